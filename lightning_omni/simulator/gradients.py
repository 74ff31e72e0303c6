"""How a group comes by its gradient: by itself, or through a merged head. What takes time here is computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightning_omni.simulator.engine import Engine, Timeline
from lightning_omni.simulator.head import SimulatedHead
from lightning_omni.simulator.network import Network
from lightning_omni.simulator.workbench import Result, Workbench

FORWARD = 1 / 3
"""Part of a batch's time that is its forward pass: the backward pass multiplies twice as many matrices."""


@dataclass(frozen=True)
class Assignment:
    """A batch that a group is to compute the gradient of.

    Attributes:
        group: number of the group.
        leader: its leader's rank.
        weights: at which it is computed.
        parts: positions of each member's samples, or all of them together.
        size: samples in all.
        place: epoch, and batches of it that are trained with this one.
        seconds: that the group takes for it.
    """

    group: int
    leader: int
    weights: list[Tensor]
    parts: Sequence[range]
    size: int
    place: tuple[int, int]
    seconds: float


class Gradients(Protocol):
    """Where gradients come from."""

    def compute(self, work: Assignment) -> Timeline:
        """A process' part: returns the `Result` when the group has it."""
        ...

    def drop(self, group: int) -> None:
        """A group has died: its result is not wanted any more."""
        ...


class OwnGradients:
    """Each group computes by itself.

    Args:
        engine: virtual time.
        bench: computes.
    """

    def __init__(self, engine: Engine, bench: Workbench) -> None:
        self._engine, self._bench = engine, bench

    def compute(self, work: Assignment) -> Timeline:
        """See `Gradients.compute`."""
        due, samples = self._engine.now + work.seconds, self._bench.samples
        indices = [samples.at(work.place[0], part) for part in work.parts]
        self._bench.begin(work.group, due, work.weights, indices)
        yield due
        return self._bench.result(work.group)

    def drop(self, group: int) -> None:
        """See `Gradients.drop`."""
        self._bench.drop(group)


class HeadGradients:
    """A group's batch goes through a merged head at the server, between its forward and its backward pass.

    Args:
        engine: virtual time.
        bench: computes.
        head: the merged head.
        network: the way there.
        sizes: bytes of one sample that go into the head and come out of it.
    """

    def __init__(
        self, engine: Engine, bench: Workbench, head: SimulatedHead, network: Network, sizes: tuple[int, int]
    ) -> None:
        self._engine, self._bench, self._head, self._network = engine, bench, head, network
        self._bytes_in, self._bytes_out = sizes
        self._lost: set[int] = set()

    def compute(self, work: Assignment) -> Timeline:
        """See `Gradients.compute`."""
        return (yield self._engine.start(self._through_head(work)))

    def drop(self, group: int) -> None:
        """See `Gradients.drop`."""
        self._lost.add(group)

    def _through_head(self, work: Assignment) -> Timeline:
        """A process of its own: what is on its way takes its turn at the head even if its group has died."""
        nbytes = self._bytes_in * work.size
        yield self._engine.now + work.seconds * FORWARD
        yield from self._network.to_head(nbytes, self._bytes_out * work.size, work.size)
        if work.group in self._lost:
            return None
        # Nothing else has had the head since its access began, so all of it may be computed now.
        self._head.turn_of(work.leader, *work.place)
        (part,) = work.parts
        batch = self._bench.samples.batch(self._bench.samples.at(work.place[0], part))
        result: Result = self._bench.compute(work.weights, [batch])
        yield self._network.from_head(nbytes) + work.seconds * (1 - FORWARD)
        return result
