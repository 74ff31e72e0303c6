"""Models of waiting times: for the slowest of several members, at shared resources, and of groups for each other.

Arrays have a first axis of draws, unless a shape is given without one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

from lightning_omni.tuning.model import constants as c

Array = np.ndarray[Any, Any]


def slowest(values: Array, counts: Array) -> tuple[Array, Array]:
    r"""Compute mean and variance of the largest of several independent times, exact for empirical distributions.

    .. math::

        E[\max] = \int 1 - \prod_r F_r(t)^{c_r} \, dt

    Args:
        values: equally likely times of each of m kinds of member, in seconds, ascending: shape (draws, m, quantiles).
        counts: members of each kind, shape (m,).

    Returns:
        The mean in seconds and the variance in seconds squared, both of shape (draws,).

    Example:
        >>> mean, variance = slowest(np.array([[[1.0, 2.0], [0.0, 3.0]]]), np.array([1, 1]))
        >>> mean.tolist(), variance.tolist()  # 1 or 2 with 0, and 3 with either
        ([2.25], [0.6875])
    """
    if values.shape[1] == 1 and counts[0] == 1:
        return values[:, 0].mean(axis=1), values[:, 0].var(axis=1)
    times, probabilities = _distribution_of_slowest(values, counts)
    mean = (times * probabilities).sum(axis=1)
    return mean, np.maximum((times**2 * probabilities).sum(axis=1) - mean**2, 0.0)


def quantiles_of_slowest(values: Array, counts: Array) -> Array:
    """Compute ascending, equally likely values of the largest of several times (draws, quantiles); see `slowest`.

    Example:
        >>> quantiles_of_slowest(np.array([[[1.0, 2.0], [0.0, 3.0]]]), np.array([1, 1])).tolist()
        [[1.5, 3.0]]
    """
    if values.shape[1] == 1 and counts[0] == 1:
        return np.asarray(values[:, 0])
    times, probabilities = _distribution_of_slowest(values, counts)
    return means_of_parts(times, probabilities, values.shape[2])


def means_of_parts(values: Array, probabilities: Array, parts: int) -> Array:
    """Return the mean of each of a distribution's equally likely parts, shape (draws, parts).

    ``values``, ascending, and their ``probabilities`` have shape (draws, n).
    """
    edges = np.arange(parts + 1) / parts
    # The partial mean is piecewise linear in the probability; its rises from edge to edge are the means in between.
    up_to = np.cumsum(probabilities, axis=1), np.cumsum(probabilities * values, axis=1)
    lines = [np.interp(edges, np.append(0.0, x), np.append(0.0, y)) for x, y in zip(*up_to, strict=True)]
    return np.diff(lines, axis=1) * parts


def quantiles_of_sum(mean: Array, variance: Array, count: int) -> Array:
    """Compute equally likely, ascending values of a positive sum, as of a gamma distribution.

    ``mean`` and ``variance`` have shape (draws, groups), the values (draws, groups, count); their mean is exact.

    Example:
        >>> quantiles_of_sum(np.array([[4.0]]), np.array([[4.0]]), 4).round(1).tolist()  # of four exponential times
        [[[1.8, 3.1, 4.4, 6.7]]]

    References:
        Wilson and Hilferty 1931 (the cube root of such a value is nearly normal).
    """
    scatter = np.sqrt(variance) / np.maximum(mean, 1e-300)
    third = (scatter / 3)[..., None]
    factors = np.maximum(1 - third**2 + third * _normal_quantiles(count), 0.0) ** 3
    factors = factors.reshape(*mean.shape, count, -1).mean(axis=-1)
    return np.asarray(mean[..., None] * factors / factors.mean(axis=-1, keepdims=True))


@cache
def _normal_quantiles(count: int) -> Array:
    fine = 8 * count
    return np.array([NormalDist().inv_cdf((place + 0.5) / fine) for place in range(fine)])


def _distribution_of_slowest(values: Array, counts: Array) -> tuple[Array, Array]:
    """Return the ascending times and the probability of each, both of shape (draws, m × quantiles)."""
    draws, _, quantiles = values.shape
    flat = values.reshape(draws, -1)
    order = np.argsort(flat, axis=1)
    times = np.take_along_axis(flat, order, axis=1)
    # At its i-th time a distribution function rises from (i - 1) / n to i / n; the logarithm of a product is a sum.
    logs = np.log(np.arange(1, quantiles + 1) / quantiles)
    rises = (counts[:, None] * np.diff(logs, prepend=0.0)).reshape(-1)  # and 0 until all begin, see below
    product = np.exp(np.cumsum(rises[order], axis=1))
    product[times < values[:, :, 0].max(axis=1)[:, None]] = 0.0
    return times, np.diff(product, axis=1, prepend=0.0)


def time_shared(think: Array, variance: Array, links: Array, counted: Array, service: Array) -> Array:
    """Compute the seconds of a group's cycle at shared links and in a shared queue, shape (draws, groups).

    The arguments are those of `residence` and of `residence_on_links`, with ``links`` for ``demand``.
    """
    nothing = np.zeros_like(think)
    if not links.any():
        return residence(think, variance, service)[:, None] + nothing
    if not service.any():
        return residence_on_links(think, links, counted)
    alone = crossing = (links * counted).sum(axis=2)
    queued = nothing
    for _ in range(c.QUEUE_ROUNDS):
        # The waiting time on links has a standard deviation as large as its mean.
        scatter, before = variance + (crossing - alone) ** 2, crossing
        queued = residence(think + crossing, scatter, service)[:, None] + nothing
        crossing = residence_on_links(think + queued, links, counted)
        if np.abs(crossing - before).max() <= c.QUEUE_TOLERANCE * (think + crossing).max():
            break
    return np.asarray(crossing + queued)


def residence(think: Array, variance: Array, service: Array) -> Array:
    """Compute the seconds of a group's cycle in a shared queue, of service and of waiting for it, shape (draws,).

    The model is a closed network with one queue. By mean value analysis an arriving group finds the queue of a network
    with one group fewer, and half of the current service remains, because all services take the same time. Without any
    scatter, groups would fall into a rhythm in which no group waits below saturation. Real groups are in between: for
    two groups of spread σ that seldom collide, a queue is σ²/s² of the queue with random arrivals; near saturation
    it is most of it, unless σ is small.

    Args:
        think: seconds of a cycle elsewhere, shape (draws, groups).
        variance: variance of ``think``, shape (draws, groups).
        service: seconds of the service of a cycle, shape (draws,).

    Example:
        >>> none, groups = np.zeros((1, 4)), np.full((1, 4), 2.0)
        >>> residence(groups, none, np.array([0.1])).round(3).tolist()  # a rhythm
        [0.1]
        >>> residence(groups, none, np.array([1.0])).round(3).tolist()  # 4 groups, 1 s each
        [2.0]

    References:
        Reiser and Lavenberg 1980 (mean value analysis); Reiser 1979 (its form for services without scatter).
    """
    groups = think.shape[1]
    mean = think.sum(axis=1) / groups
    scatter = variance.sum(axis=1) / groups + ((think - mean[:, None]) ** 2).sum(axis=1) / groups
    spent = service
    for number in range(c.QUEUE_ROUNDS):
        cycle = groups / (1 / (think + spent[:, None])).sum(axis=1)
        if service.size == 1:  # the case of every speed without an interval
            found = np.array([_residence_of_one(groups, (cycle - spent).item(), scatter.item(), service.item())])
        else:
            found = _residence_of_equals(groups, cycle - spent, scatter, service)
        change = np.abs(found - spent).max(initial=0.0)
        # Equal groups converge in the first round; undamped estimates of very different ones would oscillate.
        spent = found if number == 0 else (spent + found) / 2
        if change <= c.QUEUE_TOLERANCE * cycle.max():
            break
    return np.asarray(spent)


def _residence_of_equals(groups: int, think: Array, scatter: Array, service: Array) -> Array:
    cycle = rhythm = np.maximum(think + service, groups * service)
    queue, busy = np.zeros_like(service), np.zeros_like(service)
    for group in range(1, groups + 1):
        seen = service * (1 + queue - busy / 2)
        cycle = think + seen
        queue = group * seen / cycle
        busy = np.minimum(group * service / cycle, 1.0)
    slack = 1 - groups * service / rhythm
    against = service**2 * slack + c.QUEUE_SCATTER * service * np.sqrt(scatter)
    random = np.divide(scatter, scatter + against, out=np.zeros_like(scatter), where=scatter + against > 0)
    return np.asarray(rhythm + random * np.maximum(cycle - rhythm, 0.0) - think)


def residence_on_links(think: Array, demand: Array, counted: Array | None = None) -> Array:
    """Compute the seconds of a group's cycle on links, each shared evenly by all messages on it, shape (draws, groups).

    The result is exact for random arrivals of few, equal groups: an arriving group finds on a link the load of a
    network without it (mean value analysis). Messages that share a link evenly form no rhythm.

    Args:
        think: seconds of a cycle elsewhere, shape (draws, groups).
        demand: seconds of a cycle on each link without other groups, shape (draws, groups, links).
        counted: fraction of ``demand`` that counts, of its shape, so that time on two links at once counts once; None
            for all of it.

    Example:
        >>> demand = np.full((1, 2, 1), 1.0)  # two groups, which now and then share a link
        >>> residence_on_links(np.full((1, 2), 2.0), demand).round(3).tolist()
        [[1.333, 1.333]]

    References:
        Baskett et al. 1975 (stations that are shared evenly);
        Schweitzer 1979 (approximate mean value analysis, for many groups).
    """
    firsts, which, counts = _kinds(demand[0])
    each = demand[:, firsts]
    parts = np.ones_like(each) if counted is None else counted[:, firsts]
    spent = (each * parts).sum(axis=2)
    for number in range(c.QUEUE_ROUNDS):
        rates = 1 / (think + spent[:, which])
        cycle = counts / np.stack([rates[:, which == kind].sum(axis=1) for kind in range(len(counts))], axis=1)
        found = _residence_of_kinds(counts.tolist(), cycle - spent, each, parts)
        change = np.abs(found - spent).max(initial=0.0)
        spent = found if number == 0 else (spent + found) / 2
        if change <= c.QUEUE_TOLERANCE * cycle.max():
            break
    return np.asarray(spent[:, which])


def _kinds(demand: Array) -> tuple[Array, Array, Array]:
    """Return the first group of each kind, the kind of each group, and the groups per kind.

    Groups of one kind have equal rows of ``demand``, shape (groups, links).
    """
    groups = len(demand)
    if (demand == demand[:1]).all():  # the case unless some leaders are on the server's node
        return np.zeros(1, int), np.zeros(groups, int), np.array([groups])
    _, firsts, kinds, counts = np.unique(
        demand.round(9), axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    return firsts, kinds.reshape(-1), counts


def _residence_of_kinds(counts: Sequence[int], think: Array, demand: Array, parts: Array) -> Array:
    """Compute `residence_on_links` for ``counts`` equal groups of each kind, shape (draws, kinds)."""
    if math.prod(count + 1 for count in counts) > c.QUEUE_STATES:
        return _residence_of_many(np.array(counts), think, demand, parts)
    queues: dict[tuple[int, ...], Array] = {}
    found = demand
    for some in itertools.product(*(range(count + 1) for count in counts)):
        queue, found = np.zeros_like(demand[:, 0]), np.zeros_like(demand)
        for kind, number in enumerate(some):
            if number:
                fewer = (*some[:kind], number - 1, *some[kind + 1 :])
                found[:, kind] = demand[:, kind] * (1 + queues[fewer])
                rate = number / (think[:, kind] + (found * parts)[:, kind].sum(axis=1))[:, None]
                queue = queue + rate * found[:, kind]
        queues[some] = queue
    return np.asarray((found * parts).sum(axis=2))


def _residence_of_many(counts: Array, think: Array, demand: Array, parts: Array) -> Array:
    """Approximate `_residence_of_kinds`: an arriving group is missing from its kind's queue."""
    queues = np.zeros_like(demand)
    found = demand
    for _ in range(c.QUEUE_ROUNDS):
        rates = (counts / (think + (found * parts).sum(axis=2)))[:, :, None]
        queues = (queues + rates * found) / 2
        seen = queues.sum(axis=1, keepdims=True) - queues / counts[:, None]
        found = demand * (1 + np.maximum(seen, 0.0))
    return np.asarray((found * parts).sum(axis=2))


