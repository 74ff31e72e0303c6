"""All access to private names of Lightning, which may change in any release. Checked on Lightning 2.6.6.

Everything is in this one file so that it can be checked against a new release of Lightning. A test notices when one of
these names is gone or behaves otherwise.
"""

from __future__ import annotations

import builtins
import inspect
import math
import os
import sys
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn import Module
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

from lightning_omni.errors import UnsupportedError
from lightning_omni.runtime.model.values import write
from lightning_omni.strategy import NAMESPACES
from lightning_omni.strategy.declared import callbacks_of

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
    from pytorch_lightning.loops.fit_loop import _FitLoop
    from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop

    _Trainer = Trainer
else:
    _EvaluationLoop = _FitLoop = _TrainingEpochLoop = _Trainer = object

FIRST_BARRIER = "run-stage"
"""Name of the first barrier after Lightning has registered its signal handlers."""


def set_ddp_options(strategy: Any, options: dict[str, Any]) -> None:
    """Set the keyword arguments with which DDPStrategy wraps the module."""
    strategy._ddp_kwargs = options


def told_model_parallel(strategy: Any) -> dict[str, Any] | None:
    """Return the arguments of Lightning's ModelParallelStrategy by name; None if ``strategy`` is of another class."""
    kind = type(strategy)
    if kind.__name__ != "ModelParallelStrategy" or kind.__module__ not in _OF_MODEL_PARALLEL:
        return None
    names = ("data_parallel_size", "tensor_parallel_size", "save_distributed_checkpoint", "process_group_backend")
    return {name: getattr(strategy, f"_{name}") for name in (*names, "timeout")}


_OF_MODEL_PARALLEL = tuple(f"{name}.strategies.model_parallel" for name in NAMESPACES)


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Set the ``self.device_mesh`` that the user's ``configure_model`` reads."""
    module._device_mesh = mesh


def keep_unsynchronized(module: Any, names: list[str]) -> None:
    """Exclude parameters from DDPStrategy's broadcast before an evaluation: each rank has other rows of them."""
    module._ddp_params_and_buffers_to_ignore = names


@contextmanager
def staying_in_place(strategy: Any) -> Iterator[None]:
    """Return a context in which a strategy's ``teardown`` leaves the module on its device.

    ModelParallelStrategy does the same. FSDP2 cannot move a module after an error in its forward or backward pass,
    because its parameters are still gathered.
    """
    module = strategy.lightning_module
    if module is not None:
        vars(module)["cpu"] = lambda: module
    try:
        yield
    finally:
        if module is not None:
            del vars(module)["cpu"]


def set_launcher(strategy: Any, launcher: Any) -> None:
    """Set the launcher that the Trainer calls."""
    strategy._launcher = launcher


def start_method(strategy: Any) -> str:
    """Return how DDPStrategy starts its processes."""
    return str(strategy._start_method)


def set_start_method(strategy: Any, name: str) -> None:
    """Set how the strategy starts its processes."""
    strategy._start_method = name


def collective_timeout(strategy: Any) -> Any:
    """Return DDPStrategy's timeout for collectives."""
    return strategy._timeout


def averages_models(strategy: Any) -> bool:
    """Return whether DDPStrategy was configured for post-local SGD."""
    return strategy._model_averaging_period is not None


def has_hook_for_gradients(strategy: Any) -> bool:
    """Return whether DDPStrategy has a communication hook; a DDP module can have only one."""
    return strategy._ddp_comm_hook is not None


def be_open_ended(trainer: Trainer) -> None:
    """Make the epoch end with the leases, and not after a number of batches."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    fetcher.length = float("inf")
    fetcher.done = False


def set_last_batch(trainer: Trainer, is_last: bool) -> None:
    """Set whether the loop treats the current batch as the epoch's last."""
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = is_last


def step_schedules_by_epoch(trainer: Trainer) -> None:
    """Step the schedulers as the loop does after an epoch's last batch, without those that monitor a metric."""
    trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def step_schedule(trainer: Trainer, scheduler: Any) -> None:
    """Call the module's ``lr_scheduler_step`` for a scheduler without a metric, as the loop does."""
    _calls_of(trainer)._call_lightning_module_hook(trainer, "lr_scheduler_step", scheduler, None)


@contextmanager
def _stepping(trainer: Trainer, step: Callable[[Any, Callable[[], Any]], None]) -> Iterator[None]:
    """Return a context in which ``step`` makes the loop's calls of the module's ``lr_scheduler_step``.

    ``step`` receives the scheduler and the call. The loop alone knows which schedulers are due.
    """
    hook, own = "lr_scheduler_step", trainer.lightning_module.lr_scheduler_step
    attributes = vars(trainer.lightning_module)
    before = {hook: attributes[hook]} if hook in attributes else {}
    attributes[hook] = lambda scheduler, metric: step(scheduler, partial(own, scheduler, metric))
    try:
        yield
    finally:
        del attributes[hook]
        attributes.update(before)


@contextmanager
def scheduled(trainer: Trainer, configs: list[Any]) -> Iterator[None]:
    """Return a context in which the loop has these schedulers and no others."""
    strategy = trainer.strategy
    before, strategy.lr_scheduler_configs = strategy.lr_scheduler_configs, configs
    try:
        yield
    finally:
        strategy.lr_scheduler_configs = before


