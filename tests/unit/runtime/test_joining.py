"""Groups that come on their own, with a launcher each, while the run goes on; and go, also the one that began it."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from patience import SLOWER
from processes import Process
from runs import free_port
from test_observation import say, watch
from test_server_core import (
    TIMEOUT,
    Link,
    control_peer,
    expect_refusal,
    gradient,
    new_parameters,
    part_of,
    push_of,
    seed_of,
)
from torch import nn

from lightning_omni import FSDP, Elastic, Server
from lightning_omni.cli.commands import JOINED_HEARTBEAT_TIMEOUT
from lightning_omni.errors import ConfigurationError, ConnectionLost, Evicted, OmniError, RankLost, Refused
from lightning_omni.runtime import WorldOptions
from lightning_omni.runtime.model.meshes import ModelParallel, sizes_in
from lightning_omni.runtime.registration import COMES_BACK, GroupRegistration, ask_for_all, comes_back_to, return_to
from lightning_omni.runtime.server_process import RunServer
from lightning_omni.runtime.state.checkpoint import CheckpointFolder
from lightning_omni.server.membership import timeouts as time_limits
from lightning_omni.server.status import MOST_OBSERVERS
from lightning_omni.strategy.joining import Rejoining, _check_functions, _sampled
from lightning_omni.strategy.loops.epoch import DataSizes, EntryPoint
from lightning_omni.strategy.pytorch_lightning import OmniStrategy
from lightning_omni.topology import Topology
from lightning_omni.transport.connections import answer_of, refused_return
from lightning_omni.transport.zeromq import ZeroMQ
from lightning_omni.transport.zeromq.observer import Observer
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import pack, unpack
from lightning_omni.wire.handshake import fingerprint_problem, hello_of
from lightning_omni.wire.layout import Layout
from lightning_omni.wire.messages import EpochPlan

# --- The protocol ----------------------------------------------------------------------------------------------------

PLAN = EpochPlan(epoch=0, total=12, batch_size=2, budget=12)
STATE = {"epoch": 0, "module": {"mean": torch.arange(3.0)}}


class Joined(Link):
    """A run that groups join: they come as processes that watch, and then as ranks."""

    def register(self, ranks: int, peer: bytes) -> Any:
        """A group asks for its place, on the connection of a process that watches."""
        if not self.core.is_admitted(m.CONTROL, peer):
            watch(self, peer=peer)
        return say(self, m.RegisterGroup(ranks=ranks), peer)

    def begin(self, ranks: int = 1, plan: EpochPlan = PLAN) -> m.GroupRegistered:
        """The first group: joins, forms, hands weights over and opens the epoch."""
        registered: m.GroupRegistered = self.register(ranks, b"first")
        self.world_size = ranks
        for rank in range(ranks):
            self.come(rank, registered.run, ranks)
        self.form(tuple(range(ranks)))
        message, payload = seed_of({"parts": [part_of(new_parameters())]})
        assert self.data(0, message, payload)[0] == m.WeightsUploaded()
        self.control(0, m.OpenEpoch(plan=plan))
        return registered

    def come(self, rank: int, run: str, announced: int = 0) -> None:
        """A rank is let in."""
        self.join(rank, run=run, world_size=announced)

    def part(self) -> m.Message:
        """The groups have parted: the recorder says what a group that joins is given."""
        packed, buffer = pack(STATE)
        store = m.StoreRunState(packed=packed, nbytes=buffer.numel())
        stored: m.Message = self.data(self.core.roster.recorder, store, buffer.numpy().tobytes())[0]
        return stored

    def ask(self, rank: int) -> list[Any]:
        """A rank that was let in wants to be a group: what it hears, or nothing yet."""
        return [answer for answer, _ in self.say(control_peer(rank), m.Join(ranks=(rank,)))]

    def meet(self, number: int, *ranks: int) -> None:
        """All come to a synchronization point."""
        for rank in ranks:
            self.say(control_peer(rank), m.Contribute(number=number, what="agree", uploaded=False))


def test_the_group_that_asks_first_begins_the_run_and_others_wait_until_it_has() -> None:
    link = Joined()
    first = link.register(2, b"first")
    assert (first.first, first.announced) == (0, 0)
    assert first.run
    assert link.register(2, b"first") == first
    assert link.register(1, b"second").first == -1
    link.world_size = 2
    for rank in range(2):
        link.come(rank, first.run, 2)
    second, third = link.register(3, b"second"), link.register(1, b"third")
    assert (second.first, second.announced, second.run) == (2, 2, first.run)
    assert (third.first, third.announced) == (5, 2)
    assert link.register(3, b"second") == second  # asked again, it has the place it had


def test_if_the_group_that_was_to_begin_is_gone_the_next_one_begins() -> None:
    link = Joined()
    link.register(1, b"first")
    assert link.register(1, b"second").first == -1
    link.deliver(link.core.hang_up(b"first"))
    assert link.register(1, b"second").first == 0


def test_a_group_that_waits_is_told_why_the_first_one_could_not_form_groups() -> None:
    link = Joined()
    first = link.register(1, b"first")
    link.come(0, first.run, 1)
    assert link.register(1, b"second").first == 1
    link.inbox.clear()
    link.deliver(link.core.hang_up(control_peer(0)))
    (notice,) = [message for message, _ in link.inbox[b"second", m.CONTROL]]
    assert notice.over
    assert notice.reason.startswith("rank 0 is gone without a goodbye")


def test_the_group_that_was_to_begin_does_so_at_a_server_that_was_started_again_before_it_came() -> None:
    first, link = Joined().register(2, b"first"), Joined(world_size=2)
    for rank in range(2):
        link.come(rank, first.run, 2)
    second = link.register(1, b"second")
    assert (second.first, second.announced, second.run) == (2, 2, first.run)


def test_a_server_that_was_started_again_is_begun_with_by_the_group_that_has_asked_there() -> None:
    link = Joined(world_size=1)
    first = link.register(1, b"second")
    assert first.first == 0
    with pytest.raises(AssertionError, match="another group is about to begin a run here"):
        link.come(0, "joins-the-one-before", 1)
    link.come(0, first.run, 1)
    assert link.register(1, b"third").run == first.run


def test_groups_of_a_run_of_which_a_server_knows_nothing_are_told_what_to_start() -> None:
    link = Joined(world_size=1)
    for begun in (False, True):
        if begun:
            link.come(0, link.register(1, b"another").run, 1)
        for rank, announced in ((1, 0), (0, 2))[: 1 + begun]:
            said = "has begun it, .* joins the other" if announced else "nothing was saved yet, .* again: each"
            with pytest.raises(AssertionError, match=said):
                link.come(rank, "joins-the-one-before", announced)


def test_a_group_does_not_join_again_a_run_that_the_server_does_not_know() -> None:
    assert type(refused_return(Refused("gone", "no such run"))) is RankLost
    assert type(refused_return(Refused("busy", "another run"))) is ConnectionLost


def test_the_group_that_was_to_begin_is_missed_although_so_many_watch_that_its_connection_is_displaced() -> None:
    link = Joined()
    link.register(1, b"first")
    for number in range(MOST_OBSERVERS):
        watch(link, peer=b"watches %d" % number)
    assert not link.core.is_admitted(m.CONTROL, b"first")
    assert link.core.peers.count(b"first") == 1
    assert link.register(1, b"second").first == -1
    link.deliver(link.core.hang_up(b"first"))
    assert link.register(1, b"second").first == 0
    assert link.core.peers.count(b"second") == 1


def test_a_run_whose_ranks_were_announced_is_not_joined_so() -> None:
    link = Joined(world_size=1)
    link.join(0)
    expect_refusal(link.register(1, b"late"), "busy", "were all announced")


@pytest.mark.parametrize("ranks", [0, -1, 1 << 16])
def test_an_impossible_number_of_ranks_is_refused(ranks: int) -> None:
    expect_refusal(Joined().register(ranks, b"first"), "rank")


def test_a_group_joins_once_the_others_have_parted_and_has_a_batch_at_once() -> None:
    link = Joined()
    run = link.begin().run
    place = link.register(1, b"late")
    link.come(place.first, run)
    assert link.ask(place.first) == []  # nothing is stored that it could be given
    link.inbox.clear()
    assert link.part() == m.RunStateStored()
    (joined,) = link.news(place.first)
    assert isinstance(joined, m.Joined)
    assert (joined.group, joined.live, joined.synchronizations, joined.plan) == (1, (0, 1), 0, PLAN)
    answer, payload = link.data(1, m.ReadRunState())
    given = unpack(answer.packed, torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    assert given["epoch"] == 0
    assert torch.equal(given["module"]["mean"], STATE["module"]["mean"])  # type: ignore[index]
    for number in range(5):  # all that is left, and not the batch that the group was given
        assert link.control(0, m.DrawBatches(epoch=0, generation=1, number=number)).batches
    assert not link.control(0, m.DrawBatches(epoch=0, generation=1, number=5)).batches
    assert link.control(1, m.DrawBatches(epoch=0, generation=1, number=0)).batches


def test_no_group_joins_while_the_others_synchronize_nor_with_what_was_stored_before() -> None:
    link = Joined()
    run = link.begin().run
    link.part()
    link.meet(0, 0)  # a synchronization point is over: what was stored is of before
    place = link.register(1, b"late")
    link.come(place.first, run)
    assert link.ask(place.first) == []
    link.part()
    (joined,) = (each for each in link.news(place.first) if isinstance(each, m.Joined))
    assert joined.synchronizations == 1


def test_no_group_joins_while_one_of_the_others_waits_for_them_at_a_synchronization_point() -> None:
    link = three_groups()
    link.part()
    link.meet(0, 0)
    place = link.register(1, b"late")
    link.come(place.first, link.core.roster.run)
    assert link.ask(place.first) == []
    link.meet(0, 1, 2)
    assert any(isinstance(each, m.Gathered) for each in link.news(0))
    assert not any(isinstance(each, m.Joined) for each in link.news(place.first))
    link.part()
    assert any(isinstance(each, m.Joined) for each in link.news(place.first))


@pytest.mark.parametrize("restarts", [False, True])
def test_no_group_joins_while_the_others_are_on_their_way_to_a_validation(restarts: bool) -> None:
    link = Joined()
    run = link.begin(plan=msgspec.structs.replace(PLAN, validate_every=4)).run
    link.part()
    for number in range(2):
        link.control(0, m.DrawBatches(epoch=0, generation=1, number=number))
    asked = m.AskNext(epoch=0, generation=1, trained=2, interval=0)
    assert link.control(0, asked).next == "validate"
    if restarts:
        link.core.load(link.core.state(), (), link.now)
        link.join(0, run=run, world_size=1, returns=True)
    place = link.register(1, b"late")
    link.come(place.first, run)
    assert link.ask(place.first) == []
    link.meet(0, 0)
    assert not any(isinstance(each, m.Joined) for each in link.news(place.first))
    link.part()
    assert any(isinstance(each, m.Joined) for each in link.news(place.first))


def test_no_group_joins_an_epoch_in_which_there_is_nothing_left_to_train() -> None:
    link = Joined()
    run = link.begin().run
    for number in range(6):
        link.control(0, m.DrawBatches(epoch=0, generation=1, number=number))
    link.part()
    place = link.register(1, b"late")
    link.come(place.first, run)
    assert link.ask(place.first) == []
    link.deliver(link.core.hang_up(control_peer(0)))  # its batches come back, and there is nobody else
    assert any(isinstance(each, m.Joined) for each in link.news(place.first))


def three_groups() -> Joined:
    """One that has begun the run, and two that have joined it."""
    link = Joined()
    run = link.begin().run
    link.part()
    for peer in (b"second", b"third"):
        place = link.register(1, peer)
        link.come(place.first, run)
        assert link.ask(place.first)
    return link


def test_the_run_outlives_the_group_that_began_it_and_its_recorder_is_the_lowest_rank_that_lives() -> None:
    link = three_groups()
    expect_refusal(
        link.control(1, m.FormGroups(generation=2, groups=((0,), (1,), (2,)), method={})), "protocol", "rank 0"
    )
    link.deliver(link.core.hang_up(control_peer(0)))
    assert not link.core.roster.over
    status = link.control(1, m.AskStatus())
    assert (status.recorder, [each.group for each in status.groups], status.lost) == (1, [1, 2], (0,))
    assert link.part() == m.RunStateStored()
    link.control(1, m.Goodbye())
    assert link.control(2, m.AskStatus()).recorder == 2
    assert not link.core.roster.is_over


def test_a_run_that_all_have_left_goes_on_with_the_next_group_and_is_over_when_it_is_finished() -> None:
    link = Joined()
    run = link.begin().run
    link.part()
    link.deliver(link.core.hang_up(control_peer(0)))
    assert not link.core.roster.is_over
    assert link.core.roster.live == ()
    place = link.register(1, b"next")
    assert (place.run, place.first, place.announced) == (run, 1, 1)
    link.come(1, run)
    (joined,) = link.ask(1)
    assert (joined.group, joined.live) == (1, (1,))
    assert link.part() == m.RunStateStored()
    link.control(1, m.Goodbye(finished=True))
    assert link.core.roster.is_over


@pytest.mark.parametrize("stop", ["validate", "end", "skip"])
def test_if_all_die_before_they_have_stopped_as_was_said_the_group_that_comes_next_does(stop: str) -> None:
    link = Joined()
    run = link.begin().run
    link.part()
    place = link.register(1, b"next")
    link.come(place.first, run)
    assert isinstance(link.control(0, m.LeaveEpoch(epoch=0, generation=1, trained=0, stop=stop)), m.EpochLeft)
    assert link.ask(place.first) == []  # the others are about to end
    link.deliver(link.core.hang_up(control_peer(0)))
    (joined,) = (each for each in link.news(place.first) if isinstance(each, m.Joined))
    assert joined.live == (place.first,)
    assert len(link.control(place.first, m.DrawBatches(epoch=0, generation=1, number=0)).batches) == 1
    assert link.data(place.first, m.FetchMessage(optimizer=0))[0].stop == stop


def test_a_run_that_cannot_go_on_is_over_when_its_groups_are_gone_and_the_next_one_may_come() -> None:
    link = three_groups()
    for rank, what in enumerate(("agree", "gather")):
        link.say(control_peer(rank), m.Contribute(number=0, what=what, uploaded=False))
    assert "while rank 0 called agree" in link.core.roster.over
    for rank in range(3):
        assert not link.core.roster.is_over
        link.deliver(link.core.hang_up(control_peer(rank)))
    assert link.core.roster.is_over


def test_a_group_that_waits_hears_when_the_run_is_over() -> None:
    link = Joined()
    run = link.begin().run
    place = link.register(1, b"late")
    link.come(place.first, run)
    assert link.ask(place.first) == []
    link.control(0, m.Goodbye(finished=True))
    assert any(getattr(each, "code", "") == "over" for each in link.news(place.first))
    expect_refusal(link.register(1, b"later"), "over")


def test_if_the_group_that_began_dies_before_others_can_go_on_they_are_told_and_the_next_run_may_come() -> None:
    link = Joined()
    run = link.begin().run
    place = link.register(1, b"late")
    link.come(place.first, run)
    assert link.ask(place.first) == []
    link.deliver(link.core.hang_up(control_peer(0)))
    assert any("gone; start this one again" in getattr(each, "reason", "") for each in link.news(place.first))
    assert link.core.roster.is_over


def test_a_group_that_dies_while_it_waits_is_missed_by_nobody() -> None:
    link = Joined()
    run = link.begin().run
    place = link.register(1, b"late")
    link.come(place.first, run)
    link.ask(place.first)
    link.deliver(link.core.hang_up(control_peer(place.first)))
    link.part()
    assert link.core.roster.formed.alive == (0,)
    link.meet(0, 0)
    assert any(isinstance(each, m.Gathered) for each in link.news(0))


def test_what_a_group_is_given_is_said_by_the_recorder_alone() -> None:
    link = Joined()
    run = link.begin().run
    link.part()
    place = link.register(1, b"late")
    link.come(place.first, run)
    link.ask(place.first)
    packed, buffer = pack({})
    store = m.StoreRunState(packed=packed, nbytes=buffer.numel())
    expect_refusal(link.data(1, store)[0], "malformed", "only rank 0 says what groups that join are given")


# --- An evicted group comes again ------------------------------------------------------------------------------------


def test_what_an_evicted_group_still_pushes_is_refused_also_when_it_has_joined_again() -> None:
    link = Joined()
    run = link.begin().run
    link.part()
    place = link.register(1, b"second")
    link.come(place.first, run)
    assert link.ask(place.first)
    link.tick(20.0)
    link.control(0, m.AskStatus())
    link.inbox.clear()
    link.tick(20.0)  # rank 1 was silent for 40 s, rank 0 for 20
    (notice,) = (each for each in link.news(1) if isinstance(each, m.Notice))
    assert notice == m.Notice(lost=(1,), reason="rank 1 gave no sign of life for 30 s")
    link.part()
    again = link.register(1, b"second again")
    link.come(again.first, run)
    (joined,) = (each for each in link.ask(again.first) if isinstance(each, m.Joined))
    assert (again.first, joined.group, joined.live) == (2, 2, (0, 2))
    clock = link.core.store.clock
    for late in (push_of(gradient(0), incarnation=2), (m.FetchMessage(optimizer=0), b"")):
        expect_refusal(link.data(1, *late)[0], "lost", "rank 1 gave no sign of life")
    assert link.core.store.clock == clock
    assert link.core.roster.formed.alive == (0, 2)


def test_where_groups_join_on_their_own_a_silent_rank_counts_as_dead_sooner() -> None:
    for joins, limit in ((True, 5.0), (False, TIMEOUT)):
        link = Joined(joined_heartbeat_timeout=5.0)
        if joins:
            link.begin()
        else:
            link.world_size = 1
            link.join(0)
            link.form((0,))
        link.tick(limit)
        assert not link.core.roster.lost
        link.tick(0.1)
        assert link.core.roster.lost == {0: f"rank 0 gave no sign of life for {limit:.0f} s"}


def test_a_group_that_a_person_evicted_or_that_failed_by_itself_is_told_not_to_come_again() -> None:
    link = three_groups()
    link.say(control_peer(1), m.Goodbye(reason="rank 1 failed: KeyError"))
    say(link, m.Evict(group=2, incarnation=3), b"third")
    for rank in (1, 2):
        answer = link.control(rank, m.Heartbeat(sent=1.0))
        assert (rank in answer.lost, answer.barred) == (True, True)
    assert link.core.roster.barred == {1, 2}
    assert link.core.roster.state()["barred"] == [1, 2]


def test_from_a_host_that_a_person_has_barred_no_group_joins_any_more() -> None:
    link = three_groups()
    link.core.roster.members[2].host = "10.0.0.7"
    say(link, m.Evict(group=2, incarnation=3, bars=True), b"third")
    assert link.core.roster.state()["barred_hosts"] == ["10.0.0.7"]
    for peer, host in ((b"fourth", "10.0.0.7"), (b"fifth", "10.0.0.8")):
        place = link.register(1, peer)
        link.come(place.first, link.core.roster.run)
        link.core.roster.members[place.first].host = host
        (answer,) = link.ask(place.first)
        if host == "10.0.0.7":
            expect_refusal(answer, "barred", "a person has barred 10.0.0.7 from this run")
        else:
            assert isinstance(answer, m.Joined)
    assert link.core.roster.formed.alive == (0, 1, 3)


@pytest.mark.parametrize(("code", "kind"), [("lost", Evicted), ("barred", RankLost), ("over", RankLost)])
def test_a_rank_knows_whether_its_group_may_come_again(code: str, kind: type) -> None:
    with pytest.raises(RankLost) as caught:
        answer_of(m.RefusedMessage(code=code, reason="why"), m.Acknowledged)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("came", "most", "ranks", "says"),
    [
        ("", 10, 1, ""),  # it was in no run
        ("a-run 0", 0, 1, ""),
        ("a-run 3", 3, 1, "joined again 3 times in a row (Elastic(max_rejoins=...)) and does so no more"),
        ("a-run 2", 3, 4, "not all of its ranks were started by this process"),
        ("a-run 2", 3, 1, None),
    ],
)
def test_a_group_joins_again_so_often_in_a_row_if_this_process_can_start_it(
    came: str,
    most: int,
    ranks: int,
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(COMES_BACK, came)
    before = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", before)  # as it is afterwards, too
    error = ConnectionLost("gone")
    rejoining = Rejoining()
    assert rejoining.arm(error, error, most, ranks) == rejoining.is_armed == (says is None)
    assert (says or "") in caplog.text
    assert bool(caplog.text) == bool(says)
    assert (sys.excepthook is before) == (says is not None)


def test_a_group_whose_directory_is_deleted_can_be_imported_and_does_not_rejoin(tmp_path: Path) -> None:
    program = (
        f"import importlib, os; os.chdir({str(tmp_path)!r}); os.rmdir({str(tmp_path)!r});"
        "from lightning_omni.strategy import joining as rejoin; importlib.reload(rejoin);"
        "rejoining = rejoin.Rejoining(); rejoining.took_part('a-run', True); error = ValueError();"
        "assert not rejoining.arm(error, error, 10, 1)"
    )
    process = Process([sys.executable, "-c", program])
    try:
        assert process.end(PATIENCE) == 0, process.output
    finally:
        process.kill()
    assert "the directory in which its command was started is gone" in process.output


def test_no_group_joins_again_a_run_that_is_finished_and_its_process_may_train_in_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(COMES_BACK, "a-run 1")
    rejoining = Rejoining()
    rejoining.took_part("a-run", is_saved=True)
    rejoining.finished()
    error = ConnectionLost("gone")
    assert not rejoining.arm(error, error, most=10, ranks=1)
    assert comes_back_to() == ("", 0, True)


def test_an_error_after_a_later_run_has_ended_well_starts_no_command_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: shown.append(error))
    monkeypatch.setenv(COMES_BACK, "a-run 1")
    rejoining, error = Rejoining(), ConnectionLost("gone")
    monkeypatch.setattr(rejoining, "start_again", lambda: shown.append(SystemExit()))
    assert rejoining.arm(error, error, most=10, ranks=1)
    rejoining.finished()
    sys.excepthook(type(error), error, None)
    assert shown == [error]


def test_a_script_that_has_caught_its_eviction_and_fits_again_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # as it is afterwards, too
    monkeypatch.setenv(COMES_BACK, "a-run 1")
    rejoining, error = Rejoining(), ConnectionLost("gone")
    assert rejoining.arm(error, error, most=10, ranks=1)
    rejoining.enlisted("another-run")
    assert not rejoining.is_armed


def test_an_eviction_after_a_minute_in_the_run_is_not_one_more_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # as it is afterwards, too
    error = ConnectionLost("gone")
    for seconds, joins in ((50.0, False), (70.0, True)):
        monkeypatch.setenv(COMES_BACK, "a-run 3")
        rejoining = Rejoining()
        with monkeypatch.context() as then:
            began = time.monotonic()
            then.setattr(time, "monotonic", lambda: began - seconds)  # noqa: B023 - called in this iteration
            rejoining.took_part("a-run", is_saved=True)
        assert rejoining.arm(error, error, most=3, ranks=1) is joins


def test_a_group_that_comes_back_to_a_server_that_is_gone_hears_that_the_run_may_be_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIGHTNING_OMNI_KEY", "ab" * 32)
    monkeypatch.setattr("lightning_omni.transport.zeromq.observer.Observer", partial(Observer, timeout=0.1))
    options = WorldOptions(elastic=True, server="tcp://127.0.0.1:9")
    for came, says in (("", "no parameter server answers at"), ("a-run 1", "the run a-run: either that is over")):
        monkeypatch.setenv(COMES_BACK, came)
        with pytest.raises(ConnectionLost, match=says):
            GroupRegistration(options, 0, 1, lambda text: text)


def test_a_group_registers_with_the_encryption_of_its_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found(Exception):
        pass

    def observe(address: str, key: bytes, encryption: str) -> None:
        raise Found(address, encryption)

    monkeypatch.setenv("LIGHTNING_OMNI_KEY", "ab" * 32)
    monkeypatch.setattr("lightning_omni.transport.zeromq.observer.Observer", observe)
    for server in (Server(SERVER, encryption="off"), Server(SERVER, transport=ZeroMQ(encryption="off"))):
        with pytest.raises(Found) as caught:
            GroupRegistration(WorldOptions(elastic=True, server=server), 0, 1, lambda text: text)
        assert caught.value.args == (SERVER, "off")


@pytest.mark.parametrize(
    ("is_saved", "listens", "kind"),
    [(False, False, RankLost), (False, True, ConnectionLost), (True, False, ConnectionLost)],
)
def test_no_group_comes_back_to_a_run_that_was_not_saved_and_whose_server_has_ended(
    is_saved: bool, listens: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is the network that does not bring it there: a machine that answers says that nobody listens."""
    monkeypatch.setenv("LIGHTNING_OMNI_KEY", "ab" * 32)
    monkeypatch.setattr("lightning_omni.transport.zeromq.observer.Observer", partial(Observer, timeout=0.1))
    monkeypatch.setenv(COMES_BACK, return_to("a-run", 1, is_saved))
    assert comes_back_to() == ("a-run", 1, is_saved)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()
        options = WorldOptions(elastic=True, server=f"tcp://127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(OmniError) as caught:
            GroupRegistration(options, 0, 1, lambda text: text)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (Refused("over", "it has been trained to its end"), RankLost),
        (RankLost("the run is over: it has been trained to its end"), RankLost),
        (Evicted("rank 3 gave no sign of life"), ConnectionLost),
        (ConnectionLost("no parameter server answers"), ConnectionLost),
    ],
)
def test_what_rank_0_of_a_group_is_refused_is_refused_to_all_of_its_ranks(error: OmniError, elsewhere: type) -> None:
    """And only where rank 0 may try again, the others may."""
    said = list[str]()

    def tell(text: str) -> str:
        said.append(text)
        return said[0]

    def ask() -> str:
        raise error

    with pytest.raises(type(error), match=f"^{error}$"):
        ask_for_all(tell, True, ask)
    with pytest.raises(OmniError, match=f"rank 0 of this group could not join: {error}") as caught:
        ask_for_all(tell, False, ask)
    assert type(caught.value) is elsewhere
    assert len(said) == 2


