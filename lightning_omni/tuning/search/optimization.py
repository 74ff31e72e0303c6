"""The scikit-optimize phase, which chooses the setting to train with from now on.

The objective is the logarithm of the seconds from now to the end, including the time to form groups. The surrogate of
scikit-optimize's `Optimizer` is an estimator of this package: its mean is the prediction, corrected by the trained
segments, and its deviation is the uncertainty that the prior and the segments leave. The expected improvement over the
run's and the trained settings proposes a point, with any momentum and learning rate. The phase compares it with these
settings and with the best of all settings that can be enumerated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_omni.serialization import Serializable
from lightning_omni.tuning.model.forecast import Setting
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.search.choice import (
    log_seconds,
    promising_settings,
)
from lightning_omni.tuning.search.space import Axis, checked_axis

if TYPE_CHECKING:
    from lightning_omni.tuning.search.evidence import Evidence

ASKED = "scikit-optimize"
Row = list[Any]
"""A point of scikit-optimize's space."""


@dataclass(frozen=True)
class ConsideredSetting(Serializable):
    """A setting that was considered.

    Attributes:
        setting: the setting.
        log_seconds: logarithm of the predicted seconds from now to the end.
        deviation: standard deviation of ``log_seconds``.
        improvement: expected improvement over the run's setting, in logarithms.
        by: the source of the setting: "the run", "the list", "scikit-optimize", or "was trained with".
    """

    setting: Setting
    log_seconds: float
    deviation: float
    improvement: float
    by: str


