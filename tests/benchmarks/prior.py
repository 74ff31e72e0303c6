"""What staleness and local steps cost in samples: measured in the simulator, for the prior of the search.

    OMP_NUM_THREADS=1 python tests/benchmarks/prior.py --cache runs.jsonl --minutes 50  # measures what is missing
    OMP_NUM_THREADS=1 python tests/benchmarks/prior.py --cache runs.jsonl --write       # writes search/prior.json
    OMP_NUM_THREADS=1 python tests/benchmarks/prior.py --cache runs.jsonl --table       # prints it, beside theory
    OMP_NUM_THREADS=1 python tests/benchmarks/prior.py --cache tests/benchmarks/prior-runs.jsonl.xz --beside
    OMP_NUM_THREADS=1 python tests/benchmarks/prior.py --all-reduce                     # measures these formats anew
    OMP_NUM_THREADS=1 python tests/benchmarks/prior.py --streaming                      # likewise, fragments
    OMP_NUM_THREADS=1 python tests/benchmarks/prior.py --widths                         # PowerSGD in wider layers
    OMP_NUM_THREADS=1 python tests/benchmarks/prior.py --check                          # rows, on all tasks

Tasks are those to develop on (`tasks.DEVELOPING`) and no others, step times those of `tasks.PRIOR_CLUSTERS`; links
take no time. A run trains one method with one number of groups and local steps, and all momenta and steps of a grid
at once, on the same batches in the same order of events (`stacked.py`). The target is the held-out loss that the task's
own synchronous setting has after `PLANNED` updates (or ``--updates``) with the same order of the data. For the user's
own setting is then taken the one of the same grid that comes there with the fewest samples in one group, so that all
are chosen in one way, and with one target. A copy that is not there when the best one's samples times
`stacked.PATIENCE` are trained counts as a little worse than that.

What all-reduce formats cost is measured in one group with the task's own setting, with three orders of the data, for
either kind of optimizer by all of its tasks. What PowerSGD costs goes by its rank, not by how much of a gradient that
is: see `--widths`, which trains some of the tasks with layers of other widths.

What fragments cost that travel while groups train on is measured with the task's own target, with all tasks, and with
the momentum and step that whole averages suggest: nothing is chosen by it. It is the median over tasks.

What a setting costs is said by tasks that had no part in choosing it: of each task the costs count of the setting that
is best for all others. The momentum and step that are suggested are the best for all of them.

``--beside`` prints the rows that follow from the runs of a file beside those of the package's table. Files in the tree
have all tasks to develop on and one order of the data: `prior-runs.jsonl.xz` has the runs of the table, and
`prior-runs-250.jsonl.xz` those to the loss after 250 updates (``--updates 250``). A run takes 2 to 5 s of a core that
nothing else uses, and some need Fashion-MNIST. A file ``.xz`` is read, and not added to.

``--check`` trains all tasks to develop on with what the table suggests, to each task's own target, which is twice as
far, and prints what that costs beside what the table says.

Where several groups needed fewer samples than one they count as equal: an average of weights smooths what is evaluated,
and a user who wants that has it without groups.

The step of a setting is how far each sample moves the weights: lr g / (1 - m) where the server steps for every group's
gradient, lr / (1 - m) where groups step for themselves; of AdamW lr √g and lr.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import cache, cached_property, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stacked import PATIENCE, StackedRun
from tasks import DEVELOPING, PRIOR_CLUSTERS, RANKS, Outcome, Subject, Task
from torch import nn

from lightning_omni import Compression
from lightning_omni.methods import Method, method_named, with_period
from lightning_omni.simulator import Cluster
from lightning_omni.tuning.callback.hyperparameters import explicit_for
from lightning_omni.tuning.model.setting import Scaling, Setting
from lightning_omni.tuning.search.prior import STREAMING, Prior, PriorRow, PriorTheory, Steepness
from lightning_omni.tuning.search.space import DEFAULT_ALL_REDUCES, DEFAULT_METHODS
from lightning_omni.wire.all_reduce import PowerSGD, all_reduce_of

STREAMED = DEFAULT_METHODS[-1]
FILE = Path(__file__).resolve().parents[2] / "lightning_omni" / "tuning" / "search" / "prior.json"
EVERY = 8
"""Batches of all ranks between two evaluations."""
PLANNED = 120
"""Updates of the user's own synchronous run: the held-out loss that it has by then is what the others have to reach."""
MOST = 2.0
"""Times as many after which a run ends in any case."""
LONGEST = 2.5
"""Times a task's own updates, likewise, where its own target is to be reached."""
CENSORED = 0.2
"""Added to the logarithm of the samples after which a copy was given up."""
SGD_MOMENTA = (0.0, 0.3, 0.6, 0.9)
ADAM_MOMENTA = (0.0, 0.5, 0.9)
STEPS = (-1, 0, 1, 2)
OUTER_STEPS = (-3, -2, -1, 0, 1)
"""Factors of √3; an outer momentum of 0.9 asks for smaller steps."""
SYNCHRONOUS = "synchronous"
GROUPS, PERIODS = (2, 4, 8), (2, 8, 32)
"""Of the table."""
STREAMED_PERIODS = (4, 8, 16, 32)
"""Of averages in fragments, which are four."""
MEASURED_ALL_REDUCES = (*DEFAULT_ALL_REDUCES, "powersgd:16", "powersgd:8", "powersgd:4")
"""Those that a search tries, and others that users name."""
ORDERS = 3
"""Of the data, with each of which all-reduce formats are measured."""
WIDENED = ("fashion", "powerlaw", "teacher", "characters_sgd", "characters", "fashion_adamw", "fraud")
"""Tasks of perceptrons, which are trained with other widths, too."""
WIDTHS, THIN = (64, 256, 1024), (1, 2, 4, 8, 16)
"""Of hidden layers, and ranks of PowerSGD."""
CHECKED = (("async_sgd", 1), ("elastic_averaging", 1))
"""Methods and local steps of the rows that are checked."""
QUARTILES = 1.35
"""Standard deviations of a normal distribution between its quartiles."""
ESTIMATED = 0.15
"""Added to the standard deviation, in squares, of a row that follows from others, and half of what it costs more."""


