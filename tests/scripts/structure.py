"""Parameter groups that change in the midst of a fit: added, taken away, frozen, unfrozen."""

from __future__ import annotations

import os
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
from common import FOLDER, OPTIONS, InTime, dataset, digest, omni, pl, report, trainer
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, default_collate

from lightning_omni.runtime.model import parameter_groups

parameter_groups.AGREEMENT_TIMEOUT = timedelta(seconds=8)
RANK = int(os.environ.get("LOCAL_RANK", 0))


class Tuned(pl.LightningModule):
    """A backbone and a head; at first only what is trainable gets into the optimizer."""

    def __init__(self, kind: str = "sgd") -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 16), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
        self.kind = kind
        self.val: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.val.append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self) -> Any:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.kind == "adamw":
            return torch.optim.AdamW(trainable, lr=0.02)
        optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.5)
        return [optimizer], [{"scheduler": falling(optimizer), "interval": "step"}] if self.kind == "falls" else []


def falling(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 1 / (1 + steps))


class Noted(pl.Callback):
    """What the backbone is at the end of each epoch, as all ranks see it."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.moved: list[float] = []
        self.groups: list[int] = []
        self.trained = 0

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.trained += 1

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.start = pl_module.backbone[0].weight.detach().cpu().clone()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.digests.append(digest(pl_module))
        self.moved.append(float((pl_module.backbone[0].weight.detach().cpu() - self.start).abs().max()))
        self.groups.append(len(trainer.optimizers[0].param_groups))


class Again(pl.callbacks.BackboneFinetuning):
    """Unfreezes the backbone once more in a run that goes on: Lightning restores the groups and leaves it frozen."""

    def __init__(self, epoch: int) -> None:
        super().__init__(unfreeze_backbone_at_epoch=epoch, backbone_initial_lr=0.02)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        if len(trainer.optimizers[0].param_groups) > 1:
            self.make_trainable(pl_module.backbone)


class Thaw(pl.Callback):
    """Freezes the backbone, which the optimizer holds all the same, and unfreezes it in mid-epoch."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.backbone.requires_grad_(False)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.at:
            pl_module.backbone.requires_grad_(True)


class ThawInside(pl.Callback):
    """Freezes the backbone, and unfreezes it inside a training step."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        def thaw(*_: Any) -> None:
            pl_module.backbone.requires_grad_(trainer.global_step >= 3)

        pl_module.backbone.requires_grad_(False)
        pl_module.backbone.register_forward_pre_hook(thaw)


class Adversaries(Tuned):
    """Steps backbone and head in turn, and leaves the other one frozen: as many a GAN does it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.backbone.requires_grad_(batch_idx % 2 == 0)
        self.head.requires_grad_(batch_idx % 2 == 1)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Replace(pl.Callback):
    """Puts another last layer into the place of the old one, in module and optimizer."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            old, new = pl_module.head[2], nn.Linear(8, 3, device=pl_module.device)
            news = dict(zip(old.parameters(), new.parameters(), strict=True))
            pl_module.head[2] = new
            for group in trainer.optimizers[0].param_groups:
                group["params"] = [news.get(each, each) for each in group["params"]]


class Reschedule(pl.Callback):
    """Replaces the scheduler where the second epoch begins."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            [config] = trainer.lr_scheduler_configs
            config.scheduler = falling(trainer.optimizers[0])


class StopAtLast(pl.Callback):
    """One rank asks for a stop in its last batch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop |= RANK == 0 and trainer.is_last_batch


class Gap:
    """Collates nothing in the third batch of one rank."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.batches += 1
        return None if RANK == 0 and self.batches == 3 else default_collate(samples)


class TunesNothing(pl.Callback):
    """Forms the user's groups as training starts, like a tuner that cannot tune, and writes before the first epoch."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        parts = trainer.strategy.parts
        parts.user_groups.begin_in_one_group()
        parts.on_ready.append(parts.user_groups.form)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        assert not trainer.strategy.world.is_computing
        with torch.no_grad():
            pl_module.backbone[0].weight.mul_(0.5)


class Held(pl.Callback):
    """What the server's and this group's optimizers hold in the first batch that is resumed, and where epochs end."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        world = trainer.strategy.world
        if batch_idx == 0 and trainer.current_epoch == 2:
            server = world.exchange.store.snapshot().parts[0]["method"] if world.owns_state else None
            HELD.append([total(server), total([dict(each.state) for each in trainer.optimizers])])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        HELD.append([0.0, total([dict(each.state) for each in trainer.optimizers])])


