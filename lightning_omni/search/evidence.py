"""What is known in a search, and what follows from it: speeds, theory's proposals, what may be chosen.

Rule: what probes showed stays as it was told. What is made of it, that one counts as failed, stands beside it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_omni.methods import method_named, with_period
from lightning_omni.performance.constants import BLOCKS, TAIL
from lightning_omni.performance.exchanging import ExchangePattern
from lightning_omni.performance.forecast import Forecast, SampleEfficiency, Scaling, Setting, Theory, TrialResult
from lightning_omni.performance.head_cost import HeadCost
from lightning_omni.performance.measured import Measured
from lightning_omni.performance.profile import Prediction, Profile
from lightning_omni.protocol.wire_formats import wire_of
from lightning_omni.search import constants as c
from lightning_omni.search.experience import Experience
from lightning_omni.search.prior import Prior
from lightning_omni.search.rules import is_faster
from lightning_omni.search.space import wire_given
from lightning_omni.search.specification import SearchSpec, StepSearchSpec
from lightning_omni.serialization import Serializable


@dataclass(frozen=True)
class Observation:
    """What a probe showed, of both efficiencies; ``measured`` is None if nothing was timed."""

    tried: TrialResult
    measured: Measured | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"tried": self.tried.to_dict(), "measured": self.measured.to_dict() if self.measured else None}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Observation:
        """What `to_dict` gave."""
        measured = plain["measured"]
        return cls(TrialResult.from_dict(plain["tried"]), Measured.from_dict(measured) if measured else None)


@dataclass(frozen=True)
class GroupSpeed(Serializable):
    """How fast several groups have trained, by which the hardware model's speed of any groups is corrected.

    Attributes:
        setting: that they trained with.
        samples_per_second: of all groups together, at most.
    """

    setting: Setting
    samples_per_second: float


class Evidence:
    """What probes showed, and what follows from it.

    Attributes:
        observations: what probes showed, as it was told.
        rejected: why probes count as failed that came to their end, by number.

    Args:
        spec: what is searched.
        known: what was measured in earlier searches of the same run.
        prior: what was simulated of other tasks, in the place of theory; None for theory.
        group_speed: of groups that were chosen before and seemed slower than predicted; None if there were none.
    """

    def __init__(
        self,
        spec: SearchSpec,
        known: Sequence[Measured] = (),
        prior: Prior | None = None,
        group_speed: GroupSpeed | None = None,
    ) -> None:
        self.spec, self.known, self.prior, self.group_speed = spec, list(known), prior, group_speed
        self.rejected: dict[int, str] = {}
        most = spec.own.momentum if spec.own is not None else None
        self.theory = Theory(spec.basis, spec.scaling, most=most)
        if prior is not None:
            self.theory = Experience(spec.basis, spec.scaling, most=most, prior=prior)
        self.observations: list[Observation] = []
        self._fitted: tuple[int, Profile] | None = None
        self._rates: dict[Setting, float] = {}
        self._uneven: dict[Setting, bool] = {}
        self._may_be_uneven = False
        self._most: dict[tuple[int, str, str], float] = {}
        self._slower: float | None = None
        self._ways: list[Setting] | None = None
        self._patterns: dict[tuple[str, int, str, bool, tuple[str, int] | tuple[()]], ExchangePattern] = {}

    @property
    def scaling(self) -> Scaling:
        """Of learning rates."""
        return self.spec.scaling

    # --- Probes ------------------------------------------------------------------------------------------------------

    @property
    def tried(self) -> list[TrialResult]:
        """All probes so far; those whose loss rose, and those that were rejected, have that for a problem."""
        found = [each.tried for each in self.observations]
        if isinstance(self.spec, StepSearchSpec) or self.prior is not None:
            return found
        found = [
            replace(each, problem="the loss rose") if not each.has_failed and _rose(each) else each for each in found
        ]
        for number, why in self.rejected.items():
            found[number] = replace(found[number], problem=why)
        return found

    @property
    def measured(self) -> list[Measured]:
        """All step times that are known."""
        return [*self.known, *(each.measured for each in self.observations if each.measured is not None)]

    @property
    def profile(self) -> Profile | None:
        """The hardware model, once something was timed."""
        measured = self.measured
        if not measured:
            return None
        if self._fitted is None or self._fitted[0] != len(measured):
            profile = Profile.fit(measured)
            self._fitted = (len(measured), profile)
            self._may_be_uneven = speeds_differ(measured) and is_faster(profile.largest_gain_of_split, 1.0)
            self._rates.clear()
            self._uneven.clear()
            self._most.clear()
            self._slower = self._ways = None
            if isinstance(self.theory, Experience):
                self.theory = replace(self.theory, scatter=scatter(measured))
        return self._fitted[1]

    def throughput(self, setting: Setting) -> float:
        """Samples per second that are to be expected; 1.0 as long as nothing was timed."""
        if self.profile is None:
            return 1.0
        key = replace(setting, momentum=0.0, lr=0.0, further=())
        if key not in self._rates and self.prior is not None:  # of hundreds
            self._rates[key] = self._modelled(setting) * self._correction(setting)
        elif key not in self._rates:
            self._rates[key] = self.prediction(setting).samples_per_second.value
        return self._rates[key]

    def _modelled(self, setting: Setting) -> float:
        """Samples per second by the hardware model alone."""
        assert self.profile is not None
        return self.profile.samples_per_second(
            setting.groups,
            rebalance=setting.rebalance,
            exchanging=self._pattern(setting),
            all_reduce=setting.all_reduce or "fp32",
            head=self._head(setting),
        )

    def _correction(self, setting: Setting) -> float:
        """What the model's samples per second are multiplied by: 1, unless groups were seen to be slower than it says.

        Whatever it is that slows them down, a busy server or a lock in the user's data, it is taken to do so to all
        settings with groups: one that it spares is not known before it was tried, and trying costs.
        """
        seen = self.group_speed
        if setting.groups == 1 or seen is None:
            return 1.0
        if self._slower is None:
            self._slower = min(1.0, seen.samples_per_second / self._modelled(seen.setting))
        return self._slower

    @property
    def corrected(self) -> list[str]:
        """For the user: how much slower than predicted groups were, if they clearly were."""
        seen = self.group_speed
        if seen is None:
            return []
        rate, predicted = seen.samples_per_second, self._modelled(seen.setting)
        text = f"{seen.setting.groups} groups have trained at most {rate:.3g} samples per second"
        return [f"{text}, and {predicted:.3g} were predicted"] if is_faster(predicted, rate) else []

    def most(self, setting: Setting) -> float:
        """Samples per second that no way of exchanging can exceed, with as many groups that average gradients so."""
        assert self.profile is not None
        key = setting.groups, setting.all_reduce or "fp32", setting.merged
        if key not in self._most:
            none = 0 if self.profile.nbytes else None
            free = ExchangePattern(period=sys.maxsize, push=none, pull=none)
            ways = (False, True) if self.spec.space.rebalance else (False,)
            head = self._head(setting)
            self._most[key] = self._correction(setting) * max(
                self.profile.samples_per_second(
                    setting.groups, rebalance=how, exchanging=free, all_reduce=key[1], head=head and head.at_least
                )
                for how in ways
            )
        return self._most[key]

    def prediction(self, setting: Setting) -> Prediction:
        """What the hardware model says of a setting, corrected by what was seen of groups."""
        assert self.profile is not None
        pattern, all_reduce = self._pattern(setting), setting.all_reduce or "fp32"
        period = setting.period if pattern is None else None
        found = self.profile.predict(
            setting.groups,
            rebalance=setting.rebalance,
            period=period,
            exchanging=pattern,
            all_reduce=all_reduce,
            head=self._head(setting),
        )
        factor = self._correction(setting)
        return found if factor == 1 else found.faster(factor)

    def loading(self, bottleneck: str) -> float:
        """If computation is what takes longest, the part of it that waits for data, where that is most; 0 otherwise."""
        share = self.measured[-1].loading_share if bottleneck == "compute" and self.measured else 0.0
        return share if share > 1 / 2 else 0.0

    def _pattern(self, setting: Setting) -> ExchangePattern | None:
        """How a setting's groups exchange; None for the run's own way."""
        if setting.groups == 1 or not setting.method:
            return None
        head = self._head(setting)
        shared = (setting.merged, setting.groups) if head is not None else ()
        key = setting.method, setting.period, setting.wire, setting.overlap, shared
        if key not in self._patterns:
            assert self.profile is not None
            method = with_period(method_named(setting.method), setting.period)
            wire = wire_given(setting.wire) if setting.wire else "fp32"
            nbytes = self.profile.nbytes if head is None else head.body
            found = ExchangePattern.of(method, wire, setting.overlap, nbytes)
            self._patterns[key] = found if head is None else head.added_to(found)
        return self._patterns[key]

    def _head(self, setting: Setting) -> HeadCost | None:
        """What the submodule costs that a setting's groups have merged; None for none, or if that is not known."""
        profile = self.profile
        if setting.groups == 1 or profile is None or setting.merged not in profile.heads:
            return None
        rows = profile.batch_size * profile.ranks / setting.groups
        wire_format = wire_of(wire_given(setting.wire or "fp32"))
        return HeadCost(profile.heads[setting.merged], profile.nbytes, rows, wire_format)

    @property
    def unseen_heads(self) -> list[str]:
        """Submodules that might be merged, but of which it could not be seen what that would take."""
        profile = self.profile
        return [name for name in self.spec.space.merged if profile is not None and name not in profile.heads]

    def efficiency(self) -> SampleEfficiency:
        """Samples that settings need, from theory and the probes."""
        if self.prior is not None:  # the run's own batches are not compared with any
            return SampleEfficiency(self.theory)
        return SampleEfficiency.of(self.theory, self.tried, self.further_place if self.spec.space.further else None)

    def further_place(self, setting: Setting) -> list[float]:
        """Coordinates of a setting in dimensions of a user's own."""
        return [each.coordinate(setting, self) for each in self.spec.space.further]

    def forecast(self) -> Forecast:
        """Time to the target of any setting, from what is known so far."""
        self.profile  # noqa: B018 - what is known of samples depends on how step times scatter
        return Forecast(self.efficiency(), self.throughput, None, [each.setting for each in self.tried])

    def divergence_threshold(self, setting: Setting) -> float:
        """The training loss above which a run with that setting is lost: half of what its probe gained is gone.

        Batches whose losses scatter do not make it lost. Probes of as many groups count, or all, if there was none of
        these. NaN if all failed.
        """
        sound = [each for each in self.tried if not each.has_failed]
        tried = [each for each in sound if each.setting.groups == setting.groups] or sound
        if not tried:
            return math.nan
        level, first = max(map(_level, tried)), tried[0].first_loss
        return level + max(c.LOST * (first - level), c.NOISY * abs(level), c.SCATTERED * _scatter_of_losses(tried))

    @property
    def learnt_below(self) -> float:
        """The training loss below which a run has learnt something since its first batches; NaN if they failed.

        It is the mean of the last of these, less its standard error.
        """
        first = self.tried[0]
        if first.has_failed:
            return math.nan
        counted = max(1.0, len(first.losses) * TAIL / BLOCKS)
        return _level(first) - _scatter_of_losses([first]) / math.sqrt(counted)

    def gain(self, number: int) -> float:
        """By how much lower the loss of a probe was than that of the first.

        They trained on the same samples, so that the difference is exact to a per cent where the losses are not.
        """
        first, other = self.tried[0], self.tried[number]
        if first.has_failed or other.has_failed:
            return -math.inf if other.has_failed else math.inf
        until = min(first.end, other.end)
        was, is_now = (float(each.blocks(until)[2:].mean()) for each in (first, other))
        return was - is_now

    # --- Settings ----------------------------------------------------------------------------------------------------

    def is_uneven(self, setting: Setting) -> bool:
        """Whether proportional batches make a setting faster by more than a trifle."""
        profile = self.profile
        if not self.spec.space.rebalance or profile is None or setting.groups == len(profile.speeds):
            return False
        key = replace(setting, momentum=0.0, lr=0.0, rebalance=False, further=())
        if key not in self._uneven:
            split, plain = (replace(key, rebalance=how) for how in (True, False))
            self._uneven[key] = self._may_be_uneven and is_faster(self.throughput(split), self.throughput(plain))
        return self._uneven[key]

    def groups(self) -> list[int]:
        """Numbers of groups that are worth a thought: more of them have to be faster than fewer."""
        if self.profile is None:
            return list(self.spec.space.groups)
        kept: list[int] = []
        fastest = 0.0
        for number in self.spec.space.groups:
            rate = self.throughput(self.as_it_would_be(replace(self.spec.start, groups=number, period=self.period)))
            if number == 1 or is_faster(rate, fastest):
                kept.append(number)
                fastest = max(fastest, rate)
        return kept

    @property
    def period(self) -> int:
        """Local steps between two exchanges, unless others are asked for."""
        own, allowed = self.spec.start.period, self.spec.space.period
        return own if not allowed or own in allowed else min(allowed)

    def proposal(self, groups: int, factor: float = 1.0) -> Setting:
        """What theory proposes for that many groups."""
        if groups == self.theory.start.groups:
            setting = replace(self.theory.start, lr=self.theory.start.lr * factor, period=self.period)
        else:
            setting = self.theory.setting(groups, period=self.period, factor=factor)
        start = self.spec.start
        alike = replace(start, groups=setting.groups, momentum=setting.momentum, lr=setting.lr, period=setting.period)
        if alike.updates_per_batch != groups:  # a method that averages
            alike = replace(
                alike, lr=self.scaling.lr(alike.updates_per_batch, alike.momentum, self.theory.step * factor)
            )
        return self._within(alike)

    def stepped(self, factor: float) -> Setting:
        """What the run trains with, in larger or smaller steps."""
        start = self.spec.start
        return self._within(replace(start, lr=start.lr * factor, period=self.period))

    def setting(
        self, groups: int, momentum: float, step: float, period: int | None = None, like: Setting | None = None
    ) -> Setting:
        """The setting of that step, in numbers of a few digits.

        Args:
            groups: of the setting.
            momentum: of the setting.
            step: see `Scaling`.
            period: local steps between two exchanges; None for what is usual here.
            like: what has the same method, wire format and further values; None for what the search starts from.
        """
        momentum, like = round(momentum, 2), like or self.spec.start
        setting = replace(like, groups=groups, momentum=momentum, rebalance=False, period=period or self.period)
        lr = float(f"{self.scaling.lr(setting.updates_per_batch, momentum, step):.3g}")
        return self._within(replace(setting, lr=lr))

    def as_it_would_be(self, setting: Setting) -> Setting:
        """With proportional batches where they pay."""
        return replace(setting, rebalance=self.is_uneven(setting))

    def _within(self, setting: Setting) -> Setting:
        return self.spec.space.holds(self.as_it_would_be(setting))

    def candidates(self) -> list[Setting]:
        """What can be chosen: what was tried, and what theory proposes for each number of groups."""
        if self.prior is not None:
            profile = self.profile
            if self._ways is None:
                self._ways = self._ways_by_prior(profile)
            return list(self._ways)
        tried = self.tried
        sound = [each.setting for each in tried if not each.has_failed]
        if tried and 1 not in {each.groups for each in sound}:
            sound = []
        proposed = [self.proposal(groups, factor) for groups in self.groups() if (factor := self.largest_step(groups))]
        return list(dict.fromkeys([*map(self.as_it_would_be, sound), *proposed])) or [self.spec.start]

    def _ways_by_prior(self, profile: Profile | None) -> list[Setting]:
        """Every way in which groups may exchange, of those whose cost is known.

        Without the all-reduce formats that no group can be clearly faster by: where links are fast that is four ways
        out of five, of which no more has to be found out.
        """
        space, start = self.spec.space, self.spec.start
        if profile is not None:
            formats = [each for each in space.all_reduce if each == start.all_reduce or _pays(profile, each)]
            space = replace(space, all_reduce=tuple(formats))
        ways = space.ways(start, self._suggested)
        ranks = profile.ranks if profile is not None else math.inf
        heads = {"", *(profile.heads if profile is not None else ())}
        ways = [each for each in ways if each.groups == 1 or each.merged in heads]
        return [each for each in ways if each.groups < ranks or each.all_reduce == start.all_reduce]

    def _suggested(self, setting: Setting) -> Setting:
        """The same with the momentum and rate that suited such a setting best, of those that are allowed."""
        assert isinstance(self.theory, Experience)
        best, holds = self.theory.suggested(setting), self.spec.space.holds
        if (momentum := holds(best).momentum) != best.momentum:  # a step as large
            lr = self.scaling.lr(best.updates_per_batch, momentum, self.scaling.step(best))
            best = replace(best, momentum=momentum, lr=lr)
        return holds(best)

    def largest_step(self, groups: int) -> float:
        """By what the user's step has to be multiplied with that many groups; 0 if they are out of the question.

        One group is what the user knows: unless it diverges its steps are theirs, and others have to be seen beside it.
        If several groups diverged, the largest steps that did not are taken.
        """
        tried = self.tried
        if not tried:
            return 1.0
        alone = [each for each in tried if each.setting.groups == 1]
        if groups == 1:
            return 1.0 if any(not each.has_failed for each in alone) or not alone else 1 / c.SMALLER
        several = [each for each in tried if each.setting.groups > 1]
        if not alone or all(each.has_failed for each in several):
            return 0.0
        if not any(each.has_failed for each in several):
            return 1.0
        return min(self.scaling.step(each.setting) / self.theory.step for each in several if not each.has_failed)


