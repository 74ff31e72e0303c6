"""A thousand asynchronous groups in virtual time: updates, seconds, memory, and what a simulated update costs.

    OMP_NUM_THREADS=1 python tests/benchmarks/simulator.py [--devices 1024] [--updates 5000] [--batch-size 8]

Promised are 5000 updates of 1024 groups in 5 minutes on two cores and in 4 GB, and an overhead of at most 15 %: the
time of a simulation that computes gradients one by one, over that of computing the gradients of just these batches.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch
from torch import Tensor, nn

from lightning_omni.simulator import Cluster, Computation, Jitter, Limits, Link, Workload, simulate
from lightning_omni.simulator.workbench import Samples, Workbench
from lightning_omni.trace import Trace


def network() -> nn.Module:
    """A small convolutional network for images of 28 x 28: 43,338 weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(784, 46), nn.ReLU(), nn.Linear(46, 10),
    )  # fmt: skip


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.005, momentum=0.5)


def run(data: Any, devices: int, updates: int, batch_size: int, batched: Any) -> tuple[Trace, float]:
    """A run, and the seconds of processor time that it took, all of it."""
    cluster = Cluster.even(
        devices, 0.1, jitter=Jitter("exponential"), link=Link(1e9, 1e-4), server=Link(1e10), update_seconds=1e-6
    )
    began = time.process_time()
    trace = simulate(
        "async_sgd",
        devices,
        cluster,
        Workload(network(), data, loss=loss, optimizer=sgd),
        batch_size=batch_size,
        limits=Limits(updates=updates),
        computation=Computation(batched=batched),
    )
    return trace, time.process_time() - began


def bare_seconds(data: Any, updates: int, batch_size: int) -> float:
    """Seconds of processor time for just the gradients, one after the other."""
    model = network()
    samples = Samples(data, seed=0)
    bench = Workbench(model, dict(model.named_parameters()), loss, samples, False, batch_size)
    # Other weights every time, as in a run: some hundred sets of them do not fit into the processor's cache.
    weights = [[parameter.detach().clone() for parameter in model.parameters()] for _ in range(500)]
    began = time.process_time()
    for number in range(updates):
        start = number * batch_size % (len(samples) - batch_size)
        bench.compute(weights[number % len(weights)], [samples.batch(samples.at(0, range(start, start + batch_size)))])
    return time.process_time() - began


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # processor time is told, which busy waiting of a second thread would spoil
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(60_000, 1, 28, 28, generator=generator), torch.randint(0, 10, (60_000,), generator=generator)
    )
    run(data, 16, 32, arguments.batch_size, "auto")  # torch imports what it needs at first use
    trace, together = run(data, arguments.devices, arguments.updates, arguments.batch_size, "auto")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{arguments.devices} groups, {trace.updates} updates, mean staleness {trace.mean_staleness:.1f}")
    print(f"batched: {together:.1f} s, {together / trace.updates * 1e3:.3f} ms an update, peak memory {peak:.2f} GiB")
    # Every other measurement twice and interleaved: other programs come and go.
    ratios = []
    for _ in range(2):
        bare = bare_seconds(data, arguments.updates, arguments.batch_size)
        _, alone = run(data, arguments.devices, arguments.updates, arguments.batch_size, False)
        ratios.append(alone / bare)
        print(
            f"one by one: {alone:.1f} s; gradients alone: {bare:.1f} s; overhead {ratios[-1] - 1:.1%};"
            f" batched / gradients alone {together / bare:.2f}"
        )


if __name__ == "__main__":
    main()
