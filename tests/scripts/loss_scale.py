"""Three fits in half precision, in which one of two groups meets an infinite loss: it alone scales its losses less."""

from __future__ import annotations

import os
from typing import Any

import torch
from common import Net, digest, loaders, omni, pl, report, trainer
from devices import own_device
from torch import Tensor

RANK = int(os.environ.get("LOCAL_RANK", 0))
INFINITE, REGROUPS = 1, 4
"""Batches of an epoch: in which the loss is infinite in the second group, and before which the groups become one."""


class Overflows(Net):
    """A net whose second group has an infinite loss in every fit that trains in two groups."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        alone = not self.trainer.strategy.world.is_synchronous
        return loss * float("inf") if alone and RANK == 1 and batch_idx == INFINITE else loss


class Fits(pl.Callback):
    """Forms the groups of each fit, and notes the loss scale after each batch.

    The first fit ends in two groups. The second is in one, as a tuner's that has yet to choose; the third becomes one.
    """

    def __init__(self) -> None:
        self.number = 0
        self.scales: list[list[tuple[float, int]]] = [[], [], []]

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.number == 1:
            trainer.strategy.parts.user_groups.begin_in_one_group()
        elif self.number == 2:
            trainer.strategy.parts.user_groups.restore()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.number == 2 and batch_idx == REGROUPS:
            trainer.strategy.regroup(1)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        state = trainer.precision_plugin.state_dict()
        self.scales[self.number].append((state["scale"], state["_growth_tracker"]))


def main() -> None:
    kind = own_device().type
    scaler = torch.amp.GradScaler(kind, init_scale=1024.0, growth_interval=7)
    precision = pl.plugins.MixedPrecision("16-mixed", kind, scaler=scaler)
    fits, module, digests = Fits(), Overflows(norm=False), []
    run = trainer(omni.OmniStrategy(groups=2, data="static"), 2, callbacks=[fits], plugins=[precision])
    for number in range(3):
        fits.number, run.fit_loop.max_epochs = number, number + 1
        run.fit(module, *loaders())
        digests.append(digest(module))
    report(RANK, {"scales": fits.scales, "digests": digests})


if __name__ == "__main__":
    main()
