"""Statistical efficiency: the number of updates to a target, from loss curves.

A curve is fitted by a decay that may level off anywhere and bend in any way between an exponential and a slow power,

    L(t) = floor + drop (1 + t / τ)^(-p),        L(t) = floor + drop exp(-t / τ) as p → ∞ with τ / p fixed,

so a forecast is as uncertain as the end of the curve leaves it. `lightning_omni.tuning.model.profile`
predicts the seconds per update.

Rule 1: The fit needs no start and cannot fail: it searches q = 1 / p and T = τ / p, with least squares in the rest.
Rule 2: Forecasts are quantiles over draws from the likelihood. A covariance would not suffice: for a curve that has not
levelled off yet, updates to a target are far from normally distributed, and may be infinite.
Rule 3: Floor and drop enter linearly, so a weighted least squares of two columns yields them for each (T, q) of a grid,
which is narrowed to the likely region.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np

from lightning_omni.checks import check_number, check_whole
from lightning_omni.errors import ConfigurationError
from lightning_omni.trace import Trace
from lightning_omni.tuning.model import constants as c

Array = np.ndarray[Any, Any]


def shape_of(moments: Array, scale: Array, bend: Array) -> Array:
    """Return the decay from 1 for any bend q >= 0: (1 + q t / T)^(-1/q), or exp(-t / T) at q = 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        slow = np.log1p(bend * moments / scale) / bend
    return np.asarray(np.exp(-np.where(bend > 0, slow, moments / scale)))


@dataclass(frozen=True, eq=False)
class DecayData:
    """The losses of a curve over positions in units of the last one."""

    x: Array
    y: Array
    weights: Array  # 1 / (standard deviation of the noise), up to a factor
    lowest: float

    def solve(self, scale: Array, bend: Array) -> Nodes:
        """Solve for floor >= lowest and drop >= 0 at every node (T, q) by least squares."""
        ones, losses = self.weights, self.weights * self.y
        shape = ones * shape_of(self.x, scale[:, None], bend[:, None])
        # Nearly equal columns do not determine floor and drop; a ridge of 1e-9 bounds them.
        normal = np.empty((len(scale), 2, 2))
        normal[:, 0, 0] = (ones @ ones) * (1 + 1e-9)
        normal[:, 0, 1] = normal[:, 1, 0] = shape @ ones
        normal[:, 1, 1] = (shape * shape).sum(1) + 1e-9 * (ones @ ones)
        right = np.stack([np.full(len(scale), ones @ losses), shape @ losses], axis=1)
        linear = self.bounded(np.linalg.solve(normal, right[:, :, None])[:, :, 0], normal, right)
        left = losses - linear[:, :1] * ones - linear[:, 1:] * shape
        return Nodes(scale, bend, linear, left, normal, right)

    def bounded(self, linear: Array, normal: Array, right: Array) -> Array:
        """Clip floor and drop to their bounds, and solve again for the other one where one was clipped."""
        floor, drop = linear.T
        low = floor < self.lowest
        if low.any():  # the bound may be -infinity
            floor = np.where(low, self.lowest, floor)
            drop = np.where(low, (right[:, 1] - self.lowest * normal[:, 0, 1]) / normal[:, 1, 1], drop)
        return np.stack([np.where(drop < 0, right[:, 0] / normal[:, 0, 0], floor), np.maximum(drop, 0.0)], axis=1)


@dataclass(frozen=True, eq=False)
class Nodes:
    """A set of decays at given (T, q), each with the best floor and drop."""

    scale: Array  # (nodes,)
    bend: Array  # (nodes,)
    linear: Array  # (nodes, 2): floor and drop
    residuals: Array  # (nodes, points)
    normal: Array  # (nodes, 2, 2)
    right: Array  # (nodes, 2)

    @property
    def squares(self) -> Array:
        """Return the sum of squared residuals of each node, above 0, shape (nodes,)."""
        return np.asarray((self.residuals**2).sum(1) + 1e-24 * self.residuals.shape[1])

    @property
    def best(self) -> int:
        return int(self.squares.argmin())

    @property
    def freedom(self) -> float:
        """Return the degrees of freedom at the best node, with correlated points counted as fewer; at least 1."""
        residuals = self.residuals[self.best]
        return max((len(residuals) - 4) / autocorrelation_time(residuals), 1.0)

    @property
    def likely(self) -> Array:
        """Return the log likelihood of each node, 0 at the best, integrated over the unknown noise, shape (nodes,)."""
        return np.asarray(-self.freedom / 2 * np.log(self.squares / self.squares.min()))


