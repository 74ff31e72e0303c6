"""Typed access to public attributes of the Trainer that its class does not declare, so that type checkers miss them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from pytorch_lightning.callbacks import Callback
    from torch.utils.data import DataLoader


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the Trainer's callbacks, in the order in which they are called."""
    callbacks: list[Callback] = cast(Any, trainer).callbacks
    return callbacks


def is_fast_dev_run(trainer: Trainer) -> bool:
    """Return whether the Trainer runs only a few batches, as a smoke test."""
    return bool(cast(Any, trainer).fast_dev_run)


def reloads(trainer: Trainer) -> bool:
    """Return whether loaders are made again every few epochs, perhaps with another length."""
    return bool(cast(Any, trainer).reload_dataloaders_every_n_epochs)


def loader_of(trainer: Trainer) -> DataLoader[Any]:
    """Return the Trainer's training data, where that is one DataLoader."""
    return cast("DataLoader[Any]", trainer.train_dataloader)
