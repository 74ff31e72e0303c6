"""How far a run is, in samples of all groups, and how many steps of DDP are left to it.

Lightning counts the steps that one rank takes, and compares them with max_steps. Where several groups train, those are
not the steps of DDP. `RunProgress` knows what these are, in the epoch under way and in all before it, also where a run
goes on from a checkpoint; and what the loops are to compare with, so that the run ends where DDP's would.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_omni.optimizer import World
from lightning_omni.optimizer.saved import Saved
from lightning_omni.protocol import EpochPlan
from lightning_omni.protocol.cut import Cut
from lightning_omni.protocol.progress import Progress
from lightning_omni.protocol.record import Spans
from lightning_omni.strategy import _private
from lightning_omni.strategy.declared import reloads
from lightning_omni.strategy.leased import FitLimits, LeasedData, StepsByHand, size_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class RunProgress:
    """How far the runs of one strategy are.

    Args:
        data: the training data, as leased.

    Attributes:
        progress: how far the run is; None if its data are not leased.
        past: how far it was when the last epoch ended, or by a checkpoint that was loaded since, which a fit goes on
            from; None if neither says so.
        resumed: the moment that a checkpoint is of, if a run goes on from one: perhaps inside an epoch.
        is_counted_together: whether several groups have trained the run: then a rank's own steps are not those of DDP.
        step_limit: what the loops take for max_steps, which counts the steps of DDP; None for the Trainer's own.
    """

    def __init__(self, data: LeasedData) -> None:
        self._data = data
        self._trainer: Trainer | None = None
        self._world: World | None = None
        self._limits: FitLimits | None = None
        self._resumed_batches = (-1, 0)  # of which epoch, and how many of each rank
        self.progress: Progress | None = None
        self.past: Progress | None = None
        self.resumed = Cut()
        self.is_counted_together = False
        self.step_limit: int | None = None

    # --- The run -----------------------------------------------------------------------------------------------------

    def connect(self, trainer: Trainer, world: World) -> None:
        """A run is being set up."""
        self._trainer, self._world = trainer, world
        if self.is_counted_together and trainer.max_steps != -1:
            self.step_limit = sys.maxsize  # until `start` knows: or the loop would compare this rank's own steps

    def resume(self, saved: Saved) -> None:
        """A fit goes on from a checkpoint.

        Args:
            saved: what it says of its run.
        """
        self.resumed, self.past = saved.cut, saved.progress
        self.is_counted_together = saved.progress is not None or saved.cut.epoch != -1

    def restored(self) -> None:
        """The loops have been told what a checkpoint says, if any: a run whose max_steps are taken is not begun."""
        trainer, past = self.trainer, self.past
        if self.step_limit is None or past is None or past.epochs != trainer.current_epoch:
            return
        if past.steps >= trainer.max_steps and trainer.lightning_module.automatic_optimization:
            self.step_limit = min(trainer.max_steps, trainer.global_step)

    def start(self, ranks_per_batch: int, entered: int | None) -> None:
        """The groups stand, and have the data; the first epoch is about to begin.

        Args:
            ranks_per_batch: as `EpochPlan` has it.
            entered: samples of the epoch under way that are trained, if this group has joined a run that goes on.
        """
        trainer = self.trainer
        before, self._limits = self._limits, FitLimits(trainer, ranks_per_batch)
        if before is not None and self._limits.by_hand is not None and before.by_hand is not None:
            self._limits.by_hand = before.by_hand  # a further fit: the loops' counts are no longer this rank's own
        self._resumed_batches = trainer.current_epoch, _private.batches_resumed(trainer)
        self.step_limit = None
        if self._data.leases is None:
            return
        epoch = trainer.current_epoch
        self.progress = self._limits.progress(self._data.leases, epoch, self.trained_spans(epoch), self.past)
        if entered is not None:
            self.advance(entered)
        elif self.past is None and not self.is_counted_together:
            self.progress = self._limits.counted(self.progress)

    def forget(self) -> None:
        """The run is torn down."""
        self.progress, self.resumed, self._trainer, self._world = None, Cut(), None, None

    @property
    def trainer(self) -> Trainer:
        """The fit's."""
        assert self._trainer is not None
        return self._trainer

    @property
    def limits(self) -> FitLimits:
        """The fit's, once it has started."""
        assert self._limits is not None
        return self._limits

    # --- An epoch ----------------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> EpochPlan:
        """An epoch of leased data begins. Returns what is to be trained of it."""
        assert self._data.leases is not None
        trained = self.trained_spans(epoch)
        self.progress = self.limits.progress(self._data.leases, epoch, trained, self.progress)
        return self.limits.plan(self._data.leases, self.progress, trained)

    def trained_spans(self, epoch: int) -> Spans:
        """What a checkpoint says is trained of an epoch."""
        leases = self._data.leases
        if leases is None:
            return ()
        if self.resumed.epoch == -1:  # nothing was leased: one group saved it, or DDP, where all ranks count alike
            at, batches = self._resumed_batches
            trained = batches * self._limits.reference(leases).batch if self._limits and at == epoch else 0
            return ((0, min(trained, leases.total)),) if trained else ()
        fits = self.resumed.total == leases.total
        return self.resumed.trained if fits and self.resumed.epoch == epoch else ()

    @property
    def is_resumed_inside(self) -> bool:
        """Whether the epoch under way is one that several groups have trained in part, or in which they had begun to.

        Of what they train between two exchanges the server knows nothing, nor do the weights that it has.
        """
        leases, epoch = self._data.leases, self.trainer.current_epoch
        if leases is None or (self.resumed.epoch, self.resumed.total) != (epoch, leases.total):
            return False
        assert self.progress is not None
        at, batches = self._resumed_batches
        trained = size_of(self.trained_spans(epoch))
        has_begun = trained > 0 or (at == epoch and batches > 0)
        return has_begun and trained < self.progress.budget(leases.total, epoch)

    def now(self) -> Progress:
        """The run's progress. Accumulation may have a schedule: then a step is of more samples than before."""
        assert self.progress is not None
        assert self._data.leases is not None
        self.progress = replace(self.progress, reference=self.limits.reference(self._data.leases))
        return self.progress

    def advance(self, samples: int) -> None:
        """So many samples of the epoch are trained, as far as this rank knows."""
        if self.progress is not None:
            self.progress = replace(self.progress, samples=max(self.progress.samples, samples))

    @property
    def seen(self) -> int:
        """Positions of this epoch that are trained, as far as this rank knows. All members of a group know alike."""
        assert self._world is not None
        assert self._data.leases is not None
        if not self._data.is_dynamic:
            return size_of(self._data.leases.trained_spans)
        # Groups that exchange weights now and then, or never, hear too seldom of the others.
        return self._data.leases.position if self._world.steps_at_worker else self._world.core.last_answer.progress

    def keep_up(self) -> None:
        """What is `seen` is trained."""
        self.advance(self.seen)

    def align(self, all_reduce_max: Callable[[list[int]], list[int]]) -> None:
        """Ranks that come from different groups must count alike, or they would validate at different batches.

        Args:
            all_reduce_max: the largest of each number over all ranks.
        """
        mine, by_hand = _private.progress_counters(self.trainer), self.by_hand
        *theirs, batches, steps = all_reduce_max([*mine, *(by_hand.counts if by_hand is not None else (0, 0))])
        if mine != theirs:
            _private.set_progress_counters(self.trainer, theirs)
        if by_hand is not None:
            by_hand.counts = batches, steps

    def end(self, epoch: int, trained: int | None) -> None:
        """An epoch is over.

        Args:
            epoch: its number; perhaps of one that was resumed at its end, and never began here.
            trained: samples of it that are trained, if a rank has skipped the rest of it, or has stopped the run.
        """
        if self.progress is None:
            return
        over = self.now().steps_before(epoch + 1)
        if self.max_steps != -1 and self.trainer.lightning_module.automatic_optimization:
            over = min(over, self.max_steps)  # which may have ended the run inside the epoch
        if trained is not None:
            over = min(over, replace(self.progress, samples=trained).steps)
        self.progress = self.past = replace(self.progress, epochs=epoch + 1, samples=0, past=over)

    # --- Steps -------------------------------------------------------------------------------------------------------

    @property
    def max_steps(self) -> int:
        """Steps of DDP after which the user wants the run to end, or -1."""
        return self._limits.max_steps if self._limits is not None else -1

    @property
    def by_hand(self) -> StepsByHand | None:
        """How many steps the user takes, in manual optimization."""
        return self._limits.by_hand if self._limits is not None else None

    def steps_left(self) -> int | None:
        """Return the steps of DDP that are left when a fit begins; None if that is not known.

        A group makes as many if all groups are equally fast. Epochs are taken to be as long as the first one.
        """
        trainer, progress = self.trainer, self.progress
        if not trainer.lightning_module.automatic_optimization:
            return None
        epoch, epochs = trainer.current_epoch, trainer.max_epochs
        bounds = []
        if self.max_steps != -1:
            bounds.append(self.max_steps - (trainer.global_step if progress is None else self.now().steps))
        batches = trainer.num_training_batches if progress is None else progress.batches
        is_alike = batches != math.inf and not reloads(trainer)
        if epochs is not None and epochs >= 0 and is_alike:
            accumulated = int(trainer.accumulate_grad_batches)
            windows = _private.accumulation_windows(trainer, epochs)[epoch:] or [accumulated] * (epochs - epoch)
            if progress is None:
                made = self._resumed_batches[1] // accumulated
            else:
                made = self.now().steps - progress.steps_before(progress.epochs)
            bounds.append(sum(-(-int(batches) // window) for window in windows) - made)
        return max(0, min(bounds)) if bounds else None

    def steps_at(self, progress: Progress) -> int:
        """Optimizer steps as DDP would count them."""
        automatic = self.trainer.lightning_module.automatic_optimization
        # max_steps may end the run inside an epoch.
        return min(progress.steps, self.max_steps) if automatic and self.max_steps != -1 else progress.steps

    def limit_steps(self, is_open_ended: bool) -> None:
        """Where the steps of this rank are not those of DDP, they must not end the run; its samples do.

        Args:
            is_open_ended: whether the epoch ends when the samples do, and not after a number of batches.
        """
        assert self.progress is not None
        self.is_counted_together |= self._data.is_dynamic
        left, own = self.limits.steps_left(self.progress.steps), self.trainer.global_step
        if left is None or not self.is_counted_together:
            return
        if self._data.is_dynamic or is_open_ended:
            self.step_limit = sys.maxsize if left else own
        elif self.step_limit in (None, sys.maxsize):  # one group counts for itself, from here on
            self.step_limit = own + left

    def count_together(self) -> None:
        """Groups have changed inside an epoch: one counted for itself; from here on the samples end the run."""
        self.is_counted_together = True
        if self.max_steps != -1 and not self.is_limit_reached:
            self.step_limit = sys.maxsize

    def stop_here(self) -> None:
        """The loops find that max_steps are taken."""
        self.step_limit = self.trainer.global_step

    @property
    def is_limit_reached(self) -> bool:
        """Whether this rank has taken as many steps as the loops let it."""
        limit = self.trainer.max_steps if self.step_limit is None else self.step_limit
        return -1 < limit <= self.trainer.global_step

    @property
    def is_whole(self) -> bool:
        """Whether an epoch that is over is so because all of it is trained, and max_steps has not ended it."""
        return (
            self.is_counted_together
            and self.progress is not None
            and self._limits is not None
            and self._limits.steps_left(self.progress.steps) != 0
        )
