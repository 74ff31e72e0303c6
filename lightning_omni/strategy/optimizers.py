"""The user's optimizers in a fit with groups: proxies whose step is an exchange, and checks of what they train.

DDP reads which parameters are trainable only when it wraps the module. Gradients of those trained later are not
averaged, without a warning: `Trainable` notices them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_omni.errors import UnsupportedError
from lightning_omni.methods.model.head import check_mergeable
from lightning_omni.methods.model.server_optimizer import held_by
from lightning_omni.runtime import OmniOptimizer, World, names_of
from lightning_omni.runtime.model.merged_head import RemoteHead
from lightning_omni.runtime.model.wrapping import ranks_elsewhere
from lightning_omni.strategy.lightning_internals.callbacks import callbacks_of
from lightning_omni.strategy.lightning_internals.loops import ignore_missing_step

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class Proxies:
    """The `OmniOptimizer` of each of the user's optimizers, and a guard against the user's own steps."""

    def __init__(self) -> None:
        self._of: dict[int, OmniOptimizer] = {}
        self._world: World | None = None
        self._module: Module | None = None
        self._hook: Any = None

    def __bool__(self) -> bool:
        return bool(self._of)

    def attach(
        self, world: World, module: Module, optimizers: Sequence[Optimizer], merged: MergedSubmodule, trainer: Trainer
    ) -> None:
        world.detach_all()
        self._world, self._module = world, module
        left_out = set(merged.parameters(module))
        names = partial(names_of, module)
        self._of = {id(each): OmniOptimizer(each, world, names, left_out) for each in optimizers}
        merged.attach(world, module, optimizers, trainer)

    def are_of(self, optimizers: Sequence[Optimizer]) -> bool:
        return {id(each) for each in optimizers} == set(self._of)

    def of(self, optimizer: Optimizer) -> OmniOptimizer:
        if id(optimizer) not in self._of:
            raise UnsupportedError(
                "strategy.optimizers was changed inside an epoch, while several groups train: change it at an epoch's"
                " start or end (on_train_epoch_start, say), where all groups hear of it, or use groups=1"
            )
        return self._of[id(optimizer)]

    # --- Steps of the user's own -------------------------------------------------------------------------------------

    def guard(self, optimizers: Sequence[Optimizer]) -> None:
        """Reject ``optimizer.step()`` outside exchanges, which would change one rank's weights, until `unguard`.

        While groups train, this includes optimizers outside the Trainer that hold weights of the module.
        """
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._refuse)
        for optimizer in optimizers:
            ignore_missing_step(optimizer)

    def unguard(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _refuse(self, optimizer: Optimizer, *_: Any) -> None:
        world, module = self._world, self._module
        assert world is not None
        assert module is not None
        if world.executor.is_stepping:
            return
        if id(optimizer) in self._of:
            raise UnsupportedError(
                "a raw optimizer.step() would move this rank's weights behind the parameter server's back; take the"
                " optimizer from self.optimizers() (with use_pl_optimizer=True, its default), or use groups=1"
            )
        names = names_of(module) if world.is_computing else {}
        for parameter in held_by(optimizer):
            if parameter in names:
                self._refuse_step(optimizer, names[parameter])

    def _refuse_step(self, optimizer: Optimizer, name: str) -> NoReturn:
        its = type(optimizer).__name__
        for own in (proxy.optimizer for proxy in self._of.values()):
            if any(each is optimizer for each in vars(own).values()):
                outer = type(own).__name__
                raise UnsupportedError(
                    f"{its}.step() would move {name} outside of step() of the {outer} that holds this {its}, and only"
                    f" a step of the {outer} is one of the group's: call its step(closure) with a closure that computes"
                    " loss and gradients, or use groups=1"
                )
        raise UnsupportedError(
            f"{its}.step() would move {name}, and configure_optimizers has not returned that optimizer: each group"
            " would train weights of its own, of which rank 0's are kept; return it from configure_optimizers and take"
            " it from self.optimizers(), keep what it trains out of the LightningModule, or use groups=1"
        )


class MergedSubmodule:
    """The submodule that stays at the server (``merged=``), called a merged head, if any."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self._head: RemoteHead | None = None

    def __bool__(self) -> bool:
        return self.name is not None

    def parameters(self, module: Module) -> list[Parameter]:
        if self.name is None:
            return []
        if self._head is None:
            check_mergeable(self.name, module)
        return list(module.get_submodule(self.name).parameters())

    def attach(self, world: World, module: Module, optimizers: Sequence[Optimizer], trainer: Trainer) -> None:
        if self.name is None:
            return
        self._head = world.attach_head(self.name, module, optimizers)
        side = self._head.side
        side.clip = float(trainer.gradient_clip_val or 0.0)
        side.clip_algorithm = "value" if trainer.gradient_clip_algorithm == "value" else "norm"

    def step_done(self) -> None:
        if self._head is not None:
            self._head.step_done()

    def check(self, trainer: Trainer) -> None:
        """Reject features that do not work with a head that is stepped in the backward pass."""
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


