"""The lease book: every position is trained, once, whatever order groups draw, train and die in."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import chain, permutations, product
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_omni.errors import ConfigurationError, ProtocolError
from lightning_omni.group.leased_batches import apportion, positions, weight
from lightning_omni.runtime.leased_loader import LeasedBatchSampler, RankLeases, permutation, why_not_leased
from lightning_omni.server.epochs.lease_book import MOST_AHEAD, LeaseBook
from lightning_omni.wire.messages import Batch, EpochPlan

varied = settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


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
        self.book = LeaseBook.open(plan, sizes)
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

    def evict(self, group: int) -> None:
        self.book.evict(group)
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
def test_every_position_is_trained_exactly_once_whichever_group_dies(
    plan: EpochPlan, sizes: list[int], data: st.DataObject
) -> None:
    groups = Groups(plan, dict(enumerate(sizes)))
    for _ in range(data.draw(st.integers(0, 25), label="events")):
        group = data.draw(st.sampled_from(sorted(groups.sizes)), label="group")
        event = data.draw(st.sampled_from(["draw", "draw", "train", "train", "evict", "regroup"]), label="event")
        if event == "draw":
            groups.draw(group, data.draw(st.integers(0, len(groups.told[group])), label="number"))
        elif event == "train":
            groups.train(group, data.draw(st.integers(0, len(groups.told[group])), label="batches"))
        elif event == "evict" and len(groups.sizes) > 1:
            groups.evict(group)
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
    book = LeaseBook.open(EpochPlan(epoch=0, total=4, batch_size=2, budget=4), {0: 2, 1: 1})
    book.draw(0, 0)
    assert book.draw(1, 0) == [Batch(0, 2, 0)]
    assert book.draw(1, 1) == []
    book.train(0, 1)
    assert not book.is_finished
    book.evict(1)
    assert book.is_finished, "a repeated batch does not come back"


@pytest.mark.parametrize("sizes", [[1, 1], [1] * 8, [2, 1], [1, 2]])
def test_samples_that_are_too_few_for_whole_batches_are_divided_among_the_groups(sizes: list[int]) -> None:
    total = 4 * sum(sizes)
    book = LeaseBook.open(EpochPlan(epoch=0, total=total, batch_size=64, budget=total), dict(enumerate(sizes)))
    drawn = [batch for group in range(len(sizes)) for batch in book.draw(group, 0)]
    assert [batch.stop - batch.start for batch in drawn] == [4 * size for size in sizes], "as DistributedSampler does"
    assert covered(drawn) == dict.fromkeys(range(total), 1)


def test_a_group_that_has_had_a_batch_leaves_one_to_each_that_has_had_none() -> None:
    book = LeaseBook.open(EpochPlan(epoch=0, total=8, batch_size=2, budget=8, validate_every=4), {0: 1, 1: 1})
    for number in range(3):
        book.draw(0, number)
    assert book.draw(0, 3) == []
    assert book.draw(1, 0) == [Batch(6, 8, 1)]
    assert book.is_drained


def test_after_a_validation_a_group_leaves_a_batch_to_each_that_has_had_none_since() -> None:
    book = LeaseBook.open(EpochPlan(epoch=0, total=8, batch_size=2, budget=8, validate_every=4), {0: 1, 1: 1})
    for group in (0, 1):
        book.draw(group, 0)
        book.train(group, 1)
    book.advance()
    assert book.draw(0, 1) == [Batch(4, 6, 1)]
    assert book.draw(0, 2) == []
    assert book.draw(1, 1) == [Batch(6, 8, 1)]


def test_a_group_for_which_nothing_is_left_after_a_validation_repeats_the_first_batch() -> None:
    book = LeaseBook.open(EpochPlan(epoch=0, total=6, batch_size=2, budget=6, validate_every=4), {0: 1, 1: 1})
    for group in (0, 1):
        book.draw(group, 0)
        book.train(group, 1)
    book.advance()
    assert book.draw(0, 1) == [Batch(4, 6, 1)]
    assert book.draw(1, 1) == [Batch(0, 2, 1)]
    assert book.draw(1, 2) == []
    book.train(0, 2)
    assert not book.is_finished
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(book), type=LeaseBook)
    again.evict(1)
    assert again.is_finished, "a repeated batch does not come back"


def test_a_group_that_had_trained_ahead_of_a_validation_has_a_batch_after_it_all_the_same() -> None:
    book = LeaseBook.open(EpochPlan(epoch=0, total=8, batch_size=2, budget=8, validate_every=4), {0: 1, 1: 1})
    for number in range(2):
        book.draw(0, number)
    assert book.draw(1, 0) == [Batch(4, 6, 1)]
    book.train(0, 2)
    book.train(1, 1)
    book.advance()
    assert book.draw(0, 2) == [Batch(6, 8, 1)]
    assert book.draw(1, 1) == [Batch(0, 2, 1)]


@pytest.mark.parametrize("trained", [(), ((2, 4),), ((0, 2),), ((0, 4),)])
def test_a_batch_that_a_group_repeats_goes_out_again_if_it_is_not_trained_any_more(
    trained: tuple[tuple[int, int], ...],
) -> None:
    book = LeaseBook.open(EpochPlan(epoch=0, total=4, batch_size=2, budget=4), {0: 1})
    for number in range(2):
        book.draw(0, number)
    for group in (1, 2):
        book.join(group, 1)
    assert book.draw(1, 0) == [Batch(0, 2, 0)]
    book.train(0, 2)
    book.go_back(trained)
    book.evict(1)
    drawn = 0
    while batches := book.draw(2, drawn):
        drawn += len(batches)
    book.train(2, drawn)
    assert book.is_finished
    assert book.trained_spans == ((0, 4),), "a sample is left out"


def test_what_a_dead_group_held_goes_out_again_first() -> None:
    book = LeaseBook.open(EpochPlan(epoch=0, total=40, batch_size=2, budget=40), {0: 1, 1: 1})
    first = book.draw(0, 0)
    book.draw(1, 0)
    book.train(0, 0)
    book.evict(0)
    assert book.draw(1, len(book.draw(1, 0)))[0].start == first[0].start


def test_what_was_released_may_be_drawn_by_the_same_group_under_the_same_number() -> None:
    book = LeaseBook.open(EpochPlan(epoch=0, total=4, batch_size=2, budget=4), {0: 1})
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
    book = LeaseBook.open(EpochPlan(epoch=0, total=40, batch_size=2, budget=40), {0: 1})
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
    samplers: list[DistributedSampler[int]] = [
        DistributedSampler(range(count), world_size, rank, shuffle=True, seed=3)  # type: ignore[arg-type]
        for rank in range(world_size)
    ]
    order = list(chain.from_iterable(zip(*samplers, strict=True)))
    book = LeaseBook.open(
        EpochPlan(epoch=0, total=len(order), batch_size=batch_size, budget=len(order)), {0: world_size}
    )
    drawn: list[Batch] = []
    while new := book.draw(0, len(drawn)):
        drawn += new
    for rank, sampler in enumerate(samplers):
        mine = [[order[position] for position in positions(batch, rank, world_size)] for batch in drawn]
        assert mine == list(BatchSampler(sampler, batch_size, drop_last=False))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_dataset_that_has_grown_is_refused_where_distributed_sampler_refuses_it(drop_last: bool) -> None:
    dataset = list(range(64))
    sampler: DistributedSampler[int] = DistributedSampler(dataset, 2, 0, drop_last=drop_last)  # type: ignore[arg-type]
    assert len(permutation(sampler)) == 64
    dataset += [64]
    if drop_last:
        assert len(permutation(sampler)) == len(list(sampler)) * 2
        return
    with pytest.raises(AssertionError):
        list(sampler)
    with pytest.raises(ConfigurationError, match=r"has 65 samples, and had 64 or fewer .*reload_dataloaders_every_n_"):
        permutation(sampler)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_dataset_that_has_shrunk_is_refused_where_distributed_sampler_refuses_it(drop_last: bool) -> None:
    dataset = list(range(64))
    sampler: DistributedSampler[int] = DistributedSampler(dataset, 2, 0, drop_last=drop_last)  # type: ignore[arg-type]
    del dataset[40:]
    if not drop_last:
        assert len(permutation(sampler)) == len(list(sampler)) * 2
        return
    with pytest.raises(AssertionError):
        list(sampler)
    with pytest.raises(ConfigurationError, match=r"has 40 samples, and had 64 or more .*reload_dataloaders_every_n_"):
        permutation(sampler)


@varied
@given(st.integers(0, 1000), st.integers(1, 40), st.integers(1, 8))
def test_members_share_a_batch_without_gap_or_overlap(start: int, size: int, members: int) -> None:
    shares = [list(positions(Batch(start, start + size, 0), member, members)) for member in range(members)]
    assert all(shares), "every member needs a sample"
    used = Counter(chain.from_iterable(shares))
    assert set(used) == set(range(start, start + size))
    if size >= members:
        assert set(used.values()) == {1}


@varied
@given(st.integers(6, 400), st.lists(st.integers(1, 3), min_size=2, max_size=4), st.data())
def test_no_group_is_left_fewer_than_two_samples_for_each_member(
    total: int, sizes: list[int], data: st.DataObject
) -> None:
    book = LeaseBook.open(EpochPlan(epoch=0, total=total, batch_size=8, budget=total), dict(enumerate(sizes)))
    drawn = [0] * len(sizes)
    while not book.is_drained:
        group = data.draw(st.sampled_from([each for each in book.groups if book.has_free(each)]), label="group")
        new = book.draw(group, drawn[group])
        drawn[group] += len(new)
        assert all(batch.stop - batch.start >= 2 * sizes[group] for batch in new)


@varied
@given(st.integers(2, 40), st.lists(st.integers(1, 20), min_size=1, max_size=8), st.booleans())
def test_in_pairs_each_member_gets_two_samples_and_all_samples_count_about_alike(
    size: int, shares: list[int], is_shared_out: bool
) -> None:
    batch, members = Batch(7, 7 + size, 0), len(shares)
    mine = shares if is_shared_out else []
    parts = [list(positions(batch, member, members, mine, in_pairs=True)) for member in range(members)]
    assert all(len(set(part)) > 1 for part in parts)
    used = Counter(chain.from_iterable(parts))
    assert set(used) == set(range(7, 7 + size))
    if size < 2 * members:
        assert max(used.values()) - min(used.values()) <= 1
        assert all(weight(batch, member, members, mine, in_pairs=True) == 1.0 for member in range(members))
    else:
        assert parts == [list(positions(batch, member, members, mine)) for member in range(members)]


def rest_of_an_epoch(batch_size: int, members: int = 4) -> RankLeases:
    """One group goes on where several have left a single batch of one rank, and the end."""
    leases = RankLeases(members, batch_size, 16 * batch_size, rank=0, before_epoch=lambda _: None, is_local=True)
    trained = ((0, 3 * batch_size), (4 * batch_size, 8 * batch_size))
    whole = EpochPlan(epoch=0, total=leases.total, batch_size=batch_size, budget=leases.total, trained=trained)
    leases.begin_local(whole, resumed=True)
    return leases


@pytest.mark.parametrize(("batch_size", "sizes"), [(1, [1, 1, 1]), (4, [2, 4, 4]), (7, [2, 7, 7]), (8, [2, 8, 8])])
def test_what_several_groups_leave_of_an_epoch_is_trained_to_its_end(batch_size: int, sizes: list[int]) -> None:
    for drop_last in (False, True):
        leases = rest_of_an_epoch(batch_size)
        sampler: DistributedSampler[int] = DistributedSampler(range(leases.total), 4, 0, shuffle=False)  # type: ignore[arg-type]
        assert [len(batch) for batch in LeasedBatchSampler(sampler, leases, drop_last)] == sizes


@pytest.mark.parametrize(("every", "heard"), [(11, ["over:validate"]), (8, ["validate", "over"])])
def test_one_group_validates_at_the_end_where_that_is_due_inside_its_last_batch(every: int, heard: list[str]) -> None:
    leases = RankLeases(1, 4, 12, rank=0, before_epoch=lambda _: None, is_local=True)
    plan = EpochPlan(epoch=0, total=12, batch_size=4, budget=12, validate_every=every, trained=((0, 2),))
    leases.begin_local(plan, resumed=True)
    said = []
    while leases.hand_out() is not None:
        leases.begin_batch()
        coming = leases.peek()
        if coming is None or coming.interval > leases.interval:
            said.append(leases.ask())
    assert said == heard


def test_a_whole_epoch_of_one_group_is_never_trained_in_pairs() -> None:
    leases = rest_of_an_epoch(batch_size=4)
    assert leases.in_pairs
    leases.iterate(epoch=0)
    leases.iterate(epoch=1)
    assert not leases.in_pairs


# --- In proportion to the speeds -----------------------------------------------------------------------------------


def slowest(parts: tuple[int, ...], speeds: list[int]) -> Fraction:
    return max(Fraction(part, speed) for part, speed in zip(parts, speeds, strict=True))


@varied
@given(st.integers(0, 500), st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9))
def test_all_samples_are_apportioned_and_each_gets_two(total: int, speeds: list[float]) -> None:
    parts = apportion(total, speeds)
    least = min(2, total // len(speeds))
    assert sum(parts) == total
    assert min(parts) >= least
    for (part, speed), (other, theirs) in permutations(zip(parts, speeds, strict=True), 2):
        assert part <= other or speed >= theirs or part == least, "one that gets more is not slower"


@settings(varied, max_examples=30)
@given(st.integers(1, 14), st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_no_other_split_lets_the_slowest_be_done_earlier(total: int, speeds: list[int]) -> None:
    least = min(2, total // len(speeds))
    every = [parts for parts in product(range(least, total + 1), repeat=len(speeds)) if sum(parts) == total]
    assert slowest(apportion(total, speeds), speeds) == min(slowest(parts, speeds) for parts in every)


@varied
@given(st.integers(9, 36_000), st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9))
def test_what_was_split_once_is_split_the_same_way_again(total: int, speeds: list[float]) -> None:
    once = apportion(total, speeds)
    assert apportion(total, once) == once


@varied
@given(st.integers(0, 500), st.integers(1, 9))
def test_equal_speeds_get_equal_parts_but_for_the_rest(total: int, members: int) -> None:
    small, larger = divmod(total, members)
    assert apportion(total, [1.5] * members) == (small + 1,) * larger + (small,) * (members - larger)


@pytest.mark.parametrize("speeds", [[], [1.0, 0.0], [1.0, -1.0], [float("inf")], [float("nan"), 1.0]])
def test_impossible_speeds_are_refused(speeds: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot split 8 samples"):
        apportion(8, speeds)


@varied
@given(st.integers(0, 1000), st.integers(1, 60), st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_members_of_different_speed_share_a_batch_without_gap_or_overlap(
    start: int, size: int, shares: list[int]
) -> None:
    batch = Batch(start, start + size, 0)
    parts = [list(positions(batch, member, len(shares), shares)) for member in range(len(shares))]
    assert all(parts), "every member needs a sample"
    used = Counter(chain.from_iterable(parts))
    assert set(used) == set(range(start, start + size))
    if size >= len(shares):
        assert set(used.values()) == {1}
    if size == sum(shares) and min(shares) > 1:
        assert [len(part) for part in parts] == shares


@varied
@given(st.integers(1, 60), st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_weighted_means_of_members_make_the_mean_over_the_batch(size: int, shares: list[int]) -> None:
    batch, members = Batch(7, 7 + size, 0), len(shares)
    gradients: Counter[int] = Counter()
    for member in range(members):
        mine = positions(batch, member, members, shares)
        for position in mine:
            gradients[position] += weight(batch, member, members, shares) / len(mine) / members  # type: ignore[assignment]
    assert gradients == pytest.approx(dict.fromkeys(range(7, 7 + size), 1 / size))


@given(st.integers(1, 60), st.integers(1, 8))
def test_equal_shares_have_no_weights(size: int, members: int) -> None:
    for member in range(members):
        assert weight(Batch(0, size, 0), member, members) == 1.0
        assert weight(Batch(0, size * members, 0), member, members, [size] * members) == 1.0


def local_leases(members: int = 2, batch_size: int = 4, total: int = 64) -> RankLeases:
    leases = RankLeases(members, batch_size, total, rank=0, before_epoch=lambda _: None, is_local=True)
    leases.begin_local(EpochPlan(epoch=0, total=total, batch_size=batch_size, budget=total))
    return leases


def test_shares_count_from_a_batch_on_that_no_loader_has_taken() -> None:
    leases = local_leases()
    for _ in range(3):  # the loader is ahead
        leases.hand_out()
    leases.set_batch_shares((2, 6), from_number=4)
    assert leases.hand_out() is not None
    assert leases.hand_out() is not None
    assert [len(leases.indices(number)) for number in range(5)] == [4, 4, 4, 4, 2]
    assert (leases.samples, leases.weight) == (0, 1.0)
    weights = []
    for _ in range(5):
        leases.begin_batch()
        weights.append((leases.samples, leases.weight))
    assert weights == [(4, 1.0)] * 4 + [(2, 0.5)]


def test_shares_outlast_the_epoch_and_equal_ones_are_none() -> None:
    leases = local_leases()
    leases.set_batch_shares((2, 6), from_number=9)
    assert (leases.shares, leases.split) == ((2, 6), (2, 6))
    leases.iterate(1)
    leases.hand_out()
    assert leases.indices(0) == range(2)
    leases.batch_size = 8  # as a new loader may have
    assert leases.split == (4, 12)
    leases.batch_size = 4
    leases.set_batch_shares((4, 4), from_number=1)
    assert (leases.shares, leases.split) == ((), (4, 4))
    leases.hand_out()
    assert leases.indices(1) == range(8, 16, 2)


def test_new_peers_have_no_shares() -> None:
    leases = local_leases()
    leases.set_batch_shares((2, 6), from_number=0)
    leases.assign(1, 3, None, generation=1)
    assert leases.split == (4, 4, 4)


@pytest.mark.parametrize(("shares", "number"), [((2, 6), 0), ((8,), 1), ((1, 2, 5), 1), ((0, 8), 1)])
def test_impossible_shares_are_refused(shares: tuple[int, ...], number: int) -> None:
    leases = local_leases()
    leases.hand_out()
    with pytest.raises(ValueError, match="cannot share out"):
        leases.set_batch_shares(shares, from_number=number)


@pytest.mark.parametrize(("drop_last", "batches"), [(True, 2), (False, 3)])
def test_the_groups_last_batch_is_dropped_by_all_members_or_by_none(drop_last: bool, batches: int) -> None:
    for rank in range(2):
        sampler: DistributedSampler[int] = DistributedSampler(range(22), 2, rank, shuffle=False)  # type: ignore[arg-type]
        leases = RankLeases(2, 4, 22, rank=rank, before_epoch=lambda _: None, is_local=True, shares=(2, 6))
        sizes = [len(batch) for batch in LeasedBatchSampler(sampler, leases, drop_last)]
        assert sizes == [[2, 2, 2], [6, 6, 4]][rank][:batches]


# --- Intervals -----------------------------------------------------------------------------------------------------


def test_intervals_end_where_validations_are_due() -> None:
    plan = EpochPlan(epoch=0, total=24, batch_size=2, budget=24, validate_every=8, validate_offset=4)
    groups = Groups(plan, {0: 1})
    groups.finish()
    assert [(batch.start, batch.interval) for batch in groups.done] == [
        (0, 0), (2, 0), (4, 1), (6, 1), (8, 1), (10, 1), (12, 2), (14, 2), (16, 2), (18, 2), (20, 3), (22, 3)
    ]  # fmt: skip


def test_what_comes_back_late_does_not_reopen_a_validated_interval() -> None:
    book = LeaseBook.open(EpochPlan(epoch=0, total=24, batch_size=2, budget=24, validate_every=8), {0: 1, 1: 1})
    book.draw(0, 0)
    held = book.draw(1, 0)
    book.train(0, 1)
    book.advance()
    book.evict(1)
    again = book.draw(0, 1)[0]
    assert (again.start, held[0].interval, again.interval) == (held[0].start, 0, 1)


def test_what_comes_back_is_drawn_in_the_order_of_the_epoch() -> None:
    book = LeaseBook.open(EpochPlan(epoch=0, total=24, batch_size=4, budget=24, validate_every=4), {0: 1, 1: 1, 2: 1})
    assert [book.draw(group, 0)[0].interval for group in (0, 1, 2)] == [0, 1, 2]
    book.evict(0)
    book.evict(1)
    assert book.next_interval == 0
    assert [book.draw(2, number)[0].start for number in (1, 2, 3)] == [0, 4, 12]


def test_a_resumed_epoch_begins_in_the_interval_of_its_first_batch() -> None:
    plan = EpochPlan(epoch=0, total=24, batch_size=2, budget=24, validate_every=8, trained=((0, 10),))
    assert LeaseBook.open(plan, {0: 1}).interval == 1


# --- Refusals ------------------------------------------------------------------------------------------------------


@pytest.fixture
def book() -> LeaseBook:
    return LeaseBook.open(EpochPlan(epoch=3, total=40, batch_size=2, budget=40), {0: 1, 1: 1})


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
        LeaseBook.open(plan, {0: 1})


def test_ranges_that_overlap_are_counted_once() -> None:
    plan = EpochPlan(epoch=0, total=10, batch_size=2, budget=10, trained=((2, 6), (0, 4), (4, 5)))
    assert (LeaseBook.open(plan, {0: 1}).trained, LeaseBook.open(plan, {0: 1}).trained_spans) == (6, ((0, 6),))


# --- Ranks that get the same samples ----------------------------------------------------------------------------------


def test_samples_of_ranks_that_compute_together_count_once() -> None:
    plan = EpochPlan(epoch=0, total=24, batch_size=3, budget=24, ranks_per_batch=2)
    book = LeaseBook.open(plan, {0: 4, 1: 2})
    assert (book.draw(0, 0), book.draw(1, 0)) == ([Batch(0, 6, 0)], [Batch(6, 9, 0)])
    leases = RankLeases(world_size=2, batch_size=3, total=24, rank=1, before_epoch=lambda epoch: None, is_local=True)
    leases.begin_local(plan)
    assert leases.hand_out() == Batch(0, 6, 0), "both rows of the one group"
    assert list(leases.indices(0)) == [1, 3, 5]


@pytest.mark.parametrize(("ranks", "sizes"), [(0, {0: 2}), (-1, {0: 2}), (2, {0: 2, 1: 3})])
def test_groups_that_are_no_whole_rows_are_refused(ranks: int, sizes: dict[int, int]) -> None:
    with pytest.raises(ProtocolError, match="cannot train as in"):
        LeaseBook.open(EpochPlan(epoch=0, total=24, batch_size=3, budget=24, ranks_per_batch=ranks), sizes)


class Resumable(DataLoader[int]):
    """Finds its place in an epoch again, as torchdata's StatefulDataLoader does."""

    def state_dict(self) -> dict[str, int]:
        return {"batches": 3}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Repeated(DataLoader[int]):
    """Gives out each batch twice: a batch that is trained is not one that was drawn."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield from (batch, batch)


class Collated(DataLoader[int]):
    """Changes nothing in how batches are drawn."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "collate_fn": list})


@pytest.mark.parametrize(
    ("kind", "expected"), [(DataLoader, True), (Collated, True), (Resumable, False), (Repeated, False)]
)
def test_a_loader_that_decides_which_batches_it_gives_out_and_when_is_not_leased(
    kind: type[DataLoader[int]], expected: bool
) -> None:
    data = range(12)
    loader = kind(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=0))  # type: ignore[arg-type]
    assert (why_not_leased(loader) == "") is expected
