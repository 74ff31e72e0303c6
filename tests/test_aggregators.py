"""Aggregators between groups and the server: nothing is lost or counted twice, whatever arrives first or dies."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from ensemble import KEY, NONCE, Make
from hypothesis import given, settings
from runs import Running
from tree import Tree, trained

from lightning_omni.cli.serve import serve
from lightning_omni.errors import ConfigurationError, ConnectionLost, Refused
from lightning_omni.methods import METHODS, HardSync, Method, SoftSync, method_named
from lightning_omni.methods.totals import Total
from lightning_omni.protocol import ServerCore, handshake
from lightning_omni.protocol import messages as m
from lightning_omni.protocol import shard_messages as sm
from lightning_omni.protocol.aggregators import _nearness
from lightning_omni.protocol.in_memory import InMemory
from lightning_omni.protocol.requests import ByAggregator
from lightning_omni.protocol.transport import Data
from lightning_omni.protocol.wire_format import RAW, WireFormat
from lightning_omni.protocol.wire_formats import wire_of

OPTIMIZER: Make = lambda parameters: torch.optim.SGD(parameters, lr=0.25, momentum=0.5)  # noqa: E731
GRADIENTS: tuple[Method, ...] = (
    HardSync(),
    SoftSync(n=1, modulation="average"),
    SoftSync(n=2, modulation="none"),
)
ADDED: tuple[Method, ...] = (
    *GRADIENTS,
    *map(method_named, ("local_sgd:period=2", "diloco:period=2", "local_sgd:period=4,fragments=2")),
)


def tree_of(aggregators: int, groups: int, method: Method | str, wire: WireFormat = RAW, seed: int = 0) -> Tree:
    chosen = method_named(method) if isinstance(method, str) else method
    return Tree(aggregators, groups, chosen, OPTIMIZER, wire, seed)


def weights(tree: Tree) -> list[torch.Tensor]:
    return [weight.clone() for weight in tree.cores[0].shards[0].master.weights()]


def settle(tree: Tree) -> None:
    """All that is on its way arrives, and groups go on as far as they can without a gradient."""
    tree.arrive()
    while sum(group.go_on() for group in tree.groups):
        tree.arrive()


def check_conserved(tree: Tree, exactly: bool) -> None:
    """The server side has got each push that was answered once, and in sum what they were."""
    totals: defaultdict[int | None, Total] = defaultdict(Total)
    for group in tree.groups:
        answered = tree.received[group.rank]
        if group.rank not in tree.dead:
            assert answered == group.core.sequence(0) == len(group.pushed), "a push of a group that is there"
        for fragment, tensors in group.pushed[:answered]:
            totals[fragment].add(tensors)
    for fragment, total in totals.items():
        for here, there in zip(total.scaled(1.0), tree.total[fragment].scaled(1.0), strict=True):
            assert here is not None
            assert there is not None
            assert torch.equal(here, there) if exactly else torch.allclose(here, there, atol=1e-4)


# --- Conservation ----------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.integers(2, 6),
    st.sampled_from(ADDED),
    st.sampled_from([0.1, 0.7, 1.0]),
)
@settings(max_examples=8, deadline=None)
def test_sums_are_bitwise_what_was_pushed_where_numbers_allow_it(
    seed: int, aggregators: int, groups: int, method: Method, eagerness: float
) -> None:
    tree = tree_of(aggregators, groups, method, seed=seed)
    trained(tree, 8 * groups, eagerness, whole=True)
    assert tree.sums
    assert not any(group.refused for group in tree.groups)
    check_conserved(tree, exactly=method in GRADIENTS)


@given(
    st.integers(0, 10**6),
    st.sampled_from(ADDED),
    st.lists(
        st.one_of(
            st.tuples(st.just("rank"), st.integers(1, 5), st.integers(0, 120)),
            st.tuples(st.just("aggregator"), st.integers(1, 2), st.integers(0, 120)),
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda death: death[:2],
    ),
)
@settings(max_examples=15, deadline=None)
def test_nothing_is_lost_or_counted_twice_whichever_group_or_aggregator_dies_in_mid_exchange(
    seed: int, method: Method, deaths: list[tuple[str, int, int]]
) -> None:
    tree = tree_of(2, 6, method, seed=seed)
    trained(tree, 60, 0.6, deaths, whole=True)
    live = [group for group in tree.groups if group.rank not in tree.dead]
    assert all(group.is_computing for group in live), "a group waits for ever"
    check_conserved(tree, exactly=method in GRADIENTS)


@given(st.integers(0, 10**6), st.sampled_from(["int8", "bf16", "topk:0.2", {"push": "int8", "pull": "bf16"}]))
@settings(max_examples=4, deadline=None)
def test_what_is_added_up_are_the_decoded_values_in_any_wire_format(seed: int, wire: Any) -> None:
    tree = tree_of(2, 4, "hardsync", wire_of(wire), seed=seed)
    trained(tree, 32)
    assert len(tree.sums) == 16
    check_conserved(tree, exactly=False)


def test_a_binary_tree_trains_as_the_server_alone_does() -> None:
    for method in ADDED:
        if isinstance(method, SoftSync):  # which has no order of its own
            continue
        alone, tree = tree_of(0, 4, method, seed=1), tree_of(2, 4, method, seed=1)
        for run in (alone, tree):
            for _ in range(8):
                for group in run.groups:
                    group.compute()
                settle(run)
        assert all(
            torch.allclose(here, there, atol=1e-5) for here, there in zip(weights(alone), weights(tree), strict=True)
        )
        assert alone.cores[0].clock == tree.cores[0].clock > 0
        assert tree.up == alone.up / 2
        assert tree.down == alone.down / 2
        assert {len(each.parts) for each in tree.sums} == {2}


def test_staleness_is_counted_for_each_child() -> None:
    tree = tree_of(1, 3, SoftSync(n=1, modulation="average"))
    for group in tree.groups:
        group.compute()
    tree.arrive()
    assert all(group.go_on() for group in tree.groups)
    assert [heard.staleness for group in tree.groups for heard in group.heard] == [0, 0, 0]
    assert len(tree.sums[0].parts) == 1
    status = tree.cores[0].status(0.0)
    assert [group.updates for group in status.groups] == [1, 1, 1]


# --- No group waits in vain ------------------------------------------------------------------------------------------


def test_where_no_group_waits_for_others_what_comes_while_a_sum_travels_is_in_the_next() -> None:
    tree = tree_of(1, 4, SoftSync(n=1, modulation="average"))
    for group in tree.groups:
        group.compute()
        while tree.queues["data", 1, group.rank]:
            tree._arrive(("data", 1, group.rank))
    assert [len(message.parts) for message, _ in tree.queues["sum", 1]] == [1]
    tree.arrive()
    assert [len(each.parts) for each in tree.sums] == [1, 3]
    check_conserved_after(tree)


def check_conserved_after(tree: Tree) -> None:
    settle(tree)
    check_conserved(tree, exactly=False)


def test_a_group_that_waits_for_others_is_not_waited_for() -> None:
    tree = tree_of(1, 3, "hardsync")
    tree.groups[0].compute()
    tree.groups[1].compute()
    tree.arrive()
    assert not tree.sums
    tree.queues["control", 2].append(m.Contribute(number=0, what="x"))
    tree.arrive()
    assert [len(each.parts) for each in tree.sums] == [2]
    settle(tree)
    for rank in (0, 1):
        tree.queues["control", rank].append(m.Contribute(number=0, what="x"))
    tree.arrive()
    for group in tree.groups:  # all go on
        group.compute()
    check_conserved_after(tree)
    assert tree.received == {0: 2, 1: 2, 2: 1}
    assert len(tree.sums[-1].parts) == 3


def test_a_group_that_pushes_to_the_server_itself_is_not_waited_for() -> None:
    tree = tree_of(1, 3, "hardsync")
    tree.groups[2].aggregator = 0  # its connection has ended, and no other process knows
    for _ in range(3):
        for group in tree.groups:
            group.compute()
        settle(tree)
        assert all(group.is_computing for group in tree.groups)
    assert {len(each.parts) for each in tree.sums} == {2}
    check_conserved(tree, exactly=False)


def test_a_push_that_is_not_finite_is_refused_by_the_server_and_costs_its_siblings_nothing() -> None:
    tree = tree_of(1, 3, "hardsync")
    poisoned = [torch.full((), torch.nan).expand(each.shape) for each in tree.groups[0].whole_numbers()]
    for group in tree.groups:
        group.compute(poisoned if group.rank == 1 else None)
    for _ in range(4):
        tree.arrive()
        for group in tree.groups:
            group.go_on()
    assert "not finite" in tree.groups[1].refused[0]
    assert [group.heard[-1].applied for group in tree.groups if group.heard][:1] == [False]
    assert tree.cores[0].status(0.0).refused == 1
    tree.groups[1].compute()
    tree.arrive()
    assert all(group.heard or group.go_on() for group in tree.groups)
    assert tree.cores[0].clock == 1
    assert tree.received == {0: 1, 1: 1, 2: 1}


def test_of_a_sum_that_comes_once_more_or_of_groups_that_are_gone_nothing_is_applied() -> None:
    tree = tree_of(1, 2, "hardsync")
    for group in tree.groups:
        group.compute()
    while not tree.queues["sum", 1]:
        assert tree.step()
    message, payload = tree.queues["sum", 1][0]
    tree.arrive()
    before = weights(tree)
    (refused,) = tree.cores[0].receive(m.DATA, b"a1", message, payload, 0.0)
    assert isinstance(refused.message, sm.SumRefused)
    assert "has counted" in refused.message.reason
    late = sm.SummedPush(0, type(message.parts[0].push)(**_fields(message.parts[0].push, incarnation=7)))
    (refused,) = tree.cores[0].receive(m.DATA, b"a1", type(message)(**_fields(message, parts=(late,))), payload, 0.0)
    assert isinstance(refused.message, sm.SumRefused)
    assert all(map(torch.equal, before, weights(tree)))


def _fields(message: Any, **changed: Any) -> dict[str, Any]:
    return {**{name: getattr(message, name) for name in message.__struct_fields__}, **changed}


# --- Who is let in ---------------------------------------------------------------------------------------------------


def test_sums_and_aggregators_of_strangers_are_refused() -> None:
    tree = tree_of(1, 2, "hardsync")
    root = tree.cores[0]
    for group in tree.groups:
        group.compute()
    while not tree.queues["sum", 1]:
        assert tree.step()
    message, payload = tree.queues["sum", 1][0]
    with pytest.raises(Refused, match="of no aggregator"):
        root.check_payload(b"d1", message)
    (refusal,) = root.receive(m.DATA, b"d1", message, payload, 0.0)
    assert isinstance(refusal.message, m.RefusedMessage)
    (challenge,) = root.receive(m.DATA, b"x", m.Attach(rank=-1, nonce=NONCE), b"", 0.0)
    assert isinstance(challenge.message, m.AttachChallenge)
    (refusal,) = root.receive(m.DATA, b"x", m.AttachProof(mac=bytes(32)), b"", 0.0)
    assert isinstance(refusal.message, m.RefusedMessage)


def say_to(core: ServerCore, message: m.Message, expect: type[Any]) -> Any:
    answer = core.receive(m.CONTROL, b"y", message, b"", 0.0)[0].message
    if isinstance(answer, m.RefusedMessage):
        raise Refused(answer.code, answer.reason)
    return answer


def test_what_cannot_be_added_up_for_is_told_why() -> None:
    hello = ServerCore(KEY, os.urandom, adds_up=True).shard_hello("memory://", NONCE)

    def joins(core: ServerCore, key: bytes = KEY, hello: sm.ShardHello = hello) -> None:
        handshake.join_as_shard(lambda message, expect: say_to(core, message, expect), key, hello)

    with pytest.raises(Refused, match="key does not match"):
        joins(ServerCore(KEY, os.urandom), bytes(32))
    with pytest.raises(Refused, match="leave out --record"):
        joins(ServerCore(KEY, os.urandom, record=lambda event: None))
    with pytest.raises(Refused, match="leave out --shards there, or --upstream here"):
        joins(ServerCore(KEY, os.urandom, shards=2))
    with pytest.raises(Refused, match="start it with --shards 3"):
        joins(ServerCore(KEY, os.urandom), hello=sm.ShardHello(**_fields(hello, shard=1, shards=3)))
    with pytest.raises(Refused, match="protocol version"):
        joins(ServerCore(KEY, os.urandom), hello=sm.ShardHello(**_fields(hello, version=1)))
    with pytest.raises(Refused, match="its --upstream"):
        joins(ServerCore(KEY, os.urandom, adds_up=True))
    rank = handshake.hello_of("run", 0, 1, tree_of(0, 1, "hardsync").groups[0].layout, NONCE)
    with pytest.raises(Refused, match="give the address of the server"):
        say_to(ServerCore(KEY, os.urandom, adds_up=True), rank, m.Challenge)
    transport = InMemory()
    server = transport.serve(ServerCore(KEY, bytes))
    with pytest.raises(ConfigurationError, match="--upstream"):
        transport.follow(ServerCore(KEY, os.urandom, adds_up=True), server.address)


@pytest.mark.parametrize("method", [SoftSync(), *(kind() for kind in METHODS.values() if kind not in map(type, ADDED))])
def test_methods_that_need_each_push_by_itself_are_refused_with_those_that_do_not(method: Method) -> None:
    with pytest.raises(AssertionError, match=r"(?s)method=.*needs each push by itself.*hardsync"):
        tree_of(1, 4, method)
    assert method.most_added(4) == 0


def test_an_aggregator_keeps_nothing_that_belongs_to_the_connection_of_a_rank_that_is_dead() -> None:
    tree = tree_of(1, 3, "hardsync")
    trained(tree, 6, 1.0)
    assert len(tree.cores[1].attached) == 3
    tree.lose(1)
    settle(tree)
    assert len(tree.cores[1].attached) == 2


def test_a_run_under_way_does_without_an_aggregator_that_is_of_no_use_to_it() -> None:
    tree = tree_of(0, 2, "async_sgd")
    tree._begin(1)
    for group in tree.groups:
        group.attach_aggregator()
    assert [group.aggregator for group in tree.groups] == [0, 0]


def test_ranks_push_to_the_nearest_aggregator_and_of_several_to_the_one_with_the_fewest() -> None:
    assert _nearness("10.1.2.3", "tcp://10.1.2.4:5") > _nearness("10.1.2.3", "tcp://10.2.2.3:5") > 0
    assert _nearness("localhost", "tcp://10.1.2.3:5") == _nearness("10.1.2.3", "tcp://[::1]:5") == 0
    assert [group.aggregator for group in tree_of(3, 6, "hardsync").groups] == [1, 2, 3, 1, 2, 3]


def test_groups_that_are_gone_count_at_no_aggregator() -> None:
    tree = tree_of(0, 5, "hardsync")
    tree._begin(1)
    tree._begin(2)
    for group in tree.groups[:4]:
        group.attach_aggregator()
    for rank in (1, 3):
        tree.lose(rank)
    settle(tree)
    tree.groups[4].attach_aggregator()
    assert [group.aggregator for group in tree.groups] == [1, 2, 1, 2, 2]


def test_a_rank_that_asks_when_its_aggregator_dies_is_told_of_none() -> None:
    tree = tree_of(0, 2, "hardsync")
    tree._begin(1)
    tree.queues["control", 0].append(m.AskAggregator())
    tree._arrive(("control", 0))
    assert not tree.queues["told", 0]
    tree.end(1, drops=True)
    assert tree.queues["told", 0].pop() == m.Aggregator(address="")


def test_a_silent_aggregator_is_given_up_and_the_run_goes_on() -> None:
    tree = tree_of(1, 2, "hardsync")
    root = tree.cores[0]
    for rank in range(2):
        root.receive(m.CONTROL, b"c%d" % rank, m.Heartbeat(sent=1.0), b"", 100.0)
    told = [out.message for out in root.tick(101.0)]
    assert told.count(m.PushDirectly()) == 2
    assert root.over == ""
    assert b"s1" not in root.peers


# --- A rank's connection ---------------------------------------------------------------------------------------------


class Scripted(Data):
    """A data connection whose answers are written down."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.said, self.is_closed = list(answers), [], False  # type: ignore[var-annotated]

    def send(self, message: m.Message, payload: Any = None, into: Any = None) -> None:
        self.said.append(message)
        self.moved += 0 if payload is None else payload.numel()
        if self.answers and isinstance(self.answers[0], ConnectionLost) and "now" in str(self.answers[0]):
            raise self.answers[0]

    def receive(self, expect: Any, into: Any = None) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer, into

    def close(self) -> None:
        self.is_closed = True


