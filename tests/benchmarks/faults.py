"""Groups that join one run on their own, under random faults: is nothing lost, and how long does training stand still?

A supervisor starts a standing server and as many groups as are asked for, each a process of its own, and starts one
again that has ended before the run, as torchrun with --max-restarts, SLURM with --requeue or a pod would. Faults come
at random, in equal parts of each kind, from a seed:

    kill        SIGKILL
    leave       SIGTERM: the group leaves in good order
    freeze      SIGSTOP, for longer than the server's heartbeat time-out, and SIGCONT
    server      SIGKILL to the server, which is started again with its saved state

    python tests/benchmarks/faults.py --groups 4 --minutes 5 --faults 40 --seed 1

prints: how the last groups ended; the longest time between two batches of anybody; samples of an epoch that nobody has
trained; useful device time over all device time of groups that were up; and the accuracy beside that of a run that was
left alone (--alone measures that, too).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
KINDS = ("kill", "leave", "freeze", "server")
SILENCE = 5.0
"""Seconds of silence after which the server evicts a group."""
FROZEN = 9.0
"""Seconds that a frozen group stays so."""
SAMPLES, BATCH = 2048, 16


# --- A group ---------------------------------------------------------------------------------------------------------


def train(folder: Path, epochs: int, step: float) -> None:
    """One group, which joins whatever run there is."""
    import pytorch_lightning as pl
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_omni import OmniStrategy

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES + 1024, 16, generator=generator)
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 6))
    with torch.no_grad():
        for each in teacher.parameters():
            each.copy_(torch.randn(each.shape, generator=generator))
        y = teacher(x).argmax(1)
    data = TensorDataset(x[:SAMPLES], y[:SAMPLES], torch.arange(SAMPLES))
    held_out = TensorDataset(x[SAMPLES:], y[SAMPLES:])
    log = (folder / f"trained-{os.getpid()}").open("a", buffering=1)

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 6))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            time.sleep(step)
            self.samples = batch[2].tolist()
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            # Before the push: a group may die after its push has come, which then counts.
            log.write(json.dumps([time.time(), self.current_epoch, self.samples]) + "\n")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)
            steps = int(self.trainer.estimated_stepping_batches)
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps), "interval": "step"}
            ]

    pl.seed_everything(3, verbose=False)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        strategy=OmniStrategy(),
        callbacks=[pl.callbacks.ModelCheckpoint(folder / "checkpoints", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Net(), DataLoader(data, batch_size=BATCH, shuffle=True), DataLoader(held_out, batch_size=64))
    (folder / f"ended-{os.getpid()}").write_text(str(float(trainer.callback_metrics["accuracy"])))


# --- The supervisor --------------------------------------------------------------------------------------------------


class Fleet:
    """A server and the groups of a run; a group that ends before the run does is started again.

    Args:
        folder: of all that they write.
        groups: how many there are to be.
        epochs: of the run.
        step: seconds of a batch.
    """

    def __init__(self, folder: Path, groups: int, epochs: int, step: float) -> None:
        self.folder, self._wanted = folder, groups
        self._env = {
            **os.environ,
            "LIGHTNING_OMNI_KEY": secrets.token_hex(32),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        self._member = [sys.executable, "-W", "ignore", __file__, "--member", str(folder)]
        self._member += ["--epochs", str(epochs), "--step", str(step)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._serve = [sys.executable, "-m", "lightning_omni", "serve", "--port", str(port), "--once"]
        self._serve += ["--heartbeat-timeout", str(SILENCE), "--state", str(folder / "state"), "--save-every", "5s"]
        self.server = self._start(self._serve, "server.log")
        deadline = time.monotonic() + 60
        while not (found := re.search(r"tcp://\S+(?=,)", (folder / "server.log").read_text())):
            assert time.monotonic() < deadline, (folder / "server.log").read_text()
            time.sleep(0.1)
        self._env["LIGHTNING_OMNI_SERVER"] = found[0]
        self.members: list[subprocess.Popen[bytes]] = []
        self.codes: Counter[int] = Counter()
        self.up = 0.0
        """Seconds that groups were up, in sum."""
        self._began: dict[int, float] = {}
        self.frozen: set[int] = set()
        while len(self.members) < groups:
            self.add()

    def add(self) -> None:
        """One group more comes."""
        self.members.append(self._start(self._member, f"group-{len(self._began)}.log"))
        self._began[self.members[-1].pid] = time.monotonic()

    def kill_server(self) -> None:
        """The server dies, and is started again."""
        self.server.kill()
        self.server.wait()
        self.server = self._start(self._serve, "server.log")

    def tend(self, restart: bool = True) -> bool:
        """Groups that have ended are counted, and started again. Returns whether the run goes on."""
        goes_on = self.server.poll() is None
        for member in list(self.members):
            if (code := member.poll()) is not None:
                self.members.remove(member)
                self.codes[code] += 1
                self.up += time.monotonic() - self._began[member.pid]
                if restart and goes_on and code != 0:
                    self.add()
        return goes_on

    def close(self) -> None:
        """Whatever is left is killed."""
        for process in (*self.members, self.server):
            process.kill()
            process.wait()

    def _start(self, command: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as output:
            return subprocess.Popen(
                command, env=self._env, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
            )


def disturbed(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A run under faults; what came of it."""
    chance = random.Random(args.seed)
    fleet = Fleet(folder, args.groups, args.epochs, args.step)
    kinds = [KINDS[number % len(KINDS)] for number in range(args.faults)]
    chance.shuffle(kinds)
    moments = sorted(chance.uniform(10, 60 * args.minutes) for _ in kinds)
    began, done, thaw = time.monotonic(), Counter[str](), list[tuple[float, int]]()
    try:
        while fleet.tend():
            now = time.monotonic() - began
            if now > 60 * args.minutes + args.patience:
                break
            for due, pid in [each for each in thaw if each[0] <= now]:
                thaw.remove((due, pid))
                fleet.frozen.discard(pid)
                if any(member.pid == pid and member.poll() is None for member in fleet.members):
                    os.kill(pid, signal.SIGCONT)
            if moments and moments[0] <= now:
                moments.pop(0)
                free = [member.pid for member in fleet.members if member.pid not in fleet.frozen]
                if kinds[-1] == "server":
                    done[kinds.pop()] += 1
                    fleet.kill_server()
                elif len(free) > 1:
                    pid, kind = chance.choice(free), kinds.pop()
                    done[kind] += 1
                    os.kill(pid, {"kill": signal.SIGKILL, "leave": signal.SIGTERM, "freeze": signal.SIGSTOP}[kind])
                    if kind == "freeze":
                        fleet.frozen.add(pid)
                        thaw.append((now + FROZEN, pid))
            time.sleep(0.1)
        deadline = time.monotonic() + 30
        while fleet.members and time.monotonic() < deadline:
            fleet.tend(restart=False)
            time.sleep(0.1)
        left = [member.pid for member in fleet.members]
    finally:
        fleet.close()
    return {"faults": dict(done), "left": left, "codes": dict(fleet.codes), "up": fleet.up, **read(folder, args)}


