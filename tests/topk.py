"""A wire format that is none of the package's: the largest numbers travel, and the sender remembers the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from core import Encoded, Layout, Memory, State, WireFormat, register_format
from torch import Tensor


@register_format
class TopK(WireFormat, frozen=True, kw_only=True, tag="largest"):
    """A count, the places of so many numbers among all that are there, and these; as float64, so as to round nothing.

    Attributes:
        fraction: of the numbers that travel at most; of those that are zero, none does.
    """

    fraction: float = 0.25

    def sizes(self, layout: Layout) -> tuple[int, int]:
        return 8, 8 + 16 * self._most(layout)

    def encode(self, tensors: Sequence[Tensor | None], layout: Layout, state: State, memory: Memory) -> Encoded:
        present = tuple(tensor is not None for tensor in tensors)
        rest: list[Tensor | None] = []
        for tensor, before in zip_longest(tensors, state.get("residual", ())):
            rest.append(before if tensor is None else tensor.clone() if before is None else tensor + before)
        there = [each for each, is_there in zip(rest, present, strict=True) if is_there and each is not None]
        flat = torch.cat([each.flatten() for each in there]) if there else torch.zeros(0)
        count = min(self._most(layout.subset(present)), int(flat.count_nonzero()))
        places = flat.abs().topk(count).indices
        parts = [torch.tensor([count]), places, flat[places].double()]
        flat[places] = 0
        for each, left in zip(there, flat.split([each.numel() for each in there]), strict=True):
            each.copy_(left.view_as(each))
        return Encoded(torch.cat([part.cpu().view(torch.uint8) for part in parts]), present, {"residual": rest})

    def decode(self, payload: Tensor, layout: Layout, memory: Memory) -> Tensor:
        count = int(payload[:8].view(torch.int64))
        if payload.numel() != 8 + 16 * count:
            raise ValueError(f"{count} numbers were announced")
        places, numbers = payload[8:].split(8 * count) if count else (payload[8:], payload[8:])
        buffer, views = memory.hold(layout)
        flat = torch.zeros(layout.numel, dtype=torch.float64)
        flat[places.view(torch.int64)] = numbers.view(torch.float64)
        for view, part in zip(views, flat.split([view.numel() for view in views]), strict=True):
            view.copy_(part.view_as(view))
        return buffer

    def _most(self, layout: Layout) -> int:
        return min(layout.numel, max(1, int(self.fraction * layout.numel)))  # a NaN must find its way out
