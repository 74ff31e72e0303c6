"""Interrupts and resumes runs, within the strategy and across to plain DDP and back."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from common import FOLDER, InTime, Net, digest, loaders, omni, pl, report, trainer
from torch.utils._pytree import tree_map

from lightning_omni import Server

MANY = 768
"""Samples of which a group leases so many at once that the server hears of them late."""
RANK = int(os.environ.get("LOCAL_RANK", 0))


class AdamNet(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


def fit(strategy: Any, epochs: int, save: str = "", resume: str = "", devices: int = 2) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module = AdamNet(norm=False)
    callbacks: list[Any] = [InTime()]
    if save:
        callbacks += [pl.callbacks.ModelCheckpoint(FOLDER, filename=save, save_top_k=-1, every_n_epochs=epochs)]
    run = trainer(strategy, devices, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=bool(save))
    run.fit(module, *loaders(), ckpt_path=f"{FOLDER}/{resume}.ckpt" if resume else None)
    saved = FOLDER / f"{save}.ckpt"
    checkpoint = torch.load(saved, weights_only=True) if save and RANK == 0 else {}
    state = checkpoint.get("optimizer_states", [{}])[0].get("state", {})
    return {
        "weights": digest(module),
        "saved": {name: value.double().sum().item() for name, value in checkpoint.get("state_dict", {}).items()},
        "own": {name: value.double().sum().item() for name, value in module.state_dict().items()},
        "state": {str(index): float(each["exp_avg"].double().sum()) for index, each in state.items()},
        "adam_steps": [float(each["step"]) for each in state.values()],
        "omni": tree_map(
            lambda leaf: list(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf, checkpoint.get("omni")
        ),
        "keys": sorted(checkpoint),
        "step": run.global_step,
        "lr": run.optimizers[0].param_groups[0]["lr"],
        "val_loss": float(run.callback_metrics.get("val_loss", -1.0)),
        "after_fit_state": len(run.optimizers[0].state),
    }


class Samples(InTime):
    """Notes the samples of each epoch, which a resumed one does not begin with its batch 0."""

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        is_first = trainer.current_epoch not in self.seen
        self.seen.setdefault(trainer.current_epoch, []).extend(batch[2].tolist())
        super().on_train_batch_start(trainer, pl_module, batch, 0 if is_first else batch_idx)


class CycleNet(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def inside_an_epoch(strategy: Any, resume: bool = False) -> dict[str, Any]:
    """Saves after six of sixteen batches of the second epoch, or goes on from there."""
    pl.seed_everything(1, verbose=False)
    samples = Samples()
    callbacks: list[Any] = [samples]
    if not resume:
        callbacks.append(pl.callbacks.ModelCheckpoint(FOLDER, "inside", every_n_train_steps=22))
    run = trainer(strategy, 2, callbacks=callbacks, enable_checkpointing=not resume, max_epochs=2)
    run.fit(CycleNet(norm=False), *loaders(), ckpt_path=f"{FOLDER}/inside.ckpt" if resume else None)
    return {"seen": samples.seen, "scheduled": run.lr_scheduler_configs[0].scheduler.last_epoch}


class SlowRank(pl.Callback):
    """The last rank takes longer for each batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.05 * RANK)


def inside_an_epoch_of_groups() -> dict[str, Any]:
    """Saves after six batches of a group that has trained more of the epoch than the other."""
    pl.seed_everything(1, verbose=False)
    saving = pl.callbacks.ModelCheckpoint(FOLDER, "groups-{step}", every_n_train_steps=6, save_top_k=-1)
    run = trainer(omni.OmniStrategy(groups=2), 2, callbacks=[InTime(), SlowRank(), saving], enable_checkpointing=True)
    run.fit(CycleNet(norm=False), *loaders())
    checkpoint = torch.load(FOLDER / "groups-step=6.ckpt", weights_only=True)
    return {"trained": sum(stop - start for start, stop in checkpoint["omni"]["run"]["cut"]["trained"])}


