"""The progress of a run in samples of all groups, and the remaining steps of DDP.

Lightning compares one rank's steps with max_steps. `RunProgress` computes the steps of DDP, also after a resume, and
the limit for the loops' own steps, so that the run ends where DDP's would.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_omni.errors import UnsupportedError
from lightning_omni.runtime import World
from lightning_omni.runtime.state.checkpoint import RunCheckpoint
from lightning_omni.strategy.lightning_internals.loops import (
    accumulation_windows,
    batches_resumed,
    batches_trained,
    is_at_last_batch,
    progress_counters,
    recount,
    set_progress_counters,
)
from lightning_omni.strategy.loops.epoch import LeasedData
from lightning_omni.strategy.loops.limits import FitLimits, size_of
from lightning_omni.wire.messages import EpochPlan, SnapshotId
from lightning_omni.wire.messages.data import Spans
from lightning_omni.wire.steps_and_samples import Progress

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class RunProgress:
    """The progress of the runs of one strategy.

    Attributes:
        progress: None if the data is not leased.
        past: progress at the end of the last epoch, or at a checkpoint loaded later; or None.
        resumed: the moment of the checkpoint from which the run resumes.
        resumed_samples: samples in the dataset at that moment.
        is_counted_together: whether several groups have trained the run.
        step_limit: the loops' max_steps, in this rank's steps; None for the Trainer's.
        trainer: from `connect` on.
        limits: from `start` on.
    """

    trainer: Trainer
    limits: FitLimits
    _world: World

    def __init__(self, data: LeasedData, warn: Callable[[str], None]) -> None:
        self._data, self._warn = data, warn
        self._resumed_batches = (-1, 0)  # number of the epoch, and batches of each rank
        self.progress: Progress | None = None
        self.past: Progress | None = None
        self.resumed, self.resumed_samples = SnapshotId(), 0
        self.is_counted_together = False
        self.step_limit: int | None = None
        self._begun_with: int | None = None  # the Trainer's max_steps when the run started

    # --- The run -----------------------------------------------------------------------------------------------------

    def connect(self, trainer: Trainer, world: World) -> None:
        self.trainer, self._world, self._begun_with = trainer, world, None
        if self.is_counted_together:
            self._suspend_limit()

    def _suspend_limit(self) -> None:
        # Until `start`, the loop would compare this rank's own steps with max_steps.
        if self.trainer.max_steps != -1:
            self.step_limit = sys.maxsize

    def enter(self, past: Progress | None) -> None:
        self.past = past
        self._suspend_limit()  # this rank's counts are those of the group that records

    def resume(self, saved: RunCheckpoint) -> None:
        self.resumed, self.resumed_samples, self.past = saved.cut, saved.samples, saved.progress
        self.is_counted_together = saved.progress is not None or saved.cut.epoch != -1

    def restored(self) -> None:
        """Keep a run that has made its max_steps from beginning, after the loops have loaded a checkpoint."""
        trainer, past = self.trainer, self.past
        if self.step_limit is None or past is None or past.epochs != trainer.current_epoch:
            return
        if past.steps >= trainer.max_steps and trainer.lightning_module.automatic_optimization:
            self.step_limit = min(trainer.max_steps, trainer.global_step)

    def start(self, ranks_per_batch: int, entered: int | None) -> None:
        """Start the run, after the groups and the data were set up.

        If this group has joined, ``entered`` samples of the current epoch are trained.
        """
        trainer = self.trainer
        self.limits, self._begun_with = FitLimits(trainer, ranks_per_batch), int(trainer.max_steps)
        self._count_resumed()
        self._resumed_batches = trainer.current_epoch, batches_resumed(trainer)
        self.step_limit = None
        if self._data.leases is None:
            return
        epoch = trainer.current_epoch
        self.check_resumed(epoch)
        self.progress = self.limits.progress(self._data.leases, epoch, self.trained_spans(epoch), self.past)
        if entered is not None:
            self.advance(entered)
        elif self.past is None and not self.is_counted_together:
            self.progress = self.limits.counted(self.progress)

    def _count_resumed(self) -> None:
        """Count the batches that several groups have trained as those of all ranks of this run."""
        leases, trainer = self._data.leases, self.trainer
        if leases is None or self.resumed.epoch == -1 or not trainer.fit_loop.restarted_mid_epoch:
            return
        whole, reference = int(trainer.num_training_batches), self.limits.reference(leases)
        if is_at_last_batch(trainer):  # at its end, where Lightning has counted the epoch already
            recount(trainer, whole)
        elif self._fits(trainer.current_epoch):
            trained = size_of(self.trained_spans(trainer.current_epoch))
            batches = max(1, trained // reference.samples) * reference.window
            recount(trainer, whole if trained >= leases.total else min(batches, whole - 1))

    def forget(self) -> None:
        self.progress, self.resumed = None, SnapshotId()

    # --- An epoch ----------------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> EpochPlan:
        assert self._data.leases is not None
        trained = self.trained_spans(epoch)
        before = self.progress
        self.progress = self.limits.progress(self._data.leases, epoch, trained, before)
        if before is None and not self.is_counted_together:  # a reload has brought the first leases
            self.progress = self.limits.counted(self.progress)
        return self.limits.plan(self._data.leases, self.progress, trained)

    def trained_spans(self, epoch: int) -> Spans:
        leases = self._data.leases
        if leases is None:
            return ()
        if self.resumed.epoch == -1:  # one group or DDP saved it: all ranks have the same count of batches
            at, batches = self._resumed_batches
            if at != epoch:
                return ()
            trained = batches * self.limits.reference(leases).batch
            return ((0, min(trained, leases.total)),) if trained else ()
        if not self._fits(epoch):
            return ()
        # Another number of ranks pads the same permutation to another length.
        return tuple((start, min(stop, leases.total)) for start, stop in self.resumed.trained if start < leases.total)

    def _fits(self, epoch: int) -> bool:
        leases = self._data.leases
        return leases is not None and (self.resumed.epoch, self.resumed_samples) == (epoch, leases.dataset_size)

    def check_resumed(self, epoch: int) -> None:
        leases = self._data.leases
        if leases is not None and self.resumed.epoch == epoch and self.resumed.trained and not self._fits(epoch):
            self._warn(
                f"OmniStrategy: the checkpoint was saved inside epoch {epoch} of {self.resumed_samples} samples, and"
                f" the training data now has {leases.dataset_size}: which samples were trained before the save is not"
                " known, and some may be trained a second time; resume with the same dataset to train only the others"
            )

    @property
    def is_resumed_inside(self) -> bool:
        """Return whether several groups have trained a part of the current epoch, or had begun it."""
        leases, epoch = self._data.leases, self.trainer.current_epoch
        if leases is None or not self._fits(epoch):
            return False
        assert self.progress is not None
        at, batches = self._resumed_batches
        trained = size_of(self.trained_spans(epoch))
        has_begun = trained > 0 or (at == epoch and batches > 0)
        return has_begun and trained < self.progress.budget(leases.total, epoch)

    def now(self) -> Progress:
        assert self.progress is not None
        assert self._data.leases is not None
        self.progress = replace(self.progress, reference=self.limits.reference(self._data.leases))
        return self.progress

    def advance(self, samples: int) -> None:
        if self.progress is not None:
            self.progress = replace(self.progress, samples=max(self.progress.samples, samples))

    @property
    def seen(self) -> int:
        """Return the number of this epoch's trained positions as known to this rank, and so to its group."""
        assert self._data.leases is not None
        if not self._data.is_dynamic:
            return size_of(self._data.leases.trained_spans)
        # Groups that exchange weights at intervals, or never, receive the others' progress too seldom.
        return self._data.leases.position if self._world.steps_at_worker else self._world.core.last_answer.progress

    def keep_up(self) -> None:
        self.advance(self.seen)

    def align(self, all_reduce_max: Callable[[list[int]], list[int]]) -> None:
        """Give ranks of different groups the same counts, and so the same validations."""
        mine = progress_counters(self.trainer)
        theirs = all_reduce_max(mine)
        if mine != theirs:
            set_progress_counters(self.trainer, theirs)

    def end(self, epoch: int, trained: int | None) -> None:
        """End an epoch, after ``trained`` samples if a rank has skipped its remainder or stopped the run."""
        if self.progress is None:
            return
        over = self.now().steps_before(epoch + 1)
        if self.limits.max_steps != -1:
            over = min(over, self.limits.max_steps)  # max_steps may have ended the run inside the epoch
        if trained is not None:
            over = min(over, replace(self.progress, samples=trained).steps)
        reference = self.progress.reference
        steps = over - self.progress.steps_before(epoch)
        here = steps * reference.window if trained is None else trained // reference.batch
        batches = self.progress.batches_before(epoch) + min(self.progress.batches, here)
        self.progress = self.past = replace(self.progress, epochs=epoch + 1, samples=0, past=over, past_batches=batches)

    # --- Positions ---------------------------------------------------------------------------------------------------

    def moment(self, is_open: bool, is_open_ended: bool) -> tuple[Progress | None, SnapshotId]:
        """Return the run's progress, and the trained ranges of an open-ended epoch, without a snapshot of the server.

        Return no progress if several groups have never trained: Lightning's counts suffice.
        """
        leases = self._data.leases
        if not self.is_counted_together:
            return None, SnapshotId()
        if self.progress is None or leases is None:
            return self.past, SnapshotId()
        cut = SnapshotId()
        if is_open:
            self.keep_up()
            if is_open_ended:
                cut = SnapshotId(epoch=self.progress.epochs, total=leases.total, trained=leases.trained_spans)
        return self.progress, cut

    def trained(self, is_open_ended: bool) -> int:
        """Return the trained samples of the current epoch, or 0 if the data is not leased.

        With one group, unless ``is_open_ended``, they follow from Lightning's count of batches.
        """
        if self.progress is None:
            return 0
        if is_open_ended or self._data.is_dynamic:
            self.keep_up()
            return self.progress.samples
        return batches_trained(self.trainer) * self.progress.reference.batch

    def known_spans(self) -> Spans:
        leases = self._data.leases
        if leases is None:
            return ()
        before = size_of(self.trained_spans(self.trainer.current_epoch)) if leases.is_as_ddp else 0
        if not before:
            return leases.trained_spans
        # The loader of a resumed epoch of one group starts again, as under DDP: only the number of samples is known.
        return ((0, min(before + size_of(leases.trained_spans), leases.total)),)

    def expected_batches(self, plan: EpochPlan, done: int) -> int:
        seen = min(self.seen, plan.budget)
        return max(done + 1, -(-done * plan.budget // seen) if seen else self.now().batches)

    # --- Steps -------------------------------------------------------------------------------------------------------

    def steps_left(self) -> int | None:
        """Return the steps of DDP that are left when a fit begins, as Lightning estimates them; None if unknown."""
        trainer = self.trainer
        if not trainer.lightning_module.automatic_optimization or accumulation_windows(trainer, 1):
            return None
        steps = trainer.estimated_stepping_batches
        made = trainer.global_step if self.progress is None else self.now().steps
        return None if steps in (-1, math.inf) else max(0, int(steps) - made)

    def steps_at(self, progress: Progress) -> int:
        steps, leases = progress.steps, self._data.leases
        if leases is not None and progress.samples >= progress.budget(leases.total, progress.epochs):
            steps = progress.steps_before(progress.epochs + 1)  # the last step of DDP may have fewer samples
        # max_steps may end the run inside an epoch.
        return steps if self.limits.max_steps == -1 else min(steps, self.limits.max_steps)

    def limit_steps(self, is_open_ended: bool) -> None:
        """Keep this rank's own steps from ending the run if they are not those of DDP."""
        assert self.progress is not None
        self.is_counted_together |= self._data.is_dynamic
        left, own = self.limits.steps_left(self.progress.steps), self.trainer.global_step
        if left is None or not self.is_counted_together:
            return
        if self._data.is_dynamic or is_open_ended:
            self.step_limit = sys.maxsize if left else own
        elif self.step_limit in (None, sys.maxsize):  # from here on the loops of the one group count
            self.step_limit = own + left

    def count_together(self) -> None:
        """Let the samples end the run, since groups were formed inside an epoch."""
        self.is_counted_together = True
        if self.limits.max_steps != -1 and not self.is_limit_reached:
            self.step_limit = sys.maxsize

    def stop_here(self) -> None:
        self.step_limit = self.trainer.global_step

    def limit_for(self, max_steps: int) -> int | None:
        """Return `step_limit`; raise `UnsupportedError` if ``max_steps`` has changed in a fit of several groups."""
        if self.is_counted_together and self._begun_with not in (None, max_steps):
            raise UnsupportedError(
                f"max_steps has changed from {self._begun_with} to {max_steps} inside a fit, and several groups were"
                " dealt the samples of as many steps as it was: set trainer.should_stop = True to end the run earlier,"
                " change it between two fits, or use groups=1"
            )
        return self.step_limit

    @property
    def is_limit_reached(self) -> bool:
        limit = self.trainer.max_steps if self.step_limit is None else self.step_limit
        return -1 < limit <= self.trainer.global_step

    @property
    def is_whole(self) -> bool:
        """Return whether an epoch of several groups is whole at its end if ``max_steps`` does not cut it short."""
        return self.is_counted_together and self.progress is not None
