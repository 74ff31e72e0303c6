"""The live table of a run in a terminal, and the keys that act on the run."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from lightning_omni.checks import counted
from lightning_omni.errors import ConnectionLost, Refused, quoted
from lightning_omni.transport.zeromq.observer import Observer
from lightning_omni.tuning.model.steps import parts_of_step, straggler_sentence
from lightning_omni.wire.messages import GroupOverview, GroupStatus, Overview

if TYPE_CHECKING:
    from lightning_omni.wire.messages import LogEntry

# --- The table as text: no I/O ----------------------------------------------------------------------------------------

# Rates are the increases of the server's counters over the last seconds; other values appear as the server reported
# them. A dash stands for an unknown value.

WINDOW = 10.0
"""Seconds over which rates are measured."""
LINES = 8
"""Number of recent events that are shown."""
UNKNOWN = "-"
KEYS = "↑ ↓ choose a group   e evict it   b and bar its hosts   s save now   q quit"
_HEADS = (
    "group", "host", "ranks", "alive", "step", "forward", "exchange", "rest", "samples/s", "share", "stale", "slowest",
    "bottleneck",
)  # fmt: skip
_TEXTS = ("group", "host", "slowest", "bottleneck")
_LEFT_OUT = ("slowest", "alive", "rest", "share", "forward", "exchange", "ranks", "host", "stale", "bottleneck")
"""Columns that are left out on narrow terminals, in this order."""
_WIDEST = 10_000
"""Characters; wider than any table."""
_METRICS = {"loss": "training loss", "omni/noise_scale": "gradient noise scale in samples:"}
"""What ranks report, and its name for people."""
_STYLES = {"lost": "red", "over": "bold red", "joined": "green"}


class Rates:
    """The increase per second of a run's counters over `WINDOW`."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Overview]] = deque()

    def add(self, now: float, overview: Overview) -> None:
        before = self._seen[-1][1] if self._seen else overview
        if _counted_in(before) != _counted_in(overview) or overview.serve_time < before.serve_time:
            self._seen.clear()  # the counters have restarted
        self._seen.append((now, overview))
        while now - self._seen[0][0] > WINDOW and len(self._seen) > 2:
            self._seen.popleft()

    def of(self, counter: Callable[[Overview], float | None]) -> float | None:
        if len(self._seen) < 2:
            return None
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        before, after = counter(first), counter(last)
        return (after - before) / (ended - began) if before is not None and after is not None else None


def picture(overview: Overview, rates: Rates, chosen: int = 0, note: str = "", keys: bool = True) -> RenderableType:
    """Render a run; keys, if any, act on the group with index ``chosen``; ``note`` is a line for the user."""
    if not overview.run:
        return Group(Text("No run: the server waits for ranks."), *_foot(note, keys))
    return Group(
        *_head(overview, rates),
        *_foot(note, keys),  # not below, where a terminal may be too short
        GroupsTable(overview, rates, min(chosen, len(overview.groups) - 1) if keys else None),
        *_sentences(overview),
        *(_line(entry) for entry in overview.log[-LINES:]),
    )


class GroupsTable:
    """A table with a row for each group; times are means over its ranks.

    Narrow terminals omit the least important columns. ``chosen`` is None without keys.
    """

    def __init__(self, overview: Overview, rates: Rates, chosen: int | None = None) -> None:
        total = sum(_work(each) for each in overview.groups)
        self._rows = [
            (
                {head: Text(quoted(cell)) for head, cell in _cells(group, rates, total).items()},
                "reverse" if place == chosen else "yellow" if group.silence > 2.0 else None,
            )
            for place, group in enumerate(overview.groups)
        ]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._table(0))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = options.update(max_width=_WIDEST)
        tables = map(self._table, range(len(_LEFT_OUT) + 1))
        fitting = (each for each in tables if console.measure(each, options=whole).maximum <= options.max_width)
        yield next(fitting, self._table(len(_LEFT_OUT)))

    def _table(self, left_out: int) -> Table:
        heads = [head for head in _HEADS if head not in _LEFT_OUT[:left_out]]
        table = Table(*(Column(head, justify="left" if head in _TEXTS else "right", no_wrap=True) for head in heads))
        for cells, style in self._rows:
            table.add_row(*(cells[head] for head in heads), style=style)
        return table


def _cells(group: GroupOverview, rates: Rates, total: float) -> dict[str, str]:
    status = group.status
    parts = parts_of_step(status.step_time, status.compute_time, status.exchange_time)
    name, number = status.name, status.group
    samples = rates.of(lambda seen: next((each.samples for each in seen.groups if each.status.group == number), None))
    return {
        "group": name,
        "host": " ".join(group.hosts) or UNKNOWN,
        "ranks": str(len(status.ranks)),
        "alive": duration(group.age),
        "step": _milliseconds(status.step_time),
        **{part: _milliseconds(seconds) for part, seconds in parts.items()},
        **({} if parts else dict.fromkeys(("forward", "exchange", "rest"), UNKNOWN)),
        "samples/s": UNKNOWN if samples is None else f"{samples:.0f}",
        "share": f"{100 * _work(group) / total:.0f} %" if total else UNKNOWN,
        "stale": f"{status.staleness_mean:.1f}" if status.updates else UNKNOWN,
        "slowest": f"rank {status.slowest_rank}" if len(status.ranks) > 1 and status.slowest_time else UNKNOWN,
        "bottleneck": max(parts, key=lambda part: parts[part]) if parts else UNKNOWN,
    }


def _work(group: GroupOverview) -> float:
    return group.samples if group.samples is not None else group.status.updates


