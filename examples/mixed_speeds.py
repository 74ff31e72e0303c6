"""Workers of different speed in one group: equal parts of every batch, and parts in proportion to the speeds.

python examples/mixed_speeds.py                                # three workers of speeds 1 : 2 : 4, about one minute
python examples/mixed_speeds.py --speeds 100 100 100 300       # others, in samples per second

The speeds are emulated: a worker sleeps in every batch as long as a device of its speed would need for its samples.
"""

import argparse
import time
from typing import Literal

from fashion_data import FashionMNIST
from fashion_mnist import Classifier
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.callbacks import Timer
from pytorch_lightning.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from typing_extensions import override

import lightning_omni as omni

Rebalance = Literal["off", "auto"]


class OnMixedDevices(Classifier):
    """The classifier of ``fashion_mnist.py`` with a small dense network, on workers that differ in speed.

    Args:
        speeds: What each worker manages, in samples per second.
    """

    def __init__(self, speeds: list[float]) -> None:
        super().__init__(lr=0.03, momentum=0.9)
        # Little to compute: what is slow here should be the emulated devices, not this machine's few cores.
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10))
        self.speeds = speeds

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(len(batch[1]) / self.speeds[self.global_rank])
        return super().training_step(batch, batch_idx)


def main() -> None:
    """Train twice from the same weights, and show what a better split is worth."""
    arguments = parse_arguments()
    table = Table(title=f"workers of {' : '.join(f'{speed:.0f}' for speed in arguments.speeds)} samples/s")
    for column in ("rebalance", "training time", "samples/s", "part of the sum of the speeds", "test accuracy"):
        table.add_column(column, justify="right")
    ways: tuple[Rebalance, ...] = ("off", "auto")
    for rebalance in ways:
        seconds, accuracy = train(rebalance, arguments)
        samples = arguments.batches * arguments.batch_size * len(arguments.speeds)
        throughput = samples / seconds
        part = throughput / sum(arguments.speeds)
        table.add_row(f'"{rebalance}"', f"{seconds:.1f} s", f"{throughput:.0f}", f"{part:.0%}", f"{accuracy:.2%}")
    rank_zero_only(Console().print)(table)


def train(rebalance: Rebalance, arguments: argparse.Namespace) -> tuple[float, float]:
    """Seconds of training, and the accuracy that it reached."""
    seed_everything(arguments.seed, verbose=False)
    timer = Timer()
    trainer = Trainer(
        accelerator="cpu",
        devices=len(arguments.speeds),
        strategy=omni.OmniStrategy(groups=1, rebalance=rebalance),
        max_epochs=1,
        limit_train_batches=arguments.batches,
        limit_val_batches=0,
        callbacks=[timer],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model, data = OnMixedDevices(arguments.speeds), FashionMNIST(batch_size=arguments.batch_size)
    trainer.fit(model, data)
    (scores,) = trainer.test(model, data, verbose=False)
    return timer.time_elapsed("train"), scores["test_accuracy"]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train with workers of different speed in one compute group.")
    add = parser.add_argument
    add("--speeds", type=float, nargs="+", default=[100, 200, 400], help="samples per second, one for each worker")
    add("--batches", type=int, default=100, help="batches of the group")
    add("--batch-size", type=int, default=32, help="samples per worker and batch, as long as all get the same")
    add("--seed", type=int, default=0, help="of the initial weights and of the order of the samples")
    return parser.parse_args()


if __name__ == "__main__":
    main()
