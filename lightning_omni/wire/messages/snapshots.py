"""Messages of consistent snapshots of the run."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from lightning_omni.wire.codec import Packed
from lightning_omni.wire.messages.base import Message
from lightning_omni.wire.steps_and_samples import Progress


class SnapshotId(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent state of the server, described by the counts of everything handled before it.

    A server handles one message at a time, so its state between two of them is consistent over all optimizers. Several
    servers, each of which holds a partition of the parameters, must agree on a cut.

    Attributes:
        clocks: updates in the weights of each optimizer.
        pushes: for each group, the number of pushes to all optimizers since groups were formed, including pushes that
            were refused or wait for others. Groups without pushes are left out.
        epoch: number of the current or last epoch; -1 if none was leased.
        total: positions in that epoch.
        trained: ranges of it that are trained, in order.
    """

    clocks: tuple[int, ...] = ()
    pushes: dict[int, int] = {}
    epoch: int = -1
    total: int = 0
    trained: tuple[tuple[int, int], ...] = ()

    def progress(self, known: Progress) -> Progress:
        """Return the run's progress at this cut: inside the epoch, a rank's own count of samples is approximate.

        Example:
            >>> from lightning_omni.wire.steps_and_samples import ReferenceBatch
            >>> cut = SnapshotId(epoch=2, total=320, trained=((0, 64), (96, 128)))
            >>> cut.progress(Progress(ReferenceBatch(4, 8), batches=10, epochs=2, samples=64)).samples
            96
        """
        if self.epoch != known.epochs:
            return known
        return replace(known, samples=sum(stop - start for start, stop in self.trained))


class GroupState(Message, frozen=True, kw_only=True):
    """The state that only this group holds, for the next snapshot. The tensors follow as payload."""

    packed: Packed
    nbytes: int


class GroupStateStored(Message, frozen=True, kw_only=True):
    """The answer to `GroupState`."""


class TakeSnapshot(Message, frozen=True, kw_only=True):
    """A request for a snapshot: weights, optimizer states, clocks, all consistent. ``request`` is as in `PushMessage`.

    Attributes:
        version: number of a validation, for the state at the first request with this number; 0 for the current one.
    """

    with_state: bool = True
    request: int = 0
    version: int = 0


class Snapshot(Message, frozen=True, kw_only=True):
    """A consistent snapshot, described by its ``cut``; the tensors follow as payload."""

    cut: SnapshotId
    packed: Packed
    nbytes: int
