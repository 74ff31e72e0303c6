"""The use of a device as one value, and its application to a process, a model and an optimizer."""

from __future__ import annotations

import ctypes
import platform
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_omni.checks import check_kind
from lightning_omni.errors import ConfigurationError
from lightning_omni.json_dataclasses import Serializable
from lightning_omni.methods.model.server_optimizer import held_by

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class DeviceSetting(Serializable):
    """A way to use a device for training; the defaults change nothing.

    Args:
        keep_memory: whether to keep freed memory for the next tensors (CPU, glibc).
        channels_last: whether channels are the innermost dimension of 4- and 5-dimensional weights.
        compiled: names of the submodules that `torch.compile` compiles; ``""`` is the whole module.
        bf16: whether to train in Lightning's ``bf16-mixed``.

    Raises:
        ConfigurationError: ``compiled`` is no tuple or list.

    Example:
        >>> DeviceSetting(channels_last=True, compiled=("",)).words
        'channels_last, compiled model'
    """

    keep_memory: bool = False
    channels_last: bool = False
    compiled: tuple[str, ...] = ()
    bf16: bool = False

    def __post_init__(self) -> None:
        check_kind("compiled", self.compiled, (tuple, list), 'names of submodules, as ("net",)')
        object.__setattr__(self, "compiled", tuple(self.compiled))

    @property
    def words(self) -> str:
        """Describe the differences from the defaults."""
        parts = ["freed memory kept"] * self.keep_memory + ["channels_last"] * self.channels_last
        if self.compiled:
            parts.append(f"compiled {', '.join(name or 'model' for name in self.compiled)}")
        return ", ".join(parts + ["bf16-mixed"] * self.bf16) or "defaults"

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context for the forward pass; with ``bf16`` it casts each weight at every use, as in Lightning."""
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if self.bf16 else nullcontext()

    def apply(self, model: nn.Module, optimizer: Optimizer | None = None) -> Applied:
        """Apply everything except autocast, in place; return the changes, which can be undone.

        Args:
            model: model to change: memory format and compiled submodules.
            optimizer: optimizer over the model's parameters; None if it steps elsewhere.

        Example:
            >>> model = nn.Sequential(nn.Conv2d(3, 4, 3))
            >>> applied = DeviceSetting(channels_last=True).apply(model)
            >>> model[0].weight.is_contiguous(memory_format=torch.channels_last)
            True
            >>> applied.undo()
            >>> model[0].weight.is_contiguous()
            True
        """
        with Applied() as applied:
            applied.to_process(self)
            applied.to_model(self, model, optimizer)
            return applied.pop_all()


class Applied(ExitStack):
    """The changes made by a setting; `undo` reverts them, once."""

    undo = ExitStack.close

    def to_process(self, setting: DeviceSetting) -> None:
        if setting.keep_memory:
            self.callback(keep_memory, False)  # registered first, because Ctrl-C may interrupt in between
            keep_memory(True)

    def to_model(self, setting: DeviceSetting, model: nn.Module, optimizer: Optimizer | None) -> None:
        if setting.channels_last:
            self._channels_last(model, optimizer)
        for name in setting.compiled:
            try:
                submodule = model.get_submodule(name)
            except AttributeError as error:
                raise ConfigurationError(
                    f"compiled={setting.compiled!r}: {type(model).__name__} has no submodule {name!r}; the setting is"
                    " of another model: leave the name out, or have this one measured"
                ) from error
            self.callback(setattr, submodule, "_compiled_call_impl", submodule._compiled_call_impl)
            submodule.compile()

    def _channels_last(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        if optimizer is not None:
            self.callback(align_layouts, optimizer)  # runs after the weights are restored
            self.callback(optimizer.register_step_pre_hook(align_layouts).remove)
        for parameter in model.parameters():
            if (wanted := _FORMATS.get(parameter.dim())) is None or parameter.is_contiguous(memory_format=wanted):
                continue
            self.callback(_reformat, parameter, torch.contiguous_format)
            _reformat(parameter, wanted)
        if optimizer is not None:
            align_layouts(optimizer)


def align_layouts(optimizer: Optimizer, *_: Any) -> None:
    """Give gradients and optimizer state the memory layout of their weights.

    torch's fused CPU kernels pair elements by position in memory, whatever the strides: with state or gradients from
    elsewhere, they would silently mix up the elements of a channels_last weight.
    """
    for parameter in held_by(optimizer):
        if parameter.dim() not in _FORMATS:
            continue
        if parameter.grad is not None and _has_other_strides(parameter.grad, parameter):
            parameter.grad = _laid_out_as(parameter.grad, parameter)
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if _has_other_strides(value, parameter):
                state[name] = _laid_out_as(value, parameter)


def contiguous(tree: Any) -> Any:
    return tree_map(lambda each: each.contiguous() if _is_strided(each) else each, tree)


def _has_other_strides(tensor: Any, parameter: Tensor) -> bool:
    return _is_strided(tensor) and tensor.shape == parameter.shape and tensor.stride() != parameter.stride()


def _is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _laid_out_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def _reformat(parameter: nn.Parameter, memory_format: torch.memory_format) -> None:
    parameter.data = parameter.data.contiguous(memory_format=memory_format)
    if parameter.grad is not None:
        parameter.grad = _laid_out_as(parameter.grad, parameter)


# --- The C library's allocator ----------------------------------------------------------------------------------------

# These are the constants of <malloc.h>; mallopt(3) explains them.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_MOST_MAPPINGS = 65536
_LARGEST_THRESHOLD = 32 * 2**20
"""Upper limit of glibc's own growing threshold, in bytes."""


@cache
def _library() -> Any:
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def can_keep_memory() -> bool:
    return _library() is not None


def keep_memory(keep: bool) -> None:
    """Set whether the process keeps freed memory for the next tensors; do nothing without glibc.

    By default glibc returns freed blocks of 32 MiB and more to the kernel at once. Its growing threshold cannot be
    restored, so ``False`` sets its final value in a process that frees large tensors: 32 MiB, and 64 MiB for memory at
    the heap's end.
    """
    library = _library()
    if library is None:
        return
    if keep:
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)
    else:
        library.mallopt(_M_MMAP_MAX, _MOST_MAPPINGS)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
        library.malloc_trim(0)
