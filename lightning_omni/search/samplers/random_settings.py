"""Random search."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lightning_omni.search.evidence import Evidence
from lightning_omni.search.samplers.sampler import Proposal, Sampler
from lightning_omni.search.space import draw_further


class RandomSettings(Sampler):
    """Groups and momentum uniformly, the step uniformly in its logarithm."""

    def propose(self, evidence: Evidence) -> Iterator[Proposal]:
        random, space = np.random.default_rng(evidence.spec.seed), evidence.spec.space
        low, high = map(math.log, space.factor)
        while True:
            groups = int(random.choice(evidence.groups()))
            momentum = float(random.uniform(*space.momentum))
            step = evidence.theory.step * math.exp(random.uniform(low, high))
            setting = evidence.setting(groups, momentum, step)
            yield draw_further(space.further, setting, evidence, random), "at random"
