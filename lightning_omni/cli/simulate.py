"""The runs of ``simulate``: their methods, learning rates, and output."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lightning_omni import simulator
from lightning_omni.checks import counted
from lightning_omni.cli.console import (
    INTERRUPTED,
    check_file,
    make_folder,
    print_line,
    print_sentence,
    show_table,
)
from lightning_omni.cli.simulate_settings import SimulationSettings
from lightning_omni.cli.simulate_task import Task
from lightning_omni.cli.units import flag
from lightning_omni.combinations import refuse_pairs
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import AsyncSGD, Method, method_named
from lightning_omni.palette import check_can_draw
from lightning_omni.simulator import StopSimulation
from lightning_omni.simulator.settings import progress_bar
from lightning_omni.topology import Topology
from lightning_omni.trace import Trace, plot_comparison

# --- The learning rate that suits a method ----------------------------------------------------------------------------

# The search applies successive halving to a grid around the workload's own rate: a tenth of the run separates rates
# that differ by a factor of four, a third of it those that differ by two. The caller runs the winner in full.

COARSE, FINE = 4.0, 2.0
"""Factors between neighbours of the two grids."""
FIRST, SECOND = 0.1, 1 / 3
"""Fractions of a run that the two rounds take."""
_REACH = 2
"""Steps of the coarse grid to either side, and largest number of further steps while the best is at an end."""
_EQUAL = 0.05
"""Largest relative difference of results that count as equal."""

Try = Callable[[float, float], Trace]
"""Function from a learning rate and a fraction of the run to the trace of that part."""


def best_rate(own: float, attempt: Try, target: tuple[str, float] | None) -> tuple[float, list[float]]:
    """Return the rate of the best ``attempt`` around the workload's ``own``, and all rates tried."""
    first = {
        factor: merit(attempt(own * factor, FIRST), target)
        for factor in (COARSE**power for power in range(-_REACH, _REACH + 1))
    }
    for _ in range(_REACH):
        best = min(_equally_good(first))
        if best not in (min(first), max(first)):
            break
        beyond = best * COARSE if best == max(first) else best / COARSE
        first[beyond] = merit(attempt(own * beyond, FIRST), target)
    # If the rate makes no difference, the runs were too short for the method: its first exchange was not reached.
    best = 1.0 if len(_equally_good(first)) == len(first) else min(_equally_good(first))
    second = {factor: merit(attempt(own * factor, SECOND), target) for factor in (best / FINE, best, best * FINE)}
    tried = sorted({*first, *second})
    return own * min(_equally_good(second)), [own * factor for factor in tried]


def _equally_good(merits: dict[float, tuple[float, float]]) -> list[float]:
    """Return the best factors, of which the smallest is to be taken: nearly too large ones suffer in longer runs."""
    seconds, loss = min(merits.values())
    if math.isfinite(seconds):
        return [factor for factor, each in merits.items() if each[0] <= (1 + _EQUAL) * seconds]
    return [factor for factor, each in merits.items() if each[1] <= loss + _EQUAL * abs(loss)]


