"""How named tensors lie in one flat run of bytes, and the fingerprint by which two sides know that they agree.

Rule 1: both sides derive offsets from the same layout; no offset ever travels.
Rule 2: a layout only grows at its end, and gets a version each time; what was known before is the beginning of it.
Rule 3: an entry is a tensor, or a range of its numbers where several hold a part each.
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
from lightning_omni.methods.fragments import Pieces, cut

ALIGNMENT = 64
"""Bytes; every tensor starts at a multiple, so that any dtype can be viewed in place."""

LARGEST = 1 << 56
"""Numbers of a tensor, fewer than that."""

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
    """One tensor, or a part of it.

    Attributes:
        name: of the tensor.
        shape: of the whole tensor.
        dtype: its name, without ``torch.``.
        range: first number, and the one behind the last, of the flattened tensor's that are here; None if all are.

    Example:
        >>> whole = TensorSpec("w", (2, 3), "float32")
        >>> part = TensorSpec("w", (2, 3), "float32", range=(2, 6))
        >>> whole.local_shape, part.local_shape, part.nbytes
        ((2, 3), (4,), 16)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    range: tuple[int, int] | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of what is here: the tensor's own shape, or one dimension if it is a part."""
        return self.shape if self.range is None else (self.range[1] - self.range[0],)

    @property
    def numel(self) -> int:
        """Numbers that are here."""
        return prod(self.local_shape)

    @property
    def bounds(self) -> tuple[int, int]:
        """First number that is here, and the one behind the last, of the flattened tensor's."""
        return (0, prod(self.shape)) if self.range is None else self.range

    @property
    def nbytes(self) -> int:
        """Size of what is here, in bytes."""
        return self.numel * DTYPES[self.dtype].itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Of what is here, contiguous, in numbers."""
        shape = self.local_shape
        return tuple(prod(shape[axis + 1 :]) for axis, _ in enumerate(shape))

    def part(self, where: tuple[int, int] | None) -> TensorSpec:
        """A range of the numbers that are here; None for all of them."""
        if where is None:
            return self
        begin = self.range[0] if self.range is not None else 0
        return TensorSpec(self.name, self.shape, self.dtype, (begin + where[0], begin + where[1]))

    @property
    def is_sane(self) -> bool:
        """Whether there can be such a tensor; empty ones, too, must have sizes that torch can hold."""
        if self.dtype not in DTYPES or any(size < 0 for size in self.shape):
            return False
        start, stop = self.range or (0, 0)
        whole = prod(max(size, 1) for size in self.shape)
        return whole < LARGEST and 0 <= start <= stop <= max(prod(self.shape), 0)


class Layout(msgspec.Struct, frozen=True, dict=True):
    """Tensors, or parts of them, one after the other in a flat buffer of bytes.

    Attributes:
        specs: the entries, in order.
        version: counts how often entries were added; a push says in which version its tensors lie.
        first: how many entries the first version had; 0 if this is the first. Fragments are cut out of these.
        division: how the members of a group share these tensors, as a text that must be the same for all groups; empty
            if each member exchanges all of them.
        servers: that hold a share of these tensors each. Fragments are cut out of the shares.

    Example:
        >>> layout = Layout.of({"w": torch.ones(2, 3), "b": torch.zeros(3)})
        >>> layout.nbytes, [view.shape for view in layout.views(layout.empty())]
        (76, [torch.Size([2, 3]), torch.Size([3])])
    """

    specs: tuple[TensorSpec, ...]
    version: int = 0
    first: int = 0
    division: str = ""
    servers: int = 1

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
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Of each entry its numbers, and the bytes of one of them."""
        return tuple((spec.numel, DTYPES[spec.dtype].itemsize) for spec in self.specs)

    @cached_property
    def _places(self) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...], int], ...]:
        """Dtype, shape, strides and offset of each tensor, the last two in numbers."""
        return tuple(
            (spec.dtype, spec.local_shape, spec.strides, start // DTYPES[spec.dtype].itemsize)
            for spec, start in zip(self.specs, self.offsets, strict=True)
        )

    @cached_property
    def nbytes(self) -> int:
        """Size of the whole buffer in bytes."""
        return self.offsets[-1] + self.specs[-1].nbytes if self.specs else 0

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Names of the dtypes that there are."""
        return tuple({spec.dtype: None for spec in self.specs})

    @cached_property
    def numel(self) -> int:
        """Numbers in all entries together."""
        return sum(prod(spec.local_shape) for spec in self.specs)

    @cached_property
    def reals(self) -> tuple[int, ...]:
        """Real numbers of each entry: a complex number is two."""
        return tuple(prod(spec.local_shape) * (1 + DTYPES[spec.dtype].is_complex) for spec in self.specs)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all names, shapes, dtypes and ranges in order; and the `division`, if there is one."""
        digest = hashlib.sha256(msgspec.msgpack.encode(self.specs)).hexdigest()
        return f"{digest} {self.division}" if self.division else digest

    def grown(self, specs: Sequence[TensorSpec]) -> Layout:
        """The next version: with further entries at the end."""
        return Layout((*self.specs, *specs), self.version + 1, self.first or len(self.specs), servers=self.servers)

    def subset(self, present: Sequence[bool]) -> Layout:
        """The layout of just those tensors whose flag is set. The last few are remembered."""
        if all(present):
            return self
        flags = tuple(present)
        if flags not in self._subsets:
            while len(self._subsets) >= SUBSETS:  # which parameters are used may change at random
                del self._subsets[next(iter(self._subsets))]
            self._subsets[flags] = Layout(
                tuple(spec for spec, there in zip(self.specs, flags, strict=True) if there), self.version
            )
        return self._subsets[flags]

    @cached_property
    def _subsets(self) -> dict[tuple[bool, ...], Layout]:
        return {}

    def pieces(self, number: int, of: int) -> Pieces:
        """What a fragment has of each entry; the numbers are those of the entry, which may be a part itself."""
        if of not in self._pieces:
            self._pieces[of] = cut(self.sizes, of, self.first, self.servers)
        return self._pieces[of][number]

    def fragment(self, number: int | None, of: int) -> Layout:
        """The layout of one of ``of`` fragments, of equal bytes; its entries are whole ones and ranges.

        Args:
            number: of the fragment, from 0; None for the whole layout.
            of: how many fragments there are.

        Example:
            >>> [spec.range for spec in Layout.of({"w": torch.ones(6), "b": torch.ones(2)}).fragment(1, of=2).specs]
            [(4, 6), None]
        """
        if number is None:
            return self
        if (number, of) not in self._fragments:
            specs = tuple(self.specs[place].part(where) for place, where in self.pieces(number, of))
            self._fragments[number, of] = Layout(specs, self.version)
        return self._fragments[number, of]

    @cached_property
    def _pieces(self) -> dict[int, Sequence[Pieces]]:
        return {}

    @cached_property
    def _fragments(self) -> dict[tuple[int, int], Layout]:
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
