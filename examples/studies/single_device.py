"""Compare four ways to train on one CPU: image by image, batched, PyTorch with defaults, and PyTorch tuned.

    python examples/studies/single_device.py                  # about five minutes on two cores
    python examples/studies/single_device.py --batch-size 64 --rounds 3

Caffe computed a convolution image by image: im2col, then a matrix product. Omnivore (arXiv 1606.04487, abstract)
attributes "5.5x or more" on CPUs to lowering the whole batch into one product. PyTorch does neither; the table shows
how much `DeviceTuner` gains over it. Every way trains in a process of its own with the same Trainer, and all alternate,
so that a change of the machine's speed affects all of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, fold, unfold
from torch.utils.data import DataLoader, TensorDataset

from lightning_omni import DeviceTuner

PER_IMAGE, BATCHED, PLAIN = "per-image lowering", "batched lowering", "PyTorch with defaults"
TUNED, TUNED_BF16 = "tuned", "tuned, bfloat16 allowed"
KINDS = (PER_IMAGE, BATCHED, PLAIN, TUNED, TUNED_BF16)
PUBLISHED = 5.5
"""Omnivore over systems that lower image by image, on a CPU."""

WARM_UP = 3
"""Steps of a fit that are not timed."""


# --- Convolutions as matrix products ---------------------------------------------------------------------------------


class PerImage(torch.autograd.Function):
    """As in Caffe: for each image im2col and one product, forward and backward; im2col is done again for backward."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(images, weight)
        ctx.padding = padding
        kernel = weight.shape[2:]
        matrix = weight.flatten(1)
        out = images.new_empty(len(images), len(weight), *images.shape[2:])
        for image, result in zip(images, out, strict=True):
            torch.mm(matrix, unfold(image, kernel, padding=padding), out=result.flatten(1))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        images, weight = ctx.saved_tensors
        kernel, size = weight.shape[2:], images.shape[2:]
        matrix = weight.flatten(1)
        for_weight = torch.zeros_like(matrix)
        for_images = torch.empty_like(images) if ctx.needs_input_grad[0] else None
        for number, (image, grad) in enumerate(zip(images, gradient.contiguous().flatten(2), strict=True)):
            for_weight.addmm_(grad, unfold(image, kernel, padding=ctx.padding).T)
            if for_images is not None:
                for_images[number] = fold(matrix.T @ grad, size, kernel, padding=ctx.padding)
        return for_images, for_weight.view_as(weight), None


