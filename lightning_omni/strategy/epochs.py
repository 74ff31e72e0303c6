"""Takes Lightning's training loop through epochs whose samples are dealt out while they are trained.

Lightning counts batches; here an epoch ends when its samples do, for all groups together. `EpochDriver` holds all that
follows from this: when a group has its last batch, when all groups validate, what max_steps means, how schedules keep
pace. With one group, and with static data, it leaves the loop alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_omni.optimizer import World
from lightning_omni.optimizer.data import Leases, can_lease, lease
from lightning_omni.optimizer.run_state.run import Schedule
from lightning_omni.protocol import EpochPlan
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.cut import Cut
from lightning_omni.protocol.progress import Progress, ReferenceBatch
from lightning_omni.protocol.record import Spans
from lightning_omni.strategy import _private
from lightning_omni.strategy.schedulers import Pacer


class EpochDriver:
    """The epochs of one strategy.

    Args:
        data: ``"dynamic"`` or ``"static"``.
        say: tells the user something, on rank 0.

    Attributes:
        is_open: whether a training epoch is under way.
        resumed: the moment that a checkpoint is of, if a run goes on from one: perhaps inside an epoch.
        progress: how far the run is; None if its data are not leased.
        schedule: where schedulers that keep pace count from.
        step_limit: what the loops take for max_steps, which counts the steps of DDP; None for the Trainer's own.
        is_open_ended: whether the epoch ends when the samples do, and not after a number of batches.
    """

    def __init__(self, data: Literal["dynamic", "static"], say: Callable[[str], None]) -> None:
        self._data = data
        self._say = say
        self._leases: Leases | None = None
        self.is_open = False
        self.resumed = Cut()
        self.step_limit: int | None = None
        self.is_open_ended = False
        self._new_leases: list[Leases] = []
        self._trainer: Any = None
        self._world: World | None = None
        self._pacer: Pacer | None = None
        self._plan: EpochPlan | None = None
        self.progress: Progress | None = None
        self.schedule: Schedule = {}
        self._begun = -1
        self._max_steps = -1
        self._validates: bool | None = None
        self._started = self._stopping = self._over = False

    # --- The run -----------------------------------------------------------------------------------------------------

    def connect(self, trainer: Any, world: World) -> None:
        """A run is being set up."""
        self._trainer, self._world = trainer, world
        self._started, self._begun = False, -1

    def start(self) -> None:
        """The groups stand; the first epoch is about to begin."""
        trainer = self._trainer
        self._started, self._stopping = True, False
        self._max_steps = trainer.max_steps
        self.world.core.data = self._leases
        self._adopt()
        if self.leases is not None:
            self.progress = self._progress_at(trainer.current_epoch)
        self._pace()

    def finish(self) -> None:
        """The run has ended, well or badly: the loops decide for themselves, and the schedulers are given back."""
        self.step_limit, self._validates, self.is_open_ended = None, None, False
        self._unpace()
        self.schedule = {}
        self.is_open = self._started = False

    def forget(self) -> None:
        """The run is torn down."""
        self.finish()
        self.leases, self._new_leases, self._plan, self.progress, self.resumed = None, [], None, None, Cut()
        self._trainer = self._world = None

    @property
    def world(self) -> World:
        """This rank's place in the run."""
        assert self._world is not None
        return self._world

    @property
    def leases(self) -> Leases | None:
        """This rank's view of the data, if it is leased: what its group's core tells the server of."""
        return self._leases

    @leases.setter
    def leases(self, leases: Leases | None) -> None:
        self._leases = leases
        if self._world is not None:
            self._world.core.data = leases

    @property
    def max_steps(self) -> int:
        """Steps of DDP after which the user wants the run to end, or -1."""
        return self._max_steps

    @property
    def is_dynamic(self) -> bool:
        """Whether samples are drawn from the server's book."""
        return self.leases is not None and not self.leases.is_local

    # --- Loaders -----------------------------------------------------------------------------------------------------

    def process(self, loader: object, rank: int, is_ours: Callable[[DataLoader[Any]], bool]) -> object:
        """Turns a training DataLoader into one with leased batches, if it is one whose samples may be dealt out.

        Args:
            loader: what Lightning is about to iterate.
            rank: this rank.
            is_ours: tells a sampler of Lightning's from a user's own.
        """
        if self._data == "static" or self._world is None or not self._trainer.training:
            return loader
        if not isinstance(loader, DataLoader) or not can_lease(loader) or not is_ours(loader):
            if self.world.executor.exchanges:
                self._say(
                    'OmniStrategy: the training data is dealt out beforehand (as with data="static"), because it has a'
                    " sampler of its own, is iterable, or is no plain DataLoader; a slow group delays an epoch's end"
                )
            return loader
        shares = self.leases.shares if self.leases is not None else ()  # of the loader that this one replaces
        leased = lease(
            loader,
            rank=rank,
            before_epoch=self._begin_present,
            is_local=not self.world.executor.exchanges,
            shares=shares,
        )
        self._new_leases.append(leased.leases)  # type: ignore[attr-defined]
        return leased

    def _adopt(self) -> None:
        """New loaders were made: at the start, or because they are reloaded every few epochs."""
        if len(self._new_leases) == 1:
            self.leases = self._new_leases[0]
            if self.world.executor.exchanges:
                self.assign(self.leases.shares)
        elif self._new_leases:
            # Several loaders advance together; each deals its samples out as DistributedSampler does.
            for each in self._new_leases:
                each.is_local = True
            self.leases = None
        self._new_leases = []

    def assign(self, shares: Sequence[int] = ()) -> None:
        """Tells the leases of this rank's place in its group, and of the group's ``shares``, if they are unequal."""
        world = self.world
        if self.leases is not None:
            place = world.members.index(world.rank)
            self.leases.assign(place, len(world.members), world.executor.control, world.generation, shares)

    def weigh(self, loss: Tensor) -> Tensor:
        """The loss whose gradient this rank contributes: more, if it has more of the group's batch than others."""
        weight = self.leases.weight if self.leases is not None else 1.0
        return loss if weight == 1.0 else loss * weight

    @property
    def is_dealt_out(self) -> bool:
        """Whether the samples are dealt out beforehand, to all ranks."""
        return self.leases is None and not self._new_leases

    # --- An epoch ----------------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """An epoch begins: the groups part, and its samples are laid out to be drawn. Called again, does nothing."""
        if epoch == self._begun or not self._started:
            return
        self._begun = epoch
        self._adopt()
        self.world.enter_compute()
        self.is_open, self.is_open_ended, self._over = True, self.is_dynamic or self._is_bereft, False
        self._plan = self._validates = None
        if self.leases is not None:
            self.progress = self._progress_at(epoch)
            self._plan = self._make_plan(self.progress)
            self.world.core.heard.progress, self.world.core.heard.stop = self.progress.samples, ""
            if self.is_dynamic:
                self.leases.begin(self._plan)
                self._count_steps_together()
            elif self.is_open_ended:
                self.leases.begin_local(self._plan, goes_on=True)
            else:
                self._count_steps_alone(epoch)

    def _begin_present(self, epoch: int) -> None:
        """Samples are about to be drawn. A loader that was made in this epoch's first hook says another epoch."""
        self.begin(self._trainer.current_epoch)

    @property
    def _is_bereft(self) -> bool:
        """Whether one group is left with fewer ranks than the run began with: it needs more batches for an epoch."""
        return self.leases is not None and self.leases.is_local and len(self.world.members) < self.leases.world_size

    def begin_batch(self) -> None:
        """A batch begins."""
        self.begin(self._trainer.current_epoch)  # a resumed epoch starts without its first hook
        if self.leases is not None:
            self.leases.begin_batch()
            if self.is_open_ended:
                # Perhaps the last: then an accumulation window ends here. `end_batch` knows for certain.
                self._set_last_batch(self.leases.peek() is None)

    def end_batch(self) -> None:
        """A batch has ended: finds out, together with the other groups, whether to go on, validate or stop."""
        if not (self.world.executor.exchanges or self.is_open_ended):
            return
        verdict = self._what_next()
        self._over = verdict == "over"
        if self.is_open_ended:
            self._set_last_batch(verdict == "over")
            at_end = verdict == "over" and self._validates_at_end()
            if verdict == "over" and self._reaches_max_steps():
                self._stop_at_max_steps()
            self._validates = verdict in ("validate", "stop:validate") or at_end
        if verdict == "stop:skip":
            self._over = True
            self._set_last_batch(True)
        elif verdict.startswith("stop:"):
            self._stopping = True
            if verdict == "stop:validate":
                self._trainer.should_stop = True
            else:
                self._validates = False
                self.step_limit = self._trainer.global_step

    def end(self, buffers: Any) -> None:
        """An epoch has ended, in good order or before its time: the groups meet."""
        trainer = self._trainer
        complete = self._over if self.is_open_ended else trainer.is_last_batch
        limit = trainer.max_steps if self.step_limit is None else self.step_limit
        is_limit_reached = -1 < limit <= trainer.global_step
        stops = _private.stops_now(trainer) or is_limit_reached
        if self.world.is_computing and not self._stopping and (stops or not complete):
            self.leave("end" if stops else "skip" if self.is_open_ended else "")
        self._meet(buffers)
        if self.world.executor.exchanges and any(self.world.agree([int(stops or self._stopping)])):
            trainer.should_stop |= not is_limit_reached  # whoever said so, and however late
        self.is_open = False
        if self.progress is not None:
            self.progress = replace(self.progress, epochs=self._begun + 1, samples=0)
        if self._pacer is not None:
            self._pacer.catch_up()
        self.is_open_ended, self._validates = False, None

    def expected_batches(self, done: int) -> int | None:
        """How many batches this rank trains in this epoch, if all groups go on as so far; None if Lightning knows.

        Args:
            done: batches of this rank that are trained.
        """
        plan = self._plan
        if plan is None or self.leases is None or not self.is_open_ended:
            return None
        if self._over:
            return done
        seen = min(self._seen(), plan.budget)
        return max(done + 1, -(-done * plan.budget // seen) if seen else self._now().batches)

    def interrupt(self, buffers: Any) -> None:
        """The run ends here, in mid-epoch: the groups meet for the last time, with what each has trained."""
        if self.world.is_computing:
            self.leave("skip")
        self.world.enter_world(buffers)

    def leave(self, stop: str) -> None:
        """This group ends the epoch early; ``stop`` says how the others end it, or the run."""
        control = self.world.control
        if control is None:
            return
        if self.leases is not None and self.is_dynamic:
            self.leases.leave(stop)
        elif stop:
            control.request(m.Leave(epoch=-1, generation=self.world.generation, trained=0, stop=stop), m.Left)
        self._stopping = self._stopping or stop in ("validate", "end")

    def before_validation(self, buffers: Any) -> None:
        """Validation is for all groups together. One that comes on its own (a callback said stop) brings the others."""
        if self._world is None or not self.is_open:
            return  # no training is under way: validation after the fit, or without one
        if self.world.is_computing and _private.stops_now(self._trainer) and not self._stopping:
            self.leave("validate")
        self._meet(buffers)

    def _meet(self, buffers: Any) -> None:
        """All groups come together, and count steps alike from here on: as the recorder, which logs and saves.

        Names of checkpoints, which have the step in them, are then the same on all ranks.
        """
        if not self.world.is_computing:
            return
        self.world.enter_world(buffers)
        trainer, mine = self._trainer, self._trainer.global_step
        counts = _private.step_counters(trainer)
        _private.set_step_counters(trainer, self.world.agree(counts if self.world.is_recorder else [0] * len(counts)))
        if self.step_limit == mine:
            self.step_limit = trainer.global_step

    def after_validation(self) -> None:
        """Back into the epoch, if it goes on."""
        if self.is_open and not self._trainer.is_last_batch:
            self.world.enter_compute()

    def _what_next(self) -> str:
        leases = self.leases
        if self.world.core.heard.stop:
            return f"stop:{self.world.core.heard.stop}"
        if not self.is_open_ended or leases is None:
            return ""
        coming = leases.peek()
        if coming is not None and coming.stretch <= leases.stretch:
            return ""
        return leases.ask()

    def _set_last_batch(self, is_last: bool) -> None:
        _private.be_open_ended(self._trainer)
        _private.set_last_batch(self._trainer, is_last)

    def _make_plan(self, progress: Progress) -> EpochPlan:
        """The epoch's data: what Lightning's limits mean for all ranks together."""
        trainer, leases, epoch = self._trainer, self.leases, progress.epochs
        assert leases is not None
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
            budget=progress.budget(leases.total, epoch, self._max_steps),
            validate_every=every,
            validate_offset=offset,
            trained=self._resumed_spans(epoch),
        )

    def _resumed_spans(self, epoch: int) -> Spans:
        """What a checkpoint says is trained of an epoch."""
        fits = self.leases is not None and self.resumed.total == self.leases.total
        return self.resumed.trained if fits and self.resumed.epoch == epoch else ()

    def _progress_at(self, epoch: int) -> Progress:
        """The run's progress where an epoch begins or is resumed."""
        assert self.leases is not None
        reference = self._reference_batch
        there = -(-self.leases.total // reference.batch)
        limit = self._trainer.num_training_batches  # a callback may have put it beyond what is there
        batches = min(int(limit), there) if limit != float("inf") else there
        return Progress(reference, batches, epochs=epoch, samples=_size(self._resumed_spans(epoch)))

    @property
    def _reference_batch(self) -> ReferenceBatch:
        assert self.leases is not None
        window = int(self._trainer.accumulate_grad_batches)
        return ReferenceBatch(self.leases.world_size, self.leases.batch_size, window)

    def _now(self) -> Progress:
        """The run's progress. Accumulation may have a schedule: then a step is of more samples than before."""
        assert self.progress is not None
        self.progress = replace(self.progress, reference=self._reference_batch)
        return self.progress

    def _advance(self, samples: int) -> None:
        """So many samples of the epoch are trained, as far as this rank knows."""
        if self.progress is not None:
            self.progress = replace(self.progress, samples=max(self.progress.samples, samples))

    # --- Validation and steps ----------------------------------------------------------------------------------------

    @property
    def _is_cut_short(self) -> bool:
        """Whether max_steps ends the epoch before its samples do."""
        assert self.leases is not None
        assert self._plan is not None
        return self._plan.budget < self._now().budget(self.leases.total, self._plan.epoch)

    def _validates_at_end(self) -> bool:
        """Whether the end of the epoch is one of the points at which val_check_interval asks for a validation."""
        plan = self._plan
        if plan is None:
            return True
        if self._trainer.val_check_batch == float("inf"):
            return not self._is_cut_short
        if not plan.validate_every:
            return False
        if self._is_cut_short:
            return (plan.budget + plan.validate_offset) % plan.validate_every == 0
        return (self._now().samples_an_epoch + plan.validate_offset) % plan.validate_every == 0

    def validates(self, is_due: Callable[[], bool]) -> bool:
        """Whether all validate after this batch.

        Args:
            is_due: what the loop would say by itself.
        """
        trainer = self._trainer
        if _private.validates_by_time(trainer):
            return any(self.world.agree([int(is_due())]))  # no two clocks are alike
        if self._validates is None:
            return is_due()
        return _private.validates_this_epoch(trainer) and (self._validates or _private.stops_now(trainer))

    def _count_steps_together(self) -> None:
        """max_steps counts the steps that DDP would take. A group's own count must not end the run for it alone."""
        if self._max_steps == -1:
            return
        assert self._plan is not None
        left = self._now().steps_left(self._max_steps, self._plan.epoch)
        self.step_limit = sys.maxsize if left else self._trainer.global_step

    def _count_steps_alone(self, epoch: int) -> None:
        """One group counts for itself again, if there were several before: what is left of the steps of DDP."""
        if self._max_steps != -1 and self.step_limit == sys.maxsize:
            self.step_limit = self._trainer.global_step + self._now().steps_left(self._max_steps, epoch)

    def _reaches_max_steps(self) -> bool:
        if self._max_steps == -1 or self._plan is None:
            return False
        return not self._now().steps_left(self._max_steps, self._plan.epoch + 1)

    def _stop_at_max_steps(self) -> None:
        trainer = self._trainer
        self.step_limit = trainer.global_step
        self._say(
            f"OmniStrategy: max_steps={self._max_steps} reached: as many samples as {self._max_steps} steps of all"
            f" {self.world.size} ranks; this group took {trainer.global_step} steps of its own"
        )

    def _steps(self) -> int:
        """The run's progress in optimizer steps as DDP would count them."""
        if self.is_open:
            self._advance(self._seen())
        return self._now().steps

    def _seen(self) -> int:
        """Positions of this epoch that are trained, as far as this rank knows. All members of a group know alike."""
        assert self.leases is not None
        if not self.is_dynamic:
            return _size(self.leases.trained_spans)
        # Groups that exchange weights now and then, or never, hear too seldom of the others.
        return self.leases.position if self.world.steps_at_worker else self.world.core.heard.progress

    def _pace(self) -> None:
        """Schedulers follow the run's common progress, where groups differ in speed."""
        if self.leases is not None and self._data == "dynamic":
            trainer = self._trainer
            pacer = Pacer(trainer.lr_scheduler_configs, self._steps, lambda: trainer.current_epoch + 1)
            self.schedule = pacer.count_from(self.schedule)
            if self.is_dynamic or self.is_open_ended:
                pacer.pace()
                self._pacer = pacer

    def _unpace(self) -> None:
        if self._pacer is not None:
            self._pacer.release()
            self._pacer = None

    # --- Regrouping --------------------------------------------------------------------------------------------------

    def before_regroup(self) -> Spans:
        """The groups are about to change: what is drawn and not trained goes back.

        Returns:
            The ranges that are trained, as far as this rank knows.
        """
        spans = self.leases.trained_spans if self.leases is not None else ()
        if self.is_dynamic and self.is_open:
            self.leave("")
        return spans

    def after_regroup(self, spans: Spans, was_synchronous: bool) -> None:
        """The groups have changed: the epoch goes on with the samples that are left."""
        self.assign()
        if self.is_open and self.leases is not None and self._plan is not None and self._data == "dynamic":
            self.is_open_ended = True
            rest = msgspec.structs.replace(self._plan, trained=spans)
            self._advance(_size(spans))
            if not self.world.executor.exchanges:
                self.leases.begin_local(rest, goes_on=True)
            elif was_synchronous:
                self.leases.begin(rest)
            else:
                self.leases.go_on(rest.epoch)
        self._align_progress()
        self._unpace()
        self._pace()

    def _align_progress(self) -> None:
        """Ranks that come from different groups must count alike, or they would validate and save apart."""
        mine = _private.progress_counters(self._trainer)
        theirs = self.world.agree(mine)
        if mine != theirs:
            _private.set_progress_counters(self._trainer, theirs)


def _size(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)
