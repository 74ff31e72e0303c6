"""Control of Lightning's loops: ends of epochs, validations, counters, and steps of schedulers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_omni.strategy.lightning_internals.callbacks import call_module, callbacks_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

# --- Steps of learning-rate schedulers --------------------------------------------------------------------------------


def epochs_stepped(trainer: Trainer) -> int:
    """Return the number of epochs for which Lightning has stepped schedulers, which it does in their last batch."""
    epochs: Any = trainer.fit_loop.epoch_progress.current  # Lightning declares a base class of its type
    is_begun = epochs.started > epochs.processed
    return int(epochs.processed) + (is_begun and trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def step_schedule(trainer: Trainer, scheduler: Any) -> None:
    progress = trainer.fit_loop.epoch_loop.scheduler_progress
    progress.increment_ready()
    call_module(trainer)._call_lightning_module_hook(trainer, "lr_scheduler_step", scheduler, None)
    progress.increment_completed()


@contextmanager
def _with_schedulers(trainer: Trainer, configs: list[Any]) -> Iterator[None]:
    strategy = trainer.strategy
    before, strategy.lr_scheduler_configs = strategy.lr_scheduler_configs, configs
    try:
        yield
    finally:
        strategy.lr_scheduler_configs = before


def step_plateaus(trainer: Trainer, configs: list[Any]) -> None:
    """Step schedulers that monitor a metric, whatever this rank's batch number."""
    with _with_schedulers(trainer, [replace(config, frequency=1) for config in configs]):
        trainer.fit_loop.epoch_loop._update_learning_rates("step", update_plateau_schedulers=True)


def ignore_missing_step(optimizer: Any) -> None:
    optimizer._opt_called = True  # else schedulers warn


def replaces_scheduler(trainer: Trainer) -> bool:
    return any(hasattr(callback, "_swa_scheduler") for callback in callbacks_of(trainer))


def runs_finder(trainer: Trainer) -> bool:
    finders = ("lr_find", "scale_batch_size")
    return any(hasattr(callback, name) for callback in callbacks_of(trainer) for name in finders)


# --- Control ----------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
    from pytorch_lightning.loops.fit_loop import _FitLoop
    from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop

    _Trainer = Trainer
else:
    _EvaluationLoop = _FitLoop = _TrainingEpochLoop = _Trainer = object


def make_epoch_open_ended(trainer: Trainer) -> None:
    fetcher: Any = trainer.fit_loop._data_fetcher
    fetcher.length = float("inf")
    fetcher.done = False


def set_last_batch(trainer: Trainer, is_last: bool) -> None:
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = is_last


def is_fitting(trainer: Trainer) -> bool:
    return trainer.state.fn is not None and trainer.state.fn.value == "fit"


def will_step(trainer: Trainer) -> bool:
    return not trainer.fit_loop._should_accumulate()


def validates_this_epoch(trainer: Trainer) -> bool:
    return bool(trainer.enable_validation and trainer.fit_loop.epoch_loop._should_check_val_epoch())


def validates_by_time(trainer: Trainer) -> bool:
    return getattr(trainer, "_val_check_time_interval", None) is not None


def should_stop_now(trainer: Trainer) -> bool:
    return bool(trainer.should_stop and trainer.fit_loop._can_stop_early)


def set_batch_agreement(trainer: Trainer, agree: Callable[[], None] | None) -> None:
    """Replace the broadcast of SIGTERM before every training batch by another collective; None restores it."""
    loop: Any = trainer.fit_loop.epoch_loop
    if agree is None:
        vars(loop).pop("_broadcast_sigterm_tensor", None)
    else:
        loop._broadcast_sigterm_tensor = agree


def seed_workers(trainer: Trainer, loader: object, rank: int) -> None:
    """Seed a loader's workers by this rank, as Lightning would do later by the rank in the Trainer's group."""
    if hasattr(loader, "worker_init_fn"):
        package = call_module(trainer).__name__.removesuffix(".call")
        sys.modules[f"{package}.connectors.data_connector"]._auto_add_worker_init_fn(loader, rank)


