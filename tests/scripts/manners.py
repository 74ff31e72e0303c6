"""What a user may read of Trainer and loops before, in and after a fit, for one strategy after another."""

from __future__ import annotations

import math
import os
import time
import warnings
from typing import Any

from common import OPTIONS, Net, digest, loaders, omni, pl, report, trainer
from torch import Tensor

warnings.filterwarnings("always", message="OmniStrategy")
RANK = int(os.environ.get("LOCAL_RANK", 0))
SIMPLE = (int, float, str, bool, type(None), tuple)


def public(thing: Any) -> dict[str, str]:
    """Public attributes with plain values, and of others the class."""
    values: dict[str, str] = {}
    for name in sorted(dir(thing)):
        if not name.startswith("_"):
            try:
                value = getattr(thing, name)
            except Exception as error:
                value = type(error).__name__
            if not callable(value):
                values[name] = repr(value) if isinstance(value, SIMPLE) else type(value).__name__
    return values


def seen(run: pl.Trainer) -> dict[str, dict[str, str]]:
    loop = run.fit_loop
    run_values = public(run)
    run_values["callbacks"] = ", ".join(type(each).__name__ for each in run.callbacks)
    return {"trainer": run_values, "fit_loop": public(loop), "epoch_loop": public(loop.epoch_loop)}


class Reader(pl.Callback):
    """Reads where a group is at a batch, at a validation and at an epoch's end, and what it hears."""

    def __init__(self, raises: bool) -> None:
        self.raises = raises
        self.seen: dict[str, Any] = {}
        self.heard: list[str] = []

    def note(self, where: str, trainer: pl.Trainer) -> None:
        self.seen.setdefault(where, seen(trainer))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.note("epoch start", trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.note("batch start", trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("batch end", trainer)
        if self.raises and batch_idx == 1:
            raise ValueError("something is wrong with this batch")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.note("validation end", trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note("epoch end", trainer)


class PlainNet(Net):
    """Without buffers."""

    def __init__(self) -> None:
        super().__init__(norm=False)


class GatheringNet(PlainNet):
    """Gathers in the training step, as contrastive losses do, and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: set[tuple[str, int]] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.gathered.add(("training", self.all_gather(loss.detach()).numel()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.gathered.add(("validation", self.all_gather(batch[2][:1]).numel()))


class SlowNet(PlainNet):
    """Takes its time, so that a second passes in an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.1)
        return super().training_step(batch, batch_idx)


def fit(options: dict[str, Any]) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    groups = options["groups"]
    strategy = omni.OmniStrategy(groups=groups) if groups else "ddp"
    reader = Reader(options.get("raises", False))
    run = trainer(strategy, 2, callbacks=[reader], **options.get("trainer", {"max_epochs": 2}))
    module: Any = {"": Net, "gathers": GatheringNet, "slow": SlowNet, "plain": PlainNet}[options.get("net", "")]()
    before = seen(run)
    error = ""
    try:
        run.fit(module, *loaders())
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    return {
        "before": before,
        **reader.seen,
        "after": seen(run),
        "error": error,
        "metrics": sorted(run.callback_metrics),
        "gathered": sorted(getattr(module, "gathered", [])),
        "finite": all(math.isfinite(value) for value in run.callback_metrics.values()),
        "weights": digest(module),
    }


if __name__ == "__main__":
    report(RANK, [fit(options) for options in OPTIONS["fits"]])