def test_a_push_that_an_aggregator_does_not_take_or_answer_goes_to_the_server_and_only_pushes_go_there() -> None:
    push = m.PushMessage(optimizer=0, read_at=0, present=(), hyperparameters=(), epoch=-1, trained=0, nbytes=4)
    seen: list[ConnectionLost] = []
    payload = torch.zeros(4, dtype=torch.uint8)
    for trouble, closes in (
        (Refused("directly", "it is not finite"), False),
        (ConnectionLost("it has ended"), True),
        (ConnectionLost("it has ended just now"), True),
    ):
        aggregator, server = Scripted("summed", trouble), Scripted("fetched", "applied", "again")
        data: Any = ByAggregator(server, aggregator, seen.append)
        assert data.exchange(push, m.Weights, payload)[0] == "summed"
        assert data.exchange(m.FetchMessage(optimizer=0), m.Weights)[0] == "fetched"
        assert data.exchange(push, m.Weights, payload)[0] == "applied"
        assert server.said == [m.FetchMessage(optimizer=0), push]
        assert aggregator.is_closed is closes
        assert data.moved >= 8
        if closes:
            assert data.exchange(push, m.Weights, payload)[0] == "again"
    assert len(seen) == 2
    with pytest.raises(Refused, match="memory"):
        ByAggregator(server, Scripted(Refused("memory", "memory")), seen.append).exchange(push, m.Weights, payload)


