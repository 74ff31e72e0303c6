"""Golden searches: what every sampler proposes and every search chooses and says on made-up machines.

    python tests/golden/searched.py             # which searches have changed
    python tests/golden/searched.py --write     # that is meant: keep them

Machines are formulas with seeded noise, so that proposals are a function of the code alone. Texts, but for the decimals
in them, choices and the number of probes hold everywhere. Digests hold where the same code computes them (see `here`,
which is kept beside them): a Gaussian process may differ in the last place elsewhere.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from golden import digests
from golden.digests import digest
from lightning_omni.performance.forecast import SampleEfficiency, Scaling, Setting, TrialResult
from lightning_omni.performance.measured import Measured
from lightning_omni.report.digest import Digest
from lightning_omni.search import SAMPLERS, Observation, Probe, Search, SearchSpec, Space
from lightning_omni.topology import Topology

FILE = Path(__file__).with_name("searches.json")
LIBRARIES = ("scipy", "scikit-learn", "scikit-optimize")
_DECIMAL = re.compile(r"\d+\.\d+")
START = Setting(1, 0.9, 0.05)


def here() -> dict[str, Any]:
    """Return what decides the bits."""
    return {**digests.here(), **{name: version(name) for name in LIBRARIES}}


def everywhere(outcome: Mapping[str, Any]) -> list[str]:
    """Return what of a recorded search is the same on every processor: texts without their decimals, and counts."""
    return [_DECIMAL.sub("#", text) for text in (f"{outcome['probes']} probes", outcome["choice"], *outcome["words"])]


PROBING = tuple(name for name, kind in SAMPLERS.items() if not kind.learns_from_run)
"""Samplers that propose probes."""


@dataclass(frozen=True)
class Machines:
    """Ranks, their network, and how they learn.

    Attributes:
        slowness: of each rank.
        noise: of step times, as the deviation of a logarithm.
        reduction: seconds of an all-reduce over all ranks.
        exchange: seconds of one, for each local step between two of them.
        staleness: what each further group costs, as a logarithm.
        best: the step that learns fastest.
        diverges: the largest step that does not diverge, of several groups.
        rises: the largest step with which the loss does not rise, of several groups.
        above: what is added to the loss of several groups.
        is_timed: whether steps were timed.
    """

    slowness: tuple[float, ...] = (1.0, 1.1, 1.0, 1.3)
    noise: float = 0.1
    reduction: float = 0.1
    exchange: float = 0.01
    staleness: float = 0.1
    best: float = 0.5
    diverges: float = math.inf
    rises: float = math.inf
    above: float = 0.0
    is_timed: bool = True

    def show(self, probe: Probe, batch: int, seed: int, scaling: Scaling) -> Observation:
        """What comes of a probe."""
        random = np.random.default_rng([seed, probe.number])
        setting, ranks = probe.setting, len(self.slowness)
        steps = probe.samples // batch
        groups = list(Topology.even(ranks, setting.groups).groups)
        size = batch / ranks
        own = {
            rank: (0.01 + size * 0.004 * self.slowness[rank]) * random.lognormal(0, self.noise, steps)
            for rank in range(ranks)
        }
        several = len(groups) > 1
        exchanges = [np.full(steps, self.exchange * several / setting.period) for _ in groups]
        rows = [
            np.max([own[rank] for rank in members], axis=0)
            + self.reduction * (len(members) - 1) / len(members)
            + exchange
            for members, exchange in zip(groups, exchanges, strict=True)
        ]
        step = scaling.step(setting)
        pace = math.exp(-self.staleness * (setting.groups - 1) - 0.1 * math.log(max(step, 1e-9) / self.best) ** 2)
        ends = np.arange(1, steps * setting.groups + 1) * batch / setting.groups
        losses = 0.4 + 1.9 / (1 + pace * ends / 500) + random.normal(0, 0.02, len(ends)) + self.above * several
        if several and step > self.rises:
            losses = losses + np.linspace(0, 3, len(losses))
        problem = "diverged: gradients or weights are not finite on rank 0" if several and step > self.diverges else ""
        if problem:
            losses[-3:] = math.nan
        seconds = 0.3 + max(float(row.sum()) for row in rows)
        tried = TrialResult(setting, tuple(ends.tolist()), tuple(losses.tolist()), seconds, problem)
        if not self.is_timed:
            return Observation(tried, None)
        return Observation(
            tried,
            Measured(
                tuple(map(tuple, groups)),
                ((size,) * steps,) * ranks,
                tuple(tuple(own[rank].tolist()) for rank in range(ranks)),
                tuple(tuple(row.tolist()) for row in rows),
                tuple(tuple(each.tolist()) for each in exchanges),
                serve=0.003 * several,
                nbytes=4_000_000,
                period=setting.period,
            ),
        )


FOUR = Machines()
EIGHT = Machines((1, 1, 1.1, 1, 1, 1, 1, 2.6), noise=0.2, exchange=0.014)
NETWORK = Machines((1, 1, 1, 1), reduction=0.01, exchange=0.5, staleness=0.02)


def job(machines: Machines, **changes: Any) -> SearchSpec:
    """What is searched on them."""
    ranks = len(machines.slowness)
    space = changes.pop("space", {})
    made = SearchSpec(START, 16 * ranks, horizon=64_000.0, share=0.1, space=Space.of(space, ranks))
    return replace(made, **changes)


def under_way(machines: Machines, **changes: Any) -> SearchSpec:
    """A search for the size of a step."""
    first_loss, near = changes.pop("first_loss", 2.3), changes.pop("near", False)
    options = {"start": replace(START, groups=4, momentum=0.6), "own": START, "reference": 16.0}
    return job(machines, **{**options, "current": True, "seconds": 40.0, **changes}).for_step(first_loss, near)


def searches() -> dict[str, tuple[Machines, Callable[[Machines], SearchSpec]]]:
    """Machines and jobs, by name."""
    return {
        "four ranks": (FOUR, job),
        "eight ranks": (EIGHT, job),
        "several groups at the start": (FOUR, lambda of: job(of, start=replace(START, groups=4))),
        "an adaptive optimizer": (EIGHT, lambda of: job(of, scaling=Scaling(True), start=Setting(1, 0.9, 0.001))),
        "periods": (NETWORK, lambda of: job(of, space={"period": [1, 4, 16]})),
        "a period of the method": (NETWORK, lambda of: job(of, start=replace(START, period=16))),
        "a small space": (
            FOUR,
            lambda of: job(
                of, space={"groups": [1, 3], "momentum": [0.5, 0.7], "lr": [0.02, 0.04], "rebalance": False}
            ),
        ),
        "one group": (FOUR, lambda of: job(of, space={"groups": 1})),
        "a small budget": (FOUR, lambda of: job(of, share=0.005)),
        "a large budget": (FOUR, lambda of: job(of, share=0.5)),
        "seconds": (FOUR, lambda of: job(of, seconds=12.0, current=True)),
        "what was chosen before": (
            EIGHT,
            lambda of: job(of, start=Setting(4, 0.6, 0.05), own=START, reference=32.0, current=True),
        ),
        "groups that diverge": (replace(FOUR, diverges=0.3, staleness=0.01, reduction=0.5), job),
        "groups that always diverge": (replace(FOUR, diverges=0.0), job),
        "groups whose loss rises": (replace(FOUR, rises=0.2, reduction=0.5), job),
        "groups far above one": (replace(EIGHT, above=0.6), job),
        "nothing timed": (replace(FOUR, is_timed=False), job),
    }


def step_searches() -> dict[str, tuple[Machines, Callable[[Machines], SearchSpec]]]:
    """The same for runs that are under way."""
    return {
        "steps": (FOUR, under_way),
        "steps that are too large": (replace(FOUR, best=0.1), under_way),
        "steps that are too small": (replace(FOUR, best=5.0), under_way),
        "steps that diverge": (replace(FOUR, diverges=0.3), under_way),
        "steps of one group": (FOUR, lambda of: under_way(of, start=START, reference=64.0)),
        "steps without a first loss": (EIGHT, lambda of: under_way(of, first_loss=None)),
        "steps and little time": (FOUR, lambda of: under_way(of, seconds=6.0)),
        "steps near the target": (FOUR, lambda of: under_way(of, near=True)),
        "steps near the target that diverge": (replace(FOUR, diverges=0.3), lambda of: under_way(of, near=True)),
    }


def cases(seeds: int = 1) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every search, by its name."""
    for strategy in PROBING:
        for name, (machines, made) in searches().items():
            for seed in range(seeds):
                yield f"{strategy}: {name}, {seed}", partial(recorded, strategy, machines, made, seed)
    for name, (machines, made) in step_searches().items():
        for seed in range(seeds):
            yield f"bayes: {name}, {seed}", partial(recorded, "bayes", machines, made, seed)


