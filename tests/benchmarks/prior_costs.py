"""What settings of the prior's table cost in samples, on all tasks to develop on.

    OMP_NUM_THREADS=1 python tests/benchmarks/prior_costs.py --cache costs.jsonl  # measures and writes, 25 minutes
    OMP_NUM_THREADS=1 python tests/benchmarks/prior_costs.py --all-reduce         # likewise, all-reduce formats
    OMP_NUM_THREADS=1 python tests/benchmarks/prior_costs.py --widths             # PowerSGD in wider layers
    OMP_NUM_THREADS=1 python tests/benchmarks/prior_costs.py --table              # prints the table

What a row costs is measured with the momentum and step that it suggests (`prior.py` chose them, with six of the 21
tasks) for either kind of optimizer by all of its tasks: samples to the task's own target, relative to those that its
user's own setting takes in one group. The row's cost is the median of their logarithms, and its deviation goes by the
quartiles: of the tasks on which groups diverge, or do not come to the target, a mean would say too much, for a run
notices these, and goes back to one group. Where several groups needed fewer samples than one they count as equal: an
average of weights smooths what is evaluated, and a user who wants that has it without groups. With ``--cache``, costs
are written to a file as they come, and those that it has are not measured again.

What a lossy wire format and overlap add is measured in the same way, where `VARIANTS` says; the mean counts.

What all-reduce formats cost is measured in one group with the task's own setting, with three orders of the data. What
PowerSGD costs goes by its rank, not by how much of a gradient that is: see ``--widths``, which trains some of the tasks
with layers of other widths.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from prior import CENSORED, FILE, Cell, today, write
from rich.progress import track
from tasks import DEVELOPING, PRIOR_CLUSTERS, Outcome, Subject, Task
from torch import nn

from lightning_omni.protocol.all_reduce import PowerSGD, all_reduce_of
from lightning_omni.search.prior import Prior, PriorRow
from lightning_omni.search.space import ALL_REDUCES

LONGEST = 2.5
"""Times a task's own updates after which a run ends in any case."""
SECONDS_PER_SAMPLE = PRIOR_CLUSTERS["nearly equal"].devices[0].seconds_per_sample
VARIANTS = {
    "wire": (Cell("async_sgd", 4, 1, "exponential"), Cell("local_sgd", 4, 8)),
    "overlap": (Cell("async_sgd", 4, 1, "exponential"),),
}
"""Where it is measured what they add."""
MEASURED_ALL_REDUCES = (*ALL_REDUCES, "powersgd:16", "powersgd:8", "powersgd:4")
"""Those that a search tries, and others that users name."""
ORDERS = 3
"""Of the data, with each of which all-reduce formats are measured."""
WIDENED = ("fashion", "powerlaw", "teacher", "characters_sgd", "characters", "fashion_adamw", "fraud")
"""Tasks of perceptrons, which are trained with other widths, too."""
WIDTHS, THIN = (64, 256, 1024), (1, 2, 4, 8, 16)
"""Of hidden layers, and ranks of PowerSGD."""


# --- Rows of the table -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Suggestion:
    """A row of the table, of which it is measured what it costs.

    Args:
        cell: method, groups, local steps, step times.
        is_adaptive: whether the optimizer is AdamW.
        momentum: that is suggested; a user whose own is less keeps that.
        step: that is suggested.
    """

    cell: Cell
    is_adaptive: bool
    momentum: float
    step: float

    @classmethod
    def of(cls, row: PriorRow) -> Suggestion:
        """What a row suggests."""
        return cls(Cell(row.method, row.groups, row.period, row.times), row.is_adaptive, row.momentum, row.step)

    @property
    def tasks(self) -> list[str]:
        """With that kind of optimizer."""
        return [name for name, task in DEVELOPING.items() if task.is_adaptive == self.is_adaptive]

    def cost(self, name: str) -> float:
        """Logarithm of the samples to a task's target, relative to its user's own."""
        task, cell = DEVELOPING[name], self.cell
        momentum = min(self.momentum, task.momentum)
        own = task.own_lr if task.is_adaptive else task.own_lr / (1 - task.momentum)
        found = task.train(
            PRIOR_CLUSTERS[cell.times],
            cell.made,
            cell.groups,
            momentum=momentum,
            lr=own * cell.lr(momentum, self.step, task.is_adaptive),
            max_seconds=longest_seconds(task),
            **cell.options,
        )
        return math.log(samples_at_least(task, found) / samples_alone(name))


def longest_seconds(task: Task) -> float:
    """In which ranks that hardly wait train `LONGEST` times a task's own updates, on the clusters of the prior."""
    return float(LONGEST * task.updates * task.batch_size * SECONDS_PER_SAMPLE)


@cache
def samples_alone(name: str) -> float:
    """To a task's target with its user's own setting."""
    task = DEVELOPING[name]
    return float(task.train(PRIOR_CLUSTERS["nearly equal"], max_seconds=longest_seconds(task)).samples)


def samples_at_least(task: Task, found: Outcome) -> float:
    """To the target; of a run that did not come there, or diverged, a little more than the longest has."""
    return float(min(found.samples, LONGEST * task.updates * task.batch * math.exp(CENSORED)))