# --- What is refused -------------------------------------------------------------------------------------------------

SERVER = "tcp://127.0.0.1:5555"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"server": None}, "elastic=True without the address of a server"),
        ({"server": "per-node"}, "elastic=True without the address of a server"),
        ({"groups": 2}, "groups=2 and elastic=True"),
        ({"method": "gossip"}, "elastic=True and method=Gossip"),
        ({"data": "static"}, 'elastic=True and data="static"'),
        ({"validation": "published"}, 'elastic=True and validation="published"'),
        ({"merged": "head"}, "merged='head' and elastic=True"),
    ],
)
def test_what_groups_that_join_cannot_do_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        OmniStrategy(**{"elastic": True, "server": SERVER, **given})
    assert says in str(caught.value)


def test_the_environment_names_a_run_to_join_and_an_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def options(**given: Any) -> WorldOptions:
        return OmniStrategy(**given).world_options

    assert not options(server=SERVER).elastic.join
    monkeypatch.setenv("LIGHTNING_OMNI_SERVER", SERVER)
    assert (options().server.address, options().elastic.join) == (SERVER, True)
    kept = options(server=Server(save=5.0), elastic=Elastic(heartbeat=5.0))
    assert (kept.server, kept.elastic) == (Server(SERVER, save=5.0), Elastic(join=True, heartbeat=5.0))
    assert not options(elastic=False).elastic.join
    assert not options(server="tcp://127.0.0.1:7").elastic.join
    with pytest.raises(ConfigurationError, match="LIGHTNING_OMNI_SERVER"):
        options(groups=3)


