"""The lease book: every position is trained, once, whatever order groups draw, train and die in."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler

from lightning_omni.errors import ProtocolError
from lightning_omni.protocol.leases import MOST_AHEAD, Batch, EpochPlan, LeaseBook, positions

varied = settings(deadline=None, max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def plans(draw: st.DrawFn) -> EpochPlan:
    total = draw(st.integers(0, 120))
    cuts = sorted(draw(st.sets(st.integers(0, total), max_size=6)))
    return EpochPlan(
        epoch=0,
        total=total,
        batch_size=draw(st.integers(1, 5)),
        budget=draw(st.integers(0, total)),
        validate_every=draw(st.sampled_from([0, 0, 7, 20])),
        validate_offset=draw(st.integers(0, 20)),
        trained=tuple(zip(cuts[::2], cuts[1::2], strict=False)),
    )


def covered(batches: list[Batch]) -> Counter[int]:
    return Counter(chain.from_iterable(range(batch.start, batch.stop) for batch in batches))


def to_train(plan: EpochPlan) -> Counter[int]:
    before = set(chain.from_iterable(range(start, stop) for start, stop in plan.trained))
    return Counter(position for position in range(plan.budget) if position not in before)


class Groups:
    """Draws and trains as groups would, and remembers everything that it was told."""

    def __init__(self, plan: EpochPlan, sizes: dict[int, int]) -> None:
        self.book = LeaseBook(plan, sizes)
        self.size = plan.batch_size
        self.done: list[Batch] = []
        self.start(sizes)

    def start(self, sizes: dict[int, int]) -> None:
        self.sizes = dict(sizes)
        self.told: dict[int, list[Batch]] = {group: [] for group in sizes}
        self.trained = dict.fromkeys(sizes, 0)
        self.repeats: set[int] = set()

    def draw(self, group: int, number: int) -> None:
        told = self.told[group]
        if not told and self.book.is_drained:
            self.repeats.add(group)
        answer = self.book.draw(group, number)
        assert answer[: len(told) - number] == told[number:], "an answer never changes"
        assert len(answer) <= len(told) - number + MOST_AHEAD
        assert all(0 < batch.stop - batch.start <= self.sizes[group] * self.size for batch in answer)
        told[number:] = answer

    def train(self, group: int, batches: int) -> None:
        self.book.train(group, batches)
        first = max(self.trained[group], int(group in self.repeats))
        self.done += self.told[group][first:batches]
        self.trained[group] = max(self.trained[group], batches)

    def retire(self, group: int) -> None:
        self.book.retire(group)
        del self.sizes[group], self.told[group], self.trained[group]
        self.repeats.discard(group)

    def regroup(self, sizes: dict[int, int]) -> None:
        self.book.regroup(sizes)
        self.start(sizes)

    def finish(self) -> None:
        while not self.book.is_finished:
            for group in self.sizes:
                self.draw(group, len(self.told[group]))
                self.train(group, len(self.told[group]))


@varied
@given(plans(), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_every_position_is_trained_exactly_once_whoever_dies(
    plan: EpochPlan, sizes: list[int], data: st.DataObject
) -> None:
    groups = Groups(plan, dict(enumerate(sizes)))
    for _ in range(data.draw(st.integers(0, 25), label="events")):
        group = data.draw(st.sampled_from(sorted(groups.sizes)), label="group")
        event = data.draw(st.sampled_from(["draw", "draw", "train", "train", "retire", "regroup"]), label="event")
        if event == "draw":
            groups.draw(group, data.draw(st.integers(0, len(groups.told[group])), label="number"))
        elif event == "train":
            groups.train(group, data.draw(st.integers(0, len(groups.told[group])), label="batches"))
        elif event == "retire" and len(groups.sizes) > 1:
            groups.retire(group)
        elif event == "regroup":
            groups.regroup(dict(enumerate(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))))
        spans = groups.book.trained_spans
        assert groups.book.trained == sum(stop - start for start, stop in spans)
        assert list(spans) == sorted(spans)
    groups.finish()
    assert covered(groups.done) == to_train(plan), "but for what a group that came too late repeats"
    assert groups.book.is_drained
    assert sum(stop - start for start, stop in groups.book.trained_spans) == groups.book.trained


def test_a_group_that_comes_too_late_repeats_the_first_batch() -> None:
    book = LeaseBook(EpochPlan(epoch=0, total=4, batch_size=2, budget=4), {0: 2, 1: 1})
    book.draw(0, 0)
    assert book.draw(1, 0) == [Batch(0, 2, 0)]
    assert book.draw(1, 1) == []
    book.train(0, 1)
    assert not book.is_finished
    book.retire(1)
    assert book.is_finished, "a repeated batch does not come back"


def test_what_a_dead_group_held_goes_out_again_first() -> None:
    book = LeaseBook(EpochPlan(epoch=0, total=40, batch_size=2, budget=40), {0: 1, 1: 1})
    first = book.draw(0, 0)
    book.draw(1, 0)
    book.train(0, 0)
    book.retire(0)
    assert book.draw(1, len(book.draw(1, 0)))[0].start == first[0].start


def test_what_was_released_may_be_drawn_by_the_same_group_under_the_same_number() -> None:
    book = LeaseBook(EpochPlan(epoch=0, total=4, batch_size=2, budget=4), {0: 1})
    assert book.draw(0, 0) == [Batch(0, 2, 0)]
    book.release(0)
    assert book.out(0) == 0
    assert book.draw(0, 0) == [Batch(0, 2, 0)]


@varied
@given(plans())
def test_what_a_resumed_run_had_trained_is_not_drawn_again(plan: EpochPlan) -> None:
    groups = Groups(plan, {0: 1, 1: 2})
    before = {position for start, stop in plan.trained for position in range(start, stop)}
    assert groups.book.trained == len(before)
    groups.finish()
    assert not before & covered(groups.done).keys()


def test_a_closed_epoch_hands_nothing_out() -> None:
    book = LeaseBook(EpochPlan(epoch=0, total=40, batch_size=2, budget=40), {0: 1})
    held = book.draw(0, 0)
    book.close()
    assert book.draw(0, len(held)) == []
    assert not book.is_finished
    book.train(0, len(held))
    assert book.is_finished


def test_a_fast_group_trains_more() -> None:
    groups = Groups(EpochPlan(epoch=0, total=400, batch_size=2, budget=400), {0: 1, 1: 1})
    groups.draw(1, 0)
    while not groups.book.is_drained:
        groups.draw(0, len(groups.told[0]))
        groups.train(0, len(groups.told[0]))
    slow = sum(batch.stop - batch.start for batch in groups.told[1])
    assert slow <= MOST_AHEAD * 2
    assert groups.book.trained == 400 - slow


# --- As DistributedSampler deals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5, 16, 37, 64])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_one_group_trains_the_batches_of_distributed_sampler(count: int, world_size: int, batch_size: int) -> None:
    samplers = [
        DistributedSampler(range(count), world_size, rank, shuffle=True, seed=3)  # type: ignore[arg-type]
        for rank in range(world_size)
    ]
    order = list(chain.from_iterable(zip(*samplers, strict=True)))
    book = LeaseBook(EpochPlan(epoch=0, total=len(order), batch_size=batch_size, budget=len(order)), {0: world_size})
    drawn: list[Batch] = []
    while new := book.draw(0, len(drawn)):
        drawn += new
    for rank, sampler in enumerate(samplers):
        mine = [[order[position] for position in positions(batch, rank, world_size)] for batch in drawn]
        assert mine == list(BatchSampler(sampler, batch_size, drop_last=False))


@varied
@given(st.integers(0, 1000), st.integers(1, 40), st.integers(1, 8))
def test_members_share_a_batch_without_gap_or_overlap(start: int, size: int, members: int) -> None:
    shares = [list(positions(Batch(start, start + size, 0), member, members)) for member in range(members)]
    assert all(shares), "every member needs a sample"
    used = Counter(chain.from_iterable(shares))
    assert set(used) == set(range(start, start + size))
    if size >= members:
        assert set(used.values()) == {1}


# --- Stretches -----------------------------------------------------------------------------------------------------


def test_stretches_end_where_validations_are_due() -> None:
    plan = EpochPlan(epoch=0, total=24, batch_size=2, budget=24, validate_every=8, validate_offset=4)
    groups = Groups(plan, {0: 1})
    groups.finish()
    assert [(batch.start, batch.stretch) for batch in groups.done] == [
        (0, 0), (2, 0), (4, 1), (6, 1), (8, 1), (10, 1), (12, 2), (14, 2), (16, 2), (18, 2), (20, 3), (22, 3)
    ]  # fmt: skip


def test_what_comes_back_late_does_not_reopen_a_validated_stretch() -> None:
    book = LeaseBook(EpochPlan(epoch=0, total=24, batch_size=2, budget=24, validate_every=8), {0: 1, 1: 1})
    book.draw(0, 0)
    held = book.draw(1, 0)
    book.train(0, 1)
    book.advance()
    book.retire(1)
    again = book.draw(0, 1)[0]
    assert (again.start, held[0].stretch, again.stretch) == (held[0].start, 0, 1)


def test_what_comes_back_is_drawn_in_the_order_of_the_epoch() -> None:
    book = LeaseBook(EpochPlan(epoch=0, total=24, batch_size=4, budget=24, validate_every=4), {0: 1, 1: 1, 2: 1})
    assert [book.draw(group, 0)[0].stretch for group in (0, 1, 2)] == [0, 1, 2]
    book.retire(0)
    book.retire(1)
    assert book.next_stretch == 0
    assert [book.draw(2, number)[0].start for number in (1, 2, 3)] == [0, 4, 12]


def test_a_resumed_epoch_begins_in_the_stretch_of_its_first_batch() -> None:
    plan = EpochPlan(epoch=0, total=24, batch_size=2, budget=24, validate_every=8, trained=((0, 10),))
    assert LeaseBook(plan, {0: 1}).stretch == 1


# --- Refusals ------------------------------------------------------------------------------------------------------


@pytest.fixture
def book() -> LeaseBook:
    return LeaseBook(EpochPlan(epoch=3, total=40, batch_size=2, budget=40), {0: 1, 1: 1})


def test_an_unknown_group_is_refused(book: LeaseBook) -> None:
    for ask in (lambda: book.draw(2, 0), lambda: book.train(2, 0), lambda: book.release(2)):
        with pytest.raises(ProtocolError, match="group 2 does not take part in epoch 3"):
            ask()


def test_a_batch_number_cannot_be_skipped(book: LeaseBook) -> None:
    book.draw(0, 0)
    for number in (3, 100, -1):
        with pytest.raises(ProtocolError, match=f"asks for its batch {number}"):
            book.draw(0, number)


def test_nothing_is_trained_that_was_not_drawn(book: LeaseBook) -> None:
    book.draw(0, 0)
    for batches in (5, 100, -1):
        with pytest.raises(ProtocolError, match=f"says it trained {batches} batches"):
            book.train(0, batches)
    assert book.trained == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"batch_size": 0},
        {"batch_size": -1},
        {"total": -1, "budget": -1},
        {"budget": 11},
        {"budget": -1},
        {"validate_every": -1},
        {"validate_offset": -1},
        {"trained": ((4, 2),)},
        {"trained": ((-1, 2),)},
        {"trained": ((8, 12),)},
        {"total": 2**60, "budget": 2**60},
    ],
    ids=str,
)
def test_an_impossible_plan_is_refused(fields: dict[str, int]) -> None:
    plan = EpochPlan(**{"epoch": 0, "total": 10, "batch_size": 2, "budget": 10, **fields})  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="no epoch can be"):
        LeaseBook(plan, {0: 1})


def test_ranges_that_overlap_are_counted_once() -> None:
    plan = EpochPlan(epoch=0, total=10, batch_size=2, budget=10, trained=((2, 6), (0, 4), (4, 5)))
    assert (LeaseBook(plan, {0: 1}).trained, LeaseBook(plan, {0: 1}).trained_spans) == (6, ((0, 6),))
