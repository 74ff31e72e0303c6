"""Whether a training loss is flat, and whether a trial of the user's own setting has lowered it: numbers alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from lightning_omni.performance.forecast import Setting
from lightning_omni.search import constants as c
from lightning_omni.serialization import Serializable


@dataclass
class TrainingLosses(Serializable):
    """The training loss with one setting, and whether it is flat.

    Args:
        first: loss at the start of the run.

    Attributes:
        windows: mean loss of each window, the latest one last: an epoch, or a part of one.
        setting: that they were trained with.
        is_stale: whether gradients are stale with it: the optimizer steps for each group's.
        trials: of the user's own setting, so far.
        next_trial: windows after which there may be another.

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
        """The more often the user's own setting was no better, the longer it takes until it is tried again."""
        self.trials += 1
        self.next_trial = c.LONGER**self.trials * len(self.windows)

    @property
    def now(self) -> float:
        """The mean of the last windows; NaN if there are none."""
        return self._mean(len(self.windows))

    @property
    def gained(self) -> float:
        """By how much the loss has fallen while the number of windows grew by the factor `c.LONGER`."""
        return self._mean(round(len(self.windows) / c.LONGER)) - self.now

    @property
    def is_flat(self) -> bool:
        """Whether that is a small part of what was learnt since the start, and of the loss, which may be near zero.

        Stale gradients may keep a loss from where it would arrive while it still falls a little. Where none are, it is
        flat only if it does not fall at all. It never is if there are too few windows.
        """
        if len(self.windows) < c.FEWEST_WINDOWS:
            return False
        if not self.is_stale:
            return self.gained <= _rounding(self)
        return self.gained <= min(c.FLAT * abs(self.first - self.now), c.STEEP * abs(self.now))

    def _mean(self, end: int) -> float:
        """Of the last windows up to there."""
        count = max(1, round(c.LATE * len(self.windows)))
        last = self.windows[max(0, end - count) : end]
        return statistics.fmean(last) if last else math.nan


class TrialOutcome(IntEnum):
    """What a trial has come to: numbers, so that rank 0 can tell the others."""

    BETTER = 0
    """It has lowered the loss by more than the setting before is expected to."""
    NEITHER = 1
    """It has lowered the loss by less than that."""
    WORSE = 2
    """The loss is higher than before it."""

    @classmethod
    def of(cls, losses: Sequence[float], curve: TrainingLosses) -> TrialOutcome:
        """That of a trial.

        Args:
            losses: of all of its batches.
            curve: of the setting before.
        """
        _, last = _latest(losses)
        if last and lowers_more(last, curve):
            return cls.BETTER
        return cls.NEITHER if last and statistics.fmean(last) <= curve.now + _rounding(curve) else cls.WORSE


def is_falling(losses: Sequence[float]) -> bool:
    """Whether the loss of a trial falls, by more than its scatter explains: larger steps may well raise it at first.

    Args:
        losses: of all of its batches.
    """
    earlier, last = _latest(losses)
    if not earlier:
        return False
    return statistics.fmean(earlier) - statistics.fmean(last) > math.hypot(_error(earlier), _error(last))


def _latest(losses: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The last part of them, which counts, and before it the part that is as long."""
    count = math.ceil(c.LAST * len(losses))
    return losses[-2 * count : -count], losses[-count:]


def lowers_more(losses: Sequence[float], curve: TrainingLosses) -> bool:
    """Whether a trial has lowered the loss by more than the setting before is expected to.

    What that lowered it by, while its windows grew by the factor `c.LONGER`, it is expected to do once more: a run that
    has taken so long may well take as long again. Less than the standard error of the trial's mean is not told from it.

    Args:
        losses: of the last batches of the trial.
        curve: of the setting before.
    """
    return curve.now - statistics.fmean(losses) > max(0.0, curve.gained) + _error(losses) + _rounding(curve)


def _rounding(curve: TrainingLosses) -> float:
    """Differences that single precision cannot tell."""
    return 1e-6 * abs(curve.now)


def _error(losses: Sequence[float]) -> float:
    """Standard error of their mean; NaN if one is not finite."""
    if not math.isfinite(math.fsum(losses)):
        return math.nan
    return statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0


__all__ = ["TrainingLosses", "TrialOutcome", "is_falling", "lowers_more"]
