"""Grid search."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_omni.search.evidence import Evidence
from lightning_omni.search.samplers.sampler import Proposal, Sampler


class Grid(Sampler):
    """All of a grid, as far as the budget goes: momentum in thirds, steps a factor of three apart."""

    def propose(self, evidence: Evidence) -> Iterator[Proposal]:
        points = [
            evidence.setting(groups, momentum, evidence.theory.step * factor)
            for factor in (1.0, 1 / 3, 3.0)
            for momentum in (0.9, 0.6, 0.3, 0.0)
            for groups in reversed(evidence.groups())
        ]
        tried = {each.setting for each in evidence.tried}
        yield from ((each, "on the grid") for each in dict.fromkeys(points) if each not in tried)
