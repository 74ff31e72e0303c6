"""Counters and measurements of a simulated run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from lightning_omni.errors import ConfigurationError
from lightning_omni.simulator.engine import Engine, Timeline
from lightning_omni.simulator.settings import Evaluation, Limits
from lightning_omni.trace import reaches

Columns = dict[str, np.ndarray[Any, Any]]
Row = tuple[float, int, int, int, int, float, int, int, int]
"""A push or, where groups exchange only with one another, a step, as in `Trace.COLUMNS`."""
Work = list[tuple[int, int, float]]
"""Rank, samples and seconds of each member of a group."""


class Monitor:
    """The counters of a run, which evaluate it and end it.

    Args:
        clock: returns the clock of the master weights; None where each step counts as an update.

    Attributes:
        evaluations: time, update, samples and metrics of each.
        work: rows of `Trace.WORK`, without steps that were cut short.
        step_times: rows of `Trace.STEPS`, likewise.
        useful_seconds: seconds in which ranks computed the gradients of ``rows``, summed over ranks.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        evaluation: Evaluation,
        metrics: Callable[[], dict[str, float]] | None,
        clock: Callable[[], int] | None,
        epoch_size: int,
    ) -> None:
        self._engine, self._evaluation, self._metrics, self._clock = engine, evaluation, metrics, clock
        self.limits, self.epoch_size = limits, epoch_size
        self._period = math.inf if evaluation.every is None else evaluation.every
        self._next_evaluation = self._period
        self.rows: list[Row] = []
        self.evaluations: list[tuple[float, int, int, dict[str, float]]] = []
        self.work: Work = []
        self.step_times: list[tuple[int, float, float, float]] = []
        self._begun: dict[int, tuple[float, Work]] = {}
        self._computed: dict[int, float] = {}
        self.useful_seconds = 0.0
        self.steps = self.samples = 0
        self.ended = ""
        self.moves_between_updates = False  # whether the evaluated weights change with each local step

    @property
    def updates(self) -> int:
        return self.steps if self._clock is None else self._clock()

    @property
    def fraction(self) -> float:
        return self.limits.fraction(self.updates, self.samples / self.epoch_size, self._engine.now)

    def begin(self, group: int, work: Work) -> None:
        self._begun[group] = self._engine.now, work

    def computed(self, group: int, samples: int) -> float:
        self._computed[group] = self._engine.now
        self.samples += samples
        self.steps += 1
        return sum(seconds for _, _, seconds in self._begun[group][1])

    def end(self, group: int) -> None:
        if group in self._begun:
            now, (began, work) = self._engine.now, self._begun.pop(group)
            self.work.extend(work)
            self.step_times.append((group, now, now - began, now - self._computed[group]))

    def check(self) -> None:
        updates = self.updates
        if updates >= self._next_evaluation:
            self.evaluate()
            while self._next_evaluation <= updates:
                self._next_evaluation += self._period
        if updates >= self.limits.updates:
            self.ended = self.ended or "max_updates"

    def evaluate_by_time(self, period: float) -> Timeline:
        for number in count(1):
            yield number * period
            self.evaluate()
            if not self._engine.events:
                return

    def evaluate_at_end(self) -> None:
        if self._metrics is None:
            return
        _, updates, samples, _ = self.evaluations[-1] if self.evaluations else (0.0, -1, -1, {})
        is_same = updates == self.updates and (samples == self.samples or not self.moves_between_updates)
        if not is_same:
            self.evaluate()

    def evaluate(self) -> None:
        assert self._metrics is not None
        metrics = self._metrics()
        self.evaluations.append((self._engine.now, self.updates, self.samples, metrics))
        if self._evaluation.target is None:
            return
        name, value = self._evaluation.target
        if name not in metrics:
            raise ConfigurationError(f"target={name!r}: evaluate returns {', '.join(map(repr, metrics)) or 'nothing'}")
        if reaches(name, metrics[name], value):
            self.ended = self.ended or "target"


def arrays(columns: Mapping[str, type[Any]], rows: Sequence[tuple[Any, ...]]) -> Columns:
    values = zip(*rows, strict=True) if rows else ((),) * len(columns)
    return {name: np.array(column, dtype) for (name, dtype), column in zip(columns.items(), values, strict=True)}


def evaluated(evaluations: Sequence[tuple[float, int, int, dict[str, float]]]) -> Columns:
    columns = {"time": np.float64, "update": np.int64, "samples": np.int64}
    names = dict.fromkeys(name for *_, metrics in evaluations for name in metrics)
    return arrays(columns, [row[:3] for row in evaluations]) | {
        name: np.array([metrics.get(name, math.nan) for *_, metrics in evaluations], np.float64) for name in names
    }