class MeasuredCosts:
    """Costs that were measured, in a file of one line each.

    Args:
        path: of the file; None for none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[tuple[Suggestion, str], float] = {}
        for line in path.read_text().splitlines() if path is not None and path.is_file() else ():
            plain = json.loads(line)
            cell = Cell(**plain.pop("cell"))
            name, cost = plain.pop("task"), plain.pop("cost")
            self._known[Suggestion(cell, **plain), name] = cost

    def measure(self, suggestions: Sequence[Suggestion]) -> dict[Suggestion, dict[str, float]]:
        """Those of all its tasks; what is missing is measured, with a progress bar."""
        wanted = [(each, name) for each in suggestions for name in each.tasks]
        missing = [place for place in wanted if place not in self._known]
        with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
            jobs = {pool.submit(each.cost, name): (each, name) for each, name in missing}
            for job in track(as_completed(jobs), "samples of groups", len(jobs)):
                self._keep(*jobs[job], job.result())
        found: dict[Suggestion, dict[str, float]] = defaultdict(dict)
        for each, name in wanted:
            found[each][name] = self._known[each, name]
        return found

    def _keep(self, suggestion: Suggestion, name: str, cost: float) -> None:
        self._known[suggestion, name] = cost
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({**asdict(suggestion), "task": name, "cost": cost}) + "\n")


def with_costs(known: Mapping[str, Any], costs: MeasuredCosts) -> dict[str, Any]:
    """A table whose rows say what they cost, and what a lossy wire format and overlap add."""
    rows = {Suggestion.of(row): row for row in map(PriorRow.from_dict, known["rows"])}
    varied = {
        (name, each): replace(each, cell=replace(each.cell, variant=name))
        for name, each in product(VARIANTS, rows)
        if each.cell in VARIANTS[name]
    }
    found = costs.measure([*rows, *varied.values()])
    variants: dict[str, list[float]] = defaultdict(list)
    for (name, plain), each in varied.items():
        variants[name] += [cost - found[plain][task] for task, cost in found[each].items()]
    measured = {
        "command": "python tests/benchmarks/prior_costs.py",
        "tasks": sorted(DEVELOPING),
        "version": version("lightning-omni"),
        "date": today(),
    }
    return {
        **known,
        "provenance": {**known["provenance"], "costs": measured},
        **{name: _mean(added) for name, added in variants.items()},
        "rows": [_with_cost(row, list(found[each].values())).to_dict() for each, row in rows.items()],
    }


def _with_cost(row: PriorRow, costs: Sequence[float]) -> PriorRow:
    """A row with what was measured of it; between the quartiles there are 1.35 standard deviations of a normal one."""
    low, median, high = statistics.quantiles((max(0.0, cost) for cost in costs), n=4, method="inclusive")
    deviation = (high - low) / 1.35 * math.sqrt(1 + 1 / len(costs))
    return replace(row, log_cost=round(median, 3), deviation=round(deviation, 3), tasks=len(costs), seeds=1)


def _mean(costs: Sequence[float]) -> list[float]:
    """Mean and standard deviation of the next one."""
    deviation = statistics.stdev(costs) * math.sqrt(1 + 1 / len(costs))
    return [max(0.0, round(statistics.mean(costs), 3)), round(deviation, 3)]


# --- All-reduce formats ----------------------------------------------------------------------------------------------


def of_all_reduces(is_adaptive: bool) -> dict[str, list[float]]:
    """By all-reduce format, the mean logarithm of the samples and its deviation."""
    return {each: _mean(all_reduce_costs(each, is_adaptive, ORDERS)) for each in MEASURED_ALL_REDUCES}


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
            task.train(cluster, groups=1, seed=seed, most=LONGEST * task.updates, all_reduce=each)
            for each in ("fp32", format_)
        )
        found.append(math.log(samples_at_least(task, other) / exact.samples))
    return found


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
            run = train(until=target, all_reduce=f"powersgd:{rank}")
            ratio = samples_at_least(task, run) / exact
            cells.append(f"{ratio:.2f} ({100 * PowerSGD(rank=rank).share(shapes):.1f} %)")
        print("|", " | ".join([name, str(width), *cells]), "|", flush=True)


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


# --- All of it -------------------------------------------------------------------------------------------------------


def show() -> None:
    """Prints the package's table, as a page has it: a line for each method, optimizer, scatter and number of groups."""
    lines: dict[tuple[str, ...], dict[int, str]] = defaultdict(dict)
    for row in Prior.load().rows:
        place: tuple[str, ...] = f"`{row.method}`", "AdamW" if row.is_adaptive else "SGD", row.times, str(row.groups)
        lines[place][row.period] = f"{math.exp(row.log_cost):.2f} ({row.deviation:.2f})"
    periods = sorted({period for line in lines.values() for period in line})
    print("| method | optimizer | step times | groups |", *(f"H = {period} |" for period in periods))
    print("|---" * (4 + len(periods)) + "|")
    for place, line in lines.items():
        print("|", " | ".join((*place, *(line.get(period, "") for period in periods))), "|")


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="file of costs: what is in it is not measured again")
    parser.add_argument("--all-reduce", action="store_true", help="measure and write all-reduce formats instead")
    parser.add_argument("--widths", action="store_true", help="print what PowerSGD costs in layers of other widths")
    parser.add_argument("--table", action="store_true", help="print the table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(FILE.read_text())
    if given.table:
        show()
    elif given.widths:
        show_widths()
    elif given.all_reduce:
        write({**known, "all_reduce": {name: of_all_reduces(name == "adaptive") for name in known["all_reduce"]}})
    else:
        write(with_costs(known, MeasuredCosts(given.cache)))


if __name__ == "__main__":
    main()
