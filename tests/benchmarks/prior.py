"""Which momentum and step suit groups: chosen in the simulator, for the prior of the search.

    OMP_NUM_THREADS=1 python tests/benchmarks/prior.py --cache runs.jsonl --minutes 50  # measures what is missing
    OMP_NUM_THREADS=1 python tests/benchmarks/prior.py --cache runs.jsonl --write       # then prior_costs.py
    OMP_NUM_THREADS=1 python tests/benchmarks/prior.py --cache runs.jsonl --theory      # prints theory beside it

Tasks are those to develop on (`tasks.DEVELOPING`) and no others, step times those of `tasks.PRIOR_CLUSTERS`; links
take no time. A run trains one method with one number of groups and local steps, and all momenta and steps of a grid
at once, on the same batches in the same order of events (`stacked.py`). The target is the held-out loss that the task's
own synchronous setting has after `PLANNED` updates with the same order of the data. For the user's own setting is then
taken the one of the same grid that comes there with the fewest samples in one group, so that all are chosen in one way,
and with one target. A copy that is not there when the best one's samples times `stacked.PATIENCE` are trained counts as
a little worse than that.

The momentum and step that are suggested are the best for all tasks. Rows that no grid has follow from those about them,
and averages in fragments that travel while groups train on have those of whole averages. What any of them costs,
``prior_costs.py`` measures with more tasks, in longer runs.

The step of a setting is how far each sample moves the weights: lr g / (1 - m) where the server steps for every group's
gradient, lr / (1 - m) where groups step for themselves; of AdamW lr √g and lr.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stacked import PATIENCE, StackedRun
from tasks import DEVELOPING, PRIOR_CLUSTERS, RANKS, Task

from lightning_omni.methods import Method, method_named, with_period
from lightning_omni.performance.forecast import Scaling, Setting, Theory
from lightning_omni.search.prior import STREAMING, Prior, PriorRow, Steepness
from lightning_omni.search.space import METHODS

STREAMED = METHODS[-1]
FILE = Path(__file__).resolve().parents[2] / "lightning_omni" / "search" / "prior.json"
EVERY = 8
"""Batches of all ranks between two evaluations."""
PLANNED = 120
"""Updates of the user's own synchronous run: the held-out loss that it has by then is what the others have to reach."""
MOST = 2.0
"""Times as many after which a run ends in any case."""
CENSORED = 0.2
"""Added to the logarithm of the samples after which a copy was given up."""
SGD_MOMENTA = (0.0, 0.3, 0.6, 0.9)
ADAM_MOMENTA = (0.0, 0.5, 0.9)
STEPS = (-1, 0, 1, 2)
OUTER_STEPS = (-3, -2, -1, 0, 1)
"""Factors of √3; an outer momentum of 0.9 asks for smaller steps."""
GRID_TASKS = ("powerlaw", "fashion", "digits", "words", "fraud", "characters")
"""With which momenta and steps are chosen."""
SYNCHRONOUS = "synchronous"
GROUPS, PERIODS = (2, 4, 8), (2, 8, 32)
"""Of the table."""
STREAMED_PERIODS = (4, 8, 16, 32)
"""Of averages in fragments, which are four."""


# --- What is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One method with so many groups and local steps.

    Args:
        method: its name in the table; `SYNCHRONOUS` for one group.
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
        if self.method == STREAMING:
            return with_period(method_named(STREAMED), self.period)
        return method_named(f"{self.method}:period={self.period}")

    @property
    def options(self) -> dict[str, Any]:
        """Of the simulation."""
        if self.variant == "wire":
            return {"wire": "int8" if self.made.pushes_weights else {"push": "int8", "pull": "bf16"}}
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
    for groups, period in ((8, 8), (4, 2), (2, 8), (8, 2), (2, 2), (8, 32), (2, 32)):
        yield from (Cell(method, groups, period, local[method]) for method in ("local_sgd", "elastic_averaging"))
    yield from (Cell("elastic_averaging", groups, 1, scattered) for groups in (8, 2))
    yield from (Cell("elastic_averaging", groups, period, even) for groups in (4, 8, 2) for period in (8, 2, 1))
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

    @cached_property
    def by_setting(self) -> dict[tuple[float, float], float]:
        """Samples by momentum and step; what was given up, a little more than the samples that it had."""
        fewest = PATIENCE * PLANNED * DEVELOPING[self.task].batch  # should all copies have diverged
        given_up = max(self.trained, fewest) * math.exp(CENSORED)
        return {
            (momentum, step): samples if math.isfinite(samples) else given_up
            for (momentum, step), samples in zip(self.settings, self.samples, strict=True)
        }


