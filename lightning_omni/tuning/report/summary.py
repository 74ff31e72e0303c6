"""The numbers and sentences about a run and one of its searches."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property

from lightning_omni.checks import counted
from lightning_omni.json_dataclasses import Serializable
from lightning_omni.tuning.model.forecast import Estimate
from lightning_omni.tuning.model.profile import BOTTLENECKS, Prediction
from lightning_omni.tuning.model.setting import Setting
from lightning_omni.tuning.search import Choice, Search
from lightning_omni.tuning.search.choice import best_by_forecast
from lightning_omni.tuning.search.constants import QUANTILE

# --- Numbers as text --------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Return a number as text, with three significant digits, or whole from 1000 to 1e9; a dash for NaN.

    Example:
        >>> number(12345.6), number(0.012345), number(float("nan"))
        ('12,346', '0.0123', '–')
    """
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e9 else f"{value:.3g}"


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


def between(rate: Estimate) -> str:
    """Return a number with its interval as text.

    Example:
        >>> between(Estimate(1050.0, 990.0, 1200.0))
        '1,050 (80 % interval 990 to 1,200)'
    """
    return f"{number(rate.value)} (80 % interval {number(rate.low)} to {number(rate.high)})"


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


# --- The run: its searches, measurements and times --------------------------------------------------------------------


@dataclass(frozen=True)
class Round(Serializable):
    """One search of a fit: the first, or a retuning.

    Args:
        epoch: the epoch in which it ended.
        seconds_run: seconds of training until then.
        measured_after: samples per second of all ranks with the choice, by groups.
    """

    search: Search
    epoch: int
    seconds_run: float
    measured_after: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunTimes(Serializable):
    """Seconds of a run since just before its first batch, on rank 0's clock.

    Args:
        training: seconds of batches, validations and checkpoints.
        tuning: seconds in which searches stopped the training: deciding, and forming groups.
        reached: all seconds, and those for tuning, when a validation first reached the target.

    Example:
        >>> times = RunTimes(training=90.0, tuning=6.0, reached=(45.0, 5.0))
        >>> times.to_target, times.sentence
        (45.0, 'the target was reached after 45 s, 5 s of them for tuning')
    """

    training: float
    tuning: float
    reached: tuple[float, float] | None = None

    @property
    def total(self) -> float:
        return self.training + self.tuning

    @property
    def to_target(self) -> float | None:
        return self.reached[0] if self.reached is not None else None

    @property
    def metrics(self) -> dict[str, float]:
        found = {"omni/tuner/seconds": self.tuning}
        return found if self.to_target is None else {**found, "omni/tuner/target_seconds": self.to_target}

    @property
    def sentence(self) -> str:
        if self.reached is None or self.to_target is None:
            return (
                f"{duration(self.training)} of training, {duration(self.tuning)} of tuning; the target was not reached"
            )
        tuning = duration(self.reached[1])
        return f"the target was reached after {duration(self.to_target)}, {tuning} of them for tuning"


@dataclass(frozen=True)
class ReportOrigin(Serializable):
    """The date, version and hosts of a report.

    Args:
        date: date and time, in UTC.
        hosts: names of the hosts of the ranks, as far as known.
    """

    date: str
    version: str
    hosts: tuple[str, ...] = ()

    @classmethod
    def now(cls, hosts: tuple[str, ...] = ()) -> ReportOrigin:
        """Return the origin of a report written now, on these hosts; by default this one."""
        from lightning_omni import __version__

        date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        return cls(date, __version__, hosts or (socket.gethostname(),))

    @property
    def sentence(self) -> str:
        shown = [*self.hosts[:_MOST_HOSTS], *(["…"] if len(self.hosts) > _MOST_HOSTS else [])]
        return f"{self.date}, lightning-omni {self.version}, on {', '.join(shown)}"


_MOST_HOSTS = 8

# --- One search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConsideredRow:
    """One setting that a search considered.

    Attributes:
        rate: predicted samples per second.
        samples: samples to the target, relative to the user's own setting.
        speed_up: expected time to the target with the user's own setting, over that with this one.
    """

    setting: Setting
    by: str
    rate: float
    samples: float
    speed_up: float


@dataclass(frozen=True)
class Contribution:
    """The effect of one part of the choice, after those before it.

    Attributes:
        rate: factor of the samples per second.
        samples: factor of the samples to the target, with the momentum and learning rate that suit the parts so far;
            the last part has the choice's.
    """

    part: str
    rate: float
    samples: float

    @property
    def speed_up(self) -> float:
        return self.rate / self.samples


_PARTS: Mapping[tuple[str, ...], Callable[[Setting], str]] = {
    ("rebalance",): lambda at: "proportional batches",
    ("all_reduce",): lambda at: f"all-reduce {at.all_reduce}",
    ("groups",): lambda at: f"{counted(at.groups, 'group')}, {at.method or 'the same method'}",
    ("method", "period"): lambda at: replace(at, wire="", overlap=False, all_reduce="").exchange or "another method",
    ("wire",): lambda at: f"compression {at.wire}",
    ("overlap",): lambda at: "overlapped" if at.overlap else "not overlapped",
}
"""The parts of a choice, by the fields of its setting, and their names once they are in a setting."""


