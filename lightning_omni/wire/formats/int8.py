"""``int8``: each number as a multiple, -127 to 127, of a scale that its neighbours share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_omni.checks import check_whole
from lightning_omni.wire.formats.base import register
from lightning_omni.wire.formats.error_feedback import Lossy


@register
class Int8(Lossy, frozen=True, kw_only=True, tag="int8"):
    """A format of about a quarter of float32's bytes: one byte for each element, and a scale for each block of them.

    A block's scale is its largest magnitude over 127, so the error of each element is at most half a scale.

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
