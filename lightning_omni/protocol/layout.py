"""How named tensors lie in one flat run of bytes, and the fingerprint by which two sides know that they agree.

Rule: both sides derive offsets from the same layout; no offset ever travels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod

import msgspec
import torch
from torch import Tensor

from lightning_omni.errors import MalformedMessage

ALIGNMENT = 64
"""Bytes; every tensor starts at a multiple, so that any dtype can be viewed in place."""

SUBSETS = 64
"""Subsets of a layout that are remembered."""

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, shape and dtype of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Of a contiguous tensor, in numbers."""
        return tuple(prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))


class Layout(msgspec.Struct, frozen=True, dict=True):
    """Tensors one after the other in a flat buffer of bytes.

    Example:
        >>> layout = Layout.of({"w": torch.ones(2, 3), "b": torch.zeros(3)})
        >>> layout.nbytes, [view.shape for view in layout.views(layout.empty())]
        (76, [torch.Size([2, 3]), torch.Size([3])])
    """

    specs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """The layout of named tensors, in the mapping's order."""
        return cls(tuple(spec_of(name, tensor) for name, tensor in tensors.items()))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor starts, in bytes."""
        starts, position = [], 0
        for spec in self.specs:
            starts.append(position)
            position += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        return tuple(starts)

    @cached_property
    def _places(self) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...], int], ...]:
        """Dtype, shape, strides and offset of each tensor, the last two in numbers."""
        return tuple(
            (spec.dtype, spec.shape, spec.strides, start // DTYPES[spec.dtype].itemsize)
            for spec, start in zip(self.specs, self.offsets, strict=True)
        )

    @cached_property
    def nbytes(self) -> int:
        """Size of the whole buffer in bytes."""
        return self.offsets[-1] + self.specs[-1].nbytes if self.specs else 0

    @cached_property
    def numel(self) -> int:
        """Numbers in all tensors together."""
        return sum(prod(spec.shape) for spec in self.specs)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all names, shapes and dtypes in order."""
        return hashlib.sha256(msgspec.msgpack.encode(self.specs)).hexdigest()

    def subset(self, present: Sequence[bool]) -> Layout:
        """The layout of just those tensors whose flag is set. The last few are remembered."""
        if all(present):
            return self
        flags = tuple(present)
        if flags not in self._subsets:
            while len(self._subsets) >= SUBSETS:  # which parameters are used may change at random
                del self._subsets[next(iter(self._subsets))]
            self._subsets[flags] = Layout(tuple(spec for spec, there in zip(self.specs, flags, strict=True) if there))
        return self._subsets[flags]

    @cached_property
    def _subsets(self) -> dict[tuple[bool, ...], Layout]:
        return {}

    def empty(self) -> Tensor:
        """A new buffer: uint8, ``(nbytes,)``. Zeros, because the gaps between tensors travel, too."""
        return torch.zeros(self.nbytes, dtype=torch.uint8)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Tensors that share the memory of a buffer.

        Args:
            buffer: uint8, at least ``(nbytes,)``, contiguous.
        """
        # One call for each tensor: with many small ones, views are what a push costs.
        flat: dict[str, tuple[Tensor, int]] = {}
        views = []
        for dtype, shape, strides, offset in self._places:
            if dtype not in flat:
                size = DTYPES[dtype].itemsize
                typed = buffer[: self.nbytes // size * size].view(DTYPES[dtype])
                flat[dtype] = typed, int(typed.storage_offset())
            typed, first = flat[dtype]
            views.append(typed.as_strided(shape, strides, first + offset))
        return views


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """The specification of one tensor.

    Raises:
        MalformedMessage: its dtype cannot travel.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise MalformedMessage(f"tensor {name!r} has dtype {tensor.dtype}, which cannot be exchanged")
    return TensorSpec(name, tuple(tensor.shape), dtype)
