"""The measurements that ranks take of their own steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_omni.checks import check_number
from lightning_omni.errors import ConfigurationError
from lightning_omni.serialization import Serializable


@dataclass(frozen=True)
class Measured(Serializable):
    """A segment of training with one grouping, as measured by its ranks, without warm-up. 0 and empty mean unknown.

    Args:
        groups: ranks of each group.
        samples: for each rank, in ascending order, its samples in each of its steps.
        own: for each rank, its compute time in each step, in seconds (load, forward, backward, the optimizer's step),
            without exchange and waiting.
        steps: for each group, seconds of each step, from the end of one to the end of the next.
        exchanges: for each group, seconds of each step in the exchange with the server; zeros for one group.
        serve: seconds that a server computes for one push, or for its share of one; with one group, those that a single
            server would need.
        period: local steps between two exchanges, H.
        nbytes: bytes of one exchange, one way.
        servers: number of servers; with one group, the number that several would use.
        per_node: whether each node ran one server.
        round_trip: seconds until the server, or another rank, answers a nearly empty message; used only if no exchange
            was measured.
        reduce_per_byte: seconds that each byte adds to an all-reduce of all ranks, timed by itself. It limits the part
            of a step that is attributed to the all-reduce, if no exchange was measured.
        hands_on: whether leaders forward answers to the other members, over the links of their all-reduce. Measured
            exchanges include that.
        nodes: for each rank, its node; or its site, if links between some nodes are much faster. It is empty if each
            rank has links of its own, or all are on one node.
        server_node: node of a single server, existing or not; None if it is on none of these, or unknown.
        node_round_trip: ``round_trip`` between two ranks on one node, or at one site.
        node_per_byte: seconds of each byte of such a message, one way.
        copy_per_byte: seconds of each byte between a rank's device and its host, which exchanges cross, the mean of
            both ways; 0 if weights are on the CPU.
        host_per_byte: seconds of each byte, one way, between the hosts of the last and the first rank, by sockets; 0 if
            exchanges use the links of all-reduces.
        shapes: shapes of the parameters whose gradients a group averages.
        averaging: by all-reduce format, seconds that a rank computes to average gradients in it.
        loading: for each rank, the mean seconds of ``own`` in which it waited for its data loader.

    Raises:
        ConfigurationError: a field is missing, inconsistent or out of range.

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
    copy_per_byte: float = 0.0
    host_per_byte: float = 0.0
    shapes: tuple[tuple[int, ...], ...] = ()
    averaging: Mapping[str, float] = field(default_factory=dict)
    loading: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("groups", "samples", "own", "steps", "exchanges"):  # accepts lists
            kind = int if name == "groups" else float
            object.__setattr__(self, name, tuple(tuple(map(kind, row)) for row in getattr(self, name)))
        object.__setattr__(self, "nodes", tuple(map(int, self.nodes)))
        object.__setattr__(self, "loading", tuple(map(float, self.loading)))
        object.__setattr__(self, "shapes", tuple(tuple(map(int, shape)) for shape in self.shapes))
        _check_counts(self)
        _check_numbers(self)

    @property
    def loading_share(self) -> float:
        """Return the fraction of the slowest rank's compute time spent waiting for its data loader; 0 if unknown."""
        means = [math.fsum(row) / len(row) for row in self.own]
        slowest = means.index(max(means))
        return self.loading[slowest] / means[slowest] if self.loading else 0.0

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for members in self.groups for rank in members))


def servers_of(measured: Sequence[Measured]) -> tuple[int, bool]:
    """Return the number of servers in the last segment with several groups, or the last, and if each node ran one."""
    last = ([each for each in measured if len(each.groups) > 1] or measured)[-1]
    return last.servers, last.per_node


def mean_samples(measured: Sequence[Measured]) -> float:
    counts = [number for each in measured for row in each.samples for number in row]
    return sum(counts) / len(counts)


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
    per_byte = "reduce_per_byte", "node_per_byte", "copy_per_byte", "host_per_byte"
    seconds = "serve", "round_trip", "node_round_trip", *per_byte
    least = dict.fromkeys((*seconds, "nbytes"), 0) | {"period": 1, "servers": 1}
    for name, low in least.items():
        check_number(name, getattr(measured, name), f"a number, {low} or more", low, below=math.inf)
