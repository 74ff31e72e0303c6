"""Trains with a merged head, and reports what every rank saw and ended with. Each "fit" is one fit, in order."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import torch
from common import FOLDER, OPTIONS, dataset, digest, loaders, omni, pl, report, trainer
from layers import Counter
from torch import Tensor, nn
from values import values_in

from lightning_omni.errors import ConfigurationError

RANK = int(os.environ.get("LOCAL_RANK", 0))


class HeadNet(pl.LightningModule):
    """A small body and a large head."""

    def __init__(self, dropout: float = 0.0, optimizer: str = "sgd", defect: str = "") -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.ReLU())
        layers: list[nn.Module] = [nn.Linear(16, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 3)]
        if defect == "counter":
            layers.insert(1, Counter())
        self.classifier = nn.Sequential(*layers)
        self.defect, self.optimizer_name, self.began = defect, optimizer, 0
        self.losses: list[float] = []
        self.answers: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        features = self.body(x)
        if self.defect == "counter":
            self.note(lambda: self.classifier(features))
            return features.square().mean()
        logits = self.classifier(features)
        if self.defect == "misused" and batch_idx == 1:
            self.note(lambda: self.classifier(features))
        if self.defect == "die" and RANK == 3 and batch_idx == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.defect == "nan" and batch_idx % 3 == 1:
            logits = logits * float("nan")
        if "copied" in self.defect and batch_idx == 1:
            self.copies_work(features.detach())
        loss = nn.functional.cross_entropy(logits, y)
        if self.defect == "idle" and batch_idx % 2:
            loss = features.square().mean()  # the head has had its forward pass for nothing
        if self.defect == "misused" and batch_idx == 3:
            loss = loss + self.classifier[0].weight.square().mean()
        with torch.no_grad():
            self.log("train_acc", (self.classifier(features).argmax(1) == y).float().mean())
        self.losses.append(float(loss))
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.note(lambda: super(HeadNet, self).optimizer_step(*args, **kwargs))

    def note(self, action: Callable[[], Any]) -> None:
        """Notes what a misuse is answered with, and goes on."""
        try:
            action()
        except ConfigurationError as error:
            if not self.defect:
                raise
            self.answers.append(str(error))
            self.zero_grad()

    def copies_work(self, features: Tensor) -> None:
        """Copies of the head have a forward pass of their own, with the weights of the last synchronization."""
        for twin in (copy.deepcopy(self.classifier), pickle.loads(pickle.dumps(self.classifier))):
            plain = twin[3](twin[0](features).relu())
            assert torch.equal(twin(features), plain)

    def on_train_epoch_start(self) -> None:
        if "frozen first" in self.defect:
            self.classifier.requires_grad_(self.current_epoch > 0)
        if self.defect == "written" and self.current_epoch == 1:
            self.began = len(self.losses)
            for parameter in self.classifier[3].parameters():
                nn.init.zeros_(parameter)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sum":  # weights stay, and the buffers add all gradients up
            return torch.optim.SGD(self.parameters(), lr=0.0, momentum=1.0)
        if self.optimizer_name == "plain":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)
        if self.optimizer_name == "adam":
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        groups = [{"params": self.classifier.parameters(), "lr": 0.05}, {"params": self.body.parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Regroup(pl.Callback):
    """Forms other groups in mid-fit."""

    def __init__(self, plan: dict[str, int]) -> None:
        self.plan = {int(batch): groups for batch, groups in plan.items()}
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.batches += 1
        if self.batches in self.plan:
            trainer.strategy.regroup(self.plan[self.batches])


def saved_matches(path: str, model: HeadNet) -> bool:
    """Whether the last checkpoint holds the model and the state of each of its weights."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    same = all(torch.equal(value, model.state_dict()[name].cpu()) for name, value in saved["state_dict"].items())
    return same and set(saved["optimizer_states"][0]["state"]) == set(range(len(list(model.parameters()))))


def gradient_sums(model: HeadNet, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """By how much the sum of all gradients of an epoch, over the number of batches, misses the mean over all data."""
    state = optimizer.state
    buffers = {name: state[p]["momentum_buffer"] for name, p in model.named_parameters() if p in state}
    x, y, _ = dataset().tensors
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    return {
        name: float((buffers[name] / (len(model.losses) * OPTIONS["devices"] / model.group_size) - p.grad).abs().max())
        for name, p in model.named_parameters()
    }


@torch.no_grad()
def validation_loss(model: HeadNet) -> float:
    x, y, _ = dataset(64).tensors
    return float(nn.functional.cross_entropy(model.eval()(x), y))


def fit(number: int, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    model = HeadNet(**options.get("model", {}))
    untrained = validation_loss(copy.deepcopy(model))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    record = f"{FOLDER}/record{number}" if options.get("record") else None
    given = options.get("strategy", {})
    given = {
        "merged": options.get("merged", "classifier"),
        **given,
        "server": {"record": record, **given.get("server", {})},
    }
    strategy = omni.OmniStrategy(**values_in(given))
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=FOLDER / f"fit{number}", monitor="val_loss", save_last=True)
    callbacks = [checkpoint, Regroup(options.get("regroup", {}))]
    run = trainer(
        strategy,
        OPTIONS["devices"],
        callbacks=callbacks,
        enable_checkpointing=True,
        **{"max_epochs": 2, **options.get("trainer", {})},
    )
    saved = f"{FOLDER}/fit{options['resumes']}/last.ckpt" if "resumes" in options else None
    run.fit(model, *loaders(**options.get("data", {})), ckpt_path=saved)
    model.group_size = strategy.report().group_size
    sums = options.get("model", {}).get("optimizer") == "sum" and RANK == 0
    return {
        "record": record,
        "initial": {name: value.tolist() for name, value in before.items()} if record else {},
        "weights": {name: value.tolist() for name, value in model.state_dict().items()} if record else {},
        "sums": gradient_sums(model, run.optimizers[0]) if sums else {},
        "digest": digest(model),
        "losses": model.losses,
        "began": model.began,
        "answers": model.answers,
        "moved": {name: bool((value != before[name]).any()) for name, value in model.state_dict().items()},
        "own_forward": "forward" in vars(model.classifier),
        "trainable": all(parameter.requires_grad for parameter in model.parameters()),
        "val_loss": float(run.callback_metrics.get("val_loss", float("nan"))),
        "untrained": untrained,
        "report": vars(strategy.report()),
        "saved": saved_matches(checkpoint.last_model_path, model) if RANK == 0 else None,
    }


report(RANK, [fit(number, options) for number, options in enumerate(OPTIONS["fits"])])
