"""What a simulated run is told by: the columns of its trace while they come in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Columns = dict[str, np.ndarray[Any, Any]]


class Row(NamedTuple):
    """A push or, where groups talk to one another only, a step; the columns are those of `Trace.COLUMNS`."""

    time: float
    group: int
    read: int
    write: int
    staleness: int
    loss: float
    samples: int
    epoch: int
    steps: int


class Stopwatch:
    """How long each group's steps took, and each member's part of them; a step that the run cuts short is none.

    Attributes:
        work: rows of `Trace.WORK`.
        steps: rows of `Trace.STEPS`.
    """

    def __init__(self) -> None:
        self.work: list[tuple[int, int, float]] = []
        self.steps: list[tuple[int, float, float, float]] = []
        self._open: dict[int, tuple[float, list[tuple[int, int, float]]]] = {}
        self._computed: dict[int, float] = {}

    def begin(self, group: int, now: float, work: list[tuple[int, int, float]]) -> None:
        """A group begins a batch; of each member its rank, its samples and its seconds."""
        self._open[group] = now, work

    def computed(self, group: int, now: float) -> None:
        """The group has its gradient. Whatever comes before its next batch is exchange."""
        self._computed[group] = now

    def end(self, group: int, now: float) -> None:
        """The step is over, if there was one: the group may begin its next batch."""
        if group in self._open:
            began, work = self._open.pop(group)
            self.work.extend(work)
            self.steps.append((group, now, now - began, now - self._computed[group]))


def arrays(columns: Mapping[str, type[Any]], rows: Sequence[tuple[Any, ...]]) -> Columns:
    """One array for each column of that name and type."""
    values = zip(*rows, strict=True) if rows else ((),) * len(columns)
    return {name: np.array(column, dtype) for (name, dtype), column in zip(columns.items(), values, strict=True)}


class Evaluations:
    """The trace's evaluations while they come in."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, int, dict[str, float]]] = []

    @property
    def last_update(self) -> int:
        """Updates at the last evaluation; -1 if there was none."""
        return self._rows[-1][1] if self._rows else -1

    def add(self, time: float, update: int, samples: int, metrics: dict[str, float]) -> None:
        """An evaluation."""
        self._rows.append((time, update, samples, metrics))

    def arrays(self) -> Columns:
        """One array for each column; a metric that was missing is NaN."""
        names = list(dict.fromkeys(name for row in self._rows for name in row[3]))
        return {
            "time": np.array([row[0] for row in self._rows], np.float64),
            "update": np.array([row[1] for row in self._rows], np.int64),
            "samples": np.array([row[2] for row in self._rows], np.int64),
            **{name: np.array([row[3].get(name, math.nan) for row in self._rows], np.float64) for name in names},
        }
