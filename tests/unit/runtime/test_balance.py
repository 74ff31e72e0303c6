"""Splitting a group's batch by speed: the measurement, and when the split changes."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_omni.runtime.balance import OwnTime
from lightning_omni.runtime.timing import EventClock
from lightning_omni.strategy.loops.live_metrics import SMOOTHING, StepTimes
from lightning_omni.tuning.model import constants as c
from lightning_omni.tuning.model.steps import Balancer, BatchSplit, Throughput, seconds, shrunk, straggler_sentence
from lightning_omni.wire.messages import GroupStatus, Status

varied = settings(deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

# --- Throughput ------------------------------------------------------------------------------------------------------


def test_the_first_batches_do_not_count() -> None:
    throughput = Throughput()
    for _ in range(c.SPLIT_WARM_UP):
        throughput.note(8, 100.0)
    for _ in range(c.SPLIT_FEWEST):
        assert throughput.speed == 0.0
        throughput.note(8, 0.1)
    assert throughput.speed == pytest.approx(80.0)


def test_a_batch_that_took_long_by_chance_does_not_count_for_much() -> None:
    throughput = Throughput(warm_up=0)
    for duration in (0.1, 0.1, 5.0, 0.1, 0.0):
        throughput.note(8, duration)
    assert throughput.speed == pytest.approx(80.0)


def test_only_the_latest_batches_count() -> None:
    throughput = Throughput(warm_up=0)
    for duration in [0.1] * c.SPLIT_WINDOW + [0.2] * c.SPLIT_WINDOW:
        throughput.note(8, duration)
    assert throughput.speed == pytest.approx(40.0)


@varied
@given(st.lists(st.floats(0.9, 1.1), min_size=20, max_size=20), st.sampled_from([0.25, 4.0]))
def test_a_speed_that_changes_is_known_after_a_few_batches(noise: list[float], factor: float) -> None:
    throughput = Throughput(warm_up=0)
    for each in noise:
        throughput.note(8, 0.1 * each)
    for each in noise[: 2 * c.SPLIT_FEWEST]:
        throughput.note(8, 0.1 * each * factor)
    assert throughput.speed == pytest.approx(80.0 / factor, rel=0.15)


def test_the_scatter_of_batches_says_how_far_a_speed_may_be_off() -> None:
    """Of the medians of many series, each of normal logarithms."""
    draw = random.Random(0)
    said, medians = [], []
    for _ in range(400):
        throughput = Throughput(warm_up=0)
        for _ in range(c.SPLIT_WINDOW):
            throughput.note(8, 0.1 * draw.lognormvariate(0.0, 0.3))
        said.append(throughput.variance)
        medians.append(math.log(throughput.speed))
    assert statistics.fmean(said) == pytest.approx(statistics.variance(medians), rel=0.25)


# --- The decision ----------------------------------------------------------------------------------------------------


def test_a_large_gain_is_taken_at_once() -> None:
    assert Balancer().decide((8, 8), (1.0, 3.0)) == BatchSplit((4, 12), 1.0)


def test_a_small_gain_has_to_be_seen_twice_in_a_row() -> None:
    balancer, even, faster = Balancer(), (10.0, 10.0), (10.0, 12.0)
    assert balancer.decide((80, 80), faster) is None
    assert balancer.decide((80, 80), even) is None
    assert balancer.decide((80, 80), faster) is None
    split = balancer.decide((80, 80), faster)
    assert split is not None
    assert split.shares == (73, 87)
    assert c.ALIKE < split.gain < c.SPLIT_AT_ONCE


def test_a_small_gain_has_to_be_seen_twice_with_the_same_member_too_slow() -> None:
    balancer = Balancer()
    for speeds in ((10.0, 12.0, 12.0), (12.0, 10.0, 12.0), (12.0, 12.0, 10.0)) * 2:  # noise, and none is slow
        assert balancer.decide((80, 80, 80), speeds) is None
    balancer = Balancer()
    assert balancer.decide((80, 80, 80), (10.0, 10.1, 12.0)) is None
    assert balancer.decide((80, 80, 80), (10.1, 10.0, 12.0)) is not None, "two are slow, now one, now the other"


def test_nothing_is_decided_before_all_are_known() -> None:
    assert Balancer().decide((8, 8), (1.0, 0.0)) is None


def test_a_split_that_whole_samples_cannot_better_remains() -> None:
    assert Balancer().decide((1, 1), (1.0, 10.0)) is None
    assert Balancer().decide((4, 4, 4), (10.0, 11.0, 12.0)) is None


def test_random_step_times_split_nothing_by_chance() -> None:
    """Members of one speed are given equal parts in nearly all decisions; in hardly any, were speeds taken as exact."""
    draw, balancers, changes = random.Random(1), (Balancer(), Balancer()), [0, 0]
    members = [Throughput() for _ in range(4)]
    for batch in range(4000):
        for member in members:
            member.note(16, draw.expovariate(1.0))
        if batch % 5 == 4 and all(member.speed for member in members):
            speeds, variances = [each.speed for each in members], [each.variance for each in members]
            for place, errors in enumerate((variances, ())):
                changes[place] += balancers[place].decide((16,) * 4, speeds, errors) is not None
    assert changes[0] < 0.15 * 800
    assert changes[1] > 0.7 * 800


def test_members_whose_speeds_differ_by_more_than_their_batches_get_their_parts_all_the_same() -> None:
    split = Balancer().decide((32, 32), (10.0, 40.0), (0.01, 0.01))
    assert split is not None
    assert split.shares == (13, 51)


@varied
@given(st.lists(st.tuples(st.floats(0.01, 1e4), st.floats(0.0, 4.0)), min_size=1, max_size=8))
def test_speeds_that_may_be_wrong_are_nearer_to_each_other_and_in_the_same_order(
    members: list[tuple[float, float]],
) -> None:
    speeds, variances = [speed for speed, _ in members], [each for _, each in members]
    nearer = shrunk(speeds, variances)
    assert sum(map(math.log, nearer)) == pytest.approx(sum(map(math.log, speeds)), abs=1e-6)
    by_speed = [after for _, after in sorted(zip(speeds, nearer, strict=True))]
    assert all(after >= before * (1 - 1e-9) for before, after in itertools.pairwise(by_speed))
    assert max(nearer) / min(nearer) <= max(speeds) / min(speeds) * (1 + 1e-9)
    assert shrunk(speeds, [0.0] * len(speeds)) == speeds


@varied
@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(0.1, 100)), min_size=1, max_size=8),
    st.lists(st.floats(0.98, 1.02), min_size=8, max_size=8),
)
def test_it_does_not_flap(members: list[tuple[int, float]], noise: list[float]) -> None:
    shares, speeds = tuple(share for share, _ in members), [speed for _, speed in members]
    balancer = Balancer()
    for _ in range(2):
        split = balancer.decide(shares, speeds)
        shares = split.shares if split else shares
    assert sum(shares) == sum(share for share, _ in members)
    for _ in range(3):
        assert balancer.decide(shares, speeds) is None, "once it is balanced, it remains so"
    noisy = [speed * factor for speed, factor in zip(speeds, noise, strict=False)]
    assert balancer.decide(shares, noisy) is None, "one look at a small difference changes nothing"


@varied
@given(st.lists(st.tuples(st.floats(0, 0.02), st.floats(0.0005, 0.01)), min_size=2, max_size=6), st.integers(8, 64))
def test_it_converges_also_where_a_batch_takes_some_time_whatever_its_size(
    devices: list[tuple[float, float]], batch_size: int
) -> None:
    def times(shares: tuple[int, ...]) -> list[float]:
        return [fixed + each * share for (fixed, each), share in zip(devices, shares, strict=True)]

    balancer, shares = Balancer(), (batch_size,) * len(devices)
    before, changes = max(times(shares)), []
    for _ in range(40):
        split = balancer.decide(shares, [share / time for share, time in zip(shares, times(shares), strict=True)])
        changes.append(split is not None)
        shares = split.shares if split else shares
    assert not any(changes[-3:])
    assert max(times(shares)) <= before * 1.001


def test_the_slowest_member_sets_the_pace() -> None:
    assert seconds((9, 18, 37), (1.0, 2.0, 4.0)) == 37 / 4


# --- A rank's own time -----------------------------------------------------------------------------------------------


class Hands:
    """A clock that is set by hand; it knows the time only as far as it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.known = float("inf")

    def mark(self, instead_of: Any = None) -> Any:
        return self.now

    def seconds(self, since: Any, until: Any) -> float | None:
        return until - since if until <= self.known else None


