"""How good are searches by probes, beside `OmniTuner`, which makes none? In the simulator.

    OMP_NUM_THREADS=1 python tests/benchmarks/rivals.py --tasks mixture --clusters exponential
    OMP_NUM_THREADS=1 python tests/benchmarks/rivals.py --probe 0.03 --rivals omnivore skopt --cache FILE

A rival trains some settings of asynchronous SGD from the initial weights for a while, one after the other, and takes
the one whose mean training loss over the last quarter of its probe was the lowest; then it trains with that from the
first sample to the target. What probes took is part of its time. Every probe takes the same part (``--probe``) of the
time that the user's own run takes to the target, whatever its setting; and each rival has ``--probes`` of them.

- ``omnivore`` is Algorithm 1 of Hadjis et al. 2016: as many groups as are fastest, by the hardware model after the
  run's first batches; of these a grid of four momenta, for the user's rate and a tenth of it; and half as many groups
  as long as a momentum of 0 is the best of the grid. A probe with larger steps than one that diverged is left out.
- ``grid`` tries all numbers of groups with momenta of 0.9, 0.6, 0.3 and 0, in this order, with the user's step.
- ``random`` draws groups, momentum and the logarithm of the rate, about the user's step.
- ``skopt`` is scikit-optimize as it comes: a Gaussian process of its own over the losses of the probes, in groups,
  momentum and the logarithm of the rate, after a third of the probes at random.

``tuned`` is the tuner's choice as `judged.py` takes it, what its first batches lose included. Times are virtual.
Forming groups takes none, though a rival forms them for each probe. Printed is the time over that of the user's own run
in one group: below 1 is faster. A run ends after `judged.LONGEST` times the samples of the user's own, or as much time,
and counts so.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from judged import LONGEST, Decided, Judged
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tasks import CLUSTERS, JUDGING, RANKS, TASKS, cluster_of

from lightning_omni.tuning.model.setting import Scaling, Setting
from lightning_omni.tuning.search.constants import FASTER

GROUPS = (1, 2, 4, 8)
MOMENTA = (0.9, 0.6, 0.3, 0.0)
WIDEST = 5.0
"""Times the user's step, and the part of it, between which rates are drawn."""
COUNTED = 0.25
"""Part of a probe whose losses count."""
DIVERGED = 1e3
"""Loss that stands for any that is larger, or is no number."""


@dataclass
class Prober:
    """Trains settings for a while, and remembers how that went.

    Args:
        judged: the task on its cluster.
        decided: what the tuner found, for its hardware model.
        seconds: of a probe.
        most: probes.
        seed: of what is random.

    Attributes:
        tried: settings, and their losses.
        spent: seconds.
    """

    judged: Judged
    decided: Decided
    seconds: float
    most: int
    seed: int
    tried: dict[Setting, float] = field(default_factory=dict)
    spent: float = 0.0

    def loss(self, setting: Setting) -> float:
        """At the end of a probe; one that was tried is not tried again."""
        if setting not in self.tried:
            trace = self.judged.train(setting, math.inf, seconds=self.seconds).trace
            losses = trace.rows["loss"][trace.rows["time"] >= (1 - COUNTED) * self.seconds]
            found = float(losses.mean()) if len(losses) and not trace.ended.startswith("diverged") else DIVERGED
            self.tried[setting] = min(found, DIVERGED) if math.isfinite(found) else DIVERGED
            self.spent += self.seconds
        return self.tried[setting]

    @property
    def is_over(self) -> bool:
        """Whether there are no more probes."""
        return len(self.tried) >= self.most

    @property
    def best(self) -> Setting:
        """With the lowest loss of all."""
        return min(self.tried, key=self.tried.__getitem__)

    def setting(self, groups: int, momentum: float, lr: float) -> Setting:
        """In the user's own way otherwise."""
        own: Setting = self.judged.own
        return replace(own, groups=groups, momentum=round(momentum, 3), lr=float(f"{lr:.3g}"))

    def lr(self, groups: int, momentum: float, factor: float = 1.0) -> float:
        """The rate with steps so many times as large as the user's."""
        scaling: Scaling = self.judged.scaling
        return scaling.lr(groups, momentum, factor * scaling.step(self.judged.own))


# --- Rivals ----------------------------------------------------------------------------------------------------------


def omnivore(prober: Prober) -> Setting:
    """The published algorithm."""
    groups, lr = fastest(prober), prober.judged.own.lr
    while True:
        level: dict[Setting, float] = {}
        for rate, momentum in product((lr, lr / 10), MOMENTA):
            setting = prober.setting(groups, momentum, rate)
            has_diverged = (each for each, loss in level.items() if loss >= DIVERGED)
            if prober.is_over or any(each.momentum <= momentum and each.lr <= rate for each in has_diverged):
                continue
            level[setting] = prober.loss(setting)
        best = min(level, key=level.__getitem__, default=prober.best)
        if best.momentum > 0 or groups == 1 or prober.is_over:
            return best
        groups, lr = groups // 2, best.lr


def fastest(prober: Prober) -> int:
    """The fewest groups whose samples per second no other number exceeds by more than a trifle."""
    search, own = prober.decided.search, prober.judged.own
    rates = {groups: search.throughput(replace(own, groups=groups)) for groups in GROUPS}
    return min(groups for groups in GROUPS if FASTER * rates[groups] >= max(rates.values()))


