"""How much longer settings take than the hardware model says, from segments that a run has trained with some of them.

A Gaussian process about zero, over the logarithm of measured over predicted seconds. Its kernel is fixed: half a dozen
segments would not tell its lengths. Settings are alike in it if they have about as many groups, exchange about as
often, and in the same way: whatever it is that slows groups down, a busy server or a lock in the user's data, it does
so to similar ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    def __init__(self, settings: Sequence[Setting], log_ratios: Sequence[float], variances: Sequence[float]) -> None:
        self._settings = list(settings)
        self._weights = np.zeros(0)
        if settings:
            covariance = _kernel(self._settings, self._settings) + np.diag(variances)
            self._inverse = np.linalg.inv(covariance)
            self._weights = self._inverse @ np.asarray(log_ratios, dtype=float)

    def __call__(self, setting: Setting) -> tuple[float, float]:
        """The logarithm of the ratio that is to be expected of a setting, and its standard deviation."""
        if not self._settings:
            return 0.0, c.SPEED_ERROR
        near = _kernel([setting], self._settings)[0]
        variance = c.SPEED_ERROR**2 - float(near @ self._inverse @ near)
        return float(near @ self._weights), math.sqrt(max(variance, 0.0))

    @property
    def fastest(self) -> float:
        """A factor that the speed of no setting is corrected by more than."""
        return math.exp(c.SPEED_ERROR**2 * float(np.abs(np.minimum(self._weights, 0.0)).sum()))


def _place(setting: Setting) -> list[float]:
    """Coordinates in which settings that are one apart have errors with a correlation of exp(-1/2)."""
    return [
        math.log(setting.groups) / math.log(c.NEAR_GROUPS),
        math.log(setting.period) / math.log(c.NEAR_PERIOD),
        float(setting.overlap) * c.OTHER_WAY,
        float(setting.method.partition(":")[0] == "async_sgd") * c.OTHER_WAY,
        float(bool(setting.merged)) * c.OTHER_WAY,
    ]


def _kernel(some: Sequence[Setting], others: Sequence[Setting]) -> Array:
    a, b = (np.array([_place(each) for each in settings]) for settings in (some, others))
    squares = ((a[:, None] - b[None]) ** 2).sum(-1)
    differing = np.array([[_differing(one, other) for other in others] for one in some])
    return np.asarray(c.SPEED_ERROR**2 * np.exp(-0.5 * (squares + c.OTHER_VALUE**2 * differing)))


def _differing(one: Setting, other: Setting) -> int:
    """In how many dimensions of a user's own two settings have other values."""
    return sum(value != dict(other.further).get(name) for name, value in one.further)
