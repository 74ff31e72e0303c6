"""For how long the server waits for ranks that are silent, late or stuck."""

from __future__ import annotations

import math

PATIENCE = 30.0
"""Seconds for which a rank may say nothing whose connection stands: it may hold Python's lock for long."""


class TimeLimits:
    """How many seconds the server gives the ranks of a run.

    Args:
        heartbeat: of silence, after which a rank counts as dead.
        join: that a rank may take to join after the first.
        progress: after which a group that has trained, is alive and gets nothing done counts as dead.
        joined_heartbeat: as ``heartbeat``, where groups join on their own, and one that was evicted by mistake joins
            again; None for no other. Where ``hears_connections``, it is the connections whose silence counts so, and
            ranks that have one are given `PATIENCE` at least.

    Attributes:
        hears_connections: whether connections give signs of life of their own, without the help of the rank's Python,
            and end without these; the driver sets it.
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
        """Seconds of silence after which a rank counts as dead, as ranks are told.

        Args:
            joining: whether the groups of the run join on their own.
        """
        return self._joined_heartbeat if joining else self.heartbeat

    def silence_of(self, joining: bool) -> float:
        """Seconds for which a rank may say nothing, after which it counts as dead.

        Args:
            joining: as in `heartbeat_of`.
        """
        limit = self.heartbeat_of(joining)
        return max(limit, PATIENCE) if joining and self.hears_connections else limit

    @property
    def silence_of_connections(self) -> float:
        """Seconds for which a connection of a group that joins may be silent; 0 if that is not heard."""
        return self._joined_heartbeat if self.hears_connections and math.isfinite(self._joined_heartbeat) else 0.0


__all__ = ["PATIENCE", "TimeLimits"]
