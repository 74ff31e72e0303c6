"""Trains a tiny regression on two processes a node, and prints what came of it. Run by tests, under any launcher.

python regression.py [--groups 2] [--nodes 1] [--server tcp://host:port] [--epochs 2] [--pace 0.0]
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

gc.disable()  # what is imported stays: to look for garbage in it takes as long as to import it

import pytorch_lightning as pl
import spares
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_omni import Elastic
from lightning_omni.strategy.pytorch_lightning import OmniStrategy

gc.freeze()
gc.enable()
spares.prepare(ranks=int(os.environ.get("OMNI_TEST_SPARES", 0)), servers=0)
TRUTH = torch.tensor([[1.0], [-2.0], [0.5], [3.0]])


def say(line: str) -> None:
    """In one write, for the ranks share their output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Witness(pl.Callback):
    """Says when training is under way, takes its time, and remembers what is gone when the run is over."""

    def __init__(self, pace: float) -> None:
        self.pace = pace
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, OmniStrategy)
        assert strategy.world is not None
        if not self.seen:
            say(f"rank {trainer.global_rank} trains, pid {os.getpid()}")
        self.seen = {
            "server": strategy.world.server_address,
            "groups": strategy.world.topology.groups,
            "steps": trainer.global_step,
        }
        time.sleep(self.pace)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--server")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--heartbeat-timeout", type=float, default=30.0)
    parser.add_argument("--wire", default="fp32")
    options = parser.parse_args()
    if options.wire == "largest":  # which is none of the package's
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        importlib.import_module("topk")

    pl.seed_everything(1)
    inputs = torch.randn(384, 4)
    loader = DataLoader(TensorDataset(inputs, inputs @ TRUTH), batch_size=8, shuffle=True)
    strategy = OmniStrategy(
        groups=options.groups,
        server=options.server,
        elastic=Elastic(heartbeat=options.heartbeat_timeout),
        compression=options.wire,
    )
    witness = Witness(options.pace)
    trainer = pl.Trainer(
        accelerator=ACCELERATOR,
        devices=2,
        num_nodes=options.nodes,
        strategy=strategy,
        max_epochs=options.epochs,
        callbacks=[witness],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    trainer.fit(model, loader)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    report = strategy.report()
    result = {
        **witness.seen,
        "updates": report.updates,
        "lost": report.ranks_lost,
        "error": float((model.layer.weight.detach().cpu().T - TRUTH).abs().max()),
        "weights": hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest(),
    }
    say(f"rank {trainer.global_rank} results in {json.dumps(result)}")


if __name__ == "__main__":
    main()
