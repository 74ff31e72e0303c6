"""The live table of a run in a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from lightning_omni.errors import ConnectionLost, Refused, quoted
from lightning_omni.transport.zeromq.observer import Observer
from lightning_omni.tuning.model.steps import parts_of_step, straggler_sentence
from lightning_omni.tuning.report.summary import duration
from lightning_omni.wire.formats.base import argument_of
from lightning_omni.wire.messages import GroupOverview, Overview

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


def picture(overview: Overview, rates: Rates, note: str = "") -> RenderableType:
    foot = [Text(note, "bold")] if note else []
    if not overview.run:
        return Group(Text("No run: the server waits for ranks."), *foot)
    return Group(
        *_head(overview, rates),
        *foot,  # not below, where a terminal may be too short
        GroupsTable(overview, rates),
        *_sentences(overview),
        *(_line(entry) for entry in overview.log[-LINES:]),
    )


class GroupsTable:
    """A table with a row for each group.

    Times of steps are means over its ranks; "alive" counts from the last rank's admission. Narrow terminals omit the
    least important columns.
    """

    def __init__(self, overview: Overview, rates: Rates) -> None:
        total = sum(_work(each) for each in overview.groups)
        self._rows = [
            (
                {head: Text(quoted(cell)) for head, cell in _cells(group, rates, total).items()},
                "yellow" if group.silence > 2.0 else None,
            )
            for group in overview.groups
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
    method = str((overview.method or {}).get("name", UNKNOWN))
    wire = argument_of(overview.wire_format) if overview.wire_format else f"compression {UNKNOWN}"
    saved = f", state saved {duration(overview.saved)} ago" if overview.saved >= 0 else ""
    here = len(overview.live) - len(overview.missing)
    ranks = (
        f"{here} of {overview.announced} ranks" if here <= overview.announced else f"{here} ranks"
    )  # more have joined than were announced
    lines: list[RenderableType] = [
        Text(quoted(f"{overview.run}: {method}, {wire}, {ranks}, for {duration(overview.age)}"), "bold"),
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


def _sentences(overview: Overview) -> list[Text]:
    sentences = [Text(sentence, "yellow") for sentence in [straggler_sentence(overview.status)] if sentence]
    return [*sentences, *([Text(f"over: {quoted(overview.over)}", "bold red")] if overview.over else [])]


def _line(entry: LogEntry) -> Text:
    return Text(f"{duration(entry.age):>8} ago  {quoted(entry.text)}", _STYLES.get(entry.kind, ""))


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


# --- The live table --------------------------------------------------------------------------------------------------

AGAIN = 1.0
"""Seconds for one attempt to reconnect to a server."""


def watch(console: Console, observer: Observer | None, reach: Callable[[], Observer], every: float) -> NoReturn:
    """Show a run until Ctrl-C; ``reach`` reconnects, updates are ``every`` seconds apart."""
    rates, overview = Rates(), None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
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
                if overview is not None:
                    live.update(picture(overview, rates, lost), refresh=True)
                time.sleep(every)
        finally:
            if observer is not None:
                observer.close()
