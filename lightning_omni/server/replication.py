"""Several servers that hold a partition of the parameters each and act as one; or one server, on its own.

Every server runs the whole state machine of training on its partition. Server 0 coordinates: ranks join it, and it
sends the others commands, which all execute in the same order. So clocks, staleness and the decisions of a method are
the same at all servers, and every moment between two requests is a consistent cut.

Rule 1: a request of a rank has one part for each server. Either all servers apply it, once all parts have arrived, or
none does: a push that is not finite in one part, that a server refuses, or whose leader dies before all parts arrive.
Rule 2: the coordinator alone decides this. A leader may die at any moment, and no server waits for it.
Rule 3: if other ranks may act at the other servers upon an answer of the coordinator, it is sent once these servers
have executed the commands.
Rule 4: where the members of a group hold a shard each, the parts arrive from different ranks, and count as those of
their leader.
Rule 5: the loss of a server is the loss of its partition, and ends the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import Unpack

from lightning_omni.errors import OmniError, ProtocolError, Refused, StepFailed
from lightning_omni.server.service import Out, Payload, Peer, Sender, Service
from lightning_omni.wire import messages as m
from lightning_omni.wire.handshake import Challenges, server_mac
from lightning_omni.wire.journal import Arguments, Call
from lightning_omni.wire.messages import servers as sm

COORDINATOR: Peer = b"\0coordinator"
"""The coordinating server, as the peer of another one's messages."""
MOST_HELD = 16
"""The most requests of one rank that may wait for further parts."""

Request = m.PushMessage | m.FetchMessage | m.AverageMessage | m.UploadWeights | m.TakeSnapshot
"""A request to all servers, each of which gets a part."""
Handle = Callable[[Sender], list[Out]]
"""A function that handles this server's part of a request."""


Key = tuple[int, int]
"""The rank and the number of a request."""


class Replication(Service, ABC):
    """The relation of server ``number`` of ``count`` servers to the others, which hold a partition each."""

    def __init__(self, number: int, count: int) -> None:
        self.number, self.count = number, count
        self._out: list[Out] = []
        self._held: dict[Key, tuple[Sender, Handle]] = {}
        self._refused: dict[Key, m.RefusedMessage] = {}  # parts to refuse when they arrive

    def begin(
        self, end: Callable[[str], list[Out]], live: Callable[[], Container[int]], relayed: Callable[[int, bytes], Any]
    ) -> None:
        """Prepare for a run; ``end`` ends it, ``live`` returns live ranks, ``relayed`` handles a relayed message."""
        self._end, self._live, self._relayed = end, live, relayed
        self._held.clear()
        self._refused.clear()

    def evict(self, group: int, lost: bool) -> list[Out]:
        live = self._live()
        self._held = {key: held for key, held in self._held.items() if key[0] in live}
        self._refused = {key: refusal for key, refusal in self._refused.items() if key[0] in live}
        return []

    def drain(self) -> list[Out]:
        out, self._out = self._out, []
        return out

    @abstractmethod
    def tick(self, now: float) -> list[Out]:
        """Look for servers that are gone, or report to the coordinating server."""

    # --- Of the coordinating server alone ----------------------------------------------------------------------------

    def send_to_all(self, method: Callable[[Unpack[Arguments]], object], *arguments: Unpack[Arguments]) -> None:
        """Make the other servers call their own such method, after all earlier ones."""

    def relay(self, rank: int, message: m.Message) -> None:
        """Make the other servers handle a rank's control message, too."""

    def when_done(self, out: list[Out]) -> list[Out]:
        """Return the answers that may be sent now; hold others until all servers have executed their commands."""
        return out

    def hang_up(self, peer: Peer) -> list[Out]:
        return []

    @property
    def peers(self) -> list[Peer]:
        return []

    @property
    def missing(self) -> int:
        """Return the number of servers that have not joined, or are lost."""
        return 0

    @property
    def lost_server(self) -> str:
        """Return a sentence about a lost server, without which no run can be served, or ""."""
        return ""

    def ended(self, number: int, how: str) -> None:
        """Record how a server's process has ended; if it has not joined, the next `tick` ends the run."""

    # --- Requests in parts -------------------------------------------------------------------------------------------

    def check_addressee(self, message: type[m.Message], in_parts: bool) -> None:
        """Raise `ProtocolError` if messages of this type are not for this server."""

    def check_number(self, rank: int, request: int) -> None:
        """Raise `ProtocolError` if a request cannot have this number, or too many of its rank are held."""
        if request < 1 or (rank, request) in self._held:
            raise ProtocolError(f"request {request} of rank {rank}: the parts of a request have one number, from 1 on")
        if sum(key[0] == rank for key in self._held) >= MOST_HELD:
            raise ProtocolError(f"{MOST_HELD} requests of rank {rank} wait for the rest of their parts; no more may")

    def hold(self, sender: Sender, message: Request, finite: bool, handle: Handle) -> list[Out]:
        """Hold this server's part of a request until all parts have arrived; refuse it if one was refused."""
        key = sender.rank, message.request
        if (refusal := self._refused.pop(key, None)) is not None:
            return [Out(sender.peer, m.DATA, refusal)]
        self._held[key] = sender, handle
        present = message.present if isinstance(message, m.PushMessage) else ()
        return self._part_arrived(key, finite, () if all(present) else present)

    @abstractmethod
    def refuse(self, rank: int, request: int, refusal: m.RefusedMessage) -> None:
        """Record that this server has refused its part of a request: all servers refuse theirs."""

    @abstractmethod
    def _part_arrived(self, key: Key, finite: bool, present: tuple[bool, ...]) -> list[Out]:
        """Handle the arrival of this server's part; see `PartReady`."""

    def decide(
        self, key: Key, finite: bool, refusal: m.RefusedMessage | None, elsewhere: tuple[tuple[bool, ...], ...]
    ) -> list[Out]:
        """Handle this server's part of a request once all parts have arrived; with a ``refusal``, refuse it instead."""
        held = self._held.pop(key, None)
        if held is None:
            if refusal is not None:
                self._refused[key] = refusal
                of_rank = [each for each in self._refused if each[0] == key[0]]
                for oldest in of_rank[:-MOST_HELD]:  # parts that were refused here never arrive
                    del self._refused[oldest]
            return []
        sender, handle = held
        if refusal is None:
            try:
                return handle(sender._replace(finite=finite, elsewhere=elsewhere))
            except StepFailed:
                raise
            except OmniError as error:
                refusal = refusal_of(error)
        return [Out(sender.peer, m.DATA, refusal)]


