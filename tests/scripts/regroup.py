"""Regroups again and again in mid-fit, and notes times, threads and open files."""

from __future__ import annotations

import os
from typing import Any

import torch
from common import FOLDER, OPTIONS, digest, loaders, pl, report, trainer
from groups import GroupNet, Notes
from torch.nn.parallel import DistributedDataParallel

import lightning_omni as omni

RANK = int(os.environ.get("LOCAL_RANK", 0))


class Wrapped(Notes):
    """Notes whether the module is wrapped as its group needs it."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.wrapped: list[bool] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        alone = len(trainer.strategy.world.members) == 1
        self.wrapped.append(isinstance(trainer.strategy.model, DistributedDataParallel) is not alone)


class Saves(pl.Callback):
    """Saves a checkpoint in mid-epoch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == OPTIONS["saved_after"]:
            trainer.save_checkpoint(FOLDER / "inside.ckpt")


def saved() -> str:
    """A checkpoint that one group has saved in mid-epoch."""
    first = trainer(omni.OmniStrategy(groups=1), 4, callbacks=[Saves()])
    first.fit(GroupNet({}, OPTIONS.get("schedule", "")), *loaders(**OPTIONS["data"]))
    return str(FOLDER / "inside.ckpt")


def main() -> None:
    path = saved() if "saved_after" in OPTIONS else None
    notes = Wrapped(OPTIONS)
    pl.seed_everything(5, verbose=False)
    strategy = omni.OmniStrategy(groups=OPTIONS["groups"])
    module = GroupNet({}, OPTIONS.get("schedule", ""))
    run = trainer(strategy, 4, callbacks=[notes], **OPTIONS.get("trainer", {}))
    error = ""
    try:
        run.fit(module, *loaders(**OPTIONS["data"]), ckpt_path=path)
    except Exception as problem:
        if not OPTIONS.get("expect_error"):
            raise
        error = f"{type(problem).__name__}: {problem}"
    report(
        RANK,
        {
            "error": error,
            "samples": notes.samples,
            "times": notes.regroup_times,
            "threads": notes.threads,
            "files": notes.files,
            "wrapped": all(notes.wrapped),
            "rates": notes.rates,
            "step": run.global_step,
            "lr": run.optimizers[0].param_groups[0]["lr"] if run.optimizers else None,
            "momentum": bool(run.optimizers and run.optimizers[0].state),
            "parameters": digest(torch.nn.ParameterList(module.parameters())),
            "val_loss": float(run.callback_metrics.get("val_loss", -1.0)),
        },
    )


if __name__ == "__main__":
    main()