def merit(trace: Trace, target: tuple[str, float] | None) -> tuple[float, float]:
    """Return a run's quality, less is better: seconds to the target, then the loss in the last third."""
    reached = trace.time_to(*target) if target is not None else math.nan
    losses = trace.evaluated.get("loss", trace.rows["loss"])
    last = float(np.mean(losses[-max(1, len(losses) // 3) :])) if len(losses) else math.nan
    return (math.inf if math.isnan(reached) else reached, math.inf if math.isnan(last) else last)


# --- Runs -------------------------------------------------------------------------------------------------------------

_PICTURES = (".png", ".svg", ".pdf")
_UNTITLED = ("devices", "workload", "batch_size", "groups", "lr", "out", "picture", "threads")
"""The settings that the title of a picture states otherwise, or not at all."""

OnProgress = Callable[[float, str], None]


@dataclass(frozen=True)
class Entrant:
    """A method with its groups; ``name`` is the user's text."""

    name: str
    method: Method
    topology: Topology

    @classmethod
    def of(cls, name: str, devices: int, groups: int | None) -> Entrant:
        """Parse a method, as in ``"softsync:n=2@8"``; by default with ``groups``, or as many as devices."""
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

    @property
    def waits(self) -> bool:
        return len(self.topology.alive) > 1 and not isinstance(self.method, AsyncSGD)


@dataclass(frozen=True)
class Run:
    """A run; ``lr`` is the best rate of the search, or the workload's; None if the optimizer has none."""

    entrant: Entrant
    trace: Trace
    lr: float | None
    real_seconds: float
    tried: tuple[float, ...] = ()


def run(names: Sequence[str], settings: SimulationSettings, together: bool = False) -> int:
    """Run the command; ``together`` in one picture, with a learning rate found for each method if none is given."""
    if settings.picture:
        check_can_draw(remedy=", or pass --no-picture")
    task = Task.of(settings)
    entrants = [Entrant.of(name, len(task.cluster.devices), settings.groups) for name in names]
    if settings.overlap and not (together and any(not entrant.waits for entrant in entrants)):
        refuse_pairs(entrants[0].method, {"overlap": "--overlap"})
    given = {"merged": f"--merged {settings.merged}"} if settings.merged is not None else {}
    for entrant in entrants:
        refuse_pairs(entrant.method, {**given, **task.options["compression"].features})
    files = _Files(settings.out, "comparison" if together else _file_name(names[0]), together)
    files.check([entrant.name for entrant in entrants], settings.picture)
    torch.set_num_threads(settings.threads)
    runs, code = _runs(entrants, task, files, finds_rates=together and not task.rates)
    _report(runs, task, together)
    for sentence in _without_effect(entrants, settings):
        print_sentence(sentence)
    if settings.picture and together:
        traces = {each.entrant.name: each.trace for each in runs}
        plot_comparison(traces, files.picture, _title(settings), task.target)
    elif settings.picture:
        runs[0].trace.plot(files.picture, _title(settings))
    if settings.picture:
        print_line(f"picture: {files.picture}")
    for each in runs:
        print_line(f"trace: {files.trace(each.entrant.name)}")
    return code


def _runs(entrants: Sequence[Entrant], task: Task, files: _Files, finds_rates: bool) -> tuple[list[Run], int]:
    runs: list[Run] = []
    with progress_bar() as shown:
        try:
            for place, entrant in enumerate(entrants):

                def show_progress(done: float, text: str, place: int = place, name: str = entrant.name) -> None:
                    shown((place + done) / len(entrants), f"{name}: {text}")

                runs.append(_run_method(entrant, task, finds_rates, show_progress))
                runs[-1].trace.save(files.trace(entrant.name))  # an error of the next one must not lose it
                if runs[-1].trace.ended == "interrupted":
                    return runs, INTERRUPTED
        except KeyboardInterrupt:
            if not runs:
                raise
            return runs, INTERRUPTED
    return runs, 0


def _run_method(entrant: Entrant, task: Task, finds_rates: bool, progress: OnProgress) -> Run:
    own = task.own_rate
    if finds_rates and own is not None:
        began = time.perf_counter()
        lr, tried = best_rate(own, lambda rate, part: _run_part(entrant, rate, part, task, progress), task.target)
        found = _run_whole(entrant, lr, task, progress)
        return replace(found, tried=tuple(tried), real_seconds=time.perf_counter() - began)
    runs: list[Run] = []
    for rate in task.rates or (None,):
        runs.append(_run_whole(entrant, rate, task, progress))
        if runs[-1].trace.ended == "interrupted":
            return runs[-1]  # it must not be compared with whole ones
    return replace(min(runs, key=lambda each: merit(each.trace, task.target)), tried=task.rates)


def _run_whole(entrant: Entrant, rate: float | None, task: Task, progress: OnProgress) -> Run:
    lr = task.own_rate if rate is None else rate
    began = time.perf_counter()
    trace = _simulated(entrant, rate, task, lambda done, text: progress(done, f"{_at(lr)}{text}"))
    progress(1.0, "done")
    return Run(
        entrant, replace(trace, meta={**trace.meta, "name": entrant.name, "lr": lr}), lr, time.perf_counter() - began
    )


def _run_part(entrant: Entrant, rate: float, part: float, task: Task, progress: OnProgress) -> Trace:

    def until(done: float, text: str) -> None:
        progress(0.0, f"{_at(rate)}for {part:.0%} of the run")
        if done >= part:
            raise StopSimulation

    trace = _simulated(entrant, rate, task, until)
    if trace.ended == "interrupted":
        raise KeyboardInterrupt  # an interrupted run must not be compared with others
    return trace


def _simulated(entrant: Entrant, rate: float | None, task: Task, progress: OnProgress) -> Trace:
    return simulator.simulate(
        entrant.method,
        entrant.topology,
        task.cluster,
        replace(task.workload, optimizer=task.optimizer(rate)),
        progress=progress,
        **{**task.options, "overlap": task.options["overlap"] and isinstance(entrant.method, AsyncSGD)},
    )


def _at(rate: float | None) -> str:
    return "" if rate is None else f"lr {rate:.3g}, "


# --- Results ---------------------------------------------------------------------------------------------------------


class _Files:
    """The files for results in ``out``, a folder or the picture's file."""

    def __init__(self, out: Path, stem: str, together: bool) -> None:
        names_picture = out.suffix.lower() in _PICTURES
        self.picture = out if names_picture else out / f"{stem}.png"
        self._prefix = f"{out.stem}-" if names_picture else ""
        self._together = together

    def check(self, names: Sequence[str], draws: bool) -> None:
        make_folder("--out", self.picture.parent)
        for path in (*([self.picture] if draws else []), *map(self.trace, names)):
            check_file("--out", path)

    def trace(self, name: str) -> Path:
        if not self._together:
            return self.picture.with_name(f"{self.picture.stem}.npz")
        return self.picture.with_name(f"{self._prefix}{_file_name(name)}.npz")


def _file_name(method: str) -> str:
    return re.sub(r"[^\w.=@]+", "-", method)


def _title(settings: SimulationSettings) -> str:
    usual = asdict(SimulationSettings())
    changed = {name: value for name, value in asdict(settings).items() if value != usual[name]}
    given = [f"{name.replace('_', ' ')} {value}" for name, value in changed.items() if name not in _UNTITLED]
    workload = f"{settings.workload.rpartition('/')[2]}, batches of {settings.batch_size} a device"
    return "; ".join([counted(settings.devices, "device"), workload, *given])


def _report(runs: Sequence[Run], task: Task, together: bool) -> None:
    show_table([_row(each, task.target) for each in runs], left=("method", "ended"))
    if together:
        print_sentence(_of_rates(runs, task))
        if waiting := [each.entrant.name for each in runs if task.options["overlap"] and each.entrant.waits]:
            without = ", ".join(waiting)
            print_sentence(f"--overlap is for async_sgd: {without} ran without")


_INSIDE = ("rebalance", "all_reduce")
_BETWEEN = (
    "compression", "overlap", "servers", "server_bandwidth", "update_seconds", "merged", "head_seconds_per_sample",
)  # fmt: skip


def _without_effect(entrants: Sequence[Entrant], settings: SimulationSettings) -> Iterator[str]:
    topologies = [each.topology for each in entrants]
    alone = all(len(members) == 1 for each in topologies for members in each.groups)
    synchronous = all(each.is_synchronous for each in topologies)
    for is_unused, names, why in (
        (alone, _INSIDE, "every group is one device; pass fewer --groups"),
        (synchronous, _BETWEEN, "one group exchanges with no server; pass more --groups"),
    ):
        given = [flag(name) for name in names if getattr(settings, name) != getattr(SimulationSettings, name)]
        if is_unused and given:
            yield f"without effect: {' and '.join(given)}, because {why}"


def _of_rates(runs: Sequence[Run], task: Task) -> str:
    momentum = task.workload.optimizer(task.workload.model.parameters()).param_groups[0].get("momentum")
    shared = momentum if task.momentum is None else task.momentum
    rest = f"; all have momentum {shared:g}, which suits fewer groups better than many" if shared else ""
    if len(task.rates) == 1:
        return (
            f"all methods share the learning rate {task.rates[0]:g}, which flatters those that it happens to suit;"
            f" leave --lr out, and each gets its own best{rest}"
        )
    if task.rates:
        return f"each method is shown with the best of {_listed(task.rates)}, whole runs of each{rest}"
    tried = sorted({rate for each in runs for rate in each.tried})
    if not tried:
        return f"the workload's optimizer has no learning rate to vary: all methods share what it has{rest}"
    return (
        f"each method has its own best learning rate of {_listed([tried[0], tried[-1]], ' to ')}, found by runs of"
        f" {FIRST:.0%} and {SECOND:.0%} of the length{rest}"
    )


def _listed(rates: Sequence[float], between: str = ", ") -> str:
    return between.join(f"{rate:.3g}" for rate in rates)


def _row(run: Run, target: tuple[str, float] | None) -> Mapping[str, str]:
    trace = run.trace
    known = ("time", "update", "samples")
    finals = {name: _number(column[-1]) for name, column in trace.evaluated.items() if name not in known}
    reached = {}
    if target is not None:
        name, value = target
        reached = {
            f"s to {name} {value:g}": _number(trace.time_to(name, value) if name in trace.evaluated else math.nan)
        }
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
    return "-" if math.isnan(value) else f"{value:.4g}"
