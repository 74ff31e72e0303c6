"""Train with a merged head and without: bytes, staleness and time of both.

    python examples/merged_head.py            # four workers in four groups, the head a quarter as wide as AlexNet's
    python examples/merged_head.py --short    # a few seconds, and not trained to the end
    python examples/merged_head.py --width 4096 --pooled 12 --limit-train-batches 10   # AlexNet's: bytes and times only

The last layers of a network like AlexNet hold nearly all of its weights and little of its work. A merged head stays at
the server: each group's batch passes through it there, one group at a time, so its weights are never stale, and only
activations and their gradients travel (Hadjis et al. 2016, "Omnivore").

Look at the megabytes of a step, and at the staleness of the head: it is 0 with a merged head. Output on two cores which
other programs used, too:

        3,439,498 weights, 99.4% in the head; 4 workers in 4 groups
    ┏━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━┓
    ┃                          ┃ everything pushed ┃      merged head ┃
    ┡━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━┩
    │ MB exchanged per step    │            27.516 │            0.747 │
    │ ... by calculation       │            27.516 │            0.747 │
    │ staleness of the body    │              3.00 │             2.99 │
    │ staleness of the head    │ mean 3.00, max 12 │ mean 0.00, max 0 │
    │ updates                  │             1,716 │            1,716 │
    │ ms per update            │             46.01 │            36.34 │
    │ ms of access to the head │                   │            29.43 │
    │ test accuracy            │            79.61% │           81.08% │
    └──────────────────────────┴───────────────────┴──────────────────┘
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from fashion_data import FashionMNIST
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import Timer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

import lightning_omni as omni
from lightning_omni.server.event_log import read_record
from lightning_omni.simulator import trace_of

BODY, HEAD = 0, 1
"""Whose updates: the optimizer's own, and those of the merged head."""
MOMENTUM = {1: 0.9, 2: 0.6, 4: 0.2}
"""What asynchrony leaves to the optimizer, by number of groups."""