# --- What is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One method with so many groups and local steps.

    Args:
        method: its name; `SYNCHRONOUS` for one group.
        groups: how many.
        period: local steps between two exchanges.
        times: of the prior's clusters.
        variant: ``"wire"`` for int8 pushes and bfloat16 answers, if they may be rounded, ``"overlap"`` for exchanges
            that travel meanwhile.
    """

    method: str
    groups: int
    period: int = 1
    times: str = "nearly equal"
    variant: str = ""

    @property
    def made(self) -> Method:
        """The method."""
        if self.method in (SYNCHRONOUS, "async_sgd"):
            return method_named("async_sgd")
        if self.method == "softsync":
            return method_named(f"softsync:n={max(1, self.groups // 2)}")
        return method_named(f"{self.method}:period={self.period}")

    @property
    def options(self) -> dict[str, Any]:
        """Of the simulation."""
        if self.variant == "wire":
            return {"compression": "int8" if self.made.pushes_weights else Compression(push="int8", pull="bf16")}
        return {"overlap": True} if self.variant == "overlap" else {}

    @property
    def steps(self) -> tuple[int, ...]:
        """Of the grid: factors of √3."""
        return OUTER_STEPS if self.method in ("diloco", "async_diloco") else STEPS

    def lr(self, momentum: float, step: float, is_adaptive: bool) -> float:
        """The learning rate of a step, where the user's own step is 1 for a rate of 1."""
        groups = self.groups if self.made.steps_at == "server" else 1
        return Scaling(is_adaptive).lr(groups, momentum, step)


REFERENCE = Cell(SYNCHRONOUS, 1)


def cells() -> Iterator[Cell]:
    """What is measured, the most important first."""
    yield REFERENCE
    scattered, even = "exponential", "nearly equal"
    local = {"local_sgd": even, "elastic_averaging": scattered, "diloco": even, "async_diloco": scattered}
    yield Cell("async_sgd", 4, 1, scattered)
    yield from (Cell(method, 4, 8, local[method]) for method in ("local_sgd", "elastic_averaging"))
    yield from (Cell("async_sgd", groups, 1, times) for groups, times in ((4, even), (8, scattered)))
    yield from (Cell(method, 4, 32, local[method]) for method in ("local_sgd", "elastic_averaging"))
    yield Cell("elastic_averaging", 4, 1, scattered)
    yield from (Cell("async_sgd", groups, 1, times) for groups, times in ((2, scattered), (8, even), (2, even)))
    yield from (Cell("async_sgd", 4, 1, scattered, variant) for variant in ("wire", "overlap"))
    for groups, period in ((8, 8), (4, 2), (2, 8), (8, 2), (2, 2), (8, 32), (2, 32)):
        yield from (Cell(method, groups, period, local[method]) for method in ("local_sgd", "elastic_averaging"))
    yield from (Cell("elastic_averaging", groups, 1, scattered) for groups in (8, 2))
    yield from (Cell("elastic_averaging", groups, period, even) for groups in (4, 8, 2) for period in (8, 2, 1))
    yield Cell("local_sgd", 4, 8, even, "wire")
    for groups, period in ((4, 8), (8, 8), (2, 8), (4, 32)):
        yield from (Cell(method, groups, period, local[method]) for method in ("diloco", "async_diloco"))


