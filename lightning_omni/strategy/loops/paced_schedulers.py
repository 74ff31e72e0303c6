"""Learning-rate schedulers that keep pace with the whole run.

With leased data a fast group takes more steps than a slow one. A paced scheduler, whenever Lightning steps it,
therefore catches up with the steps that every rank would have taken under DDP.

A scheduler that the user's code steps is not paced: in manual optimization, in hooks, to a given position
(``scheduler.step(epoch + batch / batches)``), and in an ``lr_scheduler_step`` that does not step it exactly once in
each call. Pacing ends at the first such or missing step.
"""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

Schedule = dict[LRScheduler, tuple[int, int]]
"""For each scheduler, its count and the run's progress at the same moment, from which it keeps pace."""


class StepCounts:
    """The number of steps of each scheduler: its own count, and the steps that this count misses.

    A scheduler that wraps another one may count only that one's steps.
    """

    def __init__(self) -> None:
        self._uncounted: dict[Any, int] = {}  # an attribute of the schedulers would be in their state_dict

    def of(self, scheduler: Any) -> int:
        return count_of(scheduler) + self._uncounted.get(scheduler, 0)

    def reach(self, scheduler: Any, count: int, step: Callable[[], Any]) -> None:
        while (before := self.of(scheduler)) < count:
            step()
            if missing := before + 1 - self.of(scheduler):
                self._uncounted[scheduler] = self._uncounted.get(scheduler, 0) + missing

    def as_saved(self, scheduler: Any, target: int) -> tuple[int, int]:
        """Return the present and the target count, as counted by a scheduler that is made again from its state."""
        return count_of(scheduler), target - self._uncounted.get(scheduler, 0)

    def forget(self) -> None:
        self._uncounted.clear()


class _Paced:
    """A mixin for a scheduler's own class, as which the scheduler is pickled and copied."""

    counts: StepCounts
    target: Callable[[], int]
    is_due: Callable[[Any], bool]
    stop: Callable[[Any], None]

    def step(self, *args: Any, **options: Any) -> None:
        """Step as often as necessary to catch up.

        Pacing stops if the user's ``lr_scheduler_step`` passes an epoch, or if user code makes the step.
        """
        own = type(self)
        if any(each is not None for each in (*args, *options.values())) or not own.is_due(self):
            own.stop(self)
            self.step(*args, **options)
        else:
            own.counts.reach(self, own.target(), super().step)  # type: ignore[misc]

    @override
    def __reduce_ex__(self, _: Any) -> Any:
        reduced: Any = super().__reduce_ex__(1)  # from protocol 2 on pickle requires exactly this class
        make, arguments, *rest = reduced
        _, own = type(self).__bases__
        return make, tuple(own if each is type(self) else each for each in arguments), *rest


