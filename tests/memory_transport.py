"""A transport of server and ranks in one process, on top of `InMemoryConnections`: no sockets, threads or clocks.

A message is handled before the call that sends it returns.

Rule: no call waits. If the answer to a request depends on other ranks, send it with `InMemoryData.send` and take the
answer once it has arrived; `receive`, `exchange` and `request` raise if no answer has arrived.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec
import torch
from core import (
    COORDINATOR,
    RAW,
    REQUEST_TIMEOUT,
    Address,
    Control,
    Data,
    Layout,
    Out,
    Payload,
    Peers,
    ServerCore,
    Total,
    Transport,
    WireFormat,
    allowed,
    answer_of,
    as_tensor,
    handshake,
    nbytes_of,
    refusal,
    refused_return,
)
from core import messages as m
from torch import Tensor

from lightning_omni.errors import ConfigurationError, ConnectionLost, OmniError, ProtocolError, Refused
from lightning_omni.methods import Inbox

Answer = TypeVar("Answer", bound=m.Message)
_NONCE = bytes(handshake.NONCE_BYTES)
"""The nonce of every rank: the server's nonces are fresh, and no process can overhear."""
_SCHEME = "memory://"


class InMemory(Transport, frozen=True, kw_only=True, tag="in_memory"):
    """A transport inside one process. The value that made a server finds it by its address.

    Attributes:
        servers: the servers by address.

    Example:
        >>> transport, core = InMemory(), ServerCore(bytes(32), bytes)
        >>> server = transport.serve(core)
        >>> layout = Layout.of({"w": torch.zeros(2)})
        >>> rank = transport.join(server.address, bytes(32), "run", 0, 1, layout)
        >>> rank.request(m.AskStatus(), m.Status).clock
        0
    """

    servers: dict[str, InMemoryServer] = msgspec.field(default_factory=dict)

    def check_address(self, address: str) -> None:
        if address not in self.servers:
            raise ConfigurationError(
                f"server={address!r}: nothing is served there; pass the address of a server of this value's `serve`"
            )

    def serve(self, core: ServerCore, host: str = "", port: int = 0, data_port: int = 0) -> InMemoryServer:
        server = InMemoryServer(f"{_SCHEME}{len(self.servers)}", core, self.servers)
        self.servers[server.address] = server
        return server

    def serve_again(self, core: ServerCore, address: str) -> InMemoryServer:
        """Serve as in `Transport`; the ranks of the earlier server connect to this one in order."""
        self.check_address(address)
        before, server = self.servers[address], InMemoryServer(address, core, self.servers)
        self.servers[address] = server
        server.leaders.update(before.leaders)
        for control in before.ranks:
            control.return_to(server)
        return server

    def follow(
        self, core: ServerCore, coordinator: str, host: str = "", port: int = 0, data_port: int = 0
    ) -> InMemoryServer:
        self.check_address(coordinator)
        server = self.serve(core)
        server.follow(self.servers[coordinator])
        return server

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
    ) -> InMemoryControl:
        self.check_address(address)
        return InMemoryControl(self.servers[address], key, run, rank, world_size, layout, on_end)


class InMemoryConnections:
    """The connections of all ranks to a server in this process.

    Attributes:
        now: seconds on a monotonic clock, set by the driver.
    """

    def __init__(self, core: ServerCore) -> None:
        self.core = core
        self.now = 0.0

    def control(self, rank: int, message: m.Message, payload: bytes = b"") -> list[Out]:
        """Send a rank's message on its control connection; return the server's messages to any ranks.

        The returned tensors are valid until the next message.
        """
        return self.core.receive(m.CONTROL, b"c%d" % rank, message, payload, self.now)

    def data(self, rank: int, message: m.Message, payload: Payload = b"") -> list[Out]:
        return self.core.receive(m.DATA, b"d%d" % rank, message, payload, self.now)

    def hang_up(self, rank: int) -> list[Out]:
        return self.core.hang_up(b"c%d" % rank)

    def rank_of(self, peer: bytes) -> int:
        return int(peer[1:])


