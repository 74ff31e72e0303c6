"""What joins a group's side and the server's side: connections, as both sides see them. No sockets, clocks or threads.

A transport brings three things for a rank, its control connection (`Control`), its data connection (`Data`) and a
leader's way to other leaders (`Peers`), and one for the server, what drives its state machine (`Served`). Which
transport a run uses is one value, a `Transport`. ZeroMQ is the one that ships; `in_memory` joins both sides in one
process.

Rule 1: what is said on a control connection is heard in order, and so is what is said on a data connection.
Rule 2: a request has one answer. A refusal is raised as `Refused`, whatever ended the run as what ended it.
Rule 3: a control connection that ends without a goodbye is told to `ServerCore.hang_up`: its rank is lost.
Rule 4: the server believes nothing. It asks `ServerCore.check_payload` before it allocates memory for a payload.
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
    tells_of_failure,
)
from lightning_omni.methods import Inbox
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.arrivals import Arrivals
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.server import ServerCore
from lightning_omni.protocol.service import Out, Peer
from lightning_omni.protocol.wire_format import RAW, WireFormat
from lightning_omni.registry import Registry, to_wire

_log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=m.Message)
PATIENCE = 1800.0
"""Seconds that a request waits for its answer, if it is not said otherwise."""


class ServerAway(ConnectionLost):
    """The server is gone, and another one may go on: what it was asked is to be asked again."""


# --- A rank's side ---------------------------------------------------------------------------------------------------


class Control(ABC):
    """A rank's control connection: it stands, and keeps itself alive, until it is closed.

    Requests come from one thread. What keeps the connection alive may be another one: it sends a `heartbeat` twice a
    second and gives what it receives to `handle`.

    Args:
        address: of the server.
        rank: this rank.
        on_end: called once, from whichever thread finds out, when this rank must stop.

    Attributes:
        status: how the run goes, as heard last.
        lost: ranks lost so far.
        failures: what is said of those among them that have failed by themselves.
        signal: a signal that this rank was given, to be told with the next heartbeat.
        shards: servers that hold a share of the weights each; see `attach_all`.
        has_finished: whether the run is at its end when this rank says goodbye.
        progress: counts what this rank has got done, and how often it has waited for the server a little more.
        patience: seconds for which the server is looked for when it is gone; 0 if its loss ends the run.
        returns: tells the servers apart that have gone on in the place of one that was gone: each has a larger number,
            the same at all ranks of a group, whenever they have joined.
        is_away: whether the server is gone, and looked for.
    """

    shards = 1
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

    # --- What each transport brings -----------------------------------------------------------------------------------

    @abstractmethod
    def request_payload(
        self, message: m.Message, expect: type[Answer], payload: bytes = b"", timeout: float = PATIENCE
    ) -> tuple[Answer, list[bytes]]:
        """Sends a message and waits for its answer. Returns it with its payload: one part for each contributor.

        Raises:
            RankLost: this rank was evicted, or the run is over.
            ConnectionLost: the server is gone, or did not answer within ``timeout`` seconds.
            Refused: the server refused, and says why.
        """

    @abstractmethod
    def post(self, message: m.Message) -> None:
        """Sends a message that has no answer, within half a second. From any thread."""

    @abstractmethod
    def wait_for_end(self, seconds: float) -> OmniError | None:
        """What ended this rank's run, if the server says so within that time."""

    @abstractmethod
    def attach(self, timeout: float = 300.0, address: str = "") -> Data:
        """Opens this rank's data connection.

        Args:
            timeout: seconds to wait for any one answer.
            address: of the data socket of another server, which holds a share; empty for that of this one.
        """

    def empty(self, nbytes: int) -> Tensor:
        """Zeros, uint8, ``(nbytes,)``: memory from and to which a data connection takes payloads best."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    @abstractmethod
    def listen(
        self,
        layouts: Sequence[Layout],
        is_lost: Callable[[int], bool],
        everywhere: bool,
        wire_format: WireFormat = RAW,
    ) -> Peers:
        """Opens a leader's way to other leaders.

        Args:
            layouts: of each optimizer's parameters.
            is_lost: whether a group is gone, so that waiting for it is pointless.
            everywhere: whether leaders on other machines must be able to reach this one.
            wire_format: how weights may be put into bytes: those that come are what it makes of them already, so a
                transport may as well send them as they are.
        """

    @abstractmethod
    def close(self, reason: str | None = None) -> None:
        """Says goodbye (with the reason of a failure; None says nothing) and closes the connection."""

    # --- What all have in common --------------------------------------------------------------------------------------

    def attach_all(self, timeout: float = 300.0, share: int | None = None) -> list[Data]:
        """Opens this rank's data connections to the servers that hold a share each.

        Args:
            timeout: seconds to wait for any one answer.
            share: number of the one that this rank exchanges with; None for all.

        Returns:
            The first is to the server that coordinates; of ``share``, the last to that server, perhaps the same.
        """
        if self.patience:
            numbers = range(self.shards) if share is None else sorted({0, share})
            return [LastingData(self, partial(self._find, number), partial(self.attach, timeout)) for number in numbers]
        others = self.request(m.AskShards(), m.Shards).addresses if self.shards > 1 else ()
        addresses = ("", *others)
        if share is not None:
            addresses = ("",) if share == 0 else ("", addresses[share])
        return [self.attach(timeout, address) for address in addresses]

    def _find(self, server: int) -> str:
        """Where one of several servers is now, as `attach` takes it."""
        return self.request(m.AskShards(), m.Shards).addresses[server - 1] if server else ""

    @property
    def records(self) -> bool:
        """Whether this rank logs for the run, as the server has said last."""
        return self.rank == (self.status.recorder if self.status is not None else 0)

    def stands(self, returns: int) -> bool:
        """Whether the server is there, and no other than when ``returns`` was this."""
        return not self.is_away and self.returns == returns

    def check_stands(self, returns: int) -> None:
        """Raises what ended this rank's run, or `ServerAway` if the server is no more the one that it was.

        Args:
            returns: what ``returns`` was.
        """
        self.check()
        if not self.stands(returns):
            raise ServerAway(f"the parameter server at {self.address} is gone")

    def wait_for_return(self) -> None:
        """Waits until there is a server.

        Raises:
            ConnectionLost: there is none any more.
        """
        self.check()
        if self.is_away:
            raise ConnectionLost(f"the parameter server at {self.address} is gone")

    def wait_for_another(self, returns: int) -> None:
        """Waits until a server is there whose ``returns`` is not below this.

        Raises:
            ConnectionLost: there is none any more.
        """
        self.check()
        if self.returns < returns:
            raise ConnectionLost(f"the parameter server at {self.address} is gone")

    def came_back(self, welcome: m.Welcome) -> None:
        """Another server goes on in the place of the one that was gone."""
        self.returns, self.is_away = max(self.returns + 1, welcome.began), False
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
        """Like `request_payload`, for answers that bring none."""
        return self.request_payload(message, expect, payload, timeout)[0]

    @property
    def cause(self) -> OmniError | None:
        """What has ended this rank's run, if anything did."""
        return self._ended

    @property
    def is_ended(self) -> bool:
        """Whether anything did."""
        return self.cause is not None

    def check(self) -> None:
        """Raises what ended this rank's run, if anything did. A rank that waits for the server asks all the time."""
        self.progress += 1
        if self._ended is not None:
            raise self._ended

    def report_timings(self, compute: float, step: float, exchange: float) -> None:
        """Seconds for the next heartbeat: compute time, whole step, exchange."""
        self._timings = (compute, step, exchange)

    def got_on(self, has_trained: bool = False) -> None:
        """This rank has got something done, a batch, say.

        Args:
            has_trained: whether that was a batch of training; from the first one on more is expected.
        """
        self.progress += 1
        self._has_trained |= has_trained
        self._is_judged = self._has_trained

    def takes_time(self) -> None:
        """What this rank does now may take its time, until it gets on."""
        self._is_judged = False

    def heartbeat(self, now: float) -> m.Heartbeat:
        """What is said twice a second."""
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
        """Handles a message of the server. Returns whether it is the answer to a request."""
        if isinstance(message, m.Status):
            self.status, self.lost = message, message.lost
            return not message.sent  # the others answer heartbeats, or nothing
        if not isinstance(message, m.Notice):
            return True
        self.lost = message.lost
        if message.over:
            self.end(RankLost(f"the run is over: {message.reason}"))
        elif self.rank in message.lost:
            kind = RankLost if message.barred else Evicted
            self.end(kind(f"rank {self.rank}'s group is out of the run: {message.reason}"))
        elif message.barred and tells_of_failure(message.reason):
            self.failures += (message.reason,)
        return False

    def end(self, error: OmniError) -> None:
        """This rank's run has ended, if it had not before."""
        if self._ended is None:
            self._ended = error
            self._on_end(error)


