"""One group of a run that others join and leave; it waits in the first batch of given epochs until a file says go."""

from __future__ import annotations

import ctypes
import json
import os
import time
from typing import Any

import torch
from common import FOLDER, OPTIONS, Net, dataset, digest, loaders, omni, pl, trainer
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, random_split
from values import values_in

NAME = os.environ["OMNI_TEST_NAME"]
GATE = OPTIONS.get("gate", "go")
INSIDE = OPTIONS.get("inside", "ddp")  # or "fsdp", or a mesh, as "1 x 2"


class Member(Net):
    """Writes down what it has trained, in which epoch, and at which rate."""

    held = -1

    def setup(self, stage: str) -> None:
        self.come_to("setup")

    def on_train_start(self) -> None:
        self.come_to("start")

    def come_to(self, place: str) -> None:
        """Before training: waits there if it is to, until a file says go."""
        rank = self.trainer.local_rank
        (FOLDER / f"{NAME}{rank}-in-{place}").touch()
        while f"{NAME}{rank}-{place}" in OPTIONS.get("hold_in", ()) and not (FOLDER / f"{GATE}-{place}").exists():
            time.sleep(0.02)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        epoch = self.current_epoch
        if epoch != self.held and batch_idx >= OPTIONS.get("batch", 0):
            self.held = epoch
            (FOLDER / f"{NAME}{self.global_rank}-rate-{epoch}").write_text(repr(self.rate))
            (FOLDER / f"{NAME}{self.global_rank}-target-{epoch}").write_text(repr(self.frozen[0].item()))
            begins = FOLDER / f"{NAME}{self.global_rank}-in-{epoch}"
            begins.with_suffix(".partial").write_text(self.averaged())
            begins.with_suffix(".partial").rename(begins)
            while epoch in OPTIONS.get("hold", ()) and not (FOLDER / f"{GATE}-{epoch}").exists():
                time.sleep(0.02)
            # What holds Python's lock: a large pickle, say. No thread of this process runs meanwhile.
            ctypes.PyDLL(None).usleep(int(1e6 * OPTIONS.get("locked", 0.0)))
        time.sleep(OPTIONS.get("step", 0.0))
        self.log("size", float(len(batch[0])), on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        return super().training_step(batch, batch_idx)

    @property
    def rate(self) -> float:
        return float(self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if OPTIONS.get("target") == NAME and self.current_epoch == 0:  # frozen, and the optimizer holds it
            torch.nn.init.constant_(self.frozen, 0.5)
        (FOLDER / f"{NAME}{self.global_rank}-average").write_text(self.averaged())
        line = [self.current_epoch, batch[2].tolist(), self.rate]
        with (FOLDER / f"seen-{os.getpid()}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if "tuner" in OPTIONS:
            group = self.trainer.optimizers[0].param_groups[0]
            with (FOLDER / f"{NAME}{self.global_rank}-steps").open("a") as file:
                rate = group["lr"] * self.trainer.strategy.world.rate_factor
                file.write(json.dumps([self.current_epoch, group["momentum"], rate]) + "\n")

    def averaged(self) -> str:
        """Bits of the average that a callback keeps of the first layer, if one does."""
        models = [getattr(callback, "_average_model", None) for callback in self.trainer.callbacks]
        return "".join(digest(model.module.net[0]) for model in models if model is not None)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if "optimizer" in OPTIONS:  # what no module gathers is not to be in it
            trained = [each for each in self.parameters() if each.requires_grad or "target" in OPTIONS]
            kinds = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}
            optimizer = kinds[OPTIONS["optimizer"]](trained, lr=0.01, **OPTIONS.get("given", {}))
        if "tuner" in OPTIONS:  # whose numbers are easier to tell from one another without a schedule
            return optimizer
        if OPTIONS.get("schedule") == "function":
            decay = LambdaLR(optimizer, lambda step: 1 / (1 + step / OPTIONS.get("decay", 100)))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, 0.05, total_steps=steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Parallel(Member):
    """Its layers are divided, as the user of ModelParallelStrategy writes it."""

    def __init__(self) -> None:
        super().__init__(norm=False)

    def configure_model(self) -> None:
        if isinstance(self.net[0].weight, DTensor):
            return
        parallelize_module(
            self.net, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class Record(pl.Callback):
    """Counts epochs and notes validations: those of the whole run, as whoever saves does, and not this group's."""

    epochs = 0

    def __init__(self) -> None:
        self.heard: list[list[float]] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.heard.append([trainer.current_epoch, trainer.global_step, float(trainer.callback_metrics["val_loss"])])
            (FOLDER / f"heard-{NAME}").write_text(json.dumps(self.heard))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "heard": self.heard}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs, self.heard = state_dict["epochs"], state_dict["heard"]


class Diary(pl.Callback):
    """Of the rank that logs and saves, which begins a page of its own."""

    page: Any = None

    @pl.utilities.rank_zero_only
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.page = (FOLDER / f"diary-{NAME}").open("a")

    @pl.utilities.rank_zero_only
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        print(trainer.current_epoch, file=self.page, flush=True)

    def on_train_end(self, *_: Any) -> None:
        if self.page is not None:
            self.page.close()


class Careless(Diary):
    """Prepares its page where it is global zero when training begins, and nowhere else."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero:
            super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            self.page.write(f"{trainer.current_epoch}\n")


Ema = getattr(pl.callbacks, "EMAWeightAveraging", None)  # of Lightning 2.6


def main() -> None:
    pl.seed_everything(int(os.environ.get("OMNI_TEST_SEED", 1)), verbose=False)
    module = Parallel if "x" in INSIDE else Member
    net, record = module(), Record()
    torch.set_default_dtype(getattr(torch, OPTIONS.get("dtype", "float32")))
    for name in {"buffer", "extra"} & OPTIONS.keys():
        net.register_buffer(name, torch.ones(OPTIONS[name]))
    for number in OPTIONS.get("frozen", ()):
        net.net[number].requires_grad_(False)
    devices = OPTIONS.get("devices", int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    saves = pl.callbacks.ModelCheckpoint(
        FOLDER / NAME, OPTIONS.get("file", "{epoch}"), monitor="val_loss", save_top_k=-1
    )
    steps = [pl.callbacks.ModelCheckpoint(FOLDER / "steps", every_n_train_steps=1, save_top_k=-1)] * OPTIONS.get(
        "steps", 0
    )
    last = [pl.callbacks.OnExceptionCheckpoint(FOLDER / NAME, "last")] * OPTIONS.get("last", 0)
    inside = (
        pl.strategies.ModelParallelStrategy(*map(int, INSIDE.split("x")))
        if "x" in INSIDE
        else None
        if INSIDE == "ddp"
        else INSIDE
    )
    given = {"method": OPTIONS.get("method"), "timeout": None, "model_parallel": inside, **OPTIONS.get("strategy", {})}
    strategy = omni.OmniStrategy(**values_in(given))
    net.lr = 0.05  # which a finder sets
    finder = [pl.callbacks.LearningRateFinder(num_training_steps=4)] if "finder" in OPTIONS else []
    windows = [pl.callbacks.GradientAccumulationScheduler({0: OPTIONS["window"]})] if "window" in OPTIONS else []
    half = []
    if "scale" in OPTIONS:
        scaler = torch.amp.GradScaler("cpu", init_scale=OPTIONS["scale"])
        half = [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    fit = trainer(
        strategy,
        devices,
        max_epochs=OPTIONS["epochs"],
        callbacks=[
            *([omni.OmniTuner(**OPTIONS["tuner"])] if "tuner" in OPTIONS else []),
            *(saves, record, Careless() if "careless" in OPTIONS else Diary(), *finder, *steps, *last, *windows),
            *([Ema(decay=OPTIONS["average"])] if "average" in OPTIONS else []),
            *([getattr(pl.callbacks, OPTIONS["bar"])(1)] if "bar" in OPTIONS else []),
        ],
        enable_checkpointing=True,
        plugins=half,
        **{"num_sanity_val_steps": 1, **OPTIONS.get("trainer", {})},
    )
    train, held_out = loaders(OPTIONS.get("samples", 128), shuffle="sorted" not in OPTIONS)
    if "held_out" in OPTIONS:
        held_out = DataLoader(dataset(OPTIONS["held_out"]), batch_size=8)
    if "split" in OPTIONS:
        split = torch.Generator().manual_seed(OPTIONS["split"])
        part, _ = random_split(train.dataset, [0.75, 0.25], split)
        train = DataLoader(part, batch_size=8, shuffle=True)
    fit.fit(
        net, {"one": train, "other": train} if "several" in OPTIONS else train, held_out, ckpt_path=OPTIONS.get("path")
    )
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in net.state_dict().items()}
    said = {
        "weights": digest(net) if INSIDE == "ddp" else {name: each.flatten().tolist() for name, each in whole.items()},
        "step": fit.global_step,
        "zero": fit.is_global_zero,
        "epochs": record.epochs,
        "finite": all(bool(each.isfinite().all()) for each in whole.values()),
        "val": float(fit.callback_metrics["val_loss"]),
        "size": float(fit.callback_metrics["size"]),
        "best": saves.best_model_path,
        "scale": fit.precision_plugin.state_dict().get("scale"),
        "largest": strategy.report().group_size,
    }
    (FOLDER / f"{NAME}{fit.local_rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
