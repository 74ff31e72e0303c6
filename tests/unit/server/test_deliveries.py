"""Each push counts once: answers are lost, deliveries repeated and reordered, groups are formed again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_transport import InMemory
from rounds import sent
from test_transport import Group, Serving, served
from torch import Tensor

from lightning_omni.errors import Refused
from lightning_omni.group.core import ServerRequest
from lightning_omni.methods import Method, method_named
from lightning_omni.methods.contract import Gradient
from lightning_omni.methods.model.server_optimizer import hyperparameters_of
from lightning_omni.registry import to_wire
from lightning_omni.server.parameters.push_checks import Deliveries
from lightning_omni.topology import GroupId
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import Memory


def formed(serving: Serving, count: int, method: Method | None = None) -> list[Group]:
    groups = [Group(serving, rank, count, method=method) for rank in range(count)]
    groups[0].form([(rank,) for rank in range(count)])
    return groups


class Pushed:
    """A group's next push, as it travels; it may be delivered as often as one likes."""

    def __init__(self, group: Group, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.group = group
        self.gradient: list[Tensor] = [torch.randn(p.shape, generator=rng) for p in group.parameters.values()]
        with torch.no_grad():
            ask = group.core.gradient(0, Gradient(self.gradient, hyperparameters_of(group.replica.optimizer)))
        assert isinstance(ask, ServerRequest)
        self.ask = ask

    def deliver(self) -> tuple[m.Weights, Sequence[Tensor]]:
        said = sent(self.group.core, self.ask, self.group.layout, Memory())
        answer, payload = self.group.data.exchange(said.message, m.Weights, said.payload)
        return answer, self.group.layout.views(payload)

    def finish(self, answer: m.Weights, tensors: Sequence[Tensor]) -> None:
        with torch.no_grad():
            pulled = self.group.core.receive(answer, tensors)
            self.group.core.answer(0, pulled)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 8)), min_size=1, max_size=12))
def test_however_often_and_late_pushes_are_delivered_each_counts_once(steps: list[tuple[int, int, int]]) -> None:
    """Plain SGD: the master weights are what they were, less every gradient once."""
    with served(InMemory()) as serving:
        groups = formed(serving, 3)
        for group in groups:
            group.replica.optimizer.param_groups[0]["momentum"] = 0.0
        total = [parameter.detach().double().clone() for parameter in groups[0].parameters.values()]
        gone: list[tuple[Group, m.PushMessage, Tensor]] = []
        for seed, (number, times, late) in enumerate(steps):
            push = Pushed(groups[number], seed)
            answers = [push.deliver() for _ in range(times)]
            assert [answer.repeated for answer, _ in answers] == [False] + [True] * (times - 1)
            assert all(answer.applied for answer, _ in answers)
            push.finish(*answers[-1])
            torch._foreach_sub_(total, [0.1 * gradient.double() for gradient in push.gradient])
            said = sent(groups[number].core, push.ask, groups[number].layout, Memory())
            assert isinstance(said.message, m.PushMessage)
            assert said.payload is not None
            sequence = groups[number].core.sequence(0)
            gone.append(
                (groups[number], msgspec.structs.replace(said.message, sequence=sequence), said.payload.clone())
            )
            if late < len(gone):  # some earlier push arrives once more, out of order
                sender, message, payload = gone[late]
                if message.sequence == sender.core.sequence(0):
                    assert sender.data.exchange(message, m.Weights, payload)[0].repeated
                else:
                    with pytest.raises(Refused, match="it has counted") as refused:
                        sender.data.exchange(message, m.Weights, payload)
                    assert refused.value.code == "late"
        assert serving.core.store.clock == len(steps)
        for mine, theirs in zip(total, serving.core.store.all[0].master.weights(), strict=True):
            torch.testing.assert_close(theirs.double(), mine, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["async_sgd", "elastic_averaging:period=1", "async_diloco:period=1"])
