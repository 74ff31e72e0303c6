"""The server's side of aggregators, which sum the pushes of several groups for it.

Groups exchange control messages with the server directly: leases, heartbeats, losses and synchronization points. At its
request, a leader is assigned an aggregator and pushes to it. The aggregator sums the pushes of several groups, sends
one sum, and forwards the one answer to all of them, so the server's link carries one push and one answer for several
groups.

Rule 1: an aggregator decides nothing. The server decides which groups there are, which of them wait, and which pushes
count.
Rule 2: a push may arrive in a sum or alone, and counts once: see `deliveries`. A sum is applied whole or not at all; if
not, each of its groups pushes to the server itself.
Rule 3: the loss of an aggregator loses nothing: groups without an answer push to the server itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit

from lightning_omni.errors import Refused, UnsupportedError
from lightning_omni.methods import Method
from lightning_omni.protocol import messages as m
from lightning_omni.protocol import shard_messages as sm
from lightning_omni.protocol.handshake import aggregator_key, shard_mac
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.roster import Roster
from lightning_omni.protocol.service import Out, Payload, Peer, Sender
from lightning_omni.protocol.shard_servers import Newcomers, OneServer
from lightning_omni.protocol.shards import HeldShards
from lightning_omni.topology import Topology

MOST = 256
"""The most aggregators of one server, and the most processes that are about to prove to be aggregators."""


@dataclass
class _AggregatorLink:
    """The connections of an aggregator.

    Attributes:
        number: its number, from -1 downwards.
        control: control connection, to which commands are sent.
        address: address of its data socket.
        secret: secret that opens its data connection.
        last_seen: time of its last message.
        data: connection of its sums; empty before it is open.
        sent: number of commands sent to it.
        done: number of these that it has processed.
        asked: control connections of ranks to be sent its address, and the value of ``done`` that each of them awaits.
    """

    number: int
    control: Peer
    address: str
    secret: bytes
    last_seen: float
    data: Peer = b""
    sent: int = 0
    done: int = 0
    asked: list[tuple[Peer, int]] = field(default_factory=list)


class Aggregators(OneServer):
    """The server's aggregators. The object outlasts a run.

    Args:
        key: the run's shared secret.
        random: returns a number of random bytes (nonces).
        heartbeat_timeout: seconds of silence after which an aggregator counts as gone.
        now: returns the time of the current message.
        data_port: returns the server's data port.
        is_recorded: whether events are recorded: a record needs every single push.
    """

    def __init__(
        self,
        key: bytes,
        random: Callable[[int], bytes],
        heartbeat_timeout: float,
        now: Callable[[], float],
        data_port: Callable[[], int],
        is_recorded: bool,
    ) -> None:
        self._key, self._now, self._data_port = key, now, data_port
        self._heartbeat_timeout, self._is_recorded = heartbeat_timeout, is_recorded
        self._newcomers = Newcomers(key, random, MOST)
        self._links: dict[int, _AggregatorLink] = {}
        self._count = 0
        self._out: list[Out] = []
        self._forget_run()

    def _forget_run(self) -> None:
        self._admitted: dict[int, sm.Admit] = {}
        self._of: dict[int, int] = {}  # the aggregator that each rank was assigned
        self._leaders: dict[int, int] = {}  # leaders of the participating groups
        self._formed: m.Form | None = None
        self._adds_up = False

    def serve(self, roster: Roster, shards: HeldShards) -> None:
        """Reset for a run with these ranks and weights."""
        self._roster, self._shards = roster, shards
        self._forget_run()
        for link in self._links.values():
            self._send(link, sm.RunOver())

    # --- Commands to aggregators -------------------------------------------------------------------------------------

    def check_method(self, method: Method, groups: int) -> None:
        if self._links and groups > 1 and not method.most_added(groups):
            where = ", ".join(link.address for link in self._links.values())
            raise UnsupportedError(
                f"method={method!r} needs each push by itself, and this server has aggregators (at {where}) that add"
                ' pushes up: take method="hardsync", "local_sgd", "diloco" or "softsync:modulation=average", or end the'
                " aggregators (lightning-omni serve --upstream)",
            )

    def form(self, topology: Topology, method: Method, message: m.Form) -> None:
        self._formed = message
        self._adds_up = bool(method.most_added(len(topology.alive)))
        self._leaders = {group: topology.leader(group) for group in topology.alive}
        self.seeded()

    def join(self, group: int, ranks: tuple[int, ...]) -> None:
        self._leaders[group] = ranks[0]
        self.seeded()

    def evict(self, group: int, lost: bool) -> list[Out]:
        if (rank := self._leaders.pop(group, -1)) in self._of:
            self._send_about(rank, sm.Lose(rank=rank, reason="lost" if lost else "left"))
            del self._of[rank]
        return []

    def seeded(self) -> None:
        for link in self._links.values():
            self._gather(link)

    def send_to_all(self, message: sm.Told) -> None:
        match message:
            case sm.Admit():
                self._admitted[message.hello.rank] = message
            case sm.Idle() | sm.Resume():
                self._send_about(message.rank, message)
            case sm.RunOver():
                for link in self._links.values():
                    self._send(link, message)

    def pushed_directly(self, rank: int) -> None:
        # The other groups of the same aggregator must not wait for this one there.
        self._send_about(rank, sm.Idle(rank=rank))

    def _send_about(self, rank: int, message: sm.Told) -> None:
        if (link := self._links.get(self._of.get(rank, 0))) is not None:
            self._send(link, message)

    def _gather(self, link: _AggregatorLink) -> None:
        if self._formed is None or not self._shards.all:
            return
        leaders = [
            sm.Leader(group, rank, self._roster.formed.identity(group).incarnation)
            for group, rank in self._leaders.items()
        ]
        layouts = [Layout(()) if shard.is_head else shard.layout for shard in self._shards.all]
        method, wire_format = self._formed.method, self._formed.wire_format
        self._send(
            link, sm.Gather(method=method, wire_format=wire_format, leaders=tuple(leaders), layouts=tuple(layouts))
        )

    def _send(self, link: _AggregatorLink, message: sm.Told) -> None:
        link.sent += 1
        self._out.append(Out(link.control, m.CONTROL, message))

    def drain(self) -> list[Out]:
        out, self._out = self._out, []
        return out

    # --- Ranks -------------------------------------------------------------------------------------------------------

    def send_aggregator(self, sender: Sender) -> list[Out]:
        ready = [link for link in self._links.values() if link.data]
        if not ready or not self._adds_up or sender.rank not in self._admitted or sender.rank in self._of:
            return super().send_aggregator(sender)
        host, shared = self._roster.members[sender.rank].host, list(self._of.values())
        link = min(ready, key=lambda link: (-_nearness(host, link.address), shared.count(link.number), -link.number))
        self._of[sender.rank] = link.number
        self._send(link, self._admitted[sender.rank])
        link.asked.append((sender.peer, link.sent))
        return []

    # --- Arrival and loss of aggregators -----------------------------------------------------------------------------

    def hello(self, sender: Sender, message: sm.ShardHello, payload: Payload) -> list[Out]:
        """Answer an aggregator's hello with a challenge."""
        return self._newcomers.challenge(sender.peer, message)

    def admit(self, sender: Sender, message: sm.ShardProof, payload: Payload) -> list[Out]:
        """Admit an aggregator that proves that it holds the key."""
        hello, challenge = self._newcomers.proved(sender.peer, message)
        if hello.shard or hello.shards:
            raise Refused(
                "shard",
                f"server {hello.shard} of {hello.shards} cannot hold a share here: this one holds all weights; start it"
                f" with --shards {hello.shards}",
            )
        if self._is_recorded:
            raise Refused(
                "record", "a record is of pushes one by one, and an aggregator adds them up: leave out --record"
            )
        if len(self._links) >= MOST:
            raise Refused("busy", f"there are {MOST} aggregators already")
        self._count += 1
        number = -self._count
        link = _AggregatorLink(
            number, sender.peer, hello.address, aggregator_key(self._key, hello, challenge), self._now()
        )
        self._links[number] = link
        welcome = sm.ShardWelcome(
            mac=shard_mac(self._key, "coordinator", hello, challenge),
            heartbeat_timeout=self._heartbeat_timeout,
            data_port=self._data_port(),
            number=number,
        )
        return [Out(sender.peer, m.CONTROL, welcome)]

    def secret_of(self, number: int) -> bytes:
        link = self._links.get(number)
        return link.secret if link is not None and not link.data else b""

    def attached(self, number: int, peer: Peer) -> None:
        link = self._links[number]
        link.data = peer
        self._gather(link)

    @property
    def peers(self) -> list[Peer]:
        return [link.control for link in self._links.values()]

    @property
    def data_peers(self) -> list[Peer]:
        return [link.data for link in self._links.values() if link.data]

    def check_adds_up(self, peer: Peer) -> None:
        if peer not in self.data_peers:
            raise Refused("stranger", "this data connection is of no aggregator")

    def heard(self, sender: Sender, message: sm.ShardHeard, payload: Payload) -> list[Out]:
        """Record the commands that an aggregator has processed; send its address to ranks that waited for these."""
        link = self._link_of(sender.peer)
        link.last_seen, link.done = self._now(), max(link.done, message.count)
        due = [peer for peer, sent in link.asked if sent <= link.done]
        link.asked = [each for each in link.asked if each[1] > link.done]
        answer = m.Aggregator(address=link.address)
        return [Out(link.control, m.CONTROL, m.Acknowledged()), *(Out(peer, m.CONTROL, answer) for peer in due)]

    def fail(self, sender: Sender, message: sm.ShardFailed, payload: Payload) -> list[Out]:
        """Remove an aggregator that cannot continue."""
        return self._lose(self._link_of(sender.peer))

    def tick(self, now: float) -> list[Out]:
        silent = [link for link in self._links.values() if now - link.last_seen > self._heartbeat_timeout]
        return [out for link in silent for out in self._lose(link)]

    def hang_up(self, peer: Peer) -> list[Out]:
        gone = [link for link in self._links.values() if link.control == peer]
        return [out for link in gone for out in self._lose(link)]

    def _link_of(self, peer: Peer) -> _AggregatorLink:
        for link in self._links.values():
            if link.control == peer:
                return link
        raise Refused("stranger", "say ShardHello first: this connection is of no aggregator")

    def _lose(self, link: _AggregatorLink) -> list[Out]:
        """Remove an aggregator; its ranks push directly from now on, which some may do already."""
        del self._links[link.number]
        theirs = [rank for rank, number in self._of.items() if number == link.number]
        for rank in theirs:
            del self._of[rank]
        waiting = {peer for peer, _ in link.asked}
        out = [Out(peer, m.CONTROL, m.Aggregator(address="")) for peer in waiting]
        members = [self._roster.members[rank] for rank in theirs if rank not in self._roster.gone]
        return out + [Out(member.peer, m.CONTROL, m.PushDirectly()) for member in members if member.peer not in waiting]


def _nearness(host: str, address: str) -> int:
    """Return the number of leading bits that the addresses of two machines share; 0 if it is unknown."""
    try:
        one, other = ip_address(host), ip_address(urlsplit(address).hostname or "")
    except ValueError:
        return 0
    if one.version != other.version:
        return 0
    return one.max_prefixlen - (int(one) ^ int(other)).bit_length()