class Pacer:
    """The pacing of a run's schedulers, which `release` undoes.

    Args:
        steps: returns the run's progress in steps of DDP.
        epochs: returns the run's progress in epochs, including the current one.
        scheduled: returns how often a scheduler with a frequency, in batches, is stepped in a number of steps.
        counts: earlier steps; None for the schedulers' own counts.
        ask: calls the module's ``lr_scheduler_step`` with a scheduler, as Lightning does.

    Attributes:
        schedulers: schedulers of the run that can keep pace.
    """

    def __init__(
        self,
        configs: list[Any],
        steps: Callable[[], int],
        epochs: Callable[[], int],
        scheduled: Callable[[int, int], int] = lambda frequency, steps: steps // frequency,
        counts: StepCounts | None = None,
        ask: Callable[[Any], None] = lambda scheduler: scheduler.step(),
    ) -> None:
        self._configs, self._counts = _that_keep_pace(configs), counts or StepCounts()
        self.schedulers = [config.scheduler for config in self._configs]
        self._steps, self._epochs, self._scheduled, self._ask = steps, epochs, scheduled, ask
        self._asked: Any = None  # the scheduler that the module is asked to step, until it has
        self._bases: Schedule = {}
        self._paced: dict[LRScheduler, type[LRScheduler]] = {}  # with their own classes

    def has(self, configs: list[Any]) -> bool:
        theirs = [config.scheduler for config in _that_keep_pace(configs)]
        return len(theirs) == len(self.schedulers) and all(map(operator.is_, theirs, self.schedulers))

    def count_from(self, schedule: Schedule) -> Schedule:
        """Set and return the counts from which schedulers keep pace: earlier ones, or else the present.

        The present is also used where counts omit steps: see `_counts_all_steps`. The result loses a scheduler as soon
        as the user's code steps it.
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
            self._pace(config.scheduler, config.interval, config.frequency)

    def _pace(self, scheduler: LRScheduler, interval: str, frequency: int) -> None:
        def target() -> int:
            count, began = self._bases[scheduler]
            if interval == "step":
                return count_at(count, began, frequency, self._steps(), self._scheduled)
            return count_at(count, began, frequency, self._epochs())

        own = self._paced[scheduler] = type(scheduler)
        fields = {"counts": self._counts, "target": staticmethod(target), "is_due": self._is_due, "stop": self._stop}
        # This makes a class, because an attribute of the scheduler would be in its state_dict.
        scheduler.__class__ = type(own.__name__, (_Paced, own), {**fields, "__module__": own.__module__})

    def step(self, scheduler: Any, call: Callable[[], Any]) -> None:
        """Make ``call`` of the module's ``lr_scheduler_step``; stop pacing unless it steps this one exactly once."""
        self._asked = scheduler
        call()
        if self._asked is scheduler and isinstance(scheduler, _Paced):
            self._stop(scheduler)
        self._asked = None

    def _is_due(self, scheduler: Any) -> bool:
        if self._asked is not scheduler:
            return False
        self._asked = None
        return True

    def _stop(self, scheduler: Any) -> None:
        scheduler.__class__ = self._paced.pop(scheduler)
        self._bases.pop(scheduler)

    def catch_up(self) -> None:
        """Advance schedulers that count steps to the end of the epoch, and count from there."""
        for config in self._configs:
            self._catch_up(config)
            if self._counts_steps(config):
                self._bases[config.scheduler] = type(config.scheduler).target(), self._steps()

    def keep_up(self) -> None:
        """Step schedulers whose frequency is several batches of DDP, if due, after a batch of this rank."""
        for config in self._configs:
            if config.frequency > 1:
                self._catch_up(config)

    def _catch_up(self, config: Any) -> None:
        """Ask the module to step a scheduler that is behind: its hook may leave it as it is."""
        scheduler = config.scheduler
        if self._counts_steps(config) and self._counts.of(scheduler) < type(scheduler).target():
            self.step(scheduler, lambda: self._ask(scheduler))

    def _counts_steps(self, config: Any) -> bool:
        return config.interval == "step" and config.scheduler in self._paced

    @property
    def counts_any_steps(self) -> bool:
        return any(map(self._counts_steps, self._configs))

    def counts_at(self, configs: list[Any], steps: int) -> list[tuple[int, ...]]:
        """Return each scheduler's count now and at ``steps`` of the run if paced; an empty tuple if it counts none."""
        return [self._counts_at(config, steps) for config in configs]

    def _counts_at(self, config: Any, steps: int) -> tuple[int, ...]:
        if not self._counts_steps(config):
            return ()
        count, began = self._bases[config.scheduler]
        target = count_at(count, began, config.frequency, steps, self._scheduled)
        return self._counts.as_saved(config.scheduler, target)

    def release(self) -> None:
        for scheduler, own in self._paced.items():
            scheduler.__class__ = own
        self._paced = {}


def _that_keep_pace(configs: list[Any]) -> list[Any]:
    return [
        config
        for config in configs
        if isinstance(config.scheduler, LRScheduler) and not isinstance(config.scheduler, ReduceLROnPlateau)
    ]


def counts_of(configs: list[Any], counts: StepCounts) -> list[int]:
    return [counts.of(config.scheduler) for config in _that_keep_pace(configs)]


def reach_all(configs: list[Any], targets: Sequence[int], counts: StepCounts) -> None:
    for config, target in zip(_that_keep_pace(configs), targets, strict=True):
        counts.reach(config.scheduler, target, config.scheduler.step)


def arrive(
    configs: list[Any], saved: Sequence[Sequence[int]], counts: StepCounts | None = None
) -> dict[LRScheduler, int]:
    """Advance schedulers to the progress of a resumed run, which was ahead of their saved states; return their targets.

    ``saved`` is a result of `caught_up`. A scheduler with another count now, perhaps loaded by the user, stays.
    ``counts`` are earlier steps.
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
    return count + scheduled(frequency, now) - scheduled(frequency, began)


def count_of(scheduler: Any) -> int:
    """Return a scheduler's own count; for a ChainedScheduler, that of one in it."""
    while not hasattr(scheduler, "last_epoch"):
        scheduler = vars(scheduler)["_schedulers"][0]
    return int(scheduler.last_epoch)


def _counts_all_steps(scheduler: Any) -> bool:
    # A ``step`` of its own may omit some.
    return bool(type(scheduler).step.__module__ == LRScheduler.__module__)


# --- States at another moment: that of the weights in a checkpoint ----------------------------------------------------

# Schedulers of torch are made again from their states, and stepped; functions of the user are called. Schedulers of
# other classes are left unchanged.

Counts = tuple[int, ...]
"""A scheduler's count, and the count that it would have if it had kept pace; or an empty tuple."""


class SchedulerSnapshot(NamedTuple):
    """The ``state_dict`` of a scheduler, and its optimizer's parameter groups without the parameters."""

    state: dict[str, Any]
    groups: list[dict[str, Any]]


def standing(scheduler: Any) -> SchedulerSnapshot | None:
    if not described(scheduler)[0]:
        return None
    return SchedulerSnapshot(_copied(scheduler.state_dict()), _bare(scheduler.optimizer.param_groups))


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    copied = {name: copy(value) for name, value in state.items() if name not in ("lr_lambdas", "_schedulers")}
    if "lr_lambdas" in state:
        copied["lr_lambdas"] = [None] * len(state["lr_lambdas"])
    if "_schedulers" in state:
        copied["_schedulers"] = [_copied(each) for each in state["_schedulers"]]
    return copied


