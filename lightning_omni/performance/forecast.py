"""Time to a target = hardware efficiency × statistical efficiency, for any setting, with an interval.

Probes that start from the same weights and train on the same samples are compared where they end: one that is at a
loss which the best had reached after two thirds of the samples has two thirds of its sample efficiency. Theory says
what to expect of settings that were not tried, and the probes correct it (`SampleEfficiency`). A profile of the cluster
(`lightning_omni.performance.profile`) adds the samples per second.

Rule 1: what is compared are samples, not updates: groups of different size make updates of different size.
Rule 2: the sample efficiency of proportional batches is that of equal ones; the gradient is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from lightning_omni.checks import counted
from lightning_omni.methods import method_named
from lightning_omni.performance import constants as c
from lightning_omni.performance.statistical import DecayFit, Estimate, LossCurve, check_level, fit_decay
from lightning_omni.serialization import Serializable

Array = np.ndarray[Any, Any]


# --- Settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Setting(Serializable):
    """A point of the space that is searched.

    Attributes:
        groups: number of compute groups.
        momentum: explicit momentum (of Adam and its kin β1); 0.0 if the optimizer has none.
        lr: learning rate.
        rebalance: whether a group's batch is split in proportion to the speeds of its ranks.
        period: local steps between two exchanges.
        further: names and values in dimensions of a user's own, by name.
        method: how groups exchange, as ``OmniStrategy(method=...)`` takes it but for the period; empty for the run's
            own.
        wire: what pushes and answers are rounded to, as ``"int8"``, or ``"int8/bf16"`` for one each way; empty for the
            run's own.
        overlap: whether exchanges travel while the next gradient is computed.
        all_reduce: how the members of a group average their gradients, as ``OmniStrategy(all_reduce=...)`` takes it;
            empty for the run's own.
        merged: name of the submodule that stays at the server while there are several groups; empty for none.

    Example:
        >>> str(Setting(groups=4, momentum=0.3, lr=0.025))
        '4 groups, momentum 0.3, lr 0.025'
        >>> str(Setting(4, 0.9, 0.1, period=8, method="local_sgd", wire="int8/bf16"))
        '4 groups, local_sgd, period 8, wire int8/bf16, momentum 0.9, lr 0.1'
    """

    groups: int
    momentum: float
    lr: float
    rebalance: bool = False
    period: int = 1
    further: tuple[tuple[str, Any], ...] = ()
    method: str = ""
    wire: str = ""
    overlap: bool = False
    all_reduce: str = ""
    merged: str = ""

    @property
    def updates_per_batch(self) -> int:
        """How often the weights step while all ranks train one batch: for each group, if the server steps, or once."""
        if self.groups == 1:
            return 1
        return method_named(self.method).updates_per_batch(self.groups) if self.method else self.groups

    def further_value(self, name: str) -> Any:
        """The value in a dimension of a user's own."""
        return dict(self.further)[name]

    def with_further(self, name: str, value: Any) -> Setting:
        """The same with another value there."""
        return replace(self, further=tuple(sorted({**dict(self.further), name: value}.items())))

    @property
    def exchange(self) -> str:
        """How gradients and weights travel, in words; empty where that is plain, or nothing is known of it."""
        return ", ".join([*self._named_method, *self._pace] if self.groups > 1 else self._averaged)

    @property
    def _named_method(self) -> list[str]:
        return [self.method] * (self.groups > 1 and bool(self.method))

    @property
    def _averaged(self) -> list[str]:
        """How the members of a group average their gradients."""
        return [f"all-reduce {self.all_reduce}"] * (self.all_reduce not in ("", "fp32"))

    @property
    def _pace(self) -> list[str]:
        """How often groups exchange, and how."""
        several = self.groups > 1
        parts = [f"period {self.period}"] * (self.period > 1)
        parts += self._averaged
        parts += [f"wire {self.wire}"] * (several and self.wire not in ("", "fp32"))
        parts += [f"{self.merged} merged"] * (several and bool(self.merged))
        return parts + ["overlapped"] * (several and self.overlap)

    def __str__(self) -> str:
        parts = [counted(self.groups, "group"), *self._named_method]
        parts += ["proportional batches"] * self.rebalance + self._pace
        parts += [f"{name} {value}" for name, value in self.further]
        return ", ".join([*parts, f"momentum {self.momentum:.3g}", f"lr {self.lr:.3g}"])