class Data(ABC):
    """A rank's data connection: tensors out, tensors in. Used from one thread.

    Attributes:
        moved: bytes of payload that went out and came in so far.
        shared: of these, bytes that lay in memory that both sides have, where a transport has such.
    """

    moved: int = 0
    shared: int = 0

    @abstractmethod
    def send(self, message: m.Message, payload: Tensor | None = None, into: Tensor | None = None) -> None:
        """Sends a message with its payload, and does not wait: they travel while this rank does something else.

        Args:
            message: what to say. Nothing more may be said before its answer was received.
            payload: uint8, on the CPU; must not change until the answer is there.
            into: memory for the answer's payload. It may be written from now on until the answer is there.

        Raises:
            RankLost: this rank's group is out of the run, or the run is over.
            ConnectionLost: the connection has ended.
        """

    @abstractmethod
    def receive(self, expect: type[Answer], into: Tensor | None = None) -> tuple[Answer, Tensor]:
        """Waits for the answer to what was sent, with its payload.

        Args:
            expect: type of the answer.
            into: memory for the answer's payload, if it does not lie where `send` was given memory for it; fresh
                memory where this is missing or too short.

        Returns:
            The answer, and its payload: uint8, empty if there is none.

        Raises:
            Refused: the server refused.
            RankLost: this rank's group is out of the run, or the run is over.
            ConnectionLost: no answer in time.
        """

    def exchange(
        self, message: m.Message, expect: type[Answer], payload: Tensor | None = None, into: Tensor | None = None
    ) -> tuple[Answer, Tensor]:
        """Sends a message and waits for its answer: `send` and `receive`, with the arguments of both."""
        self.send(message, payload, into)
        return self.receive(expect, into)

    @abstractmethod
    def close(self) -> None:
        """Closes the connection at once."""


