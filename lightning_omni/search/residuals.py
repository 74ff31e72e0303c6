"""How much longer settings take than the hardware model says, from segments that a run has trained with some of them.

A Gaussian process about zero, over the logarithm of measured over predicted seconds. Its kernel is fixed: half a dozen
segments would not tell its lengths. Settings are alike in it if they have about as many groups, exchange about as
often, and in the same way: whatever it is that slows groups down, a busy server or a lock in the user's data, it does
so to similar ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_omni.performance.forecast import Setting
from lightning_omni.search import constants as c

Array = np.ndarray[Any, Any]


class SpeedResiduals:
    """A Gaussian process over log ratios of seconds.

    Args:
        settings: that were trained with.
        log_ratios: logarithm of the seconds that each took, over those that were predicted.
        variances: of these.
        spans: of a user's own dimensions that are ranges, how long these are, by name. Values that are half of one
            apart are as different as two of a list.

    Example:
        >>> from lightning_omni.performance.forecast import Setting
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
        kept = sorted(latest.values())  # of settings that it cannot tell from one another
        self._settings = [settings[number] for number in kept]
        if kept:
            noise = [max(variances[number], c.SEGMENT_ERROR**2) for number in kept]
            self._inverse = np.linalg.inv(self._kernel(self._settings, self._settings) + np.diag(noise))
            self._weights = self._inverse @ np.array([log_ratios[number] for number in kept])

    def __call__(self, setting: Setting) -> tuple[float, float]:
        """The logarithm of the ratio that is to be expected of a setting, and its standard deviation."""
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
        """How far apart the values in a user's own dimensions are, as the square of a distance."""
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
    """Coordinates in which settings that are one apart have errors with a correlation of exp(-1/2)."""
    return [
        math.log(setting.groups) / math.log(c.NEAR_GROUPS),
        math.log(setting.period) / math.log(c.NEAR_PERIOD),
        float(setting.overlap) * c.OTHER_WAY,
        float(setting.method.partition(":")[0] == "async_sgd") * c.OTHER_WAY,
        float(bool(setting.merged)) * c.OTHER_WAY,
    ]