@dataclass(frozen=True)
class Measured:
    """Samples to the target of every setting of a grid, in one cell with one task.

    Attributes:
        cell: method, groups, local steps, step times.
        task: its name.
        seed: of the order of the data.
        target: held-out loss.
        settings: momentum and relative step of each.
        samples: to the target; infinite for one that was not there in time, or diverged.
        trained: samples that were trained in all.
        scatter: coefficient of variation of a group's step times.
        seconds: that the run took here.
        updates: of the user's own synchronous run, after which the held-out loss is the target.
    """

    cell: Cell
    task: str
    seed: int
    target: float
    settings: tuple[tuple[float, float], ...]
    samples: tuple[float, ...]
    trained: float
    scatter: float
    seconds: float
    updates: int = PLANNED

    @cached_property
    def by_setting(self) -> dict[tuple[float, float], float]:
        """Samples by momentum and step; what was given up, a little more than the samples that it had."""
        fewest = PATIENCE * self.updates * DEVELOPING[self.task].batch  # should all copies have diverged
        given_up = max(self.trained, fewest) * math.exp(CENSORED)
        return {
            (momentum, step): samples if math.isfinite(samples) else given_up
            for (momentum, step), samples in zip(self.settings, self.samples, strict=True)
        }


def measure(cell: Cell, task: Task, seed: int, target: float | None, updates: int = PLANNED) -> Measured:
    """One run.

    Args:
        cell: method, groups, local steps, step times.
        task: what is trained.
        seed: of the order of the data.
        target: held-out loss; None for the synchronous run, which sets it.
        updates: of that run, until it has set it.
    """
    began = time.process_time()
    own = task.own_lr if task.is_adaptive else task.own_lr / (1 - task.momentum)
    momenta = ADAM_MOMENTA if task.is_adaptive else SGD_MOMENTA
    settings = [(momentum, round(3 ** (step / 2), 4)) for momentum, step in product(momenta, cell.steps)]
    rates = [(m, own * cell.lr(m, step, task.is_adaptive)) for m, step in settings]
    run = StackedRun(task, rates, -math.inf if target is None else target)
    trace = task.simulate(
        run,
        PRIOR_CLUSTERS[cell.times],
        cell.made,
        cell.groups,
        target=("open_loss", 0.5),
        most=updates * (PATIENCE if target is None else MOST),
        every=EVERY,
        seed=seed,
        **cell.options,
    )
    trained = trace.evaluated["samples"]
    if target is None:
        losses = run.smooth[:, settings.index((task.momentum, 1.0))]
        target = float(np.interp(updates * task.batch, trained, losses))
    busy = trace.steps["seconds"] - trace.steps["exchange"]
    return Measured(
        cell=cell,
        task=task.name,
        seed=seed,
        target=target,
        settings=tuple(settings),
        samples=tuple(run.samples(trained, target)),
        trained=float(trained[-1]),
        scatter=float(np.std(busy) / np.mean(busy)),
        seconds=time.process_time() - began,
        updates=updates,
    )


class Runs:
    """Runs that were made, in a file of one line each.

    Args:
        path: of the file, which may be compressed by xz.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[tuple[Cell, str, int], Measured] = {}
        data = path.read_bytes() if path.is_file() else b""
        for line in (lzma.decompress(data) if path.suffix == ".xz" else data).decode().splitlines():
            plain = json.loads(line)
            cell = Cell(**plain.pop("cell"))
            plain["settings"] = tuple((momentum, step) for momentum, step in plain["settings"])
            plain["samples"] = tuple(math.inf if each is None else each for each in plain["samples"])
            self._keep(Measured(cell=cell, **plain))

    def _keep(self, found: Measured) -> None:
        self.known[found.cell, found.task, found.seed] = found

    def add(self, found: Measured) -> None:
        """Keeps a run."""
        self._keep(found)
        plain = asdict(found)
        plain["samples"] = [each if math.isfinite(each) else None for each in found.samples]
        with self.path.open("a") as file:
            file.write(json.dumps(plain) + "\n")


# --- What is learnt from it ------------------------------------------------------------------------------------------

Surface = dict[tuple[float, int], float]
"""Logarithm of samples by momentum and step, in factors of √3 of the user's own."""