class LastingData(Data):
    """A data connection that outlasts its server: what was not answered is said again to the one that goes on.

    Args:
        control: of the same rank.
        find: asks where the server is. That may take long, and another server may answer than was asked.
        open: makes a data connection to it.
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
            # Refused is, for instance, a connection that a transport has made again by itself.
            self._return(error)
            return self.receive(expect, into)
        self._said = None
        self.moved, self.shared = self._before[0] + self._data.moved, self._before[1] + self._data.shared
        return answer

    def close(self) -> None:
        self._data.close()

    # --- Where what was said is a part of a request, which is said again as a whole or not at all ---------------------

    @property
    def control(self) -> Control:
        """The control connection of the same rank."""
        return self._control

    @property
    def returns(self) -> int:
        """Of which server this is the connection, as `Control.returns` counts them."""
        return self._returns

    def send_part(self, message: m.Message, payload: Tensor | None = None, into: Tensor | None = None) -> None:
        """As `send`, to the server that there is.

        Raises:
            ServerAway: it is no more.
        """
        with self._telling():
            self._data.send(message, payload, into)

    def receive_part(self, expect: type[Answer], into: Tensor | None = None) -> tuple[Answer, Tensor]:
        """As `receive`, from the server that there is.

        Raises:
            ServerAway: it is no more.
        """
        with self._telling():
            answer = self._data.receive(expect, into)
        self.moved, self.shared = self._before[0] + self._data.moved, self._before[1] + self._data.shared
        return answer

    def renew(self) -> None:
        """Connects to the server that there is now, if it is another one."""
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
        """Says what was not answered to the server that goes on; raises the error if the server is still the same."""
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
    """Where a group's leader listens. All leaders learn it through the control channel."""

    group: int
    address: str


