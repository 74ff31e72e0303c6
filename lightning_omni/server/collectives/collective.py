"""Collectives of all live ranks: each contributes bytes and receives those of all.

Rule 1: a collective is complete when every *live* rank has contributed; it does not wait for dead ranks.
Rule 2: all ranks must call the same collective; two different ones at the same point end the run with a clear message.
Rule 3: a rank may have a few open at a time, so the number of ranks bounds the memory.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor

from lightning_omni.errors import CollectiveMismatch, ProtocolError

MOST_OPEN = 16
"""The most collectives at which a rank may wait when it opens another one."""

_OF_EACH_BATCH = (
    ". Groups train different numbers of batches, so what a hook has kept of each batch has other sizes on other ranks:"
    " gather the sizes and pad to the largest, use torch.distributed.all_gather_object, or a metric of torchmetrics"
)

_ELSEWHERE = (
    ". If ranks have data of different lengths, such as an IterableDataset each, limit_train_batches= gives all of them"
    " as many batches as the shortest has"
)


class _Contribution(NamedTuple):
    """A rank's contribution to a collective."""

    what: str
    where: str
    payload: bytes | Tensor

    def __str__(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


class Collectives:
    """The open collectives.

    Example:
        >>> collectives = Collectives()
        >>> collectives.contribute(0, 1, "barrier", b""), collectives.complete(live=[0, 1])
        (None, [])
        >>> collectives.contribute(0, 0, "barrier", b""), collectives.complete(live=[0, 1])
        (None, [(0, [(0, b''), (1, b'')])])
    """

    def __init__(self) -> None:
        self._open: dict[int, dict[int, _Contribution]] = {}

    def contribute(
        self, number: int, rank: int, what: str, payload: bytes | Tensor, where: str = "", is_stopping: bool = False
    ) -> None:
        """Add a rank's contribution to a collective.

        Args:
            number: number of the collective.
            rank: the contributing rank.
            what: the collective and its signature; the same on all ranks.
            payload: bytes for the other ranks.
            where: the rank's position in the program, for the message on a mismatch.
            is_stopping: whether a group has requested the run's stop, so that a mismatch is no sign of uneven data.

        Raises:
            ProtocolError: the rank waits at too many others.
            CollectiveMismatch: other ranks called another collective at the same point.
        """
        if number not in self._open and sum(rank in waiting for waiting in self._open.values()) >= MOST_OPEN:
            raise ProtocolError(f"rank {rank} comes to collective {number}, and waits at {MOST_OPEN} others")
        present, mine = self._open.setdefault(number, {}), _Contribution(what, where, payload)
        for other, theirs in present.items():
            if theirs.what != what:
                sizes_differ = what.partition("(")[0] == theirs.what.partition("(")[0]
                is_of_loops = mine.where and theirs.where and not is_stopping
                hint = _OF_EACH_BATCH if sizes_differ else _ELSEWHERE if is_of_loops else ""
                raise CollectiveMismatch(
                    f"rank {rank} called {mine} while rank {other} called {theirs}; outside the training epoch all"
                    f" ranks must make the same collective calls in the same order, as under DDP{hint}"
                )
        present[rank] = mine

    @property
    def is_idle(self) -> bool:
        """Return whether no collective is open."""
        return not self._open

    @property
    def contributed(self) -> set[int]:
        """Return the ranks that have contributed to an open collective and wait for the others."""
        return {rank for present in self._open.values() for rank in present}

    def forget(self, ranks: Collection[int]) -> None:
        """Drop the contributions of dead ranks."""
        for present in self._open.values():
            for rank in ranks:
                present.pop(rank, None)

    def complete(self, live: Collection[int]) -> list[tuple[int, list[tuple[int, bytes | Tensor]]]]:
        """Remove and return the complete collectives: their numbers, and the ranks' payloads in rank order."""
        ready = []
        for number in sorted(self._open):
            present = self._open[number]
            if all(rank in present for rank in live):
                del self._open[number]
                ready.append((number, [(rank, present[rank].payload) for rank in sorted(present) if rank in live]))
        return ready
