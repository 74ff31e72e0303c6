"""Members of a group that have the model in shares exchange with other groups as one: no model is torn."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SLOWER
from torch import Tensor

from lightning_omni.group.sharded_inbox import MOST_WAITING, ShardedInbox
from lightning_omni.methods import Inbox
from lightning_omni.runtime import group_exchange
from lightning_omni.runtime.group_exchange import ShardedPeerExchange
from lightning_omni.transport.connections import Address
from lightning_omni.transport.zeromq.keys import RunKeys
from lightning_omni.transport.zeromq.peers import PeerWires
from lightning_omni.wire.layout import Layout

SIZES = (70_000, 3)
"""Numbers in the share of each member."""
KEYS = RunKeys(bytes(32))
ENOUGH = 40
"""Publications that are read, or messages that are taken."""


def share(member: int, value: float) -> list[Tensor]:
    return [torch.full((SIZES[member],), value)]


class Collective:
    """The largest of each number over some threads."""

    def __init__(self, members: int) -> None:
        self._said: list[Sequence[int]] = [()] * members
        self._barrier = threading.Barrier(members, timeout=SLOWER * 30)

    def of(self, member: int) -> Callable[[Sequence[int]], list[int]]:
        def largest(numbers: Sequence[int]) -> list[int]:
            self._said[member] = numbers
            self._barrier.wait()
            found = [max(each) for each in zip(*self._said, strict=True)]
            self._barrier.wait()
            return found

        return largest


class Groups:
    """Two groups of two members each, that speak over real sockets."""

    def __init__(self, folder: Path) -> None:
        self.lost: set[int] = set()
        self.wires: dict[tuple[int, int], PeerWires] = {}
        self.members: dict[tuple[int, int], ShardedPeerExchange] = {}
        self._threads = ThreadPoolExecutor(4)
        for group in (0, 1):
            collective = Collective(2)
            for member in (0, 1):
                layout = Layout.of({"weight": share(member, 0.0)[0]})
                is_lost, check = self.lost.__contains__, (lambda: None)
                self.wires[group, member] = wires = PeerWires(
                    f"ipc://{folder}/control", 2 * group + member, [layout], KEYS, is_lost, check, everywhere=False
                )
                self.members[group, member] = ShardedPeerExchange(wires, group, collective.of(member), is_lost)
        for (group, member), each in self.members.items():
            each.connect({1 - group: Address(1 - group, self.members[1 - group, member].address)})

    def all(
        self, does: Callable[[ShardedPeerExchange, int], Any], groups: Sequence[int] = (0, 1)
    ) -> dict[int, list[Any]]:
        """What members return, of each group; all of them do it at once."""
        futures = {
            group: [self._threads.submit(does, self.members[group, member], member) for member in (0, 1)]
            for group in groups
        }
        return {group: [each.result(timeout=SLOWER * 60) for each in both] for group, both in futures.items()}

    def close(self) -> None:
        for each in self.members.values():
            each.close()
        self._threads.shutdown()


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Groups]:
    with closing(Groups(tmp_path)) as made:
        yield made


@contextmanager
def busy(groups: Groups, does: Callable[[ShardedPeerExchange, int, int], None]) -> Iterator[None]:
    """A context in which the members of group 1 do something over and over, each at moments of its own."""
    over, steps = threading.Event(), threading.Barrier(2, timeout=SLOWER * 30)

    def act(each: ShardedPeerExchange, member: int) -> None:
        jitter, number = random.Random(member), 0
        while not over.is_set():
            number += 1
            time.sleep(jitter.random() * 0.002)
            does(each, member, number)
            steps.wait()  # members of a group step together

    with ThreadPoolExecutor(2) as threads:
        acting = [threads.submit(act, groups.members[1, member], member) for member in (0, 1)]
        try:
            yield
        finally:
            over.set()
            steps.abort()
    assert all(isinstance(each.exception(), threading.BrokenBarrierError | None) for each in acting)


def rounds() -> Iterator[None]:
    """Endless, but for the test's time."""
    deadline = time.monotonic() + SLOWER * 60
    while True:
        assert time.monotonic() < deadline
        yield


def value_of(tensors: Sequence[Tensor] | None) -> float | None:
    if tensors is None:
        return None
    (value,) = set(tensors[0].unique().tolist())
    return float(value)


def test_all_members_read_the_same_publication_while_another_group_publishes(groups: Groups) -> None:
    def publishes(each: ShardedPeerExchange, member: int, number: int) -> None:
        each.publish(0, share(member, number))

    found = list[float]()
    with busy(groups, publishes):
        for _ in rounds():
            one, other = groups.all(lambda each, _: value_of(each.read(1, 0)), [0])[0]
            assert one == other
            found += [] if one is None else [one]
            if len(set(found)) >= ENOUGH:
                break
    assert found == sorted(found)


