"""Virtual time: an event queue, and processes that wait in it.

A process is a generator. Its yields determine when it resumes:

- a time, in seconds: at that time;
- another process: when that one has ended, with its return value;
- None: when other code resumes it, with the value that this code passes.

Rule: events happen in order of (time, priority, serial number), and so in the same order in each run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator
from enum import IntEnum
from typing import Any


class Priority(IntEnum):
    """The order of events at the same time, before the order in which they were scheduled."""

    FAILURE = 0
    """A rank dies; other events of its group at that time do not happen."""
    EVENT = 1
    """All other events."""


class Process:
    """A generator in virtual time, started by `Engine.resume`."""

    __slots__ = ("is_over", "priority", "returned", "timeline", "waiters")

    def __init__(self, timeline: Timeline, priority: Priority = Priority.EVENT) -> None:
        self.timeline, self.priority = timeline, priority
        self.is_over, self.returned = False, None
        self.waiters: tuple[Process, ...] = ()


Timeline = Generator[float | Process | None, Any, Any]
"""The generator of a process."""


class Engine:
    """An event loop of processes in virtual time.

    Attributes:
        now: virtual time, in seconds.
        events: a heap of (time, priority, serial number, process, value).

    Example:
        >>> engine = Engine()
        >>> def travel(seconds):
        ...     yield engine.now + seconds
        ...     return "parcel"
        >>> def sender():
        ...     yield 1.0
        ...     print((yield engine.start(travel(0.5))), "at", engine.now)
        >>> process = engine.start(sender())
        >>> while len(engine.events):
        ...     engine.step()
        parcel at 1.5
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, Priority, int, Process, Any]] = []
        self._serial_number = 0

    @property
    def next_time(self) -> float:
        return self.events[0][0] if self.events else math.inf

    def start(self, timeline: Timeline, priority: Priority = Priority.EVENT) -> Process:
        """Start a process now, up to its first wait."""
        process = Process(timeline, priority)
        self.resume(process)
        return process

    def resume(self, process: Process, value: Any = None) -> None:
        """Resume a process now, up to its next wait, unless it has ended."""
        while not process.is_over:
            try:
                awaited = process.timeline.send(value)
            except StopIteration as stop:
                self._finish(process, stop.value)
                return
            if not isinstance(awaited, Process):
                if awaited is not None:
                    self.resume_at(awaited, process, None)
                return
            if not awaited.is_over:
                awaited.waiters += (process,)
                return
            value = awaited.returned

    def resume_at(self, time: float, process: Process, value: Any) -> None:
        heapq.heappush(self.events, (time, process.priority, self._serial_number, process, value))
        self._serial_number += 1

    def stop(self, process: Process) -> None:
        """End a process; processes that it started continue, and those that wait for it resume with None."""
        process.timeline.close()
        self._finish(process, None)

    def step(self) -> None:
        self.now, _, _, process, value = heapq.heappop(self.events)
        self.resume(process, value)

    def _finish(self, process: Process, returned: Any) -> None:
        process.is_over, process.returned = True, returned
        for waiter in process.waiters:
            self.resume(waiter, returned)


def until_resumed() -> Timeline:
    return (yield None)
