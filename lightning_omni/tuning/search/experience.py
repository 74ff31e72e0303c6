"""Expected costs of settings by simulations of other tasks, in place of theory's rules."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

from typing_extensions import override

from lightning_omni.methods import DiLoCo, LocalSGD, method_named
from lightning_omni.tuning.model.forecast import Setting, Theory
from lightning_omni.tuning.search.prior import STREAMING, Prior


@cache
def _known_as(method: str) -> str:
    """Return the name of a method in the prior; an empty name stands for asynchronous SGD."""
    if not method:
        return "async_sgd"
    value = method_named(method)
    # An outer step of plain SGD with a rate of 1 sets the weights to the mean of the groups' weights.
    is_plain = isinstance(value, DiLoCo) and value.outer_lr == 1.0 and not value.outer_momentum
    if isinstance(value, (DiLoCo, LocalSGD)) and (is_plain or isinstance(value, LocalSGD)):
        return STREAMING if value.keep_steps else "local_sgd"
    return method.partition(":")[0]


@dataclass(frozen=True)
class Experience(Theory):
    """A `Theory` whose costs, momentum and steps are those of a `Prior`.

    Args:
        prior: the table of simulated costs.
        scatter: coefficient of variation of the groups' step times.
    """

    prior: Prior = field(kw_only=True)
    scatter: float = field(default=0.0, kw_only=True)
    _costs: dict[Setting, tuple[float, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def suggested(self, setting: Setting) -> Setting:
        """Return a setting with the momentum and learning rate that the prior suggests."""
        momentum, factor = self.prior.suggested(
            _known_as(setting.method),
            setting.groups,
            setting.period,
            momentum=self.start.momentum,
            scatter=self.scatter,
            is_adaptive=self.scaling.is_adaptive,
        )
        lr = self.scaling.lr(setting.updates_per_batch, momentum, self.step * factor)
        return replace(setting, momentum=momentum, lr=lr)

    def covers(self, setting: Setting) -> bool:
        """Return whether runs with as many groups and local steps, of the method or a relative, were simulated."""
        return self.prior.covers(_known_as(setting.method), setting.groups, setting.period)

    @override
    def __call__(self, setting: Setting) -> float:
        return self._cost(setting)[0]

    @override
    def error(self, setting: Setting) -> float:
        return self._cost(setting)[1]

    def _cost(self, setting: Setting) -> tuple[float, float]:
        if setting not in self._costs:  # a search requests hundreds of settings several times
            self._costs[setting] = self._cost_by_prior(setting)
        return self._costs[setting]

    def _cost_by_prior(self, setting: Setting) -> tuple[float, float]:
        return self.prior.log_cost(
            _known_as(setting.method),
            setting.groups,
            setting.period,
            scatter=self.scatter,
            momentum=setting.momentum,
            step=self.scaling.step(setting) / self.step,
            is_adaptive=self.scaling.is_adaptive,
            wire=setting.wire not in ("", "fp32"),
            overlap=setting.overlap,
            all_reduce=setting.all_reduce if setting.all_reduce != self.start.all_reduce else "",
        )
