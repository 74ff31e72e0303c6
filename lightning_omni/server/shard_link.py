"""The connections of a server that holds a share, or of an aggregator, to the server that coordinates, over ZeroMQ."""

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
"""Seconds in which the server that coordinates must have answered."""
BURST = 64
"""Things to be done that are heard before ranks are."""


class ShardLink:
    """Hears what is to be done, and says what is here.

    Args:
        core: of the server that holds a share, or adds pushes up.
        coordinator: address of the server that coordinates.
        address: of the former's data socket, as ranks can reach it.
        encryption: ``"curve"`` or ``"off"``, as that server's.

    Attributes:
        welcome: what that server has said when it let this one in.
        secret: opens an aggregator's data connection.

    Raises:
        ConfigurationError: the address is none.
        ConnectionLost: the server that coordinates cannot be reached.
        Refused: it does not want this one, and says why.
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
        """Whether the server that coordinates is there, so that there is something to do."""
        return not self._ended and self._clock() - self._last_received < self._timeout

    def watch(self, poller: zmq.Poller) -> None:
        """Wakes what polls when there is something to hear."""
        poller.register(self._dialed.wire, zmq.POLLIN)
        poller.register(self._dialed.monitor, zmq.POLLIN)

    def receive(self) -> Iterator[m.Message]:
        """What is to be done, in order."""
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
        """What it answers with tensors: nothing, on this channel."""
        yield from ()

    def send(self, message: m.Message, payload: Sequence[Payload] = ()) -> None:
        """To the server that coordinates."""
        with contextlib.suppress(zmq.Again):  # the connection has ended, as the monitor says
            self._dialed.wire.send(m.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Ends the connection."""
        self._dialed.close()
        self._context.term()


class UpstreamLink(ShardLink):
    """The connections of an aggregator to the server that it adds up for: what is said, and sums with their answers.

    Args:
        core: of the aggregator.
        upstream: address of the server.
        address: as in `ShardLink`, and so is ...
        encryption: ... this.

    Raises:
        As `ShardLink`.
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
        """Answers to sums, each with its payload, which stands until the next one."""
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
        with contextlib.suppress(zmq.Again):  # the connection has ended, as the monitor says
            for frames in message_frames(message):
                self._sums.wire.send_multipart(frames, zmq.NOBLOCK)
            for part in payload:
                for chunk in chunks(as_tensor(part)):
                    self._sums.wire.send_multipart([CHUNK_MARK, chunk], zmq.NOBLOCK, copy=True)

    def close(self) -> None:
        self._sums.close()
        super().close()

    def _take(self, frames: list[Any]) -> Assembly:
        """The message to which these frames belong, as far as it is here."""
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
