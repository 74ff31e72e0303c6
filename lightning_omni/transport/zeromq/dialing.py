"""Repeated attempts to connect and be admitted, and a clock for other time-outs."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightning_omni.errors import ConnectionLost, MalformedMessage, Refused
from lightning_omni.transport.connections import Answer
from lightning_omni.transport.zeromq.frames import configure
from lightning_omni.transport.zeromq.keys import RunKeys
from lightning_omni.wire import handshake
from lightning_omni.wire import messages as m

# --- Clock ------------------------------------------------------------------------------------------------------------

LONGEST = 2.0
"""The most seconds that count between two readings. Loops read their clock several times a second."""


class SuspendAwareClock:
    """A monotonic clock that stops with its process.

    A job that is stopped and resumed (Ctrl-Z and ``fg``, ``scontrol suspend``) resumes as a whole: the silence of the
    others was this process's own pause.

    Example:
        >>> moments = iter([0.0, 0.5, 1.0, 61.0, 61.5])
        >>> clock = SuspendAwareClock(now=lambda: next(moments))
        >>> [clock() for _ in range(4)]
        [0.5, 1.0, 3.0, 3.5]
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last = now()
        self._stood = 0.0

    def __call__(self) -> float:
        """Return seconds on the scale of ``now``, less the time beyond `LONGEST` between any two readings."""
        now = self._now()
        self._stood += max(0.0, now - self._last - LONGEST)
        self._last = now
        return now - self._stood


# --- Attempts ---------------------------------------------------------------------------------------------------------

T = TypeVar("T")

_SLICE = 100
"""Milliseconds between two checks whether waiting is still of use."""
SIGN = 100
"""Milliseconds between two ZeroMQ heartbeats, which tell the server that the process runs."""
ANSWERED = 60_000
"""Milliseconds within which a server must answer a heartbeat: it may be busy, and ranks have other ways to check it."""
_CONNECT_TIME = 1000
"""Milliseconds after which an unanswered TCP connection is requested again."""
_PAUSE = 0.1
"""Mean seconds until the next attempt: a server under a flood of strangers may have ended the last one."""


class Ended(Exception):
    """The error of a connection that the other side has ended."""


class Dialed:
    """One attempt to connect, on its own socket, so that a late answer to an earlier attempt cannot reach this one.

    Args:
        decode: decodes an answer from bytes; by default as a message to a rank.
        silence: seconds without a sign of life after which the server evicts the rank; 0 for no signs. ZeroMQ's own
            thread sends them, so they continue while Python holds its lock, and cease when the process is stopped.
        context: that of the socket; None for one of its own, which ends with this attempt.
    """

    def __init__(
        self,
        address: str,
        keys: RunKeys,
        largest_frame: int,
        channel: m.Channel,
        decode: Callable[[bytes], Any] | None = None,
        silence: float = 0.0,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        self._decode = decode or partial(m.decode, at="rank", channel=channel)
        with ExitStack() as stack:  # after an error, too, because a context waits for open sockets
            if context is None:
                context = zmq.Context()
                stack.callback(context.term)
            self.wire: zmq.Socket[bytes] = context.socket(zmq.DEALER)
            stack.callback(self.wire.close, 0)
            configure(self.wire, largest_frame)
            self.wire.setsockopt(zmq.IPV6, int("[" in address))
            # The ranks that wait for answers bound both queues.
            self.wire.setsockopt(zmq.SNDHWM, 0)
            self.wire.setsockopt(zmq.RCVHWM, 0)
            # By default the system retries ever later, and few attempts succeed while strangers crowd the gate.
            self.wire.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIME)
            if silence:
                self.wire.setsockopt(zmq.HEARTBEAT_IVL, SIGN)
                self.wire.setsockopt(zmq.HEARTBEAT_TIMEOUT, ANSWERED)
            self.monitor = self.wire.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            stack.callback(self.monitor.close, 0)
            stack.callback(self.wire.disable_monitor)
            keys.prepare(self.wire, address, "client")
            self.wire.connect(address)
            self._open = stack.pop_all()

    def ask(self, message: m.Message, expect: type[Answer], deadline: float, check: Callable[[], None]) -> Answer:
        """Send a message and return its answer, of type ``expect``.

        ``check`` is called while waiting, and raises if that is of no use. After ``deadline``, on the monotonic clock,
        `TimeoutError` is raised.
        """
        try:
            self.wire.send(m.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # the CURVE handshake has failed for good
            raise Ended from None
        answer = self._decode(self.receive(deadline, check))
        if isinstance(answer, m.RefusedMessage):
            raise Refused(answer.code, answer.reason)
        if not isinstance(answer, expect):
            raise MalformedMessage(f"{expect.__name__} was expected, {type(answer).__name__} came")
        return answer

    def receive(self, deadline: float, check: Callable[[], None] = lambda: None) -> bytes:
        """Return the first frame of the next message; see `ask`."""
        poller = zmq.Poller()
        for wire in (self.wire, self.monitor):
            poller.register(wire, zmq.POLLIN)
        while self.wire not in (ready := dict(poller.poll(_SLICE))):
            check()
            if self.monitor in ready:
                recv_monitor_message(self.monitor)
                raise Ended
            if time.monotonic() > deadline:
                raise TimeoutError
        return self.wire.recv_multipart()[0]

    def close(self) -> None:
        self._open.close()


def dial(
    make: Callable[[], Dialed],
    talk: Callable[[handshake.Request], T],
    keys: RunKeys,
    where: str,
    silence: str,
    limit: float,
    check: Callable[[], None] = lambda: None,
) -> tuple[Dialed, T]:
    """Repeat attempts for ``limit`` seconds until ``talk`` completes on one; return that attempt and the result.

    ``make`` starts an attempt; ``talk`` exchanges its messages. ``where`` is the address, and ``silence`` explains a
    missing answer, for messages; ``check`` is that of `Dialed.ask`.

    Raises:
        Refused: the other side refused, or ended every connection before admission.
        ConnectionLost: no answer arrived.
        OmniError: another one of ``make``, ``talk`` or ``check``.
    """
    deadline = time.monotonic() + limit
    while True:
        attempt = make()
        try:
            return attempt, talk(partial(attempt.ask, deadline=deadline, check=check))
        except TimeoutError:
            attempt.close()
            raise ConnectionLost(silence) from None
        except Ended:
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


def attach(secret: bytes, number: int) -> Callable[[handshake.Request], None]:
    """Return a ``talk`` for `dial` that opens a data connection, or one between leaders."""
    return lambda request: handshake.attach(request, secret, number, secrets.token_bytes(handshake.NONCE_BYTES))
