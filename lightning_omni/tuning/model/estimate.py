"""Values with the interval that holds them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_omni.checks import check_number


@dataclass(frozen=True)
class Estimate:
    """A value and the interval that holds it with a stated probability; infinite if an event never happens.

    Attributes:
        value: median.
        low: lower end of the interval.
        high: upper end.
        probability: probability that the value is finite.

    Example:
        >>> some, none = Estimate(120.0, 100.0, math.inf, probability=0.7), Estimate(math.inf, math.inf, math.inf, 0.0)
        >>> str(some), str(none)
        ('120 (100 to inf)', 'never reached')
    """

    value: float
    low: float
    high: float
    probability: float = 1.0

    def __str__(self) -> str:
        if self.low == math.inf:
            return "never reached"
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"

    def times(self, factor: float) -> Estimate:
        """Return the estimate multiplied by ``factor``, with the same probability."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.probability)


def check_level(level: float) -> None:
    """Raise a `ConfigurationError` unless ``level`` is a probability of an interval."""
    check_number("level", level, "a probability between 0 and 1", above=0, below=1)
