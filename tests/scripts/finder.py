"""Fits with a learning-rate finder, one after the other in the same processes, and what each rank found."""

from __future__ import annotations

import os
from typing import Any

import torch
from common import OPTIONS, digest, loaders, omni, pl, report, trainer
from torch import Tensor, nn

RANK = int(os.environ.get("LOCAL_RANK", 0))
STEPS = 30


class Net(pl.LightningModule):
    def __init__(self, onecycle: bool) -> None:
        super().__init__()
        self.onecycle = onecycle
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
        self.lr = 0.05

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)
        if not self.onecycle:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, steps, cycle_momentum=False)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loaders()[0]

    def val_dataloader(self) -> Any:
        return loaders()[1]


class Finder(pl.callbacks.LearningRateFinder):
    """Finds the rate when told to, as Lightning's manual shows for fine-tuning."""

    def __init__(self, epochs: list[int]) -> None:
        super().__init__(num_training_steps=STEPS)
        self.epochs = epochs
        self.found: list[Any] = []
        self.weights: list[bool] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.epochs:
            self.find(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch in self.epochs:
            self.find(trainer, pl_module)

    def find(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        before = digest(pl_module)
        self.lr_find(trainer, pl_module)
        self.weights.append(digest(pl_module) == before)
        assert self.optimal_lr is not None
        self.found.append([self.optimal_lr.suggestion(), len(self.optimal_lr.results["lr"])])


class Early(pl.callbacks.LearningRateFinder):
    """Wants a rate where groups are under way."""

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.lr_find(trainer, pl_module)


def fit(options: dict[str, Any]) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    groups = options["groups"]
    strategy = omni.OmniStrategy(groups=groups, method=options.get("method", "async_sgd")) if groups else "ddp"
    module = Net(options.get("onecycle", False))
    finder = Finder(options["epochs"]) if "epochs" in options else None
    callbacks: list[Any] = [finder] if finder else [Early()] if options.get("early") else []
    reload = {"reload_dataloaders_every_n_epochs": 1} if options.get("reload") else {}
    run = trainer(strategy, 2, callbacks=callbacks, max_epochs=2, **reload)
    train, val = loaders()
    found: list[Any] = []
    if options.get("tuner"):
        curve = pl.tuner.Tuner(run).lr_find(module, train, val, num_training=STEPS)
        found = [[curve.suggestion(), len(curve.results["lr"])]]
    error = ""
    try:
        run.fit(module, *([Data()] if reload else [train, val]))
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    return {
        "found": finder.found if finder else found,
        "weights": finder.weights if finder else [],
        "lr": run.optimizers[0].param_groups[0]["lr"],
        "callbacks": [type(each).__name__ for each in run.callbacks],
        "loss": float(run.callback_metrics["val_loss"]) if not error else None,
        "updates": strategy.report().updates if groups and not error else run.global_step,
        "groups": strategy.report().groups if groups and not error else 1,
        "error": error,
        "final": digest(module),
    }


if __name__ == "__main__":
    report(RANK, [fit(options) for options in OPTIONS["fits"]])
