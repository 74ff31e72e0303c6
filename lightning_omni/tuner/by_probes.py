"""A run is tuned by probes: before its first batch, and at ends of epochs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import replace

from lightning_omni.errors import ConfigurationError, OmniError
from lightning_omni.search import Observation, Search, SearchSpec, StepSearchSpec
from lightning_omni.search import constants as c
from lightning_omni.search.samplers import sampler_of
from lightning_omni.search.surrogate import import_libraries, load_libraries
from lightning_omni.tuner.applied import AppliedSetting
from lightning_omni.tuner.fit_space import FitSpace
from lightning_omni.tuner.hyperparameters import Hyperparameters
from lightning_omni.tuner.monitored_metric import MonitoredMetric
from lightning_omni.tuner.probing import Prober
from lightning_omni.tuner.reports import TunerReports
from lightning_omni.tuner.retuning import SPEED, Retuning
from lightning_omni.tuner.run import TunedRun
from lightning_omni.tuner.search_progress import SearchProgress
from lightning_omni.tuner.state import Command


class ByProbes:
    """Tunes a run by trying settings.

    Args:
        run: that is tuned.
        space: what may be searched in it.
        applied: what it trains with.
        retuning: is told of changes.
        reports: tell of the choice.
        monitor: the metric that the run is tuned for.
        mute_logger: class of a logger that says nothing.
    """

    def __init__(
        self,
        run: TunedRun,
        space: FitSpace,
        applied: AppliedSetting,
        retuning: Retuning,
        reports: TunerReports,
        monitor: MonitoredMetric,
        mute_logger: type,
    ) -> None:
        self._run, self._space, self._applied = run, space, applied
        self._retuning, self._reports, self._monitor = retuning, reports, monitor
        self._mute_logger = mute_logger

    def begin(self, hyperparameters: Hyperparameters) -> None:
        """The search before the first batch, or what is left of one that was interrupted."""
        run = self._run
        run.state.own, run.state.reference = None, float(run.batch(run.world.size))
        share = run.options.budget * c.BUDGET_PART
        spec = self._space.specification(hyperparameters, hyperparameters.lr, share)
        run.state.own = spec.start
        if math.isfinite(run.seconds_left):
            spec = replace(spec, seconds=share * run.seconds_left)
        if not spec.batches:
            run.problem = Search(spec, run.sampler).choice().why
            run.info(f"OmniTuner: {run.problem}")
            return
        interrupted = run.state.unfinished and run.rounds
        observations = run.rounds.pop().search.observations if interrupted else []
        self._find(hyperparameters, spec, hyperparameters.lr, observations)

    def begin_again(self, reason: str) -> None:
        """Another search, if there is time for one. Rank 0's clock counts."""
        run = self._run
        try:
            hyperparameters = run.hyperparameters()
            spec = self._space.specification(hyperparameters, hyperparameters.lr_now, share=0.0)
        except ConfigurationError:
            return  # a schedule has come to 0, say: there is nothing to multiply
        decayed = hyperparameters.lr_now / hyperparameters.lr  # bounds are of where the schedule is highest
        low, high = spec.space.lr
        spec = replace(spec, space=replace(spec.space, lr=(low * decayed, high * decayed)))
        if run.state.own is not None:
            spec = replace(spec, own=replace(run.state.own, lr=run.state.own.lr * decayed))
        seconds = self._retuning.allowance(reason)
        share = seconds * self._retuning.rate / spec.horizon if spec.horizon else 0.0
        spec = replace(spec, share=share, seconds=seconds, current=True)
        if reason != SPEED:
            spec = self._retuning.specification_for_step(spec)
        if not run.broadcast(spec.batches):
            return
        run.info(f"OmniTuner: retuning, because {reason}; the budget is {seconds:.1f} s")
        self._find(hyperparameters, spec, hyperparameters.lr_now, ())

    def _find(
        self, hyperparameters: Hyperparameters, spec: SearchSpec, lr: float, observations: Iterable[Observation]
    ) -> None:
        """Probes until rank 0 has chosen, then trains with that."""
        began, run = time.perf_counter(), self._run
        seconds, number = run.seconds, run.state.rounds
        spec = self._space.reachable(spec)
        prober = self._prober(hyperparameters, spec, lr)
        if run.speaks:  # waits for those under way: beside a probe they would be taken for a slow rank
            load_libraries(sampler_of(run.sampler).uses_scikit_optimize)
        run.state.unfinished = True
        search = self._begin(spec, observations, seconds) if run.speaks else None
        before = search.spent if search is not None else 0.0
        try:
            self._check_monitor(prober, spec)
            with SearchProgress(run.trainer, run.info) as progress:
                command = self._go_through(prober, search, progress)
        finally:
            prober.close()
        if command.error:
            raise ConfigurationError(command.error)
        self._applied.keep()
        if not isinstance(spec, StepSearchSpec) and command.setting != spec.start:
            # What was chosen belongs to the batch of one group.
            run.state.reference = spec.batch / command.setting.groups
        self._applied.apply(hyperparameters, command)
        self._applied.watch(command.divergence_threshold, keeps=True)
        run.state.unfinished, run.state.rounds = False, number + 1
        self._retuning.changed()
        ended = time.perf_counter()
        if search is not None:
            search.overhead += ended - began - (search.spent - before)
        run.leave_out(ended - began)
        self._reports.chosen(command)
        took = time.perf_counter() - ended
        run.state.reporting += took
        run.leave_out(took)

    def _prober(self, hyperparameters: Hyperparameters, spec: SearchSpec, lr: float) -> Prober:
        run, number = self._run, self._run.state.rounds
        return Prober(
            run.trainer,
            run.module,
            hyperparameters,
            lr,
            seed=run.options.seed + number,
            several=max(spec.space.groups) > 1,
            mute_logger=self._mute_logger,
            is_first=number == 0,
            further=run.options.further,
        )

    def _begin(self, spec: SearchSpec, observations: Iterable[Observation], seconds: float) -> Search:
        run = self._run
        known = run.rounds[-1].search.measured if run.rounds and not run.world.lost else []
        search = Search(spec, run.sampler, list(observations), known)
        run.remember(search, seconds)
        self._retuning.search_begins()
        return search

    def _check_monitor(self, prober: Prober, spec: SearchSpec) -> None:
        """Before time goes into probes: the metric that they are for exists. What rank 0 finds counts."""
        run, problem = self._run, ""
        if run.broadcast(self._monitor.needs_a_step(run.trainer, run.module)):
            problem = self._monitor.stepped(prober.names_of(spec.start, spec.batch))
        if problem := run.world.broadcast_text(problem):
            raise ConfigurationError(problem)

    def _go_through(self, prober: Prober, search: Search | None, progress: SearchProgress) -> Command:
        """Probe after probe, until the search is over. ``search`` is rank 0's."""
        world = self._run.world
        lost, began = set(world.lost), time.perf_counter()
        while True:
            self._run.strategy.signals.agree()
            text = json.dumps(self._next_command(search, progress).to_dict()) if search is not None else ""
            command = Command.from_dict(json.loads(world.broadcast_text(text)))
            if command.probe is None:
                return command
            if search is not None:
                search.overhead += time.perf_counter() - began  # what no probe accounts for
            observation = prober.run(command.probe, command.speeds, command.by_speed)
            began = time.perf_counter()
            if search is not None:
                search.tell(observation)
                progress.found(search, command.probe, observation)
                if newly := sorted(set(world.lost) - lost):
                    search.stop(f"rank {', '.join(map(str, newly))} was lost while tuning")

    def _next_command(self, search: Search, progress: SearchProgress) -> Command:
        """What all ranks do next."""
        try:
            import_libraries(search.sampler.uses_scikit_optimize)
            probe = search.next()
            if probe is not None:
                progress.tries(search, probe)
                return replace(Command.to_form(search, probe.setting), probe=probe)
            return self._run.conclude(search)
        except OmniError as error:
            return Command(search.spec.start, error=str(error))


__all__ = ["ByProbes"]
