"""The search space of a fit: numbers of groups, methods, bounds, and the setting that a search starts from."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_omni.checks import plain
from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.methods import METHODS, method_named, text_of
from lightning_omni.strategy.lightning_internals.strategies import has_ddp_comm_hook
from lightning_omni.tuning.callback.hyperparameters import Hyperparameters
from lightning_omni.tuning.callback.tuned_run import TunedRun
from lightning_omni.tuning.model.forecast import Setting
from lightning_omni.tuning.search import SearchSpec, Space
from lightning_omni.tuning.search.space import DEFAULT_ALL_REDUCES, DEFAULT_METHODS, DEFAULT_WIRES, is_plain
from lightning_omni.wire.all_reduce import text_of as text_of_all_reduce
from lightning_omni.wire.compression import Compression

_log = logging.getLogger(__name__)

_USUAL = ("async_sgd", Compression(), False)
"""Method, compression and overlap of a strategy whose user has chosen none."""


class FitSpace:
    """The search space of one fit.

    Args:
        run: the fit.
    """

    def __init__(self, run: TunedRun) -> None:
        self._run, self._has_no_server = run, False

    def join_server(self) -> bool:
        """Join the parameter server, which several groups need; return whether that worked.

        All ranks call it, while they are one group. It is tried once in a fit; if it fails, rank 0 warns the user.
        """
        run = self._run
        if not self._has_no_server and (problem := run.world.connection.try_to_join()):
            self._has_no_server = True
            if run.is_rank_zero:
                _log.warning(
                    "OmniTuner: the run stays in one group, because several need a parameter server: %s", problem
                )
        return not self._has_no_server

    def restrict_to_server(self, spec: SearchSpec) -> SearchSpec:
        """Return the specification, restricted to one group if there is no server. All ranks call it."""
        if max(spec.space.groups) == 1 or self.join_server():
            return spec
        return replace(spec, space=replace(spec.space, groups=(1,)))

    def why_impossible(self, groups: int) -> str:
        """Return why a number of groups is impossible; empty if it is possible."""
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
            run.strategy.check_several(run.trainer)
            for optimizer in run.trainer.optimizers:
                run.world.check_optimizer(optimizer)
        except (ConfigurationError, UnsupportedError) as error:
            return str(error)
        return "sparse gradients travel inside one group only" if self._has_sparse_gradients else ""

    @property
    def _has_sparse_gradients(self) -> bool:
        return any(getattr(each, "sparse", False) is True for each in self._run.trainer.lightning_module.modules())

    @property
    def may_rebalance(self) -> bool:
        return Space.of(self._run.options.space, self._run.world.size).rebalance

    def specification(self, hyperparameters: Hyperparameters, switch: float) -> SearchSpec:
        """Return the specification of a search that starts from the present setting.

        Args:
            hyperparameters: those of the optimizer.
            switch: seconds to form groups, as far as they are known.
        """
        run = self._run
        start, batch = self._start(hyperparameters), run.batch(len(run.world.live_ranks))
        return SearchSpec(
            start,
            batch,
            run.horizon,
            self._space(hyperparameters, start),
            hyperparameters.scaling,
            seconds=run.seconds_left,
            ends_by_time=run.ends_by_time,
            switch=switch,
            budget=run.options.budget,
            allowance=run.options.budget * run.seconds - run.spent,
            seed=run.options.seed + run.state.rounds,
            reference=run.state.reference or batch / start.groups,
        )

    def _start(self, hyperparameters: Hyperparameters) -> Setting:
        run, world = self._run, self._run.world
        start = Setting(
            groups=max(1, len(world.live_groups)),
            momentum=hyperparameters.momentum,
            lr=hyperparameters.lr,
            rebalance=run.strategy.balance.is_on,
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
            all_reduce=text_of_all_reduce(world.reduction.format),
        )

    def _space(self, hyperparameters: Hyperparameters, start: Setting) -> Space:
        run, world = self._run, self._run.world
        live, given = len(world.live_ranks), dict(run.options.space)
        if world.lost and "groups" in given:  # the user could not foresee it
            groups = given["groups"] if isinstance(given["groups"], Iterable) else [given["groups"]]
            given["groups"] = [1, *(each for each in groups if each <= live)]
        own = run.state.own.momentum if run.state.own is not None else start.momentum
        space = Space.of(given, live, self._allows, own)
        if not hyperparameters.is_momentum_free:
            space = replace(space, momentum=(start.momentum, start.momentum))
        if run.strategy.epochs.leases is None:
            space = replace(space, rebalance=False)
        if not space.method and not hasattr(world.method, "period"):
            space = replace(space, period=())
        options = world.options
        if (options.method, options.compression, options.overlap) == _USUAL:
            space = replace(
                space,
                method=space.method or self._methods(),
                compression=space.compression or DEFAULT_WIRES,
                all_reduce=space.all_reduce or self._all_reduces(),
            )
        return space

    def _allows(self, groups: int) -> bool:
        """Return whether a number of groups is possible, and log why it is not."""
        reason = self.why_impossible(groups)
        if reason and not self._run.problem:
            self._run.info(f"OmniTuner: {groups} groups are not tried: {reason}")
        return not reason

    def _all_reduces(self) -> tuple[str, ...]:
        """Return the usable all-reduce formats: none with sparse gradients or a user's communication hook."""
        has_hook = has_ddp_comm_hook(self._run.strategy)
        return () if has_hook or self._has_sparse_gradients else DEFAULT_ALL_REDUCES

    def _methods(self) -> tuple[str, ...]:
        """Return the methods with known costs that groups of this run can use."""
        world = self._run.world
        before, found = world.method, []
        for name in DEFAULT_METHODS:
            world.method = method_named(name)
            with suppress(ConfigurationError):
                if not self.why_impossible(2):
                    found.append(name)
        world.method = before
        return tuple(found)


def _plain(name: str, value: Any) -> Any:
    """Return a value of a user-defined dimension as a plain one, if it can travel unchanged."""
    if not is_plain(value):
        raise ConfigurationError(
            f"space={{{name!r}: ...}}: current(world) returned {value!r}; return a number, a text, True or False"
        )
    return plain(value)


def _text_of_wire(given: Compression) -> str:
    """Return the formats of pushes and pulls as a setting has them; empty if one has no name."""
    if not isinstance(given.push, str) or not isinstance(given.pull, str):
        return ""
    return given.push if given.pull == "fp32" else f"{given.push}/{given.pull}"


__all__ = ["FitSpace"]