def step_plateaus(trainer: Trainer, configs: list[Any]) -> None:
    """Step schedulers that monitor a metric and are due, whatever the number of this rank's batch."""
    with scheduled(trainer, [replace(config, frequency=1) for config in configs]):
        trainer.fit_loop.epoch_loop._update_learning_rates("step", update_plateau_schedulers=True)


def metrics_by_now(trainer: Trainer) -> dict[str, Any]:
    """Return the callback metrics without computing any; a metric that was computed again is another tensor."""
    return dict(trainer._logger_connector._callback_metrics)


def will_step(trainer: Trainer) -> bool:
    """Return whether the current batch ends an accumulation window."""
    return not trainer.fit_loop._should_accumulate()


def is_inside_a_hook(trainer: Trainer) -> bool:
    """Return whether Lightning is calling a hook of the module, a callback or the strategy now."""
    return trainer.lightning_module._current_fx_name is not None


def hook_of(trainer: Trainer) -> str:
    """Return the name of the hook that Lightning is calling; an empty string if there is none."""
    return trainer.lightning_module._current_fx_name or ""


def forget_hook(trainer: Trainer) -> None:
    """Clear the name of the current hook, which an earlier fit left behind if it was interrupted in a hook."""
    trainer.lightning_module._current_fx_name = None


def validates_this_epoch(trainer: Trainer) -> bool:
    """Return whether validation is enabled and due in this epoch."""
    return bool(trainer.enable_validation and trainer.fit_loop.epoch_loop._should_check_val_epoch())


def validates_by_time(trainer: Trainer) -> bool:
    """Return whether ``val_check_interval`` is a duration."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def stops_now(trainer: Trainer) -> bool:
    """Return whether ``should_stop`` is set and min_epochs and min_steps allow to stop."""
    return bool(trainer.should_stop and trainer.fit_loop._can_stop_early)


def progress_counters(trainer: Trainer) -> list[int]:
    """Return this rank's counts of batches and steps, on which the ranks of a group must agree."""
    batch = trainer.fit_loop.epoch_loop.batch_progress
    return [batch.current.ready, batch.total.ready, *step_counters(trainer)]


def batches_begun(trainer: Trainer) -> int:
    """Return how many batches this rank has begun to train, in all epochs."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def batches_trained(trainer: Trainer) -> int:
    """Return how many batches of the current epoch this rank has trained."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    return int(progress.current.processed)


def batches_resumed(trainer: Trainer) -> int:
    """Return how many batches of its epoch each rank had trained when the checkpoint of a resumed fit was saved.

    Return 0 if the fit resumes from no checkpoint, or from one that was not saved inside an epoch.
    """
    if not trainer.fit_loop.restarted_mid_epoch:
        return 0
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    batches = int(progress.current.processed)
    return batches if batches < trainer.num_training_batches else 0


def accumulation_windows(trainer: Trainer, epochs: int) -> list[int]:
    """Return ``accumulate_grad_batches`` of the first epochs if a callback has a schedule for it; otherwise nothing."""
    for callback in callbacks_of(trainer):
        if hasattr(callback, "get_accumulate_grad_batches"):
            return [int(callback.get_accumulate_grad_batches(epoch)) for epoch in range(epochs)]
    return []


def steps_by_hand(trainer: Trainer) -> int:
    """Return how many steps of all optimizers the user has taken in manual optimization."""
    return int(trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed)


def set_progress_counters(trainer: Trainer, counters: list[int]) -> None:
    """Set the counts that `progress_counters` returns."""
    current, total, *steps = counters
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress
    for progress, ready in ((batch.current, current), (batch.total, total)):
        progress.completed += ready - progress.ready
        progress.processed += ready - progress.ready
        progress.started += ready - progress.ready
        progress.ready = ready
    set_step_counters(trainer, steps)


def step_counters(trainer: Trainer) -> list[int]:
    """Return this rank's counts of steps, from which Lightning computes ``global_step`` and the steps of logs."""
    loop = trainer.fit_loop.epoch_loop
    return [
        loop.automatic_optimization.optim_progress.optimizer.step.total.completed,
        loop.manual_optimization.optim_step_progress.total.completed,
        loop._batches_that_stepped,
    ]


def set_step_counters(trainer: Trainer, counters: list[int]) -> None:
    """Set the counts that `step_counters` returns."""
    loop = trainer.fit_loop.epoch_loop
    automatic, manual, loop._batches_that_stepped = counters
    for steps, wanted in (
        (loop.automatic_optimization.optim_progress.optimizer.step, automatic),
        (loop.manual_optimization.optim_step_progress, manual),
    ):
        steps.total.ready += wanted - steps.total.completed
        steps.total.completed = wanted


def ignore_missing_step(optimizer: Any) -> None:
    """Suppress the warning of schedulers that their optimizer was never stepped: the server steps its copy."""
    optimizer._opt_called = True


def logs_now(trainer: Trainer) -> bool:
    """Return whether Lightning sends the metrics of this batch to the loggers."""
    return bool(trainer._logger_connector.should_update_logs)


