"""The table: a row a case. What it builds, what it covers, and what is expected of it with two groups.

Rows are read by `fits.py` (which runs them), `compare.py`, `matrix.py` and by `table.py`, which makes the docs of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import modules
import pytorch_lightning as pl
import torch
from fit import Fit, evaluate, fit_once
from pytorch_lightning import callbacks as cb
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from lightning_omni.errors import RankLost


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: what a reader of the docs sees.
        covers: names of callbacks and of Trainer options, beside those in ``trainer``.
        module: makes the module.
        data: makes the loaders, or a datamodule.
        callbacks: makes the callbacks, given the folder.
        trainer: options of the Trainer, or a function from the folder.
        act: what is done; returns further facts to compare.
        ddp: arguments of DDPStrategy and OmniStrategy alike.
        omni: arguments of OmniStrategy(groups=2).
        refused: words of the message with which two groups refuse it; empty: as DDP.
        by_the_clock: the clock decides how much is trained, so what comes out is not compared even for one group.
        differs: facts that are not compared for two groups, each with the reason.
    """

    name: str
    covers: tuple[str, ...] = ()
    module: Callable[[], Any] = modules.Classifier
    data: Callable[[], Any] | None = None
    callbacks: Callable[[Path], list[Any]] | None = None
    trainer: Any = field(default_factory=dict)
    act: Callable[[Fit], Any] = fit_once
    ddp: Mapping[str, Any] = field(default_factory=dict)
    omni: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    by_the_clock: bool = False
    differs: Mapping[str, str] = field(default_factory=dict)

    @property
    def quick(self) -> bool:
        """Whether ``make test`` runs it."""
        return self.name in QUICK

    @property
    def options(self) -> set[str]:
        """Trainer options that this row sets."""
        given = self.trainer(Path()) if callable(self.trainer) else self.trainer
        return set(given) | {name for name in self.covers if name.islower()}


# --- What rows do besides fitting -----------------------------------------------------------------------------------


class Stop(Exception):
    """Raised by a callback in mid-fit."""


class RaiseAt(cb.Callback):
    """Raises in the same batch on every rank."""

    def __init__(self, batch: int, error: type[BaseException] = Stop) -> None:
        self.batch, self.error = batch, error

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            raise self.error("in mid-fit")


def raising(fit: Fit) -> dict[str, Any]:
    with contextlib.suppress(Stop, RankLost):  # a rank that comes later hears that the run is over
        fit.fit()
    return {}


def everything(fit: Fit) -> dict[str, Any]:
    """fit, validate, test, predict with one Trainer."""
    trainer = fit.fit()
    loader = modules.val_loader()
    validated = trainer.validate(fit.module, loader, verbose=False)
    tested = trainer.test(fit.module, loader, verbose=False)
    predicted = trainer.predict(fit.module, loader)
    return {
        "validated": sorted(validated[0]),
        "tested": sorted(tested[0]),
        "predicted": len(predicted),
        "test is validation": abs(validated[0]["val_loss"] - tested[0]["test_loss"]) < 1e-5,
    }


def evaluate_first(fit: Fit) -> dict[str, Any]:
    trainer = fit.trainer()
    before = trainer.validate(fit.module, modules.val_loader(), verbose=False)
    fit.fit(trainer=trainer)
    tested = trainer.test(fit.module, modules.val_loader(), verbose=False)
    return {"before": round(before[0]["val_loss"], 4), "tested": sorted(tested[0])}


def fit_twice(fit: Fit) -> dict[str, Any]:
    """Two fits of one Trainer; the second goes on with more epochs."""
    trainer = fit.fit()
    first = trainer.global_step
    trainer.fit_loop.max_epochs = 5
    fit.fit(trainer=trainer)
    return {"about steps of the second": trainer.global_step - first}


def fit_by_steps_twice(fit: Fit) -> dict[str, Any]:
    """The first fit ends inside an epoch; the second takes more steps."""
    trainer = fit.fit(trainer=fit.trainer(max_steps=30, max_epochs=-1))
    trainer.fit_loop.epoch_loop.max_steps = 62
    fit.fit(trainer=trainer)
    return {}


def fit_with_two_trainers(fit: Fit) -> dict[str, Any]:
    fit.fit()
    loss = evaluate(fit.module)[0]
    fit.fit()
    return {"second is no worse": evaluate(fit.module)[0] <= loss + 0.05}


def resume(fit: Fit) -> dict[str, Any]:
    """One epoch, a checkpoint, and two more by ckpt_path, in a new Trainer and module."""
    path = fit.folder / "resume.ckpt"
    trainer = fit.fit(trainer=fit.trainer(max_epochs=1))
    trainer.save_checkpoint(path)
    saved = evaluate(fit.module)[0]
    fit.module = fit.case.module()
    fit.fit(trainer=fit.trainer(), ckpt_path=path)
    return {"went on": evaluate(fit.module)[0] <= saved + 0.05}


def resume_in_mid_epoch(fit: Fit) -> dict[str, Any]:
    """Ends in the middle of an epoch and goes on from there."""
    path = fit.folder / "resume.ckpt"
    trainer = fit.fit(trainer=fit.trainer(max_steps=30))
    trainer.save_checkpoint(path)
    fit.module = fit.case.module()
    fit.fit(trainer=fit.trainer(), ckpt_path=path)
    return {}