@dataclass(frozen=True)
class Scaling:
    """Which learning rates do the same with other numbers of groups, and other momenta.

    A group of N / g ranks has a g-th of the batch, so each sample moves the weights by the same if the rate is a g-th,
    too; and momentum m multiplies what a gradient does in the end by 1 / (1 - m). Their product is the *step* of a
    setting: for small ones training follows one curve, whatever groups and momentum are. Adaptive optimizers divide by
    the gradients' size, in which neither momentum nor sums count; for them the square root of the batch is usual.

    Args:
        is_adaptive: whether the optimizer divides by the size of gradients, as Adam does.

    Example:
        >>> Scaling().step(Setting(groups=1, momentum=0.9, lr=0.1)), Scaling().lr(groups=4, momentum=0.6, step=1.0)
        (1.0, 0.1)
    """

    is_adaptive: bool = False

    def step(self, setting: Setting) -> float:
        """The rate of one group without momentum that would do the same."""
        return setting.lr / self.lr(setting.updates_per_batch, setting.momentum, 1.0)

    def lr(self, groups: int, momentum: float, step: float) -> float:
        """The learning rate of a setting of that step.

        Args:
            groups: that step one after the other; of methods that average what groups do in the same time it is one,
                see `Setting.updates_per_batch`.
            momentum: explicit momentum.
            step: as `step` says it.
        """
        return step / math.sqrt(groups) if self.is_adaptive else round(step * (1 - momentum) / groups, 12)


# --- Probes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialResult(Serializable):
    """What a probe showed.

    Attributes:
        setting: what was tried.
        samples: samples that had been trained when each batch ended, ascending, shape (batches,).
        losses: mean training loss of each batch, before it was learnt from, shape (batches,).
        seconds: how long the probe took, with all that belongs to it.
        problem: why it ended early; empty if it did not.
        gathers: whether its momentum began at nothing and had to be gathered first. (Adam corrects for that by itself.)
    """

    setting: Setting
    samples: tuple[float, ...]
    losses: tuple[float, ...]
    seconds: float = 0.0
    problem: str = ""
    gathers: bool = True

    @property
    def end(self) -> float:
        """Samples that it trained."""
        return self.samples[-1] if self.samples else 0.0

    @property
    def first_loss(self) -> float:
        """Mean loss of each group's first batch, from the weights that the probe began with; NaN if there is none."""
        return float(np.mean(self.losses[: self.setting.groups])) if self.losses else math.nan

    @property
    def last_loss(self) -> float:
        """Mean loss of the last eighth of the samples; NaN if there is none."""
        return float(self.blocks(self.end)[-1]) if self.samples else math.nan

    @property
    def has_failed(self) -> bool:
        """Whether it diverged, or came to no end."""
        return bool(self.problem) or not self.samples or not all(map(math.isfinite, self.losses))

    def to_dict(self) -> dict[str, Any]:
        """Plain values; a loss that is not finite is None, which JSON knows."""
        losses = [loss if math.isfinite(loss) else None for loss in self.losses]
        return {**super().to_dict(), "losses": losses}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> TrialResult:
        """What `to_dict` gave."""
        return super().from_dict({**plain, "losses": [math.nan if loss is None else loss for loss in plain["losses"]]})

    def blocks(self, until: float, count: int = c.BLOCKS) -> Array:
        """Mean loss of each of ``count`` equal segments of the first ``until`` samples, shape (count,)."""
        edges = np.linspace(0, until, count + 1)
        ends = np.asarray(self.samples)
        # The integral of a loss that is constant over its batch, read at the edges.
        total = np.concatenate([[0.0], np.cumsum(np.diff(ends, prepend=0.0) * np.asarray(self.losses))])
        return np.asarray(np.diff(np.interp(edges, np.concatenate([[0.0], ends]), total)) / np.diff(edges))


def log_costs(tried: Sequence[TrialResult]) -> list[tuple[float, float]]:
    """How many times as many samples each probe needs as the one that came furthest, in logarithms, with errors.

    All must have started at one snapshot. They are compared at the samples at which the shortest ended, on the same
    samples: their noise is the same, and the difference is free of most of it. A probe starts without momentum, which
    holds it up for m / (1 - m) updates, and a run only once; so these are not counted against it.

    Returns:
        For each probe the logarithm and its standard error: 0 for the one that came furthest, less for one that is
        only held up by its beginning, infinite for one that diverged.

    Example:
        >>> samples = tuple(range(10, 330, 10))
        >>> def probe(speed):
        ...     return TrialResult(Setting(1, 0.0, 0.1), samples, tuple(1 / (1 + speed * end / 50) for end in samples))
        >>> [round(math.exp(cost), 1) for cost, _ in log_costs([probe(1.0), probe(0.5)])]
        [1.0, 2.0]
    """
    sound = [each for each in tried if not each.has_failed]
    if not sound:
        return [(math.inf, 0.0)] * len(tried)
    until = min(each.end for each in sound)
    curves = [None if each.has_failed else _Curve.of(each, until) for each in tried]
    best = min((curve for curve in curves if curve is not None), key=lambda curve: curve.level)
    return [(math.inf, 0.0) if curve is None else curve.log_cost(best) for curve in curves]


