"""The commands of a tuner and its state, as plain values for messages between ranks and for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_omni.serialization import Serializable
from lightning_omni.topology import Topology
from lightning_omni.tuning.callback.guards.flatness import TrainingLosses
from lightning_omni.tuning.model.forecast import Setting
from lightning_omni.tuning.search import Search, TrainedSegment


@dataclass(frozen=True)
class Command(Serializable):
    """A command of rank 0 to all ranks.

    Attributes:
        setting: the setting to train with from now on.
        speeds: samples per second of each rank; None if unknown.
        by_speed: whether groups are formed by them.
        scale: factor of the learning rates.
        divergence_threshold: the training loss above which the run has diverged with that setting; NaN if unknown.
        learnt_below: the training loss below which it has learnt something with that setting; NaN if unknown.
        why: the reasons of the choice.
        error: the message of an error that every rank raises; empty if there is none.
    """

    setting: Setting
    speeds: Mapping[int, float] | None = None
    by_speed: bool = False
    scale: float = 1.0
    divergence_threshold: float = math.nan
    learnt_below: float = math.nan
    why: str = ""
    error: str = ""

    @classmethod
    def to_form(cls, search: Search, setting: Setting) -> Command:
        """Return the command to train with a setting, in groups of similar speed where these are faster."""
        profile = search.profile
        if len(profile.speeds) < setting.groups:
            return cls(setting)
        topology = search.prediction(setting).topology
        by_speed = topology != Topology.of(topology.ranks, setting.groups)
        return cls(setting, speeds=dict(zip(topology.ranks, profile.speeds, strict=True)), by_speed=by_speed)


@dataclass
class TunerState(Serializable):
    """The state of a tuned run in checkpoints, beside its searches.

    Attributes:
        setting: the setting that the run trains with; None before a choice.
        own: the user's own setting.
        reference: samples of the batch that momentum and learning rate belong to.
        scaled: factor of the user's learning rates.
        ranks: number of ranks.
        speeds: rank and samples per second, if groups were formed by speed.
        unfinished: whether a search is under way.
        rounds: number of adopted choices.
        checked: value of ``rounds`` when speed was last compared with the forecast.
        segments: the trained segments.
        refuted: whether groups have seemed not to pay once, so that one group was timed again; next time they are given
            up.
        divergence_threshold: the training loss above which the run has diverged; NaN if unknown.
        learnt_below: the training loss below which it has learnt something since the choice; NaN once it has.
        is_final: whether the run stays in one group: it had diverged with its choice, had learnt too slowly, or groups
            were not fast enough.
        before_trial: the setting to restore if a trial is no better; None if there is no trial.
        losses: the training loss with the setting, window by window.
        samples: samples of the windows.
        forgotten: seconds of searches that are not kept.
        at_target: all seconds, and those of them for tuning, when the target was reached; None before that.
        trained: seconds of training before the run was resumed.
        reached: seconds of training, and the monitored metric, of each validation.
    """

    setting: Setting | None = None
    own: Setting | None = None
    reference: float = 0.0
    scaled: float = 1.0
    ranks: int = 0
    speeds: list[tuple[int, float]] = field(default_factory=list)
    unfinished: bool = False
    rounds: int = 0
    checked: int = 0
    segments: list[TrainedSegment] = field(default_factory=list)
    refuted: bool = False
    divergence_threshold: float = math.nan
    learnt_below: float = math.nan
    is_final: bool = False
    before_trial: Setting | None = None
    losses: TrainingLosses = field(default_factory=lambda: TrainingLosses(math.nan))
    samples: float = 0.0
    forgotten: float = 0.0
    at_target: tuple[float, float] | None = None
    trained: float = 0.0
    reached: list[tuple[float, float]] = field(default_factory=list)


__all__ = ["Command", "TunerState"]
