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
from collections.abc import Generator
from enum import IntEnum
from typing import Any, Generic, TypeVar

Event = TypeVar("Event")


class Priority(IntEnum):
    """What comes first among the events of one moment, whenever they were put down."""

    FAILURE = 0
    """A rank dies: whatever its group was to do at that moment, it does not."""
    EVENT = 1
    """All else."""


class EventQueue(Generic[Event]):
    """Events in order of time; those of one moment by priority, and then in the order in which they were put down.

    Example:
        >>> events = EventQueue[str]()
        >>> events.add(2.0, "a push arrives")
        >>> events.add(2.0, "another one")
        >>> events.add(2.0, "a rank dies", Priority.FAILURE)
        >>> events.add(1.0, "a group computes")
        >>> [events.pop() for _ in range(len(events))]
        ['a group computes', 'a rank dies', 'a push arrives', 'another one']
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, Priority, int, Event]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, time: float, event: Event, priority: Priority = Priority.EVENT) -> None:
        """Puts an event down for ``time``, in seconds."""
        heapq.heappush(self._heap, (time, priority, self._count, event))
        self._count += 1

    @property
    def next_time(self) -> float:
        """When the next event is due, in seconds."""
        return self._heap[0][0]

    def pop(self) -> Event:
        """Takes the next event off."""
        return heapq.heappop(self._heap)[3]


class Process:
    """A generator in virtual time, which `Engine.resume` begins.

    Args:
        timeline: the generator.
        priority: of all that happens to it at moments of its own.

    Attributes:
        is_over: whether it has returned, or was stopped.
        returned: what it has returned.
    """

    __slots__ = ("is_over", "priority", "returned", "timeline", "waiter")

    def __init__(self, timeline: Timeline, priority: Priority = Priority.EVENT) -> None:
        self.timeline, self.priority = timeline, priority
        self.is_over, self.returned = False, None
        self.waiter: Process | None = None


Timeline = Generator[float | Process | None, Any, Any]
"""What a process is made from."""


class Engine:
    """Runs processes in virtual time.

    Attributes:
        now: virtual time, in seconds.
        events: who goes on when, and with what.

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
        self.events = EventQueue[tuple[Process, Any]]()

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
                    self.events.add(awaited, (process, None), process.priority)
                return
            if not awaited.is_over:
                awaited.waiter = process
                return
            value = awaited.returned

    def resume_at(self, time: float, process: Process, value: Any) -> None:
        """A process that waits for it goes on at ``time``, with this value."""
        self.events.add(time, (process, value), process.priority)

    def stop(self, process: Process) -> None:
        """A process ends where it is. What it has started goes on."""
        process.is_over = True
        process.timeline.close()

    def step(self) -> None:
        """The next event happens."""
        self.now = self.events.next_time
        self.resume(*self.events.pop())

    def _finish(self, process: Process, returned: Any) -> None:
        process.is_over, process.returned = True, returned
        if process.waiter is not None:
            self.resume(process.waiter, returned)
