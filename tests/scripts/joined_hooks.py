"""One group of a run that others join while callbacks and hooks of the user's change what is trained, and how."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
from common import FOLDER, OPTIONS, Net, dataset, digest, loaders, omni, pl, trainer
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader

NAME = os.environ["OMNI_TEST_NAME"]
FIRST = 160
"""Samples of the first epoch; the others have fewer."""
THAWED = OPTIONS.get("thawed", 1)
"""The epoch in which the first layers are unfrozen."""


class Edited(Net):
    """Its hooks change it where epochs begin, and in the first batch of an epoch it waits until a file says go."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(1))
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.said: dict[int, dict[str, Any]] = {}
        self.loaded: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature

    def state_dict(self) -> dict[str, Any]:
        """Takes no arguments, and returns copies, under names of its own, of some."""
        return {f"my.{name}": value.clone() for name, value in super().state_dict().items() if name != "temperature"}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["my.net.3.bias"]

    def train_dataloader(self) -> Any:
        self.loaded.append(self.current_epoch)
        return DataLoader(dataset(FIRST if self.current_epoch == 0 else 128), batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        return loaders()[1]

    def on_train_epoch_start(self) -> None:
        self.temperature.mul_(0.5)
        with torch.no_grad():
            self.net[3].weight.clamp_(-0.2, 0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        epoch = self.current_epoch
        if epoch not in self.said:
            steps = self.trainer.strategy.parts.epochs.run.progress.steps_before(epoch)
            self.said[epoch] = {**self.say(), "steps": steps}
            (FOLDER / f"{NAME}0-in-{epoch}").touch()
            while epoch in OPTIONS["hold"] and not (FOLDER / f"go-{epoch}").exists():
                time.sleep(0.02)
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.said[self.current_epoch]["moves"] = self.net[0].weight.grad is not None

    def say(self) -> dict[str, Any]:
        [optimizer], [counts] = self.trainer.optimizers, [c for c in self.trainer.callbacks if isinstance(c, Counts)]
        return {
            "groups": [[group["lr"], len(group["params"])] for group in optimizer.param_groups],
            "momenta": [group["momentum"] for group in optimizer.param_groups],
            "trainable": [name for name, each in self.named_parameters() if each.requires_grad],
            "tracks": self.net[1].track_running_stats,
            "temperature": float(self.temperature),
            "seen": float(self.seen),
            "epochs": counts.epochs,
        }

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


class Thaws(pl.callbacks.BaseFinetuning):
    """Unfreezes the first layers, and lowers the rates in each epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[:2], train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        if epoch == THAWED:
            self.unfreeze_and_add_param_group(pl_module.net[:2], optimizer, lr=0.01, initial_denom_lr=1.0)


class Counts(pl.Callback):
    """Counts the epochs that have begun, and keeps the number with its state."""

    epochs = 0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


def main() -> None:
    pl.seed_everything(1, verbose=False)
    net = Edited()
    fit = trainer(
        omni.OmniStrategy(),
        1,
        max_epochs=OPTIONS["epochs"],
        callbacks=[Thaws(), Counts(), *([omni.OmniTuner()] if OPTIONS.get("is_tuned") else [])],
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=1,
    )
    fit.fit(net)
    said = {"said": net.said, "weights": digest(net), "loaded": net.loaded, "end": net.say()}
    fit.validate(net, verbose=False)
    said |= {"is_zero": fit.is_global_zero, "says": rank_zero_only.rank == 0}
    (FOLDER / f"{NAME}0.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
