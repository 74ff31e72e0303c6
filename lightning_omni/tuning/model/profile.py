"""Hardware efficiency: seconds per update of any grouping, from a model fitted to measured steps of one or two.

    step of a group = E[max over members of compute time] + all-reduce + exchange / H
    compute time of a rank = (overhead + samples × seconds per sample) × jitter, with the measured jitter
    all-reduce of k members = (k - 1) / k × 2 a + (k - 1) × 2 l
    exchange = delay + service at shared resources, and the wait for it (`lightning_omni.tuning.model.queueing`)

Here a is the time of the gradient's bytes on a link, and l that of one message. Without a barrier, groups wait for
each other only at shared resources, so an update follows every 1 / Σ 1 / (step of each group) seconds.

With S servers, each takes 1 / S of the service. The delay that does not depend on bytes counts twice, because the
servers agree on each update. If each node has a server, 1 / S of an exchange crosses no link. The fitted costs are
those of one server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from lightning_omni.checks import check_number, check_whole
from lightning_omni.errors import ConfigurationError
from lightning_omni.serialization import Serializable
from lightning_omni.topology import Topology
from lightning_omni.tuning.model import constants as c
from lightning_omni.tuning.model.convergence import Estimate
from lightning_omni.tuning.model.cost_fit import fit_model
from lightning_omni.tuning.model.cost_model import ClusterChange, CostModel, Costs, ExchangePattern, first_draw
from lightning_omni.tuning.model.measurements import Measured, mean_samples
from lightning_omni.tuning.model.training_plan import TrainingPlan
from lightning_omni.wire.compression import EXACT, all_reduce_of

Array = np.ndarray[Any, Any]


BOTTLENECKS = {
    "compute": "compute",
    "allreduce": "all-reduce",
    "exchange": "way to the server",
    "server": "server",
    "link": "server's link",
}
"""The possible bottlenecks of a `Prediction`, in words."""


@dataclass(frozen=True)
class Prediction:
    """The predicted speed of a grouping.

    Attributes:
        seconds_per_update: seconds per push of any group; with H > 1, per local step of any group.
        samples_per_second: total over all groups.
        parts: seconds per update that ``"compute"``, ``"allreduce"``, ``"exchange"`` (its delay), ``"serve"``, and
            ``"link"`` take. The first three are divided among the groups; no update is faster than any part.
        bottleneck: ``"server"`` or ``"link"`` if it is busy all the time, or else the largest part of a step,
            ``"compute"``, ``"allreduce"`` or ``"exchange"``. With a pattern of exchanges, see `Profile.predict`.
    """

    seconds_per_update: Estimate
    samples_per_second: Estimate
    parts: Mapping[str, float]
    bottleneck: str
    topology: Topology

    def faster(self, factor: float) -> Prediction:
        seconds, samples = self.seconds_per_update.times(1 / factor), self.samples_per_second.times(factor)
        return replace(self, seconds_per_update=seconds, samples_per_second=samples)


@dataclass(frozen=True)
class Profile(Serializable):
    """A fitted cost model of ranks and their links, which predicts the speed of other groupings.

    Args:
        measured: segments of training; see `fit`. Costs of exchanges are fitted to those with as many servers as the
            last one.
        draws: number of resampled fits for the intervals.
        costs: known costs instead of measurements; see `of`.
        equal_ranks: number of ranks with these costs, and samples of each in a step.

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
    """

    measured: tuple[Measured, ...]
    draws: int = 100
    seed: int = 0
    changes: tuple[ClusterChange, ...] = ()
    costs: Costs | None = None
    equal_ranks: tuple[int, float] = (1, 1.0)

    @classmethod
    def of(cls, costs: Costs, ranks: int, batch_size: float) -> Profile:
        """Return the profile of known costs, for equal ranks with ``batch_size`` samples per step.

        Raises:
            ConfigurationError: ``ranks`` is below 1, or ``batch_size`` is not a positive number.

        Example:
            A server takes 16 ms for a push, a sample 10 ms; of 16 ranks, groups have 16 samples each:

            >>> profile = Profile.of(Costs(per_sample=0.010, exchange=0.016, serve=0.016), ranks=16, batch_size=1)
            >>> found = [profile.predict(groups, batch_size=groups) for groups in (2, 4, 8)]
            >>> [round(1000 * each.seconds_per_update.value, 1) for each in found], found[2].bottleneck
            ([18.0, 16.0, 16.0], 'server')
        """
        if ranks < 1 or not 0 < batch_size < math.inf:
            raise ConfigurationError(f"ranks={ranks}, batch_size={batch_size}: pass at least one rank and samples")
        return cls((), draws=2, costs=costs, equal_ranks=(ranks, batch_size))

    @classmethod
    def fit(cls, measured: Sequence[Measured], draws: int = 100, seed: int = 0) -> Profile:
        """Fit the model to measured steps, some thirty of each rank.

        A segment with one group shows the costs inside a group, one with as many groups as ranks those of the server.
        With one group alone and a known ``nbytes``, predictions with ``exchanging`` forecast the exchange from the
        all-reduce; without ``exchanging``, exchanges count as nothing.

        Args:
            measured: segments of training by the same ranks, in any groupings.
            draws: number of resampled fits for the intervals, at least 2.
            seed: seed of the resampling.

        Raises:
            ConfigurationError: ``measured`` is empty or mixes different ranks, or ``draws`` is below 2.

        References:
            Lawson and Hanson 1974 (least squares without negative costs); Künsch 1989 (resampling of blocks).
        """
        profile = cls(tuple(measured), draws, seed)
        profile._model  # noqa: B018 - errors belong here
        return profile

    def __post_init__(self) -> None:
        object.__setattr__(self, "measured", tuple(self.measured))
        object.__setattr__(self, "changes", tuple(self.changes))
        if not self.measured and self.costs is None:
            raise ConfigurationError("measured=[]: pass at least one segment of training")
        if any(each.ranks != self.measured[0].ranks for each in self.measured):
            raise ConfigurationError(
                f"measured: of ranks {[list(each.ranks) for each in self.measured]}; pass segments of the same ranks"
            )
        check_whole("draws", self.draws, "a whole number, 2 or more", low=2)

    @cached_property
    def _model(self) -> CostModel:
        known = None if self.costs is None else CostModel.of(self.costs, self.equal_ranks[0])
        model = known or fit_model(self.measured, self.draws, self.seed)
        for change in self.changes:
            model = model.changed(change)
        return model

    @property
    def ranks(self) -> int:
        return len(self._model.devices)

    @cached_property
    def batch_size(self) -> float:
        """Return the mean samples per rank and step: the measured ones, or those last passed to `scaled`."""
        for change in reversed(self.changes):
            if change.batch_size is not None:
                return float(change.batch_size)
        return mean_samples(self.measured) if self.measured else self.equal_ranks[1]

    @property
    def nbytes(self) -> int:
        """Return the bytes of one exchange, one way, as float32; 0 if unknown."""
        return self._model.nbytes

    @property
    def servers(self) -> int:
        return self._model.servers

    @property
    def per_node(self) -> bool:
        return self._model.per_node

    @property
    def speeds(self) -> tuple[float, ...]:
        """Return the samples per second of each rank alone, ordered by rank, in batches of `batch_size`."""
        return tuple(self._model.speeds(self.batch_size).values())

    @property
    def knows_overhead(self) -> bool:
        """Return whether batches of several sizes were measured; otherwise predictions for other sizes are a guess."""
        return self._model.knows_overhead

    def predict(
        self,
        groups: int | Topology,
        *,
        batch_size: float | None = None,
        rebalance: bool = False,
        period: int | None = None,
        exchanging: ExchangePattern | None = None,
        all_reduce: str = "fp32",
    ) -> Prediction:
        """Predict the speed of a grouping.

        Args:
            groups: the groups; or their number, with sizes that differ by at most one. Ranks that differ in speed are
                sorted by it if that is faster.
            batch_size: mean samples per rank and step; None for the profile's.
            rebalance: whether the members of a group share its batch in proportion to their speeds.
            period: local steps between two exchanges, H; None for the measured number.
            exchanging: pattern of exchanges, in place of ``period``; None for groups that wait for their own answers
                only, with the measured bytes each way. With a pattern, the bottleneck is the part that would help most
                if it were twice as fast.
            all_reduce: format of gradients in a group, as in ``Compression(all_reduce=...)``; ``"fp32"`` as measured.

        The intervals, of probability 0.8, cover noise in the measurements, not errors of the model.

        Raises:
            ConfigurationError: an argument is out of range, or needs what was not measured.
        """
        model = self._model if exchanging is None else self._model.forecast or self._model
        model = self._averaging(model, all_reduce)
        batch = self.batch_size if batch_size is None else batch_size
        if exchanging is not None and period is not None:
            raise ConfigurationError(
                f"exchanging={exchanging} with period={period}: it has a period of its own; leave the other out"
            )
        period = model.period if period is None else period
        check_number("batch_size", batch, "samples per rank and step, above 0", above=0, below=math.inf)
        check_whole("period", period, "local steps between two exchanges, 1 or more", low=1)
        usual = ExchangePattern(period, model.nbytes, model.nbytes)
        plan = TrainingPlan(model, batch, rebalance, usual if exchanging is None else model.known(exchanging))
        topology = groups if isinstance(groups, Topology) else self._fastest_topology(groups, plan)[0]
        if not set(topology.ranks) <= set(model.devices):
            raise ConfigurationError(
                f"groups: ranks {sorted(set(topology.ranks) - set(model.devices))} were not measured;"
                f" pass a topology of {len(model.devices)} ranks"
            )
        outcome = plan.outcome(topology)
        least = outcome.serial
        most = float(outcome.samples_rate[0] * outcome.seconds_per_update[0]) / least if least else math.inf
        seconds = _interval(outcome.seconds_per_update, least=least)
        samples = _interval(outcome.samples_rate, most=most)
        bottleneck = outcome.bottleneck if exchanging is None else plan.bottleneck(topology)
        return Prediction(seconds, samples, outcome.parts, bottleneck, topology)

    def samples_per_second(
        self,
        groups: int,
        *,
        rebalance: bool = False,
        exchanging: ExchangePattern | None = None,
        all_reduce: str = "fp32",
    ) -> float:
        """Return the most likely speed, as `predict` does, without intervals and in a fiftieth of the time.

        An exchange that was not measured is forecast where possible.
        """
        model = self._averaging(self._likely, all_reduce)
        plan = TrainingPlan(model, self.batch_size, rebalance, model.known(exchanging or ExchangePattern()))
        topology, rate = self._fastest_topology(groups, plan)
        return float(plan.outcome(topology).samples_rate[0]) if rate is None else rate

    @property
    def largest_gain_of_split(self) -> float:
        """Return a bound on the speed-up of any group by proportional batches."""
        slowest, *others = sorted(self.speeds)
        sums = np.cumsum([slowest, *reversed(others)])  # of the slowest and the fastest few
        return float((sums / np.arange(1, len(sums) + 1)).max() / slowest)

    def largest_gain(self, all_reduce: str) -> float:
        """Return a bound on the speed-up of any group by an all-reduce format, compared to the exact one."""
        exact, other = self._likely, self._averaging(self._likely, all_reduce)
        computed = float((other.overhead - exact.overhead).max())
        # Groups of each size, on several nodes and on one.
        sizes, together = np.tile(np.arange(1, self.ranks + 1), 2), np.repeat([False, True], self.ranks)
        saved = float((exact.all_reduce(sizes, together) - other.all_reduce(sizes, together)).max())
        return 1 + max(0.0, saved - computed) * max(self.speeds) / self.batch_size

    def _averaging(self, model: CostModel, all_reduce: str) -> CostModel:
        if all_reduce not in self._averages:  # settings share few formats
            self._averages[all_reduce] = self._average(all_reduce)
        share, messages, computed = self._averages[all_reduce]
        if (share, messages, computed) == (1.0, 1, 0.0):
            return model
        return replace(model.averaging(share, messages), overhead=model.overhead + computed)

    @cached_property
    def _averages(self) -> dict[str, tuple[float, int, float]]:
        return {}

    def _average(self, all_reduce: str) -> tuple[float, int, float]:
        """Return the fraction of a gradient's bytes that travels, the number of all-reduces, and compute seconds."""
        format_ = all_reduce_of(all_reduce)
        if format_ == EXACT:
            return 1.0, 1, 0.0
        if not self.shapes:
            raise ConfigurationError(
                f"all_reduce={all_reduce!r}: how many bytes travel depends on the parameters' shapes, which were not"
                " measured; fit with Measured(shapes=...)"
            )
        computed = max((each.averaging.get(all_reduce, 0.0) for each in self.measured), default=0.0)
        return format_.share(self.shapes), format_.messages, computed

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return next((each.shapes for each in reversed(self.measured) if each.shapes), ())

    @cached_property
    def _likely(self) -> CostModel:
        return first_draw(self._model.forecast or self._model)

    def _fastest_topology(self, groups: int, plan: TrainingPlan) -> tuple[Topology, float | None]:
        """Return the faster of even groups and groups of similar speed, and its rate (None if not compared)."""
        check_whole("groups", groups, f"1 to {self.ranks}, the number of ranks, or a topology", 1, self.ranks)
        speeds = plan.speeds
        even = Topology.of(speeds, groups)
        if max(speeds.values()) <= (1 + c.ALIKE) * min(speeds.values()) or groups in (1, self.ranks):
            return even, None
        alike = Topology.by_speed(speeds, groups)
        quick = replace(plan, model=first_draw(plan.model))
        rates = [float(quick.outcome(topology).samples_rate[0]) for topology in (even, alike)]
        return (alike, rates[1]) if rates[1] > rates[0] else (even, rates[0])

    def scaled(
        self,
        ranks: int | None = None,
        bandwidth: float | None = None,
        latency: float | None = None,
        servers: int | None = None,
        per_node: bool = False,
        batch_size: float | None = None,
    ) -> Profile:
        """Return the profile of a changed cluster, or of other batches.

        Args:
            ranks: number of ranks, copied cyclically from the measured ones.
            bandwidth: bytes per second of the server's link, and between the members of a group.
            latency: seconds of one message, on both.
            servers: number of parameter servers, which agree by one more message each way. If all measured exchanges
                were of one size, its delay is unknown: pass ``latency``, too.
            per_node: whether each node runs one server.
            batch_size: mean samples per rank and step.

        Raises:
            ConfigurationError: an argument is out of range, or the bytes for a bandwidth were not measured.

        Example:
            >>> measured = Measured(((0, 1),), ((8,) * 9,) * 2, ((0.1,) * 9,) * 2, ((0.1,) * 9,), ((0.0,) * 9,))
            >>> profile = Profile.fit([measured]).scaled(ranks=16, latency=0.001)
            >>> [round(1000 * profile.predict(groups).seconds_per_update.value, 2) for groups in (1, 4, 16)]
            [130.0, 27.0, 6.38]
        """
        change = ClusterChange(
            ranks=ranks,
            bandwidth=bandwidth,
            latency=latency,
            servers=servers,
            per_node=per_node,
            batch_size=batch_size,
        )
        if bandwidth is not None:
            self._model.check_nbytes(f"bandwidth={bandwidth}: bytes of an exchange were")
        scaled = replace(self, changes=(*self.changes, change))
        vars(scaled)["_model"] = self._model.changed(change)  # avoids another fit
        return scaled

    def saturating_groups(self) -> int:
        """Return the least number of groups, 2 or more, that saturates a serial part; the number of ranks if none does.

        More groups are no faster and staler, so a search begins here (Hadjis et al. 2016, Algorithm 1).
        """
        model = first_draw(self._model)
        plan = TrainingPlan(model, self.batch_size, False, model.known(ExchangePattern()))
        low, high = 2, max(self.ranks, 2)
        while low < high:  # the load grows with the number of groups
            middle = (low + high) // 2
            if plan.outcome(self._fastest_topology(middle, plan)[0]).is_saturated:
                high = middle
            else:
                low = middle + 1
        return min(low, self.ranks)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Profile:
        profile = super().from_dict(plain)
        profile._model  # noqa: B018 - errors belong here
        return profile


def _interval(draws: Array, least: float = 0.0, most: float = math.inf, level: float = 0.8) -> Estimate:
    """Return the basic bootstrap interval: resampled fits are off the first by as much as it is off the true value.

    ``draws`` are the fit and the resampled fits; ``least`` and ``most`` bound the value.
    """
    first, factors = float(draws[0]), draws[0] / draws[1:]
    low, value, high = first * np.quantile(factors, [(1 - level) / 2, 0.5, (1 + level) / 2])
    value = float(min(max(value, least), most))
    return Estimate(value, min(float(low), value), max(float(high), value))
