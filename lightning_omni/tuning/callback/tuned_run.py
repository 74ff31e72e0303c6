"""A tuned fit: shared state, time, and reports."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning_omni.json_dataclasses import Serializable
from lightning_omni.palette import can_draw
from lightning_omni.runtime.world import World
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.strategy.lightning_internals.callbacks import loader_of
from lightning_omni.topology import Topology
from lightning_omni.trace import reaches
from lightning_omni.tuning.callback.hyperparameters import Hyperparameters
from lightning_omni.tuning.callback.losses import TrainingLosses
from lightning_omni.tuning.model.setting import Setting
from lightning_omni.tuning.report import ReportOrigin, Round, RunTimes, TuningReport
from lightning_omni.tuning.search import Choice, Dimension, Search, TrainedSegment
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.trainer import batch_size_of, check_tunable, folder_of, log
from lightning_omni.wire.steps_and_samples import ReferenceBatch

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

__all__ = ["Command", "TunedRun", "TunerOptions", "TunerReports", "TunerState", "last_choice", "strategy_of"]


@dataclass(frozen=True)
class Command(Serializable):
    """A command of rank 0 to all ranks.

    Attributes:
        speeds: samples per second of each rank, if known.
        by_speed: whether groups are formed by them.
        divergence_threshold: as in `TunerState`, as is ``learnt_below``.
        error: the message of an error that every rank raises.
    """

    setting: Setting
    speeds: Mapping[int, float] | None = None
    by_speed: bool = False
    divergence_threshold: float = math.nan
    learnt_below: float = math.nan
    why: str = ""
    error: str = ""


@dataclass
class TunerState(Serializable):
    """The state of a tuned run in checkpoints, beside its searches.

    Attributes:
        setting: the setting that the run trains with; None before a choice.
        speeds: rank and samples per second, if groups were formed by speed.
        segments: complete on rank 0 only.
        rounds: number of adopted choices.
        checked: value of ``rounds`` when speed was last compared with the forecast.
        refuted: whether groups have seemed not to pay once; next time they are given up.
        divergence_threshold: training loss above which the run has diverged; NaN if unknown.
        learnt_below: training loss below which it has learnt since the choice; NaN if unknown, or once it has.
        is_final: whether the run stays in one group: it had diverged, had learnt too slowly, or groups were too slow.
        before_trial: the setting to restore if a trial is no better; None without a trial.
        forgotten: seconds of dropped searches.
        at_target: all seconds, and those for tuning, when the target was reached.
        trained: seconds of training before the run was resumed.
        reached: seconds of training, and the monitored metric, of each validation.
    """

    setting: Setting | None = None
    own: Setting | None = None
    ranks: int = 0
    speeds: list[tuple[int, float]] = field(default_factory=list)
    unfinished: bool = False
    rounds: int = 0
    checked: int = 0
    segments: list[TrainedSegment] = field(default_factory=list)
    refuted: bool = False
    divergence_threshold: float = math.nan
    learnt_below: float = math.nan
    is_final: bool = False
    before_trial: Setting | None = None
    losses: TrainingLosses = field(default_factory=lambda: TrainingLosses(math.nan))
    samples: float = 0.0
    forgotten: float = 0.0
    at_target: tuple[float, float] | None = None
    trained: float = 0.0
    reached: list[tuple[float, float]] = field(default_factory=list)

    @property
    def scaled(self) -> float:
        return self.setting.lr / self.own.lr if self.setting is not None and self.own is not None else 1.0


@dataclass(frozen=True)
class TunerOptions:
    """The arguments of `OmniTunerHooks`."""

    target: float | None
    monitor: str
    is_lower_better: bool
    budget: float
    space: Mapping[str, Any]
    further: tuple[Dimension, ...]
    retune_every: int | None
    seed: int

    def is_reached(self, value: float) -> bool:
        return self.target is not None and reaches("loss" if self.is_lower_better else "", value, self.target)


class TunedRun:
    """One fit.

    Attributes:
        rounds: all searches with the present number of ranks, complete on rank 0; ``choice`` and ``folder`` (of the
            report) are on rank 0 only.
        has_ended_epoch: whether an epoch has just ended, which the Trainer does not count yet.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, options: TunerOptions, info: Callable[[str], None]
    ) -> None:
        self.trainer, self.module, self.options, self.info = trainer, module, options, info
        assert isinstance(trainer.strategy, OmniStrategyHooks)
        self.strategy: OmniStrategyHooks = trainer.strategy
        self.state = TunerState()
        self.rounds: list[Round] = []
        self.choice: Choice | None = None
        self.problem = ""
        self.folder: Path | None = None
        self.hosts: tuple[str, ...] = ()
        self._began = 0.0
        self.has_ended_epoch = False

    @property
    def world(self) -> World:
        return self.strategy.world

    @property
    def own(self) -> Setting:
        assert self.state.own is not None
        return self.state.own

    @property
    def setting(self) -> Setting:
        assert self.state.setting is not None
        return self.state.setting

    @property
    def is_rank_zero(self) -> bool:
        return bool(self.trainer.is_global_zero)

    def broadcast(self, number: int) -> int:
        """Return rank 0's number, 0 or more."""
        return self.world.all_reduce_max([number if self.is_rank_zero else 0])[0]

    def broadcast_command(self, command: Command | None) -> Command | None:
        text = self.world.broadcast_text(json.dumps(command.to_dict()) if command is not None else "")
        return Command.from_dict(json.loads(text)) if text else None

    def hyperparameters(self) -> Hyperparameters:
        check_tunable(self.trainer)
        return Hyperparameters.of(self.trainer)

    # --- Searches -----------------------------------------------------------------------------------------------------

    @property
    def searches(self) -> list[Search]:
        return [each.search for each in self.rounds]

    @property
    def may_change_inside(self) -> bool:
        """Return whether groups can change inside an epoch: not if its samples were distributed beforehand."""
        return self.strategy.parts.epochs.leases is not None

    def may_change_again(self, epoch: int) -> bool:
        return epoch + (not self.may_change_inside) < self.epochs

    def conclude(self, search: Search) -> Command:
        """Record rank 0's search; return the command for its choice, in groups of similar speed if that is faster."""
        self.rounds.append(Round(search, self.trainer.current_epoch, self.seconds))
        self.choice, self.state.segments = search.choice(), search.segments
        setting = replace(self.choice.setting, groups=min(self.choice.setting.groups, len(self.world.live_ranks)))
        speeds = search.profile.speeds
        topology = search.prediction(setting).topology if len(speeds) >= setting.groups else None
        return Command(
            setting,
            speeds=dict(zip(topology.ranks, speeds, strict=True)) if topology is not None else None,
            by_speed=topology is not None and topology != Topology.of(topology.ranks, setting.groups),
            divergence_threshold=search.divergence_threshold,
            learnt_below=search.learnt_below,
            why=self.choice.why,
        )

    def renew_choice(self) -> None:
        self.choice = last_choice(self.searches, self.state) if self.is_rank_zero else None

    def forget(self) -> None:
        """Drop all findings: they do not hold here, or are not to be used."""
        self.state = replace(
            self.state,
            setting=None,
            speeds=[],
            unfinished=False,
            segments=[],
            refuted=False,
            divergence_threshold=math.nan,
            learnt_below=math.nan,
            is_final=False,
            before_trial=None,
            losses=TrainingLosses(math.nan),
            forgotten=self.spent,
        )
        self.rounds, self.choice = [], None

    # --- Time ---------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self) -> None:
        self.state.trained, self._began = self.seconds, 0.0

    def exclude_seconds(self, seconds: float) -> None:
        self._began += seconds

    @property
    def seconds(self) -> float:
        """Return the seconds of training so far, without searches."""
        return self.state.trained + (time.perf_counter() - self._began if self._began else 0.0)

    @property
    def spent(self) -> float:
        return self.state.forgotten + sum(each.overhead for each in self.searches)

    @property
    def times(self) -> RunTimes:
        return RunTimes(self.seconds, self.spent, self.state.at_target)

    # --- Length -------------------------------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        return int(self.trainer.accumulate_grad_batches)

    def batch(self, ranks: int) -> int:
        return ReferenceBatch(ranks, batch_size_of(loader_of(self.trainer)), self.window).samples

    @property
    def batches(self) -> float:
        batches = self.trainer.fit_loop.max_batches
        return max(1, batches) if math.isfinite(batches) else 1

    @property
    def epochs(self) -> float:
        most, steps = self.trainer.max_epochs, self.strategy.parts.epochs.run.limits.max_steps
        limits = [] if most in (None, -1) else [float(most or 0)]
        limits += [] if steps == -1 else [steps * self.window / self.batches]
        return float(min(limits, default=max(c.UNLIMITED, 2 * (self.trainer.current_epoch + 1))))

    @property
    def samples_per_epoch(self) -> float:
        leases = self.strategy.parts.epochs.leases  # which hold the samples of lost ranks, too
        ranks = len(self.world.live_ranks) if leases is None else leases.world_size
        return self.batches * self.batch(ranks) / self.window

    @property
    def horizon(self) -> float:
        """Return the samples that are left to train with a setting chosen now."""
        epochs = self.strategy.parts.epochs
        begun = self.trainer.current_epoch + self.has_ended_epoch  # Lightning counts it a little later
        begun += not self.may_change_inside  # the timed epoch does not change
        trained = float(epochs.samples) if epochs.is_open and self.may_change_inside else 0.0
        return max(0.0, (self.epochs - begun) * self.samples_per_epoch - trained)

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.state.to_dict(),
            "searches": [each.to_dict() for each in self.rounds],
            "trained": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = TunerState.from_dict(state)
        self.rounds = [Round.from_dict(each) for each in state["searches"]]
        self.renew_choice()
        if self._began:  # in a run, as after a learning-rate finder: the state has the time so far
            self.begin()


