"""The compute groups of a run: their ranks, names and leaders.

Rule 1: an incarnation is used once in a run, a number once between two formings of groups.
Rule 2: several servers, each of which holds a partition of the parameters, receive their parts of a request from a
group's leader. If groups were formed so, each server instead receives its part from the member of the same number,
which counts as the leader there; further members send nothing there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_omni.errors import ProtocolError
from lightning_omni.server.parameters.served_optimizer import GroupHistory
from lightning_omni.topology import GroupId, Topology


class FormedGroups:
    """The groups that were formed together, and those that have joined since.

    Attributes:
        topology: ranks of each group; None before groups are formed, and when none is left.
        incarnation: the last incarnation used.
        by_member: whether each member exchanges its own share.
    """

    def __init__(self) -> None:
        self.topology: Topology | None = None
        self.incarnation = 0
        self.by_member = False
        self._places = 0  # numbers used so far, for when no group is left
        self._identities: dict[int, GroupId] = {}

    @property
    def is_any(self) -> bool:
        """Return whether groups were formed, even if none is left."""
        return self.topology is not None or self._places > 0

    @property
    def alive(self) -> tuple[int, ...]:
        return self.topology.alive if self.topology is not None else ()

    def form(self, topology: Topology, names: Sequence[str], by_member: bool) -> None:
        """Form groups.

        Args:
            topology: the groups.
            names: one name for each group; empty to use the numbers.
            by_member: whether each member exchanges its own share.

        Raises:
            ProtocolError: the names are not unique, or not one for each group.
        """
        names = names or [str(group) for group in range(len(topology.groups))]
        if len(names) != len(topology.groups) or len(set(names)) != len(names):
            raise ProtocolError(f"names={tuple(names)}: {len(topology.groups)} groups need as many different names")
        self.topology, self.by_member = topology, by_member
        self.incarnation += 1
        self._identities = {group: GroupId(name, self.incarnation) for group, name in enumerate(names)}

    def add(self, ranks: Sequence[int], name: str) -> int:
        """Add a group of these ranks; return its number.

        Raises:
            ProtocolError: a group of that name participates.
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

    def remove(self, group: int) -> None:
        """Remove a group; perhaps none is left."""
        assert self.topology is not None
        self._places = len(self.topology.groups)
        self.topology = self.topology.without(group) if len(self.topology.alive) > 1 else None

    def identity(self, group: int) -> GroupId:
        return self._identities[group]

    def members(self, group: int) -> tuple[int, ...]:
        """Return the ranks of a group; empty if there are no groups."""
        return self.topology.members(group) if self.topology is not None else ()

    def group_of(self, rank: int) -> int:
        """Return the number of a rank's group, or -1."""
        return self.topology.find(rank) if self.topology is not None else -1

    def is_leader(self, rank: int) -> bool:
        group = self.group_of(rank)
        return group >= 0 and self.members(group)[0] == rank

    def exchanges_with(self, group: int, server: int) -> int:
        """Return the rank of a group that sends a server its part of the group's requests.

        Args:
            group: number of the group.
            server: number of the server, among those that hold a partition of the parameters.
        """
        return self.members(group)[server if self.by_member else 0]

    def counts_as(self, rank: int, server: int) -> int:
        """Return the rank that a sender counts as: its leader, if it is the member that exchanges with this server.

        Args:
            rank: the sender.
            server: number of the server.
        """
        group = self.group_of(rank) if self.by_member else -1
        return rank if group < 0 or self.exchanges_with(group, server) != rank else self.members(group)[0]

    def check_grouped(self, rank: int, group: int) -> None:
        """Raise `ProtocolError` unless ``group``, the number of the rank's group, is valid."""
        if group < 0:
            raise ProtocolError(f"rank {rank} is in no group; groups are formed when training begins")

    def check_leads(self, rank: int, group: int) -> None:
        """Raise `ProtocolError` unless the rank leads its group."""
        self.check_grouped(rank, group)
        if not self.is_leader(rank):
            raise ProtocolError(f"rank {rank} does not lead group {group}; only leaders push")

    def history(self, formed: int) -> GroupHistory:
        """Return all groups so far, of which the first ``formed`` were formed together."""
        every = range(len(self.topology.groups) if self.topology is not None else self._places)
        return GroupHistory(every[:formed], every[formed:], [group for group in every if group not in self.alive])

    def state(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {
            "groups": [list(members) for members in self.topology.groups] if self.topology is not None else None,
            "places": self._places,
            "incarnation": self.incarnation,
            "by_member": self.by_member,
            "identities": {group: (each.name, each.incarnation) for group, each in self._identities.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        groups = state["groups"]
        self.topology = Topology(tuple(tuple(members) for members in groups)) if groups is not None else None
        self._places, self.incarnation = state["places"], state["incarnation"]
        self.by_member = state["by_member"]
        self._identities = {group: GroupId(*each) for group, each in state["identities"].items()}
