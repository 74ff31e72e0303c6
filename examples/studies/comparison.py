"""Data, model, parallel simulations, findings with verdicts, and pictures of the studies.

Not a script. Fashion-MNIST is pooled to 14 x 14, so that thousands of updates are simulated in seconds; where it is
neither installed nor to be had, scikit-learn's handwritten digits replace it, and tables and pictures name the data.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import signal
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.pool import Pool
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy
from torch.utils.data import TensorDataset

from lightning_omni.methods import Method
from lightning_omni.simulator import Cluster, Evaluation, Limits, Workload, simulate
from lightning_omni.topology import Topology
from lightning_omni.trace import Trace

EVALUATED_ON = 2_000
"""Test images that every evaluation uses, always the same ones."""

STEADY_OVER = 4
"""Evaluations over which the steady accuracy is the mean."""

Key = TypeVar("Key", bound=Hashable)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # fashion_data
console = Console(width=None if sys.stdout.isatty() else 132)


# --- Data and model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """Pooled and normalised images, float32 (N, 1, 14, 14), and labels, int64 (N,)."""

    source: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load_images() -> Images:
    """55,000 training images and `EVALUATED_ON` test images of Fashion-MNIST, or of what stands in."""
    from fashion_data import FashionMNIST  # needs Lightning; the simulating processes do not

    module = FashionMNIST()
    module.prepare_data()
    module.setup("fit")
    (train, labels), (test, test_labels) = module.train_set.tensors, module.test_set.tensors
    train, test = avg_pool2d(train, 2), avg_pool2d(test, 2)
    mean, std = train.mean(), train.std()
    first = slice(EVALUATED_ON)
    return Images(
        f"{module.source}, 14 x 14",
        ((train - mean) / std, labels),
        ((test[first] - mean) / std, test_labels[first]),
    )


def network(seed: int = 0) -> nn.Sequential:
    """A multilayer perceptron of 26,010 weights; ten epochs of SGD at a constant rate bring it to 87 %."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(196, 112), nn.ReLU(), nn.Linear(112, 32), nn.ReLU(), nn.Linear(32, 10)
        )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of a batch of images and labels."""
    images, labels = batch
    return cross_entropy(model(images), labels)


class Evaluator:
    """Metrics of a model on the test images.

    ``accuracy``, ``error`` (one minus it) and ``loss``; and ``steady``, the mean accuracy of the last
    `STEADY_OVER` evaluations, which does not reach a target by chance.
    """

    def __init__(self, images: Images) -> None:
        self._inputs, self._labels = images.test
        self._last: deque[float] = deque(maxlen=STEADY_OVER)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        logits = model(self._inputs)
        accuracy = float((logits.argmax(1) == self._labels).float().mean())
        self._last.append(accuracy)
        return {
            "accuracy": accuracy,
            "error": 1 - accuracy,
            "loss": float(cross_entropy(logits, self._labels)),
            "steady": sum(self._last) / len(self._last),
        }


def sgd(parameters: Any, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> torch.optim.SGD:
    """torch's SGD, whose constructor refuses a negative momentum but whose step does not."""
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=max(0.0, momentum), weight_decay=weight_decay)
    for group in optimizer.param_groups:
        group["momentum"] = momentum
    return optimizer


class CutOnce(torch.optim.SGD):
    """Nesterov's SGD; from step number ``cut_at`` on, its learning rate is a tenth.

    It is set again at every step: where the optimizer steps at the server, the workers always send the first rate
        along.
    """

    def __init__(self, parameters: Any, lr: float, cut_at: int, momentum: float = 0.9) -> None:
        super().__init__(parameters, lr=lr, momentum=momentum, nesterov=True)
        self._cut_at, self._steps, self._rate_after = cut_at, 0, lr / 10

    def step(self, closure: Any = None) -> Any:
        self._steps += 1
        if self._steps >= self._cut_at:
            for group in self.param_groups:
                group["lr"] = self._rate_after
        return super().step(closure)


