"""Groups on the server's node cross no link, and neither do the messages of a group that is on one node."""

from __future__ import annotations

import heapq
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import run_nodes

from lightning_omni.errors import ConfigurationError
from lightning_omni.tuning.model import constants
from lightning_omni.tuning.model.cost_model import ExchangePattern, sites_of
from lightning_omni.tuning.model.measurements import Measured
from lightning_omni.tuning.model.profile import Profile
from lightning_omni.tuning.model.queueing import residence_on_links

NBYTES = 4_000_000
LINK = 40e6
"""Bytes per second: the weights cross it in a step's time."""
STEP, BATCH = 0.1, 8
DRAWS = np.random.default_rng(0)


def one_group(ranks: int = 4, scatter: float = 0.0, **known: Any) -> Measured:
    """So many ranks in one group, over links on which the all-reduce of the gradient takes its bytes' time."""
    own = DRAWS.gamma(1 / scatter**2, scatter**2, (ranks, 200)) if scatter else np.ones((ranks, 12))
    own *= STEP / own.mean(axis=1, keepdims=True)
    count = own.shape[1]
    return Measured(
        ranks=tuple(range(ranks)),
        samples=((BATCH,) * count,) * ranks,
        own=tuple(map(tuple, own.tolist())),
        steps=tuple((own.max(axis=0) + 2 * (ranks - 1) / ranks * NBYTES / LINK).tolist()),
        nbytes=NBYTES,
        round_trip=1e-6,
        **known,
    )


def rate(measured: Measured, groups: int, method: str, wire: str = "fp32") -> float:
    exchanging = ExchangePattern.of(method, wire, nbytes=NBYTES)
    return Profile.fit([measured]).predict(groups, exchanging=exchanging).samples_per_second.value


HOSTS: dict[str, Any] = {"nodes": (0, 1, 2, 3), "server_node": 0}


def test_the_group_on_the_servers_node_trains_at_its_own_pace_and_the_others_share_the_link() -> None:
    # A group that arrives on either way of the link finds what one less would have there (mean value analysis):
    # 1/3 of one group, 8/11 of two. Three take 19/11 of a step each way, and four 106/49.
    every = rate(one_group(**HOSTS), 4, "async_sgd")
    assert every == pytest.approx(BATCH / STEP * (1 + 3 / (1 + 2 * 19 / 11)), rel=0.01)
    assert rate(one_group(), 4, "async_sgd") == pytest.approx(BATCH / STEP * 4 / (1 + 2 * 106 / 49), rel=0.01)


def test_where_each_node_has_a_server_or_the_server_is_elsewhere_all_groups_cross_links() -> None:
    apart = one_group(nodes=(0, 1, 2, 3))
    assert rate(apart, 4, "async_sgd") == rate(one_group(), 4, "async_sgd")
    spread = one_group(servers=4, per_node=True)
    assert rate(replace(spread, **HOSTS), 4, "async_sgd") == rate(spread, 4, "async_sgd")


@pytest.mark.parametrize("hosts", [{}, HOSTS | {"node_per_byte": 1e-12}], ids=["one node", "the server's node"])
def test_exchanges_of_devices_are_forecast_by_copies_and_not_by_links_of_their_all_reduces(hosts: Any) -> None:
    copies = STEP / (2 * NBYTES)  # both ways together take a step's time
    measured = one_group(copy_per_byte=copies, host_per_byte=1e-15, **hosts)
    assert rate(measured, 4, "async_sgd") == pytest.approx(4 * BATCH / (2 * STEP), rel=0.01)


def test_on_another_network_exchanges_of_devices_are_still_copied() -> None:
    copies = STEP / (2 * NBYTES)
    pattern = ExchangePattern.of("async_sgd", nbytes=NBYTES)
    timed: list[dict[str, Any]] = [{"host_per_byte": 1 / LINK}, {}]
    for known in timed:
        faster = Profile.fit([one_group(copy_per_byte=copies, **known)]).scaled(bandwidth=1e15)
        found = faster.predict(4, exchanging=pattern).samples_per_second.value
        assert found == pytest.approx(4 * BATCH / (2 * STEP), rel=0.01)


