"""The training data of a fit: which of Lightning's loaders are leased, and what this rank holds of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import DataLoader

from lightning_omni.optimizer import World
from lightning_omni.optimizer.data import Leases, can_lease, lease


class LeasedData:
    """Turns training loaders into leased ones, and keeps their leases.

    Args:
        data: ``"dynamic"`` or ``"static"``.
        say: tells the user something, on rank 0.
        before_epoch: called with an epoch's number before samples of it are drawn from the server.
    """

    def __init__(
        self, data: Literal["dynamic", "static"], say: Callable[[str], None], before_epoch: Callable[[int], None]
    ) -> None:
        self.kind = data
        self._say, self._before_epoch = say, before_epoch
        self._world: World | None = None
        self._leases: Leases | None = None
        self._new: list[Leases] = []

    def connect(self, world: World) -> None:
        """A run is being set up."""
        self._world = world

    def start(self) -> None:
        """The groups stand: their core tells the server of what this rank holds."""
        if self._world is not None:
            self._world.core.data = self._leases

    def forget(self) -> None:
        """The run is torn down."""
        self.leases, self._new, self._world = None, [], None

    @property
    def leases(self) -> Leases | None:
        """This rank's view of the data, if it is leased: what its group's core tells the server of."""
        return self._leases

    @leases.setter
    def leases(self, leases: Leases | None) -> None:
        self._leases = leases
        self.start()

    @property
    def is_dealt_out(self) -> bool:
        """Whether the samples are dealt out beforehand, to all ranks."""
        return self._leases is None and not self._new

    @property
    def is_dynamic(self) -> bool:
        """Whether samples are drawn from the server's book."""
        return self._leases is not None and not self._leases.is_local

    def process(self, loader: object, rank: int, is_ours: Callable[[DataLoader[Any]], bool]) -> object:
        """Turns a training DataLoader into one with leased batches, if it is one whose samples may be dealt out.

        Args:
            loader: what Lightning is about to iterate in training.
            rank: this rank.
            is_ours: tells a sampler of Lightning's from a user's own.
        """
        world = self._world
        if self.kind == "static" or world is None:
            return loader
        if not isinstance(loader, DataLoader) or not can_lease(loader) or not is_ours(loader):
            if world.executor.exchanges:
                self._say(
                    'OmniStrategy: the training data is dealt out beforehand (as with data="static"), because it has a'
                    " sampler of its own, is iterable, or is no plain DataLoader; a slow group delays an epoch's end"
                )
            return loader
        leased = lease(
            loader,
            rank=rank,
            before_epoch=self._before_epoch,
            is_local=not world.executor.exchanges,
            shares=self._leases.shares if self._leases is not None else (),  # of the loader that this one replaces
        )
        self._new.append(leased.leases)  # type: ignore[attr-defined]
        return leased

    def adopt(self) -> None:
        """New loaders were made: at the start, or because they are reloaded every few epochs."""
        assert self._world is not None
        if len(self._new) == 1:
            self.leases = self._new[0]
            if self._world.executor.exchanges:
                self.assign(self._new[0].shares)
        elif self._new:
            # Several loaders advance together; each deals its samples out as DistributedSampler does.
            for each in self._new:
                each.is_local = True
            self.leases = None
        self._new = []

    def assign(self, shares: Sequence[int] = ()) -> None:
        """Tells the leases of this rank's place in its group, and of the group's ``shares``, if they are unequal."""
        world = self._world
        if self._leases is not None and world is not None:
            place = world.members.index(world.rank)
            self._leases.assign(place, len(world.members), world.executor.control, world.generation, shares)

    def weigh(self, loss: Tensor) -> Tensor:
        """The loss whose gradient this rank contributes: more, if it has more of the group's batch than others."""
        weight = self._leases.weight if self._leases is not None else 1.0
        return loss if weight == 1.0 else loss * weight
