"""The learning rate and momentum of an optimizer: their schedulers, and the momentum that asynchrony adds."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_omni.checks import check_number
from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.model import constants as c
from lightning_omni.tuning.model.forecast import Scaling

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

# --- Momentum from measured staleness ---------------------------------------------------------------------------------

# Asynchrony averages gradients of older weights into an update, and this acts like momentum (Mitliagkas et al. 2016).
# If staleness is geometric with mean E, P(l) = (1 - u) u^l with u = E / (1 + E) = 1 - 1/(1 + E), then the expected step
# is
#
#     D' = u D - (1 - u) lr ∇f                                                       (Theorem 3; u = 1 - 1/g, Theorem 5)
#     D' = (m + u) D - m u D₋ - (1 - u) lr ∇f         with explicit momentum m at the server                 (Theorem 6)
#
# The second line applies two momenta in sequence, (1 - m B)(1 - u B) D' = -(1 - u) lr ∇f, where B goes back one update.
# For steps that change slowly (D₋ = D) they act as one momentum t with 1 - t = (1 - m)(1 - u). Here, "total momentum"
# means this t; the sum m + u, which equals it for small m u, would soon exceed 1.
#
# Rule 1: The theorems require random staleness. Workers of nearly equal speed have a nearly constant delay, which is
# not momentum and does not help; `ImplicitMomentum.holds` reports it.
#
# The server estimates the total momentum while a run trains, see `lightning_omni.server.parameters.momentum_estimate`.

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ImplicitMomentum:
    """The momentum that staleness adds, and the validity of the theorem behind it.

    Attributes:
        momentum: u = 1 - 1 / (1 + mean), 0 or more and less than 1.
        mean: mean staleness, in updates.
        deviation: standard deviation of staleness, in updates.
        spread: ``deviation`` relative to that of a geometric staleness of this mean, √(mean (mean + 1)): 1 if staleness
            is geometric, near 0 if it is constant.
        distance: fraction of the pushes that would have to change to make staleness geometric (total variation).
        pushes: number of pushes.
    """

    momentum: float
    mean: float
    deviation: float
    spread: float
    distance: float
    pushes: int

    @property
    def holds(self) -> bool:
        """Return whether staleness is random enough for the theorem: zero, or with a ``spread`` of 0.5 to 1.5."""
        return self.mean == 0 or c.LEAST_SPREAD <= self.spread <= c.MOST_SPREAD

    @property
    def statement(self) -> str:
        """Return these results in a sentence."""
        text = f"mean staleness {self.mean:.3g} with a spread of {self.spread:.2f} of a geometric one"
        if self.mean == 0:
            return "no staleness: no implicit momentum"
        if self.holds:
            return f"{text}: implicit momentum {self.momentum:.3g}"
        if self.spread < c.LEAST_SPREAD:
            return f"{text}: nearly constant, a delay and not a momentum; the theorem does not hold, so search instead"
        return f"{text}: a few pushes are very late; the theorem does not hold, so search instead"


def implicit_momentum(histogram: Sequence[int] | Array) -> ImplicitMomentum:
    """Compute implicit momentum from measured staleness, as if that were geometric, and its distance from geometric.

    Args:
        histogram: number of pushes of staleness 0, 1, 2, ..., as returned by `Trace.staleness_histogram`.

    Raises:
        ConfigurationError: the histogram holds no push, or a negative number.

    Example:
        >>> implicit_momentum([800, 160, 32, 8]).statement
        'mean staleness 0.248 with a spread of 0.98 of a geometric one: implicit momentum 0.199'
        >>> implicit_momentum([0, 2, 4, 994]).holds
        False

    References:
        Mitliagkas et al. 2016, "Asynchrony begets Momentum", Theorems 3 and 5.
    """
    counts = np.asarray(histogram, dtype=np.float64)
    if counts.ndim != 1 or not np.isfinite(counts).all() or (counts < 0).any() or counts.sum() <= 0:
        raise ConfigurationError("histogram: pass the number of pushes of staleness 0, 1, 2, ..., at least one push")
    share, values = counts / counts.sum(), np.arange(len(counts))
    mean = float(share @ values)
    deviation = math.sqrt(float(share @ (values - mean) ** 2))
    momentum = mean / (1 + mean)
    geometric = (1 - momentum) * momentum**values
    beyond = max(0.0, 1 - float(geometric.sum()))
    return ImplicitMomentum(
        momentum=momentum,
        mean=mean,
        deviation=deviation,
        spread=deviation / math.sqrt(mean * (mean + 1)) if mean else 1.0,
        distance=min(1.0, (float(np.abs(share - geometric).sum()) + beyond) / 2),
        pushes=int(counts.sum()),
    )


def explicit_for(total: float, staleness: float) -> float:
    """Return the explicit momentum that reaches a total together with the momentum of geometric staleness.

    From (1 - total) = (1 - m)(1 - u), see the docstring of this module, follows m = 1 - (1 - total)(1 + staleness). The
    result is 0 where asynchrony alone adds as much or more.

    Args:
        total: wanted momentum, 0 or more and less than 1.
        staleness: mean staleness, in updates; with g groups that push one after the other it is g - 1.

    Example:
        >>> [round(explicit_for(0.9, groups - 1), 2) for groups in (1, 2, 4, 16)]
        [0.9, 0.8, 0.6, 0.0]
    """
    return max(0.0, min(total, round(1 - (1 - total) * (1 + staleness), 12)))


@dataclass(frozen=True)
class ExplicitMomentum:
    """The explicit momentum to set in the optimizer.

    Attributes:
        momentum: explicit momentum m, 0 or more and less than 1.
        first_order: m if momenta added up to the total, not clipped: negative where asynchrony alone exceeds the total.
        exceeded: whether asynchrony alone adds more momentum than wanted; fewer groups would help.
        implicit: momentum that asynchrony adds.
    """

    momentum: float
    first_order: float
    exceeded: bool
    implicit: ImplicitMomentum

    @property
    def statement(self) -> str:
        """Return these results in a sentence."""
        if self.exceeded and self.implicit.holds:
            return (
                f"{self.implicit.statement}; it alone exceeds the wanted total: no explicit momentum, or fewer groups"
            )
        return self.implicit.statement


def explicit_momentum(total: float, histogram: Sequence[int] | Array) -> ExplicitMomentum:
    """Compute the explicit momentum that reaches a wanted total together with the implicit one.

    The result is `explicit_for` of the measured mean staleness. Where the theorem does not hold (``implicit.holds``),
    use it only as the start of a search.

    Args:
        total: wanted momentum, 0 or more and less than 1: the best one without asynchrony.
        histogram: number of pushes of staleness 0, 1, 2, ...

    Raises:
        ConfigurationError: the total is no momentum, or the histogram holds no push.

    Example:
        >>> advice = explicit_momentum(0.9, [500, 250, 125, 63, 31, 16, 8, 4, 2, 1])  # two groups
        >>> round(advice.momentum, 2), round(advice.first_order, 2), advice.exceeded
        (0.8, 0.4, False)

    References:
        Mitliagkas et al. 2016, "Asynchrony begets Momentum", Theorem 6.
    """
    check_number("total", total, "a momentum, 0 or more and less than 1", low=0, below=1)
    implicit = implicit_momentum(histogram)
    return ExplicitMomentum(
        momentum=explicit_for(total, implicit.mean),
        first_order=total - implicit.momentum,
        exceeded=implicit.momentum > total,
        implicit=implicit,
    )


# --- Learning rate and momentum in a fit ------------------------------------------------------------------------------

_REHEARSED_STEPS = 1000
_REHEARSED_FACTOR = 0.5
_RATE_TOLERANCE = 0.01
"""The largest deviation from the scaled rate, as a fraction of the highest one: a warm-up may begin at a tiny rate."""


def check_scaling(
    optimizer: Optimizer, schedulers: Sequence[Any], held: Sequence[Any], scale: Callable[[Any, Any, float], None]
) -> None:
    """Check that the learning rates of schedulers that are not torch's are those that `scale` sets.

    Copies of the schedulers are stepped, so that the run's own do not change.

    Args:
        optimizer: the optimizer whose rates they set.
        schedulers: the schedulers of its rates.
        held: these, and those that they hold.
        scale: multiplies the rates of an optimizer and of its schedulers.

    Raises:
        ConfigurationError: the rates are others, or the schedulers cannot be copied and stepped.
    """
    foreign = sorted({type(each).__name__ for each in held if not type(each).__module__.startswith("torch.")})
    if not foreign:
        return
    names = " and ".join(foreign)
    remedy = (
        "compute the rates from base_lrs, as the schedulers of torch do, or use those (a SequentialLR of LinearLR and"
        " CosineAnnealingLR, say)"
    )
    try:
        plain, scaled = (_Rehearsal(optimizer, schedulers, held) for _ in range(2))
        scale(scaled.optimizer, scaled.schedulers, _REHEARSED_FACTOR)
        plain.step()
        scaled.step()
    except Exception as error:  # a class of the user's own may raise anything
        raise ConfigurationError(
            f"{names} cannot be stepped on a copy to learn whether its schedule follows another learning rate"
            f" ({type(error).__name__}: {error}); {remedy}"
        ) from error
    if not plain.is_like(scaled):
        raise ConfigurationError(
            f"the schedule of {names} does not follow a learning rate that is chosen, because it keeps a rate of its"
            f" own under another name than base_lrs; {remedy}"
        )


class _Rehearsal:
    """Copies of schedulers, with an optimizer that has the rates of theirs, but not its parameters."""

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any], held: Sequence[Any]) -> None:
        groups = [{name: each for name, each in group.items() if name != "params"} for group in optimizer.param_groups]
        self.optimizer = Optimizer(
            [{**group, "params": [torch.zeros(1)]} for group in copy.deepcopy(groups)],
            copy.deepcopy(optimizer.defaults),
        )
        memo: dict[int, Any] = {id(optimizer): self.optimizer}
        for each in held:
            for value in vars(each).values():
                if isinstance(value, Optimizer):
                    memo[id(value)] = self.optimizer
                elif isinstance(value, Module):
                    memo[id(value)] = value  # it may be large, and a schedule only reads it
        self.schedulers = copy.deepcopy(list(schedulers), memo)
        self._rates: list[list[float]] = []

    def step(self) -> None:
        """Step the schedulers, and note the rates.

        Raises:
            Exception: whatever their first step raises. A later one may be beyond the end of the schedule.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimizer has stepped
            try:
                for _ in range(_REHEARSED_STEPS):
                    self._step_once()
            except Exception:
                if not self._rates:
                    raise

    def _step_once(self) -> None:
        for each in self.schedulers:
            each.step(*[1.0] * isinstance(each, ReduceLROnPlateau))
        self._rates.append([float(group["lr"]) for group in self.optimizer.param_groups])

    def is_like(self, scaled: _Rehearsal) -> bool:
        """Return whether the rates of another rehearsal are these times the factor."""
        highest = 0.0
        for mine, theirs in zip(self._rates, scaled._rates, strict=False):
            highest = max(highest, *map(abs, mine))
            for rate, other in zip(mine, theirs, strict=True):
                if not abs(other - _REHEARSED_FACTOR * rate) <= _RATE_TOLERANCE * _REHEARSED_FACTOR * highest:
                    return False
        return True


