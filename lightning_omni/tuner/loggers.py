"""What a Trainer's loggers are told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def log(trainer: Trainer, metrics: Mapping[str, float]) -> Path | None:
    """Tells the loggers; called on all ranks.

    Returns:
        The folder of the first one, for a report, on rank 0; None elsewhere, and if it has none on this machine.
    """
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=trainer.global_step)
    folder = trainer.log_dir if trainer.loggers else None  # asks all ranks
    return None if folder is None or "://" in str(folder) or not trainer.is_global_zero else Path(folder)
