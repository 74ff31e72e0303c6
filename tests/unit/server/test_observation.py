"""A process that watches a run and is no rank: how it is let in, what it is shown, and what it may do."""

from __future__ import annotations

import math
import time
from datetime import datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from test_server_core import KEY, Link, control_peer, expect_refusal, trained_link

from lightning_omni.cli.serve import TIMES, RunLog
from lightning_omni.errors import Refused
from lightning_omni.methods import AsyncSGD
from lightning_omni.server.status import MOST_CHALLENGED, MOST_OBSERVERS, ranks_text
from lightning_omni.wire import handshake
from lightning_omni.wire import messages as m
from lightning_omni.wire.messages import EpochPlan

PLAN = EpochPlan(epoch=3, total=64, batch_size=2, budget=64)


def say(link: Link, message: m.Message, peer: bytes = b"observer") -> Any:
    """What a process that is no rank hears."""
    out = link.core.receive(m.CONTROL, peer, message, b"", link.now)
    return next((item.message for item in out if item.peer == peer), None)


def watch(link: Link, peer: bytes = b"observer", key: bytes = KEY) -> None:
    def ask(message: m.Message, expect: type[Any]) -> Any:
        answer = say(link, message, peer)
        if isinstance(answer, m.RefusedMessage):
            raise Refused(answer.code, answer.reason)
        assert isinstance(answer, expect)
        return answer

    handshake.observe(ask, key, bytes(32))


def overview(link: Link) -> m.Overview:
    shown = say(link, m.AskOverview())
    assert isinstance(shown, m.Overview)
    return shown


# --- Who is let in ---------------------------------------------------------------------------------------------------


def test_nothing_is_shown_to_a_process_that_has_not_proved_that_it_holds_the_key() -> None:
    link = trained_link((0, 1), (2,))
    for message in (m.AskOverview(), m.Evict(group=1, incarnation=1), m.AskStatus()):
        expect_refusal(say(link, message), "stranger", "Hello first")
    with pytest.raises(Refused, match="the key does not match"):
        watch(link, key=b"k" * 32)
    expect_refusal(say(link, m.AskOverview()), "stranger")
    assert link.core.strangers == 5
    assert link.core.roster.formed.alive == (0, 1)


def test_a_proof_that_was_overheard_opens_nothing_a_second_time() -> None:
    link = trained_link((0, 1), (2,))
    hello = m.Observe(version=m.VERSION, nonce=bytes(32))
    challenge = say(link, hello)
    proof = m.ObserverProof(mac=handshake.client_mac(KEY, hello, challenge.nonce))
    assert isinstance(say(link, proof), m.ObserverWelcome)
    say(link, hello, b"thief")
    expect_refusal(say(link, proof, b"thief"), "key")
    # Nor does a server's own proof, or that of a rank, open anything.
    say(link, hello, b"thief")
    expect_refusal(say(link, m.ObserverProof(mac=b""), b"thief"), "key")


def test_a_server_without_the_key_is_found_out() -> None:
    answers = iter((m.Challenge(nonce=bytes(32)), m.ObserverWelcome(mac=bytes(32))))
    with pytest.raises(Refused, match="does not hold the run's key"):
        handshake.observe(lambda message, expect: next(answers), KEY, bytes(32))


def test_another_version_is_told_both_numbers() -> None:
    answer = say(Link(), m.Observe(version=m.VERSION + 1, nonce=b""))
    expect_refusal(answer, "version", f"connects speaks protocol version {m.VERSION + 1}, the server {m.VERSION}")


def test_what_watches_is_no_rank_and_a_rank_watches_nothing() -> None:
    link = trained_link((0, 1), (2,))
    watch(link)
    for message in (m.AskStatus(), m.Heartbeat(sent=1.0), m.RankEnded(rank=2, reason="a lie"), m.Goodbye()):
        expect_refusal(say(link, message), "stranger")
    for other in (m.AskOverview(), m.Evict(group=1, incarnation=1)):
        expect_refusal(say(link, other, control_peer(2)), "stranger")
    assert link.core.roster.live == (0, 1, 2)


