"""Decoupled DiLoCo: what it is with the simplest settings, what late and dead groups do to it, and what it keeps."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from rounds import Cluster, zero
from test_oracles import assert_close, every_rule, orders, rounds, same, varied
from test_simulator import DATA, new_model, replayed, run
from torch.nn import Parameter

from lightning_omni.errors import ProtocolError
from lightning_omni.group.core import GroupCore, ServerRequest
from lightning_omni.methods import (
    AsyncDiLoCo,
    DecoupledDiLoCo,
    DiLoCo,
    Exchange,
    Fetch,
    Gradient,
    Master,
    Method,
    NextGradient,
    Pulled,
    Push,
    Receive,
    Replica,
    Reply,
)
from lightning_omni.server.event_log import Event
from lightning_omni.server.parameters.served_parameters import ServedParameters
from lightning_omni.simulator import Cluster as Devices
from lightning_omni.simulator import Computation, Failure, Jitter, Limits, Link, Slowdown
from lightning_omni.topology import Topology
from lightning_omni.wire import messages as m

WHOLE: dict[str, Any] = {"fragments": 1, "delay": 0, "grace": 0}
"""No fragments, no computing meanwhile, no window of grace."""

# --- With the simplest settings --------------------------------------------------------------------------------------


@every_rule
def test_a_quorum_of_all_without_fragments_is_diloco(make: Any) -> None:
    whole = Cluster(DecoupledDiLoCo(period=3, quorum=4, **WHOLE), 4, make=make)
    known = Cluster(DiLoCo(period=3), 4, make=make)
    for cluster in (whole, known):
        cluster.run(rounds(4, 12))
    assert whole.master.clock == known.master.clock == 4
    assert same(whole.everything(), known.everything())


@varied
@given(order=orders(3))
def test_a_quorum_of_one_without_a_window_is_asynchronous_diloco_without_delayed_momentum(order: list[int]) -> None:
    one = Cluster(DecoupledDiLoCo(period=2, quorum=1, **WHOLE), 3)
    known = Cluster(AsyncDiLoCo(period=2, buffer=1, dynamic_steps=False), 3)
    for cluster in (one, known):
        cluster.run(order)
    assert_close(one.everything(), known.everything())
    assert not one.waiting


@pytest.mark.parametrize("fragments", [2, 3])
def test_fragments_that_are_waited_for_are_merged_as_one_would_be(fragments: int) -> None:
    """With one step between two exchanges of anything, plain SGD and a whole outer step, averages are averages."""
    settings: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "quorum": 3, "delay": 0, "grace": 0}
    cluster = Cluster(DecoupledDiLoCo(period=fragments, fragments=fragments, **settings), 3, gradient=zero)
    for group, replica in enumerate(cluster.replicas):
        for weight, start in zip(replica.weights(), cluster.weights(), strict=True):
            weight.copy_(start + group)
        replica.memory["outer"] = cluster.weights()
    cluster.run(rounds(3, fragments))
    for group in range(3):
        assert_close(cluster.weights(group), cluster.weights())
    assert_close(cluster.weights(), [start + 1.0 for start in Cluster(DiLoCo(), 1).weights()])


# --- Who counts, and how much ----------------------------------------------------------------------------------------


def side_of(method: Method, groups: int, numel: int = 4) -> tuple[Master, Any]:
    master = Master({"w": Parameter(torch.zeros(numel, dtype=torch.float64))}, None)
    return master, method.server_side(master, range(groups))


def push(side: Any, group: int, change: float, read_at: int = 0, note: float = 1.0, **more: Any) -> list[Reply]:
    (weight,) = side.master.weights(more.get("fragment"))
    with torch.no_grad():
        replies: list[Reply] = side.receive(Push(group, read_at, [torch.full_like(weight, change)], note=note, **more))
    return replies


@varied
@given(st.lists(st.tuples(st.integers(50, 500), st.integers(1, 50), st.floats(-9, 9)), min_size=1, max_size=6))
def test_groups_count_by_their_samples_times_samples_a_step_and_weights_sum_to_one(
    groups: list[tuple[int, int, float]],
) -> None:
    method = DecoupledDiLoCo(period=4, quorum=len(groups), outer_lr=0.5, outer_momentum=0.8, **WHOLE)
    master, side = side_of(method, len(groups))
    weights = [samples * samples / steps for samples, steps, _ in groups]
    for group, (weight, (_, _, change)) in enumerate(zip(weights, groups, strict=True)):
        push(side, group, change, note=weight)
    parts = [weight / sum(weights) for weight in weights]
    assert sum(parts) == pytest.approx(1)
    merged = sum(part * change for part, (_, _, change) in zip(parts, groups, strict=True))
    assert master.clock == 1
    assert master.weights()[0].tolist() == pytest.approx([-0.5 * (1 + 0.8) * merged] * 4)


def test_the_note_of_a_push_has_samples_and_steps_since_the_fragment_went_before() -> None:
    weight = Parameter(torch.zeros(4))
    replica = Replica([weight], torch.optim.SGD([weight], lr=0.1))
    core = GroupCore(DecoupledDiLoCo(period=4, fragments=2, delay=0))
    core.attach(replica)
    notes = []
    for samples in (3, 5, 7, 9, 2, 2):
        action = core.gradient(0, Gradient([torch.ones(4)], [{}], samples=samples))
        while isinstance(action, ServerRequest):
            assert isinstance(action.need, Exchange)
            notes.append((action.need.fragment, action.need.note))
            action = core.answer(0, Pulled([torch.zeros(2)], clock=1, fragment=action.need.fragment))
    assert notes == [(0, 8 * 8 / 2), (1, 24 * 24 / 4), (0, 20 * 20 / 4)]


@varied
@given(order=orders(2))
def test_a_group_that_never_comes_changes_nothing(order: list[int]) -> None:
    settings: dict[str, Any] = {"period": 2, "fragments": 2, "quorum": 2, "delay": 0, "grace": 0}
    with_it, without = Cluster(DecoupledDiLoCo(**settings), 3), Cluster(DecoupledDiLoCo(**settings), 2)
    for cluster in (with_it, without):
        cluster.run(order)
    assert with_it.master.clock == without.master.clock
    assert same(with_it.weights(), without.weights())


def test_a_late_group_is_answered_at_once_and_is_part_of_the_next_merge() -> None:
    method = DecoupledDiLoCo(period=4, quorum=2, outer_lr=1.0, outer_momentum=0.0, **WHOLE)
    master, side = side_of(method, 3)
    assert push(side, 0, 2.0) == []
    assert {reply.group for reply in push(side, 1, 4.0)} == {0, 1}
    assert master.weights()[0].tolist() == [-3.0] * 4
    assert push(side, 2, 9.0) == [Reply(2, staleness=1)]  # with what was merged without it
    assert (master.clock, master.weights()[0].tolist()) == (1, [-3.0] * 4)
    assert push(side, 0, 3.0, read_at=1) == []  # one in time; the late one is no part of the quorum
    assert {reply.group for reply in push(side, 1, 3.0, read_at=1)} == {0, 1}
    assert master.weights()[0].tolist() == [-8.0] * 4


def test_what_a_dead_group_had_pushed_is_merged_and_no_group_waits_for_it() -> None:
    method = DecoupledDiLoCo(period=4, quorum=3, outer_lr=1.0, outer_momentum=0.0, **WHOLE)
    master, side = side_of(method, 3)
    assert push(side, 0, 3.0) == push(side, 1, 6.0) == []
    with torch.no_grad():
        assert [reply.group for reply in side.evict(2)] == [0, 1]
        assert master.weights()[0].tolist() == [-4.5] * 4
        assert push(side, 0, 2.0, read_at=1) == []
        assert side.evict(0) == []
        assert [reply.group for reply in push(side, 1, 4.0, read_at=1)] == [1]
    assert master.weights()[0].tolist() == [-7.5] * 4


def test_a_window_that_was_open_for_the_dead_is_open_no_more() -> None:
    master, side = side_of(DecoupledDiLoCo(period=2, fragments=1, quorum=1, grace=0.5), 3)
    push(side, 0, 1.0)
    side.now = 4.0
    assert push(side, 0, 1.0, read_at=1) == []
    assert side.due == 6.0
    with torch.no_grad():
        assert side.evict(0) == []
    assert (side.due, master.clock) == (float("inf"), 1)
    side.now = 5.0
    assert [reply.group for reply in push(side, 1, 1.0, read_at=1)] == [1]
    assert master.clock == 2


def test_what_is_left_when_groups_leave_moves_the_weights_no_more() -> None:
    master, side = side_of(DecoupledDiLoCo(period=4, quorum=2, **WHOLE), 3)
    push(side, 0, 1.0), push(side, 1, 1.0), push(side, 2, 1.0)  # the last comes late
    with torch.no_grad():
        assert [side.idle(group) for group in range(3)] == [side.evict(group) for group in range(3)] == [[]] * 3
    assert master.clock == 1


def test_none_waits_where_those_who_could_come_wait_with_other_fragments() -> None:
    method = DecoupledDiLoCo(period=4, fragments=2, quorum=2, delay=0, grace=0)
    _, side = side_of(method, 2)
    assert push(side, 0, 1.0, fragment=0) == []
    assert {reply.group for reply in push(side, 1, 1.0, fragment=1)} == {0, 1}


@pytest.mark.parametrize("weight", [-1.0, 0.1, 1e300])
def test_a_weight_that_cannot_be_is_refused_and_changes_nothing(weight: float) -> None:
    _, side = side_of(DecoupledDiLoCo(), 2)
    before = side.state()
    with pytest.raises(ProtocolError, match=r"1 to 1e\+15, not"):
        push(side, 0, 1.0, note=weight, fragment=0)
    assert side.state() == before


# --- The window of grace ---------------------------------------------------------------------------------------------


def test_the_window_is_a_part_of_the_time_until_the_first_that_waits_wants_its_answer() -> None:
    method = DecoupledDiLoCo(period=4, fragments=2, quorum=2, grace=0.5)
    master, side = side_of(method, 4)
    for group, moment in ((0, 10.0), (1, 11.0)):  # no group has come before: nothing is known of their times
        side.now = moment
        push(side, group, 1.0, fragment=0)
    assert master.clock == 1
    for group, moment in ((0, 14.0), (1, 14.5)):
        side.now = moment
        assert len(push(side, group, 1.0, fragment=1)) == 0
    # Group 0 comes every 4 s, so it wants its answer at 18, group 1 at 18; half of the 3.5 s is waited for.
    assert side.due == 14.5 + 0.5 * (18.0 - 14.5)
    side.now = 15.0
    assert push(side, 2, 1.0, fragment=1) == []
    side.now = side.due
    with torch.no_grad():
        assert {reply.group for reply in side.expire()} == {0, 1, 2}
    assert master.clock == 2
    assert side.due == float("inf")


def test_a_group_that_joins_does_not_keep_an_open_window_from_closing() -> None:
    master, side = side_of(DecoupledDiLoCo(period=4, fragments=1, grace=0.5), 3)
    for moment, clock in ((10.0, 1), (14.0, 1)):
        for group in (0, 1):
            side.now = moment
            push(side, group, 1.0, read_at=side.master.clock)
        assert master.clock == clock
    side.join(3)
    side.now = side.due
    with torch.no_grad():
        assert {reply.group for reply in side.expire()} == {0, 1}
    assert (master.clock, side.due) == (2, float("inf"))


def test_time_in_which_a_group_is_idle_is_no_interval_between_its_pushes() -> None:
    _, side = side_of(DecoupledDiLoCo(period=2, fragments=1, quorum=2, grace=0.5), 3)
    for moment, read_at in ((0.0, 0), (4.0, 1)):
        for group in (0, 1):
            side.now = moment
            push(side, group, 1.0, read_at=read_at)
    for group in range(3):
        side.idle(group)
    side.now = 604.0  # a validation
    for group in range(3):
        side.resume(group)
    side.now = 608.0
    for group in (0, 1):
        push(side, group, 1.0, read_at=2)
    assert side.due == 608.0 + 0.5 * 4.0


def test_the_window_closes_when_all_have_come() -> None:
    master, side = side_of(DecoupledDiLoCo(period=2, fragments=1, quorum=2, grace=0.9), 3)
    for moment, read_at in ((0.0, 0), (1.0, 1), (2.0, 2)):
        for group in range(3):
            side.now = moment + 0.01 * group
            replies = push(side, group, 1.0, read_at=read_at)
        # At first nothing is known, and the quorum is enough: the third comes late.
        assert [reply.group for reply in replies] == ([2] if not moment else [0, 1, 2])
    assert master.clock == 3


# --- The group -------------------------------------------------------------------------------------------------------


def test_a_group_computes_on_and_keeps_what_it_has_changed_while_its_fragment_is_under_way() -> None:
    weight = Parameter(torch.zeros(4))
    replica = Replica([weight], torch.optim.SGD([weight], lr=1.0))
    core = GroupCore(DecoupledDiLoCo(period=4, fragments=2, delay=1))
    core.attach(replica)

    def step() -> Any:
        return core.gradient(0, Gradient([-torch.ones(4)], [{"lr": 1.0}]))

    assert step() == NextGradient()
    ask = step()
    assert isinstance(ask, ServerRequest)
    assert isinstance(ask.need, Exchange)
    assert (ask.waits, ask.need.fragment, ask.need.tensors[0].tolist()) == (False, 0, [-2.0, -2.0])  # type: ignore[union-attr]
    assert core.answer(0, None) == NextGradient()
    assert step() == Receive()
    assert weight.tolist() == [3.0] * 4
    assert core.answer(0, Pulled([torch.full((2,), 10.0)], clock=7, fragment=0)) == NextGradient()
    assert weight.tolist() == [11.0, 11.0, 3.0, 3.0]
    ask = step()
    assert isinstance(ask, ServerRequest)
    assert isinstance(ask.need, Exchange)
    assert (ask.need.fragment, ask.need.read_at) == (1, 0)
    core.answer(0, None)
    core.apply_answer(0, Pulled([torch.full((2,), 20.0)], clock=8, fragment=1))  # at a synchronization point, say
    assert weight.tolist() == [12.0, 12.0, 20.0, 20.0]
    assert step() == NextGradient()
    ask = step()
    assert isinstance(ask, ServerRequest)
    assert isinstance(ask.need, Exchange)
    assert (ask.need.fragment, ask.need.read_at) == (0, 7)
    assert ask.need.tensors[0].tolist() == [-4.0, -4.0]  # type: ignore[union-attr]  # all that came since the 10


def test_a_group_that_is_refused_begins_again_from_all_of_the_masters_weights() -> None:
    weight = Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    replica = Replica([weight], optimizer)
    core = GroupCore(DecoupledDiLoCo(period=2, fragments=2, delay=0))
    core.attach(replica)
    ask = core.gradient(0, Gradient([torch.ones(4)], [{"lr": 1.0}]))
    assert isinstance(ask, ServerRequest)
    fetch = core.answer(0, Pulled([torch.zeros(2)], clock=3, refused=True, fragment=0))
    assert isinstance(fetch, ServerRequest)
    assert isinstance(fetch.need, Fetch)
    assert core.answer(0, Pulled([torch.full((4,), 5.0)], clock=3)) == NextGradient()
    assert (weight.tolist(), replica.memory, replica.clock, len(optimizer.state)) == ([5.0] * 4, {}, 3, 0)


def test_a_server_that_has_gone_back_in_time_refuses_what_is_newer_and_the_group_hears_it() -> None:
    message = {"optimizer": 0, "present": (True,), "hyperparameters": (), "epoch": -1, "trained": 0, "nbytes": 8}
    for method, fragment in ((DecoupledDiLoCo(period=2, fragments=2), 0), (DiLoCo(period=2), -1)):
        served = ServedParameters(None, {"w": torch.zeros(4)}, 3, method, range(2), lambda path: None)  # type: ignore[arg-type, return-value]
        newer = m.PushMessage(read_at=5, fragment=fragment, **message)  # type: ignore[arg-type]
        tensors = [torch.ones(2 if fragment == 0 else 4)]
        if isinstance(method, DecoupledDiLoCo):
            assert served.take(0, newer, tensors) is None
            assert (served.counts.refused, served.counts.refused_in_row[0], served.master.clock) == (1, 0, 3)
        else:
            with pytest.raises(ProtocolError, match=r"clock 5 were never sent; the clock is 3"):
                served.take(0, newer, tensors)


# --- In virtual time -------------------------------------------------------------------------------------------------

CHAOS = (Failure(4, 0.05, 0.12), Slowdown(1, 0.05, 0.3, 4.0), Failure(2, 0.1), Failure(4, 0.2, 0.25))


@pytest.mark.parametrize(
    ("method", "wire"),
    covering(
        product(
            (
                "decoupled_diloco:period=4,fragments=2",
                "decoupled_diloco:period=6,fragments=3,delay=1,quorum=2,grace=0.8",
                "decoupled_diloco:period=3,fragments=1,quorum=1",
                "decoupled_diloco:period=2,fragments=2,quorum=3,delay=0",
            ),
            ("fp32", "int8"),
        )
    ),
)
def test_it_trains_through_failures_and_slow_times_and_replays_bit_for_bit(method: str, wire: Any) -> None:
    events: list[Event] = []
    cluster = Devices.even(5, 2e-3, jitter=Jitter("lognormal", 0.4), link=Link(1e6, 1e-3), events=CHAOS)
    topology = Topology(((0, 1), (2,), (3, 4)))
    trace = run(
        method,
        topology,
        cluster,
        limits=Limits(epochs=2),
        computation=Computation(members_apart=True),
        record=events.append,
        compression=wire,
    )
    assert trace.ended == "max_epochs"
    trained = {(event.epoch, place) for event in events for span in event.spans for place in range(*span)}
    assert trained == {(epoch, place) for epoch in range(2) for place in range(len(DATA))}
    assert [event.kind for event in events].count("join") == 2
    again = replayed(events)
    assert all((weight.numpy() == trace.weights[name]).all() for name, weight in again.weights.items())


def test_most_groups_never_wait_and_one_that_crawls_holds_up_none() -> None:
    crawls = (Slowdown(3, 0.0, 1e9, 50.0),)
    steady: dict[str, Any] = {"jitter": Jitter("lognormal", 0.1), "link": Link(latency=1e-3)}
    method = "decoupled_diloco:period=8,fragments=4"
    data = torch.utils.data.TensorDataset(*(tensor.repeat(10, *[1] * (tensor.dim() - 1)) for tensor in DATA.tensors))
    traces = [
        run(each, 4, Devices.even(4, 2e-3, events=events, **steady), data=data, limits=Limits(seconds=0.8))
        for each, events in ((method, ()), (method, crawls), ("diloco:period=8", crawls))
    ]
    quiet, slowed, barrier = (trace.rows["steps"][trace.rows["group"] < 3].sum() for trace in traces)
    assert slowed > 0.97 * quiet
    assert barrier < 0.2 * quiet
    assert traces[1].goodput > 0.85 > 0.4 > traces[2].goodput


def test_it_learns_what_diloco_learns() -> None:
    def final(method: str) -> float:
        trace = run(
            method, 4, Devices.even(4, jitter=Jitter("lognormal", 0.2)), limits=Limits(epochs=4), model=new_model()
        )
        return float(trace.rows["loss"][-20:].mean())

    settings = "period=5,outer_momentum=0.5"
    assert final(f"decoupled_diloco:{settings},fragments=5") < 1.1 * final(f"diloco:{settings}")
