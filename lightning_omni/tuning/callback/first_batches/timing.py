"""The first batches of a run, timed while they train: they predict hardware efficiency at no cost.

The batches are the run's own, and none is undone. All ranks are one group then, so a step takes equally long for one
rank and for all, and its part that is not a rank's own computation is the all-reduce.

Rule: ranks decide after the same batches, counted in optimizer steps, so that all reach the collectives of `seen`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_omni.runtime.data.balance import Balance, gather_values
from lightning_omni.runtime.timing import wait_for
from lightning_omni.strategy.declared import loader_of
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.tuning.callback.first_batches.microbenchmarks import Microbenchmarks
from lightning_omni.tuning.callback.tunable import batch_size_of
from lightning_omni.tuning.model.forecast import TrainedBatches
from lightning_omni.tuning.model.measured import Measured
from lightning_omni.tuning.model.steps.timer import StepTimer
from lightning_omni.tuning.search import Observation, SearchSpec
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.search.rules import is_faster
from lightning_omni.tuning.trainer import log_nothing

DECISION_STEPS = tuple(c.FIRST_DECISION << number for number in range(c.DECISIONS))


@dataclass(frozen=True)
class TimedStep:
    """One optimizer step of one rank.

    Attributes:
        samples: samples of this rank.
        own: its compute time in seconds: with the optimizer's step and hooks, without waiting for others.
        seconds: seconds from the end of the last step to the end of this one.
        loss: mean over its samples, before the step.
        loading: seconds of ``own`` spent waiting for the data loader.
    """

    samples: int
    own: float
    seconds: float
    loss: float
    loading: float


class FirstBatches:
    """The timing of a run's first steps, on every rank of one group.

    Args:
        strategy: strategy of the run, whose groups are formed and whose first batch has not begun.
        spec: the specification of the search, which starts from the run's setting.
        before: an earlier timing of the same group with other batches, whose messages need not be timed again.
    """

    def __init__(self, strategy: OmniStrategyHooks, spec: SearchSpec, before: FirstBatches | None = None) -> None:
        self.spec = spec
        self._alone: Microbenchmarks = before._alone if before else Microbenchmarks(strategy)
        self._strategy, self._world = strategy, strategy.world
        self._balance = Balance("auto", log_nothing, only_measures=True)
        self._kept = strategy.balance
        self._timer = StepTimer()
        self._steps: list[TimedStep] = []
        self._losses: list[Tensor] = []
        self._count = self._measured = 0
        self._loaded = 0.0
        self._moments = list(DECISION_STEPS[1:] if before else DECISION_STEPS)
        self._seen = 0
        batch = batch_size_of(loader_of(strategy.pl_module.trainer))
        strategy.balance = self._balance
        self._balance.begin(self._world, strategy.pl_module, lambda: strategy.epochs.leases, samples=batch)

    def batch_done(self, loss: Tensor | None, steps: bool, counts: bool = True) -> None:
        """Record a batch.

        Args:
            loss: loss of the batch; None if there is none.
            steps: whether the optimizer has stepped.
            counts: whether the step is recorded.
        """
        wait_for(self._world.device)
        if loss is not None:
            self._losses.append(loss.detach())
        if not steps:
            return
        seconds, batches = self._timer.done(), self._balance.measured[self._measured :]
        mean = float(torch.stack(self._losses).mean()) if self._losses else math.nan
        if counts and seconds is not None and len(batches) == len(self._losses) > 0:
            samples, own = (math.fsum(column) for column in zip(*batches, strict=True))
            self._steps.append(TimedStep(int(samples), own, seconds, mean, self._balance.loading - self._loaded))
        self._measured, self._loaded, self._losses = len(self._balance.measured), self._balance.loading, []
        self._count += 1

    def interrupted(self) -> None:
        """Leave the next step untimed, because it includes more than training."""
        self._timer.interrupt()

    @property
    def is_due(self) -> bool:
        """Return whether a decision is due; the same on all ranks."""
        return bool(self._moments) and self._count >= self._moments[0]

    @property
    def is_early(self) -> bool:
        """Return whether the last observation suffices for proportional batches only."""
        return self._seen == DECISION_STEPS[0]

    @property
    def is_hurried(self) -> bool:
        """Return whether the last observation covers so small a part of the run that measuring more costs little."""
        return self.spec.is_hurried(self._seen)

    @property
    def is_last(self) -> bool:
        """Return whether the last observation leads to a decision in any case."""
        return not self._moments

    def seen(self) -> Observation | None:
        """Return the observation of all ranks so far, the same on all; None if it is too small. All ranks call it."""
        self._seen = self._moments.pop(0)
        rows: list[list[TimedStep]] = gather_values(self._world, self._steps, list[TimedStep])
        count = min(map(len, rows))
        if count < 2:
            return None
        rows = [row[-count:] for row in rows]
        # In the long run a step takes equally long on all ranks: if one is late after an all-reduce, in a hook or the
        # optimizer, the others wait for it at the next one.
        seconds = [math.fsum(row[step].seconds for row in rows) / len(rows) for step in range(count)]
        samples = [sum(row[step].samples for row in rows) for step in range(count)]
        take_long = is_faster(1 + self._seconds_of_bytes / _quickest(rows), 1.0)
        if take_long:
            self._alone.time_averaging(self.spec.space.all_reduce)
        losses = [math.fsum(row[step].loss for row in rows) / len(rows) for step in range(count)]
        ends = [float(sum(samples[: step + 1])) for step in range(count)]
        alone, server = self._alone, self._world.server
        places = alone.sites if take_long else alone.nodes
        measured = Measured(
            groups=(self._world.members,),
            samples=tuple(tuple(each.samples for each in row) for row in rows),
            own=tuple(tuple(max(each.own, 1e-9) for each in row) for row in rows),
            steps=(tuple(seconds),),
            exchanges=((0.0,) * count,),
            serve=alone.push,
            round_trip=alone.round_trip,
            reduce_per_byte=alone.reduce_per_byte,
            hands_on=True,
            shapes=alone.shapes,
            averaging=alone.averaging,
            loading=tuple(math.fsum(each.loading for each in row) / count for row in rows),
            nbytes=alone.nbytes,
            servers=server.count,
            per_node=server.per_node,
            nodes=places.of,
            server_node=server.node,
            node_round_trip=places.round_trip,
            node_per_byte=places.per_byte,
        )
        return Observation(TrainedBatches(self.spec.start, tuple(ends), tuple(losses)), measured)

    @property
    def _seconds_of_bytes(self) -> float:
        """Return the seconds that a gradient's bytes take in an all-reduce."""
        return self._alone.reduce_per_byte * self._alone.nbytes

    def close(self) -> None:
        """Stop timing, and restore the strategy's own balance."""
        self._balance.end()
        if self._strategy.balance is self._balance:
            self._strategy.balance = self._kept
            self._kept.after_validation()  # the time since it was replaced is no batch of its own


def _quickest(rows: Sequence[Sequence[TimedStep]]) -> float:
    """Return the seconds in which the fastest rank computes a batch of mean size, from rows of shape (ranks, steps)."""
    samples = [math.fsum(each.samples for each in row) for row in rows]
    seconds = [math.fsum(each.own for each in row) for row in rows]
    each = min(own / number for own, number in zip(seconds, samples, strict=True))
    return max(each * math.fsum(samples) / (len(rows) * len(rows[0])), 1e-9)