class InMemoryServer:
    """A server that handles each message when it is sent.

    Args:
        address: address for ranks to join.
        core: its state machine.
        servers: all servers by address.

    Attributes:
        link: connections of all ranks.
        leaders: the other leaders by address.
    """

    def __init__(self, address: str, core: ServerCore, servers: Mapping[str, InMemoryServer]) -> None:
        self.address = address
        self.link = InMemoryConnections(core)
        self.leaders: dict[str, InMemoryPeers] = {}
        self._servers = servers
        self._coordinator: _CoordinatorLink | None = None
        self._to_come: deque[tuple[int, m.Message]] = deque()  # from followers
        self._delivering = 0
        self._controls: list[_Receiver | None] = []
        self._answers: list[deque[tuple[m.Message, Tensor]]] = []
        self._closed = False

    def run(self, until: Callable[[], bool]) -> None:
        """Advance the state machine to `InMemoryConnections.now` and return; messages are handled when sent."""
        self.deliver(self.link.core.tick(self.link.now))

    def farewell(self, reason: str) -> None:
        """Report to the other ranks, unless the run is over, that rank 0, which owns this server, has ended."""
        self.deliver(self.link.core.lose(0, reason))

    def kill(self) -> None:
        """Stop answering without a report to the ranks, as if the process had ended."""
        self._closed = True

    @property
    def is_gone(self) -> bool:
        return self._closed

    @property
    def ranks(self) -> list[InMemoryControl]:
        return [control for control in self._controls if isinstance(control, InMemoryControl)]

    def close(self) -> None:
        """Stop answering, and report that to every rank."""
        self._closed = True
        if self._coordinator is not None:
            self._coordinator.hang_up()
        for control in self._controls:
            if control is not None:
                control.end(ConnectionLost(f"the parameter server at {self.address} is gone; the run cannot go on"))

    def follow(self, coordinator: InMemoryServer) -> None:
        """Join the coordinating server, for which this one holds a share."""
        self._coordinator = _CoordinatorLink(coordinator, self)

    def deliver_later(self, number: int, message: m.Message) -> None:
        """Queue a message from a server with a share until all current messages are delivered."""
        self._to_come.append((number, message))
        self._deliver_from_followers()

    def _deliver_from_followers(self) -> None:
        while self._to_come and not self._delivering:
            number, message = self._to_come.popleft()
            self.send(m.CONTROL, number, message, b"")

    def at(self, address: str) -> InMemoryServer:
        """Return the server at an address."""
        return self._servers[address]

    def connect(self, control: _Receiver) -> int:
        """Add the connections of a rank or of another server; return their number."""
        self._controls.append(control)
        self._answers.append(deque())
        return len(self._controls) - 1

    def send(self, channel: m.Channel, number: int, message: m.Message, payload: Payload) -> None:
        """Handle a message of a rank or of another server, and deliver the messages that follow from it.

        A message that is not allowed is answered with a refusal.

        Raises:
            ConnectionLost: this server is closed.
        """
        if self._closed:
            raise ConnectionLost(f"the parameter server at {self.address} is gone; the run cannot go on")
        core, peer = self.link.core, b"%s%d" % (b"c" if channel == m.CONTROL else b"d", number)
        try:  # encoded, as over any wire, so that encoding errors appear here, too
            arrived = allowed(core, channel, peer, m.encode(message), nbytes_of(payload))
            self.deliver(core.receive(channel, peer, arrived, payload, self.link.now))
        except ProtocolError as error:
            self.deliver(refusal(core, channel, peer, error))

    def hang_up(self, number: int) -> None:
        self._controls[number] = None
        if not self._closed:
            self.deliver(self.link.hang_up(number))

    def answers(self, number: int) -> deque[tuple[m.Message, Tensor]]:
        """Return the messages, with payloads, that await a rank on its data connection."""
        return self._answers[number]

    def deliver(self, out: Sequence[Out]) -> None:
        """Deliver messages to their ranks; tensors are copied, because the server's own change."""
        self._delivering += 1
        for item in out:
            if item.peer == COORDINATOR:
                assert self._coordinator is not None
                self._coordinator.send(item.message)
                continue
            number = self.link.rank_of(item.peer)
            if (control := self._controls[number]) is None:
                continue
            if item.channel == m.CONTROL:
                control.arrived(item.message, item.payload)
            else:
                parts = [as_tensor(part) for part in item.payload]
                self._answers[number].append((item.message, torch.cat(parts) if parts else _empty()))
        self._delivering -= 1
        self._deliver_from_followers()


class _Receiver(Protocol):
    """A receiver of a server's messages on a control connection."""

    def arrived(self, message: m.Message, payload: Sequence[Payload]) -> None:
        """Receive a message of the server."""

    def end(self, error: OmniError) -> None:
        """End, because the server is gone."""


class _CoordinatorLink:
    """The connection of a server with a share to the coordinating server."""

    def __init__(self, coordinator: InMemoryServer, server: InMemoryServer) -> None:
        self._coordinator, self._server = coordinator, server
        self._inbox: deque[m.Message] = deque()
        self._is_open = False
        self._number = coordinator.connect(self)
        core = server.link.core
        handshake.join_as_follower(
            self._ask, core.key, core.follower_hello(server.address, _NONCE), coordinator.address
        )
        self._is_open = True
        self._receive_all()

    def send(self, message: m.Message) -> None:
        self._coordinator.deliver_later(self._number, message)

    def hang_up(self) -> None:
        self._coordinator.hang_up(self._number)

    def arrived(self, message: m.Message, payload: Sequence[Payload]) -> None:
        self._inbox.append(message)
        if self._is_open:
            self._receive_all()

    def end(self, error: OmniError) -> None:
        self._server.close()

    def _receive_all(self) -> None:
        while self._inbox:
            self._server.deliver(self._server.link.core.follow(self._inbox.popleft()))

    def _ask(self, message: m.Message, expect: type[Answer]) -> Answer:
        self._coordinator.send(m.CONTROL, self._number, message, b"")
        return answer_of(self._inbox.popleft(), expect)


