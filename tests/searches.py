"""Searches with made-up observations: eight ranks, the last 2.6 times as slow as the others, and a slow network."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from lightning_omni.performance.forecast import Setting, TrialResult
from lightning_omni.performance.measured import Measured
from lightning_omni.search import Observation, Search, SearchSpec, Space
from lightning_omni.topology import Topology

SLOWNESS = (1, 1, 1.1, 1, 1, 1, 1, 2.6)
BATCH = 16
START = Setting(1, 0.9, 0.05)


def measured(setting: Setting, steps: int, random: np.random.Generator, nbytes: int = 4_000_000) -> Measured:
    """What ranks and groups would measure, with exchanges of about 14 ms and all-reduces of up to 100 ms."""
    ranks = len(SLOWNESS)
    groups = [members for members in Topology.even(ranks, setting.groups).groups if members]
    own = {rank: (0.01 + BATCH * 0.004 * SLOWNESS[rank]) * random.lognormal(-0.02, 0.2, steps) for rank in range(ranks)}
    several = len(groups) > 1
    exchanges = [np.full(steps, 0.0 if not several else 0.014) * random.uniform(1, 1.2, steps) for _ in groups]
    rows = [
        np.max([own[rank] for rank in members], axis=0) + 0.1 * (len(members) - 1) / len(members) + exchange
        for members, exchange in zip(groups, exchanges, strict=True)
    ]
    return Measured(
        tuple(map(tuple, groups)),
        ((float(BATCH),) * steps,) * ranks,
        tuple(tuple(own[rank]) for rank in range(ranks)),
        tuple(map(tuple, rows)),
        tuple(map(tuple, exchanges)),
        serve=0.003 if several else 0.0,
        nbytes=nbytes,
    )


def observed(setting: Setting, speed: float = 1.0, problem: str = "", seed: int = 0) -> Observation:
    """A probe of 16 batches of each rank; the loss falls as fast as ``speed`` says."""
    random = np.random.default_rng(seed)
    samples = np.arange(1, 16 * setting.groups + 1) * BATCH * len(SLOWNESS) / setting.groups
    losses = 0.4 + 1.9 / (1 + speed * samples / 500) + random.normal(0, 0.02, len(samples))
    if problem:
        losses[-3:] = math.nan
    tried = TrialResult(setting, tuple(samples.tolist()), tuple(losses.tolist()), 4.5, problem)
    return Observation(tried, measured(setting, 16, random))


def search(
    *observations: Observation, horizon: float = 1e5, space: Space | None = None, start: Setting = START, **job_: Any
) -> Search:
    """A search that saw these."""
    job = SearchSpec(start, BATCH * len(SLOWNESS), horizon, 0.1, space or Space.of({}, len(SLOWNESS)), **job_)
    made = Search(job)  # told, and never asked
    for observation in observations:
        made.tell(observation)
    return made


PROBLEM = "diverged: the loss was <nan> & more"
FOUND = (
    (Setting(8, 0.2, 0.05), 0.7, ""),
    (START, 1.0, ""),
    (Setting(4, 0.6, 0.05), 0.95, ""),
    (Setting(4, 0.6, 0.5), 1.0, PROBLEM),
)


def smaller() -> Search:
    """A look at a run under way, which finds that a third of the step of four groups is better."""
    chosen = Setting(4, 0.6, 0.05)
    probes = [observed(chosen), observed(replace(chosen, lr=0.05 / 3), 2.0)]
    of_a_group = BATCH * len(SLOWNESS) / chosen.groups
    known = search(start=chosen, current=True, seconds=60.0, own=START, reference=of_a_group)
    made = Search(known.spec.for_step(None, is_final=False))
    for probe in probes:
        made.tell(probe)
    return made


@cache
def found() -> Search:
    """A search of four probes, of which one diverged; do not tell it more."""
    return search(*(observed(*each, seed=seed) for seed, each in enumerate(FOUND)))
