"""The common part of lossy wire formats: one run of elements, and error feedback at the sender.

Rule: the part that a push leaves out is its sender's residual, which is added to the next push. So the decoded
elements and the residual add up to the pushed elements in any format.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from lightning_omni.wire.formats.base import RESIDUAL, Encoded, Memory, State, WireFormat
from lightning_omni.wire.layout import Layout


class Lossy(WireFormat, frozen=True, kw_only=True):
    """A format that encodes the same elements in fewer bytes.

    A subclass encodes one run of real elements, in float32, or in float64 if one of the tensors has that dtype. A
    complex element counts as two real ones.
    """

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
        there = [
            _numbers(tensor) if before is None else _numbers(tensor) + _numbers(before)
            for tensor, before in zip(tensors, owed, strict=True)
            if tensor is not None
        ]
        if not there:
            return Encoded(torch.empty(self.nbytes(0), dtype=torch.uint8), present, state)
        flat = torch.cat(there)
        parts = [part.contiguous().view(torch.uint8) for part in self.compress(flat)]
        room = memory.room(sum(part.numel() for part in parts))
        payload = torch.cat(parts, out=room) if flat.is_cpu else torch.cat(parts)
        left = iter((flat - self.expand(payload, flat.numel()).to(flat)).split([each.numel() for each in there]))
        for place, tensor in enumerate(tensors):
            if tensor is not None:
                owed[place] = _like(next(left), tensor)
        return Encoded(payload if flat.is_cpu else room.copy_(payload), present, {RESIDUAL: owed})

    def decode(self, payload: Tensor, layout: Layout, memory: Memory) -> Tensor:
        if payload.storage_offset():  # the bytes are read as wider elements, which must be aligned
            payload = payload.clone()
        buffer, views = memory.hold(layout)
        for view, part in zip(views, self.expand(payload, sum(layout.reals)).split(layout.reals), strict=True):
            view.copy_(_like(part, view))
        return buffer


def _numbers(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    wide = torch.promote_types(real.dtype, torch.float32)
    return real.to(wide).flatten()


def _like(numbers: Tensor, tensor: Tensor) -> Tensor:
    """Return real elements in the shape of a tensor, in their own precision."""
    if tensor.is_complex():
        real, imaginary = numbers.reshape(*tensor.shape, 2).unbind(-1)
        return torch.complex(real, imaginary)  # no view, because views of complex numbers must be aligned
    return numbers.view_as(tensor)
