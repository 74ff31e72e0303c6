"""Trials of the user's own setting in a run that hardly learns any more with the chosen one.

Stale gradients may keep the loss above that of synchronous training. When the loss is flat, the run continues with the
user's own setting for a while, and keeps it if that lowers the loss by more than the chosen setting is still expected
to. If the loss is then higher, the weights before the trial are restored.

If nothing was learnt since the choice, its steps may have spoilt the weights: the trial then begins with the weights
before the choice.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_omni.runtime.state.checkpoint import RollbackPoint
from lightning_omni.strategy.lightning_internals.callbacks import copy_averages_to_module
from lightning_omni.strategy.lightning_internals.loops import will_step
from lightning_omni.tuning.callback.losses import TrainingLosses, TrialOutcome, is_falling
from lightning_omni.tuning.callback.settings import AppliedSetting
from lightning_omni.tuning.callback.speed import SpeedRecord
from lightning_omni.tuning.callback.tuned_run import Command, TunedRun, TunerReports
from lightning_omni.tuning.search import constants as c


@dataclass
class UserSettingTrial:
    """A trial of the user's own setting.

    Attributes:
        length: steps of the trial, unless its loss falls for longer.
        losses: losses of its batches, on this rank.
    """

    length: int
    end: int
    before: RollbackPoint
    losses: list[Tensor] = field(default_factory=list)
    taken: int = 0


class PlateauGuard:
    """A watch for plateaus of the training loss, which begins trials. All ranks call its methods.

    A trial begins where all groups synchronize, and ends inside an epoch, or with training.
    """

    def __init__(self, run: TunedRun, applied: AppliedSetting, speeds: SpeedRecord, reports: TunerReports) -> None:
        self._run, self._applied, self._speed_record, self._reports = run, applied, speeds, reports
        self.trial: UserSettingTrial | None = None
        self._noted: list[Tensor] = []  # losses that belong to no window yet
        self._is_inside = False  # whether their first one was inside an epoch

    # --- Training -----------------------------------------------------------------------------------------------------

    def batch_done(self, loss: Tensor | None) -> None:
        trainer, trial, state = self._run.trainer, self.trial, self._run.state
        is_searching = state.setting is None or state.unfinished  # the losses belong to what will be chosen
        if loss is not None and (trial is not None or is_searching or self._is_watched):
            (self._noted if trial is None else trial.losses).append(loss.detach().float().mean())
        if trial is None:
            return
        trial.taken += will_step(trainer)
        if trial.taken >= trial.end and will_step(trainer) and not trainer.is_last_batch:
            self._end(trial)

    def synchronized(self, ends_epoch: bool) -> None:
        is_followed = self.trial is None and self._is_watched
        if not is_followed or self._follow(least=int(ends_epoch and not self._is_inside)):
            self._noted, self._is_inside = [], not ends_epoch

    @property
    def is_due(self) -> bool:
        if not self._is_watched:
            return False
        run = self._run
        curve = run.state.losses
        to_form = 2 * self._applied.seconds_to_form if run.setting.groups > 1 else 0.0  # to one group and back
        pays = to_form <= run.options.budget * run.seconds
        is_flat = curve.is_flat and len(curve.windows) >= curve.next_trial
        return bool(run.broadcast(int(is_flat and pays and self._length < self._steps_left)))

    @property
    def has_learnt(self) -> bool:
        """Return whether the run has learnt since the choice, as far as is known."""
        return not self._is_watched or math.isnan(self._run.state.learnt_below)

    @property
    def _is_watched(self) -> bool:
        state = self._run.state
        is_chosen = state.setting is not None and not state.is_final and not self._applied.is_user_setting
        return self._run.may_change_inside and is_chosen  # a trial ends inside an epoch

    def _follow(self, least: int) -> bool:
        """Add as many windows as the recorded batches fill, at least ``least``; return whether there are any."""
        run, state = self._run, self._run.state
        if state.setting != state.losses.setting:
            is_stale = run.world.method.updates_per_batch(run.setting.groups) > 1
            first = run.searches[0].observation.batches.first_loss if run.searches else math.nan  # rank 0 decides
            state.losses = TrainingLosses(first, setting=state.setting, is_stale=is_stale)
        (batches,) = self._sum_over_ranks(torch.tensor([float(len(self._noted))]))
        samples = batches * run.batch(1) / run.window
        count = max(int(samples / (c.SHORTEST_WINDOW * self._batch)), least) if samples else 0
        if not count:
            return False
        # Each group trains about as many batches in each window as in any other.
        ends = [number * len(self._noted) // count for number in range(count + 1)]
        losses = torch.stack(self._noted).tolist() if self._noted else []
        sums = [[math.fsum(losses[begin:end]), end - begin] for begin, end in itertools.pairwise(ends)]
        for total, number in self._sum_over_ranks(torch.tensor(sums)):
            state.losses.windows.append(total / number)
            if total / number < state.learnt_below:
                state.learnt_below = math.nan
        state.samples += samples
        return True

    def _sum_over_ranks(self, own: Tensor) -> list[Any]:
        summed: Tensor = self._run.strategy.reduce(own.to(self._run.strategy.root_device), reduce_op="sum")
        return list(summed.tolist())

    # --- Trials -------------------------------------------------------------------------------------------------------

    @property
    def _length(self) -> int:
        return max(c.FEWEST_STEPS, math.ceil(c.TRIAL * self._run.state.samples / self._batch))

    @property
    def _batch(self) -> int:
        return self._run.batch(len(self._run.world.live_ranks))

    @property
    def _steps_left(self) -> float:
        run, epochs = self._run, self._run.strategy.parts.epochs
        later = (run.epochs - run.trainer.current_epoch - 1) * run.batches / run.window
        return later + (max(0.0, run.samples_per_epoch - epochs.samples) / self._batch if epochs.is_open else 0.0)

    def begin_trial(self) -> None:
        run, curve = self._run, self._run.state.losses
        steps = self._length
        starts_over = not self.has_learnt and self._applied.rollback_point is not None
        learnt = "is no lower than it was before" if starts_over else "hardly falls any more"
        run.info(
            f"OmniTuner: the training loss {learnt} ({curve.now:.4g}) with {run.state.setting}: your own setting is"
            f" tried for {steps} steps{', from the weights of before' if starts_over else ''}"
        )
        before = self._applied.begin_trial(starts_over)
        curve.trial_begins()
        self._speed_record.changed()
        self.trial = UserSettingTrial(steps, steps, before)

    def ended(self) -> None:
        trial, self.trial = self.trial, None
        if trial is None:
            return
        outcome = TrialOutcome.of(self._losses(trial), self._run.state.losses)
        if self._run.broadcast(outcome) == TrialOutcome.WORSE:
            self._applied.return_to(trial.before)
            copy_averages_to_module(self._run.trainer)

    def _losses(self, trial: UserSettingTrial) -> list[float]:
        summed = self._run.strategy.reduce(torch.stack(trial.losses), reduce_op="mean") if trial.losses else None
        return [] if summed is None else list(summed.tolist())

    def _end(self, trial: UserSettingTrial) -> None:
        """Keep the user's own setting, extend the trial, or restore the setting before it."""
        run, state = self._run, self._run.state
        losses = self._losses(trial)
        outcome = TrialOutcome.of(losses, state.losses)
        fits = trial.taken < c.LONGEST_TRIAL * trial.length and trial.length < self._steps_left
        may_go_on = outcome is not TrialOutcome.BETTER and fits
        if run.broadcast(int(may_go_on and is_falling(losses))):
            trial.end = trial.taken + trial.length
            return
        self.trial, outcome = None, TrialOutcome(run.broadcast(outcome))
        if outcome is TrialOutcome.BETTER:
            state.is_final, state.before_trial = True, None
            run.renew_choice()
            self._applied.watch(state.divergence_threshold)  # drops the rollback point
            why = "it lowers the training loss further"
        else:
            self._applied.end_trial(trial.before if outcome is TrialOutcome.WORSE else None)
            self._speed_record.changed()
            why = "your own setting, which was tried, does not lower the training loss further"
        self._reports.chosen(Command(run.setting, why=why))


__all__ = ["PlateauGuard", "UserSettingTrial"]
