"""Decoupled DiLoCo where groups fail, come back and are slow for a while, against DiLoCo where nothing fails.

    python tests/benchmarks/decoupled.py [--groups 64] [--seeds 3] [--steps 128]

In virtual time, with real gradients: groups of one device, one pass over the data, so all train on the same samples.
The schedule is drawn from the seed: after 500 steps on the average a group fails, and comes back after 15; after 300 on
the average it is slow for 10 steps, each of which takes four times as long. Printed for each method, over the seeds:
goodput (useful device time over all device time), the loss on held-out samples, and that over the loss of DiLoCo
without failures. Promised are, for Decoupled DiLoCo, a goodput of at least 0.88 and a loss within 1 %. All have the
outer momentum that is best for DiLoCo without failures, of 0.5 to 0.9 in tenths.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from statistics import mean

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_omni.simulator import Cluster, Failure, Jitter, Limits, Link, Slowdown, Workload, simulate
from lightning_omni.simulator.workload import classification_loss, classification_metrics
from lightning_omni.trace import Trace

PERIOD, BATCH, MOMENTUM = 8, 8, 0.6
STEP = 1.0
"""Seconds of a batch."""
BETWEEN_FAILURES, AWAY = 500.0, 15.0
BETWEEN_SLOW_TIMES, SLOW, FACTOR = 300.0, 10.0, 4.0
HELD_OUT = 8192
"""Samples to evaluate by."""
GOODPUT, LOSS = 0.88, 0.01
"""What is promised."""
SETTINGS = f"period={PERIOD},outer_momentum={MOMENTUM}"
METHODS = {
    "DiLoCo": f"diloco:{SETTINGS}",
    "Asynchronous DiLoCo": f"async_diloco:{SETTINGS}",
    "Decoupled DiLoCo": f"decoupled_diloco:{SETTINGS},fragments=4",
}


@dataclass(frozen=True)
class Task:
    """Points of ten classes that overlap, and others to evaluate by."""

    data: TensorDataset
    held_out: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, samples: int, seed: int) -> Task:
        """So many points to train on."""
        random = torch.Generator().manual_seed(seed)
        centres = torch.randn(10, 24, generator=random)
        labels = torch.randint(0, 10, (samples + HELD_OUT,), generator=random)
        points = centres[labels] + 1.8 * torch.randn(samples + HELD_OUT, 24, generator=random)
        return cls(TensorDataset(points[:samples], labels[:samples]), (points[samples:], labels[samples:]))


def schedule(groups: int, seconds: float, seed: int) -> tuple[Failure | Slowdown, ...]:
    """Who fails and who is slow, and when; the first group, whose rank 0 records, does not fail."""
    random, events = np.random.default_rng((seed, groups)), list[Failure | Slowdown]()
    for rank in range(groups):
        now = random.exponential(BETWEEN_SLOW_TIMES)
        while now < seconds:
            events.append(Slowdown(rank, now, now + SLOW * FACTOR, FACTOR))
            now += SLOW * FACTOR + random.exponential(BETWEEN_SLOW_TIMES)
        now = random.exponential(BETWEEN_FAILURES)
        while rank and now < seconds:
            events.append(Failure(rank, now, now + AWAY * STEP))
            now += AWAY * STEP + random.exponential(BETWEEN_FAILURES)
    return tuple(events)


def train(method: str, groups: int, steps: int, seed: int, fails: bool) -> Trace:
    """One run."""
    task = Task.of(groups * steps * BATCH, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 10))
    events = schedule(groups, 3 * steps * STEP, seed) if fails else ()
    link = Link(bandwidth=1e6, latency=0.01)
    cluster = Cluster.even(groups, STEP / BATCH, jitter=Jitter("lognormal", 0.1), link=link, events=events)
    points, labels = task.held_out
    return simulate(
        method,
        groups,
        cluster,
        Workload(
            model,
            task.data,
            loss=classification_loss,
            evaluate=lambda net: classification_metrics(net, points, labels),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ),
        batch_size=BATCH,
        limits=Limits(epochs=1),
        seed=seed,
    )


def main() -> int:
    """Measures and prints; 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=128, help="of each group, on the average")
    parser.add_argument("--method", action="append", help="another method than those that are compared")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds, size = range(options.seeds), (options.groups, options.steps)
    quiet = [float(train(METHODS["DiLoCo"], *size, seed, fails=False).evaluated["loss"][-1]) for seed in seeds]
    print(f"{options.groups} groups, {options.steps} steps of {BATCH} samples each, {options.seeds} seeds")
    print(f"{'':42} goodput  seconds    loss   loss / DiLoCo's without failures")
    print(f"{'DiLoCo, nothing fails':42} {'':8} {'':8} {mean(quiet):.4f}")
    met = True
    methods = {name: name for name in options.method} if options.method else METHODS
    for name, method in methods.items():
        began, traces = time.perf_counter(), [train(method, *size, seed, fails=True) for seed in seeds]
        losses = [float(trace.evaluated["loss"][-1]) for trace in traces]
        ratios = [loss / base for loss, base in zip(losses, quiet, strict=True)]
        goodput = mean(trace.goodput for trace in traces)
        took = (time.perf_counter() - began) / len(traces)
        print(f"{name:42} {goodput:7.3f} {mean(trace.seconds for trace in traces):8.0f}  {mean(losses):.4f}"
              f"   {mean(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})   {took:.0f} s a run")  # fmt: skip
        if name == "Decoupled DiLoCo":
            met = goodput >= GOODPUT and mean(ratios) <= 1 + LOSS
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
