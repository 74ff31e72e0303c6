"""Trains with any start method, and reports from the script's own process. Its options are those of `fit`."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import signal
import sys
from typing import Any

import torch
from common import FOLDER, OPTIONS, Net, loaders, omni, pl, report, trainer
from values import values_in

from lightning_omni.tuning.device import DeviceSetting


class Dying(pl.Callback):
    """Rank 1 is killed at its third batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def pretend_that_this_is_a_shell() -> None:
    """As `python -i`; Lightning has looked whether it is one when it was imported."""
    sys.ps1 = ">>> "
    for name in (f"{pl.__name__}.trainer.connectors.accelerator_connector",):
        importlib.import_module(name)._IS_INTERACTIVE = True  # type: ignore[attr-defined]


def tuner_found(tuner: Any) -> dict[str, Any]:
    """What the script's own process knows of it."""
    return {
        "choice": tuner.choice is not None and tuner.choice.setting.groups,
        "searches": len(tuner.searches),
        "problem": tuner.problem,
        "report": tuner.folder is not None and sorted(each.name for each in tuner.folder.iterdir()),
    }


def copies(*originals: Any) -> list[str]:
    """What comes out of pickle and copy.deepcopy, by the names of the classes."""
    return [
        type(copied).__name__
        for original in originals
        for copied in (pickle.loads(pickle.dumps(original)), copy.deepcopy(original))
    ]


def fit(
    strategy: Any,
    dies: bool = False,
    validates: bool = True,
    is_tuned: bool = False,
    is_interactive: bool = False,
    **options: Any,
) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    if is_interactive:
        pretend_that_this_is_a_shell()
    strategy = strategy if isinstance(strategy, str) else omni.OmniStrategy(**values_in(strategy))
    callbacks: list[Any] = [
        *([Dying()] if dies else ()),
        *([omni.OmniTuner(budget=0.3)] if is_tuned else ()),
        *([omni.DeviceTuner(setting=DeviceSetting())] if is_interactive else ()),
    ]
    if is_interactive:
        options["logger"] = pl.loggers.CSVLogger(FOLDER)
    run = trainer(strategy, 2, callbacks=callbacks, **options)
    before = copies(run, run.strategy)
    module = Net()
    run.fit(module, *loaders())
    summary = run.strategy.report()
    saved = {}
    if type(run.strategy.launcher).__name__ == "OmniProcesses":  # outside of any fit: those were in other processes
        torch.save({"state_dict": module.state_dict(), "omni": {"clock": 3}}, FOLDER / "any.ckpt")
        saved = run.strategy.load_checkpoint(FOLDER / "any.ckpt")
    again = pickle.loads(pickle.dumps(run.strategy)).report()
    return {
        "name": type(run.strategy).__name__,
        "pickled before": before,
        "pickled after": copies(run, run.strategy),
        "report survives": again == summary,
        "weights": [type(each).__name__ for each in module.state_dict().values()],
        "updates": summary.updates,
        "groups": summary.groups,
        "loaded": sorted(saved),
        "left behind": [name for name in os.environ if name.startswith("OMNI_LAUNCHER")],
        "found": [tuner_found(each) for each in callbacks if isinstance(each, omni.OmniTuner)],
        "loss": float(run.callback_metrics["val_loss"]),
        "validated": run.validate(module, loaders()[1], verbose=False)[0]["val_loss"] if validates else None,
    }


if __name__ == "__main__":
    report(int(os.environ.get("LOCAL_RANK", 0)), [fit(**options) for options in OPTIONS["fits"]])