class Averages(pl.Callback):
    """Keeps an average of the backbone in the module, and notes it after the last batch and at the epoch's end."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.average = AveragedModel(pl_module.backbone).requires_grad_(False)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.average.update_parameters(pl_module.backbone)
        if trainer.is_last_batch:
            self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        HELD.append(parameters_to_vector(pl_module.average.parameters()).tolist())


HELD: list[list[float]] = []


def total(tree: Any) -> float:
    leaves = tree_leaves(tree)
    return sum(float(leaf.abs().sum()) for leaf in leaves if isinstance(leaf, Tensor))


class Add(pl.Callback):
    """Adds the backbone after some steps, on these ranks; on the others an epoch later."""

    def __init__(self, at: int, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        self.at, self.ranks, self.is_done = at, ranks, False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.backbone.requires_grad_(False)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        late = RANK not in self.ranks and trainer.current_epoch == 0
        if trainer.global_step >= self.at and not late and not self.is_done:
            self.is_done = True
            pl_module.backbone.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(pl_module.backbone.parameters()), "lr": 0.05})


class Regroup(pl.Callback):
    """Forms other groups after so many batches."""

    def __init__(self, plan: dict[int, int]) -> None:
        self.plan, self.batches = plan, 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.batches += 1
        if self.batches in self.plan:
            trainer.strategy.regroup(self.plan[self.batches])


class Drop(pl.Callback):
    """Takes the backbone out of the optimizer in the second epoch, and keeps its bits."""

    def __init__(self) -> None:
        self.before: Tensor | None = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            optimizer = trainer.optimizers[0]
            backbone = set(pl_module.backbone.parameters())
            group = optimizer.param_groups[0]
            group["params"] = [each for each in group["params"] if each not in backbone]
            self.before = pl_module.backbone[0].weight.detach().clone()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.before is not None:
            assert torch.equal(pl_module.backbone[0].weight, self.before)


class Write(pl.Callback):
    """Writes the backbone at the first epoch's end."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            with torch.no_grad():
                pl_module.backbone[0].weight.mul_(0.5)


class Unlike(pl.Callback):
    """One member of a group adds a parameter, and the others another one, or none."""

    def __init__(self, others_add: bool) -> None:
        self.others_add = others_add

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and (RANK % 2 or self.others_add):
            pl_module.odd = nn.Parameter(torch.zeros(2 + RANK % 2))
            trainer.optimizers[0].add_param_group({"params": [pl_module.odd]})


