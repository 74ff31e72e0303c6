"""Which ranks take part in a run: admission, signs of life, losses.

Rule 1: a rank that was lost never comes back under the same number in the same run.
Rule 2: a rank that was not announced may come while the run goes on, under a number beyond the announced ones; it takes
part in nothing before it is in a group.
Rule 3: a dead rank costs its own group; the recorder's group costs the run.
Rule 4: where groups join on their own, the recorder is the lowest rank that lives, and the run outlives every group: it
is over when one has trained it to its end.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lightning_omni.errors import ProtocolError, Refused
from lightning_omni.protocol.formed_groups import FormedGroups
from lightning_omni.protocol.handshake import fingerprint_problem, is_equal, rank_mac, session_key, version_problem
from lightning_omni.protocol.messages import Heartbeat, Hello, Proof
from lightning_omni.protocol.rank_numbers import JOINS, MOST_RANKS, RankNumbers, origin
from lightning_omni.topology import RECORDER, Topology

MOST_CHALLENGED = 1024
"""Connections that may be about to prove something; a further one displaces the first. Each holds at most 1 kB."""
TRAINED_TO_ITS_END = "it has been trained to its end"
"""Why no group joins a finished run."""


@dataclass
class Member:
    """An admitted rank.

    Attributes:
        peer: its control connection; empty for a rank that a server which goes on has not heard of yet.
        session: the secret that it shares with the server; it never travels.
        since: when it was admitted.
        got_on: when it was heard last that it gets on with its work, or is not to be judged by that.
        host: the address from which it has connected, where the transport knows it.
    """

    rank: int
    peer: bytes
    session: bytes
    last_seen: float
    timings: Heartbeat = field(default_factory=lambda: Heartbeat(sent=0.0))
    since: float = field(init=False)
    got_on: float = field(init=False)
    host: str = ""

    def __post_init__(self) -> None:
        self.since = self.got_on = self.last_seen

    def update(self, heartbeat: Heartbeat) -> None:
        """A sign of life."""
        if heartbeat.progress == 0 or heartbeat.progress != self.timings.progress:
            self.got_on = self.last_seen
        self.timings = heartbeat


class Roster:
    """The ranks of one run.

    Attributes:
        formed: the compute groups that they are in.
        numbers: of ranks, where groups ...
        joining: ... join on their own.
        finished: whether it was trained to its end.
        can_go_on: whether a group that joins can go on with it, also if no rank is left.
        wanted_groups: how many groups a person who watches has asked for; 0 if that is done, or no one has.
        barred: those of the lost ranks whose group is not to join again by itself.
        barred_hosts: addresses from which no group may join.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._first: Hello | None = None
        self._began = 0.0
        self._challenged: dict[bytes, tuple[Hello, bytes]] = {}
        self.members: dict[int, Member] = {}
        self.lost: dict[int, str] = {}
        self.barred: set[int] = set()
        self.barred_hosts: set[str] = set()
        self.gone: set[int] = set()
        self.formed, self.numbers = FormedGroups(), RankNumbers()
        self.late: list[int] = []
        self.joining = self.finished = self.can_go_on = False
        self.wanted_groups = 0
        self._ranks: dict[bytes, int] = {}

    @property
    def run(self) -> str:
        """The run's name; empty while no rank has come."""
        return self._first.run if self._first else ""

    @property
    def began(self) -> float:
        """When the first rank was admitted."""
        return self._began

    @property
    def world_size(self) -> int:
        """Number of ranks that the run was announced with."""
        return self._first.world_size if self._first else 0

    @property
    def recorder(self) -> int:
        """The rank that forms groups, hands weights over, logs and saves."""
        return min(self.live, default=RECORDER) if self.joining else RECORDER

    def hears_first(self, group: int) -> bool:
        """Whether a group may hear of a validation before the recorder has saved what it wants to save of it.

        Args:
            group: number of the group; where groups join on their own, that of the recorder hears first.
        """
        return not self.joining or self.formed.group_of(self.recorder) == group

    @property
    def live(self) -> tuple[int, ...]:
        """Ranks that take part in collectives: those announced or joined, less those lost and those that left."""
        ranks = (*range(self.world_size), *self.late)
        return tuple(r for r in ranks if r not in self.lost and r not in self.gone)

    @property
    def is_over(self) -> bool:
        """Whether ranks came, and none is left; nor is there something for others to go on with."""
        goes_on = self.can_go_on and not self.finished
        return self._first is not None and not goes_on and not any(rank in self.members for rank in self.live)

    @property
    def lost_ranks(self) -> tuple[int, ...]:
        """All ranks lost so far, ascending."""
        return tuple(sorted(self.lost))

    @property
    def groups(self) -> tuple[int, ...]:
        """Numbers of the groups that take part; none before groups are formed."""
        return self.formed.alive

    @property
    def joined_groups(self) -> int:
        """How many groups take part, of a run that they join on their own; 0 where ranks form groups together."""
        return len(self.groups) if self.joining else 0

    def form(self, topology: Topology, names: Sequence[str] = (), by_member: bool = False) -> None:
        """Groups are formed: see `FormedGroups.form`."""
        self.formed.form(topology, names, by_member)
        self.wanted_groups = 0

    def enlist(self, peer: bytes, ranks: int, run: str) -> tuple[int, int]:
        """A group that comes on its own wants numbers for its ranks: see `RankNumbers.enlist`.

        Raises:
            Refused: the run is over, its ranks were announced, or there are too few numbers left.
        """
        if self.finished:
            raise Refused("over", TRAINED_TO_ITS_END)
        if self._first is not None and not self.joining:
            raise Refused(
                "busy",
                "this server is busy with a run whose ranks were all announced when it began; start a server for each"
                " run",
            )
        return self.numbers.enlist(peer, ranks, run, self.world_size)

    def join(self, ranks: Sequence[int], name: str) -> int:
        """Ranks that came late are a group from now on. Returns its number.

        Raises:
            ProtocolError: they cannot be one.
            Refused: one of them has connected from an address that is barred.
        """
        if not self.formed.is_any:
            raise ProtocolError("no group can join before the first are formed")
        for rank in ranks:
            if rank not in self.members or rank in self.late or rank < self.world_size or rank in self.gone:
                raise ProtocolError(f"rank {rank} is not one that came late and is in no group")
            if (host := self.members[rank].host) in self.barred_hosts:
                raise Refused("barred", f"a person has barred {host} from this run")
        if not ranks or len(set(ranks)) != len(ranks):
            raise ProtocolError(f"ranks={tuple(ranks)}: a group has one rank or more, each of them once")
        number = self.formed.add(ranks, name)
        self.late.extend(ranks)
        return number

    def leave(self, rank: int) -> None:
        """A rank leaves in good order; its group is none any more when all have."""
        self.gone.add(rank)
        group = self.formed.group_of(rank)
        if group < 0 or not self.gone.issuperset(self.formed.members(group)):
            return
        if len(self.groups) > 1 or self.joining:
            self.formed.take_out(group)

    def record_hello(self, peer: bytes, hello: Hello, challenge: bytes) -> None:
        """A rank says hello; it is to answer ``challenge``.

        Raises:
            Refused: another protocol version.
        """
        if problem := version_problem(hello):
            raise Refused("version", problem)
        self._challenged[peer] = (hello, challenge)
        while len(self._challenged) > MOST_CHALLENGED:  # strangers may say hello as they like, but not fill the memory
            self._challenged.pop(next(iter(self._challenged)))

    def admit(self, peer: bytes, proof: Proof, now: float) -> tuple[Hello, bytes]:
        """Checks the answer to a challenge and admits the rank.

        Returns:
            Its hello, and the challenge.

        Raises:
            Refused: wrong key, another run, another model, a rank that cannot be.
        """
        hello, challenge = self._challenged.pop(peer, (None, b""))
        if hello is None or not is_equal(proof.mac, rank_mac(self._key, hello, challenge)):
            raise Refused("key", "the key does not match the server's; both sides must be given the same key")
        if problem := self._gone_with_its_server(hello):
            raise Refused("gone", problem)
        joins = hello.run.startswith(JOINS)
        if joins and self._first is None and self.numbers.claimed not in ("", hello.run):
            raise Refused(
                "busy",
                "another group is about to begin a run here, and this server, which was started again meanwhile, knows"
                " nothing of this group; start it again, and it joins the other",
            )
        if hello.world_size > MOST_RANKS:
            raise Refused("rank", f"a run of {hello.world_size} ranks cannot be: {MOST_RANKS} are the most")
        first = self._first or hello
        comes_late = self._first is not None and not hello.world_size
        if hello.run != first.run or (hello.world_size != first.world_size and not comes_late):
            raise Refused(
                "busy", f"this server is busy with another run of {first.world_size} ranks; start a server for each run"
            )
        allowed = range(first.world_size, MOST_RANKS) if comes_late else range(min(hello.world_size, MOST_RANKS))
        if hello.rank not in allowed or hello.rank in self.lost or hello.rank in self.gone:
            of = f" of {hello.world_size}" if hello.world_size else ""  # a group that joins on its own announces none
            raise Refused("rank", f"rank {hello.rank}{of} cannot join: it was lost or never was")
        if hello.rank in self.members and self.members[hello.rank].peer:
            raise Refused("rank", f"rank {hello.rank} has joined already; is the script running twice?")
        if problem := fingerprint_problem(hello, first):
            raise Refused("fingerprint", problem)
        self.take_in(peer, hello, challenge, now)
        return hello, challenge

    def _gone_with_its_server(self, hello: Hello) -> str:
        """Why a rank cannot go on with the run that it came to at a server before this one; empty if it can."""
        joins = hello.run.startswith(JOINS)
        is_unknown = self._first is None and (hello.returns or (joins and not hello.world_size))
        here = self.run or self.numbers.claimed or self.numbers.lost
        if joins and origin(hello.run) == origin(here) and (is_unknown or hello.run != here):
            return "the server before this one was gone before it had saved anything; the run is begun again"
        if is_unknown:
            return (
                "this server knows nothing of the run: what the one before it had saved is not there; start it with the"
                " same --state"
            )
        return ""

    def take_in(self, peer: bytes, hello: Hello, challenge: bytes, now: float) -> None:
        """A rank has shown that it holds the key."""
        if self._first is None:
            self._first, self._began = hello, now
            self.joining = hello.run.startswith(JOINS)
            self.numbers.begin()
        self.members[hello.rank] = Member(hello.rank, peer, session_key(self._key, hello, challenge), now)
        self._ranks[peer] = hello.rank

    # --- A server that goes on ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All of it, as plain values; which connections ranks have is not a part of it."""
        return {
            "first": msgspec.msgpack.encode(self._first),
            "members": list(self.members),
            "lost": dict(self.lost),
            "barred": sorted(self.barred),
            "barred_hosts": sorted(self.barred_hosts),
            "wanted_groups": self.wanted_groups,
            "gone": sorted(self.gone),
            "joining": self.joining,
            "finished": self.finished,
            "numbered": self.numbers.given,
            "late": list(self.late),
            **self.formed.state(),
        }

    def load(self, state: dict[str, Any], now: float) -> None:
        """Goes on from a `state`. Its ranks count as heard of now."""
        self._first, self._began = msgspec.msgpack.decode(state["first"], type=Hello), now
        self.lost, self.gone, self.barred = dict(state["lost"]), set(state["gone"]), set(state["barred"])
        self.barred_hosts = set(state.get("barred_hosts", ()))  # which earlier releases did not know
        self.wanted_groups = state.get("wanted_groups", 0)  # nor did they keep this
        self.joining, self.finished = state["joining"], state["finished"]
        self.numbers.given, self.late = state["numbered"], list(state["late"])
        self.formed.load(state)
        self.expect(state["members"], now)

    def expect(self, ranks: Sequence[int], now: float) -> None:
        """These ranks were admitted by the server before this one; they will come again."""
        for rank in ranks:
            self.members.setdefault(rank, Member(rank, b"", b"", now))

    def by_peer(self, peer: bytes) -> Member | None:
        """The admitted rank behind a control connection."""
        return self.members.get(self._ranks.get(peer, -1))

    def silent(self, now: float, timeout: float, join_timeout: float) -> list[tuple[int, str]]:
        """Live ranks that were silent for too long, and how to say so."""
        late = []
        for rank in self.live:
            member = self.members.get(rank)
            if member is None:
                if now - self._began > join_timeout:
                    late.append((rank, f"rank {rank} did not join within {join_timeout:.0f} s"))
            elif now - member.last_seen > timeout:
                late.append((rank, f"rank {rank} gave no sign of life for {timeout:.0f} s"))
        return late

    def stalled(self, now: float, timeout: float, contributed: Container[int]) -> list[tuple[int, str]]:
        """A rank of each group that is alive and has got nothing done for too long, and how to say so.

        Members of a group wait for one another, so none of them is blamed, and a group stands still when none gets on.
        A group with which the run would end is left alone.

        Args:
            now: seconds.
            timeout: seconds.
            contributed: ranks that wait at a synchronization point of all ranks; the others of their group do not wait
                for them.
        """
        late = []
        for group in self.groups:
            if self.ends_with(group):
                continue
            ranks = [r for r in self.formed.members(group) if r in self.members and r not in self.gone]
            at_work = [self.members[rank].got_on for rank in ranks if rank not in contributed]
            if at_work and now - max(at_work) > timeout:
                name = self.formed.identity(group).name
                late.append((ranks[0], f"group {name} is alive and has made no progress for {timeout:.0f} s"))
        return late

    def ends_with(self, group: int) -> bool:
        """Whether the run would end if this group did."""
        return not self.joining and (len(self.groups) == 1 or self.recorder in self.formed.members(group))

    def lose(self, rank: int, reason: str, barred: bool = False) -> tuple[int | None, bool]:
        """Takes a dead rank's group out of the run.

        Args:
            rank: the dead one.
            reason: of its death.
            barred: whether the group is not to join again by itself.

        Returns:
            The number of the evicted group, or None; and whether the run is over.
        """
        group = self.formed.group_of(rank)
        if group < 0 or self.ends_with(group):
            self.lost[rank] = reason
            return None, True
        members = self.formed.members(group)
        self.lost.update(dict.fromkeys(members, reason))
        self.barred.update(members if barred else ())
        self.formed.take_out(group)
        return group, False