@dataclass(frozen=True, eq=False)
class _Curve:
    """A probe's losses, smoothed, over the samples that count."""

    losses: Array
    places: Array

    @classmethod
    def of(cls, tried: TrialResult, until: float) -> _Curve:
        centres = (np.arange(c.BLOCKS) + 0.5) * until / c.BLOCKS
        update = tried.end / len(tried.samples)  # samples of one
        momentum = min(tried.setting.momentum, 0.99) if tried.gathers else 0.0
        held_up = momentum / (1 - momentum) * (1 - momentum ** (centres / update)) * update
        # Half an update at least: before the first one nothing is learnt.
        return cls(tried.blocks(until), np.maximum(centres - held_up, 0.5 * centres))

    @property
    def level(self) -> float:
        """The loss at the end."""
        return float(self.losses[-c.TAIL :].mean())

    @property
    def place(self) -> float:
        """The samples that led to it."""
        return float(self.places[-c.TAIL :].mean())

    def log_cost(self, best: _Curve) -> tuple[float, float]:
        """Samples to come where this is, relative to those of the best."""
        curve = np.minimum.accumulate(best.losses)
        span = float(curve[0] - curve[-1])
        if not np.isfinite(self.losses).all() or self.level >= curve[0] + c.WORSE * max(span, 1e-12):
            return math.inf, 0.0  # worse than where all began
        if span <= 0:
            return 0.0, 1.0  # no probe learns anything
        reached, middle = (float(np.interp(-level, -curve, best.places)) for level in (self.level, best.level))
        efficiency = max(c.SLOWEST_PROBE, reached / middle * best.place / self.place)
        # What the paired differences scatter, in units of samples by the slope of the best.
        scatter = float(np.std((self.losses - best.losses)[-c.TAIL :], ddof=1)) / math.sqrt(c.TAIL)
        error = scatter / span * float(best.places[-1]) / max(reached, 0.1 * middle)
        return -math.log(efficiency), min(1.0, error)


# --- Sample efficiency -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Theory:
    """What is expected of settings before they are tried: logarithms of samples, relative to where one starts.

    Staleness costs: much at once, like the momentum 1 - 1 / g that it acts as, and then little; about as much explicit
    momentum is wanted as implicit momentum leaves room for; the step should be near the one that the user chose. How
    strongly is a matter of experience, and probes correct it.

    Args:
        start: the setting that all others are measured by: the user's own, or what a run trains with by now.
        scaling: of learning rates.
        most: the largest explicit momentum; that of ``start`` if None.
        staleness: the cost of the first staleness, which is what it would be of very many groups but for ``spread``.
        spread: what every further group costs.
        narrow: the cost of a step that is e times as large or small, as a fraction.

    References:
        Mitliagkas et al. 2016, "Asynchrony begets Momentum", Theorem 6, for the momentum.
    """

    start: Setting
    scaling: Scaling
    most: float | None = None
    staleness: float = 0.4
    spread: float = 0.01
    narrow: float = 0.15

    @property
    def step(self) -> float:
        """The user's step."""
        return self.scaling.step(self.start)

    @property
    def total_momentum(self) -> float:
        """Explicit and implicit momentum of the user's setting together."""
        return 1 - (1 - self.start.momentum) / self.start.groups

    def momentum(self, groups: int) -> float:
        """The explicit momentum that is left for the optimizer; never more than ``most``."""
        if self.scaling.is_adaptive:
            return self.start.momentum
        most = self.start.momentum if self.most is None else self.most
        return min(most, max(0.0, round(1 - (1 - self.total_momentum) * groups, 6)))

    def setting(self, groups: int, rebalance: bool = False, period: int = 1, factor: float = 1.0) -> Setting:
        """The setting that theory proposes for a number of groups; ``factor`` makes larger or smaller steps."""
        momentum = self.momentum(groups)
        return Setting(groups, momentum, self.scaling.lr(groups, momentum, self.step * factor), rebalance, period)

    def error(self, setting: Setting) -> float:
        """The standard deviation of what this is off by, in logarithms."""
        return c.THEORY_ERROR

    def __call__(self, setting: Setting) -> float:
        """The logarithm of the samples to a target."""
        away = math.log(max(self.scaling.step(setting), 1e-12) / self.step)
        steepness = self.narrow if away < 0 else 2 * self.narrow
        momentum = 0.5 * (setting.momentum - self.momentum(setting.groups)) ** 2
        exchangers = setting.groups * setting.period if setting.groups > 1 else 1  # one group exchanges with no other
        stale = self.staleness * (1 - 1 / exchangers) + self.spread * (exchangers - 1)
        return math.log1p(stale) + steepness * away**2 + momentum


