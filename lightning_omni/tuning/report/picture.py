"""The picture of one search: the choice and why, speed forecast and measured, loss over time, and details."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_omni.checks import counted
from lightning_omni.palette import (
    CHOSEN,
    EXPECTED,
    MEASURED,
    PROPORTIONAL,
    QUANTITY,
    YOURS,
    new_figure,
    plot_interval,
)
from lightning_omni.palette import PARTS as PARTS_COLOURS
from lightning_omni.tuning.model.forecast import Estimate
from lightning_omni.tuning.report.summary import SearchSummary, number, shares, times

_PART_LABELS = {
    "compute": "compute",
    "allreduce": "all-reduce",
    "exchange": "way to the server",
    "wait": "queue at server, link or head",
}
_CHOSEN = {"marker": "*", "s": 430, "color": CHOSEN, "edgecolor": "white", "zorder": 6}


def draw(summary: SearchSummary, heading: str, losses: Sequence[tuple[float, float]], monitor: str) -> Any:
    """Draw the picture as a matplotlib figure.

    ``losses`` are seconds of training and validated losses.

    Raises:
        ConfigurationError: matplotlib is missing.
    """
    figure = new_figure(14, 11.5, dpi=100, facecolor="white")
    from matplotlib import rc_context

    with rc_context(_STYLE):
        engine: Any = figure.get_layout_engine()
        engine.set(w_pad=0.11, h_pad=0.09)
        figure.suptitle(heading, fontsize=12.5, x=0.01, ha="left", linespacing=1.45)
        # Each row is a subfigure, so that the long names of the first one do not move the margins of all.
        bands: Any = figure.subfigures(3, 1, height_ratios=[1.06, 1, 0.72], hspace=0.03)
        upper, middle, lower = bands
        choice, hardware, loss = upper.subplots(1, 3)
        statistics, speed_up, step = middle.subplots(1, 3)
        _contributions(choice, summary)
        _hardware(hardware, summary)
        _loss(loss, summary, losses, monitor)
        _statistics(statistics, summary)
        _speed_up(speed_up, summary)
        _step(step, summary)
        handles, texts = _entries(summary)  # outside the three panels over groups
        middle.legend(handles, texts, loc="outside upper left", ncols=len(texts), columnspacing=1.4)
        _phase(lower.subplots(), summary, lower)
    return figure


def _entries(summary: SearchSummary) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    entries: list[tuple[str, dict[str, Any]]] = [("expected, with 80 % interval", {"color": EXPECTED, "marker": "o"})]
    if any(rebalance for _, rebalance in summary.predictions):
        entries.append(("with proportional batches", {"color": PROPORTIONAL, "marker": "o"}))
    alone: dict[str, Any] = {"linestyle": "", "markersize": 8}
    entries.append(("considered", {**alone, "marker": "D", "color": "white", "markeredgecolor": "black"}))
    if summary.measured_after:
        entries.append(("measured in training", {**alone, "marker": "X", "color": MEASURED}))
    entries.append(("the choice", {**alone, "marker": "*", "color": CHOSEN, "markersize": 15}))
    return [Line2D([], [], **{"markersize": 5, **style}) for _, style in entries], [text for text, _ in entries]


_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",
}


def heading_of(summary: SearchSummary, when: str, foot: str, statement: str = "") -> str:
    """Return the heading of a picture, whose first lines are the ``statement``, if any."""
    parts = [f"{summary.ranks} ranks", when, summary.expense, *([foot] if foot else [])]
    lines = textwrap.wrap(" · ".join(parts), 138, break_on_hyphens=False)
    return "\n".join([*textwrap.wrap(statement, 138), *lines])


def _contributions(axes: Any, summary: SearchSummary) -> None:
    parts = summary.contributions
    names, heights = ["your own setting"], [1.0]
    for each in parts:
        names.append(each.part)
        heights.append(heights[-1] * each.speed_up)
    colours = [YOURS, *[EXPECTED] * len(parts)]
    if parts:
        colours[-1] = CHOSEN
    places = range(len(names))
    axes.barh(places, heights, color=colours, height=0.6, alpha=0.85)
    for place, height in zip(places, heights, strict=True):
        axes.text(height + 0.02 * max(heights), place, times(height), va="center", fontsize=9.5)
    axes.set_yticks(places, ["\n".join(textwrap.wrap(name, 24)[:3]) for name in names], fontsize=9)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlim=(0, 1.2 * max(heights)), xlabel="speed-up over your own setting, part by part")
    bottleneck = _bottleneck_of_choice(summary)
    chosen = "Your own setting stays" if not parts else f"Chosen: {counted(summary.choice.setting.groups, 'group')}"
    axes.set_title(f"{chosen}{f'; bottleneck: {bottleneck}' if bottleneck else ''}")


def _bottleneck_of_choice(summary: SearchSummary) -> str:
    groups = summary.choice.setting.groups
    return summary.bottleneck(summary.prediction(groups)) if groups in summary.groups else ""


def _loss(axes: Any, summary: SearchSummary, losses: Sequence[tuple[float, float]], monitor: str) -> None:
    if len(losses) < 2:
        axes.set_title("Loss of the timed batches")
        seconds, values = _timed(summary) if summary.search.observation.batches.is_finite else ([], [])
        axes.plot(seconds, values, color=YOURS, marker="." if len(values) < 40 else "")
        axes.set(xlabel="seconds (no validation yet)", ylabel="training loss")
        return
    axes.set_title("Loss over time, beside your own setting")
    seconds, values = zip(*losses, strict=True)
    slower = [each * summary.speed_up.value for each in seconds]
    axes.plot(seconds, values, color=CHOSEN, marker="o", markersize=4, label="measured")
    axes.plot(slower, values, color=YOURS, linestyle="--", label="your own setting, forecast")
    axes.set(xlabel="seconds of training", ylabel=monitor, xlim=(0, 1.05 * max(*seconds, *slower)))
    axes.legend(loc="upper right")


def _timed(summary: SearchSummary) -> tuple[Any, Any]:
    batches = summary.search.observation.batches
    window = max(1, len(batches.losses) // 20)
    rate = summary.search.throughput(summary.start)
    losses = np.convolve(batches.losses, np.ones(window) / window, mode="valid")
    return np.convolve(batches.samples, np.ones(window) / window, mode="valid") / rate, losses


def _over_groups(axes: Any, summary: SearchSummary, expected: Sequence[Estimate], name: str, chosen: float) -> None:
    """Draw the expectation for each number of groups, the considered settings, and the choice.

    ``name`` is the attribute of `ConsideredRow` with the same quantity.
    """
    groups = summary.groups
    plot_interval(axes, groups, expected, EXPECTED)
    rows = summary.considered
    places, heights = [row.setting.groups for row in rows], [getattr(row, name) for row in rows]
    colours = [PROPORTIONAL if row.setting.rebalance else EXPECTED for row in rows]
    axes.scatter(places, heights, marker="D", s=40, facecolor="none", edgecolor=colours, linewidth=1.7, zorder=7)
    axes.scatter(summary.choice.setting.groups, chosen, **_CHOSEN)
    axes.set_xscale("log", base=2)
    # If two labels would touch, only the larger number gets one.
    named = [g for g, more in zip(groups, [*groups[1:], math.inf], strict=True) if more / g > 1.19]
    axes.set_xticks(named, map(str, named))
    axes.minorticks_off()
    axes.set_xlim(groups[0] / 1.3, groups[-1] * 1.3)
    axes.set_xlabel("groups (more: less waiting, more staleness)")


# --- Hardware efficiency ---------------------------------------------------------------------------------------------


def _hardware(axes: Any, summary: SearchSummary) -> None:
    rates = {key: each.samples_per_second for key, each in summary.predictions.items()}
    even, chosen = [rates[g, False] for g in summary.groups], summary.rate.value
    _over_groups(axes, summary, even, "rate", chosen)
    uneven = [g for g in summary.groups if (g, True) in rates]
    plot_interval(axes, uneven, [rates[g, True] for g in uneven], PROPORTIONAL)
    measured = {groups: rate for groups, rate in summary.measured_after.items() if groups in summary.groups}
    if measured:
        axes.scatter(*zip(*measured.items(), strict=True), marker="X", s=70, color=MEASURED, zorder=7, ec="white")
    if summary.is_outside and summary.choice.setting.groups in measured:
        where = summary.choice.setting.groups, measured[summary.choice.setting.groups]
        axes.scatter(*where, marker="o", s=260, facecolor="none", edgecolor="red", linewidth=2, zorder=8)
        offset = (-14, 0) if where[0] > 1 else (14, 0)
        side = "right" if where[0] > 1 else "left"
        style = {"textcoords": "offset points", "ha": side, "va": "center", "color": "red"}
        axes.annotate("outside the\nforecast's interval", where, offset, fontsize=9, **style)
    top = max([*(each.high for each in rates.values()), summary.rate.high, *measured.values()])
    axes.set(ylabel="samples / s", title=_of_hardware(summary), ylim=(0, 1.1 * top))


def _of_hardware(summary: SearchSummary) -> str:
    if summary.measured_rate is None:
        return f"Speed: {number(summary.rate.value)} samples/s, forecast"
    return f"Speed: {number(summary.rate.value)} forecast, {number(summary.measured_rate)} measured"


def _step(axes: Any, summary: SearchSummary) -> None:
    places = range(len(summary.groups))
    bottom = np.zeros(len(summary.groups))
    found = [summary.prediction(g) for g in summary.groups]
    rows = [shares(each.parts, each.seconds_per_update.value, g) for each, g in zip(found, summary.groups, strict=True)]
    for name, label in _PART_LABELS.items():
        heights = np.array([1000 * row[name] for row in rows])
        if heights.max() > 0.002 * max(sum(row.values()) for row in rows) * 1000:
            axes.bar(places, heights, bottom=bottom, color=PARTS_COLOURS[name], width=0.62, label=label)
            bottom += heights
    for place, each in zip(places, found, strict=True):
        style = {"ha": "center", "va": "bottom", "fontsize": 9, "rotation": 90 if len(places) > 5 else 0}
        axes.annotate(summary.bottleneck(each), (place, bottom[place]), (0, 4), textcoords="offset points", **style)
    axes.set_xticks(places, map(str, summary.groups))
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, (1.42 if len(places) <= 5 else 1.75) * bottom.max())
    axes.set(xlabel="groups", ylabel="ms in one step of a group", title="Time of a step, and its bottleneck")
    axes.legend(loc="upper right", ncols=2)


# --- Statistical efficiency ------------------------------------------------------------------------------------------


def _statistics(axes: Any, summary: SearchSummary) -> None:
    values = [summary.samples(summary.curve[g]) for g in summary.groups]
    _over_groups(axes, summary, values, "samples", summary.samples(summary.choice.setting).value)
    top = 1.15 * max(min(each.high, 3 * each.value) for each in values)
    axes.set(ylabel="samples to the target  (1: yours)", ylim=(0, top), title=_of_statistics(summary))


def _of_statistics(summary: SearchSummary) -> str:
    most = max(summary.groups)
    if most == 1:
        return "Samples to the target"
    ratio = summary.samples(summary.curve[most]).value / summary.samples(summary.curve[1]).value
    return f"{counted(most, 'group')} need {ratio:.2f}× the samples of 1"


# --- Both ------------------------------------------------------------------------------------------------------------


def _speed_up(axes: Any, summary: SearchSummary) -> None:
    values = [summary.speed_up_of(summary.curve[g]) for g in summary.groups]
    _over_groups(axes, summary, values, "speed_up", summary.speed_up.value)
    considered = [row.speed_up for row in summary.considered]
    top = 1.15 * max([*(min(each.high, 2.5 * each.value) for each in values), 1.2, *considered])
    title = "Both together: speed-up over your own setting"
    axes.set(ylabel="speed-up to the target  (1: yours)", ylim=(0, top), title=title)


# --- The phase -------------------------------------------------------------------------------------------------------

_MOMENTA = 20
"""Rows of the map."""


def _phase(axes: Any, summary: SearchSummary, figure: Any) -> None:
    from matplotlib.colors import LogNorm

    low, high = summary.search.spec.space.momentum
    momenta = np.linspace(low, high, _MOMENTA) if high > low else np.array([low])
    height = (momenta[1] - momenta[0]) if len(momenta) > 1 else 0.1
    several = summary.groups[1:]
    gains = np.array([[_speed_up_with(summary, groups, each) for groups in several] for each in momenta])
    own = summary.ratio(summary.curve[1])
    least, most = min(0.7, own, *gains.ravel()), max(1.5, own, *gains.ravel())
    norm = LogNorm(least, most)
    place = {groups: number for number, groups in enumerate(summary.groups)}
    style = {"norm": norm, "cmap": QUANTITY}
    if several:
        edges = [momenta[0] - height / 2, *(momenta + height / 2)]
        drawn = axes.pcolormesh(np.arange(len(several) + 1) + 0.5, edges, gains, **style)
        bar = figure.colorbar(drawn, ax=axes, pad=0.02, aspect=30, label="speed-up")
        ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50) if least <= tick <= most]
        bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        bar.ax.minorticks_off()
    if summary.start.groups in place:
        axes.scatter(place[summary.start.groups], summary.start.momentum, c=[own], s=260, marker="s", **style)
    for row in summary.considered:
        style = {"marker": "D", "s": 60, "facecolor": "none", "edgecolor": "white", "linewidth": 2, "zorder": 5}
        axes.scatter(place[row.setting.groups], row.setting.momentum, **style)
        where = place[row.setting.groups], row.setting.momentum
        box = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.75}
        style = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "bbox": box, "zorder": 4}
        axes.annotate(row.by, where, (0, 9), **style)
    for each in summary.search.segments:
        if each.setting.groups in place:
            axes.scatter(
                place[each.setting.groups], each.setting.momentum, marker="X", s=90, color=MEASURED, ec="white"
            )
    chosen = summary.choice.setting
    axes.scatter(place[chosen.groups], chosen.momentum, **_CHOSEN)
    axes.set_xticks(range(len(place)), map(str, place))
    axes.grid(visible=False)
    room = 0.16 * (momenta[-1] - momenta[0] + height)
    bottom = min(momenta[0] - height / 2, chosen.momentum, summary.start.momentum) - 0.4 * room
    top = max(momenta[-1] + height / 2, chosen.momentum, summary.start.momentum) + room
    axes.set(xlabel="groups", ylabel="momentum", xlim=(-0.6, len(place) - 0.4), ylim=(bottom, top))
    axes.set_title(f"Chosen: momentum {chosen.momentum:.3g}, lr {chosen.lr:.3g}")


def _speed_up_with(summary: SearchSummary, groups: int, momentum: float) -> float:
    best, scaling = summary.curve[groups], summary.search.scaling
    lr = scaling.lr(best.updates_per_batch, momentum, scaling.step(best))
    return summary.ratio(replace(best, momentum=momentum, lr=max(lr, 1e-12)))
