"""The connection of a server that holds a share to the one that coordinates, over ZeroMQ."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import zmq

from lightning_omni.protocol import ServerCore, handshake
from lightning_omni.protocol import messages as m
from lightning_omni.protocol import shard_messages as sm
from lightning_omni.server.addresses import EVERYWHERE, check_address, is_private, own_host
from lightning_omni.server.dialing import Dialed, dial
from lightning_omni.server.frames import LARGEST_ANSWER_FRAME, PROBE
from lightning_omni.server.keys import RunKeys

CONNECT_TIME = 60.0
"""Seconds in which the server that coordinates must have answered."""
BURST = 64
"""Things to be done that are heard before ranks are."""


class ShardLink:
    """Hears what is to be done, and says what is here.

    Args:
        core: of the server that holds a share.
        coordinator: address of the server that coordinates.
        address: of the former's data socket, as ranks can reach it.
        encryption: ``"curve"`` or ``"off"``, as that server's.

    Raises:
        ConfigurationError: the address is none.
        ConnectionLost: the server that coordinates cannot be reached.
        Refused: it does not want this one, and says why.
    """

    def __init__(self, core: ServerCore, coordinator: str, address: str, encryption: str) -> None:
        check_address(coordinator)
        self._coordinator, self._context = coordinator, zmq.Context()
        keys = RunKeys(core.key, encryption)

        def shake_hands(attempt: Dialed, deadline: float) -> sm.ShardWelcome:
            hello = core.shard_hello(address, secrets.token_bytes(handshake.NONCE_BYTES))
            return handshake.join_as_shard(
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
                " that it runs there with a host= that this machine can reach, and that no firewall is in between",
                CONNECT_TIME,
            )
        except BaseException:
            self._context.term()
            raise
        self._timeout = welcome.heartbeat_timeout
        self._heard = time.monotonic()
        self._ended = False

    @property
    def stands(self) -> bool:
        """Whether the server that coordinates is there, so that there is something to do."""
        return not self._ended and time.monotonic() - self._heard < self._timeout

    def watch(self, poller: zmq.Poller) -> None:
        """Wakes what polls when there is something to hear."""
        poller.register(self._dialed.wire, zmq.POLLIN)
        poller.register(self._dialed.monitor, zmq.POLLIN)

    def hear(self) -> Iterator[m.Message]:
        """What is to be done, in order."""
        for _ in range(BURST):
            try:
                frames = self._dialed.wire.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._ended = self._ended or bool(self._dialed.monitor.poll(0))
                return
            self._heard = time.monotonic()
            if frames[0] != PROBE:
                yield sm.decode(frames[0])

    def say(self, message: m.Message) -> None:
        """To the server that coordinates."""
        with contextlib.suppress(zmq.Again):  # the connection has ended, as the monitor says
            self._dialed.wire.send(m.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Ends the connection."""
        self._dialed.close()
        self._context.term()


def reachable(bound: str, coordinator: str) -> str:
    """The address of a socket of this machine as ranks can reach it.

    Args:
        bound: what it is bound to.
        coordinator: address of the server that coordinates, which ranks can reach.

    Returns:
        That address; or that of all interfaces, where ranks find it on the host on which they find that server.
    """
    if is_private(bound) or urlsplit(bound).hostname != EVERYWHERE:
        return bound
    host = own_host(coordinator)
    return bound if host.startswith("127.") else f"tcp://{host}:{urlsplit(bound).port}"
