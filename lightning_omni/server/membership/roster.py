"""The participating ranks of a run, in their groups.

Rule 1: a lost rank never rejoins the same run under its number.
Rule 2: a rank that was not announced may join a running run, under a number beyond the announced ones; it participates
only once it is in a group.
Rule 3: a dead rank's group is lost with it; if it is the recorder's or the only one (but see Rule 4), or the rank is in
none, the run ends.
Rule 4: where groups join on their own, the recorder is the lowest live rank, and once state is stored for groups that
join, the run ends when a group has trained it to its end, not when groups are gone.
Rule 5: each rank number is assigned once. The first group to request numbers begins the run, and numbers its ranks from
0; until then other groups wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lightning_omni.errors import ProtocolError, Refused
from lightning_omni.server.parameters.served_parameters import GroupHistory
from lightning_omni.topology import RECORDER, GroupId
from lightning_omni.wire.handshake import session_key
from lightning_omni.wire.messages import CONTROL, DATA, FormGroups, Heartbeat, Hello

# --- Groups -----------------------------------------------------------------------------------------------------------

# Rule 1: an incarnation is used once in a run, a number once between two formings of groups.
# Rule 2: several servers, each of which holds a partition of the parameters, receive their parts of a request from a
# group's leader. If they were formed ``by_member``, each server instead receives its part from the member of the same
# number, which counts as the leader there; further members send nothing there.


class FormedGroups(msgspec.Struct, dict=True):
    """The groups that were formed together, and those that have joined since. The fields are the saved state.

    Attributes:
        groups: ranks of each group, by its number; empty for those that have ended.
        incarnation: the last incarnation used.
        message: the recorder's, by which they were formed; None before.
        alive: numbers of the groups that have ranks.
        ranks: the group of each of their ranks.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    incarnation: int = 0
    message: FormGroups | None = None
    _ended: dict[int, int] = {}  # groups that have ended, with the numbers used until then
    _identities: dict[int, GroupId] = {}

    def __post_init__(self) -> None:
        self._set(self.groups)

    def _set(self, groups: tuple[tuple[int, ...], ...]) -> None:
        self.groups, self.alive = groups, tuple(group for group, members in enumerate(groups) if members)
        self.ranks = {rank: group for group, members in enumerate(groups) for rank in members}

    @property
    def by_member(self) -> bool:
        return self.message is not None and self.message.by_member

    def form(self, message: FormGroups) -> None:
        names = message.names or [str(group) for group in range(len(message.groups))]
        if len(names) != len(message.groups) or len(set(names)) != len(names):
            raise ProtocolError(f"names={tuple(names)}: {len(message.groups)} groups need as many different names")
        self._set(message.groups)
        self.message = message
        self.incarnation += 1
        self._ended.clear()
        self._identities = {group: GroupId(name, self.incarnation) for group, name in enumerate(names)}

    def add(self, ranks: Sequence[int], name: str) -> int:
        number = len(self.groups)
        name = name or str(number)
        if any(self._identities[group].name == name for group in self.alive):
            raise ProtocolError(f"name={name!r}: a group of that name takes part; pass another one")
        self._set((*self.groups, tuple(ranks)))
        self.incarnation += 1
        self._identities[number] = GroupId(name, self.incarnation)
        return number

    def remove(self, group: int) -> None:
        self._ended[group] = len(self.groups)
        self._set(tuple(() if number == group else members for number, members in enumerate(self.groups)))

    def identity(self, group: int) -> GroupId:
        return self._identities[group]

    def members(self, group: int) -> tuple[int, ...]:
        return self.groups[group]

    def group_of(self, rank: int) -> int:
        return self.ranks.get(rank, -1)

    def is_leader(self, rank: int) -> bool:
        group = self.group_of(rank)
        return group >= 0 and self.members(group)[0] == rank

    def exchanges_with(self, group: int, server: int) -> int:
        """Return the rank of a group that sends a server its part of the group's requests."""
        return self.members(group)[server if self.by_member else 0]

    def counts_as(self, rank: int, server: int) -> int:
        """Return the leader of a member that exchanges with this server; otherwise the rank itself."""
        group = self.group_of(rank) if self.by_member else -1
        return rank if group < 0 or self.exchanges_with(group, server) != rank else self.members(group)[0]

    def check_grouped(self, rank: int, group: int) -> None:
        if group < 0:
            raise ProtocolError(f"rank {rank} is in no group; groups are formed when training begins")

    def check_leads(self, rank: int, group: int) -> None:
        self.check_grouped(rank, group)
        if self.members(group)[0] != rank:
            raise ProtocolError(f"rank {rank} does not lead group {group}; only leaders push")

    def history(self, formed: int) -> GroupHistory:
        every = range(len(self.groups))
        return GroupHistory(every[:formed], every[formed:], self._ended)


