"""Calls of callbacks' hooks, the averages of weights that callbacks hold, and their checkpoints."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn import Module
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_map

from lightning_omni.runtime.model.tensor_sync import write

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import Callback
    from torch.utils.data import DataLoader


def is_inside_hook(trainer: Trainer) -> bool:
    return trainer.lightning_module._current_fx_name is not None


def current_hook(trainer: Trainer) -> str:
    return trainer.lightning_module._current_fx_name or ""


def clear_current_hook(trainer: Trainer) -> None:
    """Clear the current hook, which an interrupted fit leaves behind."""
    trainer.lightning_module._current_fx_name = None


def deciding_callbacks(trainer: Trainer) -> list[str]:
    """Return the state keys, and settings, of callbacks that save, stop, tune, freeze or prune."""
    names = {"ModelCheckpoint", "EarlyStopping", "OmniTuner", "BaseFinetuning", "ModelPruning"}
    found = (each for each, its in _classes_of_callbacks(trainer) if names & its)
    return [f"{each.state_key}{getattr(each, 'omni_settings', '')}" for each in found]


def limits_in_callbacks(trainer: Trainer) -> dict[str, str]:
    """Return what callbacks set that Lightning has as arguments, too: accumulated batches, and the duration of the fit.

    Example:
        >>> from pytorch_lightning import Trainer
        >>> limits_in_callbacks(Trainer(max_time={"seconds": 9}, logger=False, enable_checkpointing=False))
        {'max_time': '9.0 s', 'GradientAccumulationScheduler': 'none'}
    """
    found = list[str](), list[str]()
    for each, its in _classes_of_callbacks(trainer):
        if "Timer" in its:
            found[0].append(f"{each._duration} s")  # type: ignore[attr-defined]
        if "GradientAccumulationScheduler" in its:
            found[1].append(str(each.scheduling))  # type: ignore[attr-defined]
    times, windows = (", ".join(each) or "none" for each in found)
    return {"max_time": times, "GradientAccumulationScheduler": windows}


def _classes_of_callbacks(trainer: Trainer) -> Iterator[tuple[Callback, set[str]]]:
    # Names are the same in both of Lightning's namespaces.
    return ((each, {kind.__name__ for kind in type(each).__mro__}) for each in callbacks_of(trainer))


_BEFORE_TRAINING = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start")


_FOR_RANK_ZERO = rank_zero_only(lambda: None).__code__  # every function that it decorates has this code


def call_rank_zero_hooks(trainer: Trainer) -> None:
    """Call the hooks before training that only rank 0 runs, on a new rank 0.

    Later hooks may need their results, as in ThroughputMonitor.
    """
    module = trainer.lightning_module
    before, trainer.training = trainer.state.stage, True  # a validation may be about to begin
    for name in _BEFORE_TRAINING:
        stage = {"stage": "fit"} if name == "setup" else {}
        with _inside_hook(module, name):
            for each in (*callbacks_of(trainer), module):
                hook: Any = getattr(each, name, None)
                if _is_for_rank_zero(hook):
                    hook(**stage) if each is module else hook(trainer, module, **stage)
    trainer.state.stage = before


def show_progress_bar(trainer: Trainer, is_in_epoch: bool) -> None:
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
    while function is not None and getattr(function, "__code__", None) is not _FOR_RANK_ZERO:
        function = getattr(function, "__wrapped__", None)
    return function is not None


class _CallbackRelay:
    """A replacement for Lightning's call of callbacks, which calls a listener first."""

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
        if self.held_back and hook_name in self.held_back.get(trainer, ()):
            return
        try:
            self.call_callbacks(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
        except BaseException:
            if hook_name == "on_exception" and trainer in self.listeners:  # Lightning does not call the strategy's then
                self.listeners[trainer].failures.report(*args)
            raise


@contextmanager
def _inside_hook(module: LightningModule, name: str) -> Iterator[None]:
    attributes = vars(module)  # assignments to a module's attributes search its parameters, buffers and submodules
    before, attributes["_current_fx_name"] = module._current_fx_name, name
    try:
        yield
    finally:
        attributes["_current_fx_name"] = before


def call_module(trainer: Trainer) -> Any:
    """Return the module of the Trainer's namespace through which its loops call hooks."""
    own = next(kind for kind in type(trainer).__mro__ if kind.__module__.endswith("trainer.trainer"))
    return sys.modules[own.__module__.removesuffix("trainer") + "call"]


def add_listener(trainer: Trainer, listener: Any) -> None:
    """Call the listener before any callback's hook of the same name."""
    calls = call_module(trainer)
    if not isinstance(calls._call_callback_hooks, _CallbackRelay):
        calls._call_callback_hooks = _CallbackRelay(calls._call_callback_hooks)
    calls._call_callback_hooks.listeners[trainer] = listener


def remove_listener(trainer: Trainer) -> None:
    calls = call_module(trainer)
    relay = calls._call_callback_hooks
    if isinstance(relay, _CallbackRelay):
        relay.listeners.pop(trainer, None)
        if not relay.listeners:
            calls._call_callback_hooks = relay.call_callbacks


def callbacks_of(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = cast(Any, trainer).callbacks
    return callbacks


def is_fast_dev_run(trainer: Trainer) -> bool:
    return bool(cast(Any, trainer).fast_dev_run)


def reloads(trainer: Trainer) -> bool:
    return bool(cast(Any, trainer).reload_dataloaders_every_n_epochs)


def loader_of(trainer: Trainer) -> DataLoader[Any]:
    return cast("DataLoader[Any]", trainer.train_dataloader)


def averaged_models(trainer: Trainer) -> list[Any]:
    return [average for _, average in _averaging(trainer) if isinstance(average, AveragedModel)]


def _averaging(trainer: Trainer) -> Iterator[tuple[Any, Module]]:
    for callback in callbacks_of(trainer):
        if isinstance(average := getattr(callback, "_average_model", None), Module):
            yield callback, average


def averaged_tensors(trainer: Trainer) -> Iterator[Tensor]:
    for callback, average in _averaging(trainer):
        yield from (*average.parameters(), *average.buffers())
        if hasattr(callback, "n_averaged"):  # StochasticWeightAveraging creates it with its first update
            if callback.n_averaged is None:
                callback.n_averaged = torch.tensor(callback._init_n_averaged, device=trainer.strategy.root_device)
            yield callback.n_averaged


def copy_averages_to_module(trainer: Trainer) -> None:
    for callback, average in _averaging(trainer):
        if isinstance(average, AveragedModel):
            callback._copy_average_to_current(trainer.lightning_module)
        elif trainer.current_epoch > getattr(callback, "swa_end", math.inf):
            callback.transfer_weights(average, trainer.lightning_module)


@torch.no_grad()
def restart_empty_averages(trainer: Trainer) -> None:
    """Set averages that contain no update yet to the current weights, after weights were set back.

    Without an update, a callback would copy the weights from before training into the module at the end.
    """
    for callback, average in _averaging(trainer):
        counted, kept = (average, average.module) if isinstance(average, AveragedModel) else (callback, average)
        if getattr(counted, "n_averaged", None) == 0:
            own, copies = ((*each.parameters(), *each.buffers()) for each in (trainer.lightning_module, kept))
            for tensor, copied in zip(own, copies, strict=False):
                write(copied, tensor)


def averages_weights(trainer: Trainer) -> bool:
    return any(hasattr(callback, "_average_model") for callback in callbacks_of(trainer))


def lower_last_average_step(trainer: Trainer) -> None:
    """Let WeightAveraging continue after steps were set back."""
    averaging: list[Any] = [each for each in callbacks_of(trainer) if hasattr(each, "_latest_update_step")]
    for each in averaging:
        each._latest_update_step = min(each._latest_update_step, trainer.global_step)


# --- Checkpoints, and the folders and files that ModelCheckpoint and loggers record -----------------------------------


def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    for name in ("NAME", "KEY", "TYPE"):
        checkpoint.pop(getattr(trainer.lightning_module, f"CHECKPOINT_HYPER_PARAMS_{name}"), None)
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None:
        checkpoint.pop(datamodule.CHECKPOINT_HYPER_PARAMS_KEY, None)
    return checkpoint


def forget_loaded_path(trainer: Trainer) -> None:
    """Forget the checkpoint that an earlier run has loaded: a hook of this fit may load it for its weights."""
    if not (connector := trainer._checkpoint_connector)._user_managed:
        connector._ckpt_path = None


def load_checkpoint(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    calls, connector = call_module(trainer), trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    try:
        calls._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
    finally:
        connector._loaded_checkpoint = {}


def load_callback_states(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    call_module(trainer)._call_callbacks_load_state_dict(trainer, checkpoint)


_FOLDER_ATTRIBUTES = ("dirpath", "_last_global_step_saved", "_last_checkpoint_saved")
"""Attributes that ModelCheckpoint uses and does not load from its state."""


def output_folders(trainer: Trainer) -> dict[str, Any]:
    loggers = [getattr(each, "version", None) for each in trainer.loggers]
    return {
        "checkpoints": {
            each.state_key: {name: _plain_value(getattr(each, name, None)) for name in _FOLDER_ATTRIBUTES}
            for each in _folder_callbacks(trainer)
        },
        "loggers": [version if isinstance(version, (str, int)) else None for version in loggers],
    }


def _plain_value(value: Any) -> Any:
    return str(value) if isinstance(value, os.PathLike) else value


def set_output_folders(trainer: Trainer, theirs: Mapping[str, Any]) -> None:
    for callback in _folder_callbacks(trainer):
        for name, value in theirs["checkpoints"].get(callback.state_key, {}).items():
            setattr(callback, name, value)
    for logger, version in zip(trainer.loggers, theirs["loggers"], strict=False):
        if version is not None and type(logger).__name__ == "TensorBoardLogger":
            vars(logger)["_version"] = version


def use_own_folders(trainer: Trainer) -> None:
    """Give a new recorder's CSVLoggers, which delete the files in their folders, new ones."""
    loggers: list[Any] = trainer.loggers
    for logger in loggers:
        is_csv = any(kind.__name__ == "CSVLogger" for kind in type(logger).__mro__)
        if is_csv and logger._experiment is None and logger._fs.exists(logger.log_dir):
            logger._version = logger._get_next_version()


_RECORD_ATTRIBUTES = (
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
"""Attributes of ModelCheckpoint about the saves of rank 0, and their scores."""


def copy_checkpoint_records(trainer: Trainer, broadcast_from_recorder: Callable[[Any], Any]) -> None:
    """Copy the recorder's record of saved checkpoints to all ranks, which call this."""
    callbacks = [each for each in callbacks_of(trainer) if hasattr(each, "best_k_models")]
    if not callbacks:
        return
    mine = [
        {name: _plain_value(getattr(each, name)) for name in _RECORD_ATTRIBUTES if hasattr(each, name)}
        for each in callbacks
    ]
    theirs = tree_map(
        lambda leaf: leaf.to(trainer.strategy.root_device) if isinstance(leaf, torch.Tensor) else leaf,
        broadcast_from_recorder(mine),
    )
    for callback, values in zip(callbacks, theirs, strict=True):
        vars(callback).update(values)


def _folder_callbacks(trainer: Trainer) -> list[Any]:
    return [each for each in callbacks_of(trainer) if hasattr(each, "dirpath")]
