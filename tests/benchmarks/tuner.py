"""`OmniTuner` against DDPStrategy at its own best learning rate: seconds to an accuracy, tuning included.

    python tests/benchmarks/tuner.py [--scenarios equal straggler exponential] [--seeds 3] [--quick] [--json FILE]

Four workers train a small network on Fashion-MNIST until 88 % of 5,000 held-out images are right, looked at every
quarter of an epoch. They sleep 2 ms for each sample, 64 ms a batch: what is slow are emulated devices, not the cores.

    equal        all are as fast
    straggler    the last one sleeps four times as long
    exponential  each batch takes 64 ms times an exponentially distributed number; on average all are as fast

The learning rate with which DDPStrategy takes the fewest batches (mean over the seeds, momentum 0.9, no sleeping) is
found first. DDPStrategy trains with it, and OmniTuner starts from it, both with seeds that had no part in choosing it;
they take turns, each run is a script of its own, as a user's is, and both are timed from on_train_start, right before
the first batch, to the end of the validation that reaches the target. (How long it takes from the
script's start to there is told, too.) Promised are medians over the seeds: straggler 2.5 times as soon, exponential 1.6
times, equal at most 10 % later. Which validation is the first at the target is rng: from seed to seed that is half
an epoch more or less, so --seeds 6 tells more than 3. Ends with 1 if one of these is missed. About 30
minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import pytorch_lightning as pl
import torch
from fashion_data import FashionMNIST
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import lightning_omni as omni
from lightning_omni.errors import OmniError

WORKERS, BATCH_SIZE = 4, 32
PER_SAMPLE = 2e-3
"""Seconds that a device of speed 1 takes."""
MOMENTUM = 0.9
RATES = (0.02, 0.05, 0.1, 0.2)
FRESH = 100
"""What the comparison's seeds begin with: with those that chose it, DDPStrategy's rate was lucky."""
SCENARIOS = {"equal": 1 / 1.1, "straggler": 2.5, "exponential": 1.6}
"""The speed-up over DDPStrategy that is promised."""


class Emulated(pl.LightningModule):
    """A small network that takes as long as on the devices of a scenario.

    Args:
        lr: the learning rate.
        scenario: one of `SCENARIOS`; None does not sleep.
        seed: of exponential times.
    """

    def __init__(self, lr: float, scenario: str | None, seed: int) -> None:
        super().__init__()
        self.lr, self.scenario, self.seed = lr, scenario, seed
        # About 1 ms of real work for a batch, and 88 % after two epochs; a perceptron as light takes five or more.
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, stride=2, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.GroupNorm(4, 16),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def on_fit_start(self) -> None:
        self.rng = random.Random(1000 * self.seed + self.global_rank)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.scenario is not None:
            time.sleep(PER_SAMPLE * len(batch[1]) * self._slowness())
        return cross_entropy(self.network(batch[0]), batch[1])

    def _slowness(self) -> float:
        if self.scenario == "exponential":
            return self.rng.expovariate(1.0)
        return 4.0 if self.scenario == "straggler" and self.global_rank == WORKERS - 1 else 1.0

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        right = self.network(batch[0]).argmax(1) == batch[1]
        self.log("val_acc", right.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=MOMENTUM)


class InMemory(Dataset[Any]):
    """Batches cut from two tensors at once: collating sample by sample would be half of the work."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.images[indices], self.labels[indices]


def _as_it_is(batch: Any) -> Any:
    return batch


class Clock(pl.Callback):
    """When the target was reached, and after how many batches."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.seconds = self.steps = math.inf
        self.best = 0.0
        self.ready = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.began, self.ready = time.perf_counter(), time.time()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        accuracy = float(trainer.callback_metrics["val_acc"])
        self.best = max(self.best, accuracy)
        if accuracy >= self.target and self.seconds == math.inf:
            self.seconds, self.steps = time.perf_counter() - self.began, trainer.global_step


@dataclass(frozen=True)
class Outcome:
    """What one run came to; infinite seconds if it did not reach the target. ``ready`` is the time when it began."""

    seconds: float = math.inf
    steps: float = math.inf
    best: float = 0.0
    ready: float = 0.0
    tuning: float = 0.0
    choice: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Pair:
    """DDPStrategy and the tuned run, of one scenario and seed."""

    scenario: str
    seed: int
    ddp: Outcome
    tuned: Outcome

    @property
    def ratio(self) -> float:
        """The speed-up of the tuned run; 0 if it never was."""
        if self.tuned.seconds == math.inf:
            return 0.0
        return self.ddp.seconds / self.tuned.seconds


def main() -> int:
    """Measures and prints."""
    options = parse_arguments()
    if options.task:
        carry_out(options)
        return 0
    rate = options.rates[0] if len(options.rates) == 1 else started({"rate": None}).get("lr")
    if rate is None:
        say("the search for DDPStrategy's own learning rate failed, see above; --rates with one rate goes without")
        return 1
    pairs = []
    say(f"{'scenario':12} seed  DDP s  tuned s (tuning)  ratio  choice")
    for scenario in options.scenarios:
        for seed in range(FRESH, FRESH + options.seeds):
            outcomes = {}
            for tuned in (False, True) if seed % 2 == 0 else (True, False):
                began = time.time()
                found = started({"train": [rate, scenario, seed, tuned]})
                outcomes[tuned] = Outcome(**{**found, "ready": found.get("ready", math.inf) - began})
            pairs.append(Pair(scenario, seed, outcomes[False], outcomes[True]))
            say(line(pairs[-1]))
    ready = [statistics.median(getattr(pair, who).ready for pair in pairs) for who in ("ddp", "tuned")]
    say("from the script's start to the first batch: DDPStrategy {:.1f} s, tuned {:.1f} s".format(*ready))
    if options.json:
        options.json.write_text(json.dumps({"rate": rate, "pairs": [asdict(pair) for pair in pairs]}, indent=2))
    return judge(pairs)


def started(task: dict[str, Any]) -> dict[str, Any]:
    """What this script answers when it is started once more, for one task; nothing if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        subprocess.run([sys.executable, *sys.argv, "--task", json.dumps(task), "--answer", str(answer)], check=False)
        return json.loads(answer.read_text()) if answer.exists() else {"problem": "the script failed"}


