"""The actions of a tuner in one fit: a `TunedFit` searches, a `JoinedFit` follows the number of joined groups.

Rule: in a `TunedFit` rank 0 decides, and sends its decision to the others before any action; all ranks do the same.
"""

from __future__ import annotations

import difflib
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.runtime.balance import gather_values
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.strategy.lightning_internals.callbacks import is_fast_dev_run
from lightning_omni.strategy.lightning_internals.loops import should_stop_now, will_step
from lightning_omni.strategy.lightning_internals.metrics import loss_in
from lightning_omni.strategy.lightning_internals.strategies import has_ddp_comm_hook
from lightning_omni.tuning.callback.hyperparameters import Hyperparameters, follow_groups
from lightning_omni.tuning.callback.online_tuner import OnlineTuner
from lightning_omni.tuning.callback.plateau import PlateauGuard
from lightning_omni.tuning.callback.settings import AppliedSetting, FitSpace
from lightning_omni.tuning.callback.speed import ForecastCheck, SpeedRecord, samples_in
from lightning_omni.tuning.callback.tuned_run import TunedRun, TunerOptions, TunerReports
from lightning_omni.tuning.model.setting import Setting
from lightning_omni.tuning.search import Space
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.trainer import end_epoch, log
from lightning_omni.wire.all_reduce import EXACT

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


MONITORED = "val_loss"
"""The default metric."""


def _missing(name: str, logged: Iterable[str]) -> str:
    known = sorted(each for each in logged if each.removesuffix("_step").removesuffix("_epoch") == each)
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    there = f"Logged are {', '.join(known)}" if known else "Nothing is logged"
    return f"monitor={name!r}: no metric of that name is logged; {meant}{there}"


# --- Fits -------------------------------------------------------------------------------------------------------------


def may_form_groups(options: TunerOptions, trainer: Trainer) -> bool:
    groups = options.space.get("groups")
    is_one = list(groups) == [1] if isinstance(groups, Iterable) else groups == 1
    return options.budget > 0 and trainer.world_size > 1 and not is_one


class Fit:
    """The actions of a tuner in one fit; by default, none."""

    def __init__(self, run: TunedRun) -> None:
        self.run = run

    def fit_starts(self) -> None:
        """Act before any loop begins; the groups are not formed yet."""

    def begin(self) -> None:
        """Act before the first batch; the groups are formed."""

    def interrupted(self) -> None:
        """Act before an epoch's batches, and before a validation: the time until the next batch does not count."""

    def batch_starts(self) -> None:
        """Act before a batch."""

    def batch_done(self, outputs: Any, batch_idx: int) -> None:
        """Act after a batch."""

    def validated(self) -> None:
        """Act after a validation, also the one before the first batch."""

    def epoch_done(self) -> None:
        """Act at the end of an epoch, which is a synchronization point."""

    def ended(self) -> None:
        """Act after training."""

    def close(self) -> None:
        """Stop all measurements, and undo what another fit would inherit."""


