"""Rules for the training loss with a chosen setting: divergence, and a plateau that a trial may leave."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from lightning_omni.json_dataclasses import Serializable
from lightning_omni.tuning.model.setting import Setting
from lightning_omni.tuning.search import constants as c


class DivergenceGuard:
    """A rank's running mean loss with one setting; a mean over ranks above ``threshold``, or NaN, is divergence."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._mean: Tensor | None = None
        self._lost: Tensor | None = None
        self._refused = 0

    def batch_done(self, loss: Tensor | None, is_guarded: bool, push_is_finite: bool | None) -> None:
        """Record a batch; its ``loss`` and ``push_is_finite`` are None if unknown.

        ``is_guarded`` tells whether a server rejects non-finite pushes, so that a non-finite loss does no harm.
        """
        if loss is not None:
            loss, before = loss.detach().float().mean(), self._mean
            is_finite, lost = torch.isfinite(loss), torch.zeros_like(loss) if self._lost is None else self._lost
            mean = loss.clone() if before is None else before.lerp(loss, c.NEWEST_LOSS)
            if is_guarded and before is not None:
                mean = torch.where(is_finite, torch.where(torch.isfinite(before), mean, loss), before)
            self._mean, self._lost = mean, torch.where(is_finite, 0.0, lost + 1)  # on the device: nothing waits for it
        if push_is_finite is not None:
            self._refused = 0 if push_is_finite else self._refused + 1

    @property
    def has_given_up(self) -> bool:
        return self._refused >= c.NON_FINITE_TOLERATED

    def mean(self, like: Tensor) -> Tensor:
        """Return the running mean of the loss and 1, to be summed over ranks.

        After too many losses or pushes in a row that were not finite it returns NaN and 1, and before any known loss
        two zeros.
        """
        if self.has_given_up:
            return like.new_tensor([math.nan, 1.0])
        if self._mean is None or self._lost is None:
            return like.new_zeros(2)
        mean = torch.where(self._lost < c.NON_FINITE_TOLERATED, self._mean, math.nan)
        return torch.stack([mean.to(like), like.new_ones(())])

    def is_worse(self, total: float, ranks: float) -> bool:
        return ranks > 0 and not total / ranks <= self.threshold


@dataclass
class TrainingLosses(Serializable):
    """The training loss with one setting, and whether it is flat.

    Attributes:
        first: loss at the start of the run; NaN if unknown.
        windows: mean loss of each window: an epoch, or a part of one.
        is_stale: whether its gradients are stale, because each group's gradient makes a step of its own.
        next_trial: number of windows after which another trial may begin.

    Example:
        >>> curve = TrainingLosses(first=2.3, windows=[1.0, 0.50, 0.49])
        >>> curve.is_flat, round(curve.gained, 2)
        (True, 0.01)
    """

    first: float
    windows: list[float] = field(default_factory=list)
    setting: Setting | None = None
    is_stale: bool = True
    trials: int = 0
    next_trial: float = 0.0

    def trial_begins(self) -> None:
        self.trials += 1
        self.next_trial = c.LONGER**self.trials * len(self.windows)

    @property
    def now(self) -> float:
        return self._mean(len(self.windows))

    @property
    def gained(self) -> float:
        """Return the decrease of the loss while the number of windows grew by the factor `c.LONGER`."""
        return self._mean(round(len(self.windows) / c.LONGER)) - self.now

    @property
    def is_flat(self) -> bool:
        """Return whether the gain is a small part of the decrease since the start, and of the loss itself.

        Without stale gradients, it is flat only if it does not fall at all; with too few windows, never.
        """
        if len(self.windows) < c.FEWEST_WINDOWS:
            return False
        if not self.is_stale:
            return self.gained <= _rounding(self)
        return self.gained <= min(c.FLAT * abs(self.first - self.now), c.CLEAR_CHANGE * abs(self.now))

    def _mean(self, end: int) -> float:
        count = max(1, round(c.LATE * len(self.windows)))
        last = self.windows[max(0, end - count) : end]
        return statistics.fmean(last) if last else math.nan


class TrialOutcome(IntEnum):
    BETTER = 0
    """The trial has lowered the loss by more than the setting before is expected to."""
    NEITHER = 1
    """The trial has lowered the loss by less than that, or not at all."""
    WORSE = 2
    """The loss is higher than before the trial, NaN or unknown."""

    @classmethod
    def of(cls, losses: Sequence[float], curve: TrainingLosses) -> TrialOutcome:
        _, last = _latest(losses)
        if last and lowers_more(last, curve):
            return cls.BETTER
        return cls.NEITHER if last and statistics.fmean(last) <= curve.now + _rounding(curve) else cls.WORSE


def is_falling(losses: Sequence[float]) -> bool:
    earlier, last = _latest(losses)
    if not earlier:
        return False
    return statistics.fmean(earlier) - statistics.fmean(last) > math.hypot(_error(earlier), _error(last))


def _latest(losses: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    count = math.ceil(c.LAST * len(losses))
    return losses[-2 * count : -count], losses[-count:]


def lowers_more(losses: Sequence[float], curve: TrainingLosses) -> bool:
    """Return whether a trial's last batches have lower losses than the setting before is expected to reach.

    That setting is expected to repeat any gain of the last `c.LONGER`-fold growth of its windows. A difference below
    the standard error of the trial's mean does not count.
    """
    return curve.now - statistics.fmean(losses) > max(0.0, curve.gained) + _error(losses) + _rounding(curve)


def _rounding(curve: TrainingLosses) -> float:
    return 1e-6 * abs(curve.now)


def _error(losses: Sequence[float]) -> float:
    if not math.isfinite(math.fsum(losses)):
        return math.nan
    return statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0


__all__ = ["TrainingLosses", "TrialOutcome", "is_falling", "lowers_more"]
