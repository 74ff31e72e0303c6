"""`OmniTuner` finds groups, momentum and learning rate, and trains on: four emulated workers on Fashion-MNIST.

python examples/tune_fashion_mnist.py                          # one worker is four times as slow
python examples/tune_fashion_mnist.py --plain                  # the same with DDPStrategy
python examples/tune_fashion_mnist.py --scenario exponential   # times of batches vary at random

The workers sleep 1 ms for each sample, so that emulated devices are what is slow, not this machine's few cores. About a
minute each.
"""

import argparse
import random
import time

from fashion_data import FashionMNIST
from fashion_mnist import Classifier
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import DDPStrategy
from rich import print
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

import lightning_omni as omni


class Emulated(Classifier):
    """The classifier of ``fashion_mnist.py`` with a lighter network, which sleeps as long as a device would work.

    Args:
        lr: The learning rate.
        scenario: Whether all workers are alike, the last one is a straggler, or times are exponentially distributed.
    """

    def __init__(self, lr: float, scenario: str) -> None:
        super().__init__(lr=lr, momentum=0.9)
        self.scenario = scenario
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, stride=2, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.GroupNorm(4, 16),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    @override
    def on_fit_start(self) -> None:
        self.random = random.Random(self.global_rank)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        seconds = 0.001 * len(batch[1])
        if self.scenario == "straggler" and self.global_rank == self.trainer.world_size - 1:
            seconds *= 4
        if self.scenario == "exponential":
            seconds *= self.random.expovariate(1.0)
        time.sleep(seconds)
        return super().training_step(batch, batch_idx)

    @override
    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class TimeToTarget(Callback):
    """Notes how long training took to the target; a search counts, too."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.seconds: float | None = None
        self.best = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.began = time.perf_counter()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.best = max(self.best, float(trainer.callback_metrics["val_accuracy"]))
        if self.best >= self.target and self.seconds is None:
            self.seconds = time.perf_counter() - self.began


def main() -> None:
    """Train to the target, and say how long it took."""
    arguments = parse_arguments()
    target = arguments.target
    seed_everything(arguments.seed)

    clock = TimeToTarget(target)
    # With several validations in an epoch, one that is not better is no reason to stop.
    stop = EarlyStopping(monitor="val_accuracy", mode="max", stopping_threshold=target, patience=1000)
    tuner = omni.OmniTuner(target=target, monitor="val_accuracy")
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.workers,
        strategy=DDPStrategy() if arguments.plain else omni.OmniStrategy(),
        callbacks=[clock, stop] if arguments.plain else [clock, stop, tuner],
        max_epochs=arguments.epochs,
        val_check_interval=0.25,
        num_sanity_val_steps=0,
        logger=CSVLogger(arguments.logs),  # its folder gets the tuner's report
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Emulated(arguments.lr, arguments.scenario), FashionMNIST(batch_size=arguments.batch_size))

    folder = trainer.log_dir  # asks all ranks
    if trainer.is_global_zero:
        name = "DDPStrategy" if arguments.plain else "OmniTuner"
        took = f"{target:.1%} after {clock.seconds:.1f} s" if clock.seconds else f"{clock.best:.1%} at most"
        print(f"{name}, {arguments.scenario}: {took}")
        if tuner.choice is not None:
            print(f"{tuner.state_dict()['spent']:.1f} s of them went into finding: {tuner.choice.setting}")
            print(f"why: {folder}/omni-tuning.html")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Tune and train on Fashion-MNIST with workers of emulated speed.")
    add = parser.add_argument
    add("--workers", type=int, default=4, help="processes, one replica each")
    add("--scenario", choices=("equal", "straggler", "exponential"), default="straggler", help="how fast workers are")
    add("--plain", action="store_true", help="DDPStrategy without a tuner, to compare")
    add("--target", type=float, default=0.88, help="validation accuracy at which training ends")
    add("--epochs", type=int, default=4, help="passes over the training data, at most")
    add("--batch-size", type=int, default=32, help="samples per worker and step")
    add("--lr", type=float, default=0.05, help="learning rate: the tuner starts from it")
    add("--logs", default=".", help="logs and the tuner's report go to lightning_logs in this folder")
    add("--seed", type=int, default=0, help="of the initial weights and of the order of the samples")
    return parser.parse_args()


if __name__ == "__main__":
    main()
