"""Trains in groups and reports, for every rank, what it trained on and what it ended with.

Each "fit" in the options is one fit, in order, in the same processes.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
from common import FOLDER, OPTIONS, InTime, Net, dataset, digest, loaders, omni, pl, report, trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, WeightedRandomSampler
from torchmetrics.classification import MulticlassAccuracy
from values import values_in

RANK = int(os.environ.get("LOCAL_RANK", 0))
warnings.filterwarnings("always", message="OmniStrategy: each group makes")


class GroupNet(Net):
    """A net that can be slow, and that notes the samples whose batch was trained."""

    def __init__(self, sleep: dict[str, float], schedule: str = "", sync: bool = False) -> None:
        super().__init__()
        self.sleep, self.schedule, self.sync = sleep.get(str(RANK), 0.0), schedule, sync
        self.learning_rates: list[float] = []
        self.world_sizes: set[int] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.sleep)
        loss = self.loss(batch)
        self.world_sizes.add(torch.distributed.get_world_size())
        self.log("train_loss", loss, sync_dist=self.sync)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.3)
        if self.schedule == "onecycle":
            schedule: Any = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.05, self.trainer.estimated_stepping_batches
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        if self.schedule == "step":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        if self.schedule == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}
        if self.schedule == "plateau by steps":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
            often = {"interval": "step", "frequency": 4}
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss", **often}}
        return optimizer


class AdamNet(GroupNet):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class LbfgsNet(GroupNet):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class ManualNet(GroupNet):
    """Two optimizers, stepped by hand."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        head, body = self.net[-1].parameters(), self.net[:-1].parameters()
        return torch.optim.SGD(head, lr=0.02, momentum=0.3), torch.optim.Adam(body, lr=1e-2)


class NanNet(GroupNet):
    """Its gradients are not finite in some steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx % 4 == 1 or OPTIONS.get("always_nan") else loss


class RawStepNet(GroupNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.optimizers(use_pl_optimizer=False).step()
        return super().training_step(batch, batch_idx)


class BufferNet(GroupNet):
    """Buffers that cannot be averaged blindly, and a weight with two names."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
        self.register_buffer("rotation", torch.tensor([1 + 2j, 3 - 4j]))
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.register_buffer("is_full", torch.tensor(False))
        self.register_buffer("running_mean", torch.zeros(2))
        self.register_buffer("running_var", torch.ones(2))
        self.register_buffer("moving_mean", torch.zeros(2))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long))
        self.codes = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.twin = torch.nn.Linear(32, 3, bias=False)
        self.twin.weight = self.net[-1].weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        group = RANK // 2
        self.queue[int(self.pointer) % 4] = int(self.pointer) + 1000 * group
        self.pointer += 1
        self.is_full.fill_(group == 0)
        self.running_mean.fill_(group)
        self.running_var.fill_(3.0 if group == 0 else float("nan"))  # of a batch that was not finite
        self.moving_mean.fill_(float("inf"))
        self.num_batches_tracked += 1 + 1000 * group
        self.codes.fill_(group + 1)
        return super().training_step(batch, batch_idx)