_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min")
_RATES_OF_PLATEAUS = ("default_min_lr", "eps")


class Hyperparameters:
    """The learning rate and momentum of one optimizer, which `OmniTuner` tunes.

    The learning rate is that of the first parameter group at the peak of its schedule (a warm-up has hardly begun when
    a search does); the rates of other groups and of the schedulers change in proportion.

    Args:
        optimizer: the optimizer.
        schedulers: the schedulers of its rates.

    Raises:
        ConfigurationError: the optimizer has no weights (that of a module whose ``configure_optimizers`` returns None)
            or no learning rate (Adafactor, if it finds its own), or the learning rate is 0.
    """

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any] = ()) -> None:
        self._optimizer = optimizer
        self._given = list(schedulers)
        self._schedulers = _flat(schedulers)
        if not optimizer.param_groups:
            raise ConfigurationError("configure_optimizers returns no optimizer, so that nothing is trained")
        first = optimizer.param_groups[0]
        if any(group.get("lr") is None for group in optimizer.param_groups):
            raise ConfigurationError(f"{type(optimizer).__name__} has no learning rate that could be chosen; pass lr=")
        if not self.lr > 0:
            raise ConfigurationError(f"lr={self.lr}: learning rates near it are searched, so pass one above 0")
        self._has_betas = "betas" in first
        self.has_momentum = self._has_betas or "momentum" in first
        self._is_momentum_scheduled = any(getattr(each, "cycle_momentum", False) for each in self._schedulers)

    @classmethod
    def of(cls, trainer: Trainer) -> Hyperparameters:
        """Return the hyperparameters of a Trainer that has one optimizer."""
        return cls(trainer.optimizers[0], [config.scheduler for config in trainer.lr_scheduler_configs])

    @property
    def scaling(self) -> Scaling:
        """Return how learning rates scale with batch and momentum."""
        return Scaling(is_adaptive=not isinstance(self._optimizer, SGD))

    @property
    def is_momentum_free(self) -> bool:
        """Return whether momentum can be chosen: all parameter groups share one, and no schedule changes it."""
        is_common = len(set(map(self._momentum_of, self._optimizer.param_groups))) == 1
        return self.has_momentum and is_common and not self._is_momentum_scheduled

    @property
    def lr(self) -> float:
        """Return the learning rate at the peak of its schedule."""
        return self._highest()[0]

    @property
    def momentum(self) -> float:
        """Return the momentum, or β1; 0.0 if there is none."""
        return self._momentum_of(self._optimizer.param_groups[0])

    def _momentum_of(self, group: dict[str, Any]) -> float:
        return float(group["betas"][0] if self._has_betas else group.get("momentum", 0.0))

    def set_momentum(self, momentum: float) -> None:
        """Set the momentum (or β1) of all parameter groups.

        Nothing changes if the optimizer has no momentum, a scheduler changes it, or the first parameter group has this
        momentum already.
        """
        if not self.has_momentum or self._is_momentum_scheduled or momentum == self.momentum:
            return
        for group in self._optimizer.param_groups:
            if self._has_betas:
                first, *others = group["betas"]
                group["betas"] = (torch.full_like(first, momentum) if isinstance(first, Tensor) else momentum, *others)
            else:
                group["momentum"] = momentum

    def make_default(self) -> None:
        """Give the present momentum to parameter groups that are added later, as in finetuning."""
        if self.is_momentum_free:
            name = "betas" if self._has_betas else "momentum"
            getattr(self._optimizer, "defaults", {})[name] = self._optimizer.param_groups[0][name]

    def scale(self, factor: float) -> None:
        """Multiply all rates for good, including those that schedulers store. Schedules keep their shape."""
        if factor == 1.0:
            return
        for name in _RATES:
            groups = [group for group in self._optimizer.param_groups if name in group]
            _own(groups, name)
            for group in groups:
                _set(group, name, _times(group[name], factor))
        for scheduler in self._schedulers:
            for name in (*_RATES_OF_SCHEDULERS, *_RATES_OF_PLATEAUS * isinstance(scheduler, ReduceLROnPlateau)):
                value = vars(scheduler).get(name)
                if isinstance(value, list):
                    setattr(scheduler, name, [_times(each, factor) for each in value])
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    setattr(scheduler, name, _times(value, factor))

    def check_schedules(self) -> None:
        """Check that the schedules follow `scale`, before a search begins.

        Raises:
            ConfigurationError: a scheduler of the user's own class keeps a rate that `scale` does not know.
        """
        check_scaling(
            self._optimizer,
            self._given,
            self._schedulers,
            lambda optimizer, schedulers, factor: type(self)(optimizer, schedulers).scale(factor),
        )

    def _highest(self) -> list[float]:
        """Return the learning rate of each parameter group at the peak of its schedule."""
        rates = [
            float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in self._optimizer.param_groups
        ]
        for scheduler in self._schedulers:
            peaks = vars(scheduler).get("max_lrs", rates)  # the groups of a CyclicLR hold only the lowest
            rates = [max(float(peak), rate) for peak, rate in zip(peaks, rates, strict=True)]
        return rates