def test_all_members_take_the_same_messages_while_another_group_sends(groups: Groups) -> None:
    def sends(each: ShardedPeerExchange, member: int, number: int) -> None:
        each.send(0, 0, share(member, number))

    def takes(each: ShardedPeerExchange, _: int) -> tuple[float | None, int]:
        inbox = each.read_inbox(0)
        return value_of(inbox.total), inbox.count

    counts = list[int]()
    with busy(groups, sends):
        for _ in rounds():
            one, other = groups.all(takes, [0])[0]
            assert one == other
            counts.append(one[1])
            if sum(counts) >= ENOUGH:
                break


def test_one_share_that_is_not_finite_is_the_whole_model_s(groups: Groups) -> None:
    groups.all(lambda each, member: each.publish(0, share(member, float("nan") if member else 1.0)))
    assert groups.all(lambda each, _: each.read(1, 0), [0]) == {0: [None, None]}
    groups.all(lambda each, member: each.send(0, 0, share(member, float("inf") if member else 1.0)), [1])
    assert groups.all(lambda each, _: each.read_inbox(0), [0]) == {0: [Inbox(None, 0)] * 2}
    groups.all(lambda each, member: each.publish(0, share(member, 2.0)))
    assert groups.all(lambda each, _: value_of(each.read(1, 0)), [0]) == {0: [2.0, 2.0]}


def test_a_part_that_is_lost_costs_all_members_what_came_with_it(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = groups.wires[1, 1].send_part
    for lost in (False, True, False):
        monkeypatch.setattr(group_exchange, "WAIT", 0.2 if lost else 20)
        if lost:
            groups.wires[1, 1].send_part = lambda *_: None  # type: ignore[method-assign]
        groups.all(lambda each, member: each.send(0, 0, share(member, 1.0)), [1])
        groups.wires[1, 1].send_part = whole  # type: ignore[method-assign]
        for _ in rounds():
            arrived = groups.all(lambda each, _: each.read_inbox(0), [0])[0]
            if arrived[0].count or groups.members[0, 0].missed:
                break
        if lost:
            assert [each.missed for each in (groups.members[0, 0], groups.members[0, 1])] == [1, 1]
            groups.members[0, 0].missed = groups.members[0, 1].missed = 0
        assert [each.count for each in arrived] == [0 if lost else 1] * 2


def test_no_member_waits_for_a_group_that_is_gone(groups: Groups) -> None:
    groups.all(lambda each, member: each.publish(0, share(member, 1.0)))
    groups.lost.add(1)
    assert groups.all(lambda each, _: each.read(1, 0), [0]) == {0: [None, None]}
    groups.all(lambda each, member: each.send(1, 0, share(member, 1.0)), [0])
    assert groups.wires[0, 0]._unread[1] == 0


def test_a_member_that_never_has_what_another_has_gives_up(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_exchange, "PAUSES", (0.0, 0.001))
    groups.all(lambda each, member: each.publish(0, share(member, 1.0)))
    groups.members[1, 0].publish(0, share(0, 2.0))
    assert groups.all(lambda each, _: each.read(1, 0), [0]) == {0: [None, None]}
    assert groups.members[0, 1].missed == 1
    groups.members[1, 1].publish(0, share(1, 2.0))
    assert groups.all(lambda each, _: value_of(each.read(1, 0)), [0]) == {0: [2.0, 2.0]}


def part(value: float) -> list[Tensor]:
    return [torch.tensor([value])]


def test_what_comes_while_members_agree_is_taken_or_waits_as_they_agree() -> None:
    arrivals = ShardedInbox()
    arrivals.add(1, 1, part(1.0))
    assert arrivals.seen() == {1: 1}
    arrivals.add(1, 2, part(10.0))
    arrivals.add(1, 3, part(100.0))
    assert arrivals.has({1: 2})
    taken = arrivals.take({1: 2})
    assert taken is not None
    assert (taken.count, value_of(taken.total)) == (2, 11.0)
    assert arrivals.seen() == {1: 3}
    rest = arrivals.take({1: 3})
    assert rest is not None
    assert (rest.count, value_of(rest.total)) == (1, 100.0)


@pytest.mark.parametrize("cause", ["never came", "is of no use", "parameters changed", "too many wait"])
def test_a_member_that_lacks_a_part_says_so_once(cause: str) -> None:
    arrivals = ShardedInbox()
    arrivals.add(2, 1, part(1.0))
    upto = {2: 1, 1: 2}
    if cause == "never came":
        arrivals.add(1, 2, part(1.0))
    elif cause == "is of no use":
        arrivals.add(1, 1, part(1.0))
        arrivals.add(1, 2, None)
    elif cause == "parameters changed":
        arrivals.spoil()
        arrivals.add(1, 1, part(1.0))
        arrivals.add(1, 2, part(1.0))
    arrivals.seen()
    if cause == "too many wait":
        upto = {2: 1, 1: MOST_WAITING + 1}
        for number in range(1, MOST_WAITING + 2):
            arrivals.add(1, number, part(1.0))
    assert arrivals.has(upto)
    assert arrivals.take(upto) is None
    arrivals.add(1, upto[1], part(5.0))  # late, and done without
    arrivals.add(1, upto[1] + 1, part(7.0))
    arrivals.seen()
    taken = arrivals.take({2: 1, 1: upto[1] + 1})
    assert taken is not None
    assert (taken.count, value_of(taken.total)) == (1, 7.0)