class MetricsNet(GroupNet):
    """Validates by a metric that has a state, and by what all ranks that evaluate have seen."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.seen: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.accuracy(self(batch[0]), batch[1])
        self.log("val_accuracy", self.accuracy)
        self.seen.append(self.all_gather(batch[2]).flatten())

    def on_validation_epoch_end(self) -> None:
        self.log("val_seen", float(len(torch.cat(self.seen).unique())))
        self.seen.clear()


NETS = {
    "metrics": MetricsNet,
    "buffers": BufferNet,
    "": GroupNet,
    "adam": AdamNet,
    "lbfgs": LbfgsNet,
    "manual": ManualNet,
    "nan": NanNet,
    "raw": RawStepNet,
}


class Notes(pl.Callback):
    """Notes what happens, and makes things happen."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.samples: list[list[int]] = []
        self.validations: list[Any] = []
        self.validation_worlds: list[int] = []
        self.metrics: list[dict[str, float]] = []
        self.rates: list[list[float]] = []
        self.regroup_times: list[float] = []
        self.threads: list[int] = []
        self.files: list[int] = []
        self.is_server_prepared = False
        self.checks: list[list[Any]] = []
        self.events = (FOLDER / f"events{RANK}").open("a")

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self.is_server_prepared = bool(trainer.strategy.world.server.processes)  # none is needed yet
        self.say(f"process {os.getpid()}")
        if "check_every" in self.options:

            def note() -> None:
                self.checks.append([torch.distributed.get_world_size(), digest(pl_module), len(self.samples[-1])])

            epochs = trainer.strategy.parts.epochs
            epochs.check_every, epochs.on_check = self.options["check_every"], note

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.samples.append([])
        self.rates.append([])
        self.say(f"epoch {trainer.current_epoch}")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.samples:  # an epoch that is resumed in its midst
            self.samples, self.rates = [[]], [[]]
        # as a LightningModule's own hook does that returns -1
        skips = batch_idx == self.options.get("skip_at", {}).get(str(RANK))
        pl_module.on_train_batch_start = lambda *_: -1 if skips else None
        self.say(f"begin {batch_idx} {batch[2].tolist()}")
        hold = self.options.get("hold", {})
        if (trainer.current_epoch, batch_idx) == (hold.get("epoch"), hold.get("batch")):
            while not (FOLDER / hold["until"]).exists():
                time.sleep(0.02)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.samples[-1] += batch[2].tolist()
        self.rates[-1].append(trainer.optimizers[0].param_groups[0]["lr"])
        self.say(f"batch {batch_idx} {batch[2].tolist()}")
        number = trainer.fit_loop.total_batch_idx + 1
        groups = self.options.get("regroup", {}).get(str(number))
        if groups:
            began = time.perf_counter()
            trainer.strategy.regroup(groups)
            self.regroup_times.append(time.perf_counter() - began)
            if len(self.regroup_times) % 10 == 0:
                gc.collect()
            self.threads.append(threading.active_count())
            self.files.append(len(os.listdir("/proc/self/fd")))
        if number == self.options.get("die_at", {}).get(str(RANK)):
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self.options.get("stall_at", {}).get(str(RANK)):
            time.sleep(1000)  # heartbeats go on meanwhile
        if number == self.options.get("raise_at", {}).get(str(RANK)):
            raise ValueError("something is wrong with this batch")
        if number == self.options.get("stop_at", {}).get(str(RANK)):
            trainer.should_stop = True
        if trainer.strategy.parts.epochs._epoch.validates and RANK in self.options.get("stop_where_all_validate", ()):
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == self.options.get("stop_at_end_of", {}).get(str(RANK)):
            trainer.should_stop = True

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self.say(f"validation {batch_idx}")
        if self.options.get("die_in_validation") == RANK and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validations.append([trainer.global_step, float(trainer.callback_metrics["val_loss"])])
            self.validation_worlds.append(torch.distributed.get_world_size())
            metrics = trainer.callback_metrics.items()
            self.metrics.append({name: float(value) for name, value in metrics if name.startswith("val_")})

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.say(f"exception {type(exception).__name__}")

    def say(self, what: str) -> None:
        print(what, file=self.events, flush=True)


class Swaps(pl.Callback):
    """Validates with weights of its own."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.trained = [each for each in pl_module.parameters() if each.requires_grad]
        self.kept = [each.detach().clone() for each in self.trained]
        with torch.no_grad():
            for each in self.trained:
                each.zero_()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        with torch.no_grad():
            for each, kept in zip(self.trained, self.kept, strict=True):
                each.copy_(kept)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Asks which rank of how many it is whenever a sample is drawn from it."""

    def __iter__(self) -> Any:
        for place, sample in enumerate(dataset()):
            if place % torch.distributed.get_world_size() == torch.distributed.get_rank():
                yield sample

    def __len__(self) -> int:
        return len(dataset()) // torch.distributed.get_world_size()


class Endless(Stream):
    """As far as one knows before it ends."""

    __len__ = None  # type: ignore[assignment]


class Uneven(Endless):
    """Of which rank 3 gets less than rank 2, with which it is in a group."""

    def __iter__(self) -> Any:
        return itertools.islice(super().__iter__(), 40 if RANK == 3 else None)


