"""A rank's view of leased data: the samples of its next batch, and the DataLoader that loads them.

With one group or several loaders the leases are drawn from a local book, and the batches of a whole epoch, in equal
parts, are those of DistributedSampler. Otherwise they are drawn from the server's book.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_omni.errors import ConfigurationError
from lightning_omni.group.leased_batches import LeaseClient, apportion
from lightning_omni.server.epochs.lease_book import LeaseBook
from lightning_omni.transport.connections import Control
from lightning_omni.wire.messages import Batch, BatchesDrawn, EpochLeft, EpochOpened, EpochPlan, Next, OpenEpoch


class RankLeases(LeaseClient):
    """The batches of one rank, epoch after epoch, drawn from the server's book or from a local one.

    Args:
        batch_size: samples in one rank's batch.
        total: positions in an epoch's permutation.
        rank: this rank, which gets DistributedSampler's samples until `assign` places it in a group.
        before_epoch: called with the epoch's number before samples are drawn from the server's book.
        is_local: whether batches are not drawn from the server: with one group, or with several loaders.
        shares: see `set_batch_shares`.
        dataset_size: samples in the dataset, if they differ from ``total``.

    Attributes:
        generation: number of calls of `assign`; batches that were drawn before the last one are void.
        is_as_ddp: whether equal parts of batches are those of DistributedSampler, as for one group with a whole epoch.
    """

    def __init__(
        self,
        world_size: int,
        batch_size: int,
        total: int,
        rank: int,
        before_epoch: Callable[[int], None],
        is_local: bool,
        shares: Sequence[int] = (),
        dataset_size: int | None = None,
    ) -> None:
        super().__init__(rank, world_size, shares=shares)
        self.world_size, self.batch_size, self.total = world_size, batch_size, total
        self.dataset_size = total if dataset_size is None else dataset_size
        self.is_local = is_local
        self.generation = 0
        self._deal(is_as_ddp=is_local)
        self._before_epoch = before_epoch
        self._control: Control | None = None
        self._book: LeaseBook | None = None
        self._is_resumed = False

    @property
    def place(self) -> tuple[int, int]:
        return (-1, 0) if self.is_local else super().place

    @property
    def trained_spans(self) -> tuple[tuple[int, int], ...]:
        if self._book is None:
            return ()
        self._book.train(0, self.trained)
        return self._book.trained_spans

    def assign(
        self,
        member: int,
        members: int,
        control: Control | None,
        generation: int,
        shares: Sequence[int] = (),
    ) -> None:
        """Place this rank in a group, and forget all batches and the local book.

        It is number ``member`` of ``members``; ``control`` draws leases, None with one group; ``generation`` is that of
        `ParallelState`, ``shares`` are as in `set_batch_shares`.
        """
        self.join(member, members, generation, shares)
        self._control = control
        self.is_local = control is None
        self._deal(is_as_ddp=self.is_local)
        self._book = None
        self.generation += 1

    def _deal(self, is_as_ddp: bool) -> None:
        self.is_as_ddp = is_as_ddp
        self.in_pairs = not is_as_ddp and self.batch_size > 1

    def begin_local(self, plan: EpochPlan, resumed: bool = False) -> None:
        """Begin an epoch of a local book; if ``resumed``, continue one with the untrained positions of ``plan``."""
        self._book = LeaseBook.open(plan, {0: self._members * plan.ranks_per_batch})
        self._is_resumed = resumed
        self._deal(is_as_ddp=not resumed)
        self.restart(plan.epoch)
        coming = self.peek() if resumed else None
        self.interval = coming.interval if coming is not None else 0

    def iterate(self, epoch: int) -> None:
        if not self.is_local:
            self._before_epoch(epoch)
        elif not self._is_resumed:
            self.begin_local(EpochPlan(epoch=epoch, total=self.total, batch_size=self.batch_size, budget=self.total))
        self._is_resumed = False

    def begin(self, plan: EpochPlan) -> None:
        if self._control is None:
            self.begin_local(plan)
            return
        self._control.request(OpenEpoch(plan=plan), EpochOpened)
        self.restart(plan.epoch)

    def hand_out(self) -> Batch | None:
        """Return the next batch for the loader, or None if none is free for the group now."""
        if not self._have(self.handed):
            return None
        self.handed += 1
        return self._batches[self.handed - 1]

    def peek(self) -> Batch | None:
        return self._batches[self.trained] if self._have(self.trained) else None

    @property
    def has_unloaded(self) -> bool:
        return self._have(self.handed)

    def ask(self) -> str:
        """Return the decision after this validation interval, applied here: see `lightning_omni.wire.messages.Next`."""
        if self._control is None:
            coming = self.peek()
            if coming is None:
                assert self._book is not None
                return "over:validate" if self._book.has_point_after(self.interval) else "over"
            self.interval = coming.interval
            return "validate"
        verdict = self._control.request(self.ask_next(), Next, timeout=float("inf")).next
        self.apply_next(verdict, self.peek() if verdict == "more" else None)
        return verdict

    def leave(self, stop: str) -> None:
        if self._control is not None:
            self._control.request(self.leave_epoch(stop), EpochLeft)

    def is_whole(self, batch: Batch) -> bool:
        return batch.stop - batch.start == self._members * self.batch_size

    @property
    def split(self) -> tuple[int, ...]:
        return apportion(self._members * self.batch_size, self.shares or (1,) * self._members)

    def _have(self, number: int) -> bool:
        if number < self.drawn:
            return True
        if self._control is None:
            assert self._book is not None
            self.record_drawn(self._book.draw(0, number))
        else:  # the current batch may not be finished, and accumulated gradients are in no step
            trained = max(0, min(self.stepped, self.trained - 1))
            self.record_drawn(self._control.request(self.draw(number, trained), BatchesDrawn).batches)
        return number < self.drawn


class LeasedBatchSampler:
    """A batch sampler that yields the dataset indices of this rank's leased batches.

    Args:
        sampler: Lightning's DistributedSampler, for its permutation, seed and epoch.
        own_batches: returns the number of batches that this rank trains, from the number under DDP.
    """

    def __init__(
        self,
        sampler: DistributedSampler[Any],
        leases: RankLeases,
        drop_last: bool,
        own_batches: Callable[[int], int] = lambda batches: batches,
    ) -> None:
        self.sampler, self.leases, self.drop_last, self._own_batches = sampler, leases, drop_last, own_batches

    @property
    def batch_size(self) -> int:
        return self.leases.batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        raise ConfigurationError(
            f"batch_sampler.batch_size = {batch_size}: batches of {self.batch_size} are leased to all ranks; return"
            ' another loader from train_dataloader() with reload_dataloaders_every_n_epochs=1, or use data="static"'
        )

    def __len__(self) -> int:
        # As many as each rank trains if all are equally fast, and as DistributedSampler would give it.
        mine = self.leases.total // self.leases.world_size
        return self._own_batches(mine // self.batch_size if self.drop_last else -(-mine // self.batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        leases = self.leases
        leases.iterate(self.sampler.epoch)
        order = permutation(self.sampler)
        while (batch := leases.hand_out()) is not None:
            chosen = leases.indices(leases.handed - 1)
            if self.drop_last and leases.is_as_ddp and not leases.is_whole(batch):
                return
            yield order[chosen.start : chosen.stop : chosen.step].tolist()


class _LeasedLoader:
    """A mixin for DataLoaders: an iteration continues when samples return, and restarts when groups change."""

    leases: RankLeases
    unleased: DataLoader[Any]
    is_for_user: Callable[[], bool]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What is copied or pickled is the loader that this one was made of: leases belong to one run.
        return _itself, (self.unleased,)

    @property
    def for_user(self) -> DataLoader[Any]:
        self.unleased.worker_init_fn = self.worker_init_fn  # type: ignore[attr-defined]  # set after it was leased
        return self.unleased

    def __iter__(self) -> Iterator[Any]:
        if self.is_for_user():
            return iter(self.for_user)
        # With one group, as eager as the loader itself, so that random numbers are drawn as under DDP; with several
        # groups no samples may be drawn before the epoch is open.
        iterator = super().__iter__() if self.leases.is_local else None  # type: ignore[misc]
        return self._batches_from(iterator, self.leases.generation)

    def _batches_from(self, iterator: Iterator[Any] | None, made_for: int) -> Iterator[Any]:
        leases = self.leases
        while True:
            generation = leases.generation
            if iterator is not None and made_for != generation:
                # It was made before groups changed, and nothing was drawn from it: its replacement must not draw
                # random numbers again.
                state = torch.get_rng_state()
                iterator = super().__iter__()  # type: ignore[misc]
                torch.set_rng_state(state)
            made_for = generation
            iterator = iterator or super().__iter__()  # type: ignore[misc]
            # Checked before the next batch is loaded, which might be drawn for groups that no longer exist.
            while leases.generation == generation:
                try:
                    batch = next(iterator)
                except StopIteration:
                    if leases.is_local or not leases.has_unloaded:
                        return
                    break
                yield batch
            iterator = None


def _itself(loader: DataLoader[Any]) -> DataLoader[Any]:
    return loader


def lease(
    loader: DataLoader[Any],
    is_for_user: Callable[[], bool] = lambda: False,
    own_batches: Callable[[int], int] = lambda batches: batches,
    **options: Any,
) -> DataLoader[Any]:
    """Return a copy of a DataLoader, with leased batches.

    Its sampler must be Lightning's DistributedSampler. ``is_for_user`` returns, when an iteration begins, whether user
    code iterates: then the loader yields the samples of DistributedSampler, and nothing is drawn. ``own_batches`` is as
    in `LeasedBatchSampler`, ``options`` are the other arguments of `RankLeases`.
    """
    sampler = loader.sampler
    assert isinstance(sampler, DistributedSampler)
    assert loader.batch_size is not None
    options["dataset_size"] = len(sampler.dataset)  # type: ignore[arg-type]
    leases = RankLeases(sampler.num_replicas, loader.batch_size, sampler.total_size, **options)
    # A copy with an extended class keeps all attributes of the user's own DataLoader class. DataLoader forbids setting
    # batch_sampler after construction, because a running iterator might disagree with it; the copy has none.
    kind = type(f"Leased{type(loader).__name__}", (_LeasedLoader, type(loader)), {})
    leased: DataLoader[Any] = object.__new__(kind)
    vars(leased).update(
        vars(loader),
        batch_sampler=LeasedBatchSampler(sampler, leases, bool(loader.drop_last), own_batches),
        leases=leases,
        unleased=loader,
        is_for_user=is_for_user,
        _iterator=None,
    )
    return leased


def why_not_leased(loader: object) -> str:
    """Return why a loader's samples cannot be leased; "" if they can."""
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}, no DataLoader"
    if type(loader).__iter__ is not DataLoader.__iter__:  # it may yield other batches than drawn, or ahead
        return f"{type(loader).__name__} has an __iter__ of its own"
    if hasattr(loader, "load_state_dict"):  # it would restore its position, and so do leases
        return f"{type(loader).__name__} restores its position itself (load_state_dict)"
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset is iterable"
    if type(loader.sampler) is not DistributedSampler:
        return f"it has a sampler of its own ({type(loader.sampler).__name__})"
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        return "it has a batch sampler of its own, or none"
    return "" if getattr(loader, "in_order", True) else "it has in_order=False"


def permutation(sampler: DistributedSampler[Any]) -> Tensor:
    """Return the epoch's order of dataset indices, padded or cut, before DistributedSampler divides it among ranks.

    Raises:
        ConfigurationError: the dataset has grown, without ``drop_last`` (samples would be left out), or shrunk with it.
    """
    count = len(sampler.dataset)  # type: ignore[arg-type]
    if count != sampler.total_size and sampler.drop_last == (count < sampler.total_size):
        other = "more" if sampler.drop_last else "fewer"
        raise ConfigurationError(
            f"the dataset has {count} samples, and had {sampler.total_size} or {other} when its DataLoader was made:"
            " have the loader made again, with reload_dataloaders_every_n_epochs=1"
        )
    if sampler.shuffle:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(sampler.seed + sampler.epoch))
    else:
        order = torch.arange(count)
    if sampler.drop_last:
        return order[: sampler.total_size]
    return order.repeat(-(-sampler.total_size // count))[: sampler.total_size]
