"""A server with open ports, a rank with the key that pushes to it without end, and attackers beside them."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from core import ServerProcess
from core import messages as m
from processes import Process
from test_wire import Rank, settings, sgd

ATTACKS = Path(__file__).parent / "attacks.py"
RANKS = 400
"""Ranks that the run is announced with: each attack lets some of them in, and a rank that has left stays away."""
NUMEL = 50_000
SOON = 60.0
"""Seconds in which an attack's first round must be over, on a busy machine."""


def megabytes(pid: int, field: str = "VmRSS") -> float:
    """Memory of a process, as Linux tells it: ``VmRSS`` now, ``VmHWM`` at its most since `forget_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024 / 1e6
    raise AssertionError(f"process {pid} has no {field}")


def forget_peak(pid: int) -> None:
    """The most begins again."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


class Pushing:
    """A rank that pushes in a thread, and compares every answer with the same optimizer here, bit for bit.

    Attributes:
        pushes: so far.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.parameters = rank.begin(*((number,) for number in range(RANKS)))
        self.pushes = 0
        self.failure: BaseException | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._push)
        self._thread.start()

    def _push(self) -> None:
        optimizer = sgd(self.parameters)
        _, gradient = self.rank.gradient(0)
        for parameter, value in zip(self.parameters, gradient, strict=True):
            parameter.grad = value
        try:
            while not self._stopping.is_set():
                optimizer.step()
                answer, weights = self.rank.push(0, read_at=self.pushes)
                assert (answer.clock, answer.applied) == (self.pushes + 1, True)
                assert all(torch.equal(mine, theirs) for mine, theirs in zip(self.parameters, weights, strict=True))
                self.pushes += 1
        except BaseException as error:
            self.failure = error

    def rate(self, seconds: float, least: int = 5) -> float:
        """Return the pushes a second, from now on for so long, and until there are enough of them."""
        began, before = time.monotonic(), self.pushes
        while (lasted := time.monotonic() - began) < seconds or self.pushes < before + least:
            self._check()
            assert lasted < seconds + SOON, "the pushes do not go on"
            time.sleep(0.01)
        return (self.pushes - before) / lasted

    def go_on(self, pushes: int) -> None:
        """Waits until that many more are answered; raises what goes wrong with any."""
        wanted, deadline = self.pushes + pushes, time.monotonic() + SOON
        while self.pushes < wanted:
            self._check()
            assert time.monotonic() < deadline, "the pushes do not go on"
            time.sleep(0.01)

    def stop(self) -> None:
        """Ends, and raises what went wrong."""
        self._stopping.set()
        self._thread.join(SOON)
        self._check()

    def close(self) -> None:
        """Ends at once, whatever went wrong."""
        self._stopping.set()
        self._thread.join(SOON)
        self.rank.close()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure


class Target:
    """A server process, and the rank that pushes to it.

    Args:
        log: file for what the server says.
        soft_limit: the server's limit of open files when it starts; it may raise it to the hard one.
        encryption: of its ports.
    """

    def __init__(self, log: Path, soft_limit: int, encryption: str) -> None:
        with log.open("w") as sink, _errors_into(sink.fileno()), _limited(soft_limit):
            self.process = ServerProcess(
                settings(transport={"name": "zeromq", "encryption": encryption}, join_timeout=3600.0)
            )
        self.log = log
        self.pid = self.process.pid
        self.address = self.process.address()
        self._encryption = encryption
        self._next = 1
        self.pushing = Pushing(self._join(0))
        self.addresses = (self.address, self.pushing.rank.control.data_address)

    def let_in(self) -> float:
        """Another rank with the key joins, fetches the weights and leaves; returns the seconds that it took."""
        began = time.monotonic()
        rank = self._join(self._next)
        self._next += 1
        try:
            rank.data.exchange(m.FetchMessage(optimizer=0), m.Weights)
            lasted = time.monotonic() - began
            rank.control.request(m.Goodbye(), m.Acknowledged, timeout=SOON)
        finally:
            rank.close()
        return lasted

    def _join(self, number: int) -> Rank:
        return Rank(self.address, number, RANKS, NUMEL, encryption=self._encryption, connect_timeout=SOON)

    @property
    def strangers(self) -> int:
        """Messages and connections that the server has refused."""
        return self.pushing.rank.control.request(m.AskStatus(), m.Status, timeout=SOON).strangers

    def close(self) -> None:
        """Ends both, and raises what went wrong with the pushes."""
        try:
            self.pushing.stop()
        finally:
            self.pushing.close()
            self.process.stop()


@contextlib.contextmanager
def attack(kind: str, addresses: Sequence[str], *options: str, rounds: int = 1) -> Iterator[Process]:
    """An attacker, until the end of the block; at its begin so many rounds are over."""
    attacker = Process([sys.executable, str(ATTACKS), kind, *addresses, *options])
    try:
        wait_for_round(attacker, rounds)
        yield attacker
    finally:
        attacker.kill()


def wait_for_round(attacker: Process, number: int) -> None:
    """Waits until an attacker has made so many rounds."""
    if number:
        attacker.expect(rf"round {number}\b", SOON)


def rates(target: Target, kind: str, core: int, seconds: float) -> float:
    """Rate of pushes beside an attacker, over that beside an idle spinner on the same core."""
    both = []
    for each in (kind, "spin"):
        with attack(each, target.addresses, f"--core={core}"):
            both.append(target.pushing.rate(seconds))
    return both[0] / both[1]


@contextlib.contextmanager
def _errors_into(descriptor: int) -> Iterator[None]:
    """What is started here inherits that as its standard error."""
    kept = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextlib.contextmanager
def _limited(files: int) -> Iterator[None]:
    """What is started here may open that many files at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
