"""``topk``: only the elements of the largest magnitude travel."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_omni.checks import check_number
from lightning_omni.errors import ConfigurationError
from lightning_omni.wire.formats.base import register
from lightning_omni.wire.formats.error_feedback import Lossy


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