class TunedFit(Fit):
    """A fit in which groups may be formed, with the parts of its tuner."""

    def __init__(self, run: TunedRun) -> None:
        super().__init__(run)
        self._check(run.strategy, run.options)
        self._logged: set[str] = set()
        self._validations = 0
        self.space = FitSpace(run)
        self.applied = AppliedSetting(run, self.space)
        self.speeds = SpeedRecord(run)
        self.reports = TunerReports(run)
        self.plateau = PlateauGuard(run, self.applied, self.speeds, self.reports)
        self.online = OnlineTuner(run, self.space, self.applied, self.speeds, self.reports)
        self.check = ForecastCheck(run, self.applied, self.speeds, self.reports)

    @staticmethod
    def _check(strategy: OmniStrategyHooks, options: TunerOptions) -> None:
        strategy.parts.grouping.check_whole("OmniTuner forms other groups while they train")
        if "all_reduce" in options.space and strategy.world.reduction.format != EXACT:
            raise ConfigurationError(
                f'space={{"all_reduce": {options.space["all_reduce"]!r}}}: it is forecast from the first batches, whose'
                " gradients are averaged as they are; leave Compression(all_reduce=...) of the strategy out"
            )
        if "all_reduce" in options.space and has_ddp_comm_hook(strategy):
            raise ConfigurationError(
                f'space={{"all_reduce": {options.space["all_reduce"]!r}}} and ddp_comm_hook=: both say how'
                " gradients are averaged; leave one of them out"
            )
        if options.budget and strategy.parts.merged:
            raise ConfigurationError(
                f"OmniTuner and merged={strategy.parts.merged.name!r}: groups change while they train, and a merged"
                " head belongs to the groups that began with it; leave merged= out, or pass OmniTuner(budget=0)"
            )
        if options.budget:
            strategy.parts.user_groups.begin_in_one_group()

    @override
    def fit_starts(self) -> None:
        run, monitor = self.run, self.run.options.monitor
        if run.options.target is None and monitor != MONITORED:
            run.info(f"OmniTuner: monitor={monitor!r} is not used: it is compared with target=, and there is none")
        elif run.options.target is not None and not run.trainer.enable_validation:
            raise ConfigurationError(
                f"target= is compared with monitor={monitor!r} when the run validates, and this one never does; pass"
                " validation data, or target=None"
            )
        if may_form_groups(run.options, run.trainer) and not self.space.why_impossible(2):
            run.world.connection.start_server()
        else:
            run.world.dismiss_server()

    @override
    def begin(self) -> None:
        run = self.run
        run.strategy.parts.user_groups.stash()
        run.begin()
        if run.broadcast(should_stop_now(run.trainer)):
            self._disable("training was stopped before the first batch")
            return
        try:
            hyperparameters = run.hyperparameters()
        except ConfigurationError as error:
            may_split = bool(run.options.budget) and self.space.may_rebalance and not is_fast_dev_run(run.trainer)
            self._disable(str(error), may_split=may_split)
            return
        known = [rank for rank, _ in run.state.speeds] or list(range(run.state.ranks))
        if run.state.setting is not None and not run.options.budget:
            self._drop_choice(hyperparameters, "with budget=0: its choice is not used")
        elif run.state.setting is not None and known != list(range(run.world.size)):
            self._drop_choice(hyperparameters, "with other ranks than those of its settings: searching again")
        elif run.state.own is not None and {each.name for each in run.options.further} - dict(run.own.further).keys():
            self._drop_choice(hyperparameters, "with other dimensions in space=: searching again")
        if run.may_change_inside:  # the third window may show a flat loss
            run.strategy.parts.epochs.check_every = c.FEWEST_WINDOWS * c.SHORTEST_WINDOW * run.batch(run.world.size)
            run.strategy.parts.epochs.on_check = self._synchronized
        if run.options.budget and run.world.size > 1:  # all ranks are one group
            run.hosts = tuple(dict.fromkeys(gather_values(run.world, socket.gethostname(), str)))
        if run.state.setting is not None:
            self._resume()
        else:
            run.state.ranks = run.world.size
            if not run.options.budget or run.world.size == 1:
                self._disable("one rank is one group" if run.options.budget else "budget=0")
                return
            if not run.may_change_again(run.trainer.current_epoch):
                self._disable("groups can change at ends of epochs only, and no epoch follows this one")
                return
            self.online.begin(hyperparameters)
        run.begin()

    def _disable(self, problem: str, may_split: bool = False) -> None:
        run = self.run
        run.problem, run.strategy.parts.epochs.check_every = problem, 0
        run.strategy.parts.user_groups.form()
        run.world.dismiss_server()
        splits = may_split and self.applied.split_by_speed()
        but = ", but batches are split in proportion to the ranks' speeds where that pays" if splits else ""
        run.info(f"OmniTuner: nothing is tuned{but}: {problem}")

    def _drop_choice(self, hyperparameters: Hyperparameters, how: str) -> None:
        run = self.run
        run.info(f"OmniTuner: the run is resumed {how}")
        if run.state.own is not None:
            hyperparameters.set_momentum(run.state.own.momentum)
        run.forget()

    def _resume(self) -> None:
        run, state = self.run, self.run.state
        run.strategy.parts.grouping.merge()  # they may exchange by another method, whose optimizer state is elsewhere
        if problem := self._why_not_resumed:
            state.before_trial, state.speeds = None, []
            self.online.begin_again(problem)
            return
        if state.unfinished:
            self.online.begin_again("the checkpoint was saved before anything was chosen, or used")
            return
        if state.before_trial is not None or not self.applied.is_user_setting:
            self.applied.capture()
        self.applied.resume(state.before_trial or run.setting)

    @property
    def _why_not_resumed(self) -> str:
        settings = (self.run.setting, self.run.state.before_trial or self.run.setting)
        if all(each.groups == 1 for each in settings):
            return ""
        try:
            self.run.strategy.parts.grouping.check_several(self.run.trainer)
        except ConfigurationError as error:
            return str(error)
        return "" if self.space.join_server() else "there is no parameter server"

    # --- Training -----------------------------------------------------------------------------------------------------

    @override
    def interrupted(self) -> None:
        self.speeds.throughput.interrupt()
        self.online.interrupted()

    @override
    def batch_starts(self) -> None:
        if self.applied.has_given_up and self.run.may_change_inside:
            end_epoch(self.run.trainer)

    @override
    def batch_done(self, outputs: Any, batch_idx: int) -> None:
        if self.run.problem:
            return
        self.speeds.throughput.batch_done(samples_in(self.run.trainer, batch_idx))
        loss = loss_in(outputs, self.run.window)
        self.online.batch_done(loss)
        self.applied.batch_done(loss)
        self.plateau.batch_done(loss)
        # The ranks of one group are all at the same step, so its speed is checked inside an epoch.
        run, trainer = self.run, self.run.trainer
        may_change = run.options.retune_every is not None and not self.online.is_timing
        may_change &= run.may_change_inside
        if may_change and will_step(trainer) and not trainer.is_last_batch and (reason := self.check.step_done()):
            self.online.begin_again(reason)

    @override
    def validated(self) -> None:
        run, options = self.run, self.run.options
        metrics = run.trainer.callback_metrics
        self._logged |= set(metrics)
        if run.trainer.sanity_checking:
            return
        self._validations += 1
        if options.target is not None and self._validations == 2:  # metrics of an epoch's end appear in the second
            is_missing = options.monitor not in self._logged
            # While groups train, all have the same metrics, but at different times.
            if is_missing if run.world.is_computing else run.broadcast(is_missing):
                raise ConfigurationError(_missing(options.monitor, self._logged))
        if (value := metrics.get(options.monitor)) is not None:
            self.reports.validated(float(value))
        self._check_in_mid_epoch()

    def _check_in_mid_epoch(self) -> None:
        run, trainer = self.run, self.run.trainer
        is_inside = run.strategy.parts.epochs.is_open and not trainer.is_last_batch and not run.world.is_computing
        if not is_inside or run.problem or not run.may_change_inside:
            return
        # No rank may have accumulated gradients without a step, or a callback that stops the run.
        if not any(run.world.all_reduce_max([int(not will_step(trainer) or should_stop_now(trainer))])):
            may_change = run.options.retune_every is not None and not self.online.is_timing
            self._react(self.check.validated, may_change, ends_epoch=False)

    def _react(self, reason: Callable[[], str], may_change: bool, ends_epoch: bool) -> None:
        """Check whether the chosen setting is still right, after all groups have synchronized.

        ``reason`` returns why to choose again, or "". Without ``may_change``, only a rollback is possible.
        """
        if self.applied.has_diverged:
            self.reports.chosen(self.applied.roll_back())
            self.speeds.changed()
            return
        self.plateau.synchronized(ends_epoch)
        if self.plateau.has_learnt:
            self.applied.capture_weights()
        if not may_change or self.plateau.trial is not None:
            return
        if why := reason():
            self.online.begin_again(why)
        elif self.plateau.is_due:
            self.plateau.begin_trial()

    def _synchronized(self) -> None:
        self._check_in_mid_epoch()
        self.interrupted()

    @override
    def ended(self) -> None:
        self.plateau.ended()
        self.online.close()
        if not self.run.problem and self.run.state.setting is None:
            self.run.problem = "the run has ended before anything was chosen, or could be used"
            self.run.info(f"OmniTuner: nothing is tuned: {self.run.problem}")
        self.reports.ended()

    @override
    def close(self) -> None:
        self.online.close()
        self.run.strategy.parts.epochs.check_every = 0
        self.applied.rollback_point = self.plateau.trial = None  # copies of all weights
        self.run.world.rate_factor = 1.0  # another fit of the strategy may have no tuner
        self.run.end()

    @override
    def epoch_done(self) -> None:
        run, options = self.run, self.run.options
        epoch = run.trainer.current_epoch + 1
        if run.problem:
            return
        run.has_ended_epoch = True
        self.speeds.epoch_done()
        self.online.epoch_done(is_last=should_stop_now(run.trainer) or epoch >= run.epochs)
        is_due = options.retune_every is not None and epoch % options.retune_every == 0
        may_change = is_due and run.state.setting is not None and not should_stop_now(run.trainer)
        may_change &= run.may_change_again(epoch)
        self._react(lambda: self.check.epoch_done() or self.speeds.reason(), may_change, ends_epoch=True)
        run.has_ended_epoch = False


