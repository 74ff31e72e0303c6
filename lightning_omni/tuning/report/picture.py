"""The picture of one search: both efficiencies, their product, and the choice.

Its colours mean the same in all pictures, see `lightning_omni.palette`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_omni.checks import counted
from lightning_omni.palette import (
    CHOSEN,
    EXPECTED,
    GREY,
    MEASURED,
    PROPORTIONAL,
    QUANTITY,
    YOURS,
    new_figure,
    plot_interval,
)
from lightning_omni.palette import PARTS as PARTS_COLOURS
from lightning_omni.tuning.model.convergence import Estimate
from lightning_omni.tuning.report.digest import Digest, interval, shares, times

_PART_LABELS = {
    "compute": "compute",
    "allreduce": "all-reduce",
    "exchange": "way to the server",
    "wait": "queue at server, link or head",
}
_LETTERS = "YSPDRO"
"""Letters of the user's own setting and the well-known systems, in the order of `Digest.systems`."""
_CHOSEN = {"marker": "*", "s": 430, "color": CHOSEN, "edgecolor": "white", "zorder": 6}
_MOST = 12.0
"""Largest time on an axis, relative to the choice."""


def draw(digest: Digest, when: str, measured_after: Mapping[int, float]) -> Any:
    """Draw the picture as a matplotlib figure.

    Args:
        digest: the digest of the search.
        when: the beginning of the search, in words.
        measured_after: samples per second measured after the search, by groups.

    Raises:
        ConfigurationError: matplotlib is missing.
    """
    figure = new_figure(14, 11.5, dpi=100, facecolor="white")
    from matplotlib import rc_context

    with rc_context(_STYLE):
        engine: Any = figure.get_layout_engine()
        engine.set(w_pad=0.11, h_pad=0.09)
        figure.suptitle(_heading(digest, when), fontsize=13, x=0.01, ha="left", linespacing=1.5)
        # Each row is a subfigure, so that the long names of the last one do not move the margins of all.
        bands: Any = figure.subfigures(3, 1, height_ratios=[1.06, 1, 0.62], hspace=0.03)
        upper, middle, lower = bands
        hardware, statistics, time = upper.subplots(1, 3)
        step, losses, phase = middle.subplots(1, 3)
        _hardware(hardware, digest, measured_after)
        _statistics(statistics, digest)
        _time(time, digest)
        handles, texts = _entries(digest, measured_after)  # outside the three panels over groups
        upper.legend(handles, texts, loc="outside upper left", ncols=len(texts), columnspacing=1.4)
        _step(step, digest)
        _losses(losses, digest)
        _phase(phase, digest, middle)
        _systems(lower.subplots(), digest)
    return figure


def _entries(digest: Digest, measured_after: Mapping[int, float]) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    entries: list[tuple[str, dict[str, Any]]] = [("expected, with 80 % interval", {"color": EXPECTED, "marker": "o"})]
    if any(rebalance for _, rebalance in digest.predictions):
        entries.append(("with proportional batches", {"color": PROPORTIONAL, "marker": "o"}))
    alone: dict[str, Any] = {"linestyle": "", "markersize": 8}
    entries.append(("considered", {**alone, "marker": "D", "color": "white", "markeredgecolor": "black"}))
    if measured_after:
        entries.append(("measured in training", {**alone, "marker": "X", "color": MEASURED}))
    entries.append(("the choice", {**alone, "marker": "*", "color": CHOSEN, "markersize": 15}))
    letters = {**alone, "marker": "s", "color": "white", "markeredgecolor": YOURS, "markersize": 11}
    entries.append(("yours and other systems' (letters: see below)", letters))
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


def _heading(digest: Digest, when: str) -> str:
    parts = [f"{digest.ranks} ranks", when, digest.expense]
    if digest.seconds is not None:
        parts.append(f"{interval(digest.seconds)} to the target with the choice")
    return "\n".join([*textwrap.wrap(digest.statement, 130), "  ·  ".join(parts)])


