"""Groups that join a run: how much sooner is it at the target than one group, as users have set it and with OmniTuner?

    OMP_NUM_THREADS=1 python tests/benchmarks/joined_tuner.py [--tasks churn clicks] [--groups 2 4 8] [--seeds 1]

In the simulator. One group trains batches of the size, and with the momentum and learning rate, that `tasks.py` has
recorded as the user's own. Then so many such groups share the run from its start, asynchronously, with the same
setting, and with the one that OmniTuner sets for their number. Told is how many times faster than the one group they
reach the task's target; 0 if they have not by the time in which that one would have done so 1.6 times. No constant was
set on the tasks to judge by, which are the default.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tasks import EVERY, JUDGING, TASKS, Run, Task, at_evaluation, crossing

from lightning_omni.methods import AsyncSGD
from lightning_omni.simulator import Cluster, Computation, Evaluation, Jitter, Limits, Workload, simulate
from lightning_omni.topology import Topology
from lightning_omni.tuning.callback.hyperparameters import follow_groups
from lightning_omni.tuning.model.setting import Scaling, Setting
from lightning_omni.tuning.search import Space

PATIENCE = 1.6
"""Times of one group alone after which a run is given up."""
STEP_TIMES = {"nearly equal": Jitter("lognormal", cv=0.1), "exponential": Jitter("exponential")}


@dataclass(frozen=True)
class Fleet:
    """Groups that share a run.

    Attributes:
        task: what they train.
        groups: how many.
        step_times: name of their distribution.
        seed: of the order of the data.
    """

    task: Task
    groups: int
    step_times: str
    seed: int

    def batches(self, momentum: float, lr: float, most: float) -> float:
        """Of all groups, to the target; infinite if they are not there after ``most``."""
        task, run = self.task, Run(self.task, momentum, lr)
        trace = simulate(
            AsyncSGD(),
            Topology.even(self.groups, self.groups),
            Cluster.even(self.groups, 1 / task.batch, jitter=STEP_TIMES[self.step_times]),
            Workload(run.model, task.subject.data, loss=run.loss, evaluate=run.evaluate, optimizer=run.optimizer),
            batch_size=task.batch,
            evaluation=Evaluation(every=EVERY, target=("smooth_loss", task.target)),
            limits=Limits(updates=max(1, round(most))),
            computation=Computation(batched=run.batched),
            seed=self.seed,
        )
        at = crossing(trace.evaluated["smooth_loss"], task.target, run.smoothed)
        batches: float = at_evaluation(trace.evaluated["samples"], at) / task.batch
        return batches


def speed_ups(fleet: Fleet, alone: float) -> tuple[float, float]:
    """Of the groups over one, as set and with the tuner.

    Args:
        fleet: the groups.
        alone: batches that one group trains to the target.
    """
    task = fleet.task
    own = Setting(groups=1, momentum=task.momentum, lr=task.own_lr)
    tuned = follow_groups(own, fleet.groups, AsyncSGD(), Scaling(task.is_adaptive), Space(groups=(1,)))
    most = PATIENCE * fleet.groups * alone
    as_set, followed = (fleet.batches(each.momentum, each.lr, most) for each in (own, tuned))
    return fleet.groups * alone / as_set, fleet.groups * alone / followed


def measured(names: list[str], groups: list[int], seeds: int) -> Iterator[tuple[str, int, float, float]]:
    """Step times, number of groups and both speed-ups of each case, printed as they come."""
    for name in names:
        task = TASKS[name]
        for seed in range(seeds):
            alone = Fleet(task, 1, "nearly equal", seed).batches(task.momentum, task.own_lr, 3 * task.updates)
            if math.isinf(alone):
                print(f"{name}, seed {seed}: one group alone does not reach the target")
                continue
            for step_times in STEP_TIMES:
                for count in groups:
                    found = speed_ups(Fleet(task, count, step_times, seed), alone)
                    print(f"{name}, {step_times}, {count} groups: {found[0]:.2f} as set, {found[1]:.2f} tuned")
                    yield step_times, count, *found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(JUDGING))
    parser.add_argument("--groups", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = list(measured(args.tasks, args.groups, args.seeds))
    print("\n| step times | groups | as set: median, not there | tuned: median, least, not there | cases |")
    print("|---|---|---|---|---|")
    for step_times in STEP_TIMES:
        for count in args.groups:
            pairs = [found for kind, groups, *found in rows if (kind, groups) == (step_times, count)]
            as_set, tuned = zip(*pairs, strict=True)
            print(
                f"| {step_times} | {count} | {statistics.median(as_set):.2f}, {as_set.count(0.0)}"
                f" | {statistics.median(tuned):.2f}, {min(tuned):.2f}, {tuned.count(0.0)} | {len(pairs)} |"
            )


if __name__ == "__main__":
    main()
