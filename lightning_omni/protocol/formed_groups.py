"""The compute groups of a run: which rank is in which, what each is called, and which rank speaks for it.

Rule 1: an incarnation is given once in a run, a number once between two formings of groups.
Rule 2: several servers that hold a share each hear their parts of a request from a group's leader or, where groups are
formed so, each from the member of its number, which counts there as the leader does; further members say nothing there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_omni.errors import ProtocolError
from lightning_omni.protocol.shard import GroupHistory
from lightning_omni.topology import GroupId, Topology


class FormedGroups:
    """Groups that were formed at once, and those that have joined since.

    Attributes:
        topology: which rank is in which group; None before groups are formed, and when none is left.
        incarnation: the last that was given.
        by_member: whether each member exchanges a share of its own.
    """

    def __init__(self) -> None:
        self.topology: Topology | None = None
        self.incarnation = 0
        self.by_member = False
        self._places = 0  # numbers of groups that were given, for when there is none
        self._identities: dict[int, GroupId] = {}

    @property
    def is_any(self) -> bool:
        """Whether groups were formed, also if none is left."""
        return self.topology is not None or self._places > 0

    @property
    def alive(self) -> tuple[int, ...]:
        """Numbers of the groups that take part."""
        return self.topology.alive if self.topology is not None else ()

    def form(self, topology: Topology, names: Sequence[str], by_member: bool) -> None:
        """Groups are formed.

        Args:
            topology: the groups.
            names: theirs; their numbers, if there are none.
            by_member: whether each member exchanges a share of its own.

        Raises:
            ProtocolError: the names are not one for each group, each another.
        """
        names = names or [str(group) for group in range(len(topology.groups))]
        if len(names) != len(topology.groups) or len(set(names)) != len(names):
            raise ProtocolError(f"names={tuple(names)}: {len(topology.groups)} groups need as many different names")
        self.topology, self.by_member = topology, by_member
        self.incarnation += 1
        self._identities = {group: GroupId(name, self.incarnation) for group, name in enumerate(names)}

    def add(self, ranks: Sequence[int], name: str) -> int:
        """These ranks are a group, too. Returns its number.

        Raises:
            ProtocolError: a group of that name takes part.
        """
        before = self.topology.groups if self.topology is not None else ((),) * self._places
        number = len(before)
        name = name or str(number)
        if any(self._identities[group].name == name for group in self.alive):
            raise ProtocolError(f"name={name!r}: a group of that name takes part; pass another one")
        self.topology = Topology((*before, tuple(ranks)))
        self.incarnation += 1
        self._identities[number] = GroupId(name, self.incarnation)
        return number

    def take_out(self, group: int) -> None:
        """A group takes no part any more; perhaps none is left."""
        assert self.topology is not None
        self._places = len(self.topology.groups)
        self.topology = self.topology.without(group) if len(self.topology.alive) > 1 else None

    def identity(self, group: int) -> GroupId:
        """Which group this is."""
        return self._identities[group]

    def members(self, group: int) -> tuple[int, ...]:
        """The ranks of a group; none if there are no groups."""
        return self.topology.members(group) if self.topology is not None else ()

    def group_of(self, rank: int) -> int:
        """Number of the group that a rank is in, or -1."""
        return self.topology.find(rank) if self.topology is not None else -1

    def is_leader(self, rank: int) -> bool:
        """Whether a rank leads a group."""
        group = self.group_of(rank)
        return group >= 0 and self.members(group)[0] == rank

    def exchanges_with(self, group: int, server: int) -> int:
        """The rank of a group from which a server has its part of what the group asks.

        Args:
            group: number of the group.
            server: that of the server, among those that hold a share each.
        """
        return self.members(group)[server if self.by_member else 0]

    def counts_as(self, rank: int, server: int) -> int:
        """The rank as which a sender counts at a server: its group's leader, if it is the member that exchanges there.

        Args:
            rank: of the sender.
            server: number of the server.
        """
        group = self.group_of(rank) if self.by_member else -1
        return rank if group < 0 or self.exchanges_with(group, server) != rank else self.members(group)[0]

    def check_grouped(self, rank: int, group: int) -> None:
        """Raises `ProtocolError` unless ``group``, that of the rank, is one."""
        if group < 0:
            raise ProtocolError(f"rank {rank} is in no group; groups are formed when training begins")

    def check_leads(self, rank: int, group: int) -> None:
        """Raises `ProtocolError` unless the rank speaks for its group."""
        self.check_grouped(rank, group)
        if not self.is_leader(rank):
            raise ProtocolError(f"rank {rank} does not lead group {group}; only leaders push")

    def history(self, formed: int) -> GroupHistory:
        """All groups so far, of which so many were formed at once."""
        every = range(len(self.topology.groups) if self.topology is not None else self._places)
        return GroupHistory(every[:formed], every[formed:], [group for group in every if group not in self.alive])

    def state(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            "groups": [list(members) for members in self.topology.groups] if self.topology is not None else None,
            "places": self._places,
            "incarnation": self.incarnation,
            "by_member": self.by_member,
            "identities": {group: (each.name, each.incarnation) for group, each in self._identities.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`."""
        groups = state["groups"]
        self.topology = Topology(tuple(tuple(members) for members in groups)) if groups is not None else None
        self._places, self.incarnation = state["places"], state["incarnation"]
        self.by_member = state.get("by_member", False)  # which earlier releases could not save
        self._identities = {group: GroupId(*each) for group, each in state["identities"].items()}
