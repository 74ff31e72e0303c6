"""A rank whose connection breaks is noticed at once, long before its silence would tell."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
import torch
import zmq
from test_server_core import control_peer, data_peer, trained_link

from lightning_omni.errors import RankLost
from lightning_omni.methods import AsyncSGD
from lightning_omni.registry import to_wire
from lightning_omni.server.core import ServerCore
from lightning_omni.server.service import Out
from lightning_omni.transport.zeromq.client import ControlConnection, DataConnection
from lightning_omni.transport.zeromq.observer import Observer
from lightning_omni.transport.zeromq.server import ANSWERED_STRANGERS, ZeroMQServer
from lightning_omni.wire import messages as m
from lightning_omni.wire.layout import Layout

KEY = bytes(32)
SILENCE = 600.0
"""Seconds after which silence alone would tell: longer than the test may take."""


@pytest.fixture
def server() -> Iterator[ZeroMQServer]:
    server = ZeroMQServer(ServerCore(KEY, secrets.token_bytes, heartbeat_timeout=SILENCE))
    with serving(server):
        yield server


@contextmanager
def serving(server: ZeroMQServer) -> Iterator[None]:
    stopping = threading.Event()
    thread = threading.Thread(target=server.run, args=(stopping.is_set,))
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(120)
        server.close()


def join(server: ZeroMQServer, rank: int, size: int, run: str = "run") -> ControlConnection:
    return ControlConnection(server.address, KEY, run, rank, size, Layout.of({"w": torch.zeros(1)}))


def heard(observer: Observer) -> str:
    """Why the run is over, as soon as it has come."""
    deadline = time.monotonic() + 120
    while not (reason := observer.why_over()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return reason


def form(control: ControlConnection, *groups: tuple[int, ...]) -> None:
    control.request(m.FormGroups(generation=1, groups=groups, method=to_wire(AsyncSGD())), m.GroupsFormed, timeout=120)


def test_no_group_waits_for_a_rank_whose_connection_broke(server: ZeroMQServer) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(closing(join(server, rank, 2))) for rank in range(2))
        form(first, (0,), (1,))
        second.close()
        gathered = first.request(m.Contribute(number=0, what="barrier"), m.Gathered, timeout=120)
        assert gathered.ranks == (0,)
        assert first.lost == (1,)


def test_a_broken_connection_in_the_group_of_rank_0_ends_the_run(server: ZeroMQServer) -> None:
    with closing(join(server, 0, 2)) as first, closing(join(server, 1, 2)) as second:
        form(first, (0, 1))
        second.close()
        with pytest.raises(RankLost, match="rank 1 is gone without a goodbye"):
            first.request(m.Contribute(number=0, what="barrier"), m.Gathered, timeout=120)


def test_groups_that_are_about_to_join_look_for_no_server_that_has_ended_with_its_run() -> None:
    server = ZeroMQServer(ServerCore(KEY, secrets.token_bytes, heartbeat_timeout=SILENCE))
    server.core.reconnect_timeout = SILENCE  # ranks would look for another one
    thread = threading.Thread(target=server.run, args=(lambda: server.core.roster.is_over,))
    thread.start()
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(closing(Observer(server.address, KEY))) for _ in range(3))
        run = first.enlist(1).run
        begins = stack.enter_context(closing(join(server, 0, 1, run)))
        form(begins, (0,))
        late = stack.enter_context(closing(join(server, second.enlist(1).first, 0, run)))
        third.enlist(1)
        assert third.why_over() == ""
        begins.has_finished = True
        begins.close(reason="")
        thread.join(120)
        server.close()
        assert isinstance(late.wait_for_end(120), RankLost)
        late.close(reason="it says goodbye to nobody")
        assert heard(third) == "it has been trained to its end"


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_a_rank_has_sent_to_the_server_before_is_in_no_log_of_one_that_goes_on(
    goes_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cores = [ServerCore(KEY, secrets.token_bytes, heartbeat_timeout=SILENCE) for _ in range(2)]
    cores[0].reconnect_timeout = SILENCE
    server = ZeroMQServer(cores[0])
    ports = [int(server.address.rpartition(":")[2]), cores[0].data_port]
    with ExitStack() as stack:
        with serving(server):
            only = stack.enter_context(closing(join(server, 0, 1)))
            form(only, (0,))
            data = stack.enter_context(closing(DataConnection(only.session, lambda: None)))
        if goes_on:
            cores[1].load(cores[0].state(), [], 0.0)
        data.send(m.FetchMessage(optimizer=0))
        with serving(ZeroMQServer(cores[1], port=ports[0], data_port=ports[1])):
            answer = m.decode(data._receive()[0].buffer, at="rank", channel=m.DATA)
    assert isinstance(answer, m.RefusedMessage)
    assert answer.code == "stranger"
    assert ("attach first" in caplog.text) == (not goes_on)


def test_a_question_for_the_status_is_answered(server: ZeroMQServer) -> None:
    with closing(join(server, 0, 1)) as only:
        assert only.request(m.AskStatus(), m.Status, timeout=120).lost == ()


def test_no_memory_is_kept_for_the_rest_of_what_a_dead_rank_was_sending() -> None:
    link = trained_link((0,), (1,))
    with closing(ZeroMQServer(link.core)) as server:
        announced = zmq.Frame(m.encode(m.Upload(nbytes=m.LARGEST_UPLOAD)))
        assert server.take(m.DATA, data_peer(1), [announced]) == []
        assert server._assemblies.keys() == {data_peer(1)}
        link.deliver(link.core.hang_up(control_peer(1)))
        turns = iter((False, True))
        server.run(until=lambda: next(turns))
        assert not server._assemblies


def test_a_connection_that_is_refused_often_stays_unanswered_after_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_omni.transport.zeromq.server.COUNTED_STRANGERS", 16)
    with closing(ZeroMQServer(ServerCore(KEY, secrets.token_bytes))) as server:

        def is_answered(peer: bytes) -> bool:
            refused = m.RefusedMessage(code="stranger", reason="it has not joined")
            return server._deserves_answer(Out(peer, m.CONTROL, refused))

        assert [is_answered(b"one") for _ in range(2 * ANSWERED_STRANGERS)].count(True) == ANSWERED_STRANGERS
        for number in range(100):
            assert is_answered(f"other {number}".encode())
            assert not is_answered(b"one")
        assert len(server._refusals) == 16
