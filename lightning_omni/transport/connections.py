"""A rank's connections: what transports implement and ranks use. No sockets, clocks or threads."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from lightning_omni.errors import (
    ConnectionLost,
    Evicted,
    MalformedMessage,
    OmniError,
    ProtocolError,
    RankLost,
    Refused,
    is_failure_reason,
)
from lightning_omni.group.core import Outgoing
from lightning_omni.methods import Inbox
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import RAW, WireFormat
from lightning_omni.wire.layout import Layout

_log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=m.Message)
REQUEST_TIMEOUT = 1800.0
"""Default seconds that a request waits for its answer."""


# --- Rank ------------------------------------------------------------------------------------------------------------


class Control(ABC):
    """A rank's control connection, which keeps itself alive until it is closed.

    One thread makes all requests. Another may keep the connection alive: it sends a `heartbeat` twice a second and
    passes received messages to `handle`.

    ``on_end`` is as in `lightning_omni.transport.Transport.join`.

    Attributes:
        failures: reasons of ranks that have failed by themselves.
        servers: number of servers with a partition of the parameters each.
        has_finished: whether the run is at its end when this rank leaves.
        progress: count of this rank's progress, and of its checks while it waits for the server.
        metrics: numbers for the next heartbeat; replaced as a whole, because another thread reads them.
        reconnect_timeout: seconds for which the rank looks for a server that is gone; 0 if its loss ends the run.
        server_epoch: number of the server among those that continue the run, from 0.
    """

    servers = 1
    reconnect_timeout = 0.0
    server_epoch = 0
    is_server_gone = False
    has_finished = False

    def __init__(self, address: str, rank: int, on_end: Callable[[OmniError], None] | None = None) -> None:
        self.address, self.rank = address, rank
        self.status: m.Status | None = None
        self.lost: tuple[int, ...] = ()
        self.failures: tuple[str, ...] = ()
        self.signal = self.progress = 0
        self.metrics: dict[str, float] = {}
        self._is_judged = self._is_expected = False
        self._timings = (0.0, 0.0, 0.0)
        self._ended: OmniError | None = None
        self._on_end = on_end or (lambda error: None)

    # --- Implemented by each transport -------------------------------------------------------------------------------

    @abstractmethod
    def request_payload(
        self, message: m.Message, expect: type[Answer], payload: bytes = b"", timeout: float = REQUEST_TIMEOUT
    ) -> tuple[Answer, list[bytes]]:
        """Send a message and wait for its answer.

        Return the answer, and the parts of its payload.

        Raises:
            ProtocolError: the server refused (`Refused`), or a message is malformed or too large.
            RankLost: this rank was evicted, or the run is over.
            ConnectionLost: the server is gone, or did not answer within ``timeout`` seconds.
        """

    @abstractmethod
    def post(self, message: m.Message) -> None:
        """Send a message that has no answer, from any thread; over an open connection within half a second."""

    @abstractmethod
    def wait_for_end(self, seconds: float) -> OmniError | None:
        """Wait for the error that ends this rank's run, and return it; None after ``seconds`` without one."""

    @abstractmethod
    def attach(self, timeout: float = 300.0, address: str = "") -> Data:
        """Open this rank's data connection, to this server or to the ``address`` of another's data socket.

        ``timeout`` is in seconds, for each piece of an answer.
        """

    def empty(self, nbytes: int) -> Tensor:
        """Return zeros, uint8, ``(nbytes,)``: memory that a data connection transfers payloads from and to fastest."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    @abstractmethod
    def listen(
        self,
        layouts: Sequence[Layout],
        is_lost: Callable[[int], bool],
        everywhere: bool,
        wire_format: WireFormat = RAW,
    ) -> Peers:
        """Open a leader's connections to other leaders.

        ``layouts`` are those of each optimizer's parameters; ``is_lost`` returns whether a group is gone. With
        ``everywhere``, leaders on other machines must be able to reach this one. ``wire_format`` may encode the
        weights; a transport may also send them raw.
        """

    @abstractmethod
    def close(self, reason: str | None = None) -> None:
        """Close, after a goodbye unless ``reason`` is None or the run has ended.

        ``reason`` is that of a failure, or "" for none.
        """

    # --- Common to all transports ------------------------------------------------------------------------------------

    def attach_all(self, timeout: float = 300.0, share: int | None = None) -> list[Data]:
        """Open this rank's data connections to all servers, or to the coordinating one and number ``share``.

        The first connection is to the coordinating server, the last one to ``share``.
        """
        if self.reconnect_timeout:  # one server, because several save no state
            return [ReconnectingData(self, partial(self.attach, timeout))]
        others = self.request(m.AskServerAddresses(), m.ServerAddresses).addresses if self.servers > 1 else ()
        addresses = ("", *others)
        if share is not None:
            addresses = ("",) if share == 0 else ("", addresses[share])
        return [self.attach(timeout, address) for address in addresses]

    @property
    def records(self) -> bool:
        return self.rank == (self.status.recorder if self.status is not None else 0)

    def is_same_server(self, server_epoch: int) -> bool:
        return not self.is_server_gone and self.server_epoch == server_epoch

    def check_same_server(self, server_epoch: int) -> None:
        """Raise the error that ended this rank's run, or `ConnectionLost` if the server is gone or was replaced."""
        self.check()
        if not self.is_same_server(server_epoch):
            raise ConnectionLost(f"the parameter server at {self.address} is gone")

    def wait_for_server(self) -> None:
        self.check_same_server(self.server_epoch)

    def reconnected(self, welcome: m.Welcome) -> None:
        self.server_epoch, self.is_server_gone = self.server_epoch + 1, False
        if self.records:
            lost = max(0, (self.status.clock if self.status is not None else 0) - welcome.clock)
            _log.warning(
                "the parameter server at %s is back, with the %d updates of its last save; at least %d that came later"
                " are lost; where it deals out the data, their samples are trained again",
                self.address,
                welcome.clock,
                lost,
            )

    def request(
        self, message: m.Message, expect: type[Answer], payload: bytes = b"", timeout: float = REQUEST_TIMEOUT
    ) -> Answer:
        return self.request_payload(message, expect, payload, timeout)[0]

    @property
    def cause(self) -> OmniError | None:
        return self._ended

    def check(self) -> None:
        """Raise the error that ended this rank's run, if any. Each call counts as progress: waiting ranks repeat it."""
        self.progress += 1
        if self._ended is not None:
            raise self._ended

    def report_timings(self, compute: float, step: float, exchange: float) -> None:
        """Set seconds for the next heartbeats; ``step`` is the whole step."""
        self._timings = (compute, step, exchange)

    def report_progress(self, is_expected: bool = False) -> None:
        """Record progress of this rank; if ``is_expected``, as after a batch, the server expects more from then on."""
        self.progress += 1
        self._is_expected |= is_expected
        self._is_judged = self._is_expected

    def suspend_stall_check(self) -> None:
        """Suspend the check for progress until this rank reports progress again."""
        self._is_judged = False

    def heartbeat(self, now: float) -> m.Heartbeat:
        compute, step, exchange = self._timings
        return m.Heartbeat(
            sent=now,
            compute_time=compute,
            step_time=step,
            exchange_time=exchange,
            signal=self.signal,
            progress=self.progress if self._is_judged else 0,
            metrics=self.metrics,
        )

    def handle(self, message: m.Message) -> bool:
        """Handle a message of the server; return whether it is the answer to a request."""
        if isinstance(message, m.Status):
            self.status, self.lost = message, message.lost
            return not message.sent  # other statuses answer a heartbeat, or no request
        if not isinstance(message, m.Notice):
            return True
        self.lost = message.lost
        if message.over:
            self.end(RankLost(f"the run is over: {message.reason}"))
        elif self.rank in message.lost:
            kind = RankLost if message.barred else Evicted
            self.end(kind(f"rank {self.rank}'s group is out of the run: {message.reason}"))
        elif message.barred and is_failure_reason(message.reason):
            self.failures += (message.reason,)
        return False

    def end(self, error: OmniError) -> None:
        if self._ended is None:
            self._ended = error
            self._on_end(error)


