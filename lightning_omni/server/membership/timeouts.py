"""Time limits for ranks that are silent, late or stuck."""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_omni.server.membership.roster import Roster

PATIENCE = 30.0
"""Seconds of silence granted to a rank that may hold Python's lock, where signs of its connection cannot be counted."""


class TimeLimits:
    """The time limits for the ranks of a run.

    Args:
        heartbeat: seconds of silence after which a rank counts as dead.
        join: seconds within which all ranks must join after the first one.
        progress: seconds without progress after which a group that has trained and is alive counts as dead, unless the
            run would end with it.
        joined_heartbeat: like ``heartbeat``, where groups join on their own; None for the same.

    Attributes:
        hears_connections: whether connections send signs of life without the rank's Python, which the driver counts on
            Linux; the driver sets it.
    """

    def __init__(
        self,
        heartbeat: float = math.inf,
        join: float = math.inf,
        progress: float = math.inf,
        joined_heartbeat: float | None = None,
    ) -> None:
        self.heartbeat, self.join, self.progress = heartbeat, join, progress
        self._joined_heartbeat = heartbeat if joined_heartbeat is None else joined_heartbeat
        self.hears_connections = False

    def heartbeat_of(self, joining: bool) -> float:
        """Return the heartbeat timeout in seconds, as reported to observers."""
        return self._joined_heartbeat if joining else self.heartbeat

    def silence_of(self, joining: bool) -> float:
        """Return the seconds of silence after which the server considers a rank dead."""
        limit = self.heartbeat_of(joining)
        is_deaf = self.hears_connections and sys.platform != "linux"
        return max(limit, PATIENCE) if joining and is_deaf else limit

    @property
    def silence_of_connections(self) -> float:
        """Return for how many seconds a joining group's connection may be silent; 0 for no limit."""
        return self._joined_heartbeat if self.hears_connections and math.isfinite(self._joined_heartbeat) else 0.0

    def silent(self, roster: Roster, now: float) -> Iterator[tuple[int, str]]:
        timeout = self.silence_of(roster.joining)
        for rank in roster.live:
            member = roster.members.get(rank)
            if member is None:
                if now - roster.began > self.join:
                    yield rank, f"rank {rank} did not join within {self.join:.0f} s"
            elif now - member.last_seen > timeout:
                yield rank, f"rank {rank} gave no sign of life for {timeout:.0f} s"

    def stalled(self, roster: Roster, now: float, contributed: Container[int]) -> Iterator[tuple[int, str]]:
        """Yield one rank of each group that is alive without progress for too long, with a message.

        A group is stalled only if none of its ranks makes progress. Ranks in ``contributed`` do not count: they wait
        for all ranks. Groups whose loss would end the run are skipped.
        """
        for group in roster.formed.alive:
            if roster.ends_with(group):
                continue
            ranks = [r for r in roster.formed.members(group) if r in roster.members and r not in roster.gone]
            at_work = [roster.members[rank].got_on for rank in ranks if rank not in contributed]
            if at_work and now - max(at_work) > self.progress:
                name = roster.formed.identity(group).name
                yield ranks[0], f"group {name} is alive and has made no progress for {self.progress:.0f} s"
