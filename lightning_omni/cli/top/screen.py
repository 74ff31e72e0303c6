"""The live table of a run in a terminal, and the keys that act on the run."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from rich.console import Console
from rich.live import Live

from lightning_omni.checks import counted
from lightning_omni.cli.top.groups_table import Rates, picture
from lightning_omni.errors import ConnectionLost, Refused
from lightning_omni.transport.zeromq.observer import Observer
from lightning_omni.wire.messages import GroupOverview, GroupStatus, Overview

AGAIN = 1.0
"""Seconds for one attempt to reconnect to a server; keys wait meanwhile."""
QUIT, EVICT, BAR, SAVE = "q", "e", "b", "s"
UP, DOWN, YES = "up", "down", "y"
_ESCAPES = {
    "\x1b[A": UP, "\x1b[B": DOWN, "\x1bOA": UP, "\x1bOB": DOWN, "k": UP, "j": DOWN, "\x03": QUIT,
}  # fmt: skip
_KEY = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|.", re.DOTALL)
"""Characters that a terminal sends for one key: F5 is an escape, "[15~", and not a 5."""


# --- Keys ------------------------------------------------------------------------------------------------------------


class Actions(Protocol):
    """The actions of keys on a run. Each returns its result as a sentence."""

    def evict(self, group: GroupStatus, bars: bool) -> str:
        """Evict a group, and bar its hosts from joining again if ``bars`` is True."""

    def save(self) -> str:
        """Request a save of the server's state."""


@dataclass(frozen=True)
class View:
    """The state of the display.

    Attributes:
        chosen: index of the selected group.
        asked: group to evict if the next key confirms it.
        bars: whether to bar its hosts, too.
        note: sentence below the table.
        is_over: whether to end.
    """

    chosen: int = 0
    asked: GroupStatus | None = None
    bars: bool = False
    note: str = ""
    is_over: bool = False


def press(view: View, key: str, overview: Overview | None, actions: Actions) -> View:
    """Return the view after a pressed key; ``overview`` is None before the first one."""
    groups = overview.groups if overview is not None else ()
    if view.asked is not None:
        note = actions.evict(view.asked, view.bars) if key == YES else f"group {view.asked.name} stays"
        return replace(view, asked=None, note=note)
    if key == QUIT:
        return replace(view, is_over=True)
    if key in (UP, DOWN) and groups:
        step = 1 if key == DOWN else -1
        return replace(view, chosen=min(max(view.chosen + step, 0), len(groups) - 1), note="")
    if key in (EVICT, BAR) and groups:
        return _ask(view, groups[min(view.chosen, len(groups) - 1)], bars=key == BAR)
    if key == SAVE and groups:
        return replace(view, note=actions.save())
    return view


def _ask(view: View, group: GroupOverview, bars: bool) -> View:
    status = group.status
    question = f"evict group {status.name} with its {counted(len(status.ranks), 'rank')}"
    if bars:
        question += f", and let no group from {' '.join(group.hosts) or 'its hosts'} join any more"
    return replace(view, asked=status, bars=bars, note=f"{question}? y: yes   any other key: no")


def keys_of(typed: str) -> list[str]:
    r"""Return the keys for the characters that a terminal sends.

    Example:
        >>> keys_of("q"), keys_of("\x1b[A\x1b[Bje")
        (['q'], ['up', 'down', 'down', 'e'])
    """
    return [_ESCAPES.get(key, key) for key in _KEY.findall(typed)]


@contextmanager
def keyboard() -> Iterator[Callable[[float], list[str]]]:
    """Read the terminal's keys one by one; none if standard input is no terminal.

    Yields:
        A function that waits for keys, up to the given seconds, and returns the pressed ones.
    """
    if not sys.stdin.isatty() or os.name != "posix":
        yield _no_keys
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def wait(seconds: float) -> list[str]:
        if not select.select([descriptor], [], [], max(0.0, seconds))[0]:
            return []
        return keys_of(os.read(descriptor, 64).decode(errors="replace") or QUIT)  # empty if the terminal is gone

    try:
        tty.setcbreak(descriptor)
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_keys(seconds: float) -> list[str]:
    time.sleep(max(0.0, seconds))
    return []


# --- The live table --------------------------------------------------------------------------------------------------


class _Connected:
    """The actions on a run over the present connection.

    Attributes:
        observer: connection; None while the server cannot be reached.
    """

    def __init__(self, observer: Observer | None) -> None:
        self.observer = observer

    def evict(self, group: GroupStatus, bars: bool) -> str:
        problem = self._problem(lambda observer: observer.evict(group, bars))
        return f"group {group.name} was not evicted: {problem}" if problem else f"group {group.name} is evicted"

    def save(self) -> str:
        problem = self._problem(lambda observer: observer.save())
        return f"nothing was saved: {problem}" if problem else "the state is being saved"

    def _problem(self, act: Callable[[Observer], None]) -> str:
        if self.observer is None:
            return "the server cannot be reached"
        try:
            act(self.observer)
        except (Refused, ConnectionLost) as error:
            return str(error)
        return ""

    def close(self) -> None:
        if self.observer is not None:
            self.observer.close()
            self.observer = None


def watch(console: Console, observer: Observer | None, reach: Callable[[], Observer], every: float) -> int:
    """Show a run until a key ends it, and return the exit code.

    Args:
        console: terminal.
        observer: connection to the server.
        reach: function that reconnects.
        every: seconds between two requests.
    """
    rates, view, connected = Rates(), View(), _Connected(observer)
    overview: Overview | None = None
    with keyboard() as wait, Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while not view.is_over:
                lost = ""
                try:
                    connected.observer = connected.observer or reach()
                    overview = connected.observer.overview()
                    rates.add(time.monotonic(), overview)
                except (Refused, ConnectionLost) as error:
                    lost = f"{error}; trying again"
                    connected.close()
                due = time.monotonic() + every
                while not view.is_over:
                    if overview is not None:
                        shown = picture(overview, rates, view.chosen, view.note or lost)
                        live.update(shown, refresh=True)
                    pressed = wait(due - time.monotonic())
                    for key in pressed:
                        view = press(view, key, overview, connected)
                    if not pressed and time.monotonic() >= due:
                        break
        finally:
            connected.close()
    return 0
