"""A rank's view of leased data: which samples are in its next batch, and the DataLoader that loads them.

With one group the leases are drawn from a local book, and the batches are those of DistributedSampler. With several
groups they come from the server's book. Either way the members of a group agree without a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_omni.errors import ConfigurationError
from lightning_omni.protocol.leases import Batch, EpochPlan, LeaseBook, apportion
from lightning_omni.protocol.lessee import Lessee
from lightning_omni.protocol.messages import Drawn, EpochOpened, Left, OpenEpoch, Verdict
from lightning_omni.protocol.transport import Control


class Leases(Lessee):
    """The batches of one rank, epoch after epoch; what is missing it draws, from the server's book or one of its own.

    Args:
        world_size: number of ranks N at the start.
        batch_size: samples in one rank's batch.
        total: positions in an epoch's permutation.
        rank: this rank, dealt to as by DistributedSampler until `assign` says otherwise.
        before_epoch: called with the epoch's number before samples are drawn from the server's book.
        is_local: whether no server needs to be asked: one group, or samples that are dealt out beforehand.
        shares: what each member of the group gets of a whole batch, if not the same; see `share_out`.

    Attributes:
        generation: grows by one with every regrouping; what was drawn before is void.
        is_as_ddp: whether batches are those of DistributedSampler: one group has the whole epoch, and not what several
            have left of it.
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
    ) -> None:
        super().__init__(rank, world_size, shares=shares)
        self.world_size, self.batch_size, self.total = world_size, batch_size, total
        self.is_local = is_local
        self.generation = 0
        self._deal(is_as_ddp=is_local)
        self._before_epoch = before_epoch
        self._control: Control | None = None
        self._book: LeaseBook | None = None
        self._goes_on = False

    @property
    def place(self) -> tuple[int, int]:
        """As the server is told: nothing is leased where no server is asked."""
        return (-1, 0) if self.is_local else super().place

    @property
    def trained_spans(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the epoch that this rank knows to be trained (all of them, if the leases are local)."""
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
        """This rank is now ``member`` of a group of ``members``. What it held and has not trained goes back.

        Args:
            member: place in the group.
            members: size of the group.
            control: where leases are drawn; None if there is one group.
            generation: the server's number for these groups.
            shares: as in `share_out`, from the first batch on.
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

    def begin_local(self, plan: EpochPlan, goes_on: bool = False) -> None:
        """An epoch of one group begins; or, after a regrouping, goes on with what ``plan`` does not call trained."""
        self._book = LeaseBook(plan, {0: self._members * plan.ranks_per_batch})
        self._goes_on = goes_on
        self._deal(is_as_ddp=not goes_on)
        self.restart(plan.epoch)
        coming = self.peek() if goes_on else None
        self.interval = coming.interval if coming is not None else 0

    def iterate(self, epoch: int) -> None:
        """The loader starts to iterate."""
        if not self.is_local:
            self._before_epoch(epoch)
        elif not self._goes_on:
            self.begin_local(EpochPlan(epoch=epoch, total=self.total, batch_size=self.batch_size, budget=self.total))
        self._goes_on = False

    def begin(self, plan: EpochPlan) -> None:
        """An epoch begins."""
        if self._control is None:
            self.begin_local(plan)
            return
        self._control.request(OpenEpoch(plan=plan), EpochOpened)
        self.restart(plan.epoch)

    def hand_out(self) -> Batch | None:
        """The next batch for the loader, or None if the pool is empty at the moment."""
        if not self._have(self.handed):
            return None
        self.handed += 1
        return self._batches[self.handed - 1]

    def peek(self) -> Batch | None:
        """The batch after the current one, if there is one at the moment."""
        return self._batches[self.trained] if self._have(self.trained) else None

    @property
    def has_unloaded(self) -> bool:
        """Whether there are batches that the loader has not taken yet."""
        return self._have(self.handed)

    def ask(self) -> str:
        """Waits until it is known what follows this validation interval: `lightning_omni.protocol.messages.Verdict`."""
        if self._control is None:
            coming = self.peek()
            if coming is None:
                assert self._book is not None
                return "over:validate" if self._book.has_point_after(self.interval) else "over"
            self.interval = coming.interval
            return "validate"
        verdict = self._control.request(self.question(), Verdict, timeout=float("inf")).next
        self.follow(verdict, self.peek() if verdict == "more" else None)
        return verdict

    def leave(self, stop: str) -> None:
        """This rank's group leaves the epoch early."""
        if self._control is not None:
            self._control.request(self.leaving(stop), Left)

    def is_whole(self, batch: Batch) -> bool:
        """Whether the group batch is as large as a group batch can be."""
        return batch.stop - batch.start == self._members * self.batch_size

    @property
    def split(self) -> tuple[int, ...]:
        """What each member of the group gets of a whole batch, also if it is the same for all."""
        return apportion(self._members * self.batch_size, self.shares or (1,) * self._members)

    def _have(self, number: int) -> bool:
        if number < self.drawn:
            return True
        if self._control is None:
            assert self._book is not None
            self.drew(self._book.draw(0, number))
        else:  # the current one may not be done
            self.drew(self._control.request(self.draw(number, trained=max(0, self.trained - 1)), Drawn).batches)
        return number < self.drawn


class LeasedBatchSampler:
    """Yields the dataset indices of this rank's leased batches.

    Args:
        sampler: Lightning's DistributedSampler; its permutation, seed and epoch are used, not its dealing.
        leases: what to ask.
        drop_last: whether an incomplete last batch is dropped.
        own_batches: gives how many batches this rank trains, from how many it would train under DDP.
    """

    def __init__(
        self,
        sampler: DistributedSampler[Any],
        leases: Leases,
        drop_last: bool,
        own_batches: Callable[[int], int] = lambda batches: batches,
    ) -> None:
        self.sampler, self.leases, self.drop_last, self._own_batches = sampler, leases, drop_last, own_batches
        self.batch_size = leases.batch_size

    def __len__(self) -> int:
        # What each rank would train if all were equally fast: what DistributedSampler would give it.
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
    """Mixed into the user's DataLoader class: goes on when samples come back, starts again when groups change."""

    leases: Leases
    unleased: DataLoader[Any]
    is_for_user: Callable[[], bool]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Leases are of one run: a copy, here or in another process, is the loader that it was made of."""
        return _itself, (self.unleased,)

    def __iter__(self) -> Iterator[Any]:
        if self.is_for_user():
            self.unleased.worker_init_fn = self.worker_init_fn  # type: ignore[attr-defined]  # set after it was leased
            return iter(self.unleased)
        # As eager as the loader itself with one group, so that random numbers are drawn as under DDP; with several
        # groups nothing may be drawn before the epoch is open.
        iterator = super().__iter__() if self.leases.is_local else None  # type: ignore[misc]
        return self._batches_from(iterator, self.leases.generation)

    def _batches_from(self, iterator: Iterator[Any] | None, made_for: int) -> Iterator[Any]:
        leases = self.leases
        while True:
            generation = leases.generation
            if iterator is not None and made_for != generation:
                # It was made before groups changed, and nothing was drawn from it: its twin draws no random numbers of
                # its own.
                state = torch.get_rng_state()
                iterator = super().__iter__()  # type: ignore[misc]
                torch.set_rng_state(state)
            made_for = generation
            iterator = iterator or super().__iter__()  # type: ignore[misc]
            # Asked before the next batch is loaded: it would be drawn for groups that are no more.
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
    """The same DataLoader, with leased batches.

    Args:
        loader: a DataLoader whose sampler is Lightning's DistributedSampler.
        is_for_user: tells, where it begins to be iterated, whether that is for code of the user, and not for training:
            then it gives out what DistributedSampler deals to this rank, and nothing is drawn.
        own_batches: as `LeasedBatchSampler` has it.
        options: the arguments of `Leases` that the loader does not know.
    """
    sampler = loader.sampler
    assert isinstance(sampler, DistributedSampler)
    assert loader.batch_size is not None
    leases = Leases(sampler.num_replicas, loader.batch_size, sampler.total_size, **options)
    # A copy with its class extended keeps whatever the user's own DataLoader class carries. DataLoader forbids to set
    # batch_sampler after construction, lest a running iterator disagree with it; the copy has none.
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


def can_lease(loader: object) -> bool:
    """Whether a DataLoader is of the plain kind whose samples can be dealt out as leases."""
    return (
        isinstance(loader, DataLoader)
        and type(loader.sampler) is DistributedSampler
        and type(loader.batch_sampler) is BatchSampler
        and loader.batch_size is not None
        and getattr(loader, "in_order", True)
        and not hasattr(loader, "load_state_dict")  # with a checkpoint it would find its place, and so do leases
        and type(loader).__iter__ is DataLoader.__iter__  # one of its own may give out others than were drawn, or ahead
    )


def permutation(sampler: DistributedSampler[Any]) -> Tensor:
    """The epoch's order of dataset indices, padded, before DistributedSampler deals it out to ranks.

    Raises:
        ConfigurationError: the dataset has grown, and samples would be left out, which DistributedSampler refuses, too.
    """
    count = len(sampler.dataset)  # type: ignore[arg-type]
    if count > sampler.total_size and not sampler.drop_last:
        raise ConfigurationError(
            f"the dataset has {count} samples, and had {sampler.total_size} or fewer when its DataLoader was made: have"
            " the loader made again, with reload_dataloaders_every_n_epochs=1"
        )
    if sampler.shuffle:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(sampler.seed + sampler.epoch))
    else:
        order = torch.arange(count)
    if sampler.drop_last:
        return order[: sampler.total_size]
    return order.repeat(-(-sampler.total_size // count))[: sampler.total_size]
