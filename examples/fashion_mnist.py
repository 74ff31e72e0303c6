"""Fashion-MNIST on CPU workers, synchronous inside compute groups and asynchronous across them.

make demo                                                    # four workers in two groups
python examples/fashion_mnist.py --workers 4 --groups 2      # the same, in your own environment
python examples/fashion_mnist.py --workers 4 --groups 1      # plain synchronous training

Output of the first on two cores which other programs used, too:

              Fashion-MNIST
┌──────────────────┬─────────────────────┐
│ test accuracy    │              91.02% │
│ training time    │              70.7 s │
│ updates          │ 2,574 (36 a second) │
│ staleness        │    mean 1.00, max 4 │
│ groups x workers │               2 x 2 │
└──────────────────┴─────────────────────┘
"""

import argparse

import torch
from fashion_data import FashionMNIST
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import Timer
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

import lightning_omni as omni

# Asynchrony itself acts as momentum, about 1 - 1/g with g compute groups. The more groups there are,
# the less momentum is left for the optimizer to add.
MOMENTUM = {1: 0.9, 2: 0.6, 4: 0.2}


class Classifier(LightningModule):
    """A small convolutional network: two convolutions and two dense layers, 207k parameters.

    Args:
        lr: The learning rate of the first epoch; each later epoch has 0.4 times that of the one before.
        momentum: The explicit momentum, what the optimizer adds to that of asynchrony.
    """

    def __init__(self, lr: float, momentum: float) -> None:
        super().__init__()
        self.lr = lr
        self.momentum = momentum
        # Group normalisation has no running statistics that compute groups would have to share.
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.GroupNorm(4, 16),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.GroupNorm(4, 32),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
        self.val_accuracy = MulticlassAccuracy(10, average="micro")
        self.test_accuracy = MulticlassAccuracy(10, average="micro")

    @override
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images)
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.val_accuracy(self(images), labels)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.test_accuracy(self(images), labels)
        self.log("test_accuracy", self.test_accuracy)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)
        return {"optimizer": optimizer, "lr_scheduler": ExponentialLR(optimizer, gamma=0.4)}


def main() -> None:
    """Train, test, and show what was reached."""
    arguments = parse_arguments()
    groups = arguments.groups
    momentum = MOMENTUM.get(groups, 0.0) if arguments.momentum is None else arguments.momentum
    seed_everything(arguments.seed)

    options = {} if arguments.method is None else {"method": arguments.method}
    strategy = omni.OmniStrategy(groups=groups, data=arguments.data, **options)
    timer = Timer()
    trainer = Trainer(
        accelerator=arguments.accelerator,
        devices=arguments.workers,
        strategy=strategy,
        max_epochs=arguments.epochs,
        limit_train_batches=arguments.limit_train_batches,
        callbacks=[timer],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = Classifier(lr=arguments.lr, momentum=momentum)
    data = FashionMNIST(batch_size=arguments.batch_size)
    trainer.fit(model, data)
    report = strategy.report()
    (scores,) = trainer.test(model, data, verbose=False)

    if trainer.is_global_zero:
        show(report, data=data.source, accuracy=scores["test_accuracy"], seconds=timer.time_elapsed("train"))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small network on Fashion-MNIST in compute groups.")
    add = parser.add_argument
    add("--workers", type=int, default=4, help="processes, one replica each")
    add("--groups", type=int, default=2, help="compute groups; 1 is plain DDP")
    add("--epochs", type=int, default=3, help="passes over the training data")
    add("--batch-size", type=int, default=32, help="samples per worker and step")
    add("--lr", type=float, default=0.03, help="learning rate of the first epoch")
    add("--momentum", type=float, help="explicit momentum; by default what suits the number of groups")
    add("--data", choices=("dynamic", "static"), default="dynamic", help="how samples are dealt out")
    add("--method", help="what groups exchange, for instance hardsync or local_sgd:period=8; by default async_sgd")
    add("--accelerator", default="cpu", help="where the workers compute")
    add("--limit-train-batches", type=int, help="batches per worker and epoch; by default all")
    add("--short", action="store_true", help="two workers, one epoch of 30 batches")
    add("--seed", type=int, default=0, help="of the initial weights and of the order of the samples")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.workers, arguments.epochs, arguments.limit_train_batches = 2, 1, 30
    return arguments


def show(report: omni.RunReport, *, data: str, accuracy: float, seconds: float) -> None:
    """Print the outcome as a table."""
    table = Table(title=data, show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_row("test accuracy", f"{accuracy:.2%}")
    table.add_row("training time", f"{seconds:.1f} s")
    table.add_row("updates", f"{report.updates:,} ({report.updates / seconds:,.0f} a second)")
    table.add_row("staleness", f"mean {report.staleness_mean:.2f}, max {report.staleness_max}")
    table.add_row("groups x workers", f"{report.groups} x {report.group_size}")
    if report.ranks_lost:
        table.add_row("ranks lost", ", ".join(map(str, report.ranks_lost)))
    Console().print(table)


if __name__ == "__main__":
    main()