def last_choice(searches: list[Search], state: TunerState) -> Choice | None:
    if searches and state.is_final and state.setting is not None:
        return Choice(state.setting, "what was chosen before has been given up")
    return searches[-1].choice() if searches else None


def strategy_of(trainer: Trainer) -> OmniStrategyHooks:
    return cast(OmniStrategyHooks, trainer.strategy)


# --- Reports: on the console, in the loggers, and as files in the first logger's folder -------------------------------

_log = logging.getLogger(__name__)


class TunerReports:
    def __init__(self, run: TunedRun) -> None:
        self._run = run

    def chosen(self, command: Command) -> None:
        run, setting = self._run, command.setting
        run.info(f"OmniTuner: trains with {setting}: {command.why}")
        metrics = {
            "omni/groups": float(setting.groups),
            "omni/momentum": setting.momentum,
            "omni/lr": setting.lr,
            **run.times.metrics,
        }
        if run.rounds and (noise_scale := run.searches[-1].observation.noise_scale) is not None:
            metrics["omni/noise_scale"] = noise_scale
            if (control := run.world.control) is not None:  # observers of the server see it
                control.metrics = {**control.metrics, "omni/noise_scale": noise_scale}
        log(run.trainer, metrics)  # pictures would delay all ranks inside an epoch; they are drawn when the run ends

    def validated(self, value: float) -> None:
        run, options = self._run, self._run.options
        run.state.reached.append((run.seconds, value))
        if options.is_reached(value) and run.state.at_target is None:
            run.state.at_target = run.times.total, run.spent
            run.info(f"OmniTuner: {options.monitor}={value:.4g}: {run.times.sentence}")
            log(run.trainer, run.times.metrics)

    def ended(self) -> None:
        run, options = self._run, self._run.options
        run.folder = folder_of(run.trainer)
        if run.rounds and run.is_rank_zero:  # a checkpoint gives all ranks the earlier searches
            results = run.times, tuple(run.state.reached), ReportOrigin.now(run.hosts)
            self._report(TuningReport(tuple(run.rounds), options.target, options.monitor, *results))
        values = [value for _, value in run.state.reached if not math.isnan(value)]
        if options.target is None or any(map(options.is_reached, values)):
            return
        best = (min(values) if options.is_lower_better else max(values)) if values else None
        why = "it was NaN in every validation" if run.state.reached else "it was never logged in a validation"
        why = f"the best was {best:.4g}" if best is not None else why
        run.info(f"OmniTuner: {options.monitor} has not reached {options.target:.4g}: {why}")

    def _report(self, report: TuningReport) -> None:
        """Log the numbers, and write files and pictures; an error in them does not end the run."""
        run = self._run
        try:
            log(run.trainer, report.metrics)
            run.info(f"OmniTuner: {report.statement}")
            if run.folder is None:
                run.info("OmniTuner: no report was written, because no logger has a folder on this machine")
                return
            files = report.save(run.folder)
            run.info(f"OmniTuner: the report is {next(each for each in files if each.suffix == '.html')}")
            for logger in run.trainer.loggers if can_draw() else ():
                add_figure = getattr(getattr(logger, "experiment", None), "add_figure", None)
                if callable(add_figure):
                    add_figure("omni/tuning", report.figure(-1), global_step=run.trainer.global_step)
        except Exception as error:
            _log.warning(
                "OmniTuner: the report could not be written to %s: %s: %s", run.folder, type(error).__name__, error
            )
