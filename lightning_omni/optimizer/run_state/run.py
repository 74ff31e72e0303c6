"""What the run is as a whole: its progress, and what was counted and heard of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch.optim.lr_scheduler import LRScheduler

from lightning_omni.methods import Method
from lightning_omni.optimizer.channel import Channel, Traffic
from lightning_omni.optimizer.place import Place
from lightning_omni.protocol.group import Heard
from lightning_omni.protocol.progress import Progress

Schedule = Mapping[LRScheduler, tuple[int, int]]
"""For each scheduler, its count and the run's progress at one and the same moment: from there it keeps pace."""


class Epochs(Protocol):
    """What takes the run through its epochs, and has these."""

    progress: Progress | None
    schedule: Schedule


@dataclass(frozen=True)
class RunScope:
    """A copy of what is the run's.

    Attributes:
        progress: in samples and steps; None if the data are not leased.
        schedule: where schedulers count from.
        method: how groups exchange.
        clocks: updates that the weights of each optimizer contain.
        steps: optimizer steps that were taken in one group, which no clock of a server counts.
        heard: the last that the server said of the run.
        traffic: what exchanges took.
        staleness: of the pushes since the last report, for each optimizer.
    """

    progress: Progress | None
    schedule: Schedule
    method: Method
    clocks: tuple[int, ...]
    steps: int
    heard: Heard
    traffic: Traffic
    staleness: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, place: Place, channel: Channel, epochs: Epochs) -> RunScope:
        """As it is now.

        Args:
            place: this rank's, in the run.
            channel: its way to the server.
            epochs: has progress and schedule.
        """
        return cls(
            progress=epochs.progress,
            schedule=dict(epochs.schedule),
            method=place.method,
            clocks=tuple(part.replica.clock for part in place.parts),
            steps=place.steps,
            heard=replace(place.core.heard),
            traffic=replace(channel.traffic),
            staleness=tuple(tuple(part.staleness) for part in place.parts),
        )

    def put_back(self, place: Place, channel: Channel, epochs: Epochs) -> None:
        """As it was."""
        epochs.progress, epochs.schedule = self.progress, dict(self.schedule)
        place.method, place.steps = self.method, self.steps
        place.core.heard, channel.traffic = replace(self.heard), replace(self.traffic)
        for part, clock, staleness in zip(place.parts, self.clocks, self.staleness, strict=True):
            part.replica.clock = clock
            part.staleness[:] = staleness