def _head(overview: Overview, rates: Rates) -> list[RenderableType]:
    status, plan = overview.status, overview.plan
    updates, samples = rates.of(lambda seen: seen.status.clock), rates.of(_samples)
    busy = rates.of(lambda seen: seen.serve_time)
    method, wire = str((overview.method or {}).get("name", UNKNOWN)), wire_words(overview.wire_format)
    saved = f", state saved {duration(overview.saved)} ago" if overview.saved >= 0 else ""
    here = len(overview.live) - len(overview.missing)
    ranks = (
        f"{here} of {overview.announced} ranks" if here <= overview.announced else f"{here} ranks"
    )  # more have joined than were announced
    lines: list[RenderableType] = [
        Text(quoted(f"{overview.run}: {method}, compression {wire}, {ranks}, for {duration(overview.age)}"), "bold"),
        Text(
            f"{status.clock} updates ({_per_second(updates)}), {_per_second(samples, 'samples')},"
            f" server busy {UNKNOWN if busy is None else f'{100 * busy:.0f} %'}, {status.refused} pushes refused,"
            f" {status.strangers} strangers refused{saved}"
        ),
    ]
    if plan is not None and plan.budget:
        bar = Table.grid(padding=(0, 1))
        done = Text(
            f"{overview.trained} of {plan.budget} samples, {100 * overview.trained / plan.budget:.0f} %"
            f"{_time_left(plan.budget - overview.trained, plan.later, samples)}"
        )
        bar.add_row(Text(f"epoch {plan.epoch}"), ProgressBar(plan.budget, overview.trained, width=30), done)
        lines.append(bar)
    if shown := [f"{text} {overview.metrics[name]:.4g}" for name, text in _METRICS.items() if name in overview.metrics]:
        lines.append(Text(", ".join(shown)))
    return lines


def _time_left(samples: int, later: int | None, rate: float | None) -> str:
    if not rate:
        return ""
    run = "" if later is None else f", {duration((samples + later) / rate)} in the run"
    return f", {duration(samples / rate)} left in the epoch{run}"


def wire_words(plain: Mapping[str, Any] | None) -> str:
    """Return a wire format as users write it.

    Example:
        >>> wire_words({"name": "raw"}), wire_words({"name": "both_ways", "push": {"name": "int8"}, "pull": {}})
        ('fp32', 'int8/-')
    """
    plain = plain or {}
    if "push" in plain and "pull" in plain:
        return f"{wire_words(plain['push'])}/{wire_words(plain['pull'])}"
    return {"raw": "fp32"}.get(name := str(plain.get("name", UNKNOWN)), name)


def _sentences(overview: Overview) -> list[Text]:
    sentences = [Text(sentence, "yellow") for sentence in [straggler_sentence(overview.status)] if sentence]
    return [*sentences, *([Text(f"over: {quoted(overview.over)}", "bold red")] if overview.over else [])]


def _line(entry: LogEntry) -> Text:
    return Text(f"{duration(entry.age):>8} ago  {quoted(entry.text)}", _STYLES.get(entry.kind, ""))


def _foot(note: str, keys: bool) -> list[Text]:
    return [*([Text(note, "bold")] if note else []), *([Text(KEYS, "dim")] if keys else [])]


def _samples(overview: Overview) -> float | None:
    counts = [group.samples for group in overview.groups if group.samples is not None]
    return sum(counts) if counts else None


def _counted_in(overview: Overview) -> tuple[object, ...]:
    """Return a value that changes when counters restart."""
    return overview.run, tuple((group.status.name, group.status.incarnation) for group in overview.groups)


def _per_second(rate: float | None, of: str = "") -> str:
    shown = UNKNOWN if rate is None else f"{rate:.1f}" if rate < 10 else f"{rate:.0f}"
    return f"{shown} {of}/s" if of else f"{shown}/s"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds else UNKNOWN


def duration(seconds: float) -> str:
    """Return a time in a short form.

    Example:
        >>> duration(4.2), duration(200), duration(7300), duration(200000)
        ('4s', '3m20s', '2h01m', '2d07h')
    """
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


# --- Terminal and keys ------------------------------------------------------------------------------------------------

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


@dataclass(frozen=True)
class View:
    """The state of the display; ``asked`` is the group of ``run`` to evict if the next key confirms it."""

    chosen: int = 0
    asked: GroupStatus | None = None
    run: str = ""
    bars: bool = False
    note: str = ""
    is_over: bool = False


def press(view: View, key: str, overview: Overview | None, actions: _Connected) -> View:
    run, groups = (overview.run, overview.groups) if overview is not None else ("", ())
    if view.asked is not None:
        is_confirmed = key == YES and run == view.run  # another run's groups have the same numbers
        note = actions.evict(view.asked, view.bars) if is_confirmed else f"group {view.asked.name} stays"
        return replace(view, asked=None, note=note)
    if key == QUIT:
        return replace(view, is_over=True)
    if key in (UP, DOWN) and groups:
        step = 1 if key == DOWN else -1
        return replace(view, chosen=min(max(view.chosen + step, 0), len(groups) - 1), note="")
    if key in (EVICT, BAR) and groups:
        return _ask(replace(view, run=run), groups[min(view.chosen, len(groups) - 1)], bars=key == BAR)
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
    """Yield a function that waits at most some seconds for keys and returns them; none without a terminal."""
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
    """The actions of keys over the present connection; each returns its result as a sentence.

    ``observer`` is None while the server cannot be reached.
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
    """Show a run until the user quits; ``reach`` reconnects, updates are ``every`` seconds apart."""
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
                        note = view.note if view.asked is not None or not lost else lost
                        shown = picture(overview, rates, view.chosen, note)
                        live.update(shown, refresh=True)
                    pressed = wait(due - time.monotonic())
                    for key in pressed:
                        view = press(view, key, overview, connected)
                    if not pressed and time.monotonic() >= due:
                        break
        finally:
            connected.close()
    return 0
