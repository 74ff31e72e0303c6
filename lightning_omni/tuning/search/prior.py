"""Costs of settings in samples before a run has shown anything: a table that was measured in the simulator.

``prior.json`` holds the rows, geometric means over tasks, or medians for `STREAMING`. ``tests/benchmarks/prior.py``
generates it.

Rule 1: a step is how far each sample moves the weights, relative to the user's own: `Scaling` for methods whose
optimizer steps at the server for every group's gradient, and the same without the factor for groups elsewhere.
Rule 2: one group costs nothing, whatever the method: it is the user's own synchronous training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from lightning_omni.json_dataclasses import Serializable
from lightning_omni.methods import DiLoCo, LocalSGD, method_named
from lightning_omni.tuning.model.setting import Scaling, Setting
from lightning_omni.tuning.search import constants as c

Array = np.ndarray[Any, Any]
_VALUES = ("momentum", "log_step", "log_cost", "deviation", "scatter")
COST, DEVIATION, SCATTER = map(_VALUES.index, ("log_cost", "deviation", "scatter"))
"""Indices into `PriorRow.values`."""

STREAMING = "streaming"
"""Averages in fragments that travel while groups keep training, with their steps kept: a name of this table alone."""
RELATIVES = {
    STREAMING: ("local_sgd",),
    "softsync": ("async_sgd",),
    "ringmaster_asgd": ("async_sgd",),
    "delay_compensated": ("async_sgd",),
    "downpour": ("async_sgd",),
    "gossip": ("elastic_averaging", "local_sgd"),
    "decoupled_diloco": ("async_diloco", "diloco", "local_sgd"),
    "async_diloco": ("diloco", "local_sgd"),
    "diloco": ("local_sgd",),
    "elastic_averaging": ("local_sgd",),
}
"""Methods that stand in for those without measurements, the closest first."""


@dataclass(frozen=True)
class PriorRow(Serializable):
    """The measurements of a method with a number of groups and local steps.

    Attributes:
        is_adaptive: whether the optimizer was AdamW instead of SGD.
        times: name of the distribution of step times.
        scatter: coefficient of variation of a group's step times.
        momentum: the momentum that needed the fewest samples to a held-out loss (β1 of AdamW); for `STREAMING`,
            that of local SGD, as is ``step``.
        step: the step that needed them, relative to the user's own.
        log_cost: logarithm of these samples, relative to those of synchronous training; at least 0.
        deviation: standard deviation of ``log_cost`` from task to task, with the error of the mean.
        tasks: number of measured tasks; 0 if the row was derived from its neighbours.
        seeds: number of orders of the data.
    """

    method: str
    is_adaptive: bool
    groups: int
    period: int
    times: str
    scatter: float
    momentum: float
    step: float
    log_cost: float
    deviation: float
    tasks: int = 0
    seeds: int = 0

    @property
    def values(self) -> Array:
        return np.array([self.momentum, math.log(self.step), self.log_cost, self.deviation, self.scatter])


@dataclass(frozen=True)
class Steepness(Serializable):
    """The rise of the log samples with the squared distance from the best momentum and step.

    ``momentum_below`` and ``step_below`` are for smaller ones; the distance of steps is the logarithm of their ratio.
    """

    momentum_below: float = 0.3
    momentum_above: float = 0.6
    step_below: float = 0.15
    step_above: float = 0.3

    def __call__(self, momentum: float, log_step: float) -> float:
        of_momentum = self.momentum_below if momentum < 0 else self.momentum_above
        of_step = self.step_below if log_step < 0 else self.step_above
        return of_momentum * momentum**2 + of_step * log_step**2


@dataclass(frozen=True)
class Prior:
    """Samples to a target, for any method, groups, local steps, momentum and step, relative to the user's own setting.

    Args:
        steepness: the rise about the best, of adaptive optimizers (True) and of SGD (False).
        wire: logarithm of the cost of a lossy wire format, and its standard deviation.
        overlap: the same of overlapped exchanges.
        all_reduce: the same of all-reduce formats inside groups, for adaptive optimizers (True) and SGD (False); a
            format without an entry costs as much as a lossy wire format.
    """

    rows: tuple[PriorRow, ...]
    steepness: Mapping[bool, Steepness] = field(default_factory=dict)
    wire: tuple[float, float] = (0.0, 0.05)
    overlap: tuple[float, float] = (0.0, 0.1)
    all_reduce: Mapping[bool, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    _found: dict[tuple[str, bool, int, int], list[Array]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    @cache
    def load(cls) -> Prior:
        return cls.of(
            json.loads(files("lightning_omni.tuning.search").joinpath("prior.json").read_text(encoding="utf-8"))
        )

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Prior:
        return cls(
            rows=tuple(PriorRow.from_dict(row) for row in plain["rows"]),
            steepness={name == "adaptive": Steepness.from_dict(values) for name, values in plain["steepness"].items()},
            wire=tuple(plain["wire"]),
            overlap=tuple(plain["overlap"]),
            all_reduce={
                kind == "adaptive": {name: tuple(cost) for name, cost in costs.items()}
                for kind, costs in plain["all_reduce"].items()
            },
            provenance=plain["provenance"],
        )

    def suggested(
        self, method: str, groups: int, period: int, momentum: float, scatter: float, is_adaptive: bool
    ) -> tuple[float, float]:
        """Return the best momentum (β1), and the best step relative to the user's own, at most `LARGEST_STEP`.

        ``period`` is 1 for methods without one, ``momentum`` the user's own, which is never exceeded, and ``scatter``
        the coefficient of variation of a group's step times: 0 for equal ones, 1 for exponential ones.
        """
        if self._is_synchronous(method, groups):
            return momentum, 1.0
        best, log_step, *_ = self._values(method, groups, period, scatter, is_adaptive)
        step = min(math.exp(log_step), c.LARGEST_STEP)
        return min(momentum, max(0.0, round(float(best), 6))), round(step, 6)

    def log_cost(
        self,
        method: str,
        groups: int,
        period: int,
        *,
        scatter: float,
        momentum: float | None = None,
        step: float | None = None,
        is_adaptive: bool = False,
        wire: bool = False,
        overlap: bool = False,
        all_reduce: str = "",
    ) -> tuple[float, float]:
        """Return the log samples to a target, relative to the user's synchronous setting, and their standard deviation.

        ``momentum`` and ``step`` are the best if None; ``wire`` tells whether the wire format is lossy;
        ``all_reduce`` is empty for the run's own. Other arguments are as in `suggested`.
        """
        variants = [self.all_reduce.get(is_adaptive, {}).get(all_reduce, self.wire)] if all_reduce else []
        if groups > 1:  # one alone exchanges nothing
            variants += [each for is_used, each in ((wire, self.wire), (overlap, self.overlap)) if is_used]
        if self._is_synchronous(method, groups):
            return _added((0.0, 0.0), variants)
        best, log_step, cost, deviation, _ = self._values(method, groups, period, scatter, is_adaptive)
        away = (0.0 if momentum is None else momentum - best, 0.0 if step is None else math.log(step) - log_step)
        cost += self.steepness.get(is_adaptive, Steepness())(*away)
        return _added((cost, deviation), variants)

    def covers(self, method: str, groups: int, period: int) -> bool:
        names = (method, *RELATIVES.get(method, ()))
        rows = next((rows for name in names if (rows := self._rows(name, is_adaptive=False))), [])
        most = max((row.groups for row in rows), default=1), max((row.period for row in rows), default=1)
        return self._is_synchronous(method, groups) or (groups <= most[0] and period <= most[1])

    # --- Interpolation -----------------------------------------------------------------------------------------------

    @staticmethod
    def _is_synchronous(method: str, groups: int) -> bool:
        return groups == 1 or method == "hardsync"

    def _values(self, method: str, groups: int, period: int, scatter: float, is_adaptive: bool) -> Array:
        """Interpolate the values of the method, its closest relative, or the costliest method."""
        for name, error in ((method, 0.0), *((name, c.RELATED) for name in RELATIVES.get(method, ()))):
            if rows := self._rows(name, is_adaptive):
                found = self._interpolated(name, is_adaptive, groups, period, scatter)
                other = 0.0 if rows[0].is_adaptive == is_adaptive else c.RELATED
                found[DEVIATION] = math.hypot(found[DEVIATION], error, other)
                return found
        every = {row.method for row in self.rows}
        found = max(
            (self._interpolated(name, is_adaptive, groups, period, scatter) for name in sorted(every)),
            key=lambda values: float(values[COST]),
        )
        found[DEVIATION] = math.hypot(found[DEVIATION], 2 * c.RELATED)
        return found

    def _interpolated(self, method: str, is_adaptive: bool, groups: int, period: int, scatter: float) -> Array:
        """Interpolate between distributions of step times, by their scatter at these groups."""
        found = self._on_surfaces(method, is_adaptive, groups, period)
        low, high = found[0], found[-1]
        width = float(high[SCATTER] - low[SCATTER])
        share = min(1.0, max(0.0, (scatter - float(low[SCATTER])) / width)) if width > 0 else 0.0
        return np.asarray((1 - share) * low + share * high)

    def _on_surfaces(self, method: str, is_adaptive: bool, groups: int, period: int) -> list[Array]:
        """Return the values for each distribution of step times, the steadiest first."""
        key = method, is_adaptive, groups, period
        if key not in self._found:  # settings with other wire formats, and other searches, request the same
            rows = self._rows(method, is_adaptive)
            surfaces = [[row for row in rows if row.times == each] for each in dict.fromkeys(row.times for row in rows)]
            values = [_on_surface(each, groups, period) for each in surfaces]
            self._found[key] = sorted(values, key=lambda each: each[SCATTER])
        return self._found[key]

    def _rows(self, method: str, is_adaptive: bool) -> list[PriorRow]:
        rows = [row for row in self.rows if row.method == method]
        return [row for row in rows if row.is_adaptive == is_adaptive] or rows


def _added(cost: tuple[float, float], variants: Iterable[tuple[float, float]]) -> tuple[float, float]:
    means, deviations = zip(cost, *variants, strict=True)
    return float(sum(means)), float(math.hypot(*deviations))


def _on_surface(rows: list[PriorRow], groups: int, period: int) -> Array:
    """Interpolate on a grid of groups and local steps, linearly in their logarithms."""
    known = {(row.groups, row.period): row.values for row in rows}
    first, among_groups = _between(sorted({place[0] for place in known}), groups)
    second, among_periods = _between(sorted({place[1] for place in known}), period)
    corners = np.array([[known[g, h] for h in second] for g in first])

    def at(share: float, other: float) -> Array:
        return np.asarray(np.array([1 - other, other]) @ (np.array([1 - share, share]) @ corners.swapaxes(0, 1)))

    found, end = at(among_groups, among_periods), at(min(among_groups, 1.0), min(among_periods, 1.0))
    beyond = max(0.0, among_groups - 1) + max(0.0, among_periods - 1)
    if beyond:  # momentum and step stay constant; costs are extrapolated, less certain and no lower
        end[COST], end[DEVIATION] = max(found[COST], end[COST]), end[DEVIATION] + c.BEYOND * beyond
        return end
    return found


def _between(knots: list[int], wanted: int) -> tuple[tuple[int, int], float]:
    """Return the two knots about a number, and its position between them in logarithms.

    The position is 0 up to the first or only knot, and above 1 beyond the last.
    """
    if len(knots) == 1 or wanted <= knots[0]:
        return (knots[0], knots[0]), 0.0
    place = next((i for i, knot in enumerate(knots[1:], 1) if wanted <= knot), len(knots) - 1)
    low, high = knots[place - 1], knots[place]
    return (low, high), min(math.log(wanted / low) / math.log(high / low), 1 + c.FARTHEST)


@cache
def _known_as(method: str) -> str:
    """Return the name of a method in the prior; an empty name stands for asynchronous SGD."""
    if not method:
        return "async_sgd"
    value = method_named(method)
    # An outer step of plain SGD with a rate of 1 sets the weights to the mean of the groups' weights.
    if isinstance(value, LocalSGD) or (
        isinstance(value, DiLoCo) and value.outer_lr == 1.0 and not value.outer_momentum
    ):
        return STREAMING if value.keep_steps else "local_sgd"
    return method.partition(":")[0]


@dataclass(frozen=True)
class PriorTheory:
    """The expected log samples of settings that were not tried yet, their best momentum and steps, by a `Prior`.

    Args:
        start: the user's own setting, of one group, to which all others are relative.
    """

    start: Setting
    scaling: Scaling
    prior: Prior
    scatter: float = 0.0

    @property
    def step(self) -> float:
        return self.scaling.step(self.start)

    def suggested(self, setting: Setting) -> Setting:
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
        return self.prior.covers(_known_as(setting.method), setting.groups, setting.period)

    def __call__(self, setting: Setting) -> float:
        return self._cost(setting)[0]

    def error(self, setting: Setting) -> float:
        return self._cost(setting)[1]

    def _cost(self, setting: Setting) -> tuple[float, float]:
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
