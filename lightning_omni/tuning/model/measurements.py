"""The measurements that the ranks of one group take of their own steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_omni.checks import check_number
from lightning_omni.errors import ConfigurationError
from lightning_omni.json_dataclasses import Serializable
from lightning_omni.tuning.model import constants as c

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Measured(Serializable):
    """A segment of training in one group, as measured by its ranks, without warm-up. 0 and empty mean unknown.

    Args:
        ranks: the ranks, in ascending order.
        samples: for each rank, its samples in each step.
        own: for each rank, its compute time in each step, in seconds (load, forward, backward, the optimizer's step),
            without waiting.
        steps: seconds of each step, from the end of one to the end of the next.
        serve: seconds that a single server would compute for one push.
        nbytes: bytes of one exchange, one way.
        servers: number of servers that several groups would use.
        per_node: whether each node would run one server.
        round_trip: seconds until another rank answers a nearly empty message.
        reduce_per_byte: seconds that each byte adds to an all-reduce of all ranks, timed by itself.
        hands_on: whether leaders forward answers to the other members, over the links of their all-reduce.
        nodes: for each rank, its node; or its site, if links between some nodes are much faster. It is empty if each
            rank has links of its own, or all are on one node.
        server_node: node of all servers, existing or not; None if they are on none or on each of these, or unknown.
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
    """

    ranks: tuple[int, ...]
    samples: tuple[tuple[float, ...], ...]
    own: tuple[tuple[float, ...], ...]
    steps: tuple[float, ...]
    serve: float = 0.0
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
        for name in ("samples", "own"):  # accepts lists
            object.__setattr__(self, name, tuple(tuple(map(float, row)) for row in getattr(self, name)))
        for name, kind in (("ranks", int), ("steps", float), ("nodes", int), ("loading", float)):
            object.__setattr__(self, name, tuple(map(kind, getattr(self, name))))
        object.__setattr__(self, "shapes", tuple(tuple(map(int, shape)) for shape in self.shapes))
        _check_counts(self)
        _check_numbers(self)

    @property
    def loading_share(self) -> float:
        """Return the fraction of the slowest rank's compute time spent waiting for its data loader; 0 if unknown."""
        means = [math.fsum(row) / len(row) for row in self.own]
        slowest = means.index(max(means))
        return self.loading[slowest] / means[slowest] if self.loading else 0.0


def mean_samples(measured: Sequence[Measured]) -> float:
    counts = [number for each in measured for row in each.samples for number in row]
    return sum(counts) / len(counts)


def _check_counts(measured: Measured) -> None:
    ranks, count = len(measured.ranks), len(measured.steps)
    if not ranks or list(measured.ranks) != sorted(set(measured.ranks)):
        raise ConfigurationError(f"ranks={measured.ranks}: pass each rank once, in ascending order")
    if not count:
        raise ConfigurationError("steps: none; measure at least one, better 30")
    for name in ("samples", "own"):
        found = [len(row) for row in getattr(measured, name)]
        if found != [count] * ranks:
            raise ConfigurationError(f"{name}: rows of {found}; pass one for each rank, {ranks}, of {count} steps")
    for name in ("nodes", "loading"):
        if (known := len(getattr(measured, name))) not in (0, ranks):
            raise ConfigurationError(f"{name}: of {known} ranks; pass that of each of {ranks}, or none")


def _check_numbers(measured: Measured) -> None:
    for name, rows in (("samples", measured.samples), ("own", measured.own), ("steps", (measured.steps,))):
        if not all(0 < number < math.inf for row in rows for number in row):
            raise ConfigurationError(f"{name}: pass numbers above 0; leave out steps that were not measured")
    per_byte = "reduce_per_byte", "node_per_byte", "copy_per_byte", "host_per_byte"
    seconds = "serve", "round_trip", "node_round_trip", *per_byte
    least = dict.fromkeys((*seconds, "nbytes"), 0) | {"servers": 1}
    for name, low in least.items():
        check_number(name, getattr(measured, name), f"a number, {low} or more", low, below=math.inf)


@dataclass(frozen=True)
class TrainedBatches(Serializable):
    """The losses of a run's first batches, in one group.

    Attributes:
        samples: samples trained when each batch ended, ascending, shape (batches,).
        losses: mean training loss of each batch, before the update with it, shape (batches,); empty if one of them is
            not finite.
    """

    samples: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def end(self) -> float:
        return self.samples[-1] if self.samples else 0.0

    @property
    def first_loss(self) -> float:
        return self.losses[0] if self.losses else math.nan

    @property
    def is_finite(self) -> bool:
        return len(self.losses) == len(self.samples) > 0

    @property
    def level(self) -> float:
        return float(self.blocks()[-c.TAIL :].mean())

    @property
    def scatter(self) -> float:
        """Return the standard deviation of a batch's loss about the trend, from differences of successive losses."""
        differences = np.diff(self.losses)
        return float(np.sqrt(np.mean(differences**2) / 2)) if len(differences) else 0.0

    def blocks(self, count: int = c.BLOCKS) -> Array:
        """Return the mean loss of each of ``count`` equal segments of the samples."""
        edges = np.linspace(0, self.end, count + 1)
        ends = np.asarray(self.samples)
        # The losses are integrated, as constant over each batch, and interpolated at the edges.
        total = np.concatenate([[0.0], np.cumsum(np.diff(ends, prepend=0.0) * np.asarray(self.losses))])
        return np.asarray(np.diff(np.interp(edges, np.concatenate([[0.0], ends]), total)) / np.diff(edges))
