"""What an exchange costs: its delay, and how long it keeps busy what all groups share."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lightning_omni.performance import constants as c
from lightning_omni.performance.cost_model import first_draw
from lightning_omni.performance.measured import servers_of
from lightning_omni.performance.placement import Placement, over_links
from lightning_omni.performance.queueing import time_shared
from lightning_omni.performance.resampled import Resampled

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Exchanges:
    """What one segment says of the exchange; seconds of one exchange, and of a cycle from one to the next.

    Attributes:
        think: of a cycle without the exchange, by group, shape (draws, groups).
        variance: of that, shape (draws, groups).
        mean: of an exchange that crosses a link, shape (draws,).
        least: the shortest of these. Most likely it did not wait; later, among many, all may.
        nbytes: of an exchange.
        crosses: of each group, whether its exchanges cross a link.
    """

    think: Array
    variance: Array
    mean: Array
    least: float
    nbytes: int
    crosses: tuple[bool, ...]

    @classmethod
    def of(cls, drawn: Resampled, handed: Array) -> _Exchanges:
        """What is left without the seconds of an exchange in which leaders hand it on, shape (draws, groups)."""
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
        """By what part of a cycle the mean is missed, and the shortest; both of shape (draws,).

        Args:
            away: seconds of an exchange that no other group lengthens, shape (draws,).
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
    """Delay, a byte on a group's own link, the server's time, and a byte on its link: seconds of each, shape (draws,).

    Args:
        drawn: segments of training.
        ring: seconds for a gradient's bytes on the links of a group, over which answers are handed on, shape (draws,).
        hop: of a message there, whatever its bytes, shape (draws,).
        placement: knows what messages within a node take.
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
    if not known or not nbytes:  # the server and its link cannot be told apart
        is_noticed = not known or busy[0] > c.NOTICED * serve
        return delay, beside / 2, serve + is_noticed * busy, np.zeros_like(busy)
    link = busy / nbytes
    own = beside / 2 + link
    # Groups wait for the server, unless its link is busy for longer.
    return delay, own, np.full_like(busy, serve), link if busy[0] > (1 + c.NOTICED) * serve else np.zeros_like(busy)


def _exchange_costs(segments: Sequence[_Exchanges], serve: float, nbytes: int) -> Array:
    """Delay, delay of so many bytes, and what is busy beside what is known to be: shape (draws, 3).

    That is the server's link each way, if the server's time ``serve`` is known, and otherwise the server.
    """
    sizes = {each.nbytes for each in segments}
    # Where all exchanges are of one size, all of their delay is ascribed to the bytes.
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
    # The other draws are near: one step of Gauss and Newton takes each to its own fit.
    missed = misses(found, segments)
    costs = np.zeros((len(missed), 3))
    costs[:, free] = unit * np.maximum(found - (missed - missed[0]) @ np.linalg.pinv(slopes, rcond=1e-2).T, 0.0)
    return costs


def _least_squares(
    misses: Callable[[Array], Array], count: int, segments: Sequence[_Exchanges], unit: float
) -> tuple[Array, Array]:
    """The costs, in units, of the last of which is the busiest station; and how the misses depend on them."""

    def slopes(costs: Array) -> Array:
        here = misses(costs)
        return np.stack([(misses(costs + step) - here) / c.SLOPE_STEP for step in c.SLOPE_STEP * np.eye(count)], axis=1)

    least = min(each.least for each in segments) / unit
    most = max(float(each.mean[0]) / each.think.shape[1] for each in segments) / unit
    starts = [
        np.append(np.full(count - 1, max(least - busy, 0.05 * least) / max(count - 1, 1)), busy)
        for busy in (0.0, 0.5 * least, most)  # a server for which no group waits, and one that is always busy
    ]
    fit = partial(scipy("optimize").least_squares, misses, jac=slopes, bounds=(0, np.inf), x_scale=0.1)
    best: Array = starts[0]
    least_cost = math.inf
    for start in starts:
        found = fit(start + 1e-9)
        # Of fits that are equally good (misses of a thousandth are) the first has the least that is always busy.
        if (cost := round(float(found.cost), 6)) < least_cost:
            best, least_cost = found.x, cost
        if not least_cost:
            break
    return best, slopes(best)


def scipy(part: str) -> Any:
    """Import a part of SciPy, such as its optimizers, where it is first used: that takes a while."""
    return importlib.import_module(f"scipy.{part}")