class _ControlledTrainer(_Trainer):
    _control: Any

    @property
    @override
    def num_training_batches(self) -> float:
        batches = super().num_training_batches
        if "_estimates" not in vars(self):
            batches = self._control.parts.epochs.own_batches(batches)
        return batches

    @property
    @override
    def estimated_stepping_batches(self) -> float:
        vars(self)["_estimates"] = True  # the estimate for all epochs uses the number of batches under DDP
        try:
            return super().estimated_stepping_batches
        finally:
            del vars(self)["_estimates"]


class _ControlledFitLoop(_FitLoop):
    _control: Any

    @override
    def run(self) -> None:
        self._control.run(super().run)

    @override
    def setup_data(self) -> None:
        self._control.begin_setup()
        with _iterating(self):
            super().setup_data()

    @override
    def on_advance_end(self) -> None:
        super().on_advance_end()
        self._control.epoch_has_ended()

    @property
    @override
    def done(self) -> bool:
        loop = self.epoch_loop
        limit = self._control.parts.epochs.run.limit_for(loop.max_steps)
        is_reached = limit is not None and -1 < limit <= loop.global_step
        if is_reached and self.max_batches != 0 and (loop.max_steps == -1 or self.trainer.should_stop):
            return True  # another group has stopped the run, and Lightning's message would say that max_steps have
        with _with_max_steps(loop, limit):
            return super().done


class _ControlledEpochLoop(_TrainingEpochLoop):
    _control: Any

    @override
    def on_run_start(self, data_fetcher: Any) -> None:
        self._control.begin_epoch(_iterating(self.trainer.fit_loop)(partial(super().on_run_start, data_fetcher)))

    @override
    def _on_before_fetch(self) -> None:
        super()._on_before_fetch()
        self._control.begin_fetch()

    @override
    def _on_after_fetch(self) -> None:
        self._control.end_fetch()
        super()._on_after_fetch()

    @property
    @override
    def _is_training_done(self) -> bool:
        with _with_max_steps(self, self._control.parts.epochs.run.limit_for(self.max_steps)):
            return super()._is_training_done

    @override
    def _num_ready_batches_reached(self) -> bool:
        if self._control.parts.epochs.is_open_ended:
            return self.batch_progress.is_last_batch
        return super()._num_ready_batches_reached()

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        epochs = self._control.parts.epochs
        if interval == "epoch" and epochs.is_cut_short:
            return
        if epochs.schedulers.is_paced and not update_plateau_schedulers:
            if interval == "epoch" or not self._should_accumulate():
                epochs.schedulers.step(interval)
            return
        configs = self.trainer.lr_scheduler_configs
        due = epochs.stepped_by_batches(configs) if interval == "step" else configs
        with _with_schedulers(self.trainer, due):
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    @override
    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        return bool(self._control.parts.epochs.validates(partial(super()._should_check_val_fx, data_fetcher)))


class _ControlledValidationLoop(_EvaluationLoop):
    _control: Any

    @override
    def run(self) -> Any:
        return self._control.parts.epochs.validate(super().run)


@contextmanager
def _iterating(fit_loop: Any) -> Iterator[None]:
    fit_loop._iterates = True
    try:
        yield
    finally:
        vars(fit_loop).pop("_iterates", None)


def unlease_loaders(trainer: Trainer) -> None:
    """Give the Trainer the user's loaders for evaluations after a fit."""
    if (combined := trainer.fit_loop._combined_loader) is not None:
        combined.flattened = [getattr(each, "for_user", each) for each in combined.flattened]


def loops_iterate(trainer: Trainer) -> bool:
    """Return whether the loops begin to iterate the data."""
    return hasattr(trainer.fit_loop, "_iterates")


class _ShownLimit(int):
    """A number of steps that messages show as the user's max_steps."""

    shown: int

    @override
    def __repr__(self) -> str:
        return repr(self.shown)


@contextmanager
def _with_max_steps(epoch_loop: Any, max_steps: int | None) -> Iterator[None]:
    before = epoch_loop.max_steps
    if max_steps is not None:
        epoch_loop.max_steps = _ShownLimit(max_steps)
        epoch_loop.max_steps.shown = before
    try:
        yield
    finally:
        epoch_loop.max_steps = before