class Data(ABC):
    """A rank's data connection, for tensors, used by one thread.

    ``moved`` counts bytes of payload in both directions, ``shared`` those of them in shared memory.
    """

    moved: int = 0
    shared: int = 0

    @abstractmethod
    def send(self, message: m.Message, payload: Tensor | None = None, into: Tensor | None = None) -> None:
        """Send a message with its payload, without waiting for the transfer.

        Args:
            message: its answer must be received before the next one is sent.
            payload: uint8, on the CPU; it must not change until the answer is received.
            into: memory for the answer's payload, which may be written until the answer is received.

        Raises:
            RankLost: this rank's group is out of the run, or the run is over.
            ConnectionLost: the connection has ended.
        """

    @abstractmethod
    def receive(self, expect: type[Answer], into: Tensor | None = None) -> tuple[Answer, Tensor]:
        """Wait for the answer to the sent message, with its payload: uint8, and empty if there is none.

        The payload is in the memory given to `send` if written there, else in ``into`` if that is long enough, else in
        fresh memory.

        Raises:
            ProtocolError: the server refused (`Refused`), or the answer is malformed.
            RankLost: this rank's group is out of the run, or the run is over.
            ConnectionLost: no answer in time, or the connection has ended.
        """

    def exchange(
        self, message: m.Message, expect: type[Answer], payload: Tensor | None = None, into: Tensor | None = None
    ) -> tuple[Answer, Tensor]:
        self.send(message, payload, into)
        return self.receive(expect, into)

    @abstractmethod
    def close(self) -> None:
        """Close the connection at once."""


