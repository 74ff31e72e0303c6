"""The fit of costs to measured steps: those of each rank, of the all-reduce and of the exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from lightning_omni.tuning.model import constants as c
from lightning_omni.tuning.model.cost_model import CostModel, messages_of, part_away
from lightning_omni.tuning.model.exchange_fit import fit_exchange, scipy
from lightning_omni.tuning.model.measured import Measured, mean_samples, servers_of
from lightning_omni.tuning.model.placement import Placement, over_links
from lightning_omni.tuning.model.queueing import means_of_parts
from lightning_omni.tuning.model.resampled import Resampled

Array = np.ndarray[Any, Any]

_Rows = list[tuple[int, Array]]
"""Sizes of groups, and seconds of each group, shape (draws,)."""


def fit_model(measured: Sequence[Measured], draws: int, seed: int) -> CostModel:
    """Fit the costs to measurements, with draws for the intervals.

    Args:
        measured: segments of training by the same ranks.
        draws: number of resampled fits.
        seed: seed of the resampling.

    Raises:
        ConfigurationError: SciPy is missing.
    """
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
    heads = [each for each in several if each.head]
    # An access to the head covers the whole batch of a group.
    batches = [mean_samples([each]) * len(each.ranks) / len(each.groups) for each in heads]
    sizes = {number for each in measured for row in each.samples for number in row}
    model = CostModel(
        devices={rank: (device, 1.0) for device, rank in enumerate(ranks)},
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
        head_per_sample=sum(each.head for each in heads) / max(sum(batches), 1e-300),
        period=several[0].period if several else 1,
        nbytes=nbytes,
        knows_overhead=len(sizes) > 1,
        knows_exchange=bool(several),
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
    """Fit overhead and seconds per sample, both of shape (draws, 1), to samples of shape (1, steps)."""
    if not np.ptp(samples):
        return np.zeros((len(own), 1)), own.sum(axis=1, keepdims=True) / samples.sum()
    # The rows are divided by the samples, because longer steps scatter more.
    matrix = np.stack([1 / samples[0], np.ones(samples.shape[1])], axis=1)
    nnls = scipy("optimize").nnls
    costs = np.array([nnls(matrix, row)[0] for row in own / samples])
    return costs[:, :1], costs[:, 1:]


def _of_each(drawn: Sequence[Resampled], factors: Mapping[int, Array]) -> list[Array]:
    """Return each rank's jitter, shape (draws, steps), without the part that prolongs a step of all members of a group.

    Batches of sequences of similar length, a shared disk, or a callback may cause that part. The members are then late
    together: none waits for another, and more groups would not be faster.
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
    """Return the factor by which each step is longer for all members, shape (draws, steps).

    Args:
        rows: jitter of a group's members, shape (members, draws, steps).

    Returns:
        The factors, or None if the ranks seem independent.

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

    The pooled jitter of all ranks contributes with the weight of `constants.POOLED` steps.
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
        head = each.measured.head if len(each.measured.groups) > 1 else 0.0
        placement = Placement.measured([each.measured])
        for members, steps, exchanges in zip(each.measured.groups, each.steps, each.exchanges, strict=True):
            if len(members) > 1:
                own = np.max([each.own[rank] for rank in members], axis=0)
                row = len(members), np.maximum((steps - exchanges - own).mean(axis=1) - head, 0.0)
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
    """Return the seconds of a gradient's bytes in an all-reduce timed by itself; infinity if none was."""
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
    """Return the model with exchanges that are forecast over the links of the all-reduce.

    A push and its answer cross the server's link once each, and their group's link at the same time. An all-reduce
    timed by itself gives the time on the links; within a step, the backward pass may hide a part of it.
    """
    ranks, timed = len(model.devices), _most_of_bytes(measured)
    ring = model.ring if np.isinf(timed) else timed / (2 * (ranks - 1) / ranks) + 0 * model.ring
    known = [each.serve for each in measured if each.serve]
    # The intervals include the forecast's error, one for the bytes and one for the other costs.
    draws = len(model.ring) - 1
    quantiles = [NormalDist().inv_cdf((place + 0.5) / draws) for place in range(draws)]
    factors = np.exp(c.FORECAST_ERROR * random.permuted([quantiles] * 2, axis=1))
    bytes_off, delay_off = np.concatenate([np.ones((2, 1)), factors], axis=1)
    per_byte = ring / model.nbytes * bytes_off
    return replace(
        model,
        delay=(_round_trip(measured) or 2 * model.hop) * delay_off,
        own_per_byte=per_byte,
        serve=sum(known) / max(len(known), 1) * delay_off,
        link_per_byte=per_byte,
        hand_ring=ring * bytes_off,
    )
