"""The optimizers that step in the place of the user's, and the guard that keeps these from stepping by themselves."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_omni.errors import UnsupportedError
from lightning_omni.optimizer import OmniOptimizer, World, names_of
from lightning_omni.strategy import _private
from lightning_omni.strategy.merged import Merged

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class Proxies:
    """An `OmniOptimizer` for each of the user's optimizers, while a fit runs."""

    def __init__(self) -> None:
        self._of: dict[int, OmniOptimizer] = {}
        self._own_steps: dict[Optimizer, Callable[..., Any] | None] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def attach(
        self, world: World, module: Module, optimizers: Sequence[Optimizer], merged: Merged, trainer: Trainer
    ) -> None:
        """The world takes these optimizers in, and nothing but these.

        Args:
            world: this rank's.
            module: the LightningModule.
            optimizers: the user's that hold anything.
            merged: the submodule that stays at the server.
            trainer: says how a merged head's gradients are clipped.
        """
        world.detach_all()
        left_out = set(merged.parameters(module))
        names = partial(names_of, module)
        self._of = {id(each): OmniOptimizer(each, world, names, left_out) for each in optimizers}
        merged.attach(world, module, optimizers, trainer)

    def are_of(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether these are the optimizers that were attached."""
        return {id(each) for each in optimizers} == set(self._of)

    def of(self, optimizer: Optimizer) -> OmniOptimizer:
        """What steps in its place.

        Raises:
            UnsupportedError: it was not attached.
        """
        if id(optimizer) not in self._of:
            raise UnsupportedError(
                "strategy.optimizers was changed inside an epoch, while groups train apart: change it at an epoch's"
                " start or end (on_train_epoch_start, say), where all groups hear of it, or use groups=1"
            )
        return self._of[id(optimizer)]

    def forget(self) -> None:
        """The fit is over."""
        self.unguard()
        self._of = {}

    # --- Steps of the user's own -------------------------------------------------------------------------------------

    def guard(self, optimizers: Sequence[Optimizer]) -> None:
        """Among several groups, a raw ``optimizer.step()`` would move one rank's weights behind the server's back."""
        for optimizer in optimizers:
            if optimizer not in self._own_steps:
                # A scheduler may have put a step of its own on the instance.
                self._own_steps[optimizer] = vars(optimizer).get("step")
                optimizer.step = types.MethodType(_refuse_raw_step, optimizer)  # type: ignore[method-assign]
                _private.ignore_missing_step(optimizer)

    def unguard(self) -> None:
        """The optimizers step by themselves again."""
        for optimizer, own in self._own_steps.items():
            del optimizer.step
            if own is not None:
                optimizer.step = own  # type: ignore[method-assign]
        self._own_steps.clear()


def _refuse_raw_step(self: Optimizer, closure: Any = None) -> Tensor:
    raise UnsupportedError(
        "a raw optimizer.step() would move this rank's weights behind the parameter server's back; take the optimizer"
        " from self.optimizers() (with use_pl_optimizer=True, its default), or use groups=1"
    )


_refuse_raw_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers look for their own mark