def _times(value: Any, factor: float) -> float:
    """Return a product, without rounding errors if it has few digits: the user's own rate is restored exactly.

    Example:
        >>> 0.05 * 1.3 * (1 / 1.3), _times(0.05 * 1.3, 1 / 1.3)
        (0.049999999999999996, 0.05)
    """
    product = float(value) * factor
    short = float(f"{product:.12g}")
    return short if math.isclose(product, short, rel_tol=1e-15) else product


def _flat(schedulers: Iterable[Any]) -> list[Any]:
    """Return schedulers, and those that they hold under any name, each once."""
    found: dict[int, Any] = {}
    left = list(schedulers)
    while left:
        each = left.pop()
        if id(each) not in found:
            found[id(each)] = each
            for held in vars(each).values():
                inside = held.tolist() if isinstance(held, np.ndarray) else held
                inside = inside if isinstance(inside, (list, tuple)) else [inside]
                left += [one for one in inside if isinstance(one, LRScheduler)]
    return list(found.values())


def _own(groups: Sequence[dict[str, Any]], name: str) -> None:
    """Replace a tensor that several groups share by one for each."""
    seen: set[int] = set()
    for group in groups:
        value = group[name]
        if isinstance(value, Tensor) and id(value) in seen:
            group[name] = value.clone()
        seen.add(id(value))


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    """Set a rate, which may be a tensor that a compiled optimizer reads."""
    if isinstance(group[name], Tensor):
        group[name].fill_(float(value))
    else:
        group[name] = float(value)
