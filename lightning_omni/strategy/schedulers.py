"""Learning-rate schedulers that keep pace with the run as a whole rather than with one group.

With leased data a fast group takes more steps than a slow one. A schedule that counted a group's own steps would give
every group another learning rate, and OneCycleLR would run past its end. A paced scheduler, whenever it is stepped,
therefore catches up with the progress of all groups: the steps that every rank would have taken under DDP.

In manual optimization the user steps schedulers at any time. A scheduler that is stepped at most once per epoch is not
paced, since all groups do the same. One that is stepped more often is paced by its steps per batch on this rank.

A scheduler that is stepped to a given position (``scheduler.step(epoch + batch / batches)``) steps there, and is not
paced: its unit is the user's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

Schedule = Mapping[LRScheduler, tuple[int, int]]
"""For each scheduler, its count and the run's progress at the same moment, from which it keeps pace."""


class StepCounts:
    """The number of steps of each scheduler: its own count, and the steps that this count misses.

    A scheduler that wraps another one may count the steps of that one only, and none of its own earlier warm-up.
    """

    def __init__(self) -> None:
        self._uncounted: dict[Any, int] = {}  # an attribute of the schedulers would be in their state_dict
        self._told: set[Any] = set()

    def of(self, scheduler: Any) -> int:
        return count_of(scheduler) + self._uncounted.get(scheduler, 0)

    def reach(self, scheduler: Any, count: int, step: Callable[[], Any]) -> None:
        """Step a scheduler until it was stepped ``count`` times."""
        while (before := self.of(scheduler)) < count:
            step()
            if missing := before + 1 - self.of(scheduler):
                self._uncounted[scheduler] = self._uncounted.get(scheduler, 0) + missing

    def note(self, scheduler: Any, arguments: Sequence[Any]) -> None:
        if any(each is not None for each in arguments):
            self._told.add(scheduler)
        else:
            self._told.discard(scheduler)

    def are_told(self, scheduler: Any) -> bool:
        """Return whether the last step of the scheduler was to a given position, so that it counts no steps."""
        return scheduler in self._told

    def as_saved(self, scheduler: Any, target: int) -> tuple[int, int]:
        """Return the present and the target count of a scheduler as it counts when it is made again from its state."""
        return count_of(scheduler), target - self._uncounted.get(scheduler, 0)

    def forget(self) -> None:
        self._uncounted.clear()
        self._told.clear()


class _Mixed:
    """A mixin for a scheduler's own class, which pickles and copies the scheduler as that class.

    The state of a third-party scheduler may hold one of its methods, and so the scheduler itself.
    """

    @override
    def __reduce_ex__(self, _: Any) -> Any:
        reduced: Any = super().__reduce_ex__(1)  # from protocol 2 on pickle requires exactly this class
        make, arguments, *rest = reduced
        _, own = type(self).__bases__
        return make, tuple(own if each is type(self) else each for each in arguments), *rest


class _Paced(_Mixed):
    counts: StepCounts
    target: Callable[[], int]

    def step(self, *args: Any, **options: Any) -> None:
        """Step as often as necessary to catch up: not at all, once, or several times.

        If the user's ``lr_scheduler_step`` passes an epoch or a metric, step once with it.
        """
        counts = type(self).counts
        counts.note(self, [*args, *options.values()])
        if args or options:
            super().step(*args, **options)  # type: ignore[misc]
            return
        counts.reach(self, type(self).target(), super().step)  # type: ignore[misc]


class _SteppedByHand(_Mixed):
    """A mixin for a scheduler that the user steps."""

    counts: StepCounts
    calls: Calls

    def step(self, *args: Any, **options: Any) -> None:
        """Step once if the user steps it at most once per epoch; otherwise step as often as necessary to catch up."""
        calls, counts = type(self).calls, type(self).counts
        calls.note()
        counts.note(self, [*args, *options.values()])
        if args or options:
            super().step(*args, **options)  # type: ignore[misc]
        else:
            target = calls.target() if calls.are_frequent else counts.of(self) + 1
            counts.reach(self, target, super().step)  # type: ignore[misc]


