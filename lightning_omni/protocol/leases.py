"""Which group trains on which samples of an epoch.

Rule 1: an epoch is one permutation of positions ``0 .. total-1``; a group batch is one range of them.
Rule 2: what a group drew and did not train goes back to the pool when the group is evicted or regrouped, so every
position is trained at least once.
Rule 3: the answer to (group, batch number) never changes, so the members of a group agree without talking.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from math import inf
from operator import itemgetter

import msgspec

from lightning_omni.errors import ProtocolError

MOST_AHEAD = 4
"""Group batches handed out by one answer, at most; fewer towards the end, so that groups end at about one time."""

LARGEST_EPOCH = 1 << 53
"""Positions in an epoch, at most."""


class EpochPlan(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch's data, as every rank knows it before the first batch.

    Attributes:
        epoch: number of the epoch.
        total: positions in the epoch's permutation (samples, padded as DistributedSampler pads them).
        batch_size: samples in one rank's batch.
        ranks_per_batch: ranks of a group that get the same samples, and compute on them together.
        budget: positions to train in this epoch; less than ``total`` where the user limits the batches.
        validate_every: positions between two validations inside the epoch; 0 for none.
        validate_offset: positions that count towards the first validation already.
        trained: ranges that a resumed run had trained before.
    """

    epoch: int
    total: int
    batch_size: int
    budget: int
    validate_every: int = 0
    validate_offset: int = 0
    trained: tuple[tuple[int, int], ...] = ()
    ranks_per_batch: int = 1


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One group batch: positions ``start .. stop-1``, and the validation interval that it belongs to."""

    start: int
    stop: int
    interval: int


class LeaseBook:
    """One epoch's samples: which are free, which are out on lease, which are trained.

    Args:
        plan: of the epoch.
        group_sizes: ranks of each group.
        samples: counts, for each group, the positions that it has trained first, on from what was before.

    Raises:
        ProtocolError: no epoch can have this plan.

    Example:
        >>> book = LeaseBook(EpochPlan(epoch=0, total=8, batch_size=2, budget=8), {0: 1, 1: 2})
        >>> book.draw(0, 0), book.draw(1, 0)
        ([Batch(start=0, stop=2, interval=0)], [Batch(start=2, stop=6, interval=0)])
    """

    def __init__(self, plan: EpochPlan, group_sizes: dict[int, int], samples: Counter[int] | None = None) -> None:
        spans_in_range = all(0 <= start < stop <= plan.total for start, stop in plan.trained)
        if plan.batch_size < 1 or not 0 <= plan.budget <= plan.total <= LARGEST_EPOCH or not spans_in_range:
            raise ProtocolError(f"no epoch can be as in {plan}")
        if plan.validate_every < 0 or not 0 <= plan.validate_offset <= LARGEST_EPOCH:
            raise ProtocolError(f"no epoch can be validated as in {plan}")
        if plan.ranks_per_batch < 1 or any(size % plan.ranks_per_batch for size in group_sizes.values()):
            raise ProtocolError(f"groups of {sorted(set(group_sizes.values()))} ranks cannot train as in {plan}")
        self.plan = plan
        self.interval = 0
        self._free = _complement(plan.trained, plan.budget)
        self._done = _merge(plan.trained)
        self._done_size = sum(stop - start for start, stop in self._done)
        if self._free:
            self.interval = self.next_interval
        self._sizes = dict(group_sizes)
        self._drawn: dict[int, list[Batch]] = {group: [] for group in group_sizes}
        self._trained: dict[int, int] = dict.fromkeys(group_sizes, 0)
        self._before: dict[int, int] = {}  # batches that groups had trained when the interval began
        self._repeats: set[tuple[int, int]] = set()  # a group, and the number of a batch that is another's
        self._samples = Counter[int]() if samples is None else samples

    @property
    def trained(self) -> int:
        """Positions trained so far."""
        return self._done_size

    @property
    def trained_spans(self) -> tuple[tuple[int, int], ...]:
        """Ranges trained so far, merged and in order."""
        return tuple(self._done)

    @property
    def groups(self) -> tuple[int, ...]:
        """Groups that draw."""
        return tuple(self._sizes)

    def has(self, group: int) -> bool:
        """Whether a group draws."""
        return group in self._sizes

    @property
    def next_interval(self) -> int:
        """The validation interval of what is drawn next.

        Raises:
            IndexError: the pool is empty.
        """
        return self._interval_of(self._free[0][0])

    def has_point_after(self, interval: int) -> bool:
        """Whether the epoch has a validation point after a validation interval, perhaps inside its last batches."""
        return self._interval_of(self.plan.budget - 1) > interval

    @property
    def is_drained(self) -> bool:
        """Whether nothing is free (batches may still be out)."""
        return not self._free

    @property
    def is_finished(self) -> bool:
        """Whether nothing is free and nothing is out."""
        return self.is_drained and not any(self.out(group) for group in self._sizes)

    def out(self, group: int) -> int:
        """Batches that a group drew and has not trained."""
        return len(self._drawn[group]) - self._trained[group]

    def drawn(self, group: int, number: int) -> Batch | None:
        """A group's batch of that number, if it was drawn."""
        return self._drawn[group][number] if number < len(self._drawn[group]) else None

    def has_free(self, group: int) -> bool:
        """Return whether a group that asks gets a batch.

        One that has had its first since the last validation leaves one each to those that have had none.
        """
        if not self._free or not self.has_begun(group):
            return bool(self._free)
        size = self._sizes[group] // self.plan.ranks_per_batch * self.plan.batch_size
        batches = sum(-(-(stop - start) // size) for start, stop in self._free)
        return batches > len(self._sizes) or batches > sum(not self.has_begun(each) for each in self._sizes)

    def has_begun(self, group: int) -> bool:
        """Return whether a group has drawn a batch since the last validation."""
        return len(self._drawn[group]) > self._before.get(group, 0)

    def draw(self, group: int, number: int) -> list[Batch]:
        """Batches of a group from the given batch number on: those drawn before, or else a few new ones.

        A group that comes too late for any gets the epoch's first batch once more: every group needs at least one
        batch from each validation to the next, to come to that, or to the end of the epoch, together with the others.

        Returns:
            At least one batch, or none if the pool is empty at the moment, but for what others need.

        Raises:
            ProtocolError: the group is unknown, or skips a number.
        """
        drawn = self._known(group)
        if not 0 <= number <= len(drawn):
            raise ProtocolError(f"group {group} asks for its batch {number}, but has drawn only {len(drawn)}")
        if number == len(drawn):
            size = self._sizes[group] // self.plan.ranks_per_batch * self.plan.batch_size
            left = sum(stop - start for start, stop in self._free)
            ahead = left // (8 * max(1, len(self._sizes)) * size)
            for _ in range(max(1, min(MOST_AHEAD, ahead))):
                if self.has_free(group):
                    drawn.append(self._take(size))
            if not self.has_begun(group) and self.plan.budget:
                drawn.append(Batch(0, min(size, self.plan.budget), self.interval))
                self._repeats.add((group, number))
        return drawn[number:]

    def train(self, group: int, batches: int) -> None:
        """A group has trained its first ``batches`` batches.

        Raises:
            ProtocolError: it never drew that many.
        """
        self.check_trained(group, batches)
        drawn = self._drawn[group]
        for batch in drawn[self._trained[group] : batches]:
            new = _insert(self._done, batch.start, batch.stop)
            self._done_size += new
            self._samples[group] += new
        self._trained[group] = max(batches, self._trained[group])

    def untrained_spans(self, group: int, batches: int) -> tuple[tuple[int, int], ...]:
        """Of a group's first ``batches`` batches, those that are not trained yet, as ranges."""
        return tuple((batch.start, batch.stop) for batch in self._known(group)[self._trained[group] : batches])

    def check_trained(self, group: int, batches: int) -> None:
        """Raises `ProtocolError` unless the group has drawn that many batches."""
        drawn = self._known(group)
        if not 0 <= batches <= len(drawn):
            raise ProtocolError(f"group {group} says it trained {batches} batches, but has drawn only {len(drawn)}")

    def release(self, group: int) -> None:
        """A group is gone, or goes on to something else: what it drew and did not train is free again."""
        drawn, first = self._known(group), self._trained[group]
        numbers = [number for number in range(first, len(drawn)) if (group, number) not in self._repeats]
        back = [(drawn[number].start, drawn[number].stop) for number in numbers]
        self._repeats -= {(group, number) for number in range(first, len(drawn))}
        del drawn[first:]
        self._free = _merge([*back, *self._free])

    def evict(self, group: int) -> None:
        """Like `release`, and the group draws no more."""
        self.release(group)
        del self._sizes[group], self._drawn[group], self._trained[group]
        self._before.pop(group, None)
        self._repeats = {repeat for repeat in self._repeats if repeat[0] != group}

    def join(self, group: int, size: int) -> None:
        """One group more draws, from its batch number 0."""
        self._sizes[group], self._drawn[group], self._trained[group] = size, [], 0

    def regroup(self, group_sizes: dict[int, int]) -> None:
        """All that is out goes back; from now on other groups draw, from their batch number 0."""
        for group in list(self._sizes):
            self.evict(group)
        self._sizes = dict(group_sizes)
        self._drawn = {group: [] for group in group_sizes}
        self._trained = dict.fromkeys(group_sizes, 0)

    def advance(self) -> None:
        """The interval is complete; the next one that still has something to train begins."""
        left = [batch.interval for group in self._sizes for batch in self._drawn[group][self._trained[group] :]]
        if self._free:
            left.append(self.next_interval)
        self.interval = max(self.interval + 1, min(left, default=0))
        self._before = dict(self._trained)

    def close(self) -> None:
        """The epoch ends early: nothing is handed out any more."""
        self._free = []

    def state(self) -> bytes:
        """All of it, but for the samples that groups have trained."""
        return msgspec.msgpack.encode(
            _BookState(
                self.plan,
                self.interval,
                self._free,
                self._done,
                self._sizes,
                self._drawn,
                self._trained,
                self._before,
                sorted(self._repeats),
            )
        )

    @classmethod
    def from_state(cls, state: bytes, samples: Counter[int]) -> LeaseBook:
        """A book that goes on from a `state`; ``samples`` as in the constructor."""
        saved = msgspec.msgpack.decode(state, type=_BookState)
        book = cls(saved.plan, saved.sizes, samples)
        book.interval, book._free, book._done = saved.interval, saved.free, saved.done
        book._done_size = sum(stop - start for start, stop in saved.done)
        book._drawn, book._trained, book._before = saved.drawn, saved.trained, saved.before
        book._repeats = set(saved.repeats)
        return book

    def go_back(self, trained: Sequence[tuple[int, int]]) -> None:
        """Just these ranges are trained; the others go out again, unless a group has drawn them and not trained."""
        self._done = _merge(trained)
        self._done_size = sum(stop - start for start, stop in self._done)
        held = [(each.start, each.stop) for group in self._sizes for each in self._drawn[group][self._trained[group] :]]
        self._free = _complement([*self._done, *held], self.plan.budget)
        # Of what is not trained any more a group may hold the only lease, and it is to come back.
        self._repeats = {
            (group, number) for group, number in self._repeats if self._is_trained(self._drawn[group][number])
        }

    def _is_trained(self, batch: Batch) -> bool:
        return any(start <= batch.start and batch.stop <= stop for start, stop in self._done)

    def _known(self, group: int) -> list[Batch]:
        if group not in self._drawn:
            raise ProtocolError(f"group {group} does not take part in epoch {self.plan.epoch}")
        return self._drawn[group]

    def _take(self, size: int) -> Batch:
        start, stop = self._free.pop(0)
        size -= self._missing(stop - start - size, size)
        if stop - start > size:
            self._free.insert(0, (start + size, stop))
            stop = start + size
        return Batch(start, stop, self._interval_of(start))

    def _missing(self, rest: int, size: int) -> int:
        """By how much a batch of ``size`` is too large: what is left would be too little for a group that draws it.

        Where groups have a remainder of fewer than two samples for each member, one of them may get a single one, with
        which BatchNorm cannot train. The batches of one group are those of DistributedSampler.
        """
        if rest <= 0 or len(self._sizes) == 1:
            return 0
        least = 2 * max(self._sizes.values()) // self.plan.ranks_per_batch
        missing = max(0, least - rest)
        return missing if size - missing >= 2 * size // self.plan.batch_size else 0

    def _interval_of(self, start: int) -> int:
        # What comes back from a dead group is trained late: it never reopens an interval that was validated.
        if not self.plan.validate_every:
            return self.interval
        own = (start + self.plan.validate_offset) // self.plan.validate_every
        return max(own, self.interval)


class _BookState(msgspec.Struct, frozen=True, array_like=True):
    """What a `LeaseBook` remembers."""

    plan: EpochPlan
    interval: int
    free: list[tuple[int, int]]
    done: list[tuple[int, int]]
    sizes: dict[int, int]
    drawn: dict[int, list[Batch]]
    trained: dict[int, int]
    before: dict[int, int]
    repeats: list[tuple[int, int]]


def apportion(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Whole samples for each member of a group, so that the slowest of them is done as early as can be.

    In proportion to the speeds, but for rounding. Each gets at least two samples if there are enough for that, or one:
    of a single one BatchNorm has no variance, and fails.

    Args:
        total: samples to split.
        speeds: what each member manages: samples per second, or in any other unit. Its own shares, say: what was split
            once is split the same way again.

    Returns:
        Each member's samples, whose sum is ``total``.

    Raises:
        ValueError: there is no member, or a speed is not a positive number.

    Example:
        >>> apportion(64, [1.0, 2.0, 4.0])
        (9, 18, 37)
    """
    if total < 0 or not speeds or not all(0 < speed < inf for speed in speeds):
        raise ValueError(f"cannot split {total} samples by the speeds {tuple(speeds)}")
    least, whole = min(2, total // len(speeds)), sum(speeds)
    parts = [max(least, int(total * speed / whole)) for speed in speeds]
    members = range(len(parts))
    # Rounded down, a few samples are left; where the least was more than its part, a few are too many.
    while sum(parts) < total:
        parts[min(members, key=lambda member: (parts[member] + 1) / speeds[member])] += 1
    while sum(parts) > total:
        spare = (member for member in members if parts[member] > least)
        parts[max(spare, key=lambda member: parts[member] / speeds[member])] -= 1
    return tuple(parts)


def positions(batch: Batch, member: int, members: int, shares: Sequence[int] = (), in_pairs: bool = False) -> range:
    """The positions of a group batch that fall to one member: every ``members``-th, as DistributedSampler deals.

    With one group this is exactly what DistributedSampler and BatchSampler would give that rank. A batch with fewer
    positions than members gives some of them twice, because every member of a group needs at least one sample.

    Args:
        batch: the group's batch.
        member: place in the group, from 0.
        members: size of the group.
        shares: what each member gets of a whole batch, if that is not the same for all: then each gets a range without
            gaps, and of a shorter batch in proportion.
        in_pairs: whether of a batch with fewer than two positions for each member, members get two nevertheless, some
            of them twice: with a single one BatchNorm cannot train.

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
    """By what a member multiplies its mean gradient, so that DDP's mean over members is the mean over the batch.

    That is ``members * own samples / all samples``, and less for a sample that several members hold.

    Args:
        batch: the group's batch.
        member: place in the group, from 0.
        members: size of the group.
        shares: as in `positions`. Without any it is 1.0, whatever the batch: members count alike, as under DDP.
        in_pairs: as in `positions`.

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
    """Whether a batch has fewer than two positions for each member, but two at all."""
    return 1 < size < 2 * members


def _merge(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def _insert(merged: list[tuple[int, int]], start: int, stop: int) -> int:
    """Adds a range to merged ones, in place; a run of many groups cannot merge them all at every push.

    Returns:
        By how many positions they have grown.
    """
    first = bisect_left(merged, start, key=itemgetter(1))  # the first range that ends at ``start`` or later
    last = bisect_right(merged, stop, lo=first, key=itemgetter(0))
    known = merged[first:last]
    if known:
        start, stop = min(start, known[0][0]), max(stop, known[-1][1])
    merged[first:last] = [(start, stop)]
    return stop - start - sum([end - begin for begin, end in known])


def _complement(spans: Sequence[tuple[int, int]], total: int) -> list[tuple[int, int]]:
    free, position = [], 0
    for start, stop in _merge(spans):
        if start > position:
            free.append((position, min(start, total)))
        position = max(position, stop)
    if position < total:
        free.append((position, total))
    return [(start, stop) for start, stop in free if stop > start]