def load_in_ddp(fit: Fit) -> dict[str, Any]:
    """A checkpoint validates in plain DDP as it did here, and training goes on there."""
    path = fit.folder / "portable.ckpt"
    trainer = fit.fit()
    trainer.save_checkpoint(path)
    here = trainer.validate(fit.module, modules.val_loader(), verbose=False)[0]["val_loss"]
    fresh = fit.case.module()
    plain = fit.trainer(fit.make_ddp(), max_epochs=4, callbacks=[], logger=False)
    there = plain.validate(fresh, modules.val_loader(), ckpt_path=path, verbose=False)[0]["val_loss"]
    plain.fit(fresh, modules.train_loader(), modules.val_loader(), ckpt_path=path)
    fit.last = trainer
    return {"same in DDP": abs(here - there) < 1e-6, "goes on in DDP": plain.current_epoch == 4}


def load_from_ddp(fit: Fit) -> dict[str, Any]:
    """A checkpoint of plain DDP goes on here."""
    path = fit.folder / "portable.ckpt"
    plain = fit.trainer(fit.make_ddp(), max_epochs=1)
    plain.fit(fit.module, modules.train_loader(), modules.val_loader())
    plain.save_checkpoint(path)
    fit.module = fit.case.module()
    fit.fit(trainer=fit.trainer(), ckpt_path=path)
    return {}


def best_checkpoint(fit: Fit) -> dict[str, Any]:
    """What ModelCheckpoint says, and test with ckpt_path="best"."""
    trainer = fit.fit()
    callback = trainer.checkpoint_callback
    tested = trainer.test(datamodule=None, dataloaders=modules.val_loader(), ckpt_path="best", verbose=False)
    validated = trainer.validate(dataloaders=modules.val_loader(), ckpt_path="best", verbose=False)
    score = float(callback.best_model_score)
    return {
        "best is finite": score > 0,
        "best is what it was": abs(validated[0]["val_loss"] - score) < 1e-5 if callback.monitor == "val_loss" else True,
        "best tested": sorted(tested[0]),
        "kept": len(callback.best_k_models),
    }


def find_rate(fit: Fit) -> dict[str, Any]:
    """Tuner.lr_find, then a fit."""
    trainer = fit.trainer()
    finder = pl.tuner.Tuner(trainer).lr_find(
        fit.module, modules.train_loader(), modules.val_loader(), num_training=30, max_lr=0.2
    )
    curve = finder.results
    fit.fit(trainer=trainer)
    return {
        "points": len(curve["lr"]),
        "rates": [round(rate, 9) for rate in curve["lr"]],
        "suggests": finder.suggestion() is not None,
        "rate was taken": fit.module.lr == finder.suggestion(),
    }


def find_batch_size(fit: Fit) -> dict[str, Any]:
    """Tuner.scale_batch_size, then a fit."""

    class Loaders(pl.LightningDataModule):
        batch_size = 4

        def train_dataloader(self) -> Any:
            return modules.train_loader(self.batch_size)

        def val_dataloader(self) -> Any:
            return modules.val_loader()

    data, trainer = Loaders(), fit.trainer()
    pl.tuner.Tuner(trainer).scale_batch_size(fit.module, datamodule=data, max_trials=2, steps_per_trial=2)
    trainer.fit(fit.module, datamodule=data)
    return {"batch size": data.batch_size}


def read_seen(fit: Fit) -> dict[str, Any]:
    fit.fit()
    return {f"calls {name}": value > 0 for name, value in fit.module.seen.items()}


def read_read(fit: Fit) -> dict[str, Any]:
    fit.fit()
    return {"read": fit.module.read}


def read_state(fit: Fit) -> dict[str, Any]:
    """Buffers and attributes in the end."""
    fit.fit()
    module = fit.module
    gap = (module.shadow.weight - module.head.weight).norm() / module.head.weight.norm()
    saved = fit.folder / "state.ckpt"
    fit.last.save_checkpoint(saved)
    return {
        "shadow follows": bool(gap < 0.5),
        "seen everything": int(module.seen) >= modules.SAMPLES // fit.ranks,
        "outputs were cleared": not module.outputs,
        "ema is saved": sorted(torch.load(saved, weights_only=False)["ema"]),
    }


def read_steps(fit: Fit) -> dict[str, Any]:
    states = fit.fit().optimizers[0].state.values()  # where the server had it, rank 0 has it again
    return {"goes on from the state": fit.last.global_rank > 0 or all(state["step"] > 1020 for state in states)}


def read_hooks(fit: Fit) -> dict[str, Any]:
    fit.fit()
    module = fit.module
    gap = float((module.shadow["weight"] - module.head.weight).norm() / module.head.weight.norm())
    return {
        "hooks of each step": module.begun == module.stepped == module.steps > 0,
        "average follows": gap < 0.5,
    }


def read_sparsity(fit: Fit) -> dict[str, Any]:
    """How many weights pruning has left at zero, and whether masks are still masks."""
    fit.fit()
    weights = [p for name, p in fit.module.named_parameters() if "weight" in name]
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    masks = [b for name, b in fit.module.named_buffers() if name.endswith("_mask")]
    return {"about zeros": zeros, "masks hold 0 and 1": all(bool(((m == 0) | (m == 1)).all()) for m in masks)}


def use_datamodule(fit: Fit) -> dict[str, Any]:
    trainer = fit.trainer()
    data = modules.Data()
    trainer.fit(fit.module, datamodule=data)
    trainer.test(fit.module, datamodule=data, verbose=False)
    predicted = trainer.predict(fit.module, datamodule=data)
    return {"notes": data.notes, "predicted": len(predicted)}


