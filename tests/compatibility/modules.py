"""Modules of users, each with a habit: a small, nearly convex classifier that freezes, switches, logs, edits, ..."""

from __future__ import annotations

import copy
from typing import Any

import pytorch_lightning as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

FEATURES, CLASSES, SAMPLES, HELD_OUT = 12, 3, 384, 128


def samples(count: int, seed: int) -> TensorDataset:
    """Classes that a linear map separates but for some noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    truth = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(99))
    y = (x @ truth + 0.5 * torch.randn(count, CLASSES, generator=generator)).argmax(1)
    return TensorDataset(x, y)


def training_data() -> TensorDataset:
    return samples(SAMPLES, 1)


def held_out_data() -> TensorDataset:
    return samples(HELD_OUT, 2)


def train_loader(batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(training_data(), batch_size=batch_size, shuffle=True, **options)


def val_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(held_out_data(), batch_size=8, **options)


class Twice(DataLoader[Any]):
    """Gives out each batch twice."""

    def __len__(self) -> int:
        return 2 * super().__len__()

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield from (batch, batch)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Every rank's share of the samples, as users of IterableDataset write it."""

    def __iter__(self) -> Any:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        data = training_data()
        return (data[place] for place in range(rank, len(data), size))


class Named(Dataset):  # type: ignore[type-arg]
    """Batches that are dictionaries."""

    def __init__(self) -> None:
        self.data = training_data()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        x, y = self.data[place]
        return {"x": x, "y": y}


class Classifier(pl.LightningModule):
    """What all others are made of: a linear body and a linear head."""

    norm = False

    def __init__(self, lr: float = 0.05, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.batch_size = lr, batch_size
        layers: list[nn.Module] = [nn.Linear(FEATURES, 16, bias=not self.norm)]
        self.backbone = nn.Sequential(*layers, *([nn.BatchNorm1d(16)] if self.norm else []))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def loss(self, batch: Any) -> Tensor:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, add_dataloader_idx=dataloader_idx > 0)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)


class Drawing(Classifier):
    """Draws its batches itself, and says how large they are where it logs."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        loss = self.loss(batch)
        self.log("train_loss", loss, batch_size=len(batch[0]))
        return loss


class WithNorm(Classifier):
    norm = True


class Frozen(Classifier):
    """A body that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=self.lr, momentum=0.5)


class FrozenInOptimizer(Classifier):
    """A body that is frozen and given to the optimizer all the same, with weight decay."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5, weight_decay=1e-3)


class Unfreezing(Classifier):
    """A body that is in the optimizer from the start and thawed after an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone.requires_grad_(True)

    configure_optimizers = FrozenInOptimizer.configure_optimizers


class Freezing(Classifier):
    """A body that is frozen after an epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone.requires_grad_(False)
            self.kept = copy.deepcopy(self.backbone.state_dict())

    def on_train_end(self) -> None:
        for name, value in self.backbone.state_dict().items():
            assert torch.equal(value, self.kept[name]), f"backbone.{name} was frozen, and moved"


class AddingGroup(Classifier):
    """Adds the body to the optimizer after an epoch."""

    def configure_optimizers(self) -> Any:
        self.backbone.requires_grad_(False)
        return torch.optim.SGD(self.head.parameters(), lr=self.lr, momentum=0.5)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone.requires_grad_(True)
            self.optimizers().optimizer.add_param_group({"params": self.backbone.parameters(), "lr": self.lr})


class Manual(Classifier):
    """Manual optimization with clipping and accumulation by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch) / 2
        self.manual_backward(loss)
        self.log("train_loss", loss)
        if (batch_idx + 1) % 2 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class TwoOptimizers(Classifier):
    """As a GAN does it: two optimizers, toggled, each with a loss of its own, and schedulers by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("train_loss", loss)
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.backbone.parameters(), lr=self.lr)
        second = torch.optim.Adam(self.head.parameters(), lr=0.01)
        return [first, second], [torch.optim.lr_scheduler.StepLR(each, 50, 0.9) for each in (first, second)]


class Alternating(TwoOptimizers):
    """Two optimizers, of which every batch steps one, in a toggled context."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx % 2]
        with optimizer.toggle_model(sync_grad=True):
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        self.log("train_loss", loss)