class Costs:
    """Logarithms of samples relative to the best synchronous setting, of all tasks with one kind of optimizer.

    Args:
        runs: that were made.
        is_adaptive: whether the optimizer is AdamW.
    """

    def __init__(self, runs: Runs, is_adaptive: bool) -> None:
        self.is_adaptive = is_adaptive
        self._by_cell: dict[Cell, dict[str, list[Measured]]] = {}
        for (cell, name, _), found in runs.known.items():
            if DEVELOPING[name].is_adaptive == is_adaptive and (REFERENCE, name, found.seed) in runs.known:
                self._by_cell.setdefault(cell, {}).setdefault(name, []).append(found)
        synchronous = {name: _mean_surface(found) for name, found in self._by_cell.get(REFERENCE, {}).items()}
        self.own = {name: min(each, key=each.__getitem__) for name, each in synchronous.items()}
        """Momentum and step of the best synchronous setting, which is taken for the user's own, by task."""
        self._least = {name: each[self.own[name]] for name, each in synchronous.items()}

    @property
    def cells(self) -> list[Cell]:
        """That were measured, without the synchronous one."""
        return [cell for cell in self._by_cell if cell != REFERENCE]

    def runs(self, cell: Cell) -> list[Measured]:
        """All of a cell."""
        return [run for runs in self._by_cell.get(cell, {}).values() for run in runs]

    def surfaces(self, cell: Cell) -> dict[str, Surface]:
        """By task, with steps relative to the user's own."""
        return {
            name: {
                (momentum, step - self.own[name][1]): cost - self._least[name]
                for (momentum, step), cost in _mean_surface(found).items()
            }
            for name, found in self._by_cell.get(cell, {}).items()
        }

    def mean(self, cell: Cell) -> Surface:
        """Over tasks, at settings that all of them have."""
        surfaces = list(self.surfaces(cell).values())
        return _over_tasks(surfaces, surfaces)

    def row(self, cell: Cell, pooled: float) -> PriorRow:
        """The best setting of a cell, and what a task pays that had no part in choosing it."""
        mean, runs = self.mean(cell), self.runs(cell)
        best = min(mean, key=mean.__getitem__)
        each = self.unseen(cell)
        cost = statistics.mean(each)
        # A few tasks say little of the scatter over tasks: that of all cells counts as two tasks more.
        squares = sum((one - cost) ** 2 for one in each) + 2 * pooled**2
        variance = squares / (len(each) + 1) * (1 + 1 / len(each))
        return PriorRow(
            method=cell.method,
            is_adaptive=self.is_adaptive,
            groups=cell.groups,
            period=cell.period,
            times=cell.times,
            scatter=round(statistics.mean(run.scatter for run in runs), 3),
            momentum=best[0],
            step=round(3 ** (_vertex(mean, best) / 2), 3),
            log_cost=max(0.0, round(cost, 3)),
            deviation=round(math.sqrt(variance), 3),
            tasks=len(each),
            seeds=len(runs) // len(each),
        )

    def unseen(self, cell: Cell) -> list[float]:
        """Of each task what the setting costs it that is best for all others; for a single task, the best.

        The least of many noisy costs is less than what it would be once more: a setting that was chosen with a task
        says too little of what one costs that is new.
        """
        surfaces, found = list(self.surfaces(cell).values()), []
        for number, surface in enumerate(surfaces):
            mean = _over_tasks(surfaces[:number] + surfaces[number + 1 :] or surfaces, surfaces)
            found.append(surface[min(mean, key=mean.__getitem__)])
        return found

    def pooled(self) -> float:
        """Standard deviation over tasks of what settings cost that were chosen without them, over all cells."""
        squares, freedom = 0.0, 0
        for cell in self.cells:
            each = self.unseen(cell)
            squares += sum((cost - statistics.mean(each)) ** 2 for cost in each)
            freedom += len(each) - 1
        return math.sqrt(squares / freedom) if freedom else 0.15

    def steepness(self) -> Steepness:
        """Medians over cells of what it costs to stay with another momentum, or another step."""
        found: dict[str, list[float]] = defaultdict(list)
        for cell in self.cells:
            mean = self.mean(cell)
            best = min(mean, key=mean.__getitem__)
            for momentum in {each for each, _ in mean} - {best[0]}:
                least = min(cost for (each, _), cost in mean.items() if each == momentum)
                side = "momentum_below" if momentum < best[0] else "momentum_above"
                found[side].append((least - mean[best]) / (momentum - best[0]) ** 2)
            for (momentum, step), cost in mean.items():
                if momentum == best[0] and abs(step - best[1]) == 1:
                    side = "step_below" if step < best[1] else "step_above"
                    found[side].append((cost - mean[best]) / (math.log(3) / 2) ** 2)
        return Steepness(**{side: round(statistics.median(each), 3) for side, each in found.items()})

    def variant(self, name: str) -> list[float]:
        """What a wire format or overlap costs at the best setting without it, by cell and task."""
        found = []
        for cell in self.cells:
            plain = replace(cell, variant="")
            if cell.variant != name or plain not in self._by_cell:
                continue
            mean, with_it, without = self.mean(plain), self.surfaces(cell), self.surfaces(plain)
            best = min(mean, key=mean.__getitem__)
            found += [with_it[task][best] - without[task][best] for task in with_it if task in without]
        return found