class Calls:
    """The frequency of the user's steps of a scheduler on this rank.

    Args:
        count: count of the scheduler.
        steps: returns the run's progress in batches of DDP.
        epochs: returns the run's progress in epochs, including the current one.
        batches: returns the batches that this rank has trained, including the current one.

    Attributes:
        are_frequent: whether the scheduler was stepped several times in one epoch.
    """

    def __init__(
        self, count: int, steps: Callable[[], int], epochs: Callable[[], int], batches: Callable[[], int]
    ) -> None:
        self._count, self._steps, self._epochs, self._batches = count, steps, epochs, batches
        self._began, self._began_here = steps(), batches()
        self._calls, self._epoch, self._called = 0, 0, 0
        self.are_frequent = False

    def note(self) -> None:
        self.are_frequent |= self._epoch == self._epochs()
        self._epoch = self._epochs()
        self._calls += 1
        self._called = self._batches() - self._began_here

    def target(self, steps: int | None = None) -> int:
        """Return the scheduler's count if all ranks stepped it as often per batch as this one does.

        Batches since this rank's last call do not affect the frequency, unless the next call is overdue. If they did, a
        scheduler that is stepped every hundred batches would lose a step in each epoch of 400 that two groups divide as
        399 and 401.
        """
        done, here = (self._steps() if steps is None else steps) - self._began, self._batches() - self._began_here
        if (here - self._called) * self._calls < self._called:
            here = self._called
        return self._count + self._calls * done // max(1, here)


class Pacer:
    """The pacing of a run's schedulers, which `release` undoes.

    Args:
        configs: Lightning's scheduler configs.
        steps: returns the run's progress in optimizer steps of DDP.
        epochs: returns the run's progress in epochs, including the current one.
        batches: returns the batches that this rank has trained, including the current one; None if Lightning steps the
            schedulers, and not the user.
        scheduled: returns how often a scheduler with a frequency, in batches, is stepped in a number of optimizer
            steps.
        counts: earlier steps of the schedulers; None for their own counts.

    Attributes:
        schedulers: schedulers of the run that can keep pace.
    """

    def __init__(
        self,
        configs: list[Any],
        steps: Callable[[], int],
        epochs: Callable[[], int],
        batches: Callable[[], int] | None = None,
        scheduled: Callable[[int, int], int] = lambda frequency, steps: steps // frequency,
        counts: StepCounts | None = None,
    ) -> None:
        self._configs, self._counts = _that_keep_pace(configs), counts or StepCounts()
        self.schedulers = [config.scheduler for config in self._configs]
        self._steps, self._epochs, self._batches, self._scheduled = steps, epochs, batches, scheduled
        self._bases: Schedule = {}
        self._paced: list[tuple[LRScheduler, type[LRScheduler], str | Calls]] = []

    def has(self, configs: list[Any]) -> bool:
        """Return whether these are exactly the pacer's schedulers."""
        theirs = [config.scheduler for config in _that_keep_pace(configs)]
        return len(theirs) == len(self.schedulers) and all(map(operator.is_, theirs, self.schedulers))

    def count_from(self, schedule: Schedule) -> Schedule:
        """Set and return the counts from which schedulers keep pace: earlier ones, or the present for new schedulers.

        The present is also used for those whose steps in one group are unknown to all ranks: see `_counts_all_steps`.
        """
        now = {
            config.scheduler: (
                self._counts.of(config.scheduler),
                self._steps() if config.interval == "step" else self._epochs() - 1,
            )
            for config in self._configs
        }
        self._bases = {**now, **{each: base for each, base in schedule.items() if _counts_all_steps(each)}}
        return self._bases

    def pace(self) -> None:
        for config in self._configs:
            if self._batches is not None:
                calls = Calls(self._counts.of(config.scheduler), self._steps, self._epochs, self._batches)
                self._mix_in(config.scheduler, _SteppedByHand, calls, {"calls": calls})
            else:
                self._pace(config.scheduler, config.interval, config.frequency)

    def _pace(self, scheduler: LRScheduler, interval: str, frequency: int) -> None:
        count, began = self._bases[scheduler]

        def target() -> int:
            if interval == "step":
                return count_at(count, began, frequency, self._steps(), self._scheduled)
            return count_at(count, began, frequency, self._epochs())

        self._mix_in(scheduler, _Paced, interval, {"target": staticmethod(target)})

    def _mix_in(self, scheduler: LRScheduler, mixin: type, paced: str | Calls, fields: dict[str, Any]) -> None:
        own = type(scheduler)
        self._paced.append((scheduler, own, paced))
        # This makes a class, because an attribute of the scheduler would be in its state_dict.
        scheduler.__class__ = type(
            own.__name__, (mixin, own), {**fields, "counts": self._counts, "__module__": own.__module__}
        )

    def catch_up(self) -> None:
        """Advance schedulers that count steps to the end of the epoch."""
        for scheduler, own, paced in self._paced:
            if self._counts.are_told(scheduler):
                continue
            if isinstance(paced, Calls):
                if paced.are_frequent:
                    self._counts.reach(scheduler, paced.target(), partial(own.step, scheduler))
            elif paced == "step":
                scheduler.step()

    def keep_up(self) -> None:
        """Step schedulers that are due at multiples of a number of batches of DDP, after a batch of this rank."""
        for config in self._configs:
            is_now_and_then = config.interval == "step" and config.frequency > 1
            follows = isinstance(config.scheduler, _Paced) and not self._counts.are_told(config.scheduler)
            if is_now_and_then and follows:
                config.scheduler.step()

    def counts_at(self, configs: list[Any], steps: int) -> list[tuple[int, ...]]:
        """Return for each scheduler its present count, and the count if it had kept pace until ``steps`` of the run.

        A scheduler that counts no steps has an empty tuple.
        """
        paced = {scheduler: how for scheduler, _, how in self._paced}
        return [self._counts_at(config, paced.get(config.scheduler, "epoch"), steps) for config in configs]

    def _counts_at(self, config: Any, paced: str | Calls, steps: int) -> tuple[int, ...]:
        scheduler = config.scheduler
        if self._counts.are_told(scheduler):
            return ()
        if isinstance(paced, Calls):
            return self._counts.as_saved(scheduler, paced.target(steps)) if paced.are_frequent else ()
        if paced == "epoch":
            return ()
        count, began = self._bases[scheduler]
        return self._counts.as_saved(scheduler, count_at(count, began, config.frequency, steps, self._scheduled))

    def release(self) -> None:
        for scheduler, own, _ in self._paced:
            scheduler.__class__ = own
        self._paced = []


