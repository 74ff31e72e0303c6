"""The formats of averages inside a group: exact, rounded, or as products of thin matrices.

Like a wire format, an all-reduce format is a frozen value. It defines how the members of one group form one gradient,
and nothing about exchanges between groups. This module has the arithmetic alone: `AllReduce.average` yields each
tensor to average over the members, and is sent the mean. The caller computes the mean: torch.distributed between
ranks, or the identity in simulations.

Rule 1: all members yield tensors of the same shapes and dtypes in the same order.
Rule 2: the part of its gradients that a member has not sent yet is kept in its `Unsent`: summed over members, the
sent parts and the kept ones are the gradients.
Rule 3: a gradient that is not finite stays so and leaves no trace: a loss scaler skips the step, or a server refuses
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from lightning_omni.checks import check_choice, check_whole
from lightning_omni.errors import ConfigurationError
from lightning_omni.registry import Registry

Steps = Generator[Tensor, Tensor, None]
"""A generator that yields each flat tensor to average over the members, and is sent the mean."""


@dataclass
class Unsent:
    """A member's memory of one parameter.

    Attributes:
        error: the unsent part of its gradients, in the gradient's shape.
        factor: right factor of the last product, where the next one starts; the same on all members.
    """

    error: Tensor
    factor: Tensor


Memory = MutableMapping[Hashable, Unsent]
"""The memory by parameter, or by a key that represents it."""


class AllReduce(msgspec.Struct, frozen=True, kw_only=True, tag_field="name"):
    """A way to average gradients over the members of a group.

    ``messages`` is the most consecutive all-reduces of one gradient.
    """

    messages: ClassVar[int] = 1

    def nbytes(self, shapes: Iterable[Sequence[int]]) -> int:
        """Return the bytes that encode a member's gradient for float32 parameters of these shapes."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many bytes travel")

    def share(self, shapes: Iterable[Sequence[int]]) -> float:
        """Return the encoded size of a gradient as a fraction of its size in float32."""
        shapes = tuple(shapes)
        return self.nbytes(shapes) / (4 * sum(map(math.prod, shapes)))

    def average(self, gradients: Sequence[Tensor], keys: Sequence[Hashable], memory: Memory) -> Steps:
        """Return the steps that average a member's gradients, of one device and dtype, in place.

        ``keys`` are those of the parameters in ``memory``.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot average")


class _Whole(AllReduce, frozen=True, kw_only=True):
    dtype: ClassVar[torch.dtype | None] = None

    def nbytes(self, shapes: Iterable[Sequence[int]]) -> int:
        return (2 if self.dtype else 4) * sum(map(math.prod, shapes))

    def average(self, gradients: Sequence[Tensor], keys: Sequence[Hashable], memory: Memory) -> Steps:
        _put((yield _flat(gradients, self.dtype or gradients[0].dtype)), gradients)


class Exact(_Whole, frozen=True, kw_only=True, tag="fp32"):
    """The exact average: DistributedDataParallel's own all-reduce."""