def _over_groups(axes: Any, digest: Digest, expected: Sequence[Estimate], name: str, chosen: float) -> None:
    """Draw the expectation for each number of groups, the considered settings, and the choice.

    ``name`` is the attribute of `ConsideredRow` with the same quantity.
    """
    groups = digest.groups
    plot_interval(axes, groups, expected, EXPECTED)
    rows = digest.considered
    places, heights = [row.setting.groups for row in rows], [getattr(row, name) for row in rows]
    colours = [PROPORTIONAL if row.setting.rebalance else EXPECTED for row in rows]
    axes.scatter(places, heights, marker="D", s=40, facecolor="none", edgecolor=colours, linewidth=1.7, zorder=7)
    axes.scatter(digest.choice.setting.groups, chosen, **_CHOSEN)
    axes.set_xscale("log", base=2)
    # If two labels would touch, only the larger number gets one.
    named = [g for g, more in zip(groups, [*groups[1:], math.inf], strict=True) if more / g > 1.19]
    axes.set_xticks(named, map(str, named))
    axes.minorticks_off()
    axes.set_xlim(groups[0] / 1.3, groups[-1] * 1.3)
    axes.set_xlabel("groups (more: less waiting, more staleness)")


# --- Hardware efficiency ---------------------------------------------------------------------------------------------


def _hardware(axes: Any, digest: Digest, measured_after: Mapping[int, float]) -> None:
    rates = {key: each.samples_per_second for key, each in digest.predictions.items()}
    even, chosen = [rates[g, False] for g in digest.groups], digest.search.throughput(digest.choice.setting)
    _over_groups(axes, digest, even, "rate", chosen)
    uneven = [g for g in digest.groups if (g, True) in rates]
    plot_interval(axes, uneven, [rates[g, True] for g in uneven], PROPORTIONAL)
    if measured_after:
        axes.scatter(*zip(*measured_after.items(), strict=True), marker="X", s=70, color=MEASURED, zorder=7, ec="white")
    axes.set(ylabel="samples / s", title=_of_hardware(digest))
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)


def _of_hardware(digest: Digest) -> str:
    rates = {g: digest.prediction(g).samples_per_second.value for g in digest.groups}
    fastest = max(rates, key=lambda g: rates[g])
    gain = rates[fastest] / rates[1]
    if gain < 1.05:
        return "More groups are not faster"
    return f"{counted(fastest, 'group')} train{'s' * (fastest == 1)} {gain:.1f}× faster than 1"


def _step(axes: Any, digest: Digest) -> None:
    places = range(len(digest.groups))
    bottom = np.zeros(len(digest.groups))
    found = [digest.prediction(g) for g in digest.groups]
    rows = [shares(each.parts, each.seconds_per_update.value, g) for each, g in zip(found, digest.groups, strict=True)]
    for name, label in _PART_LABELS.items():
        heights = np.array([1000 * row[name] for row in rows])
        if heights.max() > 0.002 * max(sum(row.values()) for row in rows) * 1000:
            axes.bar(places, heights, bottom=bottom, color=PARTS_COLOURS[name], width=0.62, label=label)
            bottom += heights
    for place, each in zip(places, found, strict=True):
        style = {"ha": "center", "va": "bottom", "fontsize": 9, "rotation": 90 if len(places) > 5 else 0}
        axes.annotate(digest.bottleneck(each), (place, bottom[place]), (0, 4), textcoords="offset points", **style)
    axes.set_xticks(places, map(str, digest.groups))
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, (1.42 if len(places) <= 5 else 1.75) * bottom.max())
    chosen = digest.choice.setting.groups
    bottleneck = digest.bottleneck(digest.prediction(chosen)) if chosen in digest.groups else ""
    axes.set(
        xlabel="groups",
        ylabel="ms in one step of a group",
        title=f"With {counted(chosen, 'group')} {bottleneck} is the bottleneck",
    )
    axes.legend(loc="upper right", ncols=2)


# --- Statistical efficiency ------------------------------------------------------------------------------------------


