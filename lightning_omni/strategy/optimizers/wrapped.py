"""A check of users' modules that have a process group of their own, in the module or in a callback.

Rule 1: a training epoch has no collective of several groups. They train different numbers of batches, and would wait
    for each other in each such collective, finally without end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from torch.nn import Module

from lightning_omni.errors import UnsupportedError
from lightning_omni.runtime.checks.first_steps import ranks_elsewhere
from lightning_omni.strategy.declared import callbacks_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def check_wrapped(trainer: Trainer, members: Collection[int]) -> None:
    """Raise `UnsupportedError` if a module of the user would wait for other groups in its forward or backward pass.

    ``members`` are the ranks of this rank's group, as torch.distributed numbers them.
    """
    for name, module in _modules(trainer):
        if others := ranks_elsewhere(module, members):
            raise UnsupportedError(
                f"{name} is a {type(module).__name__} whose process group has ranks of other compute groups"
                f" ({', '.join(map(str, sorted(others)))}): groups train different numbers of batches, and would wait"
                " for each other in its collectives; wrap it in on_train_batch_start, where the default process group"
                " is the compute group's, or use groups=1"
            )


def _modules(trainer: Trainer) -> Iterator[tuple[str, Module]]:
    """Yield the modules, with the names by which users know them."""
    yield from trainer.lightning_module.named_modules()
    for callback in callbacks_of(trainer):
        for attribute, value in vars(callback).items():
            if isinstance(value, Module) and value is not trainer.lightning_module:
                yield from value.named_modules(prefix=f"{type(callback).__name__}.{attribute}")
