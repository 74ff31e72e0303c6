"""Four groups of one rank whose steps take random times, emulated by sleeping; notes how long ranks wait."""

from __future__ import annotations

import os
import random
import time
from typing import Any

from common import OPTIONS, Net, loaders, omni, pl, report, trainer
from torch import Tensor
from torch.utils.data import DataLoader

RANK = int(os.environ.get("LOCAL_RANK", 0))


class Timed(Net):
    """Sleeps for exponential times in each step, and measures what lies between the end of one and the next."""

    def __init__(self, step: float, evaluation: float) -> None:
        super().__init__()
        self.step_time, self.evaluation_time = step, evaluation
        self.draw = random.Random(RANK)
        self.ended: float | None = None
        self.own = self.waited_at_end = 0.0
        self.is_due = False
        self.gaps: list[float] = []
        self.due: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (self.due if self.is_due else self.gaps).append(self.take_gap())
        self.is_due = False
        time.sleep(self.draw.expovariate(1 / self.step_time))
        return self.loss(batch)

    def take_gap(self) -> float:
        """Seconds since the last gradient in which this rank neither trained nor evaluated."""
        gap = 0.0 if self.ended is None else time.perf_counter() - self.ended - self.own
        self.own, self.ended = 0.0, None
        return gap

    def on_after_backward(self) -> None:
        self.ended = time.perf_counter()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        began = time.perf_counter()
        time.sleep(self.draw.expovariate(1 / self.evaluation_time))
        super().validation_step(batch, batch_idx)
        self.own += time.perf_counter() - began

    def on_train_epoch_end(self) -> None:
        self.waited_at_end += self.take_gap()


class Count(pl.Callback):
    """Counts the validations whose metrics a rank gets, and notes between which steps it had to do with one."""

    def __init__(self) -> None:
        self.validations: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        versions = trainer.strategy.world.versions
        claim = versions.claim

        def noted(*place: int) -> int:
            pl_module.is_due = True
            return int(claim(*place))

        versions.claim = noted

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.is_due = True

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.validations.append(float(trainer.callback_metrics["val_loss"]))


def main() -> None:
    pl.seed_everything(0, verbose=False)
    module, count = Timed(OPTIONS["step"], OPTIONS["evaluation"]), Count()
    batch = 8
    run = trainer(
        omni.OmniStrategy(groups=4, validation=OPTIONS["validation"]),
        4,
        callbacks=[count],
        val_check_interval=OPTIONS["every"] // 4,  # a batch of DDP is one of each of the four groups
        limit_val_batches=OPTIONS["batches"] // 4 if OPTIONS["validates"] else 0,
    )
    held_out = DataLoader(loaders(samples=batch * OPTIONS["batches"])[0].dataset, batch_size=batch)
    began = time.perf_counter()
    run.fit(module, loaders(samples=batch * OPTIONS["updates"], batch_size=batch)[0], held_out)
    seconds = time.perf_counter() - began
    usual = sorted(module.gaps)[len(module.gaps) // 2]  # an exchange with the server
    report(
        RANK,
        {
            "seconds": seconds,
            "inside": sum(gap - usual for gap in module.due),
            "end": module.waited_at_end,
            "validations": count.validations,
        },
    )


if __name__ == "__main__":
    main()
