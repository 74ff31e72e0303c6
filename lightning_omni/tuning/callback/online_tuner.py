"""Tuning by a run's first batches: they are timed until a decision, which may switch the run to a faster setting."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from lightning_omni.errors import ConfigurationError, OmniError
from lightning_omni.runtime.balance import Balance, gather_values
from lightning_omni.runtime.timing import wait_for
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.strategy.lightning_internals.callbacks import loader_of
from lightning_omni.strategy.lightning_internals.loops import will_step
from lightning_omni.strategy.lightning_internals.strategies import has_ddp_comm_hook
from lightning_omni.tuning.callback.hyperparameters import Hyperparameters
from lightning_omni.tuning.callback.microbenchmarks import Microbenchmarks
from lightning_omni.tuning.callback.settings import AppliedSetting, FitSpace
from lightning_omni.tuning.callback.speed import SpeedRecord
from lightning_omni.tuning.callback.tuned_run import Command, TunedRun, TunerReports
from lightning_omni.tuning.model.measurements import Measured, TrainedBatches
from lightning_omni.tuning.model.steps import StepTimer
from lightning_omni.tuning.search import Observation, Search, SearchSpec
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.search.choice import verdict
from lightning_omni.tuning.search.evidence import is_faster
from lightning_omni.tuning.trainer import batch_size_of, log_nothing
from lightning_omni.wire.all_reduce import EXACT

DECISION_STEPS = tuple(c.FIRST_DECISION << number for number in range(c.DECISIONS))


@dataclass(frozen=True)
class TimedStep:
    """One optimizer step of one rank.

    Attributes:
        own: compute time in seconds, with the optimizer's step and hooks, without waits for others.
        seconds: from the end of the last step to the end of this one.
        loss: mean over the rank's batches, before the step.
        loading: seconds of ``own`` spent waiting for the data loader.
        squares: squared lengths of this rank's gradient and of the mean gradient; empty if unknown.
    """

    samples: int
    own: float
    seconds: float
    loss: float
    loading: float
    squares: tuple[float, ...] = ()


class FirstBatches:
    """The timing of a run's first steps, on every rank of one group.

    Ranks decide after the same number of optimizer steps, so that all reach the collectives of `seen`.

    ``before`` is an earlier timing of the same group with other batches, whose messages need not be timed again.
    """

    def __init__(self, strategy: OmniStrategyHooks, spec: SearchSpec, before: FirstBatches | None = None) -> None:
        self.spec = spec
        self._alone: Microbenchmarks = before._alone if before else Microbenchmarks(strategy)
        self._strategy, self._world = strategy, strategy.world
        self._balance = Balance("auto", log_nothing, only_measures=True)
        self._kept = strategy.parts.balance
        self._has_means = self._world.reduction.format == EXACT and not has_ddp_comm_hook(strategy)
        self._timer = StepTimer()
        self._steps: list[TimedStep] = []
        self._losses: list[Tensor] = []
        self._count = self._measured = 0
        self._loaded = 0.0
        self._moments = list(DECISION_STEPS[1:] if before else DECISION_STEPS)
        self._seen = 0
        batch = batch_size_of(loader_of(strategy.parts.trainer))
        strategy.parts.balance = self._balance
        self._balance.begin(self._world, strategy.parts.pl_module, lambda: strategy.parts.epochs.leases, samples=batch)

    def batch_done(self, loss: Tensor | None, steps: bool, counts: bool = True) -> None:
        wait_for(self._world.device)
        if loss is not None:
            self._losses.append(loss.detach())
        if not steps:
            return
        seconds, batches = self._timer.done(), self._balance.measured[self._measured :]
        mean = float(torch.stack(self._losses).mean()) if self._losses else math.nan
        if counts and seconds is not None and len(batches) == len(self._losses) > 0:
            samples, own = (math.fsum(column) for column in zip(*batches, strict=True))
            loading, scaler = self._balance.loading - self._loaded, self._strategy.parts.grouping.loss_scaler
            scale = 1.0 if scaler is None else scaler.get_scale()
            is_known = self._has_means and len(batches) == 1  # accumulated gradients are sums
            squares = tuple(each / scale**2 for each in self._balance.squares.tolist()) if is_known else ()
            self._steps.append(TimedStep(int(samples), own, seconds, mean, loading, squares))
        self._measured, self._loaded, self._losses = len(self._balance.measured), self._balance.loading, []
        self._count += 1

    def keep_one_group(self) -> None:
        self.spec = replace(self.spec, space=replace(self.spec.space, groups=(1,)))

    def interrupted(self) -> None:
        self._timer.interrupt()

    @property
    def is_due(self) -> bool:
        return bool(self._moments) and self._count >= self._moments[0]

    @property
    def is_early(self) -> bool:
        """Return whether the latest observation suffices for proportional batches only."""
        return self._seen == DECISION_STEPS[0]

    @property
    def can_wait(self) -> bool:
        return self.spec.can_wait(self._seen)

    @property
    def is_last(self) -> bool:
        return not self._moments

    def seen(self) -> Observation | None:
        """Return all ranks' observation, None if it is too small, and begin to wait for the next. All ranks call it."""
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
        take_long = is_faster(1 + self._alone.reduce_per_byte * self._alone.nbytes / _quickest(rows), 1.0)
        if take_long:
            self._alone.time_averaging(self.spec.space.all_reduce)
        losses = [math.fsum(row[step].loss for row in rows) / len(rows) for step in range(count)]
        losses = losses if all(map(math.isfinite, losses)) else []
        ends = [float(sum(samples[: step + 1])) for step in range(count)]
        alone, server = self._alone, self._world.server
        places = alone.sites if take_long else alone.nodes
        measured = Measured(
            ranks=self._world.members,
            samples=tuple(tuple(each.samples for each in row) for row in rows),
            own=tuple(tuple(max(each.own, 1e-9) for each in row) for row in rows),
            steps=tuple(seconds),
            serve=alone.push,
            round_trip=alone.round_trip,
            reduce_per_byte=alone.reduce_per_byte,
            hands_on=True,
            shapes=alone.shapes,
            averaging=dict(alone.averaging),
            loading=tuple(math.fsum(each.loading for each in row) / count for row in rows),
            nbytes=alone.nbytes,
            servers=server.count,
            per_node=server.per_node,
            nodes=places.of,
            server_node=server.node,
            node_round_trip=places.round_trip,
            node_per_byte=places.per_byte,
            copy_per_byte=alone.copy_per_byte,
            host_per_byte=alone.host_per_byte,
        )
        return Observation(TrainedBatches(tuple(ends), tuple(losses)), measured, noise_scale(rows))

    def close(self) -> None:
        self._balance.end()
        if self._strategy.parts.balance is self._balance:
            self._strategy.parts.balance = self._kept
            self._kept.after_validation()  # the time since it was replaced is no batch of its own