class SampleEfficiency:
    """The samples that settings need, from theory and probes: a Gaussian process about the theory.

    Its length scales are fixed (a factor of 2.5 in the number of groups, 0.4 of momentum, a factor of 3 in the step):
    half a dozen probes would not tell them.

    Args:
        theory: what is expected.
        settings: what was tried.
        costs: logarithms of the samples that each needs, but for a constant.
        errors: their standard errors.
        noise: how much less they say of the whole run than of themselves, as a standard deviation.
        further: coordinates of a setting in dimensions of a user's own; None for none.

    Example:
        >>> theory = Theory(Setting(1, 0.9, 0.1), Scaling())
        >>> efficiency = SampleEfficiency(theory)
        >>> mean, error = efficiency(theory.setting(groups=4))
        >>> round(math.exp(mean), 2), error > 0.2
        (1.33, True)
    """

    def __init__(
        self,
        theory: Theory,
        settings: Sequence[Setting] = (),
        costs: Sequence[float] = (),
        errors: Sequence[float] = (),
        noise: float = c.PROBE_ERROR,
        further: Callable[[Setting], list[float]] | None = None,
    ) -> None:
        self.theory, self._further = theory, further
        self.costs = list(costs)
        self._places = np.array([self._place(each) for each in settings])
        expected = np.array([theory(each) for each in settings])
        # Only differences between probes are known; theory says where the whole lies.
        self.offset = float(np.mean(expected - self.costs)) if len(costs) else 0.0
        variances = np.array([noise + error for error in errors or [0.0] * len(costs)]) ** 2
        self._left = np.array(self.costs) + self.offset - expected
        if len(costs):
            self._inverse = np.linalg.inv(_kernel(self._places, self._places) + np.diag(variances))

    @classmethod
    def of(
        cls, theory: Theory, tried: Sequence[TrialResult], further: Callable[[Setting], list[float]] | None = None
    ) -> SampleEfficiency:
        """From probes of one start; what diverged is `constants.FAILED` times slower than the slowest of the others."""
        costs = log_costs(tried)
        worst = max((cost for cost, _ in costs if math.isfinite(cost)), default=0.0) + math.log(c.FAILED)
        return cls(
            theory,
            [each.setting for each in tried],
            [min(cost, worst) for cost, _ in costs],
            [error for _, error in costs],
            further=further,
        )

    def __call__(self, setting: Setting) -> tuple[float, float]:
        """The logarithm of the samples to the target, relative to the theory's start, and its standard deviation."""
        expected = self.theory(setting)
        if not len(self._left):
            return expected, self.theory.error(setting)
        near = _kernel(np.array([self._place(setting)]), self._places)[0]
        variance = c.THEORY_ERROR**2 - near @ self._inverse @ near
        return float(expected + near @ self._inverse @ self._left), math.sqrt(max(float(variance), 1e-6))

    def deviation(self, one: Setting, other: Setting) -> float:
        """The standard deviation of the logarithm of the ratio of their samples: 0 if they are the same."""
        places = np.array([self._place(one), self._place(other)])
        covariance = _kernel(places, places)
        if len(self._left):
            near = _kernel(places, self._places)
            covariance = covariance - near @ self._inverse @ near.T
        difference = np.array([1.0, -1.0])
        return math.sqrt(max(float(difference @ covariance @ difference), 0.0))

    def _place(self, setting: Setting) -> list[float]:
        return [
            math.log(setting.groups) / math.log(c.NEAR_GROUPS),
            setting.momentum / c.NEAR_MOMENTUM,
            math.log(max(self.theory.scaling.step(setting), 1e-12)) / math.log(c.NEAR_STEP),
            math.log(setting.period) / math.log(c.NEAR_PERIOD),
            *(self._further(setting) if self._further is not None else ()),
        ]


