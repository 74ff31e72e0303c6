"""How good is what `OmniTuner` chooses on tasks that had no part in its making? Simulated, against many settings.

    OMP_NUM_THREADS=1 python tests/benchmarks/judged.py                                 # all of it: hours
    OMP_NUM_THREADS=1 python tests/benchmarks/judged.py --tasks churn --clusters equal  # a part of it
    OMP_NUM_THREADS=1 python tests/benchmarks/judged.py --alternatives none             # the choice beside DDP alone

Tasks are those of `tasks.JUDGING`, which set no constant; their users' own settings are recorded there. The user's own
synchronous run is timed as `OmniTuner` times the first batches of a fit, and decided by after as many of them; then the
chosen setting trains from the first sample to the target. What the first batches took longer than they would have with
it is added. Times are virtual, and deciding and forming groups take none.

Beside it stand the user's own setting, and alternatives: every all-reduce format in one group; and every way of
exchanging with as many groups as there are ranks and half as many, each with the momentum and rate that the prior
suggests, a third of the rate of these, and three times it. Regret is the time with the choice over that with the best
of all these, minus 1.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from tasks import CLUSTERS, JUDGING, RANKS, Outcome, Task, cluster_of

from lightning_omni.methods import method_named, with_period
from lightning_omni.performance.forecast import Scaling, Setting, TrialResult
from lightning_omni.performance.measured import Measured
from lightning_omni.search import Observation, Search, SearchSpec, Space
from lightning_omni.search.choice import verdict
from lightning_omni.search.evidence import Evidence
from lightning_omni.search.experience import Experience
from lightning_omni.search.space import ALL_REDUCES, METHODS, WIRES, wire_given
from lightning_omni.simulator import Cluster
from lightning_omni.topology import Topology
from lightning_omni.tuner.first_batches import DECISION_STEPS

LONGEST = 6.0
"""Samples that a run may take, in those of the user's own."""
PERIODS = (1, 8, 32)
"""Local steps of the alternatives."""


@dataclass(frozen=True)
class Decided:
    """What the tuner chose.

    Attributes:
        setting: the choice.
        topology: its groups.
        batches: of all ranks after which it was decided.
        seconds: that they took.
        search: that has decided.
    """

    setting: Setting
    topology: Topology
    batches: int
    seconds: float
    search: Search


