"""Groups that come and go while the run goes on: with public names alone, over the transport in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from memory_transport import InMemory
from test_transport import KEY, Group, Serving, served

from lightning_omni.errors import Refused
from lightning_omni.group.leased_batches import LeaseClient
from lightning_omni.methods import METHODS, REGISTRY, Method, method_named
from lightning_omni.topology import GroupId
from lightning_omni.wire import messages as m
from lightning_omni.wire.layout import Layout
from lightning_omni.wire.messages import EpochPlan

SAMPLES = 60
PLAN = EpochPlan(epoch=0, total=SAMPLES, batch_size=2, budget=SAMPLES)


class Member(Group):
    """A group that trains on leased data."""

    def __init__(self, serving: Serving, rank: int, size: int, method: Method | None = None) -> None:
        super().__init__(serving, rank, size, method=method)
        self.used: list[int] = []

    def lease(self, generation: int) -> None:
        self.core.data = LeaseClient(generation=generation)
        self.core.data.restart(PLAN.epoch)

    def train(self, seed: int) -> bool:
        """A batch, if there is one."""
        data = self.core.data
        assert data is not None
        if data.drawn == data.trained:
            data.record_drawn(self.control.request(data.draw(data.drawn), m.BatchesDrawn).batches)
        if data.drawn == data.trained:
            return False
        data.begin_batch()
        self.used += list(data.indices(data.trained - 1))
        self.step(seed)
        return True

    def ask_for_more(self) -> None:
        assert self.core.data is not None
        self.control.ask(self.core.data.ask_next())  # type: ignore[attr-defined]

    @property
    def verdict(self) -> str:
        answer = self.control.take(m.Next)  # type: ignore[attr-defined]
        return answer[0].next if answer is not None else ""


def running(serving: Serving, method: Method | None = None) -> list[Member]:
    """Two groups in the middle of an epoch."""
    groups = [Member(serving, rank, 2, method) for rank in range(2)]
    groups[0].form([(0,), (1,)])
    for group in groups:
        group.control.request(m.OpenEpoch(plan=PLAN), m.EpochOpened)
        group.lease(generation=1)
    return groups


@torch.no_grad()
def joins(serving: Serving, rank: int, name: str = "", method: Method | None = None) -> Member:
    """A group comes while others train: it says so, hears what it has to know, and reads weights."""
    member = Member(serving, rank, 0, method)
    joined = member.control.request(m.Join(ranks=(rank,), name=name), m.Joined)
    assert joined.plan == PLAN
    assert REGISTRY.from_wire(joined.method) == member.method
    member.replica.group, member.replica.peers = joined.group, joined.groups
    member.core.form(GroupId(name or str(joined.group), joined.incarnation))
    member.lease(joined.generation)
    member.replica.load(member.do(member.core.fetch(0)))
    return member


@pytest.mark.parametrize(
    "method", ["async_sgd", "delay_compensated", "elastic_averaging:period=1", "async_diloco:period=2"]
)
def test_a_group_joins_in_mid_epoch_and_another_leaves_and_every_sample_is_used_once(method: str) -> None:
    made = method_named(method)
    with served(InMemory()) as serving:
        groups = running(serving, made)
        seeds: Iterator[int] = iter(range(1000))
        for _ in range(3):
            assert all(group.train(next(seeds)) for group in groups)
        third = joins(serving, 7, method=made)
        master = serving.core.store.all[0].master.weights()
        assert all(map(torch.equal, third.replica.weights(), master))
        assert serving.core.store.clock > 0
        status = groups[0].control.request(m.AskStatus(), m.Status)
        assert [(group.name, group.ranks) for group in status.groups] == [("0", (0,)), ("1", (1,)), ("2", (7,))]
        assert [group.incarnation for group in status.groups] == [1, 1, 2]
        for _ in range(3):
            assert all(group.train(next(seeds)) for group in (*groups, third))
        left = groups.pop()
        left.control.close(reason="")
        assert left.core.data is not None
        trained = left.used[: PLAN.batch_size * left.core.data.trained]
        busy = {*groups, third}
        while busy:
            busy = {group for group in busy if group.train(next(seeds))}
        for group in (*groups, third):
            group.ask_for_more()
        assert [group.verdict for group in (*groups, third)] == ["over", "over"]
        used = Counter([*trained, *(index for group in (*groups, third) for index in group.used)])
        assert used == Counter(range(SAMPLES))
        status = third.control.request(m.AskStatus(), m.Status)
        assert [group.name for group in status.groups] == ["0", "2"]
        assert status.lost == ()


def test_a_barrier_waits_for_the_group_that_has_joined_and_no_more_for_the_one_that_has_left() -> None:
    made = method_named("hardsync")
    with served(InMemory()) as serving:
        groups = running(serving, made)
        third = joins(serving, 2, method=made)
        (side,) = [served.method_side for served in serving.core.store.all]
        assert side.groups == {0, 1, 2}
        groups[1].control.close(reason="")
        assert side.groups == {0, 2}
        third.control.close()  # without a word: it is lost
        assert side.groups == {0}
        groups[0].step(1)
        assert groups[0].control.lost == (2,)


def test_a_group_that_was_lost_comes_back_under_its_name_and_in_another_incarnation() -> None:
    with served(InMemory()) as serving:
        first, second = running(serving)
        second.train(1)
        with pytest.raises(Refused, match="name='1': a group of that name takes part"):
            joins(serving, 5, name="1")
        second.control.close()
        back = joins(serving, 6, name="1")
        assert back.core.identity == GroupId("1", 2)
        back.train(2)
        first.train(3)
        status = first.control.request(m.AskStatus(), m.Status)
        assert [(group.name, group.incarnation) for group in status.groups] == [("0", 1), ("1", 2)]
        back.core.form(GroupId("1", 1))  # a push of what it was before
        with pytest.raises(Refused, match=r"'1' \(incarnation 1\) came, and that name is now '1' \(incarnation 2"):
            back.train(4)


def test_who_may_not_come_late_is_told_why() -> None:
    layout = Layout.of({"w": torch.zeros(2)})
    with served(InMemory()) as serving:
        with pytest.raises(Refused, match=r"^rank 0 cannot join: it was lost or never was"):
            serving.join(0, 0, layout)  # no group is there yet
        serving.join(0, 1, layout)
        early = serving.join(4, 0, layout)
        with pytest.raises(Refused, match="no group can join before the first are formed"):
            early.request(m.Join(ranks=(4,)), m.Joined)
        with pytest.raises(Refused, match="cannot join"):
            serving.join(0, 0, layout)  # a number of those that were announced
        with pytest.raises(Refused, match="key"):
            serving.join(5, 0, layout, key=KEY[::-1])
    with served(InMemory()) as serving:
        first, _ = running(serving)
        late = serving.join(4, 0, first.layout)
        for ranks, says in (((), "speaks for no group"), ((4, 4), "each of them once"), ((4, 1), "rank 1 is not one")):
            with pytest.raises(Refused, match=says):
                late.request(m.Join(ranks=ranks), m.Joined)
        late.close()  # was in no group: none is lost
        first.train(1)
        assert first.control.lost == ()
        assert not serving.core.roster.over


def test_every_method_of_the_package_takes_a_group_more() -> None:
    """No group is held up by what was before it came, nor waits for it once it is gone; nothing pushed is lost."""
    own = [name for name, kind in METHODS.items() if kind.__module__.startswith("lightning_omni.")]
    assert len(own) == 12
    for name in [*own, "async_sgd:bound=1"]:
        made = method_named(name)
        if made.talks_to_peers:
            continue
        with served(InMemory()) as serving:
            groups = running(serving, made)
            side = serving.core.store.all[0].method_side
            third = joins(serving, 2, method=made)
            assert side.groups == {0, 1, 2}
            assert side.working == {0, 1, 2}
            assert side.released() == []
            for group in groups:
                group.control.close(reason="") if group.rank else None
            third.control.close(reason="")
            assert side.groups == {0}
            groups[0].step(1)
