"""The ZeroMQ connection of a server that holds a partition to the coordinating server."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from urllib.parse import urlsplit

import zmq

from lightning_omni.server import ServerCore
from lightning_omni.transport.zeromq.addresses import EVERYWHERE, check_address, is_private, own_host
from lightning_omni.transport.zeromq.dialing import Dialed, dial
from lightning_omni.transport.zeromq.frames import LARGEST_ANSWER_FRAME, PROBE
from lightning_omni.transport.zeromq.keys import RunKeys
from lightning_omni.transport.zeromq.suspend_aware_clock import SuspendAwareClock
from lightning_omni.wire import handshake
from lightning_omni.wire import messages as m
from lightning_omni.wire.messages import servers as sm

CONNECT_TIME = 60.0
"""Seconds within which the coordinating server must answer."""
BURST = 64
"""Commands of the coordinating server that are read before messages of ranks are."""


class CoordinatorLink:
    """A control connection to the coordinating server: it receives commands and sends reports.

    Args:
        core: state machine of the server that holds a partition.
        coordinator: address of the coordinating server.
        address: address of this server's data socket, as ranks can reach it.
        encryption: ``"curve"`` or ``"off"``, as the coordinating server's.

    Raises:
        ConfigurationError: the address is invalid.
        ConnectionLost: the coordinating server cannot be reached.
        Refused: it rejects this server; the error holds the reason.
    """

    def __init__(self, core: ServerCore, coordinator: str, address: str, encryption: str) -> None:
        check_address(coordinator, coordinator)
        keys, self._context = RunKeys(core.key, encryption), zmq.Context()

        def shake_hands(attempt: Dialed, deadline: float) -> sm.FollowerWelcome:
            hello = core.follower_hello(address, secrets.token_bytes(handshake.NONCE_BYTES))
            return handshake.join_as_follower(
                lambda message, expect: attempt.ask(message, expect, deadline, lambda: None),
                core.key,
                hello,
                coordinator,
            )

        try:
            self._dialed, welcome = dial(
                lambda: Dialed(self._context, coordinator, keys, LARGEST_ANSWER_FRAME, m.CONTROL, decode=sm.decode),
                shake_hands,
                keys,
                coordinator,
                f"no parameter server answers at {coordinator}, which is to coordinate this one; check the address,"
                " that it runs there with a --host that this machine can reach, and that no firewall is in between",
                CONNECT_TIME,
            )
        except BaseException:
            self._context.term()
            raise
        self._timeout, self._clock = welcome.heartbeat_timeout, SuspendAwareClock()
        self._last_received = self._clock()
        self._ended = False

    @property
    def is_connected(self) -> bool:
        """Return whether the connection is open and the coordinating server not silent for too long."""
        return not self._ended and self._clock() - self._last_received < self._timeout

    def watch(self, poller: zmq.Poller) -> None:
        poller.register(self._dialed.wire, zmq.POLLIN)
        poller.register(self._dialed.monitor, zmq.POLLIN)

    def receive(self) -> Iterator[m.Message]:
        """Yield the received commands in order."""
        for _ in range(BURST):
            try:
                frames = self._dialed.wire.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._ended = self._ended or bool(self._dialed.monitor.poll(0))
                return
            self._last_received = self._clock()
            if frames[0] != PROBE:
                yield sm.decode(frames[0])

    def send(self, message: m.Message) -> None:
        with contextlib.suppress(zmq.Again):  # the connection has ended, which the monitor reports
            self._dialed.wire.send(m.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._dialed.close()
        self._context.term()


def reachable(bound: str, coordinator: str) -> str:
    """Return the address of a socket of this machine as ranks can reach it.

    Args:
        bound: address to which the socket is bound.
        coordinator: address of the coordinating server, which ranks can reach.

    Returns:
        A reachable address; or all interfaces, if the coordinating server runs on this machine: ranks replace the host.
    """
    if is_private(bound) or urlsplit(bound).hostname != EVERYWHERE:
        return bound
    host = own_host(coordinator)
    return bound if host.startswith("127.") else f"tcp://{host}:{urlsplit(bound).port}"
