"""The page of a report: one HTML file with its pictures and styles in it, which is read without a network."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from lightning_omni.report.digest import PARTS, Digest, duration, interval, number, span, times

if TYPE_CHECKING:
    from lightning_omni.report.tuning import Round, TuningReport

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c1c1e; --faint: #666; --line: #ddd; --bar: #0072b233;
  --mark: #d55e00; }
@media (prefers-color-scheme: dark) {
  :root { --back: #17181a; --text: #e8e8e8; --faint: #a0a0a0; --line: #3a3a3c; --bar: #56b4e944; --mark: #f09050; }
}
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 1400px; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.4rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .3rem; }
.finding { font-size: 1.15rem; border-left: 4px solid var(--mark); padding-left: .8rem; margin: 1rem 0; }
.faint, caption { color: var(--faint); } .wide { overflow-x: auto; }
img { background: #fff; border-radius: 8px; width: 100%; height: auto; margin: .8rem 0; }
table { border-collapse: collapse; margin: .3rem 0 .8rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .7rem; text-align: left; vertical-align: top; }
th { font-weight: 600; } td.number, th.number { text-align: right; white-space: nowrap; }
tr.chosen { font-weight: 600; } tr.chosen td:first-child::before { content: "★ "; color: var(--mark); }
td.bar { background: linear-gradient(to right, var(--bar) var(--part), transparent var(--part)); min-width: 8rem; }
.problem { color: var(--mark); }
"""


