"""Notices that a run has diverged with what was chosen. What it is rolled back to then is a `RollbackPoint`.

A setting that looks good may diverge a thousand batches later. A run that would have gone well without a tuner must not
end that way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_omni.search import constants as c


class DivergenceGuard:
    """Follows the training loss of one rank since the last search.

    Args:
        threshold: the training loss above which the run has diverged.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._mean: Tensor | None = None
        self._lost: Tensor | None = None
        self._refused = 0

    def batch_done(self, loss: Tensor | None, is_guarded: bool, applied: bool | None) -> None:
        """A batch was trained.

        Args:
            loss: its loss, or None if there is none.
            is_guarded: whether there is a server, which refuses what is not finite: a loss that is not does no harm.
            applied: whether what the group pushed was applied; None if it pushed nothing.
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
        """Whether nothing that the group pushes is applied any more; alike on all its members."""
        return self._refused >= c.NON_FINITE_TOLERATED

    def mean(self, like: Tensor) -> Tensor:
        """The running mean of the loss, and 1, to be added up over the ranks; NaN and 1 if nothing is learnt any more.

        Two zeros if this rank has trained nothing yet, as where a run goes on at the end of an epoch.
        """
        if self.gives_up:
            return like.new_tensor([math.nan, 1.0])
        if self._mean is None or self._lost is None:
            return like.new_zeros(2)
        mean = torch.where(self._lost < c.NON_FINITE_TOLERATED, self._mean, math.nan)
        return torch.stack([mean.to(like), like.new_ones(())])

    def is_worse(self, total: float, ranks: float) -> bool:
        """Whether the run has diverged.

        Args:
            total: of the mean losses of all ranks.
            ranks: that have one.
        """
        return ranks > 0 and not total / ranks <= self.threshold


def loss_in(outputs: Any, accumulated: int) -> Tensor | None:
    """The loss in what Lightning passes to ``on_train_batch_end``, undivided."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss * accumulated if isinstance(loss, Tensor) else None