@pytest.mark.parametrize(
    ("server", "elastic", "says"),
    [
        (
            {"save": 5.0, "threads": 2},
            {},
            r"save=5\.0\), Server\(threads=2\): .* --state DIR --save-every 5 --threads 2$",
        ),
        ({"host": "10.0.0.9"}, {"timeout": None}, "Elastic.timeout=None.: .* --host 10.0.0.9 --progress-timeout 0$"),
        ({}, {"join": True, "heartbeat": 9.5}, r"Elastic\(heartbeat=9\.5\): .* serve --heartbeat-timeout 9\.5$"),
    ],
)
def test_settings_that_a_running_server_has_of_its_own_are_warned_of_with_its_options(
    server: dict[str, Any], elastic: dict[str, Any], says: str
) -> None:
    with pytest.warns(UserWarning, match=says):
        OmniStrategy(server=Server(SERVER, **server), elastic=Elastic(**elastic))


@pytest.mark.parametrize(
    ("given", "inside", "says"),
    [
        ("3 ranks, ab", "2 ranks, cd", "sharded (3 ranks, ab), not sharded (2 ranks, cd): all groups need the same"),
        ("", "2 ranks, cd", "whole in each member, not sharded (2 ranks, cd)"),
        ("2 ranks, cd", "", "sharded (2 ranks, cd), not whole in each member"),
        ("2 ranks, cd", "2 ranks, cd", ""),
    ],
)
def test_a_group_is_told_that_it_divides_the_model_otherwise(given: str, inside: str, says: str) -> None:
    plain = Layout.of({"w": torch.ones(4)})
    mine, theirs = (hello_of("run", 2, 0, Layout(plain.specs, division=each), b"") for each in (given, inside))
    problem = fingerprint_problem(mine, theirs)
    assert says in problem
    assert bool(says) == bool(problem)


