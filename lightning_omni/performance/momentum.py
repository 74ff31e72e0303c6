"""What asynchrony does to momentum, from measured staleness.

Asynchrony averages gradients of older weights into an update, and this acts like momentum (Mitliagkas et al. 2016). If
staleness is geometric with mean E, P(l) = (1 - u) u^l with u = E / (1 + E) = 1 - 1/(1 + E), then the expected step is

    D' = u D - (1 - u) lr ∇f                                                       (Theorem 3; u = 1 - 1/g, Theorem 5)
    D' = (m + u) D - m u D₋ - (1 - u) lr ∇f         with explicit momentum m at the server                 (Theorem 6)

The second line is two momenta one after the other, (1 - m B)(1 - u B) D' = -(1 - u) lr ∇f, B being one update back. For
steps that change slowly (D₋ = D) they act as one momentum t of 1 - t = (1 - m)(1 - u). That is what "total momentum"
means here; the sum m + u, to which it is equal for small m u, would soon exceed 1.

Rule 1: all of this wants staleness to be random. Workers of nearly equal speed have a nearly constant delay, which
is not momentum and helps nothing; `Implicit.holds` says so.

The server senses the total momentum while a run trains, see `lightning_omni.protocol.sensing`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_omni.checks import check_number
from lightning_omni.errors import ConfigurationError
from lightning_omni.performance import constants as c

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Implicit:
    """The momentum that staleness adds, and whether the theorem behind that number holds.

    Attributes:
        momentum: u = 1 - 1 / (1 + mean), 0 or more and less than 1.
        mean: mean staleness, in updates.
        deviation: its standard deviation, in updates.
        spread: the deviation as a share of that of a geometric staleness of this mean, √(mean (mean + 1)): 1 if it is
            geometric, near 0 if it is constant.
        distance: share of the pushes that would have to change to make it geometric (total variation).
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
        """Whether staleness is random enough for the theorem: none at all, or of half to 1.5 times the spread."""
        return self.mean == 0 or c.LEAST_SPREAD <= self.spread <= c.MOST_SPREAD

    @property
    def statement(self) -> str:
        """All this in a sentence."""
        text = f"mean staleness {self.mean:.3g} with a spread of {self.spread:.2f} of a geometric one"
        if self.mean == 0:
            return "no staleness: no implicit momentum"
        if self.holds:
            return f"{text}: implicit momentum {self.momentum:.3g}"
        if self.spread < c.LEAST_SPREAD:
            return f"{text}: nearly constant, a delay and not a momentum; the theorem does not hold, so search instead"
        return f"{text}: a few pushes are very late; the theorem does not hold, so search instead"


def implicit_momentum(histogram: Sequence[int] | Array) -> Implicit:
    """Implicit momentum from measured staleness, as if that were geometric, and how geometric it is.

    Args:
        histogram: number of pushes of staleness 0, 1, 2, ...; what `Trace.staleness_histogram` gives.

    Raises:
        ConfigurationError: there is no push, or a number is negative.

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
    """The explicit momentum that makes up a wanted total with what staleness adds, if that is geometric.

    From (1 - total) = (1 - m)(1 - u), see the head of this module, m = 1 - (1 - total)(1 + staleness): 0 where
    asynchrony alone brings as much or more.

    Args:
        total: the wanted momentum, 0 or more and less than 1.
        staleness: its mean, in updates; with g groups that push one after the other it is g - 1.

    Example:
        >>> [round(explicit_for(0.9, groups - 1), 2) for groups in (1, 2, 4, 16)]
        [0.9, 0.8, 0.6, 0.0]
    """
    return max(0.0, min(total, round(1 - (1 - total) * (1 + staleness), 12)))


@dataclass(frozen=True)
class Explicit:
    """What to give the optimizer.

    Attributes:
        momentum: the explicit momentum m, 0 or more and less than 1.
        first_order: what the sum m + u would ask for, not clipped: negative where asynchrony alone exceeds the target.
        exceeded: asynchrony alone brings more momentum than wanted; fewer groups would help.
        implicit: what asynchrony brings.
    """

    momentum: float
    first_order: float
    exceeded: bool
    implicit: Implicit

    @property
    def statement(self) -> str:
        """All this in a sentence."""
        if self.exceeded and self.implicit.holds:
            return (
                f"{self.implicit.statement}; it alone exceeds the wanted total: no explicit momentum, or fewer groups"
            )
        return self.implicit.statement


def explicit_momentum(total: float, histogram: Sequence[int] | Array) -> Explicit:
    """The explicit momentum that makes up a wanted total with the implicit one.

    That of `explicit_for`, for the mean of what was measured. Where the theorem does not hold (``implicit.holds``) this
    is a place to search from and no more.

    Args:
        total: the wanted momentum, 0 or more and less than 1: what was best without asynchrony.
        histogram: number of pushes of staleness 0, 1, 2, ...

    Raises:
        ConfigurationError: the total is no momentum, or there is no push.

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