class Writer(cb.BasePredictionWriter):
    """Writes predictions to files."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *rest: Any) -> None:
        torch.save(prediction, self.folder / f"batch-{trainer.global_rank}-{rest[2]}.pt")

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        (self.folder / f"epoch-{trainer.global_rank}.json").write_text(json.dumps(batch_indices))


def predict_to_files(fit: Fit) -> dict[str, Any]:
    trainer = fit.fit()
    trainer.predict(fit.module, modules.val_loader(), return_predictions=False)
    indices = [json.loads((fit.folder / f"epoch-{rank}.json").read_text()) for rank in (trainer.global_rank,)]
    return {"indices": indices}


class CountedBar(cb.ProgressBar):
    """A progress bar of the user's: reads totals and metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.beyond = 0
        self.totals: set[str] = set()

    def disable(self) -> None:
        pass

    def enable(self) -> None:
        pass

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.totals.add(str(self.total_train_batches))
        self.beyond += batch_idx + 1 > self.total_train_batches
        self.get_metrics(trainer, pl_module)


def read_bar(fit: Fit) -> dict[str, Any]:
    trainer = fit.fit()
    bar = trainer.progress_bar_callback
    return {"totals": sorted(bar.totals)}


class Thaw(cb.BaseFinetuning):
    """A finetuning of the user's: the body joins after an epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.05, initial_denom_lr=1.0)


class OnlyTrainable(modules.Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=self.lr, momentum=0.5)


class NormOnlyTrainable(modules.WithNorm):
    configure_optimizers = OnlyTrainable.configure_optimizers


class OwnCheckpoint(cb.Checkpoint):
    """A checkpoint callback of the user's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 7:
            trainer.save_checkpoint(self.folder / f"own-{trainer.current_epoch}.ckpt")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"validated-{trainer.current_epoch}.ckpt", weights_only=True)


class Spiking(modules.Classifier):
    """Its loss jumps in one batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 1e4 if batch_idx == 12 else loss


class WithEma(cb.EMAWeightAveraging):
    def __init__(self, **options: Any) -> None:
        super().__init__(decay=0.9, **options)


class EpochAverage(cb.WeightAveraging):
    """Averages at the end of every epoch."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


class LookAtData(cb.Callback):
    """Goes through the training data in its hooks, as for statistics or prototypes, and counts what it sees."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}

    def look(self, trainer: Any, place: str) -> None:
        self.seen.setdefault(place, []).append(sum(len(batch[0]) for batch in trainer.train_dataloader))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, "start")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, "epoch start")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.look(trainer, "batch end")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, "validation end")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, "epoch end")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, "end")


def read_looks(fit: Fit) -> dict[str, Any]:
    """How many samples were seen in each hook, and after the fit."""
    trainer = fit.fit()
    looks = next(each for each in fit.callbacks if isinstance(each, LookAtData))
    looks.look(trainer, "after")
    return {"looked": looks.seen}


class StopAt(cb.Callback):
    """Sets should_stop."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == self.batch:
            trainer.should_stop = True


class WithLoaders(modules.Classifier):
    """The module is its own datamodule."""

    def train_dataloader(self) -> Any:
        return modules.train_loader(self.batch_size)

    def val_dataloader(self) -> Any:
        return modules.val_loader()


class Growing(WithLoaders):
    """Every epoch has more data than the one before."""

    def train_dataloader(self) -> Any:
        data = torch.utils.data.Subset(modules.training_data(), range(128 * (self.trainer.current_epoch + 1)))
        return DataLoader(data, batch_size=8, shuffle=True)


class Several(modules.Classifier):
    """Takes batches of several loaders at once."""

    def loss(self, batch: Any) -> Any:
        batches = batch.values() if isinstance(batch, dict) else batch
        if not isinstance(batch, dict) and torch.is_tensor(batch[0]):
            return super().loss(batch)
        losses = [super(Several, self).loss(each) for each in batches if each is not None]
        return torch.stack(losses).mean()


def several(mode: str) -> Callable[[], Any]:
    return lambda: (
        CombinedLoader({"a": modules.train_loader(8), "b": modules.train_loader(16)}, mode),
        modules.val_loader(),
    )


def own_batch_sampler() -> Any:
    data = modules.training_data()
    return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 8, drop_last=False)), modules.val_loader()


