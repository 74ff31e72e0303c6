"""Trains two groups twice, with strangers at the ports the second time, and reports what both fits ended with.

Rank 0 says where its server listens and waits for the file ``attacked`` before the second fit's first step.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from common import FOLDER, Net, digest, loaders, omni, pl, report, trainer

from lightning_omni import Server

PACE = 0.03
"""Seconds that a step of the second fit takes longer, so that there is something to attack."""


class Ports(pl.Callback):
    """Tells the test where the server listens, and waits for the strangers."""

    def __init__(self) -> None:
        self.strangers = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        world = trainer.strategy.world
        if trainer.global_rank == 0 and trainer.global_step == 0:
            partial = FOLDER / "partial"
            partial.write_text(json.dumps([world.control.address, world.control.data_address]))
            partial.rename(FOLDER / "ports.json")
            while not (FOLDER / "attacked").exists():
                time.sleep(0.01)
        time.sleep(PACE)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        status = trainer.strategy.world.control.status
        self.strangers = status.strangers if status is not None else 0


def fit(callbacks: list[Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Net()
    strategy = omni.OmniStrategy(groups=2, method="hardsync", data="static", server=Server(host="127.0.0.1"))
    fitting = trainer(strategy, devices=2, callbacks=callbacks, max_epochs=2)
    fitting.fit(model, *loaders(shuffle=False))
    return {"weights": digest(model), "steps": fitting.global_step, "lost": strategy.report().ranks_lost}


if __name__ == "__main__":
    ports = Ports()
    quiet, attacked = fit([]), fit([ports])
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    report(rank, {"quiet": quiet, "attacked": {**attacked, "strangers": ports.strangers}})