# --- Simulations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One simulation of `network` on the images.

    Args:
        method: a name with settings, or a method.
        groups: compute groups, or which rank is in which.
        cluster: devices and links.
        optimizer: makes the optimizer from parameters; ``partial`` of something importable, as it goes to another
            process: ``partial(sgd, lr=0.1)``, ``partial(torch.optim.AdamW, lr=1e-3)``.
        batch_size: samples in one device's batch.
        updates: most updates, infinite for no limit; likewise ``epochs`` and ``seconds``. One of them is needed.
        evaluate_every: updates between two evaluations; None for one at the end only.
        target: steady test accuracy (see `Evaluator`) at which the run ends early.
        seed: of everything that is random, the initial weights included.
        overlap: whether exchanges travel while the next gradient is computed.
    """

    method: str | Method
    groups: int | Topology
    cluster: Cluster
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch_size: int = 32
    updates: float = math.inf
    epochs: float = math.inf
    seconds: float = math.inf
    evaluate_every: int | None = 50
    target: float | None = None
    seed: int = 0
    overlap: bool = False

    def model(self) -> nn.Module:
        """The network that the run begins with."""
        return network(self.seed)

    def simulate(self, images: Images) -> Trace:
        """Simulates it, in this process."""
        return simulate(
            self.method,
            self.groups,
            self.cluster,
            Workload(
                self.model(),
                TensorDataset(*images.train),
                loss=loss,
                evaluate=Evaluator(images),
                optimizer=self.optimizer,
            ),
            batch_size=self.batch_size,
            evaluation=Evaluation(
                every=self.evaluate_every, target=None if self.target is None else ("steady", self.target)
            ),
            limits=Limits(updates=self.updates, epochs=self.epochs, seconds=self.seconds),
            seed=self.seed,
            overlap=self.overlap,
        )


def simulate_all(runs: Mapping[Key, Run], images: Images, what: str, processes: int = 2) -> dict[Key, Trace]:
    """Simulates all runs in a pool of processes; same runs, same traces, however many processes there are.

    Ctrl-C ends the processes and the script.

    Args:
        runs: by whatever key the caller likes.
        images: from `load_images`.
        what: stands beside the progress bar.
        processes: each computes on one thread.
    """
    keys = list(runs)
    traces: dict[int, Trace] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with (
            TemporaryDirectory() as folder,
            _pool(processes, images, Path(folder, "images.pt")) as pool,
            Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress,
        ):
            bar = progress.add_task(what, total=len(keys))
            for number, trace in pool.imap_unordered(_simulate, enumerate(runs.values())):
                traces[number] = trace
                progress.advance(bar)
    except KeyboardInterrupt:
        console.print("Interrupted.")
        sys.exit(130)
    return {key: traces[number] for number, key in enumerate(keys)}


def _pool(processes: int, images: Images, path: Path) -> Pool:
    """A pool whose processes leave Ctrl-C to this one, from their first moment on.

    They read the images from a file: who passes megabytes to a process waits until it has imported torch, and here
    would not hear Ctrl-C meanwhile.
    """
    torch.save((images.source, images.train, images.test), path)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return multiprocessing.get_context("spawn").Pool(processes, _prepare, (path,))
    finally:
        signal.signal(signal.SIGINT, before)


_images: list[Images] = []


def _prepare(path: Path) -> None:
    torch.set_num_threads(1)
    _images.append(Images(*torch.load(path)))


def _simulate(numbered: tuple[int, Run]) -> tuple[int, Trace]:
    number, run = numbered
    return number, run.simulate(_images[0])


# --- What is asked of a trace ----------------------------------------------------------------------------------------


def final(trace: Trace, metric: str = "accuracy", last: int = 3) -> float:
    """Mean of a metric over the last few evaluations."""
    values = trace.evaluated[metric][-last:]
    return float(values.mean()) if len(values) else float("nan")


def best(traces: Mapping[Key, Trace], score: Callable[[Trace], float]) -> Key:
    """Key of the trace with the smallest score; one that is NaN loses to any other, the first of equals wins."""
    scores = {key: score(trace) for key, trace in traces.items()}
    return min(scores, key=lambda key: (scores[key] != scores[key], scores[key] if scores[key] == scores[key] else 0))


# --- Findings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A published finding beside what came out here.

    Args:
        metric: what was measured.
        published: the finding, with its source.
        here: what came out.
        holds: what the finding says about the numbers measured here, claim by claim.
    """

    metric: str
    published: str
    here: str
    holds: Sequence[bool]

    @property
    def reproduced(self) -> str:
        """``"yes"`` if all claims hold here, ``"no"`` if none does, else ``"partly"``."""
        held = [bool(claim) for claim in self.holds]
        return "yes" if all(held) else "partly" if any(held) else "no"


def falls(values: Iterable[float], tolerance: float = 0.0) -> bool:
    """Whether no value exceeds the one before by more than this fraction of it, and the last is below the first."""
    numbers = list(values)
    return all(b <= a + tolerance * abs(a) for a, b in pairwise(numbers)) and numbers[-1] < numbers[0]


def show_findings(title: str, findings: Iterable[Finding]) -> None:
    """Prints metrics, published findings and verdicts as a table."""
    table = Table(title=title, show_lines=True)
    for column in ("metric", "here", "published finding", "reproduced"):
        table.add_column(column)
    colours = {"yes": "green", "partly": "yellow", "no": "red"}
    for finding in findings:
        verdict = finding.reproduced
        table.add_row(finding.metric, finding.here, finding.published, f"[{colours[verdict]}]{verdict}[/]")
    console.print(table)


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints numbers as a table."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


# --- Pictures and the command line -----------------------------------------------------------------------------------


def new_figure(rows: int, columns: int) -> tuple[Any, Any]:
    """A matplotlib figure without a window, and its axes (rows, columns)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * columns, 4.2 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def caption(axes: Any, finding: Finding) -> None:
    """Writes over a panel what it shows, the published finding, and whether it was reproduced."""
    published = textwrap.fill(finding.published, 76)
    axes.set_title(f"{finding.metric}\n{published}\nreproduced here: {finding.reproduced}", fontsize="small")


def save_figure(figure: Any, title: str, path: Path) -> None:
    """Writes the picture and says where."""
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    console.print(f"Picture: {path}")


def command_line(description: str | None, picture: str) -> argparse.ArgumentParser:
    """A parser with the options that all the paper examples have."""
    first_line = (description or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=first_line)
    parser.add_argument("--quick", action="store_true", help="a minute: fewer settings and updates, rougher numbers")
    parser.add_argument("--out", type=Path, default=Path(picture), help="the picture (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="simulations at a time (default: %(default)s)")
    return parser


class Stopwatch:
    """Real seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def __str__(self) -> str:
        return f"{time.perf_counter() - self._began:.0f} s"
