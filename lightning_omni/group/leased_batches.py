"""A group's batches: drawn by leases, trained, and divided among the members."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from lightning_omni.wire import messages as m
from lightning_omni.wire.messages.data import Batch

# --- The samples of each member ---------------------------------------------------------------------------------------


def apportion(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Split samples into whole numbers for the members of a group, so that the slowest ends as early as possible.

    The parts are about proportional to the speeds. Each is at least ``min(2, total // members)``: BatchNorm
    fails with a single sample, which has no variance.

    Args:
        total: samples to split.
        speeds: speed of each member, in any unit, or an earlier result without zeros.

    Raises:
        ValueError: the group has no member, a speed is not positive and finite, or ``total`` is negative.

    Example:
        >>> apportion(64, [1.0, 2.0, 4.0])
        (9, 18, 37)
    """
    if total < 0 or not speeds or not all(0 < speed < inf for speed in speeds):
        raise ValueError(f"cannot split {total} samples by the speeds {tuple(speeds)}")
    least, whole = min(2, total // len(speeds)), sum(speeds)
    parts = [max(least, int(total * speed / whole)) for speed in speeds]
    members = range(len(parts))
    # Rounding down leaves a few samples; a minimum above the part takes a few too many.
    while sum(parts) < total:
        parts[min(members, key=lambda member: (parts[member] + 1) / speeds[member])] += 1
    while sum(parts) > total:
        spare = (member for member in members if parts[member] > least)
        parts[max(spare, key=lambda member: parts[member] / speeds[member])] -= 1
    return tuple(parts)


def positions(batch: Batch, member: int, members: int, shares: Sequence[int] = (), in_pairs: bool = False) -> range:
    """Return one member's positions of a group batch: every ``members``-th one, as in DistributedSampler.

    With one group they are exactly those of DistributedSampler and BatchSampler for that rank. A batch with fewer
    positions than members uses some repeatedly, because every member needs one.

    Args:
        batch: the group's batch.
        member: index in the group, from 0.
        members: size of the group.
        shares: each member's samples of a whole batch, if they differ: each then gets a contiguous range, of a shorter
            batch a proportional one.
        in_pairs: whether each member gets two positions of a batch with 2 or more, but fewer than ``2 * members``, for
            BatchNorm; some are used repeatedly.

    Example:
        >>> list(positions(Batch(10, 16, 0), member=1, members=2))
        [11, 13, 15]
        >>> list(positions(Batch(10, 16, 0), member=1, members=2, shares=(2, 4)))
        [12, 13, 14, 15]
        >>> [list(positions(Batch(10, 13, 0), member, members=2, in_pairs=True)) for member in (0, 1)]
        [[10, 11], [10, 12]]
    """
    size = batch.stop - batch.start
    if in_pairs and _is_short(size, members):
        low, high = sorted((2 * member % size, (2 * member + 1) % size))
        return range(batch.start + low, batch.start + high + 1, high - low)
    if shares and size >= members:
        parts = apportion(size, shares)
        first = batch.start + sum(parts[:member])
        return range(first, first + parts[member])
    first = batch.start + member
    if first >= batch.stop:
        first = batch.start + member % size
        return range(first, first + 1)
    return range(first, batch.stop, members)


def weight(batch: Batch, member: int, members: int, shares: Sequence[int] = (), in_pairs: bool = False) -> float:
    """Return the factor for a member's mean gradient that makes DDP's mean over members the mean over the batch.

    It is ``members * own samples / all samples``, and less for a sample that several members hold. The arguments are as
    in `positions`; without ``shares``, and for pairs, the factor is 1.0, as under DDP.

    Example:
        >>> [weight(Batch(0, 6, 0), member, 2, shares=(2, 4)) for member in (0, 1)]
        [0.6666666666666666, 1.3333333333333333]
    """
    size = batch.stop - batch.start
    if not shares or (in_pairs and _is_short(size, members)):
        return 1.0
    if size >= members:
        return members * apportion(size, shares)[member] / size
    holders = len(range(member % size, members, size))
    return members / (size * holders)


def _is_short(size: int, members: int) -> bool:
    return 1 < size < 2 * members


# --- Leases -----------------------------------------------------------------------------------------------------------

# A `LeaseClient` is the counterpart of `lightning_omni.server.epochs.lease_book`. Members of a group draw by batch
# number and get the same batches, so they agree without communication.


class LeaseClient:
    """One member's view of an epoch's batches: those of its group, and its own part of each.

    Args:
        generation: the recorder's count of formings of groups.
        shares: see `set_batch_shares`.

    Attributes:
        trained: batches of this epoch that the group has begun to train since groups were formed.
        stepped: those of them whose gradients are in a step; if the group is gone, others train the rest.
        handed: batches passed to the data loader.
        in_pairs: as in `positions`.
    """

    def __init__(self, member: int = 0, members: int = 1, generation: int = 0, shares: Sequence[int] = ()) -> None:
        self.epoch = -1
        self.in_pairs = False
        self.join(member, members, generation, shares)

    def join(self, member: int, members: int, generation: int, shares: Sequence[int] = ()) -> None:
        """Set another index or another group; all drawn batches are forgotten."""
        self._member, self._members, self._formed = member, members, generation
        self._shares = [(0, tuple(shares))]  # from a batch number on, ascending; never empty
        self.restart(self.epoch)

    def restart(self, epoch: int) -> None:
        """Begin an epoch, or continue it with the server's remaining batches; none of them is drawn here."""
        self.epoch = epoch
        self._batches: list[Batch] = []
        self.handed = self.trained = self.stepped = self.interval = 0
        self._shares = [(0, self.shares)]

    # --- Messages -----------------------------------------------------------------------------------------------------

    def draw(self, number: int, trained: int | None = None) -> m.DrawBatches:
        """Return the request for the group's batches from a number on, the first that is not drawn yet.

        ``trained`` is the number of completely trained batches, by default all that were begun.
        """
        done = self.trained if trained is None else trained
        return m.DrawBatches(epoch=self.epoch, generation=self._formed, number=number, trained=done)

    def record_drawn(self, batches: Sequence[Batch]) -> None:
        self._batches += batches

    def ask_next(self) -> m.AskNext:
        return m.AskNext(epoch=self.epoch, generation=self._formed, trained=self.trained, interval=self.interval)

    def apply_next(self, decision: str, coming: Batch | None = None) -> None:
        """Enter the validation interval that follows from the answer to `ask_next`, and from the next batch, if any."""
        if decision == "validate":
            self.interval += 1
        elif decision == "more" and coming is not None:
            self.interval = max(self.interval, coming.interval)

    def leave_epoch(self, stop: str) -> m.LeaveEpoch:
        """Return the message with which this group leaves; others train batches in no step, unless the epoch stops."""
        trained = self.trained if stop else self.stepped
        return m.LeaveEpoch(epoch=self.epoch, generation=self._formed, trained=trained, stop=stop)

    # --- Batches ------------------------------------------------------------------------------------------------------

    @property
    def place(self) -> tuple[int, int]:
        """Return the epoch, -1 if none is leased, and the number of its batches trained, with the current one."""
        return self.epoch, self.trained

    @property
    def drawn(self) -> int:
        return len(self._batches)

    @property
    def stepped_spans(self) -> list[tuple[int, int]]:
        return [(batch.start, batch.stop) for batch in self._batches[: self.stepped]]

    def begin_batch(self) -> None:
        self.trained += 1

    def end_batch(self, steps: bool) -> None:
        """End a batch; ``steps`` is whether its gradient, and those accumulated before, are in a step."""
        if steps:
            self.stepped = self.trained

    @property
    def current(self) -> Batch | None:
        return self._batches[self.trained - 1] if 0 < self.trained <= len(self._batches) else None

    @property
    def position(self) -> int:
        """Return where the current batch ends in the epoch's permutation, 0 without one: about all groups' progress.

        It is the same for all members of a group, without a request to the server.
        """
        return self.current.stop if self.current is not None else 0

    def indices(self, number: int) -> range:
        return positions(self._batches[number], self._member, self._members, self._shares_of(number), self.in_pairs)

    @property
    def samples(self) -> int:
        return len(self.indices(self.trained - 1)) if self.current is not None else 0

    # --- Shares ------------------------------------------------------------------------------------------------------

    @property
    def shares(self) -> tuple[int, ...]:
        """Return each member's samples of a whole batch, by the latest decision; empty if all get the same."""
        return self._shares[-1][1]

    def set_batch_shares(self, shares: Sequence[int], from_number: int) -> None:
        """Give members unequal parts of each batch, from a batch number on. All members must call this alike.

        With equal ``shares`` (samples of a whole batch), batches are divided as without any.

        Raises:
            ValueError: the shares do not fit the group, or this member was handed a batch from that number on.
        """
        if from_number < self.handed or len(shares) != self._members or min(shares) < 1:
            raise ValueError(f"cannot share out {shares} among {self._members} from batch {from_number} on")
        self._shares.append((from_number, tuple(shares) if len(set(shares)) > 1 else ()))

    @property
    def weight(self) -> float:
        batch = self.current
        if batch is None:
            return 1.0
        return weight(batch, self._member, self._members, self._shares_of(self.trained - 1), self.in_pairs)

    def _shares_of(self, number: int) -> tuple[int, ...]:
        return next(shares for start, shares in reversed(self._shares) if start <= number)
