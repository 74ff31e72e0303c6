"""The fit of costs to measured steps, and to resampled ones, which show its uncertainty.

References:
    Künsch 1989 (resampling of blocks).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from lightning_omni.tuning.model import constants as c
from lightning_omni.tuning.model.cost_model import CostModel, Placement, first_draw, messages_of, over_links, part_away
from lightning_omni.tuning.model.measurements import Measured, servers_of
from lightning_omni.tuning.model.queueing import means_of_parts, time_shared

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Resampled:
    """A resampled segment of training; the first draw is the measurement itself.

    Arrays of ranks (``samples``, ``own``) and of groups (the others) have shape (draws, steps); times are in seconds.
    ``steady`` steps are after the first ones, in which all groups reach the server at once.
    """

    measured: Measured
    samples: Mapping[int, Array]
    own: Mapping[int, Array]
    steps: Sequence[Array]
    exchanges: Sequence[Array]
    steady: Sequence[Array]

    @classmethod
    def of(cls, measured: Measured, draws: int, random: np.random.Generator) -> Resampled:
        samples, own, steps, exchanges, steady = {}, {}, [], [], []
        for number, members in enumerate(measured.groups):
            # The steps of a group and its members are drawn together, because a slow member delays the others.
            which = _blocks(len(measured.steps[number]), measured.period, draws, random)
            steady.append(which >= (measured.period if which.shape[1] > 8 * measured.period else 0))
            steps.append(np.array(measured.steps[number])[which])
            exchanges.append(np.array(measured.exchanges[number])[which])
            for rank in members:
                row = measured.ranks.index(rank)
                samples[rank] = np.array(measured.samples[row], np.float64)[which]
                own[rank] = np.array(measured.own[row])[which]
        return cls(measured, samples, own, steps, exchanges, steady)


def _blocks(count: int, period: int, draws: int, random: np.random.Generator) -> Array:
    """Return indices of steps: all measured ones, then random blocks of neighbours; shape (draws + 1, about count).

    Blocks consist of whole cycles, from one exchange to the next.
    """
    period = min(period, count)
    cycles = count // period
    length = max(1, round(cycles ** (1 / 3)))
    starts = random.integers(cycles, size=(draws, -(-cycles // length)))
    drawn = (starts[:, :, None] + np.arange(length)).reshape(draws, -1)[:, :cycles] % cycles
    drawn = np.concatenate([np.arange(cycles)[None], drawn])
    return (drawn[:, :, None] * period + np.arange(period)).reshape(draws + 1, -1)


@dataclass(frozen=True)
class _Exchanges:
    """The exchanges of one segment, in seconds; a cycle lasts from one exchange to the next.

    Attributes:
        think: a cycle without its exchange, shape (draws, groups).
        variance: variance of ``think``, shape (draws, groups).
        mean: mean exchange that crosses a link, shape (draws,).
        least: shortest such exchange, which most likely did not wait.
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
        """Return the exchanges of a segment.

        ``handed`` are the seconds of an exchange in which leaders forward the answer, shape (draws, groups).
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
        """Return the errors of the mean and of the shortest exchange, as fractions of a cycle, shape (draws,).

        Args:
            away: seconds of an exchange that other groups do not prolong, shape (draws,).
            serve: seconds of the server, for which groups queue, shape (draws,).
            link: seconds on the server's link, each way, shape (draws,).
        """
        crosses = np.array(self.crosses)
        links = np.repeat((link[:, None] * crosses)[:, :, None], 2, axis=2)
        think = self.think + away[:, None] * crosses
        there = time_shared(think, self.variance, links, None, serve)[:, crosses].mean(axis=1)
        cycle, over = float(self.think[0].mean() + self.mean[0]), away + serve + 2 * link - self.least
        return [(away + there - self.mean) / cycle, (np.maximum(over, 0.0) + c.SHORTEST_EXCHANGE * over) / cycle]


def fit_exchange(
    drawn: Sequence[Resampled], ring: Array, hop: Array, placement: Placement
) -> tuple[Array, Array, Array, Array]:
    """Fit the delay, a byte on a group's own link, the server's time for a push, and a byte on the server's link.

    All are in seconds, of shape (draws,).

    Args:
        drawn: segments of training.
        ring: seconds of a gradient's bytes on the links of a group, over which leaders forward answers, shape (draws,).
        hop: seconds of a message there that do not depend on its bytes, shape (draws,).
        placement: costs of messages within a node.
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

    The shared resource is the server's link (each way) if ``serve`` and ``nbytes`` are known, else the server beyond
    ``serve``.
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
    """Fit the costs in multiples of ``unit`` seconds; return them with the Jacobian of the misses."""

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
    return importlib.import_module(f"scipy.{part}")


