"""The use of a device as one value, and its application to a process, a model and an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_omni.checks import check_whole, counted, keep_plain
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.model.master import held_by
from lightning_omni.serialization import Serializable
from lightning_omni.tuning.device.allocator import keep_memory

FUSABLE = (SGD, Adam, AdamW, Adagrad)
"""Optimizers for which torch has fused kernels."""

PRECISIONS = ("32-true", "tf32", "bf16-mixed")
"""The parameters' own precision; TF32 in matrix products (CUDA); products and convolutions in bfloat16 (autocast)."""

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class DeviceSetting(Serializable):
    """A way to use a device for training. The defaults change nothing.

    Args:
        threads: torch's threads for one operation; None for their present number.
        keep_memory: whether to keep freed memory for the next tensors (CPU, glibc).
        cudnn_benchmark: whether cuDNN measures its convolution algorithms (CUDA).
        channels_last: whether channels are the innermost dimension of convolution weights, and thus of activations.
        fused: whether the optimizer updates each weight in one pass over memory.
        compiled: names of the submodules that `torch.compile` compiles; ``""`` is the whole module.
        precision: ``"32-true"`` for no change, ``"tf32"``, or ``"bf16-mixed"`` as in Lightning's Trainer.
        batch_size: samples in a batch; None for that of the given batches.
        workers: processes that share the machine's cores.

    Raises:
        ConfigurationError: a value is out of range.

    Example:
        >>> DeviceSetting(threads=2, channels_last=True).words
        '2 threads, channels_last'
    """

    threads: int | None = None
    keep_memory: bool = False
    cudnn_benchmark: bool = False
    channels_last: bool = False
    fused: bool = False
    compiled: tuple[str, ...] = ()
    precision: str = "32-true"
    batch_size: int | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        keep_plain(self)
        if self.precision not in PRECISIONS:
            raise ConfigurationError(f"precision={self.precision!r}: pass one of {', '.join(map(repr, PRECISIONS))}")
        for name in ("threads", "batch_size", "workers"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), "1 or more", low=1)
        object.__setattr__(self, "compiled", tuple(self.compiled))

    @property
    def words(self) -> str:
        """Describe the differences from the defaults."""
        parts = [counted(self.threads, "thread")] if self.threads is not None else []
        parts += ["freed memory kept"] * self.keep_memory + ["cudnn.benchmark"] * self.cudnn_benchmark
        parts += ["channels_last"] * self.channels_last + ["fused optimizer"] * self.fused
        if self.compiled:
            parts.append(f"compiled {', '.join(name or 'model' for name in self.compiled)}")
        parts += [self.precision] * (self.precision != "32-true")
        parts += [f"batches of {self.batch_size}"] if self.batch_size is not None else []
        parts += [f"{self.workers} processes"] if self.workers > 1 else []
        return ", ".join(parts) or "defaults"

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context for the forward pass; as in Lightning, it casts each weight at every use."""
        if self.precision != "bf16-mixed":
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)

    def apply(self, model: nn.Module, optimizer: Optimizer | None = None) -> Applied:
        """Apply everything except autocast, batch size and workers, which belong in the training loop.

        Args:
            model: model to change in place: memory format and compiled submodules.
            optimizer: optimizer over the model's parameters, changed in place; None if it steps elsewhere.

        Returns:
            The changes, with a method that undoes them.

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
    """The changes made by a setting; `undo` reverts them. A second call does nothing."""

    undo = ExitStack.close

    def to_process(self, setting: DeviceSetting) -> None:
        """Apply the settings of the whole process: threads, allocator, cuDNN and TF32."""
        # Each callback is registered before its change, because Ctrl-C may interrupt in between.
        if setting.threads is not None:
            self.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(setting.threads)
        if setting.keep_memory:
            self.callback(keep_memory, False)
            keep_memory(True)
        if setting.cudnn_benchmark:
            self.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = True
        if setting.precision == "tf32":
            self.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            self.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True

    def to_model(self, setting: DeviceSetting, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Apply memory format, fused steps and compiled submodules."""
        if setting.channels_last:
            self._channels_last(model, optimizer)
        if setting.fused and optimizer is not None:
            self._fuse(optimizer)
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
        for parameter in model.parameters():
            if (wanted := _FORMATS.get(parameter.dim())) is None or parameter.is_contiguous(memory_format=wanted):
                continue
            self.callback(_reformat, parameter, torch.contiguous_format)
            _reformat(parameter, wanted)
        if optimizer is not None:
            align_layouts(optimizer)

    def _fuse(self, optimizer: Optimizer) -> None:
        handle = optimizer.register_step_pre_hook(align_layouts)
        self.callback(handle.remove)
        for group in optimizer.param_groups:
            for flag, value in (("fused", True), ("foreach", False)):
                if flag in group:
                    self.callback(group.__setitem__, flag, group[flag])
                    group[flag] = value
            for parameter in group["params"]:
                count = optimizer.state.get(parameter, {}).get("step")
                if isinstance(count, Tensor):  # as fused kernels require
                    optimizer.state[parameter]["step"] = count.to(parameter.device, torch.float32)


def align_layouts(optimizer: Optimizer, *_: Any) -> None:
    """Give gradients and optimizer state the memory layout of their weights.

    torch's fused CPU kernels pair elements at equal positions in memory, whatever the strides: with a momentum loaded
    from a checkpoint, or a gradient received over the network, they would silently mix up the elements of a
    channels_last weight.
    """
    for parameter in held_by(optimizer):
        if parameter.dim() not in _FORMATS:
            continue
        if parameter.grad is not None and _lies_otherwise(parameter.grad, parameter):
            parameter.grad = _laid_out_as(parameter.grad, parameter)
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and _lies_otherwise(value, parameter):
                state[name] = _laid_out_as(value, parameter)


def contiguous(tree: Any) -> Any:
    """Return a tree of dicts, lists and tuples with contiguous tensors, so that any program can load them."""
    if isinstance(tree, Tensor):
        return tree if tree.layout != torch.strided or tree.is_contiguous() else tree.contiguous()
    if isinstance(tree, dict):
        return type(tree)((key, contiguous(value)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(contiguous(value) for value in tree)
    return tree


def _lies_otherwise(tensor: Tensor, parameter: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.shape == parameter.shape and tensor.stride() != parameter.stride()


def _laid_out_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def _reformat(parameter: nn.Parameter, memory_format: torch.memory_format) -> None:
    parameter.data = parameter.data.contiguous(memory_format=memory_format)
    if parameter.grad is not None:
        parameter.grad = _laid_out_as(parameter.grad, parameter)


@contextmanager
def used(setting: DeviceSetting) -> Iterator[None]:
    """Apply a setting to the process for the duration of the context."""
    with Applied() as applied:
        applied.to_process(setting)
        yield