@dataclass
class _FollowerLink:
    """The coordinator's connection to another server.

    ``done`` counts that server's executed commands.
    """

    peer: Peer
    address: str
    last_seen: float
    done: int = 0


@dataclass
class _Parts:
    """The servers that have their part of a request, with `PartReady.present`; ``finite`` if all are so far."""

    here: dict[int, tuple[bool, ...]] = field(default_factory=dict)
    finite: bool = True


class Coordinator(Replication):
    """The server that decides the order of events.

    Args:
        count: number of servers, including this one, which may be the only one.
        heartbeat_timeout: seconds of silence after which a server counts as gone.
        join_timeout: seconds for the others to join once a rank waits for them.
    """

    def __init__(
        self,
        key: bytes,
        random: Callable[[int], bytes],
        count: int,
        heartbeat_timeout: float,
        join_timeout: float,
        now: Callable[[], float],
    ) -> None:
        super().__init__(0, count)
        self._key, self._now = key, now
        self._heartbeat_timeout, self._join_timeout = heartbeat_timeout, join_timeout
        self._challenges = Challenges[sm.FollowerHello](random, most=4 * count)
        self._links: dict[int, _FollowerLink] = {}
        self._gone: dict[int, str] = {}
        self._ended: dict[int, str] = {}
        self._history: list[sm.ServerCommand] = []  # for servers that have not joined yet
        self._sent = 0
        self._waiting: list[tuple[int, Callable[[], list[Out]]]] = []
        self._asked_at: float | None = None
        self._parts: dict[Key, _Parts] = {}

    def begin(
        self, end: Callable[[str], list[Out]], live: Callable[[], Container[int]], relayed: Callable[[int, bytes], Any]
    ) -> None:
        super().begin(end, live, relayed)
        self._parts.clear()
        self._waiting.clear()
        self._asked_at = None

    @property
    def lost_server(self) -> str:
        return next(iter(self._gone.values()), "")

    @property
    def missing(self) -> int:
        return self.count - 1 - len(self._links)

    @property
    def peers(self) -> list[Peer]:
        return [link.peer for link in self._links.values()]

    # --- Commands ----------------------------------------------------------------------------------------------------

    def send_to_all(self, method: Callable[[Unpack[Arguments]], object], *arguments: Unpack[Arguments]) -> None:
        self._sent += 1
        command = sm.ServerCommand(call=Call.of(method, *arguments), now=self._now())
        if not self._is_complete:
            self._history.append(command)
        self._out += [Out(link.peer, m.CONTROL, command) for link in self._links.values()]

    def relay(self, rank: int, message: m.Message) -> None:
        self.send_to_all(self._relayed, rank, m.encode(message))

    def when_done(self, out: list[Out]) -> list[Out]:
        return self._when_done(lambda: out)

    def _when_done(self, answer: Callable[[], list[Out]]) -> list[Out]:
        if not self._is_complete and self._asked_at is None:
            self._asked_at = self._now()
        self._waiting.append((self._sent, answer))
        return self._answers_due()

    def _answers_due(self) -> list[Out]:
        done = min((link.done for link in self._links.values()), default=self._sent) if self._is_complete else -1
        if self._gone:  # the run is over, so no rank must wait
            done = self._sent
        due = [answer for sent, answer in self._waiting if sent <= done]
        self._waiting = [each for each in self._waiting if each[0] > done]
        return [out for answer in due for out in answer()]

    @property
    def _is_complete(self) -> bool:
        return len(self._links) == self.count - 1

    # --- Connections of servers --------------------------------------------------------------------------------------

    def hello(self, sender: Sender, message: sm.FollowerHello, payload: Payload) -> list[Out]:
        return [Out(sender.peer, m.CONTROL, m.Challenge(nonce=self._challenges.ask(sender.peer, message)))]

    def admit(self, sender: Sender, message: sm.FollowerProof, payload: Payload) -> list[Out]:
        hello, challenge = self._challenges.proved(sender.peer, message.mac, lambda _: self._key)
        if hello.servers != self.count or not 0 < hello.number < self.count:
            raise Refused(
                "server",
                f"server {hello.number} of {hello.servers} cannot join here: this one is server 0 of {self.count}; give"
                " all of them the same --servers, and the others the address of server 0",
            )
        if hello.number in self._links or hello.number in self._gone:
            raise Refused("server", f"there was a server {hello.number} already; give each another number")
        link = self._links[hello.number] = _FollowerLink(sender.peer, hello.address, self._now())
        welcome = sm.FollowerWelcome(
            mac=server_mac(self._key, hello, challenge), heartbeat_timeout=self._heartbeat_timeout
        )
        out = [Out(link.peer, m.CONTROL, each) for each in (welcome, *self._history)]
        link.done = self._sent - len(self._history)
        if self._is_complete:
            self._history.clear()
            self._asked_at = None
        return out

    def ask_addresses(self, sender: Sender, message: m.AskServerAddresses, payload: Payload) -> list[Out]:
        """Send the addresses of the other servers, once all have joined and admitted the rank."""
        return self._when_done(lambda: [Out(sender.peer, m.CONTROL, self._addresses())] if self._is_complete else [])

    def _addresses(self) -> m.ServerAddresses:
        return m.ServerAddresses(addresses=tuple(self._links[number].address for number in range(1, self.count)))

    def tick(self, now: float) -> list[Out]:
        for number, link in list(self._links.items()):
            if now - link.last_seen > self._heartbeat_timeout:
                return self._lose(number, f"gave no sign of life for {self._heartbeat_timeout:.0f} s")
        missing = sorted(set(range(1, self.count)) - self._links.keys() - self._gone.keys())
        if ended := [number for number in missing if number in self._ended]:
            reason = self._gone[ended[0]] = f"{self._description_of(ended[0])}, never came: {self._ended[ended[0]]}"
            return self._end(f"{reason}; the run cannot go on without it") + self._answers_due()
        if missing and self._asked_at is not None and now - self._asked_at > self._join_timeout:
            self._asked_at = None
            reason = f"{self._description_of(missing[0])}, did not come within {self._join_timeout:.0f} s"
            return self._end(f"{reason}; the run cannot go on without it")
        return []

    def hang_up(self, peer: Peer) -> list[Out]:
        for number, link in list(self._links.items()):
            if link.peer == peer:
                return self._lose(number, "is gone: its process or its machine failed")
        return []

    def ended(self, number: int, how: str) -> None:
        self._ended[number] = how

    def _description_of(self, number: int) -> str:
        return f"parameter server {number} of {self.count}, which is to hold a partition of the parameters"

    def _lose(self, number: int, what: str) -> list[Out]:
        link = self._links.pop(number)
        reason = (
            f"parameter server {number} of {self.count} at {link.address} {what}, and its partition of the parameters"
        )
        self._gone[number] = f"{reason} is lost"
        return self._end(f"{reason} with it; the run cannot go on") + self._answers_due()

    def fail(self, sender: Sender, message: sm.FollowerFailed, payload: Payload) -> list[Out]:
        number = self._number_of(sender)
        if message.of_run:
            return self._end(message.reason) + self._answers_due()
        return self._lose(number, f"failed: {message.reason}")

    def commands_done(self, sender: Sender, message: sm.CommandsDone, payload: Payload) -> list[Out]:
        link = self._links[self._number_of(sender)]
        link.last_seen = self._now()
        link.done = max(link.done, message.count)
        return [Out(link.peer, m.CONTROL, m.Acknowledged()), *self._answers_due()]

    def _number_of(self, sender: Sender) -> int:
        for number, link in self._links.items():
            if link.peer == sender.peer:
                return number
        raise Refused("stranger", "say FollowerHello first: this connection is of no server that holds a partition")

    # --- Requests ----------------------------------------------------------------------------------------------------

    def ready(self, sender: Sender, message: sm.PartReady, payload: Payload) -> list[Out]:
        number = self._number_of(sender)
        key = message.rank, message.request
        if message.rank not in self._live():  # the rank has died meanwhile
            return []
        if message.refusal is not None:
            return self._refuse(key, message.refusal)
        return self._take(key, number, message.finite, message.present)

    def refuse(self, rank: int, request: int, refusal: m.RefusedMessage) -> None:
        self._out += self._refuse((rank, request), refusal)

    def evict(self, group: int, lost: bool) -> list[Out]:
        live = self._live()
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] in live}
        return super().evict(group, lost)

    def _part_arrived(self, key: Key, finite: bool, present: tuple[bool, ...]) -> list[Out]:
        return self._take(key, 0, finite, present)

    def _take(self, key: Key, number: int, finite: bool, present: tuple[bool, ...]) -> list[Out]:
        parts = self._parts.setdefault(key, _Parts())
        parts.here[number] = present
        parts.finite &= finite
        if len(parts.here) < self.count:
            return []
        del self._parts[key]
        self.send_to_all(self.decide, key, parts.finite, None, ())
        return self.decide(key, parts.finite, None, tuple(parts.here[number] for number in range(1, self.count)))

    def _refuse(self, key: Key, refusal: m.RefusedMessage) -> list[Out]:
        self._parts.pop(key, None)
        self.send_to_all(self.decide, key, False, refusal, ())
        return self.decide(key, False, refusal, ())


