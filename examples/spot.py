"""Train with groups that come and go: one is killed, another joins, and every sample of the epochs is trained.

    python examples/spot.py            # about a minute on two cores
    python examples/spot.py --short    # about twenty seconds

This script does the work of a cluster of spot machines. It starts ``lightning-omni serve``, and then groups of two
ranks, each by the same command, ``python examples/spot.py --group``: two at the beginning, of which one is killed, as
by a preemption without notice, and then a third one. No group knows of another. The training script is
`train`: an ordinary one, with ``OmniStrategy(server=address, elastic=True)``.

Look at the order of the lines: the run continues while a group is missing, the third group receives the run's weights
and trains from the current batch on. In each later epoch the batches of all groups add up to 94, one pass over the
data. Output on two cores which other programs used, too (starting two ranks took half a minute there):

      0.0 s  server is started
      0.0 s  group A is started
      0.1 s  group B is started
     16.1 s  server: parameter server on tcp://127.0.0.1:44657, key from the environment
     51.5 s  group A: trains, from step 0 of epoch 0 on
     51.6 s  server: ranks 0 to 1 joined from 127.0.0.1
     51.6 s  server: 1 group formed (0): AsyncSGD(staleness_aware=False, bound=None)
     53.3 s  group B: trains, from step 0 of epoch 0 on
     53.4 s  server: ranks 2 to 3 joined from 127.0.0.1
     53.4 s  server: group 1 takes part: ranks 2 to 3
     55.4 s  group B is killed
     55.4 s  group C is started
     56.1 s  server: ranks 2 to 3 lost: rank 3 is gone without a goodbye: its process or its machine failed
     75.5 s  group A: val_accuracy 79.2% after epoch 0
     75.5 s  group A: has trained 87 batches a rank in epoch 0
     83.3 s  group C: trains, from step 87 of epoch 1 on
     83.5 s  server: ranks 4 to 5 joined from 127.0.0.1
     83.5 s  server: group 2 takes part: ranks 4 to 5
     92.2 s  group A: val_accuracy 87.7% after epoch 1
     92.3 s  group A: has trained 62 batches a rank in epoch 1
     92.3 s  group C: has trained 32 batches a rank in epoch 1
    104.9 s  group A: val_accuracy 86.7% after epoch 2
    105.0 s  group A: has trained 47 batches a rank in epoch 2
    105.0 s  group C: has trained 47 batches a rank in epoch 2
    105.1 s  server: ranks 1, 4 to 5 left in good order
    105.1 s  server: rank 0 left in good order
    105.1 s  server: a run is over: 282 updates, ranks lost: 2
    105.1 s  server: parameter server stopped
"""

import argparse
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightning_omni import OmniStrategy

console = Console(soft_wrap=True, highlight=False)

# --- A training script, the same for all groups ----------------------------------------------------------------------


class Classifier(LightningModule):
    """A small network for the digits of scikit-learn; its emulated device takes a quarter of a second for a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.accuracy = MulticlassAccuracy(10)
        self.batches = 0

    @override
    def on_train_start(self) -> None:
        if self.trainer.local_rank == 0:
            console.print(f"    trains, from step {self.trainer.global_step} of epoch {self.trainer.current_epoch} on")

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.25)
        self.batches += 1
        return cross_entropy(self.network(batch[0]), batch[1])

    @override
    def on_train_epoch_end(self) -> None:
        if self.trainer.local_rank == 0:
            console.print(f"    has trained {self.batches} batches a rank in epoch {self.trainer.current_epoch}")
        self.batches = 0

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.accuracy(self.network(batch[0]), batch[1])
        self.log("val_accuracy", self.accuracy)

    @override
    def on_validation_epoch_end(self) -> None:
        accuracy = self.accuracy.compute()
        if self.trainer.is_global_zero:
            console.print(f"    val_accuracy {accuracy:.1%} after epoch {self.trainer.current_epoch}")

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)


def train(address: str, ranks: int, epochs: int) -> None:
    """Train as one group of the run at ``address``."""
    seed_everything(0, verbose=False)
    digits = load_digits()
    columns, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train_set, validation_set = TensorDataset(columns[300:], labels[300:]), TensorDataset(columns[:300], labels[:300])
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=OmniStrategy(server=address, elastic=True),
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Classifier(), DataLoader(train_set, 8, shuffle=True), DataLoader(validation_set, 100))


DATE = re.compile(r"^\d{4}-\d\d-\d\d [\d:]+ ")
"""The beginning of a line of the server's log."""

