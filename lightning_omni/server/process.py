"""Starts the embedded server in a process of its own, and sees to it that it does not outlive the run."""

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
from lightning_omni.server.addresses import remove_if_abandoned

STARTS_WITHIN = 120.0
"""Seconds in which a server must listen once it was told where: on a slow disk torch takes long to import."""

# Ctrl-C and the end of a terminal reach the whole foreground group; torchrun and SLURM send SIGTERM to all that rank 0
# has started. The run's ranks decide what it means; the server ends with them, tells the other nodes why, and removes
# its files.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ServerSettings(msgspec.Struct, frozen=True):
    """What the server process is told on its standard input.

    Attributes:
        host: address to bind; empty if all ranks are on this machine: sockets in a private directory, where ZeroMQ has
            them.
        wire_formats: class paths of those that the run may use beside the package's own.
        transport: how the ranks speak to it, as plain data.
        transports: class path of that transport, if it is none of the package's own.
        shards: servers that hold a share of the weights each, this one among them.
        shard: which of them this is; number 0 coordinates the others.
        coordinator: the address of that one, for the others.
        state: directory for its state, or its share of it; empty to save none.
        restore: of a server that holds a share, the number of the save that it goes on from; 0 for none.
        save_every: seconds between two saves.
        progress_timeout: as in `ServerCore`; None for infinite.
        joined_heartbeat_timeout: as in `ServerCore`.
        adds_up: whether it is an aggregator, which sums the pushes of groups for another server.
        again: address at which another server listened that is gone, and whose run it goes on with.
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
    shards: int = 1
    shard: int = 0
    coordinator: str = ""
    state: str = ""
    save_every: float = 30.0
    again: str = ""
    progress_timeout: float | None = None
    restore: int = 0
    joined_heartbeat_timeout: float | None = None
    adds_up: bool = False


class Ready(msgspec.Struct, frozen=True):
    """What the server process answers on its standard output."""

    address: str
    error: str = ""


class ServerProcess:
    """The embedded parameter server. Starting returns at once; `address` waits until it listens.

    A process, not a thread: the optimizer step and the sockets would take their time from the trainer's interpreter.

    Args:
        settings: address, key and timeouts; None if they are not known yet: the process imports meanwhile what it
            needs, and waits for `tell`.
    """

    def __init__(self, settings: ServerSettings | None = None) -> None:
        self._address = self._how_ended = ""
        self._deadline = time.monotonic() + STARTS_WITHIN
        self.is_told = False
        with _signals_held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lightning_omni.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
            )
        if settings is not None:
            self.configure(settings)

    def configure(self, settings: ServerSettings) -> None:
        """What it waits for; once."""
        assert self._process.stdin is not None
        self.is_told = True
        self._deadline = time.monotonic() + STARTS_WITHIN
        with contextlib.suppress(BrokenPipeError):  # it has died, as `address` will find out and say
            self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def address(self) -> str:
        """The control socket's address, ``tcp://host:port`` or ``ipc:///directory/control``; waits until it is known.

        Raises:
            ConfigurationError: the server could not listen where it was told to.
            ConnectionLost: it did not come up in time, or died.
        """
        if not self._address:
            ready = msgspec.json.decode(self._first_line(), type=Ready)
            if ready.error:
                raise ConfigurationError(f"the parameter server did not start: {ready.error}")
            self._address = ready.address
        return self._address

    def how_ended(self) -> str:
        """How the process has ended, once it has; empty while it runs."""
        if not self._how_ended and (status := self._process.poll()) is not None:
            self._how_ended = f"its process has ended with status {status}"
            try:
                self.address()
            except ConfigurationError as error:  # which it has said itself
                self._how_ended = str(error)
            except ConnectionLost:
                pass
        return self._how_ended

    def wait(self) -> int:
        """Waits until the process has ended; returns its exit status."""
        return self._process.wait()

    def leave(self) -> None:
        """This process ends, and the server may go on: one that holds a share ends with the one that coordinates."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def dismiss(self) -> None:
        """Tells it to end, by a line on its standard input, and returns at once; `stop` waits until it has."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or this was called before
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        self.leave()

    def stop(self, timeout: float = 5.0) -> None:
        """Tells it to end, and waits until it has; killing it is the last resort."""
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
                f"the parameter server's process {what}; run `python -m lightning_omni.server < /dev/null` to see why"
            )
        return line


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """What is started meanwhile does not get those signals that the server ignores until it has said that it does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """In the server's process."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)


def _environment() -> dict[str, str]:
    # The server is no rank: it must not be taken for one, nor bring a crowd of threads along.
    ignored = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "PL_GLOBAL_SEED")
    environment = {name: value for name, value in os.environ.items() if name not in ignored}
    ours = {"CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"}
    return environment | ours | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def raise_limit_of_files() -> None:
    """As many connections as the system allows this user."""
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