def test_groups_that_shard_their_model_need_a_server_for_each_member_and_more_than_one() -> None:
    options = WorldOptions(server=SERVER, elastic=True, model_parallel="fsdp")
    with pytest.raises(ConfigurationError, match=r"is one of 2; all groups of the run need as many shards"):
        RunServer(0, options, [3], shares=3).check(2, SERVER)
    RunServer(0, options, [3], shares=3).check(3, SERVER)
    for inside in (FSDP(), ModelParallel(1, 1)):
        with pytest.raises(ConfigurationError, match="elastic=True and a group of one rank"):
            sizes_in(Topology.even(1, 1), inside, [1], joins=True)
    assert sizes_in(Topology.even(2, 1), FSDP(), [2], joins=True) == (2, 1)


# --- Processes -------------------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).parents[2] / "scripts" / "joining.py"
COMMAND = [sys.executable, "-c", "from lightning_omni.cli import main; raise SystemExit(main())"]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
PATIENCE = 150.0
"""Seconds for a process to import what it needs and to train a little, on a busy machine."""


class Run:
    """A standing server, and groups that come.

    Args:
        folder: for what they write.
        options: more of the server's.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.groups = folder, dict[str, Process]()
        self._env: dict[str, str | None] = {
            "LIGHTNING_OMNI_KEY": secrets.token_hex(32),
            "OMNI_TEST_FOLDER": str(folder),
        }
        command = [*COMMAND, "serve", "--port", "0", "--once", *options]
        self.server = Process(command, {**self._env, "OMNI_TEST_COPIES": "1"})
        address = self.server.expect(r"parameter server on (tcp://\S+),", timeout=PATIENCE)[1]
        self._env["LIGHTNING_OMNI_SERVER"] = address

    def start(
        self,
        name: str,
        options: dict[str, Any],
        launcher: Sequence[str] = (),
        seed: int = 1,
        script: Path = SCRIPT,
        **more: str,
    ) -> Process:
        spares = str(options.get("devices", 1) - 1)
        env = {**self._env, "OMNI_TEST_NAME": name, "OMNI_TEST_SEED": str(seed), "OMNI_TEST_SPARES": spares, **more}
        command = [sys.executable, *launcher, str(script), json.dumps(options)]
        self.groups[name] = Process(command, env)
        return self.groups[name]

    def wait_for(self, name: str) -> None:
        """Until a group has made a file."""
        deadline = time.monotonic() + SLOWER * PATIENCE
        while not (self.folder / name).exists():
            ended = {each: process.output for each, process in self.groups.items()}
            assert time.monotonic() < deadline, f"{name} did not come: {ended} {self.server.output}"
            time.sleep(0.02)

    def go(self, epoch: int | str, gate: str = "go") -> None:
        (self.folder / f"{gate}-{epoch}").touch()

    def train_together(
        self, options: dict[str, Any], later: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """One group begins, another joins it in epoch 1, perhaps with other options; what both said in the end."""
        first = self.start("a", options)
        self.wait_for("a0-in-1")
        second = self.start("b", {**options, **(later or {})}, seed=2)
        self.wait_for("b0-in-1")
        self.go(1)
        assert first.end(PATIENCE) == 0, first.output
        assert second.end(PATIENCE) == 0, second.output
        return self.result("a"), self.result("b")

    def result(self, name: str, rank: int = 0) -> dict[str, Any]:
        """What a rank of a group said in the end."""
        result: dict[str, Any] = json.loads((self.folder / f"{name}{rank}.json").read_text())
        return result

    @property
    def trained(self) -> Counter[tuple[int, int]]:
        """How often each sample of each epoch was trained to the end."""
        text = "".join(file.read_text() for file in self.folder.glob("seen-*"))
        lines = list(map(json.loads, text.splitlines()))
        return Counter((epoch, sample) for epoch, samples, _ in lines for sample in samples)

    def close(self) -> None:
        for process in (*self.groups.values(), self.server):
            process.kill()


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    run = Run(tmp_path, *getattr(request, "param", ()))
    yield run
    run.close()


SERVERS = {"one server": (), "two servers": ("--servers", "2")}


def served_by(always: str) -> pytest.MarkDecorator:
    """Cases of a claim that is made of one server and of two: this one, and with --all the other one, too."""
    marks = {name: () if name == always else pytest.mark.exhaustive for name in SERVERS}
    cases = [pytest.param(options, id=name, marks=marks[name]) for name, options in SERVERS.items()]
    return pytest.mark.parametrize("run", cases, indirect=True)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that is over: one group began it; the other one, given another scale of losses, holds Python's lock long.

    The server waits for signs of life as long as it does by default: on a busy machine two seconds would be too short.
    """
    locked = 2.5 * JOINED_HEARTBEAT_TIMEOUT
    assert locked < time_limits.PATIENCE / 2  # for which any message of a rank may be awaited
    run = Run(tmp_path_factory.mktemp("joined"))
    try:
        options = {"epochs": 2, "samples": 64, "hold": [1], "scale": 1024.0}
        run.train_together(options, {"scale": 65536.0, "locked": locked})
        yield run
    finally:
        run.close()


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_that_joins_a_run_says_so_where_it_was_started(joined: Run) -> None:
    first, second = (joined.groups[name].output for name in "ab")
    assert "joined the run" not in first
    assert re.findall(r"OmniStrategy: 1 rank in 1 group of 1 .* joined the run as (.*)", second) == [
        "group 1; another group logs and saves"
    ]


@pytest.mark.slow
@pytest.mark.processes
def test_groups_that_join_go_on_from_a_checkpoint_of_the_midst_of_an_epoch(run: Run, tmp_path: Path) -> None:
    first = run.start("a", {"epochs": 3, "steps": 1})
    assert first.end(PATIENCE) == 0, first.output
    path = tmp_path / "steps" / "epoch=1-step=24.ckpt"
    spans = torch.load(path, map_location="cpu", weights_only=True)["omni"]["run"]["cut"]["trained"]
    trained = sum(stop - start for start, stop in spans)
    assert 0 < trained < 128
    folder = tmp_path / "again"
    folder.mkdir()
    again = Run(folder)
    try:
        begins, joins = again.train_together({"epochs": 3, "hold": [1], "path": str(path)})
    finally:
        again.close()
    assert (begins["weights"], begins["epochs"]) == (joins["weights"], 3)  # epochs that the callback has counted
    assert Counter(epoch for epoch, _ in again.trained) == {1: 128 - trained, 2: 128}
    assert set(again.trained.values()) == {1}


