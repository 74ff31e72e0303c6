"""Resampled measurements of steps: fits to many draws show the uncertainty of the first fit.

References:
    Künsch 1989 (resampling of blocks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_omni.tuning.model.measured import Measured

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Resampled:
    """A resampled segment of training; the first draw is the measurement itself.

    All arrays have shape (draws, steps); times are in seconds.

    Attributes:
        samples: samples of each rank.
        own: compute time of each rank.
        steps: steps of each group.
        exchanges: exchanges of each group.
        steady: for each group, whether a step is after the first ones, in which all groups reach the server at once.
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
            # The steps of a group and its members are drawn together, because a slow member delays the others.
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
    """Return indices of steps: all measured ones, then random blocks of neighbours; shape (draws + 1, about count).

    Blocks consist of whole cycles, from one exchange to the next; a cycle that is cut short at the end is left out.
    """
    period = min(period, count)
    cycles = count // period
    length = max(1, round(cycles ** (1 / 3)))
    starts = random.integers(cycles, size=(draws, -(-cycles // length)))
    drawn = (starts[:, :, None] + np.arange(length)).reshape(draws, -1)[:, :cycles] % cycles
    drawn = np.concatenate([np.arange(cycles)[None], drawn])
    return (drawn[:, :, None] * period + np.arange(period)).reshape(draws + 1, -1)
