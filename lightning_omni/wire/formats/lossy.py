"""The lossy wire formats: bf16, fp16, int8 and top-k."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from lightning_omni.checks import check_number, check_whole
from lightning_omni.errors import ConfigurationError
from lightning_omni.wire.formats import error_feedback
from lightning_omni.wire.formats.base import register
from lightning_omni.wire.formats.error_feedback import Lossy, pieces, write

# --- int8 -------------------------------------------------------------------------------------------------------------


@register
class Int8(Lossy, frozen=True, kw_only=True, tag="int8"):
    """A format of one byte for each element, and a scale for each block of them.

    A block's scale is about its largest magnitude over 127; the error of each element is at most half a scale.

    Args:
        block: number of elements that share a scale, 8 or more.

    Raises:
        ConfigurationError: ``block`` is no whole number of 8 or more.

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
            multiples = multiples.where(known == rows, -128.0)  # otherwise unused; it is decoded as NaN
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
    """A format of half the bytes of float32, with 11 bits of precision from about 6e-5 to 65,504."""

    dtype: ClassVar[torch.dtype] = torch.float16


# --- topk -------------------------------------------------------------------------------------------------------------


@register
class TopK(Lossy, frozen=True, kw_only=True, tag="topk"):
    """A format of the largest elements of a push with their indices, 8 bytes each; the residual collects the others.

    Args:
        fraction: fraction of the elements that travel, above 0 to 1; at least one travels.

    Raises:
        ConfigurationError: the fraction is out of range; in use, 2**31 elements or more.

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
        for begin, views in pieces(unsent, error_feedback.AT_ONCE):
            flat = torch.cat(views)
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
        write(payload, [(0, torch.cat([places.to(torch.int32).view(torch.uint8), numbers.view(torch.uint8)]))])
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
