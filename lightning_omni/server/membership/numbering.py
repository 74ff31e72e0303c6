"""Numbers of ranks, where groups join on their own: each number is assigned once.

Rule: the first group to request numbers begins the run, and numbers its ranks from 0; until then other groups wait.
"""

from __future__ import annotations

from lightning_omni.errors import Refused

JOINS = "joins-"
"""Prefix of the names of runs that groups join on their own. A restarted server recognizes such a run by it."""
AGAIN = "+"
"""Separator in the name of a run that begins again because its server ended before the first save."""
MOST_RANKS = 1 << 16
"""The most ranks of a run."""


def origin(run: str) -> str:
    """Return the original name of a run, which is the same for all runs that replaced it."""
    return run.partition(AGAIN)[0]


class RankNumbers:
    """The rank numbers of groups that join on their own.

    Attributes:
        given: numbers from this one on are free.
        lost: name of the run that groups were about to join at an earlier server, which has saved none of it; the next
            run is this run, begun again. With `AGAIN` if a rank had joined; empty if there was no such run.
    """

    def __init__(self) -> None:
        self.given, self.lost = 0, ""
        self._claim: tuple[bytes, str] | None = None  # the connection that begins the run, and its name
        self._enlisted: dict[bytes, tuple[int, int]] = {}

    def register(self, peer: bytes, ranks: int, run: str, announced: int) -> tuple[int, int]:
        """Assign numbers to the ranks of a group.

        Args:
            peer: connection of the group.
            ranks: number of its ranks.
            run: suffix of the run's name if this group begins it; `JOINS`, or the name of the run that begins again, is
                its prefix.
            announced: number of announced ranks; 0 if the run has not begun.

        Returns:
            The first number, or -1 while another group is about to begin the run; and the number of announced ranks, 0
            if this group must begin the run.

        Raises:
            Refused: too few numbers are left.
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
            name = f"{origin(self.lost)}{AGAIN}{run}" if self.lost else JOINS + run
            self._claim = self._claim or (peer, name)
            return (0 if self._claim[0] == peer else -1), 0
        self.given = first + ranks
        self._enlisted[peer] = first, announced
        return self._enlisted[peer]

    def begin(self) -> None:
        self._claim = None

    def withdraw(self, peer: bytes) -> None:
        """Forget a group whose connection has ended; if it was about to begin the run, another group may."""
        self._enlisted.pop(peer, None)
        if self._claim is not None and self._claim[0] == peer:
            self._claim = None

    def has_given(self, given: int) -> None:
        """Record that an earlier server has assigned all numbers below this one."""
        self.given = max(self.given, given)

    @property
    def peers(self) -> list[bytes]:
        """Return the connections of groups with assigned numbers, and of the group that is about to begin the run."""
        claim = [self._claim[0]] if self._claim is not None else []
        return [*claim, *self._enlisted]

    @property
    def claimed(self) -> str:
        """Return the name of the run that a group is about to begin, or an empty string."""
        return self._claim[1] if self._claim is not None else ""
