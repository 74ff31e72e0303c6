"""Learning-rate schedules that keep pace with the run as a whole rather than with one group.

With leased data a fast group takes more steps than a slow one. A schedule that counted a group's own steps would give
every group another learning rate, and OneCycleLR would run past its end. So a paced scheduler, whenever it is
stepped, catches up with the run's common progress: the steps that every rank would have taken under DDP.

In manual optimization the user steps schedulers, at any time. One that is stepped once per epoch or less often is left
alone: all groups do so alike. One that is stepped more often is paced by how often, relative to this rank's batches.

One that is told where to go (``scheduler.step(epoch + batch / batches)``) goes there, and is left alone: it counts in
units of the user's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

Schedule = Mapping[LRScheduler, tuple[int, int]]
"""For each scheduler, its count and the run's progress at one and the same moment: from there it keeps pace."""


class StepCounts:
    """How often schedulers were stepped: what they count themselves, and what they were seen not to.

    A schedule that wraps another one may count the steps of that one only, and none of its own warm-up before.
    """

    def __init__(self) -> None:
        self._uncounted: dict[Any, int] = {}  # no attribute of theirs, for it would go into their state_dict
        self._told: set[Any] = set()

    def of(self, scheduler: Any) -> int:
        """How often it was stepped."""
        return count_of(scheduler) + self._uncounted.get(scheduler, 0)

    def reach(self, scheduler: Any, count: int, step: Callable[[], Any]) -> None:
        """Steps until the scheduler was stepped so many times."""
        while (before := self.of(scheduler)) < count:
            step()
            if missing := before + 1 - self.of(scheduler):
                self._uncounted[scheduler] = self._uncounted.get(scheduler, 0) + missing

    def note(self, scheduler: Any, arguments: Sequence[Any]) -> None:
        """A user has stepped the scheduler: to an epoch, or on by one."""
        if any(each is not None for each in arguments):
            self._told.add(scheduler)
        else:
            self._told.discard(scheduler)

    def are_told(self, scheduler: Any) -> bool:
        """Whether the scheduler was last told where to go: then it counts no steps."""
        return scheduler in self._told

    def as_saved(self, scheduler: Any, target: int) -> tuple[int, int]:
        """What it counts, and what it would count, when it is made again from its state."""
        return count_of(scheduler), target - self._uncounted.get(scheduler, 0)

    def forget(self) -> None:
        """There are no schedulers."""
        self._uncounted.clear()
        self._told.clear()


class _Mixed:
    """Mixed into the scheduler's own class, as which it is pickled and copied.

    The state of a schedule of public code may hold one of its methods, and so the scheduler itself.
    """

    @override
    def __reduce_ex__(self, _: Any) -> Any:
        reduced: Any = super().__reduce_ex__(1)  # from protocol 2 on pickle insists on this very class
        make, arguments, *rest = reduced
        _, own = type(self).__bases__
        return make, tuple(own if each is type(self) else each for each in arguments), *rest


class _Paced(_Mixed):
    counts: StepCounts
    target: Callable[[], int]

    def step(self, *args: Any, **options: Any) -> None:
        """Steps as often as it takes to catch up: not at all, once, or several times.

        Where a user's ``lr_scheduler_step`` says for which epoch or metric, as it is.
        """
        counts = type(self).counts
        counts.note(self, [*args, *options.values()])
        if args or options:
            super().step(*args, **options)  # type: ignore[misc]
            return
        counts.reach(self, type(self).target(), super().step)  # type: ignore[misc]


class _SteppedByHand(_Mixed):
    """For a scheduler that the user steps."""

    counts: StepCounts
    calls: Calls

    def step(self, *args: Any, **options: Any) -> None:
        """Steps once if it is stepped once an epoch at most; otherwise as often as it takes to catch up."""
        calls, counts = type(self).calls, type(self).counts
        calls.note()
        counts.note(self, [*args, *options.values()])
        if args or options:
            super().step(*args, **options)  # type: ignore[misc]
        else:
            target = calls.target() if calls.are_frequent else counts.of(self) + 1
            counts.reach(self, target, super().step)  # type: ignore[misc]


class Calls:
    """How often this rank steps a scheduler by hand.

    Args:
        count: of the scheduler.
        steps: the run's progress in batches as DDP would count them.
        epochs: the run's progress in epochs, the current one counted.
        batches: batches that this rank has trained, the current one counted.

    Attributes:
        are_frequent: whether it was stepped several times in one epoch.
    """

    def __init__(
        self, count: int, steps: Callable[[], int], epochs: Callable[[], int], batches: Callable[[], int]
    ) -> None:
        self._count, self._steps, self._epochs, self._batches = count, steps, epochs, batches
        self._began, self._began_here = steps(), batches()
        self._calls, self._epoch, self._called = 0, 0, 0
        self.are_frequent = False

    def note(self) -> None:
        """It is stepped."""
        self.are_frequent |= self._epoch == self._epochs()
        self._epoch = self._epochs()
        self._calls += 1
        self._called = self._batches() - self._began_here

    def target(self, steps: int | None = None) -> int:
        """What the scheduler would count by now if all ranks stepped it as often, batch for batch, as this one does.

        Batches since this rank's last call say nothing of how often it calls, unless the next one is overdue. If they
        counted, a scheduler that is stepped every hundred batches would lose a step in each epoch of 400 that two
        groups divide as 399 and 401.

        Args:
            steps: the run's progress, if it is known better.
        """
        done, here = (self._steps() if steps is None else steps) - self._began, self._batches() - self._began_here
        if (here - self._called) * self._calls < self._called:
            here = self._called
        return self._count + self._calls * done // max(1, here)


