"""``lightning-omni simulate`` and ``lightning-omni compare``: runs in virtual time, a table and a picture."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from lightning_omni import simulator
from lightning_omni.cli.settings import Settings, Task
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import Method, method_named
from lightning_omni.topology import Topology
from lightning_omni.trace import Trace, plot_comparison

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_PICTURES = (".png", ".svg", ".pdf")
_WIDTH = 160
"""Columns of a table that goes into a file or a pipe."""
_SEPARATORS = re.compile(r"[\s;]+|,(?!\s*\w+\s*=)")
"""Between methods; a comma before ``name=`` stands between settings of one method."""


def simulate(method: str = "async_sgd", **settings: Any) -> int:
    """Simulates one method on a cluster: virtual time, real gradients. Writes a table, a picture and the trace.

    Args:
        method: Name, with settings after a colon, as in diloco:period=50,outer_lr=1.0; @2 behind it makes 2 groups.
        settings: See Settings.
    """
    return _run([method], Settings(**settings))


def compare(methods: str | list[str] = "async_sgd@1, hardsync, softsync:n=2, async_sgd", **settings: Any) -> int:
    """Simulates several methods on one cluster. Writes a table, one picture and the traces.

    Args:
        methods: Names as for simulate, separated by commas, semicolons or spaces; in YAML also a list. @1 behind a
            method makes one group of it, which is plain synchronous training.
        settings: See Settings.
    """
    entries = [methods] if isinstance(methods, str) else methods
    names = [name for entry in entries for name in _SEPARATORS.split(entry) if name]
    if not names:
        raise ConfigurationError("--methods: pass at least one, as in --methods async_sgd,hardsync")
    return _run(list(dict.fromkeys(names)), Settings(**settings), together=True)


@dataclass(frozen=True)
class Entrant:
    """A method with its groups.

    Args:
        name: as the user wrote it.
        method: what it means.
        topology: which rank is in which group.
    """

    name: str
    method: Method
    topology: Topology

    @classmethod
    def of(cls, name: str, devices: int, groups: int | None) -> Entrant:
        """The method of that name.

        Args:
            name: as in ``"softsync:n=2@8"``.
            devices: number of devices.
            groups: number of groups, unless the name says it; None for as many as devices.

        Raises:
            ConfigurationError: there is no such method, or it cannot work with that many groups.
        """
        text, _, own = name.partition("@")
        if own and not own.isdecimal():
            raise ConfigurationError(f"{name}: after @ stands the number of groups, as in {text}@4")
        method = method_named(text)
        try:
            topology = Topology.even(devices, int(own) if own else devices if groups is None else groups)
            method.check(len(topology.alive))
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}: {error}") from error
        return cls(name, method, topology)


@dataclass(frozen=True)
class Run:
    """A run that is over, the learning rate that was asked for, and the real seconds that it took."""

    entrant: Entrant
    trace: Trace
    lr: float | None
    real_seconds: float


def _run(names: Sequence[str], settings: Settings, together: bool = False) -> int:
    """All of a command. Returns the exit code."""
    if settings.picture and importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            "pictures need matplotlib; install it with: pip install 'lightning-omni[plot]', or pass --no-picture"
        )
    task = Task.of(settings)
    entrants = [Entrant.of(name, len(task.cluster.devices), settings.groups) for name in names]
    files = _Files(settings.out, "comparison" if together else _file_name(names[0]), together)
    files.make_folder()
    torch.set_num_threads(settings.threads)
    runs, code = _runs(entrants, task)
    for run in runs:
        run.trace.save(files.trace(run.entrant.name))
    if settings.picture and together:
        plot_comparison({run.entrant.name: run.trace for run in runs}, files.picture)
    elif settings.picture:
        runs[0].trace.plot(files.picture)
    _report(runs, task.target, files, settings.picture)
    return code


def _runs(entrants: Sequence[Entrant], task: Task) -> tuple[list[Run], int]:
    """One run after the other, with a bar for each; after Ctrl-C no more. Returns the runs and the exit code."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    runs: list[Run] = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        try:
            for entrant in entrants:
                tried: list[Run] = []
                for lr in task.optimizers:
                    tried.append(_run_one(entrant, lr, task, bars))
                    if tried[-1].trace.ended == "interrupted":
                        return [*runs, _best(tried, task.target)], INTERRUPTED
                runs.append(_best(tried, task.target))
        except KeyboardInterrupt:
            if not runs:
                raise
            return runs, INTERRUPTED
    return runs, 0


