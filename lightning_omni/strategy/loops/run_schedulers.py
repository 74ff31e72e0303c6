"""The schedulers of a run, which follow the progress of all groups.

ReduceLROnPlateau with ``interval="step"`` may monitor a metric of validations inside the epoch. It is then stepped when
a rank's callbacks receive a validation, and counts the batches that DDP would have trained by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning_omni.strategy.lightning_internals.loops import step_plateaus, step_schedule
from lightning_omni.strategy.lightning_internals.metrics import cached_metrics, names_in_training
from lightning_omni.strategy.loops.paced_schedulers import (
    Counts,
    Pacer,
    Schedule,
    SchedulerSnapshot,
    StepCounts,
    arrive,
    caught_up,
    counts_of,
    reach_all,
    standing,
)
from lightning_omni.strategy.loops.progress import RunProgress
from lightning_omni.wire.messages import EpochPlan
from lightning_omni.wire.steps_and_samples import Progress

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class RunSchedulers:
    """The schedulers of one fit after another.

    Attributes:
        bases: counts from which schedulers keep pace.
        synchronized: paced schedulers' states when all groups had last exchanged everything.
    """

    def __init__(self, run: RunProgress, steps: Callable[[], int]) -> None:
        self._run, self._steps = run, steps
        self._pacer: Pacer | None = None
        self._counts = StepCounts()
        self._resumed: Sequence[Sequence[int]] = ()
        self._before = 0  # steps of DDP before the epoch
        self.bases: Schedule = {}
        self.synchronized: dict[Any, SchedulerSnapshot | None] = {}

    def resume(self, counts: Sequence[Sequence[int]]) -> None:
        self._resumed = counts

    def start(self, count_from_here: bool) -> None:
        self.begin_epoch()
        counts, self._resumed = arrive(self._configs, self._resumed, self._counts), ()
        if count_from_here:
            self.bases = {**self.bases, **{each: (count, self._steps()) for each, count in counts.items()}}

    def begin_epoch(self) -> None:
        """Count the batches of schedules with a frequency from here, as Lightning does."""
        progress = self._run.progress
        self._before = progress.steps_before(progress.epochs) if progress is not None else 0

    def keep_pace(self, is_paced: bool) -> None:
        """Let schedulers follow the progress of all groups from now on, or only store their counts."""
        trainer = self._run.trainer
        if not trainer.lightning_module.automatic_optimization:
            return
        pacer = Pacer(
            self._configs,
            self._steps,
            lambda: trainer.current_epoch + 1,
            lambda frequency, steps: self._run.now().scheduled(frequency, steps - self._before),
            self._counts,
            lambda scheduler: step_schedule(trainer, scheduler),
        )
        self.bases = pacer.count_from(self.bases)
        if is_paced:
            pacer.pace()
            self._pacer = pacer
        self.note_synchronized()

    def note_synchronized(self) -> None:
        self.synchronized = {each: standing(each) for each in self._pacer.schedulers} if self._pacer else {}

    @property
    def are_paced(self) -> bool:
        return self._pacer is not None

    @property
    def count_steps(self) -> bool:
        return self._pacer is not None and self._pacer.counts_any_steps

    @property
    def are_others(self) -> bool:
        """Return whether the schedulers were replaced, as by StochasticWeightAveraging."""
        return self._pacer is not None and not self._pacer.has(self._configs)

    def step(self, scheduler: Any, call: Callable[[], Any]) -> None:
        if self._pacer is not None:
            self._pacer.step(scheduler, call)
        else:
            call()

    def keep_up(self) -> None:
        if self._pacer is not None:
            self._pacer.keep_up()

    def catch_up(self) -> None:
        if self._pacer is not None:
            self._pacer.catch_up()
        elif self._run.progress is not None:  # Lightning alone has stepped them, as under DDP
            for config in self._configs:
                if config.interval == "step" and config.scheduler in self.bases:
                    self.bases[config.scheduler] = self._counts.of(config.scheduler), self._steps()

    def align(self, all_reduce_max: Callable[[list[int]], list[int]]) -> None:
        """Give all ranks the same scheduler counts after a change of groups, and stop pacing."""
        self.release()
        if counts := counts_of(self._configs, self._counts):
            reach_all(self._configs, all_reduce_max(counts), self._counts)

    def catch_up_in(self, checkpoint: dict[str, Any], progress: Progress | None) -> list[Counts]:
        """Advance the schedulers in a checkpoint to its progress; return their counts: see `caught_up`."""
        if self._pacer is None or progress is None:
            return []
        counts = self._pacer.counts_at(self._configs, self._run.steps_at(progress))
        schedulers = [config.scheduler for config in self._configs]
        return caught_up(checkpoint, schedulers, self._run.trainer.optimizers, counts, self.synchronized)

    def release(self) -> None:
        if self._pacer is not None:
            self._pacer.release()
            self._pacer = None

    def finish(self) -> None:
        self.release()
        self.bases, self.synchronized = {}, {}

    def forget(self) -> None:
        self.finish()
        self._counts.forget()

    @property
    def _configs(self) -> list[Any]:
        return self._run.trainer.lr_scheduler_configs


class Plateaus:
    def __init__(self) -> None:
        self._validated: set[str] | None = None  # metrics of validations; None until there was one
        self._points = 0

    def begin(self, plan: EpochPlan, trained: int) -> None:
        self._points = (trained + plan.validate_offset) // plan.validate_every if plan.validate_every else 0

    def stepped_by_batches(self, trainer: Trainer, configs: list[Any]) -> list[Any]:
        return [config for config in configs if not self._waits(trainer, config)]

    def validated(self, trainer: Trainer, before: dict[str, Any], plan: EpochPlan, batches: int, size: int) -> None:
        """Step the due schedulers, after this rank's callbacks have received a validation.

        ``before`` are the metrics before it. ``batches`` are those of the epoch under DDP if it is over, or 0; ``size``
        is the number of samples in a batch of all ranks.
        """
        now = cached_metrics(trainer)
        self._validated = (self._validated or set()) | {name for name in now if now[name] is not before.get(name)}
        self._points += 1
        done = batches or (self._points * plan.validate_every - plan.validate_offset) // size
        configs = [config for config in trainer.lr_scheduler_configs if self._waits(trainer, config)]
        if due := [config for config in configs if done % config.frequency == 0]:
            step_plateaus(trainer, due)

    def _waits(self, trainer: Trainer, config: Any) -> bool:
        if not (config.reduce_on_plateau and config.interval == "step"):
            return False
        if self._validated is None:
            return config.monitor not in names_in_training(trainer)
        return config.monitor in self._validated
