"""How well do a run's first batches predict the samples that it needs to a target?

    OMP_NUM_THREADS=1 python tests/benchmarks/time_to_target.py            # tasks to develop on: half a minute
    OMP_NUM_THREADS=1 python tests/benchmarks/time_to_target.py --judging  # and those held out

Each task is trained in the simulator with the user's own synchronous setting, in some orders of its data, until its
held-out loss is at the target. After as many steps as `OmniTuner` decides by, the samples to the target are
extrapolated from the training losses so far, as in its report. Printed are, by steps: in how many runs there is a
prediction; the median of log(predicted / true), and of its size; and in how many of the predicted runs the true value
is in the interval of 80 %, and the interval is closed.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table
from tasks import DEVELOPING, JUDGING, Task, cluster_of

from lightning_omni.tuning.callback.online_tuner import DECISION_STEPS
from lightning_omni.tuning.model.convergence import Estimate, samples_to

STEPS = (*DECISION_STEPS[2:], 2 * DECISION_STEPS[-1])
MOST = 3
"""Times the task's updates after which a run ends in any case."""


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        target: held-out loss.
        reached: samples to it.
        samples: trained when each batch of all ranks ended.
        losses: of these batches.
    """

    target: float
    reached: float
    samples: list[float]
    losses: list[float]

    def prediction(self, steps: int) -> Estimate | None:
        """Return what is predicted after so many steps."""
        return samples_to(self.target, self.samples[:steps], self.losses[:steps])


def curves_of(task: Task, seeds: int) -> Iterator[Curve]:
    """Train a task in several orders of its data."""
    for seed in range(seeds):
        run = task.train(cluster_of("equal", task), groups=1, seed=seed, most=MOST * task.updates)
        samples, losses = np.cumsum(run.trace.rows["samples"]), run.trace.rows["loss"]
        yield Curve(task.target, run.samples, samples.tolist(), losses.tolist())


def row_of(steps: int, curves: list[Curve]) -> list[str]:
    """Return the cells of a row of the table."""
    asked = [each for each in curves if steps < len(each.samples) and each.samples[steps - 1] < each.reached < math.inf]
    found = [(each.reached, made) for each in asked if (made := each.prediction(steps)) is not None]
    errors = [math.log(made.value / true) for true, made in found]
    inside = sum(made.low <= true <= made.high for true, made in found)
    closed = sum(math.isfinite(made.high) for _, made in found)
    if not found:
        return [str(steps), f"0 of {len(asked)}", "", "", "", ""]
    middle = [f"{statistics.median(errors):+.2f}", f"{statistics.median(map(abs, errors)):.2f}"]
    parts = [f"{100 * count / len(found):.0f} %" for count in (inside, closed)]
    return [str(steps), f"{len(found)} of {len(asked)}", *middle, *parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="orders of the data of each task (%(default)s)")
    parser.add_argument("--judging", action="store_true", help="tasks held out, instead of those to develop on")
    options = parser.parse_args()
    # LeNet, the residual net and the transformer take minutes each.
    tasks = [JUDGING[name] for name in ("churn", "clicks", "mixture")] if options.judging else [*DEVELOPING.values()]
    curves = [each for task in tasks for each in curves_of(task, options.seeds)]
    table = Table("steps", "predicted", "log error", "its size", "inside", "closed")
    for steps in STEPS:
        table.add_row(*row_of(steps, curves))
    Console().print(table)


if __name__ == "__main__":
    main()
