"""Processes that tests start, with their output. Each is given a limited time, and is killed at the end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from patience import SLOWER
from runs import inherited, search_path, start


def interpret(program: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program that imports, says something and ends, in an interpreter of its own.

    For what depends on the order of imports; a `Process` has torch and Lightning already.

    Its garbage collector is off, which otherwise takes as long as to import torch and Lightning.
    """
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import gc\ngc.disable()\n{program}\ngc.freeze()"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=SLOWER * 220,
        cwd=cwd,
        env={**inherited(), "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()},
    )


def connected_to(address: str) -> Iterator[socket.socket]:
    """What this process has connected to an address, by TCP; Linux only, for descriptors are found in /proc."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not os.readlink(link).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as wire:
                if wire.family == socket.AF_INET and wire.getpeername()[1] == urlsplit(address).port:
                    yield wire


class Process:
    """A process in a session of its own, and whatever that starts.

    Args:
        command: the command line; where it names this Python, a copy of a process runs it that has torch and Lightning.
        env: additions to this process's environment; None removes a variable.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str | None] | None = None) -> None:
        additions = {"PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1", **(env or {})}
        environment = {name: value for name, value in {**inherited(), **additions}.items() if value is not None}
        reader, writer = os.pipe()
        self._stdout = os.fdopen(reader, errors="replace")
        try:
            self._popen = start(list(command), environment, writer)
        finally:
            os.close(writer)
        self.pid = self._popen.pid
        self._coming: queue.Queue[str | None] = queue.Queue()
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """Standard output and standard error, as far as they came."""
        return "".join(self._lines)

    @property
    def results(self) -> dict[int, dict[str, Any]]:
        """What the ranks of a training script said in the end, by rank."""
        return {int(rank): json.loads(text) for rank, text in re.findall(r"rank (\d+) results in (.*)", self.output)}

    def expect(self, pattern: str, timeout: float) -> re.Match[str]:
        """Waits for a line in which the pattern is found. Lines before it are passed over."""
        timeout *= SLOWER
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._coming.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{pattern!r} did not come within {timeout:.0f} s:\n{self.output}") from None
            if line is None:
                raise AssertionError(f"the output ended without {pattern!r}:\n{self.output}")
            if found := re.search(pattern, line):
                return found

    def end(self, timeout: float) -> int:
        """Waits until the process and all that inherited its output are gone; returns its exit code."""
        timeout *= SLOWER
        deadline = time.monotonic() + timeout
        self._reader.join(timeout)
        assert not self._reader.is_alive(), f"not over after {timeout:.0f} s:\n{self.output}"
        return self._popen.wait(max(0.1, deadline - time.monotonic()))

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._popen.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Ends the whole process group, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait(10)
        self._reader.join(10)
        if not self._reader.is_alive():
            self._stdout.close()

    def _read(self) -> None:
        for line in self._stdout:
            self._lines.append(line)
            self._coming.put(line)
        self._coming.put(None)
