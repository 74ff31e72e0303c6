"""States of learning-rate schedulers at another moment than their own: where a run is by now, or its weights are.

The recorder says how the schedulers stood when the groups parted, and what the run has trained since, the server knows.
Schedulers of torch are made again from their states, and stepped. What is the user's own is left as it stood; functions
of the user's are called where they are at hand, as in a checkpoint that the recorder saves itself.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer, lr_scheduler

from lightning_omni.strategy.schedulers import StepCounts

Counts = tuple[int, ...]
"""What a scheduler counts, and what it would count if it had kept pace; or nothing."""


class Standing(NamedTuple):
    """A scheduler at some moment of a run.

    Attributes:
        state: as its ``state_dict``.
        groups: of its optimizer, without the parameters, as it has set them.
    """

    state: dict[str, Any]
    groups: list[dict[str, Any]]


def standing(scheduler: Any) -> Standing | None:
    """A scheduler as it is now; None if it is not torch's."""
    if not described(scheduler)[0]:
        return None
    return Standing(_copied(scheduler.state_dict()), _bare(scheduler.optimizer.param_groups))


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a scheduler, without what functions of the user's hold, which may be anything."""
    copied = {name: copy(value) for name, value in state.items() if name not in ("lr_lambdas", "_schedulers")}
    if "lr_lambdas" in state:
        copied["lr_lambdas"] = [None] * len(state["lr_lambdas"])
    if "_schedulers" in state:
        copied["_schedulers"] = [_copied(each) for each in state["_schedulers"]]
    return copied


def described(scheduler: Any) -> list[Any]:
    """The class of a scheduler of torch, and those of the schedulers in it; an empty name for any other.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> described(lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 3)]))
        ['ChainedScheduler', [['StepLR', []]]]
    """
    kind = type(scheduler)
    is_torchs = kind.__module__ == lr_scheduler.__name__ and hasattr(lr_scheduler, kind.__name__)
    if getattr(scheduler, "_scale_fn_custom", None) is not None:  # of a CyclicLR, which the state does not tell
        is_torchs = False
    inside = getattr(scheduler, "_schedulers", ()) if is_torchs else ()
    return [kind.__name__ if is_torchs else "", [described(each) for each in inside]]


def advanced(
    description: Sequence[Any],
    state: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    count: int,
    own: Any = None,
) -> Standing | None:
    """A scheduler's state when it has counted so far, and what it has made of its optimizer's parameter groups.

    Args:
        description: from `described`.
        state: of the scheduler, as it stood.
        groups: of its optimizer, as they stood; the parameters in them do not matter.
        count: what it counts by now.
        own: the scheduler, if it is at hand; it stays as it is.

    Returns:
        None if it is not torch's, or is made of functions of the user's that are not at hand.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.8)
        >>> scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        >>> then = advanced(described(scheduler), scheduler.state_dict(), optimizer.param_groups, count=4)
        >>> then.state["last_epoch"], then.groups[0]["lr"]
        (4, 0.2)
    """
    optimizer = Optimizer([{**group, "params": [torch.zeros(1)]} for group in _bare(groups)], {})
    try:
        scheduler = _made(description, state, optimizer, own)
        if scheduler is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of steps without those of the optimizer
            StepCounts().reach(scheduler, count, scheduler.step)
    except Exception:  # states of other releases of torch may lack anything
        return None
    return Standing(scheduler.state_dict(), _bare(optimizer.param_groups))


def _bare(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups without the parameters. A rate that is a tensor, which schedulers change in place, is copied."""
    return [{name: _own(value) for name, value in group.items() if name != "params"} for group in groups]


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def by_count(description: Sequence[Any], state: Mapping[str, Any], count: int) -> dict[str, Any] | None:
    """A scheduler's state when it has counted so far, if its rate follows from the count alone; otherwise None.

    Its functions are the user's, so that its rate is known again when it is stepped next.
    """
    if description[0] != "LambdaLR":
        return None
    by = count - int(state["last_epoch"])
    return {**state, "last_epoch": count, "_step_count": int(state["_step_count"]) + by}


def count_in(state: Mapping[str, Any]) -> int:
    """How often a scheduler was stepped, as its state says; -1 if that does not."""
    while "last_epoch" not in state:
        inside = state.get("_schedulers")
        if not inside:
            return -1
        state = inside[0]
    return int(state["last_epoch"])


def whole(description: Sequence[Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """A scheduler's state as it was before it was sent: the Counter of a MultiStepLR travels as a dict."""
    inside = zip(description[1], state.get("_schedulers") or (), strict=False)
    more: dict[str, Any] = {"_schedulers": [whole(*each) for each in inside]} if description[1] else {}
    if description[0] == "MultiStepLR":
        more["milestones"] = Counter(state["milestones"])
    return {**state, **more}


def caught_up(
    checkpoint: dict[str, Any],
    schedulers: Sequence[Any],
    optimizers: Sequence[Optimizer],
    counts: Sequence[Counts],
    earlier: Mapping[Any, Standing | None],
) -> list[Counts]:
    """A checkpoint has its schedulers where they would be if they had kept pace until its moment; changed in place.

    Args:
        checkpoint: Lightning's.
        schedulers: of the Trainer.
        optimizers: likewise.
        counts: of each scheduler, what it counts and what it would count; nothing of one that counts no steps.
        earlier: schedulers at a moment before that of the checkpoint, from which those that are past it start again.

    Returns:
        The same for the checkpoint. A scheduler that only the user's module can step is where it was.
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
            then = advanced(described(scheduler), states[number], before, count[1], scheduler)
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
    scheduler: Any, earlier: Standing | None, groups: Sequence[Mapping[str, Any]], now: int, then: int
) -> Standing | None:
    """A scheduler at a moment between an earlier one and now; None if more than its own steps has set its groups.

    Args:
        scheduler: is at hand, and stays as it is.
        earlier: where it stood, if that is known.
        groups: of its optimizer now.
        now: what it counts now ...
        then: ... and at the moment that is wanted.
    """
    if earlier is None or count_in(earlier.state) > then:
        return None
    kinds = described(scheduler)
    again = advanced(kinds, *earlier, now, scheduler)
    if again is None or again.groups != _bare(groups):
        return None
    return advanced(kinds, *earlier, then, scheduler)


def _made(description: Sequence[Any], state: Mapping[str, Any], optimizer: Optimizer, own: Any) -> Any:
    name, inside = description
    has_functions = name in ("LambdaLR", "MultiplicativeLR")  # which are the user's
    if not name or (has_functions and own is None):
        return None
    kind: Any = getattr(lr_scheduler, name, None)
    if not isinstance(kind, type) or not issubclass(kind, lr_scheduler.LRScheduler):
        return None
    scheduler: Any = object.__new__(kind)
    scheduler.optimizer = optimizer
    if name == "CyclicLR":
        scheduler._scale_fn_custom = None
    if has_functions:
        scheduler.lr_lambdas = list(own.lr_lambdas)
    if inside:
        owns = [None] * len(inside) if own is None else own._schedulers
        scheduler._schedulers = [
            _made(each, its, optimizer, one) for each, its, one in zip(inside, state["_schedulers"], owns, strict=True)
        ]
        if None in scheduler._schedulers:
            return None
    scheduler.load_state_dict({**state})
    return scheduler
