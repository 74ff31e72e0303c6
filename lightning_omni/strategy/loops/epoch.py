"""The epoch of a group: its leased loaders, its entry, its state, and how ranks have ended it."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.runtime import World
from lightning_omni.runtime.leased_loader import RankLeases, lease, why_not_leased
from lightning_omni.wire.messages import EpochPlan
from lightning_omni.wire.messages.data import plan_difference
from lightning_omni.wire.steps_and_samples import Progress

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

# --- Loaders that are leased ------------------------------------------------------------------------------------------


class LeasedData:
    """The training loaders of a fit, converted to leased ones, and their leases.

    ``before_epoch`` is as in `RankLeases`, ``is_for_user`` and ``own_batches`` as in `lease`.

    Attributes:
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
        self._order: tuple[int, bool] | None = None

    @property
    def order(self) -> tuple[int, bool] | None:
        """Return the seed of the epochs' order, and whether it is random: Lightning's, or the joined run's; or None."""
        sampler = self._sampler
        return self._order if self._order is not None or sampler is None else (sampler.seed, sampler.shuffle)

    @order.setter
    def order(self, order: tuple[int, bool]) -> None:
        self._order = order
        if self._sampler is not None:
            self._sampler.seed, self._sampler.shuffle = order

    def set_epoch(self, epoch: int) -> None:
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    def connect(self, world: World) -> None:
        self._world = world

    @property
    def is_in_fit(self) -> bool:
        return self._world is not None

    def start(self) -> None:
        if self._world is not None:
            self._world.core.data = self.leases

    def forget(self) -> None:
        self.leases, self._new, self._sampler, self._order = None, [], None, None
        self.start()
        self._world = None

    @property
    def is_dealt_out(self) -> bool:
        return self.coming is None

    @property
    def coming(self) -> RankLeases | None:
        if self._new:
            return self._new[0] if len(self._new) == 1 else None
        return self.leases

    @property
    def is_dynamic(self) -> bool:
        return self.leases is not None and not self.leases.is_local

    def begin_fetch(self) -> None:
        """Use all live ranks as default process group if data is divided in advance: it may query its rank."""
        world = self._world
        if self.is_dealt_out and world is not None and world.is_computing:
            world.process_groups.use(world.process_groups.live)

    def end_fetch(self) -> None:
        world = self._world
        if self.is_dealt_out and world is not None and world.is_computing:
            world.process_groups.use(world.compute_group)

    def process(self, loader: object, rank: int, objection: Callable[[DataLoader[Any]], str]) -> object:
        """Return a DataLoader with leased batches, if possible; otherwise the user's own.

        ``objection`` returns why a loader's use forbids leases, or "".
        """
        world = self._world
        loader = getattr(loader, "unleased", loader)  # Lightning has put a leased one into the user's CombinedLoader
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
        """Let new loaders replace those that no epoch has trained yet."""
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
        if self._world is not None and self._world.registration is not None:
            raise UnsupportedError(
                "elastic=True deals the samples of an epoch out to the groups that there are, and this training data is"
                " several loaders, has a sampler of its own, is iterable, is no plain DataLoader, or is drawn by"
                " training_step (dataloader_iter): pass one DataLoader over a dataset with a length, with shuffle= in"
                " the place of a sampler, leave use_distributed_sampler=True, and have training_step take the batch"
            )

    def adopt(self) -> None:
        """Use the loaders of the start or of a reload, which must be leasable if several groups trained on leases."""
        assert self._world is not None
        self._may_be_made_again = False
        if not self._new:
            return
        before, self.leases = self.leases, self.coming
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
        elif self.leases is not None and (
            not self.leases.is_local  # it was made for several groups, which are one now
            or self._world.data_rank[1] < self.leases.world_size  # ranks were lost
        ):
            self.assign(self.leases.shares)
        self.start()

    def assign(self, shares: Sequence[int] = ()) -> None:
        world = self._world
        if self.leases is not None and world is not None:
            member, members = world.data_rank
            own = shares if len(shares) == members else ()  # other groups were formed since the loader was made
            self.leases.assign(member, members, world.executor.control, world.generation, own)

    def weigh(self, loss: Tensor) -> Tensor:
        weight = self.leases.weight if self.leases is not None else 1.0
        return loss if weight == 1.0 else loss * weight


class LightningRank(int):
    """A rank that OmniStrategy has passed to a sampler."""


def has_lightning_sampler(loader: object) -> bool:
    return isinstance(getattr(getattr(loader, "sampler", None), "rank", None), LightningRank)


def draws_batches(training_step: Callable[..., Any]) -> bool:
    return "dataloader_iter" in inspect.signature(training_step).parameters


