"""Time as a process has lived through it: who stood still itself cannot say that others were silent."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST = 2.0
"""Seconds that may count between two readings. Loops read their clock several times a second."""


class AwakeClock:
    """A monotonic clock that stands still with its process.

    A job that is stopped and goes on (Ctrl-Z and ``fg``, ``scontrol suspend``, a virtual machine that is moved) comes
    back as a whole: the silence of the others was its own. So does a server that was busy with one message for long:
    what it was told meanwhile lies in its queue.

    Args:
        now: seconds, never less than before.

    Example:
        >>> moments = iter([0.0, 0.5, 1.0, 61.0, 61.5])
        >>> clock = AwakeClock(now=lambda: next(moments))
        >>> [clock() for _ in range(4)]
        [0.5, 1.0, 3.0, 3.5]
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last = now()
        self._stood = 0.0

    def __call__(self) -> float:
        """Seconds, on the scale of ``now``, without those in which it was not read for too long."""
        now = self._now()
        self._stood += max(0.0, now - self._last - LONGEST)
        self._last = now
        return now - self._stood
