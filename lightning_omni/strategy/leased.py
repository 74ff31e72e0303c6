"""The training data of a fit: which of Lightning's loaders are leased, and what its limits mean for leased data."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lightning_omni.errors import UnsupportedError
from lightning_omni.optimizer import World
from lightning_omni.optimizer.loaders import Leases, can_lease, lease
from lightning_omni.protocol import EpochPlan
from lightning_omni.protocol.progress import Progress, ReferenceBatch
from lightning_omni.protocol.record import Spans
from lightning_omni.strategy import _private

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class LeasedData:
    """Makes training loaders leased ones, and keeps their leases.

    Args:
        data: ``"dynamic"`` or ``"static"``.
        info: logs a message for the user, on rank 0.
        before_epoch: called with an epoch's number before samples of it are drawn from the server.
        is_for_user: tells, where a training loader begins to be iterated, whether that is for code of the user.
        own_batches: gives how many batches this rank trains, from how many it would train under DDP.

    Attributes:
        leases: this rank's view of the data, if it is leased.
        split: of its training data: see `split_of`.
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
        self.leases: Leases | None = None
        self.split = 0
        self._new: list[Leases | None] = []  # of each loader; None if its samples cannot be leased
        self._may_be_made_again = False
        self._sampler: DistributedSampler[Any] | None = None
        self._order: int | None = None

    @property
    def order(self) -> int | None:
        """The seed of an epoch's order, which is Lightning's unless the run that this group has joined has another."""
        return self._order if self._order is not None or self._sampler is None else self._sampler.seed

    @order.setter
    def order(self, seed: int) -> None:
        self._order = seed
        if self._sampler is not None:
            self._sampler.seed = seed

    def connect(self, world: World) -> None:
        """A run is being set up."""
        self._world = world

    def start(self) -> None:
        """The groups stand: their core tells the server of what this rank holds."""
        if self._world is not None:
            self._world.core.data = self.leases

    def forget(self) -> None:
        """The run is torn down."""
        self.leases, self._new, self._sampler, self._order = None, [], None, None
        self.start()
        self._world = None

    @property
    def is_dealt_out(self) -> bool:
        """Whether the samples are dealt out beforehand, to all ranks."""
        return self._coming is None

    @property
    def _coming(self) -> Leases | None:
        """What is leased from the next epoch on."""
        if self._new:
            return self._new[0] if len(self._new) == 1 else None
        return self.leases

    @property
    def is_dynamic(self) -> bool:
        """Whether samples are drawn from the server's book."""
        return self.leases is not None and not self.leases.is_local

    def begin_fetch(self) -> None:
        """A batch is about to be fetched. Data that is dealt out may ask at any time which rank of how many this is."""
        world = self._world
        if self.is_dealt_out and world is not None and world.is_computing:
            world.process_groups.use(world.process_groups.live)

    def end_fetch(self) -> None:
        """The batch is there: the default process group is the compute group's again."""
        world = self._world
        if self.is_dealt_out and world is not None and world.is_computing:
            world.process_groups.use(world.compute_group)

    def process(self, loader: object, rank: int, is_ours: Callable[[DataLoader[Any]], bool]) -> object:
        """Makes a training DataLoader one with leased batches, if it is one whose samples may be dealt out.

        Args:
            loader: what Lightning is about to iterate in training.
            rank: this rank.
            is_ours: tells a loader whose samples may be dealt out, by Lightning's sampler, from a user's own.
        """
        world = self._world
        if self.kind == "static" or world is None:
            return loader
        if not isinstance(loader, DataLoader) or not can_lease(loader) or not is_ours(loader):
            self._refuse_to_join()
            if world.executor.exchanges:
                self._info(
                    'OmniStrategy: the training data is dealt out beforehand (as with data="static"), because it has a'
                    " sampler of its own, is iterable, is no plain DataLoader (has an __iter__ of its own, say), or is"
                    " drawn by training_step (dataloader_iter); so a slow group delays the end of an epoch"
                )
            self._take_in(None)
            return loader
        leased = lease(
            loader,
            self._is_for_user,
            self._own_batches,
            rank=rank // world.tensor_parallel,
            before_epoch=self._before_epoch,
            is_local=not world.executor.exchanges,
            shares=self.leases.shares if self.leases is not None else (),  # of the loader that this one replaces
        )
        self._take_in(leased.leases)  # type: ignore[attr-defined]
        self._sampler = loader.sampler  # type: ignore[assignment]
        self.split = split_of(loader.dataset)
        if self._order is not None:
            self.order = self._order
        return leased

    def expect_others(self) -> None:
        """Loaders that are made from now on take the place of those there are, which no epoch has trained yet."""
        self._may_be_made_again = True

    def _take_in(self, leases: Leases | None) -> None:
        if self._may_be_made_again:
            self._new, self._may_be_made_again = [], False
        self._new.append(leases)
        if len(self._new) > 1:
            self._refuse_to_join()
            # Several loaders advance together; each deals its samples out as DistributedSampler does.
            for each in self._new:
                if each is not None:
                    each.is_local = True

    def _refuse_to_join(self) -> None:
        """Raises `UnsupportedError` if groups may join: of data that cannot be leased, nothing is left for them."""
        if self._world is not None and self._world.enlistment is not None:
            raise UnsupportedError(
                "join=True deals the samples of an epoch out to the groups that there are, and this training data is"
                " several loaders, has a sampler of its own, is iterable, is no plain DataLoader, or is drawn by"
                " training_step (dataloader_iter): pass one DataLoader over a dataset with a length, with shuffle= in"
                " the place of a sampler, leave use_distributed_sampler=True, and have training_step take the batch"
            )

    def adopt(self) -> None:
        """New loaders were made: at the start, or because they are reloaded every few epochs.

        Raises:
            UnsupportedError: several groups have trained on leased data, and these cannot be leased.
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
        """Tells the leases of this rank's place in its group, and of the group's ``shares``, if they are unequal."""
        world = self._world
        if self.leases is not None and world is not None:
            self.leases.assign(*world.data_place, world.executor.control, world.generation, shares)

    def weigh(self, loss: Tensor) -> Tensor:
        """The loss whose gradient this rank contributes: more, if it has more of the group's batch than others."""
        weight = self.leases.weight if self.leases is not None else 1.0
        return loss if weight == 1.0 else loss * weight


