"""What asynchrony does to momentum: from measured staleness, from theory on a quadratic, and sensed during training.

Asynchrony averages gradients of older weights into an update, and this acts like momentum (Mitliagkas et al. 2016). If
staleness is geometric with mean E, P(l) = (1 - u) u^l with u = E / (1 + E) = 1 - 1/(1 + E), then the expected step is

    D' = u D - (1 - u) lr ∇f                                                       (Theorem 3; u = 1 - 1/g, Theorem 5)
    D' = (m + u) D - m u D₋ - (1 - u) lr ∇f         with explicit momentum m at the server                 (Theorem 6)

The second line is two momenta one after the other, (1 - m B)(1 - u B) D' = -(1 - u) lr ∇f, B being one update back. For
steps that change slowly (D₋ = D) they act as one momentum t of 1 - t = (1 - m)(1 - u). That is what "total momentum"
means here; the sum m + u, to which it is equal for small m u, would soon exceed 1.

Rule 1: all of this wants staleness to be random. Workers of nearly equal speed have a nearly constant delay, which
is not momentum and helps nothing; `Implicit.holds` says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_omni.errors import ConfigurationError
from lightning_omni.protocol.sensing import averaged, drawn, median_ratio

Array = np.ndarray[Any, Any]

_CONSTANT, _GEOMETRIC = 0.5, 1.5


# --- Staleness -------------------------------------------------------------------------------------------------------


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
        return self.mean == 0 or _CONSTANT <= self.spread <= _GEOMETRIC

    @property
    def statement(self) -> str:
        """All this in a sentence."""
        told = f"mean staleness {self.mean:.3g} with a spread of {self.spread:.2f} of a geometric one"
        if self.mean == 0:
            return "no staleness: no implicit momentum"
        if self.holds:
            return f"{told}: implicit momentum {self.momentum:.3g}"
        if self.spread < _CONSTANT:
            return f"{told}: nearly constant, a delay and not a momentum; the theorem does not hold, so search instead"
        return f"{told}: a few pushes are very late; the theorem does not hold, so search instead"


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

    From (1 - total) = (1 - m)(1 - u), see the head of this module, m = 1 - (1 - total)(1 + mean staleness), clipped at
    0. Where the theorem does not hold (``implicit.holds``) this is a place to search from and no more.

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
    if not 0 <= total < 1:
        raise ConfigurationError(f"total={total}: pass a momentum, 0 or more and less than 1")
    implicit = implicit_momentum(histogram)
    wanted = 1 - (1 - total) * (1 + implicit.mean)
    return Explicit(
        momentum=max(0.0, min(wanted, total)),
        first_order=total - implicit.momentum,
        exceeded=implicit.momentum > total,
        implicit=implicit,
    )


# --- Theory on a quadratic -------------------------------------------------------------------------------------------


@overload
def rate(momentum: float, implicit: float, lr: float, curvature: float) -> float: ...


@overload
def rate(
    momentum: float | Array, implicit: float | Array, lr: float | Array, curvature: float | Array
) -> float | Array: ...


def rate(
    momentum: float | Array, implicit: float | Array, lr: float | Array, curvature: float | Array
) -> float | Array:
    r"""By which factor an update takes the expected error of a quadratic nearer to 0, in the end; 1 or more diverges.

    The largest modulus of a root of

    .. math::

        z^3 - (1 + m + u - \eta (1 - u) h)\, z^2 + (m + u + m u)\, z - m u

    Args:
        momentum: the explicit momentum m, more than -1 and less than 1.
        implicit: the implicit momentum u, 0 or more and less than 1.
        lr: the learning rate η.
        curvature: the second derivative h. Arguments may be arrays, of shapes that broadcast.

    Example:
        Inside the robust region heavy-ball momentum converges like √m, whatever the curvature:

        >>> [round(float(rate(0.64, 0.0, lr=1.0, curvature=h)), 6) for h in (0.05, 1.0, 3.2)]
        [0.8, 0.8, 0.8]

    References:
        Mitliagkas et al. 2016, "Asynchrony begets Momentum", Theorem 7.
    """
    m, u, h = np.broadcast_arrays(
        *(np.asarray(each, np.float64) for each in (momentum, implicit, np.multiply(lr, curvature)))
    )
    companion = np.zeros((*m.shape, 3, 3))
    companion[..., 1, 0] = companion[..., 2, 1] = 1.0
    companion[..., 0, 0] = 1 + m + u - (1 - u) * h
    companion[..., 0, 1] = -(m + u + m * u)
    companion[..., 0, 2] = m * u
    moduli = np.abs(np.linalg.eigvals(companion)).max(axis=-1)
    return float(moduli) if moduli.ndim == 0 else np.asarray(moduli)


@dataclass(frozen=True)
class BestMomentum:
    """The fastest setting on quadratics.

    Attributes:
        momentum: the explicit momentum.
        lr: the learning rate times the largest curvature.
        rate: factor per update; ``-1 / log(rate)`` updates reduce the error e-fold.
    """

    momentum: float
    lr: float
    rate: float


def best_momentum(implicit: float, condition_number: float, lowest: float = 0.0) -> BestMomentum:
    """The explicit momentum and learning rate of the best worst rate over curvatures from 1 / condition_number to 1.

    A search on a grid that is narrowed seven times. Without asynchrony it finds ((√κ - 1) / (√κ + 1))² (Polyak); with
    more implicit momentum than that, no explicit momentum but a negative one would make up for it. Gradient noise is
    left out, and with it much of what bounds the learning rate in practice.

    Args:
        implicit: the implicit momentum, 0 or more and less than 1.
        condition_number: largest over smallest curvature κ, at least 1.
        lowest: the least momentum allowed; torch's SGD takes none below 0.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> [round(best_momentum(u, 100.0).momentum, 2) for u in (0.0, 0.5, 0.75)]
        [0.67, 0.13, 0.0]

    References:
        Mitliagkas et al. 2016, "Asynchrony begets Momentum", section 5; Polyak 1964.
    """
    if not 0 <= implicit < 1:
        raise ConfigurationError(f"implicit={implicit}: pass 0 or more and less than 1")
    if not 1 <= condition_number < math.inf:
        raise ConfigurationError(f"condition_number={condition_number}: pass a finite number, at least 1")
    if not -1 < lowest < 1:
        raise ConfigurationError(f"lowest={lowest}: pass a momentum, more than -1 and less than 1")
    curvatures = np.geomspace(1 / condition_number, 1.0, 3)
    low, high = np.array([lowest, math.log(1e-3)]), np.array([0.999, math.log(10 / (1 - implicit))])
    for _ in range(7):
        momenta, logs = np.linspace(low[0], high[0], 33), np.linspace(low[1], high[1], 33)
        rates = rate(momenta[:, None, None], implicit, np.exp(logs)[:, None], curvatures)
        worst = np.asarray(rates).max(axis=-1)
        i, j = np.unravel_index(worst.argmin(), worst.shape)
        best, reach = np.array([momenta[i], logs[j]]), (high - low) / 6
        found = BestMomentum(float(momenta[i]), math.exp(logs[j]), float(worst[i, j]))
        low, high = np.maximum(best - reach, low), np.minimum(best + reach, high)
    return found


# --- Sensed during training ------------------------------------------------------------------------------------------

Form = Literal["cascade", "published"]


class MomentumSensor(Metric):
    r"""Total momentum, sensed from the master weights and the gradients that move them.

    YellowFin's closed loop reads momentum off two steps and the gradient between them, as the median over coordinates:

    .. math::

        \hat m = \operatorname{median} \frac{x_{t+1} - x_t + \eta g(x_t)}{x_t - x_{t-1}}

    which gives the momentum of a synchronous run to rounding. Under asynchrony it misses that the gradient acts with
    1 - u of the learning rate only (Theorem 3), and where the weights drift steadily it reads the explicit momentum and
    nothing else. With the explicit momentum m known, the total t of 1 - t = (1 - m)(1 - u) has steps
    D' = t D - (1 - t) η g / (1 - m), and so

    .. math::

        \hat t = \operatorname{median} \frac{D' + \kappa \eta g}{D + \kappa \eta g}, \quad \kappa = \frac{1}{1 - m}

    which is the default, ``form="cascade"``. Numerators and denominators are averaged over the last updates, then
    divided, then the median taken; coordinates whose denominator is 0 are left out.

    It holds for plain SGD steps, x' = x - η v and v' = m v + g, without Nesterov's look-ahead, dampening or scaling by
    coordinate, with weight decay inside the gradient, and with η and m that change slowly against ``memory``. It must
    see every update of the weights, so it belongs where these are. Gradient noise does not disturb it in a synchronous
    run. In an asynchronous one it pulls the reading towards the middle between m and 1, the more so the less the
    gradient changes within the staleness: the longer the memory, the less. A constant delay of s updates reads as
    1 - 1 / (1 + s) as well: whether staleness is random is for `implicit_momentum` to say.

    Args:
        coordinates: how many weights are watched; the same ones throughout, drawn from all at the first update.
        memory: updates that the exponential averages reach back.
        longest: the largest staleness that is read; gradients that are staler are passed over.
        form: ``"cascade"`` or ``"published"`` (Zhang and Mitliagkas 2019).
        seed: of the choice of coordinates.

    Raises:
        ConfigurationError: a number is not positive, or there is no such form.

    Example:
        >>> sensor = MomentumSensor(coordinates=4)
        >>> x, v = torch.tensor([1.0, -2.0, 3.0, 0.5]), torch.zeros(4)
        >>> for _ in range(8):
        ...     gradient = x * torch.tensor([1.0, 0.5, 0.3, 2.0])
        ...     v = 0.6 * v + gradient
        ...     x = x - 0.1 * v
        ...     sensor.update([x], [gradient], lr=0.1, momentum=0.6)
        >>> round(float(sensor.compute()), 3)
        0.6

    References:
        Zhang and Mitliagkas 2019, "YellowFin and the Art of Momentum Tuning", section 4;
        Mitliagkas et al. 2016, "Asynchrony begets Momentum", Theorems 3 and 6.
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = True

    picked: Tensor
    history: Tensor
    seen: Tensor
    averages: Tensor

    def __init__(
        self, coordinates: int = 1000, memory: int = 50, longest: int = 64, form: Form = "cascade", seed: int = 0
    ) -> None:
        super().__init__(sync_on_compute=False)  # the weights are in one place
        for name, value, least in (("coordinates", coordinates, 1), ("memory", memory, 1), ("longest", longest, 0)):
            if value < least:
                raise ConfigurationError(f"{name}={value}: pass {least} or more")
        if form not in ("cascade", "published"):
            raise ConfigurationError(f"form={form!r}: pass 'cascade' or 'published'")
        self.coordinates, self.memory, self.longest, self.form, self.seed = coordinates, memory, longest, form, seed
        # A gradient of staleness s wants the weights s, s + 1 and s + 2 updates before the newest ones.
        states = {
            "picked": torch.zeros(0, dtype=torch.int64),
            "history": torch.zeros(longest + 3, 0, dtype=torch.float64),
            "seen": torch.zeros((), dtype=torch.int64),
            "averages": torch.zeros(2, 0, dtype=torch.float64),
        }
        for name, default in states.items():
            self.add_state(name, default, dist_reduce_fx=None, persistent=True)
        self._layout: tuple[list[int], Tensor, list[tuple[int, Tensor]]] | None = None

    def update(
        self,
        weights: Sequence[Tensor],
        gradient: Sequence[Tensor],
        lr: float,
        momentum: float = 0.0,
        staleness: int = 0,
    ) -> None:
        """Takes one update of the weights, right after it was made.

        Args:
            weights: the weights after the update.
            gradient: the gradient that went into it, in tensors of the same shapes.
            lr: the learning rate.
            momentum: the explicit momentum; ``form="published"`` does without.
            staleness: updates between the weights that the gradient was computed from and those that it was added to.

        Raises:
            ConfigurationError: shapes do not match, or a number is out of range.
        """
        if not 0 < lr < math.inf or not -1 < momentum < 1 or staleness < 0:
            raise ConfigurationError(
                f"lr={lr}, momentum={momentum}, staleness={staleness}: pass a positive learning rate, a momentum"
                " between -1 and 1, and a staleness of 0 or more"
            )
        self._pick(weights, gradient)
        self.history = torch.cat([self._watched(weights)[None], self.history[:-1]])
        self.seen += 1
        if staleness > self.longest or int(self.seen) < staleness + 3:
            return
        window = self.history[staleness : staleness + 3]
        terms, pushed = window[:2] - window[1:], lr * self._watched(gradient)
        # The published form has the gradient above the line only, and at its full weight.
        terms += torch.stack([pushed, 0 * pushed]) if self.form == "published" else pushed / (1 - momentum)
        self.averages = averaged(self.averages, terms, 1 - 1 / self.memory)

    def compute(self) -> Tensor:
        """The total momentum; NaN before three updates, or if no weight moved."""
        return median_ratio(self.averages)

    def _pick(self, weights: Sequence[Tensor], gradient: Sequence[Tensor]) -> None:
        """Chooses the coordinates once, and finds which of them are in which tensor."""
        sizes = [weight.numel() for weight in weights]
        if sizes != [each.numel() for each in gradient] or not sum(sizes):
            raise ConfigurationError(
                f"{len(weights)} weights, {len(gradient)} gradients: pass tensors of equal shapes, in the same order"
            )
        if not len(self.picked):
            self.picked = torch.tensor(drawn(sum(sizes), self.coordinates, self.seed), device=self.picked.device)
            self.history = self.history.new_zeros(len(self.history), len(self.picked))
            self.averages = self.history.new_zeros(2, len(self.picked))
        if self._layout is not None and self._layout[0] == sizes and self._layout[1] is self.picked:
            return
        ends = torch.tensor(sizes, device=self.picked.device).cumsum(0)
        if int(self.picked[-1]) >= int(ends[-1]):
            raise ConfigurationError(
                f"weights: {int(ends[-1])} numbers are fewer than at the first update; reset first"
            )
        homes = torch.searchsorted(ends, self.picked, right=True)
        places = [(int(home), (self.picked - ends[home] + sizes[home])[homes == home]) for home in homes.unique()]
        self._layout = (sizes, self.picked, places)

    def _watched(self, tensors: Sequence[Tensor]) -> Tensor:
        """The chosen coordinates, shape (coordinates,)."""
        assert self._layout is not None
        parts = [tensors[home].detach().flatten()[index.to(tensors[home].device)] for home, index in self._layout[2]]
        return torch.cat([part.to(self.history) for part in parts])
