"""Numbers of ranks, where groups join on their own: each is given once.

Rule: the group that asks first is to begin the run, and numbers its ranks from 0; until it has done so others wait.
"""

from __future__ import annotations

from lightning_omni.errors import Refused

JOINS = "joins-"
"""What the names of runs begin with that groups join on their own: a server that goes on before the first group has
come knows by it what the run is that this group begins."""
AGAIN = "+"
"""What a name goes on with where a run is begun again, because its server was gone before it had saved anything."""
MOST_RANKS = 1 << 16
"""Ranks of a run, at most."""


def origin(run: str) -> str:
    """The name of a run as it was when it was first begun: the same for all that were begun again in its place."""
    return run.partition(AGAIN)[0]


class RankNumbers:
    """Gives groups the numbers of their ranks.

    Attributes:
        given: numbers from this one on are free.
        lost: the run that groups were about to come to at the server before this one, which had saved nothing of it:
            the next one is that run, begun again. Its name, with `AGAIN` if one has come; empty if there is none.
    """

    def __init__(self) -> None:
        self.given, self.lost = 0, ""
        self._claim: tuple[bytes, str] | None = None  # who is to begin the run, and its name
        self._enlisted: dict[bytes, tuple[int, int]] = {}

    def enlist(self, peer: bytes, ranks: int, run: str, announced: int) -> tuple[int, int]:
        """A group wants numbers for its ranks.

        Args:
            peer: the connection that it came from.
            ranks: how many it has.
            run: a name for the run, should this group begin it; `JOINS` is put in front of it, or the name of the run
                that is begun again.
            announced: ranks that the run was announced with; 0 if it has not begun.

        Returns:
            The first number, or -1 while another group is about to begin the run; and the ranks that the run was
            announced with, 0 if this group is to begin it.

        Raises:
            Refused: there are not so many numbers left.
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
        """The run begins."""
        self._claim = None

    def withdraw(self, peer: bytes) -> None:
        """A process that had numbers given is gone; if it was to begin the run, and has not, another one may."""
        self._enlisted.pop(peer, None)
        if self._claim is not None and self._claim[0] == peer:
            self._claim = None

    def has_given(self, given: int) -> None:
        """Numbers below this one have been given by the server before this one."""
        self.given = max(self.given, given)

    @property
    def peers(self) -> list[bytes]:
        """Connections of processes whose place stands for as long as these do."""
        claim = [self._claim[0]] if self._claim is not None else []
        return [*claim, *self._enlisted]

    @property
    def claimed(self) -> str:
        """Name of the run that a group is about to begin."""
        return self._claim[1] if self._claim is not None else ""