def _kernel(a: Array, b: Array) -> Array:
    return np.asarray(c.THEORY_ERROR**2 * np.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1)))


# --- Forecast --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SettingEstimate:
    """What is to be expected of a setting.

    Attributes:
        setting: the setting.
        seconds: time to the target; if no target is known only its ratios to those of other settings mean anything.
        samples_per_second: hardware efficiency.
        samples: samples to the target, or relative to those of the best probe.
        is_measured: whether a probe tried this very setting.
    """

    setting: Setting
    seconds: Estimate
    samples_per_second: float
    samples: Estimate
    is_measured: bool


class Forecast:
    """Time to the target of any setting.

    Args:
        efficiency: samples that settings need.
        throughput: samples per second of a setting.
        samples: samples to the target with the sample efficiency of the best probe, or None if that is not known: then
            all times are relative to the best setting's.
        tried: settings that were tried.
        level: probability of the intervals.
    """

    def __init__(
        self,
        efficiency: SampleEfficiency,
        throughput: Callable[[Setting], float],
        samples: Estimate | None = None,
        tried: Sequence[Setting] = (),
        level: float = 0.8,
    ) -> None:
        self.efficiency, self.throughput, self.samples = efficiency, throughput, samples
        self._tried = set(tried)
        self._width = _deviations(level)

    def log_seconds(self, setting: Setting) -> float:
        """The logarithm of the time to the target, but for a constant: what a search makes small."""
        return self.efficiency(setting)[0] - math.log(max(self.throughput(setting), 1e-12))

    def of(self, setting: Setting) -> SettingEstimate:
        """The estimate of a setting."""
        mean, error = self.efficiency(setting)
        mean -= self.efficiency.offset
        rate = max(self.throughput(setting), 1e-12)
        low, high = math.exp(mean - self._width * error), math.exp(mean + self._width * error)
        samples = _times(self.samples or Estimate(1.0, 1.0, 1.0), math.exp(mean), low, high)
        return SettingEstimate(
            setting, _times(samples, 1 / rate, 1 / rate, 1 / rate), rate, samples, setting in self._tried
        )

    def of_systems(self, ranks: int, saturating: int, own: Setting | None = None) -> dict[str, SettingEstimate]:
        """What well-known systems would have set, and what it would have cost.

        Learning rates are the user's, as these systems leave them, but for Rudra's, which divides by the staleness,
        and Omnivore's, which is tuned.

        Args:
            ranks: number of ranks.
            saturating: groups at which a serial part saturates.
            own: the user's setting; None for the theory's start.
        """
        theory = self.efficiency.theory
        start = own or theory.start
        alone = Setting(1, start.momentum, start.lr)
        systems = {
            "DDP, Horovod (synchronous)": alone,
            "proportional batches": Setting(1, start.momentum, start.lr, rebalance=True),
            "Downpour, A-SGD (asynchronous, untuned)": Setting(ranks, start.momentum, start.lr),
            "Rudra (asynchronous, lr by staleness)": Setting(ranks, start.momentum, start.lr / max(1, ranks - 1)),
            "Omnivore (groups where a part saturates)": theory.setting(saturating),
        }
        return {name: self.of(setting) for name, setting in systems.items()}


def samples_to(target: float, tried: Sequence[TrialResult]) -> Estimate | None:
    """Samples to a training loss, extrapolated from the probe that came furthest; None if that says nothing.

    Args:
        target: the loss.
        tried: probes from one start.
    """
    costs = log_costs(tried)
    best = min(range(len(tried)), key=lambda i: costs[i][0], default=None)
    if best is None or tried[best].has_failed or len(tried[best].samples) < 8:
        return None
    fit = fit_decay(LossCurve(np.array(tried[best].samples), np.array(tried[best].losses)), lowest=-math.inf)
    if not isinstance(fit, DecayFit):
        return None
    found = fit.updates_to(target)
    return found if math.isfinite(found.value) else None


def _times(estimate: Estimate, value: float, low: float, high: float) -> Estimate:
    return Estimate(estimate.value * value, estimate.low * low, estimate.high * high, estimate.probability)


def _deviations(level: float) -> float:
    """How many standard deviations to either side hold a normal number with that probability."""
    check_level(level)
    return NormalDist().inv_cdf((1 + level) / 2)
