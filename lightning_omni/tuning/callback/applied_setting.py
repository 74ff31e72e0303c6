"""The setting that a run trains with: applied on every rank, watched, and rolled back if the run diverges with it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_omni.methods import method_named, with_period
from lightning_omni.runtime.data.balance import Balance
from lightning_omni.runtime.parallel_state import Communication
from lightning_omni.runtime.state.rollback import RollbackPoint
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.strategy.lightning_internals.callbacks import averaged_tensors, restart_empty_averages
from lightning_omni.tuning.callback.fit_space import FitSpace
from lightning_omni.tuning.callback.guards.losses import DivergenceGuard
from lightning_omni.tuning.callback.hyperparameters import Hyperparameters
from lightning_omni.tuning.callback.tuned_run import Command, TunedRun
from lightning_omni.tuning.model.forecast import Setting
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.search.space import apply_further, compression_named
from lightning_omni.wire.all_reduce import all_reduce_of


def communication_of(setting: Setting, current: Communication) -> Communication:
    """Return the communication of a setting; properties that it leaves open stay as they are."""
    method, wire, overlap, all_reduce = current
    if setting.method:
        method, overlap = method_named(setting.method), setting.overlap
    if setting.wire:
        wire = compression_named(setting.wire).wire_format
    if setting.all_reduce:
        all_reduce = all_reduce_of(setting.all_reduce)
    return Communication(with_period(method, setting.period), wire, overlap, all_reduce)


def communicate(strategy: OmniStrategyHooks, wanted: Communication) -> bool:
    """Set the communication of groups formed from now on, and return whether that is a change. All ranks call it.

    If all ranks are one group, its members average in the new format at once.
    """
    world = strategy.world
    before, world.communication = world.communication, wanted
    if before.all_reduce != wanted.all_reduce and not world.executor.exchanges:
        strategy.wrap_for_group()
    return before != wanted


class AppliedSetting:
    """The setting of one fit.

    Args:
        run: the fit.
        space: the search space of the fit.

    Attributes:
        seconds_to_form: seconds that the latest formation of several groups took; `FORMING` before the first one.
    """

    def __init__(self, run: TunedRun, space: FitSpace) -> None:
        self._run, self._space = run, space
        self.seconds_to_form = c.FORMING
        self._guard: DivergenceGuard | None = None
        self._before: RollbackPoint | None = None
        self._exchanged = 0.0

    # --- Applying -----------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Store the present state of the run as its rollback point."""
        self._before = self._now()

    def apply(self, hyperparameters: Hyperparameters, command: Command) -> None:
        """Train with the setting of a command from now on. All ranks call it."""
        state = self._run.state
        hyperparameters.set_momentum(command.setting.momentum)
        hyperparameters.make_default()
        hyperparameters.scale(command.scale)
        state.scaled *= command.scale
        state.setting = command.setting
        state.speeds = sorted(command.speeds.items()) if command.speeds and command.by_speed else []
        self.form(command.setting, command.speeds, command.by_speed)

    def form(self, setting: Setting, speeds: Mapping[int, float] | None = None, by_speed: bool = False) -> None:
        """Form the groups of a setting, with its exchange and its split of batches. All ranks call it."""
        strategy, world, began = self._run.strategy, self._run.world, time.perf_counter()
        again = communicate(strategy, communication_of(setting, world.communication))
        again |= apply_further(self._run.options.further, world, setting)
        if setting.rebalance:
            self.split_by_speed()
        if setting.groups != len(world.topology.alive) or by_speed or (again and setting.groups > 1):
            strategy.form(setting.groups, speeds if by_speed else None)
        if setting.rebalance and speeds is not None and len(world.members) > 1 and strategy.epochs.leases is not None:
            strategy.set_batch_shares([speeds[rank] for rank in world.members])
        if not strategy.epochs.is_open:
            world.enter_world(strategy.pl_module)
        if setting.groups > 1:
            self.seconds_to_form = time.perf_counter() - began

    def split_by_speed(self) -> bool:
        """Split batches by speed from now on, where that pays; return whether that is possible. All ranks call it."""
        strategy = self._run.strategy
        if strategy.epochs.leases is None:
            return False
        if not strategy.balance.is_on:
            strategy.balance = Balance("auto", self._run.info)
            strategy.balance.begin(strategy.world, strategy.pl_module, lambda: strategy.epochs.leases)
        return True

    def restore_user_setting(self) -> None:
        """Restore the user's own setting, in one group. All ranks call it."""
        run, own = self._run, self._run.own
        hyperparameters = run.hyperparameters()
        run.strategy.merge_groups()
        hyperparameters.set_momentum(own.momentum)
        hyperparameters.make_default()
        hyperparameters.scale(1 / run.state.scaled)
        communicate(run.strategy, communication_of(own, run.world.communication))
        apply_further(run.options.further, run.world, own)
        run.state.setting, run.state.scaled = own, 1.0
        run.state.reference = float(run.batch(len(run.world.live_ranks)))
        self._guard = self._before = None  # they belong to the choice that is undone

    # --- Watching -----------------------------------------------------------------------------------------------------

    def watch(self, threshold: float, keeps: bool = False) -> None:
        """Treat the run as diverged from now on if its loss exceeds a threshold.

        Args:
            threshold: the training loss; NaN for none.
            keeps: whether a larger threshold from before stays: the run may have learnt little since.
        """
        state = self._run.state
        known = [each for each in (threshold, state.divergence_threshold if keeps else math.nan) if math.isfinite(each)]
        state.divergence_threshold = max(known, default=math.nan)
        guards = known and self._before is not None and not self.is_user_setting
        self._guard = DivergenceGuard(state.divergence_threshold) if guards else None

    @property
    def is_user_setting(self) -> bool:
        """Return whether the run makes the same updates as without a tuner, which then causes no divergence."""
        setting, own = self._run.state.setting, self._run.state.own
        if setting is None or own is None or setting.groups > 1:
            return False
        is_same = setting.all_reduce == own.all_reduce and setting.further == own.further
        return is_same and setting.momentum == own.momentum and math.isclose(self._run.state.scaled, 1.0)

    @property
    def has_given_up(self) -> bool:
        """Return whether too many pushes of this rank's group in a row were not applied."""
        return self._guard is not None and self._guard.has_given_up

    def batch_done(self, loss: Tensor | None) -> None:
        if self._guard is None:
            return
        world = self._run.world
        before, self._exchanged = self._exchanged, world.exchange.traffic.seconds
        applied = world.core.last_answer.applied if world.exchange.traffic.seconds != before else None
        self._guard.batch_done(loss, world.executor.exchanges, applied)

    @property
    def has_diverged(self) -> bool:
        """Return whether the run has diverged since the last search. All ranks call it, with the same result."""
        if self._guard is None:
            return False
        mean = self._guard.mean(torch.zeros((), device=self._run.strategy.root_device))
        return self._guard.is_worse(*self._run.strategy.reduce(mean, reduce_op="sum").tolist())

    def capture_weights(self) -> None:
        """Store the present weights in the rollback point, where the run has not diverged. All ranks call it."""
        if self._guard is None or self._before is None:
            return
        # If one rank refuses, all do: a rollback would otherwise leave them with different weights.
        if not any(self._run.world.all_reduce_max([int(self._before.is_spoilt)])):
            self._before.keep_weights()

    def roll_back(self) -> None:
        """Restore the rollback point, in one group with the user's own setting. All ranks call it.

        A run that has diverged in one group, with the user's all-reduce and own dimensions, keeps its setting with
        smaller steps.
        """
        run, state, was = self._run, self._run.state, self._run.setting
        assert self._before is not None
        run.strategy.merge_groups()
        self.return_to(self._before)
        state.is_final = True
        if was.groups == 1 and (was.all_reduce, was.further) == (run.own.all_reduce, run.own.further):
            self._train_in_one_group(replace(was, lr=was.lr / c.RATE_FACTOR), 1 / c.RATE_FACTOR)
        else:
            self._train_in_one_group(run.own, 1 / state.scaled)
        self.watch(state.divergence_threshold)
        run.info(
            f"OmniTuner: the run has diverged with {was}: it is rolled back to the weights that it had after the last"
            f" good epoch or search, and goes on with {state.setting}"
        )

    def _now(self) -> RollbackPoint:
        run = self._run
        return RollbackPoint.of(run.module, run.trainer.optimizers, run.world.core, averaged_tensors(run.trainer))

    def return_to(self, point: RollbackPoint) -> None:
        """Restore a rollback point, where all ranks are one group. All ranks call it."""
        point.restore(self._run.world.core)
        restart_empty_averages(self._run.trainer)
        self._run.world.reduction.forget()

    # --- Trials of the user's own setting -----------------------------------------------------------------------------

    @property
    def can_restart(self) -> bool:
        """Return whether a trial can begin from the rollback point."""
        return self._before is not None

    def begin_trial(self, starts_over: bool) -> RollbackPoint:
        """Train with the user's own setting in one group. All ranks call it.

        Args:
            starts_over: whether the trial begins from the rollback point instead of the present weights.

        Returns:
            The state of the run before the trial.
        """
        run, state = self._run, self._run.state
        speeds, state.before_trial = state.speeds, state.setting
        run.strategy.merge_groups()
        before = self._now()
        if starts_over:
            assert self._before is not None
            self.return_to(self._before)
        self._train_in_one_group(run.own, 1 / state.scaled)
        state.speeds = speeds  # end_trial forms the groups by them again
        self._guard = None
        return before

    def end_trial(self, to: RollbackPoint | None) -> None:
        """Train with the setting before the trial again. All ranks call it.

        Args:
            to: the state to restore; None to continue from the state after the trial.
        """
        run, state = self._run, self._run.state
        before = state.before_trial
        assert before is not None
        if to is not None:
            self.return_to(to)
        before = replace(before, groups=min(before.groups, len(run.world.live_ranks)))
        speeds = dict(state.speeds) or None
        state.before_trial = None
        state.reference = run.batch(len(run.world.live_ranks)) / before.groups
        scale = before.lr / run.own.lr / state.scaled
        self.apply(run.hyperparameters(), Command(before, speeds=speeds, by_speed=bool(speeds), scale=scale))
        self.watch(math.nan, keeps=True)

    # --- Giving groups up ---------------------------------------------------------------------------------------------

    def return_to_one_group(self, setting: Setting) -> None:
        """Train with a setting of one group from now on, and choose no other any more. All ranks call it."""
        run, state = self._run, self._run.state
        run.strategy.merge_groups()
        self._train_in_one_group(setting, setting.lr / run.own.lr / state.scaled)
        state.is_final = True
        self.watch(state.divergence_threshold)

    def _train_in_one_group(self, setting: Setting, factor: float) -> None:
        """Train with a setting in one group, with scaled learning rates; batches are split by speed where that pays."""
        run = self._run
        rebalance = bool(run.strategy.epochs.leases) and self._space.may_rebalance
        run.state.reference = float(run.batch(len(run.world.live_ranks)))
        alone = replace(setting, groups=1, rebalance=rebalance)
        self.apply(run.hyperparameters(), Command(alone, scale=factor))


__all__ = ["AppliedSetting", "communicate", "communication_of"]