def read(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What the groups have written down."""
    lines = [
        json.loads(line)
        for file in folder.glob("trained-*")
        for line in file.read_text().splitlines()
        if line.endswith("]")
    ]
    times = sorted(at for at, _, _ in lines)
    trained = Counter((epoch, sample) for _, epoch, samples in lines for sample in samples)
    all_samples = {(epoch, sample) for epoch in range(args.epochs) for sample in range(SAMPLES)}
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    accuracies = [float(file.read_text()) for file in folder.glob("ended-*")]
    return {
        "seconds": times[-1] - times[0] if times else 0.0,
        "standstill": max(gaps, default=0.0),
        "missing": len(all_samples - set(trained)),
        "twice": sum(count - 1 for count in trained.values()),
        "useful": len(all_samples & set(trained)) / BATCH * args.step,
        "accuracy": statistics.median(accuracies) if accuracies else float("nan"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=5.0, help="faults come for so long")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds after the last fault")
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--step", type=float, default=0.2, help="seconds of a batch")
    parser.add_argument("--alone", action="store_true", help="also a run without faults")
    parser.add_argument("--keep", type=Path, help="where logs stay")
    parser.add_argument("--member", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member is not None:
        train(args.member, args.epochs, args.step)
        return
    for faults in (args.faults, 0) if args.alone else (args.faults,):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) if args.keep is None else args.keep / f"{faults}-faults"
            folder.mkdir(parents=True, exist_ok=True)
            args.faults = faults
            said = disturbed(folder, args)
        print(
            f"{args.groups} groups, seed {args.seed}, {said['faults'] or 'no faults'}: exit codes {said['codes']},"
            f" {len(said['left'])} processes left, {said['seconds']:.0f} s, longest standstill {said['standstill']:.1f}"
            f" s, {said['missing']} samples missing, {said['twice']} trained more than once, goodput"
            f" {said['useful'] / said['up']:.2f}, accuracy {said['accuracy']:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