def test_options_that_are_of_no_use_to_an_aggregator_are_refused() -> None:
    for options, text in (
        ({"shards": 2}, "--shards"),
        ({"record": "record"}, "--record"),
        ({"http": 0}, "--http"),
        ({"once": True}, "--once"),
    ):
        with pytest.raises(ConfigurationError, match=f"{text} --upstream"):
            serve(upstream="tcp://127.0.0.1:5555", **options)


# --- In real processes -----------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_real_groups_train_with_aggregators_as_one_would_and_one_that_is_killed_costs_nothing() -> None:
    with Running("tree.py") as running:
        finished = running.wait(120)
        assert finished.code == 0, finished.output[-4000:]
        assert running.survivors == []
    assert sorted(finished.results) == [0, 1, 2, 3]
    lost = [result["cases"][1]["by_aggregator"][-1] for result in finished.results.values()].count(False)
    assert lost == 2, "the children of the one that was killed push to the server itself"
    for result in finished.results.values():
        soft, hard = result["cases"]
        assert all(soft["by_aggregator"])
        assert hard["by_aggregator"][:5] == [True] * 5
        assert torch.allclose(torch.tensor(hard["weights"]), torch.tensor(result["synchronous"]), atol=1e-4)
        assert soft["loss"] < 1.0
    assert "the aggregator" in finished.output or "the data connection broke" in finished.output