class Batched(torch.autograd.Function):
    """As in Omnivore: im2col of the whole batch, and one product."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, padding: int) -> Tensor:
        columns = unfold(images, weight.shape[2:], padding=padding).transpose(0, 1).flatten(1)
        ctx.save_for_backward(columns, weight)
        ctx.shape, ctx.padding = images.shape, padding
        out = weight.flatten(1) @ columns
        return out.view(len(weight), len(images), *images.shape[2:]).transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        columns, weight = ctx.saved_tensors
        flat = gradient.transpose(0, 1).flatten(1)
        for_images = None
        if ctx.needs_input_grad[0]:
            lowered = (weight.flatten(1).T @ flat).view(len(columns), ctx.shape[0], -1).transpose(0, 1)
            for_images = fold(lowered, ctx.shape[2:], weight.shape[2:], padding=ctx.padding)
        return for_images, (flat @ columns.T).view_as(weight), None


class Lowered(nn.Conv2d):
    """A convolution of stride 1 as matrix products."""

    function: type[torch.autograd.Function]

    def forward(self, images: Tensor) -> Tensor:
        assert self.bias is not None
        product: Tensor = self.function.apply(images, self.weight, self.padding[0])
        return product + self.bias[:, None, None]


class PerImageConv(Lowered):
    function = PerImage


class BatchedConv(Lowered):
    function = Batched


# --- What is trained -------------------------------------------------------------------------------------------------


class Net(pl.LightningModule):
    """For images like CIFAR's, float32 (N, 3, 32, 32): convolutions of 64, 128, 256 channels, dense 512."""

    def __init__(self, convolution: type[nn.Conv2d] = nn.Conv2d) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 64), (64, 128), (128, 256)):
            layers += [convolution(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(256 * 4 * 4, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class BatchTimes(pl.Callback):
    """Notes when batches end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    @property
    def step(self) -> float:
        """Seconds."""
        return (self.ends[-1] - self.ends[WARM_UP - 1]) / (len(self.ends) - WARM_UP)


def fit(kind: str, batch_size: int, steps: int, tuner: DeviceTuner | None) -> float:
    """Trains a new model for some steps. Returns samples per second, loading included."""
    torch.manual_seed(0)
    count = (WARM_UP + steps) * batch_size
    data = TensorDataset(torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,)))
    convolution = {PER_IMAGE: PerImageConv, BATCHED: BatchedConv}.get(kind, nn.Conv2d)
    times = BatchTimes()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[times] if tuner is None else [times, tuner],
    )
    trainer.fit(Net(convolution), DataLoader(data, batch_size, shuffle=True))
    return batch_size / times.step


# --- Processes that alternate ----------------------------------------------------------------------------------------


def serve(kind: str, batch_size: int, budget: float) -> None:
    """In a process of its own: one fit for each line on standard input, one line of JSON for each."""
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    tuner = None
    if kind in (TUNED, TUNED_BF16):
        tuner = DeviceTuner(bf16="apply" if kind == TUNED_BF16 else "skip", budget=budget)
    for line in sys.stdin:
        speed = fit(kind, batch_size, int(line), tuner)
        report = tuner.report.to_dict() if tuner is not None and tuner.report is not None else None
        sys.stdout.write(json.dumps({"speed": speed, "report": report}) + "\n")
        sys.stdout.flush()


@contextmanager
def processes(kinds: Sequence[str], batch_size: int, budget: float) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """One for each kind; they are idle until they are asked, and end with this one."""
    started: dict[str, subprocess.Popen[str]] = {}
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # they leave Ctrl-C to this one, from the first moment on
        try:
            for kind in kinds:
                command = [sys.executable, __file__, "--serve", kind, "--batch-size", str(batch_size)]
                command += ["--budget", str(budget)]
                started[kind] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        finally:
            signal.signal(signal.SIGINT, before)
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def ask(process: subprocess.Popen[str], steps: int) -> dict[str, Any]:
    """One fit."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a process ended; see above")
    answer: dict[str, Any] = json.loads(line)
    return answer


Speeds = Mapping[str, Sequence[float]]


def measure(
    batch_size: int, rounds: int, steps: int, budget: float, kinds: Sequence[str] = KINDS
) -> tuple[Speeds, dict[str, Any]]:
    """Samples per second of each kind, one number for each round, and the reports of the tuned ones."""
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    reports: dict[str, Any] = {}
    console = Console(stderr=True)
    with processes(kinds, batch_size, budget) as started:
        for kind in kinds:  # not counted: imports, probes, first touches
            console.print(f"preparing: {kind}", highlight=False)
            reports[kind] = ask(started[kind], 1)["report"]
        for number in range(rounds):
            order = kinds if number % 2 == 0 else kinds[::-1]
            for kind in order:
                speeds[kind].append(ask(started[kind], steps)["speed"])
            console.print(f"round {number + 1} of {rounds}", highlight=False)
    return speeds, {kind: report for kind, report in reports.items() if report is not None}


def ratio(speeds: Speeds, above: str, below: str) -> tuple[float, float, float]:
    """Median, smallest and largest over the rounds of one kind's speed over another's."""
    ratios = [a / b for a, b in zip(speeds[above], speeds[below], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


# --- The table -------------------------------------------------------------------------------------------------------


def table(speeds: Speeds, batch_size: int) -> Table:
    """One row for each kind."""
    threads = torch.get_num_threads()
    made = Table(title=f"CIFAR-shaped CNN, batches of {batch_size}, {threads} threads: samples/s")
    for head in ("kind", "samples/s", "over per-image lowering", "over PyTorch with defaults"):
        made.add_column(head, justify="left" if head == "kind" else "right")
    for kind in speeds:
        cells = [f"{statistics.median(speeds[kind]):.0f}"]
        for other in (PER_IMAGE, PLAIN):
            if other in speeds:
                median, low, high = ratio(speeds, kind, other)
                cells.append(f"{median:.2f} ({low:.2f}–{high:.2f})" if kind != other else "1")
        made.add_row(kind, *cells)
    made.add_row("Omnivore, published", "", f"≥ {PUBLISHED}", "", style="dim")
    return made


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each fit")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for each tuner's measurements")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.batch_size, arguments.budget)
        return
    try:
        speeds, reports = measure(arguments.batch_size, arguments.rounds, arguments.steps, arguments.budget)
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted.")
        sys.exit(130)
    console = Console(width=None if sys.stdout.isatty() else 132)
    console.print(table(speeds, arguments.batch_size))
    for kind, report in reports.items():
        used = [f"{each['step']} ({each['tried']})" for each in report["findings"] if each["verdict"] == "applied"]
        console.print(f"{kind}: {', '.join(used) or 'nothing'}; {report['seconds']:.0f} s of measurements, not counted")
    for kind in (TUNED, TUNED_BF16):
        gain, *_ = ratio(speeds, kind, PER_IMAGE)
        verdict = "reached" if gain >= PUBLISHED else "not reached"
        console.print(f"the published {PUBLISHED} times over per-image lowering: {verdict} by {kind!r} ({gain:.2f})")


if __name__ == "__main__":
    main()
