"""Learning-rate schedules that keep pace with the run as a whole rather than with one group.

With leased data a fast group takes more steps than a slow one. A schedule that counted a group's own steps would give
every group another learning rate, and OneCycleLR would run past its end. So a paced scheduler, whenever it is
stepped, catches up with the run's common progress: the steps that every rank would have taken under DDP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


class _Paced:
    """Mixed into the scheduler's own class."""

    target: Callable[[], int]
    last_epoch: int

    def step(self, *args: Any) -> None:
        """Steps as often as it takes to catch up: not at all, once, or several times."""
        while self.last_epoch < type(self).target():
            before = self.last_epoch
            super().step(*args)  # type: ignore[misc]
            if self.last_epoch == before:
                return


class Pacer:
    """Paces the schedulers of a run, and gives them back as they were.

    Args:
        configs: Lightning's scheduler configs.
        steps: the run's progress in optimizer steps as DDP would count them.
        epochs: the run's progress in epochs, the current one counted.
    """

    def __init__(self, configs: list[Any], steps: Callable[[], int], epochs: Callable[[], int]) -> None:
        self._paced: list[tuple[LRScheduler, type[LRScheduler], str]] = []
        for config in configs:
            scheduler = config.scheduler
            if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
                self._pace(scheduler, config.interval, config.frequency, steps if config.interval == "step" else epochs)

    def _pace(self, scheduler: LRScheduler, interval: str, frequency: int, progress: Callable[[], int]) -> None:
        done, began = scheduler.last_epoch, progress() if interval == "step" else progress() - 1

        def target() -> int:
            return done + (progress() - began) // frequency

        own = type(scheduler)
        self._paced.append((scheduler, own, interval))
        # A class of its own, not an attribute: what hangs on a scheduler goes into its state_dict.
        scheduler.__class__ = type(
            own.__name__, (_Paced, own), {"target": staticmethod(target), "__module__": own.__module__}
        )

    def catch_up(self) -> None:
        """At the end of an epoch: schedulers that count steps arrive where the epoch ends."""
        for scheduler, _, interval in self._paced:
            if interval == "step":
                scheduler.step()

    def release(self) -> None:
        """Gives the schedulers back."""
        for scheduler, own, _ in self._paced:
            scheduler.__class__ = own
        self._paced = []
