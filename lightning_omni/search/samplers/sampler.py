"""The interface of samplers: evidence goes in, settings to try come out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from lightning_omni.performance.forecast import Setting
from lightning_omni.search.evidence import Evidence

Proposal = tuple[Setting, str]
"""A setting, and why it is to be tried in a few words."""


class Sampler(ABC):
    """Which settings are tried after the two ends of the space.

    Attributes:
        by_forecast: whether theory counts when a setting is chosen; otherwise what was measured alone.
        uses_scikit_optimize: whether it has to be installed.
        learns_from_run: whether the first batches of the run itself take the place of the two ends of the space, and
            what was simulated of other tasks (`lightning_omni.search.prior`) that of theory.
    """

    by_forecast: ClassVar[bool] = False
    uses_scikit_optimize: ClassVar[bool] = False
    learns_from_run: ClassVar[bool] = False

    @abstractmethod
    def propose(self, evidence: Evidence) -> Iterator[Proposal]:
        """One setting after another; when the next is asked for, the evidence has what came of the last.

        The search stops when the budget is spent. The same evidence has to give the same settings: a checkpoint holds
        what was observed, and a resumed search asks again.

        Args:
            evidence: what is known, with at least one probe that was timed. Probes may be ``rejected``; nothing else
                is to be changed.
        """
