"""The server's loop: it drives the state machine over ZeroMQ sockets in real time."""

from __future__ import annotations

import contextlib
import errno
import logging
import platform
import secrets
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import urlsplit

import torch
import zmq
from torch import Tensor

from lightning_omni.errors import ConfigurationError, MalformedMessage, ProtocolError, Refused
from lightning_omni.server.core import ServerCore
from lightning_omni.server.replication import COORDINATOR
from lightning_omni.server.service import Out
from lightning_omni.transport.registry import refusal
from lightning_omni.transport.zeromq.addresses import (
    CONTROL,
    DATA,
    EVERYWHERE,
    PrivateDirectory,
    check_address,
    is_private,
    memory_path,
    own_host,
    tcp_endpoint,
)
from lightning_omni.transport.zeromq.dialing import Dialed, SuspendAwareClock, dial
from lightning_omni.transport.zeromq.frames import (
    CHUNK_MARK,
    LARGEST_ANSWER_FRAME,
    LARGEST_CONTROL_FRAME,
    LARGEST_DATA_FRAME,
    PROBE,
    Assembly,
    Copies,
    message_frames,
)
from lightning_omni.transport.zeromq.guard import ConnectionGuard, RefusalLog, received_by
from lightning_omni.transport.zeromq.keys import RunKeys
from lightning_omni.transport.zeromq.shared_memory import (
    NO_RANGES,
    MemoryRange,
    MemoryRanges,
    SegmentSocket,
    SharedMemory,
    can_share_memory,
    decode_record,
)
from lightning_omni.wire import handshake
from lightning_omni.wire import messages as m
from lightning_omni.wire.messages import servers as sm
from lightning_omni.wire.messages.servers import FollowerProof

# --- The connection of a server that holds a partition to the coordinating server -------------------------------------

CONNECT_TIME = 60.0
"""Seconds within which the coordinating server must answer."""
BURST = 64
"""The most messages that are read from one socket before others are served."""


class CoordinatorLink:
    """A control connection to the coordinating server: it receives commands and sends reports.

    ``address`` is that of this server's data socket, as ranks reach it.
    """

    def __init__(self, core: ServerCore, coordinator: str, address: str, encryption: str) -> None:
        check_address(coordinator, coordinator)
        keys = RunKeys(core.key, encryption)

        def shake_hands(request: handshake.Request) -> sm.FollowerWelcome:
            hello = core.follower_hello(address, secrets.token_bytes(handshake.NONCE_BYTES))
            return handshake.join_as_follower(request, core.key, hello, coordinator)

        self._dialed, welcome = dial(
            lambda: Dialed(coordinator, keys, LARGEST_ANSWER_FRAME, m.CONTROL, decode=sm.decode),
            shake_hands,
            keys,
            coordinator,
            f"no parameter server answers at {coordinator}, which is to coordinate this one; check the address,"
            " that it runs there with a --host that this machine can reach, and that no firewall is in between",
            CONNECT_TIME,
        )
        self._timeout, self._clock = welcome.heartbeat_timeout, SuspendAwareClock()
        self._last_received = self._clock()
        self._ended = False

    @property
    def is_connected(self) -> bool:
        return not self._ended and self._clock() - self._last_received < self._timeout

    def watch(self, poller: zmq.Poller) -> None:
        poller.register(self._dialed.wire, zmq.POLLIN)
        poller.register(self._dialed.monitor, zmq.POLLIN)

    def receive(self) -> Iterator[m.Message]:
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


def reachable(bound: str, coordinator: str) -> str:
    """Return the address of a socket of this machine as ranks can reach it.

    If ``bound`` names all interfaces, and the coordinating server is reached over loopback, it is returned: ranks
    replace the host.
    """
    if is_private(bound) or urlsplit(bound).hostname not in EVERYWHERE:
        return bound
    host = own_host(coordinator)
    return bound if host.startswith("127.") else tcp_endpoint(host, urlsplit(bound).port or 0)


