"""The submodule that stays at the server (``merged=``): which it is, what it cannot do, and its head in this fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_omni.errors import UnsupportedError
from lightning_omni.methods.head import check_mergeable
from lightning_omni.optimizer import World
from lightning_omni.optimizer.head import RemoteHead

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class Merged:
    """A merged head, if there is one.

    Args:
        name: of the submodule; None if nothing is merged.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self._head: RemoteHead | None = None

    def __bool__(self) -> bool:
        return self.name is not None

    def parameters(self, module: Module) -> list[Parameter]:
        """Its parameters; none if nothing is merged.

        Raises:
            ConfigurationError: that submodule cannot be merged.
        """
        if self.name is None:
            return []
        if self._head is None:
            check_mergeable(self.name, module)
        return list(module.get_submodule(self.name).parameters())

    def attach(self, world: World, module: Module, optimizers: Sequence[Optimizer], trainer: Trainer) -> None:
        """The world takes it in; its gradients are clipped as the trainer says."""
        if self.name is None:
            return
        self._head = world.attach_head(self.name, module, optimizers)
        side = self._head.side
        side.clip = float(trainer.gradient_clip_val or 0.0)
        how = trainer.gradient_clip_algorithm
        side.clip_algorithm = "value" if how is not None and how.value == "value" else "norm"

    def step_done(self) -> None:
        """What was done with it since the last step is over."""
        if self._head is not None:
            self._head.step_done()

    def forget(self) -> None:
        """The fit is over."""
        self._head = None

    def check(self, trainer: Trainer) -> None:
        """Raises `UnsupportedError` for what a head that is stepped with the backward pass cannot do."""
        if self.name is None:
            return
        refused = f"merged={self.name!r}: the head is stepped at the server as soon as its gradients come"
        if trainer.accumulate_grad_batches != 1:
            raise UnsupportedError(
                f"{refused}, and cannot wait for accumulate_grad_batches={trainer.accumulate_grad_batches}; use larger"
                " batches, or merge nothing"
            )
        if not trainer.lightning_module.automatic_optimization:
            raise UnsupportedError(f"{refused}, and not when training_step says so; use automatic optimization")
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise UnsupportedError(
                f"{refused}, before a loss scaler could undo its scaling; use precision='bf16-mixed'"
            )
