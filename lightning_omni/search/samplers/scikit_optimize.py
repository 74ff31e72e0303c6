"""Plain scikit-optimize, to compare with: its own Gaussian process over measured times, without theory."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lightning_omni.performance.constants import FAILED
from lightning_omni.performance.forecast import log_costs
from lightning_omni.search.evidence import Evidence
from lightning_omni.search.samplers.sampler import Proposal, Sampler
from lightning_omni.search.surrogate import Axes, ask


class ScikitOptimize(Sampler):
    """Asks and tells, and knows nothing but times."""

    uses_scikit_optimize = True

    def propose(self, evidence: Evidence) -> Iterator[Proposal]:
        while True:
            axes, tried = Axes(evidence), evidence.tried
            costs = [cost for cost, _ in log_costs(tried)]
            worst = max((cost for cost in costs if math.isfinite(cost)), default=0.0) + math.log(FAILED)
            times = [
                min(cost, worst) - math.log(evidence.throughput(each.setting))
                for cost, each in zip(costs, tried, strict=True)
            ]
            points = [axes.coordinates(each.setting) for each in tried]
            point, _ = ask(axes.bounds, points, times, None, evidence.spec.seed)
            yield axes.setting(point), "asked of scikit-optimize"
