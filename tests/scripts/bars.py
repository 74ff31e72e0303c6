"""Trains in groups with a progress bar, and reports what the bar showed after each batch of rank 0."""

from __future__ import annotations

import os
import time
from typing import Any

from common import FOLDER, OPTIONS, Net, loaders, omni, pl, report, trainer
from torch import Tensor

RANK = int(os.environ.get("LOCAL_RANK", 0))
BATCHES = 64
"""Of an epoch, over both ranks."""
PATIENCE = 60.0


class SlowNet(Net):
    """Rank 1 takes a batch while rank 0 takes three, however busy the machine and however long a bar takes to draw."""

    number = 0

    def on_train_epoch_start(self) -> None:
        self.begun = 0
        SlowNet.number += 1  # of the epochs of all fits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.begun += 1
        if self.trainer.strategy.world.is_synchronous:
            time.sleep(0.03 * RANK)
        elif RANK == 0:
            with (FOLDER / f"begun-{SlowNet.number}").open("a") as file:
                file.write(".")
        else:
            self._wait_for_rank_0()
        return super().training_step(batch, batch_idx)

    def _wait_for_rank_0(self) -> None:
        file, deadline = FOLDER / f"begun-{SlowNet.number}", time.monotonic() + PATIENCE
        enough = min(3 * self.begun, BATCHES - self.begun - 4)  # what this rank has drawn is none of rank 0's
        while (file.stat().st_size if file.exists() else 0) < enough:
            assert time.monotonic() < deadline, "rank 0 does not get on"
            time.sleep(0.005)


class Keys(pl.loggers.CSVLogger):
    """A logger that remembers its keys."""

    def __init__(self) -> None:
        super().__init__(os.environ["OMNI_TEST_FOLDER"])
        self.keys: set[str] = set()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.keys |= set(metrics)


class Noted:
    """A bar of the user's own making, which notes what it shows."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shown: list[tuple[int, int]] = []
        self.entries: dict[str, Any] = {}
        self.lines: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)  # type: ignore[misc]
        if trainer.is_global_zero:
            bar = self.train_progress_bar  # type: ignore[attr-defined]
            self.shown.append((int(bar.n if hasattr(bar, "n") else bar.completed), int(bar.total)))
            if hasattr(bar, "format_meter"):  # as on a terminal of 80 columns
                self.lines.append(bar.format_meter(**{**bar.format_dict, "ncols": 80}))
            self.entries |= self.get_metrics(trainer, pl_module)  # type: ignore[attr-defined]


class NotedTqdm(Noted, pl.callbacks.TQDMProgressBar):
    pass


class NotedRich(Noted, pl.callbacks.RichProgressBar):
    pass


def fit(options: dict[str, Any]) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    strategy = omni.OmniStrategy(groups=options["groups"])
    bar = {"tqdm": NotedTqdm, "rich": NotedRich}[options["bar"]]()
    logger = Keys()
    settings = {"enable_progress_bar": True, "logger": logger, "log_every_n_steps": 4, "max_epochs": 2}
    run = trainer(strategy, 2, callbacks=[bar], **settings)
    run.fit(SlowNet(), loaders(512)[0], loaders()[1])
    return {
        "shown": bar.shown,
        "entries": {name: str(value) for name, value in bar.entries.items()},
        "lines": bar.lines,
        "keys": sorted(logger.keys),
        "said": str(strategy.report()),
    }


if __name__ == "__main__":
    report(RANK, [fit(options) for options in OPTIONS["fits"]])
