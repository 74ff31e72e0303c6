"""Hardware efficiency, fitted: seconds per update for any grouping, from measured steps of one or two.

Costs are read off what ranks and groups measured of their own steps; where they are known, `Costs` names them. The
slowest of several members counts, groups wait for one another where they share a server, its link or a merged head,
and every number has an interval.

    step of a group = E[max over members of compute time] + all-reduce + exchange / H + access to a head
    compute time of a rank = (overhead + samples × seconds per sample) × jitter, the jitter as it was measured
    all-reduce of k members = (k - 1) / k × 2 a + (k - 1) × 2 l
    exchange = delay + service at what is shared, and the wait for it (`lightning_omni.performance.queueing`)

Of S servers that hold a share of the weights each, every one takes 1 / S of the service, and all groups' shares queue
at all of them alike; the delay, which bytes do not cause, comes twice, for the servers agree on what is applied; and if
each node has one, 1 / S of an exchange crosses no link. What is fitted are the costs of one server.

Groups do not wait for each other but there, so an update comes every 1 / Σ 1 / (step of each group) seconds.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np

from lightning_omni.checks import check_number, check_whole
from lightning_omni.errors import ConfigurationError
from lightning_omni.performance import constants as c
from lightning_omni.performance.costs import Costs
from lightning_omni.performance.exchanging import ExchangePattern
from lightning_omni.performance.queueing import (
    BarrierExchange,
    means_of_parts,
    quantiles_of_slowest,
    quantiles_of_sum,
    residence,
    slowest,
)
from lightning_omni.performance.statistical import Estimate, check_level
from lightning_omni.protocol.all_reduce import EXACT, all_reduce_of
from lightning_omni.protocol.leases import apportion
from lightning_omni.serialization import Serializable
from lightning_omni.topology import Topology
from lightning_omni.trace import Trace

Array = np.ndarray[Any, Any]
Groups = Sequence[tuple[int, ...]]
_T = TypeVar("_T")
_WithDraws = TypeVar("_WithDraws", "_Model", "_Exchanges")


# --- What was measured -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured(Serializable):
    """A segment of training with one grouping, as its ranks measured it, without the first steps that warm up.

    Args:
        groups: ranks of each group.
        samples: of each rank, in ascending order of ranks: its samples of each of its steps.
        own: of each rank in that order: its compute time in each of these steps, in seconds (load, forward, backward,
            the optimizer's step): all of it but the exchange and waiting for others.
        steps: of each group: seconds of each of its steps, from the end of one to the end of the next.
        exchanges: of each group: seconds of each of these steps that went into the exchange with the server; zeros if
            there is one group.
        serve: seconds of a server's own time for one push, or its share of one; 0 if unknown. With one group, those of
            the optimizer's step, which a server would make.
        head: seconds of exclusive access to a merged head; 0 if there is none.
        period: local steps between two exchanges, H.
        nbytes: bytes of one exchange, one way; 0 if unknown.
        servers: that held a share of the weights each.
        per_node: whether they were one on each node.
        round_trip: seconds until a message of hardly any bytes is answered by the server, or by another rank; 0 if
            unknown. It is asked for only where no exchange was measured.
        shapes: of the parameters whose gradients a group averages; none if unknown.
        averaging: seconds that a rank computes to average them in an all-reduce format, where that is known.

    Raises:
        ConfigurationError: something is missing or cannot be.

    Example:
        >>> measured = Measured(
        ...     groups=((0,), (1,)), samples=((8, 8), (8, 8)), own=((0.1, 0.1), (0.2, 0.2)),
        ...     steps=((0.11, 0.11), (0.21, 0.21)), exchanges=((0.01, 0.01), (0.01, 0.01)),
        ... )
        >>> Measured.from_dict(measured.to_dict()) == measured
        True
    """

    groups: tuple[tuple[int, ...], ...]
    samples: tuple[tuple[float, ...], ...]
    own: tuple[tuple[float, ...], ...]
    steps: tuple[tuple[float, ...], ...]
    exchanges: tuple[tuple[float, ...], ...]
    serve: float = 0.0
    head: float = 0.0
    period: int = 1
    nbytes: int = 0
    servers: int = 1
    per_node: bool = False
    round_trip: float = 0.0
    shapes: tuple[tuple[int, ...], ...] = ()
    averaging: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("groups", "samples", "own", "steps", "exchanges"):  # lists and arrays are as good
            kind = int if name == "groups" else float
            object.__setattr__(self, name, tuple(tuple(map(kind, row)) for row in getattr(self, name)))
        object.__setattr__(self, "shapes", tuple(tuple(map(int, shape)) for shape in self.shapes))
        _check_counts(self)
        _check_numbers(self)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(rank for members in self.groups for rank in members))

    @classmethod
    def of(cls, trace: Trace) -> Measured:
        """What a simulated run measured.

        Args:
            trace: of `lightning_omni.simulator.simulate`, long enough that each group made two steps.

        Raises:
            ConfigurationError: the trace has no step times, or too few.
        """
        if not len(trace.steps.get("group", ())):
            raise ConfigurationError("trace: it has no step times; pass one of a simulated run, of this version")
        groups = [members for members in trace.meta["groups"] if members]
        numbers = [number for number, members in enumerate(trace.meta["groups"]) if members]
        ranks = sorted(rank for members in groups for rank in members)
        samples, own = (_columns(trace.work, "rank", ranks, name) for name in ("samples", "seconds"))
        steps, exchanges = (_columns(trace.steps, "group", numbers, name) for name in ("seconds", "exchange"))
        cluster, pushed = trace.meta["cluster"], trace.rows["steps"]
        several = len(groups) > 1
        per_node = cluster.get("servers") == "per-node"
        devices = sum(kind["count"] for kind in cluster["devices"])
        servers = (cluster["nodes"] or devices) if per_node else cluster.get("servers", 1)
        # A merged head is not pushed.
        merged = f"{trace.meta['merged']}." if trace.meta.get("merged") else ()
        per_access = len(ranks) / len(groups) * float(trace.meta["batch_size"])
        return cls(
            tuple(map(tuple, groups)),
            samples,
            own,
            steps,
            exchanges,
            serve=float(cluster["update_seconds"]) / (servers if several else 1),
            head=per_access * float(cluster["head_seconds_per_sample"])
            if several and trace.meta.get("merged")
            else 0.0,
            period=max(1, round(float(pushed.mean()))) if several and len(pushed) else 1,
            nbytes=sum(weight.nbytes for name, weight in trace.weights.items() if not name.startswith(merged)),
            shapes=tuple(weight.shape for name, weight in trace.weights.items() if not name.startswith(merged)),
            servers=servers if several else 1,
            per_node=per_node and several,
            round_trip=2 * float(cluster["link"]["latency"] + cluster["server"]["latency"]),
        )


def _columns(table: Mapping[str, Array], key: str, keys: Sequence[int], name: str) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(table[name][table[key] == one].tolist()) for one in keys)


def _check_counts(measured: Measured) -> None:
    ranks = [rank for members in measured.groups for rank in members]
    if not ranks or not all(measured.groups) or len(set(ranks)) != len(ranks):
        raise ConfigurationError(f"groups={measured.groups}: pass the ranks of each group, each rank once")
    for name, count, of in (
        ("samples", len(ranks), "rank"),
        ("own", len(ranks), "rank"),
        ("steps", len(measured.groups), "group"),
        ("exchanges", len(measured.groups), "group"),
    ):
        if len(getattr(measured, name)) != count:
            raise ConfigurationError(f"{name}: {len(getattr(measured, name))} rows; pass one for each {of}, {count}")
    order = sorted(ranks)
    for number, members in enumerate(measured.groups):
        count = len(measured.steps[number])
        if not count:
            raise ConfigurationError(f"steps: none of group {number}; measure at least one, better 30")
        if len(measured.exchanges[number]) != count:
            raise ConfigurationError(f"exchanges: {len(measured.exchanges[number])} of group {number}; pass {count}")
        for rank in members:
            for name in ("samples", "own"):
                found = len(getattr(measured, name)[order.index(rank)])
                if found != count:
                    raise ConfigurationError(
                        f"{name}: {found} of rank {rank}, whose group made {count} steps; pass one for each step"
                    )


def _check_numbers(measured: Measured) -> None:
    for name in ("samples", "own", "steps"):
        if not all(0 < number < math.inf for row in getattr(measured, name) for number in row):
            raise ConfigurationError(f"{name}: pass numbers above 0; leave out steps that were not measured")
    if not all(0 <= number < math.inf for row in measured.exchanges for number in row):
        raise ConfigurationError("exchanges: pass seconds, 0 or more")
    for name, least in (("serve", 0), ("head", 0), ("period", 1), ("nbytes", 0), ("servers", 1), ("round_trip", 0)):
        check_number(name, getattr(measured, name), f"a number, {least} or more", least, below=math.inf)


# --- What is predicted -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """How fast a grouping would be.

    Attributes:
        seconds_per_update: one update is one push of any group; with H > 1, one local step of any group.
        samples_per_second: of all groups together.
        parts: seconds per update that ``"compute"``, ``"allreduce"``, ``"exchange"`` (its delay), ``"serve"``,
            ``"link"`` and ``"head"`` take. The first three are spread over the groups; nothing can be faster than any.
        bottleneck: what holds updates up: ``"server"``, ``"link"`` or ``"head"`` if it is busy all the time, or else
            the largest part of a step, ``"compute"``, ``"allreduce"`` or ``"exchange"``.
        topology: the groups.
        statement: a sentence for users.
    """

    seconds_per_update: Estimate
    samples_per_second: Estimate
    parts: Mapping[str, float]
    bottleneck: str
    topology: Topology
    statement: str


_BOTTLENECKS = {
    "compute": "each group's slowest member holds it up",
    "allreduce": "the all-reduce inside the groups holds it up",
    "exchange": "the way to the server and back holds it up; exchange less often, or less",
    "server": "the server holds it up: it is always busy, and more groups would not help",
    "link": "the server's link holds it up: it is always busy, and more groups would not help",
    "head": "the merged head holds it up: it is always busy, and more groups would not help",
}
_NOT_ALWAYS_BUSY = {
    **_BOTTLENECKS,
    "server": "the server, which groups wait for at times, holds it up; exchange less often",
    "link": "the server's link, which groups wait for at times, holds it up; exchange less often, or less",
    "head": "the merged head, which groups wait for at times, holds it up",
}


# --- The profile -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile(Serializable):
    """Ranks and what is between them, as measured; answers how fast another grouping would be.

    Args:
        measured: segments of training; see `fit`, which is the way to make a profile. What exchanges take is read off
            those with as many servers as the last one had.
        draws: number of resampled fits for the intervals.
        seed: of these.
        changes: what `scaled` was asked for, one after the other.
        costs: what is known instead of measured; see `of`.
        equal_ranks: of these costs: number of ranks, and samples of each in a step.

    Example:
        Two ranks, the second half as fast, measured as two groups that a server answers after 10 ms:

        >>> measured = Measured(
        ...     groups=((0,), (1,)), samples=((8,) * 9, (8,) * 9), own=((0.1,) * 9, (0.2,) * 9),
        ...     steps=((0.11,) * 9, (0.21,) * 9), exchanges=((0.01,) * 9, (0.01,) * 9),
        ... )
        >>> profile = Profile.fit([measured])
        >>> [round(speed) for speed in profile.speeds]
        [80, 40]
        >>> str(profile.predict(1).seconds_per_update)  # the slower one counts
        '0.2 (0.2 to 0.2)'
        >>> round(profile.predict(1, rebalance=True).seconds_per_update.value, 3)  # 11 samples and 5
        0.137
        >>> profile.predict(1).statement
        "1 group: an update every 200 ms (200 to 200), 80 samples/s; each group's slowest member holds it up"
    """

    measured: tuple[Measured, ...]
    draws: int = 100
    seed: int = 0
    changes: tuple[Mapping[str, Any], ...] = ()
    costs: Costs | None = None
    equal_ranks: tuple[int, float] = (1, 1.0)

    @classmethod
    def of(cls, costs: Costs, ranks: int, batch_size: float) -> Profile:
        """The model of costs that are known, for equal ranks.

        Args:
            costs: seconds of each part.
            ranks: number of ranks.
            batch_size: samples per rank and step.

        Raises:
            ConfigurationError: there is no rank or no sample.

        Example:
            A merged head that takes 1 ms a sample, a body of 10 ms a sample; groups with 16 samples each, of 16 ranks:

            >>> profile = Profile.of(Costs(per_sample=0.010, head_per_sample=0.001), ranks=16, batch_size=1)
            >>> found = [profile.predict(groups, batch_size=groups) for groups in (2, 4, 8)]
            >>> [round(1000 * each.seconds_per_update.value, 1) for each in found], found[2].bottleneck
            ([18.0, 16.0, 16.0], 'head')
        """
        if ranks < 1 or not 0 < batch_size < math.inf:
            raise ConfigurationError(f"ranks={ranks}, batch_size={batch_size}: pass at least one rank and samples")
        return cls((), draws=2, costs=costs, equal_ranks=(ranks, batch_size))

    @classmethod
    def fit(cls, measured: Sequence[Measured], draws: int = 100, seed: int = 0) -> Profile:
        """Fits the model to measured steps.

        One segment with one group shows what inside a group takes time, one with as many groups as ranks what the
        server does; with both, the groups in between are predicted. Thirty steps of each rank are enough. With one
        group alone and ``nbytes`` known, what is predicted with ``exchanging`` is forecast from the all-reduce, which
        goes over the same links, and the intervals are wider for it; without ``exchanging`` exchanges count as nothing.

        Args:
            measured: segments of training by the same ranks, in any groupings.
            draws: number of resampled fits for the intervals, at least 2.
            seed: of these.

        Raises:
            ConfigurationError: nothing was measured, or of different ranks; SciPy is missing.

        References:
            Lawson and Hanson 1974 (least squares without negative costs); Künsch 1989 (resampling of blocks).
        """
        profile = cls(tuple(measured), draws, seed)
        profile._model  # noqa: B018 - errors belong here
        return profile

    def __post_init__(self) -> None:
        object.__setattr__(self, "measured", tuple(self.measured))
        object.__setattr__(self, "changes", tuple(dict(change) for change in self.changes))
        if not self.measured and self.costs is None:
            raise ConfigurationError("measured=[]: pass at least one segment of training")
        if any(each.ranks != self.measured[0].ranks for each in self.measured):
            raise ConfigurationError(
                f"measured: of ranks {[list(each.ranks) for each in self.measured]}; pass segments of the same ranks"
            )
        check_whole("draws", self.draws, "a whole number, 2 or more", low=2)

    @cached_property
    def _model(self) -> _Model:
        known = None if self.costs is None else _known(self.costs, self.equal_ranks[0])
        model = known or _fit(self.measured, self.draws, self.seed)
        for change in self.changes:
            model = _changed(model, **change)
        return model

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self._model.devices)

    @cached_property
    def batch_size(self) -> float:
        """Mean samples per rank and step: those that were measured, unless `scaled` was asked for others."""
        for change in reversed(self.changes):
            if "batch_size" in change:
                return float(change["batch_size"])
        return _mean_samples(self.measured) if self.measured else self.equal_ranks[1]

    @property
    def nbytes(self) -> int:
        """Bytes of one exchange, one way, as float32; 0 if they are not known."""
        return self._model.nbytes

    @property
    def servers(self) -> int:
        """Parameter servers that hold a share of the weights each."""
        return self._model.servers

    @property
    def per_node(self) -> bool:
        """Whether they are one on each node."""
        return self._model.per_node

    @property
    def speeds(self) -> tuple[float, ...]:
        """Samples per second of each rank alone, in batches of the measured size, in ascending order of ranks."""
        return tuple(self._model.speeds(self.batch_size).values())

    @property
    def knows_overhead(self) -> bool:
        """False if all batches were of one size: then all time counts as time per sample, and others are a guess."""
        return self._model.knows_overhead

    def predict(
        self,
        groups: int | Topology,
        *,
        batch_size: float | None = None,
        rebalance: bool = False,
        period: int | None = None,
        nbytes: int | None = None,
        exchanging: ExchangePattern | None = None,
        all_reduce: str = "fp32",
        level: float = 0.8,
    ) -> Prediction:
        """How fast training would be.

        Args:
            groups: the groups; or how many, of sizes that differ by at most one. If ranks differ in speed they are
                sorted by it where that is faster; the prediction's ``topology`` says so.
            batch_size: mean samples per rank and step; None for what was measured.
            rebalance: the members of a group share its batch in proportion to their speeds.
            period: local steps between two exchanges, H; None for what was measured.
            nbytes: bytes of one exchange, one way; None for what was measured.
            exchanging: how groups exchange, in place of ``period`` and ``nbytes``; None for groups that wait for their
                own answers only, as many bytes each way. With it the bottleneck is what would help most if it were
                twice as fast.
            all_reduce: how the members of a group average their gradients, as ``OmniStrategy(all_reduce=...)`` takes
            it. What was measured is taken for ``"fp32"``.
            level: probability of the intervals. They are about noise in what was measured, not about the model.

        Raises:
            ConfigurationError: an argument is out of range, or SciPy is missing.
        """
        model = self._model if exchanging is None else self._model.forecast or self._model
        model = self._averaging(model, all_reduce)
        batch = self.batch_size if batch_size is None else batch_size
        if exchanging is not None and (period is not None or nbytes is not None):
            raise ConfigurationError(
                f"exchanging={exchanging} with period={period}, nbytes={nbytes}: it has a period and bytes of its own;"
                " leave the others out"
            )
        period = model.period if period is None else period
        check_number("batch_size", batch, "samples per rank and step, above 0", above=0, below=math.inf)
        check_whole("period", period, "local steps between two exchanges, 1 or more", low=1)
        check_level(level)
        if nbytes is not None:
            check_number("nbytes", nbytes, "bytes of one exchange, 0 or more", low=0)
            model.check_nbytes(f"nbytes={nbytes}: what an exchange had was")
        usual = ExchangePattern(period, *(model.nbytes if nbytes is None else nbytes,) * 2)
        plan = _TrainingPlan(model, batch, rebalance, usual if exchanging is None else model.known(exchanging))
        topology = groups if isinstance(groups, Topology) else self._topology(groups, plan)
        if not set(topology.ranks) <= set(model.devices):
            raise ConfigurationError(
                f"groups: ranks {sorted(set(topology.ranks) - set(model.devices))} were not measured;"
                f" pass a topology of {len(model.devices)} ranks"
            )
        outcome = plan.outcome(topology)
        seconds, samples = (_interval(draws, level) for draws in (outcome.seconds_per_update, outcome.samples_rate))
        bottleneck = outcome.bottleneck if exchanging is None else plan.bottleneck(topology)
        reason = (_BOTTLENECKS if exchanging is None or outcome.is_busy else _NOT_ALWAYS_BUSY)[bottleneck]
        return Prediction(
            seconds,
            samples,
            outcome.parts,
            bottleneck,
            topology,
            self._statement(model, topology, seconds, samples, reason, batch),
        )

    def samples_per_second(
        self,
        groups: int,
        *,
        rebalance: bool = False,
        exchanging: ExchangePattern | None = None,
        all_reduce: str = "fp32",
    ) -> float:
        """How fast training would be, most likely: `predict` without intervals, in a fiftieth of the time.

        Args:
            groups: as in `predict`.
            rebalance: as there.
            exchanging: as there.
            all_reduce: as there.

        Raises:
            ConfigurationError: an argument is out of range.
        """
        model = self._averaging(self._likely, all_reduce)
        plan = _TrainingPlan(model, self.batch_size, rebalance, model.known(exchanging or ExchangePattern()))
        return float(plan.outcome(self._topology(groups, plan)).samples_rate[0])

    def _averaging(self, model: _Model, all_reduce: str) -> _Model:
        """The same with gradients that the members of a group average so."""
        if all_reduce not in self._averages:  # hundreds of settings ask for the same few
            self._averages[all_reduce] = self._average(all_reduce)
        share, messages, computed = self._averages[all_reduce]
        if (share, messages, computed) == (1.0, 1, 0.0):
            return model
        return replace(model, ring=share * model.ring, hop=messages * model.hop, overhead=model.overhead + computed)

    @cached_property
    def _averages(self) -> dict[str, tuple[float, int, float]]:
        return {}

    def _average(self, all_reduce: str) -> tuple[float, int, float]:
        """The part of a gradient's bytes that travel, in how many all-reduces, and the seconds that a rank computes."""
        format_ = all_reduce_of(all_reduce)
        if format_ == EXACT:
            return 1.0, 1, 0.0
        if not self.shapes:
            raise ConfigurationError(
                f"all_reduce={all_reduce!r}: how many bytes travel depends on the parameters' shapes, which were not"
                " measured; fit with Measured(shapes=...)"
            )
        share = format_.nbytes(self.shapes) / EXACT.nbytes(self.shapes)
        computed = max((each.averaging.get(all_reduce, 0.0) for each in self.measured), default=0.0)
        return share, format_.messages, computed

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the parameters whose gradients a group averages; none if they are not known."""
        return next((each.shapes for each in reversed(self.measured) if each.shapes), ())

    @cached_property
    def _likely(self) -> _Model:
        return _first(self._model.forecast or self._model)

    def _topology(self, groups: int, plan: _TrainingPlan) -> Topology:
        check_whole("groups", groups, f"1 to {self.ranks}, the number of ranks, or a topology", 1, self.ranks)
        speeds = plan.speeds
        even = Topology.of(speeds, groups)
        if max(speeds.values()) <= (1 + c.ALIKE) * min(speeds.values()) or groups in (1, self.ranks):
            return even
        alike = Topology.by_speed(speeds, groups)
        quick = replace(plan, model=_first(plan.model))
        return max(even, alike, key=lambda topology: float(quick.outcome(topology).samples_rate[0]))

    def _statement(
        self, model: _Model, topology: Topology, seconds: Estimate, samples: Estimate, reason: str, batch: float
    ) -> str:
        count = len(topology.alive)
        said = (
            f"{count} group{'s' * (count > 1)}: an update every {_milliseconds(seconds)},"
            f" {samples.value:.4g} samples/s; {reason}"
        )
        if count > 1 and not model.knows_exchange:
            said += "; the exchange was not measured"
            said += " and counts as nothing" if model is self._model else ": forecast from the all-reduce"
        if batch != self.batch_size and not self.knows_overhead:
            said += f"; batches of {batch:g} were not measured"
        return said

    def scaled(
        self,
        ranks: int | None = None,
        bandwidth: float | None = None,
        latency: float | None = None,
        slowest: float | None = None,
        servers: int | None = None,
        per_node: bool = False,
        batch_size: float | None = None,
    ) -> Profile:
        """A cluster that was not measured, or other batches.

        Args:
            ranks: how many, drawn cyclically from those that were measured; numbered from 0.
            bandwidth: bytes per second of the server's link, and between the members of a group. An exchange crosses
                the link twice, once waiting for it to be free.
            latency: seconds of one message, on both.
            slowest: by what factor the last rank's compute time takes longer than it did.
            servers: parameter servers that hold a share of the weights each. The message each way by which they agree
                takes the delay of an exchange that its bytes do not cause. If exchanges of one size were measured, none
                is known to be that: pass ``latency``, too.
            per_node: whether they are one on each node, so that a share of each exchange crosses no link.
            batch_size: mean samples per rank and step.

        Raises:
            ConfigurationError: an argument is out of range, or the bytes for a bandwidth were not measured.

        Example:
            >>> measured = Measured(((0, 1),), ((8,) * 9,) * 2, ((0.1,) * 9,) * 2, ((0.1,) * 9,), ((0.0,) * 9,))
            >>> profile = Profile.fit([measured]).scaled(ranks=16, latency=0.001)
            >>> [round(1000 * profile.predict(groups).seconds_per_update.value, 2) for groups in (1, 4, 16)]
            [130.0, 27.0, 6.38]
        """
        asked = {"ranks": ranks, "bandwidth": bandwidth, "latency": latency, "slowest": slowest, "servers": servers}
        change: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        if servers is not None:
            check_whole("servers", servers, "a whole number, 1 or more", low=1)
        if per_node:
            if servers is None:
                raise ConfigurationError("per_node=True: pass servers=, the number of nodes, as well")
            change["per_node"] = True
        if ranks is not None:
            check_whole("ranks", ranks, "a whole number, 1 or more", low=1)
        if bandwidth is not None:
            check_number("bandwidth", bandwidth, "a positive number", above=0)
            self._model.check_nbytes(f"bandwidth={bandwidth}: bytes of an exchange were")
        if latency is not None:
            check_number("latency", latency, "a positive number", low=0, below=math.inf)
        if slowest is not None:
            check_number("slowest", slowest, "a positive number", above=0, below=math.inf)
        if batch_size is not None:
            check_number("batch_size", batch_size, "samples per rank and step, above 0", above=0, below=math.inf)
            change["batch_size"] = batch_size
        scaled = replace(self, changes=(*self.changes, change))
        vars(scaled)["_model"] = _changed(self._model, **change)  # which is fitted once
        return scaled

    def saturating_groups(self) -> int:
        """The fewest groups, at least 2, of which a serial part is always busy; the number of ranks if it never is.

        More of them are no faster and staler, so this is where a search begins (Hadjis et al. 2016, Algorithm 1).
        """
        model = _first(self._model)
        plan = _TrainingPlan(model, self.batch_size, False, model.known(ExchangePattern()))
        low, high = 2, max(self.ranks, 2)
        while low < high:  # more groups only bring more to do
            middle = (low + high) // 2
            if plan.outcome(self._topology(middle, plan)).is_saturated:
                high = middle
            else:
                low = middle + 1
        return min(low, self.ranks)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Profile:
        """What `to_dict` made; it is fitted again.

        Raises:
            ConfigurationError: it did not make that, or SciPy is missing.
        """
        kept = super().from_dict(plain)
        fitted = replace(kept, changes=())
        fitted._model  # noqa: B018 - errors belong here
        try:
            return reduce(lambda profile, change: profile.scaled(**change), kept.changes, fitted)
        except TypeError as error:
            raise ConfigurationError(f"plain: {error}; pass what Profile.to_dict returned") from error


def _interval(draws: Array, level: float) -> Estimate:
    """By what factor the resampled fits are off the first, that is off the true value (the basic bootstrap).

    They are off on average, too: of few steps the slowest is not seen, and one over a mean is not the mean of one over.
    """
    first, factors = float(draws[0]), draws[0] / draws[1:]
    low, value, high = np.quantile(factors, [(1 - level) / 2, 0.5, (1 + level) / 2])
    return Estimate(first * float(value), first * float(low), first * float(high))


def _milliseconds(seconds: Estimate) -> str:
    return f"{1000 * seconds.value:.4g} ms ({1000 * seconds.low:.4g} to {1000 * seconds.high:.4g})"


# --- The fitted model ------------------------------------------------------------------------------------------------


def _first(drawn: _WithDraws) -> _WithDraws:
    """The same without the draws but the first."""
    cut: dict[str, Any] = {name: each[:1] for name, each in vars(drawn).items() if isinstance(each, np.ndarray)}
    return replace(drawn, **cut)


@dataclass(frozen=True)
class _Model:
    """What was fitted. Arrays have a first axis of draws, of which the first is the fit to what was measured.

    Attributes:
        devices: of each rank: which measured device it is, and by what factor it is slower.
        overhead: seconds of a step whatever its samples, shape (draws, devices).
        per_sample: seconds of a sample, shape (draws, devices).
        jitter: quantiles of the factor by which steps scatter, ascending, shape (draws, devices, quantiles).
        ring: seconds for the gradient's bytes on a member's link, shape (draws,); 2 (k - 1) / k of it count.
        hop: seconds of one of the 2 (k - 1) messages of an all-reduce, shape (draws,).
        delay: seconds of an exchange whatever its bytes, but for what is shared, shape (draws,).
        delay_per_byte: seconds of each byte there, shape (draws,).
        serve: seconds of the server for a push, shape (draws,).
        link_per_byte: seconds of a byte on the server's link, shape (draws,).
        head_per_sample: seconds of a sample of a group's batch at a merged head.
        servers: that hold a share of the weights each. What an exchange costs is said of one that holds everything.
        per_node: whether they are one on each node.
        forecast: the same with an exchange that is forecast; None if it was measured, or cannot be forecast.
    """

    devices: Mapping[int, tuple[int, float]]
    overhead: Array
    per_sample: Array
    jitter: Array
    ring: Array
    hop: Array
    delay: Array
    delay_per_byte: Array
    serve: Array
    link_per_byte: Array
    head_per_sample: float
    period: int
    nbytes: int
    knows_overhead: bool
    knows_exchange: bool
    servers: int = 1
    per_node: bool = False
    forecast: _Model | None = None

    @property
    def away(self) -> float:
        """What part of an exchange's bytes crosses links."""
        return _away(self.servers, self.per_node)

    def known(self, exchanging: ExchangePattern) -> ExchangePattern:
        """With what was measured in place of what is not said."""
        for name in ("push", "pull"):
            if getattr(exchanging, name) is not None:
                self.check_nbytes(f"{name}={getattr(exchanging, name)}: what an exchange had was")
        period = self.period if exchanging.period is None else exchanging.period
        push, pull = (self.nbytes if nbytes is None else nbytes for nbytes in (exchanging.push, exchanging.pull))
        return replace(exchanging, period=period, push=push, pull=pull)

    def check_nbytes(self, asked: str) -> None:
        """Refuses what depends on the bytes of an exchange, where these are not known."""
        if not self.nbytes:
            raise ConfigurationError(f"{asked} not measured; fit with Measured(nbytes=...)")

    def speeds(self, samples: float) -> dict[int, float]:
        """Samples per second of each rank in steps of so many."""
        seconds = self.overhead[0] + samples * self.per_sample[0]
        return {rank: float(samples / seconds[device] / slower) for rank, (device, slower) in self.devices.items()}


def _changed(
    model: _Model,
    ranks: int | None = None,
    bandwidth: float | None = None,
    latency: float | None = None,
    slowest: float | None = None,
    servers: int | None = None,
    per_node: bool = False,
    batch_size: float | None = None,
) -> _Model:
    """What `Profile.scaled` was asked for, but for the size of batches, which no part of the model depends on."""
    alike = np.ones_like(model.delay)
    if model.forecast is not None:
        changed = _changed(model.forecast, ranks, bandwidth, latency, slowest, servers, per_node)
        model = replace(model, forecast=changed)
    if servers is not None:
        model = replace(model, servers=servers, per_node=per_node)
    if ranks is not None:
        known = list(model.devices.values())
        model = replace(model, devices={rank: known[rank % len(known)] for rank in range(ranks)})
    if bandwidth is not None:
        per_byte = alike / bandwidth
        model = replace(model, ring=model.nbytes * per_byte, delay_per_byte=per_byte, link_per_byte=per_byte)
        model = replace(model, knows_exchange=True)
    if latency is not None:
        model = replace(model, hop=alike * latency, delay=2 * alike * latency, knows_exchange=True)
    if slowest is not None:
        last = max(model.devices)
        device, slower = model.devices[last]
        model = replace(model, devices={**model.devices, last: (device, slower * slowest)})
    return model


def _away(servers: int, per_node: bool) -> float:
    """What part of an exchange's bytes crosses links."""
    return (servers - 1) / servers if per_node and servers > 1 else 1.0


def _messages(servers: int) -> int:
    """How often a message goes there and back in an exchange."""
    return 1 if servers == 1 else 2


_TWICE_AS_FAST = {
    "compute": ("overhead", "per_sample"),
    "allreduce": ("ring", "hop"),
    "exchange": ("delay", "delay_per_byte"),
    "server": ("serve",),
    "link": ("link_per_byte",),
    "head": ("head_per_sample",),
}
"""What of a model is halved to find out what it helps."""


@dataclass(frozen=True)
class _TrainingPlan:
    """How the groups would train. All that `ExchangePattern` can leave open is known."""

    model: _Model
    batch: float
    rebalance: bool
    exchanging: ExchangePattern
    is_rough: bool = False

    @property
    def period(self) -> int:
        """Local steps between two exchanges."""
        return self.exchanging.period or 1

    @cached_property
    def speeds(self) -> dict[int, float]:
        return self.model.speeds(self.batch)

    def bottleneck(self, topology: Topology) -> str:
        """What would speed training up most if it took half as long."""
        model, rough = _first(self.model), replace(self, is_rough=True)

        def rate(halved: Sequence[str]) -> float:
            changed = replace(model, **{name: getattr(model, name) / 2 for name in halved})
            return float(replace(rough, model=changed).outcome(topology).samples_rate[0])

        rates = {name: rate(halved) for name, halved in _TWICE_AS_FAST.items()}
        return max(rates, key=rates.__getitem__)

    def outcome(self, topology: Topology) -> _Outcome:
        """How fast that would be."""
        model, groups = self.model, [topology.members(group) for group in topology.alive]
        sizes = np.array([len(members) for members in groups])
        work = self._work(groups, slowest)
        compute, variance = (np.stack(column, axis=1) for column in zip(*work, strict=True))
        allreduce = 2 * (sizes - 1) * (model.ring[:, None] / sizes + model.hop[:, None])
        if len(groups) == 1:  # plain synchronous training, with no server and no head
            nothing = np.zeros_like(model.delay)
            return _Outcome(sizes * self.batch, compute, allreduce, nothing, nothing, nothing, 0.0, nothing)
        serve, link = self._serial()
        # What comes one after the other and takes equally long each time makes one queue only, at the longest.
        busy, rest = np.maximum(serve, link), np.minimum(serve, link)
        delay = self._delay(len(groups)) + rest
        head = model.head_per_sample * self.batch * float(sizes.mean())
        per_step = delay / self.period, serve / self.period, link / self.period
        if self.exchanging.barrier or self.exchanging.delay:
            alone = allreduce + head
            hidden, then = (self._steps(groups, count, compute, variance, alone) for count in self._hidden_and_others)
            play = self._at_a_barrier if self.exchanging.barrier else self._beside
            cycle, waiting = play(hidden, then, self.period * variance, delay, busy)
            cycle = np.maximum(cycle / self.period, len(groups) * head)
            compute = np.maximum(waiting / self.period - alone, compute)
            exposed = np.maximum(cycle - compute - alone, 0.0).mean(axis=1)
            return _Outcome(sizes * self.batch, compute, allreduce, exposed, *per_step[1:], head, 0 * delay, cycle)
        service, visits = np.stack([busy, np.full_like(busy, head)], axis=1), np.array([1, self.period])
        think = self.period * (compute + allreduce) + delay[:, None]
        shared = residence(think, self.period * variance, service, visits) / self.period
        return _Outcome(sizes * self.batch, compute, allreduce, *per_step, head, shared)

    # --- The exchange ------------------------------------------------------------------------------------------------

    @property
    def _nbytes(self) -> tuple[float, float]:
        """Of a push and of its answer, as far as they cross links."""
        return self.model.away * (self.exchanging.push or 0), self.model.away * (self.exchanging.pull or 0)

    def _serial(self) -> tuple[Array, Array]:
        """Seconds of the server, and of its link in the direction that is busier, for an exchange."""
        model, nbytes = self.model, max(self._nbytes)
        if self.exchanging.peers:
            return 0 * model.serve, 0 * model.serve
        return model.serve / model.servers, model.link_per_byte * nbytes / model.servers

    def _delay(self, groups: int) -> Array:
        """Seconds of an exchange but for these, for which no group waits for another."""
        model, (push, pull) = self.model, self._nbytes
        if self.exchanging.peers:  # now and then the peer that is drawn is the group itself
            per_byte = (model.delay_per_byte + model.link_per_byte) / 2
            return (1 - 1 / groups) * (model.delay + per_byte * pull) * (not self.exchanging.delay)
        mean = (push + pull) / 2
        # The other direction of the server's link is a part of the delay.
        other = model.link_per_byte / model.servers * (mean - max(push, pull))
        return model.delay * _messages(model.servers) + np.maximum(model.delay_per_byte * mean + other, 0.0)

    @property
    def _hidden_and_others(self) -> tuple[int, int]:
        """Steps between two exchanges that are made while one is under way, and the others."""
        hidden = min(self.exchanging.delay, self.period)
        return hidden, self.period - hidden

    def _at_a_barrier(self, hidden: Array, rest: Array, _: Array, delay: Array, busy: Array) -> tuple[Array, Array]:
        """Seconds from exchange to exchange, and what they would be if exchanges took no time; (draws, groups)."""
        model, (push, pull) = self.model, self._nbytes
        serve, link = model.serve / model.servers, model.link_per_byte / model.servers
        came = np.maximum(serve, link * push)
        # Answers go out one after the other, too; what of an exchange is neither no group waits for but its own.
        sent = np.minimum(link * pull, np.maximum(delay + busy - came, 0.0))
        costs = BarrierExchange(np.maximum(delay + busy - came - sent, 0.0), came, sent)
        cycle = costs.cycle(hidden, rest, self.is_rough)[:, None] + 0 * rest[:, :, 0]
        nothing = np.zeros(1)
        alone = BarrierExchange(nothing, nothing, nothing).cycle(hidden[:1], rest[:1], is_rough=True)
        return cycle, alone + 0 * cycle

    def _beside(self, hidden: Array, rest: Array, variance: Array, delay: Array, busy: Array) -> tuple[Array, Array]:
        """The same where no group waits for another."""
        spent, then = busy, rest.mean(axis=2)
        for _ in range(c.OVERLAP_ROUNDS):
            cycle = np.maximum(hidden, (delay + spent)[:, None, None]).mean(axis=2) + then
            found = residence(cycle - spent[:, None], variance, busy[:, None], np.ones(1))
            spent = (spent + found) / 2
        return cycle, hidden.mean(axis=2) + then

    # --- The steps ---------------------------------------------------------------------------------------------------

    def _steps(self, groups: Groups, count: int, compute: Array, variance: Array, alone: Array) -> Array:
        """Equally likely seconds of so many steps of each group, shape (draws, groups, quantiles)."""
        if count == 1:
            return np.asarray(np.stack(self._work(groups, quantiles_of_slowest), axis=1) + alone[:, :, None])
        sums = quantiles_of_sum(count * compute, count * variance, self.model.jitter.shape[2])
        return np.asarray(sums + count * alone[:, :, None])

    def _work(self, groups: Groups, of: Callable[[Array, Array], _T]) -> list[_T]:
        """What is asked of the compute times of each group's members: see `lightning_omni.performance.queueing`."""
        known: dict[Any, _T] = {}
        found = []
        for members in groups:
            kinds = Counter(
                (self.model.devices[rank], samples)
                for rank, samples in zip(members, self._shares(members), strict=True)
            )
            kind = frozenset(kinds.items())
            if kind not in known:
                known[kind] = of(*self._times(kinds))
            found.append(known[kind])
        return found

    def _shares(self, members: Sequence[int]) -> Sequence[float]:
        if not self.rebalance or len(members) == 1:
            return [self.batch] * len(members)
        return apportion(round(len(members) * self.batch), [self.speeds[rank] for rank in members])

    def _times(self, kinds: Mapping[tuple[tuple[int, float], float], int]) -> tuple[Array, Array]:
        """Equally likely seconds of a step of each kind of member, and how many there are."""
        which = np.array([device for (device, _), _ in kinds])
        slower = np.array([factor for (_, factor), _ in kinds])
        samples = np.array([share for _, share in kinds])
        seconds = slower * (self.model.overhead[:, which] + samples * self.model.per_sample[:, which])
        return seconds[:, :, None] * self.model.jitter[:, which], np.array(list(kinds.values()))


@dataclass(frozen=True)
class _Outcome:
    """What became of a plan; seconds of one step, shape (draws, groups) or (draws,).

    ``whole`` is all of a step, where that is no sum of its parts.
    """

    samples: Array
    compute: Array
    allreduce: Array
    exchange: Array
    serve: Array
    link: Array
    head: float
    shared: Array
    whole: Array | None = None

    @cached_property
    def _rates(self) -> Array:
        """Steps per second of each group."""
        parts = self.compute + self.allreduce + (self.exchange + self.shared)[:, None]
        rates = 1 / (parts if self.whole is None else self.whole)
        busy = np.maximum(self._serial * rates.sum(axis=1), 1.0)  # by a rounding error, at most
        return np.asarray(rates / busy[:, None])

    @property
    def _serial(self) -> Array:
        return np.maximum(np.maximum(self.serve, self.link), self.head)

    @property
    def seconds_per_update(self) -> Array:
        return np.asarray(1 / self._rates.sum(axis=1))

    @property
    def samples_rate(self) -> Array:
        return np.asarray(self._rates @ self.samples)

    @property
    def parts(self) -> dict[str, float]:
        rates, groups = self._rates[0], len(self.samples)
        weights = rates / rates.sum() / groups
        return {
            "compute": float(self.compute[0] @ weights),
            "allreduce": float(self.allreduce[0] @ weights),
            "exchange": float(self.exchange[0]) / groups,
            "serve": float(self.serve[0]),
            "link": float(self.link[0]),
            "head": self.head,
        }

    @property
    def is_saturated(self) -> bool:
        """Whether groups that did not wait would bring more than a serial part can take."""
        alone = self.exchange[0] + max(self.serve[0], self.link[0]) + self.head
        return bool(self._serial[0] * (1 / (self.compute[0] + self.allreduce[0] + alone)).sum() >= 1 - 1e-9)

    @property
    def is_busy(self) -> bool:
        """Whether something that all groups share is busy nearly all the time."""
        return bool(self._serial[0] * self._rates[0].sum() > 1 - c.IDLE)

    @property
    def bottleneck(self) -> str:
        names = ("serve", "link", "head") if self.is_saturated else ("compute", "allreduce", "exchange")
        largest = max(names, key=lambda name: self.parts[name])
        return "server" if largest == "serve" else largest


def _known(costs: Costs, ranks: int) -> _Model:
    """Without a fit; of one device, without jitter, and the two draws are the same."""
    ones = np.ones(2)
    return _Model(
        devices=dict.fromkeys(range(ranks), (0, 1.0)),
        overhead=costs.overhead * ones[:, None],
        per_sample=costs.per_sample * ones[:, None],
        jitter=np.ones((2, 1, 1)),
        ring=costs.allreduce * ones,
        hop=costs.allreduce_latency * ones,
        delay=(costs.exchange - costs.serve - costs.link) * ones,
        delay_per_byte=0 * ones,
        serve=costs.serve * ones,
        link_per_byte=costs.link / max(costs.nbytes, 1) * ones,
        head_per_sample=costs.head_per_sample,
        period=costs.period,
        nbytes=costs.nbytes,
        knows_overhead=True,
        knows_exchange=True,
        servers=costs.servers,
        per_node=costs.per_node,
    )


# --- The fit ---------------------------------------------------------------------------------------------------------


def _scipy() -> Any:
    try:
        return importlib.import_module("scipy.optimize")
    except ImportError as error:
        raise ConfigurationError(
            "a profile needs SciPy; install it with: pip install 'lightning-omni[tune]'"
        ) from error


@dataclass(frozen=True)
class _Draws:
    """One segment of training, resampled; the first draw is what was measured.

    Attributes:
        samples: of each rank, each of shape (draws, steps).
        own: of each rank, in seconds, each of shape (draws, steps).
        steps: of each group, in seconds, each of shape (draws, steps).
        exchanges: of each group, in seconds, each of shape (draws, steps).
        steady: of each group, whether a step is none of its first, when all groups come to the server at once.
    """

    measured: Measured
    samples: Mapping[int, Array]
    own: Mapping[int, Array]
    steps: Sequence[Array]
    exchanges: Sequence[Array]
    steady: Sequence[Array]

    @classmethod
    def of(cls, measured: Measured, draws: int, random: np.random.Generator) -> _Draws:
        samples, own, steps, exchanges, steady = {}, {}, [], [], []
        for number, members in enumerate(measured.groups):
            # The members' steps and the group's stay together: what slowed one down delayed the others.
            which = _blocks(len(measured.steps[number]), measured.period, draws, random)
            steady.append(which >= (measured.period if which.shape[1] > 8 * measured.period else 0))
            steps.append(np.array(measured.steps[number])[which])
            exchanges.append(np.array(measured.exchanges[number])[which])
            for rank in members:
                row = measured.ranks.index(rank)
                samples[rank] = np.array(measured.samples[row], np.float64)[which]
                own[rank] = np.array(measured.own[row])[which]
        return cls(measured, samples, own, steps, exchanges, steady)


def _blocks(count: int, period: int, draws: int, random: np.random.Generator) -> Array:
    """Numbers of steps, those measured and then blocks of neighbours at random: shape (draws + 1, about count).

    Blocks are of whole cycles, from one exchange to the next; one that was cut short at the end is left out.
    """
    period = min(period, count)
    cycles = count // period
    length = max(1, round(cycles ** (1 / 3)))
    starts = random.integers(cycles, size=(draws, -(-cycles // length)))
    drawn = (starts[:, :, None] + np.arange(length)).reshape(draws, -1)[:, :cycles] % cycles
    drawn = np.concatenate([np.arange(cycles)[None], drawn])
    return (drawn[:, :, None] * period + np.arange(period)).reshape(draws + 1, -1)


def _fit(measured: Sequence[Measured], draws: int, seed: int) -> _Model:
    random = np.random.default_rng(seed)
    drawn = [_Draws.of(each, draws, random) for each in measured]
    ranks = measured[0].ranks
    times = [_fit_rank(drawn, rank) for rank in ranks]
    overhead, per_sample, factors = (list(column) for column in zip(*times, strict=True))
    ring, hop = _fit_allreduce(drawn)
    several = [each for each in measured if len(each.groups) > 1]
    servers, per_node = _servers_of(measured)
    away = _away(servers, per_node)
    delay, delay_per_byte, serve, link_per_byte = _fit_exchange(drawn)
    heads = [each for each in several if each.head]
    # A group has its batch of samples there.
    batches = [_mean_samples([each]) * len(each.ranks) / len(each.groups) for each in heads]
    sizes = {number for each in measured for row in each.samples for number in row}
    model = _Model(
        devices={rank: (device, 1.0) for device, rank in enumerate(ranks)},
        overhead=np.stack(overhead, axis=1),
        per_sample=np.stack(per_sample, axis=1),
        jitter=_jitter(factors),
        ring=ring,
        hop=hop,
        delay=delay / _messages(servers),
        delay_per_byte=delay_per_byte / away,
        serve=serve * servers,
        link_per_byte=link_per_byte * servers / away,
        head_per_sample=sum(each.head for each in heads) / max(sum(batches), 1e-300),
        period=several[0].period if several else 1,
        nbytes=max(each.nbytes for each in measured),
        knows_overhead=len(sizes) > 1,
        knows_exchange=bool(several),
        servers=servers,
        per_node=per_node,
    )
    can_forecast = not several and model.nbytes and len(ranks) > 1
    return replace(model, forecast=_forecast(model, measured, random)) if can_forecast else model


def _servers_of(measured: Sequence[Measured]) -> tuple[int, bool]:
    """How many servers the last segment with several groups had, and whether they were one on each node."""
    return next(((each.servers, each.per_node) for each in reversed(measured) if len(each.groups) > 1), (1, False))


def _mean_samples(measured: Sequence[Measured]) -> float:
    """Of a rank in a step."""
    counts = [number for each in measured for row in each.samples for number in row]
    return sum(counts) / len(counts)


def _fit_rank(drawn: Sequence[_Draws], rank: int) -> tuple[Array, Array, Array]:
    """Overhead and seconds per sample, both of shape (draws,), and jitter, shape (draws, steps)."""
    samples, own = (
        np.concatenate([getattr(each, name)[rank] for each in drawn], axis=1) for name in ("samples", "own")
    )
    overhead, per_sample = _costs_of_steps(samples[:1], own[:1])
    factors = own / (overhead + samples * per_sample)
    # Jitter is drawn again, batches stay as they were: a draw without the few small ones would not know the overhead.
    overhead, per_sample = _costs_of_steps(samples[:1], factors * (overhead + samples[:1] * per_sample))
    return overhead[:, 0], per_sample[:, 0], factors


def _costs_of_steps(samples: Array, own: Array) -> tuple[Array, Array]:
    """Overhead and seconds per sample, both of shape (draws, 1), of samples of shape (1, steps)."""
    if not np.ptp(samples):
        return np.zeros((len(own), 1)), own.sum(axis=1, keepdims=True) / samples.sum()
    # Divided by the samples, for a long step scatters more.
    matrix = np.stack([1 / samples[0], np.ones(samples.shape[1])], axis=1)
    nnls = _scipy().nnls
    costs = np.array([nnls(matrix, row)[0] for row in own / samples])
    return costs[:, :1], costs[:, 1:]


def _jitter(factors: Sequence[Array]) -> Array:
    """Each rank's jitter in as many equal parts as there are quantiles, the mean of each, shape (draws, ranks, parts).

    Of few steps those of all ranks count, too.
    """
    pool = np.concatenate(factors, axis=1)
    found = []
    for own in factors:
        count = own.shape[1]
        values = np.concatenate([own, pool], axis=1)
        weights = np.concatenate([np.ones(count), np.full(pool.shape[1], c.POOLED / pool.shape[1])])
        order = np.argsort(values, axis=1)
        shares = weights[order] / (count + c.POOLED)
        found.append(means_of_parts(np.take_along_axis(values, order, axis=1), shares, c.QUANTILES))
    jitter = np.stack(found, axis=1)
    return np.asarray(jitter / jitter.mean(axis=2, keepdims=True))


def _fit_allreduce(drawn: Sequence[_Draws]) -> tuple[Array, Array]:
    """Seconds of the bytes and of a hop, both of shape (draws,)."""
    rows: list[tuple[int, Array]] = []
    for each in drawn:
        head = each.measured.head if len(each.measured.groups) > 1 else 0.0
        for members, steps, exchanges in zip(each.measured.groups, each.steps, each.exchanges, strict=True):
            if len(members) > 1:
                own = np.max([each.own[rank] for rank in members], axis=0)
                rows.append((len(members), np.maximum((steps - exchanges - own).mean(axis=1) - head, 0.0)))
    if not rows:
        return np.zeros(len(drawn[0].steps[0])), np.zeros(len(drawn[0].steps[0]))
    sizes = np.array([size for size, _ in rows])
    matrix, values = (
        np.stack([2 * (sizes - 1) / sizes, 2.0 * (sizes - 1)], axis=1),
        np.stack([row for _, row in rows], 1),
    )
    if len(set(sizes.tolist())) == 1:
        # One size does not tell bytes from hops. But an exchange carries the same bytes twice, in half a ring's time
        # at least: what is beyond that are hops. And a hop takes no longer than half a round trip.
        whole = values.mean(axis=1)
        round_trip = _round_trip([each.measured for each in drawn])
        if round_trip and all(len(each.measured.groups) == 1 for each in drawn):
            hop = np.minimum(round_trip / 2, whole / matrix[0, 1])
            return (whole - hop * matrix[0, 1]) / matrix[0, 0], hop
        ring = np.minimum(whole / matrix[0, 0], _seconds_of_bytes(drawn))
        return ring, (whole - ring * matrix[0, 0]) / matrix[0, 1]
    nnls = _scipy().nnls
    ring, hop = np.array([nnls(matrix, row)[0] for row in values]).T
    return ring, hop


def _seconds_of_bytes(drawn: Sequence[_Draws]) -> Array:
    """What the bytes of a gradient can take at most on their way between two ranks, shape (draws,)."""
    shortest = [
        each.measured.period
        * np.min([row.mean(axis=1) for row in each.exchanges], axis=0)
        / (2 * _away(each.measured.servers, each.measured.per_node))
        for each in drawn
        if len(each.measured.groups) > 1
    ]
    return np.min(shortest, axis=0) if shortest else np.full(len(drawn[0].steps[0]), np.inf)


def _round_trip(measured: Sequence[Measured]) -> float:
    """Seconds, the least that was measured; 0 if none was."""
    return min((each.round_trip for each in measured if each.round_trip), default=0.0)


# --- The exchange ----------------------------------------------------------------------------------------------------


def _forecast(model: _Model, measured: Sequence[Measured], random: np.random.Generator) -> _Model:
    """With exchanges over the links that the all-reduce went over.

    A push and its answer cross the server's link once each, and their group's at the same time.
    """
    known = [each.serve for each in measured if each.serve]
    # In the intervals is what a forecast is off by, for bytes and for the rest.
    draws = len(model.ring) - 1
    quantiles = [NormalDist().inv_cdf((place + 0.5) / draws) for place in range(draws)]
    factors = np.exp(c.FORECAST_ERROR * random.permuted([quantiles] * 2, axis=1))
    bytes_off, delay_off = np.concatenate([np.ones((2, 1)), factors], axis=1)
    per_byte = model.ring / model.nbytes * bytes_off
    return replace(
        model,
        delay=(_round_trip(measured) or 2 * model.hop) * delay_off,
        delay_per_byte=per_byte,
        serve=sum(known) / max(len(known), 1) * delay_off,
        link_per_byte=per_byte,
    )


@dataclass(frozen=True)
class _Exchanges:
    """What one segment says of the exchange; seconds of one exchange, and of a cycle from one to the next.

    Attributes:
        think: of a cycle without the exchange, by group, shape (draws, groups).
        variance: of that, shape (draws, groups).
        mean: of an exchange, shape (draws,).
        least: the shortest exchange of all. Most likely it did not wait; later, among many, all may.
        nbytes: of an exchange.
    """

    think: Array
    variance: Array
    mean: Array
    least: float
    nbytes: int

    @classmethod
    def of(cls, drawn: _Draws) -> _Exchanges:
        period = drawn.measured.period
        rest = [steps - exchanges for steps, exchanges in zip(drawn.steps, drawn.exchanges, strict=True)]
        exchanged = np.concatenate(drawn.exchanges, axis=1)
        steady = np.concatenate(drawn.steady, axis=1)
        return cls(
            think=period * np.stack([row.mean(axis=1) for row in rest], axis=1),
            variance=period * np.stack([row.var(axis=1) for row in rest], axis=1),
            mean=period * (exchanged * steady).sum(axis=1) / np.maximum(steady.sum(axis=1), 1),
            least=min((number for row in drawn.measured.exchanges for number in row if number > 0), default=0.0),
            nbytes=drawn.measured.nbytes,
        )

    def misses(self, away: Array, busy: Array) -> list[Array]:
        """By what part of a cycle the mean is missed, and the shortest; both of shape (draws,).

        Args:
            away: seconds of an exchange that are not at the busiest station, shape (draws,).
            busy: seconds that are, but for waiting, shape (draws,).
        """
        there = residence(self.think + away[:, None], self.variance, busy[:, None], np.ones(1))
        cycle, over = float(self.think[0].mean() + self.mean[0]), away + busy - self.least
        return [(away + there - self.mean) / cycle, (np.maximum(over, 0.0) + c.SHORTEST_EXCHANGE * over) / cycle]


def _fit_exchange(drawn: Sequence[_Draws]) -> tuple[Array, Array, Array, Array]:
    """Delay, delay of a byte, the server's time, and the link's of a byte: each in seconds, of shape (draws,)."""
    servers = _servers_of([each.measured for each in drawn])
    several = [
        each
        for each in drawn
        if len(each.measured.groups) > 1 and (each.measured.servers, each.measured.per_node) == servers
    ]
    if not several:
        nothing = np.zeros(len(drawn[0].steps[0]))
        return nothing, nothing, nothing, nothing
    segments = [_Exchanges.of(each) for each in several]
    known = [each.measured.serve for each in several if each.measured.serve]
    serve, nbytes = sum(known) / max(len(known), 1), max(each.nbytes for each in segments)
    costs = _exchange_costs(segments, serve, nbytes)
    delay, per_byte, busy = costs[:, 0], costs[:, 1] / max(nbytes, 1), serve + costs[:, 2]
    if not known:  # the server and its link cannot be told apart
        return delay, per_byte, busy, np.zeros_like(busy)
    served = np.full_like(busy, serve)
    if busy[0] <= (1 + c.NOTICED) * serve:
        return delay, per_byte, served, np.zeros_like(busy)
    # Something is busy for longer than the server is, whose time then is a part of the delay.
    if not nbytes:
        return np.maximum(delay - serve, 0.0), per_byte, busy, np.zeros_like(busy)
    per_byte = np.maximum(per_byte - np.maximum(serve - delay, 0.0) / nbytes, 0.0)
    return np.maximum(delay - serve, 0.0), per_byte, served, busy / nbytes


def _exchange_costs(segments: Sequence[_Exchanges], serve: float, nbytes: int) -> Array:
    """Delay, delay of so many bytes, and how much longer than ``serve`` the busiest station is: shape (draws, 3)."""
    sizes = {each.nbytes for each in segments}
    # Where all exchanges are of one size, all of their delay is ascribed to the bytes.
    free = [index for index, is_free in enumerate((len(sizes) > 1 or not nbytes, nbytes > 0, True)) if is_free]
    unit = max(float(each.think[0].mean() + each.mean[0]) for each in segments)

    def misses(costs: Array, of: Sequence[_Exchanges]) -> Array:
        spread = np.zeros((len(of[0].mean), 3))
        spread[:, free] = unit * costs
        found: list[Array] = []
        for each in of:
            part = each.nbytes / max(nbytes, 1)
            # What is busy beyond the server's known time is its link.
            found += each.misses(
                spread[:, 0] + spread[:, 1] * part, serve + spread[:, 2] * (part if serve and nbytes else 1.0)
            )
        return np.stack(found, axis=1)

    first = [_first(each) for each in segments]
    found, slopes = _least_squares(lambda costs: misses(costs, first)[0], len(free), segments, unit)
    # The other draws are near: one step of Gauss and Newton takes each to its own fit.
    missed = misses(found, segments)
    costs = np.zeros((len(missed), 3))
    costs[:, free] = unit * np.maximum(found - (missed - missed[0]) @ np.linalg.pinv(slopes, rcond=1e-2).T, 0.0)
    return costs


def _least_squares(
    misses: Callable[[Array], Array], count: int, segments: Sequence[_Exchanges], unit: float
) -> tuple[Array, Array]:
    """The costs, in units, of the last of which is the busiest station; and how the misses depend on them."""

    def slopes(costs: Array) -> Array:
        here = misses(costs)
        return np.stack([(misses(costs + step) - here) / c.SLOPE_STEP for step in c.SLOPE_STEP * np.eye(count)], axis=1)

    least = min(each.least for each in segments) / unit
    most = max(float(each.mean[0]) / each.think.shape[1] for each in segments) / unit
    starts = [
        np.append(np.full(count - 1, max(least - busy, 0.05 * least) / max(count - 1, 1)), busy)
        for busy in (0.0, 0.5 * least, most)  # a server for which no group waits, and one that is always busy
    ]
    fit = partial(_scipy().least_squares, misses, jac=slopes, bounds=(0, np.inf), x_scale=0.1)
    found = [fit(start + 1e-9) for start in starts]
    # Of fits that are equally good (misses of a thousandth are) the first has the least that is always busy.
    best: Array = min(found, key=lambda one: round(float(one.cost), 6)).x
    return best, slopes(best)
