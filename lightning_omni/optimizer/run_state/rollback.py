"""What a run is rolled back to when it has diverged with what was chosen for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_omni.optimizer.run_state.group import copied
from lightning_omni.protocol.group import GroupCore
from lightning_omni.protocol.wire_format import State


@dataclass(frozen=True)
class RollbackPoint:
    """Of a moment of a run in one group, what is put back. All else stays as the run has come to it.

    It stands for long, and keeps values only: while several groups train, the objects of a `RunState` would be a second
    copy of optimizer states that no rank has any use for.

    Attributes:
        weights: parameters, and what they held.
        buffers: buffers, and what they held.
        optimizers: each, and its states by parameter. Hyperparameters are not rolled back.
        senders: what the sender of the group's pushes remembered, for each optimizer. What was given to it since are
            gradients of weights that are no more.
    """

    weights: tuple[tuple[Tensor, Tensor], ...]
    buffers: tuple[tuple[Tensor, Tensor], ...]
    optimizers: tuple[tuple[Optimizer, Mapping[Any, Any]], ...]
    senders: tuple[State, ...]

    @classmethod
    def of(cls, module: nn.Module, optimizers: Sequence[Optimizer], core: GroupCore) -> RollbackPoint:
        """As it is now.

        Args:
            module: what is trained.
            optimizers: that train it; the group has taken them in.
            core: the group.
        """
        return cls(
            weights=tuple((each, each.detach().clone()) for each in module.parameters()),
            buffers=tuple((each, each.detach().clone()) for each in module.buffers()),
            optimizers=tuple(
                (each, {parameter: deepcopy(values) for parameter, values in each.state.items()}) for each in optimizers
            ),
            senders=tuple(copied(core.sender_state(index)) for index in range(len(optimizers))),
        )

    def put_back(self, core: GroupCore) -> None:
        """The run goes on from there, in one group.

        Args:
            core: the group.
        """
        with torch.no_grad():
            for tensor, kept in (*self.weights, *self.buffers):
                tensor.copy_(kept)
        for optimizer, states in self.optimizers:
            optimizer.state.clear()
            for parameter, values in states.items():
                optimizer.state[parameter] = deepcopy(values)
        for index, state in enumerate(self.senders):
            core.load_sender_state(index, copied(state))
