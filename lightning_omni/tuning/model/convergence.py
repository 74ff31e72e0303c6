"""Statistical efficiency: the samples to a loss, extrapolated from the losses of a run's first batches.

The logarithm of the loss is taken to fall linearly with a power of the samples: a dozen batches do not determine a
final level.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from lightning_omni.tuning.model import constants as c

_NEVER = -math.log(sys.float_info.epsilon)
"""Logarithm of the largest estimate of samples, 2**52; losses that hardly fall lead to more."""


@dataclass(frozen=True)
class Estimate:
    """A value and its interval; infinite if an event never happens.

    Attributes:
        value: median.

    Example:
        >>> some, none = Estimate(120.0, 100.0, math.inf), Estimate(math.inf, math.inf, math.inf)
        >>> str(some), str(none)
        ('120 (100 to inf)', 'never reached')
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == math.inf:
            return "never reached"
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"

    def times(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def samples_to(target: float, samples: Sequence[float], losses: Sequence[float]) -> Estimate | None:
    r"""Extrapolate the samples to a training loss from a run's first batches, if these determine them.

    .. math::

        \log L(n) = a + b\,n^{0.67}

    is fitted to the last half of the batches by least squares. The interval has a probability of about 0.8.

    Args:
        target: the loss.
        samples: samples trained when each batch ended, ascending.
        losses: mean training loss of each batch.

    Example:
        >>> samples = [8.0 * batch for batch in range(1, 25)]
        >>> found = samples_to(0.5, samples, [2 * math.exp(-((each / 800) ** 0.67)) for each in samples])
        >>> round(found.value), found.low < 1303 < found.high
        (1303, True)
    """
    if len(losses) < c.FEWEST_POINTS or not 0 < min(*losses, target) <= max(losses) < math.inf:
        return None
    half = len(losses) // 2
    places = (np.array(samples[half:]) / samples[-1]) ** c.DECAY_POWER
    (slope, level), covariance = np.polyfit(places, np.log(losses[half:]), 1, cov=True)
    place = (math.log(target) - level) / slope if slope < 0 else math.inf
    if place <= 0:
        return Estimate(0.0, 0.0, 0.0)
    log_samples = math.log(samples[-1]) + math.log(place) / c.DECAY_POWER
    if log_samples > _NEVER:
        return None
    gradient = np.array([place, 1.0]) / (slope * place * c.DECAY_POWER)
    width = NormalDist().inv_cdf(0.9) * math.sqrt(c.EXTRAPOLATION_ERROR**2 + gradient @ covariance @ gradient)
    low, value, high = (math.exp(min(log_samples + each, _NEVER)) for each in (-width, 0.0, width))
    return Estimate(value, low, high)
