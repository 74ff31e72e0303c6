"""Ranks that are there before they are wanted.

Importing torch and Lightning takes a process three seconds of a core, most of what a short fit costs. So the first
process of a training script copies itself right after its imports. Each copy waits until Lightning's launcher starts a
rank, and goes on as that rank: a process of its own, a child of rank 0, with the environment that the launcher made for
it. What such ranks share, and ranks that are started afresh do not, is the seed of Python's hashes; the tests with
torchrun, of which no process is a copy, have that, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from lightning_fabric.utilities.rank_zero import rank_zero_only

_spares: list[Spare] = []


class Spare:
    """A waiting copy of this process; once started, what `subprocess.Popen` is of any other."""

    def __init__(self, pid: int, wire: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._wire = wire
        self._lock = threading.Lock()

    def start(self, environment: dict[str, str]) -> None:
        with open(self._wire, "w") as wire:
            json.dump(environment, wire)

    def close(self) -> None:
        os.close(self._wire)

    def dismiss(self) -> None:
        self.close()
        self.wait()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Popen(subprocess.Popen[Any]):
    """Takes a spare for a rank, while there is one."""

    def __new__(cls, *args: Any, env: dict[str, str] | None = None, **options: Any) -> Any:
        if not env or "LOCAL_RANK" not in env or not _spares:
            return super().__new__(cls)
        while len(_spares) > int(env["WORLD_SIZE"]) - int(env["LOCAL_RANK"]):
            _spares.pop().dismiss()
        spare = _spares.pop()
        spare.start(env)
        return spare


def prepare(count: int) -> None:
    """Makes copies of this process; in a copy, this returns when it is to go on as a rank."""
    if "LOCAL_RANK" in os.environ or sys.platform != "linux":
        return
    for _ in range(count):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(write)
            return _become_a_rank(read)
        os.close(read)
        _spares.append(Spare(pid, write))
    subprocess.Popen = Popen  # type: ignore[misc]


def _become_a_rank(read: int) -> None:
    for other in _spares:
        other.close()
    _spares.clear()
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever waits has nothing to interrupt
    with open(read) as wire:
        text = wire.read()
    if not text:
        os._exit(0)  # rank 0 has ended and never wanted it
    signal.signal(signal.SIGINT, interrupt)
    os.environ.clear()
    os.environ.update(json.loads(text))
    rank_zero_only.rank = int(os.environ["LOCAL_RANK"])  # what Lightning reads when it is imported
