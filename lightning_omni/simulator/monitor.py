"""What is counted and measured of a simulated run; from it follows when it is evaluated and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from lightning_omni.errors import ConfigurationError
from lightning_omni.simulator.engine import Engine, Timeline
from lightning_omni.simulator.settings import Cadence, RunLimits
from lightning_omni.trace import reaches

Columns = dict[str, np.ndarray[Any, Any]]
Row = tuple[float, int, int, int, int, float, int, int, int]
"""A push or, where groups talk to one another only, a step, as in `Trace.COLUMNS`."""
Batches = list[tuple["Leased", int, int, float]]
"""Trained batches: what the server knows of their group, epoch, number of the batch, and seconds of devices."""
Work = list[tuple[int, int, float]]
"""Of each member of a group its rank, its samples and its seconds."""


class Leased:
    """How far a group has trained, as the server knows it, now and as of its last save.

    Attributes:
        known: epoch, and batches of it that the server knows to be trained.
        saved: the same as of the last save.
    """

    def __init__(self) -> None:
        self.known = self.saved = -1, 0

    def save(self) -> None:
        """The server's state is saved."""
        self.saved = self.known

    def report(self, epoch: int, trained: int) -> None:
        """The server hears of so many batches."""
        self.known = max(self.known, (epoch, trained))

    def goes_out_again(self, epoch: int, number: int) -> bool:
        """Whether a batch that was trained is dealt out again, by a server that goes on from its last save."""
        known_epoch, known = self.known
        saved = self.saved[1] if self.saved[0] == known_epoch else 0
        return epoch == known_epoch and saved < number <= known


class Monitor:
    """Counts what a run has done, has it evaluated, and says when it is over.

    Args:
        engine: virtual time.
        limits: when the run ends; kept, as is `epoch_size`.
        cadence: how often it is evaluated.
        metrics: computes the metrics as of now; None for none.
        clock: of the master weights; None where groups talk to one another only: then each step counts as an update.
        epoch_size: samples in an epoch.

    Attributes:
        rows: of the trace.
        evaluations: time, update, samples and metrics of each.
        work: rows of `Trace.WORK`; of a step that the run cuts short there is none.
        step_times: rows of `Trace.STEPS`, likewise.
        steps: gradients that were computed.
        samples: that were trained.
        useful_seconds: in which ranks computed gradients that were pushed, added up over ranks; not those that a server
            that has died took along.
        ended: why the run is over; empty before.
    """

    def __init__(
        self,
        engine: Engine,
        limits: RunLimits,
        cadence: Cadence,
        metrics: Callable[[], dict[str, float]] | None,
        clock: Callable[[], int] | None,
        epoch_size: int,
    ) -> None:
        self._engine, self._cadence, self._metrics, self._clock = engine, cadence, metrics, clock
        self.limits, self.epoch_size = limits, epoch_size
        self._period = math.inf if cadence.every_updates is None else cadence.every_updates
        self._next_evaluation = self._period
        self.rows: list[Row] = []
        self.evaluations: list[tuple[float, int, int, dict[str, float]]] = []
        self.work: Work = []
        self.step_times: list[tuple[int, float, float, float]] = []
        self._begun: dict[int, tuple[float, Work]] = {}
        self._computed: dict[int, float] = {}
        self.useful_seconds = 0.0
        self._since_save: Batches | None = None
        self._is_back = False  # whether the weights are older ones than those that were evaluated last
        self.steps = self.samples = 0
        self.ended = ""

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self.steps if self._clock is None else self._clock()

    @property
    def fraction(self) -> float:
        """How much of the run is done, 0 to 1."""
        return self.limits.fraction(self.updates, self.samples / self.epoch_size, self._engine.now)

    def begin(self, group: int, work: Work) -> None:
        """A group begins a batch."""
        self._begun[group] = self._engine.now, work

    def computed(self, group: int, samples: int) -> float:
        """A group has computed a gradient. Whatever comes before its next batch is exchange.

        Returns:
            Seconds that its ranks have taken for it, added up.
        """
        self._computed[group] = self._engine.now
        self.samples += samples
        self.steps += 1
        return sum(seconds for _, _, seconds in self._begun[group][1])

    @property
    def may_go_back(self) -> bool:
        """Whether the server saves its state."""
        return self._since_save is not None

    def pushed(self, seconds: float, batches: Batches) -> None:
        """A push of so many devices' seconds has counted."""
        self.useful_seconds += seconds
        if self._since_save is not None:
            self._since_save += batches

    def saved(self) -> None:
        """The server's state is saved: what was pushed before is never lost."""
        self._since_save = []

    def go_back(self, are_lost: bool) -> None:
        """The server is at its last save again: what is trained once more, or lost, was of no use.

        Args:
            are_lost: whether the updates since then are, also those that are not made again.
        """
        for leased, epoch, number, seconds in self._since_save or ():
            if are_lost or leased.goes_out_again(epoch, number):
                self.useful_seconds -= seconds
        self._since_save, self._is_back = [], True
        if self._period < math.inf:
            while self._next_evaluation - self._period > self.updates:
                self._next_evaluation -= self._period

    def end(self, group: int) -> None:
        """A group's step is over, if there was one: it may begin its next batch."""
        if group in self._begun:
            now, (began, work) = self._engine.now, self._begun.pop(group)
            self.work.extend(work)
            self.step_times.append((group, now, now - began, now - self._computed[group]))

    def check(self) -> None:
        """There may have been an update: is the run to be evaluated, or over?"""
        updates = self.updates
        if updates >= self._next_evaluation:
            self.evaluate()
            while self._next_evaluation <= updates:
                self._next_evaluation += self._period
        if updates >= self.limits.updates:
            self.ended = self.ended or "max_updates"

    def evaluate_by_time(self, period: float) -> Timeline:
        """A process that evaluates whenever so many seconds have passed, as long as anything else may happen."""
        for number in count(1):
            yield number * period
            self.evaluate()
            if not self._engine.events:
                return

    def evaluate_at_end(self) -> None:
        """The run is evaluated as it has ended, unless that has just been done."""
        evaluated = not self._is_back and self.evaluations and self.evaluations[-1][1] == self.updates
        if self._metrics is not None and not evaluated:
            self.evaluate()

    def evaluate(self) -> None:
        """The run is evaluated; one that reaches its target is over."""
        assert self._metrics is not None
        metrics, self._is_back = self._metrics(), False
        self.evaluations.append((self._engine.now, self.updates, self.samples, metrics))
        if self._cadence.target is None:
            return
        name, value = self._cadence.target
        if name not in metrics:
            raise ConfigurationError(f"target={name!r}: evaluate returns {', '.join(map(repr, metrics)) or 'nothing'}")
        if reaches(name, metrics[name], value):
            self.ended = self.ended or "target"


def arrays(columns: Mapping[str, type[Any]], rows: Sequence[tuple[Any, ...]]) -> Columns:
    """One array for each column of that name and type."""
    values = zip(*rows, strict=True) if rows else ((),) * len(columns)
    return {name: np.array(column, dtype) for (name, dtype), column in zip(columns.items(), values, strict=True)}


def evaluated(evaluations: Sequence[tuple[float, int, int, dict[str, float]]]) -> Columns:
    """One array for each column of these evaluations; a metric that was missing is NaN."""
    columns = {"time": np.float64, "update": np.int64, "samples": np.int64}
    names = dict.fromkeys(name for *_, metrics in evaluations for name in metrics)
    return arrays(columns, [row[:3] for row in evaluations]) | {
        name: np.array([metrics.get(name, math.nan) for *_, metrics in evaluations], np.float64) for name in names
    }
