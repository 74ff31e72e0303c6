"""What does `OmniTuner` gain over the best single setting, one for all tasks and clusters? Simulated.

    OMP_NUM_THREADS=1 python tests/benchmarks/fixed_setting.py --cache FILE

Somebody who does not tune picks one setting once. It is picked here as well as it can be without seeing what it is
judged by: of the settings of `FIXED`, the one that is fastest in the geometric mean over the tasks of
`tasks.DEVELOPING` on all clusters. Momentum and rate are those that the prior suggests for the task's own, so a fixed
setting gets for nothing what its user would have to search for. Then it is compared with what the tuner chooses on the
tasks of `tasks.JUDGING`, by `judged.py`; times are virtual, and the tuner's first batches are in its own.

With ``--cache``, two files, FILE for fixed settings and FILE.tuned for the tuner's choices, hold what was measured, and
what they hold is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from judged import LONGEST, Judged, Rows
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tasks import CLUSTERS, DEVELOPING, RANKS, TASKS, cluster_of

FIXED: dict[str, dict[str, Any]] = {
    "1 group, proportional batches": {"rebalance": True},
    "1 group, proportional batches, bf16": {"rebalance": True, "all_reduce": "bf16"},
    "1 group, proportional batches, powersgd:4": {"rebalance": True, "all_reduce": "powersgd:4"},
    "4 groups, async_sgd": {"groups": 4, "method": "async_sgd"},
    "8 groups, async_sgd": {"groups": RANKS, "method": "async_sgd"},
    "8 groups, elastic_averaging, period 8": {"groups": RANKS, "method": "elastic_averaging", "period": 8},
}
"""Settings by name: what differs from the user's own, one group."""


class Cells:
    """How many times faster than the user's own setting a fixed one is, of each task and cluster.

    Args:
        path: of a file of what is known, one line each; None for none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._known = path, dict[tuple[str, str, str], float]()
        if path is not None and path.is_file():
            for line in path.read_text().splitlines():
                task, cluster, name, gain = json.loads(line)
                self._known[task, cluster, name] = gain

    def gains(self, task: str, cluster: str, names: list[str]) -> list[float]:
        """Of some settings; 1/6 for one that needs more than six times the samples or the time of the user's own."""
        missing = [name for name in names if (task, cluster, name) not in self._known]
        for name, gain in measured(task, cluster, missing):
            self._known[task, cluster, name] = gain
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps([task, cluster, name, gain]) + "\n")
        return [self._known[task, cluster, name] for name in names]


def measured(task: str, cluster: str, names: list[str]) -> Iterator[tuple[str, float]]:
    """Settings, each with the momentum and the rate that the prior suggests for this task, and how much faster."""
    if not names:
        return
    judged = Judged(TASKS[task], cluster_of(cluster, TASKS[task]), seed=0)
    theory = judged.decide().search.theory
    for name in names:
        setting = replace(judged.own, **FIXED[name])
        suited = theory.suggested(setting) if setting.groups > 1 else setting
        outcome = judged.train(suited, judged.most, seconds=LONGEST * judged.ddp.seconds)
        yield name, max(1 / LONGEST, judged.ddp.seconds / outcome.seconds)


def geometric_mean(values: list[float]) -> float:
    """Of ratios."""
    return math.exp(statistics.fmean(map(math.log, values)))


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    judging = [name for name in TASKS if name not in DEVELOPING]
    parser.add_argument("--developing", nargs="+", choices=DEVELOPING, default=list(DEVELOPING))
    parser.add_argument("--judging", nargs="+", choices=judging, default=judging)
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--cache", type=Path, help="what is known, and is added to")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cells, names = Cells(given.cache), list(FIXED)
    rows = Rows(given.cache.with_suffix(given.cache.suffix + ".tuned") if given.cache is not None else None)
    console = Console(stderr=True)
    found: list[list[float]] = []
    for task, cluster in track(list(product(given.developing, given.clusters)), "Developing", console=console):
        found.append(cells.gains(task, cluster, names))
    means = {name: geometric_mean([row[number] for row in found]) for number, name in enumerate(names)}
    table = Table("setting", "times faster than the user's own", title="tasks to develop on, geometric mean")
    for name in sorted(names, key=means.__getitem__, reverse=True):
        table.add_row(name, f"{means[name]:.2f}")
    Console().print(table)
    best = max(names, key=means.__getitem__)
    table = Table("task", "cluster", best, "tuned", "tuned over it", title="tasks to judge by, times faster")
    ratios = []
    for task, cluster in track(list(product(given.judging, given.clusters)), "Judging", console=console):
        (fixed,), tuned = cells.gains(task, cluster, [best]), rows.get(task, cluster, 0, False).gain
        ratios.append(tuned / fixed)
        table.add_row(task, cluster, f"{fixed:.2f}", f"{tuned:.2f}", f"{ratios[-1]:.2f}")
    Console().print(table)
    print(f"tuned is {geometric_mean(ratios):.2f} times faster than {best}, in the geometric mean of {len(ratios)}")
    print(f"at worst {min(ratios):.2f}; it is slower in {sum(ratio < 1 for ratio in ratios)} of them")


if __name__ == "__main__":
    main()
