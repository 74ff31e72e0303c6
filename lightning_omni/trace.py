"""What happened in a run, push by push, and how good the model was on the way: numbers, questions, a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lightning_omni.errors import ConfigurationError

Array = np.ndarray[Any, Any]

_BLOCKS = 20


@dataclass(frozen=True, eq=False)
class Trace:
    """A run's pushes and evaluations.

    One row of `columns` is one push to the server; where groups talk to one another only, it is one local step. Its
    columns:

    - ``time``: when it arrived, in seconds;
    - ``group``: number of the group;
    - ``read``: clock of the weights that it was computed from;
    - ``write``: clock of the update that it went into (the last ones may not have been written);
    - ``staleness``: updates between its read and its arrival;
    - ``loss``: mean training loss of its batches;
    - ``samples``: in its batches;
    - ``epoch``: number of the epoch;
    - ``steps``: local steps, that is batches, in it.

    How long things took may be there, too, in the order in which a group's steps ended. One row of `steps` is one
    local step of a group: ``group``, ``time`` (its end), ``seconds`` (from the end of the one before; waiting for other
    groups between two epochs does not count) and ``exchange`` (of these, the seconds after its gradient was there). One
    row of `work` is one rank's part of one step: ``rank``, ``samples`` and ``seconds`` (its own forward and backward
    pass, without waiting).

    Args:
        rows: the columns.
        evaluated: ``time``, ``update`` and ``samples`` (trained so far) of each evaluation, and its figures by name.
        updates: updates in the run.
        seconds: length of the run.
        ended: why it ended: ``"max_updates"``, ``"max_epochs"``, ``"max_seconds"``, ``"target"``, ``"interrupted"``,
            or ``"lost: ..."`` or ``"diverged: ..."`` with the reason.
        meta: the run's settings as plain values.
        weights: the final weights by name.
        work: what each rank did; empty if nobody measured.
        steps: what each group did; empty if nobody measured.

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
    work: Mapping[str, Array] = field(default_factory=dict)
    steps: Mapping[str, Array] = field(default_factory=dict)

    def columns(self) -> dict[str, Array]:
        """The pushes, as ``pandas.DataFrame`` takes them."""
        return dict(self.rows)

    def evaluations(self) -> dict[str, Array]:
        """The evaluations, as ``pandas.DataFrame`` takes them."""
        return dict(self.evaluated)

    # --- Questions ---------------------------------------------------------------------------------------------------

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of all pushes, in updates; NaN if there were none."""
        staleness = self.rows["staleness"]
        return float(staleness.mean()) if len(staleness) else float("nan")

    def staleness_histogram(self) -> Array:
        """Number of pushes of staleness 0, 1, 2, ...: int64."""
        return np.bincount(self.rows["staleness"])

    @property
    def seconds_per_update(self) -> float:
        """Seconds between two updates in the steady part of the run; NaN if there are too few.

        The first fifth is left out, the rest cut into up to 20 blocks of equally many updates; this is the median of
        their means. (Updates often come in bursts, so a median of single intervals would mislead.)
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
        """Seconds until the first evaluation that reaches a value; NaN if none does.

        Args:
            metric: name of a figure; one with "loss" or "error" in its name is reached from above.
            value: what is to be reached.

        Raises:
            ConfigurationError: there is no such figure.
        """
        return self._first("time", metric, value)

    def updates_to(self, metric: str, value: float) -> float:
        """Updates until the first evaluation that reaches a value; NaN if none does. See `time_to`."""
        return self._first("update", metric, value)

    def _first(self, column: str, metric: str, value: float) -> float:
        if metric in ("time", "update", "samples") or metric not in self.evaluated:
            known = [name for name in self.evaluated if name not in ("time", "update", "samples")]
            raise ConfigurationError(f"metric={metric!r}: this run was evaluated for {known or 'nothing'}")
        reached = [index for index, figure in enumerate(self.evaluated[metric]) if reaches(metric, figure, value)]
        return float(self.evaluated[column][reached[0]]) if reached else float("nan")

    # --- Files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, with_weights: bool = True) -> None:
        """Writes the trace to a file of numpy arrays (``.npz``).

        Raises:
            ConfigurationError: the file cannot be written.
        """
        rest = {"updates": self.updates, "seconds": self.seconds, "ended": self.ended, "meta": self.meta}
        arrays = {f"rows/{name}": column for name, column in self.rows.items()}
        for part in ("evaluated", "work", "steps"):
            arrays |= {f"{part}/{name}": column for name, column in getattr(self, part).items()}
        if with_weights:
            arrays |= {f"weights/{name}": weight for name, weight in self.weights.items()}
        try:
            with Path(path).open("wb") as file:
                np.savez_compressed(file, rest=np.array(json.dumps(rest)), **arrays)  # type: ignore[arg-type]
        except OSError as error:
            raise ConfigurationError(
                f"path={str(path)!r}: {error.strerror}; pass a file that can be written"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Reads a trace that `save` wrote.

        Raises:
            ConfigurationError: the file is none.
        """
        parts: dict[str, dict[str, Array]] = {"rows": {}, "evaluated": {}, "weights": {}, "work": {}, "steps": {}}
        try:
            with np.load(path, allow_pickle=False) as arrays:
                rest = json.loads(str(arrays["rest"]))
                for name in arrays.files:
                    if name != "rest":
                        part, _, column = name.partition("/")
                        parts[part][column] = arrays[name]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigurationError(f"{path}: not a trace ({error}); pass a file that Trace.save wrote") from error
        rows, evaluated, weights = (parts[name] for name in ("rows", "evaluated", "weights"))
        return cls(rows, evaluated, weights=weights, work=parts["work"], steps=parts["steps"], **rest)

    # --- A picture ---------------------------------------------------------------------------------------------------

    def plot(self, path: str | Path) -> None:
        """Draws the run: loss and figures over time and over updates, staleness, and what the groups did when.

        Args:
            path: the image file; its suffix says which kind.

        Raises:
            ConfigurationError: matplotlib is missing.
        """
        figure_of(self).savefig(path, dpi=120)


def reaches(metric: str, figure: float, value: float) -> bool:
    """Whether a figure is as good as ``value``: at most that for a loss or an error, at least that for all else."""
    return bool(figure <= value if "loss" in metric or "error" in metric else figure >= value)


def figure_of(trace: Trace) -> Any:
    """The picture of a trace, as a matplotlib figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "pictures need matplotlib; install it with: pip install lightning-omni[plot]"
        ) from error
    figure = Figure(figsize=(11, 7), layout="constrained")
    (over_time, over_updates), (histogram, timeline) = figure.subplots(2, 2)
    _draw_course(over_time, trace, "time", "time", "seconds")
    _draw_course(over_updates, trace, "write", "update", "updates")
    counts = trace.staleness_histogram()
    histogram.bar(range(len(counts)), counts, width=1.0)
    histogram.set(xlabel="staleness / updates", ylabel="pushes", title=f"mean staleness {trace.mean_staleness:.3g}")
    shown = trace.rows["time"] <= trace.rows["time"][:2000].max(initial=0)
    timeline.scatter(trace.rows["time"][shown], trace.rows["group"][shown], s=4, c=trace.rows["staleness"][shown])
    timeline.set(xlabel="time / seconds", ylabel="group", title="pushes (colour: staleness)")
    figure.suptitle(f"{trace.updates} updates in {trace.seconds:.4g} s")
    return figure