_UNUSED = "Expected to have finished reduction in the prior iteration"
"""The error of DDP's forward pass if parameters got no gradient in the backward pass before it."""
_WHICH = re.compile(r"Parameters? (?:indices )?which did not receive grad for rank [^\n]*")
"""The part of the error with the parameters: indices, or names with TORCH_DISTRIBUTED_DEBUG=DETAIL."""


def explain_unused(error: BaseException) -> None:
    """Rewrite an error of DDP with this strategy's remedy, before Lightning adds that of another."""
    error.args = tuple(_explained(arg) if isinstance(arg, str) and _UNUSED in arg else arg for arg in error.args)


def _explained(text: str) -> str:
    which = f" ({found[0]})" if (found := _WHICH.search(text)) else ""
    return (
        f"parameters of the LightningModule had no part in the loss that training_step returned{which}, and"
        " DistributedDataParallel waits for the gradient of each. If that is intended, pass"
        " OmniStrategy(find_unused_parameters=True); else take them out of the optimizer and set requires_grad=False"
    )


class Trainable:
    """The parameters when the module was wrapped, and which were trainable."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._has_warned = False
        self._flags: list[tuple[str, Parameter, bool]] = []
        self._frozen: list[tuple[str, Parameter]] = []
        self._held: list[int] = []
        self._known: set[Parameter] = set()

    def remember(self, module: Module) -> None:
        self._flags = [(name, each, each.requires_grad) for name, each in module.named_parameters()]
        self._frozen = [(name, each) for name, each, flag in self._flags if not flag]
        self._known = {parameter for _, parameter, _ in self._flags}
        self._held = []

    def has_changed(self, optimizers: Iterable[Optimizer], may_be_unused: bool) -> bool:
        """Return whether the module must be wrapped again, so that DDP averages exactly the trained parameters.

        With ``may_be_unused`` DDP needs no gradient of one that is frozen now; a GAN's step may unfreeze it.
        """
        changed = (each for _, each, flag in self._flags if each.requires_grad is not flag)
        return any(each.requires_grad or not may_be_unused for each in changed) or self._holds_others(optimizers)

    def warn_of_late(self, optimizers: Iterable[Optimizer]) -> None:
        if self._has_warned:
            return
        late = next((name for name, each in self._frozen if each.requires_grad), "")
        if not late and self._holds_others(optimizers):
            late = "that was added to the optimizer"
        if not late:
            return
        self._has_warned = True
        self._warn(
            f"the parameter {late} is trained now, but was frozen or missing when DistributedDataParallel wrapped the"
            " module: DDP does not average its gradient, and every rank trains its own version (with DDPStrategy, too)."
            " Keep it trainable when the module is wrapped and pass find_unused_parameters=True (a callback may freeze"
            " it in on_fit_start, after the wrapping), or pass groups=2 or more: then the module is wrapped again when"
            " parameters are unfrozen"
        )

    def check_in_step(self) -> None:
        for name, each in self._frozen:
            if each.requires_grad and each.grad is not None:
                raise UnsupportedError(
                    f"the parameter {name} was unfrozen inside a training step, where its gradient was not averaged"
                    " over the group: unfreeze it before the batch begins (in on_train_epoch_start or"
                    " on_train_batch_start), or use one rank for each group"
                )

    def _holds_others(self, optimizers: Iterable[Optimizer]) -> bool:
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        held = [id(each) for group in groups for each in group]
        if held == self._held:
            return False
        others = any(each.requires_grad and each not in self._known for group in groups for each in group)
        if not others:
            self._held = held
        return others


def check_wrapped(trainer: Trainer, members: Collection[int]) -> None:
    """Reject a module of the user that would wait for other groups in its forward or backward pass.

    ``members`` are this group's ranks, as torch.distributed numbers them.
    """
    for name, module in _modules(trainer):
        if others := ranks_elsewhere(module, members):
            raise UnsupportedError(
                f"{name} is a {type(module).__name__} whose process group has ranks of other compute groups"
                f" ({', '.join(map(str, sorted(others)))}): groups train different numbers of batches, and would wait"
                " for each other in its collectives; wrap it in on_train_batch_start, where the default process group"
                " is the compute group's, or use groups=1"
            )


def _modules(trainer: Trainer) -> Iterator[tuple[str, Module]]:
    yield from trainer.lightning_module.named_modules()
    for callback in callbacks_of(trainer):
        for attribute, value in vars(callback).items():
            if isinstance(value, Module) and value is not trainer.lightning_module:
                yield from value.named_modules(prefix=f"{type(callback).__name__}.{attribute}")
