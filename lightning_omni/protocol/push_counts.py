"""What came of the pushes to one optimizer, in numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any


class PushCounts:
    """Counts what is merged, and what is refused because it is not finite.

    Attributes:
        staleness: how many pushes had which.
        by_group: the same of each group, since groups were formed.
        refused: pushes and groups' own weights so far.
        refused_in_row: of each group, those since it has sent some that are finite.
    """

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()
        self.by_group: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self.refused = 0
        self.refused_in_row: Counter[int] = Counter()

    def form(self) -> None:
        """Groups are formed."""
        self.by_group.clear()
        self.refused_in_row.clear()

    def accept(self, group: int) -> None:
        """What a group has sent is finite."""
        self.refused_in_row[group] = 0

    def refuse(self, group: int) -> None:
        """What a group has sent is not."""
        self.refused += 1
        self.refused_in_row[group] += 1

    def merge(self, group: int, staleness: int) -> None:
        """A push is merged."""
        self.staleness[staleness] += 1
        self.by_group[group][staleness] += 1

    def state(self) -> dict[str, Any]:
        """As plain values, what outlives a server."""
        return {
            "staleness": dict(self.staleness),
            "by_group": {group: dict(counts) for group, counts in self.by_group.items()},
            "refused": self.refused,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`."""
        self.staleness, self.refused = Counter(state["staleness"]), int(state["refused"])
        self.by_group.update({group: Counter(counts) for group, counts in state["by_group"].items()})
