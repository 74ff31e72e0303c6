"""A timer of steps on the host's clock. `OwnTime` measures a rank's compute time."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepTimer:
    """A timer of the seconds from the end of one step to the end of the next.

    Args:
        clock: function that returns the time in seconds; None for `time.perf_counter`.

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
        """Record the beginning of a step, unless the end of the last one did."""
        if self._since is None:
            self._since = self._clock()

    def interrupt(self) -> None:
        """Discard the recorded beginning: the next step is timed only after `start`."""
        self._since = None

    def done(self, elsewhere: float = 0.0) -> float | None:
        """Record the end of a step.

        Args:
            elsewhere: seconds of the step that do not count.

        Returns:
            Seconds of the step, or None if its beginning was not recorded.
        """
        since, self._since = self._since, self._clock()
        return None if since is None else max(0.0, self._since - since - elsewhere)
