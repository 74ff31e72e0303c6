"""Error feedback of lossy wire formats: the sender adds what a payload left out to its next one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import accumulate, zip_longest
from operator import itemgetter

import torch
from torch import Tensor
from typing_extensions import override

from lightning_omni.wire.formats.base import CHUNK, RESIDUAL, Decoding, Encoded, Memory, State, WireFormat
from lightning_omni.wire.layout import Layout

AT_ONCE = 1 << 22
"""Approximate number of elements encoded or decoded at once by formats that allow it, to save memory."""


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
        """Encode real elements, and subtract the encoded values from them in place."""
        counts, coded = list(map(len, unsent)), list[tuple[int, Tensor]]()
        for begin, views in pieces(unsent, self._most(AT_ONCE, sum(counts))):
            flat = torch.cat(views)
            parts = [part.contiguous().view(torch.uint8) for part in self.compress(flat)]
            numbers = self.expand(torch.cat(parts), len(flat)).to(flat)
            torch._foreach_sub_(views, list(numbers.split(list(map(len, views)))))
            places = self._places(begin, len(flat), sum(counts))
            coded += [(place.start, part) for place, part in zip(places, parts, strict=True)]
            if sum(part.numel() for _, part in coded) >= CHUNK // 2:
                write(payload, coded)
                coded = []
        write(payload, coded)

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
        for begin, views in pieces(reals, self._most(nbytes // 4, sum(counts))):
            length, whole = sum(map(len, views)), sum(counts)
            self._decode((yield [slice(None)] if length == whole else self._places(begin, length, whole)), views)

    def _decode(self, payload: Tensor, reals: Sequence[Tensor]) -> None:
        counts = list(map(len, reals))
        for begin, views in pieces(reals, self._most(AT_ONCE, sum(counts))):
            lengths = list(map(len, views))
            places = self._places(begin, sum(lengths), sum(counts))
            part = payload if sum(lengths) == sum(counts) else torch.cat([payload[place] for place in places])
            for view, numbers in zip(views, self.expand(part, sum(lengths)).split(lengths), strict=True):
                view.copy_(numbers)


def pieces(tensors: Sequence[Tensor], most: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the elements of flat tensors, ``most`` at once: the number of those before, and views of the tensors."""
    counts = list(map(len, tensors))
    ends = list(accumulate(counts))
    for begin in range(0, ends[-1] if ends else 0, most):
        views = []
        for tensor, end, count in zip(tensors, ends, counts, strict=True):
            start, stop = (min(max(bound - end + count, 0), count) for bound in (begin, begin + most))
            if start < stop:
                views.append(tensor[start:stop])
        yield begin, views


def write(payload: Tensor, coded: list[tuple[int, Tensor]]) -> None:
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