class ReconnectingData(Data):
    """A data connection that outlasts its server: an unanswered message is repeated to the server that continues."""

    def __init__(self, control: Control, open: Callable[[], Data]) -> None:
        self._control, self._open = control, open
        self._said: tuple[m.Message, Tensor | None, Tensor | None] | None = None
        self._before = (0, 0)
        self._connect()

    def send(self, message: m.Message, payload: Tensor | None = None, into: Tensor | None = None) -> None:
        self._said = message, payload, into
        try:
            self._data.send(*self._said)
        except (ConnectionLost, Refused) as error:
            self._return(error)

    def receive(self, expect: type[Answer], into: Tensor | None = None) -> tuple[Answer, Tensor]:
        try:
            answer = self._data.receive(expect, into)
        except (ConnectionLost, Refused) as error:
            # A connection that the transport has reopened by itself is `Refused`, for instance.
            self._return(error)
            return self.receive(expect, into)
        self._said = None
        self.moved, self.shared = self._before[0] + self._data.moved, self._before[1] + self._data.shared
        return answer

    def close(self) -> None:
        self._data.close()

    def _return(self, error: OmniError) -> None:
        """Repeat the unanswered message to the server that continues; raise the error if no other does."""
        if self._said is None or self._control.is_same_server(self._server_epoch):
            raise error
        self._before = self._before[0] + self._data.moved, self._before[1] + self._data.shared
        self._data.close()
        self._connect()
        self.send(*self._said)

    def _connect(self) -> None:
        while True:
            self._control.wait_for_server()
            self._server_epoch = self._control.server_epoch
            try:
                self._data = self._open()
            except (ConnectionLost, Refused):
                if self._control.is_same_server(self._server_epoch):
                    raise
            else:
                return


class Address(msgspec.Struct, frozen=True):
    """The address at which a group's leader listens, which all leaders receive."""

    group: int
    address: str


class Peers(Protocol):
    """A leader's connections to the other leaders: weights that they read, and an inbox that they fill."""

    @property
    def moved(self) -> int:
        """Return the bytes of weights sent to other leaders and read from them."""

    @property
    def address(self) -> str:
        """Return the address at which this leader listens."""

    def connect(self, addresses: Mapping[int, Address]) -> None:
        """Set the addresses of the other groups' leaders, before `read` and `send`."""

    def publish(self, optimizer: int, tensors: Sequence[Tensor]) -> None:
        """Publish a copy of these weights for other leaders to read."""

    def read(self, group: int, optimizer: int) -> Sequence[Tensor] | None:
        """Return the weights that a group has published, on the CPU; None if none can be read."""

    def send(self, group: int, optimizer: int, tensors: Sequence[Tensor]) -> None:
        """Send weights to a group's inbox; they are dropped if the group is too slow or cannot be reached.

        The group may drop them, too, if they are not finite or its layout is another.
        """

    def read_inbox(self, optimizer: int) -> Inbox:
        """Empty an optimizer's inbox, and return its content."""

    def grow(self, optimizer: int, layout: Layout) -> None:
        """Change an optimizer's layout; weights published or received in the old one are dropped."""

    def close(self) -> None:
        """Close both directions."""


