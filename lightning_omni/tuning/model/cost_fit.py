"""The fit of costs to measured steps of one group, and to resampled ones, which show its uncertainty."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from lightning_omni.tuning.model import constants as c
from lightning_omni.tuning.model.cost_model import CostModel, Placement
from lightning_omni.tuning.model.measurements import Measured
from lightning_omni.tuning.model.queueing import means_of_parts

Array = np.ndarray[Any, Any]


class Resampled(NamedTuple):
    """A resampled segment of training; the first draw is the measurement itself.

    ``samples`` and ``own`` have shape (ranks, draws, steps), ``steps`` (draws, steps); times are in seconds.
    """

    samples: Array
    own: Array
    steps: Array

    @classmethod
    def of(cls, measured: Measured, draws: int, random: np.random.Generator) -> Resampled:
        # The steps of all ranks are drawn together, because a slow member delays the others.
        which = _blocks(len(measured.steps), draws, random)
        return cls(*(np.array(each)[..., which] for each in (measured.samples, measured.own, measured.steps)))


def _blocks(count: int, draws: int, random: np.random.Generator) -> Array:
    """Return indices of steps: all measured ones, then random blocks of neighbours; shape (draws + 1, count)."""
    length = max(1, round(count ** (1 / 3)))
    starts = random.integers(count, size=(draws, -(-count // length)))
    drawn = (starts[:, :, None] + np.arange(length)).reshape(draws, -1)[:, :count] % count
    return np.concatenate([np.arange(count)[None], drawn])


def scipy(part: str) -> Any:
    return importlib.import_module(f"scipy.{part}")


def fit_model(measured: Sequence[Measured], draws: int, seed: int) -> CostModel:
    """Fit the costs to segments of training by the same ranks, with ``draws`` resampled fits for the intervals.

    Exchanges are forecast from the all-reduce; without its bytes, or with one rank, they count as nothing.
    """
    random = np.random.default_rng(seed)
    drawn = [Resampled.of(each, draws, random) for each in measured]
    ranks = measured[0].ranks
    samples, own = (np.concatenate(column, axis=2) for column in list(zip(*drawn, strict=True))[:2])
    overhead, per_sample, factors = zip(*map(_fit_rank, samples, own), strict=True)
    starts = np.cumsum([len(each.steps) for each in measured])[:-1]
    jitter = np.concatenate([_independent(rows) for rows in np.split(np.stack(factors), starts, axis=2)], axis=2)
    placement, nbytes = Placement.measured(measured), max(each.nbytes for each in measured)
    ring, hop, between = _fit_allreduce(drawn, measured)
    nothing = np.zeros_like(ring)
    exchange = dict.fromkeys(("delay", "own_per_byte", "serve", "link_per_byte"), nothing) | {"hand_ring": ring}
    if nbytes and len(ranks) > 1:
        exchange = _forecast(ring, hop, nbytes, measured, random)
    return CostModel(
        devices={rank: device for device, rank in enumerate(ranks)},
        overhead=np.stack(overhead, axis=1),
        per_sample=np.stack(per_sample, axis=1),
        jitter=_jitter(jitter),
        ring=ring,
        hop=hop,
        between=between,
        **exchange,
        hand_hop=hop,
        hands_on=any(each.hands_on for each in measured),
        nbytes=nbytes,
        servers=measured[-1].servers,
        per_node=measured[-1].per_node,
        placement=placement,
        node_ring=None if placement.per_byte is None else placement.per_byte * nbytes,
        node_hop=placement.round_trip / 2,
    )


def _fit_rank(samples: Array, own: Array) -> tuple[Array, Array, Array]:
    """Fit a rank's overhead and seconds per sample, both of shape (draws,), and its jitter, shape (draws, steps)."""
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


def _independent(rows: Array) -> Array:
    """Return jitter, shape (members, draws, steps), without the part that clearly prolongs a step of all members.

    More groups would not reduce that part.

    References:
        Fisher 1925 (analysis of variance); James and Stein 1961 (shrinkage of a few means to the mean of all).
    """
    members, _, steps = rows.shape
    if members == 1 or steps < 2:
        return rows
    relative = rows / rows.mean(axis=2, keepdims=True)
    of_steps = relative.mean(axis=0)
    between, within = members * of_steps[0].var(ddof=1), relative[:, 0].var(axis=0, ddof=1).mean()
    if not between:
        return rows
    freedom = steps - 1, (steps - 1) * (members - 1)
    if within and scipy("special").fdtrc(*freedom, between / within) > c.COMMON:
        return rows
    return np.asarray(rows / (1 + (1 - within / between) * (of_steps - 1)))


def _jitter(factors: Array) -> Array:
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


def _fit_allreduce(drawn: Sequence[Resampled], measured: Sequence[Measured]) -> tuple[Array, Array, Array]:
    """Fit the seconds of the bytes, of a hop, and of a step's remaining time, each of shape (draws,).

    One group does not separate them. But a hop takes at most half a round trip, and bytes take no longer than in an
    all-reduce timed by itself; a slow loader, callbacks or a busy processor cause any time beyond that.
    """
    ranks = len(measured[0].ranks)
    beyond = [np.maximum((each.steps - each.own.max(axis=0)).mean(axis=1), 0.0) for each in drawn]
    whole = np.mean(beyond, axis=0)
    if ranks == 1:
        return 0 * whole, 0 * whole, 0 * whole
    hops, parts = 2.0 * (ranks - 1), 2 * (ranks - 1) / ranks
    hop = np.minimum(_round_trip(measured) / 2, whole / hops)
    rest = whole - hop * hops
    ring = np.minimum(rest, _most_of_bytes(measured)) / parts
    return ring, hop, rest - ring * parts


def _most_of_bytes(measured: Sequence[Measured]) -> float:
    return min((each.reduce_per_byte * each.nbytes for each in measured if each.reduce_per_byte), default=np.inf)


def _round_trip(measured: Sequence[Measured]) -> float:
    return min((each.round_trip for each in measured if each.round_trip), default=0.0)


def _forecast(
    ring: Array, hop: Array, nbytes: int, measured: Sequence[Measured], random: np.random.Generator
) -> dict[str, Array]:
    """Return the costs of exchanges, forecast over the links of the all-reduce, or of the hosts if timed.

    An all-reduce timed by itself gives the time on the links; within a step, the backward pass may hide a part of it. A
    group of devices also copies pushes and answers between a device and its host.
    """
    ranks, timed = len(measured[0].ranks), _most_of_bytes(measured)
    ring = ring if np.isinf(timed) else timed / (2 * (ranks - 1) / ranks) + 0 * ring
    known = [each.serve for each in measured if each.serve]
    # The intervals include the forecast's error, one for the bytes and one for the other costs.
    draws = len(ring) - 1
    quantiles = [NormalDist().inv_cdf((place + 0.5) / draws) for place in range(draws)]
    factors = np.exp(c.FORECAST_ERROR * random.permuted([quantiles] * 2, axis=1))
    bytes_off, delay_off = np.concatenate([np.ones((2, 1)), factors], axis=1)
    per_byte = (max(each.host_per_byte for each in measured) or ring / nbytes) * bytes_off
    return {
        "delay": (_round_trip(measured) or 2 * hop) * delay_off,
        "own_per_byte": per_byte + max(each.copy_per_byte for each in measured) * bytes_off,
        "serve": sum(known) / max(len(known), 1) * delay_off,
        "link_per_byte": per_byte,
        "hand_ring": ring * bytes_off,
    }
