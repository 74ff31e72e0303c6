"""The log of a standalone server: ranks that joined or were lost, and why, each line with its time."""

from __future__ import annotations

import time
from datetime import datetime
from itertools import takewhile
from typing import TYPE_CHECKING

from rich.console import Console

from lightning_omni.cli.console import log
from lightning_omni.wire.quoting import quoted

if TYPE_CHECKING:
    from lightning_omni.server.core import ServerCore
    from lightning_omni.server.observers import RunEvent

TIMES = "%Y-%m-%d %H:%M:%S"
"""Format of times in the log."""
EVERY = 0.25
"""Seconds between two writes of new events."""


class RunLog:
    """A log of the runs of a server.

    Args:
        core: server, whose clock may have been still for a while.
        console: output.
    """

    def __init__(self, core: ServerCore, console: Console) -> None:
        self._core, self._console = core, console
        self._last: RunEvent | None = None
        self._due = 0.0

    def write(self, at_once: bool = False) -> None:
        """Write new events, if they are due or ``at_once`` is True."""
        now = time.monotonic()
        if now < self._due and not at_once:
            return
        self._due = now + EVERY
        new = list(takewhile(lambda each: each is not self._last, reversed(self._core.run_events)))
        for event in reversed(new):
            self._last = event
            log(self._console, line_of(event, self._core.now), highlight=False)


def line_of(event: RunEvent, now: float) -> str:
    """Return a line with local time and event; ``now`` is on the server's clock, as the event is."""
    return stamped(quoted(event.text), now - event.at)


def stamped(text: str, ago: float = 0.0) -> str:
    """Return a line with the local time ``ago`` seconds ago."""
    return f"{datetime.fromtimestamp(time.time() - ago).strftime(TIMES)} {text}"
