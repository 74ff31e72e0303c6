"""The driver of Lightning's training loop through epochs with leased samples.

An epoch ends when all groups together have trained its samples. It ends as in Lightning with static data, and with one
group of all ranks unless several groups have begun it or ranks were lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from torch.nn import Module

from lightning_omni.runtime import World
from lightning_omni.runtime.executor import Executor
from lightning_omni.runtime.leased_loader import RankLeases
from lightning_omni.runtime.state.checkpoint import RunCheckpoint
from lightning_omni.strategy.lightning_internals.callbacks import (
    copy_checkpoint_records,
    is_inside_hook,
    lower_last_average_step,
)
from lightning_omni.strategy.lightning_internals.loops import (
    loops_iterate,
    make_epoch_open_ended,
    set_last_batch,
    set_step_counters,
    should_stop_now,
    step_counters,
    validates_by_time,
    validates_this_epoch,
    will_step,
)
from lightning_omni.strategy.lightning_internals.metrics import (
    cached_metrics,
    divide_validation_data,
    validation_loaders,
    validation_sizes,
)
from lightning_omni.strategy.loops.epoch import (
    DataSizes,
    EntryPoint,
    EpochState,
    LeasedData,
    has_lightning_sampler,
    rates_of,
    warning_of_rates,
)
from lightning_omni.strategy.loops.limits import size_of
from lightning_omni.strategy.loops.progress import RunProgress
from lightning_omni.strategy.loops.run_schedulers import Leads, Plateaus, RunSchedulers
from lightning_omni.strategy.loops.validation import PublishedValidation
from lightning_omni.wire import messages as m
from lightning_omni.wire.messages import Batch, EpochPlan
from lightning_omni.wire.messages.data import Spans

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

_log = logging.getLogger(__name__)


class EpochDriver:
    """The driver of one strategy's epochs.

    Attributes:
        is_open: whether a training epoch is under way.
        is_open_ended: whether the epoch ends with its samples, and not after a number of batches.
        is_cut_short: whether max_steps have ended the epoch early.
        batches_cut_short: batches of each rank of DDP in such an epoch.
        on_parted: called on every rank each time the groups begin to compute.
        check_every: samples between two synchronization points in an epoch in which groups wait for no validation; 0
            for none.
        on_check: called on every rank at these points.
        trainer: from `connect` on, as is ``world``.
    """

    trainer: Trainer
    world: World

    def __init__(
        self,
        data: Literal["dynamic", "static"],
        info: Callable[[str], None],
        warn: Callable[[str], None],
        validation: Literal["wait", "published"] = "wait",
    ) -> None:
        self._info, self._warn = info, warn
        self.published = PublishedValidation(validation == "published", info)
        # The epoch of a loader that was made in the epoch's first hook may be another one.
        self.data = LeasedData(
            data,
            info,
            lambda epoch: self.begin(self.trainer.current_epoch),
            lambda: self._is_for_user,
            lambda batches: int(self.own_batches(batches)),
        )
        self.run = RunProgress(self.data, warn)
        self.is_open = False
        self.is_open_ended = self.is_cut_short = False
        self.batches_cut_short = 0
        self.schedulers = RunSchedulers(self.run, self._steps)
        self._plateaus = Plateaus()
        self.published.on_heard = self._step_plateaus
        self._epoch = EpochState()
        self._begun = -1
        self._started = self._stopping = self._have_differed = False
        self._entered: EntryPoint | None = None
        self.on_parted: Callable[[], None] = lambda: None
        self.check_every = 0
        self.on_check: Callable[[], None] = lambda: None

    # --- The run -----------------------------------------------------------------------------------------------------

    def connect(self, trainer: Trainer, world: World) -> None:
        self.trainer, self.world = trainer, world
        self.data.connect(world)
        self.published.connect(trainer, world)
        self.run.connect(trainer, world)
        self._started, self._begun, self._have_differed = False, -1, False
        self._plateaus = Plateaus()

    def resume(self, saved: RunCheckpoint) -> None:
        self.run.resume(saved)
        self.schedulers.resume(saved.schedules)

    def start(self) -> None:
        self._started, self._stopping = True, False
        self.data.adopt()
        self.run.start(self.world.tensor_parallel, self._entered.samples if self._entered is not None else None)
        if self.leases is not None:
            self.run.limit_steps(self.is_open_ended)
        self.schedulers.start()
        self._pace()

    def enter(self, entered: EntryPoint, leads: Leads) -> None:
        """Record the entry into a running run, before this group's loops begin."""
        self._entered, self.schedulers.leads = entered, leads
        self.run.enter(entered.progress)

    def finish(self) -> None:
        self.run.step_limit, self._epoch.validates, self.is_open_ended = None, None, False
        self.schedulers.finish()
        self.is_open = self._started = False

    def forget(self) -> None:
        self.finish()
        self.data.forget()
        self.published.forget()
        self.run.forget()
        self._epoch, self._entered = EpochState(), None

    @property
    def _is_for_user(self) -> bool:
        if not self.data.is_in_fit:
            return True
        return is_inside_hook(self.trainer) and not loops_iterate(self.trainer)

    @property
    def leases(self) -> RankLeases | None:
        return self.data.leases

    # --- An epoch ----------------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Begin an epoch: the groups start to compute, and the server opens its samples if it leases them.

        A second call for it, or one before `start`, does nothing.
        """
        if epoch == self._begun or not self._started:
            return
        self._begun = epoch
        self.data.adopt()
        self.world.enter_compute()
        self._epoch = EpochState()
        self.is_open_ended = self.data.is_dynamic or self._is_shrunk or self._is_resumed_by_one_group
        self.is_cut_short = False
        if self.leases is not None:
            self._begin_leased(self.leases, self.run.begin(epoch))
        else:
            self.run.progress = None  # drops the last epoch's, which was leased if a reload has brought several loaders
            self.published.begin(None)
        self.is_open = True  # from here on the leases are those of this epoch
        self._have_parted()

    def _begin_leased(self, leases: RankLeases, plan: EpochPlan) -> None:
        entered, self._entered = self._entered, None
        trained = plan.trained if entered is None else entered.plan.trained
        self.published.begin(plan, size_of(trained), self.data.is_dynamic)
        if entered is not None:
            plan = msgspec.structs.replace(plan, trained=trained)
            entered.check(self._dealt(plan), self.data.split, self.sizes)
            # The server has sent the others' progress with its weights; schedules begin there, and not at the epoch's.
            self.run.advance(max(entered.samples, self.world.core.last_answer.progress))
        self._epoch.plan = plan
        self._plateaus.begin(plan, size_of(trained) if entered is None else entered.samples)
        self.world.core.last_answer = msgspec.structs.replace(
            self.world.core.last_answer, progress=self.run.now().samples, stop=""
        )
        self.schedulers.begin_epoch()
        if entered is not None:
            self.schedulers.step()
        if self.data.is_dynamic:
            if entered is not None:
                leases.restart(plan.epoch)  # draws from the book at the server
            else:
                leases.begin(self._dealt(plan))
        elif self.is_open_ended:
            leases.begin_local(plan, resumed=True)
        # The remaining samples may form more batches than under DDP; a reload may have brought the first leases.
        if self.is_open_ended and not self.schedulers.is_paced:
            self._pace()
        self.run.limit_steps(self.is_open_ended)

    def _dealt(self, plan: EpochPlan) -> EpochPlan:
        """Return the plan for leases: an interval ends where all groups wait for each other."""
        dealt = self.published.dealt(plan)
        if not self._is_checked(plan):
            return dealt
        return msgspec.structs.replace(dealt, validate_every=self.check_every, validate_offset=0)

    def _is_checked(self, plan: EpochPlan) -> bool:
        """Return whether groups synchronize inside the epoch for checks, not validations."""
        dealt = self.published.dealt(plan)
        every = dealt.validate_every
        validates_inside = every > 0 and every - dealt.validate_offset % every < dealt.budget
        return self.check_every > 0 and not validates_inside

    def _have_parted(self) -> None:
        self.on_parted()
        self.published.have_parted()

    @property
    def sizes(self) -> DataSizes:
        return DataSizes(self.leases.dataset_size if self.leases is not None else 0, validation_sizes(self.trainer))

    @property
    def samples(self) -> int:
        if self.run.progress is None:
            return 0
        if self.is_open:
            self.run.keep_up()
        return self.run.now().samples

    @property
    def _is_shrunk(self) -> bool:
        """Return whether one group has lost ranks, so that its epoch has more batches."""
        return self.leases is not None and self.leases.is_local and self.world.data_rank[1] < self.leases.world_size

    @property
    def _is_resumed_by_one_group(self) -> bool:
        """Return whether a single group resumes an epoch of several groups, which ends with its samples."""
        return self.data.kind == "dynamic" and not self.data.is_dynamic and self.run.is_resumed_inside

    def resume_order(self) -> None:
        """Draw the samples of a resumed epoch in its own order, where Lightning has set the next epoch's."""
        if self.data.kind == "dynamic" and self.run.is_resumed_inside:
            self.data.set_epoch(self.trainer.current_epoch)

    def go_on(self) -> None:
        """Begin an epoch of several groups that one group resumes, once its loader iterates: it has no first hook."""
        if self._is_resumed_by_one_group:
            self.data.assign()  # drops the batches that the loader has taken
            self.begin(self.trainer.current_epoch)

    def begin_batch(self) -> None:
        self.begin(self.trainer.current_epoch)  # a resumed epoch starts without its first hook
        if self.leases is not None:
            self.leases.begin_batch()
            if self.is_open_ended:
                # An accumulation window ends at the last batch. `end_batch` decides finally whether this is the last.
                self._set_last_batch(self.leases.peek() is None)

    def end_batch(self) -> None:
        """End a batch; decide with the other groups to continue, validate or stop."""
        if self.leases is not None:
            self.leases.end_batch(will_step(self.trainer))
        epoch = self._epoch
        if not (self.world.executor.exchanges or self.is_open_ended):
            return
        if self.is_open_ended:
            self._check_window()
        verdict = self._what_next()
        epoch.is_over = verdict.startswith("over")
        if self.is_open_ended:
            self._set_last_batch(epoch.is_over)
            is_checked = epoch.plan is not None and self._is_checked(epoch.plan)
            epoch.is_check = verdict == "validate" and is_checked
            is_due = verdict == "stop:validate" or (verdict.endswith("validate") and not is_checked)
            if epoch.is_over:  # published validations are counted separately
                is_due = self._ends_in_validation() or (is_due and not self.published.is_on)
            epoch.validates = is_due
        if verdict == "stop:skip":
            epoch.is_over = epoch.is_skipped = True
            self._set_last_batch(True)
            self.is_cut_short = False
        elif verdict.startswith("stop:"):
            self._stopping = True
            if verdict == "stop:validate":
                self.trainer.should_stop = True
            else:
                epoch.validates = False
                self.run.stop_here()

    def _check_window(self) -> None:
        counts = self.schedulers.count_steps or self.run.limits.max_steps != -1
        self._epoch.check_window(int(self.trainer.accumulate_grad_batches), counts)

    def end(self, module: Module) -> None:
        trainer = self.trainer
        complete = self._epoch.is_over if self.is_open_ended else trainer.is_last_batch
        is_cut_short = int(not complete or self._epoch.is_skipped)
        is_limit_reached = self.run.is_limit_reached
        stops = should_stop_now(trainer) or is_limit_reached
        # Groups whose data is not leased count their own steps, and the others reach the limit without a message.
        ends_others = stops if self.data.is_dynamic or self.is_open_ended else should_stop_now(trainer)
        if self.world.is_computing and not self._stopping and (stops or not complete):
            self.leave("end" if ends_others else "skip" if self.is_open_ended else "")
        self._synchronize(module, is_end=True)
        trained = self.run.trained(self.is_open_ended)
        if self.world.executor.exchanges:
            mine = int(stops or self._stopping), int(should_stop_now(trainer)), is_cut_short, trained
            ends, was_asked, is_cut_short, trained = self.world.all_reduce_max(mine)
            # Any rank may request the stop, even now. A group that received a stop has a limit, but has requested none.
            trainer.should_stop |= bool(ends) and (bool(was_asked) or not is_limit_reached)
        self.is_open = False
        if self._epoch.is_skipped:
            self.schedulers.step("epoch")
        self.run.end(trainer.current_epoch, trained if is_cut_short else None)
        self.schedulers.step()
        self.is_open_ended, self._epoch.validates = False, None

    def after_hooks_of_end(self) -> None:
        """Stop all ranks of several groups if a hook of the epoch's end has requested it on any.

        Warn once a fit if learning rates differ between ranks.
        """
        if not self.world.executor.exchanges:
            return
        trainer, live = self.trainer, self.world.process_groups.live
        mine = msgspec.msgpack.encode((should_stop_now(trainer), rates_of(trainer)))
        of_all = live.contribute("the end of an epoch", mine)
        ends = {rank: msgspec.msgpack.decode(each, type=tuple[bool, list[float]]) for rank, each in of_all}
        trainer.should_stop |= any(stops for stops, _ in ends.values())
        rates = {rank: each for rank, (_, each) in ends.items()}
        if not self._have_differed and (sentence := warning_of_rates(trainer.current_epoch - 1, rates)):
            self._have_differed = True
            self._warn(f"OmniStrategy: {sentence}")

    def expected_batches(self, done: int) -> int | None:
        """Estimate this rank's batches in this epoch; None keeps Lightning's number."""
        plan = self._epoch.plan
        if plan is None or self.leases is None or not self.is_open_ended:
            return None
        return done if self._epoch.is_over else self.run.expected_batches(plan, done)

    def stepped_by_batches(self, configs: list[Any]) -> list[Any]:
        if not (self.is_open and self.is_open_ended and self._epoch.plan is not None):
            return configs
        return self._plateaus.stepped_by_batches(self.trainer, configs)

    def _step_plateaus(self, before: dict[str, Any], is_at_end: bool = False) -> None:
        plan = self._epoch.plan
        if plan is not None and self.is_open_ended:
            now = self.run.now()
            batches = now.batches if is_at_end else 0
            self._plateaus.validated(self.trainer, before, plan, batches, now.reference.batch)

    def own_batches(self, batches: float) -> float:
        """Return ``batches``; in an open-ended epoch, a number that equals ``batch_idx + 1`` in the last batch only."""
        if not (self.is_open and self.is_open_ended) or loops_iterate(self.trainer):
            return batches
        trained = self.trainer.fit_loop.batch_idx + 1
        return trained if trained and self.trainer.is_last_batch else max(batches, trained + 1)

    def interrupt(self, module: Module) -> None:
        """End the run inside an epoch: the groups synchronize for the last time.

        A group that has joined on its own returns its untrained samples; the others continue.
        """
        if self.world.registration is not None:
            self.leave("")
            return
        if self.world.is_computing:
            self.leave("skip")
            self.published.end_all()  # the others do the same when they receive this group's message
        self.world.enter_world(module)

    def leave(self, stop: str) -> None:
        """End the epoch early in this group; for ``stop`` see `messages.LeaveEpoch`."""
        control = self.world.control
        if control is None:
            return
        self.world.exchange.finish_exchanges()  # the server would reject pushes that arrive after the message
        if self.leases is not None and self.data.is_dynamic:
            self.leases.leave(stop)
        elif stop:
            control.request(m.LeaveEpoch(epoch=-1, generation=self.world.generation, trained=0, stop=stop), m.EpochLeft)
        self._stopping = self._stopping or stop in ("validate", "end")

    def before_validation(self, module: Module) -> None:
        """Synchronize the groups for a validation; first notify them if a callback requests a stop."""
        if not self.is_open:
            return  # no training is under way: validation after the fit, or without one
        if self.published.evaluates or self.published.version is not None:
            return
        stops = should_stop_now(self.trainer) and not self._stopping
        if self.world.is_computing and stops and not self._epoch.is_due:  # otherwise the others learn of it later
            self.leave("validate")
        self._synchronize(module)

    def _synchronize(self, module: Module, is_end: bool = False) -> None:
        """Synchronize all groups, and set their step counts to the recorder's: names of checkpoints contain them."""
        if not self.world.is_computing:
            return
        self.published.end_all()
        self.world.check_left()
        self.world.enter_world(module)
        self.schedulers.step()
        trainer, is_limit_reached = self.trainer, self.run.is_limit_reached
        counts = step_counters(trainer)
        # The server tells groups of dynamic data alike of a stop; others may meet here before they have heard of it.
        stops = not self.data.is_dynamic and (self._stopping or should_stop_now(trainer))
        marks = int(stops), int(is_end)
        *counts, is_last, has_ended = self.world.all_reduce_max(
            [*(counts if self.world.is_recorder else [0] * len(counts)), *marks]
        )
        if not any(counts):  # the recorder has died meanwhile, or no rank has stepped
            counts = self.world.all_reduce_max(step_counters(trainer))
        set_step_counters(trainer, self.published.not_before(counts))
        lower_last_average_step(trainer)
        copy_checkpoint_records(trainer, self.world.broadcast_from_recorder)
        if is_limit_reached:
            self.run.stop_here()
        if is_last:
            self._stop_with_others(bool(has_ended), is_end)

    def _stop_with_others(self, has_ended: bool, is_end: bool) -> None:
        """Make this synchronization the epoch's last, because a group has requested a stop.

        Groups at a validation complete it together, unless a group is already at its epoch's end.
        """
        self._stopping = self._epoch.is_last = True
        self._epoch.has_ended = has_ended
        if has_ended and not is_end:
            self.run.stop_here()
        elif not has_ended:
            self.trainer.should_stop = True

    def after_validation(self) -> None:
        goes_on = self.is_open and not (self.trainer.is_last_batch or self._epoch.is_last)
        if goes_on and not self.published.evaluates:
            self.world.enter_compute()
            self._have_parted()

    def _what_next(self) -> str:
        leases = self.leases
        if self.world.core.last_answer.stop:
            return f"stop:{self.world.core.last_answer.stop}"
        if not self.is_open_ended or leases is None:
            return ""
        coming = leases.peek()
        if coming is not None and coming.interval <= leases.interval:
            return ""
        self.world.exchange.finish_exchanges()  # there is nothing to compute while this group waits for the others
        return leases.ask()

    def _set_last_batch(self, is_last: bool) -> None:
        make_epoch_open_ended(self.trainer)
        set_last_batch(self.trainer, is_last)
        plan = self._epoch.plan
        self.is_cut_short = is_last and plan is not None and self.run.limits.cut_short(plan, self.run.now())
        if self.is_cut_short and plan is not None:
            self.batches_cut_short = plan.budget // self.run.now().reference.batch

    def _ends_in_validation(self) -> bool:
        """Return whether to validate at the end of the epoch; stop at max_steps."""
        plan = self._epoch.plan
        assert plan is not None
        progress, trainer = self.run.now(), self.trainer
        if self.run.limits.steps_left(progress.steps_before(plan.epoch + 1)) == 0:
            self.run.stop_here()
            steps = self.run.limits.max_steps
            self._info(
                f"OmniStrategy: max_steps={steps} reached: the groups have trained as many samples as {steps} steps of"
                f" all {self.world.size} ranks; this group made {trainer.global_step} steps"
            )
        return self.run.limits.validates_at_end(plan, progress)

    # --- Validation and steps ----------------------------------------------------------------------------------------

    def validates(self, is_due: Callable[[], bool]) -> bool:
        trainer, epoch = self.trainer, self._epoch
        epoch.is_due = False
        if epoch.is_check:
            self._check()
            return False
        if validates_by_time(trainer):
            return any(self.world.all_reduce_max([int(is_due())]))  # the clocks of ranks differ
        if self.published.is_on and not self._stopping and (epoch.is_over or not should_stop_now(trainer)):
            if not epoch.is_over:
                self.published.end_known()
                return not should_stop_now(trainer) and self.published.is_due(self._coming)
            is_missed = self.published.end_all()  # the group that has skipped the rest does not validate
            epoch.validates = (is_missed and not epoch.is_skipped) or epoch.validates
            epoch.is_due = bool(epoch.validates)
        elif not (self.published.is_on or self._stopping) and should_stop_now(trainer):
            epoch.is_due = self._is_due_without_stop(is_due)
        if epoch.validates is None:
            return is_due()
        # In its last batch a group can tell the others of a stop only at the epoch's end.
        stops = should_stop_now(trainer) and not (epoch.is_over and self.world.executor.exchanges)
        return validates_this_epoch(trainer) and (epoch.validates or stops)

    def _is_due_without_stop(self, is_due: Callable[[], bool]) -> bool:
        if self._epoch.validates is not None:
            return self._epoch.validates and validates_this_epoch(self.trainer)
        self.trainer.should_stop = False
        try:
            return is_due()
        finally:
            self.trainer.should_stop = True

    def _check(self) -> None:
        self._epoch.is_check = False
        self._synchronize(self.trainer.lightning_module)
        self.on_check()
        self.after_validation()

    def validate(self, run: Callable[[], Any]) -> Any:
        if self.published.evaluates:
            return self.published.run(run, self.run.now())
        if not self.is_open:
            return run()
        if self.world.executor.control is None:
            before = cached_metrics(self.trainer)
            returned = self._divided(run, *self.world.data_rank)  # ranks may have been lost
            self._step_plateaus(before, self._epoch.is_over)
            return returned
        self.before_validation(self.trainer.lightning_module)
        if self._epoch.has_ended:
            return []
        live = self.world.process_groups.live  # all ranks have just agreed on it
        before, ranks = cached_metrics(self.trainer), tuple(live.ranks)
        alike = self.world.tensor_parallel  # number of neighbours that get the same samples
        returned = self._divided(run, live.rank() // alike, live.size() // alike)
        lost = [rank for rank in ranks if rank in self.world.lost]
        if lost and self.world.rank == min(set(ranks).difference(lost)):  # it may not be global zero yet
            _log.warning(
                "ranks were lost during this validation (%s); its metrics leave out their part of the data",
                ", ".join(map(str, lost)),
            )
        if not self.world.is_computing:  # without a batch, the loop calls no hook of its end
            self.after_validation()
        self._step_plateaus(before, self._epoch.is_over)
        return returned

    def _divided(self, run: Callable[[], Any], part: int, parts: int) -> Any:
        is_whole = parts * self.world.tensor_parallel == self.world.size and self.world.registration is None
        if is_whole or not all(map(has_lightning_sampler, validation_loaders(self.trainer))):
            return run()
        with divide_validation_data(self.trainer, part, parts):
            return run()

    @property
    def _coming(self) -> Batch | None:
        return self.leases.peek() if self.leases is not None else None

    def _steps(self) -> int:
        if self.is_open:
            self.run.keep_up()
        return self.run.steps_at(self.run.now())

    def _pace(self) -> None:
        if self.leases is not None and self.data.kind == "dynamic":
            self.schedulers.keep_pace(self.data.is_dynamic or self.is_open_ended)

    # --- Regrouping --------------------------------------------------------------------------------------------------

    def before_regroup(self) -> Spans:
        """Give untrained samples back before a change of groups; return the known trained ranges."""
        self.published.end_all()
        spans = self.run.known_spans()
        if self.data.is_dynamic and self.is_open:
            self.leave("")
        return spans

    def after_regroup(self, spans: Spans, before: Executor) -> None:
        self.data.assign()
        plan = self._epoch.plan
        if self.is_open and self.leases is not None and plan is not None and self.data.kind == "dynamic":
            self.is_open_ended = True
            self.run.count_together()
            rest = msgspec.structs.replace(plan, trained=spans)
            self.run.advance(size_of(spans))
            if before.control is None:  # Lightning alone has stepped schedulers at validations, in one group
                batches: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
                is_before_validation = batches.processed > batches.completed
                self._plateaus.begin(plan, size_of(spans) - is_before_validation)
            self.published.go_on(plan, size_of(spans), self.world.executor.exchanges)
            if self.world.executor.control is None:
                self.leases.begin_local(rest, resumed=True)
            elif before.control is None:
                self.leases.begin(self._dealt(rest))
            else:
                self.leases.restart(rest.epoch)  # draws from the book at the server
        self.run.align(self.world.all_reduce_max)
        self.schedulers.align(self.world.all_reduce_max)
        self._pace()
