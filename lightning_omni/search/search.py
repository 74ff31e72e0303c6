"""What `OmniTuner` tries next, and what it chooses: the tuner without a trainer, a cluster or a clock.

A `Search` is told what probes showed and says which comes next. Whoever runs the probes (a Lightning fit, the
simulator) does not decide anything, and this decides the same whenever it is told the same: so a checkpoint holds the
observations, and a resumed search replays them.

Rule 1: one probe with as many groups as may be and one with a single group come first: from these two the hardware
model knows the speed of everything between, and both are points of the search.
Rule 2: all probes train on the same samples from the same snapshot.
Rule 3: no probe begins that would not end within the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from lightning_omni.errors import ConfigurationError
from lightning_omni.performance.forecast import (
    FAILED,
    Forecast,
    Outlook,
    Pace,
    Scaling,
    Setting,
    Theory,
    Tried,
    log_costs,
)
from lightning_omni.performance.profile import Measured, Prediction, Profile

Strategy = Literal["bayes", "omnivore", "grid", "random", "skopt"]

FEWEST, MOST = 4, 40
"""Batches of each worker in a probe."""
MOST_PROBES = 16
_PROBES = 7
"""Into so many probes a budget is cut, if they do not get too short or too long."""
_WORTH = 0.08
"""A search ends when the next probe is expected to find less than that (relative to the time to the target)."""
_FASTER = 1.05
"""More groups, and proportional batches, have to be that much faster to be considered."""
_CLEARLY = 4.0
"""Speeds differ if their mean squared deviation is that many times what chance would make of it."""
_LOST, _NOISY = 0.5, 0.2
"""A run is lost when this part of what its probe gained is gone, and the loss is higher by at least this part of it."""
_GAIN = 1.1
"""A run under way changes its groups only for what is expected to be that many times as fast."""
_PAYS, _DARES = 0.036, 0.057
"""A smaller and a larger step have to lower the loss at once by these parts of what was learnt so far."""
_ABOVE = 0.12
"""Groups whose loss is above that of one group by more than this part, with the same steps, are on their way up."""
_TOLERATED = 1.25
"""Three probes of a run under way may take so much more than was set aside: two of them would be of no use."""
_THIRDS = 4
"""How often a step is made smaller, if nothing else does not diverge."""
_CAUTION = 0.25
"""How many standard deviations of the forecast count against a setting when one is chosen."""


# --- What is searched ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Space:
    """The settings among which is searched.

    Args:
        groups: numbers of groups, with 1 among them.
        momentum: the least and the largest explicit momentum.
        lr: the least and the largest learning rate.
        factor: by what the step may differ from the user's (see `Scaling`), at least and at most.
        rebalance: whether batches may be split in proportion to speeds.
        period: local steps between two exchanges; none for those of the setting that a search starts from.

    Raises:
        ConfigurationError: a range is empty or out of bounds.
    """

    groups: tuple[int, ...]
    momentum: tuple[float, float] = (0.0, 0.95)
    lr: tuple[float, float] = (0.0, math.inf)
    factor: tuple[float, float] = (0.1, 10.0)
    rebalance: bool = True
    period: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if 1 not in self.groups:
            raise ConfigurationError(f'space={{"groups": {list(self.groups)}}}: one group has to be among them; add 1')
        for name, is_good, what in (
            ("momentum", 0 <= self.momentum[0] <= self.momentum[1] < 1, "from 0 up to 1, without 1"),
            ("lr", 0 <= self.lr[0] <= self.lr[1] and self.lr[1] > 0, "above 0"),
            ("factor", 0 < self.factor[0] <= self.factor[1], "above 0"),
        ):
            if not is_good:
                raise ConfigurationError(
                    f'space={{"{name}": {getattr(self, name)}}}: pass the least and the largest value, {what}'
                )
        if any(each < 1 for each in self.period):
            raise ConfigurationError(f'space={{"period": {list(self.period)}}}: pass numbers of steps, 1 or more')

    @classmethod
    def of(
        cls,
        given: Mapping[str, Any],
        ranks: int,
        allowed: Callable[[int], bool] = lambda groups: True,
        momentum: float = 0.0,
    ) -> Space:
        """From what a user passes, with the rest filled in.

        Args:
            given: any of ``groups``, ``momentum``, ``lr``, ``rebalance``, ``period``; single values, lists or ranges.
            ranks: number of ranks.
            allowed: whether there may be that many groups.
            momentum: of the user's own setting, which is never out of bounds unless ``given`` says so.

        Raises:
            ConfigurationError: there is no such name, or a value cannot be.
        """
        known = ("groups", "momentum", "lr", "rebalance", "period")
        for name in given:
            if name not in known:
                raise ConfigurationError(f"space={{{name!r}: ...}}: pass some of {', '.join(map(repr, known))}")
        groups = _numbers("groups", given.get("groups", _powers(ranks)), whole=True)
        if not all(1 <= number <= ranks for number in groups):
            raise ConfigurationError(f'space={{"groups": {groups}}}: pass whole numbers from 1 to {ranks}, the ranks')
        options: dict[str, Any] = {}
        for name in ("momentum", "lr"):
            if name in given:
                numbers = _numbers(name, given[name])
                options[name] = min(numbers), max(numbers)
        if "momentum" not in given:
            options["momentum"] = (0.0, max(momentum, cls.momentum[1]))
        if "rebalance" in given:
            values = _list(given["rebalance"])
            if not values or not all(isinstance(each, bool) for each in values):
                raise ConfigurationError(f'space={{"rebalance": {given["rebalance"]!r}}}: pass True, False or both')
            options["rebalance"] = any(values)
        if "period" in given:
            options["period"] = tuple(sorted(set(_numbers("period", given["period"], whole=True))))
        return cls(tuple(sorted({1, *(g for g in groups if g == 1 or allowed(g))})), **options)

    def holds(self, setting: Setting) -> Setting:
        """The setting with what is out of bounds put to the bound."""
        return replace(
            setting,
            momentum=min(max(setting.momentum, self.momentum[0]), self.momentum[1]),
            lr=min(max(setting.lr, self.lr[0]), self.lr[1]),
        )


def _powers(ranks: int) -> list[int]:
    return sorted({2**power for power in range(ranks.bit_length()) if 2**power <= ranks} | {ranks})


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _numbers(name: str, value: Any, whole: bool = False) -> list[Any]:
    """The numbers that a user passed, one or several."""
    values = _list(value)
    for each in values:
        good = isinstance(each, int) if whole else isinstance(each, (int, float)) and math.isfinite(each)
        if isinstance(each, bool) or not good:
            raise ConfigurationError(
                f"space={{{name!r}: {value!r}}}: pass {'whole numbers' if whole else 'finite numbers'}, one or several"
            )
    if not values:
        raise ConfigurationError(f"space={{{name!r}: {value!r}}}: nothing to choose from; pass at least one number")
    return values


# --- What goes out and comes in --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """What is to be tried next.

    Attributes:
        number: of the probe, from 0.
        setting: to train with.
        samples: to train on, all groups together.
        why: in a few words.
    """

    number: int
    setting: Setting
    samples: int
    why: str


@dataclass(frozen=True)
class Observation:
    """What a probe showed, of both efficiencies; ``measured`` is None if nothing was timed."""

    tried: Tried
    measured: Measured | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"tried": self.tried.to_dict(), "measured": self.measured.to_dict() if self.measured else None}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Observation:
        """What `to_dict` gave."""
        measured = plain["measured"]
        return cls(Tried.from_dict(plain["tried"]), Measured.from_dict(measured) if measured else None)


@dataclass(frozen=True)
class Choice:
    """What a search has come to.

    Attributes:
        setting: to train with from now on.
        why: a sentence for the user.
        outlook: what is to be expected of it; None if nothing was measured.
    """

    setting: Setting
    why: str
    outlook: Outlook | None = None


@dataclass(frozen=True)
class Job:
    """What a search is about.

    Attributes:
        start: the setting that would be used without a search.
        batch: samples of all ranks in one batch.
        reference: the *reference batch*: samples of the batch that learning rate and momentum of ``start`` belong to.
            None for ``batch``: a user's own belong to one synchronous step of all ranks, however many groups a run
            begins with. Those that an earlier search has chosen belong to one group's batch.
        horizon: samples that the run will train on.
        share: of the horizon's time that probes may take, 0.1 for a tenth.
        space: what is searched.
        scaling: of learning rates.
        seconds: time that probes may take, if it is known beforehand; otherwise it follows from ``share``.
        current: whether ``start`` has been trained with already, so that only a clear gain is worth a change.
        steps: whether only the size of the step is searched, for a run that is under way.
        first_loss: the training loss with which the run began, for ``steps``; None if it is not known.
        near: whether the target will be there so soon, for ``steps``, that what a smaller step gains at once is worth
            more than what it loses later.
        own: the user's own setting, if ``start`` is what an earlier search of the run has chosen.
        seed: of everything random.

    Raises:
        ConfigurationError: the learning rate of ``start`` is 0, which no factor changes.
    """

    start: Setting
    batch: int
    horizon: float
    share: float
    space: Space
    scaling: Scaling = field(default_factory=Scaling)
    seconds: float | None = None
    current: bool = False
    steps: bool = False
    first_loss: float | None = None
    near: bool = False
    own: Setting | None = None
    seed: int = 0
    reference: float | None = None

    def __post_init__(self) -> None:
        if not self.start.lr > 0:
            raise ConfigurationError(f"lr={self.start.lr}: there is nothing to tune; pass a learning rate above 0")
        if self.reference is not None and not 0 < self.reference < math.inf:
            raise ConfigurationError(f"reference={self.reference}: pass a number of samples above 0, or None")

    def to_dict(self) -> dict[str, Any]:
        """Plain values; a bound that is infinite is None."""
        plain = asdict(self)
        plain["space"]["lr"] = [None if math.isinf(bound) else bound for bound in self.space.lr]
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Job:
        """What `to_dict` gave."""
        space: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in plain["space"].items()
        }
        space["lr"] = tuple(math.inf if bound is None else bound for bound in plain["space"]["lr"])
        rest = {
            name: plain[name]
            for name in ("batch", "horizon", "share", "seconds", "current", "steps", "first_loss", "near", "seed")
        }
        start = Setting.from_dict(plain["start"])
        return cls(
            start=start,
            # Files without it took what a search started with for that of as many groups.
            reference=plain.get("reference", plain["batch"] / start.groups),
            space=Space(**space),
            scaling=Scaling(**plain["scaling"]),
            own=Setting.from_dict(plain["own"]) if plain["own"] is not None else None,
            **rest,
        )

    @property
    def basis(self) -> Setting:
        """``start``, with the number of groups that its learning rate and momentum belong to; theory builds on it."""
        belongs_to = self.reference if self.reference is not None else self.batch
        return replace(self.start, groups=max(1, round(self.batch / belongs_to)))

    @property
    def batches(self) -> int:
        """Batches of each worker in a probe; 0 if the budget is too small for any."""
        affordable = self.share * self.horizon / self.batch
        if affordable < FEWEST:
            return 0
        return int(min(max(affordable / (3 if self.steps else _PROBES), FEWEST), MOST))


# --- The search ------------------------------------------------------------------------------------------------------

Plan = Generator[Probe, None, None]


class Search:
    """Proposes probes and chooses a setting.

    Attributes:
        observations: what probes showed so far, and
        probes: what they were.
        overhead: seconds that the search took beside its probes; whoever carries them out adds them up.
        stopped: why it was stopped, if it was.

    Args:
        job: what is searched, and for how long.
        strategy: ``"bayes"``: scikit-optimize on the predicted time, about the theory; ``"omnivore"``: the published
            algorithm; ``"grid"``, ``"random"`` and ``"skopt"`` (scikit-optimize without theory), to compare with.
        observations: of an earlier search for the same job, which is gone on with.
        known: what was measured in earlier searches of the same run.

    Raises:
        ConfigurationError: there is no such strategy, or scikit-optimize is missing.

    Example:
        >>> job = Job(Setting(1, 0.9, 0.1), batch=64, horizon=64_000, share=0.1, space=Space((1, 2, 4)))
        >>> probe = Search(job).next()
        >>> probe.setting.groups, probe.samples // 64
        (4, 14)
    """

    def __init__(
        self,
        job: Job,
        strategy: Strategy = "bayes",
        observations: Sequence[Observation] = (),
        known: Sequence[Measured] = (),
    ) -> None:
        if strategy not in get_args(Strategy):
            raise ConfigurationError(f"search={strategy!r}: pass one of {', '.join(map(repr, get_args(Strategy)))}")
        self.job, self.strategy = job, strategy
        self.theory = Theory(job.basis, job.scaling, most=job.own.momentum if job.own is not None else None)
        self.observations: list[Observation] = []
        self.probes: list[Probe] = []
        self.known = list(known)
        self.overhead = 0.0
        self.stopped = ""
        self._plan = getattr(self, f"_{strategy}")()
        self._current: Probe | None = None
        self._is_over = False
        self._fitted: tuple[int, Profile] | None = None
        self._rates: dict[tuple[int, bool, int], float] = {}
        for observation in observations:
            if self.next() is None:
                break
            self.tell(observation)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, here or in another process, is asked and told all of it once more."""
        return type(self).from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Everything that there is to know, in plain values; `from_dict` asks and tells it all once more."""
        return {
            "job": self.job.to_dict(),
            "strategy": self.strategy,
            "observations": [each.to_dict() for each in self.observations],
            "stopped": self.stopped,
            "overhead": self.overhead,
            "known": [each.to_dict() for each in self.known],
            "is_over": self._is_over,
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Search:
        """What `to_dict` gave."""
        observations = [Observation.from_dict(each) for each in plain["observations"]]
        known = [Measured.from_dict(each) for each in plain["known"]]
        search = cls(Job.from_dict(plain["job"]), plain["strategy"], observations, known)
        search.overhead = plain["overhead"]
        if plain["is_over"]:
            search.stop(plain["stopped"])
        return search

    # --- From outside ------------------------------------------------------------------------------------------------

    def next(self) -> Probe | None:
        """The next probe, the same until its outcome is told; None if the search is over."""
        if self._current is None and not self._is_over:
            self._current = next(self._plan, None)
            self._is_over = self._current is None
        return self._current

    def tell(self, observation: Observation) -> None:
        """What the probe showed."""
        if self._current is not None:
            self.probes.append(self._current)
        if not self.job.steps and not observation.tried.has_failed and _rose(observation.tried):
            observation = replace(observation, tried=replace(observation.tried, problem="the loss rose"))
        self.observations.append(observation)
        self._current = None

    def ruin_of(self, setting: Setting) -> float:
        """The training loss above which a run with that setting is lost: half of what its probe gained is gone.

        Probes of as many groups count, or all, if there was none of these. NaN if all failed.
        """
        sound = [each for each in self.tried if not each.has_failed]
        tried = [each for each in sound if each.setting.groups == setting.groups] or sound
        if not tried:
            return math.nan
        ends = [float(each.blocks(each.end)[-3:].mean()) for each in tried]
        level, first = max(ends), tried[0].first_loss
        return level + max(_LOST * (first - level), _NOISY * abs(level))

    def stop(self, why: str) -> None:
        """No more probes: a rank was lost, or the user wants to go on."""
        self.stopped, self._is_over, self._current = why, True, None

    @property
    def tried(self) -> list[Tried]:
        """All probes so far."""
        return [each.tried for each in self.observations]

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
            self._fitted = (len(measured), Profile.fit(measured))
            self._rates.clear()
        return self._fitted[1]

    def throughput(self, setting: Setting) -> float:
        """Samples per second that are to be expected; 1.0 as long as nothing was timed."""
        profile = self.profile
        if profile is None:
            return 1.0
        key = (setting.groups, setting.rebalance, setting.period)
        if key not in self._rates:
            self._rates[key] = self.prediction(setting).samples_per_second.value
        return self._rates[key]

    def prediction(self, setting: Setting) -> Prediction:
        """What the hardware model says of a setting."""
        assert self.profile is not None
        return self.profile.predict(setting.groups, rebalance=setting.rebalance, period=setting.period)

    def forecast(self) -> Forecast:
        """Time to the target of any setting, from what is known so far."""
        return Forecast(Pace.of(self.theory, self.tried), self.throughput, None, [each.setting for each in self.tried])

    # --- Money -------------------------------------------------------------------------------------------------------

    @property
    def spent(self) -> float:
        """Seconds that the search took: its probes, and what belongs to no probe."""
        return sum(each.seconds for each in self.tried) + self.overhead

    @property
    def budget(self) -> float:
        """Seconds that probes may take altogether; infinite until something was timed."""
        if self.job.seconds is not None:
            return self.job.seconds
        if self.profile is None:
            return math.inf
        fastest = max(self.throughput(each) for each in self.candidates())
        return self.job.share * self.job.horizon / fastest

    def cost(self, probe: Probe) -> float:
        """Seconds that a probe will take, as far as can be told; 0 until something was timed."""
        if self.profile is None:
            return 0.0
        overheads = [each.seconds - each.end / self.throughput(each.setting) for each in self.tried]
        return probe.samples / self.throughput(probe.setting) + max(0.0, min(overheads, default=0.0))

    def affords(self, probe: Probe) -> bool:
        """Whether the budget is enough for a probe."""
        return len(self.observations) < MOST_PROBES and self.spent + self.cost(probe) <= self.budget

    # --- Settings ----------------------------------------------------------------------------------------------------

    def is_uneven(self, groups: int, period: int = 1) -> bool:
        """Whether proportional batches make groups faster by more than a trifle."""
        if not self.job.space.rebalance or self.profile is None or groups == len(self.profile.speeds):
            return False
        if not speeds_differ(self.measured):
            return False
        plain, split = (self.throughput(Setting(groups, 0.0, 0.0, how, period)) for how in (False, True))
        return split > _FASTER * plain

    def groups(self) -> list[int]:
        """Numbers of groups that are worth a thought: more of them have to be faster than fewer."""
        if self.profile is None:
            return list(self.job.space.groups)
        kept: list[int] = []
        fastest = 0.0
        period = self._period
        for number in self.job.space.groups:
            rate = self.throughput(Setting(number, 0.0, 0.0, self.is_uneven(number, period), period))
            if number == 1 or rate > _FASTER * fastest:
                kept.append(number)
                fastest = max(fastest, rate)
        return kept

    def proposal(self, groups: int, factor: float = 1.0, period: int | None = None) -> Setting:
        """What theory proposes for that many groups."""
        steps = period or self._period
        if groups == self.theory.start.groups:
            setting = replace(self.theory.start, lr=self.theory.start.lr * factor, period=steps)
        else:
            setting = self.theory.setting(groups, period=steps, factor=factor)
        return self._within(setting)

    def stepped(self, factor: float) -> Setting:
        """What the run trains with, in larger or smaller steps."""
        start = self.job.start
        return self._within(replace(start, lr=start.lr * factor, period=self._period))

    def _within(self, setting: Setting) -> Setting:
        return self.job.space.holds(self._as_it_would_be(setting))

    @property
    def _period(self) -> int:
        """Local steps between two exchanges, unless others are asked for."""
        allowed, own = self.job.space.period, self.job.start.period
        return own if not allowed or own in allowed else min(allowed)

    def candidates(self) -> list[Setting]:
        """What can be chosen: what was tried, and what theory proposes for each number of groups."""
        sound = [each.setting for each in self.tried if not each.has_failed]
        if self.tried and 1 not in {each.groups for each in sound}:
            sound = []
        proposed = [self.proposal(groups, factor) for groups in self.groups() if (factor := self.largest_step(groups))]
        return list(dict.fromkeys([*map(self._as_it_would_be, sound), *proposed])) or [self.job.start]

    def largest_step(self, groups: int) -> float:
        """By what the user's step has to be multiplied with that many groups; 0 if they are out of the question.

        One group is what the user knows: unless it diverges its steps are theirs, and others have to be seen beside it.
        If several groups diverged, the largest steps that did not are taken.
        """
        if not self.tried:
            return 1.0
        alone = [each for each in self.tried if each.setting.groups == 1]
        if groups == 1:
            return 1.0 if any(not each.has_failed for each in alone) or not alone else 1 / 3
        apart = [each for each in self.tried if each.setting.groups > 1]
        if not alone or all(each.has_failed for each in apart):
            return 0.0
        if not any(each.has_failed for each in apart):
            return 1.0
        return min(self.job.scaling.step(each.setting) / self.theory.step for each in apart if not each.has_failed)

    def _as_it_would_be(self, setting: Setting) -> Setting:
        return replace(setting, rebalance=self.is_uneven(setting.groups, setting.period))

    def _probe(self, setting: Setting, why: str) -> Probe:
        batches = self.job.batches
        if self.job.steps and self.profile is not None and self.job.seconds is not None:
            # Three probes have to fit in, and one batch more or less does not matter to them.
            affordable = 0.3 * self.budget * self.throughput(setting) / self.job.batch
            batches = int(min(max(affordable, FEWEST), MOST)) if not self.tried else self._batches_of_first
        return Probe(len(self.observations), setting, batches * self.job.batch, why)

    @property
    def _batches_of_first(self) -> int:
        return self.probes[0].samples // self.job.batch if self.probes else self.job.batches

    # --- The choice --------------------------------------------------------------------------------------------------

    def choice(self) -> Choice:
        """The setting that is expected to be at the target first, as far as is known."""
        start = self.job.start
        if not self.observations:
            return Choice(start, self.stopped or self._poor())
        if all(each.has_failed for each in self.tried) and self.stopped:
            return Choice(start, f"{self.stopped}: nothing was changed")
        if all(each.has_failed for each in self.tried):
            return Choice(start, f"all {len(self.tried)} probes diverged: nothing was changed; lower the learning rate")
        if self.profile is None:
            return Choice(start, f"{self.stopped or 'nothing could be timed'}: nothing was changed")
        if self.job.steps:
            return self._best_step()
        best = self._best_by_forecast() if self.strategy == "bayes" else self._best_as_measured()
        forecast = self.forecast()
        outlook = forecast.of(best)
        if self.job.current:
            gain = math.exp(forecast.log_seconds(self._as_it_would_be(start)) - forecast.log_seconds(best))
            if gain < _GAIN:
                return Choice(start, "nothing that was tried is clearly better: it stays", forecast.of(start))
        return Choice(best, self._reasons(best, forecast), outlook)

    def _best_step(self) -> Choice:
        """A step as it is, unless another is clearly better at once.

        A smaller step nearly always gains at once, because the weights come to rest, and loses later; one that is too
        large may never come to the target. If the target is near, there is no later, and nothing to ask.
        """
        start = self._as_it_would_be(self.job.start)
        if self.tried[0].has_failed:  # or all would have
            return Choice(self.tried[1].setting, "steps as large as they are diverge, and a third as large do not")
        rested = self.stepped(1 / 3)
        if self.job.near and rested != start:
            return Choice(rested, "the target is near: with steps a third as large the weights come to rest")
        smaller, larger = (self._gain(number) if len(self.tried) > number else -math.inf for number in (1, 2))
        if smaller >= _PAYS * self._learnt:
            return Choice(self.tried[1].setting, f"steps a third as large lower the loss by {smaller:.2g} at once")
        if larger >= max(_DARES * self._learnt, -smaller):
            return Choice(self.tried[2].setting, f"steps three times as large lower the loss by {larger:.2g} at once")
        return Choice(start, "neither smaller nor larger steps are better by enough: it stays")

    @property
    def _learnt(self) -> float:
        """By how much the run has lowered its loss so far."""
        level = float(np.mean(self.tried[0].losses))
        least = _PAYS * abs(level)
        return least if self.job.first_loss is None else max(self.job.first_loss - level, least)

    def _best_by_forecast(self) -> Setting:
        """Careful with what nobody tried; among equals the fewest groups and the smallest step."""
        forecast = self.forecast()

        def careful(setting: Setting) -> float:
            return forecast.log_seconds(setting) + _CAUTION * forecast.pace(setting)[1]

        candidates = self.candidates()
        least = min(map(careful, candidates))
        equal = [setting for setting in candidates if careful(setting) <= least + math.log(1.05)]
        return min(equal, key=lambda setting: (setting.groups, self.job.scaling.step(setting)))

    def _best_as_measured(self) -> Setting:
        costs = log_costs(self.tried)
        times = [
            (cost - math.log(self.throughput(self._as_it_would_be(each.setting))), number)
            for number, ((cost, _), each) in enumerate(zip(costs, self.tried, strict=True))
        ]
        return self._as_it_would_be(self.tried[min(times)[1]].setting)

    def _poor(self) -> str:
        return (
            f"the budget, {self.job.share:.3g} of the run, is too small for one probe of {FEWEST} batches of each rank:"
            " nothing was tried or changed; raise budget=, or train for longer"
        )

    def _reasons(self, best: Setting, forecast: Forecast) -> str:
        prediction = self.prediction(best)
        alone = self.proposal(1)
        parts = [f"expected to be first at the target, after {len(self.tried)} probes"]
        if best.groups > 1:
            faster = self.throughput(best) / self.throughput(alone)
            more = math.exp(forecast.pace(best)[0] - forecast.pace(alone)[0])
            parts.append(f"{faster:.2f} times the samples per second of one group, for {more:.2f} times the samples")
        elif best.rebalance:
            gain = self.throughput(best) / self.throughput(replace(best, rebalance=False))
            parts.append(f"proportional batches make one group {gain:.2f} times as fast, without staleness")
        else:
            parts.append("more groups are not faster by enough to pay for their staleness")
        parts.append(f"{prediction.binding} binds")
        return ("; ".join(parts) + (f" ({self.stopped})" if self.stopped else "")).strip()

    # --- Plans -------------------------------------------------------------------------------------------------------

    def _opening(self) -> Plan:
        """The two ends of the space."""
        if not self.job.batches:
            return
        for groups, why in ((max(self.job.space.groups), "all apart"), (1, "all together")):
            probe = self._probe(self.proposal(groups), why)
            if groups not in {each.setting.groups for each in self.tried} and self.affords(probe):
                yield probe

    def _bayes(self) -> Plan:
        """The two ends, then wherever an improvement on the predicted time is expected most."""
        if self.job.steps:
            yield from self._larger_and_smaller()
            return
        yield from self._opening()
        if self.profile is None:
            return
        self._compare_with_one_group()
        if any(each.has_failed for each in self.tried):
            yield from self._smaller()
        else:
            yield from self._asked(self._ask)

    def _compare_with_one_group(self) -> None:
        """Several groups that come out far above one have not diverged yet, but will."""
        if len(self.tried) < 2 or any(each.has_failed for each in self.tried):
            return
        apart, together = self.tried
        until = min(apart.end, together.end)
        above, level = (float(each.blocks(until)[-3:].mean()) for each in (apart, together))
        if above > level + _ABOVE * abs(level):
            tried = replace(apart, problem="its loss is far above that of one group")
            self.observations[0] = replace(self.observations[0], tried=tried)

    def _smaller(self) -> Plan:
        """Steps a third as large, until one does not diverge."""
        for power in range(1, _THIRDS + 1):
            probe = self._probe(self.proposal(max(self.job.space.groups), 3.0**-power), "a smaller step")
            if not self.affords(probe) or (self.largest_step(1) == 1.0 and not self._could_pay(probe.setting)):
                return
            yield probe
            if not self.tried[-1].has_failed:
                return

    def _could_pay(self, setting: Setting) -> bool:
        """Whether it is faster than one group by more than theory expects it to lose again."""
        alone, other = (
            self.theory(each) - math.log(self.throughput(each))
            for each in (self.proposal(1), self._as_it_would_be(setting))
        )
        return other < alone

    def _larger_and_smaller(self) -> Plan:
        """The step as it is, a third of it, and if that is worse three times as large."""
        for factor, why in ((1.0, "as it is"), (1 / 3, "a smaller step"), (3.0, "a larger step")):
            if factor > 1 and self._gain(1) >= 0:
                return
            if factor < 1 and self.job.near and not self.tried[0].has_failed:
                return  # a third it will be
            probe = self._probe(self.stepped(factor), why)
            if self.spent + self.cost(probe) > _TOLERATED * self.budget:
                return
            yield probe

    def _gain(self, number: int) -> float:
        """By how much lower the loss of a probe was than that of the first.

        They trained on the same samples, so that the difference is exact to a per cent where the losses are not.
        """
        first, other = self.tried[0], self.tried[number]
        if first.has_failed or other.has_failed:
            return -math.inf if other.has_failed else math.inf
        until = min(first.end, other.end)
        was, is_now = (float(each.blocks(until)[2:].mean()) for each in (first, other))
        return was - is_now

    def _skopt(self) -> Plan:
        """Plain scikit-optimize, which knows nothing but times."""
        yield from self._opening()
        yield from self._asked(self._ask_plainly)

    def _asked(self, ask: Callable[[], tuple[Setting, str] | None]) -> Plan:
        while self.observations and self.profile is not None and (asked := ask()) is not None:
            probe = self._probe(*asked)
            if not self.affords(probe):
                return
            yield probe

    def _random(self) -> Plan:
        """Settings by chance."""
        yield from self._opening()
        random = np.random.default_rng(self.job.seed)

        def draw() -> tuple[Setting, str]:
            groups = int(random.choice(self.groups()))
            momentum = float(random.uniform(*self.job.space.momentum))
            low, high = self.job.space.factor
            step = self.theory.step * math.exp(random.uniform(math.log(low), math.log(high)))
            return self._setting(groups, momentum, step), "by chance"

        yield from self._asked(draw)

    def _grid(self) -> Plan:
        """All of a grid, as far as the budget goes: momentum in thirds, steps a factor of three apart."""
        yield from self._opening()
        points = [
            self._setting(groups, momentum, self.theory.step * factor)
            for factor in (1.0, 1 / 3, 3.0)
            for momentum in (0.9, 0.6, 0.3, 0.0)
            for groups in reversed(self.groups())
        ]
        points = [each for each in dict.fromkeys(points) if each not in {tried.setting for tried in self.tried}]
        yield from self._asked(lambda: (points.pop(0), "on the grid") if points else None)

    def _omnivore(self) -> Plan:
        """Groups by speed alone, then a grid of momentum and learning rate; fewer groups while no momentum is best.

        References:
            Hadjis et al. 2016, Algorithm 1. Repaired here: one group is the least, rates of learning may rise, means
            are over what was measured, and no setting is tried twice.
        """
        yield from self._opening()
        if self.profile is None:
            return
        groups, best = max(self.groups()), self.job.start.lr
        while True:
            for lr in (best, best / 10):
                for momentum in (0.9, 0.6, 0.3, 0.0):
                    free = Setting(groups, momentum, lr, period=self._period)
                    setting = self._as_it_would_be(self.job.space.holds(free))
                    if self._is_pruned(setting):
                        continue
                    probe = self._probe(setting, f"grid of {groups} groups")
                    if not self.affords(probe):
                        return
                    yield probe
            found = self._best_as_measured()
            if found.momentum > 0 or groups == 1 or found.groups != groups:
                return
            groups, best = max(each for each in self.job.space.groups if each < groups), found.lr

    def _is_pruned(self, setting: Setting) -> bool:
        """Whether it was tried, or takes larger steps than something that diverged."""
        return any(
            each.setting.groups == setting.groups
            and (
                (each.setting.momentum, each.setting.lr) == (setting.momentum, setting.lr)
                or (each.has_failed and each.setting.momentum <= setting.momentum and each.setting.lr <= setting.lr)
            )
            for each in self.tried
        )

    # --- scikit-optimize ---------------------------------------------------------------------------------------------

    def _setting(self, groups: int, momentum: float, step: float, period: int | None = None) -> Setting:
        momentum = round(momentum, 2)
        lr = float(f"{self.job.scaling.lr(groups, momentum, step):.3g}")
        steps = period or self._period
        return self.job.space.holds(Setting(groups, momentum, lr, self.is_uneven(groups, steps), steps))

    def _ask(self) -> tuple[Setting, str] | None:
        """The setting with the largest expected improvement over the best so far, unless that is a trifle."""
        from lightning_omni.search.surrogate import ask

        # Not as they were tried: what proportional batches save is known without a probe of them.
        settings = [self._as_it_would_be(each.setting) for each in self.tried]
        pace = Pace.of(self.theory, self.tried)
        times = [cost - math.log(self.throughput(each)) for cost, each in zip(pace.costs, settings, strict=True)]

        def predict(point: Mapping[str, float]) -> tuple[float, float]:
            setting = self._setting_at(point)
            mean, error = pace(setting)
            return mean - pace.offset - math.log(self.throughput(setting)), error

        point, gain = ask(self._dimensions(), list(map(self._coordinates, settings)), times, predict, self.job.seed)
        setting = self._setting_at(point)
        if gain < _WORTH or setting in settings:
            return None
        return setting, f"expected to save {1 - math.exp(-gain):.0%}"

    def _ask_plainly(self) -> tuple[Setting, str] | None:
        from lightning_omni.search.surrogate import ask

        points = [self._coordinates(each.setting) for each in self.tried]
        costs = [cost for cost, _ in log_costs(self.tried)]
        worst = max((cost for cost in costs if math.isfinite(cost)), default=0.0) + math.log(FAILED)
        times = [
            min(cost, worst) - math.log(self.throughput(each.setting))
            for cost, each in zip(costs, self.tried, strict=True)
        ]
        point, _ = ask(self._dimensions(), points, times, None, self.job.seed)
        return self._setting_at(point), "asked of scikit-optimize"

    def _dimensions(self) -> dict[str, tuple[float, float] | list[int]]:
        space = self.job.space
        dimensions: dict[str, tuple[float, float] | list[int]] = {"groups": self.groups(), "momentum": space.momentum}
        if self.strategy != "bayes":
            # From a cold start the largest step that does not diverge always wins, and loses later.
            dimensions["factor"] = (math.log(space.factor[0]), math.log(space.factor[1]))
        if len(space.period) > 1:
            dimensions["period"] = list(space.period)
        return {name: values for name, values in dimensions.items() if len(set(values)) > 1}

    def _coordinates(self, setting: Setting) -> dict[str, float]:
        away = math.log(max(self.job.scaling.step(setting), 1e-12) / self.theory.step)
        return {"groups": setting.groups, "momentum": setting.momentum, "factor": away, "period": setting.period}

    def _setting_at(self, point: Mapping[str, float]) -> Setting:
        start = self.job.start
        groups = int(point.get("groups", self.groups()[0]))
        step = self.theory.step * math.exp(point.get("factor", 0.0))
        return self._setting(
            groups, point.get("momentum", start.momentum), step, int(point.get("period", self._period))
        )


def _rose(tried: Tried) -> bool:
    """Whether the loss is higher at the end than at the beginning, by more than noise."""
    groups = tried.setting.groups
    if len(tried.losses) < 4 * groups:
        return False
    first, last = (float(np.mean(part)) for part in (tried.losses[:groups], tried.losses[-3 * groups :]))
    return last > first + 0.05 * abs(first)


def speeds_differ(measured: Sequence[Measured]) -> bool:
    """Whether ranks differ in speed by more than the scatter of their steps explains.

    Args:
        measured: of the same ranks.
    """
    ranks = len(measured[0].own)
    paces = [
        np.concatenate([np.array(each.own[rank]) / np.array(each.samples[rank]) for each in measured])
        for rank in range(ranks)
    ]
    means = np.array([pace.mean() for pace in paces])
    relative = np.concatenate([pace / pace.mean() for pace in paces])
    scatter = ((relative - 1) ** 2).sum() / max(1, len(relative) - ranks)
    errors = means.mean() * np.sqrt(scatter / np.array([len(pace) for pace in paces]))
    return bool((((means - means.mean()) / np.maximum(errors, 1e-12)) ** 2).mean() > _CLEARLY)