def grid(prober: Prober) -> Setting:
    """All groups with each momentum."""
    for momentum, groups in product(MOMENTA, GROUPS):
        if not prober.is_over:
            prober.loss(prober.setting(groups, momentum, prober.lr(groups, momentum)))
    return prober.best


def at_random(prober: Prober) -> Setting:
    """Settings that were drawn."""
    draw = random.Random(prober.seed)
    while not prober.is_over:
        groups, momentum = draw.choice(GROUPS), draw.uniform(0.0, 0.95)
        factor = math.exp(draw.uniform(-1, 1) * math.log(WIDEST))
        prober.loss(prober.setting(groups, momentum, prober.lr(groups, momentum, factor)))
    return prober.best


def scikit_optimize(prober: Prober) -> Setting:
    """A Gaussian process over losses, which knows nothing else."""
    from skopt import Optimizer
    from skopt.space import Categorical, Real

    width = math.log(WIDEST)
    space = [Categorical(range(len(GROUPS)), transform="label"), Real(0.0, 0.95), Real(-width, width)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = Optimizer(space, n_initial_points=max(1, prober.most // 3), random_state=prober.seed)
        for _ in range(2 * prober.most):  # it may ask for one twice
            if prober.is_over:
                break
            row: list[Any] = optimizer.ask()
            groups, momentum = GROUPS[round(row[0])], float(row[1])
            lr = prober.lr(groups, momentum, math.exp(float(row[2])))
            optimizer.tell(row, math.log(max(prober.loss(prober.setting(groups, momentum, lr)), 1e-9)))
    return prober.best


RIVALS: dict[str, Callable[[Prober], Setting]] = {
    "omnivore": omnivore,
    "grid": grid,
    "random": at_random,
    "skopt": scikit_optimize,
}


# --- Rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One search on a task and a cluster.

    Attributes:
        name: of the rival, or ``"tuned"``.
        cost: time over that of the user's own run, probes included.
        probing: of that, in probes.
        setting: that was chosen.
    """

    name: str
    cost: float
    probing: float
    setting: str


def measured(task: str, cluster: str, seed: int, names: Sequence[str], part: float, most: int) -> Iterator[Row]:
    """The tuner, and rivals."""
    judged = Judged(TASKS[task], cluster_of(cluster, TASKS[task]), seed)
    own, decided = judged.ddp.seconds, judged.decide()
    tuned = min(judged.tuned(decided) / own, LONGEST)
    yield Row("tuned", tuned, 0.0, "as it was" if decided.setting == judged.own else str(decided.setting))
    for name in names:
        prober = Prober(judged, decided, part * own, most, seed)
        setting = RIVALS[name](prober)
        trained = judged.train(setting, judged.most, seconds=LONGEST * own).seconds
        yield Row(name, (prober.spent + min(trained, LONGEST * own)) / own, prober.spent / own, str(setting))


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=list(JUDGING), metavar="TASK")
    add("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS), metavar="CLUSTER")
    add("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS))
    add("--seeds", type=int, default=1, help="how many orders of the data")
    add("--probe", type=float, default=0.05, help="part of the user's own time that a probe takes")
    add("--probes", type=int, default=12, help="of each rival, at most")
    add("--cache", type=Path, help="a file of rows that are known, which new ones are added to")
    given = parser.parse_args()
    assert max(GROUPS) == RANKS
    torch.set_num_threads(1)
    lines = given.cache.read_text().splitlines() if given.cache is not None and given.cache.is_file() else []
    known = {json.dumps(key): row for key, row in map(json.loads, lines)}
    table, found = Table("task", "cluster", "search", "time", "of it in probes", "chosen"), dict[str, list[Row]]()
    cells = list(product(given.tasks, given.clusters, range(given.seeds)))
    for cell in track(cells, "Searches", console=Console(stderr=True), transient=True):
        keys = {name: json.dumps([*cell, name, given.probe, given.probes]) for name in ("tuned", *given.rivals)}
        missing = [name for name in given.rivals if keys[name] not in known]
        if missing or keys["tuned"] not in known:
            for row in measured(*cell, missing, given.probe, given.probes):
                known[keys[row.name]] = vars(row)
                if given.cache is not None:
                    with given.cache.open("a") as file:
                        file.write(json.dumps([json.loads(keys[row.name]), vars(row)]) + "\n")
        for key in keys.values():
            row = Row(**known[key])
            found.setdefault(row.name, []).append(row)
            cells_of = cell[0], cell[1], row.name, f"{row.cost:.2f}", f"{row.probing:.2f}", row.setting
            table.add_row(*cells_of)
            print(*cells_of, sep="; ", flush=True)
    Console(width=180).print(table)
    for name, each in found.items():
        mean = statistics.geometric_mean(row.cost for row in each)
        training = statistics.geometric_mean(row.cost - row.probing for row in each)
        print(f"{name}: {mean:.2f} of the user's own time in the geometric mean of {len(each)}", end=", ")
        print(f"{max(row.cost for row in each):.2f} at worst; {training:.2f} without probes")


if __name__ == "__main__":
    main()
