"""The sampler that is used by default: scikit-optimize's expected improvement, on the time that theory predicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from lightning_omni.performance.forecast import Setting, TrialResult
from lightning_omni.search import constants as c
from lightning_omni.search.evidence import Evidence
from lightning_omni.search.samplers.sampler import Proposal, Sampler
from lightning_omni.search.surrogate import Axes, ask


class TheoryLed(Sampler):
    """Wherever an improvement on the predicted time is expected most; smaller steps if several groups diverge."""

    by_forecast = True
    uses_scikit_optimize = True
    ask = staticmethod(ask)

    def propose(self, evidence: Evidence) -> Iterator[Proposal]:
        if _is_far_above(evidence.tried):
            evidence.rejected[0] = "its loss is far above that of one group"
        if any(each.has_failed for each in evidence.tried):
            yield from self._smaller(evidence)
        else:
            while (asked := self._ask(evidence)) is not None:
                yield asked

    def _smaller(self, evidence: Evidence) -> Iterator[Proposal]:
        """Steps a third as large, until one does not diverge."""
        for power in range(1, c.SMALLER_TIMES + 1):
            setting = evidence.proposal(max(evidence.spec.space.groups), c.SMALLER**-power)
            if evidence.largest_step(1) == 1.0 and not self._could_pay(evidence, setting):
                return
            yield setting, "a smaller step"
            if not evidence.tried[-1].has_failed:
                return

    def _could_pay(self, evidence: Evidence, setting: Setting) -> bool:
        """Whether it is faster than one group by more than theory expects it to lose again."""
        alone, other = (
            evidence.theory(each) - math.log(evidence.throughput(each))
            for each in (evidence.proposal(1), evidence.as_it_would_be(setting))
        )
        return other < alone

    def _ask(self, evidence: Evidence) -> Proposal | None:
        """The setting with the largest expected improvement over the best so far, unless that is a trifle."""
        # Not as they were tried: what proportional batches save is known without a probe of them.
        settings = [evidence.as_it_would_be(each.setting) for each in evidence.tried]
        efficiency = evidence.efficiency()
        times = [
            cost - math.log(evidence.throughput(each)) for cost, each in zip(efficiency.costs, settings, strict=True)
        ]
        # From a cold start the largest step that does not diverge always wins, and loses later.
        axes = Axes(evidence, without=("factor",))

        def predict(point: Mapping[str, float]) -> tuple[float, float]:
            setting = axes.setting(point)
            mean, error = efficiency(setting)
            return mean - efficiency.offset - math.log(evidence.throughput(setting)), error

        points = list(map(axes.coordinates, settings))
        point, gain = self.ask(axes.bounds, points, times, predict, evidence.spec.seed)
        setting = axes.setting(point)
        if gain < c.WORTH or setting in settings:
            return None
        return setting, f"expected to save {1 - math.exp(-gain):.0%}"


def _is_far_above(ends: Sequence[TrialResult]) -> bool:
    """Whether several groups came out far above one: they have not diverged yet, but will."""
    if len(ends) < 2 or any(each.has_failed for each in ends):
        return False
    several, one = ends[:2]
    until = min(several.end, one.end)
    above, level = (float(each.blocks(until)[-3:].mean()) for each in (several, one))
    return above > level + c.ABOVE * abs(level)
