"""A group's side of the leased data: the drawn and trained batches of an epoch, as each member tracks them.

It is the counterpart of `lightning_omni.server.epochs.lease_book`. Members of a group draw by batch number and get the
same batches, so they agree without communication.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_omni.group.member_samples import positions, weight
from lightning_omni.wire import messages as m
from lightning_omni.wire.messages import Batch


class LeaseClient:
    """One member's view of an epoch's batches: those of its group, and its own part of each.

    Args:
        member: index in the group.
        members: size of the group.
        generation: the server's number of this forming of groups.
        shares: each member's samples of a whole batch, if they differ; see `set_batch_shares`.

    Attributes:
        epoch: number of the epoch.
        trained: batches of this epoch that the group has begun to train, since groups were last formed.
        interval: number of the group's validation interval.
        handed: batches passed to the data loader.
        in_pairs: whether members get at least two samples of a batch; see
            `lightning_omni.group.member_samples.positions`.

    Example:
        >>> client = LeaseClient(member=1, members=2, generation=1)
        >>> client.restart(epoch=0)
        >>> client.draw(0).number
        0
        >>> client.record_drawn([Batch(0, 8, interval=0)])
        >>> client.begin_batch()
        >>> client.indices(0), client.place
        (range(1, 8, 2), (0, 1))
    """

    def __init__(self, member: int = 0, members: int = 1, generation: int = 0, shares: Sequence[int] = ()) -> None:
        self.epoch = -1
        self.in_pairs = False
        self.trained = self.interval = self.handed = 0
        self._batches: list[Batch] = []
        self._shares = [(0, tuple(shares))]  # from a batch number on, ascending; never empty
        self.join(member, members, generation, shares)

    def join(self, member: int, members: int, generation: int, shares: Sequence[int] = ()) -> None:
        """Set another index or another group; drawn and untrained batches are dropped."""
        self._member, self._members, self._formed = member, members, generation
        self._shares = [(0, tuple(shares))]
        self.restart(self.epoch)

    def restart(self, epoch: int) -> None:
        """Begin an epoch, or continue it with the server's remaining batches; none of them is drawn here."""
        self.epoch = epoch
        self._batches = []
        self.handed = self.trained = self.interval = 0
        self._shares = [(0, self.shares)]

    # --- Messages -----------------------------------------------------------------------------------------------------

    def draw(self, number: int, trained: int | None = None) -> m.DrawBatches:
        """Return the request for the group's batches from a number on.

        Args:
            number: number of the first batch that is not drawn yet.
            trained: completely trained batches; by default all that were begun.
        """
        done = self.trained if trained is None else trained
        return m.DrawBatches(epoch=self.epoch, generation=self._formed, number=number, trained=done)

    def record_drawn(self, batches: Sequence[Batch]) -> None:
        """Add the answer to `draw`, which is empty if the pool is empty now."""
        self._batches += batches

    def ask_next(self) -> m.AskNext:
        """Return the question for the next step, once all batches that could be drawn are trained."""
        return m.AskNext(epoch=self.epoch, generation=self._formed, trained=self.trained, interval=self.interval)

    def apply_next(self, decision: str, coming: Batch | None = None) -> None:
        """Apply the answer to `ask_next`, and the next batch, if any.

        After ``"validate"`` the group is in the next interval; after ``"more"`` it is in that of its next batch.
        """
        if decision == "validate":
            self.interval += 1
        elif decision == "more" and coming is not None:
            self.interval = max(self.interval, coming.interval)

    def leave_epoch(self, stop: str) -> m.LeaveEpoch:
        """Return the message that the group leaves the epoch early; see `lightning_omni.wire.messages.LeaveEpoch`."""
        return m.LeaveEpoch(epoch=self.epoch, generation=self._formed, trained=self.trained, stop=stop)

    # --- Batches ------------------------------------------------------------------------------------------------------

    @property
    def place(self) -> tuple[int, int]:
        """Return the epoch, -1 if none is leased, and the number of its batches trained, with the current one."""
        return self.epoch, self.trained

    @property
    def drawn(self) -> int:
        return len(self._batches)

    def begin_batch(self) -> None:
        self.trained += 1

    @property
    def current(self) -> Batch | None:
        """Return the group's batch that is being trained."""
        return self._batches[self.trained - 1] if 0 < self.trained <= len(self._batches) else None

    @property
    def position(self) -> int:
        """Return the end of the last trained batch in the epoch's permutation: about the progress of all groups.

        It is the same for all members of a group, without a request to the server.
        """
        return self.current.stop if self.current is not None else 0

    def indices(self, number: int) -> range:
        """Return this member's positions of a batch, by the batch's number among the drawn ones."""
        return positions(self._batches[number], self._member, self._members, self._shares_of(number), self.in_pairs)

    @property
    def samples(self) -> int:
        """Return this member's number of samples in the batch that is being trained."""
        return len(self.indices(self.trained - 1)) if self.current is not None else 0

    # --- Shares ------------------------------------------------------------------------------------------------------

    @property
    def shares(self) -> tuple[int, ...]:
        """Return each member's samples of a whole batch, by the latest decision; empty if all get the same."""
        return self._shares[-1][1]

    def set_batch_shares(self, shares: Sequence[int], from_number: int) -> None:
        """Give members unequal parts of each batch, from a batch number on. All members must call this alike.

        Args:
            shares: each member's samples of a whole batch; equal ones have no effect.
            from_number: first batch that is split this way; no member may have been handed it.

        Raises:
            ValueError: the shares do not fit the group, or this member was handed that batch.
        """
        if from_number < self.handed or len(shares) != self._members or min(shares) < 1:
            raise ValueError(f"cannot share out {shares} among {self._members} from batch {from_number} on")
        self._shares.append((from_number, tuple(shares) if len(set(shares)) > 1 else ()))

    @property
    def weight(self) -> float:
        """Return this member's weight in the gradient of the current batch; see `protocol.leases.weight`."""
        batch = self.current
        if batch is None:
            return 1.0
        return weight(batch, self._member, self._members, self._shares_of(self.trained - 1), self.in_pairs)

    def _shares_of(self, number: int) -> tuple[int, ...]:
        return next(shares for start, shares in reversed(self._shares) if start <= number)
