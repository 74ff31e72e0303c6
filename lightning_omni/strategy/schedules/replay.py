"""States of learning-rate schedulers at another moment: that of the weights in a checkpoint.

Schedulers of torch are made again from their states, and stepped; functions of the user are called. Schedulers of other
classes are left unchanged.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer, lr_scheduler

from lightning_omni.strategy.schedules.pacing import StepCounts

Counts = tuple[int, ...]
"""A scheduler's count, and the count that it would have if it had kept pace; or an empty tuple."""


class SchedulerSnapshot(NamedTuple):
    """The state of a scheduler at a moment of a run.

    Attributes:
        state: its ``state_dict``.
        groups: the parameter groups of its optimizer, as it has set them, without the parameters.
    """

    state: dict[str, Any]
    groups: list[dict[str, Any]]


def standing(scheduler: Any) -> SchedulerSnapshot | None:
    """Return the present state of a scheduler; None if it is not torch's."""
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
    """Return the class name of a scheduler of torch, and those of the schedulers in it; an empty name for any other.

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
    """Return a scheduler's state at a count, with the parameter groups that it sets on the way there.

    Args:
        scheduler: the scheduler; it is not changed.
        state: state of the scheduler before.
        groups: parameter groups of its optimizer before; the parameters in them do not matter.
        count: the count to reach.

    Returns:
        None if the scheduler is not torch's.

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
    """Return parameter groups without the parameters. A tensor rate is copied: schedulers change it in place."""
    return [{name: _own(value) for name, value in group.items() if name != "params"} for group in groups]


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def count_in(state: Mapping[str, Any]) -> int:
    """Return how often a scheduler was stepped according to its state; -1 if the state has no count."""
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
    """Set the schedulers in a checkpoint to its moment, as if they had kept pace; changed in place.

    Args:
        checkpoint: Lightning's checkpoint.
        schedulers: schedulers of the Trainer.
        optimizers: optimizers of the Trainer.
        counts: each scheduler's present and target count; an empty tuple for one that counts no steps.
        earlier: states of schedulers before that moment, from which those beyond their targets start again.

    Returns:
        The counts in the checkpoint. A scheduler that only the user's module can step keeps its own.
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

    Return None if its own steps since the earlier state do not explain its parameter groups. The scheduler is
    unchanged.
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
