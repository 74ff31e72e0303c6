"""Detection of a run that has diverged with the chosen setting; a `RollbackPoint` then restores it.

A setting that looks good may diverge a thousand batches later. A run that would have gone well without a tuner must not
end that way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_omni.tuning.search import constants as c


class DivergenceGuard:
    """A running mean of one rank's training loss since the last search.

    Args:
        threshold: the training loss above which the run has diverged.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._mean: Tensor | None = None
        self._lost: Tensor | None = None
        self._refused = 0

    def batch_done(self, loss: Tensor | None, is_guarded: bool, applied: bool | None) -> None:
        """Record a batch.

        Args:
            loss: its loss, or None if there is none.
            is_guarded: whether a server rejects non-finite pushes, so that a non-finite loss does no harm.
            applied: whether the group's push was applied; None if there was none.
        """
        if loss is not None:
            loss, before = loss.detach(), self._mean
            is_finite, lost = torch.isfinite(loss), torch.zeros_like(loss) if self._lost is None else self._lost
            mean = loss.clone() if before is None else before.lerp(loss, c.NEWEST_LOSS)
            if is_guarded and before is not None:
                mean = torch.where(is_finite, torch.where(torch.isfinite(before), mean, loss), before)
            self._mean, self._lost = mean, torch.where(is_finite, 0.0, lost + 1)  # on the device: nothing waits for it
        if applied is not None:
            self._refused = 0 if applied else self._refused + 1

    @property
    def gives_up(self) -> bool:
        """Return whether too many pushes in a row were not applied; the same on all members of the group."""
        return self._refused >= c.NON_FINITE_TOLERATED

    def mean(self, like: Tensor) -> Tensor:
        """Return the running mean of the loss and 1, to be summed over ranks; NaN and 1 if nothing is learnt any more.

        A rank that has trained nothing yet, as after a resume at an epoch's end, returns two zeros.
        """
        if self.gives_up:
            return like.new_tensor([math.nan, 1.0])
        if self._mean is None or self._lost is None:
            return like.new_zeros(2)
        mean = torch.where(self._lost < c.NON_FINITE_TOLERATED, self._mean, math.nan)
        return torch.stack([mean.to(like), like.new_ones(())])

    def is_worse(self, total: float, ranks: float) -> bool:
        """Return whether the mean loss of the ranks that have one exceeds the threshold, or is NaN."""
        return ranks > 0 and not total / ranks <= self.threshold


def loss_in(outputs: Any, accumulated: int) -> Tensor | None:
    """Return the undivided loss from the outputs that Lightning passes to ``on_train_batch_end``."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss * accumulated if isinstance(loss, Tensor) else None