class SmallAlexNet(LightningModule):
    """Two convolutions, and three dense layers that hold nearly all weights.

    Args:
        pooled: The convolutions' output is pooled to this size, so the head has 64 * pooled ** 2 inputs.
        width: Width of the dense layers; AlexNet's is 4096, on 9216 inputs.
        lr: The learning rate.
        momentum: The explicit momentum.
    """

    def __init__(self, pooled: int, width: int, lr: float, momentum: float) -> None:
        super().__init__()
        self.lr, self.momentum = lr, momentum
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(pooled),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(0.2),
            nn.Linear(64 * pooled**2, width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    @override
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return cross_entropy(self(images), labels)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("accuracy", self.accuracy)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


@dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    merged: bool
    accuracy: float
    seconds: float
    updates: int
    megabytes: float
    body_staleness: float
    head_staleness: float
    most_head_staleness: int
    head_milliseconds: float


def main() -> None:
    """Train with and without, and show both."""
    arguments = parse_arguments()
    outcomes = [outcome for merged in (False, True) if (outcome := train(arguments, merged))]
    if outcomes:
        show(arguments, outcomes)


def train(arguments: argparse.Namespace, merged: bool) -> Outcome | None:
    """One run; its outcome on rank 0, None on the others."""
    seed_everything(arguments.seed)
    record = Path(tempfile.mkdtemp()) / "record.jsonl"
    strategy = omni.OmniStrategy(
        groups=arguments.groups, merged="classifier" if merged else None, server=omni.Server(record=str(record))
    )
    timer = Timer()
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.workers,
        strategy=strategy,
        max_epochs=arguments.epochs,
        limit_train_batches=arguments.limit_train_batches,
        callbacks=[timer],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = build(arguments)
    data = FashionMNIST(batch_size=arguments.batch_size)
    trainer.fit(model, data)
    report = strategy.report()
    (scores,) = trainer.test(model, data, verbose=False)
    if not trainer.is_global_zero:
        return None
    body = trace_of(read_record(record), optimizer=BODY)
    # Not merged, the head is pushed with the rest, and as stale.
    head = trace_of(read_record(record), optimizer=HEAD) if merged else body
    return Outcome(
        merged=merged,
        accuracy=scores["accuracy"],
        seconds=timer.time_elapsed("train"),
        updates=report.updates,
        megabytes=report.bytes_per_step / 1e6,
        body_staleness=body.mean_staleness,
        head_staleness=head.mean_staleness,
        most_head_staleness=int(head.columns()["staleness"].max()),
        head_milliseconds=report.head_time * 1e3,
    )


def build(arguments: argparse.Namespace) -> SmallAlexNet:
    """The network that the arguments ask for."""
    momentum = MOMENTUM.get(arguments.groups, 0.0) if arguments.momentum is None else arguments.momentum
    return SmallAlexNet(arguments.pooled, arguments.width, arguments.lr, momentum)


def count_weights(arguments: argparse.Namespace) -> tuple[int, int]:
    """Weights of the whole network, and of its head."""
    model = build(arguments)
    return sum(each.numel() for each in model.parameters()), sum(each.numel() for each in model.classifier.parameters())


def expected_megabytes(arguments: argparse.Namespace, merged: bool) -> float:
    """What a step exchanges, to and fro: all weights, or those of the body and the head's inputs and outputs."""
    weights, head = count_weights(arguments)
    size = arguments.batch_size * (arguments.workers // arguments.groups)
    numbers = weights - head + size * (64 * arguments.pooled**2 + 10) if merged else weights
    return 2 * 4 * numbers / 1e6


def show(arguments: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """Print the comparison as a table, and what should have travelled."""
    weights, head = count_weights(arguments)
    table = Table(
        title=f"{weights:,} weights, {head / weights:.1%} in the head; {arguments.workers} workers in"
        f" {arguments.groups} groups"
    )
    table.add_column("")
    for outcome in outcomes:
        table.add_column("merged head" if outcome.merged else "everything pushed", justify="right")
    rows = {
        "MB exchanged per step": [f"{each.megabytes:.3f}" for each in outcomes],
        "... by calculation": [f"{expected_megabytes(arguments, each.merged):.3f}" for each in outcomes],
        "staleness of the body": [f"{each.body_staleness:.2f}" for each in outcomes],
        "staleness of the head": [
            f"mean {each.head_staleness:.2f}, max {each.most_head_staleness}" for each in outcomes
        ],
        "updates": [f"{each.updates:,}" for each in outcomes],
        "ms per update": [f"{1e3 * each.seconds / each.updates:.2f}" for each in outcomes],
        "ms of access to the head": [f"{each.head_milliseconds:.2f}" if each.merged else "" for each in outcomes],
        "test accuracy": [f"{each.accuracy:.2%}" for each in outcomes],
    }
    for name, values in rows.items():
        table.add_row(name, *values)
    Console().print(table)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or ``argv``."""
    parser = argparse.ArgumentParser(description="Train with and without a merged head, and compare.")
    add = parser.add_argument
    add("--workers", type=int, default=4, help="processes, one replica each")
    add("--groups", type=int, default=4, help="compute groups")
    add("--epochs", type=int, default=1, help="passes over the training data")
    add("--batch-size", type=int, default=32, help="samples per worker and step")
    add("--pooled", type=int, default=6, help="the head has 64 times the square of this many inputs")
    add("--width", type=int, default=1024, help="width of the head's layers")
    add("--lr", type=float, default=0.03, help="learning rate")
    add("--momentum", type=float, help="explicit momentum; by default what suits the number of groups")
    add("--limit-train-batches", type=int, help="batches per worker and epoch; by default all")
    add("--short", action="store_true", help="two workers, a narrow head and 10 batches")
    add("--seed", type=int, default=0, help="of the initial weights and of the order of the samples")
    arguments = parser.parse_args(argv)
    if arguments.short:
        arguments.workers = arguments.groups = 2
        arguments.width, arguments.limit_train_batches = 64, 10
    return arguments


if __name__ == "__main__":
    main()