class FrozenByHand(TwoOptimizers):
    """Two optimizers alternately, the other half frozen by hand, and left so: as many a GAN does it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        turn = batch_idx % 2
        self.backbone.requires_grad_(turn == 0)
        self.head.requires_grad_(turn == 1)
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer = self.optimizers()[turn]
        optimizer.step()
        optimizer.zero_grad()
        self.log("train_loss", loss)


class SwitchingOptimizer(Classifier):
    """From SGD to AdamW after an epoch, through the strategy as Lightning's docs have it."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.optimizers = [torch.optim.AdamW(self.parameters(), lr=0.01)]


class SwitchingThroughTrainer(Classifier):
    """The same through ``trainer.optimizers``."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.AdamW(self.parameters(), lr=0.01)]


class SwitchingInMidEpoch(Classifier):
    """The same between two batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 1 and batch_idx == 5:
            self.trainer.strategy.optimizers = [torch.optim.AdamW(self.parameters(), lr=0.01)]


class RemovingGroup(Classifier):
    """Drops the body from the optimizer after an epoch."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.head.parameters()}, {"params": self.backbone.parameters()}]
        return torch.optim.SGD(groups, lr=self.lr, momentum=0.5)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].param_groups.pop()
            self.backbone.requires_grad_(False)
            self.kept = copy.deepcopy(self.backbone.state_dict())

    on_train_end = Freezing.on_train_end


class LoggingEverywhere(Classifier):
    """Logs in every hook that may, in every way, and torchmetrics objects."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.val_accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.val_all = torchmetrics.MetricCollection(
            {"f1": torchmetrics.F1Score("multiclass", num_classes=CLASSES), "mean": torchmetrics.MeanMetric()}
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(logits := self(x), y)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("summed", 1.0, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("rank zero", loss, rank_zero_only=True)
        self.log_dict({"one": loss.detach(), "two": 2 * loss.detach()}, batch_size=len(y))
        return {"loss": loss, "more": loss.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("batch end", outputs["more"])

    def on_train_epoch_start(self) -> None:
        self.log("epoch start", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.log("epoch end", float(self.current_epoch))
        self.log("epoch end synced", float(self.current_epoch), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("gradient", self.head.weight.grad.norm())

    def on_after_backward(self) -> None:
        self.log("after backward", 1.0)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        x, y = batch
        self.val_accuracy.update(self(x), y)
        self.val_all["f1"].update(self(x), y)
        self.val_all["mean"].update(self.loss(batch))
        self.log("val_accuracy", self.val_accuracy, on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_all.compute())
        self.val_all.reset()
        gathered = self.all_gather(torch.tensor(1.0))
        self.log("ranks", gathered.sum(), sync_dist=False)


class KeepingState(Classifier):
    """Keeps state in attributes and buffers: counters, running means, an EMA of its weights by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.outputs: list[Tensor] = []
        self.shadow = copy.deepcopy(self.head).requires_grad_(False)
        self.ema: dict[str, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.outputs.append(self.loss(batch).detach())
        self.seen += len(batch[0])
        self.mean.lerp_(batch[0].mean(0), 0.1)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.shadow.parameters(), self.head.parameters(), strict=True):
                mine.lerp_(theirs, 0.2)
        for name, value in self.head.named_parameters():
            self.ema[name] = 0.9 * self.ema.get(name, value.detach()) + 0.1 * value.detach()

    def on_train_epoch_end(self) -> None:
        self.log("mean loss", torch.stack(self.outputs).mean(), sync_dist=True)
        self.outputs.clear()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ema"] = self.ema


class Skipping(Classifier):
    """training_step returns None for some batches, the same on all ranks: Lightning refuses it with several ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 3 else super().training_step(batch, batch_idx)


class SkippingEpoch(Classifier):
    """on_train_batch_start returns -1: the epoch ends early."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 10 else None


class OwnSteps(Classifier):
    """Overrides every optimizer hook that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = dict.fromkeys(("step", "clip", "zero", "before", "after", "schedule"), 0)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.seen["step"] += 1
        for group in optimizer.param_groups:  # warm-up
            group["lr"] = self.lr * min(1.0, (self.trainer.global_step + 1) / 10)
        optimizer.step(closure=optimizer_closure)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.seen["clip"] += 1
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.seen["zero"] += 1
        optimizer.zero_grad()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen["before"] += 1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen["after"] += 1

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.seen["schedule"] += 1
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)]


class EpochSchedule(Classifier):
    """Tells the schedule which epoch it is, as Lightning's docs have it for schedules of timm."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class HooksOfTheOptimizer(Classifier):
    """Counts in a hook before the optimizer's step, and averages weights in one after it."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.shadow, self.steps, self.begun, self.stepped = copy.deepcopy(self.head.state_dict()), 0, 0, 0
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)
        return optimizer

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps += 1

    def before(self, optimizer: Any, *_: Any) -> None:
        self.begun += 1

    def after(self, optimizer: Any, *_: Any) -> None:
        self.stepped += 1
        for name, value in self.head.state_dict().items():
            self.shadow[name].lerp_(value, 0.2)


class EveryOtherStep(Classifier):
    """optimizer_step that steps every other batch only, and runs the closure in between."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class Tied(Classifier):
    """A weight with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(FEATURES, FEATURES, bias=False)
        self.again = nn.Linear(FEATURES, FEATURES, bias=False)
        self.again.weight = self.backbone.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.backbone(x)) + x)


