"""Draw the pictures of the README and the site.

Run it as ``python docs/pictures/draw.py``. The pictures are SVG, with no font or script from elsewhere, and their
colours follow the reader's light or dark mode. The charts take their numbers from the tables of docs/evidence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
EVIDENCE = HERE.parent / "evidence"
STYLE = """
  .card { fill: #ffffff; stroke: #d0d5dd; }
  .ink { fill: #1f2937; }
  .soft { fill: #5b6472; }
  .group { fill: #eef2fb; stroke: #9db2e0; }
  .rank { fill: #3457a6; }
  .on { fill: #ffffff; }
  .server { fill: #fdf1dc; stroke: #d9a441; }
  .wait { fill: #d9dde4; }
  .slow { fill: #c2571a; }
  .line { stroke: #5b6472; fill: none; }
  .tip { fill: #5b6472; }
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 14px; }
  .small { font-size: 12px; }
  .head { font-size: 15px; font-weight: 600; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #171b22; stroke: #39414d; }
    .ink { fill: #e6e9ef; }
    .soft { fill: #a3acba; }
    .group { fill: #202a40; stroke: #4a64a3; }
    .rank { fill: #7f9fea; }
    .on { fill: #10131a; }
    .server { fill: #3a2e17; stroke: #b98a34; }
    .wait { fill: #3b424e; }
    .slow { fill: #f08a4b; }
    .line { stroke: #a3acba; }
    .tip { fill: #a3acba; }
  }
"""


def svg(width: int, height: int, title: str, parts: Sequence[str], scale: float = 1) -> str:
    """Return a picture on a card of its own, legible on any page; `scale` is its size where there is room for it."""
    size = f'width="{width * scale:g}" height="{height * scale:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size}'
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
    )
    card = rect(0.5, 0.5, width - 1, height - 1, "card", 10)
    body = "\n".join(parts)
    return (
        f'{head} role="img">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{tip}\n{card}\n{body}\n</svg>\n'
    )


def rect(x: float, y: float, width: float, height: float, kind: str, radius: float = 3) -> str:
    """Return a rectangle of a class of the style."""
    size = f'width="{width:g}" height="{height:g}" rx="{radius:g}"'
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" {size}/>'


def text(x: float, y: float, words: str, kind: str = "ink", anchor: str = "start") -> str:
    """Return a line of text; `kind` may be several classes."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def arrow(x: float, y: float, to_x: float, to_y: float, both: bool = False) -> str:
    """Return a straight arrow, with a tip at its end or at both."""
    ends = [(x, y, to_x, to_y), *([(to_x, to_y, x, y)] if both else [])]
    return "\n".join(
        f'<path class="line" d="M{a:g} {b:g} L{c:g} {d:g}" marker-end="url(#tip)"/>' for a, b, c, d in ends
    )


def groups() -> str:
    """Return the first picture of the README: six ranks in three groups."""
    parts = [
        rect(50, 24, 340, 54, "server", 8),
        text(220, 47, "parameter server", "ink head", "middle"),
        text(220, 66, "newest weights; steps your optimizer", "soft small", "middle"),
    ]
    for number in range(3):
        left = 13 + 142 * number
        parts += [
            arrow(left + 52, 178, left + 52, 84),
            arrow(left + 78, 84, left + 78, 178),
            rect(left, 184, 130, 104, "group", 8),
            text(left + 65, 205, f"group {number}", "ink", "middle"),
        ]
        for rank in range(2):
            x = left + 14 + 62 * rank
            parts += [
                rect(x, 218, 40, 34, "rank", 5),
                text(x + 20, 240, str(2 * number + rank), "on", "middle"),
            ]
        parts += [
            arrow(left + 56, 235, left + 74, 235, both=True),
            text(left + 65, 274, "all-reduce", "soft small", "middle"),
        ]
    parts += [
        rect(132, 112, 174, 38, "card", 6),
        text(219, 128, "gradient up, weights down,", "soft small", "middle"),
        text(219, 143, "each group when it is ready", "soft small", "middle"),
        text(16, 318, "Ranks of a group step together, as in DDP.", "soft small"),
        text(16, 336, "Groups do not wait for each other.", "soft small"),
    ]
    return svg(440, 356, "Ranks form groups: synchronous inside, asynchronous across, by a parameter server", parts)


def waiting() -> str:
    """Return the second one: the steps of three groups, of which one is slow, with DDP and without, in equal times."""
    left, width, fast, slow = 33, 376, 30, 90
    parts = [text(left, 44, "DDP: every step waits for the slowest", "ink head")]
    for row in range(3):
        y = 58 + 26 * row
        for step in range(width // slow):
            x = left + step * slow
            own = slow if row == 2 else fast
            parts.append(rect(x, y, own - 3, 18, "slow" if row == 2 else "rank"))
            if own < slow:
                parts.append(rect(x + own, y, slow - own - 3, 18, "wait"))
    parts.append(text(left, 182, "Three groups: each at its own speed", "ink head"))
    for row in range(3):
        y = 196 + 26 * row
        own = slow if row == 2 else fast
        parts += [
            rect(left + step * own, y, own - 3, 18, "slow" if row == 2 else "rank") for step in range(width // own)
        ]
    legend = [("rank", "a step"), ("slow", "a step of a slow device"), ("wait", "waiting")]
    x = left
    for kind, words in legend:
        parts += [rect(x, 306, 14, 14, kind), text(x + 20, 318, words, "soft small")]
        x += 46 + 7 * len(words)
    parts.append(text(left + 376, 342, "time →", "soft small", "end"))
    return svg(440, 356, "With DDP every step waits for the slowest rank; three groups step at their own speed", parts)


def table(page: str, heading: str, first: str) -> list[list[str]]:
    """Return the cells of the table below a heading of a page of evidence, whose head row begins with a word."""
    section = (EVIDENCE / page).read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = re.search(rf"^\| {first} \|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert lines, f"{page}: {heading}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1].splitlines()]


def numbers(cell: str) -> list[float]:
    """Return the numbers of a cell."""
    return [float(each) for each in re.findall(r"\d+(?:\.\d+)?", cell)]


def bars(title: str, rows: Sequence[tuple[str, str, Sequence[float]]], unit: str = "") -> str:
    """Return a chart of a bar for each row, as long as its mean, and a dot for each of several runs.

    Args:
        title: stands above the bars, and below it what is written in its brackets.
        rows: the name, the class of the bar and the runs of each; a name without runs is a heading.
        unit: stands behind each mean.
    """
    top, left, width, height = 52, 172, 208, 24
    most = max(run for _, _, runs in rows for run in runs)
    above, _, below = title.partition(" (")
    parts = [text(14, 26, above, "ink head"), text(14, 43, below.rstrip(")"), "soft small")]
    for number, (name, kind, runs) in enumerate(rows):
        y = top + height * number
        if not runs:
            parts.append(text(14, y + 17, name, "ink"))
            continue
        mean = sum(runs) / len(runs)
        parts += [text(left - 10, y + 14, name, "soft small", "end"), rect(left, y + 2, width * mean / most, 16, kind)]
        if len(runs) > 1:
            dots = (f'<circle class="ink" cx="{left + width * run / most:.1f}" cy="{y + 10}" r="2.5"/>' for run in runs)
            parts += dots
        parts.append(text(left + width * max(runs) / most + 8, y + 14, f"{mean:.3g}{unit}", "soft small"))
    return svg(440, top + height * len(rows) + 16, title, parts, 1.15)


def hosts() -> str:
    """Return the chart of real processes on five clusters."""
    rows: list[tuple[str, str, Sequence[float]]] = []
    for cluster, ddp, peers, tuned, _ in table("tuning-measurements.md", "On emulated hosts", "hosts"):
        rows.append((cluster, "", ()))
        if numbers(ddp):
            rows.append(("DDP", "wait", numbers(ddp)))
        for peer in peers.split(";"):
            name, _, runs = peer.partition(":")
            if runs:
                rows.append((name.strip(), "server", numbers(runs)))
        rows.append(("tuned", "rank", numbers(tuned)))
    return bars("Seconds to 86 %, emulated hosts (shorter is better)", rows, " s")


def link() -> str:
    """Return the chart of a slow link, of the rows that were run with three seeds."""
    names = {"DDP, fast": ("DDP on fast links", "wait"), "DDP, torch's Po": ("PowerSGD, rank 8", "server")}
    names |= {"`diloco": ("DiLoCo in fragments", "rank"), "the same with `k": ("the same, steps kept", "rank")}
    rows = []
    for setting, seconds, *_ in table("methods.md", "On a slow link", "configuration"):
        for start, (name, kind) in names.items():
            if setting.startswith(start) and len(numbers(seconds)) == 3:
                rows.append((name, kind, numbers(seconds)))
    return bars("Seconds to 86 % over 50 Mbit/s (shorter is better)", rows, " s")


def tasks() -> str:
    """Return the chart of simulated runs on held-out tasks."""
    cells = table("tuning-measurements.md", "Results on held-out tasks", "cluster")
    rows = [(name, "rank", [numbers(cell)[0] for cell in cells[:4]]) for name, *cells in cells]
    return bars("Times faster than your own setting (longer is better)", rows, " x")


if __name__ == "__main__":
    for draw in (groups, waiting, hosts, link, tasks):
        (HERE / f"{draw.__name__}.svg").write_text(draw())