def control_loops(trainer: Trainer, control: Any) -> None:
    """Let a listener, and the driver of its epochs, control the Trainer's loops."""
    epoch_loop = trainer.fit_loop.epoch_loop
    for loop, mixin in (
        (trainer, _ControlledTrainer),
        (trainer.fit_loop, _ControlledFitLoop),
        (epoch_loop, _ControlledEpochLoop),
        (epoch_loop.val_loop, _ControlledValidationLoop),
    ):
        _restore_class(loop)
        own = type(loop)
        fields = {"_control": control, "__module__": own.__module__, "__doc__": own.__doc__}
        loop.__class__ = type(own.__name__, (mixin, own), fields)


def release_loops(trainer: Trainer) -> None:
    for loop in (trainer, trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop):
        _restore_class(loop)


def _restore_class(loop: Any) -> None:
    if isinstance(loop, (_ControlledTrainer, _ControlledFitLoop, _ControlledEpochLoop, _ControlledValidationLoop)):
        del type(loop)._control  # the class is freed late and must not keep the run alive
        loop.__class__ = type(loop).__mro__[2]


# --- Counters: batches, steps, epochs ---------------------------------------------------------------------------------


def progress_counters(trainer: Trainer) -> list[int]:
    """Return this rank's counts of batches and steps, on which a group's ranks must agree."""
    batch = trainer.fit_loop.epoch_loop.batch_progress
    return [batch.current.ready, batch.total.ready, *step_counters(trainer)]


def batches_started(trainer: Trainer) -> int:
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def batches_trained(trainer: Trainer) -> int:
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    return int(progress.current.processed)


def is_at_last_batch(trainer: Trainer) -> bool:
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def batches_resumed(trainer: Trainer) -> int:
    """Return the batches trained in the epoch that a fit resumes; 0 if it resumes none, or a complete one."""
    if not trainer.fit_loop.restarted_mid_epoch:
        return 0
    batches = batches_trained(trainer)
    return batches if batches < trainer.num_training_batches else 0


def accumulation_windows(trainer: Trainer, epochs: int) -> list[int]:
    for callback in callbacks_of(trainer):
        if hasattr(callback, "get_accumulate_grad_batches"):
            return [int(callback.get_accumulate_grad_batches(epoch)) for epoch in range(epochs)]
    return []


def set_progress_counters(trainer: Trainer, counters: list[int]) -> None:
    current, total, *steps = counters
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress
    for progress, ready in ((batch.current, current), (batch.total, total)):
        progress.completed += ready - progress.ready
        progress.processed += ready - progress.ready
        progress.started += ready - progress.ready
        progress.ready = ready
    set_step_counters(trainer, steps)


def recount(trainer: Trainer, batches: int) -> None:
    """Set the count of the current epoch's batches, without a change of the steps and of earlier epochs."""
    current, total, *steps = progress_counters(trainer)
    set_progress_counters(trainer, [batches, total - current + batches, *steps])


def step_counters(trainer: Trainer) -> list[int]:
    """Return the counts from which Lightning computes ``global_step`` and the steps of logs."""
    loop = trainer.fit_loop.epoch_loop
    return [
        loop.automatic_optimization.optim_progress.optimizer.step.total.completed,
        loop.manual_optimization.optim_step_progress.total.completed,
        loop._batches_that_stepped,
    ]


def set_step_counters(trainer: Trainer, counters: list[int]) -> None:
    loop = trainer.fit_loop.epoch_loop
    automatic, manual, loop._batches_that_stepped = counters
    for steps, wanted in (
        (loop.automatic_optimization.optim_progress.optimizer.step, automatic),
        (loop.manual_optimization.optim_step_progress, manual),
    ):
        steps.total.ready += wanted - steps.total.completed
        steps.total.completed = wanted


def reload_epochs(trainer: Trainer) -> list[float]:
    loop: Any = trainer.fit_loop
    return [loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch]


def set_reload_epochs(trainer: Trainer, epochs: list[float]) -> None:
    loop: Any = trainer.fit_loop
    loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch = epochs


def start_fit_at_epoch(trainer: Trainer, epoch: int, counters: list[int]) -> None:
    """Set the fit loop to begin with an epoch, without a sanity check.

    ``counters`` are `progress_counters` but the first.
    """
    progress: Any = trainer.fit_loop.epoch_progress
    for each in (progress.total, progress.current):
        each.ready = each.started = each.processed = each.completed = epoch
    set_progress_counters(trainer, [0, *counters])
    trainer.num_sanity_val_steps = 0