def page(report: TuningReport) -> str:
    """The whole page.

    Args:
        report: what is shown on it.
    """
    target = "" if report.target is None else f" until {report.monitor} is {number(report.target)}"
    rounds = list(zip(report.rounds, report.digests, strict=True))
    parts = [
        f"<h1>OmniTuner{escape(target)}</h1>",
        f'<p class="finding">{escape(report.statement)}</p>',
        *_times(report),
        *([_rounds(rounds)] if len(rounds) > 1 else []),
        *(_round(report, place) for place in reversed(range(len(rounds)))),  # what holds now comes first
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    body = "\n".join(parts)
    title = "<title>OmniTuner</title>"
    head = f"<head>{head}{title}<style>{_STYLE}</style></head>"
    return f'<!DOCTYPE html>\n<html lang="en">{head}\n<body>{body}</body></html>\n'


def _times(report: TuningReport) -> list[str]:
    """What became of the run; nothing as long as it has not trained."""
    times = report.times
    if times is None:
        return []
    rows = [["trained", duration(times.training)], ["tuned", duration(times.tuning)]]
    rows.append(["wrote reports", duration(times.reports)])
    if report.target is not None:
        reached = "not reached" if times.to_target is None else times.sentence.removeprefix("the target was ")
        rows.append(["target", reached])
    return ["<h2>The run</h2>", _table([], rows)]


def _rounds(rounds: Sequence[tuple[Round, Digest]]) -> str:
    rows = [
        [str(each.epoch), duration(each.seconds_run), str(digest.choice.setting), digest.expense]
        for each, digest in rounds
    ]
    return "<h2>All searches</h2>" + _table(["epoch", "training before", "choice", "spent"], rows, chosen=len(rows) - 1)


def _round(report: TuningReport, place: int) -> str:
    each, digest = report.rounds[place], report.digests[place]
    name = "First search" if place == 0 else f"Retuning {place}"
    parts = [
        f"<h2>{name}, epoch {each.epoch}</h2>",
        _choice(digest),
        _picture(report, place),
        "<h3>Probes</h3>",
        _probes(digest),
        *([] if digest.is_about_steps else ["<h3>What others would have cost</h3>", _systems(digest)]),
        *_hardware(digest, each),
    ]
    return "\n".join(parts)


def _choice(digest: Digest) -> str:
    setting, budget = digest.choice.setting, digest.search.budget
    rows = [
        ["choice", str(setting)],
        ["why", digest.choice.why],
        ["your own setting", str(digest.start)],
        ["search", f"{digest.search.strategy}, {digest.ranks} ranks, batches of {digest.search.job.batch} in all"],
        ["spent", digest.expense],
    ]
    if not math.isinf(budget) and budget > 0:
        rows[-1][1] += f" ({digest.search.spent / budget:.0%}), which is {digest.search.job.share:.3g} of the run"
    if (setting.groups, False) in digest.predictions:
        rows.insert(2, ["binds", PARTS[digest.prediction(setting.groups).binding]])
    if digest.seconds is not None:
        rows.append(["time to the target", interval(digest.seconds)])
    if not digest.is_about_steps and digest.choice.outlook is not None:
        rows.append(["speed-up over your own setting", span(digest.speed_up)])
    if digest.search.stopped:
        rows.append(["ended early", digest.search.stopped])
    return _table([], rows)


def _picture(report: TuningReport, place: int) -> str:
    data = report.picture(place)
    if data is None:
        return (
            '<p class="faint">A picture belongs here, but matplotlib was missing; install it with:'
            " pip install 'lightning-omni[plot]'</p>"
        )
    from base64 import b64encode

    said = escape(report.digests[place].statement, quote=True)
    source = f"data:image/png;base64,{b64encode(data).decode()}"
    return f'<img alt="Both efficiencies and their product: {said}" src="{source}">'


def _probes(digest: Digest) -> str:
    if not digest.probes:
        return f'<p class="faint">None: {escape(digest.choice.why)}</p>'
    heads = ["#", "setting", "why", "samples", "loss at the end", "samples/s", "time", "seconds", "problem"]
    rows, chosen = [], None
    for place, row in enumerate(digest.probes):
        if digest.as_it_would_be(row.tried.setting) == digest.choice.setting:
            chosen = place
        rows.append(
            [
                str(row.number),
                str(row.tried.setting),
                row.why,
                number(row.tried.end),
                number(row.loss),
                number(row.rate),
                "" if digest.is_about_steps else times(row.time),
                number(row.tried.seconds),
                row.tried.problem,
            ]
        )
    note = "Time: to the target, as this probe alone tells it, relative to what is expected of the choice."
    if digest.is_about_steps:
        note = "These probes trained on the same samples; the step is chosen by what it lowers the loss by at once."
    return f'{_table(heads, rows, chosen)}<p class="faint">{note}</p>'


def _systems(digest: Digest) -> str:
    rows = [["the choice", str(digest.choice.setting), times(1.0), "", *_absolute(digest, 1.0)]]
    values = [1.0]
    for name, outlook in digest.systems.items():
        time = digest.time(outlook.setting)
        between = f"{times(time.low)} to {times(time.high)}"
        rows.append([name, str(outlook.setting), times(time.value), between, *_absolute(digest, time.value)])
        values.append(time.value)
    heads = ["system", "setting", "time", "80 % interval", *(["to the target"] if digest.seconds is not None else [])]
    most = max(values)
    return _table(heads, rows, chosen=0, bars={2: [value / most for value in values]})


def _absolute(digest: Digest, relative: float) -> list[str]:
    return [] if digest.seconds is None else [duration(relative * digest.seconds.value)]


def _hardware(digest: Digest, each: Round) -> list[str]:
    if digest.profile is None:
        return ['<h3>Hardware</h3><p class="faint">Nothing was timed.</p>']
    speeds, setting = digest.profile.speeds, digest.choice.setting
    ranks = [[str(rank), number(speed)] for rank, speed in enumerate(speeds)]
    bars = {1: [speed / max(speeds) for speed in speeds]}
    rows = []
    for (groups, rebalance), said in digest.predictions.items():
        costs = [number(1000 * said.parts[name]) for name in _COSTS]
        has_trained = groups != setting.groups or rebalance == setting.rebalance
        measured = number(each.measured_after.get(groups, math.nan) if has_trained else math.nan)
        rows.append(
            [
                str(groups),
                "proportional" if rebalance else "equal",
                str(said.samples_per_second),
                measured,
                number(1000 * said.seconds_per_update.value),
                *costs,
                PARTS[said.binding],
            ]
        )
    place = list(digest.predictions).index((setting.groups, setting.rebalance)) if _is_known(digest) else None
    heads = ["groups", "batches", "samples/s", "in training", "ms per update", *_COSTS.values(), "binds"]
    note = (
        '<p class="faint">The columns after “ms per update” are parts of it, in ms; groups share the first three.</p>'
    )
    return [
        "<h3>Hardware: what groups would do</h3>",
        _table(heads, rows, place),
        note,
        "<h3>Hardware: ranks alone</h3>",
        _table(["rank", "samples/s"], ranks, bars=bars),
    ]


_COSTS = {
    "compute": "compute",
    "allreduce": "all-reduce",
    "exchange": "way to the server",
    "serve": "server",
    "link": "its link",
    "head": "merged head",
}


def _is_known(digest: Digest) -> bool:
    return (digest.choice.setting.groups, digest.choice.setting.rebalance) in digest.predictions


# --- Tables ----------------------------------------------------------------------------------------------------------


def _table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    chosen: int | None = None,
    bars: dict[int, list[float]] | None = None,
) -> str:
    """A table of texts.

    Args:
        heads: of the columns; none: the first column has them.
        rows: the cells, as plain text.
        chosen: number of the row that is marked.
        bars: by column, how full each row's cell is, from 0 to 1.
    """
    cells = [list(row) for row in rows]
    numeric = [all(_is_number(row[column]) for row in cells) for column in range(len(cells[0]))]
    head = "".join(f"<th{_number_class(numeric[place])}>{escape(each)}</th>" for place, each in enumerate(heads))
    lines = []
    for place, row in enumerate(cells):
        parts = []
        for column, text in enumerate(row):
            tag = "td" if heads or column else "th"
            bar = (bars or {}).get(column)
            style = f' class="bar" style="--part: {100 * bar[place]:.0f}%"' if bar else _number_class(numeric[column])
            if heads and heads[column] == "problem" and text:
                style = ' class="problem"'
            parts.append(f"<{tag}{style}>{escape(text)}</{tag}>")
        lines.append(f"<tr{' class=chosen' if place == chosen else ''}>{''.join(parts)}</tr>")
    header = f"<thead><tr>{head}</tr></thead>" if heads else ""
    return f'<div class="wide"><table>{header}<tbody>{"".join(lines)}</tbody></table></div>'


def _number_class(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _is_number(text: str) -> bool:
    """Whether it stands at the right."""
    return not text or text in ("–", "∞") or (text[0].isdigit() and not _WORD.search(text))


_WORD = re.compile(r"[A-Za-z]{5,}")
"""Longer than any unit."""
