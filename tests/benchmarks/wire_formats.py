"""What wire formats cost in accuracy, and save in bytes: methods by formats, paired seeds, real digits.

    OMP_NUM_THREADS=1 python tests/benchmarks/wire_formats.py [--seeds 10] [--epochs 20] [--methods ...] [--wires ...]

Four groups on a simulated cluster train a small network on the 1,797 digits of 8 x 8 that scikit-learn ships, three
quarters of them, for the same number of updates whatever the format. Told is the accuracy on the last quarter: that of
float32 pushes, and the differences of each format to it, in points, as mean and 95 % confidence interval over the
seeds. Wanted is an interval that reaches within 0.3 points.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy
import torch
from scipy import stats
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_omni.simulator import Cluster, Jitter, Limits, Workload, simulate
from lightning_omni.wire.formats import wire_named
from lightning_omni.wire.layout import Layout

METHODS = (
    *("async_sgd", "hardsync", "softsync:n=2", "diloco:period=8", "async_diloco:period=8", "local_sgd:period=8"),
    "elastic_averaging:period=8",
)
WIRES = ("bf16", "fp16", "int8", "topk:0.1", "topk:0.01")
GROUPS, LARGEST = 4, 0.3


def digits(seed: int) -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """For training and for the accuracy; another split for each seed."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    first = len(x) * 3 // 4
    return TensorDataset(x[:first], y[:first]), (x[first:], y[first:])


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(method: str, wire: str, seed: int, epochs: int) -> float:
    """In points, of the model that the method would evaluate."""
    data, (x, y) = digits(seed)
    at_server = method.partition(":")[0] in ("async_sgd", "hardsync", "softsync")
    trace = simulate(
        method,
        GROUPS,
        Cluster.even(GROUPS, jitter=Jitter("lognormal", 0.3)),
        Workload(
            network(seed),
            data,
            loss=loss,
            optimizer=lambda own: torch.optim.SGD(own, lr=0.05 if at_server else 0.1, momentum=0.5),
        ),
        batch_size=16,
        limits=Limits(epochs=epochs),
        seed=seed,
        compression=wire,
    )
    model = network(seed)
    model.load_state_dict({name: torch.tensor(weight) for name, weight in trace.weights.items()})
    with torch.no_grad():
        return 100 * float((model(x).argmax(1) == y).float().mean())


def part_of_fp32(wire: str) -> float:
    """Bytes of a push of the network, of those in float32."""
    layout = Layout.of({name: value.detach() for name, value in network(0).named_parameters()})
    return wire_named(wire).sizes(layout)[1] / (4 * layout.numel)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--wires", nargs="+", default=WIRES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(arguments.seeds)
    print("bytes of a push: " + ", ".join(f"{wire} {part_of_fp32(wire):.3f}" for wire in arguments.wires))
    print("| method | fp32 | " + " | ".join(arguments.wires) + " |")
    print("|---|---|" + "---|" * len(arguments.wires))
    for method in arguments.methods:
        exact = numpy.array([accuracy(method, "fp32", seed, arguments.epochs) for seed in seeds])
        cells = []
        for wire in arguments.wires:
            if wire.startswith("topk") and method.partition(":")[0] in ("local_sgd", "elastic_averaging"):
                cells.append("refused")
                continue
            differences = numpy.array([accuracy(method, wire, seed, arguments.epochs) for seed in seeds]) - exact
            half = stats.sem(differences) * stats.t.ppf(0.975, len(seeds) - 1)
            mark = "" if abs(differences.mean()) - half <= LARGEST else " (!)"
            cells.append(f"{differences.mean():+.2f} ± {half:.2f}{mark}")
        print(f"| `{method}` | {exact.mean():.1f} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
