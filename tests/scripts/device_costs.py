"""Trains on emulated devices, counts copies and waits in a step, and compares the timers with the devices' clock."""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from common import OPTIONS, InTime, digest, omni, pl, report, trainer
from devices import own_device
from emulated_cuda import device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from values import values_in

from lightning_omni.group.core import GroupCore
from lightning_omni.runtime import group_exchange
from lightning_omni.runtime.model import replica
from lightning_omni.runtime.model.sharded import is_sharded
from lightning_omni.wire.formats import base, error_feedback

RANK = int(os.environ.get("LOCAL_RANK", 0))
FIRST, LAST = 4, 12
"""The batches before which counting and timing begins and ends: by then all that is made once is there."""
CYCLES_PER_MS = 1_000_000


class Net(pl.LightningModule):
    """Some layers of equal size; the device is busy for a while with each batch.

    Args:
        layers: their number; with 30 of them, the model has 60 parameters and 7.5 MB.
        width: features in and out of each.
        busy: milliseconds.
        rates: whether each layer has a learning rate of its own, on the device.
    """

    def __init__(self, layers: int = 30, width: int = 250, busy: int = 0, rates: bool = False) -> None:
        super().__init__()
        self.rates = rates
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.busy = busy

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.busy:
            torch.cuda._sleep(self.busy * CYCLES_PER_MS)
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        rates = [torch.tensor(0.01, device=self.device) if self.rates else 0.01 for _ in self.layers]
        return torch.optim.SGD([{"params": a.parameters(), "lr": b} for a, b in zip(self.layers, rates, strict=True)])


class Measures(pl.Callback):
    """Measures what happens between two batches of the last epoch, on the device and on the host.

    Args:
        merges: whether the ranks are one group from the second epoch on.
    """

    def __init__(self, merges: bool = False) -> None:
        self.merges = merges
        self.counts: dict[str, float] = {}
        self.nbytes = 0
        self.steps: list[tuple[float, float, float]] = []
        self.exchanges: list[tuple[float, float]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        world = getattr(trainer.strategy, "world", None)
        if world is not None:
            self._time_exchanges(world.exchange)
            self._time_steps()

    def _time_exchanges(self, channel: Any) -> None:
        """Note how long each exchange takes, from the moment at which the device has done what it was given before."""
        timed = channel.timed

        @contextmanager
        def noted() -> Iterator[None]:
            began, before = device.moment(-1), channel.traffic.seconds
            with timed():
                yield
            ended = device.moment(-1)
            self.exchanges.append((channel.traffic.seconds - before, ended - began))

        channel.timed = noted

    def _time_steps(self) -> None:
        """Note the time of each step, when the device ends it, and what exchanges have taken by then."""
        step_took = GroupCore.step_took

        def noted(core: GroupCore, optimizer: int, seconds: float) -> None:
            self.steps.append((seconds, device.moment(-1), sum(true for _, true in self.exchanges)))
            step_took(core, optimizer, seconds)

        GroupCore.step_took = noted
        self._end = lambda: setattr(GroupCore, "step_took", step_took)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.merges and trainer.current_epoch == 1:
            trainer.strategy.regroup(1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if hasattr(self, "_end"):
            self._end()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            self.nbytes = sum(local_of(each).nbytes for each in pl_module.parameters())
            device.reset_peak()
            self._before = device.counts()
        if batch_idx == LAST:
            after = device.counts()
            self.counts = {name: (after[name] - self._before[name]) / (LAST - FIRST) for name in after}
            self.counts["peak"] = after["peak"]

    @property
    def step_times(self) -> dict[str, float]:
        """Seconds of a step without its exchanges: as the package measures them, and by the device's clock."""
        if len(self.steps) < LAST:
            return {}
        # From an exchange to an exchange, of which there may be one in two steps: else the host is ahead at one end.
        (_, began, before), *_, (_, ended, after) = among = self.steps[FIRST - 1 : LAST]
        spans = len(among) - 1
        return {
            "measured": sum(seconds for seconds, *_ in among[1:]) / spans,
            "true": (ended - began - (after - before)) / spans,
        }

    @property
    def exchange_times(self) -> dict[str, float]:
        """Seconds of an exchange, likewise."""
        among = self.exchanges[FIRST // 2 :]
        if not among:
            return {}
        measured, true = zip(*among, strict=True)
        return {"measured": statistics.median(measured), "true": statistics.median(true)}


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fit(strategy: Any, model: dict[str, Any] | None = None, merges: bool = False, **options: Any) -> dict[str, Any]:
    """Train, and return counts and times of a step of this rank."""
    pl.seed_everything(1, verbose=False)
    gc.collect()
    before = device.counts()["allocated"]  # an earlier fit may have left some
    net, measures = Net(**(model or {})), Measures(merges)
    width = net.layers[0].in_features
    loader = DataLoader(TensorDataset(torch.randn(4 * (LAST + 2) * OPTIONS["devices"], width)), batch_size=4)
    chosen = strategy if isinstance(strategy, str) else omni.OmniStrategy(**values_in(strategy), data="static")
    callbacks = [measures, *([] if isinstance(strategy, str) else [InTime()])]
    run = trainer(chosen, OPTIONS["devices"], callbacks=callbacks, **options)
    run.fit(net, loader)
    measures.counts["peak"] -= before
    return {
        "counts": measures.counts,
        "nbytes": measures.nbytes,
        "step": measures.step_times,
        "exchange": measures.exchange_times,
        "weights": digest(net) if not is_sharded(net) else None,
        "device": str(own_device()),
    }


def use_chunks(nbytes: int) -> None:
    """Let an exchange copy in smaller chunks, so that a small model has several of them."""
    for module in (base, error_feedback, group_exchange):
        module.CHUNK = nbytes
    error_feedback.AT_ONCE, replica._AT_ONCE = nbytes // 16, nbytes // 4


if __name__ == "__main__":
    if "chunk" in OPTIONS:
        use_chunks(OPTIONS["chunk"])
    report(RANK, {name: fit(**options) for name, options in OPTIONS["fits"].items()})
