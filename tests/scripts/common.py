"""What the training scripts of the tests share: data, a module, a Trainer without frills, and reporting."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
gc.disable()  # what is imported stays: to look for garbage in it takes as long as to import it

import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

if os.environ.get("OMNI_TEST_NAMESPACE") == "lightning.pytorch":
    import lightning.pytorch as pl
else:
    import pytorch_lightning as pl

import spares

import lightning_omni as omni

gc.freeze()
gc.enable()
logging.getLogger("pytorch_lightning.utilities.rank_zero").setLevel(logging.INFO)
torch.set_num_threads(1)


FOLDER = Path(os.environ.get("OMNI_TEST_FOLDER", "."))
OPTIONS: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}

assert omni.OmniStrategy  # imported here, and so in no copy


def servers() -> int:
    """How many the fits start here: one each, or several; "servers" counts those that are not options of a fit."""
    fits = OPTIONS.get("fits", ())
    given = [fit.get("strategy", {}) if isinstance(fit, dict) else {} for fit in fits]
    embedded = [each.get("server") if isinstance(each, dict) else None for each in given]
    several = [each.get("count", 1) if isinstance(each, dict) else 1 for each in embedded]
    return OPTIONS.get("servers", 0 if fits else 1) + sum(count if isinstance(count, int) else 1 for count in several)


if SPARES := int(os.environ.get("OMNI_TEST_SPARES", 0)):
    spares.prepare(SPARES, servers())


class Net(pl.LightningModule):
    """A small classifier with BatchNorm, one unused and one frozen parameter."""

    def __init__(self, features: int = 12, norm: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 3)]
        if norm:
            layers.insert(1, nn.BatchNorm1d(32))
        self.net = nn.Sequential(*layers)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.frozen

    def loss(self, batch: Any) -> Tensor:
        x, y, _ = batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def dataset(samples: int = 256, features: int = 12) -> TensorDataset:
    """Samples, labels, and each sample's number."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, features, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1), torch.arange(samples))


def loaders(samples: int = 256, batch_size: int = 8, **options: Any) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """A training and a validation loader."""
    options.setdefault("shuffle", True)
    return DataLoader(dataset(samples), batch_size=batch_size, **options), DataLoader(dataset(64), batch_size=8)


def trainer(strategy: Any, devices: int, **options: Any) -> pl.Trainer:
    """A Trainer that prints and writes as little as it can."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        "default_root_dir": FOLDER,
    }
    return pl.Trainer(accelerator=ACCELERATOR, devices=devices, strategy=strategy, **{**quiet, **options})


class InTime(pl.Callback):
    """Groups begin to train an epoch when all have a batch of it: one that comes when the others have trained all there
    is would train the epoch's first batch once more."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        world = getattr(trainer.strategy, "world", None)
        if batch_idx == 0 and world is not None and not world.is_synchronous:
            world.barrier()


def digest(module: nn.Module) -> str:
    """All bits of a module's state."""
    hasher = hashlib.sha256()
    for name, value in module.state_dict().items():
        hasher.update(name.encode())
        hasher.update(value.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return hasher.hexdigest()


def report(rank: int, result: Any) -> None:
    """Leaves this rank's result for the test, all at once."""
    partial = FOLDER / f"partial{rank}"
    partial.write_text(json.dumps(result))
    partial.rename(FOLDER / f"rank{rank}.json")


__all__ = ["FOLDER", "OPTIONS", "InTime", "Net", "dataset", "digest", "loaders", "omni", "pl", "report", "trainer"]
