"""How groups exchange, and what the hardware model makes of it: against closed forms, and against the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from predictions import WAYS, Cell, known_profile

from lightning_omni import Compression
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import (
    METHODS,
    AsyncDiLoCo,
    DecoupledDiLoCo,
    DiLoCo,
    LocalSGD,
    method_named,
    text_of,
    with_period,
)
from lightning_omni.tuning.model.cost_model import ExchangePattern
from lightning_omni.tuning.model.measurements import Measured
from lightning_omni.tuning.model.profile import Prediction, Profile
from lightning_omni.tuning.model.queueing import BarrierExchange, quantiles_of_slowest, quantiles_of_sum, slowest
from lightning_omni.wire.layout import Layout

NBYTES = 4_000_000


def known(**costs: Any) -> Profile:
    """Four ranks that take 0.1 s a step."""
    return known_profile(4, 1, per_sample=0.1, nbytes=NBYTES, **costs)


def step(prediction: Prediction) -> float:
    """Seconds of a step of each group."""
    return prediction.seconds_per_update.value * len(prediction.topology.alive)


# --- What is read off a method ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("async_sgd", (1, False, 0)),
        ("async_sgd:bound=0", (1, True, 0)),
        ("hardsync", (1, True, 0)),
        ("softsync", (1, False, 0)),
        ("local_sgd:period=8", (8, True, 0)),
        ("diloco:period=48,fragments=4,delay=2", (12, True, 2)),
        ("async_diloco:period=6", (6, False, 0)),
        ("decoupled_diloco:period=24,fragments=4", (6, False, 6)),
        ("elastic_averaging:period=8", (8, False, 0)),
        ("downpour:n_push=4,n_fetch=8", (4, False, 0)),
        ("gossip:period=3", (3, False, 0)),
    ],
)
def test_period_barrier_and_delay_are_the_methods(method: str, expected: tuple[int, bool, int]) -> None:
    found = ExchangePattern.of(method, nbytes=NBYTES)
    assert (found.period, found.barrier, found.delay) == expected


@given(period=st.integers(1, 64), fragments=st.integers(1, 6), delay=st.integers(1, 4))
def test_steps_are_kept_with_another_period_if_any_are_made_meanwhile(period: int, fragments: int, delay: int) -> None:
    found = with_period(DiLoCo(period=720, fragments=fragments, delay=delay, keep_steps=True), period)
    assert isinstance(found, DiLoCo)
    assert (period % found.fragments, fragments % found.fragments) == (0, 0)
    assert found.delay == min(delay, period // found.fragments - 1)
    assert found.keep_steps == (found.delay > 0)


@pytest.mark.parametrize("fragments", [1, 4])
def test_a_fragment_is_loaded_no_later_than_the_next_is_sent_with_another_period(fragments: int) -> None:
    method = DecoupledDiLoCo(period=48, fragments=fragments, delay=12)
    assert with_period(method, 8) == DecoupledDiLoCo(period=8, fragments=fragments, delay=8 // fragments)
    assert with_period(method, 64) == DecoupledDiLoCo(period=64, fragments=fragments, delay=12)


@pytest.mark.parametrize(
    "method",
    [
        LocalSGD(period=8, fragments=8),
        LocalSGD(period=16, fragments=4, delay=2),
        DiLoCo(period=48, fragments=8),
        DecoupledDiLoCo(period=30, fragments=5),
        AsyncDiLoCo(period=100, min_steps=60),
    ],
)
def test_a_methods_text_without_its_period_keeps_its_other_settings(method: LocalSGD | AsyncDiLoCo) -> None:
    assert with_period(method_named(text_of(method, without=("period",))), method.period) == method


def test_fewest_steps_of_a_round_are_no_more_than_another_period_has() -> None:
    assert with_period(AsyncDiLoCo(min_steps=10), 4) == AsyncDiLoCo(period=4, min_steps=4)
    assert with_period(AsyncDiLoCo(min_steps=10), 40) == AsyncDiLoCo(period=40, min_steps=10)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_asked_for(name: str) -> None:
    found = known(exchange=0.1, link=0.01).predict(4, exchanging=ExchangePattern.of(name, nbytes=NBYTES))
    assert 0.1 <= step(found) < 0.5


def test_bytes_are_those_of_the_wire_format() -> None:
    numbers = NBYTES // 4
    assert ExchangePattern.of("async_sgd", "int8", nbytes=NBYTES).push == numbers + 4 * -(-numbers // 128)
    assert ExchangePattern.of("async_sgd", "int8", nbytes=NBYTES).pull == NBYTES
    both = ExchangePattern.of("diloco:fragments=4,period=8", Compression("topk:0.01", "bf16"), nbytes=NBYTES)
    assert (both.push, both.pull) == (8 * numbers // 400, numbers // 2)
    downpour = ExchangePattern.of("downpour:n_push=4,n_fetch=8", nbytes=NBYTES)
    assert (downpour.push, downpour.pull) == (NBYTES, NBYTES // 2)
    layout = Layout.of({"w": torch.ones(2, 3), "b": torch.zeros(3)})
    assert ExchangePattern.of("async_sgd", nbytes=layout).push == layout.nbytes
    assert ExchangePattern.of("async_sgd", "bf16").push is None


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda: ExchangePattern.of("diloco", overlap=True), "overlap=True"),
        (lambda: ExchangePattern.of("local_sgd", "topk"), "topk"),
    ],
)
def test_what_cannot_be_is_refused_by_name(ask: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        ask()


# --- What can be said beforehand --------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    groups=st.integers(1, 4),
    parts=st.lists(st.floats(0, 0.1), min_size=3, max_size=3),
)
def test_without_a_pattern_groups_exchange_after_each_step_and_wait_for_nothing_but_their_answers(
    groups: int, parts: list[float]
) -> None:
    profile = known(exchange=sum(parts) + parts[2], serve=parts[1], link=parts[2])
    assert profile.predict(groups) == profile.predict(groups, exchanging=ExchangePattern(1, NBYTES, NBYTES))


def test_at_a_barrier_the_slowest_group_counts_and_all_answers_are_there_when_the_last_one_is() -> None:
    steps, none = np.array([[[1.0], [1.0], [3.0]]]), np.zeros((1, 3, 1))
    ones = np.ones((1, 3))
    costs = BarrierExchange(way=0.5 * ones, serve=0.1 * ones, send=0.2 * ones)
    # The slowest comes last: 3 s, both ways, its push, and three answers that share the link.
    assert costs.cycle(none, steps)[0] == pytest.approx(3 + 0.5 + 0.1 + 0.6)
    equal = np.ones((1, 3, 1))
    assert costs.cycle(none, equal) == pytest.approx([1 + 0.5 + 0.3 + 0.6]), "no group has its answer before the others"


@settings(max_examples=6, deadline=None)
@given(st.integers(2, 6), st.integers(1, 8), st.floats(0.0, 0.2), st.floats(0, 0.05), st.booleans())
def test_of_equal_groups_at_a_barrier_the_last_answer_is_waited_for(
    groups: int, period: int, way: float, link: float, hides: bool
) -> None:
    profile = known_profile(groups, 1, per_sample=0.1, exchange=way + 2 * link, link=link, nbytes=NBYTES)
    barrier = ExchangePattern(period, NBYTES, NBYTES, barrier=True, delay=period if hides else 0)
    found = period * step(profile.predict(groups, exchanging=barrier))
    if hides:
        assert max(0.1 * period, groups * link) * (1 - 1e-9) <= found
        assert found <= max(0.1 * period, way + 2 * groups * link) * (1 + 1e-9)
    else:
        assert found == pytest.approx(0.1 * period + way + 2 * groups * link)


def test_at_a_barrier_groups_share_the_link_in_both_directions() -> None:
    profile = known(exchange=0.04, link=0.02)
    for push, pull in ((0.25, 1.0), (1.0, 0.25), (1.0, 1.0)):
        pattern = ExchangePattern(1, round(push * NBYTES), round(pull * NBYTES), barrier=True)
        assert step(profile.predict(4, exchanging=pattern)) == pytest.approx(0.1 + 0.02 * 4 * (push + pull))


@pytest.mark.parametrize(("exchange", "expected"), [(0.05, 0.1), (0.3, 0.3)])
def test_beside_a_step_an_exchange_costs_what_exceeds_it(exchange: float, expected: float) -> None:
    overlap = ExchangePattern.of("async_sgd", overlap=True, nbytes=NBYTES)
    assert step(known(exchange=exchange).predict(4, exchanging=overlap)) == pytest.approx(expected)


def test_a_link_that_is_always_busy_is_so_beside_the_computation_too() -> None:
    overlap = ExchangePattern.of("async_sgd", overlap=True, nbytes=NBYTES)
    profile = known(exchange=0.1, link=0.05)
    pushes = profile.predict(4, exchanging=replace(overlap, pull=NBYTES // 1000))
    assert pushes.seconds_per_update.value == pytest.approx(0.05, rel=0.01)
    assert pushes.bottleneck == "link"
    # As many bytes come back: of n groups that do nothing else each way of a link is busy for n / (n + 1) of the time.
    both = profile.predict(4, exchanging=overlap)
    assert both.seconds_per_update.value == pytest.approx(0.05 * 5 / 4, rel=0.02)


def test_fewer_bytes_one_way_leave_the_other_way_as_it_is() -> None:
    profile = known(exchange=0.04, link=0.02)
    for push, pull, expected in ((1.0, 1.0, 0.04), (0.25, 1.0, 0.025), (0.5, 0.5, 0.02)):
        pattern = ExchangePattern(10_000, round(push * NBYTES), round(pull * NBYTES))  # so seldom that none meet
        assert 10_000 * (step(profile.predict(4, exchanging=pattern)) - 0.1) == pytest.approx(expected, rel=0.01)


def test_gossip_waits_for_a_peer_and_for_no_server() -> None:
    profile = known(exchange=0.3, serve=0.2, link=0.02).scaled(bandwidth=NBYTES / 0.02, latency=0.005)
    read, put = (
        profile.predict(4, exchanging=ExchangePattern.of(method_named(name), nbytes=NBYTES))
        for name in ("pull_gossip", "push_gossip")
    )
    assert step(read) == pytest.approx(0.1 + 0.75 * (0.01 + 0.02))
    assert step(put) == pytest.approx(0.1)


# --- Distributions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4, 16])
def test_sums_of_scattered_times_have_the_largest_of_several_that_they_should(count: int) -> None:
    random = np.random.default_rng(0)
    sums = random.standard_exponential((20_000, 4, count)).sum(axis=2)
    ones = np.ones((1, 4))
    values = quantiles_of_sum(count * ones, count * ones, 64)
    mean, variance = slowest(values, np.ones(4, int))
    assert mean[0] == pytest.approx(sums.max(axis=1).mean(), rel=0.01)
    assert variance[0] == pytest.approx(sums.max(axis=1).var(), rel=0.1)


def test_quantiles_of_the_slowest_have_its_mean() -> None:
    values = np.sort(np.random.default_rng(0).standard_exponential((3, 2, 64)), axis=2)
    counts = np.array([1, 3])
    found = quantiles_of_slowest(values, counts)
    assert (np.diff(found, axis=1) > -1e-9).all()
    np.testing.assert_allclose(found.mean(axis=1), slowest(values, counts)[0])


# --- From one group alone ---------------------------------------------------------------------------------------------

LENET = 1_720_000
"""Bytes of LeNet with 430,000 weights."""


def synchronous(bandwidth: float, latency: float = 1e-4, compute: float = 0.1, **known: Any) -> Profile:
    """Four hosts that train in one group, over links of so many bytes a second."""
    own = ((compute,) * 12,) * 4
    ring = 2 * 3 * (LENET / 4 / bandwidth + latency)
    return Profile.fit(
        [
            Measured(
                ranks=(0, 1, 2, 3),
                samples=((64,) * 12,) * 4,
                own=own,
                steps=(compute + ring,) * 12,
                nbytes=LENET,
                round_trip=2 * latency,
                **known,
            )
        ]
    )


def test_over_slow_links_the_all_reduce_is_the_bottleneck_and_exchanging_seldom_is_faster() -> None:
    profile = synchronous(bandwidth=12.5e6)  # 100 Mbit
    before = profile.predict(1)
    assert before.seconds_per_update.value == pytest.approx(0.1 + 1.5 * LENET / 12.5e6 + 6e-4)
    assert (before.bottleneck, profile.predict(1, exchanging=ExchangePattern()).bottleneck) == ("allreduce",) * 2
    every = profile.predict(4, exchanging=ExchangePattern.of("async_sgd", nbytes=LENET))
    assert every.bottleneck == "link"  # the server's has to carry four pushes for each step
    # 0.1376 s each way and 0.1 s elsewhere: three groups have 1.246 messages on either way (mean value analysis).
    assert every.samples_per_second.value == pytest.approx(64 * 4 / (0.1 + 2 * 0.1376 * 2.246), rel=0.02)
    seldom = profile.predict(4, exchanging=ExchangePattern.of("elastic_averaging:period=8", nbytes=LENET))
    # In eight steps groups meet less: three have 0.458 messages on either way.
    assert seldom.samples_per_second.value == pytest.approx(64 * 32 / (0.8 + 2 * 0.1376 * 1.458), rel=0.02)
    assert seldom.samples_per_second.value > 2 * before.samples_per_second.value


def test_over_fast_links_nothing_is_to_be_gained() -> None:
    profile = synchronous(bandwidth=1.25e9)
    before = profile.predict(1)
    assert before.bottleneck == "compute"
    for groups in (2, 4):
        for method in ("async_sgd", "elastic_averaging:period=8", "local_sgd:period=8", "diloco:period=16"):
            found = profile.predict(groups, exchanging=ExchangePattern.of(method, nbytes=LENET))
            assert found.samples_per_second.value < 1.05 * before.samples_per_second.value
            assert found.bottleneck == "compute"


def test_a_forecast_from_the_all_reduce_has_a_wider_interval() -> None:
    slow = synchronous(bandwidth=12.5e6)
    exchanging = ExchangePattern.of("async_sgd", nbytes=LENET)
    alone, four = slow.predict(1).samples_per_second, slow.predict(4, exchanging=exchanging).samples_per_second
    assert alone.high / alone.low == pytest.approx(1)  # nothing scattered
    assert 1.5 < four.high / four.low < 3


def test_what_a_step_takes_beside_computation_and_messages_is_no_cost_of_bytes() -> None:
    own, beside, bytes_, round_trip = 0.1, 0.05, 0.02, 0.001
    step = own + beside + bytes_ + 6 * round_trip / 2  # four ranks: six messages
    measured = Measured(
        ranks=tuple(range(4)),
        samples=((8.0,) * 9,) * 4,
        own=((own,) * 9,) * 4,
        steps=(step,) * 9,
        nbytes=4000,
        round_trip=round_trip,
        shapes=((1000,),),
    )

    def seconds(all_reduce: str, reduce_per_byte: float, groups: int = 1) -> float:
        profile = Profile.fit([replace(measured, reduce_per_byte=reduce_per_byte)])
        exchanging = ExchangePattern.of("async_sgd", nbytes=4000) if groups > 1 else None
        return 4 * 8.0 / profile.predict(groups, all_reduce=all_reduce, exchanging=exchanging).samples_per_second.value

    per_byte = bytes_ / 4000
    assert seconds("fp32", per_byte) == pytest.approx(step), "the run's own setting is predicted as it was measured"
    assert seconds("bf16", per_byte) == pytest.approx(step - bytes_ / 2)
    assert seconds("bf16", 0.0) == pytest.approx(step - (beside + bytes_) / 2), "by itself a step cannot tell"
    assert seconds("fp32", 10 * per_byte) == pytest.approx(step), "and never more than the step had"
    alone = seconds("fp32", per_byte, groups=4)
    assert own + beside < alone < own + beside + 3 * bytes_, "each group has it in its own steps, too"
    hidden = replace(measured, steps=(own,) * 9, reduce_per_byte=per_byte)
    exchanging = ExchangePattern.of("async_sgd", nbytes=4000)
    rate = Profile.fit([hidden]).predict(4, exchanging=exchanging).samples_per_second.value
    assert 4 * 8.0 / rate > own + bytes_, "an exchange does not hide behind a backward pass as that all-reduce did"


def test_a_round_trip_tells_hops_from_bytes_and_the_optimizers_step_is_the_servers() -> None:
    profile = synchronous(bandwidth=12.5e6, latency=0.02, serve=0.004)
    found = profile.predict(4, exchanging=ExchangePattern.of("elastic_averaging:period=100", nbytes=LENET))
    assert found.seconds_per_update.value * 4 == pytest.approx(
        0.1 + (0.04 + 2 * LENET / 12.5e6 + 0.004) / 100,
        rel=2e-3,  # groups hardly meet
    )
    assert found.parts["serve"] == pytest.approx(0.004 / 100)


def test_where_no_bytes_are_known_the_exchange_counts_as_nothing() -> None:
    own = ((0.1,) * 5,) * 2
    profile = Profile.fit([Measured((0, 1), ((8,) * 5,) * 2, own, (0.2,) * 5)])
    assert profile.predict(2).seconds_per_update.value == pytest.approx(0.05)


# --- The simulator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "links", "way", "wire", "named"),
    [
        ("nearly equal", "slow", 4, "fp32", "link"),
        ("nearly equal", "middling", 7, "int8", "compute"),
        ("one slow", "slow", 2, "int8", "link"),
        ("one slow", "middling", 8, "fp32", "compute"),
    ],
)
def test_ways_of_exchanging_that_were_not_measured_are_predicted_to_ten_per_cent(
    devices: str, links: str, way: int, wire: str, named: str
) -> None:
    cell = Cell(devices, links, WAYS[way]._replace(pushes=15), wire, groups=4)
    found = cell.predicted()
    assert found.samples_per_second.value == pytest.approx(cell.rate(), rel=0.1)
    assert found.bottleneck == named


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_what_members_get_of_their_leader_is_predicted(wire: Any) -> None:
    cell = Cell("nearly equal", "slow", WAYS[4]._replace(pushes=15), wire, groups=2)
    assert cell.predicted().samples_per_second.value == pytest.approx(cell.rate(), rel=0.02)
