"""The scikit-optimize phase: which setting is to be trained with from now on.

The objective is the logarithm of the seconds from now to the end, forming groups included, and what is expected of it
is the prediction: the surrogate of scikit-optimize's `Optimizer` is an estimator of our own, whose mean is that
prediction, corrected by the segments that were trained, and whose deviation is what the prior and these leave open. Its
expected improvement over the best of the user's own setting and those that were trained with proposes a point, with any
momentum and rate. It is compared with these and with the best of all settings that can be enumerated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_omni.performance.forecast import Setting
from lightning_omni.search import constants as c
from lightning_omni.search.choice import (
    Choice,
    best_listed,
    explained,
    log_seconds,
    pays,
    pays_or_stays,
    promising_settings,
)
from lightning_omni.search.rules import careful
from lightning_omni.search.space import Axis, checked_axis
from lightning_omni.serialization import Serializable

if TYPE_CHECKING:
    from lightning_omni.search.evidence import Evidence

_ASKED = "scikit-optimize"
Row = list[Any]
"""A point of scikit-optimize's space."""


@dataclass(frozen=True)
class Considered(Serializable):
    """A setting that was considered.

    Attributes:
        setting: the setting.
        log_seconds: logarithm of the seconds that it is predicted to take from now on.
        deviation: of it.
        improvement: that is expected of it, over the setting that the run has.
        by: where it comes from: "the run", whose own it is, "the list", "scikit-optimize", or "was trained with".
    """

    setting: Setting
    log_seconds: float
    deviation: float
    improvement: float
    by: str