@dataclass(frozen=True, eq=False)
class Candidates:
    """A weighted sample of nodes from the likely region of (T, q)."""

    nodes: Nodes
    weights: Array  # (nodes,), of sum 1

    def drawn(self, data: DecayData, draws: int, random: np.random.Generator) -> Array:
        """Draw floor, drop, T and q in proportion to the likelihood, shape (draws, 4)."""
        nodes = self.nodes
        which = random.choice(len(self.weights), size=draws, p=self.weights)
        # Given T, q and the variance of a point, floor and drop are normal with covariance variance * inverse(XᵀX),
        # which is that of inverse(Lᵀ) z, with LLᵀ = XᵀX / variance and z standard normal.
        variance = nodes.squares[which] / random.chisquare(nodes.freedom, draws)
        factor = np.linalg.cholesky(nodes.normal[which] / variance[:, None, None])
        noise = np.linalg.solve(factor.transpose(0, 2, 1), random.standard_normal((draws, 2, 1)))[:, :, 0]
        linear = data.bounded(nodes.linear[which] + noise, nodes.normal[which], nodes.right[which])
        return np.column_stack([linear, nodes.scale[which], nodes.bend[which]])


def candidates(data: DecayData, slowest: float, random: np.random.Generator) -> Candidates:
    """Sample decays in proportion to the likelihood, with bends from 0 to ``slowest``."""
    grid, steps = _narrowed(data, slowest)
    weights = np.exp(grid.likely)
    which = random.choice(len(weights), size=c.CANDIDATES, p=weights / weights.sum())
    # Each node represents its cell; the weights correct for a likelihood that varies within the cell.
    away = steps * random.uniform(-0.5, 0.5, (c.CANDIDATES, 2))
    nodes = data.solve(grid.scale[which] * np.exp(away[:, 0]), np.abs(grid.bend[which] + away[:, 1]))
    weights = np.exp(nodes.likely) / weights[which]
    return Candidates(nodes, weights / weights.sum())


def _narrowed(data: DecayData, slowest: float) -> tuple[Nodes, Array]:
    """Return a grid over the likely (T, q), and its steps in log T and q."""
    low, high = np.array([math.log(c.SHORTEST_DECAY), 0.0]), np.array([math.log(c.LONGEST_DECAY), slowest])
    for _ in range(c.GRID_ROUNDS):
        across, down = np.linspace(low[0], high[0], c.GRID_NODES), np.unique(np.linspace(low[1], high[1], c.GRID_NODES))
        logs, bends = (axis.ravel() for axis in np.meshgrid(across, down))
        nodes = data.solve(np.exp(logs), bends)
        step = np.array([across[1] - across[0], down[1] - down[0] if len(down) > 1 else 0.0])
        kept = np.stack([logs, bends])[:, nodes.likely > -c.UNLIKELY]
        lower, upper = np.maximum(kept.min(1) - step, low), np.minimum(kept.max(1) + step, high)
        if (upper - lower >= 0.7 * (high - low)).all():
            break
        low, high = lower, upper
    return nodes, step


def autocorrelation_time(residuals: Array) -> float:
    """Return the number of points that carry the information of one independent point.

    The estimate is the larger of two: from the correlation of neighbours, and from the excess scatter of block means.
    Correlated noise increases it, and so does a law that does not fit.
    """
    total, points = float(residuals @ residuals), len(residuals)
    if total <= 0 or points < 8:
        return 1.0
    correlation = min(max(float(residuals[1:] @ residuals[:-1]) / total, 0.0), 0.9)
    size = math.isqrt(points)
    sums = residuals[: points - points % size].reshape(-1, size).sum(axis=1)
    blocks = float(sums @ sums) / (len(sums) * size) / (total / points)
    return max((1 + correlation) / (1 - correlation), blocks, 1.0)