class Peers(Protocol):
    """A leader's way to the other leaders: weights that they read, and an inbox that they fill."""

    @property
    def moved(self) -> int:
        """Bytes of weights that this leader has sent to others, and has read from them, so far."""

    @property
    def address(self) -> str:
        """Where this leader listens."""

    def connect(self, addresses: Mapping[int, Address]) -> None:
        """Tells it where the leaders of the other groups listen, before anything else is asked of it."""

    def publish(self, optimizer: int, tensors: Sequence[Tensor]) -> None:
        """Others read these weights from now on; copied."""

    def read(self, group: int, optimizer: int) -> Sequence[Tensor] | None:
        """What a group has published: CPU tensors; None if there is nothing or no group."""

    def send(self, group: int, optimizer: int, tensors: Sequence[Tensor]) -> None:
        """Puts weights into a group's inbox, unless it is too slow to take them."""

    def read_inbox(self, optimizer: int) -> Inbox:
        """Empties the inbox."""

    def grow(self, optimizer: int, layout: Layout) -> None:
        """An optimizer's weights have another layout; what has come in the old one is gone."""

    def close(self) -> None:
        """Ends both directions."""


@runtime_checkable
class PeersOfShares(Peers, Protocol):
    """The same of a member that has a share of the model, to its counterparts in other groups.

    The members of a group come to the same by it: `lightning_omni.optimizer.together`.
    """

    def hold(self, group: int, optimizer: int) -> int:
        """Which publication `read` gives next, whatever that group publishes meanwhile: 1 is its first, 0 is none."""

    def takes(self, group: int) -> bool:
        """Whether a message to that group would be sent now."""

    def send_part(self, group: int, optimizer: int, tensors: Sequence[Tensor], sender: int, number: int) -> None:
        """Puts a part of a message into a group's inbox; see `lightning_omni.protocol.arrivals`."""

    def arrivals(self, optimizer: int) -> AbstractContextManager[Arrivals]:
        """A context with what has come; nothing comes in it."""


def refused_return(no: Refused) -> ConnectionLost:
    """What ends the run of a rank whose server is gone, if the one in its place refuses the rank."""
    return ConnectionLost(f"the parameter server is gone, and the one at its address refuses this rank: {no}")


