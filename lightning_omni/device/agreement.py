"""Whether training in another precision is the same training: loss curves from the same weights, compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 0.02
"""Distance of two loss curves, as a fraction of the losses, up to which they count as one."""

STEPS = 20
"""Of a probe, at most; and at least:"""

FEWEST_STEPS = 8

ROUNDING = 1e-6
"""About float32's: the size of the nudge that shows how far rounding alone drives two trainings."""


def distance(curve: Sequence[float], other: Sequence[float]) -> float:
    """Mean distance of two loss curves, as a fraction of the first one's mean loss; infinite if one is not finite.

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
    """How far another precision's loss curve is from the own one, and how far rounding alone drives curves apart.

    They agree if ``gap <= tolerance + spread`` and ``spread <= tolerance``: what rounding does is not held against the
    other precision, and where rounding does more than is tolerated nothing can be said.

    Args:
        gap: distance of the curves.
        spread: distance of the own curve to that from weights nudged by `ROUNDING`.
        tolerance: what is tolerated.

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
        """From three loss curves of equal length."""
        return cls(distance(own, other), distance(own, nudged), tolerance)

    @property
    def holds(self) -> bool:
        """Whether the curves agree."""
        return self.spread <= self.tolerance and self.gap <= self.tolerance + self.spread

    @property
    def words(self) -> str:
        """The numbers in words."""
        if self.spread > self.tolerance:
            return f"cannot be judged: rounding alone moves the losses by {self.spread:.2%}"
        return f"losses differ by {self.gap:.2%} (tolerated {self.tolerance:.2%}, rounding {self.spread:.2%})"
