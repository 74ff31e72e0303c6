"""Leases of an epoch's samples to groups.

Rule 1: an epoch is one permutation of positions ``0 .. total-1``; a group batch is one range of them.
Rule 2: batches that a group has drawn and did not train return to the pool when the group is evicted or regrouped,
so every position of the budget is trained at least once, unless the epoch is stopped.
Rule 3: the batch of (group, batch number) never changes, so the members of a group agree without communication.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter

import msgspec

from lightning_omni.errors import ProtocolError
from lightning_omni.wire.messages.data import Batch, EpochPlan

MOST_AHEAD = 4
"""The most new group batches in one answer; fewer towards the end, so that groups end at about the same time."""


LARGEST_EPOCH = 1 << 53
"""The most positions in an epoch."""


class LeaseBook(msgspec.Struct):
    """The record of one epoch's samples: free, leased or trained.

    ``trained`` is the number of trained positions.

    Example:
        >>> book = LeaseBook.open(EpochPlan(epoch=0, total=8, batch_size=2, budget=8), {0: 1, 1: 2})
        >>> book.draw(0, 0), book.draw(1, 0)
        ([Batch(start=0, stop=2, interval=0)], [Batch(start=2, stop=6, interval=0)])
    """

    plan: EpochPlan
    interval: int
    trained: int
    _free: list[tuple[int, int]]
    _done: list[tuple[int, int]]
    _sizes: dict[int, int]
    _drawn: dict[int, list[Batch]]
    _trained: dict[int, int]
    _before: dict[int, int]  # trained batches of each group when the interval began
    _repeats: set[tuple[int, int]]  # groups and numbers of batches that repeat another group's
    _none: dict[int, int] = {}  # each group's number of a batch that it was told not to get, until it asks what is next

    @classmethod
    def open(cls, plan: EpochPlan, group_sizes: dict[int, int]) -> LeaseBook:
        spans_in_range = all(0 <= start < stop <= plan.total for start, stop in plan.trained)
        if plan.batch_size < 1 or not 0 <= plan.budget <= plan.total <= LARGEST_EPOCH or not spans_in_range:
            raise ProtocolError(f"no epoch can be as in {plan}")
        if plan.validate_every < 0 or not 0 <= plan.validate_offset <= LARGEST_EPOCH:
            raise ProtocolError(f"no epoch can be validated as in {plan}")
        if plan.ranks_per_batch < 1 or any(size % plan.ranks_per_batch for size in group_sizes.values()):
            raise ProtocolError(f"groups of {sorted(set(group_sizes.values()))} ranks cannot train as in {plan}")
        free, done = _complement(plan.trained, plan.budget), merge_spans(plan.trained)
        book = cls(plan, 0, _size(done), free, done, {}, {}, {}, {}, set())
        book.regroup(group_sizes)
        if free:
            book.interval = book.next_interval
        return book

    @property
    def trained_spans(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._done)

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(self._sizes)

    def has(self, group: int) -> bool:
        return group in self._sizes

    @property
    def next_interval(self) -> int:
        return self._interval_of(self._free[0][0])

    def has_point_after(self, interval: int) -> bool:
        return self._interval_of(self.plan.budget - 1) > interval

    @property
    def is_drained(self) -> bool:
        return not self._free

    @property
    def is_finished(self) -> bool:
        return self.is_drained and not any(self.out(group) for group in self._sizes)

    def out(self, group: int) -> int:
        return len(self._drawn[group]) - self._trained[group]

    def drawn(self, group: int, number: int) -> Batch | None:
        return self._drawn[group][number] if number < len(self._drawn[group]) else None

    def has_free(self, group: int) -> bool:
        """Return whether a group would get a batch: one that has begun leaves one each to those that have not."""
        if not self._free or not self.has_begun(group):
            return bool(self._free)
        size = self._sizes[group] // self.plan.ranks_per_batch * self.plan.batch_size
        batches = sum(-(-(stop - start) // size) for start, stop in self._free)
        return batches > len(self._sizes) or batches > sum(not self.has_begun(each) for each in self._sizes)

    def has_begun(self, group: int) -> bool:
        """Return whether a group has drawn a batch that it had not trained when the interval began."""
        return len(self._drawn[group]) > self._before.get(group, 0)

    def draw(self, group: int, number: int) -> list[Batch]:
        """Return a group's batches from a number on: drawn before, or a few new ones; none if none is free for it.

        If what is left is too little for whole batches, groups without a batch in this validation interval get parts of
        it, as ranks do from DistributedSampler. One that finds none left gets the epoch's first batch again, to reach
        the interval's end with the others.
        """
        drawn = self._known(group)
        if not 0 <= number <= len(drawn):
            raise ProtocolError(f"group {group} asks for its batch {number}, but has drawn only {len(drawn)}")
        if self._none.get(group) != number:
            self.deal(group, number)
        if number == len(drawn):
            self._none[group] = number
        return drawn[number:]

    def deal(self, group: int, number: int) -> None:
        """Add the group's batch of that number, and a few more, as far as free for it, unless it has drawn it."""
        drawn = self._drawn[group]
        if number == len(drawn):
            members = self._sizes[group] // self.plan.ranks_per_batch
            size = members * self.plan.batch_size
            left = sum(stop - start for start, stop in self._free)
            if not self.has_begun(group):
                waiting = sum(ranks for each, ranks in self._sizes.items() if not self.has_begun(each))
                share = left * self._sizes[group] // waiting
                size = min(size, share) if share >= 2 * members else size
            ahead = left // (8 * max(1, len(self._sizes)) * size)
            for _ in range(max(1, min(MOST_AHEAD, ahead))):
                if self.has_free(group):
                    drawn.append(self._take(members, size))
            if not self.has_begun(group) and self.plan.budget:
                drawn.append(Batch(0, min(size, self.plan.budget), self.interval))
                self._repeats.add((group, number))

    def train(self, group: int, batches: int, counts: bool = True) -> int:
        """Record a group's first ``batches`` batches as trained; return how many positions were not trained before.

        Unless it ``counts``, the training was declined, and the batches return to the pool.
        """
        self.check_trained(group, batches)
        if not counts:
            self._free = merge_spans([*self._spans_back(group, batches), *self._free])
        drawn = self._drawn[group][self._trained[group] : batches] if counts else ()
        new = sum([_insert(self._done, batch.start, batch.stop) for batch in drawn])
        self.trained += new
        self._trained[group] = max(batches, self._trained[group])
        return new

    def untrained_spans(self, group: int, batches: int) -> tuple[tuple[int, int], ...]:
        return tuple((batch.start, batch.stop) for batch in self._known(group)[self._trained[group] : batches])

    def check_trained(self, group: int, batches: int) -> None:
        drawn = self._known(group)
        if not 0 <= batches <= len(drawn):
            raise ProtocolError(f"group {group} says it trained {batches} batches, but has drawn only {len(drawn)}")

    def release(self, group: int) -> None:
        drawn, first = self._known(group), self._trained[group]
        self._free = merge_spans([*self._spans_back(group, len(drawn)), *self._free])
        self._repeats -= {(group, number) for number in range(first, len(drawn))}
        del drawn[first:]

    def _spans_back(self, group: int, batches: int) -> list[tuple[int, int]]:
        """Return the positions of a group's untrained batches up to a number, without those that repeat another's."""
        numbers = [number for number in range(self._trained[group], batches) if (group, number) not in self._repeats]
        drawn = self._drawn[group]
        return [(drawn[number].start, drawn[number].stop) for number in numbers]

    def evict(self, group: int) -> None:
        self.release(group)
        del self._sizes[group], self._drawn[group], self._trained[group]
        self._before.pop(group, None)
        self._none.pop(group, None)
        self._repeats = {repeat for repeat in self._repeats if repeat[0] != group}

    def join(self, group: int, size: int) -> None:
        self._sizes[group], self._drawn[group], self._trained[group] = size, [], 0

    def regroup(self, group_sizes: dict[int, int]) -> None:
        for group in list(self._sizes):
            self.evict(group)
        self._sizes = dict(group_sizes)
        self._drawn = {group: [] for group in group_sizes}
        self._trained = dict.fromkeys(group_sizes, 0)

    def advance(self) -> None:
        """Begin the next interval that has untrained positions."""
        left = [batch.interval for group in self._sizes for batch in self._drawn[group][self._trained[group] :]]
        if self._free:
            left.append(self.next_interval)
        self.interval = max(self.interval + 1, min(left, default=0))
        self._before = dict(self._trained)
        self._none.clear()

    def close(self) -> None:
        self._free = []

    def go_back(self, trained: Sequence[tuple[int, int]]) -> None:
        """Reset the trained ranges, and free all others but drawn and untrained batches."""
        self._done = merge_spans(trained)
        self.trained = _size(self._done)
        held = [(each.start, each.stop) for group in self._sizes for each in self._drawn[group][self._trained[group] :]]
        self._free = _complement([*self._done, *held], self.plan.budget)
        # A group may hold the only lease of positions that are untrained again; that one must return to the pool.
        self._repeats = {
            (group, number) for group, number in self._repeats if self._is_trained(self._drawn[group][number])
        }

    def _is_trained(self, batch: Batch) -> bool:
        return any(start <= batch.start and batch.stop <= stop for start, stop in self._done)

    def _known(self, group: int) -> list[Batch]:
        if group not in self._drawn:
            raise ProtocolError(f"group {group} does not take part in epoch {self.plan.epoch}")
        return self._drawn[group]

    def _take(self, members: int, size: int) -> Batch:
        start, stop = self._free.pop(0)
        size -= self._missing(stop - start - size, size - 2 * members)
        if stop - start > size:
            self._free.insert(0, (start + size, stop))
            stop = start + size
        return Batch(start, stop, self._interval_of(start))

    def _missing(self, rest: int, spare: int) -> int:
        """Return how many of a batch's ``spare`` samples to take off, so that the rest is enough for a group."""
        # BatchNorm cannot train with a single sample. The batches of one group stay those of DistributedSampler.
        if rest <= 0 or len(self._sizes) == 1:
            return 0
        least = 2 * max(self._sizes.values()) // self.plan.ranks_per_batch
        missing = max(0, least - rest)
        return missing if missing <= spare else 0

    def _interval_of(self, start: int) -> int:
        # Positions returned by a dead group are trained late: they never reopen a validated interval.
        if not self.plan.validate_every:
            return self.interval
        own = (start + self.plan.validate_offset) // self.plan.validate_every
        return max(own, self.interval)


def _size(spans: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in spans)


def merge_spans(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def _insert(merged: list[tuple[int, int]], start: int, stop: int) -> int:
    """Add a range to merged ones, in place, and return the number of added positions."""
    first = bisect_left(merged, start, key=itemgetter(1))  # the first range that ends at ``start`` or later
    last = bisect_right(merged, stop, lo=first, key=itemgetter(0))
    known = merged[first:last]
    if known:
        start, stop = min(start, known[0][0]), max(stop, known[-1][1])
    merged[first:last] = [(start, stop)]
    return stop - start - sum([end - begin for begin, end in known])


def _complement(spans: Sequence[tuple[int, int]], total: int) -> list[tuple[int, int]]:
    free, position = [], 0
    for start, stop in merge_spans(spans):
        if start > position:
            free.append((position, min(start, total)))
        position = max(position, stop)
    if position < total:
        free.append((position, total))
    return [(start, stop) for start, stop in free if stop > start]
