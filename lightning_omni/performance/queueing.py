"""Two quantities that decide how fast groups are: the slowest of several members, and the wait for what all share.

Everything has a first axis of draws, so that an interval costs little more than a number.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lightning_omni.performance import constants as c

Array = np.ndarray[Any, Any]


def slowest(values: Array, counts: Array) -> tuple[Array, Array]:
    r"""Mean and variance of the largest of several independent times, exact for empirical distributions.

    .. math::

        E[\max] = \int 1 - \prod_r F_r(t)^{c_r} \, dt

    Args:
        values: equally likely times of each of m kinds of member, in seconds, ascending: shape (draws, m, quantiles).
        counts: how many members of each kind there are, shape (m,).

    Returns:
        Both of shape (draws,), in seconds and seconds squared.

    Example:
        >>> mean, variance = slowest(np.array([[[1.0, 2.0], [0.0, 3.0]]]), np.array([1, 1]))
        >>> mean.tolist(), variance.tolist()  # 1 or 2 with 0, and 3 with either
        ([2.25], [0.6875])
    """
    draws, kinds, quantiles = values.shape
    if kinds == 1 and counts[0] == 1:
        return values[:, 0].mean(axis=1), values[:, 0].var(axis=1)
    flat = values.reshape(draws, -1)
    order = np.argsort(flat, axis=1)
    times = np.take_along_axis(flat, order, axis=1)
    # At its i-th time a distribution function rises from (i - 1) / n to i / n; in logarithms their product is a sum.
    logs = np.log(np.arange(1, quantiles + 1) / quantiles)
    rises = (counts[:, None] * np.diff(logs, prepend=0.0)).reshape(-1)  # and 0 until all have begun, see below
    product = np.exp(np.cumsum(rises[order], axis=1))
    product[times < values[:, :, 0].max(axis=1)[:, None]] = 0.0
    probabilities = np.diff(product, axis=1, prepend=0.0)
    mean = (times * probabilities).sum(axis=1)
    return mean, np.maximum((times**2 * probabilities).sum(axis=1) - mean**2, 0.0)


def residence(think: Array, variance: Array, service: Array, visits: Array) -> Array:
    """Seconds of a group's cycle at the stations that it shares with the others: service, and waiting for it.

    A closed network of queues. To a station the groups seem as many equal ones that come as often together; for
    those there is mean value analysis: a group that arrives finds the queue of a network with one group less, and of
    the service under way a half is left, as services all take the same time. Were there no scatter at all, groups would
    fall into a rhythm in which no group waits below saturation. Real groups are in between: of two, each of spread σ,
    that seldom meet, a queue is σ²/s² of what it is with arrivals at random (they are walkers who bump into each
    other), and all of it near saturation.

    Args:
        think: seconds of a cycle elsewhere, by group, shape (draws, groups).
        variance: of these, in seconds squared, shape (draws, groups).
        service: seconds of a visit to each station, shape (draws, stations).
        visits: to each station in a cycle, shape (stations,).

    Returns:
        Shape (draws,).

    Example:
        >>> none, groups = np.zeros((1, 4)), np.full((1, 4), 2.0)
        >>> residence(groups, none, np.array([[0.1]]), np.array([1])).round(3).tolist()  # a rhythm: no group waits
        [0.1]
        >>> residence(groups, none, np.array([[1.0]]), np.array([1])).round(3).tolist()  # 4 groups, 1 s each
        [2.0]

    References:
        Reiser and Lavenberg 1980 (mean value analysis); Reiser 1979 (its form for services without scatter).
    """
    groups = think.shape[1]
    scatter = variance.mean(axis=1) + think.var(axis=1)
    spent = service @ visits
    for number in range(c.QUEUE_ROUNDS):
        cycle = groups / (1 / (think + spent[:, None])).sum(axis=1)
        if service.size == 1:  # as in every step of a fit
            one = _residence_at_one_station(
                groups, (cycle - spent).item(), scatter.item(), service.item(), float(visits[0])
            )
            found = np.array([one])
        else:
            found = _residence_of_equals(groups, cycle - spent, scatter, service, visits)
        change = np.abs(found - spent).max(initial=0.0)
        # Equal groups are done after the first round; of very different ones the estimates would swing.
        spent = found if number == 0 else (spent + found) / 2
        if change <= c.QUEUE_TOLERANCE * cycle.max():
            break
    return np.asarray(spent)


def _residence_of_equals(groups: int, think: Array, scatter: Array, service: Array, visits: Array) -> Array:
    demand = service * visits
    rhythm = np.maximum(think + demand.sum(axis=1), groups * demand.max(axis=1))
    queue, busy = np.zeros_like(service), np.zeros_like(service)
    cycle = rhythm
    for group in range(1, groups + 1):
        seen = service * (1 + queue - busy / 2)
        cycle = think + seen @ visits
        queue = group * visits * seen / cycle[:, None]
        busy = np.minimum(group * demand / cycle[:, None], 1.0)
    which = demand.argmax(axis=1)
    single = np.take_along_axis(service, which[:, None], axis=1)[:, 0]
    spread = scatter / visits[which]
    slack = 1 - groups * demand.max(axis=1) / rhythm
    against = single**2 * slack + c.QUEUE_SCATTER * single * np.sqrt(spread)
    random = np.divide(spread, spread + against, out=np.zeros_like(spread), where=spread + against > 0)
    return np.asarray(rhythm + random * np.maximum(cycle - rhythm, 0.0) - think)


def _residence_at_one_station(groups: int, think: float, scatter: float, service: float, visits: float) -> float:
    """The same, bitwise, in numbers: with arrays of one it takes nineteen times longer."""
    demand = service * visits
    cycle = rhythm = max(think + demand, groups * demand)
    queue = busy = 0.0
    for group in range(1, groups + 1):
        seen = service * (1 + queue - busy / 2)
        cycle = think + seen * visits
        queue = group * visits * seen / cycle if cycle else math.nan
        busy = min(group * demand / cycle, 1.0) if cycle else math.nan
    spread = scatter / visits
    slack = 1 - groups * demand / rhythm if rhythm else math.nan
    against = service * service * slack + c.QUEUE_SCATTER * service * math.sqrt(spread)
    random = spread / (spread + against) if spread + against > 0 else 0.0
    return rhythm + random * max(cycle - rhythm, 0.0) - think
