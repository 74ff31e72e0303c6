"""The comparison of loss curves from the same weights, to judge whether another precision trains alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 0.02
"""Distance of two loss curves, as a fraction of the losses, up to which they agree."""

STEPS = 20
"""Largest number of steps of a probe."""

FEWEST_STEPS = 8
"""Smallest number of steps of a probe."""

ROUNDING = 1e-6
"""Relative size, about float32's rounding, of the nudge that shows how far rounding alone separates two trainings."""


def distance(curve: Sequence[float], other: Sequence[float]) -> float:
    """Return the mean distance of two loss curves relative to the mean of the first; infinity if a loss is not finite.

    Example:
        >>> distance([2.0, 1.0, 1.0], [2.0, 1.1, 1.1])
        0.05
    """
    if not all(map(math.isfinite, (*curve, *other))):
        return math.inf
    apart = sum(abs(a - b) for a, b in zip(curve, other, strict=True))
    scale = sum(map(abs, curve))
    return round(apart / scale, 12) if scale else (math.inf if apart else 0.0)


@dataclass(frozen=True)
class Agreement:
    """The distance of another precision's loss curve, judged against the distance that rounding alone causes.

    The curves agree if ``gap <= tolerance + spread`` and ``spread <= tolerance``: rounding does not count against the
    other precision, and where it exceeds the tolerance the curves cannot be judged.

    Args:
        gap: distance of the two precisions' curves.
        spread: distance of the first precision's curve to the one from weights nudged by `ROUNDING`.
        tolerance: tolerated distance.

    Example:
        >>> Agreement(gap=0.021, spread=0.002, tolerance=0.02).holds, Agreement(0.1, 0.09, 0.02).holds
        (True, False)
    """

    gap: float
    spread: float
    tolerance: float = TOLERANCE

    @classmethod
    def of(
        cls, own: Sequence[float], other: Sequence[float], nudged: Sequence[float], tolerance: float = TOLERANCE
    ) -> Agreement:
        """Compare three loss curves of equal length."""
        return cls(distance(own, other), distance(own, nudged), tolerance)

    @property
    def holds(self) -> bool:
        return self.spread <= self.tolerance and self.gap <= self.tolerance + self.spread

    @property
    def words(self) -> str:
        if self.spread > self.tolerance:
            return f"cannot be judged: rounding alone moves the losses by {self.spread:.2%}"
        return f"losses differ by {self.gap:.2%} (tolerated {self.tolerance:.2%}, rounding {self.spread:.2%})"