def _pays(profile: Profile, all_reduce: str) -> bool:
    """Whether a format of averages might make any group faster by more than a trifle."""
    return is_faster(profile.largest_gain(all_reduce), 1.0)


def _rose(tried: TrialResult) -> bool:
    """Whether the loss is higher at the end than at the beginning, by more than noise."""
    groups = tried.setting.groups
    if len(tried.losses) < 4 * groups:
        return False
    first, last = (float(np.mean(part)) for part in (tried.losses[:groups], tried.losses[-3 * groups :]))
    return last > first + c.RISE * abs(first)


def _level(tried: TrialResult) -> float:
    """The loss at which it ended."""
    return float(tried.blocks(tried.end)[-TAIL:].mean())


def _scatter_of_losses(tried: Sequence[TrialResult]) -> float:
    """Standard deviation of a batch's loss about what is learnt meanwhile: by the differences of successive ones."""
    differences = np.concatenate([np.diff(each.losses) for each in tried])
    return float(np.sqrt(np.mean(differences**2) / 2)) if len(differences) else 0.0


def scatter(measured: Sequence[Measured]) -> float:
    """How much ranks' step times vary about each rank's mean: their coefficient of variation.

    Args:
        measured: of the same ranks.
    """
    relative = [np.array(row) / np.mean(row) for each in measured for row in each.own]
    return float(np.concatenate(relative).std())


def mean_error(measured: Sequence[Measured]) -> float:
    """The standard error of a rank's mean step time, as a part of it, by how all of them vary.

    Args:
        measured: of the same ranks.
    """
    return scatter(measured) / math.sqrt(sum(len(each.own[0]) for each in measured))


def speeds_differ(measured: Sequence[Measured]) -> bool:
    """Whether ranks differ in speed by more than the scatter of their steps explains.

    Args:
        measured: of the same ranks.
    """
    ranks = len(measured[0].own)
    costs = [
        np.concatenate([np.array(each.own[rank]) / np.array(each.samples[rank]) for each in measured])
        for rank in range(ranks)
    ]
    means = np.array([cost.mean() for cost in costs])
    relative = np.concatenate([cost / cost.mean() for cost in costs])
    scatter = ((relative - 1) ** 2).sum() / max(1, len(relative) - ranks)
    errors = means.mean() * np.sqrt(scatter / np.array([len(cost) for cost in costs]))
    return bool((((means - means.mean()) / np.maximum(errors, 1e-12)) ** 2).mean() > c.CLEARLY)
