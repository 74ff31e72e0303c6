"""What does scikit-optimize add to the search, and theory? Every sampler on the same searches, in virtual time.

    OMP_NUM_THREADS=1 python tests/benchmarks/samplers.py [--quick] [--tasks digits] [--clusters "two generations"]

A run is a search from the initial weights, and then training with what it chose, at constant learning rate, until the
smoothed held-out loss is at the target. All samplers have the same budget of probes, start from the same setting (one
group, a momentum of 0.9 and a rate that is about right; on ``mixture`` a third of that) and see the same orders of the
data. The cost of a run is its time, that of its probes included, over the time of the best fixed setting (groups ×
momentum × three steps) with the same order of the data; `GIVEN_UP` stands for runs that take longer.

Tasks and clusters are others than those of `regret.py`, on which the constants of the search were set. ``bayes`` is the
search as it comes; ``listed`` is the same theory with the largest expected improvement of a list of points in the place
of scikit-optimize; ``two ends`` asks for no more than the two probes with which every search begins. Means are
geometric; intervals are those of Student's t over tasks × clusters, whose seeds are averaged first.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np
import torch
from regret import MOMENTUM, groupings, search_from
from regret_cluster import BATCH, FURTHER, RANKS, Cache, Machine, Workload, network
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy.stats import t as student
from torch import nn
from torch.utils.data import TensorDataset

from lightning_omni.performance.forecast import Scaling, Setting
from lightning_omni.search import SAMPLERS, SearchSpec, Space, register_sampler
from lightning_omni.search.samplers.sampler import Proposal
from lightning_omni.search.samplers.theory_led import TheoryLed
from lightning_omni.search.surrogate import Point, Predict

HORIZON = 300
"""Batches of all ranks that a user would plan for."""
SHARE = 0.1
GIVEN_UP = 3.0
"""A run that takes so many times as long as the best is not waited for."""
MOMENTA = 39
"""Points of an axis, where a list stands for a range."""


# --- Theory without scikit-optimize ----------------------------------------------------------------------------------


def listed(
    dimensions: Mapping[str, tuple[float, float] | list[int]],
    points: Sequence[Point],
    times: Sequence[float],
    predict: Predict | None,
    seed: int,
) -> tuple[dict[str, float], float]:
    """The largest expected improvement of a list of points: ``search.surrogate.ask`` without a library."""
    if not dimensions or predict is None:
        return dict(points[0]), 0.0
    axes = [each if isinstance(each, list) else np.linspace(*each, MOMENTA).tolist() for each in dimensions.values()]
    places = [dict(zip(dimensions, place, strict=True)) for place in product(*axes)]
    gains = [_expected_improvement(min(times), *predict(place)) for place in places]
    which = int(np.argmax(gains))
    return places[which], gains[which]


def _expected_improvement(best: float, mean: float, error: float) -> float:
    normal, gain = NormalDist(), best - mean
    return gain * normal.cdf(gain / error) + error * normal.pdf(gain / error) if error > 0 else max(gain, 0.0)


class Listed(TheoryLed):
    """Theory, and the best of a list."""

    uses_scikit_optimize: ClassVar[bool] = False
    ask = staticmethod(listed)


class TwoEnds(TheoryLed):
    """Theory, and nothing asked for."""

    uses_scikit_optimize: ClassVar[bool] = False

    def _ask(self, evidence: Any) -> Proposal | None:
        return None


register_sampler("listed", Listed)
register_sampler("two ends", TwoEnds)


# --- Tasks -----------------------------------------------------------------------------------------------------------


def digits() -> Workload:
    """scikit-learn's digits, and a perceptron."""
    from sklearn.datasets import load_digits

    inputs, labels = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    return _split("digits", inputs.float()[order] / 16, labels[order], network(64, 32, 10), target=0.3, lr=0.1)


def mixture() -> Workload:
    """Overlapping normal distributions, some directions of which are far noisier than others; a linear model."""
    random = torch.Generator().manual_seed(1)
    centres = 0.8 * torch.randn(10, 24, generator=random)
    labels = torch.randint(10, (2400,), generator=random)
    inputs = centres[labels] + torch.randn(2400, 24, generator=random) * torch.linspace(0.3, 2, 24)
    return _split("mixture", inputs, labels, network(24, 10), target=0.145, lr=0.06)


def deep() -> Workload:
    """A teacher's labels, and a pupil of four layers."""
    random = torch.Generator().manual_seed(2)
    inputs = torch.randn(2400, 16, generator=random)
    teacher = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.copy_(torch.randn(weight.shape, generator=random) * (0.7 if weight.dim() > 1 else 0.1))
        labels = teacher(inputs).argmax(1)
    return _split("deep", inputs, labels, network(16, 32, 32, 32, 4), target=0.8, lr=0.08)


def _split(name: str, inputs: torch.Tensor, labels: torch.Tensor, model: nn.Module, **plan: float) -> Workload:
    held_out = len(inputs) // 4
    data = TensorDataset(inputs[held_out:], labels[held_out:])
    known = (inputs[:held_out], labels[:held_out])
    return Workload(name, model, data, known, target=plan["target"], horizon=HORIZON, lr=plan["lr"])


TASKS: dict[str, Callable[[], Workload]] = {"digits": digits, "mixture": mixture, "deep": deep}


