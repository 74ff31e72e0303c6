"""An optimizer's learning rate and momentum, with the schedulers that move them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim import SGD, Optimizer

from lightning_omni.performance.forecast import Scaling, Setting

_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
_RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min")


class Hyperparameters:
    """Reads and sets what `OmniTuner` tunes of one optimizer.

    A learning rate here is that of the first parameter group where its schedule is highest (a warm-up has hardly begun
    when a search does); the rates of other groups and of the schedulers go with it in proportion.

    Args:
        optimizer: the optimizer.
        schedulers: that move its rates.
    """

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any] = ()) -> None:
        self._optimizer, self._schedulers = optimizer, list(_flat(schedulers))
        first = optimizer.param_groups[0]
        self._has_betas = "betas" in first
        self.has_momentum = self._has_betas or "momentum" in first
        self.is_momentum_scheduled = any(getattr(each, "cycle_momentum", False) for each in self._schedulers)

    @property
    def scaling(self) -> Scaling:
        """How learning rates go with batch and momentum."""
        return Scaling(is_adaptive=not isinstance(self._optimizer, SGD))

    @property
    def is_momentum_free(self) -> bool:
        """Whether momentum can be chosen: there is one, and no schedule moves it."""
        return self.has_momentum and not self.is_momentum_scheduled

    @property
    def lr(self) -> float:
        """The learning rate where its schedule is highest."""
        return _number(self._rates_of(self._optimizer.param_groups[0]))

    @property
    def lr_now(self) -> float:
        """The learning rate at this moment."""
        return _number([self._optimizer.param_groups[0]["lr"]])

    @property
    def momentum(self) -> float:
        """Momentum, or β1; 0.0 if there is none."""
        first = self._optimizer.param_groups[0]
        if self._has_betas:
            return float(first["betas"][0])
        return float(first.get("momentum", 0.0))

    def set(self, setting: Setting, lr: float) -> None:
        """For a probe: rates as they will be where the schedule is highest, and the momentum.

        Args:
            setting: what is to be.
            lr: what the first group's rate was when the search began; see `lr`.
        """
        self.set_momentum(setting.momentum)
        highest = [_number(self._rates_of(group)) for group in self._optimizer.param_groups]
        for group, rate in zip(self._optimizer.param_groups, highest, strict=True):
            _set(group, "lr", rate * setting.lr / lr)

    def set_momentum(self, momentum: float) -> None:
        """Sets the momentum (or β1) of all parameter groups, where it can be chosen."""
        for group in self._optimizer.param_groups if self.is_momentum_free else ():
            if self._has_betas:
                group["betas"] = (momentum, *group["betas"][1:])
            else:
                group["momentum"] = momentum

    def scale(self, factor: float) -> None:
        """For good: all rates, those that schedulers remember included. Schedules keep their shape."""
        if factor == 1.0:
            return
        for group in self._optimizer.param_groups:
            for name in _RATES:
                if name in group:
                    _set(group, name, group[name] * factor)
        for scheduler in self._schedulers:
            for name in _RATES_OF_SCHEDULERS:
                value = vars(scheduler).get(name)
                if isinstance(value, list):
                    setattr(scheduler, name, [each * factor for each in value])
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    setattr(scheduler, name, value * factor)

    @staticmethod
    def _rates_of(group: dict[str, Any]) -> list[Any]:
        return [group["max_lr"] if "max_lr" in group else group.get("initial_lr", group["lr"])]


def _flat(schedulers: Iterable[Any]) -> Iterable[Any]:
    """Schedulers, and those inside them."""
    for each in schedulers:
        yield each
        yield from _flat(getattr(each, "_schedulers", ()))


def _number(values: list[Any]) -> float:
    return float(values[0])


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    """A rate may be a tensor, where a compiled optimizer reads it."""
    if hasattr(group[name], "fill_"):
        group[name].fill_(float(value))
    else:
        group[name] = float(value)