def described(scheduler: Any) -> list[Any]:
    """Return the class names of a scheduler of torch and of those in it; "" for any other.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> described(lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 3)]))
        ['ChainedScheduler', [['StepLR', []]]]
    """
    kind = type(scheduler)
    is_torchs = kind.__module__ == lr_scheduler.__name__ and hasattr(lr_scheduler, kind.__name__)
    if getattr(scheduler, "_scale_fn_custom", None) is not None:  # a CyclicLR's state does not contain it
        is_torchs = False
    inside = getattr(scheduler, "_schedulers", ()) if is_torchs else ()
    return [kind.__name__ if is_torchs else "", [described(each) for each in inside]]


def advanced(
    scheduler: Any, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], count: int
) -> SchedulerSnapshot | None:
    """Return a scheduler's state at a count, and the parameter groups that it sets; None if not torch's or on an error.

    The scheduler is not changed: ``state`` and ``groups`` are those before.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.8)
        >>> scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        >>> then = advanced(scheduler, scheduler.state_dict(), optimizer.param_groups, count=4)
        >>> then.state["last_epoch"], then.groups[0]["lr"]
        (4, 0.2)
    """
    optimizer = Optimizer([{**group, "params": [torch.zeros(1)]} for group in _bare(groups)], {})
    try:
        made = _made(scheduler, state, optimizer)
        if made is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer does not step here
            StepCounts().reach(made, count, made.step)
    except Exception:  # a function of the user may raise anything
        return None
    return SchedulerSnapshot(made.state_dict(), _bare(optimizer.param_groups))


def _bare(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    # A tensor rate is copied: schedulers change it in place.
    return [{name: _own(value) for name, value in group.items() if name != "params"} for group in groups]


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def count_in(state: Mapping[str, Any]) -> int:
    while "last_epoch" not in state:
        inside = state.get("_schedulers")
        if not inside:
            return -1
        state = inside[0]
    return int(state["last_epoch"])


def caught_up(
    checkpoint: dict[str, Any],
    schedulers: Sequence[Any],
    optimizers: Sequence[Optimizer],
    counts: Sequence[Counts],
    earlier: Mapping[Any, SchedulerSnapshot | None],
) -> list[Counts]:
    """Set the schedulers in a checkpoint, in place, to its moment, as if they had kept pace; return their counts in it.

    The parameter groups that they set follow. A scheduler that cannot be stepped here, as of a class outside torch,
    keeps its state and counts.

    ``counts`` are each scheduler's present and target count, an empty tuple for one that counts no steps; from
    ``earlier`` states those beyond their targets start again.
    """
    states, saved = checkpoint.get("lr_schedulers", ()), checkpoint.get("optimizer_states", ())
    if len(states) != len(counts) or len(saved) != len(optimizers):
        return list(counts)
    found = []
    of_each = Counter(id(scheduler.optimizer) for scheduler in schedulers)
    for number, (scheduler, count) in enumerate(zip(schedulers, counts, strict=True)):
        groups = [each for own, each in zip(optimizers, saved, strict=True) if own is scheduler.optimizer]
        then = None
        if groups and count and count[0] < count[1]:
            before = groups[0]["param_groups"]
            then = advanced(scheduler, states[number], before, count[1])
        elif groups and count and count[0] > count[1] and of_each[id(scheduler.optimizer)] == 1:
            then = _returned(scheduler, earlier.get(scheduler), groups[0]["param_groups"], *count)
        if then is not None:
            states[number] = then.state
            groups[0]["param_groups"] = [
                {**own, **theirs} for own, theirs in zip(groups[0]["param_groups"], then.groups, strict=True)
            ]
        found.append(count if then is None else (count[1], count[1]))
    return found


def _returned(
    scheduler: Any, earlier: SchedulerSnapshot | None, groups: Sequence[Mapping[str, Any]], now: int, then: int
) -> SchedulerSnapshot | None:
    """Return a scheduler's state at a count between an earlier state and now.

    Return None if its own steps since do not explain its parameter groups.
    """
    if earlier is None or count_in(earlier.state) > then:
        return None
    again = advanced(scheduler, *earlier, now)
    if again is None or again.groups != _bare(groups):
        return None
    return advanced(scheduler, *earlier, then)


def _made(scheduler: Any, state: Mapping[str, Any], optimizer: Optimizer) -> Any:
    name, inside = described(scheduler)
    if not name:
        return None
    made: Any = object.__new__(getattr(lr_scheduler, name))
    made.optimizer = optimizer
    if name == "CyclicLR":
        made._scale_fn_custom = None
    if hasattr(scheduler, "lr_lambdas"):
        made.lr_lambdas = list(scheduler.lr_lambdas)
    if inside:
        made._schedulers = [
            _made(each, its, optimizer) for each, its in zip(scheduler._schedulers, state["_schedulers"], strict=True)
        ]
        if None in made._schedulers:
            return None
    made.load_state_dict({**state})
    return made