class Judged:
    """One task on one cluster.

    Args:
        task: what is trained.
        cluster: on what.
        seed: of the order of the data, and of step times.
    """

    def __init__(self, task: Task, cluster: Cluster, seed: int) -> None:
        self.task, self.cluster, self.seed = task, cluster, seed
        self.own = Setting(1, task.momentum, task.own_lr, method="async_sgd", wire="fp32", all_reduce="fp32")
        self.scaling = Scaling(task.is_adaptive)
        self.ddp = self.train(self.own, math.inf)

    def train(self, setting: Setting, most: float, topology: Topology | None = None) -> Outcome:
        """From the first sample to the target, or until so many batches of all ranks are trained."""
        method = with_period(method_named(setting.method), setting.period)
        return self.task.train(
            self.cluster,
            method,
            topology or Topology.even(RANKS, setting.groups),
            momentum=setting.momentum,
            lr=setting.lr,
            most=most,
            seed=self.seed,
            wire=wire_given(setting.wire),
            overlap=setting.overlap,
            all_reduce=setting.all_reduce,
            rebalance="auto" if setting.rebalance else "off",
        )

    @property
    def most(self) -> float:
        """Batches of all ranks after which a run is given up."""
        return float(LONGEST * self.ddp.samples / self.task.batch)

    def decide(self) -> Decided:
        """As the tuner does, from the first batches of the user's own run."""
        space = Space.of({}, RANKS, momentum=self.own.momentum)
        space = replace(space, method=METHODS, wire=WIRES, all_reduce=ALL_REDUCES)
        horizon = float(self.task.batch * 1000)
        spec = SearchSpec(self.own, self.task.batch, horizon, 0.1, space, self.scaling)
        for batches in DECISION_STEPS:
            trace = self.train(self.own, batches).trace
            measured = Measured.of(trace)
            samples = tuple(float(self.task.batch * (number + 1)) for number in range(batches))
            tried = TrialResult(self.own, samples, (1.0,) * batches, trace.seconds)
            search = Search(spec, "forecast", [Observation(tried, measured)])
            if verdict(search):
                break
        setting = search.choice().setting
        return Decided(setting, search.prediction(setting).topology, batches, trace.seconds, search)

    def tuned(self, decided: Decided) -> float:
        """Seconds to the target, with what the first batches took too long."""
        if decided.setting == self.own:
            return float(self.ddp.seconds)
        outcome = self.train(decided.setting, self.most, decided.topology)
        if math.isinf(outcome.samples):
            return math.inf
        late = decided.seconds - decided.batches * self.task.batch * outcome.seconds / outcome.samples
        return float(outcome.seconds + late)

    def alternatives(self, evidence: Evidence) -> Iterator[Setting]:
        """Ways of exchanging, each in steps of three sizes."""
        assert isinstance(evidence.theory, Experience)
        for format_ in ALL_REDUCES:
            yield replace(self.own, all_reduce=format_)
        for groups in (RANKS // 2, RANKS):
            for method in METHODS:
                periods = PERIODS if hasattr(method_named(method), "period") else (1,)
                for period in periods:
                    if with_period(method_named(method), period).fragments > 1 and period == 1:
                        continue
                    like = replace(self.own, groups=groups, method=method, period=period)
                    suited = evidence.theory.suggested(like)
                    for factor in (1.0, 1 / 3, 3.0):
                        yield replace(suited, lr=suited.lr * factor)

    def best(self, decided: Decided, known: float) -> tuple[float, str]:
        """The least time of the choice, the user's own setting and all alternatives; and which of these it was, if any.

        Args:
            decided: the choice.
            known: seconds with it.
        """
        found = (min(known, self.ddp.seconds), "")
        for setting in self.alternatives(decided.search):
            outcome = self.train(setting, self.most)
            if outcome.seconds < found[0]:
                found = outcome.seconds, str(setting)
        return found


def judge(name: str, cluster: str, seed: int, with_alternatives: bool) -> tuple[list[str], float, float]:
    """A row of the table, the speed-up over the user's own setting, and the regret."""
    judged = Judged(JUDGING[name], cluster_of(cluster, JUDGING[name]), seed)
    decided = judged.decide()
    seconds = judged.tuned(decided)
    gain, regret, best = judged.ddp.seconds / seconds, math.nan, ""
    if with_alternatives:
        least, best = judged.best(decided, seconds)
        regret = seconds / least - 1
    chosen = "as it was" if decided.setting == judged.own else str(decided.setting)
    row = [name, cluster, f"{judged.ddp.seconds:.0f}", f"{seconds:.0f}", f"{gain:.2f}", str(decided.batches), chosen]
    return [*row, "" if math.isnan(regret) else f"{100 * regret:.0f} %", best], gain, regret


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recorded = [name for name, task in JUDGING.items() if _is_recorded(task)]
    parser.add_argument("--tasks", nargs="+", choices=recorded, default=recorded)
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--alternatives", choices=("all", "none"), default="all")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("task", "cluster", "own", "tuned", "faster", "batches", "chosen", "regret", "best")
    gains, regrets = [], []
    for seed in range(given.seeds):
        for name in given.tasks:
            for cluster in given.clusters:
                row, gain, regret = judge(name, cluster, seed, given.alternatives == "all")
                print(*row, sep="; ", flush=True)
                table.add_row(*row)
                gains.append(gain)
                regrets.append(regret)
    Console(width=200).print(table)
    print(summary(gains, [each for each in regrets if not math.isnan(each)]))


def summary(gains: Sequence[float], regrets: Sequence[float]) -> str:
    """Over all rows."""
    worst, mean = min(gains), math.exp(statistics.mean(math.log(max(gain, 1e-3)) for gain in gains))
    said = f"tuned is {mean:.2f} times faster than the user's own setting in the geometric mean, {worst:.2f} at worst"
    if regrets:
        said += f"; regret {100 * statistics.median(regrets):.0f} % in the median, {100 * max(regrets):.0f} % at worst"
    return said


def _is_recorded(task: Task) -> bool:
    try:
        return bool(task.recorded)
    except KeyError:
        return False


if __name__ == "__main__":
    main()
