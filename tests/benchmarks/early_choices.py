"""What it costs to choose groups after few batches of a run, and what to wait for more. By the hardware model.

    OMP_NUM_THREADS=1 python tests/benchmarks/early_choices.py --ranks 4 8 16   # ten minutes

Step times of every rank are drawn, and what `OmniTuner` would decide after 3, 6, 12, 24 and 48 steps is what it decides
by these; how fast each decision is, is the forecast from so many steps that their scatter is known. A run of one group
trains until it is decided, and then as was decided. Printed is how many times faster than one group runs of so many
steps are, the geometric mean over all patterns and seeds, if nothing is decided before a part of the run unless each
rank's mean step time is known well. The part with a star is the one that `OmniTuner` waits for.

The patterns are no cluster's that anything else is judged by. A change of one group's batches is looked at once more,
as in a fit; that a run's speed is checked later on, and groups are given up or formed, is left out.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lightning_omni.tuning.callback.online_tuner import DECISION_STEPS
from lightning_omni.tuning.model.measurements import Measured, TrainedBatches
from lightning_omni.tuning.model.setting import Scaling, Setting
from lightning_omni.tuning.search import Observation, Search, SearchSpec, Space
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.search.choice import verdict
from lightning_omni.tuning.search.space import DEFAULT_ALL_REDUCES, DEFAULT_METHODS, DEFAULT_WIRES

Array = np.ndarray[Any, Any]
Draw = Callable[[np.random.Generator, tuple[int, int]], Array]

OWN = Setting(1, 0.9, 0.05, method="async_sgd", wire="fp32", all_reduce="fp32")
BATCH = 32
STEP = 0.1
"""Seconds of a whole batch, on average."""
UNTIMED = 2
"""Steps of the first ones that are not timed, or are warm-up."""
MANY = 600
"""Steps by which a decision is judged."""
LENGTHS = (150, 300, 1000, 4000, 20000)
PARTS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.1)


def last(factor: float, draw: Draw) -> Draw:
    """The last rank slower."""

    def slowed(random: np.random.Generator, shape: tuple[int, int]) -> Array:
        times = draw(random, shape)
        times[-1] *= factor
        return times

    return slowed


PATTERNS: dict[str, Draw] = {
    "exponential": lambda random, shape: random.exponential(1.0, shape),
    "lognormal": lambda random, shape: random.lognormal(-0.32, 0.8, shape),
    "lognormal, less": lambda random, shape: random.lognormal(-0.08, 0.4, shape),
    "lognormal, little": lambda random, shape: random.lognormal(-0.02, 0.2, shape),
    "gamma": lambda random, shape: random.gamma(4.0, 0.25, shape),
    "Pareto": lambda random, shape: 0.4 * (1 + random.pareto(1.6, shape)),
    "uniform": lambda random, shape: random.uniform(0.2, 1.8, shape),
    "stalls": lambda random, shape: np.where(random.random(shape) < 0.03, 15.0, 1.0),
    "one slow, exponential": last(4.0, lambda random, shape: random.exponential(1.0, shape)),
    "one slow": last(3.0, lambda random, shape: random.gamma(25.0, 0.04, shape)),
}


@dataclass(frozen=True)
class Look:
    """What would be decided after so many steps.

    Attributes:
        steps: of the run so far.
        is_clear: whether it would be decided by then, if it may be.
        is_known: whether it would be however small a part of the run that is.
        splits: whether it is one group's batches that are split, and timed again.
        cost: logarithm of the time to the target with what is decided, but for a constant.
    """

    steps: int
    is_clear: bool
    is_known: bool
    splits: bool
    cost: float


class Cluster:
    """Ranks whose step times are drawn.

    Args:
        ranks: how many.
        draw: factors of their step times, shape (ranks, steps).
    """

    def __init__(self, ranks: int, draw: Draw) -> None:
        self.ranks, self._draw = ranks, draw
        known = self._search([self._measured(draw(np.random.default_rng(999), (ranks, MANY)), np.full(ranks, BATCH))])
        known.choice()
        self._truth = known

    def _measured(self, factors: Array, samples: Array) -> Measured:
        """As `OmniTuner` would measure them in one group, on links on which bytes take no time to speak of."""
        own = STEP * factors * samples[:, None] / BATCH
        count = factors.shape[1]
        return Measured(
            ranks=tuple(range(self.ranks)),
            samples=tuple((float(number),) * count for number in samples),
            own=tuple(map(tuple, own)),
            steps=tuple(own.max(axis=0) + 2e-3),
            serve=5e-4,
            round_trip=3e-4,
            reduce_per_byte=1e-9,
            hands_on=True,
            nbytes=2_000_000,
            shapes=((1000, 500),),
            averaging=dict.fromkeys(DEFAULT_ALL_REDUCES, 1e-3),
        )

    def _search(self, measured: list[Measured]) -> Search:
        space = Space.of({}, self.ranks, momentum=OWN.momentum)
        space = replace(space, method=DEFAULT_METHODS, compression=DEFAULT_WIRES, all_reduce=DEFAULT_ALL_REDUCES)
        batch, count = BATCH * self.ranks, len(measured[-1].steps)
        ends = tuple(float(batch * (number + 1)) for number in range(count))
        seen = Observation(TrainedBatches(ends, (1.0,) * count), measured[-1])
        return Search(SearchSpec(OWN, batch, 1e6, space, Scaling(False)), seen, measured[:-1])

    @property
    def of_one_group(self) -> float:
        """See `Look`."""
        return self._truth.log_time(OWN)

    def looks(self, seed: int) -> list[Look]:
        """All of a run's, in their order."""
        factors = self._draw(np.random.default_rng(seed), (self.ranks, 128))
        samples, trained = np.full(self.ranks, BATCH), 0
        known: list[Measured] = []
        found: list[Look] = []
        for number, steps in enumerate(DECISION_STEPS):
            timed = slice(trained, trained + max(2, steps - UNTIMED))
            search = self._search([*known, self._measured(factors[:, timed], samples)])
            is_early = number == 0
            is_clear, choice = bool(verdict(search, is_early=is_early)), search.choice(asks=not is_early).setting
            is_known = bool(verdict(search, is_early=is_early, can_wait=True))
            splits = is_early and is_clear
            found.append(Look(trained + steps, is_clear, is_known, splits, self._truth.log_time(choice)))
            if splits:
                known, trained = [self._measured(factors[:, timed], samples)], steps
                speeds = 1 / factors[:, timed].mean(axis=1)
                samples = np.maximum(1, np.round(BATCH * self.ranks * speeds / speeds.sum()))
        return found


