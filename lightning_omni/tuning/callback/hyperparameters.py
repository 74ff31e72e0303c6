"""The learning rate and momentum of an optimizer, with the schedulers that change them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.model.forecast import Scaling

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
