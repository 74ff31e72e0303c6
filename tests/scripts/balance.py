"""Trains with ranks of different speed, and compares every gradient with that of the group's whole batch.

Each "fit" in the options is one fit, in order, in the same processes.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import OPTIONS, InTime, Net, dataset, digest, omni, pl, report, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, WeightedRandomSampler
from values import values_in

from lightning_omni.runtime.balance import Balance
from lightning_omni.runtime.timing import HostClock
from lightning_omni.tuning.callback import settings

RANK = int(os.environ.get("LOCAL_RANK", 0))
DATA = dataset(1024)


class Emulated(HostClock):
    """Time that passes when it is told to: measured speeds are exact, whatever else this machine does."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self, instead_of: Any = None) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Paced(Net):
    """Sleeps in proportion to its samples; its speed may change after some batches."""

    def __init__(self, sleep: dict[str, list[float]], clock: Any = time) -> None:
        super().__init__(norm=False)
        self.clock = clock
        self.sleep = {int(batch): per_rank[RANK] for batch, per_rank in sleep.items()}
        self.per_sample, self.batches = 0.0, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.work(len(batch[2]))
        return self.loss(batch)

    def work(self, samples: int) -> None:
        self.per_sample = self.sleep.get(self.batches, self.per_sample)
        self.batches += 1
        self.clock.sleep(self.per_sample * samples)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ByHand(Paced):
    """Two optimizers, stepped by hand."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.work(len(batch[2]))
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        head, body = self.net[-1].parameters(), self.net[:-1].parameters()
        return torch.optim.SGD(head, lr=0.01), torch.optim.SGD(body, lr=0.01)


class Notes(pl.Callback):
    """Notes samples, splits, and by how much a gradient differs from that of the group's batch in one process."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.window: list[list[int]] = []
        self.errors: list[float] = []
        self.samples: list[list[int]] = []
        self.counts: list[int] = []
        self.splits: list[list[int]] = []
        self.groups: list[Any] = []
        self.share = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.samples.append([])
        if shares := self.options.get("shares"):
            trainer.strategy.parts.epochs.leases.set_batch_shares(shares, 0)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.window.append(batch[2].tolist())
        self.counts.append(len(batch[2]))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if not self.options.get("compare", True):
            return
        world = trainer.strategy.world
        windows: list[Any] = [None] * len(world.members)
        dist.all_gather_object(windows, self.window, group=world.compute_group)
        batches = [sorted({sample for part in parts for sample in part}) for parts in zip(*windows, strict=True)]
        self.errors.append(difference(pl_module, optimizer, batches, trainer.accumulate_grad_batches))

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if pl_module.automatic_optimization:
            del self.window[:-1]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.samples[-1] += batch[2].tolist()
        leases = trainer.strategy.parts.epochs.leases
        if leases is not None:
            self.splits.append(list(leases.split))
        if not pl_module.automatic_optimization:
            self.window.clear()
        self.share = float(trainer.callback_metrics.get("omni/share", self.share))
        if how := self.options.get("regroup", {}).get(str(trainer.fit_loop.total_batch_idx + 1)):
            trainer.strategy.regroup(**how)
            self.groups.append(trainer.strategy.world.topology.groups)


def difference(module: Net, optimizer: Any, batches: list[list[int]], accumulated: int) -> float:
    """The largest difference of a gradient from the mean over whole batches, in parts of its largest entry."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    losses: list[Tensor] = []
    for samples in batches:
        x, y, _ = (each.to(module.device) for each in DATA[samples])
        losses.append(nn.functional.cross_entropy(module.net(x) * module.frozen, y))
    with torch.enable_grad():
        plain = torch.autograd.grad(torch.stack(losses).sum() / accumulated, parameters)
    largest = max(float(each.abs().max()) for each in plain)
    return max(float((p.grad - each).abs().max()) for p, each in zip(parameters, plain, strict=True)) / largest


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([DATA[index] for index in range(RANK, 64, 4)])


def make_loader(kind: str, samples: int, **options: Any) -> DataLoader[Any]:
    if kind == "iterable":
        return DataLoader(Stream(), batch_size=8)
    data = torch.utils.data.Subset(DATA, range(samples))
    if kind == "sampler":
        return DataLoader(data, batch_size=8, sampler=WeightedRandomSampler(torch.ones(samples), samples))
    return DataLoader(data, **{"batch_size": 8, "shuffle": True, **options})


class Loader(pl.LightningDataModule):
    """A loader that is made again whenever the Trainer asks."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = {"kind": "", "samples": 256, **options}

    def train_dataloader(self) -> DataLoader[Any]:
        return make_loader(**self.options)


def fit(options: dict[str, Any]) -> dict[str, Any]:
    pl.seed_everything(5, verbose=False)
    strategy = omni.OmniStrategy(**values_in({"groups": 1, **options.get("strategy", {})}))
    notes, clock = Notes(options), Emulated() if options.get("emulated") else None
    if clock and strategy.parts.balance.is_on:
        strategy.parts.balance = Balance("auto", strategy.namespace.info, clock=clock)
    settings.Balance = partial(Balance, clock=clock)  # which a tuner turns on
    module = (ByHand if options.get("by_hand") else Paced)(options.get("sleep", {}), clock or time)
    tuners = [omni.OmniTuner(**options["tuner"])] if "tuner" in options else []
    run = trainer(
        strategy,
        4,
        callbacks=[notes, InTime(), *tuners],
        limit_val_batches=0,
        log_every_n_steps=1,
        **options.get("trainer", {}),
    )
    error = ""
    try:
        run.fit(module, Loader(options.get("data", {})))
    except ValueError as problem:
        if not options.get("expect_error"):
            raise
        error = str(problem)
    return {
        "error": error,
        "errors": notes.errors,
        "samples": notes.samples,
        "counts": notes.counts,
        "splits": notes.splits,
        "groups": notes.groups,
        "share": notes.share,
        "hooks": sum(len(p._backward_hooks or ()) for p in module.parameters()) + len(module._forward_pre_hooks),
        "weights": digest(module),
    }


if __name__ == "__main__":
    report(RANK, [fit(dict(options)) for options in OPTIONS["fits"]])
