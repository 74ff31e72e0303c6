"""The picture of one search, on one page: both efficiencies, their product, and what the probes did.

Its colours mean what they mean in all pictures, see `lightning_omni.palette`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    number_colours,
    plot_interval,
)
from lightning_omni.palette import PARTS as PARTS_COLOURS
from lightning_omni.performance.forecast import Setting, TrialResult
from lightning_omni.performance.statistical import Estimate
from lightning_omni.report.digest import Digest, ProbeRow, interval, shares, times

_PART_LABELS = {
    "compute": "compute",
    "allreduce": "all-reduce",
    "exchange": "way to the server",
    "wait": "queue at server, link or head",
}
_LETTERS = "YSPDRO"
"""Of the user's own setting and the well-known systems, in the order of `Digest.systems`."""
_CHOSEN = {"marker": "*", "s": 430, "color": CHOSEN, "edgecolor": "white", "zorder": 6}
_MOST = 12.0
"""Times as long as the choice: axes go no further."""


def draw(digest: Digest, when: str, measured_after: Mapping[int, float]) -> Any:
    """The picture, as a matplotlib figure. Of a search for the size of a step alone there is less to show.

    Args:
        digest: of the search.
        when: it began, in words.
        measured_after: samples per second that were measured after the search, by groups.

    Raises:
        ConfigurationError: matplotlib is missing.
    """
    figure = new_figure(14, 5.2 if digest.is_about_steps else 11.5, dpi=100, facecolor="white")
    from matplotlib import rc_context

    with rc_context(_STYLE):
        engine: Any = figure.get_layout_engine()
        engine.set(w_pad=0.11, h_pad=0.09)
        figure.suptitle(_heading(digest, when), fontsize=13, x=0.01, ha="left", linespacing=1.5)
        if digest.is_about_steps:
            losses, hardware, step = figure.subplots(1, 3)
            _losses(losses, digest)
            _hardware(hardware, digest, measured_after)
            hardware.legend(*_entries(digest, measured_after, has_systems=False), loc="lower right")
            _step(step, digest)
            return figure
        # Rows of their own, so that the long names of the last do not move the margins of all.
        bands: Any = figure.subfigures(3, 1, height_ratios=[1.06, 1, 0.62], hspace=0.03)
        upper, middle, lower = bands
        hardware, statistics, time = upper.subplots(1, 3)
        step, losses, plane = middle.subplots(1, 3)
        _hardware(hardware, digest, measured_after)
        _statistics(statistics, digest)
        _time(time, digest)
        handles, texts = _entries(digest, measured_after)  # for the three panels over groups, where they hide nothing
        upper.legend(handles, texts, loc="outside upper left", ncols=len(texts), columnspacing=1.4)
        _step(step, digest)
        _losses(losses, digest)
        _plane(plane, digest, middle)
        _systems(lower.subplots(), digest)
    return figure


def _entries(
    digest: Digest, measured_after: Mapping[int, float], has_systems: bool = True
) -> tuple[list[Any], list[str]]:
    """Of a legend: what is drawn, and what it is."""
    from matplotlib.lines import Line2D

    entries: list[tuple[str, dict[str, Any]]] = [("expected, with 80 % interval", {"color": EXPECTED, "marker": "o"})]
    if any(rebalance for _, rebalance in digest.predictions):
        entries.append(("with proportional batches", {"color": PROPORTIONAL, "marker": "o"}))
    alone: dict[str, Any] = {"linestyle": "", "markersize": 8}
    entries.append(("a probe", {**alone, "marker": "D", "color": "white", "markeredgecolor": "black"}))
    if not all(math.isfinite(row.time) for row in digest.probes) and has_systems:
        entries.append(("diverged", {**alone, "marker": "x", "color": "black"}))
    if measured_after:
        entries.append(("measured in training", {**alone, "marker": "X", "color": MEASURED}))
    entries.append(("the choice", {**alone, "marker": "*", "color": CHOSEN, "markersize": 15}))
    if has_systems:
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