def _that_keep_pace(configs: list[Any]) -> list[Any]:
    return [
        config
        for config in configs
        if isinstance(config.scheduler, LRScheduler) and not isinstance(config.scheduler, ReduceLROnPlateau)
    ]


def counts_of(configs: list[Any], counts: StepCounts) -> list[int]:
    """Return how often each scheduler that can keep pace was stepped."""
    return [counts.of(config.scheduler) for config in _that_keep_pace(configs)]


def reach_all(configs: list[Any], targets: Sequence[int], counts: StepCounts) -> None:
    """Step schedulers that can keep pace, but are not paced now, to the target counts: see `counts_of`."""
    for config, target in zip(_that_keep_pace(configs), targets, strict=True):
        if not counts.are_told(config.scheduler):
            counts.reach(config.scheduler, target, config.scheduler.step)


def arrive(
    configs: list[Any], saved: Sequence[Sequence[int]], counts: StepCounts | None = None
) -> dict[LRScheduler, int]:
    """Advance schedulers to the progress of a resumed run, which was ahead of their saved states.

    Args:
        configs: Lightning's scheduler configs.
        saved: result of `Pacer.counts_at`. A scheduler with another count now (of state that the user has loaded, for
            example) is not advanced.
        counts: earlier steps of the schedulers; None for their own counts.

    Returns:
        The target counts. A scheduler with a larger count was saved later than the weights.
    """
    if len(saved) != len(configs):
        return {}
    found, counts = {}, counts or StepCounts()
    for config, each in zip(configs, saved, strict=True):
        if each and counts.of(config.scheduler) == each[0]:
            counts.reach(config.scheduler, each[1], config.scheduler.step)
            found[config.scheduler] = each[1]
    return found


def count_at(
    count: int,
    began: int,
    frequency: int,
    now: int,
    scheduled: Callable[[int, int], int] = lambda frequency, now: now // frequency,
) -> int:
    """Return the count of a paced scheduler now, in optimizer steps or epochs, from its ``count`` when it ``began``.

    ``scheduled`` returns how often it is stepped, with a frequency, in a number of them.
    """
    return count + scheduled(frequency, now) - scheduled(frequency, began)


def count_of(scheduler: Any) -> int:
    """Return a scheduler's own count. A ChainedScheduler does not count, but each scheduler in it does."""
    while not hasattr(scheduler, "last_epoch"):
        scheduler = vars(scheduler)["_schedulers"][0]
    return int(scheduler.last_epoch)


def _counts_all_steps(scheduler: Any) -> bool:
    """Return whether a scheduler's count certainly includes all steps; a class with its own ``step`` may omit some."""
    return bool(type(scheduler).step.__module__ == LRScheduler.__module__)
