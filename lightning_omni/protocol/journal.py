"""What happened at the server since its state was saved last, as far as ranks know of it: for a server that goes on.

Weights go back to the last save when a server dies, and may; what ranks were told may not. Which samples a group has
drawn, what it was told to do next, what all ranks gathered at a synchronization point and which ranks are lost is
written down before it is told. A server that goes on from the save goes through the journal, and knows all of it.

Rule: an entry is written before the answer that follows from it leaves the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lightning_omni.protocol.codec import Packed
from lightning_omni.protocol.leases import EpochPlan
from lightning_omni.protocol.messages import Await, Join, Leave


class Entry(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all entries."""


class OpenedEntry(Entry, frozen=True):
    """An epoch was opened."""

    plan: EpochPlan


class TrainedEntry(Entry, frozen=True):
    """A group has trained so many of its batches."""

    group: int
    epoch: int
    batches: int


class DrewEntry(Entry, frozen=True):
    """A group drew its batches from a number on."""

    group: int
    number: int


class AskedEntry(Entry, frozen=True):
    """A rank asked what comes next."""

    group: int
    rank: int
    question: Await


class ResolvedEntry(Entry, frozen=True):
    """Ranks were told what comes next."""

    all_answered: bool


class LeftEpochEntry(Entry, frozen=True):
    """A group left the epoch early."""

    group: int
    message: Leave


class GatheredEntry(Entry, frozen=True):
    """All live ranks have contributed to a collective."""

    number: int
    ranks: tuple[int, ...]
    payloads: tuple[bytes, ...]


class ClaimedEntry(Entry, frozen=True):
    """A group came past a point at which the run is validated."""

    group: int
    epoch: int
    passed: int


class EvaluatedEntry(Entry, frozen=True):
    """A group said what came of a validation."""

    group: int
    number: int
    packed: Packed
    payload: bytes


class ReadEntry(Entry, frozen=True):
    """A rank read what came of a validation."""

    rank: int
    number: int


class SavedEntry(Entry, frozen=True):
    """Of the validations up to this number everything is saved."""

    number: int


class LostEntry(Entry, frozen=True):
    """A rank is dead."""

    rank: int
    reason: str
    barred: bool = False


class LeftEntry(Entry, frozen=True):
    """A rank has left in good order, perhaps at the end of the run."""

    rank: int
    finished: bool


class NumberedEntry(Entry, frozen=True):
    """Ranks below this number were given to groups that are about to join."""

    numbered: int


class JoinedEntry(Entry, frozen=True):
    """Ranks that came late are a group."""

    rank: int
    message: Join


class RestructuredEntry(Entry, frozen=True):
    """A group's optimizer has other parameter groups than before, or more parameters; its pushes are as these."""

    group: int
    optimizer: int
    packed: Packed
    payload: bytes


class FormedEntry(Entry, frozen=True):
    """Other groups were formed; a save of those before is of no use any more."""


class SeededEntry(Entry, frozen=True):
    """Weights were handed over; a save of those before is of no use any more."""


class WentOnEntry(Entry, frozen=True):
    """A server went on from the save: what was trained after it counts no more."""


AnyEntry = (
    OpenedEntry
    | TrainedEntry
    | DrewEntry
    | AskedEntry
    | ResolvedEntry
    | LeftEpochEntry
    | GatheredEntry
    | ClaimedEntry
    | EvaluatedEntry
    | ReadEntry
    | SavedEntry
    | LostEntry
    | LeftEntry
    | NumberedEntry
    | JoinedEntry
    | RestructuredEntry
    | FormedEntry
    | SeededEntry
    | WentOnEntry
)


class Journal:
    """Where entries go.

    Attributes:
        write: takes each entry; None while nothing is saved.
        is_due: whether the state should be saved soon, for what has changed is not in the journal.
        saves: how often the state was saved.
    """

    def __init__(self) -> None:
        self.write: Callable[[Entry], Any] | None = None
        self.is_due = False
        self.saves = 0

    def note(self, entry: Entry) -> None:
        """Something has happened of which ranks will know."""
        if self.write is not None:
            self.write(entry)
