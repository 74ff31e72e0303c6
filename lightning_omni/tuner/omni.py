"""`OmniTuner`: Lightning's hooks, translated into a search and its probes. What is decided is not known here.

Written once for both of Lightning's namespaces, as the strategy is (see ``pytorch_lightning.py`` and ``lightning.py``).

Rule 1: rank 0 decides, and tells the others before anything is done; all ranks do the same.
Rule 2: a search ends with the run's own state on every rank, and then the choice is applied.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import override

from lightning_omni.checks import check_kind, check_number, check_whole
from lightning_omni.errors import ConfigurationError, OmniError, UnsupportedError
from lightning_omni.methods import METHODS, method_named, text_of
from lightning_omni.optimizer.balance import Balance
from lightning_omni.optimizer.run_state import RollbackPoint
from lightning_omni.performance.forecast import Setting
from lightning_omni.protocol.all_reduce import EXACT
from lightning_omni.protocol.all_reduce import text_of as text_of_all_reduce
from lightning_omni.protocol.progress import ReferenceBatch
from lightning_omni.protocol.split import check_servers
from lightning_omni.report import Round, RunTimes, TuningReport
from lightning_omni.search import (
    Choice,
    Observation,
    Probe,
    Search,
    SearchSpec,
    Space,
    StepSearchSpec,
)
from lightning_omni.search import space as searched
from lightning_omni.search.choice import verdict
from lightning_omni.search.samplers import sampler_of
from lightning_omni.search.space import apply_further
from lightning_omni.search.surrogate import check_libraries, import_libraries, load_libraries
from lightning_omni.serialization import Serializable
from lightning_omni.strategy._private import will_step
from lightning_omni.strategy.arguments import refuses_unknown
from lightning_omni.strategy.declared import loader_of
from lightning_omni.strategy.hooks import OmniStrategyHooks, strategy_of
from lightning_omni.strategy.namespaces import refuse_other_namespace
from lightning_omni.topology import Topology
from lightning_omni.trace import reaches
from lightning_omni.tuner import _private
from lightning_omni.tuner.communicating import communicate, communication_of
from lightning_omni.tuner.divergence import DivergenceGuard, loss_in
from lightning_omni.tuner.first_batches import FirstBatches
from lightning_omni.tuner.hyperparameters import Hyperparameters
from lightning_omni.tuner.loggers import log
from lightning_omni.tuner.monitored_metric import MonitoredMetric
from lightning_omni.tuner.probing import Prober, batch_size_of, probed_loader
from lightning_omni.tuner.search_progress import SearchProgress
from lightning_omni.tuner.throughput import RunThroughput, samples_in

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import Callback as _CallbackBase
else:
    _CallbackBase = object

_log = logging.getLogger(__name__)

_AT_START, _UNDER_WAY = 0.4, 0.4
"""The parts of the budget for the search before the first batch, and for the first retuning of the run under way. More
is earned while the run trains: so a run that reaches its target early has not paid for all of its epochs."""
_UNLIMITED = 10
"""Epochs that a run without limits is taken to train."""
_EARLY = 0.25
"""Up to this part of the run it counts as early: the steps that are best then are best for most of it."""
_SOON = 3.0
"""How many times as long as now the run may last until the target for this to be near."""
_REASONS = _NONE, _UNDER_WAY_ALREADY, _SPEED, _STALLED = (
    "",
    "the run is under way",
    "the ranks do not train as fast as before",
    "the target would not be reached in time",
)
_USUAL = ("async_sgd", "fp32", False, "fp32")
"""Method, wire format, overlap and all-reduce format of a strategy whose user has chosen none."""
_COMMUNICATION = ("method", "wire", "overlap", "all_reduce")
"""Dimensions of how gradients and weights travel."""
_MOST_SEED = (1 << 32) - (1 << 16)
"""Libraries take seeds below 2³², and a search adds small numbers to its own."""
_CHANGED = 0.2
"""Speed that has changed by more than this part is a reason to search again."""


@dataclass(frozen=True)
class Command(Serializable):
    """What rank 0 says is to be done next.

    Attributes:
        setting: to train with: for a probe, or from now on.
        probe: to carry out; None if the search is over.
        speeds: samples per second of each rank, if they are known.
        by_speed: whether groups are formed by them.
        scale: by what learning rates are multiplied, if the search is over.
        divergence_threshold: the training loss above which the run has diverged with that setting; NaN if unknown.
        why: of the choice.
        error: why nothing can go on; every rank raises it.
    """

    setting: Setting
    probe: Probe | None = None
    speeds: Mapping[int, float] | None = None
    by_speed: bool = False
    scale: float = 1.0
    divergence_threshold: float = math.nan
    why: str = ""
    error: str = ""


@dataclass
class TunerState(Serializable):
    """What checkpoints keep of a tuned run, beside its searches.

    Attributes:
        setting: that it trains with; None before a search has ended.
        own: the user's own setting.
        reference: samples of the batch that momentum and learning rate belong to.
        scaled: by what the user's learning rates were multiplied.
        ranks: how many the run has.
        speeds: rank and samples per second, of those by whose speed the groups were formed.
        unfinished: whether a search is under way.
        rounds: searches that were begun.
        forgotten: seconds of searches that are not kept.
        reporting: seconds that writing reports took.
        at_target: all seconds, and those of them for tuning, when the target was reached; None before that.
        trained: seconds of training before the run was resumed.
        reached: seconds of training, and the monitored metric, of each validation.
        at_epochs: the metric at each epoch's end.
    """

    setting: Setting | None = None
    own: Setting | None = None
    reference: float = 0.0
    scaled: float = 1.0
    ranks: int = 0
    speeds: list[tuple[int, float]] = field(default_factory=list)
    unfinished: bool = False
    rounds: int = 0
    forgotten: float = 0.0
    reporting: float = 0.0
    at_target: tuple[float, float] | None = None
    trained: float = 0.0
    reached: list[tuple[float, float]] = field(default_factory=list)
    at_epochs: list[float] = field(default_factory=list)


def _text_of_wire(given: Any) -> str:
    """As a setting has it; empty for a format that is no name."""
    if isinstance(given, Mapping):
        given = "/".join(str(given.get(way, "fp32")) for way in ("push", "pull"))
    return given if isinstance(given, str) else ""


class OmniTunerHooks(_CallbackBase):
    """Finds the groups, method, momentum and learning rate that are expected to be at the target first, and trains so.

    The run begins as it would without it, in one group, and its first batches are timed: how long each rank computes,
    and how long the all-reduce takes. From these it forecasts the samples per second of every number of groups, method,
    number of local steps and wire format; what each of them costs in samples is known from other tasks. As soon as one
    is expected to be clearly faster, the run goes on with it, in mid-epoch: groups are formed, momentum and learning
    rate are set, and batches are split in proportion to the ranks' speeds where that pays. Where nothing is, nothing
    changes. No batch is thrown away.

    With ``search="bayes"`` and the others it trains a few batches with one setting after another instead, before the
    first batch and again at ends of epochs, always from the same snapshot and back to it: weights, optimizer state,
    data order and RNG state are those of the run when a search is over.

    It needs `OmniStrategy`, one optimizer, automatic optimization, and one DataLoader over a map-style data set.

    Args:
        target: value of ``monitor`` that is wanted; None to have the lowest loss when the run ends.
        monitor: name of a logged metric, read when it is validated.
        budget: part of the run's time that probes may take, 0 or more and less than 1: 0.1 is a tenth. Two fifths of it
            are for the search before the first batch, two fifths for the first retuning of the run under way, and what
            comes later has to be earned by then. 0 tunes nothing.
        search: ``"forecast"`` times the run's own first batches and makes no probes; ``"bayes"`` asks scikit-optimize
            for the setting whose predicted time promises most, starting from theory; ``"omnivore"`` is the published
            algorithm; ``"grid"`` and ``"random"`` are what their names say. With ``data="static"`` groups cannot change
            in mid-epoch, and ``"bayes"`` takes the place of ``"forecast"``.
        space: what is searched: any of ``"groups"``, ``"method"``, ``"period"``, ``"wire"``, ``"overlap"``,
            ``"all_reduce"``, ``"momentum"``, ``"lr"``, ``"rebalance"``, each a value, a list, or the least and the
            largest value. By default groups are powers of two and the number of ranks, momentum 0 to 0.95 (or yours, if
            it is more), the learning rate what goes with them, and batches may be split by speed. How groups exchange,
            and how their members average gradients, is searched by ``"forecast"`` unless you have chosen it
            (``method=``, ``wire=``, ``overlap=`` or ``all_reduce=`` of the strategy).
        retune_every: epochs between two checks whether the setting is still the best; None for none.
        mode: whether ``monitor`` is better if it is smaller; by its name if None ("loss" or "error" in it).
        seed: of the search, and of the samples that probes train on.

    Attributes:
        choice: what was chosen last, a `lightning_omni.search.Choice`; on rank 0.
        searches: all searches of this fit, on rank 0.
        problem: why nothing was searched.

    Raises:
        ConfigurationError: an argument is wrong; the message names it.

    Example:
        >>> from lightning_omni import OmniTuner
        >>> tuner = OmniTuner(target=0.88, monitor="val_acc")  # Trainer(strategy=OmniStrategy(), callbacks=[tuner])

    References:
        Hadjis et al. 2016, "Omnivore", for the objective and ``search="omnivore"``.
    """

    rank_zero_info: Callable[[str], None]
    mute_logger: type

    @refuses_unknown
    def __init__(
        self,
        target: float | None = None,
        monitor: str = "val_loss",
        budget: float = 0.1,
        search: str = "forecast",
        space: Mapping[str, Any] | None = None,
        retune_every: int | None = 1,
        mode: Literal["min", "max"] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if target is not None:
            check_number("target", target, "a finite number, or None", -sys.float_info.max, sys.float_info.max)
        check_kind("monitor", monitor, str, "the name of a metric that is logged")
        check_number("budget", budget, "the part of the run's time that probes may take, as 0.1", 0, below=1)
        sampler = sampler_of(search)
        check_kind("space", space, (Mapping, type(None)), "a dictionary, or None")
        if retune_every is not None:
            check_whole("retune_every", retune_every, "a number of epochs, or None", low=1)
        if mode not in (None, "min", "max"):
            raise ConfigurationError(f'mode={mode!r}: pass "min", "max" or None')
        check_whole("seed", seed, "a whole number from 0 up", high=_MOST_SEED)
        Space.of(dict(space or {}), ranks=1 << 30)
        if budget > 0:
            check_libraries(sampler.uses_scikit_optimize)
        self.target, self.monitor, self.budget, self.search = target, monitor, budget, search
        self.retune_every, self.seed = retune_every, seed
        self._space = dict(space or {})
        self._further = Space.of(self._space, ranks=1 << 30).further
        self._mode = mode or ("min" if "loss" in monitor or "error" in monitor else "max")
        self._fitting: OmniStrategyHooks | None = None
        self._call: Callable[[], None] | None = None
        self._forget()

    def _forget(self) -> None:
        """Nothing is known of a fit."""
        self.choice: Choice | None = None
        self.problem = ""
        self._state = TunerState()
        self._rounds: list[Round] = []
        self._folder: Path | None = None
        self._throughput = RunThroughput()
        self._totals: dict[int, tuple[float, float]] = {}
        self._guard: DivergenceGuard | None = None
        self._before_choice: RollbackPoint | None = None
        self._first: FirstBatches | None = None
        self._first_spec: SearchSpec | None = None
        self._deciding = 0.0
        self._changed_in = -1
        self._began = self._rate = self._seconds_before = self._exchanged = 0.0
        self._samples_an_epoch = self._epochs_planned = 0.0
        self._monitor = MonitoredMetric(self.monitor, self.target is not None)

    @property
    def searches(self) -> list[Search]:
        """All searches of this fit, on rank 0."""
        return [each.search for each in self._rounds]

    # --- Hooks --------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds the strategy."""
        refuse_other_namespace(self, trainer, "tuner")
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, OmniStrategyHooks):
            raise ConfigurationError(
                f"OmniTuner forms compute groups, which {type(trainer.strategy).__name__} has not;"
                " pass Trainer(strategy=OmniStrategy())"
            )
        trainer.strategy.check_whole("OmniTuner forms other groups while they train")
        trainer.strategy.joined.check_regroup()
        self._leave()
        self._forget()
        self._fitting, self._call = trainer.strategy, partial(self._before_first_batch, trainer, pl_module)
        self._strategy.restore_arrangement()  # an earlier fit of this strategy may have been tuned
        learns = sampler_of(self.search).learns_from_run and self._strategy.epochs.data.kind == "dynamic"
        if "all_reduce" in self._space and not (learns and self._strategy.joined.reduction.format == EXACT):
            raise ConfigurationError(
                f'space={{"all_reduce": {self._space["all_reduce"]!r}}}: it is forecast from the first batches, whose'
                ' gradients are averaged as they are; pass search="forecast", and leave data= and all_reduce= of the'
                " strategy out"
            )
        if self.budget and learns:
            self._strategy.begin_in_one_group()
        self._strategy.on_ready.append(self._call)

    def on_omni_launch(self, trainer: Trainer) -> None:
        """What a search needs comes up while the other ranks start: a server for several groups, and slow libraries."""
        if self.budget > 0:
            needed = sampler_of(self.search).uses_scikit_optimize
            threading.Thread(target=load_libraries, args=(needed,), name="omni-libraries", daemon=True).start()
            if self._may_form_groups(trainer):
                strategy_of(trainer).prepare_server()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The server is needed, or it is not."""
        self._monitor.check_validated(trainer)
        if self._may_form_groups(trainer) and not self._why_not(trainer, 2):
            strategy_of(trainer).joined.start_server()
        else:
            strategy_of(trainer).joined.dismiss_server()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Batches come."""
        self._throughput.go()
        if self._first is not None:
            self._first.interrupted()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """This is no training."""
        self._throughput.pause()
        if self._first is not None:
            self._first.interrupted()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Where no push is applied any more, the epoch ends early."""
        if self._guard is not None and self._guard.gives_up:
            _private.skip_the_rest(trainer)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A gradient is there, and has been reduced."""
        if self._first is not None:
            self._first.backward_done()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Whether the run goes well with what was chosen, and how fast it is."""
        if not self.problem:
            self._throughput.batch_done(samples_in(trainer, batch_idx))
        if self._first is not None:
            steps = will_step(trainer)
            self._first.batch_done(loss_in(outputs, int(trainer.accumulate_grad_batches)), steps)
            if steps and self._first.is_due and not trainer.is_last_batch:
                self._evaluate(trainer, pl_module)
        if self._guard is not None:
            world = self._strategy.joined
            loss = loss_in(outputs, int(trainer.accumulate_grad_batches))
            before, self._exchanged = self._exchanged, world.channel.traffic.seconds
            applied = world.core.heard.applied if world.channel.traffic.seconds != before else None
            self._guard.batch_done(loss, world.executor.exchanges, applied)

    @override
    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Which metrics a validation logs."""
        self._monitor.sanity_checked(trainer.callback_metrics)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """How far the run is from its target."""
        value = trainer.callback_metrics.get(self.monitor)
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._throughput.go()
        if self._monitor.is_open:
            problem = self._monitor.validated(trainer, pl_module, trainer.callback_metrics)
            world = self._strategy.joined  # groups that train have the same metrics, at different times
            if bool(problem) if world.is_computing else world.agree([trainer.is_global_zero and bool(problem)])[0]:
                raise ConfigurationError(problem or f"monitor={self.monitor!r}: no metric of that name is logged")
        if value is None:
            return
        self._state.reached.append((self._seconds, float(value)))
        if self.target is not None and self._is_reached(float(value)) and self._state.at_target is None:
            self._state.at_target = self._times.total, self._spent
            self.rank_zero_info(f"OmniTuner: {self.monitor}={float(value):.4g}: {self._times.sentence}")
            for logger in trainer.loggers:
                logger.log_metrics(self._times.metrics, step=trainer.global_step)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A synchronization point: is the setting still the best?"""
        epoch = trainer.current_epoch + 1
        if self.problem:
            return
        if self._state.reached:
            self._state.at_epochs.append(self._state.reached[-1][1])
        rate, self._rate = self._rate, self._measure_rate(trainer)
        if self._changed_in == trainer.current_epoch:  # part of which was trained with another setting
            self._rate = 0.0
        if self._has_diverged(trainer):
            self._roll_back(trainer)
            return
        if (
            self.retune_every is None
            or self._state.setting is None
            or epoch % self.retune_every
            or trainer.should_stop
            or epoch >= self._epochs(trainer)
        ):
            return
        reason = self._reason(trainer, epoch, rate)
        if reason and self._learns_from_run:
            self._watch_again(trainer, reason)
        elif reason:
            self._retune(trainer, pl_module, reason)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says if the target was not reached; the report gets to know how fast the run was with what was chosen."""
        if self._folder is not None:
            self._report(trainer, self._folder)
        if self.target is not None and not any(self._is_reached(value) for _, value in self._state.reached):
            values = [value for _, value in self._state.reached]
            best = (min(values) if self._mode == "min" else max(values)) if values else None
            told = f"the best was {best:.4g}" if best is not None else "it was never logged in a validation"
            self.rank_zero_info(f"OmniTuner: {self.monitor} has not reached {self.target:.4g}: {told}")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """No hook of ours stays behind."""
        self._leave()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """No hook of ours stays behind."""
        self._leave()

    @override
    def state_dict(self) -> dict[str, Any]:
        """What was observed, as plain lists: a resumed run replays it and goes on where it was."""
        return {
            **self._state.to_dict(),
            "searches": [each.to_dict() for each in self.searches],
            "when": [(each.epoch, each.seconds_run) for each in self._rounds],
            "after": [sorted(each.measured_after.items()) for each in self._rounds],
            "spent": self._spent,
            "trained": self._seconds,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Before the first batch it is known what is left to do."""
        self._state = TunerState.from_dict(state_dict)
        rounds = zip(state_dict["searches"], state_dict["when"], state_dict["after"], strict=True)
        self._rounds = [Round(Search.from_dict(each), when[0], when[1], dict(after)) for each, when, after in rounds]

    # --- When ---------------------------------------------------------------------------------------------------------

    def _before_first_batch(self, trainer: Trainer, module: LightningModule) -> None:
        """The groups stand, and no batch has begun."""
        world = self._strategy.joined
        self._strategy.stash_arrangement()
        self._began = time.perf_counter()
        try:
            hyperparameters = self._read_hyperparameters(trainer)
        except (ConfigurationError, UnsupportedError) as error:
            self.problem = str(error)
            self.rank_zero_info(f"OmniTuner: nothing is tuned: {self.problem}")
            self._strategy.form_as_arranged()
            world.dismiss_server()
            return
        if self._state.setting is not None and self._state.ranks != self._strategy.joined.size:
            self._begin_again(hyperparameters)
        if self._state.setting is not None:
            self._go_on(trainer, self._state.setting)
        else:
            self._state.ranks = self._strategy.joined.size
            if self._learns_from_run:
                self._watch_first(trainer, hyperparameters)
            else:
                self._tune_first(trainer, module, hyperparameters)
        self._began = time.perf_counter()
        self._seconds_before = self._state.trained

    def _begin_again(self, hyperparameters: Hyperparameters) -> None:
        """A run is resumed with another number of ranks: what was found of the others does not hold for these."""
        self.rank_zero_info(
            f"OmniTuner: the run is resumed with {self._strategy.joined.size} ranks instead of {self._state.ranks}, and"
            " searches once more"
        )
        if self._state.own is not None:
            hyperparameters.set_momentum(self._state.own.momentum)
        hyperparameters.scale(1 / self._state.scaled)
        self._state = replace(self._state, setting=None, scaled=1.0, speeds=[], unfinished=False, forgotten=self._spent)
        self._rounds = []

    def _go_on(self, trainer: Trainer, setting: Setting) -> None:
        """A run is resumed with what was chosen; rates and momentum are in the checkpoint."""
        if self._state.unfinished and self._rounds:  # a retuning was interrupted: it is done again when it is due
            self._state.forgotten += self._rounds.pop().search.spent
        self._state.unfinished = False
        self._regroup(trainer, setting, dict(self._state.speeds) or None, bool(self._state.speeds))

    def _tune_first(self, trainer: Trainer, module: LightningModule, hyperparameters: Hyperparameters) -> None:
        reference = float(self._batch(trainer, self._strategy.joined.size))
        self._state = replace(self._state, own=None, reference=reference)
        spec = self._spec(trainer, hyperparameters, hyperparameters.lr, share=self.budget * _AT_START)
        self._state.own = spec.start
        if not spec.batches:
            self.problem = Search(spec, self._sampler).choice().why
            self.rank_zero_info(f"OmniTuner: {self.problem}")
            return
        interrupted = self._state.unfinished and self._rounds
        observations = self._rounds.pop().search.observations if interrupted else []
        self._find(trainer, module, hyperparameters, spec, hyperparameters.lr, observations)

    # --- The run's own first batches ----------------------------------------------------------------------------------

    @property
    def _sampler(self) -> str:
        """Name of the sampler: a run whose samples are dealt out beforehand cannot change its groups in mid-epoch."""
        can_change = self._strategy.epochs.leases is not None
        return self.search if can_change or not sampler_of(self.search).learns_from_run else "bayes"

    @property
    def _learns_from_run(self) -> bool:
        return sampler_of(self._sampler).learns_from_run

    def _watch_first(self, trainer: Trainer, hyperparameters: Hyperparameters) -> None:
        """The run begins in one group, with the user's own setting, and is timed."""
        self._strategy.form_one()
        self._state.own, self._state.reference = None, float(self._batch(trainer, self._strategy.joined.size))
        spec = self._spec(trainer, hyperparameters, hyperparameters.lr, share=self.budget)
        self._state.own, self._first_spec = spec.start, spec
        if not self.budget or self._strategy.joined.size == 1:
            self.problem = "budget=0" if not self.budget else "one rank is one group"
            self.rank_zero_info(f"OmniTuner: nothing is tuned: {self.problem}")
            self._strategy.joined.dismiss_server()
            return
        self._first = FirstBatches(self._strategy, spec.start, spec.space.all_reduce)

    def _watch_again(self, trainer: Trainer, reason: str) -> None:
        """Back to the user's own setting, in one group, which is timed once more."""
        assert self._state.own is not None
        self.rank_zero_info(f"OmniTuner: times the run in one group again, because {reason}")
        hyperparameters = self._read_hyperparameters(trainer)
        self._strategy.form_one()
        hyperparameters.set_momentum(self._state.own.momentum)
        hyperparameters.scale(1 / self._state.scaled)
        communicate(self._strategy, communication_of(self._state.own, self._strategy.joined.communication))
        reference = float(self._batch(trainer, len(self._strategy.joined.live_ranks)))
        self._state = replace(self._state, scaled=1.0, reference=reference)
        self._first_spec = self._spec(trainer, hyperparameters, hyperparameters.lr, share=self.budget)
        self._deciding = 0.0
        self._guard = self._before_choice = None  # of a choice that is taken back
        self._first = FirstBatches(self._strategy, self._first_spec.start, self._first_spec.space.all_reduce)

    def _evaluate(self, trainer: Trainer, module: LightningModule) -> None:
        """Decides by what the first batches have shown, on every rank, or goes on timing them."""
        assert self._first is not None
        assert self._state.own is not None
        began, first, world = time.perf_counter(), self._first, self._strategy.joined
        observation, command = first.seen(), None
        if trainer.is_global_zero and observation is not None:
            command = self._decide(trainer, observation, first.is_last)
        said = world.tell(json.dumps(command.to_dict()) if command is not None else "")
        if said:
            command = Command.from_dict(json.loads(said))
            if command.error:
                raise ConfigurationError(command.error)
        if said or first.is_last:
            first.close()
            self._first = None
        first.interrupted()
        if command is not None:
            self._adopt(trainer, module, command)
            self._publish(trainer, command)
        took = time.perf_counter() - began
        if trainer.is_global_zero and command is not None:
            self._rounds[-1].search.overhead += self._deciding + took
        self._deciding, self._began = self._deciding + took, self._began + took

    def _decide(self, trainer: Trainer, observation: Observation, is_last: bool) -> Command | None:
        """What rank 0 makes of it: None to go on measuring."""
        spec = self._first_spec
        assert spec is not None
        try:
            search = Search(spec, self._sampler, [observation])
            if not (is_last or verdict(search)):
                return None
        except OmniError as error:
            return Command(spec.start, error=str(error))
        search.next()  # it is over
        self._rounds.append(Round(search, trainer.current_epoch, self._seconds))
        self._totals = {}
        return self._conclusion(search)

    def _adopt(self, trainer: Trainer, module: LightningModule, command: Command) -> None:
        """Trains with what was chosen, from this batch on."""
        spec = self._first_spec
        assert spec is not None
        if command.setting == spec.start:
            self._state.setting = command.setting
            self._strategy.joined.dismiss_server()
        else:
            self._before_choice = RollbackPoint.of(module, trainer.optimizers, self._strategy.joined.core)
            self._state.reference = spec.batch / command.setting.groups
            self._apply(trainer, self._read_hyperparameters(trainer), command)
        if math.isfinite(command.divergence_threshold) and self._before_choice is not None:
            self._guard = DivergenceGuard(command.divergence_threshold)
        self._state.rounds, self._rate = self._state.rounds + 1, 0.0
        self._changed_in = trainer.current_epoch

    def _retune(self, trainer: Trainer, module: LightningModule, reason: str) -> None:
        """Another search, if there is time for one. Rank 0's clock counts."""
        try:
            hyperparameters = self._read_hyperparameters(trainer)
            spec = self._spec(trainer, hyperparameters, hyperparameters.lr_now, share=0.0)
        except ConfigurationError:
            return  # a schedule has come to 0, say: there is nothing to multiply
        decayed = hyperparameters.lr_now / hyperparameters.lr  # bounds are of where the schedule is highest
        low, high = spec.space.lr
        spec = replace(spec, space=replace(spec.space, lr=(low * decayed, high * decayed)))
        if self._state.own is not None:
            spec = replace(spec, own=replace(self._state.own, lr=self._state.own.lr * decayed))
        seconds = self._allowance(spec, reason)
        share = seconds * self._rate / spec.horizon if spec.horizon else 0.0
        spec = replace(spec, share=share, seconds=seconds, current=True)
        if reason != _SPEED:
            spec = spec.for_step(self._first_loss, self._ends_soon and not trainer.lr_scheduler_configs)
        if not self._strategy.joined.agree([spec.batches if trainer.is_global_zero else 0])[0]:
            return
        self.rank_zero_info(f"OmniTuner: retunes, because {reason}; there are {seconds:.1f} s for it")
        self._find(trainer, module, hyperparameters, spec, hyperparameters.lr_now, ())

    def _allowance(self, spec: SearchSpec, reason: str) -> float:
        """Seconds for a search: what was earned so far, or what was reserved."""
        earned = self.budget * (self._seconds + self._spent) - self._spent
        if reason != _UNDER_WAY_ALREADY or not self._rate:
            return earned
        whole = min(self._epochs_planned * self._samples_an_epoch / self._rate, self._expected)
        return max(earned, self.budget * (_AT_START + _UNDER_WAY) * whole - self._spent)

    @property
    def _first_loss(self) -> float | None:
        """The training loss with which the run began; rank 0 knows it from its first probe."""
        tried = [each for search in self.searches for each in search.tried if each.losses]
        return tried[0].first_loss if tried else None

    @property
    def _expected(self) -> float:
        """Seconds of training until the target, very roughly: twice as long as at the rate of late."""
        if self.target is None or len(self._state.reached) < 3:
            return math.inf
        (before, was), (now, value) = self._state.reached[-3], self._state.reached[-1]
        gained = abs(self.target - was) - abs(self.target - value)
        if self._is_reached(value):
            return 0.0
        return now + 2 * abs(self.target - value) * (now - before) / gained if gained > 0 else math.inf

    @property
    def _ends_soon(self) -> bool:
        """Whether the target is expected before the run has lasted three times as long.

        About so long a run whose steps have become a third as large is ahead of one whose steps have not.
        """
        return 0 < self._expected <= _SOON * self._seconds

    def _reason(self, trainer: Trainer, epoch: int, rate: float) -> str:
        """Why another search may be worth its time, or nothing. What rank 0 finds counts."""
        number = 0
        if self._learns_from_run:
            number = 2 if rate and self._rate and abs(self._rate / rate - 1) > _CHANGED else 0
        elif self._state.rounds == 1 and epoch <= max(1, _EARLY * self._epochs(trainer)):
            number = 1
        elif rate and self._rate and abs(self._rate / rate - 1) > _CHANGED:
            number = 2
        elif self._has_stalled(trainer, epoch):
            number = 3
        return _REASONS[self._strategy.joined.agree([number if trainer.is_global_zero else 0])[0]]

    def _has_stalled(self, trainer: Trainer, epoch: int) -> bool:
        """Whether at the rate of the last epoch the target would not be reached in time."""
        if self.target is None or len(self._state.at_epochs) < 2 or self._is_reached(self._state.at_epochs[-1]):
            return False
        before, now = (abs(self.target - value) for value in self._state.at_epochs[-2:])
        left = self._epochs(trainer) - epoch
        return now >= before or now / (before - now) > left

    # --- A search -----------------------------------------------------------------------------------------------------

    def _find(
        self,
        trainer: Trainer,
        module: LightningModule,
        hyperparameters: Hyperparameters,
        spec: SearchSpec,
        lr: float,
        observations: Any,
    ) -> None:
        """Probes until rank 0 has chosen, then trains with that."""
        began, seconds, number = time.perf_counter(), self._seconds, self._state.rounds
        several = max(spec.space.groups) > 1
        seed = self.seed + number
        prober = Prober(
            trainer, module, hyperparameters, lr, seed, several, self.mute_logger, number == 0, self._further
        )
        if trainer.is_global_zero:
            load_libraries(
                sampler_of(self._sampler).uses_scikit_optimize
            )  # waits for those under way: beside a probe they would be taken for a slow rank
        self._state.unfinished = True
        search = self._begin(trainer, spec, observations, seconds) if trainer.is_global_zero else None
        before = search.spent if search is not None else 0.0
        try:
            self._check_monitor(trainer, module, prober, spec)
            with SearchProgress(trainer, self.rank_zero_info) as progress:
                command = self._go_through(prober, search, progress)
        finally:
            prober.close()
        if command.error:
            raise ConfigurationError(command.error)
        self._before_choice = RollbackPoint.of(module, trainer.optimizers, self._strategy.joined.core)
        if not isinstance(spec, StepSearchSpec) and command.setting != spec.start:
            # What was chosen belongs to the batch of one group.
            self._state.reference = spec.batch / command.setting.groups
        self._apply(trainer, hyperparameters, command)
        known = [command.divergence_threshold] if math.isfinite(command.divergence_threshold) else []
        known += [self._guard.threshold] if self._guard is not None else []
        self._guard = DivergenceGuard(max(known)) if known else None
        self._state.unfinished, self._state.rounds, self._rate = False, number + 1, 0.0
        ended = time.perf_counter()
        if search is not None:
            search.overhead += ended - began - (search.spent - before)
        self._began += ended - began
        self._publish(trainer, command)
        took = time.perf_counter() - ended
        self._state.reporting, self._began = self._state.reporting + took, self._began + took

    def _check_monitor(self, trainer: Trainer, module: LightningModule, prober: Prober, spec: SearchSpec) -> None:
        """Before time goes into probes: the metric that they are for exists. What rank 0 finds counts."""
        world, problem = self._strategy.joined, ""
        if world.agree([trainer.is_global_zero and self._monitor.needs_a_step(trainer, module)])[0]:
            problem = self._monitor.stepped(prober.names_of(spec.start, spec.batch))
        if problem := world.tell(problem):
            raise ConfigurationError(problem)

    def _go_through(self, prober: Prober, search: Search | None, progress: SearchProgress) -> Command:
        """Probe after probe, until the search is over. ``search`` is rank 0's."""
        world = self._strategy.joined
        lost, began = set(world.lost), time.perf_counter()
        while True:
            self._strategy.signals.agree()
            said = json.dumps(self._next_command(search, progress).to_dict()) if search is not None else ""
            command = Command.from_dict(json.loads(world.tell(said)))
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

    def _begin(self, trainer: Trainer, spec: SearchSpec, observations: Any, seconds: float) -> Search:
        known = self._rounds[-1].search.measured if self._rounds and not self._strategy.joined.lost else []
        search = Search(spec, self._sampler, observations, known)
        self._rounds.append(Round(search, trainer.current_epoch, seconds))
        self._totals = {}
        return search

    def _next_command(self, search: Search, progress: SearchProgress) -> Command:
        """What all ranks do next."""
        try:
            import_libraries(search.sampler.uses_scikit_optimize)
            probe = search.next()
            if probe is not None:
                progress.tries(search, probe)
                return replace(self._placed(search, probe.setting), probe=probe)
        except OmniError as error:
            return Command(search.spec.start, error=str(error))
        return self._conclusion(search)

    def _conclusion(self, search: Search) -> Command:
        """What is to be trained with, when a search is over."""
        try:
            self.choice = search.choice()
            found, left = self.choice.setting, len(self._strategy.joined.live_ranks)
            setting = replace(found, groups=min(found.groups, left))
            scale = setting.lr / search.spec.start.lr
            threshold = search.divergence_threshold(setting)
            placed = self._placed(search, setting)
            return replace(placed, scale=scale, divergence_threshold=threshold, why=self.choice.why)
        except OmniError as error:
            return Command(search.spec.start, error=str(error))

    @staticmethod
    def _placed(search: Search, setting: Setting) -> Command:
        """How groups are formed, if speeds are known."""
        profile = search.profile
        if profile is None or len(profile.speeds) < setting.groups:
            return Command(setting)
        topology = search.prediction(setting).topology
        by_speed = topology != Topology.of(topology.ranks, setting.groups)
        return Command(setting, speeds=dict(zip(topology.ranks, profile.speeds, strict=True)), by_speed=by_speed)

    # --- Applying -----------------------------------------------------------------------------------------------------

    def _apply(self, trainer: Trainer, hyperparameters: Hyperparameters, command: Command) -> None:
        """From here on the run trains like that."""
        hyperparameters.set_momentum(command.setting.momentum)
        hyperparameters.scale(command.scale)
        self._state.scaled *= command.scale
        self._state.setting = command.setting
        self._state.speeds = sorted(command.speeds.items()) if command.speeds and command.by_speed else []
        self._regroup(trainer, command.setting, command.speeds, command.by_speed)

    def _regroup(self, trainer: Trainer, setting: Setting, speeds: Mapping[int, float] | None, by_speed: bool) -> None:
        strategy, world = self._strategy, self._strategy.joined
        again = communicate(strategy, communication_of(setting, world.communication))
        again |= apply_further(self._further, world, setting)
        if setting.rebalance and not strategy.balance.is_on and strategy.epochs.leases is not None:
            strategy.balance = Balance("auto", self.rank_zero_info)
            strategy.balance.begin(world, strategy.fitted, lambda: strategy.epochs.leases)
        if setting.groups != len(world.topology.alive) or by_speed or (again and setting.groups > 1):
            strategy.form(setting.groups, speeds if by_speed else None)
        if setting.rebalance and speeds is not None and len(world.members) > 1 and strategy.epochs.leases is not None:
            strategy.share_out([speeds[rank] for rank in world.members])
        if not strategy.epochs.is_open:
            world.enter_world(strategy.buffers())

    # --- Rollback -----------------------------------------------------------------------------------------------------

    def _has_diverged(self, trainer: Trainer) -> bool:
        """Whether the run has diverged since the last search. All ranks say the same."""
        if self._guard is None:
            return False
        mean = self._guard.mean(torch.zeros((), device=self._strategy.root_device))
        return self._guard.is_worse(float(self._strategy.reduce(mean, reduce_op="mean")))

    def _roll_back(self, trainer: Trainer) -> None:
        """Back to the weights of before, in one group with the user's own setting; if it was that, in smaller steps."""
        assert self._state.setting is not None
        assert self._guard is not None
        assert self._before_choice is not None
        assert self._state.own is not None
        world, hyperparameters = self._strategy.joined, self._read_hyperparameters(trainer)
        self._strategy.form_one()
        self._before_choice.put_back(world.core)
        world.reduction.forget()
        was = self._state.setting
        factor = 1 / self._state.scaled if was.groups > 1 else 1 / 3  # the user's own schedule, or smaller steps
        momentum = self._state.own.momentum if was.groups > 1 else was.momentum
        rebalance = bool(self._strategy.epochs.leases) and Space.of(self._space, world.size).rebalance
        self._state.setting = replace(was, groups=1, momentum=momentum, lr=was.lr * factor, rebalance=rebalance)
        self._state.reference = float(self._batch(trainer, len(world.live_ranks)))
        hyperparameters.set_momentum(momentum)
        hyperparameters.scale(factor)
        self._state.scaled *= factor
        self._regroup(trainer, self._state.setting, None, False)
        self._guard = DivergenceGuard(self._guard.threshold)
        self.rank_zero_info(
            f"OmniTuner: the run has diverged with {was}: it is rolled back to the weights of the last"
            f" search, and goes on with {self._state.setting}"
        )

    # --- What is known of the run -------------------------------------------------------------------------------------

    def _read_hyperparameters(self, trainer: Trainer) -> Hyperparameters:
        """The optimizer, if this fit can be probed at all.

        Raises:
            ConfigurationError: it cannot.
        """
        probed_loader(trainer)
        return Hyperparameters(trainer.optimizers[0], [config.scheduler for config in trainer.lr_scheduler_configs])

    def _spec(self, trainer: Trainer, hyperparameters: Hyperparameters, lr: float, share: float) -> SearchSpec:
        """A search that starts from what the run trains with at the moment."""
        world = self._strategy.joined
        start = Setting(
            groups=max(1, len(world.live_groups)),
            momentum=hyperparameters.momentum,
            lr=lr,
            rebalance=self._strategy.balance.is_on,
            period=int(getattr(world.method, "period", 1)),
            further=tuple(sorted((each.name, each.current(world)) for each in self._further)),
        )
        is_named = self._learns_from_run or any(each in self._space for each in _COMMUNICATION)
        if is_named and type(world.method) in METHODS.values():
            method = text_of(world.method, without=("period",))
            wire, all_reduce = _text_of_wire(world.options.wire), text_of_all_reduce(world.reduction.format)
            start = replace(start, method=method, wire=wire, overlap=world.core.overlaps, all_reduce=all_reduce)
        live, given = len(world.live_ranks), dict(self._space)
        batch = self._batch(trainer, live)
        own = self._state.own.momentum if self._state.own is not None else start.momentum
        if world.lost and "groups" in given:  # the user could not know
            groups = given["groups"] if isinstance(given["groups"], Iterable) else [given["groups"]]
            given["groups"] = [1, *(each for each in groups if each <= live)]
        space = Space.of(given, live, lambda groups: self._allows(trainer, groups), own)
        if not hyperparameters.is_momentum_free:
            space = replace(space, momentum=(start.momentum, start.momentum))
        if self._strategy.epochs.leases is None:
            space = replace(space, rebalance=False)
        if not space.method and not hasattr(world.method, "period"):
            space = replace(space, period=())
        options = world.options
        if self._learns_from_run and (options.method, options.wire, options.overlap, options.all_reduce) == _USUAL:
            space = replace(
                space,
                method=space.method or self._methods(trainer),
                wire=space.wire or searched.WIRES,
                all_reduce=space.all_reduce or searched.ALL_REDUCES,
            )
        return SearchSpec(
            start,
            batch,
            self._horizon(trainer, batch),
            share,
            space,
            hyperparameters.scaling,
            seed=self.seed + self._state.rounds,
            reference=self._state.reference or batch / start.groups,
        )

    @staticmethod
    def _batch(trainer: Trainer, ranks: int) -> int:
        """Samples in one synchronous step of so many ranks."""
        window = int(trainer.accumulate_grad_batches)
        return ReferenceBatch(ranks, batch_size_of(loader_of(trainer)), window).samples

    def _allows(self, trainer: Trainer, groups: int) -> bool:
        """Whether there may be that many groups."""
        reason = self._why_not(trainer, groups)
        if reason and not self.problem:
            self.rank_zero_info(f"OmniTuner: {groups} groups are not tried: {reason}")
        return not reason

    def _methods(self, trainer: Trainer) -> tuple[str, ...]:
        """Methods by which groups of this run can exchange, of those of which it is known what they cost."""
        world = self._strategy.joined
        before, found = world.method, []
        for name in searched.METHODS:
            world.method = method_named(name)
            with suppress(ConfigurationError):
                check_servers(world.options.servers, world.method)
                if not self._why_not(trainer, 2):
                    found.append(name)
        world.method = before
        return tuple(found)

    def _may_form_groups(self, trainer: Trainer) -> bool:
        """Whether several groups are among what is searched."""
        return self.budget > 0 and trainer.world_size > 1 and self._space.get("groups") not in (1, [1], (1,))

    def _why_not(self, trainer: Trainer, groups: int) -> str:
        """Why there cannot be that many groups; empty if there can."""
        world = self._strategy.joined
        try:
            world.check_method(groups)
            self._strategy.check_several(trainer)
            for optimizer in trainer.optimizers:
                world.check_optimizer(optimizer)
        except (ConfigurationError, UnsupportedError) as error:
            return str(error)
        if any(getattr(each, "sparse", False) is True for each in trainer.lightning_module.modules()):
            return "sparse gradients travel inside one group only"
        return ""

    def _epochs(self, trainer: Trainer) -> float:
        """Epochs that the run will train."""
        batches = max(1, trainer.num_training_batches if math.isfinite(trainer.num_training_batches) else 1)
        limits: list[float] = [] if trainer.max_epochs in (None, -1) else [trainer.max_epochs]
        steps = self._strategy.epochs.max_steps
        if steps != -1:
            limits.append(steps * int(trainer.accumulate_grad_batches) / batches)
        return float(min(limits)) if limits else float(_UNLIMITED)

    def _horizon(self, trainer: Trainer, batch: int) -> float:
        """Samples that are left to train."""
        left = max(0.0, self._epochs(trainer) - trainer.current_epoch)
        batches = trainer.num_training_batches if math.isfinite(trainer.num_training_batches) else 1
        return float(left * batches * batch / int(trainer.accumulate_grad_batches))

    def _measure_rate(self, trainer: Trainer) -> float:
        """Samples per second of all ranks in the epoch that has just ended, or in what was trained of it.

        Validations count here; for the report they do not.
        """
        strategy = self._strategy
        own = self._throughput.take()
        counts = torch.tensor([float(own.samples), float(own.timed)], device=strategy.root_device)
        trained, timed = strategy.reduce(counts, reduce_op="sum").tolist()
        longest = strategy.joined.agree([round(1e6 * own.seconds)])[0] / 1e6
        if self._rounds and self._state.setting is not None and longest > 0:
            groups = self._state.setting.groups
            before = self._totals.get(groups, (0.0, 0.0))
            self._totals[groups] = before[0] + timed, before[1] + longest
            self._rounds[-1].measured_after[groups] = self._totals[groups][0] / self._totals[groups][1]
        batch = batch_size_of(loader_of(trainer)) * len(strategy.joined.live_ranks)
        self._samples_an_epoch = batch * trainer.num_training_batches
        self._epochs_planned = self._epochs(trainer)
        seconds, self._seconds_before = self._seconds - self._seconds_before, self._seconds
        return trained / seconds if seconds > 0 else 0.0

    @property
    def _seconds(self) -> float:
        """Seconds of training so far, without those of searches."""
        return self._state.trained + (time.perf_counter() - self._began if self._began else 0.0)

    @property
    def _spent(self) -> float:
        """Seconds of all searches of the run; rank 0's count."""
        return self._state.forgotten + sum(each.spent for each in self.searches)

    @property
    def _times(self) -> RunTimes:
        """Where the run's time went."""
        return RunTimes(self._seconds, self._spent, self._state.at_target, self._state.reporting)

    def _is_reached(self, value: float) -> bool:
        assert self.target is not None
        return reaches("loss" if self._mode == "min" else "", value, self.target)

    # --- What a user sees ---------------------------------------------------------------------------------------------

    def _publish(self, trainer: Trainer, command: Command) -> None:
        """To the console, to the loggers, and as files into the first logger's folder."""
        setting = command.setting
        self.rank_zero_info(f"OmniTuner: trains with {setting}: {command.why}")
        metrics = {
            "omni/groups": float(setting.groups),
            "omni/momentum": setting.momentum,
            "omni/lr": setting.lr,
            **self._times.metrics,
        }
        if (folder := log(trainer, metrics)) is not None:
            self._folder = folder
            if not self._learns_from_run:  # in mid-epoch pictures would hold all up: they are drawn when the run ends
                self._report(trainer, folder)

    def _report(self, trainer: Trainer, folder: Path) -> None:
        """Files and pictures; whatever is wrong with them, the run goes on."""
        try:
            self._write_report(trainer, folder)
        except Exception as error:
            _log.warning(
                "OmniTuner: the report could not be written to %s: %s: %s", folder, type(error).__name__, error
            )

    def _write_report(self, trainer: Trainer, folder: Path) -> None:
        rounds = tuple(
            replace(each, reasons=tuple(probe.why for probe in each.search.probes))
            for each in self._rounds
            if each.search.observations
        )
        if not rounds:
            return
        report = TuningReport(rounds, self.target, self.monitor, self._times if self._seconds_before else None)
        report.save(folder)
        for logger in trainer.loggers:
            add_figure = getattr(getattr(logger, "experiment", None), "add_figure", None)
            if callable(add_figure):
                add_figure("omni/tuning", report.figure(-1), global_step=trainer.global_step)

    @property
    def _strategy(self) -> OmniStrategyHooks:
        """That of the fit."""
        assert self._fitting is not None
        return self._fitting

    def _leave(self) -> None:
        if self._first is not None:
            self._first.close()
            self._first = None
        if self._fitting is not None and self._call in self._fitting.on_ready:
            self._strategy.on_ready.remove(self._call)


__all__ = ["Command", "OmniTunerHooks"]
