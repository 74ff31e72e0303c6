"""Two ways of doing the same, timed alternately, and the decision which is faster. What is timed is not known here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

REPEATS = 7
"""Pairs of blocks that a comparison has at most."""

FEWEST = 3
"""Pairs without which nothing is decided."""

MARGIN = 0.03
"""What a gain must exceed: a faster way that is this little faster is not worth being different."""

AGREE = 0.7
"""The share of pairs that must have found a gain."""

CLEAR = 0.1
"""If all pairs find that much on one side, the rest are left out."""

BLOCK_SECONDS = 0.1
"""Short steps are timed in blocks of about that length."""

_MOST_STEPS = 50


class Timed(Protocol):
    """Something that trains.

    Attributes:
        samples: in one step.
    """

    samples: int

    def run(self, steps: int) -> float:
        """Trains for so many steps, after a warm-up that does not count. Returns the seconds."""
        ...


@dataclass(frozen=True)
class Comparison:
    """What paired blocks have found.

    Args:
        before: samples per second of the way that is known, one number for each pair.
        after: those of the way that is tried.

    Example:
        >>> found = Comparison(before=(100.0, 90.0, 110.0), after=(150.0, 144.0, 165.0))
        >>> found.gain, found.spread, found.is_faster
        (1.5, (1.5, 1.6), True)
    """

    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Of each pair: above 1 if the tried way is faster."""
        return tuple(after / before for before, after in zip(self.before, self.after, strict=True))

    @property
    def gain(self) -> float:
        """Median of the pairs' ratios."""
        return statistics.median(self.ratios)

    @property
    def best_gain(self) -> float:
        """Ratio of the fastest blocks: what other programs on the machine disturb least."""
        return max(self.after) / max(self.before)

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest ratio."""
        return min(self.ratios), max(self.ratios)

    @property
    def is_faster(self) -> bool:
        """Whether the gain is more than noise: two estimates exceed the margin, and most pairs agree."""
        if len(self.ratios) < FEWEST:
            return False
        found = sum(ratio > 1 for ratio in self.ratios)
        return min(self.gain, self.best_gain) >= 1 + MARGIN and found >= AGREE * len(self.ratios)

    @property
    def is_clear(self) -> bool:
        """Whether more pairs would tell nothing new."""
        low, high = self.spread
        return len(self.ratios) >= FEWEST and (low >= 1 + CLEAR or high <= 1)


def compare(
    before: Timed, after: Timed, deadline: float, clock: Callable[[], float], enough: float = math.inf
) -> Comparison:
    """Times two ways alternately, each first as often as second, until the difference is clear.

    Machines slow down and speed up by themselves; within a pair they rarely do.

    Args:
        before: the way that is known.
        after: the way that is tried.
        deadline: on ``clock``; no pair begins after it.
        clock: seconds.
        enough: on ``clock``; after it the fewest pairs must do.
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
            # Too short to be timed singly: the first reading only says how many steps make a block.
            steps = min(_MOST_STEPS, max(2, round(BLOCK_SECONDS / max(min(found.values()), 1e-9))))
            continue
        old.append(steps * before.samples / found[False])
        new.append(steps * after.samples / found[True])
        if Comparison(tuple(old), tuple(new)).is_clear:
            break
    return Comparison(tuple(old), tuple(new))
