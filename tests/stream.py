"""A transport of one file: TCP streams, on which a message is MessagePack and its payload follows.

For tests and to be read: a thread for each connection, and no encryption. The package knows nothing of it.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from core import (
    RAW,
    REQUEST_TIMEOUT,
    Address,
    Control,
    Data,
    Layout,
    Out,
    Payload,
    ServerCore,
    Total,
    Transport,
    WireFormat,
    allowed,
    answer_of,
    as_tensor,
    handshake,
    refusal,
    register,
)
from core import messages as m
from torch import Tensor

from lightning_omni.errors import (
    ConfigurationError,
    ConnectionLost,
    MalformedMessage,
    OmniError,
    ProtocolError,
    Refused,
)
from lightning_omni.methods import Inbox

T = TypeVar("T", bound=m.Message)
BEAT, SLICE, TICK = 0.5, 0.1, 0.1
_HEAD = struct.Struct("<II")
_KINDS = {m.CONTROL: b"c", m.DATA: b"d"}


@register
class Stream(Transport, frozen=True, kw_only=True, tag="stream"):
    """TCP streams."""

    def check_address(self, address: str) -> None:
        if urlsplit(address).scheme != "stream" or not urlsplit(address).port:
            raise ConfigurationError(
                f'server={address!r}: pass the address of a running server as "stream://host:port"'
            )

    def serve(self, core: ServerCore, host: str = "", port: int = 0, data_port: int = 0) -> StreamServer:
        return StreamServer(core, host or "127.0.0.1", port)

    def join(
        self,
        address: str,
        key: bytes,
        run: str,
        rank: int,
        world_size: int,
        layout: Layout,
        on_end: Callable[[OmniError], None] | None = None,
        silence: float = 0.0,
    ) -> StreamControl:
        return StreamControl(address, key, run, rank, world_size, layout, on_end)


class Wire:
    """A connection: messages with the parts of their payloads, either way."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._file = connection, connection.makefile("rb")
        self._lock = threading.Lock()

    @classmethod
    def to(cls, address: str, kind: bytes = b"") -> Wire:
        parts = urlsplit(address)
        assert parts.hostname is not None
        try:
            wire = cls(socket.create_connection((parts.hostname, parts.port or 0), 15.0))
        except OSError as error:
            raise ConnectionLost(f"none answers at {address}: {error}") from error
        wire._socket.sendall(kind)
        return wire

    def send(self, message: m.Message, *payload: Payload) -> None:
        data, parts = m.encode(message), [as_tensor(part).numpy().data for part in payload]
        with self._lock:
            self._socket.sendall(_HEAD.pack(len(data), len(parts)))
            self._socket.sendall(struct.pack(f"<{len(parts)}Q", *map(len, parts)) + data)
            for part in parts:
                self._socket.sendall(part)

    def receive(self) -> tuple[bytes, list[int]]:
        """A message, and the sizes of what follows."""
        length, count = _HEAD.unpack(self.read(_HEAD.size))
        if length > m.LONGEST or count > 1 << 16:
            raise EOFError
        sizes = list(struct.unpack(f"<{count}Q", self.read(8 * count)))
        return self.read(length), sizes

    def read(self, nbytes: int) -> bytes:
        data = self._file.read(nbytes)
        if len(data) < nbytes:
            raise EOFError
        return data

    def tensor(self, nbytes: int, into: Tensor | None = None) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8) if into is None or into.numel() < nbytes else into[:nbytes]
        if self._file.readinto(memory.numpy().data) < nbytes:
            raise EOFError
        return memory

    def skip(self, nbytes: int) -> None:
        while nbytes > 0:
            nbytes -= len(self.read(min(nbytes, 1 << 20)))

    def has_more(self, seconds: float) -> bool:
        return bool(select.select([self._socket], [], [], seconds)[0])

    def allow(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def say(self, channel: m.Channel) -> handshake.Request:
        """Questions and answers, for a handshake."""

        def say(message: m.Message, expect: type[Any]) -> Any:
            try:
                self.send(message)
                return answer_of(m.decode(self.receive()[0], at="rank", channel=channel), expect)
            except (OSError, EOFError) as error:
                raise ConnectionLost(f"no answer to {type(message).__name__}") from error

        return say

    def close(self) -> None:
        end(self._socket)
        self._file.close()


def end(connection: socket.socket) -> None:
    """Also for another thread that waits at it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def start(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()


def accept(listener: socket.socket, serve: Callable[[Wire], None]) -> None:
    with contextlib.suppress(OSError):  # it was closed
        while True:
            start(serve, Wire(listener.accept()[0]))


# --- The server ------------------------------------------------------------------------------------------------------


class StreamServer:
    """Drives a `ServerCore`, a thread for each connection, one of them at a time."""

    def __init__(self, core: ServerCore, host: str, port: int) -> None:
        self.core = core
        self._listener = socket.create_server((host, port), backlog=128)
        self.address = f"stream://{host}:{self._listener.getsockname()[1]}"
        self._wires: dict[bytes, Wire] = {}
        self._lock = threading.RLock()

    def run(self, until: Callable[[], bool]) -> None:
        start(accept, self._listener, self._serve)
        while not until():
            with self._lock:
                self._send(self.core.tick(time.monotonic()))
                pause = min(TICK, max(0.0, self.core.due - time.monotonic()))
            time.sleep(pause)

    def farewell(self, reason: str) -> None:
        with self._lock:
            self._send(self.core.lose(0, reason))

    def close(self) -> None:
        end(self._listener)
        for wire in list(self._wires.values()):
            wire.close()

    def _serve(self, wire: Wire) -> None:
        peer = secrets.token_bytes(8)
        self._wires[peer] = wire
        try:
            channel = {kind: channel for channel, kind in _KINDS.items()}.get(wire.read(1))
            while channel is not None:
                self._take(channel, peer, wire)
        except (OSError, EOFError):
            pass
        with self._lock:
            del self._wires[peer]
            self._send(self.core.hang_up(peer))
        wire.close()

    def _take(self, channel: m.Channel, peer: bytes, wire: Wire) -> None:
        data, sizes = wire.receive()
        nbytes = sum(sizes)
        try:
            with self._lock:
                message = allowed(self.core, channel, peer, data, nbytes)
        except ProtocolError as error:
            wire.skip(nbytes)
            with self._lock:
                self._send(refusal(self.core, channel, peer, error))
            return
        payload: Payload = wire.tensor(nbytes) if channel == m.DATA else wire.read(nbytes)
        with self._lock:
            self._send(self.core.receive(channel, peer, message, payload, time.monotonic()))
            self.core.status_service.end()

    def _send(self, out: Sequence[Out]) -> None:
        for item in out:
            if (wire := self._wires.get(item.peer)) is not None:
                with contextlib.suppress(OSError):
                    wire.send(item.message, *item.payload)


# --- A rank ----------------------------------------------------------------------------------------------------------


class StreamControl(Control):
    """A control connection, with a thread that hears and one that gives signs of life."""

    def __init__(
        self,
        address: str,
        key: bytes,
        run: str,
        rank: int,
        world_size: int,
        layout: Layout,
        on_end: Callable[[OmniError], None] | None,
    ) -> None:
        super().__init__(address, rank, on_end)
        self._answers: queue.SimpleQueue[tuple[m.Message, list[bytes]]] = queue.SimpleQueue()
        self._closing, self._over = threading.Event(), threading.Event()
        self._key = key
        self._wire = Wire.to(address, _KINDS[m.CONTROL])
        hello = handshake.hello_of(run, rank, world_size, layout, secrets.token_bytes(handshake.NONCE_BYTES))
        try:
            welcome, self._secret = handshake.join(self._wire.say(m.CONTROL), key, hello, address)
        except BaseException:
            self._wire.close()
            raise
        self._wire.allow(welcome.heartbeat_timeout)  # every sign of life is answered
        start(self._listen)
        start(self._beat)

    def request_payload(
        self, message: m.Message, expect: type[T], payload: bytes = b"", timeout: float = REQUEST_TIMEOUT
    ) -> tuple[T, list[bytes]]:
        self.check()
        self.post(message, payload)
        deadline = time.monotonic() + timeout
        while True:
            try:
                answer, parts = self._answers.get(timeout=SLICE)
                return answer_of(answer, expect), parts
            except queue.Empty:
                self.check()
            if time.monotonic() > deadline:
                raise ConnectionLost(f"no answer to {type(message).__name__} within {timeout:.0f} s")

    def post(self, message: m.Message, payload: bytes = b"") -> None:
        with contextlib.suppress(OSError):  # as `_listen` finds out, too
            self._wire.send(message, *([payload] if payload else []))

    def wait_for_end(self, seconds: float) -> OmniError | None:
        self._over.wait(seconds)
        return self._ended

    def attach(self, timeout: float = 300.0, address: str = "") -> StreamData:
        return StreamData(self, self._secret, timeout)

    def listen(
        self,
        layouts: Sequence[Layout],
        is_lost: Callable[[int], bool],
        everywhere: bool,
        wire_format: WireFormat = RAW,
    ) -> StreamPeers:
        host = urlsplit(self.address).hostname
        assert host is not None
        return StreamPeers(host, layouts, handshake.derive(self._key, b"peers"), is_lost)

    def end(self, error: OmniError) -> None:
        if not self._closing.is_set():
            super().end(error)
            self._over.set()

    def close(self, reason: str | None = None) -> None:
        if self._closing.is_set():
            return
        if reason is not None and self.cause is None:
            with contextlib.suppress(OmniError):
                self.request(m.Goodbye(reason=reason), m.Acknowledged, timeout=5.0)
        self._closing.set()
        self._wire.close()

    def _listen(self) -> None:
        try:
            while True:
                data, sizes = self._wire.receive()
                parts = [self._wire.read(nbytes) for nbytes in sizes]
                message = m.decode(data, at="rank", channel=m.CONTROL)
                if self.handle(message):
                    self._answers.put((message, parts))
        except MalformedMessage as error:
            self.end(error)
        except (OSError, EOFError, ValueError):
            self.end(ConnectionLost(f"the parameter server at {self.address} is gone; the run cannot go on"))

    def _beat(self) -> None:
        while not self._closing.wait(BEAT):
            self.post(self.heartbeat(time.monotonic()))


class StreamData(Data):
    """A data connection."""

    def __init__(self, control: StreamControl, secret: bytes, timeout: float) -> None:
        self._control, self._timeout = control, timeout
        self._wire = Wire.to(control.address, _KINDS[m.DATA])
        try:
            nonce = secrets.token_bytes(handshake.NONCE_BYTES)
            handshake.attach(self._wire.say(m.DATA), secret, control.rank, nonce)
        except BaseException:
            self._wire.close()
            raise
        self._wire.allow(None)

    def send(self, message: m.Message, payload: Tensor | None = None, into: Tensor | None = None) -> None:
        with self._naming_the_cause():
            self._wire.send(message, *([payload] if payload is not None else []))
        self.moved += payload.numel() if payload is not None else 0

    def receive(self, expect: type[T], into: Tensor | None = None) -> tuple[T, Tensor]:
        deadline = time.monotonic() + self._timeout
        with self._naming_the_cause():
            while not self._wire.has_more(SLICE):
                self._control.check()
                if time.monotonic() > deadline:
                    raise ConnectionLost(f"the parameter server sent no tensors for {self._timeout:.0f} s")
            data, sizes = self._wire.receive()
            answer = answer_of(m.decode(data, at="rank", channel=m.DATA), expect)
            self.moved += sum(sizes)
            return answer, self._wire.tensor(sum(sizes), into)

    @contextlib.contextmanager
    def _naming_the_cause(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            self._control.check()
            raise ConnectionLost("the connection to the parameter server has ended") from error

    def close(self) -> None:
        self._wire.close()


class StreamPeers:
    """A leader's way to the other leaders."""

    def __init__(self, host: str, layouts: Sequence[Layout], secret: bytes, is_lost: Callable[[int], bool]) -> None:
        self._layouts, self._secret, self._is_lost = list(layouts), secret, is_lost
        self._published: dict[int, Tensor] = {}
        self._inboxes = [Total() for _ in layouts]
        self._lock = threading.Lock()
        self._addresses: Mapping[int, Address] = {}
        self._wires: dict[int, Wire] = {}
        self.moved = 0
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address = f"stream://{host}:{self._listener.getsockname()[1]}"
        start(accept, self._listener, self._serve)

    def connect(self, addresses: Mapping[int, Address]) -> None:
        self._addresses = dict(addresses)

    def publish(self, optimizer: int, tensors: Sequence[Tensor]) -> None:
        self._published[optimizer] = self._flat(optimizer, tensors)

    def read(self, group: int, optimizer: int) -> Sequence[Tensor] | None:
        answer = self._ask(group, m.ReadPublished(optimizer=optimizer), m.Published)
        layout = self._layouts[optimizer]
        self.moved += answer.numel() if answer is not None else 0
        return layout.views(answer) if answer is not None and 0 < answer.numel() == layout.nbytes else None

    def send(self, group: int, optimizer: int, tensors: Sequence[Tensor]) -> None:
        flat = self._flat(optimizer, tensors)
        self.moved += flat.numel()
        self._ask(group, m.PeerMessage(optimizer=optimizer, nbytes=flat.numel()), m.PeerMessageStored, flat)

    def read_inbox(self, optimizer: int) -> Inbox:
        with self._lock:
            inbox, self._inboxes[optimizer] = self._inboxes[optimizer], Total()
        count = inbox.count
        return Inbox(inbox.take() if count else None, count)  # type: ignore[arg-type]

    def grow(self, optimizer: int, layout: Layout) -> None:
        with self._lock:
            self._layouts[optimizer], self._inboxes[optimizer] = layout, Total()
            self._published.pop(optimizer, None)

    def close(self) -> None:
        end(self._listener)
        for wire in self._wires.values():
            wire.close()

    def _flat(self, optimizer: int, tensors: Sequence[Tensor]) -> Tensor:
        flat = self._layouts[optimizer].empty()
        for view, tensor in zip(self._layouts[optimizer].views(flat), tensors, strict=True):
            view.copy_(tensor)
        return flat

    def _ask(self, group: int, message: m.Message, expect: type[Any], *payload: Tensor) -> Tensor | None:
        if group not in self._addresses or self._is_lost(group):
            return None
        try:
            if group not in self._wires:
                wire = self._wires[group] = Wire.to(self._addresses[group].address)
                handshake.attach(wire.say(m.PEER), self._secret, group, secrets.token_bytes(handshake.NONCE_BYTES))
            self._wires[group].send(message, *payload)
            data, sizes = self._wires[group].receive()
            answer_of(m.decode(data, at="rank", channel=m.PEER), expect)
            return self._wires[group].tensor(sum(sizes))
        except (OSError, EOFError, OmniError):
            self._wires.pop(group, None)
            return None

    def _serve(self, wire: Wire) -> None:
        with contextlib.suppress(OSError, EOFError, ProtocolError):
            self._let_in(wire)
            while True:
                data, sizes = wire.receive()
                message = m.decode(data, at="server", channel=m.PEER)
                layout = self._layouts[message.optimizer]
                if isinstance(message, m.ReadPublished):
                    published = self._published.get(message.optimizer)
                    nbytes = published.numel() if published is not None else 0
                    wire.send(m.Published(nbytes=nbytes), *([] if published is None else [published]))
                    continue
                if sum(sizes) != layout.nbytes:
                    raise MalformedMessage(f"the weights have {sum(sizes)} bytes, {layout.nbytes} were expected")
                weights = layout.views(wire.tensor(layout.nbytes))
                with self._lock:
                    self._inboxes[message.optimizer].add(weights)
                wire.send(m.PeerMessageStored())
        wire.close()

    def _let_in(self, wire: Wire) -> None:
        attach = m.decode(wire.receive()[0], at="server", channel=m.PEER)
        challenge = secrets.token_bytes(handshake.NONCE_BYTES)
        wire.send(m.AttachChallenge(nonce=challenge))
        proof = m.decode(wire.receive()[0], at="server", channel=m.PEER)
        right = handshake.client_mac(self._secret, attach, challenge)
        if not isinstance(proof, m.AttachProof) or not handshake.is_equal(proof.mac, right):
            raise Refused("stranger", "this proof opens nothing")
        wire.send(m.Attached(mac=handshake.server_mac(self._secret, attach, challenge)))
