"""Measured steps, resampled: a fit to each of many draws says how certain the first one is.

References:
    Künsch 1989 (resampling of blocks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_omni.performance.measured import Measured

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Resampled:
    """One segment of training, resampled; the first draw is what was measured.

    Attributes:
        samples: of each rank, each of shape (draws, steps).
        own: of each rank, in seconds, each of shape (draws, steps).
        steps: of each group, in seconds, each of shape (draws, steps).
        exchanges: of each group, in seconds, each of shape (draws, steps).
        steady: of each group, whether a step is none of its first, when all groups come to the server at once.
    """

    measured: Measured
    samples: Mapping[int, Array]
    own: Mapping[int, Array]
    steps: Sequence[Array]
    exchanges: Sequence[Array]
    steady: Sequence[Array]

    @classmethod
    def of(cls, measured: Measured, draws: int, random: np.random.Generator) -> Resampled:
        samples, own, steps, exchanges, steady = {}, {}, [], [], []
        for number, members in enumerate(measured.groups):
            # The members' steps and the group's stay together: what slowed one down delayed the others.
            which = _blocks(len(measured.steps[number]), measured.period, draws, random)
            steady.append(which >= (measured.period if which.shape[1] > 8 * measured.period else 0))
            steps.append(np.array(measured.steps[number])[which])
            exchanges.append(np.array(measured.exchanges[number])[which])
            for rank in members:
                row = measured.ranks.index(rank)
                samples[rank] = np.array(measured.samples[row], np.float64)[which]
                own[rank] = np.array(measured.own[row])[which]
        return cls(measured, samples, own, steps, exchanges, steady)


def _blocks(count: int, period: int, draws: int, random: np.random.Generator) -> Array:
    """Numbers of steps, those measured and then blocks of neighbours at random: shape (draws + 1, about count).

    Blocks are of whole cycles, from one exchange to the next; one that was cut short at the end is left out.
    """
    period = min(period, count)
    cycles = count // period
    length = max(1, round(cycles ** (1 / 3)))
    starts = random.integers(cycles, size=(draws, -(-cycles // length)))
    drawn = (starts[:, :, None] + np.arange(length)).reshape(draws, -1)[:, :cycles] % cycles
    drawn = np.concatenate([np.arange(cycles)[None], drawn])
    return (drawn[:, :, None] * period + np.arange(period)).reshape(draws + 1, -1)
