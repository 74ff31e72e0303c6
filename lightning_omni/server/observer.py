"""A connection to a server of a process that watches its run and is no rank."""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import zmq

from lightning_omni.errors import ConnectionLost
from lightning_omni.protocol import handshake
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.transport import answer_of
from lightning_omni.server.addresses import check_address
from lightning_omni.server.dialing import Dialed, dial
from lightning_omni.server.frames import LARGEST_ANSWER_FRAME, PROBE
from lightning_omni.server.keys import RunKeys

Answer = TypeVar("Answer", bound=m.Message)
PATIENCE = 30.0
"""Seconds to wait for any one answer: meanwhile the server may be busy with an update of a large model."""


class EchoTimes(NamedTuple):
    """Answers that came: how many seconds after they were asked for, and when, on the clock of `time.perf_counter`."""

    times: Sequence[float]
    arrived: Sequence[float]

    @property
    def rate(self) -> float:
        """Answers a second, from the first one on."""
        lasted = self.arrived[-1] - self.arrived[0]
        return (len(self.arrived) - 1) / lasted if lasted > 0 else math.inf


class Observer:
    """Watches the run of a server. Used from one thread; nothing in the run waits for it.

    Args:
        address: the server's control socket, ``tcp://host:port`` or ``ipc:///directory/control``.
        key: the run's shared secret.
        encryption: ``"curve"`` or ``"off"``, as the server's; sockets in a private directory need none.
        timeout: seconds to wait for the connection.

    Raises:
        ConfigurationError: the address is none.
        ConnectionLost: the server cannot be reached.
        Refused: the server does not hold the key, or this process does not, or their versions differ.
    """

    def __init__(self, address: str, key: bytes, encryption: str = "curve", timeout: float = 10.0) -> None:
        check_address(address, address)
        self.address = address
        keys, self._context = RunKeys(key, encryption), zmq.Context()

        def shake_hands(attempt: Dialed, deadline: float) -> None:
            handshake.observe(
                lambda message, expect: attempt.ask(message, expect, deadline, lambda: None),
                key,
                secrets.token_bytes(handshake.NONCE_BYTES),
                address,
            )

        try:
            self._dialed, _ = dial(
                lambda: Dialed(self._context, address, keys, LARGEST_ANSWER_FRAME, m.CONTROL),
                shake_hands,
                keys,
                address,
                f"no parameter server answers at {address}; check the address, that a server runs there (with --once it"
                " ends with its first run), and that no firewall is in between",
                timeout,
            )
        except BaseException:
            self._context.term()
            raise

    def overview(self) -> m.Overview:
        """How the run goes.

        Raises:
            ConnectionLost: the server is gone, or does not answer.
        """
        return self._ask(m.AskOverview(), m.Overview)

    def evict(self, group: m.GroupStatus, bars: bool = False) -> None:
        """Takes a group out of the run.

        Args:
            group: as it was seen in the overview.
            bars: whether no group from the same addresses may join the run any more.

        Raises:
            Refused: it is there no more, or the run would end with it; or groups do not join the run on their own.
            ConnectionLost: the server is gone, or does not answer.
        """
        self._ask(m.Evict(group=group.group, incarnation=group.incarnation, bars=bars), m.Acknowledged)

    def set_groups(self, groups: int) -> None:
        """Has the ranks form so many groups when the next epoch begins.

        Raises:
            Refused: there cannot be so many, or groups join the run on their own.
            ConnectionLost: the server is gone, or does not answer.
        """
        self._ask(m.SetGroups(groups=groups), m.Acknowledged)

    def save(self) -> None:
        """Has the server save its state now.

        Raises:
            Refused: it saves none.
            ConnectionLost: the server is gone, or does not answer.
        """
        self._ask(m.SaveNow(), m.Acknowledged)

    def enlist(self, ranks: int) -> m.Enlisted:
        """Asks for the place of a group that wants to take part. It stands for as long as this connection does.

        Args:
            ranks: how many it has.

        Raises:
            RankLost: the run is over.
            Refused: groups cannot join there.
            ConnectionLost: the server is gone, or does not answer.
        """
        return self._ask(m.Enlist(ranks=ranks), m.Enlisted)

    def why_over(self) -> str:
        """Why the run is over in which this process has asked for a place, if the server has said so since."""
        while self._dialed.wire.poll(0):
            if (frame := self._dialed.wire.recv_multipart()[0]) == PROBE:
                continue
            message = m.decode(frame, at="rank", channel=m.CONTROL)
            if isinstance(message, m.Notice) and message.over:
                return message.reason
        return ""

    def describe(self) -> m.ServerDescription:
        """What the server is, and what time it is there.

        Raises:
            ConnectionLost: the server is gone, or does not answer.
        """
        return self._ask(m.AskServer(), m.ServerDescription)

    def echo(self, payload: bytes = b"", back: int = 0, under_way: int = 1, seconds: float = 0.0) -> EchoTimes:
        """Sends bytes there and has bytes sent back, over and over.

        Args:
            payload: what is sent, `lightning_omni.protocol.messages.LARGEST_INLINE` bytes at most.
            back: bytes that come back, `lightning_omni.protocol.messages.LARGEST_ECHO` at most.
            under_way: how many are under way at a time.
            seconds: for how long new ones are sent; none is sent but the first ones with 0.

        Raises:
            ConnectionLost: the server is gone, or does not answer.
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
        """Closes the connection at once."""
        self._dialed.close()
        self._context.term()

    def _ask(self, message: m.Message, expect: type[Answer]) -> Answer:
        self._send([m.encode(message)])
        return self._receive(expect)

    def _send(self, frames: Sequence[bytes]) -> float:
        """Says something; returns when: before, for while it is sent the answer may already come."""
        began = time.perf_counter()
        try:
            self._dialed.wire.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            raise ConnectionLost(f"the parameter server at {self.address} is gone") from None
        return began

    def _receive(self, expect: type[Answer]) -> Answer:
        wire, deadline = self._dialed.wire, time.monotonic() + PATIENCE
        poller = zmq.Poller()
        for each in (wire, self._dialed.monitor):
            poller.register(each, zmq.POLLIN)
        try:
            while (left := deadline - time.monotonic()) > 0:
                ready = dict(poller.poll(int(1000 * left) + 1))
                if wire in ready:
                    if (frame := wire.recv_multipart()[0]) != PROBE:
                        return answer_of(m.decode(frame, at="rank", channel=m.CONTROL), expect)
                elif ready:
                    raise zmq.Again
        except zmq.Again:
            raise ConnectionLost(f"the parameter server at {self.address} is gone") from None
        raise ConnectionLost(f"the parameter server at {self.address} did not answer within {PATIENCE:.0f} s")