def _draw_course(axes: Any, trace: Trace, row: str, evaluated: str, unit: str) -> None:
    loss = trace.rows["loss"]
    window = max(1, len(loss) // 100)
    count = len(loss) // window
    if count:
        smooth = loss[: count * window].reshape(count, window).mean(1)
        axes.plot(trace.rows[row][window - 1 :: window][:count], smooth, color="0.6", label="training loss")
    axes.set(xlabel=unit, ylabel="loss")
    figures = [name for name in trace.evaluated if name not in ("time", "update", "samples")]
    right = axes.twinx() if figures else axes
    for name in figures:
        right.plot(trace.evaluated[evaluated], trace.evaluated[name], marker=".", label=name)
    right.legend(loc="best", fontsize="small")


# --- A picture of several ---------------------------------------------------------------------------------------------

_MOST_FIGURES = 4


def plot_comparison(traces: Mapping[str, Trace], path: str | Path) -> None:
    """Draws several runs into one picture: each figure, or else the training loss, over time and over updates.

    Args:
        traces: the runs by name.
        path: the image file; its suffix says which kind.

    Raises:
        ConfigurationError: there is no run, matplotlib is missing, or the file cannot be written.
    """
    if not traces:
        raise ConfigurationError("traces: there is nothing to draw; pass at least one")
    try:
        comparison_of(traces).savefig(path, dpi=120)
    except OSError as error:
        raise ConfigurationError(f"path={str(path)!r}: {error.strerror}; pass a file that can be written") from error


def comparison_of(traces: Mapping[str, Trace]) -> Any:
    """The picture of several runs, as a matplotlib figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "pictures need matplotlib; install it with: pip install lightning-omni[plot]"
        ) from error
    names = dict.fromkeys(name for trace in traces.values() for name in trace.evaluated)
    figures = [name for name in names if name not in ("time", "update", "samples")][:_MOST_FIGURES]
    shown = figures if "loss" in figures else ["training loss", *figures]
    figure = Figure(figsize=(11, 1 + 3.2 * len(shown)), layout="constrained")
    for name, (over_time, over_updates) in zip(shown, figure.subplots(len(shown), 2, squeeze=False), strict=True):
        for label, trace in traces.items():
            over_time.plot(*_course(trace, name, "time"), marker=".", markersize=4, linewidth=1, label=label)
            over_updates.plot(*_course(trace, name, "update"), marker=".", markersize=4, linewidth=1, label=label)
        over_time.set(xlabel="time / seconds", ylabel=name)
        over_updates.set(xlabel="updates", ylabel=name)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(labels)), fontsize="small")
    return figure


def _course(trace: Trace, name: str, over: str) -> tuple[Array, Array]:
    """A figure over ``"time"`` or ``"update"``; the training loss is averaged over a hundredth of the pushes."""
    if name != "training loss":
        moments = trace.evaluated.get(over, np.empty(0))
        return moments, trace.evaluated.get(name, np.full(len(moments), np.nan))
    moments = trace.rows["time" if over == "time" else "write"]
    window = max(1, len(moments) // 100)
    count = len(moments) // window
    return moments[window - 1 :: window][:count], trace.rows["loss"][: count * window].reshape(count, window).mean(1)
