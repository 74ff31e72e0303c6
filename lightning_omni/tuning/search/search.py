"""`Search`, and its scikit-optimize phase."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_omni.json_dataclasses import Serializable
from lightning_omni.tuning.model.measurements import Measured
from lightning_omni.tuning.model.setting import Setting
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.search.choice import (
    Choice,
    best_enumerated,
    explain,
    is_worth_switching,
    log_seconds,
    risk_adjusted_seconds,
    worthwhile_settings,
)
from lightning_omni.tuning.search.evidence import Evidence, Observation, TrainedSegment
from lightning_omni.tuning.search.space import Axis, SearchSpec, checked_axis

__all__ = ["ASKED", "ConsideredSetting", "Optimization", "Search", "is_same_exchange"]

# --- The scikit-optimize phase ----------------------------------------------------------------------------------------

# The objective is the logarithm of the seconds from now to the end, including the time to form groups. The surrogate of
# scikit-optimize's `Optimizer` is an estimator of this package: its mean is the prediction, corrected by the trained
# segments, and its deviation is the uncertainty that the prior and the segments leave. The expected improvement over
# the run's and the trained settings proposes a point, with any momentum and learning rate. The phase compares it with
# these settings and with the best of all settings that can be enumerated.

ASKED = "scikit-optimize"
Row = list[Any]
"""A point of scikit-optimize's space."""
Predictions = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Means and standard deviations."""


@dataclass(frozen=True)
class ConsideredSetting(Serializable):
    """A setting that was considered.

    Attributes:
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
        possible = [each.setting for each in evidence.segments if each.setting.groups in evidence.spec.space.groups]
        self._trained = [evidence.with_rebalance(each) for each in possible]
        # No other proposal would be taken.
        self._ways = list(dict.fromkeys([self._start, *worthwhile_settings(evidence), *self._trained]))
        self._axes = _Axes(evidence, self._ways)

    def considered(self, listed: Setting) -> list[ConsideredSetting]:
        from skopt.acquisition import gaussian_ei

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
        means, deviations = self._predicted([*settings])
        known, best = _surrogate(lambda rows: (means, deviations)), log_seconds(self._evidence, self._start)
        expected = gaussian_ei(np.zeros((len(means), 1)), known, y_opt=best, xi=0.0)
        improvements = np.where(deviations > 0, expected, np.maximum(best - means, 0.0))
        columns = (column.tolist() for column in (means, deviations, improvements))
        return [ConsideredSetting(*each) for each in zip(settings, *columns, settings.values(), strict=True)]

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

    def predict(self, rows: Sequence[Row]) -> Predictions:
        return self._predicted([self._axes.setting(row) for row in rows])

    def _predicted(self, settings: Sequence[Setting]) -> Predictions:
        theory, residual = self._evidence.theory, self._evidence.residual
        deviations = [math.hypot(theory.error(each), residual(each)[1]) for each in settings]
        return np.array([log_seconds(self._evidence, each) for each in settings]), np.array(deviations)


def is_same_exchange(one: Setting, other: Setting) -> bool:
    return replace(one, momentum=other.momentum, lr=other.lr, further=other.further) == other


class _Axes:
    """The axes for scikit-optimize: the way of exchange, momentum, learning rate, user-defined dimensions.

    The values of a list are integers, because scikit-optimize clips the proposals of label-encoded categories to the
    first two. A dimension with one value has no axis.
    """

    def __init__(self, evidence: Evidence, ways: Sequence[Setting]) -> None:
        self._evidence, self._ways = evidence, ways
        space = evidence.spec.space
        self.further = space.further
        several, widest = any(each.groups > 1 for each in ways), math.log(c.RATE_FACTOR)
        further = [checked_axis(each, evidence) for each in self.further]
        of_groups: list[Axis] = [space.momentum, (-widest, widest)] if several else [[0.0], [0.0]]
        self._axes: list[Axis] = [list(range(len(ways))), *of_groups, *further]

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
            space, is_free = self._evidence.spec.space, _is_free(self._axes[1])
            momentum = min(round(float(momentum), 2), space.momentum[1]) if is_free else setting.momentum
            most = scaling.lr(setting.updates_per_batch, momentum, c.LARGEST_STEP * self._evidence.theory.step)
            lr = min(setting.lr * math.exp(log_factor), most)
            setting = space.holds(replace(setting, momentum=momentum, lr=float(f"{lr:.3g}")))
        for each, value in zip(self.further, further, strict=True):
            setting = setting.with_further(each.name, value)
        return setting


def _is_free(axis: Axis) -> bool:
    return len(axis) > 1 and axis[0] != axis[-1]