class ReadingStrategy(Classifier):
    """Reads what the strategy has to say, as loggers, samplers and metrics of users do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy = self.trainer.strategy
        if batch_idx == 0:
            self.read = [
                str(strategy.root_device),
                strategy.num_nodes,
                strategy.num_processes,
                strategy.is_distributed,
                strategy.handles_gradient_accumulation,
                strategy.restore_checkpoint_after_setup,
                strategy.process_group_backend,
                strategy.world_size,
                self.trainer.world_size,
                self.trainer.num_devices,
                self.trainer.is_global_zero == (self.trainer.global_rank == 0),
                strategy.reduce_boolean_decision(True),
                strategy.reduce_boolean_decision(False, all=False),
                len(strategy.optimizers),
                len(strategy.lr_scheduler_configs),
                strategy.model is not None,
                strategy.lightning_module is self,
                float(strategy.reduce(torch.tensor(2.0))),
                strategy.broadcast("said"),
                strategy.distributed_sampler_kwargs["num_replicas"],
            ]
            strategy.barrier("mine")
        return super().training_step(batch, batch_idx)


class Clamping(Classifier):
    """Clamps its weights after every step, as a Wasserstein GAN does."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.head.parameters():
            parameter.data.clamp_(-0.2, 0.2)

    def on_train_end(self) -> None:
        assert self.head.weight.abs().max() <= 0.2 + 0.1, "clamped to 0.2, and not held"


class Resetting(Classifier):
    """Writes its weights again at the end of the first epoch."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            with torch.no_grad():
                self.backbone[0].weight.mul_(0.5)
                self.head.weight.zero_()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.read = float(self.head.weight.abs().max())


class ResettingInMidEpoch(Classifier):
    """Writes a layer again between two batches; what came of it is read a few batches later."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 1 and batch_idx == 4:
            with torch.no_grad():
                self.backbone[0].bias.fill_(3.0)
        if self.current_epoch == 1 and batch_idx == 6:
            self.read = bool(self.backbone[0].bias.mean() > 2.0)


class Schedules(Classifier):
    """A schedule by steps that has to know their number."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        # Asynchrony has momentum of its own; cycled, the two would make another task of this one.
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Decaying(Classifier):
    """A schedule by steps, of which a run has as many as there are."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class DecayingWithNorm(Decaying):
    norm = True


