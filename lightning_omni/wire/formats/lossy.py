"""The lossy wire formats, with error feedback at the sender: bf16, fp16, int8 and top-k.

The part that a push leaves out is its sender's residual, which is added to the next push.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import accumulate, zip_longest
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_omni.checks import check_number, check_whole
from lightning_omni.errors import ConfigurationError
from lightning_omni.wire.formats.base import RESIDUAL, Encoded, Memory, State, WireFormat, register
from lightning_omni.wire.layout import Layout

AT_ONCE = 1 << 22
"""About how many elements are encoded at once, unless `Lossy.unit` is 0: it bounds the memory of temporary tensors."""


class Lossy(WireFormat, frozen=True, kw_only=True):
    """A format that encodes elements in fewer bytes, approximately.

    A subclass encodes one run of real elements, in float32, or in float64 if one of the tensors has that dtype. A
    complex element counts as two real ones.

    Attributes:
        unit: number of elements at whose multiples a run may be cut, to save memory: the tensors of `compress` for the
            parts are together those for the whole. 0 if it may not be cut.
    """

    @property
    def unit(self) -> int:
        return 0

    def nbytes(self, count: int) -> int:
        raise NotImplementedError(f"{type(self).__name__} does not say how large its payloads are")

    def compress(self, numbers: Tensor) -> list[Tensor]:
        """Return elements, ``(count,)``, as tensors whose bytes travel in order. Non-finite ones stay non-finite."""
        raise NotImplementedError(f"{type(self).__name__} cannot compress")

    def expand(self, payload: Tensor, count: int) -> Tensor:
        """Return the elements, ``(count,)``, that these bytes encode. May raise any exception on other bytes."""
        raise NotImplementedError(f"{type(self).__name__} cannot expand")

    def sizes(self, layout: Layout) -> tuple[int, int]:
        nbytes = self.nbytes(sum(layout.reals))
        return nbytes, nbytes

    def encode(self, tensors: Sequence[Tensor | None], layout: Layout, state: State, memory: Memory) -> Encoded:
        present = tuple(tensor is not None for tensor in tensors)
        owed = [before for _, before in zip_longest(tensors, state.get(RESIDUAL, ()))]
        there = [(tensor, before) for tensor, before in zip(tensors, owed, strict=True) if tensor is not None]
        if not there:
            return Encoded(torch.empty(self.nbytes(0), dtype=torch.uint8), present, state)
        reals = [(_reals(tensor), None if before is None else _reals(before)) for tensor, before in there]
        dtypes = [each.dtype for pair in reals for each in pair if each is not None]
        wide = reduce(torch.promote_types, dtypes, torch.float32)
        parts: list[list[Tensor]] = []
        left: list[list[Tensor]] = [[] for _ in reals]
        for pieces in self._cut([mine.numel() for mine, _ in reals]):
            flat = torch.cat([_sum(*reals[index], slice(start, stop), wide) for index, start, stop in pieces])
            parts.append([part.contiguous().view(torch.uint8) for part in self.compress(flat)])
            rest = flat - self.expand(torch.cat(parts[-1]), flat.numel()).to(flat)
            for (index, *_), piece in zip(pieces, rest.split([stop - start for _, start, stop in pieces]), strict=True):
                left[index].append(piece)
        in_order = [part for alike in zip(*parts, strict=True) for part in alike]
        room = memory.room(sum(part.numel() for part in in_order))
        payload = torch.cat(in_order, out=room) if in_order[0].is_cpu else room.copy_(torch.cat(in_order))
        for place, tensor in enumerate(tensors):
            if tensor is not None:
                first, *more = left.pop(0)  # so that a large tensor's pieces are not kept beside it
                owed[place] = _like(torch.cat([first, *more]) if more else first, tensor)
        return Encoded(payload, present, {RESIDUAL: owed})

    def _cut(self, counts: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
        """Yield the pieces of some tensors that are encoded at once: index, start and stop of each."""
        ends = list(accumulate(counts))
        most = max(AT_ONCE // self.unit, 1) * self.unit if self.unit else max(ends[-1], 1)
        for begin in range(0, max(ends[-1], 1), most):
            pieces = []
            for index, (end, count) in enumerate(zip(ends, counts, strict=True)):
                start, stop = (min(max(bound - end + count, 0), count) for bound in (begin, begin + most))
                if start < stop or not (count or begin):
                    pieces.append((index, start, stop))
            yield pieces

    def decode(self, payload: Tensor, layout: Layout, memory: Memory) -> Tensor:
        if payload.storage_offset():  # the bytes are read as wider elements, which must be aligned
            payload = payload.clone()
        buffer, views = memory.hold(layout)
        for view, part in zip(views, self.expand(payload, sum(layout.reals)).split(layout.reals), strict=True):
            view.copy_(_like(part, view))
        return buffer


def _reals(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return real.flatten()


def _sum(mine: Tensor, before: Tensor | None, where: slice, wide: torch.dtype) -> Tensor:
    own = mine[where].to(torch.promote_types(mine.dtype, torch.float32))
    return (own if before is None else own + before[where]).to(wide)


def _like(numbers: Tensor, tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        real, imaginary = numbers.reshape(*tensor.shape, 2).unbind(-1)
        return torch.complex(real, imaginary)  # no view, because views of complex numbers must be aligned
    return numbers.view_as(tensor)


# --- int8 -------------------------------------------------------------------------------------------------------------


@register
class Int8(Lossy, frozen=True, kw_only=True, tag="int8"):
    """A format of one byte for each element, and a scale for each block of them.

    A block's scale is about its largest magnitude over 127; the error of each element is at most half a scale.

    Args:
        block: number of elements that share a scale, 8 or more.

    Raises:
        ConfigurationError: the blocks are too small.

    Example:
        >>> Int8().nbytes(1000) / 4000
        0.258

    References:
        Dettmers 2016, "8-Bit Approximations for Parallelism in Deep Learning", arXiv:1511.04561; Seide et al. 2014,
        "1-Bit Stochastic Gradient Descent" (error feedback).
    """

    block: int = 128

    @property
    def unit(self) -> int:
        return self.block

    def __post_init__(self) -> None:
        check_whole("block", self.block, "8 or more numbers to a scale", 8)

    def nbytes(self, count: int) -> int:
        return 4 * self._blocks(count) + count

    def compress(self, numbers: Tensor) -> list[Tensor]:
        rows = self._rows(numbers.float())
        # A NaN or an infinity makes its block's scale non-finite, and so all elements of the block.
        scales = (rows.abs().amax(1) / 127).view(torch.int32)
        # With 16 bits of precision, 127 times a scale is exact, so decoded ones are encoded to the same bytes again.
        scales = scales.bitwise_and(-256).view(torch.float32)
        steps = torch.where(scales > 0, scales, 1.0)
        multiples = (rows / steps[:, None]).round().nan_to_num(0.0)
        return [scales, multiples.to(torch.int8).flatten()[: numbers.numel()]]

    def expand(self, payload: Tensor, count: int) -> Tensor:
        scales, multiples = payload.split([4 * self._blocks(count), count])
        rows = self._rows(multiples.view(torch.int8).float())
        numbers: Tensor = rows * scales.view(torch.float32)[:, None]
        return numbers.flatten()[:count]

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _rows(self, numbers: Tensor) -> Tensor:
        padded: Tensor = pad(numbers, (0, self._blocks(numbers.numel()) * self.block - numbers.numel()))
        return padded.view(-1, self.block)


# --- bf16 and fp16 ----------------------------------------------------------------------------------------------------


class Rounded(Lossy, frozen=True, kw_only=True):
    """A format that rounds to another dtype. A number beyond its range travels as its bound, with a residual."""

    dtype: ClassVar[torch.dtype]

    @property
    def unit(self) -> int:
        return 1

    def nbytes(self, count: int) -> int:
        return count * self.dtype.itemsize

    def compress(self, numbers: Tensor) -> list[Tensor]:
        largest = torch.finfo(self.dtype).max
        # Only finite elements are clamped, so that the server can detect the others.
        return [torch.where(numbers.isfinite(), numbers.clamp(-largest, largest), numbers).to(self.dtype)]

    def expand(self, payload: Tensor, count: int) -> Tensor:
        return payload.view(self.dtype).float()


@register
class BF16(Rounded, frozen=True, kw_only=True, tag="bf16"):
    """A format of half the bytes of float32, with its range and 8 bits of precision.

    Example:
        >>> from lightning_omni.wire.layout import Layout
        >>> from lightning_omni.wire.formats.base import Memory
        >>> layout = Layout.of({"w": torch.zeros(2)})
        >>> encoded = BF16().encode([torch.tensor([1.0, 1.0009765625])], layout, {}, Memory())
        >>> encoded.payload.numel(), encoded.state["residual"][0].tolist()
        (4, [0.0, 0.0009765625])
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16


