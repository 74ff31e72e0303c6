"""Links that messages share evenly in virtual time, and exchanges that cross a group's link and a server's card."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from lightning_omni.simulator import Cluster, Link
from lightning_omni.simulator.engine import Engine, Timeline
from lightning_omni.simulator.network import Exchanges, SharedLink

BANDWIDTH = 8.0


def carried(messages: list[tuple[float, float, float]]) -> list[tuple[float, int]]:
    """When messages of (moment, bytes, limit) have crossed, in the order in which that happens, and which they are."""
    engine, over = Engine(), list[tuple[float, int]]()
    link = SharedLink(engine, BANDWIDTH)

    def send(number: int, moment: float, nbytes: float, limit: float) -> Timeline:
        yield moment
        over.append(((yield link.carry(nbytes, limit)), number))

    for number, message in enumerate(messages):
        engine.start(send(number, *message))
    while engine.events:
        engine.step()
    return over


def filled(messages: list[tuple[float, float, float]]) -> list[float]:
    """The same from the rule itself: at every moment each message gets an even part of what others cannot take."""
    left, ends = [nbytes for _, nbytes, _ in messages], [math.inf] * len(messages)
    now = 0.0
    while math.inf in ends:
        here = [n for n, (start, *_) in enumerate(messages) if start <= now and ends[n] == math.inf]
        rates, free = {}, BANDWIDTH
        for place, number in enumerate(sorted(here, key=lambda n: messages[n][2])):
            rates[number] = min(messages[number][2], free / (len(here) - place))
            free -= rates[number]
        nexts = [start for start, *_ in messages if start > now] + [now + left[n] / rate for n, rate in rates.items()]
        until = min(nexts)
        for number, rate in rates.items():
            left[number] -= rate * (until - now)
            if left[number] <= 1e-9:
                ends[number] = until
        now = until
    return ends


message = st.tuples(st.integers(0, 6).map(float), st.integers(1, 20).map(float), st.sampled_from([1.0, 3.0, math.inf]))


@given(st.lists(message, min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_every_message_gets_an_even_part_of_what_the_others_cannot_take(
    messages: list[tuple[float, float, float]],
) -> None:
    found = {number: moment for moment, number in carried(messages)}
    assert [found[number] for number in range(len(messages))] == pytest.approx(filled(messages))


@given(st.lists(message, min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_link_never_carries_more_than_its_bandwidth_nor_a_message_faster_than_its_limit(
    messages: list[tuple[float, float, float]],
) -> None:
    over = carried(messages)
    for moment, number in over:
        start, nbytes, limit = messages[number]
        assert moment >= start + nbytes / min(limit, BANDWIDTH) - 1e-9
    for begin in {start for start, *_ in messages}:
        for end in {moment for moment, _ in over}:
            whole = sum(messages[n][1] for moment, n in over if begin <= messages[n][0] and moment <= end)
            assert whole <= BANDWIDTH * max(end - begin, 0.0) + 1e-6


def test_a_link_that_is_never_idle_carries_all_of_its_bandwidth() -> None:
    random = np.random.default_rng(0)
    messages = [(0.0, float(nbytes), math.inf) for nbytes in random.integers(1, 50, 30)]
    assert carried(messages)[-1][0] == pytest.approx(sum(nbytes for _, nbytes, _ in messages) / BANDWIDTH)


def test_equal_messages_that_start_together_end_together_in_the_order_in_which_they_came() -> None:
    for limit in (math.inf, 5.0):
        moments, numbers = zip(*carried([(1.0, 3.0, limit)] * 7), strict=True)
        assert moments == pytest.approx((1 + 7 * 3 / BANDWIDTH,) * 7)
        assert (numbers, len(set(moments))) == (tuple(range(7)), 1)
    assert carried([(1.0, 3.0, 1.0)] * 7)[0][0] == pytest.approx(4.0), "their own links are slower"


def test_of_a_thousand_messages_each_costs_little_more_than_of_ten() -> None:
    def steps(count: int) -> int:
        engine = Engine()
        link = SharedLink(engine, BANDWIDTH)

        def keep_sending(first: float) -> Timeline:
            yield first
            for _ in range(4):
                yield link.carry(1.0, math.inf)

        for number in range(count):
            engine.start(keep_sending(number / count))
        made = 0
        while engine.events:
            engine.step()
            made += 1
        assert engine.now == pytest.approx(4 * count / BANDWIDTH, rel=0.05)
        return made

    assert steps(1000) / 1000 < 1.5 * steps(10) / 10


# --- Exchanges -------------------------------------------------------------------------------------------------------


def seconds(groups: int, link: Link, card: Link, servers: int = 1, nbytes: int = 24) -> list[float]:
    """Of pushes, and of answers, of so many groups that begin together; a server takes no time."""
    engine, found = Engine(), list[float]()
    exchanges = Exchanges(
        engine, Cluster.even(groups, link=link, server=card, servers=servers), [1 / servers] * servers
    )

    def exchange(group: int) -> Timeline:
        begun = engine.now
        yield from exchanges.push(group, nbytes)
        pushed = engine.now
        yield from exchanges.answer(group, nbytes)
        found.extend((pushed - begun, engine.now - pushed))

    for group in range(groups):
        engine.start(exchange(group))
    while engine.events:
        engine.step()
    return found


def test_a_message_alone_takes_the_time_of_the_slower_of_link_and_card() -> None:
    for link, card, slower in ((3.0, 8.0, 8.0), (8.0, 3.0, 8.0), (6.0, 6.0, 4.0), (math.inf, 6.0, 4.0)):
        assert seconds(1, Link(link, 0.5), Link(card, 0.25)) == pytest.approx([0.75 + slower] * 2)


def test_a_card_slows_groups_together_only_if_it_is_slower_than_all_of_their_links() -> None:
    assert seconds(3, Link(2.0), Link(8.0)) == pytest.approx([12.0] * 6)
    assert seconds(3, Link(8.0), Link(12.0)) == pytest.approx([6.0] * 6)


def test_the_cards_of_several_servers_carry_their_parts_at_once() -> None:
    assert seconds(3, Link(24.0), Link(6.0), servers=4) == pytest.approx([3 * 1.0] * 6)
    assert seconds(1, Link(8.0), Link(6.0), servers=4) == pytest.approx([3.0] * 2), "no faster than the group's link"
