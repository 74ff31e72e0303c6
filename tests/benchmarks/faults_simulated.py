"""What random faults cost groups that come and go: predicted in virtual time, also for a thousand groups.

    python tests/benchmarks/faults_simulated.py --groups 4 --minutes 26 --faults 87 --step 0.5 --seed 5

`faults.py` measures it with processes that are killed; this draws a schedule of the same form (the seed, kinds in equal
parts, a moment for each, a group that works) and simulates it from what one measures of a few deaths:

    --start     seconds from the death of a group to its first batch, and from its return after an eviction
    --silence   the server's heartbeat time-out, after which a group that is frozen or cut off is evicted
    --away      seconds for which it is
    --exchange  seconds of a push and its answer
    --validation                for which all groups validate, and get ready for the next epoch, when one has ended

Printed is the goodput as `faults.py` counts it: the seconds of each batch once, over the time that groups were up,
which is without the seconds for which they were frozen or cut off; and how many batches were computed in vain. Then the
same for --many groups, at the same rate of faults for each group (--many-minutes, for a thousand groups compute 2,000
batches in a second).

At the end of an epoch all groups wait for the last one. Of a thousand, one is nearly always frozen then, or has just
come back, and a simulated group that comes back to an epoch of which nothing is left trains a batch again, for which a
real one would not be let in. So the second run has no such end by default (--many-epoch).

What differs from a measured run: a fault never hits rank 0, whose death would end a simulated run, nor a group that is
starting; a group that leaves loses the batch under way like one that is killed, and one that freezes finishes it; time
to start at first, and for validation, is added when all is over; and groups have a device each to themselves.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_omni.simulator import Cluster, Failure, Limits, Link, Slowdown, Workload, simulate
from lightning_omni.trace import Trace

KINDS = ("kill", "leave", "freeze", "cut")
ABSENT = ("freeze", "cut")
FIRST = 10.0
"""Seconds before the first fault."""
STOPPED = 1e6
"""Times as long a batch takes that a frozen group begins: it never ends."""


@dataclass(frozen=True)
class Durations:
    """What was measured of a few faults, in seconds; see the options."""

    start: float
    silence: float
    away: float
    exchange: float
    validation: float


@dataclass(frozen=True)
class Fault:
    """What happens, to which rank, when, and until when that rank is away."""

    kind: str
    rank: int
    time: float
    until: float

    def events(self, durations: Durations) -> list[Failure | Slowdown]:
        """The same for the simulator."""
        if self.kind not in ABSENT:
            return [Failure(self.rank, self.time, self.until)]
        evicted = self.time + durations.silence
        return [Slowdown(self.rank, self.time, evicted, STOPPED), Failure(self.rank, evicted, self.until)]

    def absence(self, durations: Durations, end: float) -> float:
        """Seconds before the end of the run that are not counted: no software could use them."""
        return max(0.0, min(durations.away, end - self.time)) if self.kind in ABSENT else 0.0


def schedule(groups: int, seconds: float, counts: Counter[str], durations: Durations, seed: int) -> list[Fault]:
    """So many faults of each kind, at random moments."""
    chance, found = random.Random(seed), list[Fault]()
    kinds = sorted(counts.elements(), key=KINDS.index)
    chance.shuffle(kinds)
    away = [0.0] * groups
    for moment, kind in zip(sorted(chance.uniform(FIRST, seconds) for _ in kinds), kinds, strict=True):
        if free := [rank for rank in range(1, groups) if away[rank] <= moment]:
            rank = chance.choice(free)
            away[rank] = moment + durations.start + (durations.away if kind in ABSENT else 0.0)
            found.append(Fault(kind, rank, moment, away[rank]))
    return found


def equal_parts(faults: int, kinds: Sequence[str]) -> Counter[str]:
    """That many faults, in equal parts of each kind."""
    return Counter(kinds[number % len(kinds)] for number in range(faults))


def scaled(counts: Counter[str], groups: float, minutes: float) -> Counter[str]:
    """As many faults of each group in a minute where there are so many times as many groups and minutes."""
    return Counter({kind: round(number * minutes * groups) for kind, number in counts.items()})


def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Any: only times matter, and with a rate of 0 a thousand groups cannot diverge."""
    value: Tensor = model(batch[0]).square().mean()
    return value


def train(
    groups: int, seconds: float, epoch: float, faults: Sequence[Fault], of: Durations, args: argparse.Namespace
) -> Trace:
    """A run of so many seconds, with so many batches of a group in an epoch; a sample stands for a batch."""
    events = [event for fault in faults for event in fault.events(of)]
    link = Link(latency=of.exchange / 2)
    cluster = Cluster.even(groups, args.step, link=link, events=tuple(events))
    return simulate(
        args.method,
        groups,
        cluster,
        Workload(
            nn.Linear(1, 1),
            TensorDataset(torch.ones(round(epoch * groups), 1)),
            loss=loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        ),
        batch_size=1,
        limits=Limits(seconds=seconds),
    )


def report(
    groups: int, seconds: float, epoch: float, counts: Counter[str], of: Durations, args: argparse.Namespace
) -> None:
    """Simulates and prints."""
    faults, began = schedule(groups, seconds, counts, of, args.seed), time.perf_counter()
    trace = train(groups, seconds, epoch, faults, of, args)
    up = trace.device_seconds - sum(fault.absence(of, trace.seconds) for fault in faults)
    up += of.start * groups + of.validation * groups * math.floor(
        trace.useful_seconds / args.step / round(epoch * groups)
    )
    computed = float(trace.work["seconds"].sum())
    done = dict(Counter(fault.kind for fault in faults))
    print(
        f"{groups} groups, {trace.seconds:.0f} s ({trace.ended}), seed {args.seed}, {done or 'no faults'}: goodput"
        f" {trace.useful_seconds / up:.3f} (batches that were computed in vain or not pushed"
        f" {(computed - trace.useful_seconds) / up:.3f}), {time.perf_counter() - began:.0f} s to simulate",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=26.0)
    parser.add_argument("--faults", type=int, default=87)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--step", type=float, default=0.5, help="seconds of a batch")
    parser.add_argument("--epoch", type=float, default=32, help="batches of a group in an epoch, at whose end all meet")
    parser.add_argument("--many-epoch", type=float, default=1000, help="the same of the second run")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what happens")
    parser.add_argument("--method", default="async_sgd")
    parser.add_argument("--many", type=int, default=1000, help="groups of the second run; 0 for none")
    parser.add_argument("--many-minutes", type=float, default=2.0)
    measured: dict[str, Any] = {
        "start": 5.0, "silence": 5.0, "away": 9.0, "exchange": 0.0, "validation": 0.0,
    }  # fmt: skip
    for name, value in measured.items():
        parser.add_argument(f"--{name}", type=float, default=value, help="seconds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    of = Durations(args.start, args.silence, args.away, args.exchange, args.validation)
    counts = equal_parts(args.faults, args.kinds)
    for each in (Counter[str](), counts):
        report(args.groups, 60 * args.minutes, args.epoch, each, of, args)
    if args.many:
        more = scaled(counts, args.many / args.groups, args.many_minutes / args.minutes)
        report(args.many, 60 * args.many_minutes, args.many_epoch, more, of, args)


if __name__ == "__main__":
    main()