@register
class FP16(Rounded, frozen=True, kw_only=True, tag="fp16"):
    """A format of half the bytes of float32, with 11 bits of precision, from about 6e-8 to 65,504."""

    dtype: ClassVar[torch.dtype] = torch.float16


# --- topk -------------------------------------------------------------------------------------------------------------


@register
class TopK(Lossy, frozen=True, kw_only=True, tag="topk"):
    """A format of the largest elements of a push with their indices, 8 bytes each; the residual collects the others.

    Args:
        fraction: fraction of the elements that travel, above 0 to 1; at least one travels.

    Raises:
        ConfigurationError: the fraction is out of range.

    Example:
        >>> TopK(fraction=0.01).nbytes(1000) / 4000
        0.02

    References:
        Aji and Heafield 2017, "Sparse Communication for Distributed Gradient Descent", arXiv:1704.05021; Stich et al.
        2018, "Sparsified SGD with Memory", arXiv:1809.07599.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        check_number("fraction", self.fraction, "a part of the numbers, above 0 to 1", high=1, above=0)

    def nbytes(self, count: int) -> int:
        return 8 * self._most(count)

    def compress(self, numbers: Tensor) -> list[Tensor]:
        # Non-finite elements count as the largest, so that the server receives them.
        magnitudes = numbers.abs().nan_to_num(nan=torch.inf)
        places = magnitudes.topk(self._most(numbers.numel()), sorted=False).indices.sort().values
        return [places.to(torch.int32), numbers[places].float()]

    def expand(self, payload: Tensor, count: int) -> Tensor:
        places, numbers = payload.tensor_split(2)
        where = places.view(torch.int32).long()
        if where.numel() and not 0 <= int(where.min()) <= int(where.max()) < count:
            raise ValueError(f"a place is not among {count} numbers")
        flat = torch.zeros(count, device=payload.device)
        flat[where] = numbers.view(torch.float32)
        return flat

    def _most(self, count: int) -> int:
        if count >= 1 << 31:
            raise ConfigurationError(
                f'compression="topk": {count:,} numbers of one optimizer; it can tell 2**31 places apart'
            )
        return min(count, max(1, round(self.fraction * count)))
