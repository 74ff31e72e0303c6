"""Measures a group of ranks whose speeds are emulated by sleeping: samples per second, and how the batch was split."""

from __future__ import annotations

import os
import time
from typing import Any

from common import OPTIONS, Net, loaders, omni, pl, report, trainer
from torch import Tensor

RANK = int(os.environ.get("LOCAL_RANK", 0))
SPEEDS = OPTIONS["speeds"]
BATCH_SIZE = OPTIONS["batch_size"]


class Paced(Net):
    """Sleeps as long as a device of this rank's speed would work, and works a little, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(len(batch[2]) / SPEEDS[RANK])
        return self.loss(batch)


class Clock(pl.Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def fit(strategy: Any, steps: int, steady: int) -> dict[str, Any]:
    """Samples per second of the whole group: from the first step on, and from step number ``steady`` on."""
    clock, size = Clock(), len(SPEEDS) * BATCH_SIZE
    run = trainer(strategy, len(SPEEDS), callbacks=[clock], limit_val_batches=0)
    run.fit(Paced(norm=False), loaders(size * steps, BATCH_SIZE)[0])
    whole, later = clock.ends, clock.ends[steady:]
    return {
        "throughput": size * (len(later) - 1) / (later[-1] - later[0]),
        "from_the_start": size * (len(whole) - 1) / (whole[-1] - whole[0]),
    }


def main() -> None:
    steps, steady = OPTIONS["steps"], OPTIONS["steady"]
    repeats = [
        {
            "ddp": fit(pl.strategies.DDPStrategy(), steady, 5),
            "auto": fit(omni.OmniStrategy(groups=1, rebalance="auto"), steps, steady),
        }
        for _ in range(OPTIONS["repeats"])
    ]
    report(RANK, repeats)


if __name__ == "__main__":
    main()
