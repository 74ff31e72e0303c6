"""A fit of a group that has joined a run on its own: momentum and learning rate follow the number of groups.

The users who start and stop groups set their number, and the first group sets how all exchange. Momentum and learning
rate follow from the number, as soon as it changes: asynchrony adds momentum, and every group makes as many updates as
one group alone did.

Rule 1: all members of a group receive the number of groups in the same answer of the server, and decide by themselves.
Rule 2: the weights move as far in a second, and with as much momentum, explicit and implicit together, as with the
user's own setting and one group. So more groups bring gradients with less noise, and not larger steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from typing_extensions import override

from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.methods import AsyncSGD, Method
from lightning_omni.tuning.callback.apply.applied import AppliedSetting
from lightning_omni.tuning.callback.apply.hyperparameters import Hyperparameters
from lightning_omni.tuning.callback.fit import Fit
from lightning_omni.tuning.callback.run import TunedRun, TunerOptions
from lightning_omni.tuning.callback.space import FitSpace
from lightning_omni.tuning.model.convergence.momentum import explicit_for
from lightning_omni.tuning.model.forecast import Scaling, Setting
from lightning_omni.tuning.search import Space

_CHOSEN = ("momentum", "lr", "rebalance")
"""Dimensions that a group which has joined on its own can choose."""


def suited_to(own: Setting, groups: int, method: Method, scaling: Scaling, space: Space) -> Setting:
    """Return the momentum and learning rate with which groups train like one.

    With g groups whose pushes are applied one after the other, staleness is g - 1 on average, and the implicit momentum
    of 1 - 1 / g is subtracted from the explicit one. The learning rate moves the weights as far in the time of a batch,
    which has g updates now. (Optimizers that divide by the gradients' size use the square root of g.) Nothing changes
    for methods that average the groups, or wait for all of them.

    Args:
        own: the user's setting, of one group.
        groups: number of groups.
        method: the method of their exchange.
        scaling: the scaling of learning rates.
        space: bounds of momentum and learning rate.

    Example:
        >>> own = Setting(groups=1, momentum=0.9, lr=0.1)
        >>> for groups in (2, 4, 16):
        ...     print(suited_to(own, groups, AsyncSGD(), Scaling(), Space(groups=(1,))))
        2 groups, momentum 0.8, lr 0.1
        4 groups, momentum 0.6, lr 0.1
        16 groups, momentum 0, lr 0.0625

    References:
        Mitliagkas et al. 2016, "Asynchrony begets Momentum", Theorem 6; Zhang et al. 2016, "Staleness-aware Async-SGD",
        for rates that fall with the staleness.
    """
    updates = method.updates_per_batch(groups)
    momentum = min(max(explicit_for(own.momentum, updates - 1), space.momentum[0]), space.momentum[1])
    lr = scaling.lr(updates, momentum, scaling.step(own))
    if isinstance(method, AsyncSGD) and method.staleness_aware:
        lr *= max(1, updates - 1)  # the server divides it by that
    return replace(own, groups=groups, momentum=momentum, lr=min(max(lr, space.lr[0]), space.lr[1]))


class JoinedFit(Fit):
    """A fit of a group that has joined on its own.

    Args:
        run: the fit.

    Raises:
        UnsupportedError: ``space`` has a dimension that such a group cannot choose.
    """

    def __init__(self, run: TunedRun) -> None:
        super().__init__(run)
        check_joined(run.options)
        self._space = Space.of(run.options.space, ranks=1)
        self._hyperparameters: Hyperparameters | None = None

    @override
    def begin(self) -> None:
        run = self.run
        if run.options.budget and self._space.rebalance and len(run.world.members) > 1:
            AppliedSetting(run, FitSpace(run)).split_by_speed()  # it changes nothing but the speed
        try:
            hyperparameters = self._hyperparameters = self._followed()
        except ConfigurationError as error:
            run.problem = str(error)
            run.info(f"OmniTuner: momentum and learning rate stay as they are: {run.problem}")
            return
        if run.state.own is None:  # a group that joins later receives that of the first one
            run.state.own = Setting(groups=1, momentum=hyperparameters.momentum, lr=hyperparameters.lr)
            run.state.setting = run.state.own
        self._space = Space.of(run.options.space, ranks=1, momentum=run.state.own.momentum)
        if not hyperparameters.is_momentum_free:
            self._space = replace(self._space, momentum=(hyperparameters.momentum, hyperparameters.momentum))
        hyperparameters.make_default()  # a group that joins later has the momentum that the others have by now

    def _followed(self) -> Hyperparameters:
        """Return the hyperparameters that follow the number of groups.

        Raises:
            ConfigurationError: none does; the message states why.
        """
        run = self.run
        method, optimizers = run.world.method, len(run.trainer.optimizers)
        if not run.options.budget:
            raise ConfigurationError("budget=0")
        if method.updates_per_batch(2) == 1:
            raise ConfigurationError(f"with {method} they do not depend on the number of groups")
        if optimizers != 1:
            raise ConfigurationError(f"it needs one optimizer, and there are {optimizers}")
        hyperparameters = Hyperparameters.of(run.trainer)
        hyperparameters.check_schedules()
        return hyperparameters

    @override
    def batch_done(self, outputs: Any, batch_idx: int) -> None:
        groups = self.run.world.core.last_answer.groups
        if self._hyperparameters is None or not groups:
            return
        if groups != self.run.setting.groups:
            self._follow(groups, self._hyperparameters)

    def _follow(self, groups: int, hyperparameters: Hyperparameters) -> None:
        """Adapt momentum and learning rate to a new number of groups. All members call it."""
        run, state = self.run, self.run.state
        setting = suited_to(run.own, groups, run.world.method, hyperparameters.scaling, self._space)
        hyperparameters.set_momentum(setting.momentum)
        hyperparameters.make_default()
        hyperparameters.scale(setting.lr / run.own.lr / state.scaled)
        state.scaled, state.setting = setting.lr / run.own.lr, setting
        run.info(f"OmniTuner: trains with {setting}, as suits the number of groups in the run")
        metrics = {"omni/groups": float(groups), "omni/momentum": setting.momentum, "omni/lr": setting.lr}
        for logger in run.trainer.loggers:
            logger.log_metrics(metrics, step=run.trainer.global_step)


def check_joined(options: TunerOptions) -> None:
    """Raise `UnsupportedError` if ``space`` has a dimension that a group which has joined on its own cannot choose."""
    for name in options.space:
        if name not in _CHOSEN:
            raise UnsupportedError(
                f"space={{{name!r}: ...}} with elastic=True: the first group decides how all exchange, and you decide"
                f" how many groups there are; pass some of {', '.join(map(repr, _CHOSEN))}"
            )


__all__ = ["JoinedFit", "check_joined", "suited_to"]
