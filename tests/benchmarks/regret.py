"""How far from the best is what `OmniTuner`'s search chooses? On simulated clusters, against an exhaustive search.

    OMP_NUM_THREADS=1 python tests/benchmarks/regret.py --retune --cache DIR [--strategies bayes] [--clusters mixed]

A tuned run is a search from the initial weights, and then a run with what it chose, at constant learning rate, until
the smoothed held-out loss is at the target; with --retune there is another search after an eighth of the horizon, as
in a fit. The user's own learning rate is right, a third, or three times that, depending on the seed. Regret is the
time of the run over that of the best setting of an exhaustive search, minus 1; below 0 two steps one after the other
were better than any single one. Promised for ``bayes`` with --retune are at most 10 % in the median and 25 % at worst,
means over the seeds, and at most 10 % of the whole time for probes. Without a cache the exhaustive search takes about
15 minutes on one core, and each strategy 3 to 8.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from regret_cluster import BATCH, CLUSTERS, RANKS, WORKLOADS, Cache, Machine, Snapshot
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lightning_omni.performance.forecast import Scaling, Setting
from lightning_omni.performance.measured import Measured
from lightning_omni.search import SAMPLERS, Observation, Search, SearchSpec, Space

OFF = (1.0, 1 / 3, 3.0)
"""By what factor the user's learning rate is off, by seed."""
MOMENTUM = 0.9
SHARE = 0.04
PROBING = [name for name, kind in SAMPLERS.items() if not kind.learns_from_run]
DATA_SEEDS = (0, 1, 2)
GIVEN_UP = 4.0
"""A chosen setting that takes so many times as long as the best is not waited for."""


# --- The best there is -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best:
    """What an exhaustive search found, and the seconds to the target with it."""

    setting: Setting
    seconds: float


def exhaustive(machine: Machine, told: Callable[[], None]) -> Best:
    """The best of a grid of groups, proportional batches, momentum and steps; then of steps between.

    What one group did not come to the target with is not run with several, and neither are more groups that are no
    faster. All others run with one order of the data, for as long as the best of them took and a third more, the better
    ones with two more.
    """
    first: dict[Setting, float] = {}
    hopeless: set[tuple[float, float]] = set()
    for groups, rebalance in groupings(machine):
        for momentum, step in _grid():
            if (momentum, step) in hopeless:
                continue
            setting = _setting(groups, rebalance, momentum, step)
            cap = 1.3 * min(first.values(), default=math.inf)
            first[setting] = machine.seconds_to_target(setting, DATA_SEEDS[0], cap)
            told()
            if groups == 1 and math.isinf(machine.seconds_to_target(setting, DATA_SEEDS[0], 2.5 * min(first.values()))):
                hopeless.add((momentum, step))
    means = _means(machine, first)
    found = min(means, key=means.__getitem__)
    step = Scaling().step(found)
    for factor in (0.55, 1.8):
        setting = _setting(found.groups, found.rebalance, found.momentum, step * factor)
        means[setting] = mean_seconds(machine, setting, 1.1 * min(means.values()))
        told()
    found = min(means, key=means.__getitem__)
    return Best(found, means[found])


def groupings(machine: Machine) -> list[tuple[int, bool]]:
    """Numbers of groups, and whether batches are proportional, fewest groups first and no faster ones left out."""
    is_even = max(machine.speeds) < 1.05 * min(machine.speeds)
    kept: list[tuple[int, bool]] = []
    fastest = 0.0
    for groups in (1, 2, 4, 8):
        for rebalance in (False, True):
            rate = machine.throughput(Setting(groups, 0.0, 0.0, rebalance))
            if rate > fastest and not (rebalance and (is_even or groups == RANKS)):
                kept = [each for each in kept if each[0] != groups] + [(groups, rebalance)]
                fastest = rate
    return kept


def _grid() -> list[tuple[float, float]]:
    """Momentum and step, likely good ones first."""
    return [(momentum, step) for step in (0.3, 1.0, 0.1, 3.0) for momentum in (0.6, 0.9, 0.3, 0.0)]


def _setting(groups: int, rebalance: bool, momentum: float, step: float) -> Setting:
    return Setting(groups, momentum, float(f"{Scaling().lr(groups, momentum, step):.3g}"), rebalance)


def _means(machine: Machine, first: dict[Setting, float]) -> dict[Setting, float]:
    """Mean seconds of the settings that were good with one order of the data."""
    least = min(first.values())
    good = sorted((s for s in first if first[s] <= 1.2 * least), key=first.__getitem__)[:8]
    means: dict[Setting, float] = {}
    for setting in good:
        means[setting] = mean_seconds(machine, setting, 1.3 * min([*means.values(), 2 * least]))
    return means


def mean_seconds(machine: Machine, setting: Setting, cap: float = math.inf, snapshot: Snapshot | None = None) -> float:
    """Mean over orders of the data of the seconds to the target; infinite if one takes longer than ``cap``."""
    seconds: list[float] = []
    for seed in DATA_SEEDS:
        seconds.append(machine.seconds_to_target(setting, seed, cap, snapshot))
        if math.isinf(seconds[-1]):
            break
    return statistics.mean(seconds)


