"""``bf16`` and ``fp16``: each number rounded to 16 bits."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_omni.wire.formats.base import register
from lightning_omni.wire.formats.error_feedback import Lossy


class Rounded(Lossy, frozen=True, kw_only=True):
    """A format that rounds to another dtype. A number beyond its range travels as the largest, with a residual."""

    dtype: ClassVar[torch.dtype]

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
