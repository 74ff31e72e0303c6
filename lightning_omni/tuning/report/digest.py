"""The numbers and sentences about one search, computed once for the picture, the page and the table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_omni.checks import counted
from lightning_omni.tuning.model.convergence import Estimate
from lightning_omni.tuning.model.forecast import Forecast, Setting, SettingEstimate, samples_to
from lightning_omni.tuning.model.profile import Prediction, Profile
from lightning_omni.tuning.search import Choice, Search
from lightning_omni.tuning.search.choice import best_by_forecast

PARTS = {
    "compute": "compute",
    "allreduce": "all-reduce",
    "exchange": "way to the server",
    "server": "the server",
    "link": "the server's link",
    "head": "the merged head",
}
"""The possible bottlenecks, in words."""


@dataclass(frozen=True)
class ConsideredRow:
    """One setting that a search considered.

    Attributes:
        setting: the setting.
        by: the source of the setting.
        rate: predicted samples per second.
        samples: samples to the target, relative to those of the user's own setting.
        time: time to the target, relative to that of the choice.
        gain: expected speed-up over the run's setting, where a slower outcome counts as 1.
    """

    setting: Setting
    by: str
    rate: float
    samples: float
    time: float
    gain: float


@dataclass(frozen=True)
class Contribution:
    """The effect of one part of the choice, beside all parts before it.

    Attributes:
        part: a short description.
        rate: factor of the samples per second.
        samples: factor of the samples to the target, with the momentum and learning rate that suit the part.
    """

    part: str
    rate: float
    samples: float

    @property
    def speed_up(self) -> float:
        return self.rate / self.samples


class Digest:
    """The derived numbers of one search.

    Args:
        search: the search.
        target: loss at which the run is over; None if none was named.
    """

    def __init__(self, search: Search, target: float | None = None) -> None:
        self.search = search
        samples = samples_to(target, search.observation.batches) if target is not None else None
        search.profile  # noqa: B018 - it sets the scatter of step times in the theory
        self.forecast = Forecast(search.theory, search.throughput, samples)

    @cached_property
    def choice(self) -> Choice:
        return self.search.choice()

    @property
    def profile(self) -> Profile:
        return self.search.profile

    def bottleneck(self, prediction: Prediction) -> str:
        """Return the bottleneck of a prediction, in words."""
        return "loading data" if self.search.loading(prediction.bottleneck) else PARTS[prediction.bottleneck]

    @property
    def ranks(self) -> int:
        return self.profile.ranks

    @property
    def start(self) -> Setting:
        return self.search.spec.start

    @property
    def groups(self) -> tuple[int, ...]:
        return self.search.spec.space.groups

    # --- Times -------------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> Estimate | None:
        """Return the seconds to the target with the choice; None if there is no target or no finite forecast."""
        if self.forecast.samples is None:
            return None
        found = self.forecast.of(self.choice.setting).seconds
        return found if math.isfinite(found.value) else None

    @property
    def speed_up(self) -> Estimate:
        """Return the expected speed-up of the choice over the user's own setting."""
        return self.time(self.start)

    def time(self, setting: Setting) -> Estimate:
        """Return the time to the target with a setting, relative to the choice."""
        unit = math.exp(self.forecast.log_seconds(self.choice.setting))
        error = self.forecast.deviation(setting, self.choice.setting)
        return self._relative(setting, 1 / self.search.throughput(setting) / unit, error)

    def samples(self, setting: Setting) -> Estimate:
        """Return the samples to the target with a setting, relative to the user's own."""
        return self._relative(setting, 1.0, self.forecast.theory.error(setting))

    def _relative(self, setting: Setting, factor: float, error: float) -> Estimate:
        mean, width = self.forecast.theory(setting), _QUANTILE * error
        return Estimate(*(factor * math.exp(each) for each in (mean, mean - width, mean + width)))

    @cached_property
    def contributions(self) -> list[Contribution]:
        """Return the effects of the parts of the choice; empty if the user's own setting stays."""
        if self.choice.setting == self.start:
            return []
        found = []
        before = self.start
        for part, setting in self._on_the_way(self.choice.setting):
            rate = self.search.throughput(setting) / self.search.throughput(before)
            more = self.forecast.theory(setting) - self.forecast.theory(before)
            found.append(Contribution(part, rate, math.exp(more)))
            before = setting
        return found

    def _on_the_way(self, choice: Setting) -> list[tuple[str, Setting]]:
        """Return the parts of a choice and the setting after each; the last one is the choice."""
        own, parts, at = self.start, [], self.start
        if choice.rebalance:
            at = replace(at, rebalance=True)
            parts.append(("proportional batches", at))
        if choice.all_reduce != own.all_reduce:
            at = replace(at, all_reduce=choice.all_reduce)
            parts.append((f"all-reduce {at.all_reduce}", at))
        if choice.groups != own.groups:
            at = replace(at, groups=choice.groups)
            parts.append((f"{counted(at.groups, 'group')}, {at.method or 'the same method'}", at))
        if (choice.method, choice.period) != (own.method, own.period):
            at = replace(at, method=choice.method, period=choice.period)
            parts.append((replace(at, wire="", overlap=False, all_reduce="").exchange or "another method", at))
        if choice.wire != own.wire:
            at = replace(at, wire=choice.wire)
            parts.append((f"wire {at.wire}", at))
        if choice.overlap != own.overlap:
            at = replace(at, overlap=choice.overlap)
            parts.append(("overlapped" if at.overlap else "not overlapped", at))
        if not parts:
            parts.append(("momentum and learning rate", choice))
        suited = self.search.theory.suggested  # it sets the momentum and rate that are expected to suit a setting
        return [*((part, suited(setting)) for part, setting in parts[:-1]), (parts[-1][0], choice)]

    # --- Settings ----------------------------------------------------------------------------------------------------

    @cached_property
    def curve(self) -> dict[int, Setting]:
        """Return, for each number of groups, the setting with the shortest predicted time."""
        best = {groups: best_by_forecast(self.search, groups) for groups in self.groups}
        if self.choice.setting.groups in best:
            best[self.choice.setting.groups] = self.choice.setting
        return best

    @cached_property
    def systems(self) -> dict[str, SettingEstimate]:
        """Return the estimates of the user's own setting and of well-known systems."""
        saturating = self.profile.saturating_groups()
        own = self.forecast.of(self.start)
        return {"your own setting": own, **self.forecast.of_systems(self.ranks, saturating, self.start)}

    @cached_property
    def predictions(self) -> dict[tuple[int, bool], Prediction]:
        """Return the hardware model's predictions, keyed by groups and by whether batches are proportional."""
        return {
            (setting.groups, rebalance): self.search.prediction(replace(setting, rebalance=rebalance))
            for setting in (replace(self.choice.setting, groups=groups) for groups in self.groups)
            for rebalance in (False, True)
            if not rebalance or self.search.gains_from_rebalance(setting)
        }

    def prediction(self, groups: int) -> Prediction:
        """Return the faster prediction for a number of groups.

        Raises:
            KeyError: the number is not in `groups`.
        """
        return self.predictions.get((groups, True)) or self.predictions[groups, False]

    @cached_property
    def considered(self) -> list[ConsideredRow]:
        _ = self.choice
        return [
            ConsideredRow(
                each.setting,
                each.by,
                self.search.throughput(each.setting),
                self.samples(each.setting).value,
                self.time(each.setting).value,
                math.exp(each.improvement),
            )
            for each in self.search.considered
        ]

    # --- Sentences ---------------------------------------------------------------------------------------------------

    @property
    def statement(self) -> str:
        if self.choice.estimate is None:
            return f"{self.choice.setting}: {self.choice.why}"
        if self.choice.setting == self.start:
            return f"your own setting stays: {self.choice.setting}"
        text = f"{self.choice.setting}: expected speed-up {span(self.speed_up)} over your own setting, {self.start}"
        return text if self.seconds is None else f"{text}; target expected after {interval(self.seconds)} of training"

    @property
    def expense(self) -> str:
        """Return the basis of the choice and the time it took."""
        batches = len(self.search.observation.batches.losses)
        return f"chosen from {batches} batches, in {duration(self.search.overhead)}"