@pytest.mark.slow
@pytest.mark.processes
def test_three_launchers_train_one_run_in_which_the_first_is_killed_and_the_second_told_to_leave(run: Run) -> None:
    """Each moment is held: the groups wait in an epoch's first batch until what is to happen in it has happened."""
    epochs, samples = 5, 128
    options = {"epochs": epochs, "samples": samples, "hold": [1, 2, 3]}
    first = run.start("a", options)
    run.wait_for("a0-in-1")
    second = run.start("b", options, seed=2)  # whatever it begins with, it is given the run's
    run.wait_for("b0-in-1")
    run.go(1)
    run.wait_for("a0-in-2")
    run.wait_for("b0-in-2")
    os.kill(first.pid, signal.SIGKILL)
    run.server.expect("rank 0 lost", PATIENCE)
    third = run.start("c", options, TORCHRUN)
    run.wait_for("c0-in-2")
    run.wait_for("c1-in-2")
    run.go(2)
    run.wait_for("b0-in-3")
    run.wait_for("c0-in-3")
    os.kill(second.pid, signal.SIGTERM)
    second.expect("its group leaves the run", PATIENCE)
    run.go(3)
    assert second.end(PATIENCE) == 128 + signal.SIGTERM, second.output
    assert third.end(PATIENCE) == 0, third.output
    assert run.server.end(PATIENCE) == 0, run.server.output
    for event in ("group 1 takes part: rank 1", "group 2 takes part: ranks 2 to 3", "rank 1 left in good order"):
        assert event in run.server.output
    assert "the group that logged and saved is gone" in second.output
    assert "the group that logged and saved is gone" in third.output

    assert set(run.trained) == {(epoch, sample) for epoch in range(epochs) for sample in range(samples)}
    ranks = [run.result("c", rank) for rank in range(2)]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert [each["zero"] for each in ranks] == [True, False]
    assert all(each["epochs"] == epochs and each["finite"] for each in ranks)  # the callback's state came along
    pages = {name: set((run.folder / f"diary-{name}").read_text().split()) for name in "abc"}
    assert pages["a"] >= {"0", "1"}
    assert pages["b"] >= {"3"}
    assert pages["c"] >= {"4"}  # each was opened when its group took over
    # Whoever recorded saved where the run saves: one folder, one checkpoint an epoch, and plain Lightning reads it.
    assert sorted(path.name for path in (run.folder / "a").iterdir()) == [f"epoch={n}.ckpt" for n in range(epochs)]
    assert not (run.folder / "b").exists()
    last = torch.load(run.folder / "a" / f"epoch={epochs - 1}.ckpt", map_location="cpu", weights_only=False)
    assert last["epoch"] == epochs - 1
    assert last["lr_schedulers"][0]["last_epoch"] == epochs * samples // 8


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("bar", ["TQDMProgressBar", pytest.param("RichProgressBar", marks=pytest.mark.exhaustive)])
def test_the_progress_bar_is_shown_where_the_rank_is_that_has_taken_over(bar: str, run: Run) -> None:
    options = {"epochs": 4, "samples": 64, "hold": [1], "bar": bar, "trainer": {"enable_progress_bar": True}}
    run.start("a", options)
    run.wait_for("a0-in-1")
    second = run.start("b", options, seed=2)
    run.wait_for("b0-in-1")
    run.groups["a"].kill()
    run.server.expect("rank 0 .*lost", PATIENCE)
    assert "Epoch" not in second.output
    run.go(1)
    assert second.end(PATIENCE) == 0, second.output
    assert re.search(r"Epoch 3(:|/3).* 8/8 ", second.output), second.output


@pytest.mark.slow
@pytest.mark.processes
def test_an_error_of_a_callback_on_the_rank_that_has_taken_over_is_explained(run: Run) -> None:
    options = {"epochs": 4, "hold": [1, 2], "careless": True}
    first = run.start("a", options)
    run.wait_for("a0-in-1")
    second = run.start("b", options, seed=2)
    run.wait_for("b0-in-1")
    run.go(1)
    run.wait_for("a0-in-2")
    os.kill(first.pid, signal.SIGTERM)
    first.expect("its group leaves the run", PATIENCE)
    run.go(2)
    assert second.end(PATIENCE) == 1, second.output
    assert "'NoneType' object has no attribute 'write'" in second.output
    assert "what a callback prepares only where trainer.is_global_zero is true, it does not have" in second.output


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="SLURM runs on Linux")
def test_slurm_requeues_the_job_of_the_group_that_its_signal_comes_to(run: Run) -> None:
    """It is not the group that logs and saves, and it leaves when SIGTERM comes; the job is requeued once."""
    scontrol, asked = run.folder / "scontrol", run.folder / "asked"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    scontrol.chmod(0o755)
    options = {"epochs": 3, "hold": [1, 2]}
    first = run.start("a", options)
    run.wait_for("a0-in-1")
    job = {"JOB_ID": "77", "ARRAY_JOB_ID": "70", "ARRAY_TASK_ID": "3", "JOB_NAME": "train", "NTASKS": "1"}
    place = {"NTASKS_PER_NODE": "1", "NNODES": "1", "NODEID": "0", "PROCID": "0", "LOCALID": "0"}
    slurm: dict[str, Any] = {f"SLURM_{name}": value for name, value in {**job, **place}.items()}
    path = f"{run.folder}{os.pathsep}{os.environ['PATH']}"
    second = run.start("b", options, seed=2, PATH=path, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), **slurm)
    run.wait_for("b0-in-1")
    os.kill(second.pid, signal.SIGUSR1)
    run.go(1)
    run.wait_for("b0-in-2")
    assert asked.read_text() == "requeue 70_3\n"
    assert not list(run.folder.glob("hpc_ckpt*"))  # the state of the run is at the server
    os.kill(second.pid, signal.SIGTERM)
    second.expect("its group leaves the run", PATIENCE)
    run.go(2)
    assert second.end(PATIENCE) == 128 + signal.SIGTERM, second.output
    assert first.end(PATIENCE) == 0, first.output


def check_saved(folder: Path, heard: Sequence[tuple[float, float, float]]) -> None:
    """There is a checkpoint for each validation that was heard of, with the weights that have this loss."""
    losses = {int(step): loss for _, step, loss in heard}
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    files = list(folder.iterdir())
    assert {file.name for file in files} == {f"epoch={int(epoch)}-step={int(step)}.ckpt" for epoch, step, _ in heard}
    for file in files:
        saved = torch.load(file, map_location="cpu", weights_only=False)
        net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)).eval()
        net.load_state_dict({name[4:]: each for name, each in saved["state_dict"].items() if name.startswith("net.")})
        with torch.no_grad():
            loss = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1))
        assert float(loss) == pytest.approx(losses[saved["global_step"]], rel=1e-5)


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_that_joins_goes_on_with_the_average_of_the_weights_and_saves_it_when_it_records(run: Run) -> None:
    pytest.importorskip("pytorch_lightning", minversion="2.6")  # EMAWeightAveraging
    options: dict[str, Any] = {"epochs": 3, "hold": [1, 2], "average": 0.9, "file": "{epoch}-{step}"}
    first = run.start("a", options)
    run.wait_for("a0-in-1")
    second = run.start("b", options, seed=2)
    run.wait_for("b0-in-1")

    def said(name: str) -> str:
        return (run.folder / name).read_text()

    assert said("a0-in-1") == said("a0-average") == said("b0-in-1") != ""
    run.go(1)
    run.wait_for("a0-in-2")
    run.wait_for("b0-in-2")
    assert said("a0-average") == said("a0-in-2") == said("b0-in-2"), "a group that is new does not count in the mean"
    assert said("b0-average") != said("b0-in-2")
    os.kill(first.pid, signal.SIGKILL)
    run.server.expect("rank 0 lost", PATIENCE)
    run.go(2)
    assert second.end(PATIENCE) == 0, second.output
    heard = json.loads(said("heard-b"))
    assert [epoch for epoch, _, _ in heard] == [0, 1, 2]
    check_saved(run.folder / "a", heard)


@pytest.mark.slow
@pytest.mark.processes
def test_momentum_and_rate_follow_the_number_of_groups_whoever_of_them_is_there(run: Run) -> None:
    """One group, two, and one again, which is not the first one any more; all of its ranks do the same."""
    given = {"optimizer": "SGD", "given": {"momentum": 0.4}, "tuner": {}}
    options = {"epochs": 3, "hold": [1, 2], **given}
    first = run.start("a", options)
    run.wait_for("a0-in-1")
    # Two ranks, which are given what the first group has.
    second = run.start("b", {**options, "given": {"momentum": 0.7}}, TORCHRUN, seed=2)
    run.wait_for("b0-in-1")
    run.wait_for("b1-in-1")
    run.go(1)
    run.wait_for("a0-in-2")
    run.wait_for("b0-in-2")
    os.kill(first.pid, signal.SIGKILL)
    run.server.expect("rank 0 lost", PATIENCE)
    run.go(2)
    assert second.end(PATIENCE) == 0, second.output
    one, two = pytest.approx([0.4, 0.01]), pytest.approx([0.0, 0.01 / 1.2])
    assert steps_of(run.folder / "a0-steps") == {0: [one], 1: [two]}
    for rank in range(2):
        assert steps_of(run.folder / f"b{rank}-steps") == {1: [two], 2: [one]}
    assert "OmniTuner: trains with 2 groups, momentum 0, lr 0.00833" in first.output
    last = torch.load(run.folder / "a" / "epoch=2.ckpt", map_location="cpu", weights_only=False)
    assert [last["optimizer_states"][0]["param_groups"][0][name] for name in ("momentum", "lr")] == one


def steps_of(file: Path) -> dict[int, list[list[float]]]:
    """Of each epoch what momentum and rate were after its batches, one after the other."""
    found: dict[int, list[list[float]]] = {}
    for epoch, *step in map(json.loads, file.read_text().splitlines()):
        steps = found.setdefault(epoch, [])
        if step not in steps[-1:]:
            steps.append(step)
    return found


