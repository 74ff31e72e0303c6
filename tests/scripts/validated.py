"""What benchmarks take for the weights to validate, at the last batch of an epoch, beside those that are validated."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from common import FOLDER, OPTIONS, Net, loaders, omni, pl, report, trainer
from torch import Tensor
from validated import ValidatedWeights

from lightning_omni.methods import REGISTRY

RANK = int(os.environ.get("LOCAL_RANK", 0))


class Compares(pl.Callback):
    """Rank 0 reads them when the other group has trained its last batch, and before its own has ended the epoch."""

    def __init__(self, number: int, times: int) -> None:
        self.times = times
        self.own, self.ended = FOLDER / f"own-{number}", FOLDER / f"ended-{number}"
        self.pairs: list[Any] = []
        self.read: list[Tensor] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.validated = ValidatedWeights(self.own, pl_module, 2)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.validated.leave_own(RANK)
        if not trainer.is_last_batch:
            return
        with self.ended.open("r" if RANK == 0 else "w") as ended:  # a pipe: either waits for the other
            ended.read() if RANK == 0 else ended.write("ended")
        if RANK == 0:
            found = [self.validated.read(trainer.strategy) for _ in range(self.times)][-1]
            self.read = None if found is None else [each.clone() for each in found]

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        weights = [each.detach().flatten().tolist() for each in pl_module.parameters()]
        self.pairs.append([self.read and [each.flatten().tolist() for each in self.read], weights])


def main() -> None:
    results = []
    for number, given in enumerate(OPTIONS["fits"]):
        pl.seed_everything(3, verbose=False)
        method = REGISTRY.from_wire(given["method"])
        comparing = Compares(number, given.get("times", 1))
        strategy = omni.OmniStrategy(groups=2, method=method, data="static", **given.get("strategy", {}))
        run = trainer(strategy, 2, callbacks=[comparing], num_sanity_val_steps=0)
        run.fit(Net(norm=False), *loaders())
        results.append(comparing.pairs)
        report(RANK, results)


if __name__ == "__main__":
    if RANK == 0:
        for number in range(len(OPTIONS["fits"])):
            os.mkfifo(FOLDER / f"ended-{number}")
    main()
