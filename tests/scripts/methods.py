"""Trains with one method after another in the same processes, and reports for each what every rank ended with."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from common import FOLDER, OPTIONS, Net, digest, loaders, omni, pl, report, trainer
from torch import Tensor
from values import values_in

from lightning_omni.methods import REGISTRY

RANK = int(os.environ.get("LOCAL_RANK", 0))


class MethodNet(Net):
    """Without BatchNorm, so that a record of the exchanges is a record of everything; some ranks may be slow."""

    def __init__(self, optimizer: dict[str, Any], sleep: float) -> None:
        super().__init__(norm=False)
        self.batches = 0
        self.choice, self.sleep = dict(optimizer), sleep
        self.spread: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.sleep)
        self.batches += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        choice = {"kind": "SGD", "lr": 0.05, **self.choice}
        return getattr(torch.optim, choice.pop("kind"))(self.parameters(), **choice)

    def on_validation_start(self) -> None:
        self.spread.append(digest(self))


class AfterBatches(pl.Callback):
    """Forms other groups after so many batches, or stops the run, or dies; keeps the optimizers' last state."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.regroup, self.die = options.get("regroup", {}), options.get("die", {})
        self.stop = options.get("stop", {})
        self.state = ""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        number = trainer.fit_loop.total_batch_idx + 1
        self.state = digest_of_states(trainer)
        if groups := self.regroup.get(str(number)):
            trainer.strategy.regroup(groups)
        if number == self.stop.get(str(RANK)):
            trainer.should_stop = True
        if number == self.die.get(str(RANK)):
            os.kill(os.getpid(), signal.SIGKILL)


def fit(options: dict[str, Any]) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    method = REGISTRY.from_wire(options["method"])
    record = str(FOLDER / options["record"]) if "record" in options else None
    given = {"groups": options.get("groups", 2), "method": method, **options.get("strategy", {})}
    given["server"] = {"record": record, **given.get("server", {})}
    strategy = omni.OmniStrategy(**values_in(given))
    net = MethodNet(options.get("optimizer", {}), options.get("sleep", {}).get(str(RANK), 0.0))
    start, initial = digest(net), plain_weights(net)
    after_batches = AfterBatches(options)
    callbacks: list[Any] = [after_batches]
    if "checkpoint" in options:
        callbacks.append(pl.callbacks.ModelCheckpoint(FOLDER / options["checkpoint"], save_top_k=-1))
    settings = {"enable_checkpointing": "checkpoint" in options, **options.get("trainer", {})}
    run = trainer(strategy, options.get("devices", 4), callbacks=callbacks, **settings)
    error = ""
    try:
        run.fit(
            net,
            *loaders(**options.get("data", {})),
            ckpt_path=FOLDER / options["resume"] if "resume" in options else None,
        )
    except Exception as problem:
        if not options.get("expect_error"):
            raise
        error = f"{type(problem).__name__}: {problem}"
    result: dict[str, Any] = {
        "error": error,
        "start": start,
        "end": digest(net),
        "evaluated": net.spread,
        "batches": net.batches,
        "state": digest_of_states(run),
        "state in training": after_batches.state,
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "initial": initial,
        "weights": plain_weights(net),
        "record": record,
    }
    if not error:
        summary = strategy.report()
        result["report"] = {name: getattr(summary, name) for name in summary.__dataclass_fields__}
    return result


def plain_weights(net: Any) -> dict[str, Any]:
    """The weights as numbers, on rank 0."""
    return {name: value.tolist() for name, value in net.state_dict().items()} if RANK == 0 else {}


def digest_of_states(run: Any) -> str:
    """All bits of the optimizers' states on this rank."""
    module = torch.nn.Module()
    tensors = [
        value
        for optimizer in run.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    for number, value in enumerate(tensors):
        module.register_buffer(str(number), value)
    return digest(module)


if __name__ == "__main__":
    report(RANK, [fit(dict(options)) for options in OPTIONS["fits"]])
