"""Virtual time: what happens next, and who has to queue."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Agenda:
    """Actions in order of time; those of one moment in the order in which they were put down.

    Example:
        >>> agenda = Agenda()
        >>> agenda.add(2.0, lambda: None)
        >>> agenda.add(1.0, lambda: None)
        >>> agenda.next_time
        1.0
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, time: float, action: Action) -> None:
        """Puts an action down for ``time``, in seconds."""
        heapq.heappush(self._heap, (time, self._count, action))
        self._count += 1

    @property
    def next_time(self) -> float:
        """When the next action is due, in seconds."""
        return self._heap[0][0]

    def pop(self) -> Action:
        """Takes the next action off."""
        return heapq.heappop(self._heap)[2]


class Queue:
    """Serves one after the other, first come, first served."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def serve(self, arrival: float, seconds: float) -> float:
        """Somebody comes who takes that long to serve. Returns when that is done."""
        self._free_at = max(arrival, self._free_at) + seconds
        return self._free_at
