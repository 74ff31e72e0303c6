"""The connection of a process that observes a server's run without being a rank."""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import zmq

from lightning_omni.errors import ConnectionLost
from lightning_omni.transport.connections import Answer, answer_of
from lightning_omni.transport.zeromq.addresses import check_address
from lightning_omni.transport.zeromq.dialing import Dialed, Ended, dial
from lightning_omni.transport.zeromq.frames import LARGEST_ANSWER_FRAME, PROBE
from lightning_omni.transport.zeromq.keys import RunKeys
from lightning_omni.wire import handshake
from lightning_omni.wire import messages as m

ANSWER_TIMEOUT = 30.0
"""Seconds to wait for any one answer: meanwhile the server may be busy with an update of a large model."""


class EchoTimes(NamedTuple):
    """The round-trip times of echoes in seconds, and the arrivals of the answers by `time.perf_counter`."""

    times: Sequence[float]
    arrived: Sequence[float]

    @property
    def rate(self) -> float:
        lasted = self.arrived[-1] - self.arrived[0]
        return (len(self.arrived) - 1) / lasted if lasted > 0 else math.inf


class Observer:
    """An observer of a server's run, used by one thread. Nothing in the run waits for it.

    Args:
        address: the server's control socket.
        encryption: ``"curve"`` or ``"off"``, as the server's.
        timeout: seconds to wait for admission.

    Raises:
        ConfigurationError: the address or the encryption is wrong.
        ConnectionLost: the server cannot be reached; all requests raise this, too.
        Refused: the server or this process does not hold the key, or their versions differ. Requests raise it if the
            server has dropped this observer for newer ones.
    """

    def __init__(self, address: str, key: bytes, encryption: str = "curve", timeout: float = 10.0) -> None:
        check_address(address, address)
        self.address = address
        keys = RunKeys(key, encryption)
        self._dialed, _ = dial(
            lambda: Dialed(address, keys, LARGEST_ANSWER_FRAME, m.CONTROL),
            lambda request: handshake.observe(request, key, secrets.token_bytes(handshake.NONCE_BYTES), address),
            keys,
            address,
            f"no parameter server answers at {address}; check the address, that a server runs there (with --once it"
            " ends with its first run), and that no firewall is in between",
            timeout,
        )

    def overview(self) -> m.Overview:
        return self._ask(m.AskOverview(), m.Overview)

    def evict(self, group: m.GroupStatus, bars: bool = False) -> None:
        """Remove a group from the run; with ``bars``, groups from its addresses may not join again.

        Raises:
            Refused: the group has left, the run is over or would end, or, with ``bars``, groups do not join it.
        """
        self._ask(m.Evict(group=group.group, incarnation=group.incarnation, bars=bars), m.Acknowledged)

    def enlist(self, ranks: int) -> m.GroupRegistered:
        """Request rank numbers for a group of ``ranks`` that is about to join; see `GroupRegistered`.

        Raises:
            RankLost: the run is over.
            Refused: groups cannot join the run, or not with so many ranks.
        """
        return self._ask(m.RegisterGroup(ranks=ranks), m.GroupRegistered)

    def why_over(self) -> str:
        """Return why the run that this process has enlisted in is over; "" without a report since the last call."""
        while self._dialed.wire.poll(0):
            if (frame := self._dialed.wire.recv_multipart()[0]) == PROBE:
                continue
            message = m.decode(frame, at="rank", channel=m.CONTROL)
            if isinstance(message, m.Notice) and message.over:
                return message.reason
        return ""

    def describe(self) -> m.ServerDescription:
        return self._ask(m.AskServer(), m.ServerDescription)

    def echo(self, payload: bytes = b"", back: int = 0, under_way: int = 1, seconds: float = 0.0) -> EchoTimes:
        """Send bytes to the server repeatedly and receive bytes back.

        Args:
            payload: bytes to send, at most `LARGEST_INLINE`.
            back: number of bytes to receive, at most `LARGEST_ECHO`.
            under_way: number of concurrent requests.
            seconds: time during which further requests are sent; with 0 only the first ones are.
        """
        frames = [m.encode(m.Echo(nbytes=back)), *([payload] if payload else [])]
        began = time.perf_counter()
        waits = deque(self._send(frames) for _ in range(under_way))
        times, arrived = list[float](), list[float]()
        while waits:
            self._receive(m.Echoed)
            arrived.append(time.perf_counter())
            times.append(arrived[-1] - waits.popleft())
            if arrived[-1] - began < seconds:
                waits.append(self._send(frames))
        return EchoTimes(times, arrived)

    def close(self) -> None:
        self._dialed.close()

    def _ask(self, message: m.Message, expect: type[Answer]) -> Answer:
        self._send([m.encode(message)])
        return self._receive(expect)

    def _send(self, frames: Sequence[bytes]) -> float:
        """Send a message; return the time before that: the answer may arrive during it."""
        began = time.perf_counter()
        with self._reporting_loss():
            self._dialed.wire.send_multipart(frames, zmq.NOBLOCK)
        return began

    def _receive(self, expect: type[Answer]) -> Answer:
        deadline = time.monotonic() + ANSWER_TIMEOUT
        with self._reporting_loss():
            while (frame := self._dialed.receive(deadline)) == PROBE:
                pass
        return answer_of(m.decode(frame, at="rank", channel=m.CONTROL), expect)

    @contextmanager
    def _reporting_loss(self) -> Iterator[None]:
        try:
            yield
        except (zmq.Again, Ended):
            raise ConnectionLost(f"the parameter server at {self.address} is gone") from None
        except TimeoutError:
            raise ConnectionLost(
                f"the parameter server at {self.address} did not answer within {ANSWER_TIMEOUT:.0f} s"
            ) from None
