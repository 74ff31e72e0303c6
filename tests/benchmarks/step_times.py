"""How long an emulated device's steps take, for `tuned_hosts.py`: what clusters do to them, one function each.

A pattern is made for a rank and called for each of its steps, with the seconds that the step would take, in proportion
to the rank's part of the batch, and the seconds since the first. Durations in it are counted in steps of a whole batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

Pattern = Callable[[float, float], float]


class Rank(NamedTuple):
    """Whose steps they are.

    Attributes:
        number: of the rank; the last is number 3.
        step: seconds of a step of a whole batch.
        draw: random numbers of its own.
    """

    number: int
    step: float
    draw: random.Random

    @property
    def is_last(self) -> bool:
        """Whether it is the one that differs from the others, if one does."""
        return self.number == 3


def steady(rank: Rank) -> Pattern:
    """Each as long as the other."""
    return lambda seconds, elapsed: seconds


def exponential(rank: Rank) -> Pattern:
    """Exponentially distributed."""
    return lambda seconds, elapsed: seconds * rank.draw.expovariate(1.0)


def lognormal(rank: Rank) -> Pattern:
    """Lognormal, with a coefficient of variation of 0.95."""
    return lambda seconds, elapsed: seconds * rank.draw.lognormvariate(-0.32, 0.8)


def common(rank: Rank) -> Pattern:
    """Exponentially distributed, the same for the same step of all ranks: batches of sequences of like length."""
    draw = random.Random(0)
    return lambda seconds, elapsed: seconds * draw.expovariate(1.0)


def stalls(rank: Rank) -> Pattern:
    """One step in 33 takes 15 times as long: a disk, a garbage collection, a message that is sent again."""
    return lambda seconds, elapsed: seconds * (15.0 if rank.draw.random() < 0.03 else 1.0)


def neighbours(rank: Rank) -> Pattern:
    """Others use the device at times: three times slower for about 40 steps, three tenths of the time."""
    factor, until = 1.0, 0.0

    def pattern(seconds: float, elapsed: float) -> float:
        nonlocal factor, until
        if elapsed >= until:
            factor = 3.0 if rank.draw.random() < 0.3 else 1.0
            until = elapsed + rank.draw.expovariate(1 / (40 * rank.step))
        return seconds * factor

    return pattern


def grades(rank: Rank) -> Pattern:
    """Speeds 1 : 1 : 1/2 : 1/4."""
    return lambda seconds, elapsed: seconds * (1.0, 1.0, 2.0, 4.0)[rank.number]


def overhead(rank: Rank) -> Pattern:
    """The last rank takes two steps longer for each, however small its part of the batch is."""
    return lambda seconds, elapsed: seconds + (2 * rank.step if rank.is_last else 0.0)


def fades(rank: Rank) -> Pattern:
    """The last rank is four times slower after 80 steps."""
    return lambda seconds, elapsed: seconds * (4.0 if rank.is_last and elapsed > 80 * rank.step else 1.0)


def drifts(rank: Rank) -> Pattern:
    """The last rank gets slower all the time, and is four times slower after 200 steps."""
    slower = 3.0 if rank.is_last else 0.0
    return lambda seconds, elapsed: seconds * (1.0 + slower * min(1.0, elapsed / (200 * rank.step)))


PATTERNS: dict[str, Callable[[Rank], Pattern]] = {
    each.__name__: each
    for each in (steady, exponential, lognormal, common, stalls, neighbours, grades, overhead, fades, drifts)
}
