"""Measures step times: of one strategy, or of a group beside another that sleeps."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch
from common import OPTIONS, Net, loaders, omni, pl, report, trainer

RANK = int(os.environ.get("LOCAL_RANK", 0))


class Timed(Net):
    """Notes the time between the ends of batches, less a warm-up."""

    def __init__(self, sleep: float) -> None:
        super().__init__(norm=False)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(12, OPTIONS["width"]), torch.nn.ReLU(), torch.nn.Linear(OPTIONS["width"], 3)
        )
        self.sleep = sleep

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
    run.fit(Timed(sleep), loaders(samples=steps * devices * 8)[0])
    return [after - before for before, after in zip(clock.ends[5:], clock.ends[6:], strict=False)]


def overhead() -> list[dict[str, float]]:
    """Paired repeats of DDP and one group, in changing order."""
    pairs = []
    for number in range(OPTIONS["repeats"]):
        kinds: dict[str, Any] = {"ddp": pl.strategies.DDPStrategy, "omni": lambda: omni.OmniStrategy(groups=1)}
        order = list(kinds) if number % 2 else list(reversed(kinds))
        times = {kind: statistics.median(fit(kinds[kind](), 0.0, 2, OPTIONS["steps"])) for kind in order}
        pairs.append(times)
    return pairs


def beside() -> list[dict[str, float]]:
    """The first group's step time beside a second group that sleeps briefly, and beside one that sleeps for long."""
    pairs = []
    for number in range(OPTIONS["repeats"]):
        pair = {}
        for name in ("sleepy", "alone") if number % 2 else ("alone", "sleepy"):
            sleep = {"sleepy": 0.05, "alone": 1.5}[name] if RANK == 1 else OPTIONS["own"]
            pair[name] = statistics.median(fit(omni.OmniStrategy(groups=2), sleep, 2, OPTIONS["steps"]))
        pairs.append(pair)
    return pairs


if __name__ == "__main__":
    report(RANK, {"overhead": overhead, "beside": beside}[OPTIONS["measure"]]())
