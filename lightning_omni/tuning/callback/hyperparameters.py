"""The learning rate and momentum of an optimizer, with the schedulers that change them."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.model.server_optimizer import set_hyperparameter
from lightning_omni.tuning.model.forecast import Scaling

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


_REHEARSED_STEPS = 1000
_REHEARSED_FACTOR = 0.5
_RATE_TOLERANCE = 0.01
"""The largest deviation from the scaled rate, as a fraction of the highest one: a warm-up may begin at a tiny rate."""


_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min")
_RATES_OF_PLATEAUS = ("default_min_lr", "eps")


class Hyperparameters:
    """The learning rate and momentum of one optimizer, which `OmniTuner` tunes.

    The learning rate is that of the first parameter group at the peak of its schedule; those of other groups and of
    schedulers change in proportion.

    Raises:
        ConfigurationError: the optimizer has no weights (``configure_optimizers`` returned None), no learning rate
            (Adafactor, if it finds its own), or one of 0.
    """

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any] = ()) -> None:
        self._optimizer = optimizer
        self._given = list(schedulers)
        self._schedulers = _flat(schedulers)
        if not optimizer.param_groups:
            raise ConfigurationError("configure_optimizers returns no optimizer, so that nothing is trained")
        first = optimizer.param_groups[0]
        if any(group.get("lr") is None for group in optimizer.param_groups):
            raise ConfigurationError(f"{type(optimizer).__name__} has no learning rate that could be chosen; pass lr=")
        if not self.lr > 0:
            raise ConfigurationError(f"lr={self.lr}: learning rates near it are searched, so pass one above 0")
        self._has_betas = "betas" in first
        self.has_momentum = self._has_betas or "momentum" in first
        self._is_momentum_scheduled = any(getattr(each, "cycle_momentum", False) for each in self._schedulers)

    @classmethod
    def of(cls, trainer: Trainer) -> Hyperparameters:
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(f"it needs one optimizer, and there are {len(trainer.optimizers)}")
        return cls(trainer.optimizers[0], [config.scheduler for config in trainer.lr_scheduler_configs])

    @property
    def scaling(self) -> Scaling:
        return Scaling(is_adaptive=not isinstance(self._optimizer, SGD))

    @property
    def is_momentum_free(self) -> bool:
        """Return whether momentum can be chosen: all parameter groups share one, and no schedule changes it."""
        is_common = len(set(map(self._momentum_of, self._optimizer.param_groups))) == 1
        return self.has_momentum and is_common and not self._is_momentum_scheduled

    @property
    def lr(self) -> float:
        group = self._optimizer.param_groups[0]
        peaks = [vars(each)["max_lrs"][0] for each in self._schedulers if "max_lrs" in vars(each)]
        # The groups of a CyclicLR hold only the lowest rates.
        return max(map(float, (group.get("max_lr", group.get("initial_lr", group["lr"])), *peaks)))

    @property
    def momentum(self) -> float:
        """Return the momentum, or β1; 0.0 without one."""
        return self._momentum_of(self._optimizer.param_groups[0])

    def _momentum_of(self, group: dict[str, Any]) -> float:
        return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))

    def set_momentum(self, momentum: float) -> None:
        """Set the momentum (or β1) of all parameter groups, unless a scheduler changes it or it is set already."""
        if not self.has_momentum or self._is_momentum_scheduled or momentum == self.momentum:
            return
        if not self._has_betas and momentum == 0:  # torch does not follow the buffers of one group from here on
            for values in dict.values(self._optimizer.state):
                if isinstance(buffer := values.get("momentum_buffer"), Tensor):
                    buffer.zero_()
        for group in self._optimizer.param_groups:
            if "betas" in group:
                first, *others = group["betas"]
                group["betas"] = (torch.full_like(first, momentum) if isinstance(first, Tensor) else momentum, *others)
            elif "momentum" in group:
                group["momentum"] = momentum

    def make_default(self) -> None:
        """Give the present momentum to parameter groups that are added later, as in finetuning."""
        if self.is_momentum_free:
            name = "betas" if self._has_betas else "momentum"
            getattr(self._optimizer, "defaults", {})[name] = self._optimizer.param_groups[0][name]

    def scale(self, factor: float) -> None:
        """Multiply all rates for good, including those that schedulers store."""
        if factor == 1.0:
            return
        for name in _RATES:
            groups = [group for group in self._optimizer.param_groups if name in group]
            _own(groups, name)
            for group in groups:
                set_hyperparameter(group, name, _times(group[name], factor))
        for scheduler in self._schedulers:
            for name in (*_RATES_OF_SCHEDULERS, *_RATES_OF_PLATEAUS * isinstance(scheduler, ReduceLROnPlateau)):
                value = vars(scheduler).get(name)
                if isinstance(value, list):
                    setattr(scheduler, name, [_times(each, factor) for each in value])
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    setattr(scheduler, name, _times(value, factor))

    def check_schedules(self) -> None:
        """Check that the schedules follow `scale`, on copies of schedulers that are not torch's.

        Raises:
            ConfigurationError: their rates are others than those that `scale` sets, or they cannot be copied and
                stepped.
        """
        kinds = {type(each) for each in self._schedulers}
        foreign = sorted(each.__name__ for each in kinds if not each.__module__.startswith("torch."))
        if not foreign:
            return
        names = " and ".join(foreign)
        remedy = (
            "compute the rates from base_lrs, as the schedulers of torch do, or use those (a SequentialLR of LinearLR"
            " and CosineAnnealingLR, say)"
        )
        try:
            plain, scaled = map(self._rehearsed, (1.0, _REHEARSED_FACTOR))
        except Exception as error:  # a class of the user's own may raise anything
            raise ConfigurationError(
                f"{names} cannot be stepped on a copy to learn whether its schedule follows another learning rate"
                f" ({type(error).__name__}: {error}); {remedy}"
            ) from error
        steps = min(len(plain), len(scaled))
        highest = np.maximum.accumulate(np.abs(plain[:steps]).max(axis=1, keepdims=True))
        if not (np.abs(scaled[:steps] / _REHEARSED_FACTOR - plain[:steps]) <= _RATE_TOLERANCE * highest).all():
            raise ConfigurationError(
                f"the schedule of {names} does not follow a learning rate that is chosen, because it keeps a rate of"
                f" its own under another name than base_lrs; {remedy}"
            )

    def _rehearsed(self, factor: float) -> np.ndarray[Any, Any]:
        """Return the scaled rates after each step of copied schedulers, shape (steps, parameter groups).

        An error of the first step is raised; a later one may be beyond the end of the schedule.
        """
        own = self._optimizer
        groups = [{name: each for name, each in group.items() if name != "params"} for group in own.param_groups]
        copied = Optimizer(
            [{**group, "params": [torch.zeros(1)]} for group in copy.deepcopy(groups)],
            copy.deepcopy(own.defaults),
        )
        memo: dict[int, Any] = {id(own): copied}
        for value in itertools.chain.from_iterable(vars(each).values() for each in self._schedulers):
            if isinstance(value, Optimizer):
                memo[id(value)] = copied
            elif isinstance(value, Module):
                memo[id(value)] = value  # it may be large, and a schedule only reads it
        copies, rates = copy.deepcopy(self._given, memo), list[list[float]]()
        Hyperparameters(copied, copies).scale(factor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimizer has stepped
            try:
                for _ in range(_REHEARSED_STEPS):
                    for each in copies:
                        each.step(*[1.0] * isinstance(each, ReduceLROnPlateau))
                    rates.append([float(group["lr"]) for group in copied.param_groups])
            except Exception:
                if not rates:
                    raise
        return np.array(rates)


def _times(value: Any, factor: float) -> float:
    """Return a product, without rounding errors if it has few digits: the user's own rate is restored exactly.

    Example:
        >>> 0.05 * 1.3 * (1 / 1.3), _times(0.05 * 1.3, 1 / 1.3)
        (0.049999999999999996, 0.05)
    """
    product = float(value) * factor
    short = float(f"{product:.12g}")
    return short if math.isclose(product, short, rel_tol=1e-15) else product


def _flat(schedulers: Iterable[Any]) -> list[Any]:
    """Return schedulers, and those that they hold under any name, each once."""
    found: dict[int, Any] = {}
    left = list(schedulers)
    while left:
        each = left.pop()
        if id(each) not in found:
            found[id(each)] = each
            for held in vars(each).values():
                inside = held.tolist() if isinstance(held, np.ndarray) else held
                inside = inside if isinstance(inside, (list, tuple)) else [inside]
                left += [one for one in inside if isinstance(one, LRScheduler)]
    return list(found.values())


def _own(groups: Sequence[dict[str, Any]], name: str) -> None:
    seen: set[int] = set()
    for group in groups:
        value = group[name]
        if isinstance(value, Tensor) and id(value) in seen:
            group[name] = value.clone()
        seen.add(id(value))
