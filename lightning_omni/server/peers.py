"""From leader to leader, with no server between: published weights that others read, and an inbox that they fill.

Each leader has one socket that a thread of its own serves, so that a peer is answered while this leader computes or
validates. What comes in is summed up where it lands: one model for the inbox, and one for each message on its way.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import zmq
from torch import Tensor

from lightning_omni.errors import ConnectionLost, MalformedMessage, ProtocolError, Refused
from lightning_omni.methods import Inbox
from lightning_omni.methods.totals import Total
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.arrivals import Arrivals
from lightning_omni.protocol.handshake import NONCE_BYTES, attach_mac, is_equal
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.roster import MOST_CHALLENGED
from lightning_omni.protocol.transport import Address
from lightning_omni.protocol.wire_format import RAW, Memory, WireFormat, check_size, decode
from lightning_omni.server.addresses import is_private, own_host, sibling, tcp_endpoint
from lightning_omni.server.awake import AwakeClock
from lightning_omni.server.dialing import Dialed, attach, dial
from lightning_omni.server.frames import CHUNK_MARK, LARGEST_DATA_FRAME, Assembly, chunks
from lightning_omni.server.guard import ConnectionGuard
from lightning_omni.server.keys import RunKeys

_log = logging.getLogger(__name__)

_SLICE = 100
"""Milliseconds after which a waiting thread looks whether there is still something to wait for."""
CONNECT_TIME = 5.0
"""Seconds in which a connection to another leader must stand."""
UNREAD = 2
"""Messages to one peer that may be on their way; further ones are dropped, for the peer is too slow to take them."""


class PeerSocket:
    """A leader's own side: publishes weights, takes messages in.

    Args:
        endpoint: what to bind: ``tcp://host:*`` or ``ipc:///directory/name``.
        layouts: of each optimizer's parameters.
        keys: of the run; only a peer that holds them is answered.
        wire_format: how weights are put into bytes.
    """

    def __init__(self, endpoint: str, layouts: Sequence[Layout], keys: RunKeys, wire_format: WireFormat = RAW) -> None:
        self.strangers = 0
        self._secret = keys.peers
        self._attaching: dict[bytes, tuple[m.Attach, bytes]] = {}
        self._connections: dict[int, bytes] = {}  # of each rank that was admitted, the last one
        self._layouts, self._format = list(layouts), wire_format
        self._published: dict[int, tuple[Tensor, int]] = {}
        self._publications: Counter[int] = Counter()
        self._held: dict[tuple[bytes, int], tuple[Tensor, int]] = {}  # as they were when they were asked for
        self._inboxes = [Total() for _ in layouts]
        self._arrivals = [Arrivals() for _ in layouts]
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._assemblies: dict[bytes, Assembly] = {}
        self._context = zmq.Context()
        self._guard = ConnectionGuard(self._context, keys)
        # Published weights are queued whole; each peer asks for them once at a time, so there is nothing to bound.
        self._wire = self._guard.listen(endpoint, LARGEST_DATA_FRAME)
        self._guard.start()
        self.address = self._wire.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="omni-peers", daemon=True)
        self._thread.start()

    def publish(self, optimizer: int, tensors: Sequence[Tensor]) -> None:
        """Others read these weights from now on; copied."""
        # In new memory: the old one may still be on its way to a peer.
        payload = self._format.encode(tensors, self._layouts[optimizer], {}, Memory()).payload
        self._publications[optimizer] += 1
        self._published[optimizer] = payload, self._publications[optimizer]

    def read_inbox(self, optimizer: int) -> Inbox:
        """Empties the inbox."""
        with self._lock:
            inbox, self._inboxes[optimizer] = self._inboxes[optimizer], Total()
        count = inbox.count
        return Inbox(inbox.take() if count else None, count)  # type: ignore[arg-type]  # messages are whole

    @contextlib.contextmanager
    def arrivals(self, optimizer: int) -> Iterator[Arrivals]:
        """A context with what has come in parts; nothing comes in it."""
        with self._lock:
            yield self._arrivals[optimizer]

    def grow(self, optimizer: int, layout: Layout) -> None:
        """An optimizer's weights have another layout; what lies here in the old one is gone."""
        with self._lock:
            self._layouts[optimizer], self._inboxes[optimizer] = layout, Total()
            self._arrivals[optimizer].spoil()
            self._published.pop(optimizer, None)

    def close(self) -> None:
        """No peer is answered any more."""
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
            except Exception as error:  # no memory, say; there may be some for the next one
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
                self._challenge(peer, message)
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
            self._send(peer, m.Taken())

    def _challenge(self, peer: bytes, attach: m.Attach) -> None:
        challenge = secrets.token_bytes(NONCE_BYTES)
        self._attaching[peer] = (attach, challenge)
        while len(self._attaching) > MOST_CHALLENGED:
            self._attaching.pop(next(iter(self._attaching)))
        self._send(peer, m.AttachChallenge(nonce=challenge))

    def _admit(self, peer: bytes, proof: m.AttachProof, frame: zmq.Frame) -> None:
        with self._guard.deciding():
            attach, challenge = self._attaching.pop(peer, (None, b""))
            if attach is None or not is_equal(proof.mac, attach_mac(self._secret, "rank", attach, challenge)):
                raise Refused("stranger", "this proof opens nothing")
            self._forget(self._connections.get(attach.rank, b""))
            self._connections[attach.rank] = peer
            self._guard.let_in(frame.get(zmq.SRCFD))
        self._send(peer, m.Attached(mac=attach_mac(self._secret, "server", attach, challenge)))

    def _forget(self, peer: bytes) -> None:
        """A rank has given this connection up: what was under way on it never comes to its end."""
        self._assemblies.pop(peer, None)
        for held in [each for each in self._held if each[0] == peer]:
            del self._held[held]

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
            if message.number:
                self._arrivals[message.optimizer].add(message.sender, message.number, weights)
            elif weights is not None:
                self._inboxes[message.optimizer].add(weights)

    def _decoded(self, payload: Tensor, layout: Layout) -> list[Tensor] | None:
        """The weights of a message; None if they are of no use."""
        if not _fits(self._format, payload.numel(), layout):
            return None  # there are more parameters since it set out
        weights = layout.views(decode(self._format, payload, layout, Memory()))
        # A group that has diverged must not take the others along.
        return weights if all(bool(torch.isfinite(weight).all()) for weight in weights) else None

    def _show(self, peer: bytes, asked: m.ReadPublished) -> None:
        published = self._published.get(asked.optimizer)
        if asked.holds:
            if published is not None:
                self._held[peer, asked.optimizer] = published
        else:
            published = self._held.pop((peer, asked.optimizer), published)
        payload, number = published if published is not None else (None, 0)
        self._send(peer, m.Published(nbytes=payload.numel() if payload is not None else 0, number=number))
        for chunk in chunks(payload) if payload is not None and not asked.holds else ():
            self._wire.send_multipart([peer, CHUNK_MARK, chunk], copy=False)

    def _send(self, peer: bytes, message: m.Message) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the peer that asked is gone
            self._wire.send_multipart([peer, m.encode(message)])


