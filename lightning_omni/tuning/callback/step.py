"""A LightningModule's ``training_step`` outside Lightning's loops: its arguments, its loss, and nothing logged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_omni.errors import ConfigurationError


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
