"""For how long does training stand still until groups are formed, and in what part of it?

    OMP_NUM_THREADS=1 python tests/benchmarks/forming.py --ranks 4 --repeats 3
    OMP_NUM_THREADS=1 python tests/benchmarks/forming.py --slow          # as if an all-reduce took long

Real processes on this machine train a perceptron of 396,210 weights, each batch as long as a draw of an exponential
distribution with a mean of 0.1 s, so that an `OmniTuner` forms groups. Printed are medians over the repeats of rank 0's
milliseconds: those of timing messages (the first time, and all), of timing the arithmetic of all-reduce formats, of
joining the server, of forming groups, and all that the tuner counts as its own. With ``--slow`` the all-reduce is taken
for one over slow links, so that formats are timed at all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_omni import OmniStrategy, OmniTuner
from lightning_omni.runtime.membership import Connection
from lightning_omni.tuning.callback.microbenchmarks import Microbenchmarks
from lightning_omni.tuning.callback.online_tuner import FirstBatches
from lightning_omni.tuning.callback.settings import AppliedSetting

STEP = 0.1
"""Seconds of a batch, in the mean."""
PARTS: dict[str, tuple[type, str]] = {
    "timing": (FirstBatches, "seen"),
    "arithmetic": (Microbenchmarks, "time_averaging"),
    "joining": (Connection, "try_to_join"),
    "forming": (AppliedSetting, "form"),
}
SECONDS: dict[str, list[float]] = defaultdict(list)


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose seconds are recorded."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            SECONDS[name].append(time.perf_counter() - began)

    return call


class Perceptron(pl.LightningModule):
    """A perceptron whose batches take random times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 200), nn.ReLU(), nn.Linear(200, 10))
        self._random: torch.Generator | None = None

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self._random is None:
            self._random = torch.Generator().manual_seed(self.global_rank)
        time.sleep(STEP * float(torch.empty(()).exponential_(generator=self._random)))
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def train(ranks: int, is_slow: bool) -> None:
    """One run, whose parts rank 0 prints in one line."""
    for name, (owner, method) in PARTS.items():
        setattr(owner, method, timed(name, getattr(owner, method)))
    if is_slow:
        Microbenchmarks.reduce_per_byte = property(lambda self: 1e-6)  # type: ignore[assignment]
    torch.manual_seed(0)
    images = torch.randn(ranks * 16 * 300, 784)
    labels = (images @ torch.randn(784, 10)).argmax(1)
    tuner = OmniTuner(budget=0.9, space={"groups": [1, ranks]})
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=OmniStrategy(),
        callbacks=[tuner],
        max_steps=60,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Perceptron(), DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True))
    if trainer.is_global_zero:
        own = sum(search.overhead for search in tuner.searches)
        chosen = str(tuner.searches[-1].choice().setting)
        print("\n" + json.dumps({**SECONDS, "tuner": [own], "setting": chosen}), flush=True)


def main() -> None:
    """Prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slow", action="store_true", help="take the all-reduce for one over slow links")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        torch.set_num_threads(1)
        train(given.ranks, given.slow)
        return
    found = []
    for _ in range(given.repeats):
        command = [sys.executable, __file__, "--one", "--ranks", str(given.ranks), *["--slow"] * given.slow]
        ended = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
        found.append(json.loads(next(line for line in reversed(ended.stdout.splitlines()) if line.startswith("{"))))
    print("first timing, all timing, arithmetic, joining, forming, all of the tuner's, in ms")
    columns = [[each["timing"][0] for each in found]]
    columns += [[sum(each.get(name, ())) for each in found] for name in (*PARTS, "tuner")]
    print(", ".join(f"{1e3 * statistics.median(column):.0f}" for column in columns))
    print(*{each["setting"] for each in found}, sep="\n")


if __name__ == "__main__":
    main()
