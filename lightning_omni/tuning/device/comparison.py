"""The comparison of two ways to train: which one is faster, and whether their losses agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

REPEATS = 7
"""Largest number of pairs of blocks in a comparison."""

FEWEST = 3
"""Smallest number of pairs for a decision."""

MARGIN = 0.03
"""Smallest gain that is worth a change."""

AGREE = 0.7
"""Fraction of the pairs that must show a gain."""

CLEAR = 0.1
"""Gain above which no more pairs are timed, if all pairs so far exceed it."""

BLOCK_SECONDS = 0.1
"""Approximate length of the blocks in which short steps are timed."""

_MOST_STEPS = 50

TOLERANCE = 0.02
"""Distance of two loss curves, as a fraction of the losses, up to which they agree."""


class Timed(Protocol):
    """A training that can be timed.

    Attributes:
        samples: samples in one step.
    """

    samples: int

    def run(self, steps: int) -> float:
        """Train for ``steps`` steps after an untimed warm-up, and return their seconds."""
        ...


@dataclass(frozen=True)
class Comparison:
    """The result of paired blocks.

    Args:
        before: samples per second of the known way, one number for each pair.
        after: samples per second of the tried way.

    Example:
        >>> found = Comparison(before=(100.0, 90.0, 110.0), after=(150.0, 144.0, 165.0))
        >>> found.gain, found.spread, found.is_faster
        (1.5, (1.5, 1.6), True)
    """

    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Return the ratio of each pair: above 1 if the tried way is faster."""
        return tuple(after / before for before, after in zip(self.before, self.after, strict=True))

    @property
    def gain(self) -> float:
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.ratios), max(self.ratios)

    @property
    def is_faster(self) -> bool:
        """Return whether the gain is more than noise: two estimates exceed the margin, and most pairs agree."""
        if len(self.ratios) < FEWEST:
            return False
        best_gain = max(self.after) / max(self.before)  # of the blocks that other programs on the machine disturb least
        found = sum(ratio > 1 for ratio in self.ratios)
        return min(self.gain, best_gain) >= 1 + MARGIN and found >= AGREE * len(self.ratios)

    @property
    def is_clear(self) -> bool:
        """Return whether enough pairs were timed, and all of them are clearly faster, or none is faster at all."""
        low, high = self.spread
        return len(self.ratios) >= FEWEST and (low >= 1 + CLEAR or high <= 1)


def compare(
    before: Timed, after: Timed, deadline: float, clock: Callable[[], float], enough: float = math.inf
) -> Comparison:
    """Time two ways alternately, each first in half of the pairs, until the difference is clear.

    The speed of a machine changes by itself, but rarely within a pair.

    Args:
        before: known way.
        after: tried way.
        deadline: time on ``clock`` after which no pair begins.
        clock: function that returns seconds.
        enough: time on ``clock`` after which the smallest number of pairs suffices.
    """
    old: list[float] = []
    new: list[float] = []
    steps = 1
    while len(old) < REPEATS:
        began = clock()
        if began >= deadline or (began >= enough and len(old) >= FEWEST):
            break
        found: dict[bool, float] = {}
        for is_new in (False, True) if len(old) % 2 == 0 else (True, False):
            timed = after if is_new else before
            found[is_new] = timed.run(steps)
        if not old and steps == 1 and min(found.values()) < BLOCK_SECONDS / 2:
            # One step is too short to be timed: the first reading only sets the number of steps in a block.
            steps = min(_MOST_STEPS, max(2, round(BLOCK_SECONDS / max(min(found.values()), 1e-9))))
            continue
        old.append(steps * before.samples / found[False])
        new.append(steps * after.samples / found[True])
        if Comparison(tuple(old), tuple(new)).is_clear:
            break
    return Comparison(tuple(old), tuple(new))


# --- Loss curves ------------------------------------------------------------------------------------------------------


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


def agreement(
    own: Sequence[float], other: Sequence[float], nudged: Sequence[float], tolerance: float = TOLERANCE
) -> tuple[bool, str]:
    """Return whether another precision's loss curve agrees with the model's own, and the distances in words.

    The curves agree if ``gap <= tolerance + spread`` and ``spread <= tolerance``: rounding does not count against the
    other precision, and where it exceeds the tolerance the curves cannot be judged.

    Args:
        own: losses in the model's own precision.
        other: losses in the other precision.
        nudged: losses in its own precision, from weights changed by about their rounding.
        tolerance: tolerated distance.

    Example:
        >>> agreement([1.0], [1.021], [1.002], tolerance=0.02)
        (True, 'losses differ by 2.10% (tolerated 2.00%, rounding 0.20%)')
    """
    gap, spread = distance(own, other), distance(own, nudged)
    if spread > tolerance:
        return False, f"cannot be judged: rounding alone moves the losses by {spread:.2%}"
    words = f"losses differ by {gap:.2%} (tolerated {tolerance:.2%}, rounding {spread:.2%})"
    return gap <= tolerance + spread, words