_QUANTILE = 1.2816
"""Quantile of the normal distribution for intervals with a probability of 0.8, as the forecast's."""


def shares(parts: Mapping[str, float], seconds_per_update: float, groups: int) -> dict[str, float]:
    """Return the seconds of each part of one step of a group, which add up to the step.

    Args:
        parts: the parts of a `Prediction`.
        seconds_per_update: those of the same prediction.
        groups: number of groups.
    """
    own = {name: parts[name] * groups for name in ("compute", "allreduce", "exchange")}
    return {**own, "wait": max(0.0, seconds_per_update * groups - sum(own.values()))}


# --- Numbers ---------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Return a number with three digits, or a dash for NaN.

    Example:
        >>> number(12345.6), number(0.012345), number(float("nan"))
        ('12,346', '0.0123', '–')
    """
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def times(value: float) -> str:
    """Return a ratio as text.

    Example:
        >>> times(1.234), times(123.4), times(float("inf"))
        ('1.23×', '123×', '∞')
    """
    if math.isinf(value):
        return "∞"
    return f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def span(ratio: Estimate) -> str:
    """Return a ratio with its interval as text.

    Example:
        >>> span(Estimate(1.5, 1.2, 2.0))
        '1.50× (80 % interval 1.20× to 2.00×)'
    """
    return f"{times(ratio.value)} (80 % interval {times(ratio.low)} to {times(ratio.high)})"


def duration(seconds: float) -> str:
    """Return seconds as text, in a suitable unit.

    Example:
        >>> duration(0.25), duration(42.0), duration(200), duration(9000), duration(1e6)
        ('0.25 s', '42 s', '3.3 min', '2.5 h', '11.6 days')
    """
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit and math.isfinite(seconds):
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.3g} s"


def interval(seconds: Estimate) -> str:
    """Return seconds with their interval as text.

    Example:
        >>> interval(Estimate(42.0, 30.0, 60.0)), interval(Estimate(42.0, 30.0, math.inf))
        ('42 s (30 s to 60 s)', '42 s (30 s or more)')
    """
    end = "or more" if math.isinf(seconds.high) else f"to {duration(seconds.high)}"
    return f"{duration(seconds.value)} ({duration(seconds.low)} {end})"