def set_batch_agreement(trainer: Trainer, agree: Callable[[], None] | None) -> None:
    """Set the collective before every training batch, in place of Lightning's broadcast of SIGTERM; None undoes it."""
    loop: Any = trainer.fit_loop.epoch_loop
    if agree is None:
        vars(loop).pop("_broadcast_sigterm_tensor", None)
    else:
        loop._broadcast_sigterm_tensor = agree


def mark_terminated(trainer: Trainer) -> None:
    """Set ``trainer.received_sigterm``."""
    trainer._signal_connector.received_sigterm = True


def averaged_models(trainer: Trainer) -> list[Any]:
    """Return the models in which WeightAveraging callbacks hold their averages."""
    return [average for _, average in _averaging(trainer) if isinstance(average, AveragedModel)]


def deciding_callbacks(trainer: Trainer) -> list[str]:
    """Return the state keys of callbacks that save, stop or tune; state keys include the callbacks' settings."""
    names = {"ModelCheckpoint", "EarlyStopping", "OmniTuner"}
    kinds = ((each, {kind.__name__ for kind in type(each).__mro__}) for each in callbacks_of(trainer))
    return [each.state_key for each, its in kinds if names & its]


def _averaging(trainer: Trainer) -> Iterator[tuple[Any, Module]]:
    """Yield Lightning's callbacks that average weights, each with the module of its averages, where that exists."""
    for callback in callbacks_of(trainer):
        if isinstance(average := getattr(callback, "_average_model", None), Module):
            yield callback, average


def averages_in(trainer: Trainer) -> Iterator[Tensor]:
    """Yield the averages of weights that Lightning's callbacks hold, and how many updates each contains."""
    for callback, average in _averaging(trainer):
        yield from (*average.parameters(), *average.buffers())
        if hasattr(callback, "n_averaged"):  # StochasticWeightAveraging creates it with its first update
            if callback.n_averaged is None:
                callback.n_averaged = torch.tensor(callback._init_n_averaged, device=trainer.strategy.root_device)
            yield callback.n_averaged


def put_averages(trainer: Trainer) -> None:
    """Copy the averages of callbacks into the module, at the end of training, as the callbacks themselves do."""
    for callback, average in _averaging(trainer):
        if isinstance(average, AveragedModel):
            callback._copy_average_to_current(trainer.lightning_module)
        elif trainer.current_epoch > getattr(callback, "swa_end", math.inf):
            callback.transfer_weights(average, trainer.lightning_module)


@torch.no_grad()
def average_from_here(trainer: Trainer) -> None:
    """Set averages that contain no weights yet to the current weights, after weights were set back.

    Until its first update a callback holds a copy of the weights from before training. If no update follows, the
    callback would copy these old weights into the module at the end.
    """
    for callback, average in _averaging(trainer):
        counted, kept = (average, average.module) if isinstance(average, AveragedModel) else (callback, average)
        if getattr(counted, "n_averaged", None) == 0:
            own, copies = ((*each.parameters(), *each.buffers()) for each in (trainer.lightning_module, kept))
            for tensor, copied in zip(own, copies, strict=False):
                write(copied, tensor)


def averages_weights(trainer: Trainer) -> bool:
    """Return whether a callback averages weights in a copy of the module, even before the callback is set up."""
    return any(hasattr(callback, "_average_model") for callback in callbacks_of(trainer))


def average_no_later(trainer: Trainer) -> None:
    """Lower WeightAveraging's last update step to the current step, so that it continues after steps were set back."""
    averaging: list[Any] = [each for each in callbacks_of(trainer) if hasattr(each, "_latest_update_step")]
    for each in averaging:
        each._latest_update_step = min(each._latest_update_step, trainer.global_step)


def replaces_scheduler(trainer: Trainer) -> bool:
    """Return whether a callback replaces the user's learning-rate scheduler during the run."""
    return any(hasattr(callback, "_swa_scheduler") for callback in callbacks_of(trainer))


# --- Groups that join a run ------------------------------------------------------------------------------------------


def set_rank(rank: int) -> None:
    """Set the rank by which `rank_zero_only` decides."""
    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def undecorated(function: Callable[[str], None]) -> Callable[[str], None]:
    """Return the function that `rank_zero_only` decorates, for messages of other ranks."""
    plain: Callable[[str], None] = inspect.unwrap(function)
    return plain


_BEFORE_TRAINING = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start")
_FOR_RANK_ZERO = rank_zero_only(lambda: None).__code__  # every function that it decorates has this code


def call_hooks_of_rank_zero(trainer: Trainer) -> None:
    """Call the hooks before training that only rank 0 runs, on a rank that becomes rank 0 during the run.

    Later hooks may need their results, as in ThroughputMonitor.
    """
    module = trainer.lightning_module
    for name in _BEFORE_TRAINING:
        stage = {"stage": "fit"} if name == "setup" else {}
        with _inside_hook(module, name):
            for each in (*callbacks_of(trainer), module):
                hook: Any = getattr(each, name, None)
                if _is_for_rank_zero(hook):
                    hook(**stage) if each is module else hook(trainer, module, **stage)


