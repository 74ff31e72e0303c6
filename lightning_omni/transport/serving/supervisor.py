"""The supervisor of a parameter server: a process that forks the server and restarts it when that has died.

Importing torch takes seconds, a fork milliseconds. The supervisor does nothing else: it holds no weights, and no
ZeroMQ sockets or threads, which do not survive a fork.

It is used only where the server saves its state: otherwise another server could not continue.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch

RESTARTS, SOON = 5, 10.0
"""The ends in a row, each within a number of seconds after the start, after which a server is not started again."""
GAVE_UP = 3
"""Exit status of a supervisor that does not start the server again."""
_FAILED = 1
"""Exit status of a Python process with an uncaught exception."""
ORPHANED = 4
"""Exit status of a server whose supervisor is gone."""
_PAUSE = 0.25
"""Seconds between two checks whether the server is to end."""
_END = b"end"


def can_supervise() -> bool:
    """Return whether this process may fork servers: on Linux, with one thread."""
    return sys.platform == "linux" and threading.active_count() == 1


def preload() -> None:
    """Do in advance the work of every server: torch's first optimizer takes a second for imports."""
    importlib.import_module("lightning_omni.transport.zeromq.server")
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


class Lifeline:
    """A forked server's connection to its supervisor. When that is gone, the process ends at once.

    It does not clean up, so that the next server finds the state, the sockets and the port free. ``report`` is the last
    one of earlier servers; "" for none.
    """

    def __init__(self, wire: socket.socket, report: str) -> None:
        self._wire, self.report = wire, report
        self._over = threading.Event()
        threading.Thread(target=self._listen, name="omni-lifeline", daemon=True).start()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def send(self, text: str) -> None:
        with contextlib.suppress(OSError):  # this process is about to end
            self._wire.sendall(text.encode())

    def _listen(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = self._wire.recv(len(_END))
        if not data:
            os._exit(ORPHANED)
        self._over.set()


def supervise(is_over: Callable[[], bool], tell: Callable[[str], None], wake_on: Sequence[int] = ()) -> Lifeline | int:
    """Fork a server, and at once another one when it was killed or has failed.

    A server that repeatedly dies soon after its start is restarted after 0, 1, 2 and 4 s, and then no more.

    Args:
        is_over: returns whether the server is to end; called several times a second.
        tell: logs an event.
        wake_on: descriptors that, once readable, cause a call of ``is_over`` at once.

    Returns:
        The `Lifeline` in the forked process; in the supervisor its exit status, once the server has ended otherwise or
        too often.
    """
    report, fallen = "", 0
    gc.freeze()  # the collector writes to the objects it visits, which would end their sharing between processes
    atexit.register(gc.unfreeze)  # C++ libraries report frozen objects as leaks, because they outlive the interpreter
    while True:
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        began, pid = time.monotonic(), os.fork()
        if pid == 0:
            ours.close()
            return Lifeline(theirs, report)
        theirs.close()
        with ours:
            report, was_told = _watch(ours, report, is_over, wake_on)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # only then are its files and ports free
        if was_told or is_over():
            return code if code >= 0 else _FAILED
        if code >= 0 and code != _FAILED:
            return code
        fallen = fallen + 1 if time.monotonic() - began < SOON else 0
        how = f"was killed by {_name(-code)}" if code < 0 else f"has failed with status {code}"
        if fallen == RESTARTS:
            tell(f"the parameter server's process {how}, {fallen} times in a row soon after its start: giving up")
            return GAVE_UP
        pause = 2.0 ** (fallen - 2) if fallen > 1 else 0.0
        tell(f"the parameter server's process {how}; another one continues" + f" in {pause:.0f} s" * bool(pause))
        while pause > 0:
            if is_over():
                return _FAILED
            time.sleep(min(_PAUSE, pause))
            pause -= _PAUSE


def _watch(wire: socket.socket, report: str, is_over: Callable[[], bool], wake_on: Sequence[int]) -> tuple[str, bool]:
    """Wait until a server is gone; return its last report, and whether its end was requested."""
    was_told = False
    while True:
        watched: list[socket.socket | int] = [wire, *(() if was_told else wake_on)]
        ready = select.select(watched, [], [], _PAUSE)[0]
        if wire in ready:
            data = b""
            with contextlib.suppress(ConnectionError):
                data = wire.recv(1 << 12)
            if not data:
                return report, was_told
            report = data.decode()
        if not was_told and is_over():
            was_told = True
            with contextlib.suppress(OSError):  # it is gone already
                wire.sendall(_END)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
