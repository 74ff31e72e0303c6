"""The measurements of a run, and the speeds, costs and candidate settings that follow from them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from lightning_omni.json_dataclasses import Serializable
from lightning_omni.methods import method_named, with_period
from lightning_omni.tuning.model.constants import BLOCKS, TAIL
from lightning_omni.tuning.model.cost_model import ExchangePattern
from lightning_omni.tuning.model.forecast import Estimate
from lightning_omni.tuning.model.measurements import Measured, TrainedBatches
from lightning_omni.tuning.model.profile import Prediction, Profile
from lightning_omni.tuning.model.setting import Scaling, Setting
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.search.prior import Prior, PriorTheory
from lightning_omni.tuning.search.space import SearchSpec, compression_named

Array = np.ndarray[Any, Any]


def is_faster(rate: float, than: float) -> bool:
    return rate > c.FASTER * than


class SpeedResiduals:
    """A Gaussian process over log ratios of measured to predicted seconds, the errors of the hardware model.

    Its mean is zero, and its kernel is fixed. Settings are close if they have about as many groups and exchange about
    as often, in the same way.

    Example:
        >>> from lightning_omni.tuning.model.setting import Setting
        >>> trained = Setting(4, 0.6, 0.1, method="async_sgd")
        >>> residuals = SpeedResiduals([trained], [0.7], [0.001])
        >>> mean, deviation = residuals(trained)
        >>> round(mean, 2), deviation < 0.05
        (0.68, True)
        >>> 0.4 < residuals(Setting(8, 0.6, 0.1, method="local_sgd", period=4))[0] < mean
        True
    """

    def __init__(self, settings: Sequence[Setting], log_ratios: Sequence[float], variances: Sequence[float]) -> None:
        latest = {(*_place(each), *each.further): number for number, each in enumerate(settings)}
        kept = sorted(latest.values())  # the latest of settings with the same coordinates
        self._settings = [settings[number] for number in kept]
        if kept:
            noise = [max(variances[number], c.SEGMENT_ERROR**2) for number in kept]
            self._inverse = np.linalg.inv(self._kernel(self._settings, self._settings) + np.diag(noise))
            self._weights = self._inverse @ np.array([log_ratios[number] for number in kept])

    def __call__(self, setting: Setting) -> tuple[float, float]:
        if not self._settings:
            return 0.0, c.SPEED_ERROR
        near = self._kernel([setting], self._settings)[0]
        variance = c.SPEED_ERROR**2 - float(near @ self._inverse @ near)
        return float(near @ self._weights), math.sqrt(max(variance, 0.0))

    def _kernel(self, some: Sequence[Setting], others: Sequence[Setting]) -> Array:
        a, b = (np.array([_place(each) for each in settings]) for settings in (some, others))
        squares = ((a[:, None] - b[None]) ** 2).sum(-1)
        differing = [[len(dict({*one.further} ^ {*other.further})) for other in others] for one in some]
        squares += c.OTHER_VALUE**2 * np.array(differing)
        return np.asarray(c.SPEED_ERROR**2 * np.exp(-0.5 * squares))


def _place(setting: Setting) -> list[float]:
    """Return coordinates in which errors at distance 1 have a correlation of exp(-1/2)."""
    return [
        math.log(setting.groups) / math.log(c.NEAR_GROUPS),
        math.log(setting.period) / math.log(c.LARGEST_PERIOD),
        float(setting.overlap) * c.OTHER_WAY,
        float(setting.method.partition(":")[0] == "async_sgd") * c.OTHER_WAY,
    ]


@dataclass(frozen=True)
class Observation(Serializable):
    """The measurements of a run's first batches: their losses, their times, and the gradient noise scale.

    The noise scale, in samples, if it is known, is only reported.
    """

    batches: TrainedBatches
    measured: Measured
    noise_scale: float | None = None


@dataclass(frozen=True)
class TrainedSegment(Serializable):
    """The ratio of measured to predicted time of a segment that a run trained with a chosen setting.

    The ratio corrects the predictions of later fits of the hardware model. If one group is timed again because groups
    were slow, the speed is kept instead, and compared with the new prediction.

    Attributes:
        log_ratio: logarithm of the measured over the predicted seconds.
        samples_per_second: the measured speed if it is still to be compared; otherwise 0.
    """

    setting: Setting
    log_ratio: float
    variance: float
    samples_per_second: float = 0.0


class Evidence:
    """The measurements of a run, and the predictions that follow from them.

    Args:
        known: earlier measurements of the same ranks in one group, with other batches.
        observation: the measurements of the first batches; None if only the hardware is known.
        segments: the segments that the run has trained since.
    """

    def __init__(
        self,
        spec: SearchSpec,
        known: Sequence[Measured] = (),
        observation: Observation | None = None,
        segments: Sequence[TrainedSegment] = (),
    ) -> None:
        self.spec, self.observation = spec, observation
        self.known = list(known)
        self._given = list(segments)
        self._rates: dict[Setting, float] = {}
        self._bounds: dict[tuple[int, str], float] = {}

    @property
    def scaling(self) -> Scaling:
        return self.spec.scaling

    # --- Measurements ------------------------------------------------------------------------------------------------

    @property
    def measured(self) -> list[Measured]:
        return [*self.known, *([self.observation.measured] if self.observation is not None else [])]

    @cached_property
    def profile(self) -> Profile:
        return Profile.fit(self.measured)

    @cached_property
    def theory(self) -> PriorTheory:
        return PriorTheory(self.spec.start, self.spec.scaling, Prior.load(), scatter(self.measured))

    @cached_property
    def _may_be_uneven(self) -> bool:
        return speeds_differ(self.measured) and is_faster(self.profile.largest_gain_of_split, 1.0)

    def throughput(self, setting: Setting) -> float:
        key = replace(setting, momentum=0.0, lr=0.0)
        if key not in self._rates:  # a search requests hundreds of settings
            self._rates[key] = self.modelled_throughput(setting) * self._correction(setting)
        return self._rates[key]

    def modelled_throughput(self, setting: Setting) -> float:
        return self.profile.samples_per_second(
            setting.groups,
            rebalance=setting.rebalance,
            exchanging=self._pattern(setting),
            all_reduce=setting.all_reduce or "fp32",
        )

    @cached_property
    def segments(self) -> list[TrainedSegment]:
        ranks = self.profile.ranks  # some may have died since
        return [self._as_compared(each) for each in self._given if each.setting.groups <= ranks]

    def _as_compared(self, segment: TrainedSegment) -> TrainedSegment:
        if not segment.samples_per_second:
            return segment
        log_ratio = math.log(self.modelled_throughput(segment.setting) / segment.samples_per_second)
        return replace(segment, log_ratio=log_ratio, samples_per_second=0.0)

    @cached_property
    def residuals(self) -> SpeedResiduals:
        return SpeedResiduals(
            [each.setting for each in self.segments],
            [each.log_ratio for each in self.segments],
            [each.variance for each in self.segments],
        )

    def residual(self, setting: Setting) -> tuple[float, float]:
        """Return the expected log ratio of actual to modelled seconds of a setting, and its standard deviation.

        Both are 0 for one group with the run's own user-defined dimensions, which every choice times.
        """
        is_timed = setting.groups == 1 and setting.further == self.spec.start.further
        return (0.0, 0.0) if is_timed else self.residuals(setting)

    def _correction(self, setting: Setting) -> float:
        return math.exp(-self.residual(setting)[0]) if self.segments else 1.0

    @property
    def corrections(self) -> list[str]:
        """Return at most one sentence for the user: the latest groups that were clearly slower than predicted."""
        slow = [each for each in self.segments if each.setting.groups > 1 and is_faster(math.exp(each.log_ratio), 1.0)]
        if not slow:
            return []
        setting, predicted = slow[-1].setting, self.modelled_throughput(slow[-1].setting)
        text = (
            f"{setting.groups} groups have trained {predicted * math.exp(-slow[-1].log_ratio):.3g} samples per second"
        )
        return [f"{text}, and {predicted:.3g} were predicted"]

    def throughput_bound(self, setting: Setting) -> float:
        """Return the samples per second that a setting's groups would reach with a free exchange."""
        key = setting.groups, setting.all_reduce or "fp32"
        if key not in self._bounds:
            free = ExchangePattern(period=sys.maxsize, push=0, pull=0)
            ways = (False, True) if self.spec.space.rebalance else (False,)
            alike = [each for each in self.candidates if each.groups == setting.groups] if self.segments else []
            self._bounds[key] = max(map(self._correction, alike), default=1.0) * max(
                self.profile.samples_per_second(setting.groups, rebalance=how, exchanging=free, all_reduce=key[1])
                for how in ways
            )
        return self._bounds[key]

    def prediction(self, setting: Setting) -> Prediction:
        """Return the hardware model's prediction of a setting, corrected by the segments."""
        found = self.profile.predict(
            setting.groups,
            rebalance=setting.rebalance,
            exchanging=self._pattern(setting),
            all_reduce=setting.all_reduce or "fp32",
        )
        factor = self._correction(setting)
        return found if factor == 1 else found.faster(factor)

    def loading(self, bottleneck: str) -> float:
        """Return the part of computation that waits for data, if that is most of the bottleneck; 0 otherwise."""
        share = self.measured[-1].loading_share if bottleneck == "compute" else 0.0
        return share if share > 1 / 2 else 0.0

    def _pattern(self, setting: Setting) -> ExchangePattern | None:
        if setting.groups == 1 or not setting.method:
            return None
        return _pattern_of(setting.method, setting.period, setting.wire, setting.overlap, self.profile.model.nbytes)

    def log_time(self, setting: Setting) -> float:
        """Return the logarithm of the time to the target, up to a constant."""
        return self.theory(setting) - math.log(max(self.throughput(setting), 1e-12))

    def speed_up(self, setting: Setting, baseline: Setting) -> Estimate:
        """Return how many times faster than with a baseline a setting is expected to reach the target.

        The interval, of probability 0.8, covers the errors of speed and of samples.
        """
        # One group exchanges nothing, whatever the way.
        way = replace(baseline, momentum=setting.momentum, lr=setting.lr, rebalance=setting.rebalance)
        is_alone = setting.groups == baseline.groups == 1
        alike = replace(way, all_reduce=setting.all_reduce, further=setting.further) if is_alone else setting
        if alike == baseline:
            return Estimate(1.0, 1.0, 1.0)
        value = math.exp(self.log_time(baseline) - self.log_time(setting))
        rates = [self.prediction(each).samples_per_second for each in (setting, baseline)]
        errors = [math.log(rate.high / rate.low) / (2 * c.QUANTILE) for rate in rates]
        if replace(setting, rebalance=baseline.rebalance) != baseline:  # a split changes no samples
            errors += [self.theory.error(setting), self.theory.error(baseline)]
        width = math.exp(c.QUANTILE * math.hypot(*errors))
        return Estimate(value, value / width, value * width)

    # --- Losses ------------------------------------------------------------------------------------------------------

    @property
    def divergence_threshold(self) -> float:
        """Return the training loss above which the run has diverged; NaN if the first losses are not finite."""
        if self.observation is None or not self.observation.batches.is_finite:
            return math.nan
        batches = self.observation.batches
        level, gained = batches.level, batches.first_loss - batches.level
        return level + max(c.LOST * gained, c.CLEAR_CHANGE * abs(level), batches.scatter)

    @property
    def learnt_below(self) -> float:
        """Return the training loss below which the run has learnt since its first batches.

        It is NaN if these have no finite losses.
        """
        if self.observation is None or not self.observation.batches.is_finite:
            return math.nan
        batches = self.observation.batches
        counted = max(1.0, len(batches.losses) * TAIL / BLOCKS)
        return batches.level - batches.scatter / math.sqrt(counted)

    # --- Settings ----------------------------------------------------------------------------------------------------

    def gains_from_rebalance(self, setting: Setting) -> bool:
        is_single = setting.groups == len(self.profile.speeds)
        if not self.spec.space.rebalance or is_single or not self._may_be_uneven:
            return False
        split, plain = (replace(setting, rebalance=how, further=()) for how in (True, False))
        return is_faster(self.throughput(split), self.throughput(plain))

    @property
    def start(self) -> Setting:
        """Return the run's own setting, with proportional batches where they pay."""
        return self.with_rebalance(self.spec.start)

    def with_rebalance(self, setting: Setting) -> Setting:
        return replace(setting, rebalance=self.gains_from_rebalance(setting))

    @cached_property
    def candidates(self) -> tuple[Setting, ...]:
        """Return every way in which groups may exchange, if its cost is known.

        All-reduce formats that can make no group clearly faster are left out.
        """
        space, start, profile, own = self.spec.space, self.spec.start, self.profile, self.spec.start.all_reduce
        formats = [each for each in space.all_reduce if each == own or is_faster(profile.largest_gain(each), 1.0)]
        ways = replace(space, all_reduce=tuple(formats)).ways(start, self.suggested)
        return tuple(each for each in ways if each.groups < profile.ranks or each.all_reduce == own)

    @property
    def possible_groups(self) -> tuple[int, ...]:
        """Return the numbers of groups of the space that can exchange in some way."""
        possible = {each.groups for each in self.candidates}
        return tuple(groups for groups in self.spec.space.groups if groups in possible)

    def suggested(self, setting: Setting) -> Setting:
        """Return a setting with the best momentum and learning rate within the bounds."""
        best, holds = self.theory.suggested(setting), self.spec.space.holds
        if (momentum := holds(best).momentum) != best.momentum:  # the step stays the same
            lr = self.scaling.lr(best.updates_per_batch, momentum, self.scaling.step(best))
            best = replace(best, momentum=momentum, lr=lr)
        return holds(best)


@cache
def _pattern_of(name: str, period: int, wire: str, overlap: bool, nbytes: int) -> ExchangePattern:
    method = with_period(method_named(name), period)
    return ExchangePattern.of(method, compression_named(wire) if wire else "fp32", overlap, nbytes)


class PlannedEvidence(Evidence):
    """The evidence of a run on planned machines, whose profile is known."""

    def __init__(self, spec: SearchSpec, profile: Profile) -> None:
        super().__init__(spec, profile.measured)
        self.profile = profile  # known, not fitted


def scatter(measured: Sequence[Measured]) -> float:
    """Return the coefficient of variation of compute times about each rank's mean."""
    relative = [np.array(row) / np.mean(row) for each in measured for row in each.own]
    return float(np.concatenate(relative).std())


def mean_error(measured: Sequence[Measured]) -> float:
    """Return the relative standard error of a rank's mean compute time, by the scatter of all ranks."""
    return scatter(measured) / math.sqrt(sum(len(each.own[0]) for each in measured))


def speeds_differ(measured: Sequence[Measured]) -> bool:
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
