"""The table of a run in a terminal, kept up to date, and the keys that act on it."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rich.console import Console
from rich.live import Live

from lightning_omni.cli.overview import Rates, picture
from lightning_omni.errors import ConnectionLost, Refused
from lightning_omni.protocol.messages import GroupStatus, Overview
from lightning_omni.server.observer import Observer

AGAIN = 1.0
"""Seconds for one attempt to reach a server again that was there before; keys wait meanwhile."""
QUIT, EVICT, UP, DOWN, YES = "q", "e", "up", "down", "y"
_ESCAPES = {"\x1b[A": UP, "\x1b[B": DOWN, "k": UP, "j": DOWN, "\x03": QUIT}


# --- Keys ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """What a person has chosen.

    Attributes:
        chosen: place of a group in the table.
        asked: the group that is to be evicted if the next key says yes.
        note: a sentence at the foot of the table.
        is_over: whether to end.
    """

    chosen: int = 0
    asked: GroupStatus | None = None
    note: str = ""
    is_over: bool = False


def press(view: View, key: str, overview: Overview, evict: Callable[[GroupStatus], str]) -> View:
    """A key was pressed.

    Args:
        view: what was chosen so far.
        key: one of those named above; others are heard by none.
        overview: what is shown.
        evict: takes a group out of the run; returns what came of it, as a sentence.

    Returns:
        What is chosen now.
    """
    groups = [each.status for each in overview.groups]
    if view.asked is not None:
        note = evict(view.asked) if key == YES else f"group {view.asked.name} stays"
        return replace(view, asked=None, note=note)
    if key == QUIT:
        return replace(view, is_over=True)
    if key in (UP, DOWN) and groups:
        step = 1 if key == DOWN else -1
        return replace(view, chosen=min(max(view.chosen + step, 0), len(groups) - 1), note="")
    if key == EVICT and groups:
        group = groups[min(view.chosen, len(groups) - 1)]
        count = len(group.ranks)
        question = f"evict group {group.name} with its {count} rank{'s' * (count > 1)}? y: yes   any other key: no"
        return replace(view, asked=group, note=question)
    return view


def keys_of(typed: str) -> list[str]:
    r"""Keys from what a terminal sends for them.

    Example:
        >>> keys_of("q"), keys_of("\x1b[A\x1b[Bje")
        (['q'], ['up', 'down', 'down', 'e'])
    """
    keys = []
    while typed:
        size = 3 if typed.startswith("\x1b[") else 1
        keys.append(_ESCAPES.get(typed[:size], typed[:size]))
        typed = typed[size:]
    return keys


@contextmanager
def keyboard() -> Iterator[Callable[[float], list[str]]]:
    """The keys of the terminal, one by one as they are pressed; none where standard input is no terminal.

    Yields:
        What waits for keys, for so many seconds at most, and returns those that were pressed.
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
        return keys_of(os.read(descriptor, 64).decode(errors="replace") or QUIT)  # nothing: the terminal is gone

    try:
        tty.setcbreak(descriptor)
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_keys(seconds: float) -> list[str]:
    time.sleep(max(0.0, seconds))
    return []


# --- The live table --------------------------------------------------------------------------------------------------


def watch(console: Console, observer: Observer | None, reach: Callable[[], Observer], every: float) -> int:
    """Shows a run until a key ends it.

    Args:
        console: a terminal.
        observer: the connection to the server.
        reach: makes it again.
        every: seconds between two questions.

    Returns:
        The exit code.
    """
    rates, view = Rates(), View()
    overview: Overview | None = None

    def evict(group: GroupStatus) -> str:
        if observer is None:
            return f"group {group.name} was not evicted: the server cannot be reached"
        try:
            observer.evict(group)
        except (Refused, ConnectionLost) as error:
            return f"group {group.name} was not evicted: {error}"
        return f"group {group.name} is evicted"

    with keyboard() as wait, Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while not view.is_over:
                lost = ""
                try:
                    observer = observer or reach()
                    overview = observer.overview()
                    rates.add(time.monotonic(), overview)
                except (Refused, ConnectionLost) as error:
                    lost = f"{error}; trying again"
                    if observer is not None:
                        observer.close()
                        observer = None
                due = time.monotonic() + every
                while not view.is_over:
                    if overview is not None:
                        shown = picture(overview, rates, view.chosen, view.note or lost)
                        live.update(shown, refresh=True)
                    pressed = wait(due - time.monotonic())
                    for key in pressed:
                        if overview is not None:
                            view = press(view, key, overview, evict)
                        elif key == QUIT:
                            view = replace(view, is_over=True)
                    if not pressed and time.monotonic() >= due:
                        break
        finally:
            if observer is not None:
                observer.close()
    return 0
