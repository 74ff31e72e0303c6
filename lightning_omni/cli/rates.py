"""The learning rate that suits a method, from short runs: what is fair to one method is rarely fair to another.

Successive halving on a grid around the workload's own rate: a tenth of the run tells rates apart that differ by a
factor of four, a third of it those that differ by two. The winner is run in full by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from lightning_omni.trace import Trace

COARSE, FINE = 4.0, 2.0
"""Factors between neighbours of the two grids."""
FIRST, SECOND = 0.1, 1 / 3
"""Fractions of a run that the two rounds take."""
_REACH = 2
"""Steps of the coarse grid to either side; and so many more where the best is at an end."""
_EQUAL = 0.05
"""Results that differ by no more than this fraction are taken for equal."""

Try = Callable[[float, float], Trace]
"""A run with that learning rate, of which that fraction is simulated."""


def best_rate(own: float, attempt: Try, target: tuple[str, float] | None) -> tuple[float, list[float]]:
    """The rate with which short runs come furthest, and all that were tried.

    Args:
        own: the workload's rate, in the middle of the grid.
        attempt: makes a short run.
        target: name and value of the metric that ends a run, or None.
    """
    first = {
        factor: merit(attempt(own * factor, FIRST), target)
        for factor in (COARSE**power for power in range(-_REACH, _REACH + 1))
    }
    for _ in range(_REACH):
        best = _smallest_of_the_best(first)
        if best not in (min(first), max(first)):
            break
        beyond = best * COARSE if best == max(first) else best / COARSE
        first[beyond] = merit(attempt(own * beyond, FIRST), target)
    best = _smallest_of_the_best(first)
    second = {factor: merit(attempt(own * factor, SECOND), target) for factor in (best / FINE, best, best * FINE)}
    tried = sorted({*first, *second})
    return own * _smallest_of_the_best(second), [own * factor for factor in tried]


def _smallest_of_the_best(merits: dict[float, tuple[float, float]]) -> float:
    """Of rates that do equally well the smallest: what is nearly too large gets worse with the length of a run."""
    seconds, loss = min(merits.values())
    if math.isfinite(seconds):
        return min(factor for factor, each in merits.items() if each[0] <= (1 + _EQUAL) * seconds)
    return min(factor for factor, each in merits.items() if each[1] <= loss + _EQUAL * abs(loss))


def merit(trace: Trace, target: tuple[str, float] | None) -> tuple[float, float]:
    """How good a run is, less is better: seconds to the target, then the loss in the last third.

    Args:
        trace: of the run.
        target: name and value of a metric, or None.
    """
    reached = trace.time_to(*target) if target is not None else math.nan
    losses = trace.evaluated.get("loss", trace.rows["loss"])
    last = float(np.mean(losses[-max(1, len(losses) // 3) :])) if len(losses) else math.nan
    return (math.inf if math.isnan(reached) else reached, math.inf if math.isnan(last) else last)
