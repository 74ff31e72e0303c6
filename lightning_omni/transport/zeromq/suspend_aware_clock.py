"""A clock that leaves out the time in which its own process was stopped or busy."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST = 2.0
"""The most seconds that count between two readings. Loops read their clock several times a second."""


class SuspendAwareClock:
    """A monotonic clock that stops with its process.

    A job that is stopped and resumed (Ctrl-Z and ``fg``, ``scontrol suspend``, a migrated virtual machine) resumes as a
    whole: the silence of the others was only this process's own pause. The same holds for a server that one message
    kept busy for long, with later messages in its queue.

    Args:
        now: a function that returns seconds and never decreases.

    Example:
        >>> moments = iter([0.0, 0.5, 1.0, 61.0, 61.5])
        >>> clock = SuspendAwareClock(now=lambda: next(moments))
        >>> [clock() for _ in range(4)]
        [0.5, 1.0, 3.0, 3.5]
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last = now()
        self._stood = 0.0

    def __call__(self) -> float:
        """Return seconds on the scale of ``now``, less the time beyond `LONGEST` between any two readings."""
        now = self._now()
        self._stood += max(0.0, now - self._last - LONGEST)
        self._last = now
        return now - self._stood