def _best(runs: Sequence[Run], target: tuple[str, float] | None) -> Run:
    """Of runs of one method, the one that reaches the target soonest, or else the one that ends at the lowest loss."""

    def merit(run: Run) -> tuple[float, float]:
        reached = run.trace.time_to(*target) if target is not None else math.nan
        losses = run.trace.evaluated.get("loss", run.trace.columns()["loss"])
        last = float(losses[-1]) if len(losses) else math.nan
        return (math.inf if math.isnan(reached) else reached, math.inf if math.isnan(last) else last)

    return min(runs, key=merit)


def _run_one(entrant: Entrant, lr: float | None, task: Task, bars: Progress) -> Run:
    name = entrant.name if len(task.optimizers) == 1 else f"{entrant.name} lr={lr:g}"
    bar = bars.add_task(name, total=1.0)

    def show(done: float, text: str) -> None:
        bars.update(bar, completed=done, description=f"{name}: {text}")

    began = time.perf_counter()
    trace = simulator.simulate(
        entrant.method,
        entrant.topology,
        task.cluster,
        task.workload.model,
        task.workload.data,
        optimizer=task.optimizers[lr],
        loss=task.workload.loss,
        target=task.target,
        progress=show,
        **task.options,
    )
    bars.update(bar, completed=1.0)
    meta = {**trace.meta, "name": entrant.name, "lr": lr}
    return Run(entrant, replace(trace, meta=meta), lr, time.perf_counter() - began)


# --- Results ---------------------------------------------------------------------------------------------------------


class _Files:
    """Where results go.

    Args:
        out: a folder, or the picture's file.
        stem: name of the picture in a folder, without suffix.
        together: whether several traces lie beside one picture.
    """

    def __init__(self, out: Path, stem: str, together: bool) -> None:
        names_picture = out.suffix.lower() in _PICTURES
        self.picture = out if names_picture else out / f"{stem}.png"
        self._prefix = f"{out.stem}-" if names_picture else ""
        self._together = together

    def make_folder(self) -> None:
        """Makes the folder, before anything is computed."""
        try:
            self.picture.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"--out: {str(self.picture.parent)!r}: {error.strerror}; pass a folder that can be written"
            ) from error

    def trace(self, name: str) -> Path:
        """The file for a run's trace."""
        if not self._together:
            return self.picture.with_name(f"{self.picture.stem}.npz")
        return self.picture.with_name(f"{self._prefix}{_file_name(name)}.npz")


def _file_name(method: str) -> str:
    return re.sub(r"[^\w.=@]+", "-", method)


def _report(runs: Sequence[Run], target: tuple[str, float] | None, files: _Files, picture: bool) -> None:
    """A table of the runs and the paths of the files, on standard output."""
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    rows = [_row(run, target) for run in runs]
    table = _table(rows)
    fits = console.measure(table, options=console.options.update(max_width=10 * _WIDTH)).maximum <= console.width
    console.print(table if fits else _tall_table(rows))
    for kind, path in (
        *((("picture", files.picture),) if picture else ()),
        *(("trace", files.trace(run.entrant.name)) for run in runs),
    ):
        console.print(Text(f"{kind}: {path}"), soft_wrap=True)


def _table(rows: Sequence[Mapping[str, str]]) -> Table:
    """One row for each run."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    table = Table()
    for head in heads:
        table.add_column(head, justify="left" if head in ("method", "ended") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(row.get(head, "-")) for head in heads))
    return table


def _tall_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """One column for each run, for narrow terminals."""
    first, *heads = dict.fromkeys(head for row in rows for head in row)
    table = Table()
    table.add_column(first, no_wrap=True)
    for row in rows:
        table.add_column(Text(row[first]), justify="right", overflow="fold")
    for head in heads:
        table.add_row(head, *(Text(row.get(head, "-")) for row in rows))
    return table


def _row(run: Run, target: tuple[str, float] | None) -> Mapping[str, str]:
    trace = run.trace
    known = ("time", "update", "samples")
    finals = {name: _number(column[-1]) for name, column in trace.evaluated.items() if name not in known}
    reached = {}
    if target is not None:
        name, value = target
        reached = {f"s to {name} {value:g}": _number(trace.time_to(name, value))}
    return {
        "method": run.entrant.name,
        "groups": str(len(run.entrant.topology.alive)),
        **({"lr": _number(run.lr)} if run.lr is not None else {}),
        "updates": str(trace.updates),
        "virtual s": _number(trace.seconds),
        "s/update": _number(trace.seconds_per_update),
        "staleness": _number(trace.mean_staleness),
        **finals,
        **reached,
        "ended": trace.ended.removeprefix("max_"),
        "real s": f"{run.real_seconds:.1f}",
    }


def _number(value: float) -> str:
    """Four digits; a dash for what there is not."""
    return "-" if math.isnan(value) else f"{value:.4g}"
