"""The process of a server that a rank or another server starts: ``python -m lightning_omni.transport.serving``.

The starting process writes the settings, with the key, as the first line of standard input. Any further byte, or its
end, ends the server. It writes one line with its address, or an error, to standard output. An embedded server that
saves its state is forked, so that a successor can continue when it is killed (`supervisor.supervise`). A server that
holds a partition of the parameters ends with the coordinating server instead.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
from collections.abc import Callable

import msgspec
import torch

from lightning_omni.server.core import ServerCore
from lightning_omni.transport.serving.process import (
    Ready,
    ServerSettings,
    core_from,
    ignore_signals,
    listen,
    raise_limit_of_files,
)
from lightning_omni.transport.serving.state_directory import EMBEDDED_RECONNECT_TIMEOUT, StateDirectory
from lightning_omni.transport.serving.supervisor import Lifeline, can_supervise, preload, supervise
from lightning_omni.transport.zeromq.addresses import remove_if_abandoned

_log = logging.getLogger(__name__)


def main() -> int:
    ignore_signals()
    logging.basicConfig(format="lightning-omni server: %(message)s", level=logging.WARNING)
    parent = os.getppid()
    preload()  # overlaps with the start of the ranks
    line = _standard_input().readline()
    if not line.strip():  # the run has ended without needing a server
        return 0
    settings = msgspec.json.decode(line, type=ServerSettings)
    stdin = sys.stdin.fileno()

    def is_over() -> bool:
        # A killed rank 0 sends nothing, and a forked data loader may hold the other end of the pipe.
        return os.getppid() != parent or bool(select.select([stdin], [], [], 0)[0])

    if not settings.state or not can_supervise():
        return _serve(settings, is_over, None)
    lifeline = supervise(is_over, lambda text: _log.warning("%s", text), wake_on=[stdin])
    if isinstance(lifeline, int):
        return lifeline
    return _serve(settings, lambda: lifeline.is_over, lifeline)


def _serve(settings: ServerSettings, has_ended: Callable[[], bool], lifeline: Lifeline | None) -> int:
    """Serve until the run ``has_ended``; ``lifeline`` is None without a supervisor."""
    raise_limit_of_files()
    torch.set_num_threads(settings.threads)
    before = lifeline.report if lifeline is not None else ""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # rank 0 reads the first line of standard output
            core = core_from(settings)
        # Ranks do not look for a server that nothing starts again.
        states = _restore(settings, core) if lifeline is not None else None
        server = listen(settings, core, before)
    except Exception as error:
        if before:  # rank 0 already has the address and reads no more
            _log.error("the parameter server could not be started again: %s", error)
        else:
            _report(Ready(address="", error=str(error)))
        return 2
    if not before:
        _report(Ready(address=server.address))
    if lifeline is not None:
        lifeline.send(server.address)
    if settings.number:
        # Only the coordinating server ends this one: a dead rank costs its own group, not the share held here.
        server.run(until=lambda: False)
        server.close()
        return 0

    def is_over() -> bool:
        if states is not None:
            states.poll(core)
        return has_ended()

    server.run(until=is_over)
    server.farewell("rank 0 has ended, and the parameter server with it")
    server.close()
    if states is not None:  # if rank 0 was killed, no other process removes the directory
        states.close()
        remove_if_abandoned(f"ipc://{settings.state}")
    return 0


def _restore(settings: ServerSettings, core: ServerCore) -> StateDirectory | None:
    """Load an earlier server's state, if any; return the `StateDirectory` to poll, if any."""
    if not settings.state:
        return None
    states = StateDirectory(settings.state, settings.save_every, EMBEDDED_RECONNECT_TIMEOUT)
    if text := states.restore(core):
        _log.warning("%s", text)
    return states


def _standard_input() -> io.FileIO:
    """Open standard input without a buffer: `select` does not see buffered bytes."""
    return io.FileIO(sys.stdin.fileno(), closefd=False)


def _report(ready: Ready) -> None:
    with contextlib.suppress(BrokenPipeError):  # the run has ended already, which standard input reports, too
        sys.stdout.buffer.write(msgspec.json.encode(ready) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # nothing is left to clean up, and rank 0 would wait for torch's exit of half a second
