"""Trains with any start method, and reports from the script's own process. Its options are those of `fit`."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from typing import Any

from common import OPTIONS, Net, loaders, omni, pl, report, trainer


class Dying(pl.Callback):
    """Rank 1 is killed at its third batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def copies(*originals: Any) -> list[str]:
    """What comes out of pickle and copy.deepcopy, by the names of the classes."""
    return [
        type(copied).__name__
        for original in originals
        for copied in (pickle.loads(pickle.dumps(original)), copy.deepcopy(original))
    ]


def fit(
    strategy: Any, dies: bool = False, validates: bool = True, is_tuned: bool = False, **options: Any
) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    strategy = strategy if isinstance(strategy, str) else omni.OmniStrategy(**strategy)
    callbacks: list[Any] = [
        *([Dying()] if dies else ()),
        *([omni.OmniTuner(search="bayes", budget=0.3)] if is_tuned else ()),
    ]
    run = trainer(strategy, 2, callbacks=callbacks, **options)
    before = copies(run, run.strategy)
    module = Net()
    run.fit(module, *loaders())
    summary = run.strategy.report()
    again = pickle.loads(pickle.dumps(run.strategy)).report()
    return {
        "name": type(run.strategy).__name__,
        "pickled before": before,
        "pickled after": copies(run, run.strategy),
        "report survives": again == summary,
        "updates": summary.updates,
        "groups": summary.groups,
        "loss": float(run.callback_metrics["val_loss"]),
        "validated": run.validate(module, loaders()[1], verbose=False)[0]["val_loss"] if validates else None,
    }


if __name__ == "__main__":
    report(int(os.environ.get("LOCAL_RANK", 0)), [fit(**options) for options in OPTIONS["fits"]])
