"""A fit that is tuned: what the parts of a tuner know of it in common, and its time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_omni.optimizer.world import World
from lightning_omni.performance.forecast import Setting
from lightning_omni.protocol.progress import ReferenceBatch
from lightning_omni.report import Round, RunTimes
from lightning_omni.search import Choice, Dimension, Search, TrainedSegment
from lightning_omni.search import constants as c
from lightning_omni.strategy.declared import callbacks_of, loader_of
from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.trace import reaches
from lightning_omni.tuner.flatness import TrainingLosses
from lightning_omni.tuner.hyperparameters import Hyperparameters
from lightning_omni.tuner.state import Command, TunerState
from lightning_omni.tuner.tunable import batch_size_of, check_tunable

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


@dataclass(frozen=True)
class TunerOptions:
    """What a tuner was told; see `OmniTunerHooks`, whose arguments these are.

    Attributes:
        is_lower_better: of the monitored metric.
        further: dimensions of a user's own, of ``space``.
    """

    target: float | None
    monitor: str
    is_lower_better: bool
    budget: float
    space: Mapping[str, Any]
    further: tuple[Dimension, ...]
    retune_every: int | None
    seed: int

    def is_reached(self, value: float) -> bool:
        """Whether a value of the monitored metric is the target, or better."""
        return self.target is not None and reaches("loss" if self.is_lower_better else "", value, self.target)


class TunedRun:
    """One fit.

    Args:
        trainer: whose strategy is an OmniStrategy.
        module: what is trained.
        options: of the tuner.
        info: logs a message for the user, on rank 0.

    Attributes:
        state: what checkpoints keep.
        rounds: all searches so far, on rank 0.
        choice: what was chosen last, on rank 0.
        problem: why nothing is searched.
        folder: of the report, on rank 0; None if there is none.
        has_ended_epoch: whether an epoch has just ended, which the Trainer does not count yet.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, options: TunerOptions, info: Callable[[str], None]
    ) -> None:
        self.trainer, self.module, self.options, self.info = trainer, module, options, info
        assert isinstance(trainer.strategy, OmniStrategyHooks)
        self.strategy: OmniStrategyHooks = trainer.strategy
        self.state = TunerState()
        self.rounds: list[Round] = []
        self.choice: Choice | None = None
        self.problem = ""
        self.folder: Path | None = None
        self._began = 0.0
        self.has_ended_epoch = False

    @property
    def world(self) -> World:
        """This rank's place among all ranks."""
        return self.strategy.world

    @property
    def own(self) -> Setting:
        """The user's own setting, once it is known."""
        assert self.state.own is not None
        return self.state.own

    @property
    def setting(self) -> Setting:
        """What the run trains with, once a search has ended."""
        assert self.state.setting is not None
        return self.state.setting

    @property
    def speaks(self) -> bool:
        """Whether this rank decides."""
        return bool(self.trainer.is_global_zero)

    def broadcast(self, number: int) -> int:
        """What rank 0 has found: a number, 0 or more. All ranks ask."""
        return self.world.all_reduce_max([number if self.speaks else 0])[0]

    def broadcast_command(self, command: Command | None) -> Command | None:
        """What rank 0 says is to be done, if anything. All ranks ask.

        Args:
            command: of rank 0; of others it does not matter.
        """
        text = self.world.broadcast_text(json.dumps(command.to_dict()) if command is not None else "")
        return Command.from_dict(json.loads(text)) if text else None

    def broadcast_segments(self, segments: list[TrainedSegment]) -> list[TrainedSegment]:
        """What rank 0 knows of settings that were trained with. All ranks ask.

        Args:
            segments: of rank 0; of others it does not matter.
        """
        text = self.world.broadcast_text(json.dumps([each.to_dict() for each in segments]))
        return [TrainedSegment.from_dict(each) for each in json.loads(text)]

    def hyperparameters(self) -> Hyperparameters:
        """The optimizer, if this fit can be tuned at all.

        Raises:
            ConfigurationError: it cannot.
        """
        check_tunable(self.trainer)
        return Hyperparameters.of(self.trainer)

    # --- Its searches -------------------------------------------------------------------------------------------------

    @property
    def searches(self) -> list[Search]:
        """All so far."""
        return [each.search for each in self.rounds]

    @property
    def may_change_inside(self) -> bool:
        """Whether groups can change inside an epoch: not if its samples were dealt out beforehand."""
        return self.strategy.epochs.leases is not None

    def may_change_again(self, epoch: int) -> bool:
        """Whether the run goes on long enough to be timed in an epoch, by its number, and to be changed then."""
        return epoch + (not self.may_change_inside) < self.epochs

    def remember(self, search: Search, seconds: float) -> None:
        """A search has begun, when the run had trained for so long."""
        self.rounds.append(Round(search, self.trainer.current_epoch, seconds))

    def conclude(self, search: Search) -> Command:
        """What is to be trained with, when a search is over; and why."""
        self.choice = search.choice()
        self.state.segments = search.segments
        setting = replace(self.choice.setting, groups=min(self.choice.setting.groups, len(self.world.live_ranks)))
        return replace(
            Command.to_form(search, setting),
            divergence_threshold=search.divergence_threshold,
            learnt_below=search.learnt_below,
            why=self.choice.why,
        )

    def forget(self) -> None:
        """What was found of other ranks does not hold for these."""
        self.state = replace(
            self.state,
            setting=None,
            scaled=1.0,
            speeds=[],
            unfinished=False,
            segments=[],
            refuted=False,
            divergence_threshold=math.nan,
            learnt_below=math.nan,
            before_trial=None,
            losses=TrainingLosses(math.nan),
            forgotten=self.spent,
        )
        self.rounds = []

    # --- Its time -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Training begins, or goes on after something else."""
        self._began = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """So much was no training."""
        self._began += seconds

    @property
    def seconds(self) -> float:
        """Of training so far, without those of searches."""
        return self.state.trained + (time.perf_counter() - self._began if self._began else 0.0)

    @property
    def spent(self) -> float:
        """Seconds of all searches of the run; rank 0's count."""
        return self.state.forgotten + sum(each.overhead for each in self.searches)

    @property
    def times(self) -> RunTimes:
        """Where the run's time went."""
        return RunTimes(self.seconds, self.spent, self.state.at_target)

    # --- Its length ---------------------------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """Batches in one optimizer step."""
        return int(self.trainer.accumulate_grad_batches)

    def batch(self, ranks: int) -> int:
        """Samples in one synchronous step of so many ranks."""
        return ReferenceBatch(ranks, batch_size_of(loader_of(self.trainer)), self.window).samples

    @property
    def batches(self) -> float:
        """Of each rank, in an epoch; 1 if there is no telling."""
        batches = self.trainer.fit_loop.max_batches
        return max(1, batches) if math.isfinite(batches) else 1

    @property
    def epochs(self) -> float:
        """Epochs that the run will train."""
        return float(min(self._limits, default=max(c.UNLIMITED, 2 * (self.trainer.current_epoch + 1))))

    @property
    def ends_by_time(self) -> bool:
        """Whether ``max_time`` alone ends the run."""
        return not self._limits and math.isfinite(self.seconds_left)

    @property
    def _limits(self) -> list[float]:
        """Epochs after which the run ends."""
        most, steps = self.trainer.max_epochs, self.strategy.epochs.max_steps
        by_epochs = [] if most in (None, -1) else [float(most or 0)]
        return by_epochs if steps == -1 else [*by_epochs, steps * self.window / self.batches]

    @property
    def samples_per_epoch(self) -> float:
        """Of all ranks that are left."""
        return self.batches * self.batch(len(self.world.live_ranks)) / self.window

    @property
    def horizon(self) -> float:
        """Samples that are left to train with what is chosen now."""
        epochs = self.strategy.epochs
        begun = self.trainer.current_epoch + self.has_ended_epoch  # which Lightning counts a little later
        begun += not self.may_change_inside  # the epoch that is timed
        trained = float(epochs.samples) if epochs.is_open and self.may_change_inside else 0.0
        return max(0.0, (self.epochs - begun) * self.samples_per_epoch - trained)

    @property
    def seconds_left(self) -> float:
        """Until ``max_time`` ends the run; infinite if it has none."""
        timers = [each for each in callbacks_of(self.trainer) if hasattr(each, "time_remaining")]
        left = [each.time_remaining() for each in timers]
        return min((each for each in left if each is not None), default=math.inf)

    # --- In a checkpoint ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was observed, as plain lists: a resumed run replays it and goes on where it was."""
        return {
            **self.state.to_dict(),
            "searches": [each.to_dict() for each in self.searches],
            "when": [(each.epoch, each.seconds_run) for each in self.rounds],
            "after": [sorted(each.measured_after.items()) for each in self.rounds],
            "spent": self.spent,
            "trained": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave."""
        self.state = TunerState.from_dict(state)
        rounds = zip(state["searches"], state["when"], state["after"], strict=True)
        self.rounds = [
            Round(Search.from_dict(each), when[0], when[1], dict(after))
            for each, when, after in rounds
            if "phase" in each  # in earlier versions there was none
        ]
        self.choice = last_choice(self.searches) if self.speaks else None
        if self._began:  # under way, as where a learning-rate finder goes back: what was trained is in the state
            self.begin()


def last_choice(searches: list[Search]) -> Choice | None:
    """What the last search has chosen."""
    return searches[-1].choice() if searches else None


__all__ = ["TunedRun", "TunerOptions", "last_choice"]
