"""A standalone server that takes one run after the other, and its log."""

from __future__ import annotations

import logging
import signal
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import torch
from rich.console import Console

from lightning_omni.cli.console import INTERRUPTED, TERMINATED, log
from lightning_omni.errors import quoted
from lightning_omni.transport.serving.http import StatusServer
from lightning_omni.transport.serving.process import (
    ServerProcess,
    ServerSettings,
    core_from,
    listen,
    raise_limit_of_files,
)
from lightning_omni.transport.serving.state_directory import StateDirectory
from lightning_omni.transport.serving.supervisor import Lifeline, can_supervise, preload, supervise
from lightning_omni.transport.zeromq import server
from lightning_omni.transport.zeromq.addresses import beside
from lightning_omni.transport.zeromq.keys import is_open_to_others

if TYPE_CHECKING:
    from lightning_omni.server.core import ServerCore
    from lightning_omni.server.status import RunEvent

# --- Log --------------------------------------------------------------------------------------------------------------

TIMES = "%Y-%m-%d %H:%M:%S"
"""Format of times in the log."""
EVERY = 0.25
"""Seconds between two writes of new events."""


class RunLog:
    def __init__(self, core: ServerCore, console: Console) -> None:
        self._core, self._console = core, console
        self._last: RunEvent | None = None
        self._due = 0.0

    def write(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if now < self._due and not at_once:
            return
        self._due = now + EVERY
        new = list(takewhile(lambda each: each is not self._last, reversed(self._core.status_service.run_events)))
        for event in reversed(new):
            self._last = event
            log(self._console, line_of(event, self._core.now), highlight=False)


def line_of(event: RunEvent, now: float) -> str:
    return stamped(quoted(event.text), now - event.at)


def stamped(text: str, ago: float = 0.0) -> str:
    return f"{datetime.fromtimestamp(time.time() - ago).strftime(TIMES)} {text}"


# --- Server -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The options of a standalone server beyond those of every server.

    Attributes:
        here: servers on this machine that share the weights, with this one.
        key_file: file of the key; None for the environment.
    """

    here: int
    once: bool
    http: int | None
    http_host: str
    key_file: Path | None


class StopSignals:
    def __init__(self) -> None:
        self._numbers: list[int] = []

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._numbers.append(number)

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def exit_code(self, code: int) -> int:
        return INTERRUPTED if code in (0, 1, TERMINATED) and signal.SIGINT in self._numbers else code


def stand(settings: ServerSettings, options: Options, console: Console) -> int:
    """Serve until stopped, or with ``once`` one run; return the exit status.

    Where possible, a server that saves its state is forked, and again after its death.
    """
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt=TIMES, level=logging.WARNING)
    signals = StopSignals()
    supervises = bool(settings.state) and can_supervise()
    if supervises:
        signals.listen()
    preload()  # before ranks join, because they give up a server that is silent for long
    lifeline = None
    if supervises:
        outcome = supervise(lambda: bool(signals), lambda text: log(console, stamped(text)))
        if isinstance(outcome, int):  # in the process that supervises
            return signals.exit_code(outcome)
        lifeline = outcome
    return signals.exit_code(StandaloneServer(settings, options, console, signals, lifeline).run())


class StandaloneServer:
    """A server with its status pages, log, saved state, and servers of other shares; ``lifeline`` if it was forked."""

    def __init__(
        self,
        settings: ServerSettings,
        options: Options,
        console: Console,
        signals: StopSignals,
        lifeline: Lifeline | None,
    ) -> None:
        self._options, self._console, self._signals, self._lifeline = options, console, signals, lifeline
        torch.set_num_threads(settings.threads)
        self._core = core_from(settings)
        self._core.on_run_over = self._run_over
        self._states = StateDirectory(settings.state, settings.save_every) if settings.state else None
        raise_limit_of_files()
        self._others: list[ServerProcess] = []
        with ExitStack() as stack:
            self._web = StatusServer(options.http_host, options.http) if options.http is not None else None
            if self._web is not None:
                stack.callback(self._web.close)
            stack.callback(self._stop_others)
            self._continued = self._states.restore(self._core) if self._states is not None else ""
            if settings.coordinator:
                log(console, f"waiting for the server at {settings.coordinator}, up to {server.CONNECT_TIME:.0f} s")
            self._server = stack.enter_context(closing(listen(settings, self._core)))
            if self._states is not None:
                stack.callback(self._states.close, self._core)
            self._open = stack.pop_all()
        self._log = None if settings.number else RunLog(self._core, console)  # server 0 logs the events
        self._others += [self._start_share(settings, number) for number in range(1, options.here)]
        self._is_stopped = False
        signals.listen()

    def _start_share(self, settings: ServerSettings, number: int) -> ServerProcess:
        coordinator = beside(self._server.address, "tcp://127.0.0.1:0")
        own = {"port": 0, "data_port": 0, "record": "", "number": number, "coordinator": coordinator}
        return ServerProcess(msgspec.structs.replace(settings, **own))

    def _stop_others(self) -> None:
        for process in self._others:  # they end when this server's connections do
            process.stop()

    # --- Run ---------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        self._announce()
        with self._open:
            self._server.run(until=self._is_over)
        lost = self._core.replication.lost_server
        if not lost and not self._is_stopped and not self._is_told:  # it holds a share, and has lost its coordinator
            lost = "the server that coordinates is gone"
        if lost:
            log(self._console, lost, style="red")
            return 1
        log(self._console, "parameter server stopped")
        return TERMINATED if self._options.once and not self._is_stopped else 0

    @property
    def _is_told(self) -> bool:
        return bool(self._signals) or (self._lifeline is not None and self._lifeline.is_over)

    def _announce(self) -> None:
        options = self._options
        where = options.key_file or "the environment"
        log(self._console, f"parameter server on {self._server.address}, key from {where}", highlight=False)
        if options.key_file is not None and is_open_to_others(options.key_file):
            warning = "other users of this machine can read or write the key file: chmod 600"
            log(self._console, f"{warning} {options.key_file}", style="yellow")
        if self._web is not None:
            log(self._console, f"status on {self._web.url}")
        if self._continued:
            log(self._console, self._continued)

    def _is_over(self) -> bool:
        if self._states is not None:
            self._states.poll(self._core)
        if self._log is not None:
            self._log.write()
        if self._web is not None:
            self._web.poll(self._core)
        for number, process in enumerate(self._others, 1):
            if how := process.how_ended():
                self._core.replication.ended(number, how)
        if self._core.replication.lost_server:
            self._is_stopped = True
        if self._core.roster.is_over:
            self._run_over()
            self._core.reset()
        return self._is_stopped or self._is_told

    def _run_over(self) -> None:
        outcome = ""
        if self._log is not None:  # servers of other shares do not count lost ranks
            self._log.write(at_once=True)
            outcome = f": {self._core.store.clock} updates, ranks lost: {len(self._core.roster.lost)}"
        log(self._console, f"a run is over{outcome}")
        has_begun = self._core.generation or not self._core.roster.joining
        if self._options.once and has_begun:
            self._is_stopped = True
        if self._states is not None:
            self._states.discard(self._core)
