"""`Round`: one search of a fit, as a report keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_omni.search import Observation, Search


@dataclass(frozen=True)
class Round:
    """One search of a fit: the first, or a retuning.

    Args:
        search: what was tried and found.
        epoch: number of the epoch in which it began.
        seconds_run: seconds of training before it.
        measured_after: samples per second while the run trained with what was chosen, by groups: samples that all ranks
            trained, over the seconds of these batches, without validations, searches and the first batch after them.
        reasons: why each probe was tried; where there are none the search is asked once more.
    """

    search: Search
    epoch: int
    seconds_run: float
    measured_after: dict[int, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "search": self.search.to_dict(),
            "epoch": self.epoch,
            "seconds_run": self.seconds_run,
            "measured_after": {str(groups): rate for groups, rate in self.measured_after.items()},
            "reasons": list(self.reasons),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Round:
        """What `to_dict` gave. The search is told what was seen, and not asked whether it would try that again."""
        search = Search.from_dict({**plain["search"], "observations": []})
        for each in plain["search"]["observations"]:
            search.tell(Observation.from_dict(each))
        measured = {int(groups): float(rate) for groups, rate in plain["measured_after"].items()}
        return cls(search, plain["epoch"], plain["seconds_run"], measured, tuple(plain["reasons"]))