class RoundedBF16(_Whole, frozen=True, kw_only=True, tag="bf16"):
    """An average in bfloat16: the range of float32, and 8 bits of precision."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16


class RoundedFP16(_Whole, frozen=True, kw_only=True, tag="fp16"):
    """An average in float16: 11 bits of precision, up to 65,504; larger elements become infinite."""

    dtype: ClassVar[torch.dtype] = torch.float16


class PowerSGD(AllReduce, frozen=True, kw_only=True, tag="powersgd"):
    """An average of gradient matrices as products of two thin ones, with error feedback and warm start.

    A gradient of shape (n, ...) counts as a matrix M of n rows. One step of subspace iteration from the last factor Q
    gives P = mean(M Q), with orthonormal columns, and Q = mean(Mᵀ P). The result is P Qᵀ; each member adds the
    remainder of its own gradient, M - P Qᵀ, to its next one. Gradients that would not shrink to half their size are
    sent whole.

    Args:
        rank: columns of the thin matrices, 1 or more.
        dtype: ``"fp32"``, or ``"bf16"`` for half the bytes. Error feedback does not cover the rounding of gradients
            sent whole.

    Raises:
        ConfigurationError: the rank is no whole number above 0, or the dtype is unknown.

    Example:
        >>> PowerSGD(rank=4).nbytes([(500, 800), (500,)]) / Exact().nbytes([(500, 800), (500,)]) < 1 / 50
        True

    References:
        Vogels, Karimireddy and Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
        Optimization", arXiv:1905.13727, Algorithms 1 and 2.
    """

    messages: ClassVar[int] = 2
    rank: int = 4
    dtype: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, "the columns of the thin matrices, 1 or more", 1)
        check_choice("dtype", self.dtype, ("fp32", "bf16"))

    def nbytes(self, shapes: Iterable[Sequence[int]]) -> int:
        return (2 if self.dtype == "bf16" else 4) * sum(self._numbers(shape) for shape in shapes)

    def average(self, gradients: Sequence[Tensor], keys: Sequence[Hashable], memory: Memory) -> Steps:
        thin = [self._columns(each.shape) for each in gradients]
        whole = [each for each, columns in zip(gradients, thin, strict=True) if not columns]
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)  # 16 bits are too few for orthonormal columns
        known = [
            (each, _remembered(memory.get(key), each, columns, dtype), key)
            for each, key, columns in zip(gradients, keys, thin, strict=True)
            if columns
        ]
        matrices = [(each.to(dtype) + unsent.error).flatten(1) for each, unsent, _ in known]
        factors = [unsent.factor for _, unsent, _ in known]
        left = [matrix @ factor for matrix, factor in zip(matrices, factors, strict=True)]
        used = [each.any().to(dtype) for each, _, _ in known]
        sent = torch.bfloat16 if self.dtype == "bf16" else dtype
        _put((yield _flat([*whole, *left, *used], sent)), [*whole, *left, *used])
        # DDP drops the mean of a parameter that no member has used: then nothing of its residuals counts as sent.
        left = [torch.linalg.qr(each).Q * is_used.bool() for each, is_used in zip(left, used, strict=True)]
        factors = [matrix.T @ each for matrix, each in zip(matrices, left, strict=True)]
        if not factors:
            return
        _put((yield _flat(factors, sent)), factors)
        for (each, unsent, key), matrix, rows, factor in zip(known, matrices, left, factors, strict=True):
            found = rows @ factor.T
            is_finite = found.isfinite().all()  # the same on all members; stays on the device, to avoid a wait
            error = torch.where(is_finite, matrix - found, unsent.error.flatten(1)).view(each.shape)
            memory[key] = Unsent(error, torch.where(is_finite & factor.any(), factor, unsent.factor))
            each.copy_(found.view(each.shape))

    def _columns(self, shape: Sequence[int]) -> int:
        """Return the columns of the thin matrices; 0 for a gradient that is sent whole."""
        if len(shape) < 2 or not all(shape):
            return 0
        rows, width = shape[0], math.prod(shape[1:])
        columns = min(rows, width, self.rank)
        return columns if 2 * columns * (rows + width) <= rows * width else 0

    def _numbers(self, shape: Sequence[int]) -> int:
        columns = self._columns(shape)
        return columns * (shape[0] + math.prod(shape[1:])) + 1 if columns else math.prod(shape)


def resumed(steps: Steps, mean: Tensor) -> Tensor | None:
    """Send the mean of the last tensor; return the next tensor to average, or None at the end."""
    try:
        return steps.send(mean)
    except StopIteration:
        return None


def run_through(steps: Steps, mean: Callable[[Tensor], Tensor]) -> None:
    """Run the steps of `AllReduce.average` to the end; ``mean`` may overwrite the tensor that it averages."""
    message: Tensor | None = next(steps)
    while message is not None:
        message = resumed(steps, mean(message))


def _remembered(unsent: Unsent | None, gradient: Tensor, columns: int, dtype: torch.dtype) -> Unsent:
    """Return a parameter's memory; a factor of another shape or device is drawn again, equally on all members."""
    width = gradient[0].numel()
    if unsent is not None and unsent.factor.shape == (width, columns) and unsent.factor.device == gradient.device:
        return unsent
    random = torch.Generator().manual_seed(width)
    factor = torch.randn(width, columns, generator=random, dtype=dtype).to(gradient.device)
    error = torch.zeros_like(gradient, dtype=dtype) if unsent is None else unsent.error.to(gradient.device)
    return Unsent(error, factor)


def _flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([each.flatten().to(dtype) for each in tensors])


def _put(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for each, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
        each.copy_(part.view(each.shape))


EXACT = Exact()
FORMATS: dict[str, type[AllReduce]] = {
    "fp32": Exact,
    "bf16": RoundedBF16,
    "fp16": RoundedFP16,
    "powersgd": PowerSGD,
}
"""The formats by the names that users write."""
_registry = Registry(
    FORMATS, AllReduce, "all_reduce", "all-reduce format", "lightning_omni.wire.all_reduce.AllReduce", ""
)


def all_reduce_of(given: str | AllReduce) -> AllReduce:
    """Return the all-reduce format of a name, with settings after a colon, or of a value.

    Raises:
        ConfigurationError: it is no all-reduce format.

    Example:
        >>> all_reduce_of("powersgd:2,dtype=bf16")
        PowerSGD(rank=2, dtype='bf16')
    """
    if isinstance(given, str):
        return _registry.named(given)
    if isinstance(given, AllReduce):
        return _registry.checked(given)
    raise ConfigurationError(
        f'all_reduce={given!r}: pass a name such as "powersgd:4", or a value such as PowerSGD(rank=4)'
    )
