"""Messages between leaders without a server: published weights that others read, and an inbox that they fill.

A thread of each leader serves its one socket. Received weights are summed on arrival.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import zmq
from torch import Tensor

from lightning_omni.errors import ConnectionLost, MalformedMessage, ProtocolError, Refused
from lightning_omni.methods import Inbox
from lightning_omni.methods.contract import Total
from lightning_omni.transport.connections import Address
from lightning_omni.transport.zeromq.addresses import is_private, own_host, sibling, tcp_endpoint
from lightning_omni.transport.zeromq.dialing import Dialed, Ended, SuspendAwareClock, attach, dial
from lightning_omni.transport.zeromq.frames import CHUNK_MARK, LARGEST_DATA_FRAME, Assembly, chunks
from lightning_omni.transport.zeromq.guard import ConnectionGuard
from lightning_omni.transport.zeromq.keys import RunKeys
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import RAW, Memory, WireFormat, check_size, decode
from lightning_omni.wire.handshake import OPENS_NOTHING, Challenges, server_mac
from lightning_omni.wire.layout import Layout

_log = logging.getLogger(__name__)

_SLICE = 100
"""Milliseconds between two checks whether waiting is still of use."""
CONNECT_TIME = 5.0
"""Seconds within which a connection to another leader must be established."""
UNREAD = 2
"""Unacknowledged messages to one peer; beyond them messages are dropped, because the peer is too slow."""


class PeerSocket:
    """The listening side of a leader, which publishes weights and receives messages.

    Its endpoint is ``tcp://host:*`` or ``ipc:///directory/name``. It serves only peers that hold ``keys``.
    """

    def __init__(self, endpoint: str, layouts: Sequence[Layout], keys: RunKeys, wire_format: WireFormat = RAW) -> None:
        self.strangers = 0
        self._secret = keys.peers
        self._attaching = Challenges[m.Attach](secrets.token_bytes, refusal=OPENS_NOTHING)
        self._connections: dict[int, bytes] = {}  # of each admitted rank, the latest one
        self._layouts, self._format = list(layouts), wire_format
        self._published: dict[int, tuple[Tensor, int]] = {}
        self._publications: Counter[int] = Counter()
        self._inboxes = [Total() for _ in layouts]
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._assemblies: dict[bytes, Assembly] = {}
        self._context = zmq.Context()
        self._guard = ConnectionGuard(self._context, keys)
        # Published weights are queued whole; each peer has one request at a time, so the queue needs no bound.
        self._wire = self._guard.listen(endpoint, LARGEST_DATA_FRAME)
        self._guard.start()
        self.address = self._wire.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="omni-peers", daemon=True)
        self._thread.start()

    def publish(self, optimizer: int, tensors: Sequence[Tensor]) -> None:
        # A peer may still be receiving from the old memory.
        payload = self._format.encode(tensors, self._layouts[optimizer], {}, Memory()).payload
        self._publications[optimizer] += 1
        self._published[optimizer] = payload, self._publications[optimizer]

    def read_inbox(self, optimizer: int) -> Inbox:
        with self._lock:
            inbox, self._inboxes[optimizer] = self._inboxes[optimizer], Total()
        count = inbox.count
        return Inbox(inbox.take() if count else None, count)  # type: ignore[arg-type]  # messages are whole

    def grow(self, optimizer: int, layout: Layout) -> None:
        with self._lock:
            self._layouts[optimizer], self._inboxes[optimizer] = layout, Total()
            self._published.pop(optimizer, None)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._guard.close()
        self._wire.close(0)
        self._context.term()

    # --- The thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing.is_set():
            if not self._wire.poll(_SLICE):
                continue
            peer, *frames = self._wire.recv_multipart(copy=False)
            try:
                self._take(peer.bytes, frames)
            except ProtocolError as error:
                self.strangers += 1
                self._assemblies.pop(peer.bytes, None)
                code = error.code if isinstance(error, Refused) else "malformed"
                self._send(peer.bytes, m.RefusedMessage(code=code, reason=str(error)))
            except Exception as error:  # for example, too little memory, which the next message may have
                self._assemblies.pop(peer.bytes, None)
                _log.exception("a message of another group could not be dealt with")
                self._send(peer.bytes, m.RefusedMessage(code="failed", reason=f"{type(error).__name__}: {error}"))

    def _take(self, peer: bytes, frames: list[Any]) -> None:
        if len(frames) == 2 and len(frames[0]) == len(CHUNK_MARK):
            if peer in self._assemblies:
                self._assemblies[peer].add(frames[1].buffer)
        elif len(frames) == 1:
            message = m.decode(frames[0].buffer, at="server", channel=m.PEER)
            if isinstance(message, m.Attach):
                self._send(peer, m.AttachChallenge(nonce=self._attaching.ask(peer, message)))
                return
            if isinstance(message, m.AttachProof):
                self._admit(peer, message, frames[0])
                return
            if peer not in self._connections.values():
                raise Refused("stranger", "attach first: this connection has not been admitted")
            if not 0 <= message.optimizer < len(self._layouts):
                raise ProtocolError(f"there is no optimizer {message.optimizer}")
            if isinstance(message, m.ReadPublished):
                self._show(peer, message)
                return
            self._assemblies[peer] = self._begin(message)
        else:
            raise MalformedMessage(f"{len(frames)} frames between peers")
        if peer in self._assemblies and self._assemblies[peer].is_complete:
            self._keep(self._assemblies.pop(peer))
            self._send(peer, m.PeerMessageStored())

    def _admit(self, peer: bytes, proof: m.AttachProof, frame: zmq.Frame) -> None:
        with self._guard.deciding():
            attach, challenge = self._attaching.proved(peer, proof.mac, lambda _: self._secret)
            self._assemblies.pop(self._connections.get(attach.rank, b""), None)  # which its rank has replaced
            self._connections[attach.rank] = peer
            self._guard.let_in(frame.get(zmq.SRCFD))
        self._send(peer, m.Attached(mac=server_mac(self._secret, attach, challenge)))

    def _begin(self, message: m.PeerMessage) -> Assembly:
        check_size(self._format, message.nbytes, self._layouts[message.optimizer])
        return Assembly(message, torch.empty(message.nbytes, dtype=torch.uint8))

    def _keep(self, assembly: Assembly) -> None:
        message: m.PeerMessage = assembly.message  # type: ignore[assignment]
        layout = self._layouts[message.optimizer]
        weights = self._decoded(assembly.buffer, layout)
        with self._lock:
            if layout is not self._layouts[message.optimizer]:
                weights = None
            if weights is not None:
                self._inboxes[message.optimizer].add(weights)

    def _decoded(self, payload: Tensor, layout: Layout) -> list[Tensor] | None:
        if not _fits(self._format, payload.numel(), layout):
            return None  # the layout has grown since the message was sent
        weights = layout.views(decode(self._format, payload, layout, Memory()))
        # A diverged group must not spoil the others.
        return weights if all(bool(torch.isfinite(weight).all()) for weight in weights) else None

    def _show(self, peer: bytes, asked: m.ReadPublished) -> None:
        published = self._published.get(asked.optimizer)
        payload, number = published if published is not None else (None, 0)
        self._send(peer, m.Published(nbytes=payload.numel() if payload is not None else 0, number=number))
        for chunk in chunks(payload) if payload is not None else ():
            self._wire.send_multipart([peer, CHUNK_MARK, chunk], copy=False)

    def _send(self, peer: bytes, message: m.Message) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the peer is gone
            self._wire.send_multipart([peer, m.encode(message)])


class PeerConnections:
    """The connections of a leader to the other leaders, used by one thread.

    Args:
        check: as in `Dialed.ask`.
        timeout: seconds to wait for a peer that is not reported as gone.

    Attributes:
        dropped: number of messages to receivers that were too slow or unreachable.
    """

    def __init__(
        self,
        rank: int,
        addresses: Mapping[int, Address],
        layouts: Sequence[Layout],
        keys: RunKeys,
        is_lost: Callable[[int], bool],
        check: Callable[[], None],
        timeout: float = 30.0,
        wire_format: WireFormat = RAW,
    ) -> None:
        self._rank, self._addresses = rank, dict(addresses)
        self._layouts, self._format = list(layouts), wire_format
        self._keys, self._is_lost, self._check, self._timeout = keys, is_lost, check, timeout
        self._context = zmq.Context()
        self._dialed: dict[int, Dialed] = {}
        self._unread: Counter[int] = Counter()
        self.dropped = self.moved = 0

    def read(self, group: int, optimizer: int) -> list[Tensor] | None:
        layout = self._layouts[optimizer]
        if not self._is_there(group):
            return None
        try:
            self._wire(group).send(m.encode(m.ReadPublished(optimizer=optimizer)), zmq.NOBLOCK)
            published = self._answer(group)
            if not isinstance(published, m.Published) or not published.number:
                return None
            if not _fits(self._format, published.nbytes, layout):
                self._drop(group)  # the group has another layout for now; this discards the payload under way
                return None
            assembly = Assembly(published, torch.empty(published.nbytes, dtype=torch.uint8))
            while not assembly.is_complete:
                assembly.add(self._receive(group)[-1].buffer)
        except (Ended, zmq.Again):
            self._give_up(group)
            return None
        self.moved += published.nbytes
        return layout.views(decode(self._format, assembly.buffer, layout, Memory()))

    def send(self, group: int, optimizer: int, tensors: Sequence[Tensor]) -> None:
        if not self._is_there(group):
            return
        try:  # requests and UNREAD bound the queue: sending blocks only without a connection
            wire = self._wire(group)
            while self._unread[group] and wire.poll(0):
                wire.recv_multipart()
                self._unread[group] -= 1
            if self._unread[group] >= UNREAD:
                self.dropped += 1
                if self.dropped == 1:
                    text = "group %d receives weights more slowly than they are sent to it; some are dropped"
                    _log.warning(text, group)
                return
            buffer = self._format.encode(tensors, self._layouts[optimizer], {}, Memory()).payload
            wire.send(m.encode(m.PeerMessage(optimizer=optimizer, nbytes=buffer.numel())), zmq.NOBLOCK)
            for chunk in chunks(buffer):
                wire.send_multipart([CHUNK_MARK, chunk], zmq.NOBLOCK, copy=False)
        except (Ended, zmq.Again):
            self.dropped += 1
            self._give_up(group)
            return
        self._unread[group] += 1
        self.moved += buffer.numel()

    def grow(self, optimizer: int, layout: Layout) -> None:
        self._layouts[optimizer] = layout

    def connect(self, addresses: Mapping[int, Address]) -> None:
        self._hang_up()
        self._addresses = dict(addresses)

    def close(self) -> None:
        self._hang_up()
        self._context.term()

    def _hang_up(self) -> None:
        for dialed in self._dialed.values():
            dialed.close()
        self._dialed.clear()
        self._unread.clear()

    def _is_there(self, group: int) -> bool:
        return group in self._addresses and not self._is_lost(group)

    def _wire(self, group: int) -> zmq.Socket[bytes]:
        """Return the connection to a group, opened if necessary; raise `Ended` if it cannot be."""
        if self._has_ended(group):
            self._drop(group)
        if group not in self._dialed:
            address = self._addresses[group].address
            try:
                self._dialed[group], _ = dial(
                    lambda: Dialed(address, self._keys, LARGEST_DATA_FRAME, m.PEER, context=self._context),
                    attach(self._keys.peers, self._rank),
                    self._keys,
                    address,
                    f"group {group} does not answer",
                    min(self._timeout, CONNECT_TIME),
                    lambda: self._still_wanted(group),
                )
            except ConnectionLost:
                raise Ended from None
        return self._dialed[group].wire

    def _has_ended(self, group: int) -> bool:
        """Return whether a connection has ended; ZeroMQ's own reconnection is not admitted."""
        return group in self._dialed and bool(self._dialed[group].monitor.poll(0))

    def _still_wanted(self, group: int) -> None:
        self._check()
        if self._is_lost(group):
            raise ConnectionLost(f"group {group} is gone")

    def _answer(self, group: int) -> m.Message:
        while self._unread[group]:
            self._receive(group)  # acknowledges an earlier message
            self._unread[group] -= 1
        answer: m.Message = m.decode(self._receive(group)[0].buffer, at="rank", channel=m.PEER)
        if isinstance(answer, m.RefusedMessage):
            if answer.code == "stranger":  # ZeroMQ has connected again by itself; only `dial` is admitted
                raise Ended
            raise Refused(answer.code, f"group {group} refused: {answer.reason}")
        return answer

    def _receive(self, group: int) -> list[Any]:
        clock = SuspendAwareClock()
        deadline = clock() + self._timeout
        wire = self._dialed[group].wire
        while not wire.poll(_SLICE):
            self._check()
            if self._is_lost(group) or clock() > deadline or self._has_ended(group):
                raise Ended
        return wire.recv_multipart(copy=False)

    def _give_up(self, group: int) -> None:
        why = "cannot be reached"
        if group in self._dialed:
            why = "has ended its connection" if self._has_ended(group) else f"did not answer for {self._timeout:.0f} s"
        # Reconnect next time, so that a late answer is not taken for that to another request.
        self._drop(group)
        if not self._is_lost(group):
            _log.warning("group %d %s; gossip continues without it", group, why)

    def _drop(self, group: int) -> None:
        if (dialed := self._dialed.pop(group, None)) is not None:
            dialed.close()
        self._unread[group] = 0


