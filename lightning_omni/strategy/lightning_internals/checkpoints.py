"""Checkpoints of callbacks, and the folders and files that ModelCheckpoint and loggers record."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from lightning_omni.strategy.lightning_internals.callbacks import call_module, callbacks_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Return the checkpoint that Lightning would save now, without hyperparameters."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    for name in ("NAME", "KEY", "TYPE"):
        checkpoint.pop(getattr(trainer.lightning_module, f"CHECKPOINT_HYPER_PARAMS_{name}"), None)
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None:
        checkpoint.pop(datamodule.CHECKPOINT_HYPER_PARAMS_KEY, None)
    return checkpoint


def load_checkpoint(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Load a result of `dump_checkpoint` into module, data module, callbacks and precision plugin, by their hooks."""
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
    """Load the callbacks' own states; `load_checkpoint` has called the hooks before."""
    call_module(trainer)._call_callbacks_load_state_dict(trainer, checkpoint)


_FOLDER_ATTRIBUTES = ("dirpath", "_last_global_step_saved", "_last_checkpoint_saved")
"""Attributes that ModelCheckpoint uses and does not save in its state."""


def output_folders(trainer: Trainer) -> dict[str, Any]:
    """Return checkpoint folders and logger versions, which each launcher would choose for itself, and the last save."""
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
    """Use the folders of another group for checkpoints and for TensorBoard's logs."""
    for callback in _folder_callbacks(trainer):
        for name, value in theirs["checkpoints"].get(callback.state_key, {}).items():
            setattr(callback, name, value)
    for logger, version in zip(trainer.loggers, theirs["loggers"], strict=False):
        # A CSVLogger would delete the files there.
        if version is not None and type(logger).__name__ == "TensorBoardLogger":
            vars(logger)["_version"] = version


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
"""Attributes of ModelCheckpoint about the files that rank 0 has written."""


def copy_checkpoint_records(trainer: Trainer, broadcast_from_recorder: Callable[[Any], Any]) -> None:
    """Copy the recorder's record of saved checkpoints to all ranks, which save and load in common.

    All ranks call it. Inside an epoch a ModelCheckpoint of each group follows that group's own steps and metrics.
    ``broadcast_from_recorder`` returns the recorder's argument on every rank; plain values and tensors.
    """
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
