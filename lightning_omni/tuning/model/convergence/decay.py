"""The likelihood of a decay that levels off, floor + drop (1 + q t / T)^(-1/q), and draws from it, as plain arrays.

Floor and drop enter linearly, so a weighted least squares of two columns yields them for each (T, q) of a grid, which
is narrowed to the likely region. `lightning_omni.tuning.model.convergence.statistical` derives verdicts and forecasts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

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
