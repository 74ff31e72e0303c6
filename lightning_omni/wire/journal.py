"""The journal of decisions that ranks have received since the server's state was last saved.

When a server dies, its weights return to the last save, but decisions sent to ranks must stay valid: drawn samples,
next steps, completed collectives, lost ranks. A server that continues from the save replays them.

Rule: an entry is written before the answer that follows from it leaves the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lightning_omni.wire.codec import Packed
from lightning_omni.wire.messages import AskNext, EpochPlan, Join, LeaveEpoch


class Entry(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The base of all entries."""


class OpenedEntry(Entry, frozen=True):
    plan: EpochPlan


class TrainedEntry(Entry, frozen=True):
    """Trained batches; unless the training ``counts``, it was declined, and other groups get the batches."""

    group: int
    epoch: int
    batches: int
    counts: bool


class DrawnEntry(Entry, frozen=True):
    group: int
    number: int


class AskedEntry(Entry, frozen=True):
    group: int
    rank: int
    question: AskNext


class ResolvedEntry(Entry, frozen=True):
    """The point in the order of entries at which waiting ranks received decisions on their next step."""

    all_answered: bool


class LeftEpochEntry(Entry, frozen=True):
    group: int
    message: LeaveEpoch


class GatheredEntry(Entry, frozen=True):
    number: int
    ranks: tuple[int, ...]
    payloads: tuple[bytes, ...]


class ClaimedEntry(Entry, frozen=True):
    group: int
    epoch: int
    passed: int


class EvaluatedEntry(Entry, frozen=True):
    group: int
    number: int
    packed: Packed
    payload: bytes


class ReadEntry(Entry, frozen=True):
    rank: int
    number: int


class SavedEntry(Entry, frozen=True):
    """The number up to which validations are saved completely."""

    number: int


class LostEntry(Entry, frozen=True):
    rank: int
    reason: str
    barred: bool = False


class LeftEntry(Entry, frozen=True):
    """A rank's orderly departure."""

    rank: int
    finished: bool


class NumberedEntry(Entry, frozen=True):
    """The assignment of all lower rank numbers to groups that are about to join."""

    numbered: int


class JoinedEntry(Entry, frozen=True):
    rank: int
    message: Join


class RestructuredEntry(Entry, frozen=True):
    group: int
    optimizer: int
    packed: Packed
    payload: bytes


class FormedEntry(Entry, frozen=True):
    """The forming of other groups, which makes earlier saves useless."""


class SeededEntry(Entry, frozen=True):
    """The upload of weights, which makes earlier saves useless."""


class RestartedEntry(Entry, frozen=True):
    """A server's restart from the save; training since then no longer counts."""


AnyEntry = (
    OpenedEntry
    | TrainedEntry
    | DrawnEntry
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
    | RestartedEntry
)


class Journal:
    """The destination of entries.

    Attributes:
        write: function that takes each entry; None while nothing is saved.
        is_due: whether to save the state soon.
        saves: number of saves that this server has completed.
    """

    def __init__(self) -> None:
        self.write: Callable[[Entry], Any] | None = None
        self.is_due = False
        self.saves = 0

    def note(self, entry: Entry) -> None:
        if self.write is not None:
            self.write(entry)