class FitLimits:
    """What Lightning's limits (max_steps, limit_train_batches, val_check_interval) mean for all ranks together.

    Lightning counts the batches and steps of one rank, as under DDP, where all ranks count alike. Groups do not. So
    limits are taken for those of DDP and counted in samples: see `lightning_omni.protocol.progress`.

    Args:
        trainer: whose they are.
        ranks_per_batch: as `EpochPlan` has it.

    Attributes:
        max_steps: steps of DDP after which the user wants the run to end, or -1.
        by_hand: how many steps the user takes, in manual optimization.
    """

    def __init__(self, trainer: Trainer, ranks_per_batch: int = 1) -> None:
        self._trainer, self._ranks_per_batch = trainer, ranks_per_batch
        self.max_steps: int = trainer.max_steps
        automatic = trainer.lightning_module.automatic_optimization
        self.by_hand = None if automatic else StepsByHand(trainer)

    def reference(self, leases: Leases) -> ReferenceBatch:
        """What one step of DDP trains, at the moment: accumulation may have a schedule."""
        return ReferenceBatch(leases.world_size, leases.batch_size, int(self._trainer.accumulate_grad_batches))

    def progress(self, leases: Leases, epoch: int, trained: Spans, before: Progress | None = None) -> Progress:
        """The run's progress where an epoch begins, or is resumed with some of its samples trained.

        Args:
            leases: the epoch's data.
            epoch: its number.
            trained: ranges of it that are trained.
            before: what was known of the run when the last epoch was over.
        """
        reference = self.reference(leases)
        there = -(-leases.total // reference.batch)
        limit = self._trainer.fit_loop.max_batches  # a callback may have put it beyond what is there
        batches = min(int(limit), there) if limit != float("inf") else there
        is_next = before is not None and epoch - before.epochs in (0, 1)
        past = before.steps_before(epoch) if before is not None and is_next else None
        if past is None and (windows := _private.accumulation_windows(self._trainer, epoch)):
            past = sum(-(-batches // window) for window in windows)
        return Progress(reference, batches, epochs=epoch, samples=size_of(trained), past=past)

    def plan(self, leases: Leases, progress: Progress, trained: Spans) -> EpochPlan:
        """The epoch's data, for the server."""
        trainer, epoch = self._trainer, progress.epochs
        interval = trainer.val_check_batch  # None if it is a duration
        every, offset = 0, 0
        if _private.validates_this_epoch(trainer) and interval not in (None, float("inf")):
            # Without check_val_every_n_epoch, the batches of earlier epochs count, too.
            done = progress.past_batches if trainer.check_val_every_n_epoch is None else 0
            every = int(interval) * progress.reference.batch
            offset = done % int(interval) * progress.reference.batch
        return EpochPlan(
            epoch=epoch,
            total=leases.total,
            batch_size=leases.batch_size,
            # In manual optimization it is not known beforehand how many batches make max_steps.
            budget=progress.budget(leases.total, epoch, self.max_steps if self.by_hand is None else -1),
            validate_every=every,
            validate_offset=offset,
            trained=trained,
            ranks_per_batch=self._ranks_per_batch,
        )

    @staticmethod
    def cut_short(plan: EpochPlan, progress: Progress) -> bool:
        """Whether max_steps end the epoch before its samples do."""
        return plan.budget < progress.budget(plan.total, plan.epoch)

    def validates_at_end(self, plan: EpochPlan, progress: Progress) -> bool:
        """Whether the end of the epoch is one of the points at which val_check_interval asks for a validation."""
        is_cut_short = self.cut_short(plan, progress)
        if self._trainer.val_check_batch == float("inf"):
            return not is_cut_short
        if not plan.validate_every:
            return False
        end = plan.budget if is_cut_short else progress.samples_an_epoch
        return (end + plan.validate_offset) % plan.validate_every == 0

    def counted(self, progress: Progress) -> Progress:
        """The progress where a fit begins, by what Lightning has counted; in manual optimization steps are batches.

        Args:
            progress: which takes all epochs to be like the one under way.
        """
        trainer, loop = self._trainer, self._trainer.fit_loop
        is_inside = loop.restarted_mid_epoch or loop.restarted_on_epoch_end
        batches = _private.batches_trained(trainer) if is_inside else 0
        steps = int(trainer.global_step) if self.by_hand is None else _private.batches_begun(trainer)
        if batches >= trainer.num_training_batches:  # saved when they were all trained, and hooks were left
            return replace(progress, epochs=progress.epochs + 1, samples=0, past=steps)
        return replace(progress, past=steps - batches // progress.reference.window)

    def steps_left(self, taken: int) -> int | None:
        """Steps of DDP that are left when so many are taken; None if there is no limit."""
        if self.max_steps == -1:
            return None
        return max(0, self.max_steps - (taken if self.by_hand is None else self.by_hand.steps_of(taken)))

    def is_reached_by_hand(self, progress: Progress) -> bool:
        """Whether DDP would have taken ``max_steps`` by now, in manual optimization."""
        if self.by_hand is None or self.max_steps == -1:
            return False
        return self.by_hand.steps_of(progress.steps) >= self.max_steps  # a window of one batch: steps are batches


class StepsByHand:
    """How many steps the user takes in manual optimization: several optimizers' for each batch, one in four batches.

    Each rank counts those of its own batches, of which there may be more or fewer than of another group.

    Args:
        trainer: whose loops count steps and batches, perhaps from a checkpoint on.

    Attributes:
        counts: batches, and the steps that were taken in them; the same on all members of a group.
        unstepped: batches since the last step.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        batches = _private.batches_begun(trainer)
        self.counts = batches, _private.steps_by_hand(trainer) if batches else 0
        self._before = self.unstepped = 0

    def begin_batch(self) -> None:
        """A batch begins."""
        self._before = _private.steps_by_hand(self._trainer)

    def end_batch(self) -> None:
        """A batch has ended."""
        batches, steps = self.counts
        taken = _private.steps_by_hand(self._trainer) - self._before
        self.counts = batches + 1, steps + taken
        self.unstepped = 0 if taken else self.unstepped + 1

    def steps_of(self, batches: int) -> int:
        """Steps that so many batches make, as far as is known."""
        counted, steps = self.counts
        return batches * steps // max(1, counted)


class GivenRank(int):
    """A rank that OmniStrategy gave to a sampler."""


def is_given(loader: object) -> bool:
    """Whether a loader's sampler is Lightning's, which has its rank of OmniStrategy, and not a user's own.

    What is no DataLoader, and an empty list of them, has none.
    """
    return isinstance(getattr(getattr(loader, "sampler", None), "rank", None), GivenRank)


def draws_batches(training_step: Callable[..., Any]) -> bool:
    """Whether it draws its batches itself, when it likes; those of leased data are told apart by their hooks."""
    return "dataloader_iter" in inspect.signature(training_step).parameters


def split_of(dataset: object) -> int:
    """Tells parts of a dataset from each other, as `torch.utils.data.random_split` makes them; 0 for a whole one."""
    mark = 0
    while isinstance(dataset, Subset):
        indices = torch.as_tensor(dataset.indices, dtype=torch.int64)
        mark = zlib.crc32(indices.numpy().tobytes(), mark)
        dataset = dataset.dataset
    return mark


def size_of(spans: Spans) -> int:
    """Samples in ranges of an epoch."""
    return sum(stop - start for start, stop in spans)
