"""Takes Lightning's training loop through epochs whose samples are dealt out while they are trained.

Lightning counts batches; here an epoch ends when its samples do, for all groups together. `EpochDriver` holds all that
follows from this: when a group has its last batch, when all groups validate, how schedules keep pace. What the samples
are is `LeasedData`'s, and what Lightning's limits make of them `Limits`'. With one group, and with static data, the
loop is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from torch.nn import Module

from lightning_omni.errors import ConfigurationError
from lightning_omni.optimizer import World
from lightning_omni.optimizer.executor import Executor
from lightning_omni.optimizer.loaders import Leases
from lightning_omni.optimizer.run_state import Schedule
from lightning_omni.optimizer.saved import Saved
from lightning_omni.protocol import EpochPlan
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.cut import Cut
from lightning_omni.protocol.leases import Batch
from lightning_omni.protocol.progress import Progress
from lightning_omni.protocol.record import Spans
from lightning_omni.strategy import _private
from lightning_omni.strategy.leased import FitLimits, LeasedData, is_given, size_of
from lightning_omni.strategy.published import PublishedValidation
from lightning_omni.strategy.schedulers import Pacer, arrive

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class Entered(NamedTuple):
    """Where a group enters a run that goes on.

    Attributes:
        plan: the epoch that is under way.
        samples: of this epoch, those that were trained when the groups parted.
        progress: how far the run was by then; earlier epochs may have had other lengths.
        validations: what callbacks have heard of: `PublishedValidation.state`.
        split: which part of a dataset is trained: `lightning_omni.strategy.leased.split_of`.
    """

    plan: EpochPlan
    samples: int
    progress: Progress | None
    validations: Mapping[str, Any]
    split: int


class EpochDriver:
    """The epochs of one strategy.

    Args:
        data: ``"dynamic"`` or ``"static"``.
        say: tells the user something, on rank 0.
        validation: ``"wait"`` or ``"published"``.

    Attributes:
        published: validations for which no group waits.
        data: the training data, as leased.
        is_open: whether a training epoch is under way.
        resumed: the moment that a checkpoint is of, if a run goes on from one: perhaps inside an epoch.
        progress: how far the run is; None if its data are not leased.
        past: how far it was when the last epoch ended, or by a checkpoint that was loaded since, which a fit goes on
            from; None if neither says so.
        is_counted_together: whether several groups have trained the run: then a rank's own steps are not those of DDP.
        schedule: where schedulers that keep pace count from.
        step_limit: what the loops take for max_steps, which counts the steps of DDP; None for the Trainer's own.
        is_open_ended: whether the epoch ends when the samples do, and not after a number of batches.
        on_parted: called on every rank when the groups have parted, and train.
    """

    def __init__(
        self,
        data: Literal["dynamic", "static"],
        say: Callable[[str], None],
        validation: Literal["wait", "published"] = "wait",
    ) -> None:
        self._say = say
        self.published = PublishedValidation(validation == "published", say)
        # A loader that was made in the epoch's first hook says another epoch.
        self.data = LeasedData(data, say, lambda epoch: self.begin(self.trainer.current_epoch))
        self.is_open = False
        self.resumed = Cut()
        self.step_limit: int | None = None
        self.is_counted_together = False
        self.is_open_ended = False
        self._trainer: Trainer | None = None
        self._world: World | None = None
        self._pacer: Pacer | None = None
        self._plan: EpochPlan | None = None
        self.progress: Progress | None = None
        self.past: Progress | None = None
        self.schedule: Schedule = {}
        self._resumed_schedules: Sequence[Sequence[int]] = ()
        self._begun = -1
        self._resumed_batches = (-1, 0)  # of which epoch, and how many of each rank
        self._limits: FitLimits | None = None
        self._validates: bool | None = None
        self._started = self._stopping = self._over = self._is_skipped = False
        self._entered: Entered | None = None
        self.on_parted: Callable[[], None] = tuple  # type: ignore[assignment]

    # --- The run -----------------------------------------------------------------------------------------------------

    def connect(self, trainer: Trainer, world: World) -> None:
        """A run is being set up."""
        self._trainer, self._world = trainer, world
        self.data.connect(world)
        self.published.connect(trainer, world)
        self._started, self._begun = False, -1
        if self.is_counted_together and trainer.max_steps != -1:
            self.step_limit = sys.maxsize  # until `start` knows: or the loop would compare this rank's own steps

    def resume(self, saved: Saved) -> None:
        """A fit goes on from a checkpoint.

        Args:
            saved: what it says of its run.
        """
        self.resumed, self.past, self._resumed_schedules = saved.cut, saved.progress, saved.schedules
        self.is_counted_together = saved.progress is not None or saved.cut.epoch != -1

    def start(self) -> None:
        """The groups stand; the first epoch is about to begin."""
        trainer = self.trainer
        self._started, self._stopping = True, False
        before, self._limits = self._limits, FitLimits(trainer, self.world.tensor_parallel)
        if before is not None and self._limits.by_hand is not None and before.by_hand is not None:
            self._limits.by_hand = before.by_hand  # a further fit: the loops' counts are no longer this rank's own
        self.data.adopt()
        self._resumed_batches = trainer.current_epoch, _private.batches_resumed(trainer)
        self.step_limit = None
        if self.leases is not None:
            epoch = trainer.current_epoch
            self.progress = self._limits.progress(self.leases, epoch, self._resumed_spans(epoch), self.past)
            if self._entered is not None:
                self._advance(self._entered.samples)
            elif self.past is None and not self.is_counted_together:
                self.progress = self._limits.counted(self.progress)
            self._limit_steps()
        counts, self._resumed_schedules = arrive(trainer.lr_scheduler_configs, self._resumed_schedules), ()
        if self.progress is not None:
            self.schedule = {**self.schedule, **{each: (count, self._steps()) for each, count in counts.items()}}
        self._pace()

    def enter(self, entered: Entered, schedule: Schedule) -> None:
        """This group joins a run that goes on, before its own loops begin.

        Args:
            entered: where.
            schedule: where the run's schedulers count from.
        """
        self._entered, self.schedule, self.past = entered, schedule, entered.progress

    def finish(self) -> None:
        """The run has ended, well or badly: the loops decide for themselves, and the schedulers are given back."""
        self.step_limit, self._validates, self.is_open_ended = None, None, False
        self._unpace()
        self.schedule = {}
        self.is_open = self._started = False

    def forget(self) -> None:
        """The run is torn down."""
        self.finish()
        self.data.forget()
        self.published.forget()
        self._plan, self.progress, self.resumed, self._entered = None, None, Cut(), None
        self._trainer, self._world = None, None

    @property
    def trainer(self) -> Trainer:
        """The fit's."""
        assert self._trainer is not None
        return self._trainer

    @property
    def world(self) -> World:
        """This rank's place in the run."""
        assert self._world is not None
        return self._world

    @property
    def leases(self) -> Leases | None:
        """This rank's view of the data, if it is leased: what its group's core tells the server of."""
        return self.data.leases

    @leases.setter
    def leases(self, leases: Leases | None) -> None:
        self.data.leases = leases
        self.data.start()

    @property
    def max_steps(self) -> int:
        """Steps of DDP after which the user wants the run to end, or -1."""
        return self._limits.max_steps if self._limits is not None else -1

    # --- An epoch ----------------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """An epoch begins: the groups part, and its samples are laid out to be drawn. Called again, does nothing."""
        if epoch == self._begun or not self._started:
            return
        self._begun = epoch
        self.data.adopt()
        self.world.enter_compute()
        self.is_open, self._over = True, False
        self.is_open_ended = self.data.is_dynamic or self._is_shrunk or self._goes_on_alone
        self._is_skipped = False
        self._plan = self._validates = None
        if self.leases is not None:
            assert self._limits is not None
            trained = self._resumed_spans(epoch)
            self.progress = self._limits.progress(self.leases, epoch, trained, self.progress)
            self._plan = self._limits.plan(self.leases, self.progress, trained)
            entered, self._entered = self._entered, None
            if entered is not None:
                trained = entered.plan.trained
            self.published.begin(self._plan, size_of(trained), self.data.is_dynamic)
            if entered is not None:
                self._check_entered(entered)
                self.published.enter(entered.validations)
            self.world.core.heard.progress, self.world.core.heard.stop = self.progress.samples, ""
            self._follow_schedulers()
            if self.data.is_dynamic:
                if entered is not None:
                    self.leases.restart(epoch)  # with the book that the server keeps
                else:
                    self.leases.begin(self.published.dealt(self._plan))
            elif self.is_open_ended:
                self.leases.begin_local(self._plan, goes_on=True)
            self._limit_steps()
        else:
            self.progress = None  # the last epoch's, if a reload has brought several loaders, say
            self.published.begin(None)
        self._have_parted()

    def _limit_steps(self) -> None:
        """Where the steps of this rank are not those of DDP, they must not end the run; its samples do."""
        assert self._limits is not None
        assert self.progress is not None
        self.is_counted_together |= self.data.is_dynamic
        left, own = self._limits.steps_left(self.progress.steps), self.trainer.global_step
        if left is None or not self.is_counted_together:
            return
        if self.data.is_dynamic or self.is_open_ended:
            self.step_limit = sys.maxsize if left else own
        elif self.step_limit in (None, sys.maxsize):  # one group counts for itself, from here on
            self.step_limit = own + left

    def _have_parted(self) -> None:
        self.on_parted()
        self.published.have_parted()

    def _check_entered(self, entered: Entered) -> None:
        """Raises `ConfigurationError` unless this group has the data of the run that it has joined."""
        assert self._plan is not None
        self._plan = msgspec.structs.replace(self._plan, trained=entered.plan.trained)
        if (mine := self.published.dealt(self._plan)) != entered.plan:
            raise ConfigurationError(
                f"this group's data is not that of the run that it joins, {mine} against {entered.plan}: give all the"
                " same dataset, batch size, limits and validation="
            )
        if self.data.split != entered.split:
            raise ConfigurationError(
                "this group's training data is another part of its dataset than that of the run that it joins, so that"
                " groups would train on what others validate with: split with one seed in all groups, as"
                " random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))"
            )
        self._advance(entered.samples)

    @property
    def samples(self) -> int:
        """Samples of the epoch under way that are trained, as far as this rank knows."""
        return self._now().samples if self.progress is not None else 0

    @property
    def _is_shrunk(self) -> bool:
        """Whether one group is left with fewer ranks than the run began with: it needs more batches for an epoch."""
        return self.leases is not None and self.leases.is_local and self.world.data_place[1] < self.leases.world_size

    @property
    def _goes_on_alone(self) -> bool:
        """Whether one group goes on inside an epoch of several: its own batches do not tell what they have trained."""
        if self.leases is None or self.data.is_dynamic or self.data.kind == "static" or self.resumed.epoch == -1:
            return False
        assert self.progress is not None
        epoch = self.trainer.current_epoch
        return 0 < size_of(self._resumed_spans(epoch)) < self.progress.budget(self.leases.total, epoch)

    def go_on(self) -> None:
        """A resumed epoch goes on, which has no first hook; its loader has begun to iterate."""
        if self._goes_on_alone:
            self.data.assign()  # what the loader has taken is void
            self.begin(self.trainer.current_epoch)

    def begin_batch(self) -> None:
        """A batch begins."""
        self.begin(self.trainer.current_epoch)  # a resumed epoch starts without its first hook
        if self._limits is not None and self._limits.by_hand is not None:
            self._limits.by_hand.begin_batch()
        if self.leases is not None:
            self.leases.begin_batch()
            if self.is_open_ended:
                # Perhaps the last: then an accumulation window ends here. `end_batch` knows for certain.
                self._set_last_batch(self.leases.peek() is None)

    def end_batch(self) -> None:
        """A batch has ended: finds out, together with the other groups, whether to go on, validate or stop."""
        if self._limits is not None and self._limits.by_hand is not None:
            self._limits.by_hand.end_batch()
        if self._pacer is not None:
            self._pacer.keep_up()
        if not (self.world.executor.exchanges or self.is_open_ended):
            return
        verdict = self._what_next()
        self._over = verdict == "over"
        if self.is_open_ended:
            self._set_last_batch(verdict == "over")
            self._validates = self._ends_in_validation() if self._over else verdict in ("validate", "stop:validate")
        if verdict == "stop:skip":
            self._over = self._is_skipped = True
            self._set_last_batch(True)
        elif verdict.startswith("stop:"):
            self._stopping = True
            if verdict == "stop:validate":
                self.trainer.should_stop = True
            else:
                self._validates = False
                self.step_limit = self.trainer.global_step
        elif self.is_open_ended and not self._over and self._is_limit_reached_by_hand:
            self.step_limit = self.trainer.global_step  # `end` tells the other groups

    @property
    def _is_limit_reached(self) -> bool:
        """Whether this rank has taken as many steps as the loops let it."""
        limit = self.trainer.max_steps if self.step_limit is None else self.step_limit
        return -1 < limit <= self.trainer.global_step

    @property
    def _is_limit_reached_by_hand(self) -> bool:
        """Whether max_steps are taken, in manual optimization."""
        assert self._limits is not None
        self._advance(self._seen())
        return self._limits.is_reached_by_hand(self._now())

    def end(self, module: Module) -> None:
        """An epoch has ended, in good order or before its time: the groups synchronize."""
        trainer = self.trainer
        complete = self._over if self.is_open_ended else trainer.is_last_batch
        is_cut_short = int(not complete or self._is_skipped)
        is_limit_reached = self._is_limit_reached
        stops = _private.stops_now(trainer) or is_limit_reached
        if self.world.is_computing and not self._stopping and (stops or not complete):
            self.leave("end" if stops else "skip" if self.is_open_ended else "")
        self._synchronize(module)
        trained = self._trained
        if self.world.executor.exchanges:
            mine = int(stops or self._stopping), int(_private.stops_now(trainer)), is_cut_short, trained
            ends, was_asked, is_cut_short, trained = self.world.agree(mine)
            # Whichever rank said so, and however late. A group that was told to stop has a limit, but was not asked to.
            trainer.should_stop |= bool(ends) and (bool(was_asked) or not is_limit_reached)
        self.is_open = False
        if self.progress is not None:
            epoch = trainer.current_epoch  # perhaps one that was resumed at its end, and never began here
            over = self._now().steps_before(epoch + 1)
            if self.max_steps != -1 and trainer.lightning_module.automatic_optimization:
                over = min(over, self.max_steps)  # which may have ended the run inside the epoch
            if is_cut_short:  # a rank has skipped the rest of it, or has stopped the run
                over = min(over, replace(self.progress, samples=trained).steps)
            self.progress = replace(self.progress, epochs=epoch + 1, samples=0, past=over)
            self.past = self.progress
        self._follow_schedulers()
        if self._pacer is not None:
            self._pacer.catch_up()
        self.is_open_ended, self._validates = False, None

    @property
    def _trained(self) -> int:
        """Samples of the epoch under way that are trained, where Lightning may have counted its batches."""
        if self.progress is None:
            return 0
        if self.is_open_ended or self.data.is_dynamic:
            self._advance(self._seen())
            return self.progress.samples
        return _private.batches_trained(self.trainer) * self.progress.reference.batch

    @property
    def is_whole(self) -> bool:
        """Whether an epoch that is over is so because all of it is trained, and max_steps has not ended it."""
        return (
            self.is_counted_together
            and self.progress is not None
            and self._limits is not None
            and self._limits.steps_left(self.progress.steps) != 0
        )

    def moment(self) -> tuple[Progress | None, Cut]:
        """How far the run is and what of its epoch is trained, for a checkpoint of one group or of after the fit.

        Nothing where Lightning's own counts say it, because no several groups have trained the run.
        """
        if not self.is_counted_together:
            return None, Cut()
        if self.progress is None or self.leases is None:
            return self.past, Cut()
        cut = Cut()
        if self.is_open:
            self._advance(self._seen())
            if self.is_open_ended:
                spans = self.leases.trained_spans
                cut = Cut(epoch=self.progress.epochs, total=self.leases.total, trained=spans)
        return self.progress, cut

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

    def interrupt(self, module: Module) -> None:
        """The run ends here, in mid-epoch: the groups synchronize for the last time, with what each has trained.

        A group that has joined on its own leaves the others to go on: what it holds and has not trained goes back.
        """
        if self.world.enlistment is not None:
            self.leave("")
            return
        if self.world.is_computing:
            self.leave("skip")
        self.world.enter_world(module)

    def leave(self, stop: str) -> None:
        """This group ends the epoch early; ``stop`` says how the others end it, or the run."""
        control = self.world.control
        if control is None:
            return
        self.world.channel.finish_exchanges()  # what comes to the server after this is said would be refused
        if self.leases is not None and self.data.is_dynamic:
            self.leases.leave(stop)
        elif stop:
            control.request(m.Leave(epoch=-1, generation=self.world.generation, trained=0, stop=stop), m.Left)
        self._stopping = self._stopping or stop in ("validate", "end")

    def before_validation(self, module: Module) -> None:
        """Validation is for all groups together. One that comes on its own (a callback said stop) brings the others."""
        if self._world is None or not self.is_open:
            return  # no training is under way: validation after the fit, or without one
        if self.published.evaluates or self.published.version is not None:
            return
        if self.world.is_computing and _private.stops_now(self.trainer) and not self._stopping:
            self.leave("validate")
        self._synchronize(module)

    def _synchronize(self, module: Module) -> None:
        """All groups synchronize, and count steps alike from here on: as the recorder, which logs and saves.

        Names of checkpoints, which have the step in them, are then the same on all ranks.
        """
        if not self.world.is_computing:
            return
        self.published.end_all()
        self.world.enter_world(module)
        trainer, mine = self.trainer, self.trainer.global_step
        counts = _private.step_counters(trainer)
        counts = self.world.agree(counts if self.world.is_recorder else [0] * len(counts))
        _private.set_step_counters(trainer, self.published.not_before(counts))
        _private.average_no_later(trainer)
        _private.share_saves(trainer, self.world.hear_recorder)
        if self.step_limit == mine:
            self.step_limit = trainer.global_step

    def after_validation(self) -> None:
        """Back into the epoch, if it goes on."""
        if self.is_open and not self.trainer.is_last_batch and not self.published.evaluates:
            self.world.enter_compute()
            self._have_parted()

    def _what_next(self) -> str:
        leases = self.leases
        if self.world.core.heard.stop:
            return f"stop:{self.world.core.heard.stop}"
        if not self.is_open_ended or leases is None:
            return ""
        coming = leases.peek()
        if coming is not None and coming.interval <= leases.interval:
            return ""
        self.world.channel.finish_exchanges()  # while it waits for the others there is nothing to compute
        return leases.ask()

    def _set_last_batch(self, is_last: bool) -> None:
        _private.be_open_ended(self.trainer)
        _private.set_last_batch(self.trainer, is_last)

    def _resumed_spans(self, epoch: int) -> Spans:
        """What a checkpoint says is trained of an epoch."""
        if self.leases is None:
            return ()
        if self.resumed.epoch == -1:  # nothing was leased: one group saved it, or DDP, where all ranks count alike
            at, batches = self._resumed_batches
            trained = batches * self._limits.reference(self.leases).batch if self._limits and at == epoch else 0
            return ((0, min(trained, self.leases.total)),) if trained else ()
        fits = self.resumed.total == self.leases.total
        return self.resumed.trained if fits and self.resumed.epoch == epoch else ()

    def _now(self) -> Progress:
        """The run's progress. Accumulation may have a schedule: then a step is of more samples than before."""
        assert self.progress is not None
        assert self.leases is not None
        assert self._limits is not None
        self.progress = replace(self.progress, reference=self._limits.reference(self.leases))
        return self.progress

    def _advance(self, samples: int) -> None:
        """So many samples of the epoch are trained, as far as this rank knows."""
        if self.progress is not None:
            self.progress = replace(self.progress, samples=max(self.progress.samples, samples))

    def _ends_in_validation(self) -> bool:
        """All samples of the epoch are trained: whether that is where to validate, and perhaps the end of the run."""
        assert self._plan is not None
        assert self._limits is not None
        progress, trainer = self._now(), self.trainer
        if self._limits.steps_left(progress.steps_before(self._plan.epoch + 1)) == 0:
            self.step_limit = trainer.global_step
            self._say(
                f"OmniStrategy: max_steps={self.max_steps} reached: the groups have trained as many samples as"
                f" {self.max_steps} steps of all {self.world.size} ranks; this group made {trainer.global_step} steps"
            )
        return self._limits.validates_at_end(self._plan, progress)

    # --- Validation and steps ----------------------------------------------------------------------------------------

    def validates(self, is_due: Callable[[], bool]) -> bool:
        """Whether all validate after this batch.

        Args:
            is_due: what the loop would say by itself.
        """
        trainer = self.trainer
        if _private.validates_by_time(trainer):
            return any(self.world.agree([int(is_due())]))  # no two clocks are alike
        if self.published.is_on and not self._stopping and not _private.stops_now(trainer):
            if not self._over:
                self.published.end_known()
                return not _private.stops_now(trainer) and self.published.is_due(self._coming)
            self._validates = self.published.end_all() or self._validates
        if self._validates is None:
            return is_due()
        return _private.validates_this_epoch(trainer) and (self._validates or _private.stops_now(trainer))

    def validate(self, run: Callable[[], Any]) -> Any:
        """The validation loop runs: of all ranks that are alive, or of this group alone."""
        if self.published.evaluates:
            return self.published.run(run, self._now())
        if self._world is None or not self.is_open or self._world.executor.control is None:
            return run()
        self.before_validation(self.trainer.lightning_module)
        live = self.world.process_groups.live  # as all ranks have just agreed
        is_whole = live.size() == self.world.size and self.world.enlistment is None
        if is_whole or not all(map(is_given, _private.validation_loaders(self.trainer))):
            return run()
        alike = self.world.tensor_parallel  # neighbours that get the same samples
        with _private.dealt_out(self.trainer, live.rank() // alike, live.size() // alike):
            return run()

    @property
    def _coming(self) -> Batch | None:
        return self.leases.peek() if self.leases is not None else None

    def _steps(self) -> int:
        """The run's progress in optimizer steps as DDP would count them."""
        if self.is_open:
            self._advance(self._seen())
        return self._steps_at(self._now())

    def _steps_at(self, progress: Progress) -> int:
        automatic = self.trainer.lightning_module.automatic_optimization
        # max_steps may end the run inside an epoch.
        return min(progress.steps, self.max_steps) if automatic and self.max_steps != -1 else progress.steps

    def schedules_at(self, progress: Progress | None) -> list[tuple[int, ...]]:
        """For a checkpoint of that moment: see `lightning_omni.strategy.schedulers.Pacer.counts_at`."""
        if self._pacer is None or progress is None:
            return []
        return self._pacer.counts_at(self.trainer.lr_scheduler_configs, self._steps_at(progress))

    def _seen(self) -> int:
        """Positions of this epoch that are trained, as far as this rank knows. All members of a group know alike."""
        assert self.leases is not None
        if not self.data.is_dynamic:
            return size_of(self.leases.trained_spans)
        # Groups that exchange weights now and then, or never, hear too seldom of the others.
        return self.leases.position if self.world.steps_at_worker else self.world.core.heard.progress

    def _pace(self) -> None:
        """Schedulers follow the run's common progress, where groups differ in speed."""
        if self.leases is not None and self.data.kind == "dynamic":
            trainer = self.trainer
            by_hand = not trainer.lightning_module.automatic_optimization
            batches = (lambda: _private.batches_begun(trainer)) if by_hand else None
            pacer = Pacer(
                trainer.lr_scheduler_configs,
                self._steps,
                lambda: trainer.current_epoch + 1,
                batches,
                lambda frequency, steps: self._now().scheduled(frequency, steps),
            )
            self.schedule = pacer.count_from(self.schedule)
            if self.data.is_dynamic or self.is_open_ended:
                pacer.pace()
                self._pacer = pacer

    def _follow_schedulers(self) -> None:
        """Callbacks and hooks may have put others in their place, as StochasticWeightAveraging does."""
        if self._pacer is not None and not self._pacer.has(self.trainer.lr_scheduler_configs):
            self._unpace()
            self._pace()

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
        self.published.end_all()
        spans = self.leases.trained_spans if self.leases is not None else ()
        if self.data.is_dynamic and self.is_open:
            self.leave("")
        return spans

    def after_regroup(self, spans: Spans, before: Executor) -> None:
        """The groups have changed: the epoch goes on with the samples that are left."""
        self.data.assign()
        if self.is_open and self.leases is not None and self._plan is not None and self.data.kind == "dynamic":
            self.is_open_ended = True
            self.is_counted_together = True
            if self.max_steps != -1 and not self._is_limit_reached:
                self.step_limit = sys.maxsize  # one group counted for itself; from here on the samples end the run
            rest = msgspec.structs.replace(self._plan, trained=spans)
            self._advance(size_of(spans))
            self.published.go_on(self._plan, size_of(spans), self.world.executor.exchanges)
            if self.world.executor.control is None:
                self.leases.begin_local(rest, goes_on=True)
            elif before.control is None:
                self.leases.begin(self.published.dealt(rest))
            else:
                self.leases.restart(rest.epoch)  # with the book that the server kept
        self._align_progress()
        self._unpace()
        self._pace()

    def _align_progress(self) -> None:
        """Ranks that come from different groups must count alike, or they would validate at different batches."""
        mine = _private.progress_counters(self.trainer)
        by_hand = self._limits.by_hand if self._limits is not None else None
        *theirs, batches, steps = self.world.agree([*mine, *(by_hand.counts if by_hand is not None else (0, 0))])
        if mine != theirs:
            _private.set_progress_counters(self.trainer, theirs)
        if by_hand is not None:
            by_hand.counts = batches, steps
