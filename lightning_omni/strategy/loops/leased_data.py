"""The training data of a fit: the loaders that are leased."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lightning_omni.errors import UnsupportedError
from lightning_omni.runtime import World
from lightning_omni.runtime.data.leased_loader import RankLeases, lease, why_not_leased

if TYPE_CHECKING:
    pass


class LeasedData:
    """The training loaders of a fit, converted to leased ones, and their leases.

    Args:
        data: ``"dynamic"`` or ``"static"``.
        info: logs a message for the user, on rank 0.
        before_epoch: called with an epoch's number before its samples are drawn from the server.
        is_for_user: returns, when a training loader is iterated, whether user code does so.
        own_batches: returns how many batches this rank trains, given the number under DDP.

    Attributes:
        leases: this rank's leases, if the data is leased.
        split: mark of the training data: see `split_of`.
    """

    def __init__(
        self,
        data: Literal["dynamic", "static"],
        info: Callable[[str], None],
        before_epoch: Callable[[int], None],
        is_for_user: Callable[[], bool] = lambda: False,
        own_batches: Callable[[int], int] = lambda batches: batches,
    ) -> None:
        self.kind, self._own_batches = data, own_batches
        self._info, self._before_epoch, self._is_for_user = info, before_epoch, is_for_user
        self._world: World | None = None
        self.leases: RankLeases | None = None
        self.split = 0
        self._new: list[RankLeases | None] = []  # one per new loader; None if its samples cannot be leased
        self._may_be_made_again = self._has_said_why = False
        self._sampler: DistributedSampler[Any] | None = None
        self._order: int | None = None

    @property
    def order(self) -> int | None:
        """Return the seed of the epochs' order: Lightning's, or that of the run that this group has joined."""
        return self._order if self._order is not None or self._sampler is None else self._sampler.seed

    @order.setter
    def order(self, seed: int) -> None:
        self._order = seed
        if self._sampler is not None:
            self._sampler.seed = seed

    def connect(self, world: World) -> None:
        self._world = world

    def start(self) -> None:
        """Let the group's core report this rank's leases to the server."""
        if self._world is not None:
            self._world.core.data = self.leases

    def forget(self) -> None:
        self.leases, self._new, self._sampler, self._order = None, [], None, None
        self.start()
        self._world = None

    @property
    def is_dealt_out(self) -> bool:
        """Return whether the samples are divided in advance among all ranks."""
        return self._coming is None

    @property
    def _coming(self) -> RankLeases | None:
        if self._new:
            return self._new[0] if len(self._new) == 1 else None
        return self.leases

    @property
    def is_dynamic(self) -> bool:
        """Return whether samples are drawn from the server's book."""
        return self.leases is not None and not self.leases.is_local

    def begin_fetch(self) -> None:
        """Make all live ranks the default process group if the data is divided in advance: it may query its rank."""
        world = self._world
        if self.is_dealt_out and world is not None and world.is_computing:
            world.process_groups.use(world.process_groups.live)

    def end_fetch(self) -> None:
        world = self._world
        if self.is_dealt_out and world is not None and world.is_computing:
            world.process_groups.use(world.compute_group)

    def process(self, loader: object, rank: int, objection: Callable[[DataLoader[Any]], str]) -> object:
        """Return a training DataLoader with leased batches, if its samples may be leased; otherwise the loader itself.

        ``objection`` returns why the Trainer's use of a loader forbids leases; empty if it does not.
        """
        world = self._world
        if self.kind == "static" or world is None:
            return loader
        why = why_not_leased(loader)
        if isinstance(loader, DataLoader) and not why:
            why = objection(loader)
        if not isinstance(loader, DataLoader) or why:
            self._refuse_to_join()
            if world.executor.exchanges and not self._has_said_why:
                self._has_said_why = True
                self._info(
                    'OmniStrategy: the training data is dealt out beforehand (as with data="static"), because'
                    f" {why}; so a slow group delays the end of an epoch"
                )
            self._add_group(None)
            return loader
        leased = lease(
            loader,
            self._is_for_user,
            self._own_batches,
            rank=rank // world.tensor_parallel,
            before_epoch=self._before_epoch,
            is_local=not world.executor.exchanges,
            shares=self.leases.shares if self.leases is not None else (),  # those of the replaced loader
        )
        self._add_group(leased.leases)  # type: ignore[attr-defined]
        self._sampler = loader.sampler  # type: ignore[assignment]
        self.split = split_of(loader.dataset)
        if self._order is not None:
            self.order = self._order
        return leased

    def expect_others(self) -> None:
        """Let the loaders that are made from now on replace the new ones that no epoch has trained yet."""
        self._may_be_made_again = True

    def _add_group(self, leases: RankLeases | None) -> None:
        if self._may_be_made_again:
            self._new, self._may_be_made_again = [], False
        self._new.append(leases)
        if len(self._new) > 1:
            self._refuse_to_join()
            # Several loaders advance together; each divides its samples as DistributedSampler does.
            for each in self._new:
                if each is not None:
                    each.is_local = True

    def _refuse_to_join(self) -> None:
        """Raise `UnsupportedError` if groups may join: data that cannot be leased has no samples for them."""
        if self._world is not None and self._world.registration is not None:
            raise UnsupportedError(
                "elastic=True deals the samples of an epoch out to the groups that there are, and this training data is"
                " several loaders, has a sampler of its own, is iterable, is no plain DataLoader, or is drawn by"
                " training_step (dataloader_iter): pass one DataLoader over a dataset with a length, with shuffle= in"
                " the place of a sampler, leave use_distributed_sampler=True, and have training_step take the batch"
            )

    def adopt(self) -> None:
        """Use the loaders that were made at the start or by a reload every few epochs.

        Raises:
            UnsupportedError: several groups have trained on leased data, and the new data cannot be leased.
        """
        assert self._world is not None
        self._may_be_made_again = False
        if not self._new:
            return
        before, self.leases = self.leases, self._coming
        self._new = []
        if self._world.executor.exchanges:
            if self.leases is not None:
                self.assign(self.leases.shares)
            elif before is not None:
                raise UnsupportedError(
                    "reload_dataloaders_every_n_epochs: what train_dataloader() returns for this epoch cannot be leased"
                    " to groups as in the epochs before, because it is several loaders, has a sampler of its own, is"
                    ' iterable, or is no plain DataLoader; pass data="static", or use groups=1'
                )
        self.start()

    def assign(self, shares: Sequence[int] = ()) -> None:
        """Set the leases' index of this rank in its group, and the group's ``shares``, if they are unequal."""
        world = self._world
        if self.leases is not None and world is not None:
            self.leases.assign(*world.data_rank, world.executor.control, world.generation, shares)

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the loss times this rank's weight: more, if it has more of the group's batch than others."""
        weight = self.leases.weight if self.leases is not None else 1.0
        return loss if weight == 1.0 else loss * weight


class LightningRank(int):
    """A rank that OmniStrategy has passed to a sampler."""


def has_lightning_sampler(loader: object) -> bool:
    """Return whether a loader's sampler is Lightning's, with a rank from OmniStrategy, and not a user's own.

    Return False for an object that is not a DataLoader, such as an empty list.
    """
    return isinstance(getattr(getattr(loader, "sampler", None), "rank", None), LightningRank)


def draws_batches(training_step: Callable[..., Any]) -> bool:
    """Return whether a training step draws its batches itself; leased batches need the hooks around each of them."""
    return "dataloader_iter" in inspect.signature(training_step).parameters


def split_of(dataset: object) -> int:
    """Return a mark of the part of a dataset, as `torch.utils.data.random_split` makes it; 0 for a whole dataset."""
    mark = 0
    while isinstance(dataset, Subset):
        indices = torch.as_tensor(dataset.indices, dtype=torch.int64)
        mark = zlib.crc32(indices.numpy().tobytes(), mark)
        dataset = dataset.dataset
    return mark