class InMemoryControl(Control):
    """A rank's control connection; see `lightning_omni.transport.registry.Transport.join` for the arguments.

    Attributes:
        number: number of its connections at the server.
    """

    def __init__(
        self,
        server: InMemoryServer,
        key: bytes,
        run: str,
        rank: int,
        world_size: int,
        layout: Layout,
        on_end: Callable[[OmniError], None] | None = None,
    ) -> None:
        super().__init__(server.address, rank, on_end)
        self._server = server
        self._inbox: deque[tuple[m.Message, list[bytes]]] = deque()
        self._unanswered: tuple[m.Message, bytes] | None = None
        self._closed = False
        self._tensors: list[InMemoryData] = []
        self.number = server.connect(self)
        self._key, self._hello = key, handshake.hello_of(run, rank, world_size, layout, _NONCE)
        try:
            welcome, self._secret = handshake.join(self.request, key, self._hello, server.address)
        except OmniError:
            server.hang_up(self.number)
            raise
        self.heartbeat_timeout, self.servers = welcome.heartbeat_timeout, welcome.servers
        self.reconnect_timeout = welcome.reconnect_timeout

    def return_to(self, server: InMemoryServer) -> None:
        """Connect to the server's successor, and repeat unanswered messages there on both connections."""
        unanswered, inbox = self._unanswered, self._inbox
        self._server, self.number = server, server.connect(self)
        if server.is_gone:  # already gone: another one may follow
            return
        self._inbox = deque()
        hello = msgspec.structs.replace(self._hello, returns=True)
        try:
            welcome, self._secret = handshake.join(self.request, self._key, hello, server.address)
        except Refused as no:
            self.end(refused_return(no))
            return
        self.reconnected(welcome)
        self._inbox.extendleft(reversed(inbox))
        for each in self._tensors:
            each.return_to(server, self.number, self._secret)
        if unanswered is not None:
            self.ask(*unanswered)

    def arrived(self, message: m.Message, payload: Sequence[Payload]) -> None:
        if self.handle(message):
            self._unanswered = None
            self._inbox.append((message, [bytes(as_tensor(part).numpy()) for part in payload]))

    def request_payload(
        self, message: m.Message, expect: type[Answer], payload: bytes = b"", timeout: float = REQUEST_TIMEOUT
    ) -> tuple[Answer, list[bytes]]:
        self.ask(message, payload)
        answer = self.take(expect)
        if answer is None:
            raise ConnectionLost(f"no answer to {type(message).__name__} yet: other ranks come first; use ask and take")
        return answer

    def ask(self, message: m.Message, payload: bytes = b"") -> None:
        """Send a message whose answer may depend on messages of other ranks: see `take`."""
        self.check()
        self._unanswered = message, payload
        if not (self.reconnect_timeout and self._server.is_gone):
            self._server.send(m.CONTROL, self.number, message, payload)

    def take(self, expect: type[Answer]) -> tuple[Answer, list[bytes]] | None:
        """Return the answer to the last `ask`, if it has arrived."""
        if not self._inbox:
            self.check()
            return None
        message, parts = self._inbox.popleft()
        return answer_of(message, expect), parts

    def post(self, message: m.Message) -> None:
        self._server.send(m.CONTROL, self.number, message, b"")

    def wait_for_end(self, seconds: float) -> OmniError | None:
        return self._ended

    def attach(self, timeout: float = math.inf, address: str = "") -> InMemoryData:
        server = self._server.at(address) if address else self._server
        number = server.connect(self) if address else self.number
        self._tensors.append(InMemoryData(server, self, self._secret, number))
        return self._tensors[-1]

    def listen(
        self,
        layouts: Sequence[Layout],
        is_lost: Callable[[int], bool],
        everywhere: bool,
        wire_format: WireFormat = RAW,
    ) -> Peers:
        return InMemoryPeers(self._server, f"{self.address}/{self.rank}", layouts, is_lost)

    def close(self, reason: str | None = None) -> None:
        if self._closed:
            return
        if reason is not None and self._ended is None:
            self.request(m.Goodbye(reason=reason, finished=self.has_finished), m.Acknowledged)
        self._closed = True
        self._server.hang_up(self.number)


