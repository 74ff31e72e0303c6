"""The published algorithm."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_omni.performance.forecast import Setting
from lightning_omni.search.choice import best_as_measured
from lightning_omni.search.evidence import Evidence
from lightning_omni.search.samplers.sampler import Proposal, Sampler


class PublishedAlgorithm(Sampler):
    """Groups by speed alone, then a grid of momentum and learning rate; fewer groups while no momentum is best.

    References:
        Hadjis et al. 2016, Algorithm 1. Repaired here: one group is the least, rates of learning may rise, means
        are over what was measured, and no setting is tried twice.
    """

    def propose(self, evidence: Evidence) -> Iterator[Proposal]:
        space, start = evidence.spec.space, evidence.spec.start
        groups, best = max(evidence.groups()), start.lr
        while True:
            for lr in (best, best / 10):
                for momentum in (0.9, 0.6, 0.3, 0.0):
                    free = Setting(groups, momentum, lr, period=evidence.period, further=start.further)
                    setting = evidence.as_it_would_be(space.holds(free))
                    if not self._is_pruned(evidence, setting):
                        yield setting, f"grid of {groups} groups"
            found = best_as_measured(evidence)
            if found.momentum > 0 or groups == 1 or found.groups != groups:
                return
            groups, best = max(each for each in space.groups if each < groups), found.lr

    def _is_pruned(self, evidence: Evidence, setting: Setting) -> bool:
        """Whether it was tried, or takes larger steps than something that diverged."""
        return any(
            each.setting.groups == setting.groups
            and (
                (each.setting.momentum, each.setting.lr) == (setting.momentum, setting.lr)
                or (each.has_failed and each.setting.momentum <= setting.momentum and each.setting.lr <= setting.lr)
            )
            for each in evidence.tried
        )
