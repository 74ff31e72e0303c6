"""The learning rate and momentum of an optimizer, and the rule by which both follow the number of groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import AsyncSGD, Method
from lightning_omni.tuning.model.setting import Scaling, Setting
from lightning_omni.tuning.search import Space

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class Hyperparameters:
    """The learning rate and momentum of one optimizer, which `OmniTuner` tunes.

    The learning rate is the user's own, of the first parameter group at the peak of its schedule. A chosen rate is a
    factor of all rates in the steps of several groups: see `World.rate_factor`.

    Raises:
        ConfigurationError: the optimizer has no weights (``configure_optimizers`` returned None), no learning rate
            (Adafactor, if it finds its own), or none above 0.
    """

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any] = ()) -> None:
        self._optimizer = optimizer
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
        return self._momentum_of(self._optimizer.param_groups[0])

    def _momentum_of(self, group: dict[str, Any]) -> float:
        return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))

    def set_momentum(self, momentum: float) -> None:
        """Set the momentum (or β1) of all parameter groups, unless a scheduler changes it or the first group has it.

        A momentum of 0 clears SGD's buffers.
        """
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
        """Give the present momentum, if `is_momentum_free`, to parameter groups that are added later."""
        if self.is_momentum_free:
            name = "betas" if self._has_betas else "momentum"
            getattr(self._optimizer, "defaults", {})[name] = self._optimizer.param_groups[0][name]


def _flat(schedulers: Iterable[Any]) -> list[Any]:
    """Return schedulers, and those that they hold under any name, as wrappers of other libraries do."""
    found = list(schedulers)
    for each in found:  # which grows meanwhile
        for value in vars(each).values():
            inside = value if isinstance(value, (list, tuple)) else [value]
            found += [one for one in inside if isinstance(one, LRScheduler) and one not in found]
    return found


def explicit_for(total: float, staleness: float) -> float:
    """Return the explicit momentum that reaches a total together with the momentum of geometric staleness.

    Random staleness of this mean (g - 1 for g groups that push one after the other) adds a momentum u = 1 - 1 / (1 +
    staleness), with 1 - total = (1 - m)(1 - u) for the explicit m. So m = 1 - (1 - total)(1 + staleness), or 0 where
    asynchrony alone adds as much or more.

    Example:
        >>> [round(explicit_for(0.9, groups - 1), 2) for groups in (1, 2, 4, 16)]
        [0.9, 0.8, 0.6, 0.0]

    References:
        Mitliagkas et al. 2016, "Asynchrony begets Momentum", Theorem 6.
    """
    return max(0.0, min(total, round(1 - (1 - total) * (1 + staleness), 12)))


def follow_groups(own: Setting, groups: int, method: Method, scaling: Scaling, space: Space) -> Setting:
    """Return the setting whose momentum and learning rate let groups train like one.

    With g groups whose pushes are applied one after the other, the explicit momentum is lowered for the implicit one of
    1 - 1 / g (`explicit_for`). The learning rate moves the weights as far in the time of a batch, which has g updates
    now (`Scaling`). Nothing changes for methods that average the groups, or wait for all of them. Both values
    stay within ``space``. A rate that the server divides by the staleness is multiplied by it. ``own`` is the user's
    setting, of one group.

    Example:
        >>> own = Setting(groups=1, momentum=0.9, lr=0.1)
        >>> for groups in (2, 4, 16):
        ...     print(follow_groups(own, groups, AsyncSGD(), Scaling(), Space(groups=(1,))))
        2 groups, momentum 0.8, lr 0.1
        4 groups, momentum 0.6, lr 0.1
        16 groups, momentum 0, lr 0.0625

    References:
        Zhang et al. 2016, "Staleness-aware Async-SGD", for rates that fall with the staleness.
    """
    updates = method.updates_per_batch(groups)
    momentum = min(max(explicit_for(own.momentum, updates - 1), space.momentum[0]), space.momentum[1])
    lr = scaling.lr(updates, momentum, scaling.step(own))
    if isinstance(method, AsyncSGD) and method.staleness_aware:
        lr *= max(1, updates - 1)  # the server divides it by that
    return replace(own, groups=groups, momentum=momentum, lr=min(max(lr, space.lr[0]), space.lr[1]))
