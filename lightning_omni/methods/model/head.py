"""A merged head: the tail of a network at its one owner, where a group's whole batch passes through it at once.

Hadjis et al. 2016 (Omnivore), "merged fully connected" servers: forward, backward and update of one group's batch
happen under a lock, so that the head's weights are never stale and, in training, never travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.methods.model.modules import check_describable, describe_module, tensors_of, with_tensors
from lightning_omni.methods.model.server_optimizer import held_by


@dataclass(frozen=True)
class HeadBackwardPass:
    """The gradients of a backward pass through the head.

    Attributes:
        inputs: None for inputs that are neither floating-point nor complex, or took no part.
        parameters: None for one that is frozen or took no part.
    """

    inputs: list[Tensor | None]
    parameters: list[Tensor | None]


class MergedHead:
    """A submodule at its owner. An exclusive access is `forward`, then `backward` or `abandon`.

    Args:
        module: the submodule, over ``parameters``.
        parameters: its parameters, in the order of gradients; the caller steps them.
        seed: seed of its forward pass (dropout).
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, Parameter], seed: int = 0) -> None:
        self._module = module
        self._ordered = list(parameters.values())
        self._random = torch.Generator().manual_seed(seed).get_state()
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._modes: bool | Sequence[bool] = True

    def forward(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        training: bool | Sequence[bool] = True,
        autocast: torch.dtype | None = None,
        exclusive: bool = True,
    ) -> Any:
        """Return the head's output.

        The arguments are trees of tensors and plain values; ``training`` is the mode of all submodules, or of each, as
        from `modes_of`; ``autocast`` is the dtype of automatic mixed precision. Only if ``exclusive``, `backward` may
        follow.

        Raises:
            UnsupportedError: the pass changed a buffer of the head, or `tensors_of` rejects an argument or the output.
        """
        tree = (tuple(args), dict(kwargs))
        inputs = [tensor.detach() for tensor in tensors_of(tree)]
        if exclusive:
            inputs = [tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex()) for tensor in inputs]
        self._set_modes(training)
        before = self._buffer_versions()
        with torch.set_grad_enabled(exclusive), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            # Copies, because the memory is the caller's, and layers may work in place, which torch forbids on leaves.
            positional, named = with_tensors(tree, [tensor.clone() for tensor in inputs])
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                output = self._module(*positional, **named)
            self._random = torch.get_rng_state()
        self._check_buffers(before)
        if exclusive:
            self._inputs, self._outputs, self._modes = inputs, tensors_of(output), training
        return with_tensors(output, [tensor.detach() for tensor in tensors_of(output)])

    def backward(
        self, gradients: Sequence[Tensor | None], scale: float = 1.0, copies: bool = False
    ) -> HeadBackwardPass:
        """End the access with a gradient for each tensor of the output; None where it took no part in the loss.

        ``scale`` multiplies only the gradients of the parameters; pass ``copies`` if these will be written.
        """
        inputs, outputs = self._inputs, self._outputs
        self.abandon()
        self._set_modes(self._modes)  # evaluations in between change them; recomputation needs those of `forward`
        pairs = [
            (output, gradient.to(output.dtype))
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        asked = [tensor for tensor in inputs if tensor.requires_grad]
        wanted = [*asked, *(parameter for parameter in self._ordered if parameter.requires_grad)]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            ends, cotangents = zip(*pairs, strict=True)
            found = torch.autograd.grad(ends, wanted, cotangents, allow_unused=True)
        given = iter(found)
        into = [next(given) if tensor.requires_grad else None for tensor in inputs]
        own = [next(given) if parameter.requires_grad else None for parameter in self._ordered]
        # Copies: autograd may return one tensor for several parameters, or an expanded one, and `clip` writes to them.
        if copies or scale != 1.0:
            own = [None if gradient is None else gradient * scale for gradient in own]
        return HeadBackwardPass(into, own)

    def abandon(self) -> None:
        self._inputs, self._outputs = [], []

    def _set_modes(self, modes: bool | Sequence[bool]) -> None:
        modules = [module for _, module in self._module.named_modules(remove_duplicate=False)]
        each = [modes] * len(modules) if isinstance(modes, bool) else modes
        for module, mode in zip(modules, each, strict=True):
            module.training = mode

    def _buffer_versions(self) -> list[tuple[str, int, int]]:
        return [(name, id(buffer), buffer._version) for name, buffer in self._module.named_buffers()]

    def _check_buffers(self, before: Sequence[tuple[str, int, int]]) -> None:
        changed = {name for name, *_ in set(before).symmetric_difference(self._buffer_versions())}
        if changed:
            raise UnsupportedError(
                f"the merged head's buffer {sorted(changed)[0]} was changed by its forward pass; groups evaluate with"
                " buffers of their own, which would not hear of it: leave what keeps such statistics (BatchNorm, say)"
                " outside the merged submodule"
            )


def modes_of(module: nn.Module) -> tuple[bool, ...]:
    """Return whether each submodule is in training mode, itself first; shared ones count each time."""
    return tuple(each.training for _, each in module.named_modules(remove_duplicate=False))


class HeadConnection(Protocol):
    """A connection to a merged head."""

    def bring(self, tree: Any, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the output's tensors for ``tree`` (arguments, keyword arguments) with these tensors in it."""

    def take_back(
        self, gradients: Sequence[Tensor | None], inputs: Sequence[tuple[torch.Size, torch.dtype]]
    ) -> Sequence[Tensor | None]:
        """Return the inputs' gradients for the output's; None for tensors that took no part."""


def pass_through(passage: HeadConnection, tree: Any, anchor: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the tensors of a merged head's output for ``tree`` (arguments, keyword arguments), with autograd.

    With `torch.autograd.grad`, an ``anchor`` (a number that requires a gradient) among its inputs lets it reach a head
    whose arguments depend on no weight.
    """
    # An anchor makes autograd call `_Pass.backward` even if no input requires a gradient.
    anchor = torch.zeros((), requires_grad=True) if anchor is None else anchor
    outputs: tuple[Tensor, ...] = _Pass.apply(  # type: ignore[no-untyped-call, unused-ignore]  # until torch 2.14
        passage, tree, anchor, *tensors_of(tree)
    )
    return outputs


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: HeadConnection, tree: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.passage = passage
        ctx.set_materialize_grads(False)
        ctx.inputs = [(tensor.shape, tensor.dtype) for tensor in tensors]
        outputs = tuple(passage.bring(tree, tensors))
        whole = (output for output in outputs if not (output.is_floating_point() or output.is_complex()))
        ctx.mark_non_differentiable(*whole)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return (None, None, None, *ctx.passage.take_back(gradients, ctx.inputs))


def clip(gradients: Sequence[Tensor | None], value: float, algorithm: str) -> None:
    """Clip the gradients of all parameters together, in place, as Lightning does by ``"norm"`` or ``"value"``.

    A ``value`` of 0 clips nothing.
    """
    there = [gradient for gradient in gradients if gradient is not None]
    if not value or not there:
        return
    if algorithm == "value":
        for gradient in there:
            gradient.clamp_(-value, value)
        return
    factor = torch.clamp(value / (get_total_norm(there) + 1e-6), max=1.0)
    for gradient in there:
        gradient.mul_(factor)


def check_mergeable(name: str, model: nn.Module) -> nn.Module:
    """Return the submodule of this name; raise `ConfigurationError` if it cannot be merged."""
    modules = dict(model.named_modules())
    if not isinstance(name, str) or name not in modules or not name:
        known = [child for child, module in modules.items() if child and any(True for _ in module.parameters())]
        raise ConfigurationError(
            f"merged={name!r}: the model has no such submodule; its submodules with parameters are"
            f" {', '.join(known) or 'none'}"
        )
    module: nn.Module = modules[name]
    own = {id(parameter) for parameter in module.parameters()}
    if not own:
        raise ConfigurationError(f"merged={name!r}: the submodule has no parameters, so there is nothing to keep fresh")
    _check_not_tied(name, model, own)
    for child_name, child in module.named_modules():
        if getattr(child, "track_running_stats", False):
            raise UnsupportedError(
                f"merged={name!r}: its submodule {child_name or name} keeps running statistics, which groups evaluate"
                " with and would not hear of; leave it outside the merged submodule"
            )
        if isinstance(child, (nn.RNNBase, nn.modules.lazy.LazyModuleMixin)):
            raise UnsupportedError(
                f"merged={name!r}: its submodule {child_name or name} is a {type(child).__name__}, which cannot be sent"
                " to the parameter server as plain values; merge a part without it"
            )
    try:
        for child_name, child in module.named_modules():
            check_describable(child, child_name)
        describe_module(module)
    except UnsupportedError as error:
        raise UnsupportedError(f"merged={name!r}: {error}") from error
    return module


def held_by_one(
    name: str, module: nn.Module, optimizers: Iterable[Optimizer]
) -> tuple[Optimizer, dict[str, Parameter]]:
    """Return the one optimizer that holds all parameters of a merged head, and these by name, in its order."""
    names = {parameter: f"{name}.{local}" for local, parameter in module.named_parameters()}
    for optimizer in optimizers:
        held = {names[parameter]: parameter for parameter in held_by(optimizer) if parameter in names}
        if held:
            break
    else:
        raise ConfigurationError(f"merged={name!r}: no optimizer holds its parameters; give them to one")
    missing = [each for each in names.values() if each not in held]
    if missing:
        raise UnsupportedError(
            f"merged={name!r}: its parameter {missing[0]} is not in the optimizer that holds {next(iter(held))}; give"
            " all of them to one optimizer (those with requires_grad=False, too: they stay as they are)"
        )
    return optimizer, held


def _check_not_tied(name: str, model: nn.Module, own: set[int]) -> None:
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own and not other.startswith(f"{name}."):
            raise UnsupportedError(
                f"merged={name!r}: its weights are shared with {other}, which stays with the groups; one owner cannot"
                " keep them: merge something else"
            )
