"""The lossy wire formats, with error feedback at the sender: bf16, fp16, int8 and top-k."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import accumulate, zip_longest
from operator import itemgetter
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from lightning_omni.checks import check_number, check_whole
from lightning_omni.errors import ConfigurationError
from lightning_omni.wire.formats.base import CHUNK, RESIDUAL, Decoding, Encoded, Memory, State, WireFormat, register
from lightning_omni.wire.layout import Layout

AT_ONCE = 1 << 22
"""About how many elements are encoded or decoded at once, unless `Lossy.unit` is 0: it bounds the temporary memory."""


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

    def lengths(self, count: int) -> list[int]:
        """Return the bytes of each tensor of `compress`, for this number of elements."""
        raise NotImplementedError(f"{type(self).__name__} does not say how large its payloads are")

    def nbytes(self, count: int) -> int:
        return sum(self.lengths(count))

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
        unsent = [mine.to(wide, copy=True) if before is None else (mine + before).to(wide) for mine, before in reals]
        payload = memory.room(self.nbytes(sum(map(len, unsent))))
        self._encode(unsent, payload)
        left = iter(unsent)
        for place, tensor in enumerate(tensors):
            if tensor is not None:
                owed[place] = _like(next(left), tensor)
        return Encoded(payload, present, {RESIDUAL: owed})

    def _encode(self, unsent: Sequence[Tensor], payload: Tensor) -> None:
        """Encode real elements, and subtract from them, in place, what the payload says of them."""
        counts, coded = list(map(len, unsent)), list[tuple[int, Tensor]]()
        for begin, pieces in _cut(counts, self._most(AT_ONCE, sum(counts))):
            views = _views(unsent, pieces)
            flat = torch.cat(views)
            parts = [part.contiguous().view(torch.uint8) for part in self.compress(flat)]
            numbers = self.expand(torch.cat(parts), len(flat)).to(flat)
            torch._foreach_sub_(views, list(numbers.split(list(map(len, views)))))
            places = self._places(begin, len(flat), sum(counts))
            coded += [(place.start, part) for place, part in zip(places, parts, strict=True)]
            if sum(part.numel() for _, part in coded) >= CHUNK // 2:
                _write(payload, coded)
                coded = []
        _write(payload, coded)

    def _most(self, elements: int, count: int) -> int:
        return max(elements // self.unit, 1) * self.unit if self.unit else max(count, 1)

    def _places(self, begin: int, count: int, of: int) -> list[slice]:
        """Return the places of some elements in a payload, one in each tensor of `compress`."""
        spans = zip(accumulate(self.lengths(of), initial=0), self.lengths(begin), self.lengths(count), strict=False)
        return [slice(start + before, start + before + length) for start, before, length in spans]

    def decode(self, payload: Tensor, layout: Layout, memory: Memory) -> Tensor:
        if payload.storage_offset():  # the bytes are read as wider elements, which must be aligned
            payload = payload.clone()
        buffer, views = memory.hold(layout)
        self._decode(payload, list(map(_reals, views)))
        return buffer

    @override
    def decoding(self, layout: Layout, tensors: Sequence[Tensor], nbytes: int) -> Decoding:
        reals, counts = list(map(_reals, tensors)), layout.reals
        for begin, pieces in _cut(counts, self._most(nbytes // 4, sum(counts))):
            views = _views(reals, pieces)
            length, whole = sum(map(len, views)), sum(counts)
            self._decode((yield [slice(None)] if length == whole else self._places(begin, length, whole)), views)

    def _decode(self, payload: Tensor, reals: Sequence[Tensor]) -> None:
        counts = list(map(len, reals))
        for begin, pieces in _cut(counts, self._most(AT_ONCE, sum(counts))):
            views = _views(reals, pieces)
            lengths = list(map(len, views))
            places = self._places(begin, sum(lengths), sum(counts))
            part = payload if sum(lengths) == sum(counts) else torch.cat([payload[place] for place in places])
            for view, numbers in zip(views, self.expand(part, sum(lengths)).split(lengths), strict=True):
                view.copy_(numbers)


def _cut(counts: Sequence[int], most: int) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    """Yield the elements of some tensors, so many at once: the first one, and index, start and stop of each piece."""
    ends = list(accumulate(counts))
    for begin in range(0, ends[-1] if ends else 0, most):
        pieces = []
        for index, (end, count) in enumerate(zip(ends, counts, strict=True)):
            start, stop = (min(max(bound - end + count, 0), count) for bound in (begin, begin + most))
            if start < stop:
                pieces.append((index, start, stop))
        yield begin, pieces


def _views(tensors: Sequence[Tensor], pieces: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    return [tensors[index][start:stop] for index, start, stop in pieces]


def _write(payload: Tensor, coded: list[tuple[int, Tensor]]) -> None:
    runs: list[tuple[int, list[Tensor]]] = []
    end = -1
    for start, part in sorted(coded, key=itemgetter(0)):
        if start == end:
            runs[-1][1].append(part)
        else:
            runs.append((start, [part]))
        end = start + part.numel()
    for start, run in runs:
        into = payload[start : start + sum(map(len, run))]
        torch.cat(run, out=into) if run[0].is_cpu else into.copy_(torch.cat(run))


def _reals(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return real.flatten()


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

    def lengths(self, count: int) -> list[int]:
        return [4 * self._blocks(count), count]

    def compress(self, numbers: Tensor) -> list[Tensor]:
        rows = known = self._rows(numbers.float())
        scales = rows.abs().amax(1) / 127
        if not rows.is_cpu or not bool(scales.isfinite().all()):  # a device would have to be waited for
            known = rows.where(rows.isfinite(), 0.0)
            scales = known.abs().amax(1) / 127
        # With 16 bits of precision, 127 times a scale is exact, so decoded ones are encoded to the same bytes again.
        scales = scales.view(torch.int32).bitwise_and(-256).view(torch.float32)
        steps = torch.where(scales > 0, scales, 1.0)
        multiples = (known / steps[:, None]).round().clamp_(-127, 127)  # of a subnormal scale, more is cut off
        if known is not rows:
            multiples = multiples.where(known == rows, -128.0)  # which else is none: it is decoded as NaN
        return [scales, multiples.to(torch.int8).flatten()[: numbers.numel()]]

    def expand(self, payload: Tensor, count: int) -> Tensor:
        scales, multiples = payload.split([4 * self._blocks(count), count])
        rows = self._rows((multiples := multiples.view(torch.int8)).float())
        numbers: Tensor = rows * scales.view(torch.float32)[:, None]
        if not rows.is_cpu or int(multiples.amin()) == -128:
            numbers = numbers.where(rows != -128, torch.nan)
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

    def lengths(self, count: int) -> list[int]:
        return [count * self.dtype.itemsize]

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

    def lengths(self, count: int) -> list[int]:
        return [4 * self._sent(count)] * 2

    @override
    def _encode(self, unsent: Sequence[Tensor], payload: Tensor) -> None:
        counts, sent, best = list(map(len, unsent)), len(payload) // 8, list[Tensor]()
        for begin, pieces in _cut(counts, AT_ONCE):
            flat = torch.cat(_views(unsent, pieces))
            # Non-finite elements count as the largest, so that the server receives them.
            magnitudes = flat.abs().nan_to_num(nan=torch.inf)
            top = magnitudes.topk(min(sent, len(flat)), sorted=False).indices
            found = [magnitudes[top], top + begin, flat[top].float()]
            best = list(map(torch.cat, zip(best, found, strict=True))) if best else found
            if len(best[0]) > sent:
                top = best[0].topk(sent, sorted=False).indices
                best = [each[top] for each in best]
        if not best:
            return
        places, order = best[1].sort()
        numbers = best[2][order]
        _write(payload, [(0, torch.cat([places.to(torch.int32).view(torch.uint8), numbers.view(torch.uint8)]))])
        ends = list(accumulate(counts))
        known = payload[: 4 * sent].view(torch.int32)  # on the CPU: no further wait for a device
        bounds = torch.searchsorted(known, torch.tensor(ends, dtype=torch.int32)).tolist()
        for rest, end, start, stop in zip(unsent, ends, [0, *bounds], bounds, strict=False):
            if start < stop:
                rest[places[start:stop] - (end - len(rest))] -= numbers[start:stop].to(rest)

    def expand(self, payload: Tensor, count: int) -> Tensor:
        places, numbers = payload.tensor_split(2)
        where = places.view(torch.int32).long()
        if where.numel() and not 0 <= int(where.min()) <= int(where.max()) < count:
            raise ValueError(f"a place is not among {count} numbers")
        flat = torch.zeros(count, device=payload.device)
        flat[where] = numbers.view(torch.float32)
        return flat

    def _sent(self, count: int) -> int:
        if count >= 1 << 31:
            raise ConfigurationError(
                f'compression="topk": {count:,} numbers of one optimizer; it can tell 2**31 places apart'
            )
        return min(count, max(1, round(self.fraction * count)))
