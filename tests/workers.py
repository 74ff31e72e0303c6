"""Workers of pytest-xdist that are copies of one process, which has imported the tests and all that they need.

That takes twenty seconds of a core. xdist starts this file in the place of Python; it has the copy made, hands its
standard streams over, and ends when the copy has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from typing import Any, NoReturn

BOOTSTRAP = "import sys;exec(eval(sys.stdin.readline()))"
"""What execnet has Python begin with; it tells the rest."""
_open: list[socket.socket] = []
"""Closed when this process ends, however it does."""
paths: list[str] = []
"""Where modules are looked for once the tests have been imported: some of them import more while they run."""


def prepare(session: Any) -> str:
    """Starts the process whose copies are workers; it ends with this one.

    Returns:
        The command line to start a worker with.
    """
    ours, theirs = socket.socketpair()
    address = f"{tempfile.mkdtemp(prefix='omni-workers-')}/asked"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    if os.fork() == 0:
        ours.close()
        try:
            _wait(session, theirs, listener)
        finally:
            os._exit(1)
    theirs.close()
    listener.close()
    _open.append(ours)
    return f"{sys.executable} {__file__} {address}"


def _wait(session: Any, begun: socket.socket, listener: socket.socket) -> NoReturn:
    """Collects the tests, then makes copies, until the process that began this one is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)
    session.config.pluginmanager.unregister(name="terminalreporter")
    with contextlib.suppress(Exception):  # a worker meets it, too, and says so
        session.perform_collect()
    paths.extend(sys.path)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        for ready in select.select([begun, listener], [], [])[0]:
            if ready is begun:
                shutil.rmtree(os.path.dirname(listener.getsockname()))
                os._exit(0)
            asked = listener.accept()[0]
            word, streams, _, _ = socket.recv_fds(asked, 1 << 20, 3)
            if os.fork() == 0:
                begun.close()
                listener.close()
                _work(json.loads(word), streams, asked)
            for number in streams:
                os.close(number)
            asked.close()


def _work(environment: dict[str, str], streams: list[int], asked: socket.socket) -> NoReturn:
    """This process is now a worker; who asked for it knows by the open connection that it lives."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c"]
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False)  # type: ignore[misc]
    logging.root.handlers.clear()  # those of the process that was copied
    try:
        exec(BOOTSTRAP, {})
        atexit._run_exitfuncs()
    finally:
        asked.close()
        os._exit(0)


def main() -> None:
    """What xdist starts and watches."""
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked.connect(sys.argv[1])
    socket.send_fds(asked, [json.dumps(dict(os.environ)).encode()], [0, 1, 2])
    asked.recv(1)


if __name__ == "__main__":
    main()
