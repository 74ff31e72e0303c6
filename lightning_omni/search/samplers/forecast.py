"""No probes: what the run's first batches, the hardware model and the prior say."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_omni.search.evidence import Evidence
from lightning_omni.search.samplers.sampler import Proposal, Sampler


class ByForecast(Sampler):
    """Proposes nothing: the run's own first batches are all that it asks for."""

    by_forecast = True
    learns_from_run = True

    def propose(self, evidence: Evidence) -> Iterator[Proposal]:
        return iter(())