def measure(cell: Cell, task: Task, seed: int, target: float | None) -> Measured:
    """One run.

    Args:
        cell: method, groups, local steps, step times.
        task: what is trained.
        seed: of the order of the data.
        target: held-out loss; None for the synchronous run, which sets it.
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
        most=PLANNED * (PATIENCE if target is None else MOST),
        every=EVERY,
        seed=seed,
        **cell.options,
    )
    trained = trace.evaluated["samples"]
    if target is None:
        losses = run.smooth[:, settings.index((task.momentum, 1.0))]
        target = float(np.interp(PLANNED * task.batch, trained, losses))
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
    )


class Runs:
    """Runs that were made, in a file of one line each.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[tuple[Cell, str, int], Measured] = {}
        for line in path.read_text().splitlines() if path.is_file() else ():
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

    def row(self, cell: Cell) -> PriorRow:
        """The best setting of a cell; what it costs is measured later."""
        mean, runs = self.mean(cell), self.runs(cell)
        best = min(mean, key=mean.__getitem__)
        return PriorRow(
            method=cell.method,
            is_adaptive=self.is_adaptive,
            groups=cell.groups,
            period=cell.period,
            times=cell.times,
            scatter=round(statistics.mean(run.scatter for run in runs), 3),
            momentum=best[0],
            step=round(3 ** (_vertex(mean, best) / 2), 3),
            log_cost=0.0,
            deviation=0.0,
        )

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
    """The rows, those that are missing on the grid of groups and local steps, and those of averages in fragments."""
    found = list(rows)
    by_surface: dict[tuple[str, bool, str], dict[tuple[int, int], PriorRow]] = defaultdict(dict)
    for row in rows:
        by_surface[row.method, row.is_adaptive, row.times][row.groups, row.period] = row
    for known in by_surface.values():
        periods = {period for _, period in known}
        places = product(GROUPS, sorted(periods | set(PERIODS)) if max(periods) > 1 else (1,))
        found += [_estimated(known, *place) for place in places if place not in known]
    return found + _streamed([row for row in found if row.method == "local_sgd"])


def _estimated(known: Mapping[tuple[int, int], PriorRow], groups: int, period: int) -> PriorRow:
    """Momentum and step from rows about it: what groups and local steps do to a step are factors."""
    about = [
        (known[groups, other_period], known[other_groups, period], known[other_groups, other_period])
        for other_groups, other_period in known
        if (groups, other_period) in known and (other_groups, period) in known
    ]
    if about:
        near, second, corner = about[0]
        step = near.step * second.step / corner.step
    else:
        near = min(
            known.values(), key=lambda row: abs(math.log(row.groups / groups)) + abs(math.log(row.period / period))
        )
        more = math.log(groups) / math.log(near.groups)
        more *= math.log(period) / math.log(near.period) if near.period > 1 else 1.0
        step = near.step ** (more if near.step < 1 else 1)  # none grows by estimate
    return replace(near, groups=groups, period=period, step=round(step, 3))


