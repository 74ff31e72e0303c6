"""Lightning's limits (max_steps, limit_train_batches, val_check_interval) in samples of all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_omni.runtime.leased_loader import RankLeases
from lightning_omni.strategy.lightning_internals.loops import (
    accumulation_windows,
    batches_started,
    batches_trained,
    validates_this_epoch,
)
from lightning_omni.wire.messages import EpochPlan
from lightning_omni.wire.messages.data import Spans
from lightning_omni.wire.steps_and_samples import Progress, ReferenceBatch

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class FitLimits:
    """Lightning's limits under DDP, in samples: see `lightning_omni.wire.steps_and_samples`.

    Attributes:
        max_steps: steps of DDP after which the run ends, or -1; in manual optimization loops count their group's own.
    """

    def __init__(self, trainer: Trainer, ranks_per_batch: int = 1) -> None:
        self.trainer, self._ranks_per_batch = trainer, ranks_per_batch
        self._is_automatic = trainer.lightning_module.automatic_optimization
        self.max_steps = int(trainer.max_steps) if self._is_automatic else -1

    def reference(self, leases: RankLeases) -> ReferenceBatch:
        return ReferenceBatch(leases.world_size, leases.batch_size, int(self.trainer.accumulate_grad_batches))

    def progress(self, leases: RankLeases, epoch: int, trained: Spans, before: Progress | None = None) -> Progress:
        reference = self.reference(leases)
        there = -(-leases.total // reference.batch)
        limit = self.trainer.fit_loop.max_batches  # a callback may have set it larger than the data
        batches = min(int(limit), there) if limit != float("inf") else there
        is_next = before is not None and epoch - before.epochs in (0, 1)
        past, past_batches = None, None
        if before is not None and is_next:
            past, past_batches = before.steps_before(epoch), before.batches_before(epoch)
        if past is None and (windows := accumulation_windows(self.trainer, epoch)):
            past = sum(-(-batches // window) for window in windows)
        return Progress(reference, batches, epoch, size_of(trained), past, past_batches)

    def plan(self, leases: RankLeases, progress: Progress, trained: Spans) -> EpochPlan:
        trainer, epoch = self.trainer, progress.epochs
        interval = trainer.val_check_batch  # None if val_check_interval is a duration
        every, offset = 0, 0
        if validates_this_epoch(trainer) and interval not in (None, float("inf")):
            # Without check_val_every_n_epoch, the batches of earlier epochs count, too.
            done = progress.batches_before(epoch) if trainer.check_val_every_n_epoch is None else 0
            every = int(interval) * progress.reference.batch
            offset = done % int(interval) * progress.reference.batch
        return EpochPlan(
            epoch=epoch,
            total=leases.total,
            batch_size=leases.batch_size,
            budget=progress.budget(leases.total, epoch, self.max_steps),
            validate_every=every,
            validate_offset=offset,
            trained=trained,
            ranks_per_batch=self._ranks_per_batch,
            later=self._later(leases.total, progress),
        )

    def _later(self, total: int, progress: Progress) -> int | None:
        epochs, limits = self.trainer.max_epochs, list[int]()
        if epochs not in (None, -1):
            limits.append(max(0, epochs - progress.epochs - 1) * progress.budget(total, progress.epochs))
        if self.max_steps != -1:
            limits.append(progress.steps_left(self.max_steps, progress.epochs + 1) * progress.reference.samples)
        return min(limits, default=None)

    @staticmethod
    def cut_short(plan: EpochPlan, progress: Progress) -> bool:
        return plan.budget < progress.budget(plan.total, plan.epoch)

    def validates_at_end(self, plan: EpochPlan, progress: Progress) -> bool:
        is_cut_short = self.cut_short(plan, progress)
        if self.trainer.val_check_batch == float("inf"):
            return not is_cut_short
        if not plan.validate_every:
            return False
        end = plan.budget if is_cut_short else progress.samples_an_epoch
        return (end + plan.validate_offset) % plan.validate_every == 0

    def counted(self, progress: Progress) -> Progress:
        """Return the progress at the start of a fit by Lightning's counts; in manual optimization steps are batches."""
        trainer, loop = self.trainer, self.trainer.fit_loop
        is_inside = loop.restarted_mid_epoch or loop.restarted_on_epoch_end
        batches = batches_trained(trainer) if is_inside else 0
        begun = batches_started(trainer)
        steps = int(trainer.global_step) if self._is_automatic else begun
        if batches >= trainer.num_training_batches:  # saved after the last batch, before the hooks of the epoch's end
            return replace(progress, epochs=progress.epochs + 1, samples=0, past=steps, past_batches=begun)
        past = steps - batches // progress.reference.window
        return replace(progress, past=past, past_batches=begun - batches)

    def steps_left(self, taken: int) -> int | None:
        return None if self.max_steps == -1 else max(0, self.max_steps - taken)


def size_of(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)