_Rows = list[tuple[int, Array]]
"""Sizes of groups, and seconds of each group, shape (draws,)."""


def fit_model(measured: Sequence[Measured], draws: int, seed: int) -> CostModel:
    """Fit the costs to segments of training by the same ranks, with ``draws`` resampled fits for the intervals."""
    random = np.random.default_rng(seed)
    drawn = [Resampled.of(each, draws, random) for each in measured]
    ranks = measured[0].ranks
    times = [_fit_rank(drawn, rank) for rank in ranks]
    overhead, per_sample, factors = (list(column) for column in zip(*times, strict=True))
    placement, nbytes = Placement.measured(measured), max(each.nbytes for each in measured)
    over, within = _beyond_computation(drawn)
    ring, hop, between = _fit_allreduce(drawn, over or within)
    if over and within and nbytes and placement.per_byte is None:
        placement = replace(placement, per_byte=_seconds_of_gradient(within) / nbytes)
    several = [each for each in measured if len(each.groups) > 1]
    servers, per_node = servers_of(measured)
    away = part_away(servers, per_node)
    delay, own_per_byte, serve, link_per_byte = fit_exchange(drawn, ring, hop, placement)
    sizes = {number for each in measured for row in each.samples for number in row}
    model = CostModel(
        devices={rank: device for device, rank in enumerate(ranks)},
        overhead=np.stack(overhead, axis=1),
        per_sample=np.stack(per_sample, axis=1),
        jitter=_jitter(_of_each(drawn, dict(zip(ranks, factors, strict=True)))),
        ring=ring,
        hop=hop,
        between=between,
        delay=delay / messages_of(servers),
        own_per_byte=own_per_byte / away,
        serve=serve * servers,
        link_per_byte=link_per_byte * servers / away,
        hand_ring=ring,
        hand_hop=hop,
        hands_on=any(each.hands_on for each in measured),
        period=several[0].period if several else 1,
        nbytes=nbytes,
        knows_overhead=len(sizes) > 1,
        servers=servers,
        per_node=per_node,
        placement=placement,
        node_ring=None if placement.per_byte is None else placement.per_byte * nbytes,
        node_hop=placement.round_trip / 2,
    )
    can_forecast = not several and model.nbytes and len(ranks) > 1
    return replace(model, forecast=_forecast(model, measured, random)) if can_forecast else model


def _fit_rank(drawn: Sequence[Resampled], rank: int) -> tuple[Array, Array, Array]:
    """Fit a rank's overhead and seconds per sample, both of shape (draws,), and its jitter, shape (draws, steps)."""
    samples, own = (
        np.concatenate([getattr(each, name)[rank] for each in drawn], axis=1) for name in ("samples", "own")
    )
    overhead, per_sample = _costs_of_steps(samples[:1], own[:1])
    factors = own / (overhead + samples * per_sample)
    # Only jitter is resampled, not batches: a draw without the few small batches would not determine the overhead.
    overhead, per_sample = _costs_of_steps(samples[:1], factors * (overhead + samples[:1] * per_sample))
    return overhead[:, 0], per_sample[:, 0], factors