def _mean_surface(found: Sequence[Measured]) -> Surface:
    """Logarithms of samples, over orders of the data."""
    return {
        (momentum, round(2 * math.log(step, 3))): statistics.mean(
            math.log(each.by_setting[momentum, step]) for each in found
        )
        for momentum, step in found[0].settings
    }


def _over_tasks(some: Sequence[Surface], every: Sequence[Surface]) -> Surface:
    """The mean of some surfaces at settings that all of them have."""
    common = set.intersection(*map(set, every))
    return {setting: statistics.mean(each[setting] for each in some) for setting in sorted(common)}


def _vertex(mean: Surface, best: tuple[float, int]) -> float:
    """The step, in factors of √3, where a parabola through the best and its neighbours is lowest."""
    momentum, step = best
    low, high = (mean.get((momentum, step + side)) for side in (-1, 1))
    if low is None or high is None or low + high <= 2 * mean[best]:
        return step
    return step + 0.5 * (low - high) / (low + high - 2 * mean[best])


def filled(rows: Sequence[PriorRow]) -> list[PriorRow]:
    """The rows, and those that are missing on the grid of groups and local steps."""
    found = list(rows)
    by_surface: dict[tuple[str, bool, str], dict[tuple[int, int], PriorRow]] = defaultdict(dict)
    for row in rows:
        by_surface[row.method, row.is_adaptive, row.times][row.groups, row.period] = row
    for known in by_surface.values():
        periods = {period for _, period in known}
        places = product(GROUPS, sorted(periods | set(PERIODS)) if max(periods) > 1 else (1,))
        found += [_estimated(known, *place) for place in places if place not in known]
    return sorted(found, key=lambda row: (row.method, row.is_adaptive, row.times, row.groups, row.period))


def _estimated(known: Mapping[tuple[int, int], PriorRow], groups: int, period: int) -> PriorRow:
    """From rows about it: effects of groups and of local steps add up, or go with the logarithms of their numbers."""
    about = [
        (known[groups, other_period], known[other_groups, period], known[other_groups, other_period])
        for other_groups, other_period in known
        if (groups, other_period) in known and (other_groups, period) in known
    ]
    if about:
        first, second, corner = about[0]
        near = max(first, second, key=lambda row: row.deviation)
        cost, step = first.log_cost + second.log_cost - corner.log_cost, first.step * second.step / corner.step
        cost = max(0.0, cost)
    else:
        near = min(
            known.values(), key=lambda row: abs(math.log(row.groups / groups)) + abs(math.log(row.period / period))
        )
        more = math.log(groups) / math.log(near.groups)
        more *= math.log(period) / math.log(near.period) if near.period > 1 else 1.0
        cost, step = near.log_cost * more, near.step ** (more if near.step < 1 else 1)  # none grows by estimate
    return replace(
        near,
        groups=groups,
        period=period,
        step=round(step, 3),
        log_cost=round(cost, 3),
        deviation=round(math.hypot(near.deviation, ESTIMATED, (cost - near.log_cost) / 2), 3),
        tasks=0,
        seeds=0,
    )


def learnt(runs: Runs) -> dict[str, Any]:
    """The prior, as it stands in `FILE`; what is measured by itself stays."""
    known = json.loads(FILE.read_text())
    kinds = [costs for is_adaptive in (False, True) if (costs := Costs(runs, is_adaptive)).own]
    rows = [costs.row(cell, costs.pooled()) for costs in kinds for cell in costs.cells if not cell.variant]
    tasks = {run.task for costs in kinds for cell in costs.cells for run in costs.runs(cell)}
    names = {costs.is_adaptive: "adaptive" if costs.is_adaptive else "sgd" for costs in kinds}
    variants = {name: [cost for costs in kinds for cost in costs.variant(name)] for name in ("wire", "overlap")}
    assumed = [name for name, found in variants.items() if not found]
    assumed += [name for is_adaptive, name in names.items() if not any(row.is_adaptive == is_adaptive for row in rows)]
    return {
        "provenance": {
            "assumed": assumed,
            "command": "python tests/benchmarks/prior.py --cache runs.jsonl --minutes 50 --write",
            "tasks": sorted(tasks),
            "step_times": list(PRIOR_CLUSTERS),
            "ranks": RANKS,
            "updates": max(run.updates for run in runs.known.values()),
            "runs": len(runs.known),
            "version": version("lightning-omni"),
            "date": today(),
            STREAMING: known["provenance"][STREAMING],
        },
        "steepness": {names[costs.is_adaptive]: costs.steepness().to_dict() for costs in kinds if costs.cells},
        **{name: _summary(found) for name, found in variants.items()},
        "all_reduce": known["all_reduce"],
        "rows": [row.to_dict() for row in filled(rows)] + [row for row in known["rows"] if row["method"] == STREAMING],
    }


