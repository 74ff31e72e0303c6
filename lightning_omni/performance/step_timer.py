"""`StepTimer`: how long steps take, on the host's clock. What a rank computes of a step is measured by `OwnTime`."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepTimer:
    """Seconds from the end of one step to the end of the next.

    Args:
        clock: gives the time in seconds; None for that of `time.perf_counter`.

    Example:
        >>> moments = iter([0.0, 2.0, 4.5])
        >>> timer = StepTimer(clock=lambda: next(moments))
        >>> timer.done(), timer.done(), timer.done(elsewhere=0.5)
        (None, 2.0, 2.0)
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.perf_counter
        self._since: float | None = None

    def start(self) -> None:
        """A step begins, unless it began when the last one ended."""
        if self._since is None:
            self._since = self._clock()

    def interrupt(self) -> None:
        """Something else comes before the next step: that one is not timed, unless it is started."""
        self._since = None

    def done(self, elsewhere: float = 0.0) -> float | None:
        """A step has ended.

        Args:
            elsewhere: seconds of it that do not count.

        Returns:
            Its seconds, or None if its beginning is not known.
        """
        since, self._since = self._since, self._clock()
        return None if since is None else max(0.0, self._since - since - elsewhere)
