"""Searches with made-up observations: eight ranks, the last 2.6 times as slow as the others, and a slow network."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from core import Measured, Observation, Search, SearchSpec, Setting, Space, TrainedBatches, TrainedSegment

SLOWNESS = (1, 1, 1.1, 1, 1, 1, 1, 2.6)
RANKS, BATCH = len(SLOWNESS), 16
START = Setting(1, 0.9, 0.05, method="async_sgd", wire="fp32")
METHODS = ("async_sgd", "local_sgd")


def measured(steps: int, allreduce: float = 0.1, seed: int = 0, nbytes: int = 4_000_000) -> Measured:
    """What ranks of one group would measure."""
    random = np.random.default_rng(seed)
    own = [(0.01 + BATCH * 0.004 * slowness) * random.lognormal(-0.02, 0.2, steps) for slowness in SLOWNESS]
    return Measured(
        tuple(range(RANKS)),
        ((float(BATCH),) * steps,) * RANKS,
        tuple(map(tuple, own)),
        tuple(np.max(own, axis=0) + allreduce),
        serve=0.003,
        nbytes=nbytes,
    )


def observed(allreduce: float = 0.1, seed: int = 0, steps: int = 16) -> Observation:
    """The first batches of a run, whose loss falls."""
    random = np.random.default_rng(seed)
    samples = np.arange(1, steps + 1) * float(BATCH * RANKS)
    losses = 0.4 + 1.9 / (1 + samples / 500) + random.normal(0, 0.02, steps)
    return Observation(TrainedBatches(tuple(samples), tuple(losses)), measured(steps, allreduce, seed))


def space_of(**given: Any) -> Space:
    """What is searched on these ranks."""
    return Space.of({"method": METHODS, "compression": ["fp32", "int8"], **given}, RANKS)


def search(
    observation: Observation | None = None, space: Space | None = None, start: Setting = START, **changes: Any
) -> Search:
    """A search that saw these."""
    observation = observation or observed()
    segments = changes.pop("segments", ())
    known = SearchSpec(start, BATCH * RANKS, 1e5, space or space_of())
    return Search(replace(known, **changes), observation, segments=segments)


@cache
def found() -> Search:
    """A search that was over once it was asked; do not change it."""
    made = search(observed(allreduce=1.0))
    made.overhead = 0.25
    assert made.choice().setting.groups > 1
    return made


@cache
def later() -> Search:
    """A search of a run whose groups were half as fast as predicted."""
    trained = found().choice().setting
    made = search(observed(allreduce=1.0, seed=1), segments=[TrainedSegment(trained, 0.7, 0.01**2)])
    made.choice()
    return made