# --- Searches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What one search came to.

    Attributes:
        scenario: task and cluster.
        sampler: of the search.
        seed: of the search and of the order of the data.
        cost: time with that of the probes, over the best's.
        share: of that time, in probes.
        probes: how many.
        setting: what was chosen.
    """

    scenario: str
    sampler: str
    seed: int
    cost: float
    share: float
    probes: int
    setting: str


def best_fixed(machine: Machine) -> Setting:
    """The setting that is at the target first, with the first order of the data."""
    found, least = Setting(1, MOMENTUM, machine.workload.lr), math.inf
    step = Scaling().step(found)
    for groups, rebalance in groupings(machine):
        for factor, momentum in product((1.0, 3.0, 1 / 3), (0.9, 0.6, 0.3, 0.0)):
            lr = float(f"{Scaling().lr(groups, momentum, step * factor):.3g}")
            setting = Setting(groups, momentum, lr, rebalance)
            seconds = machine.seconds_to_target(setting, 0, 1.1 * least)
            if seconds < least:
                found, least = setting, seconds
    return found


def searched(machine: Machine, sampler: str, seed: int, best: Setting) -> Row:
    """A search, and a run with what it chose."""
    batch, horizon = BATCH * RANKS, machine.workload.horizon
    start = Setting(1, MOMENTUM, machine.workload.lr)
    spec = SearchSpec(start, batch, float(batch * horizon), SHARE, Space.of({}, RANKS), seed=seed)
    search = search_from(machine, machine.start, spec, sampler)
    chosen, least = search.choice().setting, machine.seconds_to_target(best, seed)
    cap = GIVEN_UP * least
    whole = min(cap, search.spent + machine.seconds_to_target(chosen, seed, cap))
    name = f"{machine.workload.name}, {machine.name}"
    return Row(name, sampler, seed, whole / least, search.spent / whole, len(search.tried), str(chosen))


# --- The table -------------------------------------------------------------------------------------------------------


def interval(logs: Mapping[str, Sequence[float]]) -> tuple[float, float, float]:
    """Geometric mean and a 95 % interval, of logarithms by scenario."""
    means = [statistics.mean(each) for each in logs.values()]
    middle = statistics.mean(means)
    if len(means) < 2:
        return math.exp(middle), 0.0, math.inf
    half = float(student.ppf(0.975, len(means) - 1)) * statistics.stdev(means) / math.sqrt(len(means))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def _mean(costs: Iterable[float]) -> str:
    return f"{statistics.geometric_mean(costs):.2f}"


def report(console: Console, rows: Sequence[Row]) -> None:
    """Prints each sampler's cost by task and altogether, and that of the same searches relative to ``bayes``."""
    names = list(dict.fromkeys(row.sampler for row in rows))
    scenarios = list(dict.fromkeys(row.scenario for row in rows))
    costs = {(row.scenario, row.sampler, row.seed): row.cost for row in rows}
    seeds = sorted({row.seed for row in rows})
    tasks = list(dict.fromkeys(each.partition(", ")[0] for each in scenarios))
    table = Table(
        "sampler", *tasks, "all", "relative to bayes, paired", "worst", "given up", "probes", "time in probes"
    )
    for name in names:
        own = [row for row in rows if row.sampler == name]
        cost = {each: [math.log(costs[each, name, seed]) for seed in seeds] for each in scenarios}
        ratio = {
            each: [math.log(costs[each, name, seed] / costs[each, names[0], seed]) for seed in seeds]
            for each in scenarios
        }
        table.add_row(
            name,
            *(_mean(row.cost for row in own if row.scenario.startswith(f"{task}, ")) for task in tasks),
            "{:.2f} ({:.2f} to {:.2f})".format(*interval(cost)),
            "{:.3f} ({:.3f} to {:.3f})".format(*interval(ratio)) if name != names[0] else "1",
            f"{max(row.cost for row in own):.2f}",
            str(sum(row.cost >= GIVEN_UP for row in own)),
            f"{statistics.mean(row.probes for row in own):.1f}",
            f"{statistics.mean(row.share for row in own):.1%}",
        )
    console.print(table)
    console.print(f"{len(scenarios)} tasks on clusters, {len(seeds)} seeds each; 95 % intervals")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one task on one cluster, two seeds")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--clusters", nargs="+", choices=FURTHER, default=list(FURTHER))
    parser.add_argument("--seeds", type=int, default=3, help="of searches")
    parser.add_argument("--out", type=Path, help="JSON file")
    given = parser.parse_args()
    if given.quick:
        given.tasks, given.clusters, given.seeds = given.tasks[:1], given.clusters[:1], 2
    return given


def main() -> None:
    """Measures and prints."""
    given = arguments()
    torch.set_num_threads(1)
    console = Console(width=None if Console().is_terminal else 160)
    names = [
        "bayes",
        "listed",
        "two ends",
        *(
            name
            for name, kind in SAMPLERS.items()
            if not kind.learns_from_run and name not in ("bayes", "listed", "two ends")
        ),
    ]
    rows: list[Row] = []
    with Progress(console=console) as progress:
        bar = progress.add_task("", total=len(given.tasks) * len(given.clusters) * (1 + given.seeds * len(names)))
        for task in given.tasks:
            workload, cache = TASKS[task](), Cache(None)
            for cluster in given.clusters:
                machine = Machine(workload, cluster, cache)
                progress.update(bar, description=f"{task}, {cluster}: fixed settings")
                best = best_fixed(machine)
                progress.advance(bar)
                console.print(f"{task}, {cluster}: best is {best}")
                for name, seed in product(names, range(given.seeds)):
                    progress.update(bar, description=f"{task}, {cluster}: {name}")
                    rows.append(searched(machine, name, seed, best))
                    progress.advance(bar)
                if given.out is not None:
                    given.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    report(console, rows)


if __name__ == "__main__":
    main()
