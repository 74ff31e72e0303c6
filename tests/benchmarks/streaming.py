"""Streaming against the plain methods: loss at equal samples, and bytes in any window of H/P steps.

    OMP_NUM_THREADS=1 python tests/benchmarks/streaming.py [--seeds 5] [--epochs 16]

Four groups on a simulated cluster train a softmax classifier on noisy labels, with a period of 16 steps. Told are, for
each setting, the loss over that of the plain method after the same samples, as mean and 95 % confidence interval over
paired seeds (wanted is at most 0.5 % more), and the most bytes that a group pushes in any window of H/P steps over
those of a plain push (wanted are at most 1.2 / P).
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_omni.methods import method_named
from lightning_omni.protocol.layout import Layout
from lightning_omni.simulator import Cluster, simulate

GROUPS, PERIOD = 4, 16
SETTINGS = (
    ("diloco", 0.1, "fragments=4"),
    ("diloco", 0.1, "fragments=4,delay=2"),
    ("diloco", 0.1, "fragments=4,delay=2,alpha=0.5"),
    ("local_sgd", 0.1, "fragments=4,delay=2"),
    ("local_sgd", 0.1, "fragments=4,delay=2,alpha=0.5"),
    ("async_diloco", 0.1, "fragments=4"),
    ("async_diloco:outer_momentum=0.5", 0.1, "fragments=4"),
)


def problem(seed: int) -> tuple[nn.Module, TensorDataset]:
    """A model, and samples of which a part has wrong labels: no setting comes to a loss of zero."""
    generator = torch.Generator().manual_seed(seed)
    inputs, rows = (torch.randn(shape, generator=generator) for shape in ((1024, 16), (16, 4)))
    labels = (inputs @ rows + 2.0 * torch.randn(1024, 4, generator=generator)).argmax(1)
    torch.manual_seed(seed)
    return nn.Linear(16, 4), TensorDataset(inputs, labels)


def loss(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def final_loss(method: str, lr: float, seed: int, epochs: int) -> float:
    """Over all samples."""
    model, data = problem(seed)
    trace = simulate(
        method,
        GROUPS,
        Cluster.even(GROUPS),
        model,
        data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        loss=loss,
        batch_size=8,
        max_epochs=epochs,
        seed=seed,
        evaluate=lambda trained: {"loss": float(loss(trained, data.tensors))},
    )
    return float(trace.evaluated["loss"][-1])


def share(settings: str) -> float:
    """Of a plain push's bytes, the most in a window of H/P steps: there one fragment is pushed, the largest, say."""
    of = method_named(f"diloco:period={PERIOD},{settings}").fragments
    layout = Layout.of(dict(nn.Linear(1000, 100).named_parameters()))
    return max(layout.fragment(number, of).nbytes for number in range(of)) / layout.nbytes * of


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=16)
    arguments = parser.parse_args()
    plain: dict[tuple[str, float], list[float]] = {}
    for name, lr, settings in SETTINGS:
        seeds = range(arguments.seeds)
        method = f"{name}{',' if ':' in name else ':'}period={PERIOD}"
        if (name, lr) not in plain:
            plain[name, lr] = [final_loss(method, lr, seed, arguments.epochs) for seed in seeds]
        streamed = [final_loss(f"{method},{settings}", lr, seed, arguments.epochs) for seed in seeds]
        more = 100 * (numpy.array(streamed) / numpy.array(plain[name, lr]) - 1)
        reach = stats.t.ppf(0.975, len(more) - 1) * more.std(ddof=1) / len(more) ** 0.5
        print(
            f"{name}:{settings}: loss {more.mean():+.2f} % ± {reach:.2f}, bytes {share(settings):.3f} / P", flush=True
        )


if __name__ == "__main__":
    main()