def train_one_batch(own: OwnTime, clock: Hands) -> None:
    clock.now += 1  # loading
    own.pause()
    clock.now += 10  # the group shares buffers
    own.work()
    own.work()  # the module calls itself
    clock.now += 2
    own.gradient()
    clock.now += 3
    own.gradient()
    clock.now += 100  # the group shares gradients
    own.pause_since_gradient()
    own.work()
    clock.now += 1000  # the optimizer steps, the group exchanges


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture
def own(clock: Hands) -> OwnTime:
    return OwnTime(clock)  # type: ignore[arg-type]


def test_what_a_rank_waits_for_is_not_its_own_time(own: OwnTime, clock: Hands) -> None:
    own.start()
    train_one_batch(own, clock)
    assert own.finish(8) == [(8, 6.0)]


def test_what_a_rank_does_after_its_last_gradient_counts_if_it_waits_for_no_other_there(
    own: OwnTime, clock: Hands
) -> None:
    own.start()
    train_one_batch(own, clock)
    own.pause()
    assert own.finish(8) == [(8, 6.0 + 1000.0)]


def test_several_backward_passes_add_up_without_the_exchange_between_them(own: OwnTime, clock: Hands) -> None:
    own.start()
    train_one_batch(own, clock)
    clock.now += 4
    own.gradient()
    own.pause_since_gradient()
    assert own.finish(8, elsewhere=1000.0) == [(8, 6.0 + 4.0)]


