"""A predicted value with its interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A value and its interval.

    Attributes:
        value: median.

    Example:
        >>> str(Estimate(120.0, 100.0, 150.0).times(2))
        '240 (200 to 300)'
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"

    def times(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.low * factor, self.high * factor)
