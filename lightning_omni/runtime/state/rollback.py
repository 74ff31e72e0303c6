"""The state to which a run in one group is rolled back. docs/contribute/state.md has a table of all other state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_omni.group.core import GroupCore
from lightning_omni.runtime.model.contiguous import write
from lightning_omni.wire.formats.base import State


@dataclass(frozen=True)
class RollbackPoint:
    """The state to which a run in one group is rolled back when it has diverged with a chosen setting. All else stays.

    It is kept for long, and holds values only: while several groups train, optimizer states that no rank uses are not
    kept a second time.

    Attributes:
        weights: parameters, and averages of them that callbacks keep, each with its value.
        buffers: buffers, each with its value.
        optimizers: optimizers, each with its states by parameter. Hyperparameters are not rolled back.
        senders: memory of the sender of the group's pushes, for each optimizer. Residuals that it has received since
            belong to weights that no longer exist.
    """

    weights: tuple[tuple[Tensor, Tensor], ...]
    buffers: tuple[tuple[Tensor, Tensor], ...]
    optimizers: tuple[tuple[Optimizer, Mapping[Any, Any]], ...]
    senders: tuple[State, ...]

    @classmethod
    def of(
        cls, module: nn.Module, optimizers: Sequence[Optimizer], core: GroupCore, averages: Iterable[Tensor] = ()
    ) -> RollbackPoint:
        """Capture the present state.

        Args:
            module: the trained module.
            optimizers: its optimizers, which the group has attached.
            core: the group.
            averages: averages of weights that callbacks keep.
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
        """Return whether a number that was finite then is not now, as in an average of weights that were not."""
        pairs = (*self.weights, *self.buffers)
        return any(bool((_are_finite(kept) & ~_are_finite(tensor.detach())).any()) for tensor, kept in pairs)

    @torch.no_grad()
    def keep_weights(self) -> None:
        """Replace weights and buffers by the present ones, because the run has progressed well so far.

        Optimizer states stay. While several groups train, the present ones are at the server or differ between groups,
        and a few steps compensate for that.
        """
        for tensor, kept in (*self.weights, *self.buffers):
            kept.copy_(tensor)

    def restore(self, core: GroupCore) -> None:
        """Roll the run back to this state, in one group."""
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
    """Return which elements are finite, also of floats of 8 bits, for which torch does not support all kinds."""
    return (tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor).isfinite()


def copied(tree: Any) -> Any:
    """Copy a tree of plain data and tensors."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)
