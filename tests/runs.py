"""Runs a training script with its ranks in real processes, and collects what every rank reports."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from patience import SLOWER

SCRIPTS = Path(__file__).parent / "scripts"
SERVER = "omni-server"
"""What a copy of a process that is a server calls itself, see ``scripts/spares.py``."""
LAUNCHED = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "PL_GLOBAL_SEED", "MASTER_ADDR", "MASTER_PORT")
"""What Lightning's launcher, and seeds, leave in the environment of the process that has started ranks."""


@dataclass
class Run:
    """A finished run."""

    code: int
    output: str
    results: dict[int, Any] = field(default_factory=dict)


def inherited() -> dict[str, str]:
    """This process's environment, as it was before tests."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHED}


@cache
def _ports() -> Iterator[int]:
    """Those of this worker of pytest."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return itertools.count(20_000 + 1_000 * worker + os.getpid() % 900)  # tests of two trees may run side by side


def free_port() -> int:
    """A port for the ranks' rendezvous, below those that systems give away: it is still free when rank 0 binds it."""
    for port in _ports():
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return port
    raise AssertionError("unreachable: there is always another number")


class Started:
    """A script that a copy of a warm process runs; what `subprocess.Popen` is of any other."""

    def __init__(self, told: socket.socket) -> None:
        self._told = told.makefile()
        self._wire = told
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._wire], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.returncode = int(self._told.readline())
            self._told.close()
            self._wire.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


WARM = "OMNI_TEST_WARM"
"""The variable that has the address of the process whose copies run scripts."""


def keep_warm() -> None:
    """Starts the process whose copies run scripts, for this one and all that it starts; it ends with this one.

    It imports what they need when the first is asked for.
    """
    ours, theirs = socket.socketpair()
    address = f"{tempfile.mkdtemp(prefix='omni-warm-')}/asked"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "warm.py"), str(theirs.fileno()), str(listener.fileno())],
        pass_fds=[theirs.fileno(), listener.fileno()],
        env=inherited() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    theirs.close()
    listener.close()
    os.environ[WARM] = address

    def end() -> None:
        ours.close()
        process.wait(20)

    atexit.register(end)


@cache
def _warm() -> socket.socket:
    """Where this process asks for scripts to be run."""
    if WARM not in os.environ:
        keep_warm()
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked.connect(os.environ[WARM])
    atexit.register(asked.close)
    return asked


def search_path() -> str:
    """PYTHONPATH with the scripts, and so with their `sitecustomize.py`."""
    return f"{SCRIPTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


def start(
    command: list[str], environment: dict[str, str], output: int, folder: Path | None = None
) -> Started | subprocess.Popen[bytes]:
    """Starts a program in a session of its own.

    Args:
        command: the command line. Where it begins with this Python, a copy of the warm process goes on as that.
        environment: all of it.
        output: file for what it prints.
        folder: where it runs; None is here.
    """
    if sys.platform == "linux" and command[0] == sys.executable and environment["PYTHONPATH"] == search_path():
        ours, theirs = socket.socketpair()
        job = {"command": command[1:], "environment": environment, "folder": str(folder or Path.cwd())}
        socket.send_fds(_warm(), [json.dumps(job).encode()], [output, theirs.fileno()])
        theirs.close()
        return Started(ours)
    return subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=environment,
        cwd=folder,
        start_new_session=True,
        # Shells have what they start in the background ignore Ctrl-C, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


class Running:
    """A run in a process group of its own, which ends with it, whatever happens.

    Args:
        script: file in ``scripts``.
        options: what it is to do.
        env: additions to the environment.
        spares: ranks that rank 0 keeps ready, see ``scripts/spares.py``; 0 starts each of them afresh.
    """

    def __init__(
        self,
        script: str,
        options: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        spares: int = 3,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="omni-run-"))
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)  # other runs of this process may read it
        self._log = (self.folder / "output.txt").open("w+")
        environment = inherited() | {"OMP_NUM_THREADS": "1", "OMNI_TEST_FOLDER": str(self.folder)}
        environment["OMNI_TEST_SPARES"] = str(spares)
        environment["MASTER_PORT"] = str(free_port())
        environment["PYTHONPATH"] = search_path()
        command = [sys.executable, str(SCRIPTS / script), json.dumps(options or {})]
        self.process = start(command, environment | (env or {}), self._log.fileno())

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()

    @property
    def output(self) -> str:
        """What the run printed so far."""
        return (self.folder / "output.txt").read_text()

    def wait(self, timeout: float) -> Run:
        """Waits for the end."""
        try:
            code = self.process.wait(SLOWER * timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {SLOWER * timeout} s:\n{self.output[-6000:]}") from None
        deadline = time.monotonic() + 60  # ranks that end after rank 0 still have something to say
        while self.survivors and time.monotonic() < deadline:
            time.sleep(0.02)
        results = {
            int(path.stem.removeprefix("rank")): json.loads(path.read_text()) for path in self.folder.glob("rank*.json")
        }
        return Run(code, self.output, results)

    @property
    def survivors(self) -> list[int]:
        """Processes of this run's process group that are still there, in the order in which they were started."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                except (OSError, IndexError):
                    continue
                if int(fields[2]) == self.process.pid and fields[0] != "Z":
                    found.append((int(fields[19]), int(entry.name)))
        return [number for _, number in sorted(found)]

    @property
    def servers(self) -> list[int]:
        """Those of them that are parameter servers, each after the process that has forked it and watches it."""
        found = []
        for number in self.survivors:
            with contextlib.suppress(OSError):  # it has ended
                found += [number] * (Path(f"/proc/{number}/comm").read_text().strip() == SERVER)
        return found


def run(
    script: str,
    options: dict[str, Any] | None = None,
    *,
    timeout: float = 300.0,
    env: dict[str, str] | None = None,
    spares: int = 3,
) -> Run:
    """Runs a script to its end and expects it to succeed."""
    with Running(script, options, env, spares) as running:
        finished = running.wait(timeout)
    assert finished.code == 0, f"exit code {finished.code}:\n{finished.output[-8000:]}"
    return finished


def run_nodes(script: str, options: dict[str, Any], nodes: int = 2, *, timeout: float = 200.0) -> list[Run]:
    """Runs a script as on several nodes, each started by itself, and expects all of them to succeed."""
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                Running(
                    script,
                    options,
                    {"NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
                    spares=1,
                )
            )
            for node in range(nodes)
        ]
        ended = [each.wait(timeout) for each in started]
    assert not any(each.code for each in ended), "".join(each.output for each in ended)
    return ended