def show_progress_bar(trainer: Trainer, is_in_epoch: bool) -> None:
    """Enable and start the progress bar on a rank that becomes rank 0 during the run, perhaps inside an epoch."""
    bar = trainer.progress_bar_callback
    if bar is None:
        return
    try:
        bar.enable()
    except NotImplementedError:  # the user's own bar was never disabled
        return
    bar.on_train_start(trainer, trainer.lightning_module)
    if is_in_epoch:
        bar.on_train_epoch_start(trainer, trainer.lightning_module)


def _is_for_rank_zero(function: Any) -> bool:
    """Return whether `rank_zero_only` decorates a function, perhaps under other decorators."""
    while function is not None and getattr(function, "__code__", None) is not _FOR_RANK_ZERO:
        function = getattr(function, "__wrapped__", None)
    return function is not None


def checkpoint_of(trainer: Trainer) -> dict[str, Any]:
    """Return the checkpoint that Lightning would save now, without hyperparameters."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    for name in ("NAME", "KEY", "TYPE"):
        checkpoint.pop(getattr(trainer.lightning_module, f"CHECKPOINT_HYPER_PARAMS_{name}"), None)
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None:
        checkpoint.pop(datamodule.CHECKPOINT_HYPER_PARAMS_KEY, None)
    return checkpoint


def load_callbacks(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Load a result of `checkpoint_of` into module, data module, callbacks and precision plugin, by their hooks."""
    calls, connector = _calls_of(trainer), trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    try:
        calls._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
    finally:
        connector._loaded_checkpoint = {}