def weighted() -> Any:
    data = modules.training_data()
    sampler = WeightedRandomSampler(torch.ones(len(data)), len(data) // 2)
    return DataLoader(data, batch_size=8, sampler=sampler), modules.val_loader()


def own_distributed() -> Any:
    data = modules.training_data()
    sampler = torch.utils.data.DistributedSampler(
        data, torch.distributed.get_world_size(), torch.distributed.get_rank()
    )
    return DataLoader(data, batch_size=8, sampler=sampler), modules.val_loader()


class OwnDistributed(WithLoaders):
    def train_dataloader(self) -> Any:
        return own_distributed()[0]


class ByStream(WithLoaders):
    def train_dataloader(self) -> Any:
        return DataLoader(modules.Stream(), batch_size=8)


class BesideStream(Several):
    """A loader of samples that are dealt out, and an iterable one that begins again when it is over."""

    def train_dataloader(self) -> Any:
        stream = DataLoader(modules.Stream(), batch_size=4)
        return CombinedLoader({"a": modules.train_loader(8), "b": stream}, "max_size_cycle")

    def val_dataloader(self) -> Any:
        return modules.val_loader()


class MoreLoaders(Several):
    """Trains on one loader first, and later on two."""

    def train_dataloader(self) -> Any:
        loaders = {"a": modules.train_loader(8), "b": modules.train_loader(16)}
        return loaders if self.trainer.current_epoch else {"a": loaders["a"]}

    def val_dataloader(self) -> Any:
        return modules.val_loader()


def by_module(fit: Fit) -> dict[str, Any]:
    fit.trainer().fit(fit.module)
    return {}


def without_validation() -> Any:
    return (modules.train_loader(),)


APART = {"weights": "ranks keep the weights that they had when the error occurred"}
FAILED = {
    **APART,
    "steps": "inside an epoch each group counts its own steps",
    "a checkpoint holds the final weights": "inside an epoch it holds the server's weights, which other groups change",
}


def checkpointing(**options: Any) -> Callable[[Path], list[Any]]:
    return lambda folder: [cb.ModelCheckpoint(folder / "checkpoints", **options)]


CASES: tuple[Case, ...] = (
    # --- Callbacks --------------------------------------------------------------------------------------------------
    Case("plain", covers=("Callback", "max_epochs")),
    Case(
        "ModelCheckpoint: best two",
        ("ModelCheckpoint",),
        callbacks=checkpointing(monitor="val_loss", save_top_k=2, save_last=True),
        act=best_checkpoint,
    ),
    Case(
        "ModelCheckpoint: every n steps",
        ("ModelCheckpoint",),
        callbacks=checkpointing(every_n_train_steps=10, save_top_k=-1),
        differs={"a checkpoint holds the final weights": "the last step need not be a multiple of ten"},
    ),
    Case(
        "ModelCheckpoint: every n steps, a training metric",
        ("ModelCheckpoint",),
        callbacks=checkpointing(every_n_train_steps=10, monitor="train_loss", save_top_k=2),
    ),
    Case(
        "ModelCheckpoint: by time",
        ("ModelCheckpoint",),
        callbacks=checkpointing(train_time_interval=timedelta(milliseconds=1), save_top_k=1),
    ),
    Case(
        "ModelCheckpoint: every second epoch, weights only",
        ("ModelCheckpoint",),
        callbacks=checkpointing(every_n_epochs=2, save_weights_only=True, save_top_k=-1),
    ),
    Case(
        "ModelCheckpoint: at the end of the training epoch",
        ("ModelCheckpoint",),
        callbacks=checkpointing(save_on_train_epoch_end=True, save_top_k=-1),
    ),
    Case(
        "ModelCheckpoint: last as a link", ("ModelCheckpoint",), callbacks=checkpointing(save_last="link", save_top_k=1)
    ),
    Case(
        "ModelCheckpoint: mode max, custom file names",
        ("ModelCheckpoint",),
        callbacks=checkpointing(monitor="val_loss", mode="max", filename="{epoch}-{val_loss:.2f}", save_top_k=1),
    ),
    Case(
        "ModelCheckpoint: on an exception",
        ("ModelCheckpoint",),
        callbacks=lambda folder: [RaiseAt(12), *checkpointing(save_on_exception=True)(folder)],
        act=raising,
        differs=FAILED,
    ),
    Case(
        "ModelCheckpoint: two callbacks",
        ("ModelCheckpoint",),
        callbacks=lambda folder: [
            cb.ModelCheckpoint(folder / "a", monitor="val_loss"),
            cb.ModelCheckpoint(folder / "b", every_n_train_steps=8, save_top_k=-1),
        ],
        trainer={"val_check_interval": 0.5},
    ),
    Case(
        "ModelCheckpoint: metrics of several dtypes",
        ("ModelCheckpoint",),
        callbacks=lambda folder: [
            cb.ModelCheckpoint(folder / "a", monitor="val_loss", save_top_k=2),
            cb.ModelCheckpoint(folder / "b", monitor="step", mode="max", every_n_train_steps=4, save_top_k=2),
        ],
        trainer={"val_check_interval": 0.5},
    ),
    Case("custom Checkpoint", ("Checkpoint",), callbacks=lambda folder: [OwnCheckpoint(folder)]),
    Case(
        "OnExceptionCheckpoint",
        ("OnExceptionCheckpoint",),
        callbacks=lambda folder: [cb.OnExceptionCheckpoint(folder), RaiseAt(12)],
        act=raising,
        differs=FAILED,
    ),
    Case(
        "EarlyStopping: threshold",
        ("EarlyStopping",),
        callbacks=lambda folder: [cb.EarlyStopping("val_loss", stopping_threshold=0.9)],
        trainer={"max_epochs": 5, "val_check_interval": 0.5},
        differs={
            "loss": "the run ends at the threshold",
            "accuracy": "the run ends at the threshold",
            "epochs": "the run ends at the threshold",
            "calls": "the run ends at the threshold",
            "steps": "the run ends at the threshold",
        },
    ),
    Case(
        "EarlyStopping: no patience",
        ("EarlyStopping",),
        callbacks=lambda folder: [cb.EarlyStopping("val_loss", min_delta=10.0, patience=1)],
        trainer={"max_epochs": 6},
    ),
    Case(
        "EarlyStopping: a training metric",
        ("EarlyStopping",),
        callbacks=lambda folder: [
            cb.EarlyStopping("train_loss", min_delta=10.0, patience=2, check_on_train_epoch_end=True)
        ],
        trainer={"max_epochs": 6},
    ),
    Case(
        "EarlyStopping: divergence",
        ("EarlyStopping",),
        callbacks=lambda folder: [cb.EarlyStopping("val_loss", divergence_threshold=1e-3)],
        trainer={"max_epochs": 6},
    ),
    Case(
        "should_stop inside an epoch", callbacks=lambda folder: [StopAt(10)], trainer={"max_epochs": 6, "min_epochs": 1}
    ),
    Case(
        "StochasticWeightAveraging",
        ("StochasticWeightAveraging",),
        callbacks=lambda folder: [cb.StochasticWeightAveraging(0.05, swa_epoch_start=2)],
        trainer={"max_epochs": 5},
    ),
    Case(
        "StochasticWeightAveraging with BatchNorm",
        ("StochasticWeightAveraging",),
        module=modules.DecayingWithNorm,  # whose schedule it replaces
        callbacks=lambda folder: [cb.StochasticWeightAveraging(0.05, swa_epoch_start=2)],
        trainer={"max_epochs": 4},
    ),
    Case(
        "WeightAveraging",
        ("WeightAveraging",),
        module=modules.WithNorm,
        callbacks=lambda folder: [cb.WeightAveraging(), *checkpointing(monitor="val_loss")(folder)],
    ),
    Case("WeightAveraging by epoch", ("WeightAveraging",), callbacks=lambda folder: [EpochAverage()]),
    Case(
        "EMAWeightAveraging",
        ("EMAWeightAveraging",),
        callbacks=lambda folder: [WithEma(), *checkpointing(monitor="val_loss")(folder)],
        act=best_checkpoint,
    ),
    Case(
        "EMAWeightAveraging, validation inside an epoch",
        ("EMAWeightAveraging",),
        module=modules.WithNorm,
        callbacks=lambda folder: [WithEma(update_every_n_steps=2, update_starting_at_step=4)],
        trainer={"val_check_interval": 0.25},
    ),
    Case("EMAWeightAveraging, resumed", ("EMAWeightAveraging",), callbacks=lambda folder: [WithEma()], act=resume),
    Case(
        "BackboneFinetuning",
        ("BackboneFinetuning",),
        module=OnlyTrainable,
        callbacks=lambda folder: [
            cb.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05, verbose=False)
        ],
    ),
    Case(
        "BackboneFinetuning with BatchNorm",
        ("BackboneFinetuning",),
        module=NormOnlyTrainable,
        callbacks=lambda folder: [cb.BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False, verbose=False)],
    ),
    Case("BaseFinetuning", ("BaseFinetuning",), module=OnlyTrainable, callbacks=lambda folder: [Thaw()]),
    Case(
        "BaseFinetuning, resumed",
        ("BaseFinetuning",),
        module=OnlyTrainable,
        callbacks=lambda folder: [Thaw()],
        act=resume,
    ),
    Case(
        "LearningRateFinder",
        ("LearningRateFinder",),
        callbacks=lambda folder: [cb.LearningRateFinder(num_training_steps=20, max_lr=0.2)],
    ),
    Case("Tuner.lr_find", ("LearningRateFinder",), act=find_rate),
    Case(
        "BatchSizeFinder",
        ("BatchSizeFinder",),
        module=WithLoaders,
        callbacks=lambda folder: [cb.BatchSizeFinder(max_trials=2, steps_per_trial=2, init_val=4)],
        act=by_module,
    ),
    Case("Tuner.scale_batch_size", ("BatchSizeFinder",), act=find_batch_size),
    Case(
        "GradientAccumulationScheduler",
        ("GradientAccumulationScheduler",),
        module=modules.Decaying,
        callbacks=lambda folder: [cb.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})],
    ),
    Case(
        "LambdaCallback",
        ("LambdaCallback",),
        callbacks=lambda folder: [
            cb.LambdaCallback(on_train_epoch_end=lambda trainer, module: module.log("lambda", 1.0))
        ],
    ),
    Case(
        "LearningRateMonitor: step",
        ("LearningRateMonitor",),
        module=modules.Schedules,
        callbacks=lambda folder: [cb.LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)],
    ),
    Case(
        "LearningRateMonitor: epoch",
        ("LearningRateMonitor",),
        module=modules.OwnSteps,
        callbacks=lambda folder: [cb.LearningRateMonitor("epoch")],
    ),
    Case(
        "DeviceStatsMonitor", ("DeviceStatsMonitor",), callbacks=lambda folder: [cb.DeviceStatsMonitor(cpu_stats=False)]
    ),
    Case(
        "ModelPruning",
        ("ModelPruning",),
        callbacks=lambda folder: [cb.ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=False)],
        act=read_sparsity,
    ),
    Case(
        "ModelPruning: lottery ticket",
        ("ModelPruning",),
        callbacks=lambda folder: [
            cb.ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=True),
            *checkpointing()(folder),
        ],
        act=read_sparsity,
    ),
    Case(
        "ModelPruning: structured, resampled",
        ("ModelPruning",),
        callbacks=lambda folder: [
            cb.ModelPruning(
                "ln_structured",
                parameters_to_prune=[],
                parameter_names=["weight"],
                use_global_unstructured=False,
                amount=0.1,
                pruning_dim=0,
                pruning_norm=2,
                resample_parameters=True,
            )
        ],
        act=read_sparsity,
        differs=dict.fromkeys(("loss", "accuracy"), "weights are resampled after the last step"),
    ),
    Case(
        "ModelPruning: random",
        ("ModelPruning",),
        callbacks=lambda folder: [
            cb.ModelPruning(
                "random_unstructured",
                amount=0.2,
                use_lottery_ticket_hypothesis=False,
                prune_on_train_epoch_end=False,
                make_pruning_permanent=False,
            )
        ],
        act=read_sparsity,
    ),
    Case(
        "ThroughputMonitor",
        ("ThroughputMonitor",),
        callbacks=lambda folder: [cb.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=4)],
    ),
    Case(
        "Timer",
        ("Timer",),
        callbacks=lambda folder: [cb.Timer(timedelta(milliseconds=150))],
        trainer={"max_epochs": 100},
        differs=dict.fromkeys(("loss", "accuracy", "epochs", "steps", "calls", "moved"), "the clock ends the run"),
        by_the_clock=True,
    ),
    Case(
        "Timer by epoch",
        ("Timer",),
        callbacks=lambda folder: [cb.Timer(timedelta(milliseconds=150), interval="epoch")],
        trainer={"max_epochs": 100},
        differs=dict.fromkeys(("loss", "accuracy", "epochs", "steps", "calls"), "the clock ends the run"),
        by_the_clock=True,
    ),
    Case(
        "custom ProgressBar",
        ("ProgressBar",),
        callbacks=lambda folder: [CountedBar()],
        trainer={"enable_progress_bar": True},
        act=read_bar,
    ),
    Case(
        "TQDMProgressBar",
        ("TQDMProgressBar",),
        callbacks=lambda folder: [cb.TQDMProgressBar(refresh_rate=5, leave=True)],
        trainer={"enable_progress_bar": True},
    ),
    Case(
        "RichProgressBar",
        ("RichProgressBar",),
        callbacks=lambda folder: [cb.RichProgressBar(refresh_rate=5)],
        trainer={"enable_progress_bar": True},
    ),
    Case(
        "ModelSummary",
        ("ModelSummary",),
        callbacks=lambda folder: [cb.ModelSummary(max_depth=2)],
        trainer={"enable_model_summary": True},
    ),
    Case(
        "RichModelSummary",
        ("RichModelSummary",),
        callbacks=lambda folder: [cb.RichModelSummary(max_depth=2)],
        trainer={"enable_model_summary": True},
    ),
    Case(
        "BasePredictionWriter",
        ("BasePredictionWriter",),
        callbacks=lambda folder: [Writer(folder)],
        act=predict_to_files,
    ),
    Case(
        "SpikeDetection: no spike",
        ("SpikeDetection",),
        callbacks=lambda folder: [cb.SpikeDetection(exclude_batches_path=folder / "skip.json", rtol=100.0)],
    ),
    Case(
        "SpikeDetection: one spike",
        ("SpikeDetection",),
        module=Spiking,
        callbacks=lambda folder: [cb.SpikeDetection(exclude_batches_path=folder / "skip.json", warmup=2, rtol=10.0)],
        differs=APART,
    ),
    # --- Trainer options --------------------------------------------------------------------------------------------
    Case("limit_train_batches: a number", trainer={"limit_train_batches": 7}),
    Case("limit_train_batches: a fraction", trainer={"limit_train_batches": 0.5, "limit_val_batches": 3}),
    Case(
        "limit_*_batches",
        trainer={"limit_val_batches": 0.5, "limit_test_batches": 2, "limit_predict_batches": 3},
        act=everything,
    ),
    Case("limit_val_batches=0", trainer={"limit_val_batches": 0}),
    Case("limit_train_batches=0", trainer={"limit_train_batches": 0}),
    Case("overfit_batches: a number", trainer={"overfit_batches": 6}),
    Case("overfit_batches: a fraction", trainer={"overfit_batches": 0.25}),
    Case("fast_dev_run", trainer={"fast_dev_run": True}),
    Case("fast_dev_run: three batches", trainer={"fast_dev_run": 3}),
    Case("max_steps", trainer={"max_steps": 40, "max_epochs": -1}),
    Case("max_steps=0", trainer={"max_steps": 0}),
    Case("max_epochs=0", trainer={"max_epochs": 0}),
    Case("min_epochs", callbacks=lambda folder: [StopAt(3)], trainer={"min_epochs": 3, "max_epochs": 5}),
    Case(
        "min_steps",
        callbacks=lambda folder: [StopAt(3)],
        trainer={"min_steps": 40, "max_epochs": 5},
        refused="min_steps",
    ),
    Case(
        "max_time",
        trainer={"max_time": timedelta(milliseconds=150), "max_epochs": 100},
        by_the_clock=True,
        differs=dict.fromkeys(("loss", "accuracy", "epochs", "steps", "calls", "moved"), "the clock ends the run"),
    ),
    Case("val_check_interval: batches", trainer={"val_check_interval": 8}),
    Case("val_check_interval: a fraction", trainer={"val_check_interval": 0.3}),
    Case("val_check_interval: across epochs", trainer={"val_check_interval": 30, "check_val_every_n_epoch": None}),
    Case("val_check_interval: a duration", trainer={"val_check_interval": "00:00:00:01"}, refused="val_check_interval"),
    Case("check_val_every_n_epoch", trainer={"check_val_every_n_epoch": 2, "max_epochs": 4}),
    Case("num_sanity_val_steps", trainer={"num_sanity_val_steps": 2}),
    Case("num_sanity_val_steps: all", trainer={"num_sanity_val_steps": -1}),
    Case("no validation", data=without_validation),
    Case("log_every_n_steps", trainer={"log_every_n_steps": 1}),
    Case("accumulate_grad_batches", trainer={"accumulate_grad_batches": 3}),
    Case("gradient_clip_val", trainer={"gradient_clip_val": 0.5}),
    Case("gradient_clip_algorithm", trainer={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    *(
        Case(f"precision={precision}", trainer={"precision": precision})
        for precision in ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true")
    ),
    Case(
        "precision=16-true",
        trainer={"precision": "16-true"},
        differs={"loss": "half precision", "accuracy": "half precision"},
    ),
    Case("precision=transformer-engine", trainer={"precision": "transformer-engine"}),
    Case("deterministic", trainer={"deterministic": True}),
    Case("deterministic: warn", trainer={"deterministic": "warn"}),
    Case("benchmark", trainer={"benchmark": True}),
    Case("inference_mode=False", trainer={"inference_mode": False}, act=everything),
    Case(
        "use_distributed_sampler=False",
        module=OwnDistributed,
        trainer={"use_distributed_sampler": False},
        act=by_module,
    ),
    Case("profiler: simple", trainer={"profiler": "simple"}),
    Case("profiler: advanced", trainer=lambda folder: {"profiler": pl.profilers.AdvancedProfiler(folder, "profile")}),
    Case(
        "profiler: pytorch",
        trainer=lambda folder: {
            "profiler": pl.profilers.PyTorchProfiler(folder, "profile", schedule=None),
            "max_epochs": 1,
        },
    ),
    Case("detect_anomaly", trainer={"detect_anomaly": True}),
    Case(
        "barebones",
        trainer={
            "barebones": True,
            "logger": None,
            "log_every_n_steps": None,
            "enable_progress_bar": None,
            "enable_model_summary": None,
            "enable_checkpointing": None,
            "num_sanity_val_steps": None,
        },
    ),
    Case(
        "plugins: checkpoint_io",
        trainer=lambda folder: {"plugins": [pl.plugins.TorchCheckpointIO()], "enable_checkpointing": True},
    ),
    Case(
        "plugins: asynchronous checkpoint_io",
        callbacks=checkpointing(every_n_train_steps=10, save_top_k=-1),
        trainer=lambda folder: {"plugins": [pl.plugins.AsyncCheckpointIO()]},
    ),
    Case("plugins: precision", trainer=lambda folder: {"plugins": [pl.plugins.MixedPrecision("bf16-mixed", "cpu")]}),
    Case("plugins: environment", trainer=lambda folder: {"plugins": [LightningEnvironment()]}),
    Case("sync_batchnorm", module=modules.WithNorm, trainer={"sync_batchnorm": True}),
    Case(
        "reload_dataloaders_every_n_epochs",
        module=WithLoaders,
        trainer={"reload_dataloaders_every_n_epochs": 1},
        act=by_module,
    ),
    Case(
        "val_check_interval: across epochs that grow",
        module=Growing,
        trainer={
            "reload_dataloaders_every_n_epochs": 1,
            "val_check_interval": 10,
            "check_val_every_n_epoch": None,
        },
        act=by_module,
    ),
    Case(
        "default_root_dir", trainer=lambda folder: {"default_root_dir": folder / "root", "enable_checkpointing": True}
    ),
    Case("logger: CSV", trainer=lambda folder: {"logger": pl.loggers.CSVLogger(folder)}),
    Case(
        "logger: TensorBoard", trainer=lambda folder: {"logger": pl.loggers.TensorBoardLogger(folder, log_graph=False)}
    ),
    Case("logger: default", trainer=lambda folder: {"logger": True, "enable_checkpointing": True}),
    Case(
        "logger: several",
        trainer=lambda folder: {"logger": [pl.loggers.CSVLogger(folder, "a"), pl.loggers.CSVLogger(folder, "b")]},
    ),
    Case("enable_checkpointing", trainer={"enable_checkpointing": True}),
    Case("enable_progress_bar", trainer={"enable_progress_bar": True}),
    Case("enable_model_summary", trainer={"enable_model_summary": True}),
    Case("enable_autolog_hparams", trainer={"enable_autolog_hparams": False}),
    Case("model_registry", trainer={"model_registry": "somebody/some-model"}),
    # --- Uses ---------------------------------------------------------------------------------------------------------
    Case("fit, validate, test, predict", act=everything),
    Case("validate before fit, test after", act=evaluate_first),
    Case("fit twice with one Trainer", act=fit_twice),
    Case("fit twice, by steps", act=fit_by_steps_twice),
    Case("fit with two Trainers", act=fit_with_two_trainers),
    Case("resume by ckpt_path", module=modules.Schedules, act=resume),
    Case("resume by ckpt_path, AdamW", module=modules.Adam, act=resume),
    Case("resume inside an epoch", act=resume_in_mid_epoch),
    Case("checkpoint to DDP", module=modules.Adam, act=load_in_ddp),
    Case("checkpoint from DDP", module=modules.Adam, act=load_from_ddp),
    Case("datamodule", act=use_datamodule),
    Case("loaders defined in the module", module=WithLoaders, act=by_module),
    Case(
        "dictionaries as batches",
        data=lambda: (DataLoader(modules.Named(), batch_size=8, shuffle=True), modules.val_loader()),
    ),
    *(
        Case(f"several loaders: {mode}", module=Several, data=several(mode))
        for mode in ("min_size", "max_size_cycle", "max_size")
    ),
    Case("several loaders: one of them iterable", module=BesideStream, act=by_module),
    Case(
        "several loaders in later epochs",
        module=MoreLoaders,
        trainer={"reload_dataloaders_every_n_epochs": 1},
        act=by_module,
        refused="reload_dataloaders_every_n_epochs: what train_dataloader() returns",
    ),
    Case(
        "several loaders in later epochs, static data",
        module=MoreLoaders,
        trainer={"reload_dataloaders_every_n_epochs": 1},
        act=by_module,
        omni={"data": "static"},
    ),
    Case("several loaders: sequential", module=Several, data=several("sequential")),
    Case(
        "several validation loaders",
        data=lambda: (modules.train_loader(), [modules.val_loader(), modules.val_loader()]),
    ),
    Case("IterableDataset", module=ByStream, trainer={"limit_train_batches": 20}, act=by_module),
    Case("IterableDataset without a limit", module=ByStream, act=by_module),
    Case("custom batch sampler", data=own_batch_sampler),
    Case("weighted sampler", data=weighted),
    Case("workers", data=lambda: (modules.train_loader(num_workers=1, persistent_workers=True), modules.val_loader())),
    Case("goes through the training data in hooks", callbacks=lambda _: [LookAtData()], act=read_looks),
    Case(
        "DataLoader with an `__iter__` of its own",
        data=lambda: (modules.Twice(modules.training_data(), batch_size=8, shuffle=True), modules.val_loader()),
    ),
    Case("training_step draws its batches", module=modules.Drawing),
    Case("drop_last", data=lambda: (modules.train_loader(7, drop_last=True), modules.val_loader())),
    Case("partial last batch", data=lambda: (modules.train_loader(7), modules.val_loader())),
    # --- Modules ------------------------------------------------------------------------------------------------------
    Case("frozen body", module=modules.Frozen),
    Case("frozen body in the optimizer", module=modules.FrozenInOptimizer),
    Case("unfreezes", module=modules.Unfreezing, ddp={"find_unused_parameters": True}),
    Case("freezes", module=modules.Freezing, ddp={"find_unused_parameters": True}),
    Case("adds a parameter group", module=modules.AddingGroup, ddp={"find_unused_parameters": True}),
    Case("removes a parameter group", module=modules.RemovingGroup, ddp={"find_unused_parameters": True}),
    Case("manual optimization", module=modules.Manual),
    Case("two optimizers, toggled", module=modules.TwoOptimizers, ddp={"find_unused_parameters": True}),
    Case("two optimizers, alternating", module=modules.Alternating, ddp={"find_unused_parameters": True}),
    Case(
        "two optimizers, frozen by hand",
        module=modules.FrozenByHand,
        ddp={"find_unused_parameters": True},
        differs={"trainable": "which half was trained last depends on the number of batches"},
    ),
    Case("switches optimizers through the strategy", module=modules.SwitchingOptimizer),
    Case("switches optimizers through the Trainer", module=modules.SwitchingThroughTrainer),
    Case(
        "switches optimizers inside an epoch",
        module=modules.SwitchingInMidEpoch,
        refused="strategy.optimizers was changed",
    ),
    Case("logs everywhere", module=modules.LoggingEverywhere),
    Case("keeps state", module=modules.KeepingState, act=read_state),
    Case("training_step returns None", module=modules.Skipping, differs=APART),
    Case("ends an epoch early", module=modules.SkippingEpoch),
    Case("overrides the optimizer hooks", module=modules.OwnSteps, act=read_seen),
    Case("hooks registered on the optimizer", module=modules.HooksOfTheOptimizer, act=read_hooks),
    Case("steps every other batch", module=modules.EveryOtherStep),
    Case("tied weights", module=modules.Tied),
    Case("reads the strategy", module=modules.ReadingStrategy, act=read_read, differs={}),
    Case("clamps its weights", module=modules.Clamping, refused="was written between two steps"),
    Case("edits its weights at the end of an epoch", module=modules.Resetting, act=read_read),
    Case(
        "edits its weights inside an epoch",
        module=modules.ResettingInMidEpoch,
        act=read_read,
        refused="was written between two steps",
    ),
    Case("loads optimizer state at the start of an epoch", module=modules.LoadingState, act=read_steps),
    Case(
        "loads optimizer state inside an epoch",
        module=modules.LoadingStateInMidEpoch,
        refused="was loaded or given up between two steps",
    ),
    Case("clamps its weights, local SGD", module=modules.Clamping, omni={"method": "local_sgd:period=4"}),
    Case("OneCycleLR", module=modules.Schedules),
    Case("a schedule that is stepped with its epoch", module=modules.EpochSchedule),
    Case("ReduceLROnPlateau", module=modules.OnPlateau),
    Case("AdamW", module=modules.Adam),
    Case("LBFGS", module=modules.Lbfgs, refused="LBFGS"),
    Case("SAM, local SGD", module=modules.Sam, omni={"method": "local_sgd:period=4"}),
    Case("a target network", module=modules.FrozenTarget),
    Case(
        "a target network in the optimizer",
        module=modules.Target,
        ddp={"find_unused_parameters": True},
        refused="was written between two steps",
    ),
    Case("a callback with its own DDP", callbacks=lambda folder: [modules.Probe()], refused="whose process group"),
    Case(
        "a callback with its own DDP, per group",
        callbacks=lambda folder: [modules.LateProbe()],
        data=lambda: (modules.train_loader(7), modules.val_loader()),
    ),
    Case("raw optimizer step", module=modules.RawStep, refused="raw optimizer.step()"),
    Case("an optimizer that is not returned", module=modules.OwnOptimizer, refused="has not returned that optimizer"),
    Case("sparse gradients", module=modules.SparseEmbedding, refused="sparse"),
    Case(
        "a parameter in two optimizers",
        module=modules.SharedParameter,
        ddp={"find_unused_parameters": True},
        refused="two optimizers",
    ),
    Case("unused parameters", module=modules.Unused, ddp={"find_unused_parameters": True}),
    Case("layers created in configure_model", module=modules.LateLayer),
    Case("no optimizer", module=modules.NoOptimizer),
    Case("a compiled submodule", module=modules.Compiled),
)
BY_NAME = {case.name: case for case in CASES}
QUICK = (
    "GradientAccumulationScheduler",
    "StochasticWeightAveraging with BatchNorm",
    "EMAWeightAveraging",
    "fit twice, by steps",
    "goes through the training data in hooks",
    "DataLoader with an `__iter__` of its own",
    "training_step draws its batches",
    "two optimizers, frozen by hand",
    "switches optimizers through the strategy",
    "logs everywhere",
    "keeps state",
    "edits its weights inside an epoch",
)
"""Rows that `make test` runs: what once went wrong, and what most people use that no other test has."""
USUAL = (
    "ModelCheckpoint: best two",
    "EarlyStopping: no patience",
    "max_steps",
    "fit, validate, test, predict",
    "hooks registered on the optimizer",
    "edits its weights at the end of an epoch",
)
"""Rows that `make test-all` adds: other tests have the same options, hooks and edits."""
