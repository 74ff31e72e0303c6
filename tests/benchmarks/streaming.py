"""Streaming against the plain methods: loss at equal samples, and bytes in any window of H/P steps.

    OMP_NUM_THREADS=1 python tests/benchmarks/streaming.py [--seeds 5] [--epochs 16]
    OMP_NUM_THREADS=1 python tests/benchmarks/streaming.py --tasks --seeds 2    # samples to a target, 20 minutes
    OMP_NUM_THREADS=1 python tests/benchmarks/streaming.py --slow               # with a slow host, 5 minutes

Four groups on a simulated cluster train a softmax classifier on noisy labels, with a period of 16 steps. Told are, for
each setting, the loss over that of the plain method after the same samples, as mean and 95 % confidence interval over
paired seeds (wanted is at most 0.5 % more), and the most bytes that a group pushes in any window of H/P steps over
those of a plain push (wanted are at most 1.2 / P).

With ``--tasks`` four and eight groups average their weights on tasks to develop on (`tasks.py`), with step times that
hardly differ and links that take no time: told are the samples to the target over those of one group, the geometric
mean over tasks and orders of the data, for delays whose steps are lost and for those whose steps are kept.

With ``--slow`` one of four groups is four times slower, on all tasks with SGD: told are samples to the target over
those of one group, and samples per second over those of groups that all wait for the slow one, without and with dynamic
steps.
"""

from __future__ import annotations

import argparse
import math
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import numpy
import torch
from prior import beside_one_group
from scipy import stats
from tasks import DEVELOPING, PRIOR_CLUSTERS, Task, cluster_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_omni.methods import method_named
from lightning_omni.simulator import Cluster, Limits, Workload, simulate
from lightning_omni.wire.layout import Layout

GROUPS, PERIOD = 4, 16
SETTINGS = (
    ("diloco", 0.1, "fragments=4"),
    ("diloco", 0.1, "fragments=4,delay=2"),
    ("diloco", 0.1, "fragments=4,delay=2,alpha=0.5"),
    ("diloco", 0.1, "fragments=4,delay=2,keep_steps=true"),
    ("local_sgd", 0.1, "fragments=4,delay=2"),
    ("local_sgd", 0.1, "fragments=4,delay=2,alpha=0.5"),
    ("local_sgd", 0.1, "fragments=4,delay=2,keep_steps=true"),
    ("async_diloco", 0.1, "fragments=4"),
    ("async_diloco:outer_momentum=0.5", 0.1, "fragments=4"),
)
KEPT_ON = ("digits", "fashion", "words", "powerlaw", "fraud", "characters", "friedman", "teacher")
"""Tasks on which it is measured what steps are worth that are made while a fragment travels."""
DELAYS = ("period=4", "period=4,fragments=2,delay=1", "period=2,delay=1", "period=8,fragments=4,delay=1",
          "period=8,fragments=2,delay=3", "period=8,delay=4,alpha=0.5")  # fmt: skip
PACES = tuple(
    f"period={period},fragments=4,delay=1,keep_steps=true{dynamic}"
    for period, dynamic in product((8, 16, 32), ("", ",dynamic_steps=true"))
)
LONGEST = 4.0
"""Times as many samples as one group needs, after which a run is given up."""


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
        Workload(
            model,
            data,
            loss=loss,
            evaluate=lambda trained: {"loss": float(loss(trained, data.tensors))},
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        ),
        batch_size=8,
        limits=Limits(epochs=epochs),
        seed=seed,
    )
    return float(trace.evaluated["loss"][-1])


def share(settings: str) -> float:
    """Of a plain push's bytes, the most in a window of H/P steps: there one fragment is pushed, the largest, say."""
    of = method_named(f"diloco:period={PERIOD},{settings}").fragments
    layout = Layout.of(dict(nn.Linear(1000, 100).named_parameters()))
    return max(layout.fragment(number, of).nbytes for number in range(of)) / layout.nbytes * of


def over_one_group(settings: str, groups: int, seeds: int) -> float:
    """Samples to the target of groups that average, over those of one group."""
    cluster, found = PRIOR_CLUSTERS["nearly equal"], []
    for name, seed in product(KEPT_ON, range(seeds)):
        task = DEVELOPING[name]
        one = task.train(cluster, seed=seed, most=LONGEST * task.updates)
        method = f"diloco:outer_lr=1.0,outer_momentum=0,{settings}"
        several = task.train(cluster, method, groups, seed=seed, most=LONGEST * task.updates)
        longest = LONGEST * task.updates * task.batch  # a run that diverges ends early, and is no short one
        found.append(math.log(min(several.samples, longest) / one.samples))
    return math.exp(sum(found) / len(found))


def show_delays(seeds: int) -> None:
    """Prints what steps cost that are lost, and that are kept."""
    for groups, settings in product((4, 8), DELAYS):
        line = f"{groups} groups, {settings}: {over_one_group(settings, groups, seeds):.2f}"
        if "delay" in settings and "alpha" not in settings:
            line += f"; kept {over_one_group(f'{settings},keep_steps=true', groups, seeds):.2f}"
        print(line, flush=True)


def paced(settings: str, task: Task) -> tuple[float, float]:
    """Samples to the target of four groups, one of which is slow, over those of one group; and samples per second."""
    method = method_named(f"diloco:outer_lr=1.0,outer_momentum=0,{settings}")
    cost, groups = beside_one_group(task, method, GROUPS, cluster_of("one slow", task))
    return cost, groups.trained / groups.trace.seconds


def show_paces() -> None:
    """One line for each setting."""
    tasks = [task for task in DEVELOPING.values() if not task.is_adaptive]
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        found = {each: list(pool.map(partial(paced, each), tasks)) for each in PACES}
    waiting = [rate for _, rate in found[PACES[0]]]
    print("| settings | samples | samples per second |")
    print("|---|---|---|")
    for each, rows in found.items():
        rates = [rate / before for (_, rate), before in zip(rows, waiting, strict=True)]
        costs = [cost for cost, _ in rows]
        print(f"| `{each}` | {stats.gmean(costs):.2f} | {stats.gmean(rates):.2f} |", flush=True)


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--slow", action="store_true", help="with a slow host, without and with dynamic steps")
    parser.add_argument("--tasks", action="store_true", help="samples to a target, of steps that are lost and kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.slow:
        show_paces()
        return
    if arguments.tasks:
        show_delays(arguments.seeds)
        return
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
