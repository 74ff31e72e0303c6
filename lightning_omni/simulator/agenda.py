"""Virtual time: what happens next, and who has to queue.

Rule: actions happen in order of (time, priority, serial number). The serial number counts the actions as they were put
down, so what was caused first happens first, and the same run has the same order every time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum

Action = Callable[[], None]


class Priority(IntEnum):
    """What comes first among the actions of one moment, whenever they were put down."""

    FAILURE = 0
    """A rank dies: whatever its group was to do at that moment, it does not."""
    EVENT = 1
    """All else."""


class Agenda:
    """Actions in order of time; those of one moment by priority, and then in the order in which they were put down.

    Example:
        >>> agenda, happened = Agenda(), []
        >>> agenda.add(2.0, lambda: happened.append("a push arrives"))
        >>> agenda.add(2.0, lambda: happened.append("another one"))
        >>> agenda.add(2.0, lambda: happened.append("a rank dies"), Priority.FAILURE)
        >>> agenda.add(1.0, lambda: happened.append("a group computes"))
        >>> while len(agenda):
        ...     agenda.pop()()
        >>> happened
        ['a group computes', 'a rank dies', 'a push arrives', 'another one']
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, Priority, int, Action]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, time: float, action: Action, priority: Priority = Priority.EVENT) -> None:
        """Puts an action down for ``time``, in seconds."""
        heapq.heappush(self._heap, (time, priority, self._count, action))
        self._count += 1

    @property
    def next_time(self) -> float:
        """When the next action is due, in seconds."""
        return self._heap[0][0]

    def pop(self) -> Action:
        """Takes the next action off."""
        return heapq.heappop(self._heap)[3]


class Queue:
    """Serves one after the other, first come, first served."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def serve(self, arrival: float, seconds: float) -> float:
        """Somebody comes who takes that long to serve. Returns when that is done."""
        self._free_at = max(arrival, self._free_at) + seconds
        return self._free_at
