"""Virtual time: an event queue, and processes that wait in it. Nothing here knows what a group or a server is.

A process is a generator. What it yields is what it waits for:

- a moment, in seconds: it goes on then;
- another process: it goes on when that one is over, with what it has returned;
- None: it goes on when something else resumes it, with what that brings.

Rule: events happen in order of (time, priority, serial number). The serial number counts the events as they were put
down, so what was caused first happens first, and the same run has the same order every time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator
from enum import IntEnum
from typing import Any


class Priority(IntEnum):
    """What comes first among the events of one moment, whenever they were put down."""

    FAILURE = 0
    """A rank dies: whatever its group was to do at that moment, it does not."""
    EVENT = 1
    """All else."""


class Process:
    """A generator in virtual time, which `Engine.resume` begins.

    Args:
        timeline: the generator.
        priority: of all that happens to it at moments of its own.

    Attributes:
        is_over: whether it has returned, or was stopped.
        returned: what it has returned.
    """

    __slots__ = ("is_over", "priority", "returned", "timeline", "waiters")

    def __init__(self, timeline: Timeline, priority: Priority = Priority.EVENT) -> None:
        self.timeline, self.priority = timeline, priority
        self.is_over, self.returned = False, None
        self.waiters: tuple[Process, ...] = ()


Timeline = Generator[float | Process | None, Any, Any]
"""What a process is made from."""


class Engine:
    """Runs processes in virtual time.

    Attributes:
        now: virtual time, in seconds.
        events: which process goes on when, and with what: a heap of (time, priority, serial number, process, value).

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
        """When the next event is due, in seconds; never, if there is none."""
        return self.events[0][0] if self.events else math.inf

    def start(self, timeline: Timeline, priority: Priority = Priority.EVENT) -> Process:
        """A process begins: it runs, now, to the first thing that it waits for."""
        process = Process(timeline, priority)
        self.resume(process)
        return process

    def resume(self, process: Process, value: Any = None) -> None:
        """A process goes on, now, to the next thing that it waits for; nothing happens if it is over."""
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
        """A process that waits for it goes on at ``time``, with this value."""
        heapq.heappush(self.events, (time, process.priority, self._serial_number, process, value))
        self._serial_number += 1

    def stop(self, process: Process) -> None:
        """A process ends where it is. What it has started goes on, and so does what waits for it, with None."""
        process.timeline.close()
        self._finish(process, None)

    def step(self) -> None:
        """The next event happens."""
        self.now, _, _, process, value = heapq.heappop(self.events)
        self.resume(process, value)

    def _finish(self, process: Process, returned: Any) -> None:
        process.is_over, process.returned = True, returned
        for waiter in process.waiters:
            self.resume(waiter, returned)


def until_resumed() -> Timeline:
    """What waits until something else resumes it, and returns what that brings."""
    return (yield None)