def refused_return(no: Refused) -> OmniError:
    kind = RankLost if no.code == "gone" else ConnectionLost  # no group rejoins a run that its server does not know
    return kind(f"the parameter server is gone, and the one at its address refuses this rank: {no}")


def answer_of(message: m.Message, expect: type[Answer]) -> Answer:
    """Return the answer to a request, or raise the error that it represents."""
    if isinstance(message, expect):
        return message
    if not isinstance(message, m.RefusedMessage):
        raise MalformedMessage(f"{expect.__name__} was expected, {type(message).__name__} came")
    if message.code == "over":
        raise RankLost(f"the run is over: {message.reason}")
    if message.code in ("lost", "barred"):
        kind = RankLost if message.code == "barred" else Evicted
        raise kind(f"this rank's group is out of the run: {message.reason}")
    raise Refused(message.code, message.reason)


# --- Several servers --------------------------------------------------------------------------------------------------


class Requests:
    """A rank's data connections, used concurrently: it sends each server its part before it waits for any answer.

    With ``by_member``, `send` uses only the last one: other members of this rank's group send to other servers.
    """

    def __init__(self, connections: Sequence[Data], by_member: bool = False) -> None:
        self._all = list(connections)
        self._connections = self._all[-1:] if by_member else self._all
        self._in_parts = by_member or len(self._all) > 1
        self._number = 0
        self._got: list[Any] = []

    @property
    def count(self) -> int:
        return len(self._connections)

    @property
    def coordinator(self) -> Data:
        return self._all[0]

    @property
    def own(self) -> Data:
        return self._connections[0]

    @property
    def moved(self) -> int:
        return sum(connection.moved for connection in self._all)

    @property
    def shared(self) -> int:
        return sum(connection.shared for connection in self._all)

    def send(self, outgoing: Sequence[Outgoing], into: Sequence[Tensor | None] | None = None) -> None:
        """Send each server its part of a request, as for `lightning_omni.transport.connections.Data.send`."""
        self._number += 1
        rooms = into or [None] * self.count
        if self._in_parts:
            number = self._number
            outgoing = [
                Outgoing(msgspec.structs.replace(message, request=number), payload) for message, payload in outgoing
            ]
        parts = [(message, payload, room) for (message, payload), room in zip(outgoing, rooms, strict=True)]
        self._got = []
        for connection, part in zip(self._connections, parts, strict=True):
            connection.send(*part)

    def receive(self, expect: type[Answer], into: Sequence[Tensor | None] | None = None) -> list[tuple[Answer, Tensor]]:
        """Wait for all answers; if a server has refused, none has handled its part, and `Refused` is raised."""
        memories = into or [None] * self.count
        # All answers are received first, so that none is mistaken for an answer to the next request; an exception may
        # have interrupted an earlier call.
        for connection, memory in list(zip(self._connections, memories, strict=True))[len(self._got) :]:
            try:
                self._got.append(connection.receive(expect, memory))
            except Refused as no:  # noqa: PERF203  # the other servers answer, too
                self._got.append(no)
        received, self._got = self._got, []
        for each in received:
            if isinstance(each, Refused):
                raise each
        return received

    def exchange(self, outgoing: Sequence[Outgoing], expect: type[Answer]) -> list[tuple[Answer, Tensor]]:
        self.send(outgoing)
        return self.receive(expect)

    def close(self) -> None:
        for connection in self._all:
            connection.close()


def check_alike(answers: list[tuple[m.Weights, Tensor]]) -> None:
    clocks = [answer.clock for answer, _ in answers]
    if len(set(clocks)) > 1:
        raise ProtocolError(f"servers that hold a partition each have applied different numbers of updates: {clocks}")
