"""Weights of a thousand groups in the memory of a few: groups that read the same weights share them."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.methods.replica import Pulled, Replica, copies
from lightning_omni.protocol.layout import Layout


class Snapshot(list[Tensor]):
    """The master weights of one clock. Nobody changes them; they live as long as somebody holds them."""


class Snapshots:
    """One snapshot for each clock that somebody still works with.

    Attributes:
        most: the most snapshots that were alive at a time.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._at: WeakValueDictionary[int, Snapshot] = WeakValueDictionary()
        self.most = 0

    @property
    def live(self) -> int:
        """Snapshots that somebody holds."""
        return len(self._at)

    def at(self, clock: int, buffer: Tensor) -> Snapshot:
        """The snapshot of the weights that lie in ``buffer`` at this clock."""
        known = self._at.get(clock)
        if known is None:
            known = self._at[clock] = Snapshot(self._layout.views(buffer.clone()))
            self.most = max(self.most, len(self._at))
        return known


class OwnReplica(Replica):
    """A replica that keeps no gradient from one step to the next: a thousand groups would keep a thousand."""

    def step(self, gradient: Sequence[Tensor | None]) -> None:
        super().step(gradient)
        for parameter in self.ordered:
            parameter.grad = None


class SharingReplica(Replica):
    """A replica that refers to a snapshot instead of copying it, until it moves: then it copies first.

    Args:
        parameters: only say which weight has which learning rate.
        optimizer: holds the hyperparameters.
        group: number of the group.
        start: the weights.
    """

    def __init__(self, parameters: Sequence[Parameter], optimizer: Optimizer, group: int, start: Snapshot) -> None:
        super().__init__(parameters, optimizer, group)
        self._weights: list[Tensor] = start

    def weights(self) -> list[Tensor]:
        return self._weights

    def load(self, pulled: Pulled) -> None:
        tensors = pulled.tensors
        self._weights = tensors if isinstance(tensors, Snapshot) else copies(tensors)
        self.clock = pulled.clock

    def move(self, by: Sequence[Tensor], factor: float = 1.0) -> None:
        self._own()
        super().move(by, factor)

    def descend(self, gradient: Sequence[Tensor | None]) -> None:
        self._own()
        super().descend(gradient)

    def _own(self) -> None:
        if isinstance(self._weights, Snapshot):
            self._weights = copies(self._weights)