class Complex(pl.Callback):
    """Adds what cannot be exchanged."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            pl_module.odd = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn), requires_grad=False)
            trainer.optimizers[0].add_param_group({"params": [pl_module.odd]})


def fit(
    strategy: Any,
    epochs: int,
    callbacks: list[Any] = (),
    kind: str = "sgd",
    resume: str = "",
    save: str = "",
    collate: Any = None,
    **more: Any,
) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    module, watch = Adversaries() if kind == "by turns" else Tuned(kind), Noted()
    initial = {name: value.tolist() for name, value in module.state_dict().items()}
    every = [*callbacks, watch, InTime()]
    if save:
        every.append(pl.callbacks.ModelCheckpoint(FOLDER, filename=save, every_n_epochs=epochs))
    run = trainer(
        strategy, OPTIONS["devices"], max_epochs=epochs, callbacks=every, enable_checkpointing=bool(save), **more
    )
    error, said = "", []
    data = (
        DataLoader(dataset(256), batch_size=8, shuffle=True, collate_fn=collate),
        DataLoader(dataset(64), batch_size=8),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run.fit(module, *data, ckpt_path=f"{FOLDER}/{resume}.ckpt" if resume else None)
        except (omni.OmniError, RuntimeError) as problem:  # torch's own, which says what ended its connection
            error = str(problem)
        said = [str(each.message) for each in caught if "DistributedDataParallel" in str(each.message)]
    saved = torch.load(FOLDER / f"{save}.ckpt", weights_only=True) if save and RANK == 0 else {}
    optimizer = saved.get("optimizer_states", [{"state": {}, "param_groups": []}])[0]
    return {
        "digests": watch.digests,
        "moved": watch.moved,
        "groups": watch.groups,
        "trained": watch.trained,
        "held": [HELD.pop(0) for _ in list(HELD)],
        "saved_server": total(saved["omni"]["run"]["server"]) if saved else 0.0,
        "rate": run.optimizers[0].param_groups[0]["lr"],
        "val": module.val,
        "end": digest(module),
        "weights": {name: value.tolist() for name, value in module.state_dict().items()} if RANK == 0 else {},
        "initial": initial if RANK == 0 else {},
        "error": error,
        "warnings": said,
        "step": run.global_step,
        "updates": strategy.report().updates if save else 0,
        "saved_state": len(optimizer["state"]),
        "saved_steps": [float(each["step"]) for each in optimizer["state"].values() if "step" in each],
        "saved_groups": [len(group["params"]) for group in optimizer["param_groups"]],
    }


def main() -> None:
    groups = omni.OmniStrategy
    FITS = {
        "ddp": lambda: fit(pl.strategies.DDPStrategy(), 2, [Again(1)], "adamw"),
        "one": lambda: fit(groups(groups=1), 2, [Again(1)], "adamw"),
        "remedy": lambda: fit(groups(groups=1, find_unused_parameters=True), 1, [Thaw(3)]),
        "tuned": lambda: fit(
            groups(groups=2, server=omni.Server(record=str(FOLDER / "tuned"))), 2, [Again(1)], "adamw", save="tuned"
        ),
        "resumed": lambda: fit(groups(groups=2), 3, [Again(1)], "adamw", resume="tuned"),
        "ddp resumed": lambda: fit(pl.strategies.DDPStrategy(), 3, [Again(1)], "adamw", resume="tuned"),
        "averaged": lambda: fit(groups(groups=2), 1, [Averages()]),
        "thawed": lambda: fit(groups(groups=2), 1, [Thaw(3)]),
        "thawed inside": lambda: fit(groups(groups=2), 1, [ThawInside()]),
        "by turns": lambda: fit(groups(groups=2, find_unused_parameters=True), 2, kind="by turns"),
        "replaced": lambda: fit(groups(groups=2), 2, [Replace()]),
        "users": lambda: fit(groups(groups=2), 1, [TunesNothing()]),
        "rescheduled": lambda: fit(groups(groups=2, method="local_sgd:period=2"), 2, [Reschedule()], "falls"),
        "gap": lambda: fit(groups(groups=4), 1, collate=Gap()),
        "stopped": lambda: fit(groups(groups=4), 3, [StopAtLast()], val_check_interval=3),
        "dropped": lambda: fit(groups(groups=2), 2, [Drop()], "adamw"),
        "late": lambda: fit(
            groups(groups=4, server=omni.Server(record=str(FOLDER / "late"))), 2, [Add(2, ranks=(0, 2))]
        ),
        "mean": lambda: fit(groups(groups=4, method="local_sgd:period=2"), 2, [Again(1)]),
        "gossip": lambda: fit(groups(groups=4, method="gossip"), 2, [Add(2)]),
        "outer": lambda: fit(
            groups(groups=2, method="diloco:period=2", server=omni.Server(record=str(FOLDER / "outer"))),
            2,
            [Again(1), Held()],
            save="outer",
        ),
        "outer users": lambda: fit(
            groups(groups=2, method="diloco:period=2"), 3, [TunesNothing(), Again(1), Held()], resume="outer"
        ),
        "regrouped": lambda: fit(groups(groups=4), 2, [Add(1), Regroup({2: 2, 3: 1, 4: 4})]),
        "written": lambda: fit(groups(groups=2), 2, [Add(2), Write()], "adamw"),
        "head": lambda: fit(groups(groups=2, merged="head.2"), 2, [Again(1)]),
        "unlike": lambda: fit(groups(groups=2), 1, [Unlike(True)]),
        "alone": lambda: fit(groups(groups=2), 1, [Unlike(False)]),
        "odd": lambda: fit(groups(groups=2), 1, [Complex()]),
    }
    report(RANK, {name: FITS[name]() for name in OPTIONS["fits"]})
    deadline = time.monotonic() + 30
    # After a fit that failed ranks do not wait for each other, and none outlives the one that started it.
    while RANK == 0 and time.monotonic() < deadline:
        if all((FOLDER / f"rank{rank}.json").exists() for rank in range(OPTIONS["devices"])):
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main()