# --- Versions, which the two sides of a run compare -------------------------------------------------------------------

PACKAGES = ("lightning-omni", "torch", "pytorch-lightning", "lightning", "pyzmq")


@cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "libzmq": zmq.zmq_version()}
    return {**found, **{package: number for package in PACKAGES if (number := _version(package))}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


# --- Loop -------------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

KEPT_BUFFERS = 3
"""Payload sizes for which memory is kept per connection: of a push, and of both directions of a merged head."""
LAST_WORDS = 500
"""Milliseconds for which a closing server still sends queued messages."""
TICK = 0.25
"""Seconds between two clock ticks of the state machine."""
MOST_UNREAD = 256
"""The most messages of one connection that wait to be read."""
ANSWERED_STRANGERS = 8
"""Refusals sent to one stranger or sender of malformed messages; further ones are only counted."""
COUNTED_STRANGERS = 4096
"""Connections whose refusals are counted, those that were refused last."""
_LARGEST_FRAMES = {m.CONTROL: LARGEST_CONTROL_FRAME, m.DATA: LARGEST_DATA_FRAME}


class ZeroMQServer:
    """A parameter server on two sockets: control and data.

    Args:
        host: IP address or interface to bind; loopback by default.
        port: port of the control socket; 0 takes a free one, as for ``data_port``.
        directory: directory to listen in instead of on TCP ports; it is removed when the server closes.
        encryption: ``"curve"`` or ``"off"`` for TCP. With ``"off"``, strangers can read and alter the network traffic,
            and the server holds the bytes of one in memory until the guard ends it (within `guard.ADMISSION_TIME`, or
            after `guard.STRANGERS_MAY_SEND` bytes where the system counts them).
        shared_memory: whether leaders may share memory with the server; only in a directory.

    Raises:
        ConfigurationError: an address cannot be bound, or this machine cannot encrypt.
    """

    def __init__(
        self,
        core: ServerCore,
        host: str = "127.0.0.1",
        port: int = 0,
        data_port: int = 0,
        directory: PrivateDirectory | None = None,
        encryption: str = "curve",
        shared_memory: bool = True,
    ) -> None:
        self.core = core
        self._clock = SuspendAwareClock()
        self._directory, self._encryption = directory, encryption
        keys, self._context = RunKeys(core.key, encryption), zmq.Context()
        self._guard = ConnectionGuard(self._context, keys)
        self._refusal_log = RefusalLog(_log)
        self._sockets: dict[m.Channel, zmq.Socket[bytes]] = {}
        self._segment_socket: SegmentSocket | None = None
        self._coordinator: CoordinatorLink | None = None
        try:
            for channel, number, name in ((m.CONTROL, port, CONTROL), (m.DATA, data_port, DATA)):
                endpoint = tcp_endpoint(host, number) if directory is None else directory.address(name)
                self._sockets[channel] = self._guard.listen(endpoint, _LARGEST_FRAMES[channel], MOST_UNREAD)
        except ConfigurationError:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            where = f"{host}:{number}" if directory is None else endpoint
            is_taken = error.errno in (zmq.EADDRINUSE, errno.EACCES)
            here = "an address of this machine (Server(host=...), or serve --host), which is no name"
            option = "--port" if channel == m.CONTROL else "--data-port"
            remedy = f"another port ({option}; 0 takes a free one)" if is_taken else here
            raise ConfigurationError(
                f"cannot listen on {where}: {zmq.strerror(error.errno or 0)}; pass {remedy}"
            ) from error
        self.address = self._sockets[m.CONTROL].getsockopt_string(zmq.LAST_ENDPOINT)
        # Makes sending to a lost peer fail.
        self._sockets[m.CONTROL].setsockopt(zmq.ROUTER_MANDATORY, 1)
        core.versions, core.limits.hears_connections = versions(), True
        core.data_port = urlsplit(self._sockets[m.DATA].getsockopt_string(zmq.LAST_ENDPOINT)).port or 0
        self.shared = SharedMemory(
            lambda rank: core.roster.data_connection(rank),
            # A leader's memory for answers is one segment for all servers.
            lambda: core.replication.count * sum(served.buffer.numel() for served in core.store.all),
        )
        if directory is not None and shared_memory and can_share_memory():
            self._segment_socket = SegmentSocket(memory_path(self.address), self.shared)
        self._answer_ranges: dict[tuple[bytes, int], MemoryRange] = {}
        self._assemblies: dict[bytes, Assembly] = {}
        self._copies = Copies()
        self._buffers: dict[bytes, dict[int, Tensor]] = {}
        self._refusals: dict[bytes, int] = {}
        self._received: dict[bytes, tuple[int, int]] = {}  # descriptor and received bytes of each rank's connection
        self._turned_away = 0
        self._guard.start()

    def follow(self, coordinator: str) -> None:
        """Join a coordinating server, for which this one holds a partition; `run` returns when it is gone."""
        own = self._sockets[m.DATA].getsockopt_string(zmq.LAST_ENDPOINT)
        self._coordinator = CoordinatorLink(self.core, coordinator, reachable(own, coordinator), self._encryption)

    def run(self, until: Callable[[], bool]) -> None:
        poller = zmq.Poller()
        for socket in self._sockets.values():
            poller.register(socket, zmq.POLLIN)
        if self._segment_socket is not None:
            poller.register(self._segment_socket, zmq.POLLIN)
        if self._coordinator is not None:
            self._coordinator.watch(poller)
        due = self._clock()
        while not until() and (self._coordinator is None or self._coordinator.is_connected):
            awaited = min(due, self.core.due) - self._clock()
            ready = dict(poller.poll(int(max(0.0, awaited) * 1000) + 1))
            try:
                for channel, socket in self._sockets.items():
                    if socket in ready:
                        self._drain(channel)
                if self._segment_socket is not None and self._segment_socket.fileno() in ready:
                    self._segment_socket.serve()
                if self._coordinator is not None:
                    self._receive_from(self._coordinator)
                if self.core.due <= self._clock():
                    self._send(self.core.tick(self._clock()))
                if self._clock() >= due:
                    due = self._clock() + TICK
                    self._probe_connections()
                    self._count_strangers()
                    self._send(self.core.tick(self._clock()))
                    self._forget_strangers()
            except Exception as error:
                # Ranks must receive the error instead of waiting for a dead server.
                _log.exception("the parameter server failed")
                self._send(self.core.fail(f"{type(error).__name__}: {error}"))

    def _receive_from(self, coordinator: CoordinatorLink) -> None:
        for message in coordinator.receive():
            self._send(self.core.follow(message))
            self.core.status_service.end()

    def farewell(self, reason: str) -> None:
        self._send(self.core.lose(0, reason))

    def close(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None
        self._refusal_log.close()
        self._guard.close()
        if self._segment_socket is not None:
            self._segment_socket.close()
        for socket in self._sockets.values():
            socket.close(LAST_WORDS)
        self._context.term()
        if self._directory is not None:
            self._directory.remove()

    def _drain(self, channel: m.Channel) -> None:
        socket = self._sockets[channel]
        for _ in range(BURST):
            try:
                peer, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._send(self.take(channel, peer.bytes, frames))
            self.core.status_service.end()

    def take(self, channel: m.Channel, peer: bytes, frames: list[Any]) -> list[Out]:
        """Process a received message and return the messages to send. No message from a peer makes this raise."""
        try:
            return self._on_control(peer, frames) if channel == m.CONTROL else self._on_data(peer, frames)
        except ProtocolError as error:
            self._assemblies.pop(peer, None)
            return refusal(self.core, channel, peer, error)

    def _on_control(self, peer: bytes, frames: list[Any]) -> list[Out]:
        if not 1 <= len(frames) <= 2:
            raise MalformedMessage(f"{len(frames)} frames on the control channel")
        message = self.core.decode(m.CONTROL, frames[0].buffer)
        payload = frames[1].bytes if len(frames) == 2 else b""
        if isinstance(message, (m.Proof, m.ObserverProof, FollowerProof)):
            return self._decide(m.CONTROL, peer, message, frames[0])
        return self.core.receive(m.CONTROL, peer, message, payload, self._clock())

    def _decide(self, channel: m.Channel, peer: bytes, message: m.Message, frame: zmq.Frame) -> list[Out]:
        """Process a proof, which may admit its connection, while the guard ends none."""
        was_admitted = self.core.is_admitted(channel, peer)
        with self._guard.deciding():
            out = self.core.receive(channel, peer, message, b"", self._clock())
            if not was_admitted and self.core.is_admitted(channel, peer):
                self._guard.let_in(frame.get(zmq.SRCFD))
                if isinstance(message, m.Proof):
                    self._received[peer] = frame.get(zmq.SRCFD), 0
                    if (member := self.core.roster.find(channel, peer)) is not None:
                        member.host = "localhost" if self._directory is not None else str(frame.get("Peer-Address"))
        return out

    def _on_data(self, peer: bytes, frames: list[Any]) -> list[Out]:
        if len(frames) == 2 and len(frames[0]) == len(CHUNK_MARK):
            assembly = self._assemblies.get(peer)
            if assembly is None:
                if not self.core.is_admitted(m.DATA, peer):
                    raise MalformedMessage("a piece of nothing")
                return []  # the rest of a refused payload
            assembly.add(frames[1].buffer)
        elif 1 <= len(frames) <= 2:
            message = self.core.decode(m.DATA, frames[0].buffer)
            if isinstance(message, m.AttachProof):
                return self._decide(m.DATA, peer, message, frames[0])
            places = decode_record(frames[1].buffer, MemoryRanges) if len(frames) == 2 else NO_RANGES
            assembly = self._begin(peer, message, places)
        else:
            raise MalformedMessage(f"{len(frames)} frames on the data channel")
        if assembly.is_complete and isinstance(assembly.message, m.LargeMessage):
            message = self.core.decode(m.DATA, assembly.buffer.numpy().data)
            if isinstance(message, (m.LargeMessage, m.Attach, m.AttachProof)):
                raise MalformedMessage(f"a long {type(message).__name__}")
            assembly = self._begin(peer, message, assembly.places)
        if not assembly.is_complete:
            return []
        del self._assemblies[peer]
        return self.core.receive(m.DATA, peer, assembly.message, assembly.buffer, self._clock())

    def _begin(self, peer: bytes, message: m.Message, places: MemoryRanges) -> Assembly:
        nbytes = self.core.check_payload(peer, message)
        is_kept = self.core.router.keeps_payload(message)
        buffer = _allocated(nbytes) if is_kept else self._buffer(peer, nbytes)
        assembly = Assembly(message, buffer, places)
        if not isinstance(
            message, m.LargeMessage
        ):  # a `LargeMessage` carries the ranges of the message that it announces
            if places.payload is not None:
                assembly.fill(self.shared.at(peer, places.payload))
            self._offer(peer, message, places.answer)
        self._assemblies[peer] = assembly
        return assembly

    def _offer(self, peer: bytes, message: m.Message, memory: MemoryRange | None) -> None:
        self._answer_ranges.pop(key := _key(peer, message), None)
        if memory is not None:
            self.shared.at(peer, memory)  # raises now if the range does not exist
            self._answer_ranges[key] = memory

    def _buffer(self, peer: bytes, nbytes: int) -> Tensor:
        """Return memory for a payload, that of an earlier one of its size, if any: fresh memory is slow to touch."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        kept = self._buffers.setdefault(peer, {})
        buffer = kept.pop(nbytes, None)
        if buffer is None:
            while len(kept) >= KEPT_BUFFERS:
                del kept[next(iter(kept))]
            buffer = _allocated(nbytes)
        kept[nbytes] = buffer
        return buffer

    def _probe_connections(self) -> None:
        """Detect ended connections sooner than by missing heartbeats, and note those that have sent something."""
        for peer in self.core.peers:
            if not self._reach([peer, PROBE]):
                self._send(self.core.hang_up(peer))
            elif (known := self._received.get(peer)) and (received := received_by(known[0])) != known[1]:
                self._received[peer] = known[0], received
                if (member := self.core.roster.find(m.CONTROL, peer)) is not None:
                    member.last_seen = self._clock()
        self._received = {peer: self._received[peer] for peer in self.core.peers if peer in self._received}

    def _reach(self, frames: list[Any]) -> bool:
        try:
            self._sockets[m.CONTROL].send_multipart(frames)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _count_strangers(self) -> None:
        refused = self._guard.refused
        self.core.strangers += refused - self._turned_away
        self._turned_away = refused

    def _forget_strangers(self) -> None:
        attached = self.core.roster.attached
        if not attached:
            self._copies = Copies()  # the memory of a run that is over is given back
        for kept in (self._buffers, self._assemblies):  # an assembly whose payload is kept has no buffer
            for peer in kept.keys() - attached:
                del kept[peer]
        self.shared.keep(attached)
        self._answer_ranges = {key: memory for key, memory in self._answer_ranges.items() if key[0] in attached}

    def _send(self, out: list[Out]) -> None:
        for item in out:
            if self._coordinator is not None and item.peer == COORDINATOR:
                self._coordinator.send(item.message)
                continue
            if isinstance(item.message, m.RefusedMessage) and not self._deserves_answer(item):
                continue
            if item.channel == m.CONTROL:
                parts = [part if isinstance(part, bytes) else part.numpy().tobytes() for part in item.payload]
                self._reach([item.peer, m.encode(item.message), *parts])
                continue
            socket = self._sockets[m.DATA]
            memory = self._put(item)
            for frames in message_frames(item.message, MemoryRanges(answer=memory)):
                socket.send_multipart([item.peer, *frames])
            for part in item.payload if memory is None else ():
                assert isinstance(part, Tensor)
                self._copies.send(socket, item.peer, part)  # the weights change while the sockets still send

    def _put(self, item: Out) -> MemoryRange | None:
        """Copy an answer's payload to the range that its receiver offered; return None without one that fits."""
        memory = self._answer_ranges.pop(_key(item.peer, item.message), None)
        if memory is None or len(item.payload) != 1:
            return None
        (part,) = item.payload
        if not isinstance(part, Tensor) or not 0 < part.numel() <= memory.nbytes:
            return None
        try:
            room = self.shared.at(item.peer, memory)
        except MalformedMessage:  # the leader released it meanwhile
            return None
        room[: part.numel()].copy_(part)
        return memory

    def _deserves_answer(self, item: Out) -> bool:
        assert isinstance(item.message, m.RefusedMessage)
        count = self._refusals[item.peer] = self._refusals.pop(item.peer, 0) + 1
        if len(self._refusals) > COUNTED_STRANGERS:
            del self._refusals[next(iter(self._refusals))]  # the one whose last refusal is the longest ago
        # After a server's restart, ZeroMQ may deliver earlier messages before the rank itself has reconnected.
        is_usual = item.message.code == "stranger" and self.core.resumed
        if count == 1 and not is_usual:
            self._refusal_log.write(f"refused a {item.channel} message", item.message.reason)
        return count <= ANSWERED_STRANGERS or item.message.code not in ("malformed", "stranger")


def _key(peer: bytes, message: m.Message) -> tuple[bytes, int]:
    return peer, getattr(message, "optimizer", -1)


def _allocated(nbytes: int) -> Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except (RuntimeError, MemoryError) as error:
        raise Refused("memory", f"the server has no memory for {nbytes} bytes") from error
