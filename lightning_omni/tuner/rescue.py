"""A way back for a run that a choice has ruined: notices that it got worse, and keeps what it had.

A probe is short, and what it shows may not last: a setting that looked good may diverge a thousand batches later. A run
that would have gone well without a tuner must not end that way.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

REFUSED = 8
"""Pushes of a group that are refused in a row before it gives the epoch up."""
_MEMORY = 0.05
"""Weight of the newest loss in the running mean."""


class Kept:
    """Weights, buffers and optimizer state of a moment. Hyperparameters, and whatever else the run has come to, stay.

    Args:
        module: what is trained.
        optimizer: that trains it.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in (*module.parameters(), *module.buffers())]
        self._optimizer = optimizer
        self._state = {parameter: deepcopy(values) for parameter, values in optimizer.state.items()}

    def put_back(self) -> None:
        """The run goes on from there."""
        with torch.no_grad():
            for tensor, kept in self._tensors:
                tensor.copy_(kept)
        self._optimizer.state.clear()
        for parameter, values in self._state.items():
            self._optimizer.state[parameter] = deepcopy(values)


class Watch:
    """Follows the training loss of one rank since the last search.

    Args:
        kept: what the run had before it trained with the choice.
        ruin: the training loss above which the run is lost.
    """

    def __init__(self, kept: Kept, ruin: float) -> None:
        self.kept, self.ruin = kept, ruin
        self._mean: Tensor | None = None
        self._refused = 0

    def batch_done(self, loss: Tensor | None, is_guarded: bool, applied: bool | None) -> None:
        """A batch was trained.

        Args:
            loss: its loss, or None if there is none.
            is_guarded: whether there is a server, which refuses what is not finite: a loss that is not does no harm.
            applied: whether what the group pushed was applied; None if it pushed nothing.
        """
        if loss is not None:
            loss, before = loss.detach(), self._mean
            mean = loss.clone() if before is None else before.lerp(loss, _MEMORY)
            if is_guarded and before is not None:
                mean = torch.where(torch.isfinite(loss), mean, before)
            self._mean = mean
        if applied is not None:
            self._refused = 0 if applied else self._refused + 1

    @property
    def gives_up(self) -> bool:
        """Whether nothing that the group pushes is applied any more; alike on all its members."""
        return self._refused >= REFUSED

    def mean(self, like: Tensor) -> Tensor:
        """The running mean of the loss; NaN if there is none, or if the group has given up."""
        if self._mean is None or self.gives_up:
            return like.new_tensor(math.nan)
        return self._mean.to(like)

    def is_worse(self, mean: float) -> bool:
        """Whether the run is lost with that mean loss, or has none that is finite."""
        return not mean <= self.ruin


def loss_in(outputs: Any, accumulated: int) -> Tensor | None:
    """The loss in what Lightning passes to ``on_train_batch_end``, undivided."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss * accumulated if isinstance(loss, Tensor) else None