def load_states_of_callbacks(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Load the callbacks' own states; `load_callbacks` has called the hooks before."""
    _calls_of(trainer)._call_callbacks_load_state_dict(trainer, checkpoint)


def seed_workers(trainer: Trainer, loader: object, rank: int) -> None:
    """Seed a loader's workers by this rank, where `seed_everything` requests that.

    Lightning does so later, by the rank inside the Trainer's group, for loaders without a seed function.
    """
    if hasattr(loader, "worker_init_fn"):
        package = _calls_of(trainer).__name__.removesuffix(".call")
        sys.modules[f"{package}.connectors.data_connector"]._auto_add_worker_init_fn(loader, rank)


def reload_epochs(trainer: Trainer) -> list[float]:
    """Return the epochs in which the training and validation loaders were made last, from which reloads are counted."""
    loop: Any = trainer.fit_loop
    return [loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch]


def set_reload_epochs(trainer: Trainer, epochs: list[float]) -> None:
    """Set the epochs that `reload_epochs` returns."""
    loop: Any = trainer.fit_loop
    loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch = epochs


def begin_at(trainer: Trainer, epoch: int, counters: list[int]) -> None:
    """Set the fit loop to begin with an epoch, without a sanity check.

    ``counters`` are those of `progress_counters`, without the batches of this epoch.
    """
    progress: Any = trainer.fit_loop.epoch_progress
    for each in (progress.total, progress.current):
        each.ready = each.started = each.processed = each.completed = epoch
    set_progress_counters(trainer, [0, *counters])
    trainer.num_sanity_val_steps = 0


def known_metrics(trainer: Trainer) -> dict[str, float]:
    """Return the last callback metrics; ``callback_metrics`` would compute those of the new epoch."""
    return {name: float(value) for name, value in trainer._logger_connector._callback_metrics.items()}


def finds_rate(trainer: Trainer) -> bool:
    """Return whether a callback runs the loop inside a hook, to find a learning rate."""
    return any(hasattr(callback, "lr_find") for callback in callbacks_of(trainer))


def set_metrics(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Set the metrics that callbacks and schedulers read until there are newer ones."""
    known = {name: torch.tensor(value, device=trainer.strategy.root_device) for name, value in metrics.items()}
    trainer._logger_connector._callback_metrics.update(known)


_OF_CHECKPOINTS = ("dirpath", "_last_global_step_saved", "_last_checkpoint_saved")
"""Attributes that ModelCheckpoint uses and does not save in its state."""


def folders(trainer: Trainer) -> dict[str, Any]:
    """Return checkpoint folders and logger versions, which each launcher would choose for itself, and the last save."""
    loggers = [getattr(each, "version", None) for each in trainer.loggers]
    return {
        "checkpoints": {
            each.state_key: {name: _plain(getattr(each, name, None)) for name in _OF_CHECKPOINTS}
            for each in _folder_callbacks(trainer)
        },
        "loggers": [version if isinstance(version, (str, int)) else None for version in loggers],
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, os.PathLike) else value


def set_folders(trainer: Trainer, theirs: Mapping[str, Any]) -> None:
    """Use the folders of another group for checkpoints and for TensorBoard's logs."""
    for callback in _folder_callbacks(trainer):
        for name, value in theirs["checkpoints"].get(callback.state_key, {}).items():
            setattr(callback, name, value)
    for logger, version in zip(trainer.loggers, theirs["loggers"], strict=False):
        # A CSVLogger would delete the files there.
        if version is not None and type(logger).__name__ == "TensorBoardLogger":
            vars(logger)["_version"] = version


_OF_SAVES = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
)
"""Attributes of ModelCheckpoint about the files that rank 0 has written."""


def share_saves(trainer: Trainer, broadcast_from_recorder: Callable[[Any], Any]) -> None:
    """Copy the recorder's record of saved checkpoints to all ranks, which save and load in common.

    All ranks call it. Inside an epoch a ModelCheckpoint of each group follows that group's own steps and metrics.
    ``broadcast_from_recorder`` returns the recorder's argument on every rank; plain values and tensors.
    """
    callbacks = [each for each in callbacks_of(trainer) if hasattr(each, "best_k_models")]
    if not callbacks:
        return
    mine = [{name: _plain(getattr(each, name)) for name in _OF_SAVES if hasattr(each, name)} for each in callbacks]
    theirs = tree_map(
        lambda leaf: leaf.to(trainer.strategy.root_device) if isinstance(leaf, torch.Tensor) else leaf,
        broadcast_from_recorder(mine),
    )
    for callback, values in zip(callbacks, theirs, strict=True):
        vars(callback).update(values)


def _folder_callbacks(trainer: Trainer) -> list[Any]:
    return [each for each in callbacks_of(trainer) if hasattr(each, "dirpath")]


# --- Hooks of callbacks ----------------------------------------------------------------------------------------------


class _Relay:
    """A replacement for the function by which Lightning calls callbacks; it calls a listener first."""

    def __init__(self, call_callbacks: Callable[..., None]) -> None:
        self.call_callbacks = call_callbacks
        self.listeners: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.held_back: WeakKeyDictionary[Any, Collection[str]] = WeakKeyDictionary()

    def __call__(
        self, trainer: Trainer, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
    ) -> None:
        hook = getattr(self.listeners.get(trainer), hook_name, None)
        if hook is not None and monitoring_callbacks is not True:  # Lightning calls those in a second round
            with _inside_hook(trainer.lightning_module, hook_name):
                hook(trainer, trainer.lightning_module, *args, **kwargs)
        if hook_name in self.held_back.get(trainer, ()):
            return
        self.call_callbacks(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)


@contextmanager
def _inside_hook(module: LightningModule, name: str) -> Iterator[None]:
    """Return a context in which ``module.log`` is called in the hook of this name."""
    before, module._current_fx_name = module._current_fx_name, name
    try:
        yield
    finally:
        module._current_fx_name = before


def _calls_of(trainer: Trainer) -> Any:
    """Return the module of the Trainer's own namespace through which its loops call hooks."""
    own = next(kind for kind in type(trainer).__mro__ if kind.__module__.endswith("trainer.trainer"))
    return sys.modules[own.__module__.removesuffix("trainer") + "call"]


def listen(trainer: Trainer, listener: Any) -> None:
    """Call the listener's methods of the same name before any callback's hooks, from now on.

    The listener need not be in ``trainer.callbacks``.
    """
    calls = _calls_of(trainer)
    if not isinstance(calls._call_callback_hooks, _Relay):
        calls._call_callback_hooks = _Relay(calls._call_callback_hooks)
    calls._call_callback_hooks.listeners[trainer] = listener


def stop_listening(trainer: Trainer) -> None:
    """Undo `listen`."""
    calls = _calls_of(trainer)
    relay = calls._call_callback_hooks
    if isinstance(relay, _Relay):
        relay.listeners.pop(trainer, None)
        if not relay.listeners:
            calls._call_callback_hooks = relay.call_callbacks


# --- Control of the loops --------------------------------------------------------------------------------------------


class LoopControl(Protocol):
    """A controller that decides for the loops when an epoch begins and ends, and when to validate."""

    @property
    def step_limit(self) -> int | None:
        """Return the number of steps that the loops use as max_steps; None for their own."""

    @property
    def is_open_ended(self) -> bool:
        """Return whether an epoch ends when `set_last_batch` sets it, whatever the number of batches."""

    @property
    def is_cut_short(self) -> bool:
        """Return whether max_steps end the epoch before its samples do, so that schedules by epoch do not count it."""

    def run(self, run: Callable[[], None]) -> None:
        """Run the fit loop."""

    def begin_setup(self) -> None:
        """Prepare for the loop to make its loaders, for the first time or again."""

    def begin_epoch(self, iterate: Callable[[], None]) -> None:
        """Begin an epoch; ``iterate`` starts the loader."""

    def epoch_has_ended(self) -> None:
        """End an epoch after all its hooks, before the loop checks whether training ends."""

    def begin_fetch(self) -> None:
        """Prepare for the loop to fetch a batch from the loader."""

    def end_fetch(self) -> None:
        """Note that the loader has returned or failed."""

    def validates(self, is_due: Callable[[], bool]) -> bool:
        """Return whether to validate after this batch; ``is_due`` returns the loop's own decision."""

    def validate(self, run: Callable[[], Any]) -> Any:
        """Run the validation loop."""

    def stepped_by_batches(self, configs: list[Any]) -> list[Any]:
        """Return the schedulers that the loop steps by the number of this rank's batch."""

    def step_schedule(self, scheduler: Any, step: Callable[[], Any]) -> None:
        """Make the loop's call ``step`` of the module's ``lr_scheduler_step``."""

    def own_batches(self, batches: float) -> float:
        """Return the ``num_training_batches`` that user code reads; ``batches`` is Lightning's value."""


class _ControlledTrainer(_Trainer):
    """A mixin for the Trainer's own class."""

    _control: LoopControl

    @property
    @override
    def num_training_batches(self) -> float:
        batches = super().num_training_batches
        return batches if vars(self).get("_estimates") else self._control.own_batches(batches)

    @property
    @override
    def estimated_stepping_batches(self) -> float:
        vars(self)["_estimates"] = True  # the estimate for all epochs uses the number of batches under DDP
        try:
            return super().estimated_stepping_batches
        finally:
            del vars(self)["_estimates"]


class _ControlledFitLoop(_FitLoop):
    """A mixin for the fit loop's own class."""

    _control: LoopControl

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
        loop, limit = self.epoch_loop, self._control.step_limit
        is_reached = limit is not None and -1 < limit <= loop.global_step
        if is_reached and self.max_batches != 0 and (loop.max_steps == -1 or self.trainer.should_stop):
            return True  # another group has stopped the run, and Lightning's message would say that max_steps have
        with _limited(loop, limit):
            return super().done


class _ControlledEpochLoop(_TrainingEpochLoop):
    """A mixin for the epoch loop's own class."""

    _control: LoopControl

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
        with _limited(self, self._control.step_limit):
            return super()._is_training_done

    @override
    def _num_ready_batches_reached(self) -> bool:
        if self._control.is_open_ended:
            return self.batch_progress.is_last_batch
        return super()._num_ready_batches_reached()

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        if interval == "epoch" and self._control.is_cut_short:
            return
        configs = self.trainer.lr_scheduler_configs
        due = self._control.stepped_by_batches(configs) if interval == "step" else configs
        with scheduled(self.trainer, due), _stepping(self.trainer, self._control.step_schedule):
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    @override
    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        return self._control.validates(partial(super()._should_check_val_fx, data_fetcher))


class _ControlledValidationLoop(_EvaluationLoop):
    """A mixin for the validation loop's own class."""

    _control: LoopControl

    @override
    def run(self) -> Any:
        return self._control.validate(super().run)


@contextmanager
def _iterating(fit_loop: Any) -> Iterator[None]:
    """Return a context in which `loops_iterate` returns True."""
    fit_loop._iterates = True
    try:
        yield
    finally:
        vars(fit_loop).pop("_iterates", None)


def loops_iterate(trainer: Trainer) -> bool:
    """Return whether the loops begin to iterate the training data; learning-rate finders do this inside a hook."""
    return hasattr(trainer.fit_loop, "_iterates")


class _Limit(int):
    """A number of steps that Lightning's message shows as the user's max_steps."""

    shown: int

    @override
    def __repr__(self) -> str:
        return repr(self.shown)


@contextmanager
def _limited(epoch_loop: Any, max_steps: int | None) -> Iterator[None]:
    """Return a context in which the loop has this max_steps; all other code reads the user's."""
    before = epoch_loop.max_steps
    if max_steps is not None:
        epoch_loop.max_steps = _Limit(max_steps)
        epoch_loop.max_steps.shown = before
    try:
        yield
    finally:
        epoch_loop.max_steps = before


def control_loops(trainer: Trainer, control: LoopControl) -> None:
    """Install ``control``, which decides for the Trainer's loops from now on; their public interface stays the same."""
    epoch_loop = trainer.fit_loop.epoch_loop
    for loop, mixin in (
        (trainer, _ControlledTrainer),
        (trainer.fit_loop, _ControlledFitLoop),
        (epoch_loop, _ControlledEpochLoop),
        (epoch_loop.val_loop, _ControlledValidationLoop),
    ):
        _give_back_class(loop)
        own = type(loop)
        fields = {"_control": control, "__module__": own.__module__, "__doc__": own.__doc__}
        loop.__class__ = type(own.__name__, (mixin, own), fields)


def release_loops(trainer: Trainer) -> None:
    """Undo `control_loops`."""
    for loop in (trainer, trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop):
        _give_back_class(loop)


def _give_back_class(loop: Any) -> None:
    if isinstance(loop, (_ControlledTrainer, _ControlledFitLoop, _ControlledEpochLoop, _ControlledValidationLoop)):
        del type(loop)._control  # the class is freed late and must not keep the run alive
        loop.__class__ = type(loop).__mro__[2]


# --- Metrics of torchmetrics with lists of different lengths ----------------------------------------------------------


class _Joined:
    """A replacement for the method by which a metric gathers the states of all ranks: see `join_lists`."""

    def __init__(self, sync: Callable[..., None], is_needed: Callable[[], bool]) -> None:
        self.sync, self.is_needed = sync, is_needed

    def __get__(self, metric: Any, owner: Any = None) -> Any:
        return self if metric is None else partial(self._join, metric)

    def _join(self, metric: Any, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        sync = partial(self.sync, metric, dist_sync_fn, process_group)
        lists = {name: own for name in metric._reductions if isinstance(own := getattr(metric, name), list)}
        if not lists or dist_sync_fn is not gather_all_tensors or not self.is_needed():
            sync()
            return
        group = process_group or metric.process_group or dist.group.WORLD
        of_each = dict(zip(lists, zip(*_sizes(lists.values(), group, metric.device), strict=True), strict=True))
        for name, sizes in of_each.items():
            most, dims, kind = max(sizes)
            missing = most - len(lists[name])
            if missing and min(sizes)[0] >= 0 and not (lists[name] and metric._reductions[name] is dim_zero_cat):
                device = lists[name][0].device if lists[name] else metric.device
                empty = torch.empty([0] * dims, dtype=_DTYPES[kind], device=device)
                setattr(metric, name, [*lists[name], *[empty] * missing])
        sync()
        for name, sizes in of_each.items():
            if metric._reductions[name] is None and min(sizes)[0] >= 0:
                lengths = [length for length, *_ in sizes]  # gathered entries are in the order of indices, then ranks
                joined = enumerate(getattr(metric, name))
                ours = [each for place, each in joined if place // len(lengths) < lengths[place % len(lengths)]]
                setattr(metric, name, ours)


_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)


def _sizes(lists: Iterable[list[Any]], group: Any, device: torch.device) -> list[list[tuple[int, int, int]]]:
    """Return for each rank and each list its length (-1 if it has no tensors), and its tensors' dimensions and type."""
    mine = torch.tensor([_size(each) for each in lists], device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [[(length, dims, kind) for length, dims, kind in each.tolist()] for each in everyone]


def _size(entries: list[Any]) -> tuple[int, int, int]:
    if not all(isinstance(each, Tensor) and each.dtype in _DTYPES for each in entries):
        return -1, 0, 0
    return (len(entries), entries[0].dim(), _DTYPES.index(entries[0].dtype)) if entries else (0, 0, 0)


def join_lists(is_needed: Callable[[], bool]) -> None:
    """Patch metrics so that they can gather lists (of one tensor per batch or image) of different lengths.

    torchmetrics gathers the first tensor of all ranks, then the second, and so on; ranks with fewer tensors are in
    another collective by then. ``is_needed`` returns whether ranks may have trained different numbers of batches.
    """
    separate_lists()
    Metric._sync_dist = _Joined(Metric._sync_dist, is_needed)  # type: ignore[method-assign,assignment]


def separate_lists() -> None:
    """Undo `join_lists`."""
    joined = vars(Metric)["_sync_dist"]
    if isinstance(joined, _Joined):
        Metric._sync_dist = joined.sync  # type: ignore[method-assign]


# --- Metrics of an epoch that all ranks reduce together ---------------------------------------------------------------

_TOLD = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "metric_attribute",
)
"""The metadata of a result that ranks exchange."""


def logged_together(trainer: Trainer, group: Any) -> list[Any]:
    """Return the metrics of the last epoch that ranks reduce by collectives, as keys and plain values.

    ``group`` is the process group that was ``dist.group.WORLD`` in the epoch.
    """
    results: Any = trainer.fit_loop.epoch_loop._results
    found = []
    for key, result in results.items():
        meta, reduce_fx = result.meta, result.meta.reduce_fx
        if meta.on_epoch and not result.has_reset and _is_common(result, group):
            dtype = str(result.value.dtype).removeprefix("torch.") if result.is_tensor else ""
            is_torchs = getattr(torch, reduce_fx.__name__, None) is reduce_fx
            reduced = (reduce_fx.__name__, is_torchs, meta.sync.should, meta.sync.group is not None)
            told = {name: getattr(meta, name) for name in _TOLD}
            found.append((key, dtype, reduced, told))
    return found


def _is_common(result: Any, group: Any) -> bool:
    """Return whether all ranks compute a result together."""
    sync = result.meta.sync
    if sync.rank_zero_only:
        return False
    if not result.is_tensor:
        return bool(result.value.sync_on_compute)
    return bool(sync.should) and (sync.group is None or sync.group is group)


def log_together(trainer: Trainer, group: Any, of_all: Sequence[list[Any]]) -> None:
    """Make all ranks reduce every metric that any rank has logged in the epoch, in the same order.

    A group that trains few batches may not reach the batch in which a program logs a metric. Lightning reduces on each
    rank the metrics that this rank has logged, so that different metrics of two ranks would be combined.

    Args:
        trainer: the Trainer, after its epoch.
        group: as in `logged_together`.
        of_all: results of `logged_together` of all ranks, in the order of ranks.

    Raises:
        UnsupportedError: another rank has logged a metric object that the module does not have here.
    """
    results: Any = trainer.fit_loop.epoch_loop._results
    doubles = {key for logged in of_all for key, dtype, *_ in logged if dtype == "float64"}
    for key, dtype, reduced, told in {each[0]: each for logged in of_all for each in logged}.values():
        result = results.pop(key, None)
        if result is None:
            result = _not_logged(trainer, group if reduced[-1] else None, bool(dtype), reduced, told)
        if result.has_reset or not result.update_called:  # this rank has not logged it in this epoch and adds nothing
            result.has_reset, result._computed, result._update_count = False, None, 1
        if dtype:  # a reduction needs one type on all ranks
            result.value = result.value.to(torch.float64 if key in doubles else torch.float32)
        results[key] = result


def _not_logged(trainer: Trainer, group: Any, is_tensor: bool, reduced: Any, told: Mapping[str, Any]) -> Any:
    """Return a result with the metadata of another rank, to which this rank adds nothing."""
    results: Any = trainer.fit_loop.epoch_loop._results
    made: Any = sys.modules[type(results).__module__]
    name, is_torchs, should, _ = reduced
    meta = made._Metadata(**told, reduce_fx=getattr(torch if is_torchs else builtins, name))
    meta.sync = made._Sync(_should=should, fn=trainer.strategy.reduce, _group=group)
    result = made._ResultMetric(meta, is_tensor).to(trainer.strategy.root_device)
    if not is_tensor:
        try:
            result.value = attrgetter(meta.metric_attribute)(trainer.lightning_module)
        except AttributeError as error:
            raise UnsupportedError(
                f"self.log({meta.name!r}, ...): another rank has logged the metric {meta.metric_attribute}, and the"
                " LightningModule has none here: make metrics where all ranks do, as in __init__"
            ) from error
    return result


# --- A validation by one group, whose metrics all groups receive ------------------------------------------------------

_ENDS = ("on_validation_epoch_end", "on_validation_end")
_STARTS = ("on_validation_start", "on_validation_epoch_start")


def validation_loaders(trainer: Trainer) -> list[Any]:
    """Return the loaders of a fit's validation, and make them first if there are none. All ranks call it."""
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    loop.setup_data()
    return [] if loop._combined_loader is None else list(loop._combined_loader.flattened)


@contextmanager
def dealt_out(trainer: Trainer, place: int, members: int) -> Iterator[None]:
    """Return a context in which ``members`` ranks divide the validation data; this rank is number ``place`` of them.

    The trainer's `validation_loaders` have DistributedSamplers.
    """
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    loaders, limits = validation_loaders(trainer), loop._max_batches
    before = [(each.sampler.num_replicas, each.sampler.rank, len(each)) for each in loaders]
    for loader in loaders:
        _deal_out(loader, place, members)
    loop._max_batches = [
        min(len(loader), -(-int(limit) * ranks // members)) if limit < whole else len(loader)
        for loader, limit, (ranks, _, whole) in zip(loaders, limits, before, strict=True)
    ]
    try:
        yield
    finally:
        loop._max_batches = limits
        for loader, (ranks, rank, _) in zip(loaders, before, strict=True):
            _deal_out(loader, rank, ranks)


def _deal_out(loader: DataLoader[Any], place: int, members: int) -> None:
    sampler = loader.sampler
    assert isinstance(sampler, DistributedSampler)
    sampler.rank, sampler.num_replicas = place, members
    sampler.num_samples = -(-len(sampler.dataset) // members)  # type: ignore[arg-type]
    sampler.total_size = sampler.num_samples * members


@contextmanager
def metrics_held_back(trainer: Trainer) -> Iterator[dict[str, dict[str, Any]]]:
    """Return a context in which a validation's metrics are captured and callbacks do not get the hooks of its end.

    Yields:
        Dicts that hold, after the validation, the metrics meant for callbacks, progress bars and loggers.
    """
    connector, relay = trainer._logger_connector, _calls_of(trainer)._call_callback_hooks
    names = {"callback": "_callback_metrics", "progress_bar": "_progress_bar_metrics"}
    kept = {name: getattr(connector, attribute) for name, attribute in names.items()}
    found: dict[str, dict[str, Any]] = {name: {} for name in (*names, "logged")}
    for name, attribute in names.items():
        setattr(connector, attribute, ChainMap(found[name], kept[name]))
    logged_before = dict(connector._logged_metrics)
    connector.log_eval_end_metrics = found["logged"].update  # type: ignore[method-assign,assignment]
    relay.held_back[trainer] = _ENDS
    try:
        yield found
    finally:
        del relay.held_back[trainer]
        vars(connector).pop("log_eval_end_metrics")
        connector._logged_metrics = logged_before
        for name, attribute in names.items():
            setattr(connector, attribute, kept[name])


@torch.no_grad()
def end_validation(trainer: Trainer, found: Mapping[str, Mapping[str, Any]], has_started: bool) -> None:
    """Pass the metrics of a validation, from `metrics_held_back`, to callbacks, progress bars and loggers.

    The hooks of its end are called, and those of its start if ``has_started`` is False.
    """
    connector: Any = trainer._logger_connector
    call = partial(_calls_of(trainer)._call_callback_hooks, trainer)
    stage, first_iteration = trainer.state.stage, connector._first_loop_iter
    trainer.validating = True
    try:
        connector.epoch_end_reached()
        connector._evaluation_epoch_end()
        for hook in () if has_started else _STARTS:
            call(hook)
        connector._callback_metrics.update(found["callback"])
        connector._progress_bar_metrics.update(found["progress_bar"])
        connector._logged_metrics.update(found["logged"])
        call("on_validation_epoch_end")
        connector.on_epoch_end()
        connector.log_eval_end_metrics({**found["logged"], **connector.update_eval_epoch_metrics()})
        call("on_validation_end")
        connector.reset_results()
    finally:
        trainer.state.stage, connector._first_loop_iter = stage, first_iteration