def gain(looks: list[Look], of_one_group: float, length: int, part: float) -> float:
    """Logarithm of how many times faster than one group a run of that length is."""
    cost, seconds, trained = of_one_group, 0.0, 0
    for look in looks:
        if look.steps >= length:
            break
        seconds += (look.steps - trained) * math.exp(cost)
        trained = look.steps
        is_last = look is looks[-1]
        if look.splits:
            cost = look.cost
        elif is_last or look.is_known or (look.is_clear and look.steps >= part * length):
            cost = look.cost
            break
    seconds += (length - trained) * math.exp(cost)
    return math.log(length) + of_one_group - math.log(seconds)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    console = Console()
    for ranks in options.ranks:
        runs = []
        for draw in track(PATTERNS.values(), description=f"{ranks} ranks", console=console, transient=True):
            cluster = Cluster(ranks, draw)
            runs += [(cluster.looks(seed), cluster.of_one_group) for seed in range(options.seeds)]
        table = Table(title=f"{ranks} ranks: times as fast as one group (worst run)")
        table.add_column("steps of the run", justify="right")
        for part in PARTS:
            table.add_column(f"{part:.0%} first" + (" *" if part == c.WAITING_SHARE else ""), justify="right")
        for length in LENGTHS:
            gains = [[gain(*run, length, part) for run in runs] for part in PARTS]
            cells = (f"{math.exp(statistics.fmean(each)):.3f} ({math.exp(min(each)):.2f})" for each in gains)
            table.add_row(str(length), *cells)
        console.print(table)


if __name__ == "__main__":
    main()