@pytest.mark.slow
@pytest.mark.processes
@served_by("one server")
def test_a_run_that_nobody_trains_any_more_is_trained_on_by_the_group_that_comes_next(run: Run) -> None:
    options = {"epochs": 3, "hold": [1]}
    first = run.start("a", options)
    run.wait_for("a0-in-1")
    os.kill(first.pid, signal.SIGKILL)
    run.server.expect("rank 0 lost", PATIENCE)
    run.go(1)
    second = run.start("b", options, seed=2)
    assert second.end(PATIENCE) == 0, second.output
    assert run.server.end(PATIENCE) == 0, run.server.output
    assert set(run.trained) == {(epoch, sample) for epoch in range(3) for sample in range(128)}
    result = run.result("b")
    assert (result["epochs"], result["zero"]) == (3, True)


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_that_was_frozen_joins_again_by_itself_with_new_processes(tmp_path: Path) -> None:
    """Both ranks of a group stand still for longer than the server waits, and come to themselves."""
    run = Run(tmp_path, "--heartbeat-timeout", "3")
    try:
        options = {"epochs": 3, "samples": 64, "hold": [1, 2]}
        first = run.start("a", {**options, "devices": 2, "last": 1})  # what it cannot save then is in nobody's way
        for rank in range(2):
            run.wait_for(f"a{rank}-in-1")
        second = run.start("b", options, seed=2)
        run.wait_for("b0-in-1")
        os.killpg(first.pid, signal.SIGSTOP)
        run.server.expect("rank.* lost: rank . (is gone without a goodbye|gave no sign of life)", PATIENCE)
        os.killpg(first.pid, signal.SIGCONT)
        run.go(1)
        first.expect(r"joins again in 1 s, as a new one \(number 1 in a row\): this process starts `", PATIENCE)
        for rank in range(2):
            run.wait_for(f"a{rank}-in-2")
        run.go(2)
        assert first.end(PATIENCE) == 0, first.output
        assert second.end(PATIENCE) == 0, second.output
        assert run.server.end(PATIENCE) == 0, run.server.output
        assert "group 2 takes part: ranks 3 to 4" in run.server.output
        assert "Traceback" not in first.output
        assert run.result("b")["weights"] == run.result("a")["weights"] == run.result("a", 1)["weights"]
        assert run.result("b")["largest"] == 2, "of all groups of the run, not of this launcher's"
        assert set(run.trained) == {(epoch, sample) for epoch in range(3) for sample in range(64)}
    finally:
        run.close()