class OnPlateau(Classifier):
    """A schedule that waits for a metric."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Adam(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class LoadingState(Adam):
    """Goes on from another state of its optimizer."""

    def load(self) -> None:
        optimizer = self.optimizers().optimizer
        old = {"step": torch.tensor(1000.0)}
        states = [{**old, "exp_avg": 0 * p.detach(), "exp_avg_sq": 0 * p.detach() + 0.01} for p in self.parameters()]
        optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(enumerate(states))})

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.load()


class LoadingStateInMidEpoch(LoadingState):
    """The same between two batches."""

    def on_train_epoch_start(self) -> None:
        pass

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 1 and batch_idx == 4:
            self.load()


class SharpnessAware(torch.optim.SGD):
    """SAM: the gradient is that of the weights a step of length rho up the slope, so the loss is evaluated twice."""

    def __init__(self, parameters: Any, rho: float, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.rho = rho

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is None:
            raise RuntimeError("SAM needs a closure")
        with torch.enable_grad():
            loss = closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before, length = [p.clone() for p in held], torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.add_(p.grad, alpha=self.rho / (float(length) + 1e-12))
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, value in zip(held, before, strict=True):
            p.copy_(value)
        super().step()
        return loss


class Sam(Classifier):
    def configure_optimizers(self) -> Any:
        return SharpnessAware(self.parameters(), rho=0.05, lr=self.lr, momentum=0.5)


class Target(Classifier):
    """A moving average of the head, written after each step, which the optimizer was given with the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.head)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for mine, theirs in zip(self.target.parameters(), self.head.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * theirs.data


class FrozenTarget(Target):
    def __init__(self) -> None:
        super().__init__()
        self.target.requires_grad_(False)


class Probe(pl.Callback):
    """A linear probe of the features, trained beside the module, with an optimizer and a DDP of its own."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.probe = nn.parallel.DistributedDataParallel(nn.Linear(16, CLASSES))
        self.optimizer = torch.optim.Adam(self.probe.parameters(), lr=0.01)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        x, y = batch
        nn.functional.cross_entropy(self.probe(pl_module.backbone(x).detach()), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class LateProbe(Probe):
    """The same, wrapped where the default process group is the compute group's."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pass

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not hasattr(self, "probe"):
            torch.manual_seed(3)
            super().on_fit_start(trainer, pl_module)


class Lbfgs(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class RawStep(Manual):
    """Steps the raw optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class OwnOptimizer(Manual):
    """Makes its optimizer itself, and tells the Trainer of none."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.own.zero_grad()
        self.manual_backward(self.loss(batch))
        self.own.step()

    def configure_optimizers(self) -> Any:
        return None


class SparseEmbedding(Classifier):
    """An embedding with sparse gradients, beside the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 16, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x) + self.table((x[:, 0] > 0).long()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class SharedParameter(TwoOptimizers):
    """One parameter in two optimizers."""

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.parameters(), lr=self.lr / 2)
        second = torch.optim.SGD(self.head.parameters(), lr=self.lr / 2)
        return [first, second], []

    def lr_schedulers(self) -> Any:
        return []


class Unused(Classifier):
    """A layer that takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


class LateLayer(Classifier):
    """Layers made in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            self.head = nn.Linear(16, CLASSES)


class NoOptimizer(Classifier):
    def configure_optimizers(self) -> Any:
        return None


class Compiled(Classifier):
    """A submodule compiled (eagerly: it is Dynamo's wrapping that matters)."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.compile(self.backbone, backend="eager")


class Data(pl.LightningDataModule):
    """A datamodule that notes its hooks, and has state."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def prepare_data(self) -> None:
        self.notes.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.notes.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.notes.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        self.notes.append("train_dataloader")
        return train_loader()

    def val_dataloader(self) -> Any:
        self.notes.append("val_dataloader")
        return val_loader()

    def test_dataloader(self) -> Any:
        return val_loader()

    def predict_dataloader(self) -> Any:
        return val_loader()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"notes": len(self.notes)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.notes.append("loaded")