class Optimization:
    """One use of scikit-optimize: its observations and its proposal."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._start = evidence.start
        promising = promising_settings(evidence, evidence.forecast())
        self._trained = [evidence.with_rebalance(each.setting) for each in evidence.segments]
        self._ways = list(dict.fromkeys([self._start, *promising, *self._trained]))
        self._axes = _Axes(evidence, self._ways)

    def considered(self, listed: Setting) -> list[ConsideredSetting]:
        """Return the settings to compare, with their sources."""
        found = [(self._start, "the run"), (listed, "the list")]
        if self._axes.dimensions:
            asked = self._ask()
            found.append((asked, ASKED))
            if asked.further != listed.further:  # the value may pay in the best of the list as well
                found.append((replace(listed, further=asked.further), ASKED))
        found += [(each, "was trained with") for each in self._trained]
        settings: dict[Setting, str] = {}
        for setting, by in found:
            settings.setdefault(setting, by)
        return [self._considered(setting, by) for setting, by in settings.items()]

    def _ask(self) -> Setting:
        """Return the setting of largest expected improvement over the best of the run's and the trained settings."""
        from skopt import Optimizer

        evidence = self._evidence
        optimizer = Optimizer(
            self._axes.dimensions,
            base_estimator=_surrogate(self.predict),
            n_initial_points=0,
            acq_func="EI",
            acq_func_kwargs={"xi": 0.0},
            acq_optimizer="sampling",
            acq_optimizer_kwargs={"n_points": c.POINTS},
            random_state=evidence.spec.seed,
            avoid_duplicates=False,  # otherwise it could not propose the run's own setting
        )
        told = [self._start, *self._trained]
        rows = [self._axes.place(each) for each in told]
        optimizer.tell(rows, [log_seconds(evidence, each) for each in told])
        return self._axes.setting(optimizer.ask())

    def predict(self, rows: Sequence[Row]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return log seconds at points of the space, and their standard deviations."""
        found = [self._of(self._axes.setting(row)) for row in rows]
        means, deviations = zip(*found, strict=True)
        return np.array(means), np.array(deviations)

    def _considered(self, setting: Setting, by: str) -> ConsideredSetting:
        from skopt.acquisition import gaussian_ei

        mean, deviation = self._of(setting)
        best = log_seconds(self._evidence, self._start)
        improvement = max(best - mean, 0.0)
        if deviation > 0:
            known = _surrogate(lambda rows: (np.array([mean]), np.array([deviation])))
            improvement = float(gaussian_ei(np.zeros((1, 1)), known, y_opt=best, xi=0.0)[0])
        return ConsideredSetting(setting, mean, deviation, improvement, by)

    def _of(self, setting: Setting) -> tuple[float, float]:
        evidence = self._evidence
        return log_seconds(evidence, setting), math.hypot(evidence.theory.error(setting), evidence.residual(setting)[1])


def is_same_exchange(one: Setting, other: Setting) -> bool:
    """Return whether two settings differ only in momentum, learning rate and user-defined dimensions."""
    return replace(one, momentum=other.momentum, lr=other.lr, further=other.further) == other


class _Axes:
    """The axes of a space for scikit-optimize: the way of exchange, momentum, learning rate, user-defined dimensions.

    The values of a list are integers for scikit-optimize, because it clips the proposals of label-encoded categories to
    the first two. A dimension with one value has no axis.
    """

    def __init__(self, evidence: Evidence, ways: Sequence[Setting]) -> None:
        self._evidence, self._ways = evidence, ways
        space = evidence.spec.space
        self.further = space.further
        several, widest = max(space.groups) > 1, math.log(c.RATE_FACTOR)
        self._axes: list[Axis] = [list(range(len(ways))), list(space.momentum) if several else [0.0]]
        if several and space.momentum[0] < space.momentum[1]:
            self._axes[1] = space.momentum
        self._axes.append((-widest, widest) if several else [0.0])
        self._axes += [checked_axis(each, evidence) for each in self.further]

    @property
    def dimensions(self) -> list[Any]:
        from skopt.space import Integer, Real

        return [
            Integer(0, len(axis) - 1) if isinstance(axis, list) else Real(*map(float, axis))
            for axis in self._axes
            if _is_free(axis)
        ]

    def place(self, setting: Setting) -> Row:
        way = next(number for number, each in enumerate(self._ways) if is_same_exchange(each, setting))
        log_factor = math.log(setting.lr / self._ways[way].lr) if setting.groups > 1 else 0.0
        further = [setting.further_value(each.name) for each in self.further]
        values = [way, setting.momentum, log_factor, *further]
        return [_on(axis, value) for axis, value in zip(self._axes, values, strict=True) if _is_free(axis)]

    def setting(self, row: Row) -> Setting:
        left = list(row)
        way, momentum, log_factor, *further = (
            _at(axis, left.pop(0)) if _is_free(axis) else axis[0] for axis in self._axes
        )
        setting, scaling = self._ways[int(way)], self._evidence.scaling
        if setting.groups > 1:  # one group keeps the user's momentum and learning rate
            momentum = round(float(momentum), 2) if _is_free(self._axes[1]) else setting.momentum
            most = scaling.lr(setting.updates_per_batch, momentum, c.LARGEST_STEP * self._evidence.theory.step)
            lr = min(setting.lr * math.exp(log_factor), most)
            setting = replace(setting, momentum=momentum, lr=float(f"{lr:.3g}"))
        for each, value in zip(self.further, further, strict=True):
            setting = each.put(setting, value)
        return self._evidence.spec.space.holds(setting)


def _is_free(axis: Axis) -> bool:
    return len(axis) > 1 and axis[0] != axis[-1]


def _on(axis: Axis, value: Any) -> Any:
    """Return the coordinate of a value on an axis, clipped to a range; a value that a list lacks becomes its first."""
    if isinstance(axis, list):
        return axis.index(value) if value in axis else 0
    return float(min(max(value, axis[0]), axis[1]))


def _at(axis: Axis, place: Any) -> Any:
    return axis[round(float(place))] if isinstance(axis, list) else float(place)


def _surrogate(predict: Any) -> Any:
    """Return a scikit-learn regressor that predicts with a function and does not fit anything.

    scikit-optimize clones its estimator, with everything that it holds, after each observation; this one is its own
    clone.
    """
    from sklearn.base import BaseEstimator, RegressorMixin

    class PredictedSeconds(RegressorMixin, BaseEstimator):  # type: ignore[misc]
        def __sklearn_clone__(self) -> PredictedSeconds:
            return self

        def fit(self, X: Any, y: Any) -> PredictedSeconds:
            return self

        def predict(self, X: Any, return_std: bool = False) -> Any:
            means, deviations = predict(X)
            return (means, deviations) if return_std else means

    return PredictedSeconds()


__all__ = ["ASKED", "ConsideredSetting", "Optimization", "is_same_exchange"]
