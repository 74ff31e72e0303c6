"""The actions of a tuner in one fit. `TunedFit` searches, where all ranks were started together.

`TunedRun` holds the state that its parts share, `ByFirstBatches` measures and chooses, `AppliedSetting` is the setting
that the run trains with, and `ForecastCheck`, `Retuning` and `PlateauWatch` decide when to change it.

Rule: rank 0 decides, and sends its decision to the others before any action; all ranks do the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.strategy._private import has_hook_for_gradients, stops_now, will_step
from lightning_omni.strategy.declared import is_fast_dev_run
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.tuning.callback import _private
from lightning_omni.tuning.callback.apply.applied import AppliedSetting
from lightning_omni.tuning.callback.apply.hyperparameters import Hyperparameters
from lightning_omni.tuning.callback.first_batches.decision import ByFirstBatches
from lightning_omni.tuning.callback.guards.divergence import loss_in
from lightning_omni.tuning.callback.guards.forecast_check import ForecastCheck
from lightning_omni.tuning.callback.guards.plateau import PlateauWatch
from lightning_omni.tuning.callback.guards.retuning import Retuning
from lightning_omni.tuning.callback.guards.throughput import samples_in
from lightning_omni.tuning.callback.reports.reports import TunerReports
from lightning_omni.tuning.callback.run import TunedRun, TunerOptions
from lightning_omni.tuning.callback.space import FitSpace
from lightning_omni.tuning.callback.target_metric import MONITORED, MonitoredMetric
from lightning_omni.tuning.search import constants as c
from lightning_omni.wire.all_reduce import EXACT

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def may_form_groups(options: TunerOptions, trainer: Trainer) -> bool:
    """Return whether the search includes several groups."""
    is_one = options.space.get("groups") in (1, [1], (1,))
    return options.budget > 0 and trainer.world_size > 1 and not is_one


class Fit:
    """The actions of a tuner in one fit; by default, none.

    Args:
        run: the fit.
    """

    def __init__(self, run: TunedRun) -> None:
        self.run = run

    def fit_starts(self) -> None:
        """Act before any loop begins; the groups are not formed yet."""

    def begin(self) -> None:
        """Act before the first batch; the groups are formed."""

    def epoch_starts(self) -> None:
        """Act before the batches of an epoch."""

    def batch_starts(self) -> None:
        """Act before a batch."""

    def batch_done(self, outputs: Any, batch_idx: int) -> None:
        """Act after a batch.

        Args:
            outputs: outputs of the training step.
            batch_idx: number of the batch in the epoch.
        """

    def validation_starts(self) -> None:
        """Act before a validation."""

    def sanity_checked(self) -> None:
        """Act after the validation before the first batch."""

    def validated(self) -> None:
        """Act after a validation."""

    def epoch_done(self) -> None:
        """Act at the end of an epoch, which is a synchronization point."""

    def ended(self) -> None:
        """Act after training."""

    def close(self) -> None:
        """Stop all measurements."""


class TunedFit(Fit):
    """A fit in which groups are formed, with the parts of its tuner.

    Args:
        run: the fit.
    """

    def __init__(self, run: TunedRun) -> None:
        super().__init__(run)
        self._check(run.strategy, run.options)
        self.monitor = MonitoredMetric(run.options.monitor, run.options.target is not None)
        self.space = FitSpace(run)
        self.applied = AppliedSetting(run, self.space)
        self.retuning = Retuning(run)
        self.reports = TunerReports(run)
        self.plateau = PlateauWatch(run, self.applied, self.retuning, self.reports)
        parts = run, self.space, self.applied, self.retuning, self.reports
        self.by_first_batches = ByFirstBatches(*parts)
        self.check = ForecastCheck(run, self.applied, self.retuning, self.reports)

    @staticmethod
    def _check(strategy: OmniStrategyHooks, options: TunerOptions) -> None:
        """Reject a fit that cannot be searched, and make the run begin as one group."""
        strategy.check_whole("OmniTuner forms other groups while they train")
        strategy.arrangement.restore()  # an earlier fit of this strategy may have been tuned
        if "all_reduce" in options.space and strategy.world.reduction.format != EXACT:
            raise ConfigurationError(
                f'space={{"all_reduce": {options.space["all_reduce"]!r}}}: it is forecast from the first batches, whose'
                " gradients are averaged as they are; leave Compression(all_reduce=...) of the strategy out"
            )
        if "all_reduce" in options.space and has_hook_for_gradients(strategy):
            raise ConfigurationError(
                f'space={{"all_reduce": {options.space["all_reduce"]!r}}} and ddp_comm_hook=: both say how'
                " gradients are averaged; leave one of them out"
            )
        if "merged" in options.space and strategy.merged:
            raise ConfigurationError(
                f'space={{"merged": {options.space["merged"]!r}}}: what a merged head gains is forecast from the first'
                " batches; leave merged= of the strategy out"
            )
        if options.budget:
            strategy.arrangement.begin_in_one_group()

    @override
    def fit_starts(self) -> None:
        run = self.run
        self.monitor.check_validated(run.trainer)
        monitor = run.options.monitor
        if run.options.target is None and monitor != MONITORED:
            run.info(f"OmniTuner: monitor={monitor!r} is not used: it is compared with target=, and there is none")
        if may_form_groups(run.options, run.trainer) and not self.space.why_not(2):
            run.world.connection.start_server()
        else:
            run.world.dismiss_server()

    @override
    def begin(self) -> None:
        run = self.run
        run.strategy.arrangement.stash()
        run.begin()
        if run.broadcast(stops_now(run.trainer)):
            self._tune_nothing("training was stopped before the first batch")
            return
        try:
            hyperparameters = run.hyperparameters()
            if run.options.budget:
                hyperparameters.check_schedules()
        except (ConfigurationError, UnsupportedError) as error:
            self._tune_nothing(str(error), may_split=self._may_split_all_the_same)
            return
        if run.state.setting is not None and run.state.ranks != run.world.size:
            self._search_once_more(hyperparameters)
        if run.may_change_inside:  # the third window may show a flat loss
            run.strategy.epochs.check_every = c.FEWEST_WINDOWS * c.SHORTEST_WINDOW * run.batch(run.world.size)
            run.strategy.epochs.on_check = self._synchronized
        if run.state.setting is not None:
            self._go_on()
        else:
            run.state.ranks = run.world.size
            if not run.options.budget or run.world.size == 1:
                self._tune_nothing("one rank is one group" if run.options.budget else "budget=0")
                return
            if not run.may_change_again(run.trainer.current_epoch):
                self._tune_nothing("groups can change at ends of epochs only, and no epoch follows this one")
                return
            self.by_first_batches.begin(hyperparameters)
        run.begin()

    def _tune_nothing(self, problem: str, may_split: bool = False) -> None:
        """Continue with the user's settings, except that batches may be split by speed."""
        run = self.run
        run.problem, run.strategy.epochs.check_every = problem, 0
        run.strategy.arrangement.form()
        run.world.dismiss_server()
        splits = may_split and self.applied.split_by_speed()
        but = ", but batches are split in proportion to the ranks' speeds where that pays" if splits else ""
        run.info(f"OmniTuner: nothing is tuned{but}: {problem}")

    @property
    def _may_split_all_the_same(self) -> bool:
        """Return whether an untuned run may split batches by speed, which changes nothing else."""
        run = self.run
        return bool(run.options.budget) and self.space.may_rebalance and not is_fast_dev_run(run.trainer)

    def _search_once_more(self, hyperparameters: Hyperparameters) -> None:
        """Prepare a new search for a run resumed with another number of ranks."""
        run = self.run
        run.info(
            f"OmniTuner: the run is resumed with {run.world.size} ranks instead of {run.state.ranks}: searching again"
        )
        if run.state.own is not None:
            hyperparameters.set_momentum(run.state.own.momentum)
        hyperparameters.scale(1 / run.state.scaled)
        run.forget()

    def _go_on(self) -> None:
        """Resume a run with its chosen setting; the checkpoint has restored rates and momentum."""
        run, state = self.run, self.run.state
        if self._lacks_server:
            state.before_trial, state.speeds = None, []
            self.by_first_batches.begin_again("there is no parameter server")
            return
        if state.unfinished:
            self.by_first_batches.begin_again("the checkpoint was saved before anything was chosen, or used")
            return
        run.hyperparameters().make_default()
        if state.before_trial is not None or not self.applied.is_users_own:
            self.applied.keep()
        if state.before_trial is not None:
            self.applied.end_trial(None)
        else:
            self.applied.form(run.setting, dict(state.speeds) or None, bool(state.speeds))
            self.applied.watch(math.nan, keeps=True)

    @property
    def _lacks_server(self) -> bool:
        """Return whether a resumed run needs several groups, now or after a trial, without having a server."""
        state = self.run.state
        settings = [each for each in (state.setting, state.before_trial) if each is not None]
        return any(each.groups > 1 for each in settings) and not self.space.has_server()

    # --- Training -----------------------------------------------------------------------------------------------------

    @override
    def epoch_starts(self) -> None:
        self.retuning.throughput.go()
        self.by_first_batches.interrupted()

    @override
    def batch_starts(self) -> None:
        if self.applied.gives_up:
            _private.skip_the_rest(self.run.trainer)

    @override
    def batch_done(self, outputs: Any, batch_idx: int) -> None:
        if self.run.problem:
            return
        self.retuning.throughput.batch_done(samples_in(self.run.trainer, batch_idx))
        loss = loss_in(outputs, self.run.window)
        self.by_first_batches.batch_done(loss)
        self.applied.batch_done(loss)
        self.plateau.batch_done(loss)
        self._check_one_group()

    def _check_one_group(self) -> None:
        """Check the speed of one group, whose ranks are all at the same step, inside an epoch."""
        run, trainer = self.run, self.run.trainer
        may_change = run.options.retune_every is not None and not self.by_first_batches.is_timing
        may_change &= run.may_change_inside
        if may_change and will_step(trainer) and not trainer.is_last_batch and (reason := self.check.step_done()):
            self.by_first_batches.begin_again(reason)

    @override
    def validation_starts(self) -> None:
        self.retuning.throughput.pause()
        self.by_first_batches.interrupted()

    @override
    def sanity_checked(self) -> None:
        self.monitor.sanity_checked(self.run.trainer.callback_metrics)

    @override
    def validated(self) -> None:
        run, options = self.run, self.run.options
        metrics = run.trainer.callback_metrics
        self.retuning.throughput.go()
        if self.monitor.is_open:
            problem, world = self.monitor.validated(run.trainer, run.module, metrics), run.world
            # While groups train, all have the same metrics, but at different times.
            if bool(problem) if world.is_computing else run.broadcast(bool(problem)):
                raise ConfigurationError(problem or f"monitor={options.monitor!r}: no metric of that name is logged")
        if (value := metrics.get(options.monitor)) is not None:
            self.reports.validated(float(value))
        self._check_in_mid_epoch()

    def _check_in_mid_epoch(self) -> None:
        """Check the groups where all of them synchronize inside an epoch, which may be the only one."""
        run, trainer = self.run, self.run.trainer
        is_inside = run.strategy.epochs.is_open and not trainer.is_last_batch and not run.world.is_computing
        if not is_inside or run.problem or not run.may_change_inside:
            return
        # No rank may have accumulated gradients without a step, or a callback that stops the run.
        if not any(run.world.all_reduce_max([int(not will_step(trainer) or stops_now(trainer))])):
            may_change = run.options.retune_every is not None and not self.by_first_batches.is_timing
            self._react(self.check.validated, may_change, ends_epoch=False)

    def _react(self, reason: Callable[[], str], may_change: bool, ends_epoch: bool) -> None:
        """Check whether the chosen setting is still right, after all groups have synchronized. All ranks call it.

        Args:
            reason: returns why to choose again; empty if there is no reason.
            may_change: whether more than a rollback is possible.
            ends_epoch: whether the epoch has ended, too.
        """
        if self.applied.has_diverged:
            self.applied.roll_back()
            self.retuning.changed(in_mid_epoch=not ends_epoch)
            return
        self.plateau.synchronized(ends_epoch)
        if self.plateau.has_learnt:
            self.applied.keep_weights()
        if not may_change or self.plateau.is_trying:
            return
        if why := reason():
            self.by_first_batches.begin_again(why)
        elif self.plateau.is_due:
            self.plateau.begin_trial()

    def _synchronized(self) -> None:
        self._check_in_mid_epoch()
        self.epoch_starts()

    @override
    def ended(self) -> None:
        self.plateau.ended()
        self.by_first_batches.ended()
        if not self.run.problem and self.run.state.setting is None:
            self.run.problem = "the run has ended before anything was chosen, or could be used"
            self.run.info(f"OmniTuner: nothing is tuned: {self.run.problem}")
        self.reports.ended()

    @override
    def close(self) -> None:
        self.by_first_batches.close()
        self.run.strategy.epochs.check_every = 0

    @override
    def epoch_done(self) -> None:
        run, options = self.run, self.run.options
        epoch = run.trainer.current_epoch + 1
        if run.problem:
            return
        run.has_ended_epoch = True
        self.retuning.epoch_done()
        self.by_first_batches.epoch_done(is_last=stops_now(run.trainer) or epoch >= run.epochs)
        is_due = options.retune_every is not None and epoch % options.retune_every == 0
        may_change = is_due and run.state.setting is not None and not stops_now(run.trainer)
        may_change &= run.may_change_again(epoch)
        self._react(lambda: self.check.epoch_done() or self.retuning.reason(), may_change, ends_epoch=True)
        run.has_ended_epoch = False


__all__ = ["Fit", "TunedFit", "may_form_groups"]