def _residence_of_one(groups: int, think: float, scatter: float, service: float) -> float:
    """Compute `_residence_of_equals` bitwise with floats, faster than with arrays of one element."""
    cycle = rhythm = max(think + service, groups * service)
    queue = busy = 0.0
    for group in range(1, groups + 1):
        seen = service * (1 + queue - busy / 2)
        cycle = think + seen
        queue = group * seen / cycle if cycle else math.nan
        busy = min(group * service / cycle, 1.0) if cycle else math.nan
    slack = 1 - groups * service / rhythm if rhythm else math.nan
    against = service * service * slack + c.QUEUE_SCATTER * service * math.sqrt(scatter)
    random = scatter / (scatter + against) if scatter + against > 0 else 0.0
    return rhythm + random * max(cycle - rhythm, 0.0) - think


@cache
def _picked(groups: int, quantiles: int, chains: int) -> Array:
    """Return the index of the time that each group takes, all about equally often, shape (2, cycles, chains, groups).

    The first axis is hidden steps, then others.
    """
    count = -(-c.BARRIER_CYCLES * chains // quantiles)
    picked = np.random.default_rng(0).permuted(np.tile(np.arange(quantiles), (2, groups, count, 1)), axis=3)
    picked = picked.reshape(2, groups, -1)[:, :, : c.BARRIER_CYCLES * chains].reshape(2, groups, -1, chains)
    return np.asarray(picked.transpose(0, 2, 3, 1))


@dataclass(frozen=True)
class BarrierExchange:
    """The cost of an exchange in which groups wait for each other, in seconds, each of shape (draws, groups).

    Args:
        way: a push to the server and its answer, half in each direction.
        serve: a push where pushes queue.
        send: an answer on the link that answers share: all arrive when the last one does.
    """

    way: Array
    serve: Array
    send: Array

    def cycle(self, hidden: Array, rest: Array, is_rough: bool = False) -> Array:
        """Compute the mean seconds from one exchange of all groups to the next, by a simulation with random step times.

        All pushes are served, one after the other; then the answers leave together. A group computes its hidden steps
        before it waits for the answer.

        Args:
            hidden: equally likely seconds of the steps that a group makes during its exchange, ascending, shape (draws,
                groups, quantiles).
            rest: equally likely seconds of the steps that it makes after the answer, likewise.
            is_rough: whether a few cycles are enough.

        Example:
            Four groups compute for one second; 0.1 s of each push and 0.2 s of each answer are on one link:

            >>> steps, none = np.ones((1, 4, 1)), np.zeros((1, 4, 1))
            >>> link = BarrierExchange(way=np.zeros((1, 4)), serve=np.full((1, 4), 0.1), send=np.full((1, 4), 0.2))
            >>> link.cycle(none, steps).round(3).tolist()  # all pushes, and all answers
            [2.2]
            >>> link.cycle(steps, none).round(3).tolist()  # most of it lies in the midst of the next second
            [1.2]
        """
        if not (hidden.any() or self.way.any() or self.serve.any() or self.send.any()):
            return slowest(rest, np.ones(rest.shape[1], int))[0]
        if is_rough:
            return self._mean_cycle(hidden, rest, c.BARRIER_CHAINS)
        first = replace(self, way=self.way[:1], serve=self.serve[:1], send=self.send[:1])
        many = first._mean_cycle(hidden[:1], rest[:1], max(c.BARRIER_CHAINS, c.BARRIER_SAMPLES // rest.shape[1]))
        if len(rest) == 1:
            return many
        # All draws share the noise of few cycles; many cycles of the first draw show its size.
        few = self._mean_cycle(hidden, rest, c.BARRIER_CHAINS)
        return np.asarray(few * (many / few[:1]))

    def _mean_cycle(self, hidden: Array, rest: Array, chains: int) -> Array:
        draws, groups, quantiles = rest.shape
        firsts, thens = (
            np.ascontiguousarray(steps[:, np.arange(groups), which].transpose(1, 0, 2, 3))
            for steps, which in zip((hidden, rest), _picked(groups, quantiles, chains), strict=True)
        )
        half, serve, send = (
            np.broadcast_to(each[:, None, :], firsts.shape[1:]) for each in (self.way / 2, self.serve, self.send)
        )
        begins = (np.arange(draws * chains) * groups).reshape(draws, chains, 1)
        sent = answered = np.zeros((draws, chains, groups))
        ends = np.empty((len(thens), draws, chains))
        for number, (first, then) in enumerate(zip(firsts, thens, strict=True)):
            sent = np.maximum(sent + first, answered) + then
            come = sent + half
            order = come.argsort(axis=2) + begins  # flat indices: quicker than along an axis
            behind = np.cumsum(serve.take(order)[:, :, ::-1], axis=2)[:, :, ::-1]  # its own service and all later ones
            served = (come.take(order) + behind).max(axis=2, keepdims=True)
            sent = sent - served  # times are now relative to the barrier's end
            answered = np.empty_like(sent)
            answers = send.take(order)
            behind = answers.sum(axis=2, keepdims=True) * (answers > 0)
            answered.put(order, behind + half.take(order))
            ends[number] = served[:, :, 0]
        skipped = c.BARRIER_CYCLES // 4
        counted = c.BARRIER_CYCLES - skipped
        spent = np.cumsum(ends[skipped:].mean(axis=2), axis=0)[-1]
        if hidden.any():
            return np.asarray(spent / counted)
        longest = np.cumsum(thens[skipped:].max(axis=3).mean(axis=2), axis=0)[-1]
        exact, _ = slowest(rest, np.ones(groups, int))  # the exact mean, not that of these samples
        return np.asarray((spent - longest) / counted + exact)