def recorded(strategy: str, machines: Machines, made: Callable[[Machines], SearchSpec], seed: int) -> dict[str, Any]:
    with threadpool_limits(1):  # sums of several threads depend on their number
        return record(strategy, machines, made(machines), seed)


def record(strategy: str, machines: Machines, made: SearchSpec, seed: int) -> dict[str, Any]:
    """What becomes of a search that is carried out to its end."""
    search = Search(replace(made, seed=seed), strategy)
    for _ in range(99):
        if (probe := search.next()) is None:
            break
        search.tell(machines.show(probe, made.batch, seed, made.scaling))
    choice = search.choice()
    probes = [[*_numbers(each.setting), each.samples, each.number] for each in search.probes]
    estimate = choice.estimate
    chosen = [
        *_numbers(choice.setting),
        search.spent,
        search.budget,
        search.divergence_threshold(choice.setting),
        *(
            []
            if estimate is None
            else [*_interval(estimate.seconds), *_interval(estimate.samples), estimate.is_measured]
        ),
        *[_numbers(each) for each in search.candidates()],
    ]
    return {
        "probes": len(probes),
        "choice": str(choice.setting),
        "bits": {
            "proposed": digest([repr(probes)]),
            "chosen": digest([repr(chosen)]),
            "reported": digest([repr(_reported(search))]),
        },
        "words": [choice.why, *(each.why for each in search.probes)],
    }