def test_a_batch_whose_beginning_was_not_seen_does_not_count(own: OwnTime, clock: Hands) -> None:
    train_one_batch(own, clock)
    assert own.finish(8) == []
    own.start()
    own.skip()
    train_one_batch(own, clock)
    assert own.finish(8) == []


def test_a_batch_without_a_backward_pass_does_not_count(own: OwnTime, clock: Hands) -> None:
    own.start()
    clock.now += 1
    own.pause()
    assert own.finish(8) == []


def test_times_that_a_device_does_not_know_yet_are_read_later(own: OwnTime, clock: Hands) -> None:
    clock.known = 0.0
    own.start()
    train_one_batch(own, clock)
    assert own.finish(8) == []
    clock.known = clock.now
    own.start()
    train_one_batch(own, clock)
    assert own.finish(9) == [(8, 6.0)]
    clock.known = clock.now
    own.start()
    assert own.finish(1) == [(9, 6.0)]


def test_a_device_is_asked_only_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        made = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            Event.made += 1
            self.at = -1.0
            self.is_done = False

        def record(self) -> None:
            self.at = float(Event.made)

        def query(self) -> bool:
            return self.is_done

        def elapsed_time(self, later: Event) -> float:
            return 1e3 * (later.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = EventClock()
    first, second = clock.mark(), clock.mark()
    assert clock.mark(instead_of=second) is second
    assert clock.seconds(first, second) is None
    second.is_done = True
    assert clock.seconds(first, second) == 1.0


def test_what_a_slow_rank_is_named_by_has_its_loading_in_it_and_no_waiting(clock: Hands) -> None:
    times = StepTimes(clock)  # type: ignore[arg-type]
    for _ in range(2):
        times.begin(0.0, 0)
        clock.now += 1.5  # forward
        with times.waiting():
            clock.now += 0.5
        times.forward_done(0.25)
        clock.now += 100  # backward, with its wait for the group
        times.end(0.25, 0)
        clock.now += 0.25  # loading
        with times.waiting():
            clock.now += 0.75
    first, second = 2 - 0.5 - 0.25, 1 + 2 - 0.75 - 0.5 - 0.25
    assert times.means[0] == pytest.approx(SMOOTHING * first + (1 - SMOOTHING) * second)
    step = times.means[1]
    times.interrupt()
    clock.now += 1000  # a validation, or groups that are formed
    exchange = times.means[2]
    times.begin(60.25, 0)  # weights were exchanged meanwhile
    clock.now += 2
    times.forward_done(60.25)
    times.end(61.25, 0)
    assert times.means[2] == pytest.approx(SMOOTHING * exchange + (1 - SMOOTHING) * 1.0)
    assert times.means[0] == pytest.approx(
        SMOOTHING * (SMOOTHING * first + (1 - SMOOTHING) * second) + (1 - SMOOTHING) * 2
    )
    assert times.means[1] == pytest.approx(SMOOTHING * step + (1 - SMOOTHING) * 2)


def test_a_batch_counts_once_the_device_has_reached_its_end(clock: Hands) -> None:
    times = StepTimes(clock)  # type: ignore[arg-type]
    clock.known = 0.0
    times.begin(0.0, 0)
    clock.now += 2
    times.forward_done(0.0)
    clock.now += 3
    times.end(1.0, 8)
    assert times.means == (0.0, 0.0, 0.0)
    clock.now += 1
    times.begin(1.0, 8)
    times.forward_done(1.0)
    times.end(1.0, 8)
    assert times.means == (0.0, 0.0, 0.0)
    assert times.bytes_per_step == 4.0
    clock.known = 5.0
    clock.now += 1
    times.end(1.0, 8)
    assert times.means == (2.0, 5.0, 1.0), "of the first batch alone"


# --- What is said ----------------------------------------------------------------------------------------------------


def test_a_straggler_is_named_with_the_remedy_where_there_is_one() -> None:
    group = GroupStatus(
        group=1,
        ranks=(2, 3),
        updates=9,
        staleness_mean=0.0,
        step_time=0.1,
        compute_time=0.05,
        exchange_time=0.0,
        slowest_rank=3,
        slowest_time=0.08,
    )
    status = Status(
        sent=0.0, clock=9, updates_per_second=1.0, refused=0, strangers=0, groups=(group,), staleness=(), lost=()
    )
    assert straggler_sentence(status).startswith("rank 3 holds group 1 up")
    assert "rebalance" not in straggler_sentence(status)
    assert straggler_sentence(status, can_rebalance=True).endswith(
        'rebalance="auto" splits the batch in proportion to the speeds'
    )