class Pacer:
    """Paces the schedulers of a run, and gives them back as they were.

    Args:
        configs: Lightning's scheduler configs.
        steps: the run's progress in optimizer steps as DDP would count them.
        epochs: the run's progress in epochs, the current one counted.
        batches: if the user steps the schedulers: batches that this rank has trained, the current one counted.
        scheduled: how often a scheduler of a frequency, in batches, is stepped in so many optimizer steps.
        counts: how often they were stepped before; None for what they count themselves.

    Attributes:
        schedulers: of the run, that can keep pace.
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
        """Whether these are the schedulers that it was made for, and no others."""
        theirs = [config.scheduler for config in _that_keep_pace(configs)]
        return len(theirs) == len(self.schedulers) and all(map(operator.is_, theirs, self.schedulers))

    def count_from(self, schedule: Schedule) -> Schedule:
        """Schedulers count from where they did; those that are new, from now on. Returns where all of them do.

        From now on also those of which no rank knows how often one group has stepped them, see `_counts_all_steps`.
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
        """From now on the schedulers keep pace."""
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
        # A class of its own, not an attribute: what hangs on a scheduler goes into its state_dict.
        scheduler.__class__ = type(
            own.__name__, (mixin, own), {**fields, "counts": self._counts, "__module__": own.__module__}
        )

    def catch_up(self) -> None:
        """At the end of an epoch: schedulers that count steps arrive where the epoch ends."""
        for scheduler, own, paced in self._paced:
            if self._counts.are_told(scheduler):
                continue
            if isinstance(paced, Calls):
                if paced.are_frequent:
                    self._counts.reach(scheduler, paced.target(), partial(own.step, scheduler))
            elif paced == "step":
                scheduler.step()

    def keep_up(self) -> None:
        """At the end of a batch: schedulers that are due every so many batches of DDP, and not of this group's."""
        for config in self._configs:
            is_now_and_then = config.interval == "step" and config.frequency > 1
            follows = isinstance(config.scheduler, _Paced) and not self._counts.are_told(config.scheduler)
            if is_now_and_then and follows:
                config.scheduler.step()

    def counts_at(self, configs: list[Any], steps: int) -> list[tuple[int, ...]]:
        """Of each scheduler, what it counts, and what it would count if it had kept pace until then.

        Args:
            configs: all of Lightning's; those that count no steps have nothing.
            steps: the run's progress.
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
        """Gives the schedulers back."""
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
    """How often each scheduler that keeps pace was stepped."""
    return [counts.of(config.scheduler) for config in _that_keep_pace(configs)]


def reach_all(configs: list[Any], targets: Sequence[int], counts: StepCounts) -> None:
    """Schedulers that keep pace, and do not now, are stepped until they were so many times: see `counts_of`."""
    for config, target in zip(_that_keep_pace(configs), targets, strict=True):
        if not counts.are_told(config.scheduler):
            counts.reach(config.scheduler, target, config.scheduler.step)


def arrive(
    configs: list[Any], saved: Sequence[Sequence[int]], counts: StepCounts | None = None
) -> dict[LRScheduler, int]:
    """Where a run goes on: schedulers arrive at where it is, which was further than they knew.

    Args:
        configs: Lightning's scheduler configs.
        saved: from `Pacer.counts_at`. What has another state now, which a user has given it, say, is left there.
        counts: how often they were stepped; None for what they count themselves.

    Returns:
        What schedulers are to count at this moment. One that counts more already was saved later than the weights.
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
    """What a scheduler counts by now.

    Args:
        count: what it counted ...
        began: ... at this many optimizer steps, or epochs.
        frequency: how often it is due.
        now: optimizer steps, or epochs, by now.
        scheduled: how often it is stepped, with a frequency, in so many of them.
    """
    return count + scheduled(frequency, now) - scheduled(frequency, began)


def count_of(scheduler: Any) -> int:
    """What a scheduler counts itself. A ChainedScheduler does not count, but each of those in it does."""
    while not hasattr(scheduler, "last_epoch"):
        scheduler = vars(scheduler)["_schedulers"][0]
    return int(scheduler.last_epoch)


def _counts_all_steps(scheduler: Any) -> bool:
    """Whether it is sure to, paced or not: a class of its own ``step`` may count only some."""
    return bool(type(scheduler).step.__module__ == LRScheduler.__module__)
