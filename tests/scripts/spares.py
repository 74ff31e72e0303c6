"""Processes that are there before they are wanted: ranks, and parameter servers.

Importing torch and Lightning takes a rank three seconds of a core and a server one, most of what a short fit costs. So
the first process of a training script copies itself right after its imports. Each copy waits until Lightning's launcher
starts a rank, or the strategy a server, and goes on as that: a process of its own, a child of rank 0, with the
environment and the pipes that were made for it. What such processes share, and those that are started afresh do not, is
the seed of Python's hashes; the tests with torchrun, of which no process is a copy, have that, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

import lightning_fabric.utilities.rank_zero as rank_zero

from lightning_omni.transport.serving import __main__ as server

SERVER = "omni-server"
"""The name of a copy that is a server: its command line is that of the process it was copied from."""

_ranks: list[Spare] = []
_servers: list[Spare] = []
_copies_when_asked = False


class Spare:
    """A waiting copy of this process; once started, what `subprocess.Popen` is of any other."""

    def __init__(self, pid: int, wire: socket.socket) -> None:
        self.pid = pid
        self.wire = wire
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self._lock = threading.Lock()

    def start(self, command: list[str], environment: dict[str, str], pipes: bool, new_session: bool) -> None:
        theirs: list[int] = []
        if pipes:
            (read, write), (read_back, write_back) = os.pipe(), os.pipe()
            theirs = [read, write_back]
            self.stdin, self.stdout = os.fdopen(write, "wb"), os.fdopen(read_back, "rb")
        with self.wire:
            socket.send_fds(self.wire, [b"start"], theirs)
            job = {"command": command, "environment": environment, "new_session": new_session}
            self.wire.sendall(json.dumps(job).encode() + b"\n")
        for number in theirs:
            os.close(number)

    def dismiss(self) -> None:
        self.wire.close()
        self.wait()

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self.poll()) is not None:
            return code
        with contextlib.suppress(ProcessLookupError):  # another thread has just seen it end
            number = os.pidfd_open(self.pid)
            try:
                has_ended, _, _ = select.select([number], [], [], timeout)
            finally:
                os.close(number)
            if not has_ended:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        code = self._reap(0)
        assert code is not None
        return code

    def _reap(self, options: int) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, options)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Popen(subprocess.Popen[Any]):
    """Takes a spare for a rank or a server, while there is one."""

    def __new__(cls, args: Any, *more: Any, env: dict[str, str] | None = None, **options: Any) -> Any:
        is_leader = options.get("start_new_session", False)
        if env and "LOCAL_RANK" in env and _ranks:
            while len(_ranks) > int(env["WORLD_SIZE"]) - int(env["LOCAL_RANK"]):
                _ranks.pop().dismiss()
            return _started(_ranks.pop(), args, env, pipes=False, new_session=is_leader)
        is_server = bool(env) and list(args[1:]) == ["-m", "lightning_omni.transport.serving"]
        if is_server and _copies_when_asked and not _servers:
            prepare(ranks=0, servers=1)
        if is_server and _servers:
            return _started(_servers.pop(), args, env, pipes=True, new_session=is_leader)
        return super().__new__(cls)


def prepare(ranks: int, servers: int) -> None:
    """Makes copies of this process; in a copy for a rank, this returns when it is to go on as one."""
    if (ranks and "LOCAL_RANK" in os.environ) or sys.platform != "linux":
        return
    for kept, count in ((_servers, servers), (_ranks, ranks)):
        for _ in range(count):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                return _go_on(theirs, as_server=kept is _servers, unneeded=ours)
            theirs.close()
            kept.append(Spare(pid, ours))
    subprocess.Popen = Popen  # type: ignore[misc]


def copy_when_asked() -> None:
    """A server that this process starts is a copy that is made then: for those of shares, whose parent is a server."""
    global _copies_when_asked
    _copies_when_asked = True
    subprocess.Popen = Popen  # type: ignore[misc]


def _started(spare: Spare, command: Any, environment: dict[str, str], pipes: bool, new_session: bool) -> Spare:
    spare.start(list(map(str, command)), environment, pipes, new_session)
    return spare


def _go_on(wire: socket.socket, as_server: bool, unneeded: socket.socket) -> None:
    unneeded.close()
    if _copies_when_asked:  # by now there are sockets and locks, which no program that is started would have
        os.closerange(3, wire.fileno())
        os.closerange(wire.fileno() + 1, 1 << 16)
    for other in (*_ranks, *_servers):
        other.wire.close()
    _ranks.clear()
    _servers.clear()
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a rank that waits has nothing to interrupt
    with wire, contextlib.suppress(ConnectionError):
        word, pipes, _, _ = socket.recv_fds(wire, len(b"start"), 2)
        if not word:
            os._exit(0)  # rank 0 has ended and never wanted it
        with wire.makefile() as text:
            job = json.loads(text.readline())  # to its end it may never come: loader workers hold it open, too
    signal.signal(signal.SIGINT, interrupt)
    if job["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.orig_argv[:] = job["command"]
    if as_server:
        _serve(pipes)
    rank_zero.rank_zero_only.rank = rank_zero._get_rank()  # what Lightning reads when it is imported


def _serve(pipes: list[int]) -> None:
    Path("/proc/self/comm").write_text(SERVER)
    for number, pipe in enumerate(pipes):
        os.dup2(pipe, number)
        os.close(pipe)
    os._exit(server.main())
