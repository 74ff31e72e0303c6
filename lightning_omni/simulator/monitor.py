"""What is counted of a simulated run; from it follows when it is evaluated and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import count

from torch import Tensor, nn

from lightning_omni.errors import ConfigurationError
from lightning_omni.simulator.engine import Engine, Timeline
from lightning_omni.simulator.measurements import Evaluations, Row, Stopwatch
from lightning_omni.simulator.settings import Cadence, Limits
from lightning_omni.trace import reaches

Evaluate = Callable[[nn.Module], Mapping[str, float]]


class Evaluator:
    """Computes the metrics of the model that the method would validate.

    Args:
        evaluate: the user's.
        model: in evaluation mode; overwritten.
        trained: whose buffers count.
        weights: by name, as they are whenever this is called.
    """

    def __init__(
        self, evaluate: Evaluate, model: nn.Module, trained: nn.Module, weights: Callable[[], dict[str, Tensor]]
    ) -> None:
        self._evaluate, self._model, self._trained, self._weights = evaluate, model, trained, weights

    def metrics(self) -> dict[str, float]:
        """The metrics as of now."""
        parameters = dict(self._model.named_parameters())
        for name, weight in self._weights().items():
            parameters[name].copy_(weight)
        for mine, theirs in zip(self._model.buffers(), self._trained.buffers(), strict=True):
            mine.copy_(theirs)
        return {name: float(value) for name, value in self._evaluate(self._model).items()}


class Monitor:
    """Counts what a run has done, has it evaluated, and says when it is over.

    Args:
        engine: virtual time.
        limits: when the run ends.
        cadence: how often it is evaluated.
        evaluator: computes the metrics; None for none.
        clock: of the master weights; None where groups talk to one another only: then each step counts as an update.
        epoch_size: samples in an epoch.

    Attributes:
        rows: of the trace.
        evaluations: of the trace.
        stopwatch: measures the groups' steps.
        samples: that were trained.
        ended: why the run is over; empty before.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        cadence: Cadence,
        evaluator: Evaluator | None,
        clock: Callable[[], int] | None,
        epoch_size: int,
    ) -> None:
        self._engine, self._limits, self._cadence, self._evaluator = engine, limits, cadence, evaluator
        self._clock, self._epoch_size = clock, epoch_size
        self._period = math.inf if cadence.every_updates is None else cadence.every_updates
        self._next_evaluation = self._period
        self.rows: list[Row] = []
        self.evaluations, self.stopwatch = Evaluations(), Stopwatch()
        self.steps = self.samples = 0
        self.ended = ""

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self.steps if self._clock is None else self._clock()

    @property
    def fraction(self) -> float:
        """How much of the run is done, 0 to 1."""
        return self._limits.fraction(self.updates, self.samples / self._epoch_size, self._engine.now)

    def computed(self, group: int, samples: int) -> None:
        """A group has computed a gradient."""
        self.stopwatch.computed(group, self._engine.now)
        self.samples += samples
        self.steps += 1

    def check(self) -> None:
        """There may have been an update: is the run to be evaluated, or over?"""
        if self.updates >= self._next_evaluation:
            self.evaluate()
            while self._next_evaluation <= self.updates:
                self._next_evaluation += self._period
        if self.updates >= self._limits.updates:
            self.ended = self.ended or "max_updates"

    def evaluate_by_time(self, period: float) -> Timeline:
        """A process that evaluates whenever so many seconds have passed, as long as anything else may happen."""
        for number in count(1):
            yield number * period
            self.evaluate()
            if not len(self._engine.events):
                return

    def evaluate_at_end(self) -> None:
        """The run is evaluated as it has ended, unless that has just been done."""
        if self._evaluator is not None and self.evaluations.last_update != self.updates:
            self.evaluate()

    def evaluate(self) -> None:
        """The run is evaluated; one that reaches its target is over."""
        assert self._evaluator is not None
        metrics = self._evaluator.metrics()
        self.evaluations.add(self._engine.now, self.updates, self.samples, metrics)
        if self._cadence.target is None:
            return
        name, value = self._cadence.target
        if name not in metrics:
            raise ConfigurationError(f"target={name!r}: evaluate returns {', '.join(map(repr, metrics)) or 'nothing'}")
        if reaches(name, metrics[name], value):
            self.ended = self.ended or "target"