# --- A search --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a tuned run came to.

    Attributes:
        setting: the one that trained to the target.
        regret: time without probes over the best's, minus 1.
        share: of the whole time that probes took.
        probes: how many, of both searches.
    """

    setting: Setting
    regret: float
    share: float
    probes: int


def search_from(
    machine: Machine, snapshot: Snapshot, job: SearchSpec, strategy: str, known: Sequence[Measured] = ()
) -> Search:
    """A search that is over."""
    search = Search(job, strategy, known=known)
    while (probe := search.next()) is not None:
        tried, measured = machine.probe(snapshot, probe.setting, probe.samples, 100 + job.seed, search.profile)
        search.tell(Observation(tried, measured))
    return search


def tuned(machine: Machine, strategy: str, seed: int, best: Best, retunes: bool) -> Outcome:
    """A search, and a run with what it chose; ``retunes`` searches once more after an eighth of the horizon."""
    batch, horizon = BATCH * RANKS, machine.workload.horizon
    start = Setting(1, MOMENTUM, float(f"{machine.workload.lr * OFF[seed % len(OFF)]:.2g}"))
    job = SearchSpec(start, batch, float(batch * horizon), SHARE, Space.of({}, RANKS), seed=seed)
    search = search_from(machine, machine.start, job, strategy)
    chosen, spent, probes, began, snapshot = search.choice().setting, search.spent, len(search.tried), 0.0, None
    if retunes:
        snapshot, began = machine.train(machine.start, chosen, horizon // 8, 1000 + seed)
        seconds = SHARE * job.horizon / max(map(search.throughput, search.candidates()))
        later = replace(job, start=chosen, current=True, seconds=seconds, reference=batch / chosen.groups)
        if strategy == "bayes":
            later = later.for_step(search.tried[0].first_loss, is_final=False)
        threshold, uneven = search.divergence_threshold(chosen), search.is_uneven(search.spec.start)
        search = search_from(machine, snapshot, later, strategy, search.measured)
        if search.tried and statistics.mean(search.tried[0].losses) > threshold:
            # The run has diverged with the choice: as in a fit it begins once more, with one group as the user set it.
            chosen, snapshot = replace(start, rebalance=uneven), None
        else:
            chosen, spent, probes = search.choice().setting, spent + search.spent, probes + len(search.tried)
    cap = GIVEN_UP * best.seconds
    seconds = min(cap, began + mean_seconds(machine, chosen, cap, snapshot))
    return Outcome(chosen, seconds / best.seconds - 1, spent / (spent + seconds), probes)


# --- The table -------------------------------------------------------------------------------------------------------


def report(console: Console, strategies: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Prints what came of each scenario, and below it the sum of each strategy."""
    table = Table("cluster", "model", "best", "search", "chosen, by seed", "regret", "probes", title="Regret")
    for row in rows:
        best = f"{row['best'].setting}\n{row['best'].seconds:.0f} s"
        for number, strategy in enumerate(strategies):
            outcomes: list[Outcome] = row["outcomes"][strategy]
            table.add_row(
                *((row["cluster"], row["model"], best) if not number else ("", "", "")),
                strategy,
                "\n".join(f"{each.setting}: {each.regret:+.0%}" for each in outcomes),
                f"{_regret(outcomes):+.1%}",
                f"{statistics.mean(each.share for each in outcomes):.1%}",
                end_section=strategy == strategies[-1],
            )
    console.print(table)
    for strategy in strategies:
        regrets = [_regret(row["outcomes"][strategy]) for row in rows]
        share = max(each.share for row in rows for each in row["outcomes"][strategy])
        single = max(each.regret for row in rows for each in row["outcomes"][strategy])
        console.print(
            f"{strategy}: regret {statistics.median(regrets):+.1%} in the median, {max(regrets):+.1%} at worst"
            f" ({single:+.0%} with one seed); probes take {share:.1%} at most"
        )


def _regret(outcomes: Iterable[Outcome]) -> float:
    return statistics.mean(each.regret for each in outcomes)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row for JSON."""
    outcomes = {strategy: [asdict(each) for each in found] for strategy, found in row["outcomes"].items()}
    return {**row, "best": asdict(row["best"]), "outcomes": outcomes}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=PROBING, default=list(PROBING))
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--seeds", type=int, default=3, help="of searches")
    parser.add_argument("--retune", action="store_true", help="search once more after an eighth of the horizon")
    parser.add_argument("--cache", type=Path, help="folder in which runs are kept")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args()


def main() -> None:
    """Measures and prints."""
    given = arguments()
    torch.set_num_threads(1)
    console = Console(width=None if Console().is_terminal else 140)
    if given.cache is not None:
        given.cache.mkdir(parents=True, exist_ok=True)
    scenarios = [(model, cluster) for model in given.models for cluster in given.clusters]
    rows: list[dict[str, Any]] = []
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(scenarios) * (1 + given.seeds * len(given.strategies)))
        for model in given.models:
            workload = WORKLOADS[model]()
            cache = Cache(given.cache / f"{workload.name}.json" if given.cache is not None else None)
            for cluster in given.clusters:
                machine = Machine(workload, cluster, cache)
                progress.update(task, description=f"{cluster}, {model}: every setting")
                best = exhaustive(machine, progress.refresh)
                progress.advance(task)
                cache.save()
                outcomes: dict[str, list[Outcome]] = {}
                for strategy in given.strategies:
                    progress.update(task, description=f"{cluster}, {model}: {strategy}")
                    outcomes[strategy] = []
                    for seed in range(given.seeds):
                        outcomes[strategy].append(tuned(machine, strategy, seed, best, given.retune))
                        progress.advance(task)
                    cache.save()
                    console.print(f"{cluster}, {model}, {strategy}: {_regret(outcomes[strategy]):+.1%}")
                rows.append({"cluster": cluster, "model": workload.name, "best": best, "outcomes": outcomes})
    report(console, given.strategies, rows)
    if given.out is not None:
        given.out.write_text(json.dumps([plain(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
