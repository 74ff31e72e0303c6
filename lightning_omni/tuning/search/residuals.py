"""Errors of the hardware model, from segments that a run has trained.

`SpeedResiduals` is a Gaussian process about zero, over the logarithm of measured over predicted seconds. Its kernel is
fixed, since half a dozen segments cannot determine its lengths. Settings are close if they have about as many groups
and exchange about as often, in the same way: a busy server, or a lock in the user's data, slows similar settings down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_omni.tuning.model.forecast import Setting
from lightning_omni.tuning.search import constants as c

Array = np.ndarray[Any, Any]


class SpeedResiduals:
    """A Gaussian process over log ratios of seconds.

    Args:
        settings: the settings of the segments.
        log_ratios: logarithm of measured over predicted seconds of each segment.
        variances: variances of the log ratios.
        spans: lengths of the ranges among the user-defined dimensions, by name. Values half a range apart are as
            different as two values of a list.

    Example:
        >>> from lightning_omni.tuning.model.forecast import Setting
        >>> trained = Setting(4, 0.6, 0.1, method="async_sgd")
        >>> residuals = SpeedResiduals([trained], [0.7], [0.001])
        >>> mean, deviation = residuals(trained)
        >>> round(mean, 2), deviation < 0.05
        (0.68, True)
        >>> 0.4 < residuals(Setting(8, 0.6, 0.1, method="local_sgd", period=4))[0] < mean
        True
    """

    def __init__(
        self,
        settings: Sequence[Setting],
        log_ratios: Sequence[float],
        variances: Sequence[float],
        spans: Mapping[str, float] | None = None,
    ) -> None:
        self._spans = dict(spans or {})
        latest = {(*_place(each), *each.further): number for number, each in enumerate(settings)}
        kept = sorted(latest.values())  # the latest of settings with the same coordinates
        self._settings = [settings[number] for number in kept]
        if kept:
            noise = [max(variances[number], c.SEGMENT_ERROR**2) for number in kept]
            self._inverse = np.linalg.inv(self._kernel(self._settings, self._settings) + np.diag(noise))
            self._weights = self._inverse @ np.array([log_ratios[number] for number in kept])

    def __call__(self, setting: Setting) -> tuple[float, float]:
        """Return the expected log ratio of a setting, and its standard deviation."""
        if not self._settings:
            return 0.0, c.SPEED_ERROR
        near = self._kernel([setting], self._settings)[0]
        variance = c.SPEED_ERROR**2 - float(near @ self._inverse @ near)
        return float(near @ self._weights), math.sqrt(max(variance, 0.0))

    def _kernel(self, some: Sequence[Setting], others: Sequence[Setting]) -> Array:
        a, b = (np.array([_place(each) for each in settings]) for settings in (some, others))
        squares = ((a[:, None] - b[None]) ** 2).sum(-1)
        squares += np.array([[self._apart(one, other) for other in others] for one in some])
        return np.asarray(c.SPEED_ERROR**2 * np.exp(-0.5 * squares))

    def _apart(self, one: Setting, other: Setting) -> float:
        """Return the squared distance between two settings in the user-defined dimensions."""
        mine, theirs, apart = dict(one.further), dict(other.further), 0.0
        for name in {*mine, *theirs}:
            if mine.get(name) == theirs.get(name):
                continue
            part = 1.0
            if name in self._spans and name in mine and name in theirs:
                part = 2 * abs(mine[name] - theirs[name]) / self._spans[name]
            apart += (c.OTHER_VALUE * part) ** 2
        return apart


def _place(setting: Setting) -> list[float]:
    """Return coordinates in which settings at distance 1 have errors with a correlation of exp(-1/2)."""
    return [
        math.log(setting.groups) / math.log(c.NEAR_GROUPS),
        math.log(setting.period) / math.log(c.NEAR_PERIOD),
        float(setting.overlap) * c.OTHER_WAY,
        float(setting.method.partition(":")[0] == "async_sgd") * c.OTHER_WAY,
    ]
