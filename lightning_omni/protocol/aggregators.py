"""What the one server has to do with aggregators, which add up what groups push on its way here.

Groups speak to the server itself on their control connections: leases, signs of life, losses and synchronization points
go end to end. A leader that asks is told of an aggregator, and pushes to it; the aggregator adds the pushes of several
groups up, sends one sum, and hands the one answer on to all of them. So of pushes and of answers only one in so many
passes the server's link.

Rule 1: an aggregator decides nothing. Which groups there are, which of them wait, and which push counts, is the
server's to say.
Rule 2: a push may come in a sum or by itself, and counts once: see `deliveries`. A sum is applied whole or not at all,
and if it is not, each of its groups pushes to the server itself.
Rule 3: an aggregator that is gone takes nothing along: the groups that have no answer push to the server itself.
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
"""Aggregators of one server, and processes that may be about to show that they are."""


@dataclass
class _AggregatorLink:
    """The connections of an aggregator.

    Attributes:
        number: its own, from -1 downwards.
        control: where it is told what happens.
        address: of its data socket.
        secret: opens its data connection.
        last_seen: when it last said something.
        data: where its sums come from; empty before it is open.
        sent: messages that it was sent, of which it has ...
        done: ... done as many as this says.
        asked: ranks that are to hear of it, by their connections, and how much it must have done before.
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
    """The server, as its aggregators see it. It outlasts a run.

    Args:
        key: the run's shared secret.
        random: draws that many random bytes (nonces).
        heartbeat_timeout: seconds of silence after which an aggregator counts as gone.
        now: the time of the message that is being handled.
        data_port: of the server.
        is_recorded: whether what happens is recorded: a record is of pushes one by one.
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
        self._of: dict[int, int] = {}  # rank: number of the aggregator that it was told of
        self._leaders: dict[int, int] = {}  # of groups that take part
        self._formed: m.Form | None = None
        self._adds_up = False

    def serve(self, roster: Roster, shards: HeldShards) -> None:
        """A run may come, with these ranks and weights."""
        self._roster, self._shards = roster, shards
        self._forget_run()
        for link in self._links.values():
            self._send(link, sm.RunOver())

    # --- What aggregators are told -----------------------------------------------------------------------------------

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
        # Others that push to the same aggregator must not wait for it there.
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

    # --- Aggregators come and go -------------------------------------------------------------------------------------

    def hello(self, sender: Sender, message: sm.ShardHello, payload: Payload) -> list[Out]:
        """An aggregator says hello."""
        return self._newcomers.challenge(sender.peer, message)

    def admit(self, sender: Sender, message: sm.ShardProof, payload: Payload) -> list[Out]:
        """An aggregator proves that it holds the key."""
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
        """An aggregator lives, and has done what it was told."""
        link = self._link_of(sender.peer)
        link.last_seen, link.done = self._now(), max(link.done, message.count)
        due = [peer for peer, sent in link.asked if sent <= link.done]
        link.asked = [each for each in link.asked if each[1] > link.done]
        answer = m.Aggregator(address=link.address)
        return [Out(link.control, m.CONTROL, m.Acknowledged()), *(Out(peer, m.CONTROL, answer) for peer in due)]

    def fail(self, sender: Sender, message: sm.ShardFailed, payload: Payload) -> list[Out]:
        """An aggregator cannot go on."""
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
        """An aggregator is gone. A rank that has noticed it itself does no more than it did."""
        del self._links[link.number]
        theirs = [rank for rank, number in self._of.items() if number == link.number]
        for rank in theirs:
            del self._of[rank]
        waiting = {peer for peer, _ in link.asked}
        out = [Out(peer, m.CONTROL, m.Aggregator(address="")) for peer in waiting]
        members = [self._roster.members[rank] for rank in theirs if rank not in self._roster.gone]
        return out + [Out(member.peer, m.CONTROL, m.PushDirectly()) for member in members if member.peer not in waiting]


def _nearness(host: str, address: str) -> int:
    """How many bits the addresses of two machines have in common in front; 0 if that is not known."""
    try:
        one, other = ip_address(host), ip_address(urlsplit(address).hostname or "")
    except ValueError:
        return 0
    if one.version != other.version:
        return 0
    return one.max_prefixlen - (int(one) ^ int(other)).bit_length()
