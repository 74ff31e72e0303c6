"""Averages of weights in Lightning's WeightAveraging and StochasticWeightAveraging callbacks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.swa_utils import AveragedModel

from lightning_omni.runtime.model.values import write
from lightning_omni.strategy.declared import callbacks_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
    from pytorch_lightning.loops.fit_loop import _FitLoop
    from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop

    _Trainer = Trainer
else:
    _EvaluationLoop = _FitLoop = _TrainingEpochLoop = _Trainer = object


def averaged_models(trainer: Trainer) -> list[Any]:
    """Return the models in which WeightAveraging callbacks hold their averages."""
    return [average for _, average in _averaging(trainer) if isinstance(average, AveragedModel)]


def _averaging(trainer: Trainer) -> Iterator[tuple[Any, Module]]:
    """Yield Lightning's callbacks that average weights, each with the module of its averages, where that exists."""
    for callback in callbacks_of(trainer):
        if isinstance(average := getattr(callback, "_average_model", None), Module):
            yield callback, average


def averaged_tensors(trainer: Trainer) -> Iterator[Tensor]:
    """Yield the averages of weights that Lightning's callbacks hold, and how many updates each contains."""
    for callback, average in _averaging(trainer):
        yield from (*average.parameters(), *average.buffers())
        if hasattr(callback, "n_averaged"):  # StochasticWeightAveraging creates it with its first update
            if callback.n_averaged is None:
                callback.n_averaged = torch.tensor(callback._init_n_averaged, device=trainer.strategy.root_device)
            yield callback.n_averaged


def copy_averages_to_module(trainer: Trainer) -> None:
    """Copy the averages of callbacks into the module, at the end of training, as the callbacks themselves do."""
    for callback, average in _averaging(trainer):
        if isinstance(average, AveragedModel):
            callback._copy_average_to_current(trainer.lightning_module)
        elif trainer.current_epoch > getattr(callback, "swa_end", math.inf):
            callback.transfer_weights(average, trainer.lightning_module)


@torch.no_grad()
def restart_empty_averages(trainer: Trainer) -> None:
    """Set averages that contain no weights yet to the current weights, after weights were set back.

    Until its first update a callback holds a copy of the weights from before training. If no update follows, the
    callback would copy these old weights into the module at the end.
    """
    for callback, average in _averaging(trainer):
        counted, kept = (average, average.module) if isinstance(average, AveragedModel) else (callback, average)
        if getattr(counted, "n_averaged", None) == 0:
            own, copies = ((*each.parameters(), *each.buffers()) for each in (trainer.lightning_module, kept))
            for tensor, copied in zip(own, copies, strict=False):
                write(copied, tensor)


def averages_weights(trainer: Trainer) -> bool:
    """Return whether a callback averages weights in a copy of the module, even before the callback is set up."""
    return any(hasattr(callback, "_average_model") for callback in callbacks_of(trainer))


def lower_last_average_step(trainer: Trainer) -> None:
    """Lower WeightAveraging's last update step to the current step, so that it continues after steps were set back."""
    averaging: list[Any] = [each for each in callbacks_of(trainer) if hasattr(each, "_latest_update_step")]
    for each in averaging:
        each._latest_update_step = min(each._latest_update_step, trainer.global_step)