def test_those_that_watch_are_bounded_in_number() -> None:
    link = Link()
    for number in range(MOST_OBSERVERS + 1):
        watch(link, b"o%d" % number)
    assert len(link.core.peers) == MOST_OBSERVERS
    expect_refusal(say(link, m.AskOverview(), b"o0"), "stranger")
    for number in range(2 * MOST_CHALLENGED):
        say(link, m.Observe(version=m.VERSION, nonce=b""), b"s%d" % number)
    assert len(link.core.observers.challenges._open) == MOST_CHALLENGED


def test_a_connection_that_has_ended_watches_no_more() -> None:
    link = Link()
    watch(link)
    assert link.core.peers == [b"observer"]
    link.core.hang_up(b"observer")
    assert link.core.peers == []
    expect_refusal(say(link, m.AskOverview()), "stranger")


def test_it_outlasts_the_run() -> None:
    link = trained_link((0, 1), (2,))
    watch(link)
    assert overview(link).run
    link.core.reset()
    assert overview(link).run == ""


# --- What is shown ---------------------------------------------------------------------------------------------------


def test_an_overview_has_what_was_counted_and_heard() -> None:
    link = trained_link((0, 1), (2,))
    watch(link)
    for rank in (0, 1, 2):
        link.core.roster.members[rank].host = f"10.0.0.{rank // 2}"
    link.now += 5.0
    link.control(0, m.Heartbeat(sent=1.0, step_time=0.5, compute_time=0.2, exchange_time=0.1, metrics={"loss": 2.0}))
    metrics = {"loss": 4.0, "omni/noise_scale": 64.0}
    link.control(1, m.Heartbeat(sent=1.0, step_time=0.5, compute_time=0.4, exchange_time=0.1, metrics=metrics))
    shown = overview(link)
    assert (shown.announced, shown.live, shown.missing, shown.recorder) == (3, (0, 1, 2), (), 0)
    assert shown.method is not None
    assert shown.method["name"] == "async_sgd"
    first, second = shown.groups
    assert first.hosts == ("10.0.0.0",)
    assert second.hosts == ("10.0.0.1",)
    assert (first.silence, second.silence) == (0.0, 5.0)
    assert (first.status.slowest_rank, first.status.slowest_time) == (1, 0.4)
    assert first.samples is None  # no data was leased
    assert first.age == 5.0
    assert shown.metrics == {"loss": 3.0, "omni/noise_scale": 64.0}
    assert msgpack_copy(shown) == shown


def test_metrics_that_have_no_mean_do_not_end_the_server() -> None:
    link = trained_link((0, 1), (2,))
    watch(link)
    for rank, loss in enumerate((math.inf, -math.inf)):
        link.control(rank, m.Heartbeat(sent=1.0, metrics={"loss": loss}))
    assert math.isnan(overview(link).metrics["loss"])


def test_samples_are_counted_by_group_and_once() -> None:
    link = trained_link((0, 1), (2,))
    watch(link)
    for rank in (0, 1, 2):
        link.control(rank, m.OpenEpoch(plan=PLAN))
    for rank, trained in ((0, 0), (2, 0), (0, 1), (1, 1), (2, 1)):
        link.control(rank, m.DrawBatches(epoch=3, generation=1, number=trained, trained=trained))
    shown = overview(link)
    assert [group.samples for group in shown.groups] == [4, 2]
    assert (shown.plan, shown.trained) == (PLAN, 6)
    for rank in (0, 1, 2):
        link.control(rank, m.LeaveEpoch(epoch=3, generation=1, trained=1))
    link.control(0, m.OpenEpoch(plan=EpochPlan(epoch=4, total=8, batch_size=2, budget=8)))
    assert [group.samples for group in overview(link).groups] == [4, 2]  # they go on through the epochs
    link.form((0, 1), (2,), generation=2)
    assert [group.samples for group in overview(link).groups] in ([0, 0], [None, None])


