"""What ranks measured of their own steps: the material of a profile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from lightning_omni.checks import check_number
from lightning_omni.errors import ConfigurationError
from lightning_omni.serialization import Serializable
from lightning_omni.trace import Trace

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class HeadMeasured(Serializable):
    """What merging a submodule would take, as it was measured.

    Args:
        nbytes: of its weights that are trained, as float32.
        inputs: bytes per sample that go into it, as float32.
        outputs: bytes per sample that come out of it, as float32.
        seconds: per sample, of its forward and backward pass and its step, where the server would compute them.

    Raises:
        ConfigurationError: a number is out of range.
    """

    nbytes: int
    inputs: float
    outputs: float
    seconds: float

    def __post_init__(self) -> None:
        for name in ("nbytes", "inputs", "outputs", "seconds"):
            check_number(name, getattr(self, name), "a number, 0 or more", 0, below=math.inf)


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
        serve: seconds of a server's own time for one push, or its share of one; 0 if unknown. With one group, what it
            would take one server.
        head: seconds of exclusive access to a merged head; 0 if there is none.
        period: local steps between two exchanges, H.
        nbytes: bytes of one exchange, one way; 0 if unknown.
        servers: that held a share of the weights each; with one group, that would.
        per_node: whether they were one on each node.
        round_trip: seconds until a message of hardly any bytes is answered by the server, or by another rank; 0 if
            unknown. It is asked for only where no exchange was measured.
        reduce_per_byte: seconds that each byte adds to an all-reduce of all ranks, timed by itself; 0 if unknown. What
            a step takes beyond computation and all-reduce is then no part of the all-reduce. It is asked for only where
            no exchange was measured.
        hands_on: whether a group's leader hands what it is answered on to the other members, over the links of their
            all-reduce. With several groups it is in what was measured of exchanges.
        nodes: of each rank, in ascending order: the node that it is on, or the site, where nodes are joined by links
            much faster than those to others; none if each has links of its own, if all are on one, or if it is unknown.
        server_node: the node that a single server is on, or would be; None if it is on none of these, or unknown.
        node_round_trip: seconds until a message of hardly any bytes between two ranks on one node, or at one site, is
            answered; 0 if unknown.
        node_per_byte: seconds of each byte of such a message, one way; 0 if unknown.
        shapes: of the parameters whose gradients a group averages; none if unknown.
        averaging: seconds that a rank computes to average them in an all-reduce format, where that is known.
        heads: by name, what merging a submodule would take, where that is known.
        loading: of each rank: seconds of its compute time in which it waited for its data loader, on average over the
            steps; none if unknown.

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
    reduce_per_byte: float = 0.0
    hands_on: bool = False
    nodes: tuple[int, ...] = ()
    server_node: int | None = None
    node_round_trip: float = 0.0
    node_per_byte: float = 0.0
    shapes: tuple[tuple[int, ...], ...] = ()
    averaging: Mapping[str, float] = field(default_factory=dict)
    heads: Mapping[str, HeadMeasured] = field(default_factory=dict)
    loading: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("groups", "samples", "own", "steps", "exchanges"):  # lists and arrays are as good
            kind = int if name == "groups" else float
            object.__setattr__(self, name, tuple(tuple(map(kind, row)) for row in getattr(self, name)))
        object.__setattr__(self, "nodes", tuple(map(int, self.nodes)))
        object.__setattr__(self, "loading", tuple(map(float, self.loading)))
        object.__setattr__(self, "shapes", tuple(tuple(map(int, shape)) for shape in self.shapes))
        _check_counts(self)
        _check_numbers(self)

    @property
    def loading_share(self) -> float:
        """The part of the slowest rank's compute time in which it waits for its data loader; 0 if unknown."""
        means = [math.fsum(row) / len(row) for row in self.own]
        slowest = means.index(max(means))
        return self.loading[slowest] / means[slowest] if self.loading else 0.0

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
        groups = {number: tuple(members) for number, members in enumerate(trace.meta["groups"]) if members}
        ranks = sorted(rank for members in groups.values() for rank in members)
        samples, own = (_columns(trace.work, "rank", ranks, name) for name in ("samples", "seconds"))
        steps, exchanges = (_columns(trace.steps, "group", [*groups], name) for name in ("seconds", "exchange"))
        merged = trace.meta.get("merged")
        pushed = [weight for name, weight in trace.weights.items() if not (merged and name.startswith(f"{merged}."))]
        link = trace.meta["cluster"]["link"]["latency"] + trace.meta["cluster"]["server"]["latency"]
        return cls(
            tuple(groups.values()),
            samples,
            own,
            steps,
            exchanges,
            nbytes=sum(weight.nbytes for weight in pushed),
            shapes=tuple(weight.shape for weight in pushed),
            round_trip=2 * float(link),
            **(_of_exchanges(trace, len(ranks) / len(groups)) if len(groups) > 1 else _of_one_group(trace, len(ranks))),
        )


def _of_one_group(trace: Trace, ranks: int) -> dict[str, Any]:
    """What there is to be measured beside the steps of one group of so many ranks."""
    bandwidth = float(trace.meta["cluster"]["group_link"]["bandwidth"])
    return {"serve": _serve_time(trace), "reduce_per_byte": 2 * (ranks - 1) / ranks / bandwidth, "hands_on": True}


def _serve_time(trace: Trace) -> float:
    """What a push takes a server; where nothing was exchanged, what it would."""
    return float(trace.meta["cluster"]["update_seconds"])


def _of_exchanges(trace: Trace, members: float) -> dict[str, Any]:
    """What there is to be measured where several groups, of so many ranks, exchange with servers."""
    cluster, steps = trace.meta["cluster"], trace.rows["steps"]
    per_node = cluster.get("servers") == "per-node"
    devices = sum(kind["count"] for kind in cluster["devices"])
    servers = (cluster["nodes"] or devices) if per_node else cluster.get("servers", 1)
    per_access = members * float(trace.meta["batch_size"])
    return {
        "serve": _serve_time(trace) / servers,
        "hands_on": True,
        "head": per_access * float(cluster["head_seconds_per_sample"]) if trace.meta.get("merged") else 0.0,
        "period": max(1, round(float(steps.mean()))) if len(steps) else 1,
        "servers": servers,
        "per_node": per_node,
    }


def servers_of(measured: Sequence[Measured]) -> tuple[int, bool]:
    """How many servers the last segment with several groups had, and whether they were one on each node.

    If there is no such segment, those that groups would have.
    """
    last = ([each for each in measured if len(each.groups) > 1] or measured)[-1]
    return last.servers, last.per_node


def mean_samples(measured: Sequence[Measured]) -> float:
    """Samples of a rank in a step."""
    counts = [number for each in measured for row in each.samples for number in row]
    return sum(counts) / len(counts)


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
    for name in ("nodes", "loading"):
        if (found := len(getattr(measured, name))) not in (0, len(ranks)):
            raise ConfigurationError(f"{name}: of {found} ranks; pass that of each of {len(ranks)}, or none")
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
    seconds = "serve", "head", "round_trip", "reduce_per_byte", "node_round_trip", "node_per_byte"
    least = dict.fromkeys((*seconds, "nbytes"), 0) | {"period": 1, "servers": 1}
    for name, low in least.items():
        check_number(name, getattr(measured, name), f"a number, {low} or more", low, below=math.inf)
