"""A run that hardly learns any more with what was chosen tries the user's own setting once more.

Groups that exchange asynchronously may be far ahead early and stop short of where synchronous training arrives: stale
gradients keep the loss from falling further, and no measurement of the first batches can tell. Late, when the loss is
flat, it costs little to find out: the run goes on with the user's own setting for a while, and keeps to it if that
lowers the loss by more than the chosen setting can still be expected to. If the loss is even higher after the trial,
the run goes on from the weights of before it: larger steps than the chosen ones may well raise it at first.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from lightning_omni.optimizer.run_state import RollbackPoint
from lightning_omni.performance.forecast import Setting
from lightning_omni.search import constants as c
from lightning_omni.strategy._private import will_step
from lightning_omni.tuner.applied import AppliedSetting
from lightning_omni.tuner.divergence import loss_in
from lightning_omni.tuner.reports import TunerReports
from lightning_omni.tuner.retuning import Retuning
from lightning_omni.tuner.run import TunedRun
from lightning_omni.tuner.state import Command
from lightning_omni.tuner.throughput import SpeedHistory


@dataclass
class EpochLosses:
    """The mean training loss of each epoch with one setting, and whether it is flat.

    Args:
        first: loss at the start of the run.

    Attributes:
        epochs: mean loss of each epoch, the latest one last.

    Example:
        >>> curve = EpochLosses(first=2.3, epochs=[1.0, 0.50, 0.49])
        >>> curve.is_flat, round(curve.gained, 2)
        (True, 0.01)
    """

    first: float
    epochs: list[float] = field(default_factory=list)

    @property
    def now(self) -> float:
        """The mean of the last epochs; NaN if there are none."""
        return self._mean(len(self.epochs))

    @property
    def gained(self) -> float:
        """By how much the loss has fallen while the number of epochs grew by the factor `c.LONGER`."""
        return self._mean(round(len(self.epochs) / c.LONGER)) - self.now

    @property
    def is_flat(self) -> bool:
        """Whether that is a small part of what was learnt since the start, and of the loss, which may be near zero.

        It is not if there are too few epochs.
        """
        if len(self.epochs) < c.FEWEST_EPOCHS:
            return False
        return self.gained <= min(c.FLAT * abs(self.first - self.now), c.STEEP * abs(self.now))

    def _mean(self, end: int) -> float:
        """Of the last epochs up to there."""
        count = max(1, round(c.LATE * len(self.epochs)))
        last = self.epochs[max(0, end - count) : end]
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
    def of(cls, losses: Sequence[float], curve: EpochLosses) -> TrialOutcome:
        """That of a trial.

        Args:
            losses: of all of its batches.
            curve: of the setting before.
        """
        _, last = _latest(losses)
        if last and lowers_more(last, curve):
            return cls.BETTER
        return cls.NEITHER if last and statistics.fmean(last) <= curve.now else cls.WORSE


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


def lowers_more(losses: Sequence[float], curve: EpochLosses) -> bool:
    """Whether a trial has lowered the loss by more than the setting before is expected to.

    What that lowered it by, while its epochs grew by the factor `c.LONGER`, it is expected to do once more: a run that
    has taken so long may well take as long again. Less than the standard error of the trial's mean is not told from it.

    Args:
        losses: of the last batches of the trial.
        curve: of the setting before.
    """
    rounding = 1e-6 * abs(curve.now)
    return curve.now - statistics.fmean(losses) > max(0.0, curve.gained) + _error(losses) + rounding


def _error(losses: Sequence[float]) -> float:
    """Standard error of their mean; NaN if one is not finite."""
    if not math.isfinite(math.fsum(losses)):
        return math.nan
    return statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0


@dataclass
class OwnTrial:
    """The user's own setting, which is tried.

    Attributes:
        length: steps for which it is made, if its loss does not fall for longer.
        steps: that are left for now.
        taken: steps so far.
        speeds: of the run before.
        before: where that was.
        losses: of the steps so far, on this rank.
    """

    length: int
    steps: int
    speeds: SpeedHistory
    before: RollbackPoint
    losses: list[Tensor] = field(default_factory=list)
    taken: int = 0


class PlateauWatch:
    """Watches the training loss for a plateau, and tries the user's own setting there.

    A trial begins at the end of an epoch, which all groups reach together; in one group all ranks take the same steps,
    so that it can end in the middle of the next.

    Args:
        run: that is tuned.
        applied: what it trains with.
        retuning: is told of changes.
        reports: tell of them.
    """

    def __init__(self, run: TunedRun, applied: AppliedSetting, retuning: Retuning, reports: TunerReports) -> None:
        self._run, self._applied, self._retuning, self._reports = run, applied, retuning, reports
        self._setting: Setting | None = None
        self._curve = EpochLosses(math.nan)
        self._trial: OwnTrial | None = None
        self._next = self._samples = 0.0
        self._epoch: list[Tensor] = []

    # --- While it trains ----------------------------------------------------------------------------------------------

    def batch_done(self, outputs: Any) -> None:
        """A batch was trained.

        Args:
            outputs: of the training step.
        """
        trainer, trial = self._run.trainer, self._trial
        loss = loss_in(outputs, int(trainer.accumulate_grad_batches))
        losses = [loss.detach().float().mean()] if loss is not None else []
        if trial is None:
            self._epoch += losses
            return
        trial.losses += losses
        trial.steps -= will_step(trainer)
        trial.taken += will_step(trainer)
        if trial.steps <= 0 and will_step(trainer) and not trainer.is_last_batch:
            self._end(trial)

    def epoch_done(self) -> None:
        """An epoch has ended, for all groups. On all ranks."""
        if not self.is_trying and self._is_watched:
            self._follow()
        self._epoch = []

    @property
    def is_trying(self) -> bool:
        """Whether the user's own setting is being tried."""
        return self._trial is not None

    @property
    def is_due(self) -> bool:
        """Whether it is to be tried, at the end of an epoch. All ranks ask, and hear the same."""
        if not self._is_watched:
            return False
        curve, run = self._curve, self._run
        pays = 2 * self._applied.seconds_to_form <= run.options.budget * run.seconds  # to form groups, once and back
        is_flat = curve.is_flat and len(curve.epochs) >= self._next
        return bool(run.hear(int(is_flat and pays and self._length < self._steps_left)))

    @property
    def _is_watched(self) -> bool:
        """Whether the run trains with something that was chosen; the same on all ranks."""
        state = self._run.state
        is_final = state.diverged or state.returned or state.setting is None
        return self._run.learns_from_run and not is_final and not self._applied.is_users_own

    def _follow(self) -> None:
        """One more epoch of the curve; on all ranks."""
        run = self._run
        if run.state.setting != self._setting:
            tried = run.searches[0].tried if run.searches else []  # rank 0 knows, and decides
            self._setting, self._curve = run.state.setting, EpochLosses(tried[0].first_loss if tried else math.nan)
            self._next = 0.0
        device = run.strategy.root_device
        total = torch.stack(self._epoch).sum() if self._epoch else torch.zeros((), device=device)
        together = torch.stack([total.to(device), torch.full_like(total, len(self._epoch), device=device)])
        loss, batches = run.strategy.reduce(together, reduce_op="sum").tolist()
        if batches:
            self._curve.epochs.append(loss / batches)
            self._samples += batches * run.batch(1) / int(run.trainer.accumulate_grad_batches)

    # --- To try -------------------------------------------------------------------------------------------------------

    @property
    def _length(self) -> int:
        """Steps of a trial."""
        run = self._run
        return max(c.FEWEST_STEPS, math.ceil(c.TRIAL * self._samples / run.batch(len(run.world.live_ranks))))

    @property
    def _steps_left(self) -> float:
        """Of epochs that have not begun: a run should not end in the middle of a trial."""
        run = self._run
        return (run.epochs - run.trainer.current_epoch - 1) * run.batches / int(run.trainer.accumulate_grad_batches)

    def begin_trial(self) -> None:
        """From here on the user's own setting. On all ranks."""
        run, curve = self._run, self._curve
        steps = self._length
        run.say(
            f"OmniTuner: the training loss hardly falls any more ({curve.now:.4g}) with {run.state.setting}: your own"
            f" setting is tried for {steps} steps"
        )
        before = self._applied.begin_trial()
        self._next = c.LONGER * len(curve.epochs)
        self._trial = OwnTrial(steps, steps, self._retuning.stash_speeds(), before)

    def _end(self, trial: OwnTrial) -> None:
        """The user's own setting stays, or is tried on, or the run goes on as before. On all ranks, of one group."""
        run, state, reduce = self._run, self._run.state, self._run.strategy.reduce
        losses = reduce(torch.stack(trial.losses), reduce_op="mean").tolist() if trial.losses else []
        outcome = TrialOutcome.of(losses, self._curve)
        fits = trial.taken < c.LONGEST_TRIAL * trial.length and trial.length < self._steps_left
        may_go_on = outcome is not TrialOutcome.BETTER and fits
        if run.hear(int(may_go_on and is_falling(losses))):
            trial.steps = trial.length
            return
        self._trial, outcome = None, TrialOutcome(run.hear(outcome))
        if outcome is TrialOutcome.BETTER:
            state.returned, state.before_trial = True, None
            why = "it lowers the training loss further"
        else:
            self._applied.end_trial(trial.before if outcome is TrialOutcome.WORSE else None)
            self._retuning.restore_speeds(trial.speeds)
            why = "your own setting does not lower the training loss further"
        assert state.setting is not None
        self._reports.chosen(Command(state.setting, why=why))


__all__ = ["EpochLosses", "OwnTrial", "PlateauWatch", "TrialOutcome", "is_falling", "lowers_more"]
