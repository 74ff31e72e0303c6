"""Rate limits on what strangers can cause: connections, which the kernel leaves unanswered, and log lines.

A connection that is ended can be made again at once, and each costs this process more than it costs a stranger: made
and dropped as fast as possible, they would leave no time for the exchange. So a listening socket takes connections at a
limited rate. Those of ranks with the key do not count, and one that is not answered tries again by itself.
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

from lightning_omni.protocol.quoting import quoted

RATE = 150.0
"""Connections of strangers that a listening socket takes in a second, for long."""
BURST = 300.0
"""Connections that it takes at once after a quiet time."""
REOPEN = 8.0
"""Connections that may come again before it opens after it was shut."""
LINES, SECONDS = 10, 60.0
"""So many lines in so much time, at most; the next one says how many were left out."""
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
"""Of Linux's ``setsockopt``; Python does not name them."""
_FILTER = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the byte of a TCP header that holds its flags
        (0x45, 0, 1, 0x02),  # is SYN among them?
        (0x06, 0, 0, 0),  # then it is dropped
        (0x06, 0, 0, 0xFFFFFFFF),
    )
)
"""For the kernel (classic BPF): new connections are not heard; those that stand are not touched."""


class Gate:
    """Shuts and opens a listening TCP socket. Where the system has no filters (only Linux has), it is always open.

    Args:
        descriptor: of the listening socket.
        now: seconds, on a clock that only goes forward.
    """

    def __init__(self, descriptor: int, now: float) -> None:
        self._wire = socket.socket(fileno=os.dup(descriptor))
        self._left, self._since = BURST, now
        self.is_shut = False

    def came(self) -> None:
        """A connection has come."""
        self._left -= 1.0

    def was_let_in(self) -> None:
        """A connection turned out to be that of a rank."""
        self._left = min(BURST, self._left + 1.0)

    def poll(self, now: float) -> None:
        """Shuts or opens, by how many have come until now."""
        self._left = min(BURST, self._left + RATE * (now - self._since))
        self._since = now
        if not self.is_shut and self._left < 0.0:
            self._filter(shut=True)
        elif self.is_shut and self._left >= REOPEN:
            self._filter(shut=False)

    def close(self) -> None:
        """The gate is gone; the socket is left open."""
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
    """Says what was refused. From any thread.

    Args:
        log: where to.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._began = -SECONDS
        self._said = self._left_out = 0

    def write(self, what: str, about: str) -> None:
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