class InMemoryData(Data):
    """A rank's data connection.

    Args:
        server: the server.
        control: control connection of the same rank.
        secret: secret of this rank's process and the server.
        number: number of its connections at the server.
    """

    def __init__(self, server: InMemoryServer, control: InMemoryControl, secret: bytes, number: int) -> None:
        self._server, self._control, self._number = server, control, number
        self._kept: deque[tuple[m.Message, Tensor]] = deque()  # of an earlier server
        self._unanswered: tuple[m.Message, Payload] | None = None
        self._attach(secret)

    def return_to(self, server: InMemoryServer, number: int, secret: bytes) -> None:
        """Connect to the server's successor, and repeat an unanswered message there."""
        unanswered, kept = self._unanswered, deque((*self._kept, *self._server.answers(self._number)))
        self._server, self._number, self._kept = server, number, deque()
        self._attach(secret)
        self._kept = kept
        if unanswered is not None and not kept:
            self._unanswered = unanswered
            self._server.send(m.DATA, number, *unanswered)

    def _attach(self, secret: bytes) -> None:
        rank = self._control.rank
        handshake.attach(lambda message, expect: self.exchange(message, expect)[0], secret, rank, _NONCE)

    def send(self, message: m.Message, payload: Tensor | None = None, into: Tensor | None = None) -> None:
        self._control.check()
        self.moved += payload.numel() if payload is not None else 0
        # Copied, as by every other transport: the server may keep it.
        self._unanswered = message, b"" if payload is None else payload.clone()
        if not (self._control.reconnect_timeout and self._server.is_gone):
            self._server.send(m.DATA, self._number, *self._unanswered)

    def receive(self, expect: type[Answer], into: Tensor | None = None) -> tuple[Answer, Tensor]:
        answer = self.take(expect, into)
        if answer is None:
            raise ConnectionLost("no answer yet: other ranks come first; use send and take")
        return answer

    def take(self, expect: type[Answer], into: Tensor | None = None) -> tuple[Answer, Tensor] | None:
        """Return the answer to the last message, if it has arrived."""
        answers = self._kept or self._server.answers(self._number)
        if not answers:
            self._control.check()
            return None
        self._unanswered = None
        message, payload = answers.popleft()
        answer = answer_of(message, expect)
        self.moved += payload.numel()
        if into is None or into.numel() < payload.numel():
            return answer, payload
        into[: payload.numel()].copy_(payload)
        return answer, into[: payload.numel()]

    def close(self) -> None:
        """Do nothing: no connection is open."""


class InMemoryPeers:
    """A leader's connections with the other leaders; see `lightning_omni.transport.connections.Peers` for the methods.

    Args:
        server: the run's server.
        address: address of this leader.
        layouts: layout of each optimizer's parameters.
        is_lost: returns whether a group is gone.
    """

    def __init__(
        self, server: InMemoryServer, address: str, layouts: Sequence[Layout], is_lost: Callable[[int], bool]
    ) -> None:
        self.address, self.moved = address, 0
        self._leaders, self._is_lost = server.leaders, is_lost
        self._addresses: Mapping[int, Address] = {}
        self._published: dict[int, list[Tensor]] = {}
        self._inboxes = [Total() for _ in layouts]
        self._leaders[address] = self

    def connect(self, addresses: Mapping[int, Address]) -> None:
        self._addresses = dict(addresses)

    def publish(self, optimizer: int, tensors: Sequence[Tensor]) -> None:
        self._published[optimizer] = [tensor.detach().clone() for tensor in tensors]

    def read(self, group: int, optimizer: int) -> Sequence[Tensor] | None:
        leader = self._leader(group)
        published = leader._published.get(optimizer) if leader is not None else None
        self.moved += sum(tensor.nbytes for tensor in published or ())
        return [tensor.clone() for tensor in published] if published is not None else None

    def send(self, group: int, optimizer: int, tensors: Sequence[Tensor]) -> None:
        if (leader := self._leader(group)) is not None:
            self.moved += sum(tensor.nbytes for tensor in tensors)
            leader._inboxes[optimizer].add(tensors)

    def read_inbox(self, optimizer: int) -> Inbox:
        inbox, self._inboxes[optimizer] = self._inboxes[optimizer], Total()
        count = inbox.count
        return Inbox(inbox.take() if count else None, count)  # type: ignore[arg-type]  # messages are whole

    def grow(self, optimizer: int, layout: Layout) -> None:
        self._inboxes[optimizer] = Total()
        self._published.pop(optimizer, None)

    def close(self) -> None:
        self._leaders.pop(self.address, None)

    def _leader(self, group: int) -> InMemoryPeers | None:
        if group not in self._addresses or self._is_lost(group):
            return None
        return self._leaders.get(self._addresses[group].address)


def _empty() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)
