"""The state of one epoch: where a group enters it, what is known inside it, and how ranks have ended it.

At its end ranks are checked to agree where they would agree under DDP. Groups train different numbers of batches. A
scheduler that the user's code steps in each of them therefore has another learning rate on some ranks, and a hook that
acts at a batch number which it counts or stores itself acts on some ranks only, or at different times.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.runtime import World
from lightning_omni.strategy.lightning_internals.progress import batches_trained
from lightning_omni.wire.messages import EpochPlan
from lightning_omni.wire.steps_and_samples import Progress

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class EntryPoint(NamedTuple):
    """The position in a run at which a group joins it.

    Attributes:
        plan: plan of the current epoch.
        samples: samples of this epoch trained when the groups last began to compute.
        progress: progress of the run then; earlier epochs may have had other lengths.
        split: mark of the trained part of a dataset: `lightning_omni.strategy.loops.leased_data.split_of`.
    """

    plan: EpochPlan
    samples: int
    progress: Progress | None
    split: int

    def check(self, plan: EpochPlan, split: int) -> None:
        """Raise `ConfigurationError` unless the data of a group that joins here has the same plan and split."""
        if plan != self.plan:
            raise ConfigurationError(
                f"this group's data is not that of the run that it joins, {plan} against {self.plan}: give all the"
                " same dataset, batch size, limits and validation="
            )
        if split != self.split:
            raise ConfigurationError(
                "this group's training data is another part of its dataset than that of the run that it joins, so that"
                " groups would train on what others validate with: split with one seed in all groups, as"
                " random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))"
            )


@dataclass
class EpochState:
    """The state of the current epoch, which is dropped at its end.

    Attributes:
        plan: plan of its data, if they are leased.
        validates: whether all groups validate after this batch; None leaves it to Lightning.
        is_due: whether the other groups, too, validate after this batch without being notified.
        is_over: whether this group has trained its last batch.
        is_skipped: whether another group has ended the epoch early.
        is_check: whether all groups synchronize after this batch without a validation.
        is_counted: whether this group's last batch has counted the epoch for schedules.
        is_last: whether no group trains on after this synchronization, where all have heard of a stop.
        has_ended: whether a group is already at its end, so that none validates.
        window: ``accumulate_grad_batches`` in this group's last batch; 0 before the first one.
    """

    plan: EpochPlan | None = None
    validates: bool | None = None
    is_due: bool = False
    is_over: bool = False
    is_skipped: bool = False
    is_check: bool = False
    is_counted: bool = False
    is_last: bool = False
    has_ended: bool = False
    window: int = 0

    def check_window(self, window: int, counts: bool) -> None:
        """Refuse a change of ``accumulate_grad_batches`` inside an epoch, if the run ``counts`` its steps in samples.

        The steps of an epoch are computed from its samples with one window, and groups would change it at different
        samples.
        """
        before, self.window = self.window, window
        if counts and before not in (0, self.window):
            raise UnsupportedError(
                f"accumulate_grad_batches has changed from {before} to {self.window} inside an epoch. With"
                " several groups, max_steps and schedulers with interval='step' count the samples of all groups, as"
                " many for each step of an epoch: change it in on_train_epoch_start, as GradientAccumulationScheduler"
                " does, or use groups=1"
            )


class EpochEnd(NamedTuple):
    """The state of this rank at the end of an epoch.

    Attributes:
        epoch: number of the epoch.
        batches: batches of the epoch that this rank has trained.
        unstepped: batches since the user's last step, in manual optimization.
        rates: learning rates of all parameter groups.
    """

    epoch: int
    batches: int
    unstepped: int
    rates: list[float]

    @classmethod
    def of(cls, trainer: Trainer, unstepped: int) -> EpochEnd:
        """Return the end of the epoch that the Trainer has trained last."""
        groups: list[Any] = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rates = [float(group["lr"]) for group in groups if "lr" in group]
        return cls(trainer.current_epoch - 1, batches_trained(trainer), unstepped, rates)

    @property
    def marks(self) -> list[int]:
        """Return the numbers from whose maxima over all ranks `differ` decides."""
        rates, groups = zlib.crc32(struct.pack(f"{len(self.rates)}d", *self.rates)), len(self.rates)
        return [groups, -groups, rates, -rates, int(self.unstepped > 0), int(not self.unstepped)]

    def sentence(self, world: World) -> str:
        """Return the warning for the user that ranks differ. All live ranks call it."""
        ends = self._of_all(world)
        first = next(iter(ends.values()))
        index = next(
            (i for i in range(len(self.rates)) if any(e.rates[i] != first.rates[i] for e in ends.values())), -1
        )

        def said(end: EpochEnd) -> str:
            last = f"its last step {end.unstepped} batches before its end" if end.unstepped else "a step in the last"
            return f"the learning rate {end.rates[index]:.4g}" if index >= 0 else last

        shown = ", ".join(
            f"rank {rank} has trained {end.batches} batches and has {said(end)}"
            for rank, end in sorted(ends.items(), key=lambda item: (said(item[1]) == said(first), item[0]))[-4:]
        )
        return (
            f"epoch {self.epoch} has not ended alike on all ranks: {shown}. Groups train different numbers of batches,"
            " so a scheduler that your code steps in each of them goes further on some ranks, and a hook that compares"
            " its batch number with one that it has kept, or counts by itself, does something on some ranks only. Step"
            " such a scheduler once an epoch, or use automatic optimization, where Lightning steps it in pace with the"
            " run; ask trainer.is_last_batch, or compare with trainer.num_training_batches in that very batch, which is"
            " then that of this rank; and do what is to be done once an epoch in on_train_epoch_end"
        )

    def _of_all(self, world: World) -> dict[int, EpochEnd]:
        live = world.process_groups.live
        numbers = [1, self.batches, self.unstepped, *map(_bits, self.rates)]
        size, index = len(numbers), live.rank()
        before, after = [0] * (size * index), [0] * (size * (live.size() - index - 1))
        everything = world.all_reduce_max([*before, *numbers, *after])
        found = {}
        for number, rank in enumerate(live.ranks):
            is_there, batches, unstepped, *rates = everything[number * size : (number + 1) * size]
            if is_there:
                found[rank] = EpochEnd(self.epoch, batches, unstepped, [_rate(bits) for bits in rates])
        return found


def differ(marks: Sequence[int]) -> bool:
    """Return whether ranks differ, given the maxima of `EpochEnd.marks` over all ranks.

    Rates are not compared where ranks have different numbers of parameter groups: some may add theirs later.
    """
    groups, minus_groups, rates, minus_rates, some, others = marks
    return groups == -minus_groups and (rates != -minus_rates or (some > 0 and others > 0))


def _bits(rate: float) -> int:
    """Return the bits of a rate as an integer, which keeps the order of rates; negative rates become 0."""
    [bits] = struct.unpack("q", struct.pack("d", max(0.0, rate)))
    return int(bits)


def _rate(bits: int) -> float:
    [rate] = struct.unpack("d", struct.pack("q", bits))
    return float(rate)