def _statistics(axes: Any, digest: Digest) -> None:
    values = [digest.samples(digest.curve[g]) for g in digest.groups]
    _over_groups(axes, digest, values, "samples", digest.samples(digest.choice.setting).value)
    top = 1.15 * max(min(each.high, 3 * each.value) for each in values)
    axes.set(ylabel="samples to the target  (1: yours)", ylim=(0, top), title=_of_statistics(digest))


def _of_statistics(digest: Digest) -> str:
    most = max(digest.groups)
    if most == 1:
        return "Samples to the target"
    ratio = digest.samples(digest.curve[most]).value / digest.samples(digest.curve[1]).value
    return f"{counted(most, 'group')} need {ratio:.2f}× the samples of 1"


def _losses(axes: Any, digest: Digest) -> None:
    """Draw the training loss of the timed batches, averaged over a twentieth of them."""
    batches = digest.search.observation.batches
    window = max(1, len(batches.losses) // 20)
    losses = np.convolve(batches.losses, np.ones(window) / window, mode="valid")
    samples = np.convolve(batches.samples, np.ones(window) / window, mode="valid")
    axes.plot(samples, losses, color=MEASURED, marker="." if len(losses) < 40 else "")
    axes.set(xlabel="samples", ylabel="training loss")
    axes.set_title(f"The {len(batches.losses)} batches that were timed")


# --- Time ------------------------------------------------------------------------------------------------------------


def _time(axes: Any, digest: Digest) -> None:
    values = [digest.time(digest.curve[g]) for g in digest.groups]
    _over_groups(axes, digest, values, "time", 1.0)
    top = min(1.25 * max([*(min(each.high, 2.5 * each.value) for each in values), 1.6]), _MOST)
    _letters(axes, digest, top)
    title = f"Both together: {counted(digest.choice.setting.groups, 'group')} for the least time"
    axes.set(ylabel="time to the target  (1: the choice)", ylim=(0, top), title=title)


def _letters(axes: Any, digest: Digest, top: float) -> None:
    """Draw the systems' letters: close ones share a box, and those beyond the axis are at its top."""
    boxes: list[tuple[int, float, str]] = []
    for letter, estimate in zip(_LETTERS, digest.systems.values(), strict=True):
        groups, value = estimate.setting.groups, digest.time(estimate.setting).value
        height, text = min(value, 0.95 * top), f"{letter}↑" if value > 0.95 * top else letter
        near = [box for box in boxes if box[0] == groups and abs(box[1] - height) < 0.055 * top]
        if near:
            boxes.remove(near[0])
            height, text = near[0][1], f"{near[0][2]} {text}"
        boxes.append((groups, height, text))
    for groups, height, text in boxes:
        is_last = groups > 0.7 * max(digest.groups) and groups > 1
        axes.annotate(
            text,
            (groups, height),
            (-16 if is_last else 16, 0),
            textcoords="offset points",
            ha="right" if is_last else "left",
            va="center",
            color=YOURS,
            fontsize=8.5,
            bbox={"boxstyle": "round,pad=0.22", "fc": "white", "ec": YOURS, "lw": 1.2},
            zorder=5,
        )


def _systems(axes: Any, digest: Digest) -> None:
    names = ["the choice", *digest.systems]
    settings = [digest.choice.setting, *(each.setting for each in digest.systems.values())]
    values = [digest.time(each) for each in settings]
    most = min(_MOST, max(each.value for each in values))
    places = range(len(names))
    colours = [CHOSEN, YOURS, *[GREY] * (len(names) - 2)]
    axes.barh(places, [min(each.value, most) for each in values], color=colours, height=0.6, alpha=0.85)
    for place, (estimate, setting) in enumerate(zip(values, settings, strict=True)):
        beyond = "→ " if estimate.value > most else ""
        tail = f" ({times(estimate.low)} to {times(estimate.high)})" if place else ""
        axes.text(
            min(estimate.value, most) + 0.008 * most,
            place,
            f"{beyond}{times(estimate.value)}{tail}   {setting}",
            va="center",
            fontsize=9.5,
        )
    letters = ["★", *_LETTERS]
    axes.set_yticks(places, [f"{name}  {letter}" for letter, name in zip(letters, names, strict=True)])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.axvline(1, color=CHOSEN, linewidth=1, linestyle="--", zorder=0)
    axes.set(xlabel="time to the target (1: the choice), with 80 % intervals in brackets", xlim=(0, 1.62 * most))
    axes.set_title(_of_systems(digest))


def _of_systems(digest: Digest) -> str:
    others = {name: digest.time(each.setting).value for name, each in list(digest.systems.items())[1:]}
    best = min(others, key=lambda name: others[name])
    if others[best] < 1.05:
        return f"What others would have taken: as little with {best.partition(' (')[0]}"
    return f"What others would have taken: at least {times(others[best])} the time, with {best.partition(' (')[0]}"


# --- The phase -------------------------------------------------------------------------------------------------------

_MOMENTA = 20
"""Rows of the map."""


def _phase(axes: Any, digest: Digest, figure: Any) -> None:
    """Draw the predicted time over groups and momentum, with the considered and the trained settings.

    Each number of groups has its best exchange, with steps of the best size; one group keeps the user's momentum.
    """
    from matplotlib.colors import LogNorm

    low, high = digest.search.spec.space.momentum
    momenta = np.linspace(low, high, _MOMENTA) if high > low else np.array([low])
    height = (momenta[1] - momenta[0]) if len(momenta) > 1 else 0.1
    several = digest.groups[1:]
    seconds = np.array([[_time_with(digest, groups, each) for groups in several] for each in momenta])
    own = digest.time(digest.curve[1]).value
    least, most = min(1.0, own, *seconds.ravel()), max(1.5, own, *seconds.ravel())
    norm = LogNorm(least, most)
    place = {groups: number for number, groups in enumerate(digest.groups)}
    style = {"norm": norm, "cmap": QUANTITY}
    if several:
        edges = [momenta[0] - height / 2, *(momenta + height / 2)]
        drawn = axes.pcolormesh(np.arange(len(several) + 1) + 0.5, edges, seconds, **style)
        bar = figure.colorbar(drawn, ax=axes, pad=0.02, aspect=30, label="time (1: the choice)")
        ticks = [tick for tick in (1, 1.2, 1.5, 2, 3, 5, 10, 20, 50) if least <= tick <= most]
        bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        bar.ax.minorticks_off()
    axes.scatter(0, digest.start.momentum, c=[own], s=260, marker="s", **style)
    for row in digest.considered:
        style = {"marker": "D", "s": 60, "facecolor": "none", "edgecolor": "white", "linewidth": 2, "zorder": 5}
        axes.scatter(place[row.setting.groups], row.setting.momentum, **style)
        where = place[row.setting.groups], row.setting.momentum
        colour = "white" if row.setting.groups > 1 else "black"
        axes.annotate(row.by, where, (0, 8), textcoords="offset points", ha="center", fontsize=8, color=colour)
    for each in digest.search.segments:
        if each.setting.groups in place:
            axes.scatter(
                place[each.setting.groups], each.setting.momentum, marker="X", s=90, color=MEASURED, ec="white"
            )
    chosen = digest.choice.setting
    axes.scatter(place[chosen.groups], chosen.momentum, **_CHOSEN)
    axes.set_xticks(range(len(place)), map(str, place))
    axes.grid(visible=False)
    axes.set(xlabel="groups", ylabel="momentum", xlim=(-0.6, len(place) - 0.4))
    axes.set_title(f"Chosen: momentum {chosen.momentum:.3g}, lr {chosen.lr:.3g}")


def _time_with(digest: Digest, groups: int, momentum: float) -> float:
    """Return the time with another momentum and equal steps."""
    best, scaling = digest.curve[groups], digest.search.scaling
    lr = scaling.lr(best.updates_per_batch, momentum, scaling.step(best))
    return digest.time(replace(best, momentum=momentum, lr=max(lr, 1e-12))).value