def answer_of(message: m.Message, expect: type[Answer]) -> Answer:
    """What came as the answer to a request.

    Raises:
        RankLost: this rank's group is out of the run, or the run is over.
        Refused: the server refused.
        MalformedMessage: it is something else.
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


# --- The server's side -----------------------------------------------------------------------------------------------


class Served(Protocol):
    """A server that listens: it drives a `ServerCore`."""

    @property
    def address(self) -> str:
        """By which ranks join."""

    def run(self, until: Callable[[], bool]) -> None:
        """Serves until ``until()`` is true; it is asked several times a second."""

    def farewell(self, reason: str) -> None:
        """The rank that this server belongs to has ended: if the run has not, the others are told."""

    def close(self) -> None:
        """Listens no more, as soon as the last words are out."""


def allowed(core: ServerCore, channel: m.Channel, peer: Peer, data: bytes | memoryview, nbytes: int) -> m.Message:
    """Bytes that came in as a message, for a transport that has it whole before its payload, as a stream has.

    Args:
        core: the server.
        channel: the channel that it came on.
        peer: the connection that it came from.
        data: the message, as bytes.
        nbytes: of the payload that is to follow.

    Raises:
        ProtocolError: it is none, or not allowed; `refusal` answers it, and the payload is not to be kept.
    """
    message = core.decode(channel, data)
    if channel == m.CONTROL:
        if nbytes > m.LARGEST_INLINE:
            raise MalformedMessage(f"{nbytes} bytes of payload on the control channel, which takes {m.LARGEST_INLINE}")
    elif (expected := core.check_payload(peer, message)) != nbytes:
        raise MalformedMessage(f"{nbytes} bytes of payload came, {expected} were announced")
    return message


def refusal(core: ServerCore, channel: m.Channel, peer: Peer, error: ProtocolError) -> list[Out]:
    """What is sent for a message that was not allowed."""
    if isinstance(error, Refused):  # the server has counted it
        return [Out(peer, channel, m.RefusedMessage(code=error.code, reason=str(error))), *core.servers.drain()]
    return [*core.refuse(channel, peer, str(error)), *core.servers.drain()]


# --- The value -------------------------------------------------------------------------------------------------------


class Transport(msgspec.Struct, frozen=True, kw_only=True, tag_field="name"):
    """How the ranks of a run and its server speak to each other: its settings, and both ends.

    (A msgspec struct cannot be an abstract base class, hence the errors.)
    """

    def check_address(self, address: str) -> None:
        """Raises `ConfigurationError` unless a server could have this address."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its addresses are")

    def serve(self, core: ServerCore, host: str = "", port: int = 0, data_port: int = 0) -> Served:
        """Listens, as a server.

        Args:
            core: its state machine.
            host: address of this machine to listen on; empty if all ranks are on it, however they are reached best.
            port: to listen on, where there are ports; 0 takes a free one.
            data_port: likewise for tensors, if these have one of their own.

        Raises:
            ConfigurationError: it cannot listen there.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot serve")

    def follow(self, core: ServerCore, coordinator: str, host: str = "", port: int = 0, data_port: int = 0) -> Served:
        """Listens, as a server that holds a share, and joins the one that coordinates.

        Args:
            core: its state machine; the number of its share is in it.
            coordinator: address of that server. When it is gone, `Served.run` returns.
            host: as in `serve`, and so are ...
            port: ... this ...
            data_port: ... and this.

        Raises:
            ConfigurationError: it cannot listen there, or there are no such servers with this transport.
            ConnectionLost: the server that coordinates cannot be reached.
            Refused: it does not want this one, and says why.
        """
        raise ConfigurationError(f"transport={name_of(self)}: with it one server holds all weights; pass servers=1")

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
        """Joins a run, as a rank.

        Args:
            address: of the server.
            key: the run's shared secret.
            run: a name that all ranks of the run agree on.
            rank: this rank.
            world_size: number of ranks; 0 if this one was not announced and comes while the run goes on, under a
                number of its own.
            layout: the parameters of all optimizers; every rank must have the same.
            on_end: called, perhaps from another thread, when this rank must stop.
            silence: seconds after which the server may end the connection if there is no sign of life on it, where the
                transport can give such signs without Python's help; 0 for never.

        Raises:
            ConnectionLost: the server cannot be reached.
            Refused: the server does not want this rank, and says why.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot join")

    def serve_again(self, core: ServerCore, address: str) -> Served:
        """Listens where a server listened that is gone, to go on with its run.

        Args:
            core: its state machine.
            address: of the one that is gone.

        Raises:
            ConfigurationError: it cannot listen there, or with this transport no server goes on for another.
        """
        raise ConfigurationError(f"transport={name_of(self)}: with it no server goes on in the place of another")

    def clear(self, address: str) -> None:
        """A process ends at once: removes what a server that is gone, too, has left at this address."""


TRANSPORTS: dict[str, type[Transport]] = {}
"""Every transport by the name under which it travels."""
_registry = Registry(
    TRANSPORTS, Transport, "transport", "transport", "lightning_omni.protocol.transport.Transport", "--transport"
)


def name_of(transport: Transport) -> str:
    """The name under which a transport travels."""
    return str(type(transport).__struct_config__.tag)


def from_wire(plain: Mapping[str, Any]) -> Transport:
    """A transport from plain data.

    Raises:
        MalformedMessage: no such transport, or wrong settings.
    """
    return _registry.from_wire(plain)


def register(kind: type[Transport]) -> type[Transport]:
    """Makes a transport of your own known by its tag. A class decorator.

    The embedded server imports the module that a run's transport comes from; a standalone server is told with
    ``lightning-omni serve --transport module:Class``.

    Raises:
        ConfigurationError: the name is taken.
    """
    return _registry.register(kind)


def load(path: str) -> type[Transport]:
    """Imports and registers a transport, from its path ``module:Class``.

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