class SearchSummary:
    """The derived numbers of one search.

    ``measured_after`` is as in `Round`.
    """

    def __init__(self, search: Search, measured_after: Mapping[int, float] | None = None) -> None:
        self.search, self.measured_after = search, measured_after or {}

    @cached_property
    def choice(self) -> Choice:
        return self.search.choice()

    def bottleneck(self, prediction: Prediction) -> str:
        return "loading data" if self.search.loading(prediction.bottleneck) else BOTTLENECKS[prediction.bottleneck]

    @property
    def ranks(self) -> int:
        return self.search.profile.ranks

    @property
    def start(self) -> Setting:
        return self.search.spec.start

    @property
    def groups(self) -> tuple[int, ...]:
        return self.search.possible_groups

    # --- Speed -------------------------------------------------------------------------------------------------------

    @cached_property
    def speed_up(self) -> Estimate:
        return self.speed_up_of(self.choice.setting)

    def speed_up_of(self, setting: Setting) -> Estimate:
        return self.search.speed_up(setting, self.start)

    def ratio(self, setting: Setting) -> float:
        """Return the value of `speed_up_of`, without its interval and much faster."""
        return math.exp(self.search.log_time(self.start) - self.search.log_time(setting))

    @cached_property
    def rate(self) -> Estimate:
        return self._prediction_of(self.choice.setting).samples_per_second

    def _prediction_of(self, setting: Setting) -> Prediction:
        found, rate = self.search.prediction(setting), self.search.throughput(setting)
        interval = found.samples_per_second
        return replace(found, samples_per_second=Estimate(rate, min(interval.low, rate), max(interval.high, rate)))

    @property
    def measured_rate(self) -> float | None:
        return self.measured_after.get(self.choice.setting.groups)

    @property
    def is_outside(self) -> bool:
        rate = self.measured_rate
        return rate is not None and not self.rate.low <= rate <= self.rate.high

    @property
    def numbers(self) -> dict[str, float]:
        found = {"speed_up": self.speed_up.value, "samples_per_second": self.rate.value}
        if self.measured_rate is not None:
            found["measured_samples_per_second"] = self.measured_rate
        return found

    @property
    def headline(self) -> dict[str, str]:
        found = {NAMES["speed_up"]: span(self.speed_up)}
        found[NAMES["samples_per_second"]] = between(self.rate)
        if self.measured_rate is not None:
            outside = ", outside the forecast's interval" if self.is_outside else ""
            found[NAMES["measured_samples_per_second"]] = f"{number(self.measured_rate)}{outside}"
        return found

    def samples(self, setting: Setting) -> Estimate:
        theory = self.search.theory
        mean, width = theory(setting) - theory(self.start), QUANTILE * theory.error(setting)
        return Estimate(*(math.exp(each) for each in (mean, mean - width, mean + width)))

    @cached_property
    def contributions(self) -> list[Contribution]:
        if self.choice.setting == self.start:
            return []
        found = []
        before = self.start
        for part, setting in self._on_the_way(self.choice.setting):
            rate = self.search.throughput(setting) / self.search.throughput(before)
            more = self.search.theory(setting) - self.search.theory(before)
            found.append(Contribution(part, rate, math.exp(more)))
            before = setting
        return found

    def _on_the_way(self, choice: Setting) -> list[tuple[str, Setting]]:
        """Return the parts of a choice and the setting after each; the last one is the choice."""
        parts, at = [], self.start
        for names, words in _PARTS.items():
            changed = {name: getattr(choice, name) for name in names}
            if changed != {name: getattr(at, name) for name in names}:
                at = replace(at, **changed)
                parts.append((words(at), at))
        if not parts:
            parts.append(("momentum and learning rate", choice))
        suited = self.search.theory.suggested  # it sets the momentum and rate that are expected to suit a setting
        return [*((part, suited(setting)) for part, setting in parts[:-1]), (parts[-1][0], choice)]

    # --- Settings ----------------------------------------------------------------------------------------------------

    @cached_property
    def curve(self) -> dict[int, Setting]:
        best = {groups: best_by_forecast(self.search, groups) for groups in self.groups}
        if self.choice.setting.groups in best:
            best[self.choice.setting.groups] = self.choice.setting
        return best

    @cached_property
    def predictions(self) -> dict[tuple[int, bool], Prediction]:
        return {
            (setting.groups, rebalance): self._prediction_of(replace(setting, rebalance=rebalance))
            for setting in (replace(self.choice.setting, groups=groups) for groups in self.groups)
            for rebalance in (False, True)
            if not rebalance or self.search.gains_from_rebalance(setting)
        }

    def prediction(self, groups: int) -> Prediction:
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
                self.ratio(each.setting),
            )
            for each in self.search.considered
        ]

    # --- Sentences ---------------------------------------------------------------------------------------------------

    @property
    def statement(self) -> str:
        if not self.search.observation.batches.is_finite:
            return f"{self.choice.setting}: {self.choice.why}"
        if self.choice.setting == self.start:
            parts = [f"your own setting stays: {self.choice.setting}"]
        else:
            parts = [f"{self.choice.setting}, instead of your own setting, {self.start}"]
        return "; ".join([*parts, *(f"{name}: {text}" for name, text in self.headline.items())])

    @property
    def expense(self) -> str:
        observed = self.search.observation
        text = f"chosen from {len(observed.batches.samples)} batches, in {duration(self.search.overhead)}"
        if observed.noise_scale is None:
            return text
        return f"{text}; their gradient noise scale is {number(observed.noise_scale)} samples"


NAMES = {
    "speed_up": "speed-up over your own setting",
    "samples_per_second": "samples/s, forecast",
    "measured_samples_per_second": "samples/s, measured",
}
"""The names of the headline's numbers, for people, by those in files and loggers."""


def shares(parts: Mapping[str, float], seconds_per_update: float, groups: int) -> dict[str, float]:
    own = {name: parts[name] * groups for name in ("compute", "allreduce", "exchange")}
    return {**own, "wait": max(0.0, seconds_per_update * groups - sum(own.values()))}
