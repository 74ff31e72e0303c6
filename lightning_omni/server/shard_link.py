"""The ZeroMQ connections of a server that holds a share, or of an aggregator, to the coordinating server."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
import zmq
from torch import Tensor

from lightning_omni.protocol import ServerCore, handshake
from lightning_omni.protocol import messages as m
from lightning_omni.protocol import shard_messages as sm
from lightning_omni.protocol.service import Payload, as_tensor
from lightning_omni.server.addresses import EVERYWHERE, check_address, data_address, is_private, own_host
from lightning_omni.server.awake import AwakeClock
from lightning_omni.server.dialing import Dialed, attach, dial
from lightning_omni.server.frames import (
    CHUNK_MARK,
    LARGEST_ANSWER_FRAME,
    LARGEST_DATA_FRAME,
    PROBE,
    Assembly,
    chunks,
    message_frames,
)
from lightning_omni.server.keys import RunKeys

CONNECT_TIME = 60.0
"""Seconds within which the coordinating server must answer."""
BURST = 64
"""Commands of the coordinating server that are read before messages of ranks are."""


class ShardLink:
    """A control connection to the coordinating server: it receives commands and sends reports.

    Args:
        core: state machine of the server that holds a share, or of the aggregator.
        coordinator: address of the coordinating server.
        address: address of this server's data socket, as ranks can reach it.
        encryption: ``"curve"`` or ``"off"``, as the coordinating server's.

    Attributes:
        welcome: the coordinating server's message of admission.
        secret: secret that opens an aggregator's data connection.

    Raises:
        ConfigurationError: the address is invalid.
        ConnectionLost: the coordinating server cannot be reached.
        Refused: it rejects this server; the error holds the reason.
    """

    def __init__(self, core: ServerCore, coordinator: str, address: str, encryption: str) -> None:
        check_address(coordinator, coordinator)
        keys, self._context = RunKeys(core.key, encryption), zmq.Context()

        def shake_hands(attempt: Dialed, deadline: float) -> tuple[sm.ShardWelcome, bytes]:
            hello = core.shard_hello(address, secrets.token_bytes(handshake.NONCE_BYTES))
            return handshake.join_as_shard(
                lambda message, expect: attempt.ask(message, expect, deadline, lambda: None),
                core.key,
                hello,
                coordinator,
            )

        try:
            self._dialed, (self.welcome, self.secret) = dial(
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
        self._timeout, self._clock = self.welcome.heartbeat_timeout, AwakeClock()
        self._last_received = self._clock()
        self._ended = False

    @property
    def stands(self) -> bool:
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

    def receive_answers(self) -> Iterator[tuple[m.Message, Tensor]]:
        """Yield answers with tensors; this connection has none."""
        yield from ()

    def send(self, message: m.Message, payload: Sequence[Payload] = ()) -> None:
        with contextlib.suppress(zmq.Again):  # the connection has ended, which the monitor reports
            self._dialed.wire.send(m.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._dialed.close()
        self._context.term()


class UpstreamLink(ShardLink):
    """The connections of an aggregator to its server: control, and a data connection for sums and their answers.

    Args:
        core: state machine of the aggregator.
        upstream: address of the server.
        address: as in `ShardLink`.
        encryption: as in `ShardLink`.

    Raises:
        ConfigurationError, ConnectionLost, Refused: as in `ShardLink`.
    """

    def __init__(self, core: ServerCore, upstream: str, address: str, encryption: str) -> None:
        super().__init__(core, upstream, address, encryption)
        keys, where = RunKeys(core.key, encryption), data_address(upstream, self.welcome.data_port)
        self._assembly: Assembly | None = None
        self._room = torch.empty(0, dtype=torch.uint8)
        try:
            self._sums, _ = dial(
                lambda: Dialed(self._context, where, keys, LARGEST_DATA_FRAME, m.DATA, decode=sm.decode_answer),
                lambda attempt, deadline: attach(attempt, deadline, self.secret, self.welcome.number),
                keys,
                where,
                f"the data socket of the parameter server at {where} does not answer; check that no firewall is in"
                " between",
                CONNECT_TIME,
            )
        except BaseException:
            super().close()
            raise

    def watch(self, poller: zmq.Poller) -> None:
        super().watch(poller)
        poller.register(self._sums.wire, zmq.POLLIN)
        poller.register(self._sums.monitor, zmq.POLLIN)

    def receive_answers(self) -> Iterator[tuple[m.Message, Tensor]]:
        """Yield the answers to sums with their payloads, each valid until the next one."""
        for _ in range(BURST):
            try:
                frames = self._sums.wire.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._ended = self._ended or bool(self._sums.monitor.poll(0))
                return
            if (assembly := self._take(frames)).is_complete:
                self._assembly = None
                yield assembly.message, assembly.buffer

    def send(self, message: m.Message, payload: Sequence[Payload] = ()) -> None:
        if not isinstance(message, sm.Sum):
            super().send(message)
            return
        with contextlib.suppress(zmq.Again):  # the connection has ended, which the monitor reports
            for frames in message_frames(message):
                self._sums.wire.send_multipart(frames, zmq.NOBLOCK)
            for part in payload:
                for chunk in chunks(as_tensor(part)):
                    self._sums.wire.send_multipart([CHUNK_MARK, chunk], zmq.NOBLOCK, copy=True)

    def close(self) -> None:
        self._sums.close()
        super().close()

    def _take(self, frames: list[Any]) -> Assembly:
        """Add frames to the message they belong to, and return its assembly."""
        if self._assembly is None:
            self._assembly = self._begin(sm.decode_answer(frames[0].buffer))
        else:
            self._assembly.add(frames[-1].buffer)
        if self._assembly.is_complete and isinstance(self._assembly.message, m.Long):
            self._assembly = self._begin(sm.decode_answer(self._assembly.buffer.numpy().data))
        return self._assembly

    def _begin(self, message: m.Message) -> Assembly:
        nbytes = getattr(message, "nbytes", 0)
        if isinstance(message, m.Long):
            return Assembly(message, torch.empty(nbytes, dtype=torch.uint8))
        if self._room.numel() < nbytes:
            self._room = torch.empty(nbytes, dtype=torch.uint8)
        return Assembly(message, self._room[:nbytes])


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
