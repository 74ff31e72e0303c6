"""A LightningModule's ``training_step`` outside Lightning's loops: what it takes, what it gives, and nothing logged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_omni.errors import ConfigurationError


def arguments_of(step: Callable[..., Any]) -> tuple[int, ...]:
    """What a training_step takes beside the batch: its number, or nothing.

    Raises:
        ConfigurationError: it takes no batch.
    """
    parameters = list(inspect.signature(step).parameters.values())[1:]
    if parameters and parameters[0].name == "dataloader_iter":
        raise ConfigurationError("training_step draws its batches itself from dataloader_iter")
    many = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    return (0,) if many or len(parameters) > 1 else ()


def loss_of(found: Any) -> Tensor:
    """The loss that a training_step returned.

    Raises:
        ConfigurationError: it returned none.
    """
    loss = found.get("loss") if isinstance(found, Mapping) else found
    if not isinstance(loss, Tensor):
        raise ConfigurationError('training_step returns no loss: return it, or a dictionary with it as "loss"')
    return loss


@contextmanager
def silence(module: nn.Module, names: set[str] | None = None) -> Iterator[None]:
    """While it lasts, what the module and modules inside it log goes nowhere.

    Args:
        module: the LightningModule.
        names: takes the names of what would have been logged; None to forget them, too.
    """

    def note(name: Any, *_: Any, **__: Any) -> None:
        if names is not None:  # a metric that is logged for steps and epochs has a name for each
            for each in [name] if isinstance(name, str) else list(name):
                names.update((each, f"{each}_step", f"{each}_epoch"))

    muted = [each for each in module.modules() if hasattr(type(each), "training_step") and "log" not in vars(each)]
    for each in muted:
        each.log = each.log_dict = note  # type: ignore[assignment]
    try:
        yield
    finally:
        for each in muted:
            del each.log, each.log_dict


def log_nothing(*_: Any, **__: Any) -> None:
    """In the place of ``log``."""
