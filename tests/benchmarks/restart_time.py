"""How long training pauses when the parameter server gets SIGKILL: seconds until the first update that follows.

    python tests/benchmarks/restart_time.py [--kills 10] [--standalone]

Two groups of one process each train, and the server is killed again and again, with --standalone alternately

    the process that serves      another one is forked by the process that watches it
    both processes               with --standalone alone: ``lightning-omni serve`` is started afresh, which imports
                                 torch, as without that process

An update counts if its push was begun after the kill and answered. Printed are median and maximum of each way, and with
--standalone how the medians compare. Linux.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0
"""Seconds in which training must begin, or go on."""
BETWEEN = 6.0
"""Seconds from one update after a kill to the next kill: both processes die seldom enough not to be given up."""


def train(folder: Path) -> None:
    """One rank of a run that lasts until it is told to end."""
    import pytorch_lightning as pl
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_omni import OmniStrategy, Server

    torch.set_num_threads(1)
    server = os.environ.get("OMNI_SERVER")
    log = (folder / f"updates-{os.environ.get('LOCAL_RANK', 0)}").open("a", buffering=1)

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(64, 64)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            time.sleep(0.02)
            return nn.functional.mse_loss(self.net(batch[0]), batch[0])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.pushed = time.monotonic()

        def on_train_batch_end(self, *_: Any) -> None:
            log.write(f"{self.pushed} {time.monotonic()}\n")
            if (folder / "stop").exists():
                self.trainer.should_stop = True

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy=OmniStrategy(groups=2, server=Server(save=1.0, address=server)),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(1_000_000, 64)), batch_size=16))


def updates(folder: Path) -> list[list[tuple[float, float]]]:
    """Of each rank: when each push was begun, and when it was answered."""
    found = []
    for rank in range(2):
        with suppress(FileNotFoundError):
            lines = (folder / f"updates-{rank}").read_text().splitlines(keepends=True)
            pairs = [line.split() for line in lines if line.endswith("\n")]
            found.append([(float(pushed), float(answered)) for pushed, answered in pairs])
    return found


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [
        int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()
    ]


def is_running(pid: int) -> bool:
    """Whether a process is there, and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_embedded_server(pid: int) -> bool:
    """Whether a process is what rank 0 starts as its server."""
    return b"lightning_omni.transport.serving" in Path(f"/proc/{pid}/cmdline").read_bytes()


class Training:
    """A run, and its server.

    Args:
        folder: of what it writes.
        standalone: whether the server is ``lightning-omni serve``.
    """

    def __init__(self, folder: Path, standalone: bool) -> None:
        self._folder, self._standalone = folder, standalone
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._env["LIGHTNING_OMNI_KEY"] = secrets.token_hex(32)
        self._log = (folder / "log").open("ab")
        if standalone:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            self._env["OMNI_SERVER"] = f"tcp://127.0.0.1:{port}"
            self._serve = [sys.executable, "-m", "lightning_omni", "serve", "--once", "--port", str(port)]
            self._serve += ["--state", str(folder / "state"), "--save-every", "1"]
            self._server = self._start(self._serve)
        self._run = self._start([sys.executable, "-W", "ignore", __file__, "--member", str(folder)])

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, env=self._env, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL, start_new_session=True
        )

    @property
    def server(self) -> list[int]:
        """The process that watches, and the one that serves."""
        outer = self._server.pid if self._standalone else next(filter(is_embedded_server, children(self._run.pid)))
        return [outer, *children(outer)]

    def kill(self, both: bool) -> float:
        """The server is killed. Returns when."""
        victims = self.server if both else self.server[-1:]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        if both:
            self._server.wait()
            self._server = self._start(self._serve)
        while any(map(is_running, victims)):  # until then it may still answer
            time.sleep(0.001)
        return killed

    def first_update_after(self, moment: float) -> float:
        """When the first push was answered that was begun after a moment, and all ranks train on."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self._run.poll() is None:
            firsts = [next((end for begun, end in each if begun > moment), None) for each in updates(self._folder)]
            if len(firsts) == 2 and None not in firsts:
                return min(end for end in firsts if end is not None)
            time.sleep(0.05)
        raise SystemExit(f"training did not go on:\n{(self._folder / 'log').read_text()[-4000:]}")

    def end(self) -> int:
        """Ends the run; returns its exit code."""
        (self._folder / "stop").touch()
        return self._run.wait(PATIENCE)

    def close(self) -> None:
        """What is left is killed."""
        for process in [self._run, *([self._server] if self._standalone else [])]:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._log.close()


@contextmanager
def training(standalone: bool) -> Iterator[Training]:
    """A run in a folder of its own."""
    with ExitStack() as stack:
        run = Training(Path(stack.enter_context(tempfile.TemporaryDirectory())), standalone)
        stack.callback(run.close)
        yield run


def main() -> int:
    """Kills and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    parser.add_argument("--standalone", action="store_true", help="lightning-omni serve, not the embedded server")
    parser.add_argument("--member", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member is not None:
        train(args.member)
        return 0
    kinds = {"the process that serves": False, **({"both processes": True} if args.standalone else {})}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with training(args.standalone) as run:
        run.first_update_after(0.0)
        for _ in range(args.kills):
            for kind, both in kinds.items():
                time.sleep(BETWEEN)
                began = run.kill(both)
                seconds[kind].append(run.first_update_after(time.monotonic()) - began)
                print(f"{kind} killed: {seconds[kind][-1]:.2f} s", flush=True)
        code = run.end()
    for kind, found in seconds.items():
        print(f"{kind} killed: first update after {statistics.median(found):.2f} s, most {max(found):.2f} s")
    if args.standalone:
        fast, slow = map(statistics.median, seconds.values())
        print(f"{args.kills} kills each: the pause is {fast / slow:.2f} of that of a fresh start")
    print(f"exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
