"""Keeps a server running: a process that has imported everything forks it, and another one when it has been killed.

Importing torch takes seconds, a fork milliseconds. The process that forks does nothing else: it holds no weights, and
no socket and no thread, which do not survive a fork. What a server opens, it opens after the fork. ``multiprocessing``
has such a process, too ("forkserver"), but one for the whole program: a user's loaders would share it, and what it
forks imports the user's script.

Only where the server saves its state: without, another one would have nothing to continue from.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
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
"""How often in a row a server is started again that has ended within so many seconds."""
GAVE_UP = 3
"""Exit status of a supervising process that does not start the server once more."""
_FAILED = 1
"""Exit status of a Python process in which an exception was not caught."""
ORPHANED = 4
"""Exit status of a server whose process that has started it is gone."""
_PAUSE = 0.25
"""Seconds after which it is asked whether the server is to end."""
_END = b"end"


def can_supervise() -> bool:
    """Whether this process may fork servers.

    On Linux, with one thread. On macOS, Python's documentation calls a fork unsafe: system libraries may have threads.
    """
    return sys.platform == "linux" and threading.active_count() == 1


def preload() -> None:
    """Does once what every server does first: torch's first optimizer takes a second, for imports."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


class Lifeline:
    """What a forked server has of the process that forked it. When that is gone, the server's process ends at once.

    It ends as if it had been killed, too, so that the next one finds the state, the sockets and the port free.

    Args:
        wire: to that process.
        report: what the server before this one has sent last; empty if this is the first.
    """

    def __init__(self, wire: socket.socket, report: str) -> None:
        self._wire, self.report = wire, report
        self._over = threading.Event()
        threading.Thread(target=self._listen, name="omni-lifeline", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether the server is to end, in good order."""
        return self._over.is_set()

    def send(self, text: str) -> None:
        """What a server that continues in place of this one must know."""
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
    """Forks a server, and another one at once when it was killed or has failed.

    If it dies soon after its start, again and again, it is started again after 0, 1, 2 and 4 s, and then no more.

    Args:
        is_over: whether the server is to end; asked several times a second.
        tell: what happened, for the log.
        wake_on: files; it is asked at once when one of them can be read.

    Returns:
        In the forked process its `Lifeline`: the caller is to serve. In this one, when the server has ended in good
        order or was started in vain too often, the exit status for this process.
    """
    report, fallen = "", 0
    gc.freeze()  # the collector writes to whatever it looks at, and what is written to is no longer shared
    atexit.register(gc.unfreeze)  # frozen objects outlive the interpreter, which libraries in C++ report as leaks
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
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # not before are its files and ports free
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
                return 0
            time.sleep(min(_PAUSE, pause))
            pause -= _PAUSE


def _watch(wire: socket.socket, report: str, is_over: Callable[[], bool], wake_on: Sequence[int]) -> tuple[str, bool]:
    """Waits until a server is gone, and tells it to end in the meantime if it is to.

    Returns:
        What it has sent last, and whether it was told to end.
    """
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