def test_exchanges_of_devices_share_the_sockets_of_their_hosts() -> None:
    measured = one_group(copy_per_byte=1e-15, host_per_byte=1 / LINK)
    assert rate(measured, 4, "async_sgd") == pytest.approx(rate(one_group(), 4, "async_sgd"), rel=0.01)
    assert rate(replace(measured, host_per_byte=2 / LINK), 4, "async_sgd") < 0.7 * rate(measured, 4, "async_sgd")


# --- Beside a queue that is played ------------------------------------------------------------------------------------


def played(scatter: float, serve: float, link: float, near: int = 1, groups: int = 4) -> float:
    """Samples per second of groups that queue for a server; all but those near it cross a link that is never busy."""
    random, free, made, until = np.random.default_rng(1), 0.0, 0, 400.0

    def step(group: int) -> float:
        return float(STEP * random.gamma(1 / scatter**2, scatter**2)) + 2 * link * (group >= near)

    events = [(step(group), group) for group in range(groups)]
    heapq.heapify(events)
    while events[0][0] < until:
        now, group = heapq.heappop(events)
        free = max(free, now) + serve
        made += 1
        heapq.heappush(events, (free + step(group), group))
    return made * BATCH / until


@pytest.mark.parametrize("serve", [0.05, 0.4], ids=["a quick server", "a slow server"])
def test_for_a_server_that_is_busier_than_its_link_all_groups_queue(serve: float) -> None:
    measured = one_group(scatter=0.3, serve=serve * STEP, **HOSTS)
    pattern = ExchangePattern(1, NBYTES // 100, NBYTES // 100)
    found = Profile.fit([measured]).predict(4, exchanging=pattern).samples_per_second.value
    assert found == pytest.approx(played(0.3, serve * STEP, 0.01 * STEP), rel=0.06)


# --- Links that messages share ----------------------------------------------------------------------------------------

REAL: dict[str, Any] = {**HOSTS, "hands_on": True}


def test_on_a_link_that_is_shared_all_answers_of_a_barrier_are_there_when_the_last_one_is() -> None:
    for here, links in ((REAL, 3), (REAL | {"server_node": None}, 4)):
        found = rate(one_group(**here), 4, "local_sgd:period=8")
        assert 8 * 4 * BATCH / found == pytest.approx(8 * STEP + 2 * links * NBYTES / LINK, rel=0.01)


class FairLink:
    """Carries all that is on it at once, each as fast as the others."""

    def __init__(self) -> None:
        self.left: dict[int, float] = {}

    def until_next(self) -> float:
        return min(self.left.values(), default=np.inf) * max(len(self.left), 1)

    def go_on(self, seconds: float) -> list[int]:
        for message in self.left:
            self.left[message] -= seconds / len(self.left)
        over = [message for message, left in self.left.items() if left < 1e-12]
        for message in over:
            del self.left[message]
        return over


def shared(scatter: float, push: float, pull: float, far: int = 3, near: int = 1) -> float:
    """Samples per second of groups whose pushes, and whose answers, share a link each."""
    random, ways = np.random.default_rng(1), (FairLink(), FairLink())

    def step() -> float:
        return float(STEP * random.gamma(1 / scatter**2, scatter**2))

    computes = {group: step() for group in range(far)}
    now, made, until = 0.0, 0, 400.0
    while now < until:
        passed = min(*computes.values(), *(way.until_next() for way in ways), np.inf)
        now += passed
        answered, pushed = ways[1].go_on(passed), ways[0].go_on(passed)
        computes = {group: left - passed for group, left in computes.items()}
        made += len(answered)
        for group in [group for group, left in computes.items() if left < 1e-12]:
            del computes[group]
            ways[0].left[group] = push
        ways[1].left.update(dict.fromkeys(pushed, pull))
        computes |= {group: step() for group in answered}
    return BATCH * (made / until + near / STEP)


@pytest.mark.parametrize(("push", "pull"), [(0.2, 0.2), (0.25, 0.5), (1.0, 1.0)])
@pytest.mark.parametrize("scatter", [0.2, 1.0], ids=["steady", "random"])
def test_groups_that_share_both_directions_of_a_link_are_predicted(push: float, pull: float, scatter: float) -> None:
    pattern = ExchangePattern(1, round(push * NBYTES), round(pull * NBYTES))
    found = Profile.fit([one_group(scatter=scatter, **REAL)]).predict(4, exchanging=pattern).samples_per_second.value
    assert found == pytest.approx(shared(scatter, push * STEP, pull * STEP), rel=0.05)


@pytest.mark.parametrize("load", [0.3, 1.0, 3.0])
def test_of_many_groups_the_queue_is_nearly_what_it_is_one_group_at_a_time(
    load: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    demand = np.zeros((1, 33, 2))
    demand[:, :32] = load / 32
    pace = []
    for states in (10_000, 1):
        monkeypatch.setattr(constants, "QUEUE_STATES", states)
        pace.append(1 + residence_on_links(np.ones((1, 33)), demand)[0, 0])
    assert pace[0] == pytest.approx(pace[1], rel=0.03)
    assert pace[0] >= max(1.0, 32 * load / 32)


def test_the_group_on_the_servers_node_shares_its_link_if_it_has_members_elsewhere() -> None:
    """Rank 0 sends its gradient to rank 1, and hands answers on to it, over the link that the others push through."""
    seconds = NBYTES / LINK  # of the gradient in an all-reduce of two ranks, and of each other message
    alone = [2 * BATCH / (STEP + 2 * seconds), 2 * BATCH / (STEP + 4 * seconds)]
    found = rate(one_group(**REAL), 2, "async_sgd")
    assert 0.7 * sum(alone) < found < 0.95 * sum(alone)
    apart = rate(one_group(**REAL | {"nodes": (0, 0, 1, 1), "node_per_byte": 1e-12}), 2, "async_sgd")
    # Where its members are together it crosses no link at all, nor does the other's all-reduce.
    assert apart == pytest.approx(2 * BATCH * (1 / STEP + 1 / (STEP + 2 * seconds)), rel=0.01)


def test_with_a_server_on_each_node_all_links_carry_as_much_at_once() -> None:
    spread = one_group(**REAL | {"server_node": None}, servers=4, per_node=True)
    # Three quarters of the weights leave each node, and three quarters come to it; then answers do.
    found = rate(spread, 4, "local_sgd:period=8")
    assert 8 * 4 * BATCH / found == pytest.approx(8 * STEP + 2 * 0.75 * NBYTES / LINK, rel=0.01)
    seldom = rate(spread, 4, "elastic_averaging:period=64")  # no two at once
    assert 64 * 4 * BATCH / seldom == pytest.approx(64 * STEP + 2 * 0.75 * NBYTES / LINK, rel=0.01)


def test_several_servers_on_one_node_share_its_link() -> None:
    one, several = (rate(one_group(**REAL, servers=servers), 4, "async_sgd") for servers in (1, 4))
    assert several == pytest.approx(one, rel=0.01)


def test_a_server_that_is_busy_beside_a_busy_link_slows_the_groups_beyond_it_alone() -> None:
    quick, slow = (rate(one_group(**REAL, serve=part * STEP), 4, "async_sgd") for part in (1e-6, 0.2))
    alone = BATCH / STEP - BATCH / (1.2 * STEP)  # what the group on the server's node loses
    assert 0.9 * alone < quick - slow < 2.5 * alone


# --- Several ranks on a node ------------------------------------------------------------------------------------------

NODES: dict[str, Any] = {
    "nodes": (0, 0, 1, 1),
    "server_node": 0,
    "node_round_trip": 2e-5,
    "node_per_byte": 1e-9,
}


def test_a_group_that_is_on_one_node_averages_its_gradients_at_the_nodes_pace() -> None:
    apart, together = one_group(), one_group(**NODES)
    seldom = "elastic_averaging:period=64"
    assert rate(together, 1, seldom) == rate(apart, 1, seldom)
    within = 2 * (NBYTES / 2 * 1e-9 + 1e-5)
    assert rate(together, 2, seldom) == pytest.approx(4 * BATCH / (STEP + within + 2 * 0.1 / 64 / 2), rel=0.02)
    assert rate(together, 2, seldom) > 1.5 * rate(apart, 2, seldom)


def test_a_format_with_half_the_bytes_halves_them_within_a_node_too() -> None:
    slow = one_group(**NODES | {"node_per_byte": 1e-8}, shapes=((1000, 1000),))
    pattern = ExchangePattern.of("elastic_averaging:period=1000", nbytes=NBYTES)
    seconds = [
        4 * BATCH / Profile.fit([slow]).predict(2, exchanging=pattern, all_reduce=each).samples_per_second.value
        for each in ("fp32", "bf16")
    ]
    assert seconds[0] - seconds[1] == pytest.approx(NBYTES * 1e-8 / 2, rel=0.01)


def test_an_all_reduce_within_nodes_is_the_bottleneck_where_it_takes_longest() -> None:
    slow = Profile.fit([one_group(**NODES | {"node_per_byte": 1e-6})])
    seldom = ExchangePattern.of("elastic_averaging:period=64", nbytes=NBYTES)
    assert slow.predict(2, exchanging=seldom).bottleneck == "allreduce"
    assert slow.predict(4, exchanging=seldom).bottleneck == "compute"


def test_more_ranks_are_on_more_nodes_like_those_that_were_measured() -> None:
    larger = Profile.fit([one_group(**NODES)]).scaled(ranks=8)
    seldom = ExchangePattern.of("elastic_averaging:period=1000", nbytes=NBYTES)
    found = larger.predict(4, exchanging=seldom).samples_per_second.value
    assert found == pytest.approx(8 * BATCH / (STEP + NBYTES * 1e-9), rel=0.02)


def test_nodes_are_of_all_ranks_and_survive_json() -> None:
    measured = one_group(**NODES)
    assert Measured.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured
    with pytest.raises(ConfigurationError, match="nodes: of 2 ranks"):
        one_group(nodes=(0, 1))


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_on_two_nodes_of_two_ranks_tells_where_ranks_are_and_what_messages_take_there() -> None:
    fit: dict[str, Any] = {
        "devices": 2,
        "data": {"samples": 4096},
        "trainer": {"max_epochs": 1, "num_nodes": 2, "num_sanity_val_steps": 0},
        "tuner": {"retune_every": None},
        "dump": True,
    }
    ended = run_nodes("omni_tuner.py", {"fits": [fit]})
    measured = [Measured.from_dict(each["measured"]) for each in ended[0].results[0][0]["dump"]]
    assert {(each.nodes, each.server_node) for each in measured} == {((0, 0, 1, 1), 0)}
    assert all(0 < each.node_per_byte < 1e-6 and 0 < each.node_round_trip < 1 for each in measured)


# --- Sites ------------------------------------------------------------------------------------------------------------


@given(
    ranks=st.lists(st.integers(1, 3), min_size=2, max_size=8),
    slow=st.sets(st.integers(0, 6)),
    factor=st.floats(3.1, 1000.0),
)
def test_nodes_that_follow_each_other_are_at_one_site_unless_the_link_between_them_is_slow(
    ranks: list[int], slow: set[int], factor: float
) -> None:
    nodes = tuple(2 * node for node, count in enumerate(ranks) for _ in range(count))  # of others no rank is alive
    links = [1e-9 * (factor if number in slow else 1.0 + number / 4) for number in range(len(ranks) - 1)]
    sites, inside = sites_of(nodes, links, apart=3.0)
    if len(inside) in (0, len(links)):
        assert (sites, inside) == (nodes, [])
        return
    site = dict(zip(nodes, sites, strict=True))
    assert site[0] == 0
    steps = [site[2 * number + 2] - site[2 * number] for number in range(len(links))]
    assert steps == [0 if number in inside else 1 for number in range(len(links))]
    fastest = min(links)
    assert inside == [number for number, seconds in enumerate(links) if seconds <= 3 * fastest]


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_whose_nodes_are_at_two_sites_is_forecast_with_groups_within_sites() -> None:
    fit: dict[str, Any] = {
        "devices": 1,
        "data": {"samples": 4096},
        "seconds": {"0": 2e-3},
        "per_byte": 1e-6,
        "slow_link": [1, 1e-6],  # between the second node and the third
        "trainer": {"max_epochs": 1, "num_nodes": 3, "num_sanity_val_steps": 0},
        "tuner": {"retune_every": None},
        "dump": True,
    }
    ended = run_nodes("omni_tuner.py", {"fits": [fit]}, nodes=3)
    measured = [Measured.from_dict(each["measured"]) for each in ended[0].results[0][0]["dump"]]
    assert {(each.nodes, each.server_node) for each in measured} == {((0, 0, 1), 0)}
    assert all(0 < each.node_per_byte < 1e-7 and 0 < each.node_round_trip < 1 for each in measured)
