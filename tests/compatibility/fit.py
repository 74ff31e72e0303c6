"""One case, run under one strategy, and all that is compared of it."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import modules
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import Logger

PACE = 0.002
"""Seconds that every training batch sleeps, so that groups share the samples evenly on few cores."""
HOOKS = tuple(
    name
    for name in vars(pl.Callback)
    if name.startswith("on_") and "checkpoint" not in name and "exception" not in name
)


class Notes(Logger):
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "notes"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append(dict(metrics))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class Count(pl.Callback):
    """Counts every hook of a callback."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        for name in HOOKS:
            setattr(self, name, self._counted(name))

    def _counted(self, name: str) -> Callable[..., None]:
        def hook(trainer: Any, *_: Any, **__: Any) -> None:
            self.calls[name if not trainer.sanity_checking else f"sanity {name}"] += 1
            if name == "on_train_batch_start":
                time.sleep(PACE)

        return hook


@dataclass
class Fit:
    """One case under one strategy: makes Trainers for it, and takes notes.

    Args:
        case: the row.
        make_strategy: the strategy under test, a new one for each Trainer.
        make_ddp: plain DDP, for what is loaded there again.
        folder: where files go, the same on all ranks.
        ranks: number of ranks.
    """

    case: Any
    make_strategy: Callable[[], Any]
    make_ddp: Callable[[], Any]
    folder: Path
    ranks: int
    count: Count = field(default_factory=Count)
    notes: Notes = field(default_factory=Notes)
    module: Any = None
    last: Any = None
    callbacks: list[Any] = field(default_factory=list)

    def trainer(self, strategy: Any = None, **options: Any) -> Any:
        """A Trainer with this case's callbacks and options; what is given here comes first."""
        settings: dict[str, Any] = {
            "logger": self.notes,
            "max_epochs": 3,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 4,
            "default_root_dir": self.folder,
        }
        case = self.case
        mine = case.callbacks(self.folder) if case.callbacks is not None else []
        if any(isinstance(callback, pl.callbacks.Checkpoint) for callback in mine):
            del settings["enable_checkpointing"]
        settings["callbacks"] = self.callbacks = [self.count, *mine]
        trainer_options = case.trainer(self.folder) if callable(case.trainer) else case.trainer
        settings |= {**trainer_options, **options}
        self.last = pl.Trainer(
            accelerator="cpu", devices=self.ranks, strategy=strategy or self.make_strategy(), **settings
        )
        return self.last

    def fit(self, *args: Any, trainer: Any = None, **options: Any) -> Any:
        """Makes a Trainer and fits the module."""
        trainer = trainer or self.trainer()
        data = self.case.data() if self.case.data is not None else (modules.train_loader(), modules.val_loader())
        args = args or (data if isinstance(data, tuple) else (data,))
        trainer.fit(self.module, *args, **options)
        return trainer


def fit_once(fit: Fit) -> dict[str, Any]:
    """What most cases do."""
    fit.fit()
    return {}


def run_case(fit: Fit) -> dict[str, Any]:
    """Runs the case and returns all that is compared."""
    pl.seed_everything(11, verbose=False)
    fit.folder.mkdir(parents=True, exist_ok=True)
    fit.module = fit.case.module()
    before = {name: value.detach().clone() for name, value in fit.module.state_dict().items()}
    error, extra = "", {}
    try:
        extra = fit.case.act(fit) or {}
    except (Exception, SystemExit, KeyboardInterrupt) as problem:
        traceback.print_exc()
        error = f"{type(problem).__name__}: {problem}"
    return {"error": error, **_facts(fit, before), **extra}


def _facts(fit: Fit, before: dict[str, torch.Tensor]) -> dict[str, Any]:
    module, trainer = fit.module, fit.last
    after = module.state_dict()
    loss, accuracy = evaluate(module)
    facts: dict[str, Any] = {
        "weights": digest(after),
        "loss": loss,
        "accuracy": accuracy,
        "moved": sorted(n for n in before if n in after and not torch.equal(before[n], after[n].detach())),
        "state names": sorted(after),
        "trainable": sorted(name for name, p in module.named_parameters() if p.requires_grad),
        "calls": dict(fit.count.calls),
        "logged": sorted({name for row in fit.notes.rows for name in row}),
    }
    if trainer is not None:
        facts |= {
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "epochs": trainer.current_epoch,
            "steps": trainer.global_step,
            "stopped": bool(trainer.should_stop),
            "status": str(trainer.state.status),
            "callback list": [type(callback).__name__ for callback in trainer.callbacks],
            "max_batches": str(getattr(trainer.fit_loop, "max_batches", "")),
            "limits": [str(trainer.num_training_batches), trainer.max_steps, trainer.max_epochs],
            "optimizers": [
                {"groups": [len(group["params"]) for group in o.param_groups], "kind": type(o).__name__}
                for o in trainer.optimizers
            ],
            "lr": [group["lr"] for o in trainer.optimizers for group in o.param_groups],
        }
    if _all_have_ended(fit):
        facts |= _files(fit.folder, facts["weights"])
    return facts


def _all_have_ended(fit: Fit, patience: float = 10.0) -> bool:
    """On rank 0, once no rank writes files any more: each rank leaves a mark, and one that failed may be missing."""
    marks = [fit.folder.parent / f"{fit.folder.name}.ended.{rank}" for rank in range(fit.ranks)]
    rank = int(os.environ.get("LOCAL_RANK", 0))
    marks[rank].touch()
    deadline = time.monotonic() + patience
    while rank == 0 and time.monotonic() < deadline and not all(mark.exists() for mark in marks):
        time.sleep(0.01)
    return rank == 0


def _files(folder: Path, final: str) -> dict[str, Any]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    checkpoints = [path for path in paths if path.suffix == ".ckpt"]
    facts: dict[str, Any] = {"files": [str(path.relative_to(folder)) for path in paths]}
    facts["empty files"] = [str(path.relative_to(folder)) for path in paths if not path.stat().st_size]
    if checkpoints:
        loaded = [torch.load(path, map_location="cpu", weights_only=False) for path in checkpoints]
        facts["checkpoint keys"] = sorted({key for each in loaded for key in each} - {"omni"})
        facts["checkpoint names"] = sorted({name for each in loaded for name in each["state_dict"]})
        facts["a checkpoint holds the final weights"] = any(digest(each["state_dict"]) == final for each in loaded)
        facts["checkpoint finite"] = all(
            bool(torch.isfinite(value).all()) for each in loaded for value in each["state_dict"].values()
        )
        facts["checkpoint optimizers"] = sorted(
            {
                str(
                    [
                        [len(group["params"]) for group in o["param_groups"]] + [sorted(o["state"])]
                        for o in each.get("optimizer_states", [])
                    ]
                )
                for each in loaded
            }
        )
    return facts


def evaluate(module: Any) -> tuple[float, float]:
    """Loss and accuracy on the held-out samples."""
    was = module.training
    module.eval()
    x, y = modules.held_out_data().tensors
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        logits = module(x.to(next(module.parameters()).dtype)).float()
        loss = float(torch.nn.functional.cross_entropy(logits, y))
        module.train(was)
        return (loss if math.isfinite(loss) else -1.0), float((logits.argmax(1) == y).float().mean())
    return -1.0, -1.0


def digest(state: Mapping[str, Any]) -> str:
    """All bits of a state_dict."""
    hasher = hashlib.sha256()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            hasher.update(name.encode())
            hasher.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]
