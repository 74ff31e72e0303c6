"""Trains until it is told to end, by signals that come from elsewhere; leaves its process number, and what it saved."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import torch
from common import FOLDER, OPTIONS, Net, loaders, omni, pl, report, trainer
from torch import Tensor
from values import values_in

import lightning_omni.strategy.checkpoints as saving
import lightning_omni.strategy.launcher as launcher
import lightning_omni.strategy.signals as signals

RANK = int(os.environ.get("SLURM_PROCID", os.environ.get("LOCAL_RANK", 0)))


class SlowNet(Net):
    """Says when it trains, and can be blocked in a step."""

    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        if self.steps == OPTIONS.get("block", {}).get(str(RANK)):
            (FOLDER / f"blocked{RANK}").touch()
            time.sleep(600)
        time.sleep(0.01)
        if self.steps == OPTIONS.get("raise_at", {}).get(str(RANK)):
            raise ValueError("something is wrong with this batch")
        if self.steps == OPTIONS.get("ready", 5):
            (FOLDER / f"ready{RANK}").write_text(str(os.getpid()))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        if "model_parallel" not in OPTIONS.get("strategy", {}):
            return super().configure_optimizers()
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.05, momentum=0.9)


class Notes(pl.Callback):
    """What a user's callback sees when the run ends."""

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        name = type(exception).__name__
        seen = {"exception": name, "received": trainer.received_sigterm, "step": trainer.global_step}
        report(RANK, {**seen, "world": torch.distributed.get_world_size()})


class Waiting(logging.Handler, pl.Callback):
    """Calls a barrier with its third batch, on rank 1 only once rank 0 has said that it waits for it."""

    batches = 0

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if RANK == 0 and "on_train_batch_end" in message:  # on a busy machine any rank may wait long for another
            (FOLDER / "said").write_text(message)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.batches += 1
        if self.batches == 3:
            deadline = time.monotonic() + 60
            while RANK == 1 and not (FOLDER / "said").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            trainer.strategy.barrier()


class InterruptedAtEnd(pl.plugins.Precision):
    """Ctrl-C comes when the fit is over and the ranks take leave of each other."""

    def teardown(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)


class TerminatedAtStart(pl.Callback):
    """SIGTERM comes to rank 1 when Lightning's handlers are there, and no batch yet, after a start that took long."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if RANK == 1:
            trainer.strategy.parts.signals._progress -= 100
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.6)  # others look at it meanwhile


class TerminatedAfterLastBatch(pl.Callback):
    """SIGTERM comes to rank 1 when the last epoch has no batch left."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.2)  # others hear of it meanwhile


class TerminatedAtEnd(pl.plugins.Precision):
    """SIGTERM comes to rank 1 when it takes leave of rank 0, which is not as far."""

    def teardown(self) -> None:
        (FOLDER / f"leaves{RANK}").touch()
        deadline = time.monotonic() + 60
        while RANK == 0 and not (FOLDER / "leaves1").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        if RANK == 0:
            time.sleep(0.3)
            os.kill(int((FOLDER / "ready1").read_text()), signal.SIGTERM)
            time.sleep(0.3)


class SlowDisk(pl.plugins.TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        time.sleep(OPTIONS["slow_disk"])
        super().save_checkpoint(*args, **options)


def main() -> None:
    pl.seed_everything(1, verbose=False)
    signals.GRACE = OPTIONS.get("grace", signals.GRACE)
    saving.SAVING = OPTIONS.get("saving", saving.SAVING)
    launcher.GRACE = OPTIONS.get("grace", launcher.GRACE)
    callbacks: list[Any] = [
        Notes(),
        pl.callbacks.OnExceptionCheckpoint(FOLDER, "exception"),
        pl.callbacks.ModelCheckpoint(FOLDER, "model", save_on_exception=True, save_top_k=0),
    ]
    if OPTIONS.get("long_wait"):
        signals.LONG_WAIT = OPTIONS["long_wait"]
        callbacks.append(Waiting())
        logging.getLogger(signals.__name__).addHandler(callbacks[-1])
    strategy = omni.OmniStrategy(**values_in(OPTIONS.get("strategy", {})))
    options = {"max_epochs": 500, "enable_checkpointing": True, **OPTIONS.get("trainer", {})}
    if OPTIONS.get("interrupt_at_end"):
        options["plugins"] = InterruptedAtEnd()
    if OPTIONS.get("terminate") == "start":
        callbacks.append(TerminatedAtStart())
    if OPTIONS.get("terminate") == "last batch":
        callbacks.append(TerminatedAfterLastBatch())
    if OPTIONS.get("terminate") == "end":
        options["plugins"] = TerminatedAtEnd()
    if OPTIONS.get("slow_disk"):
        options["plugins"] = SlowDisk()
    run = trainer(strategy, OPTIONS.get("devices", 4), callbacks=callbacks, **options)
    try:
        run.fit(SlowNet(norm=False), *loaders(OPTIONS.get("samples", 256)))
    except SystemExit:
        (FOLDER / f"updates{RANK}").write_text(str(strategy.report().updates))
        raise
    report(RANK, {"exception": "", "step": run.global_step, "handler": str(signal.getsignal(signal.SIGTERM))})


if __name__ == "__main__":
    main()