JOINS = "joins-"
"""Prefix by which the server recognizes the name of a run that groups join on their own."""
MOST_RANKS = 1 << 16
"""The most rank numbers of a run."""


class RankNumbers:
    """The rank numbers of groups that join on their own.

    Attributes:
        given: numbers from this one on are free, except announced ones.
    """

    def __init__(self) -> None:
        self.given = 0
        self._claim: tuple[bytes, str] | None = None  # the connection that begins the run, and its name
        self._enlisted: dict[bytes, tuple[int, int]] = {}

    def register(self, peer: bytes, ranks: int, run: str, announced: int) -> tuple[int, int]:
        """Assign numbers to the ranks of a group.

        ``run`` is the suffix of the run's name if this group begins it; ``announced`` the number of announced ranks, 0
        if the run has not begun.

        Return the first number, or -1 while another group is about to begin the run; and ``announced``.
        """
        first = max(self.given, announced)
        if not 0 < ranks < MOST_RANKS - first:
            raise Refused(
                "rank",
                f"{ranks} ranks cannot join: {first} of the run's {MOST_RANKS} rank numbers were given out, and each is"
                " given once, also to a group that fails and starts again; resume the run from a checkpoint",
            )
        if peer in self._enlisted:
            return self._enlisted[peer]
        if not announced:
            self._claim = self._claim or (peer, JOINS + run)
            return (0 if self._claim[0] == peer else -1), 0
        self.given = first + ranks
        self._enlisted[peer] = first, announced
        return self._enlisted[peer]

    def assign(self, numbers: int) -> None:
        """Assign all numbers below this one."""
        self.given = max(self.given, numbers)

    def begin(self) -> None:
        self._claim = None

    def withdraw(self, peer: bytes) -> None:
        """Forget a group whose connection has ended; if it was about to begin the run, another may."""
        self._enlisted.pop(peer, None)
        if self._claim is not None and self._claim[0] == peer:
            self._claim = None

    @property
    def peers(self) -> list[bytes]:
        claim = [self._claim[0]] if self._claim is not None else []
        return [*claim, *self._enlisted]

    @property
    def claimed(self) -> str:
        return self._claim[1] if self._claim is not None else ""


TRAINED_TO_ITS_END = "it has been trained to its end"
"""The reason for which a finished run refuses groups."""


@dataclass
class Member:
    """An admitted rank.

    Attributes:
        peer: its control connection; empty after a restart of the server, until it reconnects, as is ``data_peer``.
        session: secret that it shares with the server; it is never sent.
        got_on: last time at which it had made progress, or was exempt from the check.
        host: address from which it has connected, if the transport provides it.
    """

    rank: int
    peer: bytes
    session: bytes
    last_seen: float
    timings: Heartbeat = field(default_factory=lambda: Heartbeat(sent=0.0))
    since: float = field(init=False)
    got_on: float = field(init=False)
    host: str = ""
    data_peer: bytes = b""

    def __post_init__(self) -> None:
        self.since = self.got_on = self.last_seen

    def update(self, heartbeat: Heartbeat) -> None:
        if heartbeat.progress == 0 or heartbeat.progress != self.timings.progress:
            self.got_on = self.last_seen
        self.timings = heartbeat