def before_an_exchange() -> dict[str, Any]:
    """Saves after three batches of a group, when the server has heard of none."""
    pl.seed_everything(1, verbose=False)
    saving = pl.callbacks.ModelCheckpoint(FOLDER, "early-{step}", every_n_train_steps=3, save_top_k=-1)
    strategy = omni.OmniStrategy(groups=2, method="diloco:period=8")
    run = trainer(strategy, 2, callbacks=[InTime(), saving], enable_checkpointing=True)
    run.fit(CycleNet(norm=False), *loaders(MANY))
    if RANK:
        return {}
    checkpoint = torch.load(FOLDER / "early-step=3.ckpt", weights_only=True)
    run_state = checkpoint["omni"]["run"]
    return {
        **run_state["cut"],
        "scheduled": checkpoint["lr_schedulers"][0]["last_epoch"],
        "schedules": run_state["schedules"],
    }


class OwnState(Net):
    """Its state takes no arguments: copies, under other names, of what is trained, and a sum of them."""

    def state_dict(self) -> dict[str, Any]:
        own = {f"my.{name}": value.clone() for name, value in super().state_dict().items() if name != "frozen"}
        return {**own, "nested": {"first": self.net[0].weight}, "sum": sum(value.sum() for value in own.values())}


class SavesOnce(InTime):
    """Saves after the third batch of a group, when the server has heard of none."""

    def __init__(self) -> None:
        self.at_first = self.before = self.after = ""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.at_first = digest(pl_module.net)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.before = digest(pl_module.net)
            trainer.save_checkpoint(FOLDER / "own state.ckpt")
            self.after = digest(pl_module.net)


def own_state() -> dict[str, Any]:
    """Saves a module that says by itself what its state is, while its groups have weights of their own."""
    pl.seed_everything(1, verbose=False)
    module, saves = OwnState(norm=False), SavesOnce()
    start = {name: value.clone() for name, value in module.state_dict().items() if name != "nested"}
    run = trainer(omni.OmniStrategy(groups=2, method="diloco:period=8"), 2, callbacks=[saves], limit_train_batches=4)
    run.fit(module, *loaders())
    if RANK:
        return {}
    saved = torch.load(FOLDER / "own state.ckpt", map_location="cpu", weights_only=True)["state_dict"]
    first = saved.pop("nested")["first"]
    return {
        "names": sorted(saved),
        "as at first": [name for name, value in saved.items() if torch.equal(value, start[name])],
        "nested": torch.equal(first, start["my.net.0.weight"]),
        "has moved": saves.before != saves.at_first,
        "goes on": saves.before == saves.after,
    }


def from_inside(strategy: Any, name: str = "groups-step=6", samples: int = 256) -> dict[str, Any]:
    """Goes on from there."""
    pl.seed_everything(1, verbose=False)
    noted = Samples()
    run = trainer(strategy, 2, callbacks=[noted])
    run.fit(CycleNet(norm=False), *loaders(samples), ckpt_path=f"{FOLDER}/{name}.ckpt")
    return {
        "seen": noted.seen[0],
        "epochs": run.current_epoch,
        "scheduled": run.lr_scheduler_configs[0].scheduler.last_epoch,
    }


def half_an_epoch() -> str:
    """Saves after the validation in the middle of an epoch of two groups, and returns the file."""
    pl.seed_everything(1, verbose=False)
    saving = pl.callbacks.ModelCheckpoint(FOLDER, "half", monitor="val_loss", save_top_k=-1)
    strategy, more = omni.OmniStrategy(groups=2), {"callbacks": [InTime(), saving], "val_check_interval": 0.5}
    trainer(strategy, 2, enable_checkpointing=True, **more).fit(CycleNet(norm=False), *loaders())
    return f"{FOLDER}/half.ckpt"


class Teacher(pl.Callback):
    """Loads another checkpoint, from which nothing resumes."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        assert trainer.strategy.load_checkpoint(FOLDER / "groups.ckpt")["state_dict"]


def from_half(path: str, batch_size: int) -> list[int]:
    """Goes on from there with batches of another size, half as many of which an epoch has, as of twice the ranks."""
    pl.seed_everything(1, verbose=False)
    noted = Samples()
    run = trainer(omni.OmniStrategy(groups=2), 2, callbacks=[noted, Teacher()], val_check_interval=0.5)
    run.fit(Net(norm=False), *loaders(batch_size=batch_size), ckpt_path=path)
    return noted.seen.get(0, [])


class Pretrained(Net):
    """Begins with the weights of a checkpoint, and predicts the samples' numbers."""

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.load_state_dict(
                self.trainer.strategy.load_checkpoint(self.trainer.ckpt_path or FOLDER / "half.ckpt")["state_dict"]
            )

    def predict_step(self, batch: Any, batch_idx: int) -> list[int]:
        return batch[2].tolist()


