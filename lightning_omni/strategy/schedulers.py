"""Learning-rate schedules that keep pace with the run as a whole rather than with one group.

With leased data a fast group takes more steps than a slow one. A schedule that counted a group's own steps would give
every group another learning rate, and OneCycleLR would run past its end. So a paced scheduler, whenever it is
stepped, catches up with the run's common progress: the steps that every rank would have taken under DDP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_omni.optimizer.run_state import Schedule


class _Paced:
    """Mixed into the scheduler's own class."""

    target: Callable[[], int]

    def step(self, *args: Any, **options: Any) -> None:
        """Steps as often as it takes to catch up: not at all, once, or several times.

        Where a user's ``lr_scheduler_step`` says for which epoch or metric, as it is.
        """
        if args or options:
            super().step(*args, **options)  # type: ignore[misc]
            return
        while (before := _count_of(self)) < type(self).target():
            super().step()  # type: ignore[misc]
            if _count_of(self) == before:
                return


class Pacer:
    """Paces the schedulers of a run, and gives them back as they were.

    Args:
        configs: Lightning's scheduler configs.
        steps: the run's progress in optimizer steps as DDP would count them.
        epochs: the run's progress in epochs, the current one counted.
    """

    def __init__(self, configs: list[Any], steps: Callable[[], int], epochs: Callable[[], int]) -> None:
        self._configs = [
            config
            for config in configs
            if isinstance(config.scheduler, LRScheduler) and not isinstance(config.scheduler, ReduceLROnPlateau)
        ]
        self._steps, self._epochs = steps, epochs
        self._bases: Schedule = {}
        self._paced: list[tuple[LRScheduler, type[LRScheduler], str]] = []

    def count_from(self, schedule: Schedule) -> Schedule:
        """Schedulers count from where they did; those that are new, from now on. Returns where all of them do."""
        now = {
            config.scheduler: (
                _count_of(config.scheduler),
                self._steps() if config.interval == "step" else self._epochs() - 1,
            )
            for config in self._configs
        }
        self._bases = {**now, **schedule}
        return self._bases

    def pace(self) -> None:
        """From now on the schedulers keep pace."""
        for config in self._configs:
            self._pace(config.scheduler, config.interval, config.frequency)

    def _pace(self, scheduler: LRScheduler, interval: str, frequency: int) -> None:
        count, began = self._bases[scheduler]
        progress = self._steps if interval == "step" else self._epochs

        def target() -> int:
            return count + (progress() - began) // frequency

        own = type(scheduler)
        self._paced.append((scheduler, own, interval))
        # A class of its own, not an attribute: what hangs on a scheduler goes into its state_dict.
        fields = {"target": staticmethod(target), "__module__": own.__module__}
        scheduler.__class__ = type(own.__name__, (_Paced, own), fields)

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


def _count_of(scheduler: Any) -> int:
    """How often it was stepped. A ChainedScheduler does not count, but each of those in it does."""
    while not hasattr(scheduler, "last_epoch"):
        scheduler = vars(scheduler)["_schedulers"][0]
    return int(scheduler.last_epoch)
