"""The settings of a fit: those to search, and the one in use, on every rank."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_omni.checks import plain
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import METHODS, Method, method_named, text_of, with_period
from lightning_omni.runtime.balance import Balance
from lightning_omni.runtime.parallel_state import Communication
from lightning_omni.runtime.state.checkpoint import RollbackPoint
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.strategy.lightning_internals.callbacks import averaged_tensors, restart_empty_averages
from lightning_omni.strategy.lightning_internals.strategies import has_ddp_comm_hook
from lightning_omni.tuning.callback.hyperparameters import Hyperparameters
from lightning_omni.tuning.callback.losses import DivergenceGuard
from lightning_omni.tuning.callback.tuned_run import Command, TunedRun
from lightning_omni.tuning.model.setting import Setting
from lightning_omni.tuning.search import SearchSpec, Space
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.search.space import (
    DEFAULT_ALL_REDUCES,
    DEFAULT_METHODS,
    DEFAULT_WIRES,
    apply_further,
    compression_named,
    is_plain,
)
from lightning_omni.wire.all_reduce import EXACT, all_reduce_of
from lightning_omni.wire.compression import Compression
from lightning_omni.wire.formats.base import text_of as text_of_wire

__all__ = ["AppliedSetting", "FitSpace", "communicate", "communication_of"]

# --- The space of a search --------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

_USUAL = ("async_sgd", Compression(), False)
"""Method, compression and overlap of a strategy whose user has chosen none."""


class FitSpace:
    def __init__(self, run: TunedRun) -> None:
        self._run, self._has_no_server = run, False

    def join_server(self) -> bool:
        """Join the parameter server; return whether that worked.

        All ranks call it, while they are one group. After a failure, a fit does not try again.
        """
        run = self._run
        if not self._has_no_server and (problem := run.world.connection.try_to_join()):
            self._has_no_server = True
            if run.is_rank_zero:
                _log.warning(
                    "OmniTuner: the run stays in one group, because several need a parameter server: %s", problem
                )
        return not self._has_no_server

    def why_impossible(self, groups: int) -> str:
        run = self._run
        if self._has_no_server:
            return "there is no parameter server"
        if type(run.world.method) not in METHODS.values() and "method" not in run.options.space:
            return (
                f"what {type(run.world.method).__name__} costs in samples is not known; pass the names of methods in"
                ' space={"method": ...}'
            )
        try:
            run.world.check_method(groups)
            run.strategy.parts.grouping.check_several(run.trainer)
        except ConfigurationError as error:
            return str(error)
        return "sparse gradients travel inside one group only" if self._has_sparse_gradients else ""

    @property
    def _has_sparse_gradients(self) -> bool:
        return any(getattr(each, "sparse", False) is True for each in self._run.trainer.lightning_module.modules())

    @property
    def may_rebalance(self) -> bool:
        return Space.of(self._run.options.space, self._run.world.size).rebalance

    def specification(self, hyperparameters: Hyperparameters, switch: float) -> SearchSpec:
        run = self._run
        start = self._start(hyperparameters)
        return SearchSpec(
            start,
            run.batch(len(run.world.live_ranks)),
            run.horizon,
            self._space(hyperparameters, start),
            hyperparameters.scaling,
            switch=switch,
            budget=run.options.budget,
            allowance=run.options.budget * run.seconds - run.spent,
            seed=run.options.seed + run.state.rounds,
        )

    def _start(self, hyperparameters: Hyperparameters) -> Setting:
        run, world = self._run, self._run.world
        if run.state.own is not None:  # it has been restored, but for what schedulers have changed
            return run.state.own
        start = Setting(
            groups=1,
            momentum=hyperparameters.momentum,
            lr=hyperparameters.lr,
            period=int(getattr(world.method, "period", 1)),
            further=tuple(sorted((each.name, _plain(each.name, each.current(world))) for each in run.options.further)),
        )
        if type(world.method) not in METHODS.values():
            return start
        return replace(
            start,
            method=text_of(world.method, without=("period",)),
            wire=_text_of_wire(world.options.compression),
            overlap=world.core.overlaps,
            all_reduce="fp32" if world.reduction.format == EXACT else "",  # the first batches are averaged as they are
        )

    def _space(self, hyperparameters: Hyperparameters, start: Setting) -> Space:
        run, world = self._run, self._run.world
        live, given = len(world.live_ranks), dict(run.options.space)
        if world.lost and "groups" in given:  # the user could not foresee it
            groups = given["groups"] if isinstance(given["groups"], Iterable) else [given["groups"]]
            given["groups"] = [1, *(each for each in groups if each <= live)]
        space = Space.of(given, live, self._allows, start.momentum)
        if not hyperparameters.is_momentum_free:
            space = replace(space, momentum=(start.momentum, start.momentum))
        if run.strategy.parts.epochs.leases is None:
            space = replace(space, rebalance=False)
        options = world.options
        if (options.method, options.compression, options.overlap) == _USUAL:
            is_averaged_otherwise = has_ddp_comm_hook(run.strategy) or self._has_sparse_gradients
            space = replace(
                space,
                method=space.method or self._methods(),
                compression=space.compression or DEFAULT_WIRES,
                all_reduce=space.all_reduce or (() if is_averaged_otherwise else DEFAULT_ALL_REDUCES),
            )
        return space

    def _allows(self, groups: int) -> bool:
        reason = self.why_impossible(groups)
        if reason and not self._run.problem:
            self._run.info(f"OmniTuner: {groups} groups are not tried: {reason}")
        return not reason

    def _methods(self) -> tuple[str, ...]:
        world = self._run.world
        before, found = world.method, []
        for name in DEFAULT_METHODS:
            world.method = method_named(name)
            if not self.why_impossible(2):
                found.append(name)
        world.method = before
        return tuple(found)


def _plain(name: str, value: Any) -> Any:
    if not is_plain(value):
        raise ConfigurationError(
            f"space={{{name!r}: ...}}: current(world) returned {value!r}; return a number, a text, True or False"
        )
    return plain(value)


def _text_of_wire(given: Compression) -> str:
    push, pull = (each if isinstance(each, str) else text_of_wire(each) for each in (given.push, given.pull))
    if not (push and pull):  # a format of the user's own
        return ""
    return push if pull == "fp32" else f"{push}/{pull}"


# --- The applied setting ----------------------------------------------------------------------------------------------


def communication_of(setting: Setting, current: Communication) -> Communication:
    method, wire, overlap, all_reduce = current
    if setting.method:
        method, overlap = method_named(setting.method), setting.overlap
    if setting.wire:
        wire = compression_named(setting.wire).wire_format
    if setting.all_reduce:
        all_reduce = all_reduce_of(setting.all_reduce)
    return Communication(with_period(method, setting.period), wire, overlap, all_reduce)


def communicate(strategy: OmniStrategyHooks, wanted: Communication) -> bool:
    """Set the communication of groups formed from now on; return whether that is a change. All ranks call it.

    If all ranks are one group, its members average in the new format at once.
    """
    world = strategy.world
    before, world.communication = world.communication, wanted
    if before.all_reduce != wanted.all_reduce and not world.executor.exchanges:
        strategy.parts.grouping.wrap()
    return before != wanted


class AppliedSetting:
    """The setting of one fit. All ranks call its methods.

    Attributes:
        seconds_to_form: seconds that the last formation of several groups took; `FORMING` before the first.
        rollback_point: the state of the run before its choice, with later weights once it has learnt, if known.
    """

    def __init__(self, run: TunedRun, space: FitSpace) -> None:
        self._run, self._space = run, space
        self.seconds_to_form = c.FORMING
        self._guard: DivergenceGuard | None = None
        self.rollback_point: RollbackPoint | None = None
        self._exchanged = 0.0
        self._pushes: type[Method] | None = None  # the method of the latest groups

    # --- Applying -----------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        self.rollback_point = self._now()

    def apply(self, command: Command) -> None:
        state, hyperparameters = self._run.state, self._run.hyperparameters()
        hyperparameters.set_momentum(command.setting.momentum)
        hyperparameters.make_default()
        state.setting = command.setting
        state.speeds = sorted(command.speeds.items()) if command.speeds and command.by_speed else []
        self.form(command.setting, command.speeds, command.by_speed)

    def form(self, setting: Setting, speeds: Mapping[int, float] | None = None, by_speed: bool = False) -> None:
        strategy, world, began = self._run.strategy, self._run.world, time.perf_counter()
        world.rate_factor = self._run.state.scaled
        communicates = communicate(strategy, communication_of(setting, world.communication)) and setting.groups > 1
        if setting.groups > 1:
            if self._pushes not in (None, type(world.method)):  # a residual has the units of what its method pushes
                world.residuals.warn_of_remainder("groups exchange by another method from here on")
                world.residuals.forget()
            self._pushes = type(world.method)
        is_due = apply_further(self._run.options.further, world, setting)
        if setting.rebalance:
            self.split_by_speed()
        if setting.groups != len(world.topology.alive) or by_speed or communicates or is_due:
            strategy.parts.grouping.form(setting.groups, speeds if by_speed else None)
        if (
            setting.rebalance
            and speeds is not None
            and len(world.members) > 1
            and strategy.parts.epochs.leases is not None
        ):
            strategy.parts.grouping.set_batch_shares([speeds[rank] for rank in world.members])
        strategy.parts.grouping.enter_world()
        if setting.groups > 1:
            self.seconds_to_form = time.perf_counter() - began

    def split_by_speed(self) -> bool:
        """Split batches by speed from now on, where that pays; return whether that is possible."""
        strategy = self._run.strategy
        if strategy.parts.epochs.leases is None:
            return False
        if not strategy.parts.balance.is_on:
            strategy.parts.balance = Balance("auto", self._run.info)
            strategy.parts.balance.begin(strategy.world, strategy.parts.pl_module, lambda: strategy.parts.epochs.leases)
        return True

    def restore_user_setting(self) -> None:
        self._run.strategy.parts.grouping.merge()
        self.apply(Command(self._run.own))
        self._guard = self.rollback_point = None  # they belong to the choice that is undone

    # --- Watching -----------------------------------------------------------------------------------------------------

    def watch(self, threshold: float, keeps: bool = False) -> None:
        """Treat the run as diverged from now on if its loss exceeds a threshold; NaN for none.

        ``keeps`` tells whether a larger threshold from before stays. Without a rollback point nothing is watched,
        nor with the user's own setting, which drops the point.
        """
        state = self._run.state
        known = [each for each in (threshold, state.divergence_threshold if keeps else math.nan) if math.isfinite(each)]
        state.divergence_threshold = max(known, default=math.nan)
        guards = known and self.rollback_point is not None and not self.is_user_setting
        self._guard = DivergenceGuard(state.divergence_threshold) if guards else None
        if self.is_user_setting:
            self.rollback_point = None  # it holds a copy of all weights

    @property
    def is_user_setting(self) -> bool:
        """Return whether the choice makes the updates of a run without a tuner, which then causes no divergence."""
        setting, own = self._run.state.setting, self._run.state.own
        if setting is None or own is None or setting.groups > 1:
            return False
        is_same = setting.all_reduce == own.all_reduce and setting.further == own.further
        return is_same and setting.momentum == own.momentum and math.isclose(self._run.state.scaled, 1.0)

    @property
    def has_given_up(self) -> bool:
        return self._guard is not None and self._guard.has_given_up

    def batch_done(self, loss: Tensor | None) -> None:
        if self._guard is None:
            return
        world = self._run.world
        before, self._exchanged = self._exchanged, world.exchange.traffic.seconds
        is_finite = not world.core.last_answer.refused_in_row if world.exchange.traffic.seconds != before else None
        self._guard.batch_done(loss, world.executor.exchanges, is_finite)

    @property
    def has_diverged(self) -> bool:
        if self._guard is None:
            return False
        mean = self._guard.mean(torch.zeros((), device=self._run.strategy.root_device))
        return self._guard.is_worse(*self._run.strategy.reduce(mean, reduce_op="sum").tolist())

    def capture_weights(self) -> None:
        """Store the present weights in the rollback point, unless a rank's are no longer finite."""
        if self._guard is None or self.rollback_point is None:
            return
        # If one rank refuses, all do: a rollback would otherwise leave them with different weights.
        if not any(self._run.world.all_reduce_max([int(self.rollback_point.is_spoilt)])):
            self.rollback_point.keep_weights()

    def roll_back(self) -> Command:
        """Restore the rollback point, in one group with the user's setting for good; return a command to report."""
        run, was = self._run, self._run.setting
        assert self.rollback_point is not None
        run.strategy.parts.grouping.merge()
        self.return_to(self.rollback_point)
        self.return_to_one_group(run.own)
        run.renew_choice()
        why = f"the run has diverged with {was}, and is rolled back to its weights after the last good epoch or search"
        return Command(run.setting, why=why)

    def _now(self) -> RollbackPoint:
        run = self._run
        averages, scaler = averaged_tensors(run.trainer), run.strategy.parts.grouping.loss_scaler
        return RollbackPoint.of(run.module, run.trainer.optimizers, run.world.core, averages, scaler)

    def return_to(self, point: RollbackPoint) -> None:
        """Restore a rollback point, where all ranks are one group."""
        point.restore(self._run.world.core)
        restart_empty_averages(self._run.trainer)
        self._run.world.reduction.forget()

    # --- Trials of the user's own setting -----------------------------------------------------------------------------

    def begin_trial(self, starts_over: bool) -> RollbackPoint:
        """Train with the user's own setting in one group; return the state before.

        With ``starts_over``, the trial begins from the rollback point, if any.
        """
        run, state = self._run, self._run.state
        speeds, state.before_trial = state.speeds, state.setting
        run.strategy.parts.grouping.merge()
        before = self._now()
        if starts_over and self.rollback_point is not None:
            self.return_to(self.rollback_point)
        self._train_in_one_group(run.own)
        state.speeds = speeds  # end_trial forms the groups by them again
        self._guard = None
        return before

    def end_trial(self, to: RollbackPoint | None) -> None:
        """Train with the setting before the trial again, from the state ``to`` if given."""
        before = self._run.state.before_trial
        assert before is not None
        if to is not None:
            self.return_to(to)
        self.resume(before)

    def resume(self, setting: Setting) -> None:
        """Train with an earlier setting again, in groups by the speeds of then."""
        state, live = self._run.state, len(self._run.world.live_ranks)
        state.before_trial, speeds = None, dict(state.speeds) or None
        self.apply(Command(replace(setting, groups=min(setting.groups, live)), speeds=speeds, by_speed=bool(speeds)))
        self.watch(math.nan, keeps=True)

    # --- Giving groups up ---------------------------------------------------------------------------------------------

    def return_to_one_group(self, setting: Setting) -> None:
        """Train with a setting of one group from now on, and choose no other."""
        run, state = self._run, self._run.state
        run.strategy.parts.grouping.merge()
        self._train_in_one_group(setting)
        state.is_final = True
        self.watch(state.divergence_threshold)

    def _train_in_one_group(self, setting: Setting) -> None:
        rebalance = bool(self._run.strategy.parts.epochs.leases) and self._space.may_rebalance
        self.apply(Command(replace(setting, groups=1, rebalance=rebalance)))
