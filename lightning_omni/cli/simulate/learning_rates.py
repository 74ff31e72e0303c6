"""The search for the learning rate that suits a method, by short runs: a rate fair to one is rarely fair to another.

The search applies successive halving to a grid around the workload's own rate: a tenth of the run separates rates that
differ by a factor of four, a third of it those that differ by two. The caller runs the winner in full.
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
"""Steps of the coarse grid to either side, and largest number of further steps while the best is at an end."""
_EQUAL = 0.05
"""Largest relative difference of results that count as equal."""

Try = Callable[[float, float], Trace]
"""Function from a learning rate and a fraction of the run to the trace of that part."""


def best_rate(own: float, attempt: Try, target: tuple[str, float] | None) -> tuple[float, list[float]]:
    """Return the rate with which short runs progress furthest, and all rates tried.

    Args:
        own: the workload's rate, in the middle of the grid.
        attempt: function that makes a short run.
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
    """Return the smallest of equally good rates, because a rate that is nearly too large suffers in longer runs."""
    seconds, loss = min(merits.values())
    if math.isfinite(seconds):
        return min(factor for factor, each in merits.items() if each[0] <= (1 + _EQUAL) * seconds)
    return min(factor for factor, each in merits.items() if each[1] <= loss + _EQUAL * abs(loss))


def merit(trace: Trace, target: tuple[str, float] | None) -> tuple[float, float]:
    """Return the quality of a run, less is better: seconds to the target, then the loss in the last third."""
    reached = trace.time_to(*target) if target is not None else math.nan
    losses = trace.evaluated.get("loss", trace.rows["loss"])
    last = float(np.mean(losses[-max(1, len(losses) // 3) :])) if len(losses) else math.nan
    return (math.inf if math.isnan(reached) else reached, math.inf if math.isnan(last) else last)
