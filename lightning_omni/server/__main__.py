"""The embedded server's process: ``python -m lightning_omni.server``, started by rank 0 and ended with it.

The first line of standard input is the settings, with the key. Whatever comes after it, or the end of standard input,
is the end of the run; processes that the parent has forked since (data loaders) hold the other end, too, so that the
end of standard input may be long in coming. One line with the addresses goes to standard output. A server that saves
its state is forked, so that another one can continue at once when it is killed (`supervisor`). A server that holds a
share of the weights ends with the one that coordinates instead.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
import threading

import msgspec
import torch

from lightning_omni.protocol import transport
from lightning_omni.protocol.server import ServerCore
from lightning_omni.server.addresses import remove_if_abandoned
from lightning_omni.server.process import Ready, ServerSettings, ignore_signals, raise_limit_of_files
from lightning_omni.server.saving import EMBEDDED_PATIENCE, ShareDirectory, StateDirectory
from lightning_omni.server.startup import core_from, load_plugins
from lightning_omni.server.supervisor import ORPHANED, Lifeline, can_supervise, preload, supervise

_log = logging.getLogger(__name__)


def main() -> int:
    """Serves one parent process, itself or by a process that it forks and watches."""
    ignore_signals()
    logging.basicConfig(format="lightning-omni server: %(message)s", level=logging.WARNING)
    parent = os.getppid()
    preload()  # now, while the ranks still start and join
    line = _standard_input().readline()
    if not line.strip():  # the run has ended and never needed a server
        return 0
    settings = msgspec.json.decode(line, type=ServerSettings)
    if not settings.state or settings.shard or not can_supervise():
        return _serve(settings, None)
    stdin = sys.stdin.fileno()

    def is_over() -> bool:
        return os.getppid() != parent or bool(select.select([stdin], [], [], 0)[0])

    lifeline = supervise(is_over, lambda text: _log.warning("%s", text), wake_on=[stdin])
    return lifeline if isinstance(lifeline, int) else _serve(settings, lifeline)


def _serve(settings: ServerSettings, lifeline: Lifeline | None) -> int:
    """Serves until the run has ended.

    Args:
        settings: of the server.
        lifeline: to the process that has forked this one; None if this is the one that rank 0 has started.
    """
    raise_limit_of_files()
    torch.set_num_threads(settings.threads)
    before = lifeline.report if lifeline is not None else ""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the first line on standard output is ours
            load_plugins(settings)
        core = core_from(settings)
        states = _restore(settings, core)
        server = _listen(settings, core, before or settings.again)
    except Exception as error:
        if before:  # rank 0 knows where the first one was, and reads no more
            _log.error("the parameter server could not be started again: %s", error)
        else:
            _report(Ready(address="", error=str(error)))
        return 2
    if not before:
        _report(Ready(address=server.address))
    if lifeline is not None:
        lifeline.send(server.address)
    if settings.shard:
        # It ends with the server that coordinates: a rank that dies costs its own group, not the share that is here.
        server.run(until=lambda: False)
        server.close()
        return 0
    beginning = lifeline or _Parent()

    def is_over() -> bool:
        if states is not None:
            states.poll(core)
        return beginning.is_over

    server.run(until=is_over)
    server.farewell("rank 0 has ended, and the parameter server with it")
    server.close()
    if states is not None:  # if rank 0 was killed, no other process removes it
        states.close()
        remove_if_abandoned(f"ipc://{settings.state}")
    return 0


def _restore(settings: ServerSettings, core: ServerCore) -> StateDirectory | None:
    """Loads what a server before this one has saved, if there was one; returns where this one saves, if it does."""
    if not settings.state:
        return None
    if settings.shard:
        ShareDirectory(settings.state).restore(core, settings.restore)
        return None
    states = StateDirectory(settings.state, settings.save_every, EMBEDDED_PATIENCE)
    if text := states.restore(core):
        _log.warning("%s", text)
    return states


def _listen(settings: ServerSettings, core: ServerCore, again: str) -> transport.Served:
    """The driver of the state machine, bound to its address; ``again`` is that of a server before this one."""
    chosen = transport.from_wire(settings.transport)
    if settings.shard:
        if settings.state:
            threading.Thread(target=_end_with_coordinator, name="omni-coordinator", daemon=True).start()
        return chosen.follow(core, settings.coordinator, settings.host, settings.port)
    if again:
        return chosen.serve_again(core, again)
    return chosen.serve(core, settings.host, settings.port)


def _end_with_coordinator() -> None:
    """If the process that has started this one is gone, this one ends at once, whatever it is at.

    It coordinates, and another one goes on at its address, which starts the others again: this one is none of those.
    """
    if not _standard_input().read(1):
        os._exit(ORPHANED)


class _Parent:
    """Rank 0, as a server sees it that it has started."""

    def __init__(self) -> None:
        self._number, self._is_gone = os.getppid(), threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or wants the server to."""
        # If it was killed, it has not said so, and a forked data loader may hold the other end of the pipe.
        return self._is_gone.is_set() or os.getppid() != self._number

    def _watch(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            _standard_input().read(1)
        self._is_gone.set()


def _standard_input() -> io.FileIO:
    """Without a buffer, in which what comes after the settings would not be seen."""
    return io.FileIO(sys.stdin.fileno(), closefd=False)


def _report(ready: Ready) -> None:
    with contextlib.suppress(BrokenPipeError):  # the run has ended already; standard input says so, too
        sys.stdout.buffer.write(msgspec.json.encode(ready) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # there is nothing left to tidy up, and torch takes half a second for it, for which rank 0 waits
