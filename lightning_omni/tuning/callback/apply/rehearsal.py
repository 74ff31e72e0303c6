"""A rehearsal of schedules on copies, which shows whether they keep to rates that are scaled.

`Hyperparameters.scale` knows the names under which the schedulers of torch store rates. A class of the user's own may
keep its peak under another name, and then overwrites a scaled rate with the unscaled one at its next step.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_omni.errors import ConfigurationError

_REHEARSED_STEPS = 1000
_REHEARSED_FACTOR = 0.5
_RATE_TOLERANCE = 0.01
"""The largest deviation from the scaled rate, as a fraction of the highest one: a warm-up may begin at a tiny rate."""


def check_scaling(
    optimizer: Optimizer, schedulers: Sequence[Any], held: Sequence[Any], scale: Callable[[Any, Any, float], None]
) -> None:
    """Check that the learning rates of schedulers that are not torch's are those that `scale` sets.

    Copies of the schedulers are stepped, so that the run's own do not change.

    Args:
        optimizer: the optimizer whose rates they set.
        schedulers: the schedulers of its rates.
        held: these, and those that they hold.
        scale: multiplies the rates of an optimizer and of its schedulers.

    Raises:
        ConfigurationError: the rates are others, or the schedulers cannot be copied and stepped.
    """
    foreign = sorted({type(each).__name__ for each in held if not type(each).__module__.startswith("torch.")})
    if not foreign:
        return
    names = " and ".join(foreign)
    remedy = (
        "compute the rates from base_lrs, as the schedulers of torch do, or use those (a SequentialLR of LinearLR and"
        " CosineAnnealingLR, say)"
    )
    try:
        plain, scaled = (_Rehearsal(optimizer, schedulers, held) for _ in range(2))
        scale(scaled.optimizer, scaled.schedulers, _REHEARSED_FACTOR)
        plain.step()
        scaled.step()
    except Exception as error:  # a class of the user's own may raise anything
        raise ConfigurationError(
            f"{names} cannot be stepped on a copy to learn whether its schedule follows another learning rate"
            f" ({type(error).__name__}: {error}); {remedy}"
        ) from error
    if not plain.is_like(scaled):
        raise ConfigurationError(
            f"the schedule of {names} does not follow a learning rate that is chosen, because it keeps a rate of its"
            f" own under another name than base_lrs; {remedy}"
        )


class _Rehearsal:
    """Copies of schedulers, with an optimizer that has the rates of theirs, but not its parameters."""

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any], held: Sequence[Any]) -> None:
        groups = [{name: each for name, each in group.items() if name != "params"} for group in optimizer.param_groups]
        self.optimizer = Optimizer(
            [{**group, "params": [torch.zeros(1)]} for group in copy.deepcopy(groups)],
            copy.deepcopy(optimizer.defaults),
        )
        memo: dict[int, Any] = {id(optimizer): self.optimizer}
        for each in held:
            for value in vars(each).values():
                if isinstance(value, Optimizer):
                    memo[id(value)] = self.optimizer
                elif isinstance(value, Module):
                    memo[id(value)] = value  # it may be large, and a schedule only reads it
        self.schedulers = copy.deepcopy(list(schedulers), memo)
        self._rates: list[list[float]] = []

    def step(self) -> None:
        """Step the schedulers, and note the rates.

        Raises:
            Exception: whatever their first step raises. A later one may be beyond the end of the schedule.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimizer has stepped
            try:
                for _ in range(_REHEARSED_STEPS):
                    self._step_once()
            except Exception:
                if not self._rates:
                    raise

    def _step_once(self) -> None:
        for each in self.schedulers:
            each.step(*[1.0] * isinstance(each, ReduceLROnPlateau))
        self._rates.append([float(group["lr"]) for group in self.optimizer.param_groups])

    def is_like(self, scaled: _Rehearsal) -> bool:
        """Return whether the rates of another rehearsal are these times the factor."""
        highest = 0.0
        for mine, theirs in zip(self._rates, scaled._rates, strict=False):
            highest = max(highest, *map(abs, mine))
            for rate, other in zip(mine, theirs, strict=True):
                if not abs(other - _REHEARSED_FACTOR * rate) <= _RATE_TOLERANCE * _REHEARSED_FACTOR * highest:
                    return False
        return True