class Phase:
    """Chooses once, when it is first asked, and remembers.

    Args:
        evidence: what is known.

    Attributes:
        considered: the user's own setting, the best of the list, what scikit-optimize proposed, and what was trained
            with before, once they were compared.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._chosen: tuple[Setting, str] | None = None
        self.considered: list[Considered] = []

    def choice(self, asks: bool = True) -> Choice:
        """The setting to train with, and why.

        Args:
            asks: whether scikit-optimize is asked; else the best of the list is chosen. What was chosen once stays.
        """
        evidence = self._evidence
        if self._chosen is None:
            found = self._choose(asks)
            self._chosen = found.setting, found.why
        setting, why = self._chosen
        is_known = evidence.observation is None or evidence.observation.batches.is_finite
        return Choice(setting, why, evidence.forecast().of(setting) if is_known else None)

    def _choose(self, asks: bool) -> Choice:
        evidence = self._evidence
        observation = evidence.observation
        if observation is not None and not observation.batches.is_finite:
            why = "the loss of the first batches is not finite: nothing was changed; lower the learning rate"
            return Choice(evidence.spec.start, why)
        listed = best_listed(evidence)
        if not asks:
            return explained(evidence, listed)
        self.considered = _Optimization(evidence).considered(listed)
        eligible = [each for each in self.considered if self._is_eligible(each, listed)]
        best = max(eligible, key=lambda each: each.improvement, default=None)
        if best is None or best.setting == listed:
            return explained(evidence, listed)
        is_asked = best.by == _ASKED
        return explained(evidence, best.setting, f"proposed by {_ASKED}" if is_asked else "it was as fast when trained")

    def _is_eligible(self, each: Considered, listed: Setting) -> bool:
        """Whether a setting is worth a change, and as good as the best of the list, or clearly better in another way.

        Of two that are, improvement favours the one of which less is known. That is why a value in a dimension of the
        user's own is tried, of which nothing is known at all.
        """
        evidence, most = self._evidence, _careful(self._evidence, listed)
        tried = {segment.setting.further for segment in evidence.segments} - {self._evidence.start.further}
        if not _is_way(each.setting, listed):
            most -= math.log(c.FASTER)  # else it is a tie, which the list has decided
        if _careful(evidence, each.setting) > most + 1e-9:
            return False
        may_try = each.setting.further not in tried and len(tried) < c.MOST_TRIED
        is_new = may_try and each.setting.further != listed.further and each.improvement >= math.log(c.FASTER)
        return pays(evidence, each.setting) or (is_new and pays_or_stays(evidence, each.setting))

    def to_dict(self) -> dict[str, Any]:
        """What was chosen, in plain values; nothing if nothing was asked."""
        if self._chosen is None:
            return {}
        setting, why = self._chosen
        return {"setting": setting.to_dict(), "why": why, "considered": [each.to_dict() for each in self.considered]}

    def load(self, plain: Mapping[str, Any]) -> None:
        """What `to_dict` gave."""
        if plain:
            self._chosen = Setting.from_dict(plain["setting"]), plain["why"]
            self.considered = [Considered.from_dict(each) for each in plain["considered"]]


def _careful(evidence: Evidence, setting: Setting) -> float:
    return careful(log_seconds(evidence, setting), evidence.theory.error(setting))


class _Optimization:
    """One use of scikit-optimize: what it is told, and what it proposes.

    Args:
        evidence: what is known.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._start = evidence.start
        promising = promising_settings(evidence, evidence.forecast())
        self._trained = [evidence.as_it_would_be(each.setting) for each in evidence.segments]
        self._ways = list(dict.fromkeys([self._start, *promising, *self._trained]))
        self._axes = _Axes(evidence, self._ways)

    def considered(self, listed: Setting) -> list[Considered]:
        """The setting that the run has, the best of the list, what was trained, and what scikit-optimize proposes.

        Args:
            listed: the best of the list.
        """
        found = [(self._start, "the run"), (listed, "the list")]
        if self._axes.dimensions:
            asked = self._ask()
            found.append((asked, _ASKED))
            if asked.further != listed.further:  # whatever else it is combined with
                found.append((replace(listed, further=asked.further), _ASKED))
        found += [(each, "was trained with") for each in self._trained]
        settings: dict[Setting, str] = {}
        for setting, by in found:
            settings.setdefault(setting, by)
        return [self._considered(setting, by) for setting, by in settings.items()]

    def _ask(self) -> Setting:
        """The largest expected improvement on the best of the user's own setting and those that were trained with."""
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
            avoid_duplicates=False,  # or that the run's setting stays could not be proposed
        )
        told = [self._start, *self._trained]
        rows = [self._axes.place(each) for each in told]
        optimizer.tell(rows, [log_seconds(evidence, each) for each in told])
        return self._axes.setting(optimizer.ask())

    def predict(self, rows: Sequence[Row]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Logarithms of seconds at points of the space, and their deviations."""
        found = [self._of(self._axes.setting(row)) for row in rows]
        means, deviations = zip(*found, strict=True)
        return np.array(means), np.array(deviations)

    def _considered(self, setting: Setting, by: str) -> Considered:
        from skopt.acquisition import gaussian_ei

        mean, deviation = self._of(setting)
        best = log_seconds(self._evidence, self._start)
        improvement = max(best - mean, 0.0)
        if deviation > 0:
            known = _surrogate(lambda rows: (np.array([mean]), np.array([deviation])))
            improvement = float(gaussian_ei(np.zeros((1, 1)), known, y_opt=best, xi=0.0)[0])
        return Considered(setting, mean, deviation, improvement, by)

    def _of(self, setting: Setting) -> tuple[float, float]:
        evidence = self._evidence
        return log_seconds(evidence, setting), math.hypot(evidence.theory.error(setting), evidence.residual(setting)[1])


def _is_way(one: Setting, other: Setting) -> bool:
    """Whether two settings differ in momentum, rate and a user's own dimensions alone."""
    return replace(one, momentum=other.momentum, lr=other.lr, further=other.further) == other


class _Axes:
    """The axes of a space for scikit-optimize: the way in which groups exchange, momentum, rate, and a user's own.

    Values of a list are whole numbers for scikit-optimize, which would bring proposed categories between the first two.
    What has one value has no axis.

    Args:
        evidence: what is known.
        ways: in which groups may exchange.
    """

    def __init__(self, evidence: Evidence, ways: Sequence[Setting]) -> None:
        self._evidence, self._ways = evidence, ways
        space = evidence.spec.space
        self.further = space.further
        several, widest = max(space.groups) > 1, math.log(c.WIDEST)
        self._axes: list[Axis] = [list(range(len(ways))), list(space.momentum) if several else [0.0]]
        if several and space.momentum[0] < space.momentum[1]:
            self._axes[1] = space.momentum
        self._axes.append((-widest, widest) if several else [0.0])
        self._axes += [checked_axis(each, evidence) for each in self.further]

    @property
    def dimensions(self) -> list[Any]:
        """Those of scikit-optimize's space."""
        from skopt.space import Integer, Real

        return [
            Integer(0, len(axis) - 1) if isinstance(axis, list) else Real(*map(float, axis))
            for axis in self._axes
            if _is_free(axis)
        ]

    def place(self, setting: Setting) -> Row:
        """The point of a setting."""
        way = next(number for number, each in enumerate(self._ways) if _is_way(each, setting))
        log_factor = math.log(setting.lr / self._ways[way].lr) if setting.groups > 1 else 0.0
        further = [setting.further_value(each.name) for each in self.further]
        values = [way, setting.momentum, log_factor, *further]
        return [_on(axis, value) for axis, value in zip(self._axes, values, strict=True) if _is_free(axis)]

    def setting(self, row: Row) -> Setting:
        """The setting at a point."""
        left = list(row)
        way, momentum, log_factor, *further = (
            _at(axis, left.pop(0)) if _is_free(axis) else axis[0] for axis in self._axes
        )
        setting, scaling = self._ways[int(way)], self._evidence.scaling
        if setting.groups > 1:  # one group keeps the user's own
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
    """The place of a value on an axis, at its end if it is outside; the first one of a value that is not in a list."""
    if isinstance(axis, list):
        return axis.index(value) if value in axis else 0
    return float(min(max(value, axis[0]), axis[1]))


def _at(axis: Axis, place: Any) -> Any:
    """The value at a place."""
    return axis[round(float(place))] if isinstance(axis, list) else float(place)


def _surrogate(predict: Any) -> Any:
    """A regressor in scikit-learn's manner, which knows already what it is to fit: the evidence is corrected by it.

    scikit-optimize clones it, with all that it is made of, whenever it is told something, and so it says that its clone
    is itself.
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


__all__ = ["Considered", "Phase"]