class Batches:
    """Held-out data that is no DataLoader: each rank evaluates all of it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.batches = list(loader)

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def make_loader(kind: str, options: dict[str, Any]) -> DataLoader[Any]:
    if kind == "iterable":
        return DataLoader(Stream(), batch_size=8)
    if kind == "of unknown length":
        return DataLoader(Endless(), batch_size=8)
    if kind == "shorter on rank 3":
        return DataLoader(Uneven(), batch_size=8)
    if kind == "sampler":
        data = dataset(128)
        return DataLoader(data, batch_size=8, sampler=WeightedRandomSampler(torch.ones(128), 128))
    if kind == "own distributed":
        data = dataset(128)
        return DataLoader(
            data, batch_size=8, sampler=torch.utils.data.DistributedSampler(data, num_replicas=2, rank=RANK % 2)
        )
    if kind == "unshuffled":
        return DataLoader(dataset(128), batch_size=8, sampler=SequentialSampler(dataset(128)))
    return loaders(**options)[0]


def odd_buffers(module: Any) -> dict[str, Any]:
    if not isinstance(module, BufferNet):
        return {}
    return {
        "mask": [bool(module.mask[0, 2].isneginf()), bool(module.mask.isnan().any())],
        "rotation": [str(value) for value in module.rotation.tolist()],
        "queue": module.queue.tolist(),
        "pointer": int(module.pointer),
        "is_full": bool(module.is_full),
        "running_mean": module.running_mean.tolist(),
        "running_var": module.running_var.tolist(),
        "moving_mean": module.moving_mean.tolist(),
        "batches_tracked": int(module.num_batches_tracked),
        "codes": module.codes.tolist(),
    }


def fit(options: dict[str, Any]) -> dict[str, Any]:
    pl.seed_everything(options.pop("seed", 3), verbose=False)
    strategy = omni.OmniStrategy(**values_in(options.pop("strategy", {"groups": 2})))
    notes = Notes(options)
    kind = NETS[options.pop("net", "")]
    module = kind(options.pop("sleep", {}), options.pop("schedule", ""), options.pop("sync", False))
    train = make_loader(options.pop("loader", ""), options.pop("data", {}))
    checkpoint = options.pop("checkpoint", None)
    resume = options.pop("resume", None)
    if resume and "*" in resume:
        resume = min(FOLDER.glob(resume), key=lambda path: int(path.stem.rpartition("=")[2]))
    callbacks: list[Any] = [notes, InTime()] if options.pop("in_time", False) else [notes]
    if options.pop("swaps", False):
        callbacks.append(Swaps())
    if checkpoint:
        callbacks.append(pl.callbacks.ModelCheckpoint(FOLDER / "checkpoints", **checkpoint))
    if early := options.pop("early", None):
        callbacks.append(pl.callbacks.EarlyStopping(**early))
    if (limit := options.pop("max_time", None)) is not None:
        callbacks.append(pl.callbacks.Timer(timedelta(seconds=limit)))
    settings = {"enable_checkpointing": bool(checkpoint), **options.pop("trainer", {})}
    run = trainer(strategy, options.pop("devices", 4), callbacks=callbacks, **settings)
    error = ""
    try:
        if options.get("validate_first"):
            run.validate(module, loaders()[1], verbose=False)
            notes.validations.clear()
            notes.validation_worlds.clear()
        held_out = DataLoader(dataset(options.get("held_out", 64)), batch_size=8)
        run.fit(module, train, Batches(held_out) if options.get("no_loader") else held_out, ckpt_path=resume)
    except Exception as problem:
        if not options.get("expect_error"):
            raise
        error = f"{type(problem).__name__}: {problem}"
    result = {
        "error": error,
        "samples": notes.samples,
        "validations": notes.validations,
        "validation_worlds": notes.validation_worlds,
        "validation_metrics": notes.metrics,
        "training_worlds": sorted(module.world_sizes),
        "rates": notes.rates,
        "lr": [g["lr"] for o in run.optimizers for g in o.param_groups],
        "step": run.global_step,
        "epoch": run.current_epoch,
        "weights": digest(module),
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "regroup_times": notes.regroup_times,
        "threads": notes.threads,
        "files": notes.files,
        "is_server_prepared": notes.is_server_prepared,
        "checks": notes.checks,
        **odd_buffers(module),
        "best": getattr(run.checkpoint_callback, "best_model_path", "") if checkpoint else "",
        "children": len(strategy.launcher.procs) if strategy.launcher and RANK == 0 else 0,
    }
    if not error:
        summary = strategy.report()
        result["report"] = {name: getattr(summary, name) for name in summary.__dataclass_fields__}
        if options.get("test"):
            result["test"] = [dict(each) for each in run.validate(module, loaders()[1], verbose=False)]
    return result


if __name__ == "__main__":
    report(RANK, [fit(dict(options)) for options in OPTIONS["fits"]])