def _reported(search: Search) -> list[Any]:
    """What a report would show."""
    told = Digest(search)
    if told.profile is None:
        return [told.statement, told.ranks]
    efficiency = SampleEfficiency.of(search.theory, search.tried)
    return [
        [[row.time, row.samples, row.error, row.rate, row.tried.problem] for row in told.probes],
        [_numbers(each) for each in told.curve.values()],
        [_interval(told.time(each.setting)) for each in told.systems.values()],
        [_interval(each.samples_per_second) for each in told.predictions.values()],
        [efficiency(each) for each in told.curve.values()],
        told.statement,
    ]


def _numbers(setting: Setting) -> list[Any]:
    return [setting.groups, setting.momentum, setting.lr, setting.rebalance, setting.period]


def _interval(estimate: Any) -> list[float]:
    return [estimate.value, estimate.low, estimate.high]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep what searches do now")
    parser.add_argument("--seeds", type=int, default=1, help="of noise")
    parser.add_argument("--file", type=Path, default=FILE, help="with what was recorded")
    given = parser.parse_args()
    found = {name: case() for name, case in cases(given.seeds)}
    if given.write:
        given.file.write_text(json.dumps({"here": here(), "searches": found}, indent=1, sort_keys=True) + "\n")
        return
    recorded = json.loads(given.file.read_text())
    kept, elsewhere = recorded["searches"], digests.apart(recorded["here"], here())
    for name in sorted({*kept, *found}):
        was, now = kept.get(name), found.get(name)
        if (was is None or now is None or everywhere(was) != everywhere(now)) if elsewhere else was != now:
            sys.stdout.write(f"{name}:\n  was {was}\n  is  {now}\n")
    if elsewhere:
        sys.stdout.write(f"recorded elsewhere ({elsewhere}): only texts, choices and counts are compared\n")


if __name__ == "__main__":
    main()
