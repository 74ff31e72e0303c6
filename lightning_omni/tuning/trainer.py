"""Lightning for both tuners: a Trainer's namespace and loggers, checks, and the arguments of ``training_step``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_omni.errors import ConfigurationError
from lightning_omni.strategy import NAMESPACES, module_in
from lightning_omni.strategy.lightning_internals.callbacks import is_fast_dev_run
from lightning_omni.strategy.namespaces import namespace_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def names_for(trainer: object) -> Any:
    return module_in("tuning.callback", namespace_of(type(trainer)) or NAMESPACES[-1]).Names


def log(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=trainer.global_step)


def folder_of(trainer: Trainer) -> Path | None:
    """Return the folder of the first logger, on rank 0, if it is on this machine. All ranks call it."""
    folder = trainer.log_dir if trainer.loggers else None
    return None if folder is None or "://" in str(folder) or not trainer.is_global_zero else Path(folder)


def arguments_of(step: Callable[..., Any]) -> tuple[int, ...]:
    """Return the arguments of a class's training_step beside the batch: 0, the batch's number, or none.

    Raises:
        ConfigurationError: its first argument is ``dataloader_iter``.
    """
    parameters = [each for each in inspect.signature(step).parameters.values() if each.kind <= each.VAR_POSITIONAL][1:]
    if parameters and parameters[0].name == "dataloader_iter":
        raise ConfigurationError("training_step draws its batches itself from dataloader_iter")
    many = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    return (0,) if many or len(parameters) > 1 else ()


def log_nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a function that logs."""


def check_tunable(trainer: Trainer) -> None:
    if is_fast_dev_run(trainer):
        raise ConfigurationError("fast_dev_run trains too little")
    if not trainer.lightning_module.automatic_optimization:
        raise ConfigurationError("with manual optimization only training_step knows what a step is")
    arguments_of(type(trainer.lightning_module).training_step)
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError("the training data are a stream, or come from several loaders")
    if loader.batch_size is None and getattr(loader.batch_sampler, "batch_size", None) is None:
        raise ConfigurationError("the DataLoader does not say how large its batches are")


def batch_size_of(loader: DataLoader[Any]) -> int:
    return int(loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1)


def end_epoch(trainer: Trainer) -> None:
    """End the epoch, from ``on_train_batch_start``, as if the module's hook had returned -1."""
    trainer.fit_loop.epoch_loop.batch_progress.increment_processed()
    raise StopIteration