# --- The cluster -----------------------------------------------------------------------------------------------------


class Cluster:
    """A server, and groups that are started and killed; all output is printed with its origin and its time."""

    def __init__(self, folder: Path, ranks: int, epochs: int) -> None:
        self.folder, self.ranks, self.epochs = folder, ranks, epochs
        self.began = time.monotonic()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.environment = {**os.environ, "LIGHTNING_OMNI_KEY": secrets.token_hex(32), "PYTHONUNBUFFERED": "1"}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.read: dict[str, int] = {}

    def start(self, name: str, *command: str) -> None:
        """Start a process whose output goes to a file."""
        self.note(f"{name} is started")
        with (self.folder / name).open("wb") as output:
            self.running[name] = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def start_server(self) -> None:
        """Start a server for one run."""
        self.start("server", sys.executable, "-m", "lightning_omni", "serve", "--once", "--port", str(self.port))

    def start_group(self, name: str) -> None:
        """Start a group."""
        address = f"tcp://127.0.0.1:{self.port}"
        options = "--ranks", str(self.ranks), "--epochs", str(self.epochs)
        self.start(name, sys.executable, __file__, "--group", address, *options)

    def kill(self, name: str) -> None:
        """Kill all ranks of a group at once."""
        os.killpg(self.running.pop(name).pid, signal.SIGKILL)
        self.note(f"{name} is killed")

    def wait_for(self, text: str, name: str) -> None:
        """Wait until a process has printed a text, or has ended."""
        while text not in (self.folder / name).read_text(errors="replace") and self.running[name].poll() is None:
            self.wait(0.2)

    def wait(self, seconds: float) -> None:
        """Print new output while time passes."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.1)
            for name in list(self.running):
                lines = (self.folder / name).read_text(errors="replace").splitlines()
                for line in lines[self.read.get(name, 0) :]:
                    if line.startswith("    ") or name == "server":
                        self.note(f"{name}: {DATE.sub('', line).strip()}")
                self.read[name] = len(lines)

    def wait_for_the_end(self) -> None:
        """Wait until all processes have ended, and fail if one of them has."""
        while any(each.poll() is None for each in self.running.values()):
            self.wait(0.2)
        self.wait(0.2)
        if failed := [name for name, each in self.running.items() if each.returncode]:
            sys.exit(f"failed: {failed}\n{(self.folder / failed[0]).read_text()}")

    def note(self, text: str) -> None:
        """Print a line with the seconds since the beginning."""
        console.print(f"{time.monotonic() - self.began:5.1f} s  {text}")


def main() -> None:
    """Run as one group, or as the cluster."""
    parser = argparse.ArgumentParser(description="Train with groups that come and go.")
    parser.add_argument("--group", metavar="ADDRESS", help="train as one group of the run at this server")
    parser.add_argument("--ranks", type=int, default=2, help="of each group")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data by all groups together")
    parser.add_argument("--short", action="store_true", help="groups of one rank, one epoch")
    arguments = parser.parse_args()
    if arguments.group:
        train(arguments.group, arguments.ranks, arguments.epochs)
        return

    if arguments.short:
        arguments.ranks, arguments.epochs = 1, 1
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), arguments.ranks, arguments.epochs)
        cluster.start_server()
        cluster.start_group("group A")
        cluster.start_group("group B")
        cluster.wait_for("trains, from", "group B")
        cluster.wait(2)
        cluster.kill("group B")
        cluster.start_group("group C")
        cluster.wait_for_the_end()


if __name__ == "__main__":
    main()
