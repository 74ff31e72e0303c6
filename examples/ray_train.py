"""Train on the workers of Ray Train: two groups with Ray's checkpoints, then workers that Ray replaces one by one.

    python examples/ray_train.py            # about a minute on two cores
    python examples/ray_train.py --short    # the same, with fewer epochs

It starts a local cluster of Ray with two workers, each of which is a group. The first part reports each epoch to Ray,
with a checkpoint, as with RayDDPStrategy. In the second part one worker is killed: with ``elastic_torch_config`` the
other trains on, Ray starts a worker in its place, and that one joins the run.

Look at the second part: the run does not start again, and the batches that the workers have trained in the last epoch
add up to its 100. Output, without a line of Ray on the death of its worker:

    Two groups, with Ray's checkpoints
    worker 0, process 8148: trains, from epoch 0 on
    worker 1, process 8218: trains, from epoch 0 on
    worker 0, process 8148: has trained 55 batches in epoch 0
    worker 1, process 8218: has trained 45 batches in epoch 0
    worker 0, process 8148: has trained 72 batches in epoch 1
    worker 1, process 8218: has trained 28 batches in epoch 1
    worker 0, process 8148: has trained 68 batches in epoch 2
    worker 1, process 8218: has trained 32 batches in epoch 2
    worker 1, process 8218: has trained 46 batches in epoch 3
    worker 0, process 8148: has trained 54 batches in epoch 3
    worker 0, process 8148: has trained 51 batches in epoch 4
    worker 1, process 8218: has trained 49 batches in epoch 4
    loss 0.19 after epoch 4, checkpoint loaded

    Workers that are replaced one by one
    worker 1, process 10052: trains, from epoch 0 on
    worker 0, process 10011: trains, from epoch 0 on
    worker 1, process 10052: is killed
    worker 1, process 11672: trains, from epoch 0 on
    worker 1, process 11672: has trained 62 batches in epoch 0
    worker 0, process 10011: has trained 36 batches in epoch 0
    worker 1, process 11672: has trained 51 batches in epoch 1
    worker 0, process 10011: has trained 49 batches in epoch 1
    worker 1, process 11672: has trained 59 batches in epoch 2
    worker 0, process 10011: has trained 41 batches in epoch 2
    worker 0, process 10011: has trained 53 batches in epoch 3
    worker 1, process 11672: has trained 47 batches in epoch 3
    worker 1, process 11672: has trained 44 batches in epoch 4
    worker 0, process 10011: has trained 56 batches in epoch 4
"""

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_omni.ray import RayOmniStrategy, elastic_torch_config

try:  # Ray uses this namespace if both are installed
    from lightning.pytorch import LightningModule, Trainer, seed_everything
except ImportError:
    from pytorch_lightning import LightningModule, Trainer, seed_everything  # type: ignore[assignment]

BATCHES = 100
console = Console(soft_wrap=True, highlight=False)


class Classifier(LightningModule):
    """A small network for the digits of scikit-learn, which notes in a folder what its worker does.

    Args:
        folder: where the notes are.
        dies: whether the second worker is killed in the first epoch. Batches then take a second until there is another.
    """

    def __init__(self, folder: str, dies: bool) -> None:
        super().__init__()
        self.folder, self.dies, self.batches = Path(folder), dies, 0
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def note(self, text: str) -> None:
        """Append a line to the notes."""
        with (self.folder / "notes").open("a") as notes:
            rank = ray.train.get_context().get_world_rank()
            notes.write(f"worker {rank}, process {os.getpid()}: {text}\n")

    @override
    def on_train_start(self) -> None:
        self.note(f"trains, from epoch {self.trainer.current_epoch} on")
        if (self.folder / "killed").exists():
            (self.folder / "replaced").touch()

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.batches += 1
        if self.dies and not (self.folder / "replaced").exists():
            time.sleep(1)
            if ray.train.get_context().get_world_rank() == 1 and self.batches == 3:
                self.note("is killed")
                (self.folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    @override
    def on_train_epoch_end(self) -> None:
        self.note(f"has trained {self.batches} batches in epoch {self.trainer.current_epoch}")
        self.batches = 0

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)


def train(config: dict[str, Any]) -> None:
    """Train on one worker."""
    seed_everything(0, verbose=False)
    digits = load_digits()
    columns, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    table = TensorDataset(columns[: 16 * BATCHES], labels[: 16 * BATCHES])
    elastic = config["elastic"]
    strategy: Any = RayOmniStrategy() if elastic else RayOmniStrategy(groups=2)
    trainer = Trainer(
        strategy=strategy,
        plugins=[RayLightningEnvironment()],
        accelerator="auto",
        devices="auto",
        max_epochs=config["epochs"],
        callbacks=[] if elastic else [RayTrainReportCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    prepare_trainer(trainer).fit(Classifier(config["folder"], dies=elastic), DataLoader(table, 16, shuffle=True))


def run(folder: Path, epochs: int, elastic: bool) -> ray.train.Result:
    """Train on two workers, print their notes, and return Ray's result."""
    folder.mkdir()
    result = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "epochs": epochs, "elastic": elastic},
        torch_config=elastic_torch_config() if elastic else None,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "results"), failure_config=FailureConfig(max_failures=1)),
    ).fit()
    console.print((folder / "notes").read_text().rstrip())
    return result


def main() -> None:
    """Run both parts on a cluster of this machine."""
    parser = argparse.ArgumentParser(description="Train on the workers of Ray Train.")
    parser.add_argument("--short", action="store_true", help="fewer epochs")
    epochs = 2 if parser.parse_args().short else 5
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory() as folder:
        console.print("Two groups, with Ray's checkpoints")
        result = run(Path(folder, "reported"), epochs, elastic=False)
        assert isinstance(result.checkpoint, Checkpoint)
        with result.checkpoint.as_directory() as directory:
            saved = torch.load(Path(directory, RayTrainReportCallback.CHECKPOINT_NAME), weights_only=False)
        Classifier("", dies=False).load_state_dict(saved["state_dict"])
        console.print(f"loss {result.metrics['loss']:.2f} after epoch {saved['epoch']}, checkpoint loaded")
        console.print("\nWorkers that are replaced one by one")
        run(Path(folder, "elastic"), epochs, elastic=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
