"""scikit-optimize's ask and tell, about a theory: the one module that imports it; and whether it is there."""

from __future__ import annotations

import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from lightning_omni.errors import ConfigurationError
from lightning_omni.performance.forecast import Setting
from lightning_omni.search.constants import POINTS
from lightning_omni.search.evidence import Evidence

Point = Mapping[str, float]
Predict = Callable[[Point], tuple[float, float]]


def load_libraries(needs_scikit_optimize: bool) -> None:
    """Imports what takes a second or two, before it is needed. It is no error if something is missing.

    Args:
        needs_scikit_optimize: whether the search's sampler does.
    """
    with suppress(ConfigurationError):
        import_libraries(needs_scikit_optimize)


def check_libraries(needs_scikit_optimize: bool) -> None:
    """Refuses a search whose libraries are missing, without importing them.

    Args:
        needs_scikit_optimize: whether the search's sampler does.

    Raises:
        ConfigurationError: SciPy, or scikit-optimize if it is needed, is not installed.
    """
    needed = {"scipy": "SciPy", **({"skopt": "scikit-optimize"} if needs_scikit_optimize else {})}
    for module, name in needed.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigurationError(missing(name))


def import_libraries(needs_scikit_optimize: bool) -> None:
    """Imports what a search needs, before its first probe: an installation may be broken.

    Args:
        needs_scikit_optimize: whether the search's sampler does.

    Raises:
        ConfigurationError: a library cannot be imported.
    """
    try:
        importlib.import_module("scipy.optimize")
        if needs_scikit_optimize:
            importlib.import_module("skopt")
    except ImportError as error:
        raise ConfigurationError(f"{missing(error.name or 'a library')} ({error})") from error


def missing(name: str) -> str:
    """What users are told."""
    return f"OmniTuner needs {name}; install it with: pip install 'lightning-omni[tune]'"


class Axes:
    """The dimensions of a space as scikit-optimize's axes, those left out along which there is nothing to ask.

    Args:
        evidence: what is known.
        without: names of dimensions that are not asked for.
    """

    def __init__(self, evidence: Evidence, without: Sequence[str] = ()) -> None:
        self._evidence = evidence
        self._dimensions = evidence.spec.space.dimensions
        self._named = {each.name: each for each in (*evidence.spec.space.communication, *evidence.spec.space.further)}
        self.bounds: dict[str, tuple[float, float] | list[int]] = {}
        for each in self._dimensions:
            axis = each.axis(evidence)
            if each.name in self._named and isinstance(axis, list):
                axis = list(range(len(axis)))  # values of any kind, by their numbers
            if each.name not in without and len(set(axis)) > 1:
                self.bounds[each.name] = axis

    def coordinates(self, setting: Setting) -> dict[str, float]:
        """Where a setting lies."""
        asked = (each for each in self._dimensions if each.name in self.bounds)
        return {each.name: each.coordinate(setting, self._evidence) for each in asked}

    def setting(self, point: Point) -> Setting:
        """The setting at a point; where there is no axis, that of theory."""
        evidence = self._evidence
        groups = int(point.get("groups", evidence.groups()[0]))
        step = evidence.theory.step * math.exp(point.get("factor", 0.0))
        momentum = point.get("momentum", evidence.spec.start.momentum)
        like = evidence.spec.start
        for name, each in self._named.items():
            if name in point:
                axis = each.axis(evidence)
                like = each.put(like, axis[int(point[name])] if isinstance(axis, list) else point[name])
        return evidence.setting(groups, momentum, step, int(point.get("period", evidence.period)), like)


def ask(
    dimensions: Mapping[str, tuple[float, float] | list[int]],
    points: Sequence[Point],
    times: Sequence[float],
    predict: Predict | None,
    seed: int,
) -> tuple[dict[str, float], float]:
    """Where the largest improvement is to be expected.

    Args:
        dimensions: by name a range of numbers, or a list of those that are possible.
        points: what was tried, with a number for each dimension (and others, which are ignored).
        times: what came of it; less is better.
        predict: mean and standard deviation of the time at a point, from all that was tried; None for scikit-optimize's
            own Gaussian process.
        seed: of the points that are looked at.

    Returns:
        The point, and the improvement that is expected there; NaN without ``predict``.

    Raises:
        ConfigurationError: scikit-optimize is missing.
    """
    try:
        from skopt import Optimizer
        from skopt.acquisition import gaussian_ei
        from skopt.space import Categorical, Real
    except ImportError as error:
        raise ConfigurationError(missing("scikit-optimize")) from error
    if not dimensions:
        return dict(points[0]), 0.0
    names = list(dimensions)
    axes = [
        Categorical(values, transform="identity" if predict is not None else "onehot")
        if isinstance(values, list)
        else Real(*values)
        for values in dimensions.values()
    ]
    model: Any = "GP" if predict is None else _surrogate(predict, names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of points asked for twice, and of bounds that a kernel's length comes to
        optimizer = Optimizer(
            axes,
            base_estimator=model,
            n_initial_points=0,
            acq_func="EI",
            acq_optimizer="sampling",
            acq_optimizer_kwargs={"n_points": POINTS},
            random_state=seed + len(points),
        )
        inside = [_inside([point[name] for name in names], dimensions) for point in points]
        optimizer.tell(inside, list(times))
        asked = optimizer.ask()
        gain = float("nan")
        if predict is not None:
            place = optimizer.space.transform([asked])
            gain = float(gaussian_ei(place, optimizer.models[-1], y_opt=min(times), xi=0.0)[0])
    return dict(zip(names, map(float, asked), strict=True)), gain


def _inside(values: list[float], dimensions: Mapping[str, tuple[float, float] | list[int]]) -> list[float]:
    """A point that was tried, at the edge of the space if it is outside (the user's own setting may be)."""
    bounded: list[float] = []
    for value, allowed in zip(values, dimensions.values(), strict=True):
        if isinstance(allowed, list):
            bounded.append(min(allowed, key=lambda each: abs(each - value)))
        else:
            bounded.append(float(np.clip(value, *allowed)))
    return bounded


def _surrogate(predict: Predict, names: list[str]) -> Any:
    from sklearn.base import BaseEstimator, RegressorMixin

    class Surrogate(RegressorMixin, BaseEstimator):  # type: ignore[misc]
        """A regressor as scikit-optimize wants one; it knows already what it is to fit."""

        def fit(self, X: Any, y: Any) -> Surrogate:
            return self

        def predict(self, X: Any, return_std: bool = False) -> Any:
            rows = [predict(dict(zip(names, map(float, row), strict=True))) for row in X]
            means, errors = (np.array(column) for column in zip(*rows, strict=True))
            return (means, errors) if return_std else means

    return Surrogate()
