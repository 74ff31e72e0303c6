"""The server's state machine with every kind of method: who is answered when, means, group states, the record."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from test_server_core import (
    LAYOUT,
    SHAPES,
    Link,
    as_bytes,
    as_tensors,
    assert_same,
    control_peer,
    data_peer,
    expect_refusal,
    gradient,
    new_parameters,
    part_of,
    push_of,
    seed_of,
)

from lightning_omni.methods import (
    AsyncSGD,
    DelayCompensated,
    DiLoCo,
    ElasticAveraging,
    Gossip,
    HardSync,
    LocalSGD,
    Method,
)
from lightning_omni.registry import to_wire
from lightning_omni.server.event_log import Event
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import pack, unpack
from lightning_omni.wire.messages import EpochPlan


def link_with(method: Method, *groups: tuple[int, ...], state: Any = None) -> tuple[Link, list[Event]]:
    """Ranks joined, groups formed, weights handed over; and what is recorded."""
    link, events = Link(sum(map(len, groups))), list[Event]()
    link.core.events.record = events.append
    for rank in range(link.world_size):
        link.join(rank)
    link.control(0, m.FormGroups(generation=1, groups=groups, method=to_wire(method)))
    part = part_of(new_parameters())
    if method.steps_at == "worker":
        part["optimizer"] = None
    message, payload = seed_of({"parts": [{**part, "method": state}]})
    assert link.data(0, message, payload)[0] == m.WeightsUploaded()
    link.inbox.clear()
    return link, events


def own(value: float) -> list[torch.Tensor]:
    return [torch.full(shape, value) for shape in SHAPES.values()]


def push(link: Link, rank: int, tensors: Any, **changes: Any) -> list[Any]:
    """A leader pushes; the answers that it gets at once."""
    message, payload = push_of(tensors, **changes)
    if link.core.store.all[0].master.optimizer is None:
        message = msgspec.structs.replace(message, hyperparameters=())
    return [answer for answer, _ in link.say(data_peer(rank), message, payload, m.DATA)]


def answers(link: Link, rank: int) -> list[m.Weights]:
    """Everything that a leader has been sent."""
    return [message for message, _ in link.inbox[data_peer(rank), m.DATA]]


def test_a_barrier_answers_none_before_all_have_pushed() -> None:
    link, _ = link_with(HardSync(), (0,), (1,), (2,))
    assert push(link, 1, gradient(1)) == []
    assert push(link, 0, gradient(0)) == []
    assert push(link, 2, gradient(2)) != []
    assert [len(answers(link, rank)) for rank in range(3)] == [1, 1, 1]
    assert link.core.store.clock == 1
    assert all(answers(link, rank)[0].staleness == 0 for rank in range(3))


def test_a_group_in_a_collective_is_not_waited_for_until_it_is_complete() -> None:
    link, events = link_with(HardSync(), (0,), (1,))
    link.say(control_peer(1), m.Contribute(number=0, what="barrier"))
    assert len(push(link, 0, gradient(0))) == 1
    link.say(control_peer(0), m.Contribute(number=0, what="barrier"))
    assert push(link, 0, gradient(0), read_at=1) == []
    assert [event.kind for event in events] == ["seed", "rest", "push", "rest", "resume", "resume", "push"]


def test_a_group_in_a_collective_frees_those_that_wait_for_it() -> None:
    link, _ = link_with(LocalSGD(), (0,), (1,))
    assert push(link, 0, own(2.0)) == []
    link.say(control_peer(1), m.Contribute(number=0, what="barrier"))
    assert [answer.clock for answer in answers(link, 0)] == [1]
    assert_same(link.weights(), own(2.0))


def test_a_peer_in_a_collective_does_not_speak_for_its_group() -> None:
    link, _ = link_with(HardSync(), (0,), (1, 2))
    link.say(control_peer(2), m.Contribute(number=0, what="barrier"))
    assert push(link, 0, gradient(0)) == []


def test_a_group_that_waits_at_the_end_of_an_epoch_is_not_waited_for() -> None:
    link, _ = link_with(HardSync(), (0,), (1,))
    plan = EpochPlan(epoch=0, total=6, batch_size=2, budget=6)
    for rank in range(2):
        link.control(rank, m.OpenEpoch(plan=plan))
    drawn = [link.control(rank, m.DrawBatches(epoch=0, generation=1, number=0)).batches for rank in (0, 1)]
    assert [len(batches) for batches in drawn] == [1, 1]
    assert push(link, 1, gradient(1), epoch=0, trained=1) == []
    push(link, 0, gradient(0), epoch=0, trained=1)
    assert len(link.control(0, m.DrawBatches(epoch=0, generation=1, number=1, trained=1)).batches) == 1
    link.say(control_peer(1), m.AskNext(epoch=0, generation=1, trained=1, interval=0))
    assert len(push(link, 0, gradient(2), read_at=1, epoch=0, trained=2)) == 1


def test_a_dead_group_frees_those_who_wait_for_it_and_so_does_one_that_leaves() -> None:
    for last_words in (None, m.Goodbye()):
        link, events = link_with(HardSync(), (0,), (1,), (2,))
        push(link, 0, gradient(0))
        push(link, 2, gradient(2))
        if last_words is None:
            link.deliver(link.core.lose(1, "killed"))
        else:
            link.say(control_peer(1), last_words)
        assert [len(answers(link, rank)) for rank in (0, 2)] == [1, 1]
        assert events[-1].kind == ("retire" if last_words is None else "leave")


def test_groups_that_step_their_optimizers_differently_do_not_wait_for_each_other_for_ever() -> None:
    link = Link(2)
    for rank in range(2):
        link.join(rank)
    link.control(0, m.FormGroups(generation=1, groups=((0,), (1,)), method=to_wire(HardSync())))
    message, payload = seed_of({"parts": [part_of(new_parameters()), part_of(new_parameters())]})
    assert link.data(0, message, payload)[0] == m.WeightsUploaded()
    link.inbox.clear()
    assert push(link, 0, gradient(0), optimizer=0) == []
    assert len(push(link, 1, gradient(1), optimizer=1)) == 1  # group 0 waits at the other: not here
    assert answers(link, 0) == []
    assert len(push(link, 1, gradient(2), optimizer=0)) == 1
    assert [answer.optimizer for answer in answers(link, 0)] == [0]
    assert push(link, 1, gradient(3), optimizer=1, read_at=1) == []  # and group 0 is waited for there again
    assert len(push(link, 0, gradient(4), optimizer=1)) == 1


def test_a_peer_that_asks_after_its_group_has_left_hears_that_there_is_nothing() -> None:
    link, _ = link_with(AsyncSGD(), (0, 1), (2,))
    for rank in range(3):
        link.control(rank, m.OpenEpoch(plan=EpochPlan(epoch=0, total=32, batch_size=2, budget=32)))
    link.control(0, m.DrawBatches(epoch=0, generation=1, number=0))
    link.control(0, m.LeaveEpoch(epoch=0, generation=1, trained=1, stop="skip"))
    assert link.control(1, m.DrawBatches(epoch=0, generation=1, number=1)).batches == ()
    answer, _ = link.data(0, m.FetchMessage(optimizer=0, epoch=0, trained=1))
    assert isinstance(answer, m.Weights)


def test_a_refused_group_is_compensated_from_what_it_was_sent() -> None:
    link, _ = link_with(DelayCompensated(strength=1.0), (0,), (1,))
    push(link, 1, gradient(1))
    push(link, 0, own(float("nan")))
    now = link.weights()
    read = link.core.store.all[0].method_side._read[0]  # type: ignore[attr-defined]
    assert_same(read, now)


def test_elastic_averaging_answers_with_the_move_and_not_with_the_weights() -> None:
    link, _ = link_with(ElasticAveraging(moving_rate=0.25), (0,), (1,))
    before = link.weights()
    link.inbox.clear()
    push(link, 0, own(1.0))
    ((answer, payload),) = link.inbox[data_peer(0), m.DATA]
    assert answer.clock == 1
    moves = as_tensors(payload)
    assert_same(moves, [(mine - centre) * 0.25 for mine, centre in zip(own(1.0), before, strict=True)])
    assert_same(link.weights(), [centre + move for centre, move in zip(before, moves, strict=True)])


def test_a_push_that_wants_no_tensors_back_gets_none() -> None:
    link, _ = link_with(AsyncSGD(), (0,), (1,))
    message, payload = push_of(gradient(0), pull=False)
    answer, body = link.data(0, message, payload)
    assert (answer.applied, answer.nbytes, body) == (True, 0, b"")


def test_hyperparameters_are_refused_where_the_optimizer_steps_at_the_worker() -> None:
    link, _ = link_with(LocalSGD(), (0,), (1,))
    message, payload = push_of(own(1.0))
    expect_refusal(link.data(0, message, payload)[0], "protocol", "parameter groups")


def test_an_optimizer_must_come_where_the_method_steps_and_only_there() -> None:
    for method in (AsyncSGD(), LocalSGD()):
        link = Link(2)
        for rank in range(2):
            link.join(rank)
        link.control(0, m.FormGroups(generation=1, groups=((0,), (1,)), method=to_wire(method)))
        part = part_of(new_parameters())
        if method.steps_at == "server":
            part["optimizer"] = None
        expect_refusal(link.data(0, *seed_of({"parts": [part]}))[0], "protocol", "the optimizer steps at the")


# --- The mean of all groups' weights ---------------------------------------------------------------------------------


def average(link: Link, rank: int, tensors: Any) -> list[Any]:
    message = m.AverageMessage(optimizer=0, nbytes=LAYOUT.nbytes)
    return link.say(data_peer(rank), message, as_bytes(tensors), m.DATA)


def test_what_is_absent_from_all_groups_weights_stays_as_it_is_and_else_the_mean_is_of_those_that_have_it() -> None:
    link, _ = link_with(Gossip(), (0,), (1,), (2,))
    before, layout = [weight.clone() for weight in link.weights()], LAYOUT.subset((False, True))
    for rank, value in enumerate((0.1, 0.2)):
        message = m.AverageMessage(optimizer=0, nbytes=layout.nbytes, absent=(0,))
        memory = layout.empty()
        for view in layout.views(memory):
            view.fill_(value)
        link.say(data_peer(rank), message, memory.numpy().tobytes(), m.DATA)
    message = m.AverageMessage(optimizer=0, nbytes=0, absent=(0, 1))
    assert link.say(data_peer(2), message, b"", m.DATA)
    first, second = link.weights()
    assert torch.equal(first, before[0])
    assert torch.allclose(second, torch.full_like(second, 0.15))


def test_weights_that_lack_what_there_is_not_are_refused() -> None:
    link, _ = link_with(Gossip(), (0,), (1,))
    ((answer, _),) = link.say(data_peer(0), m.AverageMessage(optimizer=0, nbytes=0, absent=(2,)), b"", m.DATA)
    expect_refusal(answer, "malformed", "the optimizer has 2")


def test_all_groups_get_the_mean_once_all_have_handed_in() -> None:
    link, _ = link_with(Gossip(), (0,), (1, 2), (3,))
    assert average(link, 0, own(1.0)) == []
    assert average(link, 3, own(2.0)) == []
    assert len(average(link, 1, own(6.0))) == 1
    for rank in (0, 1, 3):
        ((answer, payload),) = link.inbox[data_peer(rank), m.DATA]
        assert (answer.applied, answer.clock) == (True, 0)
        assert_same(as_tensors(payload), own(3.0))
    assert_same(link.weights(), own(3.0))


def test_a_dead_group_is_not_waited_for_in_a_mean() -> None:
    link, _ = link_with(Gossip(), (0,), (1,), (2,))
    average(link, 0, own(1.0))
    average(link, 1, own(3.0))
    link.deliver(link.core.lose(2, "killed"))
    assert [len(link.inbox[data_peer(rank), m.DATA]) for rank in range(2)] == [1, 1]
    assert_same(link.weights(), own(2.0))


def test_weights_that_are_not_finite_stay_out_of_the_mean_and_their_group_is_told() -> None:
    link, _ = link_with(Gossip(), (0,), (1,))
    average(link, 1, own(float("nan")))
    average(link, 0, own(4.0))
    told = {rank: link.inbox[data_peer(rank), m.DATA][0][0] for rank in range(2)}
    assert (told[0].applied, told[1].applied) == (True, False)
    assert told[1].refused_in_row == 1
    assert link.core.status_service.status(0.0).refused == 1
    assert_same(link.weights(), own(4.0))


def test_no_rank_hands_in_twice_nor_for_others() -> None:
    link, _ = link_with(Gossip(), (0,), (1, 2))
    average(link, 0, own(1.0))
    ((answer, _),) = average(link, 0, own(1.0))
    expect_refusal(answer, "protocol", "already")
    ((answer, _),) = link.say(data_peer(2), m.AverageMessage(optimizer=0, nbytes=0), b"", m.DATA)
    expect_refusal(answer, "malformed", "only leaders")


def test_gossip_pushes_nothing() -> None:
    link, _ = link_with(Gossip(), (0,), (1,))
    expect_refusal(push(link, 0, own(1.0))[0], "protocol", "no group pushes")


# --- Snapshots -------------------------------------------------------------------------------------------------------


def snapshot(link: Link) -> Any:
    answer, payload = link.data(0, m.TakeSnapshot())
    return unpack(answer.packed, torch.frombuffer(bytearray(payload), dtype=torch.uint8))


def test_what_is_gathered_from_groups_is_in_the_next_snapshot_and_in_no_other() -> None:
    link, _ = link_with(DiLoCo(), (0,), (1,))
    for rank in range(2):
        packed, buffer = pack([{"weights": own(float(rank)), "memory": {"steps": rank}}])
        message = m.GroupState(packed=packed, nbytes=buffer.numel())
        assert link.data(rank, message, buffer.numpy().tobytes())[0] == m.GroupStateStored()
    tree = snapshot(link)
    assert {group: states[0]["memory"]["steps"] for group, states in tree["groups"].items()} == {0: 0, 1: 1}
    assert_same(tree["groups"][1][0]["weights"], own(1.0))
    assert snapshot(link)["groups"] == {}


def test_the_method_goes_on_from_a_snapshot() -> None:
    link, _ = link_with(DiLoCo(period=1), (0,), (1,))
    for rank in range(2):
        push(link, rank, gradient(rank))
    tree = snapshot(link)["parts"][0]
    other, _ = link_with(DiLoCo(period=1), (0,), (1,), state=tree["method"])
    other.core.store.all[0].buffer.copy_(link.core.store.all[0].buffer)
    other.core.store.all[0].master.clock = link.core.store.clock
    for each in (link, other):
        for rank in range(2):
            push(each, rank, gradient(5 + rank), read_at=1)
    assert_same(link.weights(), other.weights())  # the outer momentum went along


@pytest.mark.parametrize("what", ["noise", "too much"])
def test_a_group_state_that_is_none_is_refused(what: str) -> None:
    link, _ = link_with(DiLoCo(), (0,), (1,))
    packed, buffer = pack([torch.ones(2)])
    nbytes = buffer.numel() if what == "noise" else 1 << 40
    message = m.GroupState(
        packed=type(packed)(b"\xc1" if what == "noise" else packed.tree, packed.specs), nbytes=nbytes
    )
    answer, _ = link.data(0, message, buffer.numpy().tobytes() if what == "noise" else b"")
    assert isinstance(answer, m.RefusedMessage)