def split_of(dataset: object) -> int:
    """Return a mark of a dataset's part, as of `torch.utils.data.random_split`; 0 for a whole one."""
    mark = 0
    while isinstance(dataset, Subset):
        try:
            part = torch.as_tensor(dataset.indices, dtype=torch.int64).cpu().numpy().tobytes()
        except (TypeError, ValueError):  # its indices may be keys, of a dict for example
            part = repr(list(dataset.indices)).encode()
        mark = zlib.crc32(part, mark)
        dataset = dataset.dataset
    return mark


# --- State ------------------------------------------------------------------------------------------------------------


class DataSizes(NamedTuple):
    """The samples in the datasets of a fit.

    Attributes:
        validation: those of each validation loader; None if they are not known, -1 for a dataset without a length.
    """

    training: int
    validation: list[int] | None

    def difference(self, theirs: DataSizes) -> tuple[str, str, str] | None:
        """Return in words the first difference, and both values; None if nothing known differs."""
        if self.training != theirs.training:
            return "samples in the training dataset", str(self.training), str(theirs.training)
        if None not in (self.validation, theirs.validation) and self.validation != theirs.validation:
            return "samples in the validation datasets", _listed(self.validation), _listed(theirs.validation)
        return None


def _listed(sizes: list[int] | None) -> str:
    return ", ".join("of no length" if size < 0 else str(size) for size in sizes or ()) or "none"


class EntryPoint(NamedTuple):
    """The position in a run at which a group joins it.

    Attributes:
        samples: trained samples of this epoch when the groups last began to compute.
        progress: progress of the run then; earlier epochs may have had other lengths.
        split: see `split_of`.
    """

    plan: EpochPlan
    samples: int
    progress: Progress | None
    split: int
    sizes: DataSizes

    def check(self, plan: EpochPlan, split: int, sizes: DataSizes) -> None:
        if differing := sizes.difference(self.sizes) or plan_difference(plan, self.plan):
            words, own, theirs = differing
            raise ConfigurationError(
                f"{words}: {own}; the run that this group joins has: {theirs}; give all groups the same datasets, batch"
                " size, limits and validations"
            )
        if split != self.split:
            raise ConfigurationError(
                "this group's training data is another part of its dataset than that of the run that it joins, so that"
                " groups would train on what others validate with: split with one seed in all groups, as"
                " random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))"
            )


@dataclass
class EpochState:
    """The state of the current epoch.

    Attributes:
        validates: whether all groups validate after this batch; None leaves it to Lightning.
        is_due: whether the others validate after this batch without being notified.
        is_over: whether this group has trained its last batch.
        is_skipped: whether another group has ended the epoch early.
        is_check: whether all groups synchronize after this batch without a validation.
        is_last: whether no group trains on after this synchronization.
        has_ended: whether a group is already at its end, so that none validates.
        window: ``accumulate_grad_batches`` in this group's last batch; 0 before the first one.
    """

    plan: EpochPlan | None = None
    validates: bool | None = None
    is_due: bool = False
    is_over: bool = False
    is_skipped: bool = False
    is_check: bool = False
    is_last: bool = False
    has_ended: bool = False
    window: int = 0

    def check_window(self, window: int, counts: bool) -> None:
        """Reject a change of ``accumulate_grad_batches`` inside an epoch whose steps are counted in samples."""
        before, self.window = self.window, window
        if counts and before not in (0, self.window):
            raise UnsupportedError(
                f"accumulate_grad_batches has changed from {before} to {self.window} inside an epoch. With"
                " several groups, max_steps and schedulers with interval='step' count the samples of all groups, as"
                " many for each step of an epoch: change it in on_train_epoch_start, as GradientAccumulationScheduler"
                " does, or use groups=1"
            )


def rates_of(trainer: Trainer) -> list[float]:
    groups: list[Any] = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return [float(group["lr"]) for group in groups if "lr" in group]


def warning_of_rates(epoch: int, rates: Mapping[int, Sequence[float]]) -> str:
    """Return a warning that learning rates differ between ranks with as many parameter groups, or ""."""
    same_groups = len({len(each) for each in rates.values()}) == 1
    differing = [each for each in zip(*rates.values(), strict=False) if same_groups and len({*each}) > 1]
    if not differing:
        return ""
    of_rank = dict(zip(rates, differing[0], strict=True))
    ends = sorted({min(of_rank, key=of_rank.__getitem__), max(of_rank, key=of_rank.__getitem__)})
    return (
        f"epoch {epoch} has ended with different learning rates:"
        f" {' and '.join(f'rank {rank} has {of_rank[rank]:.4g}' for rank in ends)}. Groups train different numbers of"
        " batches, so a scheduler that your code steps in each of them goes further on some ranks, and a hook that"
        " compares its batch number with one that it has kept does something on some ranks only. Step such a scheduler"
        " once an epoch, or use automatic optimization, where Lightning steps it in pace with the run; ask"
        " trainer.is_last_batch, or compare with trainer.num_training_batches in that very batch, which is then that of"
        " this rank"
    )