def noise_scale(rows: Sequence[Sequence[TimedStep]]) -> float | None:
    """Return the gradient noise scale in samples, by the last half of some steps; None if unknown.

    It is the trace of the covariance of single samples' gradients over the squared length of their mean, both estimated
    without bias from the lengths of the ranks' gradients and of their mean. Ranks need equal batches. ``rows`` has
    shape (ranks, steps).

    References:
        McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1.
    """
    steps: list[tuple[TimedStep, ...]] = list(zip(*rows, strict=True))
    last = steps[len(steps) // 2 :]  # 16-bit gradients may be infinite
    known = [each for each in last if all(rank.squares and math.isfinite(rank.squares[0]) for rank in each)]
    ranks, batches = len(rows), {rank.samples for each in known for rank in each}
    own = math.fsum(rank.squares[0] for each in known for rank in each) / ranks
    mean = math.fsum(each[0].squares[1] for each in known)
    signal: float = ranks * mean - own
    if len(batches) != 1 or not 0 < signal < math.inf:
        return None
    return max(0.0, ranks * batches.pop() * (own - mean) / signal)


def _quickest(rows: Sequence[Sequence[TimedStep]]) -> float:
    """Return the seconds in which the fastest rank computes a batch of mean size; ``rows`` has shape (ranks, steps)."""
    samples = [math.fsum(each.samples for each in row) for row in rows]
    seconds = [math.fsum(each.own for each in row) for row in rows]
    each = min(own / number for own, number in zip(seconds, samples, strict=True))
    return max(each * math.fsum(samples) / (len(rows) * len(rows[0])), 1e-9)


@dataclass
class _Decision:
    """A decision during the first batches.

    Attributes:
        found: the future of rank 0's search, on rank 0.
        batches: optimizer steps since.
    """

    observation: Observation | None
    found: Future[Search | None] | None = None
    batches: int = 0

    def trained(self) -> bool:
        """Count a step, and return whether to poll rank 0: after 1, 2, 4, 8 steps, and so on."""
        self.batches += 1
        return self.batches & (self.batches - 1) == 0


class OnlineTuner:
    """The tuning of a run by its own first batches.

    Once batches are split, they are timed again: equal batches do not show whether a slow rank takes longer for each
    sample or for each step. All ranks call the public methods.
    """

    def __init__(
        self,
        run: TunedRun,
        space: FitSpace,
        applied: AppliedSetting,
        speeds: SpeedRecord,
        reports: TunerReports,
    ) -> None:
        self._run, self._space, self._applied = run, space, applied
        self._speed_record, self._reports = speeds, reports
        self._batches: FirstBatches | None = None
        self._known: list[Measured] = []
        self._is_patient = False
        self._deciding = 0.0
        self._decision: _Decision | None = None
        self._postponed: Command | None = None

    # --- Start --------------------------------------------------------------------------------------------------------

    def begin(self, hyperparameters: Hyperparameters) -> None:
        run = self._run
        run.strategy.parts.grouping.merge()
        run.state.own = None
        spec = self._space.specification(hyperparameters, self._applied.seconds_to_form)
        run.state.own = spec.start
        self._is_patient = False
        self._batches = FirstBatches(run.strategy, spec)

    def begin_again(self, reason: str) -> None:
        """Restore the user's own setting, in one group, and time it again.

        Only the last decision may then be that nothing is faster.
        """
        run = self._run
        run.info(f"OmniTuner: timing the run in one group again, because {reason}")
        self.close()
        self._applied.restore_user_setting()
        run.state.unfinished = True
        # One group's speed is no reason to begin again, if the epoch is too short for a choice.
        self._speed_record.changed()
        hyperparameters = run.hyperparameters()
        self._deciding, self._known, self._is_patient = 0.0, [], True
        spec = self._space.specification(hyperparameters, self._applied.seconds_to_form)
        if max(spec.space.groups) > 1:
            run.world.connection.start_server()  # it was dismissed if one group was chosen before
        self._batches = FirstBatches(run.strategy, spec)

    # --- Training -----------------------------------------------------------------------------------------------------

    @property
    def is_timing(self) -> bool:
        return self._batches is not None or self._postponed is not None

    def interrupted(self) -> None:
        if self._batches is not None:
            self._batches.interrupted()

    def batch_done(self, loss: Tensor | None) -> None:
        """Record a batch, if batches are timed; start a decision that is due, or poll the one in progress.

        Both happen only after an optimizer step, and not at the last batch of an epoch.
        """
        batches, trainer = self._batches, self._run.trainer
        if batches is None:
            return
        steps = will_step(trainer)
        if self._decision is not None:
            batches.interrupted()  # rank 0 decides meanwhile, and is slower
        # The size of the last batch is not known here if samples were distributed beforehand.
        is_partial = trainer.is_last_batch and not self._run.may_change_inside
        batches.batch_done(loss, steps, counts=not is_partial)
        if not steps or trainer.is_last_batch:
            return
        if self._decision is not None:
            if self._decision.trained():
                self._poll_decision(self._decision)
        elif batches.is_due:
            self._begin_to_decide(batches)

    def close(self) -> None:
        self._postponed = None
        if self._batches is not None:
            self._batches.close()
            self._batches = self._decision = None

    # --- Decisions ----------------------------------------------------------------------------------------------------

    def _begin_to_decide(self, batches: FirstBatches) -> None:
        began, run = time.perf_counter(), self._run
        decision = self._decision = _Decision(batches.seen())
        if run.is_rank_zero:
            decision.found = run_in_background(self._finding(decision, batches))
            if batches.is_early:  # it takes no time
                wait([decision.found])
        self._exclude_seconds(time.perf_counter() - began)
        self._poll_decision(decision)

    def _poll_decision(self, decision: _Decision) -> None:
        began, run = time.perf_counter(), self._run
        is_over = False
        if run.broadcast(int(decision.found is not None and decision.found.done())):
            self._decision = None
            is_over = self._conclude(decision)
        self._exclude_seconds(time.perf_counter() - began, is_over)

    def _exclude_seconds(self, seconds: float, is_over: bool = False) -> None:
        self._deciding += seconds
        self._run.exclude_seconds(seconds)
        if is_over and self._run.is_rank_zero:
            self._run.rounds[-1].search.overhead += self._deciding
            self._deciding = 0.0

    def _conclude(self, decision: _Decision) -> bool:
        """Carry out a decision, or continue timing; return whether anything was decided."""
        run, batches = self._run, self._batches
        assert batches is not None
        command = run.broadcast_command(self._command(decision, batches.spec))
        if command is not None and command.setting.groups > 1 and not self._space.join_server():
            batches.keep_one_group()
            if run.is_rank_zero:
                run.rounds.pop()
                decision.found = run_in_background(self._finding(decision, batches))
            command = run.broadcast_command(self._command(decision, batches.spec))
        if command is not None and command.error:
            raise ConfigurationError(command.error)
        is_over = command is not None or batches.is_last
        if is_over:
            self.close()
        batches.interrupted()
        if command is not None and not (self._known and command.setting == run.state.setting):
            if run.may_change_inside or command.setting == batches.spec.start:
                self.adopt(command)
            else:
                self._postponed = command
            splits = command.setting == replace(batches.spec.start, rebalance=True)
            if splits and decision.observation is not None and not self._known:
                # One group with proportional batches is timed once more, to see whether it is as fast as predicted.
                self._known = [decision.observation.measured]
                self._batches = FirstBatches(run.strategy, batches.spec, batches)
        if is_over:
            run.state.unfinished = self._postponed is not None
        return command is not None

    def epoch_done(self, is_last: bool) -> None:
        """Adopt a postponed choice, unless the run ends here."""
        if self._postponed is not None and not is_last:
            began, run = time.perf_counter(), self._run
            self.adopt(self._postponed)
            run.state.unfinished = False
            self._exclude_seconds(time.perf_counter() - began, is_over=True)
        self._postponed = None

    def _finding(self, decision: _Decision, batches: FirstBatches) -> Callable[[], Search | None]:
        """Return a function of rank 0 that returns a search whose choice is clear or due, and None otherwise."""
        spec, is_early, can_wait = batches.spec, batches.is_early, batches.can_wait
        is_last, may_stay = batches.is_last, not self._is_patient
        observation, segments = decision.observation, list(self._run.state.segments)
        now = observation.measured if observation is not None else None
        known = [each for each in self._known if now is not None and each.ranks == now.ranks]

        def find() -> Search | None:
            if observation is None:
                return None
            search = Search(spec, observation, known, segments)
            if not (is_last or verdict(search, is_early, may_stay, can_wait)):
                return None
            search.choice(asks=not is_early)  # an early choice takes no time
            return search

        return find

    def _command(self, decision: _Decision, spec: SearchSpec) -> Command | None:
        """Return rank 0's command; None to continue measuring, and on other ranks."""
        run = self._run
        if decision.found is None:
            return None
        try:
            search = decision.found.result()
            if search is None:
                return None
            if search.known and search.choice().setting in (run.state.setting, spec.start):
                return Command(run.setting)  # the forecast was right, or nothing is better
            self._speed_record.search_begins()
            return run.conclude(search)
        except OmniError as error:
            return Command(spec.start, error=str(error))

    def adopt(self, command: Command) -> None:
        run = self._run
        if command.setting == run.own and run.state.setting in (None, run.own):
            run.state.setting = command.setting
            run.world.dismiss_server()
        else:
            self._applied.capture()
            self._applied.apply(command)
        self._applied.watch(command.divergence_threshold, keeps=True)
        run.state.rounds, run.state.learnt_below = run.state.rounds + 1, command.learnt_below
        self._speed_record.changed()
        self._reports.chosen(command)


# --- Work of rank 0 beside the training -------------------------------------------------------------------------------

Found = TypeVar("Found")

SWITCH_INTERVAL = 1e-4
"""Seconds after which a thread that only computes lets training continue, which waits for Python's lock after every
operation on tensors."""


def run_in_background(find: Callable[[], Found]) -> Future[Found]:
    """Run a function in a thread of its own; return the future of its result or error.

    ``find`` must not change anything that the run uses meanwhile.
    """

    def find_in_background() -> Found:
        with frequent_switches():
            return find()

    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="omni-tuner")
    found = thread.submit(find_in_background)
    thread.shutdown(wait=False)
    return found


_lock = threading.Lock()
_intervals: list[float] = []
"""The intervals that threads have found on entering `frequent_switches`, the first of them Python's own."""


@contextmanager
def frequent_switches() -> Iterator[None]:
    """Let Python switch threads every `SWITCH_INTERVAL` while a thread computes beside training."""
    with _lock:
        _intervals.append(SWITCH_INTERVAL if _intervals else sys.getswitchinterval())
        sys.setswitchinterval(min(SWITCH_INTERVAL, _intervals[0]))
    try:
        yield
    finally:
        with _lock:
            sys.setswitchinterval(_intervals.pop())


__all__ = ["OnlineTuner", "frequent_switches", "run_in_background"]
