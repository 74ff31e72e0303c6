"""The effect of asynchrony on momentum, computed from measured staleness.

Asynchrony averages gradients of older weights into an update, and this acts like momentum (Mitliagkas et al. 2016). If
staleness is geometric with mean E, P(l) = (1 - u) u^l with u = E / (1 + E) = 1 - 1/(1 + E), then the expected step is

    D' = u D - (1 - u) lr ∇f                                                       (Theorem 3; u = 1 - 1/g, Theorem 5)
    D' = (m + u) D - m u D₋ - (1 - u) lr ∇f         with explicit momentum m at the server                 (Theorem 6)

The second line applies two momenta in sequence, (1 - m B)(1 - u B) D' = -(1 - u) lr ∇f, where B goes back one update.
For steps that change slowly (D₋ = D) they act as one momentum t with 1 - t = (1 - m)(1 - u). Here, "total momentum"
means this t; the sum m + u, which equals it for small m u, would soon exceed 1.

Rule 1: The theorems require random staleness. Workers of nearly equal speed have a nearly constant delay, which is not
momentum and does not help; `Implicit.holds` reports it.

The server estimates the total momentum while a run trains, see `lightning_omni.server.parameters.momentum_estimate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_omni.checks import check_number
from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.model import constants as c

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Implicit:
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


def implicit_momentum(histogram: Sequence[int] | Array) -> Implicit:
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
    return Implicit(
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
class Explicit:
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
    implicit: Implicit

    @property
    def statement(self) -> str:
        """Return these results in a sentence."""
        if self.exceeded and self.implicit.holds:
            return (
                f"{self.implicit.statement}; it alone exceeds the wanted total: no explicit momentum, or fewer groups"
            )
        return self.implicit.statement


def explicit_momentum(total: float, histogram: Sequence[int] | Array) -> Explicit:
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
    return Explicit(
        momentum=explicit_for(total, implicit.mean),
        first_order=total - implicit.momentum,
        exceeded=implicit.momentum > total,
        implicit=implicit,
    )