# --- Estimates -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A value and the interval that holds it with a stated probability; infinite if an event never happens.

    Attributes:
        value: median.
        low: lower end of the interval.
        high: upper end.
        probability: probability that the value is finite.

    Example:
        >>> some, none = Estimate(120.0, 100.0, math.inf, probability=0.7), Estimate(math.inf, math.inf, math.inf, 0.0)
        >>> str(some), str(none)
        ('120 (100 to inf)', 'never reached')
    """

    value: float
    low: float
    high: float
    probability: float = 1.0

    def __str__(self) -> str:
        if self.low == math.inf:
            return "never reached"
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"

    def times(self, factor: float) -> Estimate:
        """Return the estimate multiplied by ``factor``, with the same probability."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.probability)


def check_level(level: float) -> None:
    """Raise a `ConfigurationError` unless ``level`` is a probability of an interval."""
    check_number("level", level, "a probability between 0 and 1", above=0, below=1)


# --- Curves ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LossCurve:
    """The losses of a run over its updates or samples.

    Args:
        moments: updates or samples at each point, counted from the start of the run, rising, shape (n,).
        losses: loss at each point, the lower the better, shape (n,); may be NaN or infinite.

    Raises:
        ConfigurationError: the shapes differ, or the moments do not rise.

    Example:
        >>> curve = LossCurve([1, 2, 3, 4], [4.0, 2.0, 3.0, 1.0])
        >>> curve.smoothed(2).losses.tolist(), curve.smoothed(2).moments.tolist()
        ([4.0, 3.0, 2.5, 2.0], [1.0, 1.5, 2.5, 3.5])
    """

    moments: Array
    losses: Array

    def __post_init__(self) -> None:
        for name in ("moments", "losses"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        if self.moments.ndim != 1 or self.moments.shape != self.losses.shape:
            raise ConfigurationError(
                f"moments of shape {self.moments.shape}, losses of shape {self.losses.shape}: pass one loss per moment"
            )
        if not np.isfinite(self.moments).all() or (np.diff(self.moments) <= 0).any() or (self.moments < 0).any():
            raise ConfigurationError("moments: pass rising finite numbers, counted from 0 at the start of the run")

    @classmethod
    def of(cls, trace: Trace, metric: str | None = None) -> LossCurve:
        """Return the training loss of a run over its updates, or a metric of its evaluations.

        Args:
            trace: trace of the run.
            metric: name of an evaluated loss; None for the mean training loss of each update.

        Raises:
            ConfigurationError: the run did not evaluate the metric.
        """
        if metric is not None:
            if metric not in trace.evaluated:
                raise ConfigurationError(f"metric={metric!r}: this run was evaluated for {sorted(trace.evaluated)}")
            return cls(trace.evaluated["update"], trace.evaluated[metric])
        writes, which = np.unique(trace.rows["write"], return_inverse=True)
        return cls(writes, np.bincount(which, trace.rows["loss"]) / np.bincount(which))

    def __len__(self) -> int:
        return len(self.moments)

    def smoothed(self, window: int) -> LossCurve:
        """Return the running means, each at the mean position of its window (a trailing mean would lag).

        The losses equal torchmetrics' ``RunningMean(window)`` and thus a user's log; the metric itself takes half a
        millisecond per point. `fit_decay` needs the raw curve: smoothing correlates neighbours, and the errors would be
        too small.

        Args:
            window: number of points in a mean, at least 1.

        Raises:
            ConfigurationError: the window is empty.
        """
        check_whole("window", window, "a positive number of points", low=1)
        means = [
            np.array([part[max(0, end - window) : end].mean() for end in range(1, len(self) + 1)])
            for part in (self.moments, self.losses)
        ]
        return LossCurve(*means)


def level(moments: Array, losses: Array) -> tuple[float, float]:
    """Compute the mean of some points of a curve and its standard error; correlated points count as fewer.

    The scatter is measured about the points' own straight line, so a curve that still falls steeply does not count as
    noisy.

    Args:
        moments: positions of at least three points, shape (n,).
        losses: finite losses at these positions, shape (n,).
    """
    points = len(losses)
    design = np.stack([np.ones(points), moments - moments.mean()], axis=1)
    residuals = losses - design @ np.linalg.lstsq(design, losses, rcond=None)[0]
    variance = float(residuals @ residuals) / (points - 2) * autocorrelation_time(residuals)
    return float(losses.mean()), math.sqrt(variance / points)


# --- Decays ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diverged:
    """The verdict on a curve that rose or became infinite; such a curve reaches no target.

    Attributes:
        at: position on the curve from which the divergence shows, in updates or samples.
        reason: explanation for users.
    """

    at: float
    reason: str

    def updates_to(self, target: float, level: float = 0.8) -> Estimate:
        """Return an infinite estimate, whatever the target and the level."""
        return Estimate(math.inf, math.inf, math.inf, probability=0.0)


@dataclass(frozen=True, eq=False)
class DecayFit:
    """A fitted decay, with draws of other decays that are likely.

    Attributes:
        floor: limit of the loss.
        drop: loss at position 0, less the floor.
        tau: time constant τ, in the curve's unit.
        power: power p; infinite for an exponential.
        noise: standard deviation of a fitted point about the curve.
        points: number of fitted points: means of neighbours, if the curve has more than 256.
        autocorrelation_time: number of points with the information of one independent point; large if the noise is
            correlated, or if the curve is not of this family.
        end: last fitted position; later losses are forecast.
        skipped: start of the curve, if the family fits only the rest.
        draws: floor, drop, T and q of each draw, shape (draws, 4), with T in the curve's unit.
    """

    floor: float
    drop: float
    tau: float
    power: float
    noise: float
    points: int
    autocorrelation_time: float
    end: float
    skipped: LossCurve = field(repr=False)
    draws: Array = field(repr=False)

    @property
    def family(self) -> str:
        """Return ``"exponential"`` or ``"power"``."""
        return "exponential" if math.isinf(self.power) else "power"

    def updates_to(self, target: float, level: float = 0.8) -> Estimate:
        """Return the updates (or samples, if the curve is over samples) until the curve, without noise, is at a target.

        The result is 0 if the curve starts there, and infinite in so far as the floor may be above: ``high`` is
        infinite if that has a probability of more than (1 - level) / 2, ``value`` if it is more likely than not.
        """
        return _estimate(self.draws_to(target), level)

    def draws_to(self, target: float) -> Array:
        """Return `updates_to` for each draw, shape (draws,)."""
        floor, drop, scale, bend = self.draws.T
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            left = (target - floor) / drop
            speed = np.where(bend > 0, np.expm1(-bend * np.log(left)) / np.where(bend > 0, bend, 1), -np.log(left))
            updates = np.where(floor + drop <= target, 0.0, np.where(left > 0, scale * speed, np.inf))
        # Positions before the fit are read off the skipped start, not extrapolated.
        if not len(self.skipped):
            return updates
        return np.where(updates < self.skipped.moments[-1], self._seen(target), updates)

    def _seen(self, target: float) -> Array:
        """Return the position at which the skipped start was at a target, within the noise, shape (draws,).

        The method counts the points above the target, because noise makes the first point below it come too early.
        """
        window = max(3, len(self.skipped) // 10)
        smooth = self.skipped.smoothed(window)
        error = float(np.diff(self.skipped.losses).std()) / math.sqrt(2 * window)
        shares = (np.arange(len(self.draws)) + 0.5) / len(self.draws)
        levels = target + error * np.array([NormalDist().inv_cdf(share) for share in shares])
        above = len(smooth) - np.searchsorted(np.sort(smooth.losses), levels, side="right")
        return np.asarray(smooth.moments[np.minimum(above, len(smooth) - 1)])


Verdict: TypeAlias = DecayFit | Diverged


def _estimate(draws: Array, level: float) -> Estimate:
    check_level(level)
    # Quantiles are not interpolated between draws, because half-way to infinity is not a number.
    low, value, high = np.quantile(draws, [(1 - level) / 2, 0.5, (1 + level) / 2], method="inverted_cdf")
    return Estimate(float(value), float(low), float(high), probability=float(np.isfinite(draws).mean()))


def fit_decay(curve: LossCurve, lowest: float = 0.0, draws: int = 1000, seed: int = 0) -> Verdict:
    r"""Fit a decay to a curve, or report that the curve diverged.

    .. math::

        L(t) = \mathrm{floor} + \mathrm{drop}\,(1 + q t / T)^{-1/q}, \quad q \ge 0

    with q = 0 the exponential. Akaike's criterion selects the family; the draws have q free in either case, because a
    curve that an exponential fits may still have a tail. Single outliers (ten standard deviations from their
    neighbours' median) are replaced by that median, and a few non-finite losses are left out, if the curve recovers.
    The noise about a point determines its weight. If no decay fits the whole curve, for example after a slow start, the
    first quarter or half is left out, provided that the rest fits much better; a decay that starts later is of the same
    family. The intervals do not include the error of a law that fits only nearly (a few per cent of the updates).

    Args:
        curve: raw curve, not smoothed.
        lowest: lower bound of all losses, mostly 0; -infinity for none.
        draws: number of draws.
        seed: seed of the draws.

    Returns:
        The fit, or a `Diverged` if losses at the end or more than a tenth of all are not finite, or if the last fifth
        is clearly above the first and more than twice as high over ``lowest`` (over 0 if that is -infinity).

    Raises:
        ConfigurationError: the curve has fewer than eight points, or some losses are below ``lowest``.

    Example:
        >>> moments = np.arange(1, 201)
        >>> noise = np.random.default_rng(0).normal(0, 0.01, 200)
        >>> fit = fit_decay(LossCurve(moments, 0.5 + 2 * np.exp(-moments / 40) + noise))
        >>> fit.family, round(fit.floor, 2), round(fit.tau)
        ('exponential', 0.5, 40)
        >>> reached = fit.updates_to(0.6)  # truly 119.8
        >>> 116 < reached.low < 120 < reached.high < 124, str(fit.updates_to(0.4))
        (True, 'never reached')

    References:
        Golub and Pereyra 1973 (least squares whose variables separate); Akaike 1974.
    """
    _check(curve, lowest)
    diverged = _divergence(curve, lowest)
    if diverged is not None:
        return diverged
    finite = np.isfinite(curve.losses)
    usable = LossCurve(curve.moments[finite], _without_spikes(curve.losses[finite]))
    best = _fit(usable, 0, lowest, draws, seed)
    for share in (c.MOST_SKIPPED / 2, c.MOST_SKIPPED):
        if best.autocorrelation_time <= c.CORRELATED or len(usable) * (1 - share) < 4 * c.FEWEST_POINTS:
            break
        later = _fit(usable, round(share * len(usable)), lowest, draws, seed)
        best = later if later.autocorrelation_time < best.autocorrelation_time / c.LESS_CORRELATED else best
    return best


def _fit(curve: LossCurve, skipped: int, lowest: float, draws: int, seed: int) -> DecayFit:
    """Fit the curve after its skipped points."""
    random = np.random.default_rng(seed)
    moments, losses = _thin(curve.moments[skipped:], curve.losses[skipped:])
    # In units of the data the bounds on T mean the same for every curve.
    start, end, unit = float(losses.min()), float(moments[-1]), float(np.ptp(losses)) or 1.0
    data = DecayData(moments / end, (losses - start) / unit, _precision(losses), (lowest - start) / unit)
    exponential, general = (candidates(data, slowest, random) for slowest in (0.0, c.LARGEST_BEND))
    # Akaike's criterion: one more parameter must gain two in -2 log likelihood.
    ratio = exponential.nodes.squares.min() / general.nodes.squares.min()
    gain = general.nodes.freedom * math.log(ratio) - 2
    nodes = general.nodes if gain > 0 else exponential.nodes
    # An exponential is the edge q = 0 of the general family: without a share of its own it would not be drawn.
    few = round(draws / (1 + math.exp(min(gain / 2, 700.0))))
    drawn = np.concatenate([exponential.drawn(data, few, random), general.drawn(data, draws - few, random)])
    (floor, drop), scale, bend = nodes.linear[nodes.best], nodes.scale[nodes.best], float(nodes.bend[nodes.best])
    return DecayFit(
        floor=float(floor * unit + start),
        drop=float(drop * unit),
        tau=float(scale * end / (bend or 1.0)),
        power=1 / bend if bend else math.inf,
        noise=float(np.linalg.norm(nodes.residuals[nodes.best] / data.weights) * unit / math.sqrt(len(losses) - 4)),
        autocorrelation_time=max((len(losses) - 4) / nodes.freedom, 1.0),
        points=len(losses),
        end=end,
        skipped=LossCurve(*_thin(curve.moments[:skipped], curve.losses[:skipped])),
        draws=drawn * np.array([unit, unit, end, 1.0]) + np.array([start, 0.0, 0.0, 0.0]),
    )


def _check(curve: LossCurve, lowest: float) -> None:
    finite = curve.losses[np.isfinite(curve.losses)]
    # Non-finite points count here: many of them are a divergence, not a lack of points.
    if len(curve) < c.FEWEST_POINTS:
        raise ConfigurationError(
            f"{len(curve)} points: a decay needs at least {c.FEWEST_POINTS}; log more often, or train for longer"
        )
    if len(finite) and finite.min() < lowest:
        raise ConfigurationError(
            f"lowest={lowest}: there is a loss of {finite.min():.4g}; pass a bound below all, or -math.inf for none"
        )


def _divergence(curve: LossCurve, lowest: float) -> Diverged | None:
    moments, losses = curve.moments, curve.losses
    broken = ~np.isfinite(losses)
    tail = max(3, round(c.ENDS * len(losses)))
    if broken[-tail:].any() or broken.mean() > c.BROKEN:
        at = float(moments[broken][0])
        return Diverged(at, f"{int(broken.sum())} of {len(losses)} losses are not finite, the first at {at:g}")
    moments, losses = moments[~broken], _without_spikes(losses[~broken])
    (first, error), (last, other) = level(moments[:tail], losses[:tail]), level(moments[-tail:], losses[-tail:])
    height = first - (lowest if math.isfinite(lowest) else 0.0)
    if last - first > max(c.RISEN * math.hypot(error, other), abs(height)):
        return Diverged(float(moments[-tail]), f"the loss rose from {first:.4g} to {last:.4g}")
    return None


def _without_spikes(losses: Array, width: int = c.SPIKE_WINDOW) -> Array:
    """Replace outliers by the median of their neighbours, which on a monotone curve is the curve itself."""
    padded = np.pad(losses, width // 2, mode="reflect", reflect_type="odd")
    middle = np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)
    away = np.abs(losses - middle)
    # 1.48 times the median deviation is the standard deviation of normal noise.
    return np.where(away > c.SPIKE * 1.48 * np.median(away), middle, losses) if np.median(away) > 0 else losses


def _precision(losses: Array) -> Array:
    """Return 1 / (standard deviation of the noise), up to a factor, because a falling loss becomes less noisy.

    The estimate averages second differences, which vanish on a straight line, over a fifth of the points.
    """
    variance = np.pad(np.diff(losses, 2) ** 2, 1, mode="edge")
    width = min(max(len(losses) // 5, c.FEWEST_POINTS), len(losses)) // 2
    padded = np.pad(variance, width, mode="reflect")
    spread = np.sqrt(np.lib.stride_tricks.sliding_window_view(padded, 2 * width + 1).mean(axis=1))
    typical = float(np.median(spread))
    return np.asarray(typical / np.maximum(spread, 0.1 * typical)) if typical > 0 else np.ones(len(losses))


def _thin(moments: Array, losses: Array) -> tuple[Array, Array]:
    """Average blocks of neighbours, so that at most `constants.MOST_POINTS` points remain."""
    size = max(1, -(-len(moments) // c.MOST_POINTS))
    starts = np.arange(0, len(moments), size)
    counts = np.diff(np.append(starts, len(moments)))
    return np.add.reduceat(moments, starts) / counts, np.add.reduceat(losses, starts) / counts
