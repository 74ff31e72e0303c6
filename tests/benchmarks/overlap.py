"""How much of an exchange is hidden behind the next step: two real groups over ZeroMQ, with an emulated step.

    OMP_NUM_THREADS=1 python tests/benchmarks/overlap.py [--megabytes 20] [--steps 30]

An exchange (push, a step of SGD with momentum at the server, pull) is measured by itself first, with both groups at it.
Then a step is made to take 1.2 times as long by sleeping, so that the processor is free as it is beside an accelerator;
told is the time of a step without and with ``overlap=True``, and the part of the exchange that is hidden. Wanted are
80 %.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runs import free_port

from lightning_omni import OmniOptimizer, World
from lightning_omni.optimizer import WorldOptions

GROUPS, LONGER, WANTED = 2, 1.2, 0.8


def step_time(overlap: bool, seconds: float, numbers: int, steps: int) -> float:
    """Median time of a step that computes for so many seconds, and exchanges so many numbers."""
    world = World(options=WorldOptions(groups=GROUPS, overlap=overlap))
    weight = nn.Parameter(torch.zeros(numbers))
    world.broadcast_initial(nn.ParameterList([weight]))
    optimizer = OmniOptimizer(torch.optim.SGD([weight], lr=1e-3, momentum=0.9), world)
    took = []
    with world.training():
        for _ in range(steps):
            began = time.perf_counter()
            if seconds:
                time.sleep(seconds)
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            took.append(time.perf_counter() - began)
    return statistics.median(took[3:])


def measure(rank: int, port: int, numbers: int, steps: int) -> None:
    """One rank. Rank 0 prints."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=GROUPS)
    exchange = torch.tensor(step_time(False, 0.0, numbers, steps))
    dist.broadcast(exchange, src=0)
    step = LONGER * float(exchange)
    apart, beside = (step_time(overlap, step, numbers, steps) for overlap in (False, True))
    if rank == 0:
        print(f"{numbers * 4e-6:g} MB, {GROUPS} groups: exchange {exchange * 1e3:.1f} ms, step {step * 1e3:.1f} ms")
        print(f"both {apart * 1e3:.1f} ms; overlapping {beside * 1e3:.1f} ms", end=": ")
        print(f"{(apart - beside) / (apart - step):.0%} hidden, {WANTED:.0%} are wanted")
    dist.destroy_process_group()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    given = free_port(), int(arguments.megabytes * 1e6 / 4), arguments.steps
    ranks = [mp.get_context("spawn").Process(target=measure, args=(rank, *given)) for rank in range(GROUPS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    main()
