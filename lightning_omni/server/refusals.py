"""Log lines that someone outside can cause: escaped, cut, and not too many of them."""

from __future__ import annotations

import logging
import threading
import time

from lightning_omni.protocol.quoting import quoted

LINES, SECONDS = 10, 60.0
"""So many lines in so much time, at most; the next one says how many were left out."""


class RefusalLog:
    """Says what was refused. From any thread.

    Args:
        log: where to.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._began = -SECONDS
        self._said = self._left_out = 0

    def say(self, what: str, about: str) -> None:
        """One line.

        Args:
            what: our own words.
            about: text that may hold bytes from outside.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._began >= SECONDS:
                self._tell_left_out()
                self._began, self._said = now, 0
            if self._said < LINES:
                self._said += 1
                self._log.warning("%s: %s", what, quoted(about))
            else:
                self._left_out += 1

    def close(self) -> None:
        """Says how many lines were left out last."""
        with self._lock:
            self._tell_left_out()

    def _tell_left_out(self) -> None:
        if self._left_out:
            self._log.warning("%d more lines like these were left out", self._left_out)
            self._left_out = 0
