"""The start of the embedded server in its own process, which does not outlive the run."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from lightning_omni import methods
from lightning_omni.errors import ConfigurationError, ConnectionLost
from lightning_omni.methods.model.modules import module_resolver
from lightning_omni.methods.model.server_optimizer import resolver
from lightning_omni.transport import registry
from lightning_omni.transport.registry import Served
from lightning_omni.transport.zeromq.addresses import remove_if_abandoned
from lightning_omni.wire.formats.base import load_format

if TYPE_CHECKING:  # ranks do not import the server
    from lightning_omni.server.core import ServerCore

# --- Process ----------------------------------------------------------------------------------------------------------

STARTS_WITHIN = 120.0
"""Seconds within which a server must listen once it has its settings: on a slow disk torch takes long to import."""

# Ctrl-C and the end of a terminal reach the whole foreground group; torchrun and SLURM send SIGTERM to all processes
# that rank 0 has started. The run's ranks decide the response; the server ends with them, sends the reason to the other
# nodes, and removes its files.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ServerSettings(msgspec.Struct, frozen=True):
    """The settings that the server process reads from its standard input.

    Attributes:
        host: address to bind; empty for sockets in a private directory, where possible, or with a ``coordinator`` on
            TCP for the address from which it is reached.
        coordinator: address of server 0, for the others.
        state: directory for the server's state; empty to save none.
        progress_timeout: as in `ServerCore`; None for infinite.
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
    data_port: int = 0
    servers: int = 1
    number: int = 0
    coordinator: str = ""
    state: str = ""
    save_every: float = 30.0
    progress_timeout: float | None = None
    joined_heartbeat_timeout: float | None = None


class Ready(msgspec.Struct, frozen=True):
    address: str
    error: str = ""


class ServerProcess:
    """The process of a parameter server. The constructor does not wait for it.

    Without ``settings``, it imports its modules and waits for `configure`.
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
        """Return the address of the control socket, for which the first call waits.

        With ZeroMQ it is ``tcp://host:port`` or ``ipc:///directory/control``.

        Raises:
            ConfigurationError: the server did not start.
            ConnectionLost: its process has ended, or does not listen within `STARTS_WITHIN`; it is stopped.
        """
        if not self._address:
            ready = msgspec.json.decode(self._first_line(), type=Ready)
            if ready.error:
                raise ConfigurationError(f"the parameter server did not start: {ready.error}")
            self._address = ready.address
        return self._address

    def how_ended(self) -> str:
        if not self._how_ended and (status := self._process.poll()) is not None:
            self._how_ended = f"its process has ended with status {status}"
            try:
                self.address()
            except ConfigurationError as error:  # reported by the process itself
                self._how_ended = str(error)
            except ConnectionLost:
                pass
        return self._how_ended

    def leave(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def stop(self, timeout: float = 5.0) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or this is not the first call
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        self.leave()
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
    """Block the signals that the server will ignore, for processes started meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
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
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft = 10_240 if sys.platform == "darwin" and hard == resource.RLIM_INFINITY else hard  # the most that it takes
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- State machine, with user-defined plugins -------------------------------------------------------------------------


def core_from(settings: ServerSettings) -> ServerCore:
    from lightning_omni.server.core import ServerCore
    from lightning_omni.server.event_log import RecordFile

    for load, paths in (
        (methods.load, settings.methods),
        (load_format, settings.wire_formats),
        (registry.load, settings.transports),
    ):
        for path in paths:
            load(path)
    return ServerCore(
        bytes.fromhex(settings.key),
        secrets.token_bytes,
        heartbeat_timeout=settings.heartbeat_timeout,
        joined_heartbeat_timeout=settings.joined_heartbeat_timeout,
        join_timeout=settings.join_timeout,
        progress_timeout=math.inf if settings.progress_timeout is None else settings.progress_timeout,
        resolve=resolver(settings.allow_optimizers),
        resolve_module=module_resolver(settings.allow_modules),
        clock=time.monotonic,
        record=RecordFile(settings.record) if settings.record else None,
        servers=settings.servers,
        number=settings.number,
    )


def listen(settings: ServerSettings, core: ServerCore, again: str = "") -> Served:
    """Listen as the settings have it, or ``again`` at the address of a server that is gone."""
    chosen = registry.from_wire(settings.transport)
    if again:
        return chosen.serve_again(core, again)
    ports = settings.host, settings.port, settings.data_port
    return chosen.follow(core, settings.coordinator, *ports) if settings.number else chosen.serve(core, *ports)
