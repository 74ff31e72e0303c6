"""The parameters that DistributedDataParallel averages, and those frozen, unfrozen or added after the wrapping.

DDP reads once, when it wraps the module, which parameters are trainable. It does not average the gradients of
parameters that were frozen then and are trained later: with plain DDP each rank continues with its own gradient,
without a warning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_omni.errors import UnsupportedError

_UNUSED = "Expected to have finished reduction in the prior iteration"
"""The error of DDP's forward pass if parameters got no gradient in the backward pass before it."""
_WHICH = re.compile(r"Parameters? (?:indices )?which did not receive grad for rank [^\n]*")
"""The part of the error with the parameters: indices, or names with TORCH_DISTRIBUTED_DEBUG=DETAIL."""


def explain_unused(error: BaseException) -> None:
    """Rewrite an error of DDP with the remedy for this strategy, before Lightning adds the name of another strategy."""
    error.args = tuple(_explained(arg) if isinstance(arg, str) and _UNUSED in arg else arg for arg in error.args)


def _explained(text: str) -> str:
    which = f" ({found[0]})" if (found := _WHICH.search(text)) else ""
    return (
        f"parameters of the LightningModule had no part in the loss that training_step returned{which}, and"
        " DistributedDataParallel waits for the gradient of each. If that is intended, pass"
        " OmniStrategy(find_unused_parameters=True); else take them out of the optimizer and set requires_grad=False"
    )


class Trainable:
    """The parameters that were trainable when the module was wrapped.

    Args:
        warn: warns the user, on rank 0.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._has_warned = False
        self._flags: list[tuple[str, Parameter, bool]] = []
        self._held = -1
        self._known: set[Parameter] = set()

    def remember(self, module: Module) -> None:
        """Store the trainable parameters when the module is wrapped."""
        self._flags = [(name, each, each.requires_grad) for name, each in module.named_parameters()]
        self._known = {parameter for _, parameter, _ in self._flags}
        self._held = -1

    def has_changed(self, optimizers: Iterable[Optimizer]) -> bool:
        """Return whether the module must be wrapped again, so that DDP averages exactly the trained parameters.

        Optimizers may hold parameters that the module did not have when it was wrapped.
        """
        return any(each.requires_grad is not flag for _, each, flag in self._flags) or self._holds_others(optimizers)

    def warn_of_late(self, optimizers: Iterable[Optimizer]) -> None:
        """Warn once, with one group (which stays plain DDP), that gradients of late parameters are not averaged."""
        if self._has_warned:
            return
        late = next((name for name, each, flag in self._flags if not flag and each.requires_grad), "")
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
        """Reject gradients, in a group's step, of parameters that were unfrozen in this batch: they have no group mean.

        Raises:
            UnsupportedError: there is such a gradient.
        """
        for name, each, flag in self._flags:
            if not flag and each.requires_grad and each.grad is not None:
                raise UnsupportedError(
                    f"the parameter {name} was unfrozen inside a training step, where its gradient was not averaged"
                    " over the group: unfreeze it before the batch begins (in on_train_epoch_start or"
                    " on_train_batch_start), or use one rank for each group"
                )

    def _holds_others(self, optimizers: Iterable[Optimizer]) -> bool:
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        held = sum(map(len, groups))
        if held == self._held:
            return False
        others = any(each.requires_grad and each not in self._known for group in groups for each in group)
        if not others:
            self._held = held
        return others