@pytest.mark.exhaustive  # as the group of two ranks above does, which records as well
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("run", [("--heartbeat-timeout", "3")], ids=[""], indirect=True)
def test_a_group_that_was_frozen_joins_again_although_a_callback_cannot_save_what_it_has(run: Run) -> None:
    options = {"epochs": 4, "hold": [1, 2], "last": 1}
    first = run.start("a", options)
    run.wait_for("a0-in-1")
    second = run.start("b", options, seed=2)
    run.wait_for("b0-in-1")
    os.killpg(first.pid, signal.SIGSTOP)
    run.server.expect("rank 0 lost: rank 0 (is gone without a goodbye|gave no sign of life)", PATIENCE)
    os.killpg(first.pid, signal.SIGCONT)
    run.go(1)
    first.expect("joins again in 1 s", PATIENCE)
    run.wait_for("a0-in-2")
    run.go(2)
    assert first.end(PATIENCE) == 0, first.output
    assert second.end(PATIENCE) == 0, second.output
    assert run.result("a")["weights"] == run.result("b")["weights"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere signs of life of connections are not counted")
@pytest.mark.parametrize("run", [("--heartbeat-timeout", "3")], ids=[""], indirect=True)
def test_a_group_that_freezes_while_it_sends_many_messages_is_missed_in_time(run: Run) -> None:
    options = {"epochs": 1, "samples": 4096, "hold": [0]}
    first = run.start("a", options)
    run.wait_for("a0-in-0")
    second = run.start("b", {**options, "hold": [], "step": 0.02}, seed=2)
    run.wait_for("b0-in-0")
    time.sleep(0.3)
    os.killpg(second.pid, signal.SIGSTOP)
    run.server.expect("rank 1 lost: rank 1 gave no sign of life for 3 s", PATIENCE)
    run.go(0)
    assert first.end(PATIENCE) == 0, first.output


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere signs of life of connections are not counted")
@pytest.mark.parametrize("run", [("--heartbeat-timeout", "3")], ids=[""], indirect=True)
def test_a_job_that_is_suspended_as_a_whole_goes_on(run: Run) -> None:
    options = {"epochs": 2, "hold": [1]}
    first = run.start("a", options)
    run.wait_for("a0-in-1")
    second = run.start("b", options, seed=2)
    run.wait_for("b0-in-1")
    job = (run.server, first, second)
    for process in job:
        os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(6.0)
    for process in job:
        os.killpg(process.pid, signal.SIGCONT)
    run.go(1)
    for process in (first, second, run.server):
        assert process.end(PATIENCE) == 0, process.output
    assert "ranks lost: 0" in run.server.output


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_that_holds_pythons_lock_for_long_is_not_taken_for_dead(joined: Run) -> None:
    """Its connection gives signs of life all the same, which that of a process that is stopped does not."""
    assert joined.result("a")["weights"] == joined.result("b")["weights"]
    assert "ranks lost: 0" in joined.server.output


def weights_of(saved: dict[str, Any]) -> dict[str, list[float]]:
    """Of a checkpoint that is one file."""
    return {name: each.flatten().tolist() for name, each in saved["state_dict"].items()}


@pytest.mark.slow
@pytest.mark.processes
def test_groups_that_shard_their_model_come_and_go(tmp_path: Path) -> None:
    """One begins, one joins it, the first is killed and started again, and the second is frozen and comes back."""
    run = Run(tmp_path, "--servers", "2", "--heartbeat-timeout", "3")
    options = {
        "epochs": 4,
        "samples": 64,
        "hold": [1, 2],
        "devices": 2,
        "inside": "fsdp",
        "method": "diloco:period=2",
        "optimizer": "AdamW",
        "frozen": [0],  # of which a group that joins gets the run's
        "steps": 1,
    }
    try:
        first = run.start("a", options)
        run.wait_for("a0-in-1")
        second = run.start("b", options, seed=2)
        run.wait_for("b1-in-1")
        run.go(1)
        run.wait_for("a0-in-2")
        run.wait_for("b0-in-2")
        os.killpg(first.pid, signal.SIGKILL)
        run.server.expect("ranks 0 to 1 lost", PATIENCE)
        third = run.start("c", options, seed=3)
        run.wait_for("c1-in-2")
        os.killpg(second.pid, signal.SIGSTOP)
        run.server.expect("rank.* lost: rank . (is gone without a goodbye|gave no sign of life)", PATIENCE)
        os.killpg(second.pid, signal.SIGCONT)
        second.expect("joins again in 1 s, as a new one", PATIENCE)
        run.server.expect("group 3 takes part: ranks 6 to 7", PATIENCE)
        run.go(2)
        assert third.end(PATIENCE) == 0, third.output
        assert second.end(PATIENCE) == 0, second.output
        assert run.server.end(PATIENCE) == 0, run.server.output
    finally:
        run.close()
    results = [run.result(name, rank) for name in "bc" for rank in range(2)]
    assert all(each["weights"] == results[0]["weights"] for each in results)
    assert [each["zero"] for each in results] == [False, False, True, False]
    assert all(each["epochs"] == 4 and each["finite"] for each in results)
    assert set(run.trained) == {(epoch, sample) for epoch in range(4) for sample in range(64)}
    saved = [
        torch.load(tmp_path / "a" / f"epoch={epoch}.ckpt", map_location="cpu", weights_only=False) for epoch in (0, 3)
    ]
    before, after = map(weights_of, saved)
    assert after == results[0]["weights"]
    moved = {name for name in after if after[name] != before[name]}
    assert moved == set(after) - {"frozen", "net.0.weight", "net.0.bias"}
    state = saved[1]["optimizer_states"][0]["state"]
    assert [each["exp_avg"].shape for each in state.values()] == [(32,), (32,), (3, 32), (3,)]
    steps = list((tmp_path / "steps").iterdir())
    assert {path.name[: len("epoch=0")] for path in steps} == {f"epoch={n}" for n in range(4)}, "by three recorders"
    for path in steps:
        inside = torch.load(path, map_location="cpu", weights_only=False)
        assert {name: each.shape for name, each in inside["state_dict"].items()} == {
            name: each.shape for name, each in saved[1]["state_dict"].items()
        }


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a folder is read by one process
@pytest.mark.parametrize(
    "given",
    [
        {
            "method": "async_sgd",
            "inside": "fsdp",
            "optimizer": "AdamW",
            "strategy": {"compression": "int8"},
            "replicas": 2,
        },
        {"method": "local_sgd:period=4", "inside": "1 x 2", "optimizer": "SGD"},
        pytest.param({"method": "async_sgd", "inside": "2 x 1", "optimizer": "SGD"}, marks=pytest.mark.exhaustive),
        pytest.param({"method": "hardsync", "inside": "fsdp", "optimizer": "SGD"}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda given: f"{given['method']}, {given['inside']}",
)
@pytest.mark.parametrize("run", [("--servers", "2")], ids=[""], indirect=True)
def test_a_group_that_shards_its_model_joins_however_it_does_so(run: Run, given: dict[str, Any]) -> None:
    replicas = given.get("replicas", 1)  # of the model, in the group that joins
    later = {"devices": 4, "strategy": {**given["strategy"], "model_parallel": {"shards": 2}}} if replicas > 1 else {}
    one, other = run.train_together({"epochs": 3, "hold": [1], "devices": 2, **given}, later)
    assert all(run.result("b", rank)["weights"] == one["weights"] for rank in range(2 * replicas))
    assert one["val"] == other["val"]
    assert one["finite"]
    assert set(run.trained) == {(epoch, sample) for epoch in range(3) for sample in range(128)}
    if "x" in given["inside"]:  # the checkpoint is a folder
        net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
        blank = {"frozen": torch.zeros(3), **{f"net.{name}": each for name, each in net.state_dict().items()}}
        saved = weights_of({"state_dict": CheckpointFolder(run.folder / "a" / "epoch=2.ckpt").weights(blank)})
        assert saved == one["weights"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("run", [("--servers", "2")], ids=[""], indirect=True)
def test_a_group_that_divides_its_model_otherwise_is_refused_and_the_run_goes_on(run: Run) -> None:
    options = {"epochs": 2, "devices": 2, "method": "local_sgd:period=4", "optimizer": "SGD"}
    first = run.start("a", {**options, "inside": "fsdp", "hold": [1]})
    run.wait_for("a0-in-1")
    other = run.start("b", options)
    assert other.end(PATIENCE) != 0
    assert "whole in each member, not sharded (2 ranks, " in other.output
    run.go(1)
    assert first.end(PATIENCE) == 0, first.output


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "method",
    [
        "hardsync",
        *(  # local_sgd is what groups that shard their model join with
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in ("local_sgd:period=4", "elastic_averaging:period=2", "diloco:period=4")
        ),
    ],
)
def test_a_group_joins_whatever_the_method(run: Run, method: str) -> None:
    options = {"epochs": 3, "hold": [1], "method": method}
    one, other = run.train_together(options)
    assert one["weights"] == other["weights"]
    assert one["val"] == other["val"]
    assert one["finite"]
    assert set(run.trained) == {(epoch, sample) for epoch in range(3) for sample in range(128)}


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_that_joins_has_the_target_that_others_have_written_and_steps_with_adagrad(
    run: Run,
) -> None:
    run.train_together({"epochs": 2, "hold": [1], "optimizer": "Adagrad", "target": "a", "steps": 1})
    *_, saved = sorted((run.folder / "steps").glob("epoch=0-*"), key=lambda each: each.stat().st_mtime_ns)
    assert torch.load(saved, map_location="cpu", weights_only=False)["state_dict"]["frozen"].tolist() == [0.5] * 3
    assert (run.folder / "b0-target-1").read_text() == (run.folder / "a0-target-1").read_text() == "0.5"
    one, other = (run.result(name) for name in "ab")
    assert one["weights"] == other["weights"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_that_joins_scales_its_losses_as_the_run_does(joined: Run) -> None:
    assert joined.result("a")["scale"] == joined.result("b")["scale"] == 1024.0


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_that_joins_trains_in_the_order_of_the_run_whether_it_shuffles_or_not(run: Run) -> None:
    run.train_together({"epochs": 2, "hold": [1]}, {"sorted": True})
    assert run.trained == dict.fromkeys(((epoch, sample) for epoch in range(2) for sample in range(128)), 1)


@pytest.mark.slow
@pytest.mark.processes
def test_a_mean_over_the_epoch_in_which_a_group_joins_is_of_one_metric(joined: Run) -> None:
    assert joined.result("a")["size"] == joined.result("b")["size"] == 8.0


@pytest.mark.slow
@pytest.mark.processes
def test_the_first_step_of_a_group_that_joins_is_at_the_rate_that_the_run_has_reached(run: Run) -> None:
    first = run.start("a", {"epochs": 3, "hold": [1], "batch": 6})
    run.wait_for("a0-in-1")
    second = run.start("b", {"epochs": 3, "hold": [1]}, seed=2)
    run.wait_for("b0-in-1")
    rates = [(run.folder / f"{name}0-rate-1").read_text() for name in "ab"]
    run.go(1)
    assert first.end(PATIENCE) == 0, first.output
    assert second.end(PATIENCE) == 0, second.output
    assert rates[0] == rates[1]


@pytest.mark.parametrize(("own", "says"), [(127, "training dataset: 127; .* has: 128;"), (128, "")])
def test_datasets_of_other_lengths_are_told_from_one_another_although_padding_makes_them_equal(
    own: int, says: str
) -> None:
    entered = EntryPoint(plan=PLAN, samples=0, progress=None, split=0, sizes=DataSizes(128, None))
    with pytest.raises(ConfigurationError, match=says) if says else nullcontext():
        entered.check(PLAN, 0, DataSizes(own, [64]))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("trainer", "steps"),
    [
        pytest.param({"val_check_interval": 0.5}, 48, marks=pytest.mark.exhaustive),
        pytest.param({"accumulate_grad_batches": 2}, 24, marks=pytest.mark.exhaustive),
        pytest.param({"max_steps": 40}, 40, marks=pytest.mark.exhaustive),
        pytest.param({"check_val_every_n_epoch": 2, "limit_train_batches": 12}, 36, marks=pytest.mark.exhaustive),
        ({"max_steps": 40, "check_val_every_n_epoch": 2, "limit_train_batches": 12}, 40),
    ],
)
def test_limits_are_those_of_the_run_as_it_was_begun(run: Run, trainer: dict[str, Any], steps: int) -> None:
    options: dict[str, Any] = {
        "epochs": 4 if "check_val_every_n_epoch" in trainer else 3,
        "hold": [1],
        "trainer": trainer,
    }
    one, other = run.train_together(options)
    assert one["weights"] == other["weights"]
    assert one["step"] == other["step"]
    trained = run.trained
    batches = trainer.get("limit_train_batches", 16)
    whole = options["epochs"] if "max_steps" not in trainer else 40 // batches  # and a part of the next
    assert all(sum(epoch == number for number, _ in trained) >= 8 * batches for epoch in range(whole))
    assert sum(trained.values()) >= 8 * steps * trainer.get("accumulate_grad_batches", 1)


@pytest.mark.slow
@pytest.mark.processes
def test_a_batch_in_weights_that_are_saved_inside_an_epoch_counts_as_trained(run: Run, tmp_path: Path) -> None:
    first = run.start("a", {"epochs": 1, "steps": 1, "method": "local_sgd:period=4"})
    assert first.end(PATIENCE) == 0, first.output
    for step in (1, 6, 7):
        saved = torch.load(tmp_path / "steps" / f"epoch=0-step={step}.ckpt", map_location="cpu", weights_only=True)
        assert saved["omni"]["run"]["cut"]["trained"] == [[0, 8 * step]]


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_joins_before_the_others_have_made_their_validation_loaders(run: Run) -> None:
    options = {"epochs": 3, "hold": [1], "trainer": {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}}
    one, other = run.train_together(options)
    assert (one["weights"], one["val"]) == (other["weights"], other["val"])
    assert set(run.trained.values()) == {1}


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_whose_tuner_chooses_from_another_space_is_refused_and_the_run_goes_on(run: Run) -> None:
    first = run.start("a", {"epochs": 2, "tuner": {"space": {"momentum": [0.0, 0.3]}}, "hold": [1]})
    run.wait_for("a0-in-1")
    for number, given in enumerate(({"space": {"momentum": [0.8, 0.9]}}, {"budget": 0.0})):
        other = run.start(f"b{number}", {"epochs": 2, "tuner": given})
        assert other.end(PATIENCE) != 0
        assert "run that this group joins has: OmniTuner(space={'momentum': [0.0, 0.3]}, budget=0.1)" in other.output
    run.go(1)
    assert first.end(PATIENCE) == 0, first.output


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("run", [("--progress-timeout", "4")], indirect=True)
def test_a_group_that_hangs_before_its_first_batch_is_evicted_and_the_run_goes_on(run: Run) -> None:
    first = run.start("a", {"epochs": 2, "hold": [1]})
    run.wait_for("a0-in-1")
    run.start("b", {"epochs": 2, "hold_in": ["b0-start"]}, seed=2)
    run.server.expect("rank 1 joined", PATIENCE)
    run.wait_for("b0-in-start")
    run.go(1)
    assert first.end(PATIENCE) == 0, first.output
    assert "group 1 is alive and has made no progress for 4 s" in first.output
    assert set(run.trained) == {(epoch, sample) for epoch in range(2) for sample in range(128)}


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_that_was_told_otherwise_is_refused_and_the_run_goes_on(run: Run) -> None:
    given_first = {"epochs": 2, "split": 1, "optimizer": "SGD", "buffer": 1}
    first = run.start("a", {**given_first, "hold": [1]})
    run.wait_for("a0-in-1")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"method": "hardsync"}, 'method="hardsync": the run that this group joins has method="async_sgd"; pass'),
        (
            {"strategy": {"compression": {"push": "int8", "pull": "bf16"}}},
            'compression=Compression(push="int8", pull="bf16"): the run that this group joins has compression="fp32"',
        ),
        ({"samples": 64}, "samples in the training dataset: 48; the run that this group joins has: 96; give all"),
        ({"held_out": 63}, "samples in the validation datasets: 63; the run that this group joins has: 64; give all"),
        ({"window": 2}, "Scheduler={0: 2}: the run that this group joins has GradientAccumulationScheduler=none"),
        ({"trainer": {"max_time": {"hours": 1}}}, "max_time=3600.0 s: the run that this group joins has max_time=none"),
        ({"trainer": {"min_epochs": 1}}, "min_epochs=1: the run that this group joins has min_epochs=0"),
        ({"buffer": 2}, "buffer is float32 of shape [2] in this group's module, and float32 of shape [1] in that of"),
        ({"extra": 1}, "this group's module has the buffer extra, and the module of the run that it joins has not"),
        ({"epochs": 3}, "max_epochs=3: the run that this group joins has max_epochs=2"),
        ({"trainer": {"max_steps": 20}}, "max_steps=20: the run that this group joins has max_steps=-1"),
        ({"split": 2}, "this group's training data is another part of its dataset"),
        ({"trainer": {"accumulate_grad_batches": 2}}, "the run that this group joins has accumulate_grad_batches=1"),
        ({"trainer": {"gradient_clip_val": 0.1}}, "gradient_clip_val=0.1: the run that this group joins has"),
        ({"trainer": {"gradient_clip_algorithm": "value"}}, "algorithm=value: the run that this group joins has"),
        ({"trainer": {"limit_train_batches": 4}}, "limit_train_batches=4: the run that this group joins has"),
        ({"trainer": {"limit_val_batches": 0}}, "limit_val_batches=0: the run that this group joins has"),
        ({"trainer": {"val_check_interval": 0.5}}, "val_check_interval=0.5: the run that this group joins has"),
        ({"trainer": {"check_val_every_n_epoch": 2}}, "n_epoch=2: the run that this group joins has"),
        ({"trainer": {"reload_dataloaders_every_n_epochs": 1}}, "joins has reload_dataloaders_every_n_epochs=0"),
        ({"optimizer": "AdamW"}, "optimizers: AdamW; the run that this group joins has: SGD"),
        ({"schedule": "function"}, "schedulers: LambdaLR every step; the run that this group joins has: OneCycleLR"),
        ({"schedule": None, "tuner": {}}, "schedulers: none; the run that this group joins has: OneCycleLR every step"),
        ({"steps": 1}, "'every_n_train_steps': 1, 'every_n_epochs': 0, 'train_time_interval': None}; the run that"),
        ({"dtype": "float64"}, "default dtype: torch.float64; the run that this group joins has: torch.float32; give"),
        ({"finder": True}, "find the rate or batch size before, without server="),
        ({"several": True}, "this training data is several loaders"),
    ]
    for number, (given, says) in enumerate(refused):
        other = run.start(f"b{number}", {**given_first, **given})
        assert other.end(PATIENCE) != 0
        assert says in other.output
    run.go(1)
    assert first.end(PATIENCE) == 0, first.output


