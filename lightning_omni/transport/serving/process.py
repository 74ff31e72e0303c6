"""The start of the embedded server in its own process, which does not outlive the run."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from lightning_omni.errors import ConfigurationError, ConnectionLost
from lightning_omni.transport.zeromq.addresses import remove_if_abandoned

STARTS_WITHIN = 120.0
"""Seconds within which a server must listen once it has its settings: on a slow disk torch takes long to import."""

# Ctrl-C and the end of a terminal reach the whole foreground group; torchrun and SLURM send SIGTERM to all processes
# that rank 0 has started. The run's ranks decide the response; the server ends with them, sends the reason to the other
# nodes, and removes its files.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ServerSettings(msgspec.Struct, frozen=True):
    """The settings that the server process reads from its standard input.

    Attributes:
        host: address to bind; empty if all ranks are on this machine: sockets in a private directory, where possible.
        wire_formats: class paths of user-defined wire formats.
        transport: transport of the ranks, as plain data.
        transports: class path of a user-defined transport, if any.
        servers: number of servers, each of which holds a partition of the parameters, including this one.
        number: number of this server; number 0 coordinates the others.
        coordinator: address of server 0, for the others.
        state: directory for the server's state, or its share of it; empty to save none.
        restore: number of the save from which a server with a partition continues; 0 if there is none.
        save_every: seconds between two saves.
        progress_timeout: as in `ServerCore`; None for infinite.
        joined_heartbeat_timeout: as in `ServerCore`.
        again: address of an earlier server that is gone and whose run this one continues.
    """

    key: str
    host: str
    port: int
    heartbeat_timeout: float
    join_timeout: float
    threads: int
    allow_optimizers: tuple[str, ...]
    record: str = ""
    methods: tuple[str, ...] = ()
    allow_modules: tuple[str, ...] = ()
    wire_formats: tuple[str, ...] = ()
    transport: dict[str, Any] = msgspec.field(default_factory=lambda: {"name": "zeromq"})
    transports: tuple[str, ...] = ()
    servers: int = 1
    number: int = 0
    coordinator: str = ""
    state: str = ""
    save_every: float = 30.0
    again: str = ""
    progress_timeout: float | None = None
    restore: int = 0
    joined_heartbeat_timeout: float | None = None


class Ready(msgspec.Struct, frozen=True):
    """The answer of the server process on its standard output."""

    address: str
    error: str = ""


class ServerProcess:
    """The process of the embedded parameter server. The constructor returns at once; `address` waits until it listens.

    It is not a thread, because the optimizer step and the sockets would take time from the trainer's interpreter.

    Args:
        settings: address, key and timeouts; None if they are not available yet: the process imports its modules and
            waits for `configure`.
    """

    def __init__(self, settings: ServerSettings | None = None) -> None:
        self._address = self._how_ended = ""
        self._deadline = time.monotonic() + STARTS_WITHIN
        self.is_told = False
        with _signals_held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lightning_omni.transport.serving"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
            )
        if settings is not None:
            self.configure(settings)

    def configure(self, settings: ServerSettings) -> None:
        """Send the settings to a process that was started without them; called once."""
        assert self._process.stdin is not None
        self.is_told = True
        self._deadline = time.monotonic() + STARTS_WITHIN
        with contextlib.suppress(BrokenPipeError):  # it has died, which `address` will detect and report
            self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def address(self) -> str:
        """Return the address of the control socket; wait until it is available.

        It reads ``tcp://host:port`` or ``ipc:///directory/control``.

        Raises:
            ConfigurationError: the server could not listen at the requested address.
            ConnectionLost: the server did not listen in time, or died.
        """
        if not self._address:
            ready = msgspec.json.decode(self._first_line(), type=Ready)
            if ready.error:
                raise ConfigurationError(f"the parameter server did not start: {ready.error}")
            self._address = ready.address
        return self._address

    def how_ended(self) -> str:
        """Return how the process has ended; empty while it runs."""
        if not self._how_ended and (status := self._process.poll()) is not None:
            self._how_ended = f"its process has ended with status {status}"
            try:
                self.address()
            except ConfigurationError as error:  # reported by the process itself
                self._how_ended = str(error)
            except ConnectionLost:
                pass
        return self._how_ended

    def wait(self) -> int:
        return self._process.wait()

    def leave(self) -> None:
        """Close the pipes before this process ends; other servers end with the coordinating one instead."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def dismiss(self) -> None:
        """Request the server's end by a line on its standard input, and return at once; `stop` waits for the end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or this is not the first call
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        self.leave()

    def stop(self, timeout: float = 5.0) -> None:
        """End the server and wait; kill it after the timeout."""
        self.dismiss()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        remove_if_abandoned(self._address)

    def _first_line(self) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = selector.select(max(0.0, self._deadline - time.monotonic()))
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.stop(timeout=0.0)
            what = "has ended before it listened" if ready else f"did not listen within {STARTS_WITHIN:.0f} s"
            raise ConnectionLost(
                f"the parameter server's process {what}; run `python -m lightning_omni.transport.serving < /dev/null`"
                " to see why"
            )
        return line


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Block, for processes started meanwhile, the signals that the server ignores, until it ignores them itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Ignore, in the server's process, the signals that ranks handle."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)


def _environment() -> dict[str, str]:
    # The server is not a rank: it must not inherit a rank's variables, nor start many threads.
    ignored = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "PL_GLOBAL_SEED")
    environment = {name: value for name, value in os.environ.items() if name not in ignored}
    ours = {"CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"}
    return environment | ours | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def raise_limit_of_files() -> None:
    """Allow as many open connections as the system permits this user."""
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