def _costs_of_steps(samples: Array, own: Array) -> tuple[Array, Array]:
    """Fit overhead and seconds per sample, shape (draws, 1), to samples (1, steps) and seconds (draws, steps)."""
    if not np.ptp(samples):
        return np.zeros((len(own), 1)), own.sum(axis=1, keepdims=True) / samples.sum()
    # The rows are divided by the samples, because longer steps scatter more.
    matrix = np.stack([1 / samples[0], np.ones(samples.shape[1])], axis=1)
    nnls = scipy("optimize").nnls
    costs = np.array([nnls(matrix, row)[0] for row in own / samples])
    return costs[:, :1], costs[:, 1:]


def _of_each(drawn: Sequence[Resampled], factors: Mapping[int, Array]) -> list[Array]:
    """Return each rank's jitter, shape (draws, steps), without the part that prolongs a step of all members of a group.

    More groups would not reduce that part, which a shared disk or a callback may cause.
    """
    found = {rank: row.copy() for rank, row in factors.items()}
    began = dict.fromkeys(factors, 0)
    for each in drawn:
        for members in each.measured.groups:
            steps = {rank: slice(began[rank], began[rank] + each.own[rank].shape[1]) for rank in members}
            common = _common(np.stack([factors[rank][:, steps[rank]] for rank in members]))
            for rank in members:
                if common is not None:
                    found[rank][:, steps[rank]] /= common
                began[rank] = steps[rank].stop
    return list(found.values())


def _common(rows: Array) -> Array | None:
    """Return the factor by which each step is longer for all members, shape (draws, steps); None if none is clear.

    ``rows`` is the jitter of a group's members, shape (members, draws, steps).

    References:
        Fisher 1925 (analysis of variance); James and Stein 1961 (shrinkage of a few means to the mean of all).
    """
    members, _, steps = rows.shape
    if members == 1 or steps < 2:
        return None
    relative = rows / rows.mean(axis=2, keepdims=True)
    of_steps = relative.mean(axis=0)
    between, within = members * of_steps[0].var(ddof=1), relative[:, 0].var(axis=0, ddof=1).mean()
    if not between:
        return None
    freedom = steps - 1, (steps - 1) * (members - 1)
    if within and scipy("special").fdtrc(*freedom, between / within) > c.COMMON:
        return None
    return np.asarray(1 + (1 - within / between) * (of_steps - 1))


def _jitter(factors: Sequence[Array]) -> Array:
    """Return each rank's jitter as the means of equally likely parts, shape (draws, ranks, parts).

    The pooled jitter of all ranks has the weight of `constants.POOLED` steps.
    """
    pool = np.concatenate(factors, axis=1)
    found = []
    for own in factors:
        count = own.shape[1]
        values = np.concatenate([own, pool], axis=1)
        weights = np.concatenate([np.ones(count), np.full(pool.shape[1], c.POOLED / pool.shape[1])])
        order = np.argsort(values, axis=1)
        shares = weights[order] / (count + c.POOLED)
        found.append(means_of_parts(np.take_along_axis(values, order, axis=1), shares, c.QUANTILES))
    jitter = np.stack(found, axis=1)
    return np.asarray(jitter / jitter.mean(axis=2, keepdims=True))


def _beyond_computation(drawn: Sequence[Resampled]) -> tuple[_Rows, _Rows]:
    """Return the seconds of steps beyond computation and exchanges, of groups over links and of groups on one node."""
    rows: _Rows = []
    within: _Rows = []
    for each in drawn:
        placement = Placement.measured([each.measured])
        for members, steps, exchanges in zip(each.measured.groups, each.steps, each.exchanges, strict=True):
            if len(members) > 1:
                own = np.max([each.own[rank] for rank in members], axis=0)
                row = len(members), np.maximum((steps - exchanges - own).mean(axis=1), 0.0)
                (within if placement.are_together(members) else rows).append(row)
    return rows, within


def _seconds_of_gradient(rows: _Rows) -> float:
    """Return the seconds of a gradient's bytes from one member to another, if hops take no time."""
    return float(np.mean([row[0] / (2 * (size - 1) / size) for size, row in rows]))


