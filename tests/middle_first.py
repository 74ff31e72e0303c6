"""A sampler of a user's own, in one file: momentum is halved as long as it helps."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_omni.search import Evidence, Proposal, Sampler


class MiddleFirst(Sampler):
    """The middle of what is left."""

    def propose(self, evidence: Evidence) -> Iterator[Proposal]:
        low, high = evidence.spec.space.momentum
        while high - low > 0.1:
            middle = (low + high) / 2
            yield evidence.setting(1, middle, evidence.theory.step), "the middle"
            low, high = (low, middle) if evidence.tried[-1].has_failed else (middle, high)
