"""Placement of ranks on nodes or at sites, and the costs of messages within one, which cross no slow link."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lightning_omni.tuning.model.measured import Measured

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Placement:
    """The nodes of the ranks. It is empty if each rank is on a node of its own, and the server on none of these.

    Args:
        of: node or site of each rank: see `sites_of`.
        server: node of all servers; None if they are on none of these nodes, on each of them, or unknown.
        per_byte: seconds of each byte between two ranks on one node; None if unknown.
        round_trip: seconds until a nearly empty message is answered there.

    Example:
        >>> placement = Placement({0: 0, 1: 0, 2: 1, 3: 1}, server=0)
        >>> placement.are_together([2, 3]), placement.are_together([1, 2]), placement.are_here([(0, 2), (1, 3), (2, 0)])
        (True, False, [True, True, False])
    """

    of: Mapping[int, int] = field(default_factory=dict)
    server: int | None = None
    per_byte: float | None = None
    round_trip: float = 0.0

    @classmethod
    def measured(cls, measured: Sequence[Measured]) -> Placement:
        """Return the placement in the last segment that has nodes, with the least measured costs within nodes."""
        known = [each for each in measured if each.nodes]
        if not known:
            return cls()
        of = dict(zip(known[-1].ranks, known[-1].nodes, strict=True))
        timed = [each for each in known if each.node_per_byte]
        per_byte = min((each.node_per_byte for each in timed), default=None)
        round_trip = min((each.node_round_trip for each in timed), default=0.0)
        server = None if known[-1].per_node else known[-1].server_node
        return cls(of, server, per_byte, round_trip)

    def are_together(self, members: Sequence[int]) -> bool:
        return bool(self.of) and len({self.of[rank] for rank in members}) == 1

    def are_here(self, groups: Sequence[Sequence[int]]) -> list[bool]:
        """Return, for each group, whether its leader, which exchanges with the server, is on the server's node."""
        return [self.server is not None and self.of[members[0]] == self.server for members in groups]

    def handed_on(self, groups: Sequence[Sequence[int]], over: Array, nbytes: float) -> Array:
        """Return the seconds in which each group's leader forwards a message to its members, shape (draws, groups).

        The members form a tree, whose depth is the number of messages in sequence.

        Args:
            groups: members of each group.
            over: seconds of one message that crosses links, shape (draws,).
            nbytes: bytes of the message.
        """
        depths = np.array([(len(members) - 1).bit_length() for members in groups])
        message = over[:, None]
        if self.per_byte is not None:
            within = self.round_trip / 2 + self.per_byte * nbytes
            message = np.where([self.are_together(members) for members in groups], within, message)
        return np.asarray(depths * message)

    def repeated(self, ranks: int) -> Placement:
        """Return the placement of ``ranks`` ranks on repeated copies of these nodes."""
        if not self.of:
            return self
        known, more = list(self.of.values()), 1 + max(self.of.values())
        return replace(self, of={r: known[r % len(known)] + more * (r // len(known)) for r in range(ranks)})


def sites_of(nodes: Sequence[int], seconds: Sequence[float], apart: float) -> tuple[tuple[int, ...], list[int]]:
    """Join consecutive nodes into sites, within which links are much faster than between sites.

    Args:
        nodes: node of each rank, in ascending order of ranks.
        seconds: seconds of one message from each node to the next; at least one.
        apart: ratio to the time over the fastest link above which a link leads to another site.

    Returns:
        The site of each rank, numbered from 0, and the indices of the links inside a site. If all links are alike, the
        nodes themselves, and no link.

    Example:
        >>> sites_of((0, 0, 1, 2, 3), [0.001, 0.008, 0.001], apart=3.0)
        ((0, 0, 0, 1, 1), [0, 2])
        >>> sites_of((0, 0, 1, 2), [0.008, 0.009], apart=3.0)
        ((0, 0, 1, 2), [])
    """
    longest = apart * min(seconds)
    starts = [number for number, each in enumerate(seconds, 1) if each > longest]
    if not starts:
        return tuple(nodes), []
    numbers = {node: number for number, node in enumerate(sorted(set(nodes)))}
    inside = [number for number, each in enumerate(seconds) if each <= longest]
    return tuple(bisect(starts, numbers[node]) for node in nodes), inside


def over_links(measured: Measured) -> list[int]:
    """Return the numbers of the groups whose leader is not on the server's node, or of all groups if there is none.

    Only exchanges of these groups cross links.
    """
    here = Placement.measured([measured]).are_here(measured.groups)
    return [number for number, is_here in enumerate(here) if not is_here] or [*range(len(here))]
