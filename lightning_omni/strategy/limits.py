"""What Lightning's limits of a fit (max_steps, limit_train_batches, val_check_interval) mean for all ranks together.

Lightning counts the batches and steps of one rank, as under DDP, where all ranks count alike. Groups do not. So limits
are taken for those of DDP and counted in samples: see `lightning_omni.protocol.progress`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_omni.optimizer.data import Leases
from lightning_omni.protocol import EpochPlan
from lightning_omni.protocol.progress import Progress, ReferenceBatch
from lightning_omni.protocol.record import Spans
from lightning_omni.strategy import _private

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class Limits:
    """The limits of one fit, on leased data.

    Args:
        trainer: whose they are.

    Attributes:
        max_steps: steps of DDP after which the user wants the run to end, or -1.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.max_steps: int = trainer.max_steps

    def reference(self, leases: Leases) -> ReferenceBatch:
        """What one step of DDP trains, at the moment: accumulation may have a schedule."""
        return ReferenceBatch(leases.world_size, leases.batch_size, int(self._trainer.accumulate_grad_batches))

    def progress(self, leases: Leases, epoch: int, trained: Spans) -> Progress:
        """The run's progress where an epoch begins, or is resumed with some of its samples trained."""
        reference = self.reference(leases)
        there = -(-leases.total // reference.batch)
        limit = self._trainer.num_training_batches  # a callback may have put it beyond what is there
        batches = min(int(limit), there) if limit != float("inf") else there
        return Progress(reference, batches, epochs=epoch, samples=size_of(trained))

    def plan(self, leases: Leases, progress: Progress, trained: Spans) -> EpochPlan:
        """The epoch's data, for the server."""
        trainer, epoch = self._trainer, progress.epochs
        interval = trainer.val_check_batch  # None if it is a duration
        every, offset = 0, 0
        if _private.validates_this_epoch(trainer) and interval not in (None, float("inf")):
            # Without check_val_every_n_epoch, the batches of earlier epochs count, too.
            done = epoch * progress.batches if trainer.check_val_every_n_epoch is None else 0
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
        )

    def validates_at_end(self, plan: EpochPlan, progress: Progress) -> bool:
        """Whether the end of the epoch is one of the points at which val_check_interval asks for a validation."""
        is_cut_short = plan.budget < progress.budget(plan.total, plan.epoch)  # by max_steps, before its samples end
        if self._trainer.val_check_batch == float("inf"):
            return not is_cut_short
        if not plan.validate_every:
            return False
        end = plan.budget if is_cut_short else progress.samples_an_epoch
        return (end + plan.validate_offset) % plan.validate_every == 0

    def steps_left(self, progress: Progress, epoch: int) -> int | None:
        """Steps of DDP that are left when an epoch begins; None if there is no limit."""
        return None if self.max_steps == -1 else progress.steps_left(self.max_steps, epoch)


def size_of(spans: Spans) -> int:
    """Samples in ranges of an epoch."""
    return sum(stop - start for start, stop in spans)
