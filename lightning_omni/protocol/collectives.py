"""Collectives of all live ranks: each contributes bytes, and gets those of all.

Rule 1: a collective is complete when every *live* rank has contributed; the dead are not waited for.
Rule 2: all ranks must call the same one; two that differ at one synchronization point end the run with a clear
sentence.
Rule 3: a rank opens a few at a time, so what is kept is bounded by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor

from lightning_omni.errors import CollectiveMismatch, ProtocolError

MOST_OPEN = 16
"""Collectives at which a rank may wait when it opens another one."""

_OF_EACH_BATCH = (
    ". Groups train different numbers of batches, so what a hook has kept of each batch has other sizes on other ranks:"
    " gather the sizes and pad to the largest, use torch.distributed.all_gather_object, or a metric of torchmetrics"
)

_ELSEWHERE = (
    ". If ranks have data of different lengths, such as an IterableDataset each, limit_train_batches= gives all of them"
    " as many batches as the shortest has"
)


class _Contribution(NamedTuple):
    """What a rank contributes to a collective."""

    what: str
    where: str
    payload: bytes | Tensor

    def __str__(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


class Collectives:
    """The collectives that are under way.

    Example:
        >>> collectives = Collectives()
        >>> collectives.contribute(0, 1, "barrier", b""), collectives.complete(live=[0, 1])
        (None, [])
        >>> collectives.contribute(0, 0, "barrier", b""), collectives.complete(live=[0, 1])
        (None, [(0, [(0, b''), (1, b'')])])
    """

    def __init__(self) -> None:
        self._open: dict[int, dict[int, _Contribution]] = {}

    def contribute(self, number: int, rank: int, what: str, payload: bytes | Tensor, where: str = "") -> None:
        """A rank takes part in a collective.

        Args:
            number: of the collective.
            rank: that takes part.
            what: it calls; the same on all ranks.
            payload: that the others get.
            where: the rank is, in words, for the message if others called something else.

        Raises:
            ProtocolError: the rank waits at too many others.
            CollectiveMismatch: others called something else at the same point.
        """
        if number not in self._open and sum(rank in waiting for waiting in self._open.values()) >= MOST_OPEN:
            raise ProtocolError(f"rank {rank} comes to collective {number}, and waits at {MOST_OPEN} others")
        present, mine = self._open.setdefault(number, {}), _Contribution(what, where, payload)
        for other, theirs in present.items():
            if theirs.what != what:
                sizes_differ = what.partition("(")[0] == theirs.what.partition("(")[0]
                hint = _OF_EACH_BATCH if sizes_differ else _ELSEWHERE if mine.where and theirs.where else ""
                raise CollectiveMismatch(
                    f"rank {rank} called {mine} while rank {other} called {theirs}; outside the training epoch all"
                    f" ranks must make the same collective calls in the same order, as under DDP{hint}"
                )
        present[rank] = mine

    @property
    def is_idle(self) -> bool:
        """Whether no collective is under way."""
        return not self._open

    @property
    def contributed(self) -> set[int]:
        """Ranks that have contributed to what is under way, and wait for the others."""
        return {rank for present in self._open.values() for rank in present}

    def forget(self, ranks: Collection[int]) -> None:
        """What the dead contributed does not count, nor what they called."""
        for present in self._open.values():
            for rank in ranks:
                present.pop(rank, None)

    def complete(self, live: Collection[int]) -> list[tuple[int, list[tuple[int, bytes | Tensor]]]]:
        """Collectives that have become complete: their number, and each rank's payload in rank order."""
        ready = []
        for number in sorted(self._open):
            present = self._open[number]
            if all(rank in present for rank in live):
                del self._open[number]
                ready.append((number, [(rank, present[rank].payload) for rank in sorted(present) if rank in live]))
        return ready