def carry_out(options: argparse.Namespace) -> None:
    """A task, on every rank."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.INFO if options.verbose else logging.ERROR)
    torch.set_num_threads(1)
    task = json.loads(options.task)
    answer = asdict(train(options, *task["train"])) if "train" in task else {"lr": best_rate(options)}
    if not rank_zero_only.rank:  # type: ignore[attr-defined]
        options.answer.write_text(json.dumps(answer))


def best_rate(options: argparse.Namespace) -> float:
    """The learning rate with which DDPStrategy needs the fewest batches. All ranks come to the same."""
    needed = {}
    for rate in options.rates:
        runs = [train(options, rate, None, seed, tuned=False) for seed in range(options.seeds)]
        needed[rate] = statistics.mean(run.steps for run in runs)
        each = ", ".join(f"{run.steps:.0f}" for run in runs)
        pace = statistics.mean(1e3 * run.seconds / run.steps for run in runs)
        say(f"DDPStrategy, lr {rate:g}: {needed[rate]:.0f} batches ({each}), {pace:.1f} ms each without sleeping")
    best: float = min(needed, key=lambda rate: needed[rate])
    say(f"lr {best:g}, momentum {MOMENTUM:g} is where both begin")
    return best


def train(options: argparse.Namespace, rate: float, scenario: str | None, seed: int, tuned: bool) -> Outcome:
    """One run to the target."""
    pl.seed_everything(seed, verbose=False)
    clock = Clock(options.target)
    stop = EarlyStopping("val_acc", mode="max", stopping_threshold=options.target, patience=1000)
    tuner = omni.OmniTuner(target=options.target, monitor="val_acc") if tuned else None
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORKERS,
        strategy=omni.OmniStrategy() if tuned else DDPStrategy(),
        callbacks=[clock, stop, *([tuner] if tuner else [])],
        max_epochs=options.epochs,
        val_check_interval=0.25,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    problem = ""
    try:
        trainer.fit(Emulated(rate, scenario, seed), *loaders())
    except OmniError as error:  # on all ranks; the other pairs are worth having
        problem = f"{type(error).__name__}: {str(error)[:120]}"
    if tuner is None or rank_zero_only.rank:  # type: ignore[attr-defined]
        return Outcome(clock.seconds, clock.steps, clock.best, clock.ready, problem=problem)
    chosen = str(tuner.choice.setting) if tuner.choice is not None else tuner.problem
    spent = sum(each.overhead for each in tuner.searches)
    return Outcome(clock.seconds, clock.steps, clock.best, clock.ready, spent, chosen, problem)


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """To train and to validate; read once."""
    if not SETS:
        data = FashionMNIST()
        data.prepare_data()
        data.setup("fit")
        SETS.extend(InMemory(*part.tensors) for part in (data.train_set, data.validation_set))
    train_set, validation_set = SETS
    size = math.ceil(len(validation_set) / WORKERS)
    return (
        DataLoader(train_set, BATCH_SIZE, shuffle=True, drop_last=True, collate_fn=_as_it_is),
        DataLoader(validation_set, size, collate_fn=_as_it_is),
    )


SETS: list[InMemory] = []


def line(pair: Pair) -> str:
    """A row of the table."""
    missed = [
        f"{name} came to {each.best:.1%} only{each.problem and ', and ended with ' + each.problem}"
        for name, each in (("DDPStrategy", pair.ddp), ("tuned", pair.tuned))
        if each.seconds == math.inf
    ]
    return (
        f"{pair.scenario:12} {pair.seed:4} {pair.ddp.seconds:6.1f} {pair.tuned.seconds:8.1f} ({pair.tuned.tuning:6.1f})"
        f" {pair.ratio:6.2f}  {'; '.join([pair.tuned.choice, *missed])}"
    )


def judge(pairs: Sequence[Pair]) -> int:
    """Prints the medians; 1 if a promise is broken."""
    broken = 0
    for scenario in dict.fromkeys(pair.scenario for pair in pairs):
        ratios = [pair.ratio for pair in pairs if pair.scenario == scenario]
        median, promised = statistics.median(ratios), SCENARIOS[scenario]
        kept = median >= promised
        broken += not kept
        say(
            f"{scenario}: {median:.2f} times faster than DDPStrategy ({min(ratios):.2f} to {max(ratios):.2f});"
            f" {promised:.2f} is promised{'' if kept else ': MISSED'}"
        )
    return int(broken > 0)


@rank_zero_only
def say(text: str) -> None:
    """Prints once, at once."""
    print(text, flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line; every rank does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    add("--seeds", type=int, default=3, help="how many")
    add("--rates", type=float, nargs="+", default=list(RATES), help="learning rates of DDPStrategy; one is taken as is")
    add("--target", type=float, default=0.88, help="part of the held-out images that is right")
    add("--epochs", type=int, default=3, help="at most")
    add("--quick", action="store_true", help="one seed to 80 %% with lr 0.05: does it run at all?")
    add("--verbose", action="store_true", help="what the tuner says, too")
    add("--json", type=Path, help="file for all numbers")
    add("--task", default="", help=argparse.SUPPRESS)
    add("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.rates, options.target, options.epochs = 1, [0.05], 0.80, 2
    return options


if __name__ == "__main__":
    sys.exit(main())