def test_what_happens_is_written_down_with_its_time() -> None:
    link = trained_link((0, 1), (2,), (3,))
    watch(link)
    link.now += 2.0
    link.core.lose(2, "rank 2 gave no sign of life for 30 s")
    link.core.tick(link.now)
    link.now += 1.0
    link.control(3, m.Goodbye())
    kinds = [(entry.kind, entry.text, entry.age) for entry in overview(link).log]
    assert kinds == [
        ("joined", "ranks 0 to 3 joined", 3.0),
        ("formed", f"3 groups formed (0, 1, 2): {AsyncSGD()!r}", 3.0),
        ("lost", "rank 2 lost: rank 2 gave no sign of life for 30 s", 1.0),
        ("left", "rank 3 left in good order", 0.0),
    ]
    link.core.fail("out of luck")
    assert overview(link).over == "the parameter server failed: out of luck"
    assert overview(link).log[-1].kind == "over"


def test_the_log_has_the_time_of_day_although_the_servers_clock_stood_still_for_long() -> None:
    said, began = StringIO(), datetime.now().replace(microsecond=0)
    link = Link()
    link.now = time.monotonic() - 500.0  # it was suspended for so long
    link.join(0)
    link.tick(1.0)
    RunLog(link.core, Console(file=said, width=200)).write(at_once=True)
    day, hour, text = said.getvalue().split(maxsplit=2)
    assert text == "rank 0 joined\n"
    assert abs(datetime.strptime(f"{day} {hour}", TIMES) - began) < timedelta(seconds=30)


@pytest.mark.parametrize(
    ("ranks", "text"), [((), "rank "), ((7,), "rank 7"), ((0, 1, 4), "ranks 0 to 1, 4"), ((1, 3), "ranks 1, 3")]
)
def test_ranks_are_said_in_ranges(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_text(ranks) == text


# --- What it may do --------------------------------------------------------------------------------------------------


def test_a_group_is_evicted_by_hand_and_the_others_go_on() -> None:
    link = trained_link((0, 1), (2,), (3,))
    watch(link)
    out = link.core.receive(m.CONTROL, b"observer", m.Evict(group=1, incarnation=1), b"", link.now)
    notice = next(item.message for item in out if item.peer == control_peer(2))
    assert notice == m.Notice(lost=(2,), reason="group 1 was evicted by hand", barred=True)
    assert m.Acknowledged() in [item.message for item in out if item.peer == b"observer"]
    assert link.core.roster.formed.alive == (0, 2)
    assert not link.core.roster.over


@pytest.mark.parametrize(
    ("evict", "reason"),
    [
        (m.Evict(group=0, incarnation=1), "the run would end with it"),
        (m.Evict(group=1, incarnation=2), "no group 1 of incarnation 2"),
        (m.Evict(group=9, incarnation=1), "no group 9"),
        (m.Evict(group=-1, incarnation=1), "no group -1"),
        (m.Evict(group=1, incarnation=1, bars=True), "no group joins this run on its own"),
    ],
)
def test_the_recorders_group_and_one_that_is_not_there_are_not_evicted(evict: m.Evict, reason: str) -> None:
    link = trained_link((0, 1), (2,))
    watch(link)
    expect_refusal(say(link, evict), "protocol", reason)
    assert link.core.roster.formed.alive == (0, 1)


def test_nothing_is_evicted_after_the_end() -> None:
    link = trained_link((0, 1), (2,))
    watch(link)
    link.core.fail("out of luck")
    expect_refusal(say(link, m.Evict(group=1, incarnation=1)), "protocol", "the run is over")


def test_a_server_that_goes_on_does_not_say_again_who_was_lost_before() -> None:
    link = trained_link((0, 1), (2,))
    link.core.lose(2, "rank 2 gave no sign of life for 30 s")
    assert [each.kind for each in link.core.status_service.run_events][-1] == "lost"
    link.core.load(link.core.state(), (), link.now)
    assert [each.kind for each in link.core.status_service.run_events] == ["restored"]


def test_an_observer_sees_when_the_state_was_saved() -> None:
    link = trained_link((0, 1), (2,))
    watch(link)
    assert overview(link).saved == -1.0
    link.core.journal.saves += 1
    assert overview(link).saved == 0.0
    link.now += 7.0
    assert overview(link).saved == 7.0
    link.core.reset()
    watch(link)
    assert overview(link).saved == -1.0, "nothing of the next run"


def msgpack_copy(message: m.Message) -> Any:
    return m.decode(m.encode(message), at="rank", channel=m.CONTROL)
