"""Train a ResNet on workers of unequal speed: DDP, batches in proportion to the speeds, and compute groups.

    python examples/resnet.py                          # about two minutes on two cores
    python examples/resnet.py --speeds 1 1 1 1         # equal workers: DDP is as good or better
    python examples/resnet.py --short                  # a few seconds, and not trained to the target

The workers' speeds are emulated: each sleeps in every batch as long as a device of its speed would compute. Training
ends at the target accuracy on held-out images of Fashion-MNIST (or of scikit-learn's digits, if that is neither
installed nor to be had).

Look at the seconds to the target. DDP waits for the slowest worker in every step. ``rebalance="auto"`` gives each
worker of one group a batch in proportion to its speed. With a group for each worker none waits, but gradients are
stale: the report's staleness says by how many updates. Output with Fashion-MNIST, on two cores which other programs
used, too:

    workers of speed 1 : 1 : 1 : 0.25
    DDPStrategy()                             70.3% after  44.1 s
    OmniStrategy(groups=1, rebalance="auto")  70.4% after  26.9 s
    OmniStrategy(groups=4)                    72.0% after  25.8 s
    800 updates, 4 groups of up to 1 rank; staleness 2.8, at most 12; 148.8 kB
    exchanged a step, 1.7 ms a push
"""

import argparse
import time
from itertools import pairwise

import torch
from fashion_data import FashionMNIST
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import EarlyStopping, Timer
from pytorch_lightning.strategies import DDPStrategy, Strategy
from rich import print
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightning_omni import OmniStrategy

SECONDS_PER_SAMPLE = 0.004
"""Time of one sample on an emulated device of speed 1."""


def normed_conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Return a 3 x 3 convolution and group normalization, which has no running statistics."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(4, outputs))


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            normed_conv(inputs, outputs, stride), nn.ReLU(), normed_conv(outputs, outputs)
        )
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.shortcut(x) + self.convolutions(x))


def resnet(channels: tuple[int, ...] = (8, 16, 32)) -> nn.Sequential:
    """Return a ResNet of 20 thousand weights for images of 28 x 28."""
    blocks = [Block(inputs, outputs, stride=2) for inputs, outputs in pairwise(channels)]
    stem = [normed_conv(1, channels[0], stride=2), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10))


class Classifier(LightningModule):
    """A ResNet whose workers take as long as devices of the given speeds.

    Args:
        speeds: The speed of each rank, relative to a device of speed 1.
        lr: The learning rate of SGD.
        momentum: The momentum of SGD; groups of unequal speed add some of their own.
    """

    def __init__(self, speeds: list[float], lr: float, momentum: float) -> None:
        super().__init__()
        self.speeds, self.lr, self.momentum = speeds, lr, momentum
        self.network = resnet()
        self.accuracy = MulticlassAccuracy(10, average="micro")

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        time.sleep(len(labels) * SECONDS_PER_SAMPLE / self.speeds[self.global_rank])
        return cross_entropy(self.network(images), labels)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.accuracy(self.network(batch[0]), batch[1])
        self.log("val_accuracy", self.accuracy)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def train(strategy: Strategy, momentum: float, arguments: argparse.Namespace) -> str:
    """Train to the target, and return the seconds and the accuracy in words."""
    seed_everything(0, verbose=False)
    timer = Timer()
    stop = EarlyStopping("val_accuracy", mode="max", stopping_threshold=arguments.target, patience=1000)
    trainer = Trainer(
        accelerator="cpu",
        devices=len(arguments.speeds),
        strategy=strategy,
        max_epochs=1,
        limit_train_batches=arguments.batches,
        limit_val_batches=2,
        val_check_interval=0.5 if arguments.short else 0.05,
        callbacks=[timer, stop],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Classifier(arguments.speeds, arguments.lr, momentum), FashionMNIST(batch_size=16))
    return f"{trainer.callback_metrics['val_accuracy']:.1%} after {timer.time_elapsed('train'):5.1f} s"


def main() -> None:
    """Train in three ways from the same weights, and print how long each took."""
    parser = argparse.ArgumentParser(description="Train a small ResNet with workers of unequal speed.")
    parser.add_argument("--speeds", type=float, nargs="+", default=[1, 1, 1, 0.25], help="one for each worker")
    parser.add_argument("--target", type=float, default=0.7, help="validation accuracy that ends training")
    parser.add_argument("--batches", type=int, default=200, help="batches of each worker, at most")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--short", action="store_true", help="train two workers for 16 batches only")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.batches, arguments.speeds = 16, [1, 0.25]

    workers = len(arguments.speeds)
    groups = OmniStrategy(groups=workers)
    rows = {
        "DDPStrategy()": train(DDPStrategy(), 0.9, arguments),
        'OmniStrategy(groups=1, rebalance="auto")': train(OmniStrategy(groups=1, rebalance="auto"), 0.9, arguments),
        f"OmniStrategy(groups={workers})": train(groups, 0.2, arguments),
    }
    if groups.is_global_zero:
        print(f"workers of speed {' : '.join(f'{speed:g}' for speed in arguments.speeds)}")
        for name, outcome in rows.items():
            print(f"{name:42}{outcome}")
        print(str(groups.report()))


if __name__ == "__main__":
    main()
