"""`Round`: one search of a fit, as a report stores it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_omni.tuning.search import Search


@dataclass(frozen=True)
class Round:
    """One search of a fit: the first, or a retuning.

    Args:
        search: the search.
        epoch: number of the epoch in which it began.
        seconds_run: seconds of training before it.
        measured_after: samples per second of all ranks with the choice, by groups, without validations, searches and
            the first batch after them.
    """

    search: Search
    epoch: int
    seconds_run: float
    measured_after: dict[int, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "search": self.search.to_dict(),
            "epoch": self.epoch,
            "seconds_run": self.seconds_run,
            "measured_after": {str(groups): rate for groups, rate in self.measured_after.items()},
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Round:
        measured = {int(groups): float(rate) for groups, rate in plain["measured_after"].items()}
        return cls(Search.from_dict(plain["search"]), plain["epoch"], plain["seconds_run"], measured)