class Roster:
    """The ranks of one run.

    Attributes:
        first: the message of the first rank that was admitted.
        began: time at which the first rank was admitted, or an earlier server's state was loaded.
        over: why the run cannot continue, or "".
        can_continue: whether a group that joins can continue the run, even if no rank is left.
        barred: lost ranks whose group must not rejoin by itself.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.first: Hello | None = None
        self.began = 0.0
        self.members: dict[int, Member] = {}
        self.lost: dict[int, str] = {}
        self.barred: set[int] = set()
        self.barred_hosts: set[str] = set()
        self.gone: set[int] = set()
        self.formed, self.numbers = FormedGroups(), RankNumbers()
        self.over, self.finished, self.can_continue = "", False, False
        self._ranks: dict[tuple[str, bytes], int] = {}  # of each channel's connections

    @property
    def run(self) -> str:
        return self.first.run if self.first else ""

    @property
    def joining(self) -> bool:
        """Return whether groups join on their own."""
        return self.run.startswith(JOINS)

    @property
    def world_size(self) -> int:
        return self.first.world_size if self.first else 0

    @property
    def recorder(self) -> int:
        return min(self.live, default=RECORDER) if self.joining else RECORDER

    @property
    def live(self) -> tuple[int, ...]:
        """Return the ranks that participate in collectives."""
        ranks = (*range(self.world_size), *(rank for rank in self.formed.ranks if rank >= self.world_size))
        return tuple(r for r in ranks if r not in self.lost and r not in self.gone)

    @property
    def is_over(self) -> bool:
        continues = self.can_continue and not self.finished
        return self.first is not None and not continues and not any(rank in self.members for rank in self.live)

    @property
    def lost_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.lost))

    def register(self, peer: bytes, ranks: int, run: str) -> tuple[int, int]:
        if self.finished:
            raise Refused("over", TRAINED_TO_ITS_END)
        if self.first is not None and not self.joining:
            raise Refused(
                "busy",
                "this server is busy with a run whose ranks were all announced when it began; wait until it is over, or"
                " start a server for each run",
            )
        return self.numbers.register(peer, ranks, run, self.world_size)

    def join(self, ranks: Sequence[int], name: str) -> int:
        if not self.formed.groups:
            raise ProtocolError("no group can join before the first are formed")
        for rank in ranks:
            is_out = rank not in self.members or rank in self.gone or rank in self.lost
            if is_out or rank < self.world_size or rank in self.formed.ranks:
                raise ProtocolError(f"rank {rank} is not one that came late and is in no group")
            if (host := self.members[rank].host) in self.barred_hosts:
                raise Refused("barred", f"a person has barred {host} from this run")
        if not ranks or len(set(ranks)) != len(ranks):
            raise ProtocolError(f"ranks={tuple(ranks)}: a group has one rank or more, each of them once")
        return self.formed.add(ranks, name)

    def leave(self, rank: int) -> None:
        """Record a rank's departure; remove a group whose ranks have all left, unless the run ends with it."""
        self.gone.add(rank)
        group = self.formed.group_of(rank)
        if group < 0 or not self.gone.issuperset(self.formed.members(group)):
            return
        if len(self.formed.alive) > 1 or self.joining:
            self.formed.remove(group)

    def add_member(self, peer: bytes, hello: Hello, challenge: bytes, now: float) -> None:
        if self.first is None:
            self.first, self.began = hello, now
            self.numbers.begin()
        self.members[hello.rank] = Member(hello.rank, peer, session_key(self._key, hello, challenge), now)
        self._ranks[CONTROL, peer] = hello.rank

    def attach(self, rank: int, peer: bytes) -> None:
        self.members[rank].data_peer = peer
        self._ranks[DATA, peer] = rank

    # --- Saved state -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "first": msgspec.msgpack.encode(self.first),
            "members": list(self.members),
            "lost": dict(self.lost),
            "barred": sorted(self.barred),
            "barred_hosts": sorted(self.barred_hosts),
            "gone": sorted(self.gone),
            "finished": self.finished,
            "numbered": self.numbers.given,
            "formed": msgspec.msgpack.encode(self.formed),
        }

    def load(self, state: dict[str, Any], now: float) -> None:
        self.first, self.began = msgspec.msgpack.decode(state["first"], type=Hello), now
        self.lost, self.gone, self.barred = dict(state["lost"]), set(state["gone"]), set(state["barred"])
        self.barred_hosts = set(state["barred_hosts"])
        self.finished, self.numbers.given = state["finished"], state["numbered"]
        self.formed = msgspec.msgpack.decode(state["formed"], type=FormedGroups)
        self.expect(state["members"], now)

    def expect(self, ranks: Sequence[int], now: float) -> None:
        """Expect ranks that an earlier server had admitted to reconnect."""
        for rank in ranks:
            self.members.setdefault(rank, Member(rank, b"", b"", now))

    def find(self, channel: str, peer: bytes) -> Member | None:
        return self.members.get(self._ranks.get((channel, peer), -1))

    def data_connection(self, rank: int) -> tuple[bytes, bytes] | None:
        """Return a rank's data connection and its secret; None without one, or if the rank is gone."""
        member = self.members.get(rank)
        return (member.data_peer, member.session) if member and member.data_peer and rank not in self.gone else None

    def exchange_peer(self, group: int, server: int) -> bytes:
        """Return the data connection of the group's member that exchanges with a server."""
        return self.members[self.formed.exchanges_with(group, server)].data_peer

    @property
    def attached(self) -> set[bytes]:
        # On servers other than 0, dead ranks are in `lost` only.
        out = self.gone | self.lost.keys()
        return {member.data_peer for rank, member in self.members.items() if member.data_peer and rank not in out}

    def ends_with(self, group: int) -> bool:
        return not self.joining and (len(self.formed.alive) == 1 or self.recorder in self.formed.members(group))

    def lose(self, rank: int, reason: str, barred: bool = False) -> tuple[int | None, bool]:
        """Remove a dead rank's group; return its number, and False; if the run is over instead, None and True."""
        group = self.formed.group_of(rank)
        if group < 0 or self.ends_with(group):
            self.lost[rank] = reason
            return None, True
        members = self.formed.members(group)
        self.lost.update(dict.fromkeys(members, reason))
        self.barred.update(members if barred else ())
        self.formed.remove(group)
        return group, False
