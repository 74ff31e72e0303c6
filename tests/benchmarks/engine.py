"""What the simulator's engine costs beyond the gradients, and how much memory ten thousand groups need.

    OMP_NUM_THREADS=1 python tests/benchmarks/engine.py [--groups 1024] [--updates 3000] [--rounds 5] [--most 10000]

Wanted are at most 10 % of the gradients' time at batch 8 with 1,024 groups, and 10,000 groups in 8 GB.

Each round measures, one after the other, the gradients alone and a whole run that computes as many of them one by one;
both in seconds of processor time, so that other programs count as little as they can. The median over the rounds is
told. A third run, which is given its gradients instead of computing them, says what the rest is made of: each group's
process, the server whole (messages, leases, records, the user's optimizer) and a copy of the weights for each update.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.simulator import bare_seconds, network, run
from lightning_omni.simulator.workbench import Result, Workbench

BATCH = 8
LARGEST_RATIO, LARGEST_GIB = 1.10, 8.0


def samples() -> TensorDataset:
    """Random images of 28 x 28, as many as MNIST has."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(60_000, 1, 28, 28, generator=generator), torch.randint(0, 10, (60_000,), generator=generator)
    )


@contextmanager
def given_gradients() -> Iterator[None]:
    """Within it, gradients are the same small numbers, which take no time."""
    gradient = [torch.full_like(parameter, 1e-9) for parameter in network().parameters()]
    compute = Workbench.compute
    Workbench.compute = lambda *_: Result(list(gradient), 1.0)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Workbench.compute = compute  # type: ignore[method-assign]


def peak_gib() -> float:
    """The most memory that this process had, in GiB."""
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def overhead(data: Any, groups: int, updates: int, rounds: int) -> None:
    """Prints the seconds of gradients alone and of whole runs."""
    run(data, 16, 32, BATCH, False)  # torch imports what it needs at first use
    alone, whole, rest = [], [], []
    for _ in range(rounds):
        alone.append(bare_seconds(data, updates, BATCH))
        trace, seconds = run(data, groups, updates, BATCH, False)
        assert trace.updates == updates
        whole.append(seconds)
        with given_gradients():
            rest.append(run(data, groups, updates, BATCH, False)[1])
    for name, times in (("gradients alone", alone), ("whole run", whole), ("given its gradients", rest)):
        print(f"{name:20} {statistics.median(times) / updates * 1e6:7.0f} us an update")
    ratios = [one / other for one, other in zip(whole, alone, strict=True)]
    ratio, said = statistics.median(ratios), verdict(statistics.median(ratios) <= LARGEST_RATIO)
    print(
        f"{groups} groups, batch {BATCH}: {ratio - 1:.1%} beyond the gradients ({min(ratios) - 1:.1%} to"
        f" {max(ratios) - 1:.1%} in {rounds} rounds; wanted: {LARGEST_RATIO - 1:.0%}, {said})"
    )


def memory(groups: int) -> None:
    """Prints the memory of a run in which each group has pushed about once; in a process of its own."""
    began = time.process_time()
    trace, _ = run(samples(), groups, groups, BATCH, "auto")
    peak = peak_gib()
    print(
        f"{groups} groups, {trace.updates} updates, up to {trace.meta['most_snapshots']} different weights at a time:"
        f" {peak:.2f} GiB (wanted: {LARGEST_GIB:g}, {verdict(peak <= LARGEST_GIB)}),"
        f" {time.process_time() - began:.0f} s of processor time"
    )


def verdict(holds: bool) -> str:
    """In words."""
    return "holds" if holds else "falls short"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=3000, help="of each run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=10_000, help="groups whose memory is measured")
    parser.add_argument("--only-memory", action="store_true", help="just that, in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # processor time is told, which busy waiting of a second thread would spoil
    if arguments.only_memory:
        memory(arguments.most)
        return
    overhead(samples(), arguments.groups, arguments.updates, arguments.rounds)
    own = [sys.executable, str(Path(__file__).resolve()), "--only-memory", "--most", str(arguments.most)]
    subprocess.run(own, check=True)


if __name__ == "__main__":
    main()