class PeerConnections:
    """A leader's connections to the other leaders. Used from one thread.

    Args:
        rank: the leader.
        addresses: of the other groups' leaders.
        layouts: of each optimizer's parameters.
        keys: of the run.
        is_lost: whether a group is gone, so that waiting for it is pointless.
        check: called while waiting; raises what makes waiting pointless.
        timeout: seconds to wait for a peer that is not known to be gone.
        wire_format: how weights are put into bytes.

    Attributes:
        dropped: messages that were not sent, because a group did not take the ones before.
        moved: bytes of weights that were sent to other groups, and read from them.
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
        self._held: dict[tuple[int, int], int] = {}
        self.dropped = self.moved = 0

    def read(self, group: int, optimizer: int) -> list[Tensor] | None:
        """What a group has published: CPU tensors; None if there is nothing or no group."""
        held = self._held.pop((group, optimizer), None)
        published, layout = self._ask(group, m.ReadPublished(optimizer=optimizer)), self._layouts[optimizer]
        if published is None or not published.number:
            return None
        # It has other parameters than this group, for now; or the connection is not the one for which it held them.
        if not _fits(self._format, published.nbytes, layout) or held not in (None, published.number):
            self._drop(group)  # with all that is on its way
            return None
        assembly = Assembly(published, torch.empty(published.nbytes, dtype=torch.uint8))
        while not assembly.is_complete:
            frames = self._receive(group)
            if frames is None:
                return None
            assembly.add(frames[-1].buffer)
        self.moved += published.nbytes
        return layout.views(decode(self._format, assembly.buffer, layout, Memory()))

    def hold(self, group: int, optimizer: int) -> int:
        """Which publication `read` gives next, whatever the group publishes meanwhile; 0 is none."""
        published = self._ask(group, m.ReadPublished(optimizer=optimizer, holds=True))
        self._held[group, optimizer] = published.number if published is not None else 0
        return self._held[group, optimizer]

    def send(self, group: int, optimizer: int, tensors: Sequence[Tensor]) -> None:
        """Puts weights into a group's inbox, unless it has not taken the last ones yet."""
        if self.takes(group):
            self.send_part(group, optimizer, tensors)

    def takes(self, group: int) -> bool:
        """Whether a message to a group would be sent now."""
        if group not in self._addresses or self._is_lost(group):
            return False
        wire = self._wire(group)
        if wire is None:
            self.dropped += 1
            return False
        while self._unread[group] and wire.poll(0):
            wire.recv_multipart()
            self._unread[group] -= 1
        if self._unread[group] >= UNREAD:
            self.dropped += 1
            if self.dropped == 1:
                _log.warning("group %d receives weights more slowly than they are sent to it; some are dropped", group)
            return False
        return True

    def send_part(
        self, group: int, optimizer: int, tensors: Sequence[Tensor], sender: int = 0, number: int = 0
    ) -> None:
        """Puts a part of a message into a group's inbox, or with number 0 a whole one; right after `takes`."""
        buffer = self._format.encode(tensors, self._layouts[optimizer], {}, Memory()).payload
        message = m.PeerMessage(optimizer=optimizer, nbytes=buffer.numel(), sender=sender, number=number)
        self._send(group, [m.encode(message)])
        for chunk in chunks(buffer):
            self._send(group, [CHUNK_MARK, chunk])
        self._unread[group] += 1
        self.moved += buffer.numel()

    def grow(self, optimizer: int, layout: Layout) -> None:
        """An optimizer's weights have another layout."""
        self._layouts[optimizer] = layout

    def connect(self, addresses: Mapping[int, Address]) -> None:
        """Tells it where the leaders of the other groups listen."""
        self._hang_up()
        self._addresses = dict(addresses)

    def close(self) -> None:
        """Closes all connections at once."""
        self._hang_up()
        self._context.term()

    def _hang_up(self) -> None:
        for dialed in self._dialed.values():
            dialed.close()
        self._dialed.clear()
        self._unread.clear()

    def _wire(self, group: int) -> zmq.Socket[bytes] | None:
        """The connection to a group's leader, made when first needed; None if it cannot be had."""
        if self._has_ended(group):
            self._drop(group)
        if group not in self._dialed:
            address = self._addresses[group].address
            try:
                self._dialed[group], _ = dial(
                    lambda: Dialed(self._context, address, self._keys, LARGEST_DATA_FRAME, m.PEER),
                    lambda attempt, deadline: attach(
                        attempt, deadline, self._keys.peers, self._rank, lambda: self._still_wanted(group)
                    ),
                    self._keys,
                    address,
                    f"group {group} does not answer",
                    min(self._timeout, CONNECT_TIME),
                )
            except ConnectionLost:
                self._give_up(group)
                return None
        return self._dialed[group].wire

    def _has_ended(self, group: int) -> bool:
        """Whether the connection to a group's leader has ended; ZeroMQ makes another one, which is not admitted."""
        return group in self._dialed and bool(self._dialed[group].monitor.poll(0))

    def _send(self, group: int, frames: list[Any]) -> bool:
        try:  # what is queued is bounded by what is asked and by UNREAD: it blocks only where there is no connection
            self._dialed[group].wire.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except (zmq.Again, KeyError):
            self._give_up(group)
            return False
        return True

    def _still_wanted(self, group: int) -> None:
        self._check()
        if self._is_lost(group):
            raise ConnectionLost(f"group {group} is gone")

    def _ask(self, group: int, question: m.ReadPublished) -> m.Published | None:
        """What a group answers; None if there is no group."""
        if group not in self._addresses or self._is_lost(group):
            return None
        if self._wire(group) is None or not self._send(group, [m.encode(question)]):
            return None
        published = self._answer(group)
        return published if isinstance(published, m.Published) else None

    def _answer(self, group: int) -> m.Message | None:
        frames = self._receive(group)
        while frames is not None and self._unread[group]:  # of an earlier message
            self._unread[group] -= 1
            frames = self._receive(group)
        if frames is None:
            return None
        answer: m.Message = m.decode(frames[0].buffer, at="rank", channel=m.PEER)
        if isinstance(answer, m.RefusedMessage):
            raise Refused(answer.code, f"group {group} refused: {answer.reason}")
        return answer

    def _receive(self, group: int) -> list[Any] | None:
        clock = AwakeClock()
        deadline = clock() + self._timeout
        wire = self._dialed[group].wire
        while not wire.poll(_SLICE):
            self._check()
            if self._is_lost(group) or clock() > deadline or self._has_ended(group):
                self._give_up(group)
                return None
        return wire.recv_multipart(copy=False)

    def _give_up(self, group: int) -> None:
        why = "cannot be reached"
        if group in self._dialed:
            why = "has ended its connection" if self._has_ended(group) else f"did not answer for {self._timeout:.0f} s"
        # A new connection next time: a late answer must not be taken for that to another question.
        self._drop(group)
        if not self._is_lost(group):
            _log.warning("group %d %s; gossip continues without it", group, why)

    def _drop(self, group: int) -> None:
        if (dialed := self._dialed.pop(group, None)) is not None:
            dialed.close()
        self._unread[group] = 0


