"""The transport between ranks and server: connections as both sides use them. No sockets, clocks or threads.

A transport provides for a rank its control connection (`Control`), its data connection (`Data`) and a leader's
connections to other leaders (`Peers`), and for the server the driver of its state machine (`Served`). The transport of
a run is one value, a `Transport`. The default is ZeroMQ.

Rule 1: messages on a control connection arrive in order, and so do messages on a data connection.
Rule 2: a request has one answer. A refusal is raised as `Refused`, and the end of the run as the error that caused it.
Rule 3: if a control connection ends without a goodbye, the driver calls `ServerCore.hang_up`: its rank is lost.
Rule 4: the server trusts no sender. It calls `ServerCore.check_payload` before it allocates memory for a payload.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
import torch
from torch import Tensor

from lightning_omni.errors import (
    ConfigurationError,
    ConnectionLost,
    Evicted,
    MalformedMessage,
    OmniError,
    ProtocolError,
    RankLost,
    Refused,
    is_failure_reason,
)
from lightning_omni.group.sharded_inbox import ShardedInbox
from lightning_omni.methods import Inbox
from lightning_omni.registry import Registry, to_wire
from lightning_omni.server.core import ServerCore
from lightning_omni.server.service import Out, Peer
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import RAW, WireFormat
from lightning_omni.wire.layout import Layout

_log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=m.Message)
PATIENCE = 1800.0
"""Default seconds that a request waits for its answer."""


class ServerAway(ConnectionLost):
    """The loss of a server that another one may replace; requests must be repeated to that one."""


# --- Rank ------------------------------------------------------------------------------------------------------------


class Control(ABC):
    """A rank's control connection, which keeps itself alive until it is closed.

    One thread makes all requests. Another one may keep the connection alive: it sends a `heartbeat` twice a second and
    passes received messages to `handle`.

    Args:
        address: address of the server.
        rank: this rank.
        on_end: called once, from any thread, when this rank must stop.

    Attributes:
        status: last received status of the run.
        lost: ranks lost so far.
        failures: reasons of the losses of ranks that have failed by themselves.
        signal: signal received by this rank, to report with the next heartbeat.
        servers: number of servers that hold a partition of the parameters each; see `attach_all`.
        has_finished: whether the run is at its end when this rank leaves.
        progress: count of this rank's progress, and of its checks while it waits for the server.
        patience: seconds for which the rank looks for a server that is gone; 0 if its loss ends the run.
        returns: number that identifies the server among those that continue a run one after the other; larger for later
            ones, and equal at all ranks of a group, whenever they joined.
        is_away: whether the server is gone and the rank looks for it.
    """

    servers = 1
    patience = 0.0
    returns = 0
    is_away = False
    has_finished = False

    def __init__(self, address: str, rank: int, on_end: Callable[[OmniError], None] | None = None) -> None:
        self.address, self.rank = address, rank
        self.status: m.Status | None = None
        self.lost: tuple[int, ...] = ()
        self.failures: tuple[str, ...] = ()
        self.signal = self.progress = 0
        self._is_judged = self._has_trained = False
        self._timings = (0.0, 0.0, 0.0)
        self._ended: OmniError | None = None
        self._on_end = on_end or (lambda error: None)

    # --- Implemented by each transport -------------------------------------------------------------------------------

    @abstractmethod
    def request_payload(
        self, message: m.Message, expect: type[Answer], payload: bytes = b"", timeout: float = PATIENCE
    ) -> tuple[Answer, list[bytes]]:
        """Send a message and wait for its answer.

        Returns:
            The answer, and its payload: one part for each contributor.

        Raises:
            RankLost: this rank was evicted, or the run is over.
            ConnectionLost: the server is gone, or did not answer within ``timeout`` seconds.
            Refused: the server refused the request.
        """

    @abstractmethod
    def post(self, message: m.Message) -> None:
        """Send a message without an answer, within half a second and from any thread."""

    @abstractmethod
    def wait_for_end(self, seconds: float) -> OmniError | None:
        """Return the error that ended this rank's run, if the server reports it within this time."""

    @abstractmethod
    def attach(self, timeout: float = 300.0, address: str = "") -> Data:
        """Open this rank's data connection.

        Args:
            timeout: seconds to wait for each answer.
            address: address of the data socket of another server, which holds a share; empty for this server's.
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

        Args:
            layouts: layout of each optimizer's parameters.
            is_lost: returns whether a group is gone, so that waiting for it is pointless.
            everywhere: whether leaders on other machines must be able to reach this one.
            wire_format: a format that may encode the weights. They are already decoded from it, so a transport may also
                send them raw.
        """

    @abstractmethod
    def close(self, reason: str | None = None) -> None:
        """Send a goodbye with the reason of a failure (None sends no goodbye), and close the connection."""

    # --- Common to all transports ------------------------------------------------------------------------------------

    def attach_all(self, timeout: float = 300.0, share: int | None = None) -> list[Data]:
        """Open this rank's data connections to the servers that hold a partition each.

        Args:
            timeout: seconds to wait for each answer.
            share: number of the server that this rank exchanges with; None for all.

        Returns:
            The first connection is to the coordinating server. With ``share``, the last one is to that server; the two
            may be the same connection.
        """
        if self.patience:
            numbers = range(self.servers) if share is None else sorted({0, share})
            return [LastingData(self, partial(self._find, number), partial(self.attach, timeout)) for number in numbers]
        others = self.request(m.AskServerAddresses(), m.ServerAddresses).addresses if self.servers > 1 else ()
        addresses = ("", *others)
        if share is not None:
            addresses = ("",) if share == 0 else ("", addresses[share])
        return [self.attach(timeout, address) for address in addresses]

    def _find(self, server: int) -> str:
        """Return the current address of one of several servers, for `attach`."""
        return self.request(m.AskServerAddresses(), m.ServerAddresses).addresses[server - 1] if server else ""

    @property
    def records(self) -> bool:
        """Return whether this rank logs for the run, by the last status."""
        return self.rank == (self.status.recorder if self.status is not None else 0)

    def stands(self, returns: int) -> bool:
        """Return whether a server is present, and is the one for which ``returns`` had this value."""
        return not self.is_away and self.returns == returns

    def check_stands(self, returns: int) -> None:
        """Raise the error that ended this rank's run, or `ServerAway` if the server is gone or was replaced.

        Args:
            returns: value of `returns` for that server.
        """
        self.check()
        if not self.stands(returns):
            raise ServerAway(f"the parameter server at {self.address} is gone")

    def wait_for_return(self) -> None:
        """Wait until a server is present.

        Raises:
            ConnectionLost: no server will continue.
        """
        self.check()
        if self.is_away:
            raise ConnectionLost(f"the parameter server at {self.address} is gone")

    def wait_for_another(self, returns: int) -> None:
        """Wait until a server is present whose ``returns`` is at least this.

        Raises:
            ConnectionLost: no server will continue.
        """
        self.check()
        if self.returns < returns:
            raise ConnectionLost(f"the parameter server at {self.address} is gone")

    def came_back(self, welcome: m.Welcome) -> None:
        """Continue with a server that replaces the one that was gone."""
        self.returns, self.is_away = max(self.returns + 1, welcome.started_at_ms), False
        if self.records:
            lost = max(0, (self.status.clock if self.status is not None else 0) - welcome.clock)
            _log.warning(
                "the parameter server at %s is back, with %d updates: %d that came after its last save are lost; where"
                " it deals out the data, their samples are trained again",
                self.address,
                welcome.clock,
                lost,
            )

    def request(
        self, message: m.Message, expect: type[Answer], payload: bytes = b"", timeout: float = PATIENCE
    ) -> Answer:
        """Send a request whose answer has no payload; see `request_payload`."""
        return self.request_payload(message, expect, payload, timeout)[0]

    @property
    def cause(self) -> OmniError | None:
        return self._ended

    @property
    def is_ended(self) -> bool:
        return self.cause is not None

    def check(self) -> None:
        """Raise the error that ended this rank's run, if any. A rank that waits for the server calls it repeatedly."""
        self.progress += 1
        if self._ended is not None:
            raise self._ended

    def report_timings(self, compute: float, step: float, exchange: float) -> None:
        """Set seconds for the next heartbeat: compute time, whole step, exchange."""
        self._timings = (compute, step, exchange)

    def got_on(self, has_trained: bool = False) -> None:
        """Record progress of this rank, for instance a batch.

        Args:
            has_trained: whether that was a batch of training; the server expects further progress after the first one.
        """
        self.progress += 1
        self._has_trained |= has_trained
        self._is_judged = self._has_trained

    def takes_time(self) -> None:
        """Suspend the check for progress until this rank makes progress again."""
        self._is_judged = False

    def heartbeat(self, now: float) -> m.Heartbeat:
        """Return the next heartbeat; one is sent twice a second."""
        compute, step, exchange = self._timings
        return m.Heartbeat(
            sent=now,
            compute_time=compute,
            step_time=step,
            exchange_time=exchange,
            signal=self.signal,
            progress=self.progress if self._is_judged else 0,
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
        """End this rank's run with an error, unless it has ended already."""
        if self._ended is None:
            self._ended = error
            self._on_end(error)


class Data(ABC):
    """A rank's data connection, which sends and receives tensors. One thread uses it.

    Attributes:
        moved: bytes of payload sent and received so far.
        shared: those of them in memory that both sides share, if the transport has such memory.
    """

    moved: int = 0
    shared: int = 0

    @abstractmethod
    def send(self, message: m.Message, payload: Tensor | None = None, into: Tensor | None = None) -> None:
        """Send a message with its payload, without waiting: both are transferred while this rank continues.

        Args:
            message: the message. Its answer must be received before the next message is sent.
            payload: uint8, on the CPU; it must not change until the answer is received.
            into: memory for the answer's payload, which may be written until the answer is received.

        Raises:
            RankLost: this rank's group is out of the run, or the run is over.
            ConnectionLost: the connection has ended.
        """

    @abstractmethod
    def receive(self, expect: type[Answer], into: Tensor | None = None) -> tuple[Answer, Tensor]:
        """Wait for the answer to the sent message, with its payload.

        Args:
            expect: type of the answer.
            into: memory for the answer's payload, if `send` was given none; fresh memory is used if this is missing or
                too short.

        Returns:
            The answer, and its payload: uint8, perhaps empty.

        Raises:
            Refused: the server refused.
            RankLost: this rank's group is out of the run, or the run is over.
            ConnectionLost: no answer in time.
        """

    def exchange(
        self, message: m.Message, expect: type[Answer], payload: Tensor | None = None, into: Tensor | None = None
    ) -> tuple[Answer, Tensor]:
        """Send a message and wait for its answer; see `send` and `receive`."""
        self.send(message, payload, into)
        return self.receive(expect, into)

    @abstractmethod
    def close(self) -> None:
        """Close the connection at once."""


class LastingData(Data):
    """A data connection that outlasts its server: an unanswered message is repeated to the server that continues.

    Args:
        control: control connection of the same rank.
        find: returns the address of the server. It may take long, and the server may be replaced meanwhile.
        open: opens a data connection to an address.
    """

    def __init__(self, control: Control, find: Callable[[], str], open: Callable[[str], Data]) -> None:
        self._control, self._find, self._open = control, find, open
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

    # --- Parts of a request, which is repeated as a whole or not at all ----------------------------------------------

    @property
    def control(self) -> Control:
        return self._control

    @property
    def returns(self) -> int:
        """Return the connected server's value of `Control.returns`."""
        return self._returns

    def send_part(self, message: m.Message, payload: Tensor | None = None, into: Tensor | None = None) -> None:
        """Send to the current server, like `send`.

        Raises:
            ServerAway: the server is gone.
        """
        with self._telling():
            self._data.send(message, payload, into)

    def receive_part(self, expect: type[Answer], into: Tensor | None = None) -> tuple[Answer, Tensor]:
        """Receive from the current server, like `receive`.

        Raises:
            ServerAway: the server is gone.
        """
        with self._telling():
            answer = self._data.receive(expect, into)
        self.moved, self.shared = self._before[0] + self._data.moved, self._before[1] + self._data.shared
        return answer

    def renew(self) -> None:
        """Connect to the current server, if it is another one."""
        if not self._control.stands(self._returns):
            self._reconnect()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (ConnectionLost, Refused) as error:
            if isinstance(error, ServerAway) or self._control.stands(self._returns):
                raise
            raise ServerAway(str(error)) from error

    def _reconnect(self) -> None:
        self._before = self._before[0] + self._data.moved, self._before[1] + self._data.shared
        self._data.close()
        self._connect()

    def _return(self, error: OmniError) -> None:
        """Repeat the unanswered message to the server that continues; raise the error if no other server does."""
        if self._said is None or self._control.stands(self._returns):
            raise error
        self._reconnect()
        self.send(*self._said)

    def _connect(self) -> None:
        while True:
            self._control.wait_for_return()
            self._returns = self._control.returns
            try:
                address = self._find()
                if not self._control.stands(self._returns):
                    continue
                self._data = self._open(address)
            except (ConnectionLost, Refused):
                if self._control.stands(self._returns):
                    raise
            else:
                return


class Address(msgspec.Struct, frozen=True):
    """The address at which a group's leader listens. All leaders receive it through the control channel."""

    group: int
    address: str


class Peers(Protocol):
    """A leader's connections to the other leaders: weights that they read, and an inbox that they fill."""

    @property
    def moved(self) -> int:
        """Return the bytes of weights that this leader has sent to other leaders and read from them."""

    @property
    def address(self) -> str:
        """Return the address at which this leader listens."""

    def connect(self, addresses: Mapping[int, Address]) -> None:
        """Set the addresses of the other groups' leaders; must be called first."""

    def publish(self, optimizer: int, tensors: Sequence[Tensor]) -> None:
        """Publish a copy of these weights for other leaders to read."""

    def read(self, group: int, optimizer: int) -> Sequence[Tensor] | None:
        """Return the weights that a group has published, as CPU tensors; None without any, or without the group."""

    def send(self, group: int, optimizer: int, tensors: Sequence[Tensor]) -> None:
        """Put weights into a group's inbox, unless it receives them too slowly."""

    def read_inbox(self, optimizer: int) -> Inbox:
        """Empty the inbox, and return its content."""

    def grow(self, optimizer: int, layout: Layout) -> None:
        """Change an optimizer's layout; weights received in the old one are dropped."""

    def close(self) -> None:
        """Close the connections in both directions."""


@runtime_checkable
class PeersOfShares(Peers, Protocol):
    """The connections of a member that has a share of the model to its counterparts in other groups.

    The members of a group use them to agree: see `lightning_omni.runtime.exchange.sharded_peer_exchange`.
    """

    def hold(self, group: int, optimizer: int) -> int:
        """Fix the publication that the next `read` returns; return its number, 1 for the group's first, 0 for none."""

    def takes(self, group: int) -> bool:
        """Return whether a message to that group would be sent now."""

    def send_part(self, group: int, optimizer: int, tensors: Sequence[Tensor], sender: int, number: int) -> None:
        """Put a part of a message into a group's inbox; see `lightning_omni.group.sharded_inbox`."""

    def arrivals(self, optimizer: int) -> AbstractContextManager[ShardedInbox]:
        """Return a context with all arrivals, during which no further one is added."""


def refused_return(no: Refused) -> ConnectionLost:
    """Return the error that ends a rank's run if the server that replaces a lost one refuses the rank."""
    return ConnectionLost(f"the parameter server is gone, and the one at its address refuses this rank: {no}")


def answer_of(message: m.Message, expect: type[Answer]) -> Answer:
    """Return the answer to a request, or raise the error that it represents.

    Raises:
        RankLost: this rank's group is out of the run, or the run is over.
        Refused: the server refused.
        MalformedMessage: the message is no such answer.
    """
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


# --- Server ----------------------------------------------------------------------------------------------------------


class Served(Protocol):
    """A listening server, which drives a `ServerCore`."""

    @property
    def address(self) -> str:
        """Return the address at which ranks join."""

    def run(self, until: Callable[[], bool]) -> None:
        """Serve until ``until()`` is true, which is called several times a second."""

    def farewell(self, reason: str) -> None:
        """Notify the other ranks that the rank that owns this server has ended, unless the run has."""

    def close(self) -> None:
        """Stop listening once the last messages are sent."""


def allowed(core: ServerCore, channel: m.Channel, peer: Peer, data: bytes | memoryview, nbytes: int) -> m.Message:
    """Decode and check a message before its payload of ``nbytes``, for a transport that receives it first.

    Raises:
        ProtocolError: the message is invalid or not allowed; answer with `refusal`, and do not keep the payload.
    """
    message = core.decode(channel, data)
    if channel == m.CONTROL:
        if nbytes > m.LARGEST_INLINE:
            raise MalformedMessage(f"{nbytes} bytes of payload on the control channel, which takes {m.LARGEST_INLINE}")
    elif (expected := core.check_payload(peer, message)) != nbytes:
        raise MalformedMessage(f"{nbytes} bytes of payload came, {expected} were announced")
    return message


def refusal(core: ServerCore, channel: m.Channel, peer: Peer, error: ProtocolError) -> list[Out]:
    """Return the answers to a message that was not allowed."""
    if isinstance(error, Refused):  # the server has counted it
        return [Out(peer, channel, m.RefusedMessage(code=error.code, reason=str(error))), *core.replication.drain()]
    return [*core.refuse(channel, peer, str(error)), *core.replication.drain()]


# --- Transports ------------------------------------------------------------------------------------------------------


class Transport(msgspec.Struct, frozen=True, kw_only=True, tag_field="name"):
    """A way for the ranks of a run and its server to communicate: its settings, and both ends.

    (A msgspec struct cannot be an abstract base class, so methods raise errors.)
    """

    def check_address(self, address: str) -> None:
        """Raise `ConfigurationError` unless this is a possible address of a server."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its addresses are")

    def serve(self, core: ServerCore, host: str = "", port: int = 0, data_port: int = 0) -> Served:
        """Listen as a server.

        Args:
            core: state machine of the server.
            host: address of this machine to listen on; empty if all ranks are on it, for the fastest connection.
            port: port to listen on, if the transport has ports; 0 for a free one.
            data_port: port for tensors, if the transport has a separate one; 0 for a free one.

        Raises:
            ConfigurationError: it cannot listen there.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot serve")

    def follow(self, core: ServerCore, coordinator: str, host: str = "", port: int = 0, data_port: int = 0) -> Served:
        """Listen as a server that holds a partition, and join the coordinating server.

        Args:
            core: state machine of the server, with the number of its share.
            coordinator: address of the coordinating server. When that is gone, `Served.run` returns.
            host: as in `serve`.
            port: as in `serve`.
            data_port: as in `serve`.

        Raises:
            ConfigurationError: it cannot listen there, or the transport does not support several servers.
            ConnectionLost: the coordinating server cannot be reached.
            Refused: the coordinating server refuses this one.
        """
        raise ConfigurationError(
            f"transport={name_of(self)}: with it one server holds all weights; pass Server(count=1)"
        )

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
    ) -> Control:
        """Join a run as a rank.

        Args:
            address: address of the server.
            key: the run's shared secret.
            run: a name on which all ranks of the run agree.
            rank: this rank.
            world_size: number of ranks; 0 if this one was not announced and joins a running run, under its own number.
            layout: the parameters of all optimizers; every rank must have the same.
            on_end: called, perhaps from another thread, when this rank must stop.
            silence: seconds without a sign of life after which the server may end the connection, if the transport can
                send such signs without Python; 0 for never.

        Raises:
            ConnectionLost: the server cannot be reached.
            Refused: the server refuses this rank.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot join")

    def serve_again(self, core: ServerCore, address: str) -> Served:
        """Listen at the address of a server that is gone, to continue its run.

        Raises:
            ConfigurationError: it cannot listen there, or the transport does not support this.
        """
        raise ConfigurationError(f"transport={name_of(self)}: with it no server goes on in the place of another")

    def clear(self, address: str) -> None:
        """Remove remains of a server that is gone at this address, before this process ends."""


TRANSPORTS: dict[str, type[Transport]] = {}
"""Every transport by its name in messages."""
_registry = Registry(
    TRANSPORTS, Transport, "transport", "transport", "lightning_omni.transport.Transport", "--transport"
)


def name_of(transport: Transport) -> str:
    """Return the name of a transport in messages."""
    return str(type(transport).__struct_config__.tag)


def from_wire(plain: Mapping[str, Any]) -> Transport:
    """Return a transport from plain data.

    Raises:
        MalformedMessage: unknown transport, or wrong settings.
    """
    return _registry.from_wire(plain)


def register(kind: type[Transport]) -> type[Transport]:
    """Register your own transport under its tag. This is a class decorator.

    The embedded server imports the module of a run's transport; a standalone server needs the argument
    ``lightning-omni serve --transport module:Class``.

    Raises:
        ConfigurationError: the name is in use.
    """
    return _registry.register(kind)


def load(path: str) -> type[Transport]:
    """Import and register a transport from its path ``module:Class``.

    Raises:
        ConfigurationError: it cannot be imported, or is no transport.
    """
    return _registry.load(path)


__all__ = [
    "TRANSPORTS",
    "Address",
    "Control",
    "Data",
    "Peers",
    "Served",
    "Transport",
    "allowed",
    "answer_of",
    "from_wire",
    "load",
    "name_of",
    "refusal",
    "register",
    "to_wire",
]