def _empty(axes: Any, text: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, textwrap.fill(text, 34), ha="center", va="center", color=GREY, transform=axes.transAxes)


def _over_groups(axes: Any, digest: Digest, expected: Sequence[Estimate], probed: str, chosen: float) -> None:
    """What is expected of each number of groups, what the probes came to, and the choice.

    Args:
        axes: on which powers of two will be equally far apart.
        digest: of the search.
        expected: for each number of groups.
        probed: the attribute of a `ProbeRow` that says the same of a probe.
        chosen: and that of the choice.
    """
    groups = digest.groups
    plot_interval(axes, groups, expected, EXPECTED)
    rows = [row for row in digest.probes if math.isfinite(getattr(row, probed))]
    places, heights = [_beside(row, digest) for row in rows], [getattr(row, probed) for row in rows]
    colours = [PROPORTIONAL if row.tried.setting.rebalance else EXPECTED for row in rows]
    axes.scatter(places, heights, marker="D", s=40, facecolor="none", edgecolor=colours, linewidth=1.7, zorder=7)
    axes.scatter(digest.choice.setting.groups, chosen, **_CHOSEN)
    axes.set_xscale("log", base=2)
    # Of neighbours that would touch only the larger is named.
    named = [g for g, more in zip(groups, [*groups[1:], math.inf], strict=True) if more / g > 1.19]
    axes.set_xticks(named, map(str, named))
    axes.minorticks_off()
    axes.set_xlim(groups[0] / 1.3, groups[-1] * 1.3)
    axes.set_xlabel("groups (more: less waiting, more staleness)")


# --- Hardware efficiency ---------------------------------------------------------------------------------------------


def _hardware(axes: Any, digest: Digest, measured_after: Mapping[int, float]) -> None:
    if not digest.predictions:
        return _empty(axes, "Nothing was timed: how fast groups would be is not known")
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
    """Of what a group's step consists."""
    if not digest.predictions:
        return _empty(axes, "Nothing was timed: the bottleneck is not known")
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
    sound = [row for row in digest.probes if math.isfinite(row.samples)]
    top = 1.15 * max([*(row.samples for row in sound), *(min(each.high, 3 * each.value) for each in values)])
    for row in sound:
        ends = [row.samples * math.exp(sign * row.error) for sign in (-1, 1)]
        axes.plot([_beside(row, digest)] * 2, ends, color=GREY, linewidth=1, zorder=3)
    gone = [_beside(row, digest) for row in digest.probes if not math.isfinite(row.samples)]
    axes.scatter(gone, [0.96 * top] * len(gone), marker="x", s=55, color="black", zorder=4)
    axes.set(ylabel="samples to the target  (1: the best probe)", ylim=(0, top), title=_of_statistics(digest))


def _beside(row: ProbeRow, digest: Digest) -> float:
    """Where a probe stands, so that those of one number of groups stand side by side."""
    alike = [each.number for each in digest.probes if each.tried.setting.groups == row.tried.setting.groups]
    away = alike.index(row.number) - (len(alike) - 1) / 2
    return float(row.tried.setting.groups * 2 ** (0.09 * away))


def _of_statistics(digest: Digest) -> str:
    most = max(digest.groups)
    if most == 1:
        return "Samples to the target"
    ratio = digest.samples(digest.curve[most]).value / digest.samples(digest.curve[1]).value
    return f"{counted(most, 'group')} need {ratio:.2f}× the samples of 1"