def _fit_allreduce(drawn: Sequence[Resampled], rows: _Rows) -> tuple[Array, Array, Array]:
    """Fit the seconds of the bytes, of a hop, and of a step's remaining time, each of shape (draws,)."""
    nothing = np.zeros(len(drawn[0].steps[0]))
    if not rows:
        return nothing, nothing, nothing
    sizes = np.array([size for size, _ in rows])
    matrix, values = (
        np.stack([2 * (sizes - 1) / sizes, 2.0 * (sizes - 1)], axis=1),
        np.stack([row for _, row in rows], 1),
    )
    if len(set(sizes.tolist())) == 1:
        # One group size does not separate bytes from hops. But an exchange carries the same bytes twice, so they take
        # at most half of it; hops take the remaining time. And a hop takes at most half a round trip.
        whole = values.mean(axis=1)
        round_trip = _round_trip([each.measured for each in drawn])
        if round_trip and all(len(each.measured.groups) == 1 for each in drawn):
            hop = np.minimum(round_trip / 2, whole / matrix[0, 1])
            rest = whole - hop * matrix[0, 1]
            # A slow loader, callbacks or a busy processor cause any time beyond that of the bytes.
            ring = np.minimum(rest, _most_of_bytes([each.measured for each in drawn])) / matrix[0, 0]
            return ring, hop, rest - ring * matrix[0, 0]
        ring = np.minimum(whole / matrix[0, 0], _seconds_of_bytes(drawn))
        return ring, (whole - ring * matrix[0, 0]) / matrix[0, 1], nothing
    nnls = scipy("optimize").nnls
    ring, hop = np.array([nnls(matrix, row)[0] for row in values]).T
    return ring, hop, nothing


def _most_of_bytes(measured: Sequence[Measured]) -> float:
    """Return the seconds of a gradient's bytes in an all-reduce timed by itself; infinity without one."""
    return min((each.reduce_per_byte * each.nbytes for each in measured if each.reduce_per_byte), default=np.inf)


def _seconds_of_bytes(drawn: Sequence[Resampled]) -> Array:
    """Return an upper bound on the seconds of a gradient's bytes between two ranks, shape (draws,)."""
    shortest = [
        each.measured.period
        * np.min([each.exchanges[number].mean(axis=1) for number in over_links(each.measured)], axis=0)
        / (2 * part_away(each.measured.servers, each.measured.per_node))
        for each in drawn
        if len(each.measured.groups) > 1
    ]
    return np.min(shortest, axis=0) if shortest else np.full(len(drawn[0].steps[0]), np.inf)


def _round_trip(measured: Sequence[Measured]) -> float:
    return min((each.round_trip for each in measured if each.round_trip), default=0.0)


def _forecast(model: CostModel, measured: Sequence[Measured], random: np.random.Generator) -> CostModel:
    """Return the model with exchanges that are forecast over the links of the all-reduce, or of the hosts if timed.

    An all-reduce timed by itself gives the time on the links; within a step, the backward pass may hide a part of it. A
    group of devices also copies pushes and answers between a device and its host.
    """
    ranks, timed = len(model.devices), _most_of_bytes(measured)
    ring = model.ring if np.isinf(timed) else timed / (2 * (ranks - 1) / ranks) + 0 * model.ring
    known = [each.serve for each in measured if each.serve]
    # The intervals include the forecast's error, one for the bytes and one for the other costs.
    draws = len(model.ring) - 1
    quantiles = [NormalDist().inv_cdf((place + 0.5) / draws) for place in range(draws)]
    factors = np.exp(c.FORECAST_ERROR * random.permuted([quantiles] * 2, axis=1))
    bytes_off, delay_off = np.concatenate([np.ones((2, 1)), factors], axis=1)
    per_byte = (max(each.host_per_byte for each in measured) or ring / model.nbytes) * bytes_off
    return replace(
        model,
        delay=(_round_trip(measured) or 2 * model.hop) * delay_off,
        own_per_byte=per_byte + max(each.copy_per_byte for each in measured) * bytes_off,
        serve=sum(known) / max(len(known), 1) * delay_off,
        link_per_byte=per_byte,
        hand_ring=ring * bytes_off,
    )
