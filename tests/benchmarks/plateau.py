"""What it gains that a tuned run tries the user's own setting again where its loss is flat. In the simulator.

    OMP_NUM_THREADS=1 python tests/benchmarks/plateau.py                      # the tasks to develop on: half an hour
    OMP_NUM_THREADS=1 python tests/benchmarks/plateau.py --tasks churn mixture

As in `judged.py` the user's own synchronous run is timed for a few batches, and the choice of the tuner trains from
the first sample to the target. At each end of an epoch, and inside a long one after every third window,
`OmniTuner`'s own rule looks at the training losses so far (`tuning.callback.guards.flatness`). Where it asks for a
trial, the user's own setting trains from the weights of then, with the optimizer's state if it is an adaptive one; if
the rule finds that better, the run ends with it. What a trial that is not better took is added in full, though a fit
keeps what it has learnt. Times are virtual; forming groups, and what groups wait for where the rule is applied, take
none.

Printed is how many times faster than the user's own setting a run reaches the target, without trials and with them.
Runs are given up after `LONGEST` times the time of the user's own.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from dataclasses import dataclass
from typing import Any

import tasks
import torch
from judged import Decided, Judged
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tasks import CLUSTERS, DEVELOPING, TASKS, Outcome, Run, cluster_of
from torch import Tensor, nn

from lightning_omni.methods import method_named
from lightning_omni.tuning.callback.losses import TrainingLosses, TrialOutcome, is_falling
from lightning_omni.tuning.search import constants as c

CLUSTERS_OF_RANDOM_TIMES = ("exponential", "lognormal", "two generations")
LONGEST = 4.0


@dataclass(frozen=True)
class WindowEnd:
    """Where a run was when a window of its losses ended.

    Attributes:
        evaluations: that were made by then.
        losses: of all batches by then.
        weights: of the model.
        optimizer: its state.
    """

    evaluations: int
    losses: int
    weights: dict[str, Any]
    optimizer: dict[str, Any]


class FollowedRun(Run):  # type: ignore[misc]
    """A run that notes the training loss of each batch, and what it had at each window's end.

    Attributes:
        latest: the last one that was made.
        start: of the next ones; None for the task's own.
    """

    latest: FollowedRun
    start: WindowEnd | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.noted: list[float] = []
        self.ends: list[WindowEnd] = []
        self._evaluations = self._trained = 0
        FollowedRun.latest = self
        if self.start is not None:
            self.model = copy.deepcopy(arguments[0].subject.model)
            self.model.load_state_dict(self.start.weights)

    @property
    def batched(self) -> Any:
        """Losses are noted one by one."""
        return False

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = super().optimizer(parameters)
        if self.start is not None and self.task.is_adaptive:
            made.load_state_dict({**self.start.optimizer, "param_groups": made.state_dict()["param_groups"]})
        return made

    def _warm_up(self) -> None:
        if self.start is None:  # it is over
            super()._warm_up()

    def loss(self, model: Any, batch: Any) -> Tensor:
        loss: Tensor = super().loss(model, batch)
        self.noted.append(float(loss.detach()))
        self._trained += len(batch[0])
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self._evaluations += 1
        if self._trained >= (len(self.ends) + 1) * window_of(self.task):
            state = copy.deepcopy((model.state_dict(), self._made[0].state_dict()))
            self.ends.append(WindowEnd(self._evaluations, len(self.noted), *state))
        told: dict[str, float] = super().evaluate(model)
        return told


def window_of(task: tasks.Task) -> int:
    """Samples of a window: an epoch, or a part of one."""
    return int(min(len(task.subject.data), c.SHORTEST_WINDOW * task.batch))


def with_trials(judged: Judged, decided: Decided, outcome: Outcome, run: FollowedRun) -> tuple[float, int]:
    """Seconds to the target, and how many trials there were.

    Args:
        judged: the task on its cluster.
        decided: what was chosen.
        outcome: of the choice, alone.
        run: of that.
    """
    batch, times = judged.task.batch, outcome.trace.evaluated["time"]
    is_stale = method_named(decided.setting.method).updates_per_batch(decided.setting.groups) > 1
    curve, late, before = TrainingLosses(statistics.fmean(run.noted[:2]), is_stale=is_stale), 0.0, 0
    window, epoch = window_of(judged.task), len(judged.task.subject.data)
    each = c.FEWEST_WINDOWS if window < epoch else 1
    for number, end in enumerate(run.ends):
        now = float(times[end.evaluations - 1])
        if now >= outcome.seconds:
            break
        curve.windows.append(statistics.fmean(run.noted[before : end.losses]))
        before = end.losses
        if (number + 1) % each or not curve.is_flat or len(curve.windows) < curve.next_trial:
            continue
        steps = max(c.FEWEST_STEPS, math.ceil(c.TRIAL * (number + 1) * window / batch))
        FollowedRun.start = end
        own = judged.train(judged.own, math.inf, seconds=LONGEST * judged.ddp.seconds)
        FollowedRun.start = None
        noted, length = FollowedRun.latest.noted, steps
        while TrialOutcome.of(noted[:steps], curve) is not TrialOutcome.BETTER and steps < c.LONGEST_TRIAL * length:
            if not is_falling(noted[:steps]):
                break
            steps += length
        curve.trial_begins()
        if TrialOutcome.of(noted[:steps], curve) is TrialOutcome.BETTER:
            return late + now + own.seconds, curve.trials
        late += steps * judged.ddp.seconds * batch / judged.ddp.samples
    return late + outcome.seconds, curve.trials


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(DEVELOPING), metavar="TASK")
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=CLUSTERS_OF_RANDOM_TIMES, metavar="CLUSTER")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tasks.Run = FollowedRun
    table, console = Table("cluster", "task", "chosen", "without", "with trials", "trials"), Console(width=150)
    without, with_ = [], []
    cases = [(cluster, name) for name in arguments.tasks for cluster in arguments.clusters]
    for cluster, name in track(cases, console=Console(stderr=True), description="runs"):
        judged = Judged(TASKS[name], cluster_of(cluster, TASKS[name]), 0)
        decided, limit = judged.decide(), LONGEST * judged.ddp.seconds
        if decided.setting == judged.own or decided.setting.groups == 1:
            continue
        outcome = judged.train(decided.setting, math.inf, decided.topology, limit)
        seconds, trials = with_trials(judged, decided, outcome, FollowedRun.latest)
        without.append(judged.ddp.seconds / min(outcome.seconds, limit))
        with_.append(judged.ddp.seconds / min(seconds, limit))
        row = f"{without[-1]:.2f}", f"{with_[-1]:.2f}", str(trials)
        table.add_row(cluster, name, str(decided.setting)[:60], *row)
        console.print(cluster, name, *row)
    console.print(table)
    for title, each in (("without", without), ("with trials", with_)):
        mean = statistics.geometric_mean(each)
        slower = sum(value < 0.95 for value in each)
        console.print(
            f"{title}: {mean:.2f} times faster in the geometric mean of {len(each)} cases, {min(each):.2f} at worst,"
            f" below 0.95 in {slower}"
        )


if __name__ == "__main__":
    main()