_CHOSEN = ("momentum", "lr", "rebalance")
"""Dimensions that a group which has joined on its own can choose."""


class JoinedFit(Fit):
    """A fit of a group that has joined on its own: momentum and learning rate follow the number of groups.

    All members of a group receive that number in the same answer of the server, and decide by themselves; see
    `follow_groups`.

    Raises:
        UnsupportedError: ``space`` has a dimension that such a group cannot choose.
    """

    def __init__(self, run: TunedRun) -> None:
        super().__init__(run)
        check_joined(run.options)
        self._space = Space.of(run.options.space, ranks=1)
        self._hyperparameters: Hyperparameters | None = None
        self._balance = run.strategy.parts.balance  # the user's

    @override
    def close(self) -> None:
        parts = self.run.strategy.parts
        if parts.balance is not self._balance:
            parts.balance.end()
            parts.balance = self._balance

    @override
    def begin(self) -> None:
        run = self.run
        if run.options.budget and self._space.rebalance and len(run.world.members) > 1:
            AppliedSetting(run, FitSpace(run)).split_by_speed()  # it changes nothing but the speed
        try:
            hyperparameters = self._hyperparameters = self._tunable_hyperparameters()
        except ConfigurationError as error:
            run.problem = str(error)
            run.info(f"OmniTuner: momentum and learning rate stay as they are: {run.problem}")
            return
        if run.state.own is None:  # a group that joins later receives that of the first one
            run.state.own = Setting(groups=1, momentum=hyperparameters.momentum, lr=hyperparameters.lr)
        run.state.setting = run.state.setting or run.state.own
        self._space = Space.of(run.options.space, ranks=1, momentum=run.state.own.momentum)
        if not hyperparameters.is_momentum_free:
            self._space = replace(self._space, momentum=(hyperparameters.momentum, hyperparameters.momentum))
        hyperparameters.make_default()  # a group that joins later has the momentum that the others have by now
        run.world.rate_factor = run.state.scaled

    def _tunable_hyperparameters(self) -> Hyperparameters:
        run, method = self.run, self.run.world.method
        if not run.options.budget:
            if run.state.own is not None:  # of a run that was tuned before it was resumed
                Hyperparameters.of(run.trainer).set_momentum(run.state.own.momentum)
            raise ConfigurationError("budget=0")
        if method.updates_per_batch(2) == 1:
            raise ConfigurationError(f"with {method} they do not depend on the number of groups")
        return Hyperparameters.of(run.trainer)

    @override
    def batch_done(self, outputs: Any, batch_idx: int) -> None:
        groups = self.run.world.core.last_answer.groups
        if self._hyperparameters is None or not groups:
            return
        if groups != self.run.setting.groups:
            self._follow(groups, self._hyperparameters)

    def _follow(self, groups: int, hyperparameters: Hyperparameters) -> None:
        run, state = self.run, self.run.state
        setting = follow_groups(run.own, groups, run.world.method, hyperparameters.scaling, self._space)
        hyperparameters.set_momentum(setting.momentum)
        hyperparameters.make_default()
        state.setting = setting
        run.world.rate_factor = state.scaled
        run.info(f"OmniTuner: trains with {setting}, as suits the number of groups in the run")
        log(run.trainer, {"omni/groups": float(groups), "omni/momentum": setting.momentum, "omni/lr": setting.lr})


def check_joined(options: TunerOptions) -> None:
    for name in options.space:
        if name not in _CHOSEN:
            raise UnsupportedError(
                f"space={{{name!r}: ...}} with elastic=True: the first group decides how all exchange, and you decide"
                f" how many groups there are; pass some of {', '.join(map(repr, _CHOSEN))}"
            )


__all__ = ["Fit", "JoinedFit", "TunedFit", "check_joined", "may_form_groups"]
