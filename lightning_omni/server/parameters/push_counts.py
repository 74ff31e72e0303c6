"""Counts of the pushes to one optimizer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any


class PushCounts:
    """The counts of merged pushes, and of refused ones: not finite, or declined by the method.

    Attributes:
        staleness: number of pushes with each staleness.
        by_group: for each group, the same since groups were formed.
        refused: refused pushes, and own weights left out of a mean, since the weights were uploaded.
        refused_in_row: each group's pushes that were not finite since its last finite or declined one.
    """

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()
        self.by_group: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self.refused = 0
        self.refused_in_row: Counter[int] = Counter()

    def form(self) -> None:
        self.by_group.clear()
        self.refused_in_row.clear()

    def accept(self, group: int) -> None:
        self.refused_in_row[group] = 0

    def refuse(self, group: int) -> None:
        self.refused += 1
        self.refused_in_row[group] += 1

    def decline(self, group: int) -> None:
        self.refused += 1
        self.refused_in_row[group] = 0

    def merge(self, group: int, staleness: int) -> None:
        self.staleness[staleness] += 1
        self.by_group[group][staleness] += 1

    def state(self) -> dict[str, Any]:
        return {
            "staleness": dict(self.staleness),
            "by_group": {group: dict(counts) for group, counts in self.by_group.items()},
            "refused": self.refused,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.staleness, self.refused = Counter(state["staleness"]), int(state["refused"])
        self.by_group.update({group: Counter(counts) for group, counts in state["by_group"].items()})
