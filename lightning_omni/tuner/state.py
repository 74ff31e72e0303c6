"""What a tuner says, and what it remembers: as plain values, for messages between ranks and for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_omni.performance.forecast import Setting
from lightning_omni.search import Search, TrainedSegment
from lightning_omni.serialization import Serializable
from lightning_omni.topology import Topology
from lightning_omni.tuner.flatness import TrainingLosses


@dataclass(frozen=True)
class Command(Serializable):
    """What rank 0 says is to be done next.

    Attributes:
        setting: to train with from now on.
        speeds: samples per second of each rank, if they are known.
        by_speed: whether groups are formed by them.
        scale: by what learning rates are multiplied.
        divergence_threshold: the training loss above which the run has diverged with that setting; NaN if unknown.
        learnt_below: the training loss below which it has learnt something with that setting; NaN if unknown.
        why: of the choice.
        error: why nothing can go on; every rank raises it.
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
        """Trains with a setting: with groups of like speed where these are faster."""
        profile = search.profile
        if len(profile.speeds) < setting.groups:
            return cls(setting)
        topology = search.prediction(setting).topology
        by_speed = topology != Topology.of(topology.ranks, setting.groups)
        return cls(setting, speeds=dict(zip(topology.ranks, profile.speeds, strict=True)), by_speed=by_speed)


@dataclass
class TunerState(Serializable):
    """What checkpoints keep of a tuned run, beside its searches.

    Attributes:
        setting: that it trains with; None before something was chosen.
        own: the user's own setting.
        reference: samples of the batch that momentum and learning rate belong to.
        scaled: by what the user's learning rates were multiplied.
        ranks: how many the run has.
        speeds: rank and samples per second, of those by whose speed the groups were formed.
        unfinished: whether a search is under way.
        rounds: searches that were begun.
        checked: of these, the last one whose groups' speed was compared with the forecast.
        segments: what it has trained with, and how much longer than predicted that took.
        refuted: whether groups have seemed not to pay, so that one group was timed again. If they do so once more, they
            are given up.
        divergence_threshold: the training loss above which the run has diverged; NaN if unknown.
        learnt_below: the training loss below which it has learnt something since that was chosen; NaN once it has.
        is_final: whether the run went back to one group for good: it had diverged with what was chosen, learnt too
            slowly, or groups were not fast enough.
        before_trial: what the run returns to if the user's own setting, which is tried, is no better; else None.
        losses: with the setting, epoch by epoch.
        samples: that were trained in epochs whose losses were followed.
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