def _losses(axes: Any, digest: Digest) -> None:
    curves = [_ProbeCurve(row, *_smooth(row.tried)) for row in digest.probes if len(row.tried.samples) > 1]
    if not curves:
        return _empty(axes, "No probe was run")
    bounds = _bounds_of_losses(curves)
    if bounds is None:
        return _empty(axes, "No probe had a finite loss")
    low, top = bounds
    is_step = digest.is_about_steps
    colours = number_colours(sorted({curve.setting.lr for curve in curves}) if is_step else digest.groups)
    for place, curve in enumerate(curves):
        is_choice = digest.search.as_it_would_be(curve.setting) == digest.choice.setting
        # The choice is the thick one and lies below the others, the first of which are wider: none hides another.
        width = 3.4 if is_choice else max(1.0, 2.2 - 0.3 * place)
        style = {"linestyle": ":" if curve.has_failed else "-", "linewidth": width, "zorder": 2 if is_choice else 3}
        axes.plot(curve.samples, curve.losses, color=colours[_kind(curve.setting, is_step)], **style)
        if curve.has_failed:
            _mark_failure(axes, curve, low, top)
    axes.set(xlabel="samples", ylabel="training loss", ylim=(low - 0.05 * (top - low), top))
    failed = sum(curve.has_failed for curve in curves)
    count = counted(len(curves), "probe")
    axes.set_title(f"{count} from the same weights" + (f", {failed} failed (×)" if failed else ""))
    shown = {_kind(curve.setting, is_step) for curve in curves}
    names = {kind: f"lr {kind:.3g}" if is_step else counted(int(kind), "group") for kind in colours if kind in shown}
    _name_colours(axes, {name: colours[kind] for kind, name in names.items()})


class _ProbeCurve(NamedTuple):
    """A probe's training loss over samples, smoothed."""

    row: ProbeRow
    samples: Any
    losses: Any

    @property
    def setting(self) -> Setting:
        return self.row.tried.setting

    @property
    def has_failed(self) -> bool:
        return self.row.tried.has_failed


def _bounds_of_losses(curves: Sequence[_ProbeCurve]) -> tuple[float, float] | None:
    """The least loss, and a little above the first, or the last if that is higher and its probe has not failed.

    None where no loss is finite.
    """
    alive = [curve.losses for curve in curves if not curve.has_failed]
    having = alive or [curve.losses for curve in curves]
    sound = [finite for losses in having if len(finite := losses[np.isfinite(losses)])]
    if not sound:
        return None
    ends = (0, -1) if alive else (0,)
    high, low = max(float(losses[end]) for losses in sound for end in ends), min(float(each.min()) for each in sound)
    above = 0.25 if any(curve.has_failed for curve in curves) else 0.05
    return low, high + above * max(high - low, 1e-9)


def _mark_failure(axes: Any, curve: _ProbeCurve, low: float, top: float) -> None:
    """A cross where the loss leaves the picture, or where it ends."""
    gone = np.flatnonzero(~(curve.losses < top))
    place = gone[0] if len(gone) else len(curve.losses) - 1
    height = curve.losses[place] if curve.losses[place] < top else top - 0.03 * (top - low)
    axes.scatter(curve.samples[place], height, marker="x", s=60, color="black", zorder=5)


def _kind(setting: Setting, is_step: bool) -> float:
    """By which probes are coloured."""
    return setting.lr if is_step else setting.groups


def _name_colours(axes: Any, colours: Mapping[str, Any]) -> None:
    from matplotlib.lines import Line2D

    axes.legend([Line2D([], [], color=colour) for colour in colours.values()], list(colours), loc="lower left")