class PeerWires(PeerConnections):
    """The connections of a leader with the other leaders, in both directions.

    ``everywhere`` is as in `lightning_omni.transport.connections.Control.listen`.
    """

    def __init__(
        self,
        server: str,
        rank: int,
        layouts: Sequence[Layout],
        keys: RunKeys,
        is_lost: Callable[[int], bool],
        check: Callable[[], None],
        everywhere: bool,
        wire_format: WireFormat = RAW,
    ) -> None:
        super().__init__(rank, {}, layouts, keys, is_lost, check, wire_format=wire_format)
        self._socket = PeerSocket(_endpoint(server, rank, everywhere), layouts, keys, wire_format)
        self.address = self._socket.address
        self.publish, self.read_inbox = self._socket.publish, self._socket.read_inbox

    def grow(self, optimizer: int, layout: Layout) -> None:
        self._socket.grow(optimizer, layout)
        super().grow(optimizer, layout)

    def close(self) -> None:
        super().close()
        self._socket.close()


def _fits(wire_format: WireFormat, nbytes: int, layout: Layout) -> bool:
    smallest, largest = wire_format.sizes(layout)
    return smallest <= nbytes <= largest


def _endpoint(server: str, rank: int, everywhere: bool) -> str:
    if is_private(server):
        return sibling(server, f"peer-{rank}-{secrets.token_hex(4)}")
    host = own_host(server)
    if host.startswith("127.") and everywhere:
        host = "0.0.0.0"  # the server is on this machine, and other nodes use another address
    return tcp_endpoint(host)