def test_a_group_whose_answer_was_lost_asks_again_and_goes_on(method: str) -> None:
    with served(InMemory()) as serving:
        first, second = formed(serving, 2, method_named(method))
        push = Pushed(second, seed=1)
        push.deliver()
        moved = [weight.clone() for weight in serving.core.store.all[0].master.weights()]
        answer, tensors = push.deliver()
        assert (answer.repeated, answer.applied, serving.core.store.clock) == (True, True, 1)
        assert all(map(torch.equal, tensors, moved))  # the master weights, whatever the method answers otherwise
        push.finish(answer, tensors)
        assert all(map(torch.equal, second.replica.weights(), moved))
        assert second.core.sequence(0) == 1
        for group in (second, first):
            group.step(seed=2)
        assert serving.core.store.clock == 3


def test_a_repeat_of_a_push_that_waits_for_others_is_answered_once_and_with_it() -> None:
    with served(InMemory()) as serving:
        first, second = formed(serving, 2, method_named("hardsync"))
        early, late = Pushed(first, 1), Pushed(second, 2)
        said = sent(first.core, early.ask, first.layout, Memory())
        for _ in range(3):
            first.data.send(said.message, said.payload)
        assert first.data.take(m.Weights) is None  # type: ignore[attr-defined]
        late.deliver()
        assert first.data.take(m.Weights)[0].repeated is False  # type: ignore[attr-defined]
        assert first.data.take(m.Weights) is None  # type: ignore[attr-defined]
        assert serving.core.store.clock == 1


def test_a_push_that_was_refused_as_not_finite_is_refused_again_and_counted_once() -> None:
    with served(InMemory()) as serving:
        (group,) = formed(serving, 1)
        push = Pushed(group, 1)
        push.gradient[0][0] = torch.nan
        assert [push.deliver()[0].applied for _ in range(3)] == [False] * 3
        assert serving.core.store.all[0].counts.refused == 1


def test_a_gap_and_a_push_of_an_earlier_incarnation_are_refused_by_name() -> None:
    with served(InMemory()) as serving:
        first, second = formed(serving, 2)
        push = Pushed(second, 1)
        said = sent(second.core, push.ask, second.layout, Memory())
        with pytest.raises(Refused, match=r"push 3 of group '1' \(incarnation 1\) came, and push 1 has not") as refused:
            second.data.exchange(msgspec.structs.replace(said.message, sequence=3), m.Weights, said.payload)
        assert refused.value.code == "gap"
        form = m.FormGroups(generation=2, groups=((0,), (1,)), method=to_wire(first.method), names=("left", "right"))
        assert first.control.request(form, m.GroupsFormed).incarnation == 2
        with pytest.raises(Refused, match=r"'right' \(incarnation 1\) came, and that name is now 'right'") as refused:
            push.deliver()
        assert refused.value.code == "late"
        second.core.form(GroupId("right", 2))
        second.step(seed=2)
        status = first.control.request(m.AskStatus(), m.Status)
        assert [(group.name, group.incarnation) for group in status.groups] == [("left", 2), ("right", 2)]
        with pytest.raises(Refused, match="as many different names"):
            first.control.request(msgspec.structs.replace(form, generation=3, names=("left", "left")), m.GroupsFormed)
        assert serving.core.generation == 2


def test_what_is_forgotten_begins_again_from_the_first() -> None:
    deliveries, identity = Deliveries(), GroupId("a", 1)
    push = m.PushMessage(
        optimizer=0, read_at=0, present=(), hyperparameters=(), epoch=-1, trained=0, nbytes=0, incarnation=1, sequence=1
    )
    assert deliveries.check(0, identity, push) is None
    deliveries.count(0, push, applied=True)
    assert deliveries.check(0, identity, push) is not None
    assert deliveries.check(1, identity, push) is None
    deliveries.forget(0)
    assert deliveries.check(0, identity, push) is None
