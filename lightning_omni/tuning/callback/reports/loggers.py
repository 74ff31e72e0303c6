"""Metrics for a Trainer's loggers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def log(trainer: Trainer, metrics: Mapping[str, float]) -> Path | None:
    """Log metrics to all loggers, on all ranks.

    Returns:
        The folder of the first logger, on rank 0; None on other ranks, and if it has none on this machine.
    """
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=trainer.global_step)
    folder = trainer.log_dir if trainer.loggers else None  # a collective of all ranks
    return None if folder is None or "://" in str(folder) or not trainer.is_global_zero else Path(folder)
