"""The fit of an exchange's costs: its delay, and the time in which it occupies resources that all groups share."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lightning_omni.tuning.model import constants as c
from lightning_omni.tuning.model.cost_model import first_draw
from lightning_omni.tuning.model.measured import servers_of
from lightning_omni.tuning.model.placement import Placement, over_links
from lightning_omni.tuning.model.queueing import time_shared
from lightning_omni.tuning.model.resampled import Resampled

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Exchanges:
    """The exchanges of one segment, in seconds; a cycle lasts from one exchange to the next.

    Attributes:
        think: a cycle without its exchange, by group, shape (draws, groups).
        variance: variance of ``think``, shape (draws, groups).
        mean: mean exchange that crosses a link, shape (draws,).
        least: shortest such exchange. It most likely did not wait; later ones, among many groups, may all have waited.
        nbytes: bytes of an exchange.
        crosses: for each group, whether its exchanges cross a link.
    """

    think: Array
    variance: Array
    mean: Array
    least: float
    nbytes: int
    crosses: tuple[bool, ...]

    @classmethod
    def of(cls, drawn: Resampled, handed: Array) -> _Exchanges:
        """Return the exchanges of a segment, with ``handed``, shape (draws, groups), counted in ``think``.

        ``handed`` are the seconds of an exchange in which leaders forward the answer.
        """
        period, crossing = drawn.measured.period, over_links(drawn.measured)
        rest = [steps - exchanges for steps, exchanges in zip(drawn.steps, drawn.exchanges, strict=True)]
        exchanged, steady = (
            np.concatenate([rows[number] for number in crossing], axis=1) for rows in (drawn.exchanges, drawn.steady)
        )
        mean = period * (exchanged * steady).sum(axis=1) / np.maximum(steady.sum(axis=1), 1)
        return cls(
            think=period * np.stack([row.mean(axis=1) for row in rest], axis=1) + handed,
            variance=period * np.stack([row.var(axis=1) for row in rest], axis=1),
            mean=np.maximum(mean - handed[:, crossing].mean(axis=1), 0.0),
            least=min(
                (
                    max(each - float(handed[0, number]), 0.0)
                    for number in crossing
                    for each in drawn.measured.exchanges[number]
                    if each > 0
                ),
                default=0.0,
            ),
            nbytes=drawn.measured.nbytes,
            crosses=tuple(number in crossing for number in range(len(rest))),
        )

    def misses(self, away: Array, serve: Array, link: Array) -> list[Array]:
        """Return the errors of the mean and of the shortest exchange, as fractions of a cycle, each of shape (draws,).

        Args:
            away: seconds of an exchange that other groups do not prolong, shape (draws,).
            serve: seconds of the server, for which groups queue, shape (draws,).
            link: seconds on the server's link, each way, shape (draws,).
        """
        crosses = np.array(self.crosses)
        links = np.repeat((link[:, None] * crosses)[:, :, None], 2, axis=2)
        think = self.think + away[:, None] * crosses
        there = time_shared(think, self.variance, links, None, serve[:, None], np.ones(1))[:, crosses].mean(axis=1)
        cycle, over = float(self.think[0].mean() + self.mean[0]), away + serve + 2 * link - self.least
        return [(away + there - self.mean) / cycle, (np.maximum(over, 0.0) + c.SHORTEST_EXCHANGE * over) / cycle]


def fit_exchange(
    drawn: Sequence[Resampled], ring: Array, hop: Array, placement: Placement
) -> tuple[Array, Array, Array, Array]:
    """Fit the costs of an exchange, in seconds, each of shape (draws,).

    Args:
        drawn: segments of training.
        ring: seconds of a gradient's bytes on the links of a group, over which leaders forward answers, shape (draws,).
        hop: seconds of a message there that do not depend on its bytes, shape (draws,).
        placement: costs of messages within a node.

    Returns:
        The delay, a byte on a group's own link, the server's time for a push, and a byte on the server's link.
    """
    servers = servers_of([each.measured for each in drawn])
    several = [
        each
        for each in drawn
        if len(each.measured.groups) > 1 and (each.measured.servers, each.measured.per_node) == servers
    ]
    if not several:
        nothing = np.zeros(len(drawn[0].steps[0]))
        return nothing, nothing, nothing, nothing
    largest = max(each.measured.nbytes for each in drawn)
    segments = []
    for each in several:
        segment, part = each.measured, each.measured.nbytes / largest if largest else 1.0
        handed = placement.handed_on(segment.groups, hop + ring * part, segment.nbytes) * segment.hands_on
        segments.append(_Exchanges.of(each, handed))
    known = [each.measured.serve for each in several if each.measured.serve]
    serve, nbytes = sum(known) / max(len(known), 1), max(each.nbytes for each in segments)
    costs = _exchange_costs(segments, serve, nbytes)
    delay, beside, busy = costs[:, 0], costs[:, 1] / max(nbytes, 1), costs[:, 2]
    if not known or not nbytes:  # the data do not separate the server from its link
        is_noticed = not known or busy[0] > c.NOTICED * serve
        return delay, beside / 2, serve + is_noticed * busy, np.zeros_like(busy)
    link = busy / nbytes
    own = beside / 2 + link
    # Groups wait for the server, unless its link is busy for longer.
    return delay, own, np.full_like(busy, serve), link if busy[0] > (1 + c.NOTICED) * serve else np.zeros_like(busy)


def _exchange_costs(segments: Sequence[_Exchanges], serve: float, nbytes: int) -> Array:
    """Fit the delay, the delay of ``nbytes`` bytes, and the shared resource's time, shape (draws, 3).

    The shared resource is the server's link (each way) if ``serve`` and ``nbytes`` are known, and otherwise the server,
    with its time beyond ``serve``.
    """
    sizes = {each.nbytes for each in segments}
    # If all exchanges are of one size, all of their delay is attributed to the bytes.
    free = [index for index, is_free in enumerate((len(sizes) > 1 or not nbytes, nbytes > 0, True)) if is_free]
    unit = max(float(each.think[0].mean() + each.mean[0]) for each in segments)

    def misses(costs: Array, of: Sequence[_Exchanges]) -> Array:
        spread = np.zeros((len(of[0].mean), 3))
        spread[:, free] = unit * costs
        found: list[Array] = []
        for each in of:
            part = each.nbytes / max(nbytes, 1)
            away, busy = spread[:, 0] + spread[:, 1] * part, spread[:, 2]
            if serve and nbytes:
                found += each.misses(away, np.full_like(busy, serve), busy * part)
            else:
                found += each.misses(away, serve + busy, np.zeros_like(busy))
        return np.stack(found, axis=1)

    first = [first_draw(each) for each in segments]
    found, slopes = _least_squares(lambda costs: misses(costs, first)[0], len(free), segments, unit)
    # The other draws are close to the first, so one Gauss-Newton step fits each of them.
    missed = misses(found, segments)
    costs = np.zeros((len(missed), 3))
    costs[:, free] = unit * np.maximum(found - (missed - missed[0]) @ np.linalg.pinv(slopes, rcond=1e-2).T, 0.0)
    return costs


def _least_squares(
    misses: Callable[[Array], Array], count: int, segments: Sequence[_Exchanges], unit: float
) -> tuple[Array, Array]:
    """Fit the costs in units of ``unit``, the shared resource last, and return them with the Jacobian of the misses."""

    def slopes(costs: Array) -> Array:
        here = misses(costs)
        return np.stack([(misses(costs + step) - here) / c.SLOPE_STEP for step in c.SLOPE_STEP * np.eye(count)], axis=1)

    least = min(each.least for each in segments) / unit
    most = max(float(each.mean[0]) / each.think.shape[1] for each in segments) / unit
    starts = [
        np.append(np.full(count - 1, max(least - busy, 0.05 * least) / max(count - 1, 1)), busy)
        for busy in (0.0, 0.5 * least, most)  # from a server for which no group waits to one that is always busy
    ]
    fit = partial(scipy("optimize").least_squares, misses, jac=slopes, bounds=(0, np.inf), x_scale=0.1)
    best: Array = starts[0]
    least_cost = math.inf
    for start in starts:
        found = fit(start + 1e-9)
        # Of equally good fits (errors of a thousandth are equal) the first one has the least busy shared resource.
        if (cost := round(float(found.cost), 6)) < least_cost:
            best, least_cost = found.x, cost
        if not least_cost:
            break
    return best, slopes(best)


def scipy(part: str) -> Any:
    """Import a part of SciPy, such as its optimizers, at its first use, because the import is slow."""
    return importlib.import_module(f"scipy.{part}")
