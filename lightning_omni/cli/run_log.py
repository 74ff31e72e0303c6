"""The log of a server that stands by itself: which ranks came, which were lost and why, each line with its time."""

from __future__ import annotations

import time
from datetime import datetime
from itertools import takewhile
from typing import TYPE_CHECKING

from rich.console import Console

from lightning_omni.cli.console import log
from lightning_omni.protocol.quoting import quoted

if TYPE_CHECKING:
    from lightning_omni.protocol.observation import Happening
    from lightning_omni.protocol.server import ServerCore

TIMES = "%Y-%m-%d %H:%M:%S"
"""How times are written in it."""
EVERY = 0.25
"""Seconds after which what has happened is told, at most."""


class RunLog:
    """Tells what happens to the runs of a server.

    Args:
        core: the server, whose clock may have stood still for a while.
        console: where to.
    """

    def __init__(self, core: ServerCore, console: Console) -> None:
        self._core, self._console = core, console
        self._last: Happening | None = None
        self._due = 0.0

    def write(self, at_once: bool = False) -> None:
        """Writes down what is new, if it is time.

        Args:
            at_once: even if it is not.
        """
        now = time.monotonic()
        if now < self._due and not at_once:
            return
        self._due = now + EVERY
        new = list(takewhile(lambda each: each is not self._last, reversed(self._core.happenings)))
        for happening in reversed(new):
            self._last = happening
            log(self._console, line_of(happening, self._core.now), highlight=False)


def line_of(happening: Happening, now: float) -> str:
    """One line: local time and what happened.

    Args:
        happening: on the server's clock.
        now: on the same clock.
    """
    return stamped(quoted(happening.text), now - happening.at)


def stamped(text: str, ago: float = 0.0) -> str:
    """A line with the local time.

    Args:
        text: the rest of it.
        ago: how many seconds ago it happened.
    """
    return f"{datetime.fromtimestamp(time.time() - ago).strftime(TIMES)} {text}"