class PeerWires(PeerConnections):
    """A leader's way to the other leaders, both directions.

    Args:
        server: address of the server's control socket.
        rank: the leader.
        layouts: of each optimizer's parameters.
        keys: of the run.
        is_lost: whether a group is gone, so that waiting for it is pointless.
        check: called while waiting; raises what makes waiting pointless.
        everywhere: whether leaders on other machines must be able to reach this one.
        wire_format: how weights are put into bytes.

    Attributes:
        address: where it listens.
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
        self.arrivals = self._socket.arrivals

    def grow(self, optimizer: int, layout: Layout) -> None:
        """An optimizer's weights have another layout; what lies here in the old one is gone."""
        self._socket.grow(optimizer, layout)
        super().grow(optimizer, layout)

    def close(self) -> None:
        """Ends both directions."""
        super().close()
        self._socket.close()


def _fits(wire_format: WireFormat, nbytes: int, layout: Layout) -> bool:
    smallest, largest = wire_format.sizes(layout)
    return smallest <= nbytes <= largest


def _endpoint(server: str, rank: int, everywhere: bool) -> str:
    """Where a leader listens: beside the server's sockets, or on the address by which that is reached."""
    if is_private(server):
        return sibling(server, f"peer-{rank}-{secrets.token_hex(4)}")
    host = own_host(server)
    if host.startswith("127.") and everywhere:
        host = "0.0.0.0"  # the server is on this machine, and the other nodes know it by another address
    return tcp_endpoint(host)