def today() -> str:
    """As a table says when it was made."""
    return datetime.now(timezone.utc).date().isoformat()


def streaming_row(groups: int, period: int, is_adaptive: bool) -> PriorRow:
    """What averages in fragments cost that travel while groups train on, with what suits whole averages."""
    prior = Prior.load()
    momentum, step = prior.suggested("local_sgd", groups, period, momentum=1.0, scatter=0.0, is_adaptive=is_adaptive)
    tasks = [name for name, task in DEVELOPING.items() if task.is_adaptive == is_adaptive]
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        found = list(pool.map(partial(streaming_cost, groups=groups, period=period), tasks))
    # On a task with which groups diverge, or do not come there, a run notices it: a mean would say too much of these.
    low, median, high = statistics.quantiles([cost for cost, _ in found], n=4, method="inclusive")
    deviation = (high - low) / QUARTILES * math.sqrt(1 + 1 / len(found))
    return PriorRow(
        method=STREAMING,
        is_adaptive=is_adaptive,
        groups=groups,
        period=period,
        times="nearly equal",
        scatter=round(statistics.mean(scatter for _, scatter in found), 3),
        momentum=momentum,
        step=step,
        log_cost=max(0.0, round(median, 3)),  # fewer samples count as equal, as everywhere
        deviation=round(deviation, 3),
        tasks=len(found),
        seeds=1,
    )


def streaming_cost(name: str, groups: int, period: int) -> tuple[float, float]:
    """Logarithm of the samples to a task's target relative to its user's own, and the scatter of groups' step times."""
    method = with_period(method_named(STREAMED), period)
    ratio, streamed = beside_one_group(DEVELOPING[name], method, groups, PRIOR_CLUSTERS["nearly equal"])
    busy = streamed.trace.steps["seconds"] - streamed.trace.steps["exchange"]
    return math.log(ratio), float(np.std(busy) / np.mean(busy))


def beside_one_group(
    task: Task, method: Method, groups: int, cluster: Cluster, like: str = "local_sgd", scatter: float = 0.0
) -> tuple[float, Outcome]:
    """Samples to a task's target of several groups, over its user's own in one group; and what groups did.

    Args:
        task: what is trained.
        method: of the groups.
        groups: how many.
        cluster: that they train on.
        like: name of the method whose momentum and step they have: whole averages, for fragments.
        scatter: of the groups' step times, with which that is looked up.
    """
    own, period = Setting(1, task.momentum, task.own_lr), method.push_period * method.fragments
    theory = PriorTheory(own, Scaling(task.is_adaptive), prior=Prior.load(), scatter=scatter)
    suggested = theory.suggested(replace(own, groups=groups, period=period, method=like))
    most = LONGEST * task.updates
    found = task.train(cluster, method, groups, momentum=suggested.momentum, lr=suggested.lr, most=most)
    return samples_at_least(task, found) / samples_alone(task), found


@cache
def samples_alone(task: Task) -> float:
    """To a task's target with its user's own setting in one group."""
    return float(task.train(PRIOR_CLUSTERS["nearly equal"], most=LONGEST * task.updates).samples)


def samples_at_least(task: Task, found: Outcome) -> float:
    """To the target; of a run that was given up, or diverged, a little more than the longest has."""
    return float(min(found.samples, LONGEST * task.updates * task.batch * math.exp(CENSORED)))


def of_all_reduces(is_adaptive: bool) -> dict[str, list[float]]:
    """By all-reduce format, the mean logarithm of the samples and its deviation."""
    return {each: _summary(all_reduce_costs(each, is_adaptive, ORDERS)) for each in MEASURED_ALL_REDUCES}


def all_reduce_costs(format_: str, is_adaptive: bool, seeds: int) -> list[float]:
    """Logarithms of the samples to the target in one group that averages gradients so, relative to exact means."""
    names = [name for name, task in DEVELOPING.items() if task.is_adaptive == is_adaptive]
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return [cost for found in pool.map(partial(all_reduce_costs_of, format_, seeds), names) for cost in found]


def all_reduce_costs_of(format_: str, seeds: int, name: str) -> list[float]:
    """The same of one task; nothing if its matrices are too small for that rank, and travel as they are."""
    task, cluster, found = DEVELOPING[name], PRIOR_CLUSTERS["nearly equal"], []
    value, shapes = all_reduce_of(format_), [tuple(each.shape) for each in task.subject.model.parameters()]
    if isinstance(value, PowerSGD) and PowerSGD(rank=value.rank).share(shapes) == 1:
        return []
    for seed in range(seeds):
        exact, other = (
            task.train(
                cluster, groups=1, seed=seed, most=LONGEST * task.updates, compression=Compression(all_reduce=each)
            )
            for each in ("fp32", format_)
        )
        found.append(math.log(samples_at_least(task, other) / exact.samples))
    return found


