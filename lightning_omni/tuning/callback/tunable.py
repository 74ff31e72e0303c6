"""Fits that can be tuned, and the batch size of their loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_omni.errors import ConfigurationError
from lightning_omni.strategy.declared import is_fast_dev_run
from lightning_omni.tuning.trainer import arguments_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def check_tunable(trainer: Trainer) -> None:
    """Reject a fit that cannot be tuned.

    Raises:
        ConfigurationError: it cannot be tuned; the message states why.
    """
    if is_fast_dev_run(trainer):
        raise ConfigurationError("fast_dev_run trains too little")
    if not trainer.lightning_module.automatic_optimization:
        raise ConfigurationError("with manual optimization only training_step knows what a step is")
    if len(trainer.optimizers) != 1:
        raise ConfigurationError(f"it needs one optimizer, and there are {len(trainer.optimizers)}")
    arguments_of(type(trainer.lightning_module).training_step)
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError("the training data are a stream, or come from several loaders")
    if loader.batch_size is None and getattr(loader.batch_sampler, "batch_size", None) is None:
        raise ConfigurationError("the DataLoader does not say how large its batches are")


def batch_size_of(loader: DataLoader[Any]) -> int:
    """Return the samples in one rank's batch."""
    return int(loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1)
