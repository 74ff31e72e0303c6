"""Measures step times: of one strategy, or of a group beside another that sleeps."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch
from common import OPTIONS, Net, omni, pl, report, trainer
from torch.utils.data import DataLoader, TensorDataset

RANK = int(os.environ.get("LOCAL_RANK", 0))


class Timed(Net):
    """Notes the time between the ends of batches, less a warm-up."""

    def __init__(self, sleep: float) -> None:
        super().__init__(norm=False)
        self.net = torch.nn.Sequential(  # LeNet, 431 thousand parameters
            torch.nn.Conv2d(1, 20, 5),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(20, 50, 5),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(800, 500),
            torch.nn.ReLU(),
            torch.nn.Linear(500, 10),
        )
        del self.frozen
        self.sleep = sleep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.sleep)
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)


class Clock(pl.Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def fit(strategy: Any, sleep: float, devices: int, steps: int) -> list[float]:
    clock = Clock()
    run = trainer(strategy, devices, callbacks=[clock], limit_train_batches=steps, limit_val_batches=0)
    samples = steps * devices * OPTIONS["batch_size"]
    images = torch.randn(256, 1, 28, 28).repeat(-(-samples // 256), 1, 1, 1)[:samples]
    numbers = torch.arange(samples)
    run.fit(Timed(sleep), DataLoader(TensorDataset(images, numbers % 10, numbers), batch_size=OPTIONS["batch_size"]))
    return [after - before for before, after in zip(clock.ends[5:], clock.ends[6:], strict=False)]


def overhead() -> list[dict[str, float]]:
    """Repeats of DDP, one group, and DDP again (what differs between these two is noise), in changing order."""
    ddp = pl.strategies.DDPStrategy
    kinds: dict[str, Any] = {"ddp": ddp, "omni": lambda: omni.OmniStrategy(groups=1), "again": ddp}
    repeats = []
    for number in range(OPTIONS["repeats"]):
        order = [list(kinds)[(place + number) % 3] for place in range(3)]
        repeats.append({kind: statistics.median(fit(kinds[kind](), 0.0, 2, OPTIONS["steps"])) for kind in order})
    return repeats


def beside() -> list[dict[str, float]]:
    """The first group's step time beside a second group that sleeps briefly, and beside one that sleeps for long."""
    pairs = []
    for number in range(OPTIONS["repeats"]):
        pair = {}
        for name in ("sleepy", "alone") if number % 2 else ("alone", "sleepy"):
            sleep = {"sleepy": 0.05, "alone": 1.5}[name] if RANK == 1 else OPTIONS["own"]
            times = fit(omni.OmniStrategy(groups=2), sleep, 2, OPTIONS["steps"])
            pair[name] = statistics.median(times) if times else 0.0  # the sleeper trains hardly anything
        pairs.append(pair)
    return pairs


if __name__ == "__main__":
    report(RANK, {"overhead": overhead, "beside": beside}[OPTIONS["measure"]]())