def _streamed(averages: Sequence[PriorRow]) -> list[PriorRow]:
    """Averages in fragments that travel while groups train on, with what suits whole ones."""
    prior, found = Prior(tuple(averages)), []
    for like in averages:
        if like.period == max(PERIODS):
            for period in STREAMED_PERIODS:
                momentum, step = prior.suggested(
                    like.method, like.groups, period, 1.0, scatter=0.0, is_adaptive=like.is_adaptive
                )
                found.append(replace(like, method=STREAMING, period=period, momentum=momentum, step=round(step, 3)))
    return found


def learnt(runs: Runs) -> dict[str, Any]:
    """The table with momenta and steps of grids, of which it is not known what they cost; the rest of it stays."""
    kinds = [costs for is_adaptive in (False, True) if (costs := Costs(runs, is_adaptive)).own]
    rows = [costs.row(cell) for costs in kinds for cell in costs.cells]
    return {
        **json.loads(FILE.read_text()),
        "provenance": {
            "command": "python tests/benchmarks/prior.py --cache runs.jsonl --minutes 50 --write",
            "tasks": sorted({run.task for costs in kinds for cell in costs.cells for run in costs.runs(cell)}),
            "step_times": list(PRIOR_CLUSTERS),
            "ranks": RANKS,
            "updates": PLANNED,
            "runs": len(runs.known),
        },
        "steepness": {
            "adaptive" if costs.is_adaptive else "sgd": costs.steepness().to_dict() for costs in kinds if costs.cells
        },
        "rows": [row.to_dict() for row in filled(rows)],
    }


def show_theory(runs: Runs) -> None:
    """Prints what theory says of settings of the grids, as a page has it."""
    costs = Costs(runs, is_adaptive=False)
    theory = Theory(Setting(groups=1, momentum=0.9, lr=1.0), Scaling())
    print(
        "| groups | step times | theory's momentum | samples by theory | measured with it | best measured | samples |"
    )
    print("|---|---|---|---|---|---|---|")
    for cell in sorted(costs.cells, key=lambda each: (each.times, each.groups)):
        if cell.method == "async_sgd":
            mean, setting = costs.mean(cell), theory.setting(cell.groups)
            near = min({momentum for momentum, _ in mean}, key=lambda each: abs(each - setting.momentum))
            best = min(mean, key=mean.__getitem__)
            columns = (
                f"{setting.momentum:.1f}",
                f"{math.exp(theory(setting)):.2f}",
                f"{math.exp(mean[near, 0]):.2f} (momentum {near})" if (near, 0) in mean else "not there in time",
                f"momentum {best[0]}, step {3 ** (best[1] / 2):.2f}",
                f"{math.exp(mean[best]):.2f}",
            )
            print("|", " | ".join((str(cell.groups), cell.times, *columns)), "|")


def today() -> str:
    """As a table says when it was made."""
    return datetime.now(timezone.utc).date().isoformat()


def write(table: Mapping[str, Any]) -> None:
    """The package's table."""
    FILE.write_text(json.dumps(table, indent=1) + "\n")


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="file of runs: what is in it is not measured again")
    parser.add_argument("--tasks", nargs="+", choices=DEVELOPING, default=GRID_TASKS)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=0.0, help="no run is begun later")
    parser.add_argument("--theory", action="store_true", help="print what theory says of the same settings")
    parser.add_argument("--write", action="store_true", help="write momenta and steps into the package's table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs, end = Runs(given.cache), time.monotonic() + 60 * given.minutes
    for seed, cell, name in product(range(given.seeds), cells(), given.tasks):
        if (cell, name, seed) not in runs.known and time.monotonic() < end:
            reference = runs.known.get((REFERENCE, name, seed))
            target = None if reference is None else reference.target
            runs.add(found := measure(cell, DEVELOPING[name], seed, target))
            print(f"{name} {seed} {cell}: {found.seconds:.1f} s", flush=True)
    if given.theory:
        show_theory(runs)
    if given.write:
        write(learnt(runs))
        print("what these settings cost is to be measured: python tests/benchmarks/prior_costs.py")


if __name__ == "__main__":
    main()
