"""The schedulers of a run, which keep pace with the progress of all groups.

With leased data a fast group takes more steps than a slow one. Where Lightning would step a scheduler, the module's
``lr_scheduler_step`` is therefore called as often as every rank would have called it meanwhile under DDP. Steps that
other code of the user makes are not paced.

ReduceLROnPlateau with ``interval="step"`` may monitor a metric of validations inside the epoch. It is then stepped when
a rank's callbacks receive a validation, and counts the batches that DDP would have trained by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_omni.strategy.lightning_internals.loops import epochs_stepped, step_plateaus, step_schedule
from lightning_omni.strategy.lightning_internals.metrics import cached_metrics, names_in_training
from lightning_omni.strategy.loops.progress import RunProgress
from lightning_omni.wire.messages import EpochPlan
from lightning_omni.wire.steps_and_samples import Progress

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

Leads = dict[Any, tuple[int, int]]
"""For each scheduler, by how many steps it was ahead of the run, and the run's progress then, in steps or epochs."""


class RunSchedulers:
    """The schedulers of one fit after another.

    Attributes:
        is_paced: whether they follow the progress of all groups; otherwise Lightning alone steps them.
        leads: their steps in relation to that progress, while they are paced.
    """

    def __init__(self, run: RunProgress, steps: Callable[[], int]) -> None:
        self._run, self._steps = run, steps
        self._resumed: Sequence[Sequence[int]] = ()
        self._ahead: dict[Any, int] = {}  # of the resumed progress, until they are paced
        self._before = 0  # steps of DDP before the epoch
        self.is_paced = False
        self.leads: Leads = {}

    def resume(self, counts: Sequence[Sequence[int]]) -> None:
        self._resumed = counts

    def start(self) -> None:
        """Bring the schedulers of a resumed run to its progress; those that are ahead of it will wait."""
        self.begin_epoch()
        configs, saved = self._run.trainer.lr_scheduler_configs, self._resumed
        self._resumed = ()
        if len(saved) != len(configs):
            return
        for config, counts in zip(configs, saved, strict=True):
            if counts:
                made, due = counts
                self._ahead[config.scheduler] = max(0, made - due)
                self._make(config.scheduler, due - made)

    def begin_epoch(self) -> None:
        """Count the batches of schedules with a frequency from here, as Lightning does."""
        progress = self._run.progress
        self._before = progress.steps_before(progress.epochs) if progress is not None else 0
        if self.is_paced:
            self.keep_pace(True)  # StochasticWeightAveraging, for example, has replaced some

    def keep_pace(self, is_paced: bool) -> None:
        """Let schedulers follow the progress of all groups from now on, or leave them to Lightning."""
        self.is_paced, known, self.leads = is_paced, self.leads, {}
        for config in self._configs if is_paced else ():
            now = self._steps() if config.interval == "step" else epochs_stepped(self._run.trainer)
            self.leads[config.scheduler] = known.get(config.scheduler, (self._ahead.pop(config.scheduler, 0), now))

    @property
    def count_steps(self) -> bool:
        return self.is_paced and any(config.interval == "step" for config in self._configs)

    def step(self, interval: str = "step") -> None:
        """Call the module's hook until paced schedulers of an interval have reached the run's progress."""
        for config in self._configs if self.is_paced else ():
            if config.interval == interval:
                now = self._steps() if interval == "step" else self._run.trainer.current_epoch + 1
                lead, begun = self.leads.get(config.scheduler, (0, now))
                due = self._scheduled(config, now) - self._scheduled(config, begun) - lead
                self.leads[config.scheduler] = max(0, -due), now
                self._make(config.scheduler, due)

    def _scheduled(self, config: Any, moment: int) -> int:
        if config.interval == "epoch":
            return moment // int(config.frequency)
        return self._run.now().scheduled(config.frequency, moment - self._before)

    def _make(self, scheduler: Any, steps: int) -> None:
        for _ in range(steps):
            step_schedule(self._run.trainer, scheduler)

    def align(self, all_reduce_max: Callable[[list[int]], list[int]]) -> None:
        """Step schedulers, but no ReduceLROnPlateau, as far as any rank's, after a change of groups."""
        every = [config.scheduler for config in self._run.trainer.lr_scheduler_configs]
        schedulers = [e for e in every if isinstance(e, LRScheduler) and not isinstance(e, ReduceLROnPlateau)]
        counts = [count_of(each) for each in schedulers]
        for scheduler, own, most in zip(schedulers, counts, all_reduce_max(counts), strict=True):
            if scheduler in self.leads:
                lead, begun = self.leads[scheduler]
                self.leads[scheduler] = lead + most - own, begun
            for _ in range(most - own):
                scheduler.step()

    def counts_at(self, progress: Progress | None) -> list[tuple[int, ...]]:
        """Return schedulers' steps in the epoch, made and due at a progress: () if one counts none, [] if unpaced."""
        if not self.is_paced or progress is None:
            return []
        steps, configs = self._run.steps_at(progress), self._run.trainer.lr_scheduler_configs
        return [self._counts_at(config, steps) for config in configs]

    def _counts_at(self, config: Any, steps: int) -> tuple[int, ...]:
        if config.interval == "epoch" or config.scheduler not in self.leads:
            return ()
        lead, begun = self.leads[config.scheduler]
        return self._scheduled(config, begun) + lead, self._scheduled(config, steps)

    def finish(self) -> None:
        self.is_paced, self.leads, self._ahead = False, {}, {}

    @property
    def _configs(self) -> list[Any]:
        trainer = self._run.trainer
        automatic = trainer.lightning_module.automatic_optimization
        return [config for config in trainer.lr_scheduler_configs if automatic and not config.reduce_on_plateau]


def count_of(scheduler: Any) -> int:
    """Return a scheduler's own count; for a ChainedScheduler, that of the first in it."""
    while not hasattr(scheduler, "last_epoch"):
        scheduler = vars(scheduler)["_schedulers"][0]
    return int(scheduler.last_epoch)


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
