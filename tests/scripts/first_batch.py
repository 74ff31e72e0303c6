"""Fits for a moment and prints when the first batch has begun; it imports what a user's script does, and no more."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.demos.boring_classes import BoringModel


class Begun(pl.Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            sys.stdout.write(f"{time.time()}\n")
        trainer.should_stop = True


def strategy() -> Any:
    if sys.argv[1] == "ddp":
        return pl.strategies.DDPStrategy()
    from lightning_omni import OmniStrategy

    return OmniStrategy(groups=1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    fit = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy(), max_epochs=1, callbacks=[Begun()], **quiet)
    fit.fit(BoringModel())
