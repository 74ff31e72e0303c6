"""How good is what `OmniTuner` chooses on tasks that had no part in its making? Simulated, against many settings.

    OMP_NUM_THREADS=1 python tests/benchmarks/judged.py --cache FILE                    # all of it: hours
    OMP_NUM_THREADS=1 python tests/benchmarks/judged.py --tasks churn --clusters equal  # a part of it
    OMP_NUM_THREADS=1 python tests/benchmarks/judged.py --alternatives none             # the choice beside DDP alone

With ``--cache`` rows are written to a file as they come, and those that it has are not measured again.

Tasks are those of `tasks.JUDGING`, which set no constant, unless others are asked for; their users' own settings are
recorded there. The user's own synchronous run is timed as `OmniTuner` times the first batches of a fit, and decided by
after as many of them; then the chosen setting trains from the first sample to the target. What the first batches took
longer than they would have with it is added. Times are virtual, and deciding and forming groups take none.

Beside it stand the user's own setting, and alternatives: one group with every all-reduce format, with proportional
batches and without; and every way of exchanging with as many groups as there are ranks and half as many, each with the
momentum and rate that the prior suggests, a third of the rate of these, and three times it, in the wire format that
the forecast calls the fastest. From the best of all these neighbours are tried as long as one is faster: twice and half
as many groups and local steps, other momenta, rates a factor of √3 apart. A run ends when it has taken longer than the
best one. Regret is the time with the choice over that with the best of all, minus 1; of a hundred settings the luckiest
is best, so both are timed again in two other orders of the data, and regret is told with these, too ("again").
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from simulated_measurements import measurements_of
from tasks import CLUSTERS, JUDGING, RANKS, TASKS, Outcome, Task, cluster_of

from lightning_omni.combinations import refuse_pairs
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import method_named, with_period
from lightning_omni.simulator import Cluster
from lightning_omni.topology import Topology
from lightning_omni.tuning.callback.online_tuner import DECISION_STEPS
from lightning_omni.tuning.model.measurements import TrainedBatches
from lightning_omni.tuning.model.setting import Scaling, Setting
from lightning_omni.tuning.search import Observation, Search, SearchSpec, Space
from lightning_omni.tuning.search.choice import verdict
from lightning_omni.tuning.search.evidence import Evidence
from lightning_omni.tuning.search.space import DEFAULT_ALL_REDUCES, DEFAULT_METHODS, DEFAULT_WIRES, compression_named

LONGEST = 6.0
"""Samples that a run may take, in those of the user's own."""
PLANNED = 1000
"""Batches of all ranks that a user plans for."""
PERIODS = (1, 8, 32)
"""Local steps of the alternatives."""
MOMENTA = (0.0, 0.3, 0.6, 0.9)
"""Of neighbours."""
ROUNDED = 1.05
"""Times the samples per second for which an alternative's exchanges are rounded."""
BEYOND = 1.1
"""Times the least time for which a run goes on: the target counts as reached half of a smoothed mean earlier."""


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

    @cached_property
    def ddp(self) -> Outcome:
        """The user's own run."""
        return self.train(self.own, math.inf)

    def train(
        self, setting: Setting, most: float, topology: Topology | None = None, seconds: float | None = None
    ) -> Outcome:
        """From the first sample to the target, or until so many batches of all ranks are trained, or that long."""
        method = with_period(method_named(setting.method), setting.period)
        return self.task.train(
            self.cluster,
            method,
            topology or Topology.even(RANKS, setting.groups),
            momentum=setting.momentum,
            lr=setting.lr,
            most=most,
            seed=self.seed,
            compression=replace(compression_named(setting.wire), all_reduce=setting.all_reduce),
            overlap=setting.overlap,
            rebalance="auto" if setting.rebalance else "off",
            seconds=math.inf if seconds is None else seconds,
        )

    @property
    def most(self) -> float:
        """Batches of all ranks after which a run is given up."""
        return float(LONGEST * self.ddp.samples / self.task.batch)

    @property
    def spec(self) -> SearchSpec:
        """What is searched: all that a fit would choose among."""
        space = Space.of({}, RANKS, momentum=self.own.momentum)
        space = replace(space, method=DEFAULT_METHODS, compression=DEFAULT_WIRES, all_reduce=DEFAULT_ALL_REDUCES)
        horizon = float(self.task.batch * PLANNED)
        return SearchSpec(self.own, self.task.batch, horizon, space, self.scaling, seed=self.seed)

    def decide(self) -> Decided:
        """As the tuner does, from the first batches of the user's own run."""
        spec = self.spec
        for batches in DECISION_STEPS:
            trace = self.train(self.own, batches).trace
            measured = measurements_of(trace)
            samples = tuple(float(self.task.batch * (number + 1)) for number in range(batches))
            losses = tuple(trace.rows["loss"].tolist())
            search = Search(spec, Observation(TrainedBatches(samples, losses), measured))
            is_early = batches == DECISION_STEPS[0]
            if verdict(search, is_early=is_early, can_wait=spec.can_wait(batches)):
                break
        setting = search.choice(asks=not is_early).setting
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
        for rebalance in (False, True):
            for format_ in ("fp32", *DEFAULT_ALL_REDUCES):
                yield replace(self.own, all_reduce=format_, rebalance=rebalance)
        for groups in (RANKS // 2, RANKS):
            for method in DEFAULT_METHODS:
                periods = PERIODS if hasattr(method_named(method), "period") else (1,)
                for period in periods:
                    like = replace(self.own, groups=groups, method=method, period=period)
                    if not _is_possible(like):
                        continue
                    suited = evidence.theory.suggested(replace(like, wire=fastest_wire(evidence, like)))
                    for factor in (1.0, 1 / 3, 3.0):
                        yield replace(suited, lr=suited.lr * factor)

    def neighbours(self, setting: Setting) -> Iterator[Setting]:
        """Settings that differ in one thing by one step."""
        for factor in (math.sqrt(1 / 3), math.sqrt(3)):
            yield replace(setting, lr=setting.lr * factor)
        for momentum in MOMENTA:
            if momentum != setting.momentum:  # steps of the same size; AdamW's do not depend on it
                scale = 1.0 if self.task.is_adaptive else (1 - momentum) / (1 - setting.momentum)
                yield replace(setting, momentum=momentum, lr=setting.lr * scale)
        others = [replace(setting, period=period) for period in (setting.period // 2, 2 * setting.period)]
        others += [replace(setting, groups=groups) for groups in (setting.groups // 2, 2 * setting.groups)]
        if setting.groups > 1:
            yield from filter(_is_possible, others)

    def best(self, decided: Decided, known: float) -> tuple[float, Setting]:
        """The least time of the choice, the user's own setting and all alternatives, and which of these it was.

        Args:
            decided: the choice.
            known: seconds with it.
        """
        least, best = min((known, 0, decided.setting), (self.ddp.seconds, 1, self.own))[::2]
        tried, waiting = {self.own, decided.setting}, list(self.alternatives(decided.search))
        while waiting:
            for setting in waiting:
                tried.add(setting)
                topology = decided.search.prediction(setting).topology
                outcome = self.train(setting, self.most, topology, BEYOND * least)
                if outcome.seconds < least:
                    least, best = outcome.seconds, setting
            waiting = [setting for setting in self.neighbours(best) if setting not in tried]
        return least, best


def fastest_wire(evidence: Evidence, setting: Setting) -> str:
    """The format of a setting's exchanges with the most samples per second; exact, unless another is clearly faster."""
    possible = [replace(setting, wire=wire) for wire in DEFAULT_WIRES if _can_travel(setting.method, wire)]
    rates = {each.wire: evidence.prediction(each).samples_per_second.value for each in possible}
    fastest = max(rates, key=rates.__getitem__)
    return fastest if rates[fastest] > ROUNDED * rates["fp32"] else "fp32"


def _can_travel(method: str, wire: str) -> bool:
    try:
        refuse_pairs(method_named(method), compression_named(wire).features)
    except ConfigurationError:
        return False
    return True


def _is_possible(setting: Setting) -> bool:
    """Whether groups can exchange so."""
    method = method_named(setting.method)
    if not (1 < setting.groups <= RANKS and 1 <= setting.period <= max(PERIODS)):
        return False
    return setting.period % method.fragments == 0 if hasattr(method, "period") else setting.period == 1


# --- Rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A task on a cluster.

    Attributes:
        task: its name.
        cluster: its name.
        seed: of the order of the data.
        own: seconds to the target with the user's own setting.
        tuned: with what the tuner chose, its first batches included.
        batches: after which it was decided.
        chosen: setting.
        least: seconds with the best of all settings; None if no others were tried.
        again: the regret in other orders of the data; None likewise.
        best: setting.
    """

    task: str
    cluster: str
    seed: int
    own: float
    tuned: float
    batches: int
    chosen: str
    least: float | None = None
    again: float | None = None
    best: str = ""

    @property
    def gain(self) -> float:
        """Times faster than with the user's own setting."""
        return self.own / self.tuned

    @property
    def regret(self) -> float | None:
        """Part by which it is slower than with the best of all settings."""
        return None if self.least is None else self.tuned / self.least - 1

    @property
    def columns(self) -> list[str]:
        """For people."""
        regrets = ["" if each is None else f"{100 * each:.0f} %" for each in (self.regret, self.again)]
        numbers = [f"{self.own:.0f}", f"{self.tuned:.0f}", f"{self.gain:.2f}", str(self.batches)]
        return [self.task, self.cluster, *numbers, self.chosen, *regrets, self.best]


COLUMNS = ("task", "cluster", "own", "tuned", "faster", "batches", "chosen", "regret", "again", "best")


def judge(name: str, cluster: str, seed: int, with_alternatives: bool) -> Row:
    """Measures a row."""
    judged = Judged(TASKS[name], cluster_of(cluster, TASKS[name]), seed)
    decided = judged.decide()
    seconds = judged.tuned(decided)
    chosen = "as it was" if decided.setting == judged.own else str(decided.setting)
    row = Row(name, cluster, seed, judged.ddp.seconds, seconds, decided.batches, chosen)
    if not with_alternatives:
        return row
    least, best = judged.best(decided, seconds)
    if best == decided.setting:
        return replace(row, least=least, again=0.0)
    logs = [regret_in(Judged(judged.task, judged.cluster, 100 + 2 * seed + each), decided, best) for each in range(2)]
    return replace(row, least=least, again=math.exp(statistics.mean(logs)) - 1, best=str(best))


def regret_in(judged: Judged, decided: Decided, best: Setting) -> float:
    """Logarithm of the time with a choice over that with another setting, in this order of the data."""
    other = replace(decided, setting=best, topology=decided.search.prediction(best).topology, batches=0, seconds=0.0)
    longest = judged.most * judged.task.batch * judged.ddp.seconds / judged.ddp.samples
    return math.log(min(judged.tuned(decided), longest) / min(judged.tuned(other), longest))


class Rows:
    """Rows that were measured, in a file of one line each.

    Args:
        path: of the file; None for none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.is_file() else []
        found = [Row(**json.loads(line)) for line in lines]
        self._known = {(row.task, row.cluster, row.seed, row.least is not None): row for row in found}

    def get(self, name: str, cluster: str, seed: int, with_alternatives: bool) -> Row:
        """A row of the file, or a new one."""
        key = name, cluster, seed, with_alternatives
        if key not in self._known:
            self._known[key] = judge(*key)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(asdict(self._known[key])) + "\n")
        return self._known[key]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recorded = [name for name, task in TASKS.items() if _is_recorded(task)]
    judging = [name for name in recorded if name in JUDGING]
    parser.add_argument("--tasks", nargs="+", choices=recorded, default=judging)
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--alternatives", choices=("all", "none"), default="all")
    parser.add_argument("--cache", type=Path, help="a file of rows that are known, which new ones are added to")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table, rows, measured = Table(*COLUMNS), Rows(given.cache), []
    cells = [(*cell, given.alternatives == "all") for cell in product(given.tasks, given.clusters, range(given.seeds))]
    for cell in track(cells, "Rows", console=Console(stderr=True), transient=True):
        measured.append(rows.get(*cell))
        print(*measured[-1].columns, sep="; ", flush=True)
        table.add_row(*measured[-1].columns)
    Console(width=220).print(table)
    print(summary(measured))


def summary(rows: Sequence[Row]) -> str:
    """Over all rows."""
    gains = [row.gain for row in rows]
    worst, mean = min(gains), math.exp(statistics.mean(math.log(max(gain, 1e-3)) for gain in gains))
    said = f"tuned is {mean:.2f} times faster than the user's own setting in the geometric mean, {worst:.2f} at worst"
    for regrets, where in (([row.regret for row in rows], "in the same order"), ([row.again for row in rows], "again")):
        if known := [100 * each for each in regrets if each is not None]:
            said += f"; regret {where}: {statistics.median(known):.0f} % in the median, {max(known):.0f} % at worst"
    return said


def _is_recorded(task: Task) -> bool:
    try:
        return bool(task.recorded)
    except KeyError:
        return False


if __name__ == "__main__":
    main()
