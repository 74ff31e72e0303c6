"""How a rank comes to a connection on which it was admitted: it tries again until it is, or until time is up."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightning_omni.errors import ConnectionLost, MalformedMessage, Refused
from lightning_omni.protocol import handshake
from lightning_omni.protocol import messages as m
from lightning_omni.server.frames import configure
from lightning_omni.server.keys import RunKeys

T = TypeVar("T")
Answer = TypeVar("Answer", bound=m.Message)

_SLICE = 100
"""Milliseconds after which a waiting rank looks whether there is still something to wait for."""
SIGN = 100
"""Milliseconds between two signs of life. The first of them tells the server how long it is to wait for the next."""
ANSWERED = 60_000
"""Milliseconds in which a server must answer one: it may be busy, and ranks have other ways to tell whether it is."""
_CONNECT_TIME = 1000
"""Milliseconds that a connection may take to come about before it is asked for again."""
_PAUSE = 0.1
"""Seconds, on average, until the next attempt: a server that is beset by strangers may have ended the last one."""


class _Ended(Exception):
    """The other side has ended the connection."""


class Dialed:
    """One attempt: a socket of its own, so that answers to an earlier one are never taken for answers to this.

    Args:
        context: for the socket.
        address: where to.
        keys: of the run.
        largest_frame: bytes of a frame that may come.
        channel: what is spoken.
        decode: makes messages of bytes, where these are none to a rank.
        silence: seconds after which the server ends the connection if nothing comes on it; 0 for never. ZeroMQ's own
            thread gives signs of life, also while Python does not let go of its lock, and not if the process is
            stopped.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        keys: RunKeys,
        largest_frame: int,
        channel: m.Channel,
        decode: Callable[[bytes], Any] | None = None,
        silence: float = 0.0,
    ) -> None:
        self._decode = decode or partial(m.decode, at="rank", channel=channel)
        self.wire: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        configure(self.wire, largest_frame)
        self.wire.setsockopt(zmq.IPV6, int("[" in address))
        # What goes out is bounded by the ranks that wait for the answer, and so is what comes in.
        self.wire.setsockopt(zmq.SNDHWM, 0)
        self.wire.setsockopt(zmq.RCVHWM, 0)
        # Left to itself the system asks ever more seldom, and while strangers crowd the gate few are answered.
        self.wire.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIME)
        if silence:
            self.wire.setsockopt(zmq.HEARTBEAT_IVL, SIGN)
            self.wire.setsockopt(zmq.HEARTBEAT_TTL, int(1000 * silence))
            self.wire.setsockopt(zmq.HEARTBEAT_TIMEOUT, ANSWERED)
        try:
            self.monitor = self.wire.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        except BaseException:  # too many files are open; while a socket is, its context waits for it
            self.wire.close(0)
            raise
        try:
            keys.prepare(self.wire, address, "client")
            self.wire.connect(address)
        except BaseException:
            self.close()
            raise

    def ask(self, message: m.Message, expect: type[Answer], deadline: float, check: Callable[[], None]) -> Answer:
        """Says something and waits for the answer."""
        try:
            self.wire.send(m.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # the handshake below has failed for good
            raise _Ended from None
        poller = zmq.Poller()
        for wire in (self.wire, self.monitor):
            poller.register(wire, zmq.POLLIN)
        while self.wire not in (ready := dict(poller.poll(_SLICE))):
            check()
            if self.monitor in ready:
                recv_monitor_message(self.monitor)
                raise _Ended
            if time.monotonic() > deadline:
                raise TimeoutError
        answer = self._decode(self.wire.recv_multipart()[0])
        if isinstance(answer, m.RefusedMessage):
            raise Refused(answer.code, answer.reason)
        if not isinstance(answer, expect):
            raise MalformedMessage(f"{expect.__name__} was expected, {type(answer).__name__} came")
        return answer

    def close(self) -> None:
        """Ends the attempt, or the connection that came of it."""
        if not self.wire.closed:
            self.wire.disable_monitor()
            self.monitor.close(0)
            self.wire.close(0)


def dial(
    make: Callable[[], Dialed],
    talk: Callable[[Dialed, float], T],
    keys: RunKeys,
    where: str,
    silence: str,
    limit: float,
) -> tuple[Dialed, T]:
    """Tries until ``talk`` has come to its end.

    Args:
        make: makes an attempt.
        talk: what is said, until a deadline; its result is returned.
        keys: of the run.
        where: the address, for messages.
        silence: what is wrong if no answer comes, for messages.
        limit: seconds.

    Raises:
        Refused: the other side refused, or ended every connection before it had let it in.
        ConnectionLost: no answer came.
    """
    deadline = time.monotonic() + limit
    while True:
        attempt = make()
        try:
            return attempt, talk(attempt, deadline)
        except TimeoutError:
            attempt.close()
            raise ConnectionLost(silence) from None
        except _Ended:
            attempt.close()
            if time.monotonic() > deadline:
                raise Refused(
                    "key",
                    f"the server at {where} ended every connection before it was admitted: the key does not match the"
                    " server's (both sides must be given the same key), or only one side was given"
                    f' encryption="off" (this one was given {keys.encryption!r}), or it is another program',
                ) from None
        except BaseException:
            attempt.close()
            raise
        time.sleep(random.uniform(0.5, 1.5) * _PAUSE)


def attach(
    attempt: Dialed, deadline: float, secret: bytes, number: int, check: Callable[[], None] = lambda: None
) -> None:
    """Proves to hold the secret of a data connection, or of one between leaders, and has it proved."""
    handshake.attach(
        lambda message, expect: attempt.ask(message, expect, deadline, check),
        secret,
        number,
        secrets.token_bytes(handshake.NONCE_BYTES),
    )
