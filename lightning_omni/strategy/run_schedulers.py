"""The schedulers of a run, which follow the progress of all groups: where they count from, and when they keep pace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning_omni.protocol.progress import Progress
from lightning_omni.strategy import _private
from lightning_omni.strategy.run_progress import RunProgress
from lightning_omni.strategy.scheduler_states import Counts, Standing, caught_up, standing
from lightning_omni.strategy.schedulers import Pacer, Schedule, StepCounts, arrive, counts_of, reach_all

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class RunSchedulers:
    """The schedulers of one fit after another: where they count from, and whether they keep pace.

    Args:
        run: how far it is.
        steps: the same in optimizer steps as DDP would count them, as far as this rank knows.

    Attributes:
        bases: where schedulers that keep pace count from.
        synchronized: where they stood when all groups had last exchanged all that they had trained.
    """

    def __init__(self, run: RunProgress, steps: Callable[[], int]) -> None:
        self._run, self._steps = run, steps
        self._trainer: Trainer | None = None
        self._pacer: Pacer | None = None
        self._counts = StepCounts()
        self._resumed: Sequence[Sequence[int]] = ()
        self.bases: Schedule = {}
        self.synchronized: dict[Any, Standing | None] = {}

    def connect(self, trainer: Trainer) -> None:
        """A fit is being set up."""
        self._trainer = trainer

    def resume(self, counts: Sequence[Sequence[int]]) -> None:
        """The fit goes on from a checkpoint, where `counts_at` has said this."""
        self._resumed = counts

    def start(self, count_from_here: bool) -> None:
        """The first epoch is about to begin: schedulers arrive where the run goes on.

        Args:
            count_from_here: whether those that have to arrive count from there.
        """
        counts, self._resumed = arrive(self._configs, self._resumed, self._counts), ()
        if count_from_here:
            self.bases = {**self.bases, **{each: (count, self._steps()) for each, count in counts.items()}}

    def keep_pace(self, is_paced: bool) -> None:
        """From now on schedulers follow the run's common progress.

        Args:
            is_paced: whether they need anything for it; else it is noted where they count from.
        """
        trainer = self._trainer
        assert trainer is not None
        by_hand = not trainer.lightning_module.automatic_optimization
        pacer = Pacer(
            self._configs,
            self._steps,
            lambda: trainer.current_epoch + 1,
            (lambda: _private.batches_begun(trainer)) if by_hand else None,
            lambda frequency, steps: self._run.now().scheduled(frequency, steps),
            self._counts,
        )
        self.bases = pacer.count_from(self.bases)
        if is_paced:
            pacer.pace()
            self._pacer = pacer
        self.note_synchronized()

    def note_synchronized(self) -> None:
        """All that groups have trained is exchanged."""
        self.synchronized = {each: standing(each) for each in self._pacer.schedulers} if self._pacer else {}

    @property
    def counting(self) -> Schedule:
        """`bases` of those that count steps: one that is told where to go is where it was told."""
        return {each: base for each, base in self.bases.items() if not self._counts.are_told(each)}

    @property
    def are_paced(self) -> bool:
        """Whether they keep pace."""
        return self._pacer is not None

    @property
    def are_others(self) -> bool:
        """Whether callbacks or hooks have put others in their place, as StochasticWeightAveraging does."""
        return self._pacer is not None and not self._pacer.has(self._configs)

    def keep_up(self) -> None:
        """A batch has ended."""
        if self._pacer is not None:
            self._pacer.keep_up()

    def catch_up(self) -> None:
        """An epoch has ended."""
        if self._pacer is not None:
            self._pacer.catch_up()

    def align(self, all_reduce_max: Callable[[list[int]], list[int]]) -> None:
        """Ranks of different groups are one group from here on: they count alike, or each would have another rate.

        They keep pace no longer.

        Args:
            all_reduce_max: the largest of each number over all ranks.
        """
        self.release()
        if counts := counts_of(self._configs, self._counts):
            reach_all(self._configs, all_reduce_max(counts), self._counts)

    def catch_up_in(self, checkpoint: dict[str, Any], progress: Progress | None) -> list[Counts]:
        """A checkpoint has schedulers where they are to be at its moment; it is changed in place.

        Ranks that save may not have heard of all that its weights have taken in, or have trained what those have not.

        Args:
            checkpoint: Lightning's.
            progress: of the run at that moment.

        Returns:
            What they count there, and what they are to count: see `Pacer.counts_at`.
        """
        if self._pacer is None or progress is None or self._trainer is None:
            return []
        counts = self._pacer.counts_at(self._configs, self._run.steps_at(progress))
        schedulers = [config.scheduler for config in self._configs]
        return caught_up(checkpoint, schedulers, self._trainer.optimizers, counts, self.synchronized)

    def release(self) -> None:
        """They keep pace no longer, and are as they were."""
        if self._pacer is not None:
            self._pacer.release()
            self._pacer = None

    def finish(self) -> None:
        """The fit has ended, well or badly."""
        self.release()
        self.bases, self.synchronized = {}, {}

    def forget(self) -> None:
        """The run is torn down."""
        self.finish()
        self._counts.forget()
        self._trainer = None

    @property
    def _configs(self) -> list[Any]:
        """Lightning's."""
        assert self._trainer is not None
        return self._trainer.lr_scheduler_configs