@pytest.mark.parametrize("own", [[1.0], [1.0, 0.5, 0.2], [0.3, 0.5]], ids=["shorter", "longer", "of other rates"])
def test_a_schedule_by_a_table_is_compared_where_one_has_ended_too(own: list[float]) -> None:
    def scheduled(rates: list[float]) -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        function = torch.optim.lr_scheduler.LambdaLR(optimizer, rates.__getitem__)
        return SimpleNamespace(scheduler=function, interval="step", frequency=1)

    theirs = scheduled([1.0, 0.5])
    theirs.scheduler.last_epoch = 1
    sampled = unpack(*pack({"functions": _sampled(theirs.scheduler)}))["functions"]
    _check_functions(scheduled([1.0, 0.5]), sampled)
    with pytest.raises(ConfigurationError, match=r"a function of LambdaLR every step returns .* for [012]; that of"):
        _check_functions(scheduled(own), sampled)


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_whose_schedule_has_another_function_is_refused_and_the_run_goes_on(run: Run) -> None:
    first = run.start("a", {"epochs": 2, "schedule": "function", "hold": [1]})
    run.wait_for("a0-in-1")
    other = run.start("b", {"epochs": 2, "schedule": "function", "decay": 50}, seed=2)
    assert other.end(PATIENCE) == 1, other.output
    assert re.search(
        r"schedulers: a function of LambdaLR every step returns 0\.\d+ for 1; .* joins returns 0\.\d+;", other.output
    )
    second = run.start("c", {"epochs": 2, "schedule": "function"}, seed=3)
    run.wait_for("c0-in-1")
    run.go(1)
    assert first.end(PATIENCE) == 0, first.output
    assert second.end(PATIENCE) == 0, second.output


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("number", "batch"), [(signal.SIGTERM, 6), (signal.SIGKILL, 7)])
def test_batches_whose_accumulated_gradients_are_in_no_step_go_to_others(
    run: Run, number: signal.Signals, batch: int
) -> None:
    options = {"epochs": 1, "samples": 512, "trainer": {"accumulate_grad_batches": 4}, "hold": [0]}
    first = run.start("a", options)
    run.wait_for("a0-in-0")
    second = run.start("b", {**options, "batch": batch, "gate": "leave"}, seed=2)
    run.wait_for("b0-in-0")
    os.kill(second.pid, number)
    second.expect("was told to end by SIGTERM", PATIENCE) if number == signal.SIGTERM else second.end(PATIENCE)
    run.go(0, "leave")
    assert second.end(PATIENCE) in (143, -signal.SIGKILL), second.output
    run.go(0)
    assert first.end(PATIENCE) == 0, first.output
    theirs, lines = (
        [sample for line in file.read_text().splitlines()[:most] for sample in json.loads(line)[1]]
        for file, most in ((run.folder / f"seen-{first.pid}", None), (run.folder / f"seen-{second.pid}", 4))
    )
    assert Counter(theirs + lines) == Counter(range(512))


# --- Hooks and callbacks that change what is trained ------------------------------------------------------------------


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What two groups say of a run in which layers are unfrozen before the second group joins, and weights edited."""
    run, options = Run(tmp_path_factory.mktemp("changing")), {"epochs": 4, "hold": [2, 3]}
    try:
        first = run.start("a", options, script=SCRIPT.with_name("joined_hooks.py"))
        run.wait_for("a0-in-2")
        second = run.start("b", options, script=SCRIPT.with_name("joined_hooks.py"))
        run.wait_for("b0-in-2")
        run.go(2)
        run.wait_for("a0-in-3")
        run.wait_for("b0-in-3")
        run.go(3)
        assert first.end(PATIENCE) == 0, first.output
        assert second.end(PATIENCE) == 0, second.output
        yield run.result("a"), run.result("b")
    finally:
        run.close()


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_that_joins_trains_what_was_unfrozen_before(changing: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for each in changing:
        for epoch in ("2", "3"):
            assert "net.0.weight" in each["said"][epoch]["trainable"]
            assert each["said"][epoch]["moves"]
            assert each["said"][epoch]["tracks"]
    assert [size for _, size in changing[1]["said"]["2"]["groups"]] == [2, 4]


@pytest.mark.slow
@pytest.mark.processes
def test_layers_that_are_unfrozen_while_several_groups_train_get_the_momentum_that_the_tuner_gave_the_others(
    run: Run,
) -> None:
    """And so a group that joins after that finds one momentum, which it goes on with and takes down further."""
    options = {"epochs": 4, "hold": [1, 3], "thawed": 2, "is_tuned": True}
    script = SCRIPT.with_name("joined_hooks.py")
    run.start("a", options, script=script)
    run.wait_for("a0-in-1")
    run.start("b", options, script=script)
    run.wait_for("b0-in-1")
    run.go(1)
    run.wait_for("a0-in-3")
    run.wait_for("b0-in-3")
    run.start("c", options, script=script)
    run.wait_for("c0-in-3")
    run.go(3)
    for name in "abc":
        assert run.groups[name].end(PATIENCE) == 0, run.groups[name].output
    said = {name: run.result(name) for name in "abc"}
    for name in "ab":
        assert said[name]["said"]["3"]["momenta"] == pytest.approx([0.8, 0.8])
    for name in "abc":
        assert said[name]["end"]["momenta"] == pytest.approx([0.7, 0.7])


@pytest.mark.slow
@pytest.mark.processes
def test_what_hooks_did_where_the_epoch_began_is_not_done_once_more_by_a_group_that_joins_it(
    changing: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    first, second = changing
    assert first["said"]["2"]["temperature"] == 0.125
    assert first["said"]["2"]["epochs"] == 3
    for epoch in ("2", "3"):
        assert second["said"][epoch] == first["said"][epoch]
    assert second["end"] == first["end"]
    assert second["weights"] == first["weights"]


@pytest.mark.slow
@pytest.mark.processes
def test_one_group_of_those_that_have_joined_is_rank_zero_in_an_evaluation_after_the_fit(
    changing: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    assert [(each["is_zero"], each["says"]) for each in changing] == [(True, True), (False, False)]


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_joins_with_the_buffers_of_the_run_whatever_a_module_says_that_its_state_is(
    changing: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    assert {each["said"]["3"]["temperature"] for each in changing} == {0.0625}


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_that_joins_makes_loaders_again_when_the_others_do(
    changing: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    assert [each["loaded"] for each in changing] == [[0, 1, 2, 3], [2, 3]]


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_that_joins_knows_the_steps_of_epochs_of_another_length(
    changing: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    for each in changing:
        assert [each["said"][epoch]["steps"] for epoch in ("2", "3")] == [160 // 8 + 16, 160 // 8 + 32]
