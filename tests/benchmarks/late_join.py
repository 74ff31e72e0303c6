"""A group joins a run of 100 MB of weights: how long until it computes, and what does that cost the other group?

    python tests/benchmarks/late_join.py --megabytes 100 --rounds 3

One group trains; another is started on the other core, joins, trains for a while, and leaves by SIGTERM; then one more.
Printed are, as medians over the rounds, seconds from when the model is built to the first batch, and of these until
the server has taken it in; and the batches a second of the first group between its last one before and its first one
after the other has joined, against those of the ten before. These are one or two batches in each round, so that they
are added up over all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 120.0
"""Seconds that anything may take."""


def train(folder: Path, name: str, megabytes: int, step: float) -> None:
    """One group, which notes down when what happened."""
    import pytorch_lightning as pl
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_omni import OmniStrategy

    torch.set_num_threads(1)
    width = int((megabytes * 1e6 / 4) ** 0.5)
    log = (folder / name).open("a", buffering=1)

    def note(what: str) -> None:
        log.write(json.dumps([time.time(), what]) + "\n")

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(width, width, bias=False)
            note("built")

        def on_fit_start(self) -> None:
            note("joined")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            note("batch")
            time.sleep(step)
            loss: Tensor = self.body(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    data = DataLoader(TensorDataset(torch.randn(4096, width)), batch_size=1, shuffle=True)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, strategy=OmniStrategy(), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), data)


def notes(folder: Path, name: str, what: str) -> list[float]:
    """When a group has noted that."""
    file = folder / name
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [at for at, noted in lines if noted == what]


def until(folder: Path, name: str, batches: int) -> None:
    """Waits for a group to have begun so many batches."""
    deadline = time.monotonic() + PATIENCE
    while len(notes(folder, name, "batch")) < batches:
        assert time.monotonic() < deadline, f"{name} does not train:\n{(folder / f'{name}.log').read_text()[-2000:]}"
        time.sleep(0.1)


def measure(folder: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    """Groups join one after another."""
    env = {
        **os.environ, "LIGHTNING_OMNI_KEY": secrets.token_hex(32), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }  # fmt: skip
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, core: int, *command: str) -> subprocess.Popen[bytes]:
        pinned = ["taskset", "-c", str(core), *command] if args.pin else [*command]
        with (folder / f"{name}.log").open("wb") as log:
            processes.append(subprocess.Popen(pinned, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        return processes[-1]

    def group(name: str, core: int) -> subprocess.Popen[bytes]:
        options = ["--member", name, "--folder", str(folder), "--megabytes", str(args.megabytes)]
        return start(name, core, sys.executable, "-W", "ignore", __file__, *options, "--step", str(args.step))

    try:
        start("server", 0, sys.executable, "-m", "lightning_omni", "serve", "--port", "0")
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(r"tcp://\S+(?=,)", (folder / "server.log").read_text())):
            assert time.monotonic() < deadline, (folder / "server.log").read_text()
            time.sleep(0.1)
        env["LIGHTNING_OMNI_SERVER"] = found[0]
        group("first", 0)
        until(folder, "first", 20)
        rounds = []
        for number in range(args.rounds):
            late = group(name := f"late{number}", 1)
            until(folder, name, 5)
            late.send_signal(signal.SIGTERM)
            late.wait(PATIENCE)
            until(folder, "first", len(notes(folder, "first", "batch")) + 20)
            [built], [joined], began = (notes(folder, name, what) for what in ("built", "joined", "batch"))
            times = notes(folder, "first", "batch")
            last = max(place for place, at in enumerate(times) if at <= built)
            next_ = min(place for place, at in enumerate(times) if at >= began[0])
            rounds.append(
                {
                    "first batch": began[0] - built,
                    "taken in": joined - built,
                    "before": times[last] - times[last - 10],
                    "meanwhile": times[next_] - times[last],
                    "batches": next_ - last,
                }
            )
        return rounds
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="of the model's weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", type=float, default=0.5, help="seconds of a batch")
    parser.add_argument("--no-pin", dest="pin", action="store_false", help="do not keep the groups on a core each")
    parser.add_argument("--member", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member:
        train(args.folder, args.member, args.megabytes, args.step)
        return
    with tempfile.TemporaryDirectory() as name:
        rounds = measure(Path(name), args)
    median = {what: statistics.median(each[what] for each in rounds) for what in rounds[0]}
    total = {what: sum(each[what] for each in rounds) for what in rounds[0]}
    before, meanwhile = 10 * len(rounds) / total["before"], total["batches"] / total["meanwhile"]
    print(
        f"{args.megabytes} MB, {len(rounds)} groups that joined: first batch {median['first batch']:.1f} s after the"
        f" model was built ({median['taken in']:.1f} s until it takes part); meanwhile the other group made"
        f" {meanwhile / before:.2f} of its batches a second, in {total['batches']} of them"
    )


if __name__ == "__main__":
    main()
