"""A connection to a server of a process that watches its run and is no rank."""

from __future__ import annotations

import secrets
import time
from typing import TypeVar

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
        check_address(address)
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
                f"no parameter server answers at {address}; check the address, that a server runs there, and that no"
                " firewall is in between",
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

    def evict(self, group: m.GroupStatus) -> None:
        """Takes a group out of the run.

        Args:
            group: as it was seen in the overview.

        Raises:
            Refused: it is there no more, or the run would end with it.
            ConnectionLost: the server is gone, or does not answer.
        """
        self._ask(m.Evict(group=group.group, incarnation=group.incarnation), m.Acknowledged)

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

    def close(self) -> None:
        """Closes the connection at once."""
        self._dialed.close()
        self._context.term()

    def _ask(self, message: m.Message, expect: type[Answer]) -> Answer:
        wire, deadline = self._dialed.wire, time.monotonic() + PATIENCE
        poller = zmq.Poller()
        for each in (wire, self._dialed.monitor):
            poller.register(each, zmq.POLLIN)
        try:
            wire.send(m.encode(message), zmq.NOBLOCK)
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
