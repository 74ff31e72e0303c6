"""Time to a target = hardware efficiency × statistical efficiency, for any setting, with an interval.

What settings cost in samples a prior says (`lightning_omni.search.experience`), or theory; a profile of the cluster
(`lightning_omni.performance.profile`) adds the samples per second.

Rule 1: what is compared are samples, not updates: groups of different size make updates of different size.
Rule 2: the sample efficiency of proportional batches is that of equal ones; the gradient is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


# --- The first batches of a run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedBatches(Serializable):
    """The losses of batches that a run has trained with one setting.

    Attributes:
        setting: what they were trained with.
        samples: samples that had been trained when each batch ended, ascending, shape (batches,).
        losses: mean training loss of each batch, before it was learnt from, shape (batches,).
    """

    setting: Setting
    samples: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def end(self) -> float:
        """Samples that were trained."""
        return self.samples[-1] if self.samples else 0.0

    @property
    def first_loss(self) -> float:
        """Mean loss of each group's first batch; NaN if there is none."""
        return float(np.mean(self.losses[: self.setting.groups])) if self.losses else math.nan

    @property
    def is_finite(self) -> bool:
        """Whether there are losses, and all of them are numbers."""
        return bool(self.samples) and all(map(math.isfinite, self.losses))

    @property
    def level(self) -> float:
        """The loss at which they ended: of the last segments."""
        return float(self.blocks()[-c.TAIL :].mean())

    @property
    def scatter(self) -> float:
        """Standard deviation of a batch's loss about what is learnt meanwhile: by differences of successive ones."""
        differences = np.diff(self.losses)
        return float(np.sqrt(np.mean(differences**2) / 2)) if len(differences) else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values; a loss that is not finite is None, which JSON knows."""
        losses = [loss if math.isfinite(loss) else None for loss in self.losses]
        return {**super().to_dict(), "losses": losses}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> TrainedBatches:
        """What `to_dict` gave."""
        return super().from_dict({**plain, "losses": [math.nan if loss is None else loss for loss in plain["losses"]]})

    def blocks(self, count: int = c.BLOCKS) -> Array:
        """Mean loss of each of ``count`` equal segments of the samples, shape (count,)."""
        edges = np.linspace(0, self.end, count + 1)
        ends = np.asarray(self.samples)
        # The integral of a loss that is constant over its batch, read at the edges.
        total = np.concatenate([[0.0], np.cumsum(np.diff(ends, prepend=0.0) * np.asarray(self.losses))])
        return np.asarray(np.diff(np.interp(edges, np.concatenate([[0.0], ends]), total)) / np.diff(edges))


# --- Sample efficiency -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Theory:
    """What is expected of settings before they are tried: logarithms of samples, relative to where one starts.

    Staleness costs: much at once, like the momentum 1 - 1 / g that it acts as, and then little; about as much explicit
    momentum is wanted as implicit momentum leaves room for; the step should be near the one that the user chose. How
    strongly is a matter of experience.

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


# --- Forecast --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SettingEstimate:
    """What is to be expected of a setting.

    Attributes:
        setting: the setting.
        seconds: time to the target; if no target is known only its ratios to those of other settings mean anything.
        samples_per_second: hardware efficiency.
        samples: samples to the target, or relative to those of the setting that theory starts from.
    """

    setting: Setting
    seconds: Estimate
    samples_per_second: float
    samples: Estimate


class Forecast:
    """Time to the target of any setting.

    Args:
        theory: says what settings cost in samples, and what it may be off by.
        throughput: samples per second of a setting.
        samples: samples to the target with the setting that theory starts from, or None if that is not known: then
            all times are relative to its.
        level: probability of the intervals.
    """

    def __init__(
        self,
        theory: Theory,
        throughput: Callable[[Setting], float],
        samples: Estimate | None = None,
        level: float = 0.8,
    ) -> None:
        self.theory, self.throughput, self.samples = theory, throughput, samples
        self._width = _deviations(level)

    def log_seconds(self, setting: Setting) -> float:
        """The logarithm of the time to the target, but for a constant: what a search makes small."""
        return self.theory(setting) - math.log(max(self.throughput(setting), 1e-12))

    def deviation(self, one: Setting, other: Setting) -> float:
        """The standard deviation of the logarithm of the ratio of their samples: 0 if they are as good as the same."""
        alike = replace(one, rebalance=other.rebalance) == other
        return 0.0 if alike else math.hypot(self.theory.error(one), self.theory.error(other))

    def of(self, setting: Setting) -> SettingEstimate:
        """The estimate of a setting."""
        mean, error = self.theory(setting), self.theory.error(setting)
        rate = max(self.throughput(setting), 1e-12)
        low, high = math.exp(mean - self._width * error), math.exp(mean + self._width * error)
        samples = _times(self.samples or Estimate(1.0, 1.0, 1.0), math.exp(mean), low, high)
        return SettingEstimate(setting, _times(samples, 1 / rate, 1 / rate, 1 / rate), rate, samples)

    def of_systems(self, ranks: int, saturating: int, own: Setting | None = None) -> dict[str, SettingEstimate]:
        """What well-known systems would have set, and what it would have cost.

        Learning rates are the user's, as these systems leave them, but for Rudra's, which divides by the staleness,
        and Omnivore's, which is tuned.

        Args:
            ranks: number of ranks.
            saturating: groups at which a serial part saturates.
            own: the user's setting; None for the theory's start.
        """
        start = own or self.theory.start
        alone = Setting(1, start.momentum, start.lr)
        systems = {
            "DDP, Horovod (synchronous)": alone,
            "proportional batches": Setting(1, start.momentum, start.lr, rebalance=True),
            "Downpour, A-SGD (asynchronous, untuned)": Setting(ranks, start.momentum, start.lr),
            "Rudra (asynchronous, lr by staleness)": Setting(ranks, start.momentum, start.lr / max(1, ranks - 1)),
            "Omnivore (groups where a part saturates)": self.theory.setting(saturating),
        }
        return {name: self.of(setting) for name, setting in systems.items()}


def samples_to(target: float, batches: TrainedBatches) -> Estimate | None:
    """Samples to a training loss, extrapolated from the first batches of a run; None if they say nothing.

    Args:
        target: the loss.
        batches: that were trained.
    """
    if not batches.is_finite or len(batches.samples) < c.FEWEST_POINTS:
        return None
    fit = fit_decay(LossCurve(np.array(batches.samples), np.array(batches.losses)), lowest=-math.inf)
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
