"""The search for the size of the step of a run under way."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_omni.search import constants as c
from lightning_omni.search.evidence import Evidence
from lightning_omni.search.samplers.sampler import Proposal, Sampler
from lightning_omni.search.specification import FinalStepSearchSpec


class Steps(Sampler):
    """The step as it is, a third of it, and if that is worse three times as large."""

    def propose(self, evidence: Evidence) -> Iterator[Proposal]:
        yield evidence.stepped(1.0), "as it is"
        if isinstance(evidence.spec, FinalStepSearchSpec) and not evidence.tried[0].has_failed:
            return  # a third it will be
        yield evidence.stepped(1 / c.SMALLER), "a smaller step"
        if not evidence.gain(1) >= 0:  # not a number says nothing
            yield evidence.stepped(c.SMALLER), "a larger step"