def _on(axis: Axis, value: Any) -> Any:
    if isinstance(axis, list):
        return axis.index(value) if value in axis else 0
    return float(min(max(value, axis[0]), axis[1]))


def _at(axis: Axis, place: Any) -> Any:
    return axis[round(float(place))] if isinstance(axis, list) else float(place)


def _surrogate(predict: Any) -> Any:
    """Return a scikit-learn regressor that predicts with a function and does not fit anything."""
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


class Search(Evidence):
    """A search for the setting to train with next, driven by observations. Equal inputs give equal choices.

    The arguments are those of `Evidence`.

    Attributes:
        overhead: seconds spent deciding and forming groups, from the caller.

    Example:
        >>> from lightning_omni.tuning.model.setting import Setting
        >>> from lightning_omni.tuning.model.measurements import TrainedBatches
        >>> from lightning_omni.tuning.model.measurements import Measured
        >>> from lightning_omni.tuning.search import Observation, SearchSpec, Space
        >>> spec = SearchSpec(Setting(1, 0.9, 0.1), batch=64, horizon=64_000, space=Space((1, 2)))
        >>> batches = TrainedBatches((64.0, 128.0, 192.0), (2.3, 2.2, 2.1))
        >>> times = Measured((0, 1), ((32,) * 3,) * 2, ((0.1,) * 3,) * 2, (0.1,) * 3)
        >>> str(Search(spec, Observation(batches, times)).choice().setting)
        '1 group, momentum 0.9, lr 0.1'
    """

    observation: Observation

    def __init__(
        self,
        spec: SearchSpec,
        observation: Observation,
        known: Sequence[Measured] = (),
        segments: Sequence[TrainedSegment] = (),
    ) -> None:
        super().__init__(spec, known, observation, segments)
        self.overhead = 0.0
        self.considered: list[ConsideredSetting] = []
        self._chosen: Choice | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Return the search as plain values."""
        return {
            "spec": self.spec.to_dict(),
            "observation": self.observation.to_dict(),
            "known": [each.to_dict() for each in self.known],
            "segments": [each.to_dict() for each in self.segments],
            "overhead": self.overhead,
            "chosen": self._chosen.to_dict() if self._chosen is not None else None,
            "considered": [each.to_dict() for each in self.considered],
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Search:
        known = [Measured.from_dict(each) for each in plain["known"]]
        segments = [TrainedSegment.from_dict(each) for each in plain["segments"]]
        search = cls(SearchSpec.from_dict(plain["spec"]), Observation.from_dict(plain["observation"]), known, segments)
        search.overhead = plain["overhead"]
        search.considered = [ConsideredSetting.from_dict(each) for each in plain["considered"]]
        if plain["chosen"] is not None:
            search._chosen = Choice.from_dict(plain["chosen"])
        return search

    def choice(self, asks: bool = True) -> Choice:
        """Return the setting to train with next, and the reasons.

        With ``asks``, scikit-optimize proposes a setting, too. A choice that was made before is returned unchanged.
        """
        self._chosen = self._chosen or self._choose(asks)
        return self._chosen

    def _choose(self, asks: bool) -> Choice:
        if not self.observation.batches.is_finite:
            why = "the loss of the first batches is not finite: nothing was changed; lower the learning rate"
            return Choice(self.spec.start, why)
        listed = best_enumerated(self)
        if not asks:
            return Choice(listed, explain(self, listed))
        self.considered = Optimization(self).considered(listed)
        eligible = [each for each in self.considered if self._is_eligible(each, listed)]
        best = max(eligible, key=lambda each: each.improvement, default=None)
        if best is None or best.setting == listed:
            return Choice(listed, explain(self, listed))
        proposed = f"proposed by {ASKED}" if best.by == ASKED else "it was as fast when trained"
        return Choice(best.setting, explain(self, best.setting, proposed))

    def _is_eligible(self, each: ConsideredSetting, listed: Setting) -> bool:
        """Return whether a setting is worth a change, or a try, and no worse than the best of the list."""
        most = risk_adjusted_seconds(self, listed)
        tried = {segment.setting.further for segment in self.segments} - {self.start.further}
        if not is_same_exchange(each.setting, listed):
            most -= math.log(c.FASTER)  # the list has decided ties
        if risk_adjusted_seconds(self, each.setting) > most + 1e-9:
            return False
        may_try = each.setting.further not in tried and len(tried) < c.MOST_TRIED
        is_new = may_try and each.setting.further != listed.further and each.improvement >= math.log(c.FASTER)
        plain = replace(each.setting, further=self.start.further)
        is_worth_trying = is_new and (plain == self.start or is_worth_switching(self, plain))
        return is_worth_trying or is_worth_switching(self, each.setting)