def _smooth(tried: TrialResult) -> tuple[Any, Any]:
    """A loss curve, each point the mean of a twentieth of the batches."""
    window = max(1, len(tried.losses) // 20)
    losses = np.convolve(tried.losses, np.ones(window) / window, mode="valid")
    samples = np.convolve(tried.samples, np.ones(window) / window, mode="valid")
    return samples, losses


# --- Time ------------------------------------------------------------------------------------------------------------


def _time(axes: Any, digest: Digest) -> None:
    values = [digest.time(digest.curve[g]) for g in digest.groups]
    _over_groups(axes, digest, values, "time", 1.0)
    times_of = [row.time for row in digest.probes if math.isfinite(row.time)]
    top = min(1.25 * max([*times_of, *(min(each.high, 2.5 * each.value) for each in values), 1.6]), _MOST)
    _letters(axes, digest, top)
    what = "time" if digest.profile is not None else "samples"
    title = f"Both together: {counted(digest.choice.setting.groups, 'group')} for the least time"
    axes.set(ylabel=f"{what} to the target  (1: the choice)", ylim=(0, top), title=title)


def _letters(axes: Any, digest: Digest, top: float) -> None:
    """The systems' letters beside their places, equal ones in one box; those beyond the axis stand at its top."""
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
    """What the choice and others take, as bars."""
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
    what = "time" if digest.profile is not None else "samples"
    axes.set(xlabel=f"{what} to the target (1: the choice), with 80 % intervals in brackets", xlim=(0, 1.62 * most))
    axes.set_title(_of_systems(digest))


def _of_systems(digest: Digest) -> str:
    others = {name: digest.time(each.setting).value for name, each in list(digest.systems.items())[1:]}
    best = min(others, key=lambda name: others[name])
    if others[best] < 1.05:
        return f"What others would have taken: as little with {best.partition(' (')[0]}"
    return f"What others would have taken: at least {times(others[best])} the time, with {best.partition(' (')[0]}"


# --- The plane of momentum and learning rate -------------------------------------------------------------------------


def _plane(axes: Any, digest: Digest, figure: Any) -> None:
    theory = [digest.search.proposal(g) for g in digest.groups]
    rates, momenta = [each.lr for each in theory], [each.momentum for each in theory]
    axes.plot(rates, momenta, color=GREY, linewidth=1, marker=".", label="theory's settings", zorder=1)
    axes.plot([], [], "o", color=GREY, markersize=9, label="probes (number: groups)")
    axes.legend(loc="upper left", bbox_to_anchor=(0, 1.0), ncols=1)
    rows = [row for row in digest.probes if math.isfinite(row.time)]
    failed = [row for row in digest.probes if not math.isfinite(row.time)]
    chosen = digest.choice.setting
    axes.scatter(chosen.lr, chosen.momentum, **{**_CHOSEN, "s": 1100, "alpha": 0.9, "zorder": 2})
    if rows:
        _probes_in_plane(axes, rows, figure)
    for row in failed:
        setting = row.tried.setting
        axes.scatter(setting.lr, setting.momentum, marker="x", s=200, color="black", linewidth=2, zorder=4)
    _lr_axis(axes, [*theory, chosen, *(row.tried.setting for row in digest.probes)])
    axes.set_title(f"Chosen: momentum {chosen.momentum:.3g}, lr {chosen.lr:.3g}")


def _probes_in_plane(axes: Any, rows: Sequence[ProbeRow], figure: Any) -> None:
    """Each probe where its momentum and rate are, coloured by its time, with the number of its groups."""
    from matplotlib.colors import LogNorm

    least, worst = min(1.0, *(row.time for row in rows)), max(1.5, *(row.time for row in rows))
    drawn = axes.scatter(
        [row.tried.setting.lr for row in rows],
        [row.tried.setting.momentum for row in rows],
        c=[row.time for row in rows],
        norm=LogNorm(least, worst),
        cmap=QUANTITY,
        s=260,
        edgecolor="white",
        zorder=4,
    )
    bar = figure.colorbar(drawn, ax=axes, pad=0.02, aspect=30, label="time (1: the choice)")
    ticks = [tick for tick in (1, 1.2, 1.5, 2, 3, 5, 10, 20, 50) if least <= tick <= worst]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
    for row in rows:
        is_dark = math.log(row.time / least) < 0.6 * math.log(worst / least)
        setting = row.tried.setting
        axes.annotate(
            str(setting.groups),
            (setting.lr, setting.momentum),
            ha="center",
            va="center",
            color="white" if is_dark else "black",
            fontsize=9,
            zorder=5,
        )


def _lr_axis(axes: Any, shown: Sequence[Setting]) -> None:
    rates = [each.lr for each in shown if each.lr > 0] or [1.0]
    low, high = min(rates) / 1.6, max(rates) * 1.6
    axes.set_xscale("log")
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in range(-12, 6) for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 6:
            break
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel="learning rate", ylabel="momentum", xlim=(low, high), ylim=(-0.1, 1.22))
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