def with_the_weights_of_half() -> dict[str, list[int]]:
    """Trains an epoch, and predicts with what the Trainer has trained on."""
    pl.seed_everything(1, verbose=False)
    noted = Samples()
    run = trainer(omni.OmniStrategy(groups=2), 2, callbacks=[noted])
    module, evaluated = Pretrained(norm=False), FOLDER / "half.ckpt"
    run.validate(module, loaders()[1], ckpt_path=evaluated, verbose=False)  # which the fit does not resume
    run.fit(module, *loaders())
    predicted = run.predict(module, run.train_dataloader)
    return {"seen": noted.seen[0], "predicted": [sample for batch in predicted or () for sample in batch]}


def cut_by_max_steps(strategy: Any, resume: bool = False) -> dict[str, Any]:
    """Ends after four of the second epoch's sixteen batches, and saves as the default ModelCheckpoint; or goes on."""
    pl.seed_everything(1, verbose=False)
    noted = Samples()
    saves = [] if resume else [pl.callbacks.ModelCheckpoint(FOLDER, "cut-{epoch}", save_top_k=-1)]
    run = trainer(
        strategy,
        2,
        callbacks=[noted, *saves],
        enable_checkpointing=not resume,
        max_steps=32 if resume else 20,
        max_epochs=3,
    )
    run.fit(Net(norm=False), *loaders(), ckpt_path=f"{FOLDER}/cut-epoch=1.ckpt" if resume else None)
    return {"seen": noted.seen}


def in_fragments() -> Any:
    """Groups that exchange fragments with two servers, equally often: each trains the same part of an epoch."""
    method = "diloco:period=4,fragments=2,delay=1,outer_momentum=0.5"
    return omni.OmniStrategy(groups=2, server=Server(count=2), method=method, compression="int8", data="static")


def main() -> None:
    ddp = pl.strategies.DDPStrategy
    diloco = omni.OmniStrategy(groups=2, method="diloco:period=8")
    results = {
        # one group: everything is DDP's
        "ddp whole": fit(ddp(), 2),
        "ddp half": fit(ddp(), 1, save="ddp"),
        "omni from ddp": fit(omni.OmniStrategy(groups=1), 2, resume="ddp"),
        "omni half": fit(omni.OmniStrategy(groups=1), 1, save="one"),
        "ddp from omni": fit(ddp(), 2, resume="one"),
        # two groups: the server's weights and states
        "groups half": fit(omni.OmniStrategy(groups=2), 1, save="groups"),
        "ddp from groups": fit(ddp(), 1, resume="groups"),
        "groups from groups": fit(omni.OmniStrategy(groups=2), 2, resume="groups", save="later"),
        "groups from ddp": fit(omni.OmniStrategy(groups=2), 2, resume="ddp"),
        "ddp inside an epoch": inside_an_epoch(ddp()),
        "groups from inside": inside_an_epoch(omni.OmniStrategy(groups=2), resume=True),
        "groups inside an epoch": inside_an_epoch_of_groups(),
        "ddp from inside": from_inside(ddp()),
        "groups from inside of groups": from_inside(omni.OmniStrategy(groups=2)),
        "one group from inside of groups": from_inside(omni.OmniStrategy(groups=1)),
        "before an exchange": before_an_exchange(),
        "own state": own_state(),
        "groups from before an exchange": from_inside(diloco, "early-step=3", MANY),
        "one group from before an exchange": from_inside(omni.OmniStrategy(groups=1), "early-step=3", MANY),
        # fragments, cut out of the shares of two servers
        "fragments half": fit(in_fragments(), 1, save="fragments"),
        "fragments from fragments": fit(in_fragments(), 2, resume="fragments", save="fragments later"),
    }
    half = half_an_epoch()
    results |= {f"half, {size}": from_half(half, size) for size in (8, 16)}
    results["pretrained"] = with_the_weights_of_half()
    results["cut"] = cut_by_max_steps(omni.OmniStrategy(groups=2))
    results["cut, resumed"] = cut_by_max_steps(omni.OmniStrategy(groups=2), resume=True)
    report(RANK, results)


if __name__ == "__main__":
    main()
