"""The trace of a run, push by push, with its evaluations: statistics, files and plots."""

from __future__ import annotations

import json
import math
import textwrap
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lightning_omni.checks import counted, plain
from lightning_omni.errors import ConfigurationError
from lightning_omni.palette import (
    GREY,
    QUANTITY,
    can_draw,
    line_styles,
    method_colours,
    new_figure,
    png_of,
    save_figure,
)

Array = np.ndarray[Any, Any]

_BLOCKS = 20
_VALUES = ("updates", "seconds", "ended", "meta", "useful_seconds", "device_seconds")
"""The fields of a trace that are not arrays."""


@dataclass(frozen=True, eq=False)
class Trace:
    """A run's pushes and evaluations.

    One row of `columns` is one accepted push; where groups exchange only with one another, it is one local step.
    Its columns:

    - ``time``: time of its arrival, in seconds;
    - ``group``: number of the group;
    - ``read``: clock of the weights that it was computed from;
    - ``write``: clock of the update that contains it (the last ones may not have been written);
    - ``staleness``: updates between its read and its arrival;
    - ``loss``: mean training loss of its batches; NaN if recorded by a server;
    - ``samples``: samples in its batches;
    - ``epoch``: number of the epoch;
    - ``steps``: its local steps, each of one batch.

    One row of `steps` is one local step of a group, in the order of their ends: ``group``, ``time`` (its end),
    ``seconds`` (since its computation began) and ``exchange`` (the seconds of these after its gradient was computed).
    One row of `work` is one rank's part of one step: ``rank``, ``samples`` and ``seconds`` (its own forward and
    backward pass, without waits).

    Args:
        rows: the columns.
        evaluated: ``time``, ``update`` and ``samples`` (trained so far) of each evaluation, and its metrics by name.
        ended: reason for its end: ``"max_updates"``, ``"max_epochs"``, ``"max_seconds"``, ``"target"``,
            ``"interrupted"``, ``"stopped"``, ``"recorded"`` (by a server), or ``"lost: ..."`` or ``"diverged: ..."``.
        meta: the run's settings as plain values.
        weights: the final weights by name.
        useful_seconds: useful time as for `goodput`, summed over all ranks; NaN if not measured.
        device_seconds: length of the run times its devices; NaN if not measured.
        work: the work of each rank; empty if not measured.
        steps: the steps of each group; empty if not measured.

    Example:
        >>> trace = Trace(
        ...     rows={"time": np.arange(1.0, 5.0), "staleness": np.array([0, 1, 1, 2]), "write": np.arange(1, 5)},
        ...     evaluated={"time": np.array([2.0, 4.0]), "update": np.array([2, 4]), "accuracy": np.array([0.5, 0.9])},
        ...     updates=4, seconds=4.0,
        ... )
        >>> trace.mean_staleness, trace.staleness_histogram().tolist(), trace.updates_to("accuracy", 0.8)
        (1.0, [1, 2, 1], 4.0)
    """

    COLUMNS: ClassVar[dict[str, type[Any]]] = {
        "time": np.float64,
        "group": np.int64,
        "read": np.int64,
        "write": np.int64,
        "staleness": np.int64,
        "loss": np.float64,
        "samples": np.int64,
        "epoch": np.int64,
        "steps": np.int64,
    }
    WORK: ClassVar[dict[str, type[Any]]] = {"rank": np.int64, "samples": np.int64, "seconds": np.float64}
    STEPS: ClassVar[dict[str, type[Any]]] = {
        "group": np.int64,
        "time": np.float64,
        "seconds": np.float64,
        "exchange": np.float64,
    }

    rows: Mapping[str, Array]
    evaluated: Mapping[str, Array] = field(default_factory=dict)
    updates: int = 0
    seconds: float = 0.0
    ended: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Array] = field(default_factory=dict)
    useful_seconds: float = math.nan
    device_seconds: float = math.nan
    work: Mapping[str, Array] = field(default_factory=dict)
    steps: Mapping[str, Array] = field(default_factory=dict)

    def columns(self) -> dict[str, Array]:
        """Return the pushes, as for ``pandas.DataFrame``."""
        return dict(self.rows)

    def evaluations(self) -> dict[str, Array]:
        """Return the evaluations, as for ``pandas.DataFrame``."""
        return dict(self.evaluated)

    # --- Statistics --------------------------------------------------------------------------------------------------

    @property
    def mean_staleness(self) -> float:
        """Return the mean staleness of all pushes, in updates; NaN without pushes."""
        staleness = self.rows["staleness"]
        return float(staleness.mean()) if len(staleness) else float("nan")

    @property
    def goodput(self) -> float:
        """Return useful device time over all device time, 0 to 1; NaN if not measured.

        Useful time is that of gradients that reached the other groups: in an accepted push or, where groups exchange
        only with one another, in a local step. Waits, computation that was never pushed, and the time of a dead device
        are not useful; slow computation is.

        References:
            Douillard et al. 2026, "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv:2604.21428.
        """
        return self.useful_seconds / self.device_seconds if self.device_seconds else math.nan

    def staleness_histogram(self) -> Array:
        """Return the number of pushes of staleness 0, 1, 2, ...: int64."""
        return np.bincount(self.rows["staleness"])

    @property
    def seconds_per_update(self) -> float:
        """Return the seconds between two updates in the steady part of the run; NaN for fewer than two.

        It is the median over the means of up to 20 equal blocks after the first fifth, without a remainder.
        """
        writes, first = np.unique(self.rows["write"][::-1], return_index=True)
        times = self.rows["time"][::-1][first][writes <= max(self.updates, 0)]
        steady = times[len(times) // 5 :]
        if len(steady) < 2:
            return float("nan")
        blocks = min(_BLOCKS, len(steady) - 1)
        size = (len(steady) - 1) // blocks
        edges = steady[:: max(1, size)][: blocks + 1]
        return float(np.median(np.diff(edges)) / max(1, size))

    def time_to(self, metric: str, value: float) -> float:
        """Return the seconds until the first evaluation that reaches a value; NaN if none does.

        A metric with "loss" or "error" in its name is reached from above.

        Raises:
            ConfigurationError: the evaluations have no such metric.
        """
        return self._first("time", metric, value)

    def updates_to(self, metric: str, value: float) -> float:
        """Return the updates until the first evaluation that reaches a value, as for `time_to`."""
        return self._first("update", metric, value)

    def _first(self, column: str, metric: str, value: float) -> float:
        if metric in ("time", "update", "samples") or metric not in self.evaluated:
            known = [name for name in self.evaluated if name not in ("time", "update", "samples")]
            raise ConfigurationError(f"metric={metric!r}: this run was evaluated for {known or 'nothing'}")
        reached = [index for index, reading in enumerate(self.evaluated[metric]) if reaches(metric, reading, value)]
        return float(self.evaluated[column][reached[0]]) if reached else float("nan")

    # --- Files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, with_weights: bool = True) -> None:
        """Write the trace to a file of numpy arrays (``.npz``).

        Raises:
            ConfigurationError: the file cannot be written.
        """
        rest = {name: getattr(self, name) for name in _VALUES}
        arrays = {f"rows/{name}": column for name, column in self.rows.items()}
        for part in ("evaluated", "work", "steps"):
            arrays |= {f"{part}/{name}": column for name, column in getattr(self, part).items()}
        if with_weights:
            arrays |= {f"weights/{name}": weight for name, weight in self.weights.items()}
        try:
            with Path(path).open("wb") as file:
                np.savez_compressed(file, rest=np.array(json.dumps(rest, default=plain)), **arrays)  # type: ignore[arg-type]
        except OSError as error:
            raise ConfigurationError(
                f"path={str(path)!r}: {error.strerror}; pass a file that can be written"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace that `save` wrote.

        Raises:
            ConfigurationError: the file is missing, damaged or no trace.
        """
        parts: dict[str, Any] = {"rows": {}, "evaluated": {}, "weights": {}, "work": {}, "steps": {}}
        try:
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                rest = json.loads(str(arrays["rest"]))
                for name in arrays.files:
                    if name != "rest":
                        part, _, column = name.partition("/")
                        parts[part][column] = arrays[name]
            return cls(**parts, **rest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            raise ConfigurationError(f"{path}: not a trace ({error}); pass a file that Trace.save wrote") from error

    # --- A picture ---------------------------------------------------------------------------------------------------

    @property
    def time_axis(self) -> str:
        return "virtual time / s" if "cluster" in self.meta else "time / s"

    def plot(self, path: str | Path, title: str = "") -> None:
        """Draw the run as `plot_comparison` does.

        Args:
            path: the image file, in the format of its suffix.
            title: description of the run, in one line.

        Raises:
            ConfigurationError: matplotlib is missing, or the file cannot be written.
            ValueError: matplotlib does not write this format.
        """
        save_figure(figure_of(self, title), path)

    def _repr_png_(self) -> bytes | None:
        """Return the picture for notebooks, if matplotlib is installed."""
        return png_of(figure_of(self)) if can_draw() else None


def reaches(metric: str, reading: float, value: float) -> bool:
    return bool(reading <= value if "loss" in metric or "error" in metric else reading >= value)


def figure_of(trace: Trace, title: str = "") -> Any:
    name = trace.meta.get("name") or trace.meta.get("method", {}).get("name", "run")
    text = f"{trace.updates} updates in {trace.seconds:.4g} s{' of virtual time' * ('cluster' in trace.meta)}"
    return comparison_of({name: trace}, f"{text}; {title}" if title else text)


def _draw_pushes(figure: Any, histogram: Any, timeline: Any, trace: Trace) -> None:
    counts = trace.staleness_histogram()
    histogram.bar(range(len(counts)), counts, width=0.9, color=GREY)
    histogram.set(xlabel="staleness / updates", ylabel="pushes", title=f"mean staleness {trace.mean_staleness:.3g}")
    histogram.xaxis.get_major_locator().set_params(integer=True)
    shown = trace.rows["time"] <= trace.rows["time"][:_PUSHES].max(initial=0)
    times, groups, staleness = (trace.rows[name][shown] for name in ("time", "group", "staleness"))
    points = timeline.scatter(times, groups, s=5, c=staleness, cmap=QUANTITY)
    first = "" if shown.all() else f"the first {int(shown.sum())} "
    timeline.set(xlabel=trace.time_axis, ylabel="group", title=f"{first}pushes".capitalize())
    timeline.yaxis.get_major_locator().set_params(integer=True)
    if len(staleness):
        bar = figure.colorbar(points, ax=timeline, label="staleness / updates", aspect=30)
        bar.locator.set_params(integer=True)


def _metrics_of(traces: Iterable[Trace]) -> list[str]:
    names = dict.fromkeys(name for trace in traces for name in trace.evaluated)
    return [name for name in names if name not in ("time", "update", "samples")][:_MOST_METRICS]


_MOST_METRICS = 4
_PUSHES = 2000
_MANY_TIMES = 3


def plot_comparison(
    traces: Mapping[str, Trace], path: str | Path, title: str = "", target: tuple[str, float] | None = None
) -> None:
    """Draw several runs over time and updates: four metrics at most, and the training loss if none is ``"loss"``.

    Of one run, its staleness and pushes are drawn, too.

    Args:
        traces: the runs by name; a method's name sets the colour.
        path: the image file, in the format of its suffix.
        title: description of the comparison, in one line.
        target: name and value of a metric, drawn as a line.

    Raises:
        ConfigurationError: ``traces`` is empty, matplotlib is missing, or the file cannot be written.
        ValueError: matplotlib does not write this format.
    """
    if not traces:
        raise ConfigurationError("traces: there is nothing to draw; pass at least one")
    save_figure(comparison_of(traces, title, target), path)


def comparison_of(traces: Mapping[str, Trace], title: str = "", target: tuple[str, float] | None = None) -> Any:
    metrics = _metrics_of(traces.values())
    shown = metrics if "loss" in metrics else ["training loss", *metrics]
    rows = len(shown) + (len(traces) == 1)
    figure = new_figure(11, 1.4 + 3.2 * rows)
    counts = [len(trace.meta.get("groups", ())) for trace in traces.values()]
    styles = line_styles(method_colours(list(traces), counts))
    axis = next(iter(traces.values())).time_axis
    panels = figure.subplots(rows, 2, squeeze=False)
    for name, (over_time, over_updates) in zip(shown, panels, strict=False):
        over_updates.sharey(over_time)
        for axes, over, unit in ((over_time, "time", axis), (over_updates, "update", "updates")):
            for place, ((label, trace), style) in enumerate(zip(traces.items(), styles, strict=True)):
                course = _course(trace, name, over)
                every = max(1, len(course[0]) // 12)
                begin = every * place // len(styles)  # markers of coinciding curves stay apart
                axes.plot(*course, label=_label(label, trace), markevery=(begin, every), **style)
            if target is not None and target[0] == name:
                axes.axhline(target[1], color=GREY, linestyle=":", linewidth=1)
                axes.text(0.01, target[1], "target", transform=axes.get_yaxis_transform(), va="bottom", color=GREY)
            axes.set(xlabel=unit)
            axes.grid(color="0.92")
        _tell_apart(over_updates, traces.values())
        over_time.set_ylabel(name)
        _leave_out_divergence(over_time, traces.values(), name)
    if len(traces) == 1:
        _draw_pushes(figure, *panels[-1], *traces.values())
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), fontsize="small")
    if title:
        figure.suptitle("\n".join(textwrap.wrap(title, 120)), fontsize="medium")
    return figure


def _label(name: str, trace: Trace) -> str:
    groups, lr = len(trace.meta.get("groups", ())), trace.meta.get("lr")
    known = [counted(groups, "group")] if groups else []
    known += [f"lr {lr:.3g}"] if lr is not None else []
    return f"{name}  ({', '.join(known)})" if known else name


def _tell_apart(axes: Any, traces: Iterable[Trace]) -> None:
    updates = [trace.updates for trace in traces if trace.updates]
    if updates and max(updates) > _MANY_TIMES * min(updates):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")


def _leave_out_divergence(axes: Any, traces: Iterable[Trace], name: str) -> None:
    if "loss" not in name:
        return
    courses = [values[np.isfinite(values)] for values in (_course(trace, name, "time")[1] for trace in traces)]
    courses = [values for values in courses if len(values)]
    if courses:
        least = min(float(values.min()) for values in courses)
        top = 1.3 * max(float(values[0]) for values in courses)
        if max(float(values.max()) for values in courses) > top:
            axes.set_ylim(least - 0.05 * (top - least), top)


def _course(trace: Trace, name: str, over: str) -> tuple[Array, Array]:
    """Return a metric over ``"time"`` or ``"update"``; training losses are means over a hundredth of the pushes."""
    if name != "training loss":
        moments = trace.evaluated.get(over, np.empty(0))
        return moments, trace.evaluated.get(name, np.full(len(moments), np.nan))
    moments = trace.rows["time" if over == "time" else "write"]
    window = max(1, len(moments) // 100)
    count = len(moments) // window
    return moments[window - 1 :: window][:count], trace.rows["loss"][: count * window].reshape(count, window).mean(1)