def _summary(costs: Sequence[float]) -> list[float]:
    """Mean and standard deviation of the next one; what is unknown costs nothing, more or less."""
    if len(costs) < 2:
        return [costs[0] if costs else 0.0, 0.1]
    deviation = statistics.stdev(costs) * math.sqrt(1 + 1 / len(costs))
    return [max(0.0, round(statistics.mean(costs), 3)), round(deviation, 3)]


def place_of(row: PriorRow) -> tuple[str, ...]:
    """Columns of a page's table that say what a row is about."""
    kind = "AdamW" if row.is_adaptive else "SGD"
    return f"`{row.method}`", kind, str(row.groups), str(row.period), f"{row.scatter:.2f}"


def show(runs: Runs) -> None:
    """Prints rows that were measured, and what theory says of the same settings, as a page has them."""
    print("| method | optimizer | groups | local steps | scatter | momentum | step | samples | deviation | runs |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in map(PriorRow.from_dict, learnt(runs)["rows"]):
        if row.tasks:
            cost = f"{row.momentum:.1f}", f"{row.step:.2f}", f"{math.exp(row.log_cost):.2f}", f"{row.deviation:.2f}"
            print("|", " | ".join((*place_of(row), *cost, f"{row.tasks} × {row.seeds}")), "|")
    costs = Costs(runs, is_adaptive=False)
    print("\n| groups | step times | theory's momentum | measured with it | best measured | samples |")
    print("|---|---|---|---|---|---|")
    for cell in sorted(costs.cells, key=lambda each: (each.times, each.groups)):
        if cell.method == "async_sgd" and not cell.variant:
            mean, in_theory = costs.mean(cell), explicit_for(0.9, cell.groups - 1)
            near = min({momentum for momentum, _ in mean}, key=lambda each: abs(each - in_theory))
            best = min(mean, key=mean.__getitem__)
            columns = (
                f"{in_theory:.1f}",
                f"{math.exp(mean[near, 0]):.2f} (momentum {near})" if (near, 0) in mean else "not there in time",
                f"momentum {best[0]}, step {3 ** (best[1] / 2):.2f}",
                f"{math.exp(mean[best]):.2f}",
            )
            print("|", " | ".join((str(cell.groups), cell.times, *columns)), "|")


def show_beside(runs: Runs) -> None:
    """Prints rows of runs, and the package's of the same settings."""
    print("| method | optimizer | groups | local steps | scatter | momentum | step | samples | deviation |")
    print("|---" * 9 + "|")
    known = {(row.method, row.is_adaptive, row.groups, row.period, row.times): row for row in Prior.load().rows}
    for row in map(PriorRow.from_dict, learnt(runs)["rows"]):
        there = known.get((row.method, row.is_adaptive, row.groups, row.period, row.times))
        if not row.tasks or row.method == STREAMING or there is None:
            continue
        names = ("momentum", "step", "log_cost", "deviation")
        pairs = [(getattr(row, name), getattr(there, name)) for name in names]
        pairs[2] = math.exp(pairs[2][0]), math.exp(pairs[2][1])
        print("|", " | ".join([*place_of(row), *(f"{new:.2f} ({old:.2f})" for new, old in pairs)]), "|")


def show_widths() -> None:
    """Prints what PowerSGD costs by width and rank, as a page has it."""
    print("| task | width |", *(f"rank {rank} |" for rank in THIN))
    print("|---" * (2 + len(THIN)) + "|")
    for name, width in product(WIDENED, WIDTHS):
        task = replace(DEVELOPING[name], make=partial(widened, DEVELOPING[name], width))
        shapes = [tuple(weight.shape) for weight in task.subject.model.parameters()]
        train = partial(task.train, PRIOR_CLUSTERS["nearly equal"], groups=1, most=LONGEST * task.updates)
        whole = train(until=-math.inf, most=task.updates).trace
        target = float(whole.evaluated["smooth_loss"][-1])
        exact, cells = train(until=target).samples, []
        for rank in THIN:
            run = train(until=target, compression=Compression(all_reduce=f"powersgd:{rank}"))
            ratio = samples_at_least(task, run) / exact
            cells.append(f"{ratio:.2f} ({100 * PowerSGD(rank=rank).share(shapes):.1f} %)")
        print("|", " | ".join([name, str(width), *cells]), "|", flush=True)


def show_check() -> None:
    """Prints what suggested settings cost on all tasks, as a page has it."""
    print("| method | optimizer | groups | local steps | scatter | table | median | quartiles | not there |")
    print("|---" * 9 + "|")
    rows = [row for row in Prior.load().rows if row.tasks and (row.method, row.period) in CHECKED]
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for row in rows:
            tasks = [name for name, task in DEVELOPING.items() if task.is_adaptive == row.is_adaptive]
            found = list(pool.map(partial(suggested_costs, row), tasks))
            low, median, high = statistics.quantiles([ratio for ratio, _ in found], n=4, method="inclusive")
            lost = sum(math.isinf(samples) for _, samples in found)
            cost = (
                f"{math.exp(row.log_cost):.2f}",
                f"{median:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{lost} of {len(tasks)}",
            )
            print("|", " | ".join((*place_of(row), *cost)), "|", flush=True)


def suggested_costs(row: PriorRow, name: str) -> tuple[float, float]:
    """What groups need on a task with the setting that a row suggests: samples over its user's own, and samples."""
    method, cluster = with_period(method_named(row.method), row.period), PRIOR_CLUSTERS[row.times]
    ratio, found = beside_one_group(DEVELOPING[name], method, row.groups, cluster, row.method, row.scatter)
    return ratio, found.samples


def widened(task: Task, width: int) -> Subject:
    """What a task trains, with hidden layers of another width."""
    subject, layers = task.subject, []
    last = [each for each in subject.model if isinstance(each, nn.Linear)][-1]
    inputs: int | None = None
    for layer in subject.model:
        if isinstance(layer, nn.Linear):
            outputs = layer.out_features if layer is last else width
            layers.append(nn.Linear(inputs or layer.in_features, outputs))
            inputs = outputs
        else:
            layers.append(layer)
    return replace(subject, model=nn.Sequential(*layers))


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="file of runs: what is in it is not measured again")
    parser.add_argument("--all-reduce", action="store_true", help="measure and write all-reduce formats alone")
    parser.add_argument("--streaming", action="store_true", help="measure and write averages in fragments alone")
    parser.add_argument("--widths", action="store_true", help="print what PowerSGD costs in layers of other widths")
    parser.add_argument("--check", action="store_true", help="print what suggested settings cost on all tasks")
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        choices=DEVELOPING,
        default=list(DEVELOPING),
        help="to measure or learn from",
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=PLANNED, help="of the synchronous run that sets the target")
    parser.add_argument("--minutes", type=float, default=0.0, help="no run is begun later")
    parser.add_argument("--table", action="store_true", help="print the table, and theory beside it")
    parser.add_argument("--beside", action="store_true", help="print rows of the runs beside the package's table")
    parser.add_argument("--write", action="store_true", help="write the package's table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.all_reduce:
        known = json.loads(FILE.read_text())
        known["all_reduce"] = {name: of_all_reduces(name == "adaptive") for name in known["all_reduce"]}
        FILE.write_text(json.dumps(known, indent=1) + "\n")
        return
    if given.streaming:
        known = json.loads(FILE.read_text())
        known["rows"] = [row for row in known["rows"] if row["method"] != STREAMING]
        for is_adaptive, groups, period in product((False, True), GROUPS, STREAMED_PERIODS):
            row = streaming_row(groups, period, is_adaptive)
            print(row, flush=True)
            known["rows"].append(row.to_dict())
        command = "python tests/benchmarks/prior.py --streaming"
        known["provenance"][STREAMING] = {"command": command, "tasks": sorted(DEVELOPING), "date": today()}
        FILE.write_text(json.dumps(known, indent=1) + "\n")
        return
    if given.widths:
        show_widths()
        return
    if given.check:
        show_check()
        return
    if given.cache is None:
        parser.error("--cache: pass the file of runs, or --all-reduce, --streaming, --widths or --check")
    runs, end = Runs(given.cache), time.monotonic() + 60 * given.minutes
    runs.known = {key: run for key, run in runs.known.items() if run.updates == given.updates}
    for seed, cell, name in product(range(given.seeds), cells(), given.tasks):
        if (cell, name, seed) not in runs.known and time.monotonic() < end:
            reference = runs.known.get((REFERENCE, name, seed))
            target = None if reference is None else reference.target
            runs.add(found := measure(cell, DEVELOPING[name], seed, target, given.updates))
            print(f"{name} {seed} {cell}: {found.seconds:.1f} s", flush=True)
    runs.known = {key: run for key, run in runs.known.items() if run.task in given.tasks}
    if given.table:
        show(runs)
    if given.beside:
        show_beside(runs)
    if given.write:
        FILE.write_text(json.dumps(learnt(runs), indent=1) + "\n")


if __name__ == "__main__":
    main()
