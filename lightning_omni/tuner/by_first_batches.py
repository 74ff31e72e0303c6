"""A run is tuned by its own first batches: they are timed, and once it is clear what is faster it goes on with that."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_omni.errors import ConfigurationError, OmniError
from lightning_omni.performance.measured import Measured
from lightning_omni.search import Observation, Search, SearchSpec
from lightning_omni.search.choice import verdict
from lightning_omni.strategy._private import will_step
from lightning_omni.tuner.advice import Advice
from lightning_omni.tuner.applied import AppliedSetting
from lightning_omni.tuner.beside import at_once, beside
from lightning_omni.tuner.first_batches import FirstBatches
from lightning_omni.tuner.fit_space import FitSpace
from lightning_omni.tuner.hyperparameters import Hyperparameters
from lightning_omni.tuner.reports import TunerReports
from lightning_omni.tuner.retuning import Retuning
from lightning_omni.tuner.run import TunedRun
from lightning_omni.tuner.state import Command


@dataclass
class _Decision:
    """A moment of the first batches.

    Attributes:
        observation: what all ranks had seen; None if it is too little.
        is_early: whether it is too little for anything but proportional batches.
        is_hurried: whether it is of so small a part of the run that it costs little to see more.
        is_last: whether it is decided by in any case.
        may_stay: whether it may be decided by that nothing is faster, although it is not the last.
        found: what rank 0 makes of it, once it knows; None on other ranks.
        batches: that were trained since.
    """

    observation: Observation | None
    is_early: bool
    is_hurried: bool
    is_last: bool
    may_stay: bool
    found: Future[Search | None] | None = None
    batches: int = 0

    def trained(self) -> bool:
        """A batch was trained since; says whether it is time to ask rank 0: after 1, 2, 4, 8 of them, and so on.

        To ask takes as long as a short batch, and so costs few of them, and no batch that takes longer than to decide.
        """
        self.batches += 1
        return self.batches & (self.batches - 1) == 0


class ByFirstBatches:
    """Tunes a run by what it trains anyway.

    Proportional batches are what costs no samples, and what is least certain: by equal batches alone it cannot be told
    whether a slow rank takes longer for each sample or for each step. So once batches are split, they are timed again.

    Args:
        run: that is tuned.
        space: what may be searched in it.
        applied: what it trains with.
        retuning: is told of changes.
        reports: tell of the choice.
    """

    def __init__(
        self,
        run: TunedRun,
        space: FitSpace,
        applied: AppliedSetting,
        retuning: Retuning,
        reports: TunerReports,
    ) -> None:
        self._run, self._space, self._applied = run, space, applied
        self._retuning, self._reports = retuning, reports
        self._batches: FirstBatches | None = None
        self._known: list[Measured] = []
        self._is_patient = False
        self._deciding = 0.0
        self._decision: _Decision | None = None
        self._postponed: Command | None = None
        self._spec: SearchSpec | None = None
        self._advice = Advice(run)

    # --- To begin -----------------------------------------------------------------------------------------------------

    def begin(self, hyperparameters: Hyperparameters) -> None:
        """The run begins in one group, with the user's own setting, and is timed."""
        run = self._run
        run.strategy.form_one()
        run.state.own, run.state.reference = None, float(run.batch(run.world.size))
        spec = self._space.specification(hyperparameters, self._applied.seconds_to_form)
        run.state.own = spec.start
        self._is_patient = False
        self._time(spec)

    def begin_again(self, reason: str) -> None:
        """Back to the user's own setting, in one group, which is timed once more.

        That nothing is faster than one group is then not believed a few batches once more: what has misled the last
        ones, or is new, may show in few of them.
        """
        run = self._run
        run.info(f"OmniTuner: timing the run in one group again, because {reason}")
        self.close()
        self._applied.take_back()
        run.state.unfinished = True
        # As fast as one group: no reason to begin again once more, if an epoch is too short.
        self._retuning.changed(in_mid_epoch=run.strategy.epochs.is_open)
        hyperparameters = run.hyperparameters()
        self._deciding, self._known, self._is_patient = 0.0, [], True
        spec = self._space.specification(hyperparameters, self._applied.seconds_to_form)
        if max(spec.space.groups) > 1:
            run.world.connection.start_server()  # it was dismissed if one group was chosen before
        self._time(spec)

    def _time(self, spec: SearchSpec, before: FirstBatches | None = None) -> None:
        heads = [name for name in spec.space.head.options(spec.start) if name]
        is_asked = bool(heads)
        if not is_asked and max(spec.space.groups) > 1:
            heads = self._space.mergeable()
        self._spec = spec
        self._batches = FirstBatches(self._run.strategy, spec, heads, before, is_asked=is_asked)

    # --- While it trains ----------------------------------------------------------------------------------------------

    @property
    def is_timing(self) -> bool:
        """Whether batches are timed to decide by."""
        return self._batches is not None or self._postponed is not None

    def interrupted(self) -> None:
        """Something else than training comes."""
        if self._batches is not None:
            self._batches.interrupted()

    def batch_done(self, loss: Tensor | None) -> None:
        """A batch was trained: perhaps it is clear by now what is to be done.

        Args:
            loss: of the batch; None if there is none.
        """
        batches, trainer = self._batches, self._run.trainer
        if batches is None:
            self._advice.batch_done()
            return
        steps = will_step(trainer)
        if self._decision is not None:
            batches.interrupted()  # rank 0 decides beside this batch, and is slower
        # Where samples are dealt out beforehand, how many the last batch has is not known here.
        is_partial = trainer.is_last_batch and not self._run.may_change_inside
        batches.batch_done(loss, steps, counts=not is_partial)
        if not steps or trainer.is_last_batch:
            return
        if self._decision is not None:
            if self._decision.trained():
                self._poll_decision(self._decision)
        elif batches.is_due:
            self._begin_to_decide(batches)

    def ended(self) -> None:
        """The run has ended well: the strategy has its own balance again, before that ends, too."""
        self.close()
        self._advice.ended()

    def close(self) -> None:
        """Nothing is timed any more."""
        self._postponed = None
        if self._batches is not None:
            self._batches.close()
            self._batches = self._decision = None

    # --- To decide ----------------------------------------------------------------------------------------------------

    def _begin_to_decide(self, batches: FirstBatches) -> None:
        """By what the first batches have shown, on every rank: the ranks train on until rank 0 knows."""
        began, run = time.perf_counter(), self._run
        decision = self._decision = _Decision(
            batches.seen(), batches.is_early, batches.is_hurried, batches.is_last, not self._is_patient
        )
        if run.speaks:
            # What comes so early is found in no time.
            decision.found = (at_once if decision.is_early else beside)(self._finding(decision, batches.spec))
        self._leave_out(time.perf_counter() - began)
        self._poll_decision(decision)

    def _poll_decision(self, decision: _Decision) -> None:
        """Asks rank 0 whether it has decided, on every rank."""
        began, run = time.perf_counter(), self._run
        is_over = False
        if run.broadcast(int(decision.found is not None and decision.found.done())):
            self._decision = None
            is_over = self._conclude(decision)
        self._leave_out(time.perf_counter() - began)
        if is_over and run.speaks:
            run.rounds[-1].search.overhead += self._deciding
            self._deciding = 0.0

    def _leave_out(self, seconds: float) -> None:
        """So much was no training."""
        self._deciding += seconds
        self._run.leave_out(seconds)

    def _conclude(self, decision: _Decision) -> bool:
        """Does what was decided, on every rank, or goes on timing; says whether anything was."""
        run, batches = self._run, self._batches
        assert batches is not None
        command = run.broadcast_command(self._command(decision, batches.spec))
        if command is not None and command.setting.groups > 1 and not self._space.has_server():
            batches.spec = self._spec = self._space.reachable(batches.spec)
            if run.speaks:
                run.rounds.pop()
                decision.found = at_once(self._finding(decision, batches.spec))
            command = run.broadcast_command(self._command(decision, batches.spec))
        if command is not None and command.error:
            raise ConfigurationError(command.error)
        if command is not None or decision.is_last:
            self.close()
        batches.interrupted()
        if command is not None and not (self._known and command.setting == run.state.setting):
            if run.may_change_inside or command.setting == batches.spec.start:
                self.adopt(command)
            else:
                self._postponed = command
            splits = command.setting.groups == 1 and command.setting.rebalance
            if splits and decision.observation is not None:
                self._time_again(decision.observation, batches)
        if command is not None or decision.is_last:
            run.state.unfinished = self._postponed is not None
        return command is not None

    def epoch_done(self, is_last: bool) -> None:
        """What was chosen inside the epoch is adopted at its end, where it could not be before. On all ranks.

        Args:
            is_last: whether the run ends here.
        """
        if self._postponed is not None and not is_last:
            began, run = time.perf_counter(), self._run
            self.adopt(self._postponed)
            run.state.unfinished = False
            self._leave_out(time.perf_counter() - began)
            if run.speaks:
                run.rounds[-1].search.overhead += self._deciding
                self._deciding = 0.0
        self._postponed = None

    def _finding(self, decision: _Decision, spec: SearchSpec) -> Callable[[], Search | None]:
        """What rank 0 has to find: the search whose choice is clear, or is to be made in any case; None for neither."""
        observation, segments = decision.observation, list(self._run.state.segments)
        now = observation.measured if observation is not None else None
        known = [each for each in self._known if now is not None and each.ranks == now.ranks]

        def find() -> Search | None:
            if observation is None:
                return None
            search = Search(spec, observation, known, segments)
            if not (decision.is_last or verdict(search, decision.is_early, decision.may_stay, decision.is_hurried)):
                return None
            search.choice(asks=not decision.is_early)  # so early it is found in no time
            return search

        return find

    def _command(self, decision: _Decision, spec: SearchSpec) -> Command | None:
        """What rank 0 makes of it: None to go on measuring, or on another rank."""
        run = self._run
        if decision.found is None:
            return None
        try:
            search = decision.found.result()
            if search is None:
                return None
            if search.known and search.choice().setting in (run.state.setting, spec.start):
                return Command(run.setting)  # as it was forecast, or nothing is better
            self._advice.seek(search)
            run.remember(search, run.seconds)
            self._retuning.search_begins()
            return run.conclude(search)
        except OmniError as error:
            return Command(spec.start, error=str(error))

    def _time_again(self, observation: Observation, before: FirstBatches) -> None:
        """The run goes on in one group with other batches: whether it is as fast as it should be is seen in these."""
        if not self._known:
            self._known = [observation.measured]
            self._time(before.spec, before)

    def adopt(self, command: Command) -> None:
        """Trains with what was chosen, from here on. On all ranks."""
        run = self._run
        start = run.own if self._spec is None else self._spec.start  # none of a run that was resumed
        if command.setting == start and run.state.setting in (None, start):
            run.state.setting = command.setting
            run.world.dismiss_server()
        else:
            self._applied.keep()
            run.state.reference = run.batch(len(run.world.live_ranks)) / command.setting.groups
            scale = replace(command, scale=command.setting.lr / start.lr / run.state.scaled)
            self._applied.apply(run.hyperparameters(), scale)
        self._applied.watch(command.divergence_threshold, keeps=True)
        run.state.rounds, run.state.learnt_below = run.state.rounds + 1, command.learnt_below
        self._retuning.changed(in_mid_epoch=run.strategy.epochs.is_open)
        self._reports.chosen(command)


__all__ = ["ByFirstBatches"]
