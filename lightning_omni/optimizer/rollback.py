"""What a run in one group is rolled back to when it has diverged with what was chosen for it.

What becomes of every other piece of a run's state, the table in ``docs/state.md`` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_omni.optimizer.values import write
from lightning_omni.protocol.group import GroupCore
from lightning_omni.protocol.wire_format import State


@dataclass(frozen=True)
class RollbackPoint:
    """What a run in one group is rolled back to when it has diverged with what was chosen for it. All else stays.

    It stands for long, and keeps values only: while several groups train, optimizer states that no rank has any use for
    are not kept a second time.

    Attributes:
        weights: parameters, and averages of them that callbacks keep, and what they held.
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
    def of(
        cls, module: nn.Module, optimizers: Sequence[Optimizer], core: GroupCore, averages: Iterable[Tensor] = ()
    ) -> RollbackPoint:
        """As it is now.

        Args:
            module: what is trained.
            optimizers: that train it; the group has taken them in.
            core: the group.
            averages: of weights, which callbacks keep.
        """
        return cls(
            weights=tuple((each, each.detach().clone()) for each in (*module.parameters(), *averages)),
            buffers=tuple((each, each.detach().clone()) for each in module.buffers()),
            optimizers=tuple(
                (each, {parameter: deepcopy(values) for parameter, values in each.state.items()}) for each in optimizers
            ),
            senders=tuple(copied(core.sender_state(index)) for index in range(len(optimizers))),
        )

    @property
    def is_spoilt(self) -> bool:
        """Whether a number that was finite then is not now, as in the average of weights of which some were not."""
        pairs = (*self.weights, *self.buffers)
        return any(bool((_are_finite(kept) & ~_are_finite(tensor.detach())).any()) for tensor, kept in pairs)

    @torch.no_grad()
    def keep_weights(self) -> None:
        """The run has got on well so far: weights and buffers are those of now.

        Optimizer states stay as they are. While several groups train, those of now are at the server or differ from
        group to group, and a few steps make up for it.
        """
        for tensor, kept in (*self.weights, *self.buffers):
            kept.copy_(tensor)

    def put_back(self, core: GroupCore) -> None:
        """The run goes on from there, in one group.

        Args:
            core: the group.
        """
        with torch.no_grad():
            for tensor, kept in (*self.weights, *self.buffers):
                write(tensor, kept)
        for optimizer, states in self.optimizers:
            optimizer.state.clear()
            for parameter, values in states.items():
                optimizer.state[parameter] = deepcopy(values)
        for index, state in enumerate(self.senders):
            core.load_sender_state(index, copied(state))


def _are_finite(tensor: Tensor) -> Tensor:
    """Which elements are; of floats of 8 bits, too, of which torch cannot say it for all kinds."""
    return (tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor).isfinite()


def copied(tree: Any) -> Any:
    """A tree of plain data and tensors that no other holds."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)