class Follower(Replication):
    """A server other than 0, which executes the coordinator's commands."""

    IN_PARTS: ClassVar[tuple[type[m.Message], ...]] = (
        m.Attach,
        m.AttachProof,
        m.LargeMessage,
        m.GroupState,
        m.StoreRunState,
        m.ReadRunState,
    )

    def __init__(self, number: int, count: int) -> None:
        super().__init__(number, count)
        self.commands_executed = 0

    def check_addressee(self, message: type[m.Message], in_parts: bool) -> None:
        if not in_parts and message not in self.IN_PARTS:
            raise ProtocolError(
                f"this server holds partition {self.number} of {self.count}, and takes no {message.__name__}; use the"
                " server that coordinates, server 0"
            )

    def tick(self, now: float) -> list[Out]:
        self._send(sm.CommandsDone(count=self.commands_executed))
        return []

    def refuse(self, rank: int, request: int, refusal: m.RefusedMessage) -> None:
        self._send(sm.PartReady(rank=rank, request=request, refusal=refusal))

    def fail(self, reason: str, of_run: bool = False) -> None:
        self._send(sm.FollowerFailed(reason=reason, of_run=of_run))

    def _part_arrived(self, key: Key, finite: bool, present: tuple[bool, ...]) -> list[Out]:
        self._send(sm.PartReady(rank=key[0], request=key[1], finite=finite, present=present))
        return []

    def _send(self, message: m.Message) -> None:
        self._out.append(Out(COORDINATOR, m.CONTROL, message))


def stand_in(rank: int) -> Peer:
    """Return a stand-in for a rank's control connection, at a server that has none."""
    return b"\0%d" % rank


def refusal_of(error: OmniError) -> m.RefusedMessage:
    return m.RefusedMessage(code=error.code if isinstance(error, Refused) else "protocol", reason=str(error))
