"""Rate limits on the effects of strangers: connections, which the kernel then leaves unanswered, and log lines.

A stranger can reopen an ended connection at once, at less cost than this process has with it, and could leave no time
for the exchange. So a listening socket accepts connections at a limited rate. Connections of ranks with the key do not
count, and an unanswered connection is retried by the system.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import struct
import sys
import threading
import time

from lightning_omni.wire.sanitize import quoted

RATE = 150.0
"""Sustained connections of strangers per second that a listening socket accepts."""
BURST = 300.0
"""Connections that it accepts at once after a quiet time."""
REOPEN = 8.0
"""Connections that a closed gate must have accrued before it opens again."""
LINES, SECONDS = 10, 60.0
"""The most log lines in a number of seconds; the next line reports how many were left out."""
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
"""Options of Linux's ``setsockopt``, which Python does not name."""
_FILTER = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the byte of a TCP header that holds its flags
        (0x45, 0, 1, 0x02),  # is SYN among them?
        (0x06, 0, 0, 0),  # then drop the packet
        (0x06, 0, 0, 0xFFFFFFFF),
    )
)
"""A kernel filter (classic BPF) that drops new connections and leaves established ones alone."""


class Gate:
    """A gate on a listening TCP socket. On systems without socket filters (all but Linux) it is always open.

    Args:
        descriptor: descriptor of the listening socket.
        now: seconds on a monotonic clock.
    """

    def __init__(self, descriptor: int, now: float) -> None:
        self._wire = socket.socket(fileno=os.dup(descriptor))
        self._left, self._since = BURST, now
        self.is_shut = False

    def came(self) -> None:
        self._left -= 1.0

    def was_let_in(self) -> None:
        """Take back the count of a connection that proved to be a rank's."""
        self._left = min(BURST, self._left + 1.0)

    def poll(self, now: float) -> None:
        """Close or open the gate, depending on the connections so far."""
        self._left = min(BURST, self._left + RATE * (now - self._since))
        self._since = now
        if not self.is_shut and self._left < 0.0:
            self._filter(shut=True)
        elif self.is_shut and self._left >= REOPEN:
            self._filter(shut=False)

    def close(self) -> None:
        """Remove the gate; the socket stays open."""
        if self.is_shut:
            self._filter(shut=False)
        self._wire.close()

    def _filter(self, shut: bool) -> None:
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError):
            if shut:
                program = ctypes.create_string_buffer(_FILTER, len(_FILTER))
                count = len(_FILTER) // 8
                self._wire.setsockopt(
                    socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("@HP", count, ctypes.addressof(program))
                )
            else:
                self._wire.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
            self.is_shut = shut


class RefusalLog:
    """A rate-limited log of refusals, for use from any thread.

    Args:
        log: logger to write to.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._began = -SECONDS
        self._said = self._left_out = 0

    def write(self, what: str, about: str) -> None:
        """Write one line.

        Args:
            what: trusted text.
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
        """Log how many of the last lines were left out."""
        with self._lock:
            self._tell_left_out()

    def _tell_left_out(self) -> None:
        if self._left_out:
            self._log.warning("%d more lines like these were left out", self._left_out)
            self._left_out = 0
