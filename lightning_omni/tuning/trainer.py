"""Lightning for both tuners: the namespace of a Trainer, its loggers, and a ``training_step`` without its loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_omni.errors import ConfigurationError
from lightning_omni.strategy import NAMESPACES, module_in
from lightning_omni.strategy.namespaces import namespace_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def tuner_module(kind: type) -> Any:
    """Return the tuner module for the namespace of a class, such as that of a Trainer, or of its nearest base class."""
    return module_in("tuning.callback", namespace_of(kind) or NAMESPACES[-1])


def names_for(trainer: object) -> Any:
    """Return the `Names` of the namespace that a Trainer belongs to."""
    return tuner_module(type(trainer)).Names


def log(trainer: Trainer, metrics: Mapping[str, float]) -> Path | None:
    """Log metrics to all loggers, on all ranks.

    Returns:
        The folder of the first logger, on rank 0; None on other ranks, and if it has none on this machine.
    """
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=trainer.global_step)
    folder = trainer.log_dir if trainer.loggers else None  # a collective of all ranks
    return None if folder is None or "://" in str(folder) or not trainer.is_global_zero else Path(folder)


def arguments_of(step: Callable[..., Any]) -> tuple[int, ...]:
    """Return the arguments of a training_step beside the batch: the batch's number, or none.

    Raises:
        ConfigurationError: it takes no batch.
    """
    parameters = list(inspect.signature(step).parameters.values())[1:]
    if parameters and parameters[0].name == "dataloader_iter":
        raise ConfigurationError("training_step draws its batches itself from dataloader_iter")
    many = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    return (0,) if many or len(parameters) > 1 else ()


def loss_of(found: Any) -> Tensor:
    """Return the loss in the result of a training_step.

    Raises:
        ConfigurationError: there is none.
    """
    loss = found.get("loss") if isinstance(found, Mapping) else found
    if not isinstance(loss, Tensor):
        raise ConfigurationError('training_step returns no loss: return it, or a dictionary with it as "loss"')
    return loss


def log_nothing(*_: Any, **__: Any) -> None:
    """Replace ``log``."""
