"""Fits that end after max_steps, change their groups, skip batches and go on: what is trained in each of them."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torchmetrics
from common import FOLDER, OPTIONS, Net, dataset, loaders, omni, pl, report, trainer
from torch.utils.data import DistributedSampler

from lightning_omni.runtime.leased_loader import permutation

RANK = int(os.environ.get("LOCAL_RANK", 0))
SECONDS = (0.004, 0.03)
"""Of a batch: the group of rank 0 trains most of them."""
BATCH = 16
"""Samples in a step of both ranks."""
SEED = 1


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.999**count)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ByEpoch(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class FromAnEpochOn(Scheduled):
    """Has its schedule rest in the first epoch."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.current_epoch:
            scheduler.step()


class ByHand(Net):
    """Steps after every fourth batch, or after each, and its schedule after each."""

    def __init__(self, window: int = 1) -> None:
        super().__init__()
        self.automatic_optimization, self.window = False, window

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(batch))
        if batch_idx % self.window == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()
        self.lr_schedulers().step()

    configure_optimizers = ByEpoch.configure_optimizers


class ByCount(Net):
    """Steps after every fifth batch and the last of an epoch, after which it steps its schedule, too.

    Which one that is, it finds by the number of batches, or of the loader, or by the number that there was at first.
    """

    def __init__(self, known: str) -> None:
        super().__init__()
        self.automatic_optimization, self.known = False, known
        self.number = self.left = 0

    def on_train_start(self) -> None:
        self.number = int(self.trainer.num_training_batches)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        numbers = {"trainer": self.trainer.num_training_batches, "loader": len(self.trainer.train_dataloader)}
        assert int(self.trainer.estimated_stepping_batches) == 2 * self.number
        is_last = batch_idx + 1 == numbers.get(self.known, self.number)
        self.manual_backward(self.loss(batch) / 5)
        self.left += 1
        if (batch_idx + 1) % 5 == 0 or is_last:
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.left = 0
        if is_last:
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Rows(torchmetrics.Metric):
    """Keeps what it is given, each by itself and joined, as metrics of retrieval and of detection do."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", [], dist_reduce_fx=None)
        self.add_state("joined", [], dist_reduce_fx="cat")

    def update(self, numbers: torch.Tensor) -> None:
        self.kept.append(numbers[:, None])
        self.joined.append(numbers)

    def compute(self) -> tuple[int, list[int], list[int]]:
        kept = torch.cat(self.kept).flatten().tolist() if self.kept else []
        return len(self.kept), sorted(kept), sorted(torch.as_tensor(self.joined).tolist())


class KeepsRows(Net):
    """Computes metrics of all that was trained in an epoch; some that the fast group alone has seen anything of."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.rare, self.found = Rows(), Rows(), list[Any]()
        self.number = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        is_ahead = FOLDER / f"ahead-{self.current_epoch}"
        if self.global_rank == 0 and batch_idx == 22:
            is_ahead.touch()
        while self.global_rank == 1 and batch_idx == 4 and not is_ahead.exists():
            time.sleep(0.01)
        self.rows.update(batch[2])
        if batch_idx > 18:
            self.rare.update(batch[2][: batch_idx % 3])
            self.number.update(batch_idx)
            self.log("rare", float(batch_idx), on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
            self.log("rare, of a metric", self.number, on_step=False, on_epoch=True)
            double = torch.tensor(float(batch_idx), dtype=torch.float64)
            self.log("rare, of double precision", double, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        everyone = {"sync_dist": True, "sync_dist_group": torch.distributed.group.WORLD}
        if batch_idx > 18:
            self.log("rare, by name", float(batch_idx), on_step=False, on_epoch=True, batch_size=1, **everyone)
        self.log("number", 1.0, on_step=False, on_epoch=True, reduce_fx="sum", **everyone)
        if self.global_rank or batch_idx:  # in 31 of 32 batches
            self.log("one", 1.0, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.found.append([len(self.rows.kept), *self.rows.compute(), *self.rare.compute(), len(self.rows.kept)])
        self.rows.reset()
        self.rare.reset()


class Plateau(Net):
    """Its schedule waits for the metric of validations inside the epoch, and takes the rate down with every second."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.99)
        often = {"interval": "step", "frequency": 8}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss", **often}}


class MakesLoaders(Net):
    """Makes its loader once more in every validation, with more samples in the next epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def train_dataloader(self) -> Any:
        self.made += 1
        return loaders(256 if self.made <= 3 else 384)[0]

    def val_dataloader(self) -> Any:
        return loaders()[1]

    def on_validation_end(self) -> None:
        if not self.trainer.is_last_batch:
            self.trainer.fit_loop._combined_loader = None
            self.trainer.fit_loop.setup_data()


class Skips(Scheduled):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx >= 4 else None


class SkipsByEpoch(ByEpoch):
    on_train_batch_start = Skips.on_train_batch_start


class Follows(pl.Callback):
    """Notes what is trained; forms other groups, and saves, after some batch of an epoch."""

    def __init__(self, regroup: tuple[int, int, int] | None = None, save: tuple[int, int] | None = None) -> None:
        self.regroup, self.save = regroup, save
        self.samples: dict[int, list[int]] = {}
        self.epochs: list[int] = []
        self.starts = 0
        self.counted = 0  # by the scheduler, when it saves

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.starts += 1

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(trainer.current_epoch)

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(SECONDS[RANK % 2])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.samples.setdefault(trainer.current_epoch, []).extend(batch[2].tolist())
        if self.regroup is not None and self.regroup[:2] == (trainer.current_epoch, batch_idx):
            trainer.strategy.regroup(self.regroup[2])
        if self.save == (trainer.current_epoch, batch_idx):
            self.wait_for_others(trainer.strategy.world)
            self.counted = trainer.lr_scheduler_configs[0].scheduler.last_epoch
            trainer.save_checkpoint(FOLDER / "inside.ckpt")

    def wait_for_others(self, world: Any) -> None:
        """Until the server has trained two steps more than rank 0 has heard of, or all of the epoch."""
        if RANK == 0 and world.executor.exchanges:
            enough = min(256, world.core.last_answer.progress + 2 * BATCH)
            while (
                sum(stop - start for start, stop in world.exchange.store.snapshot(with_state=False).cut.trained)
                < enough
            ):
                time.sleep(SECONDS[0])


class Saves(Follows):
    """After every batch, up to the last."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(FOLDER / "end.ckpt")


def run_of(groups: int, follows: Follows, **options: Any) -> pl.Trainer:
    pl.seed_everything(SEED, verbose=False)
    return trainer(omni.OmniStrategy(groups=groups), 2, callbacks=[follows], **{"max_epochs": -1, **options})


def facts(run: pl.Trainer, follows: Follows) -> dict[str, Any]:
    schedulers = [config.scheduler.last_epoch for config in run.lr_scheduler_configs]
    seen = {"samples": follows.samples, "epochs": follows.epochs, "starts": follows.starts}
    return {**seen, "steps": run.global_step, "scheduled": schedulers}


def limited(
    module: Net, groups: int, regroup: tuple[int, int, int] | None = None, samples: int = 512, **options: Any
) -> dict[str, Any]:
    """One fit."""
    follows = Follows(regroup)
    run = run_of(groups, follows, **options)
    run.fit(module, *loaders(samples))
    return facts(run, follows)


def by_count(known: str) -> dict[str, Any]:
    """A fit whose hooks compare numbers of batches, and what the user is warned of."""
    module = ByCount(known)
    found = warned(module, Follows())
    return {**found, "left": module.left, "rate": module.optimizers().param_groups[0]["lr"]}


def by_hand() -> dict[str, Any]:
    """A fit whose schedule is stepped in every batch, and what a checkpoint inside an epoch has of it."""
    follows = Follows(save=(1, 9))
    found = warned(ByHand(), follows)
    [saved] = torch.load(FOLDER / "inside.ckpt", weights_only=True)["lr_schedulers"]
    return {**found, "counted": follows.counted, "saved": saved["last_epoch"]}


def warned(module: Net, follows: Follows) -> dict[str, Any]:
    """A fit, and what the user is warned of."""
    run = run_of(2, follows, max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, *loaders(256))
    return {
        **facts(run, follows),
        "said": [str(each.message) for each in caught if "OmniStrategy" in str(each.message)],
    }


def lists() -> dict[str, Any]:
    """A fit with metrics that keep lists."""
    module = KeepsRows()
    found = limited(module, 2, samples=256, max_epochs=2)
    names = ("one", "number", "rare", "rare, of a metric", "rare, of double precision", "rare, by name")
    return {**found, "found": module.found, **{name: float(module.trainer.callback_metrics[name]) for name in names}}


def plateau() -> dict[str, Any]:
    """A fit that validates every four batches of DDP."""
    module = Plateau()
    found = limited(module, 2, samples=256, max_epochs=2, val_check_interval=4)
    return {**found, "rate": module.trainer.optimizers[0].param_groups[0]["lr"]}


def remade() -> dict[str, Any]:
    """A fit whose loaders are made once more in validations inside its first epoch."""
    follows = Follows()
    run = run_of(2, follows, max_epochs=2, val_check_interval=4)
    run.fit(MakesLoaders())
    return facts(run, follows)


def longer(make: Any, groups: int, then: int, how: str, limit: int = 30) -> dict[str, Any]:
    """A fit of 20 steps, the last of them inside an epoch, and another one to ``limit``."""
    run = run_of(groups, Saves() if how == "last batch" else Follows(), max_steps=20)
    module, follows = make(), Follows()
    run.fit(module, *loaders(256))
    if how != "last batch":
        run.save_checkpoint(FOLDER / "end.ckpt")
    saved = torch.load(FOLDER / "end.ckpt", weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    if how in ("checkpoint", "last batch"):
        run = run_of(then, follows, max_steps=limit)
        run.fit(make(), *loaders(256), ckpt_path=FOLDER / "end.ckpt")
    else:
        if how == "evaluated":
            run.validate(module, loaders(256)[1], ckpt_path=FOLDER / "end.ckpt", verbose=False)
        run.callbacks.append(follows)
        run.fit_loop.epoch_loop.max_steps = limit
        run.fit(module, *loaders(256))
    return {**facts(run, follows), "saved": saved["current"]["ready"]}


def inside(groups: int, then: int, regroup: tuple[int, int, int] | None = None) -> dict[str, Any]:
    """Saved in the second epoch by so many groups, and resumed by others: what was trained of it, and then."""
    saving = Follows(regroup, save=(1, 9))
    run = run_of(groups, saving, max_epochs=2)
    run.fit(Scheduled(), *loaders(256))
    saved = torch.load(FOLDER / "inside.ckpt", weights_only=True)
    cut = saved["omni"]["run"]["cut"]
    follows = Follows()
    run = run_of(then, follows, max_epochs=2)
    run.fit(Scheduled(), *loaders(256), ckpt_path=FOLDER / "inside.ckpt")
    sampler: Any = DistributedSampler(dataset(256), 2, 0, seed=SEED)
    sampler.set_epoch(1)
    order = list(map(int, permutation(sampler)))
    before = [order[place] for start, stop in cut["trained"] for place in range(start, stop)]
    return {
        **facts(run, follows),
        "before": before if RANK == 0 else [],
        "behind": saved["omni"]["run"]["progress"]["steps"] - saving.counted,
        "rate": saved["optimizer_states"][0]["param_groups"][0]["lr"],
        "counted": saved["lr_schedulers"][0]["last_epoch"],
    }


class SavesValidated(Follows):
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(FOLDER / "validated.ckpt")


def validated(groups: int, then: int | None, first: dict[str, int] | None = None, **options: Any) -> dict[str, Any]:
    """Saved in the validation at the end of the second epoch, and resumed."""
    run = run_of(groups, SavesValidated(), **(first or {"max_epochs": 2}))
    run.fit(Scheduled(), *loaders(256))
    follows = Follows()
    run = run_of(then or 1, follows, **{"max_epochs": 3, **options})
    if then is None:
        run = trainer("ddp", 2, callbacks=[follows], max_epochs=3)
    run.fit(Scheduled(), *loaders(256), ckpt_path=FOLDER / "validated.ckpt")
    return facts(run, follows)


FITS: dict[str, Callable[[], dict[str, Any]]] = {
    "regrouped": lambda: limited(Net(), 1, regroup=(0, 4, 2), max_steps=20),
    "regrouped at the end": lambda: limited(Net(), 1, regroup=(0, 19, 2), max_steps=20),
    "by hand": lambda: limited(ByHand(), 2, max_steps=20),
    "by hand, windows": lambda: limited(ByHand(4), 2, regroup=(1, 4, 1), max_steps=20),
    "by hand, scheduled": lambda: by_hand(),
    "by count": lambda: by_count("trainer"),
    "by count of the loader": lambda: by_count("loader"),
    "by count of before": lambda: by_count("before"),
    "from an epoch on": lambda: limited(FromAnEpochOn(), 2, samples=256, max_epochs=2),
    "lists": lambda: lists(),
    "plateau": lambda: plateau(),
    "remade": lambda: remade(),
    "skips": lambda: limited(Skips(), 2, max_steps=16),
    "skips, scheduled by epoch": lambda: limited(SkipsByEpoch(), 2, max_epochs=3),
    "more of two": lambda: longer(ByEpoch, 2, 2, "checkpoint"),
    "more of one": lambda: longer(ByEpoch, 2, 1, "checkpoint"),
    "more of two, saved by one": lambda: longer(ByEpoch, 1, 2, "checkpoint"),
    "more of two, inside": lambda: longer(ByEpoch, 2, 2, "last batch"),
    "more of one, inside": lambda: longer(ByEpoch, 2, 1, "last batch"),
    "more by hand": lambda: longer(ByHand, 2, 1, "checkpoint"),
    "more at once": lambda: longer(ByEpoch, 2, 2, "at once"),
    "more, evaluated": lambda: longer(ByEpoch, 2, 2, "evaluated"),
    "no more": lambda: longer(ByEpoch, 2, 2, "checkpoint", limit=20),
    "no more at once": lambda: longer(ByEpoch, 2, 2, "at once", limit=20),
    "validated": lambda: validated(2, 2),
    "validated, in one group": lambda: validated(2, 1),
    "validated, by DDP": lambda: validated(2, None),
    "validated at max_steps, by DDP": lambda: validated(2, None, {"max_steps": 32}),
    "validated, of one group": lambda: validated(1, 2, max_steps=44),
    "inside, in one group": lambda: inside(2, 1),
    "inside, in two": lambda: inside(2, 2),
    "inside, regrouped": lambda: inside(2, 1, regroup=(1, 3, 1)),
    "inside, regrouped, in two": lambda: inside(2, 2, regroup=(1, 3, 1)),
}


def main() -> None:
    left_out = OPTIONS.get("left_out", ())
    report(RANK, {name: make() for name, make in FITS.items() if name not in left_out})


if __name__ == "__main__":
    main()
