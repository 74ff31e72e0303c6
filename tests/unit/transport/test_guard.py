"""Strangers at a TCP port: they are counted, ended, and told of in few words; ranks with the key get in beside them."""

from __future__ import annotations

import logging
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import pytest
import torch
import zmq
from zmq.utils import z85

from lightning_omni.errors import LONGEST, ConfigurationError, Refused, quoted
from lightning_omni.server.core import ServerCore
from lightning_omni.transport.zeromq import guard
from lightning_omni.transport.zeromq.client import ControlConnection, DataConnection
from lightning_omni.transport.zeromq.frames import LARGEST_CONTROL_FRAME, LARGEST_DATA_FRAME
from lightning_omni.transport.zeromq.guard import RefusalLog
from lightning_omni.transport.zeromq.keys import DOMAIN, RunKeys
from lightning_omni.transport.zeromq.server import ZeroMQServer
from lightning_omni.wire import messages as m
from lightning_omni.wire.layout import Layout

KEY = bytes(32)
LAYOUT = Layout.of({"w": torch.zeros(1)})
DEADLINE = 120.0


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Serving:
    """A server in a thread."""

    def __init__(self, encryption: str) -> None:
        self.encryption = encryption
        self.core = ServerCore(KEY, lambda n: bytes(torch.randint(256, (n,)).tolist()))
        self.server = ZeroMQServer(self.core, encryption=encryption)
        self.ports = {m.CONTROL: int(self.server.address.rpartition(":")[2]), m.DATA: self.core.data_port}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self.server.run(self._stopping.is_set)
        self.server.close()

    def connect(self, channel: m.Channel) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.ports[channel]), timeout=DEADLINE)

    def join(self, rank: int, size: int) -> ControlConnection:
        return ControlConnection(
            self.server.address, KEY, "run", rank, size, LAYOUT, connect_timeout=DEADLINE, encryption=self.encryption
        )

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()


@pytest.fixture(params=["curve", "off"])
def serving(request: pytest.FixtureRequest) -> Iterator[Serving]:
    with closing(Serving(request.param)) as server:
        yield server


def is_ended(wire: socket.socket) -> bool:
    """Whether the other side has ended a connection, after whatever it has said."""
    try:
        while select.select([wire], [], [], 0)[0]:
            if not wire.recv(4096):
                return True
    except OSError:
        return True
    return False


@pytest.mark.parametrize("channel", [m.CONTROL, m.DATA])
def test_too_many_strangers_are_ended_the_oldest_first_and_ranks_get_in(
    serving: Serving, channel: m.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "ADMISSION_TIME", 60.0)
    most = guard.MOST_STRANGERS[LARGEST_CONTROL_FRAME if channel == m.CONTROL else LARGEST_DATA_FRAME]
    with ExitStack() as stack:
        first = stack.enter_context(closing(serving.join(0, 2)))
        strangers = [stack.enter_context(serving.connect(channel)) for _ in range(most + 20)]
        wait_for(lambda: sum(map(is_ended, strangers)) >= 20)
        ended = [is_ended(wire) for wire in strangers]
        if serving.encryption == "off":  # with it, time is up for others meanwhile
            assert ended == [True] * 20 + [False] * most
        second = stack.enter_context(closing(serving.join(1, 2)))
        for rank in (first, second):
            stack.enter_context(closing(DataConnection(rank.session, rank.check, DEADLINE)))
            assert rank.request(m.AskStatus(), m.Status, timeout=DEADLINE).lost == ()


def test_a_stranger_that_says_nothing_is_ended_and_a_silent_rank_is_not(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "ADMISSION_TIME", 1.0)
    with closing(serving.join(0, 1)) as rank, closing(DataConnection(rank.session, rank.check, DEADLINE)) as data:
        with serving.connect(m.CONTROL) as one, serving.connect(m.DATA) as other:
            wait_for(lambda: is_ended(one) and is_ended(other))
        refused = m.FetchMessage(optimizer=0)
        with pytest.raises(Exception, match="there is no optimizer 0"):  # it is heard, after all that time
            data.exchange(refused, m.Weights)
        assert rank.request(m.AskStatus(), m.Status, timeout=DEADLINE).lost == ()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
MORE = b"\x03" + (16_000).to_bytes(8, "big") + bytes(16_000)
"""A frame after which others follow."""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts a connection's bytes for us")
@pytest.mark.parametrize("channel", [m.CONTROL, m.DATA])
def test_without_encryption_a_message_without_end_is_ended_long_before_its_time_is_up(
    channel: m.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "ADMISSION_TIME", 600.0)
    with closing(Serving("off")) as serving, serving.connect(channel) as wire:
        wire.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
        deadline = time.monotonic() + DEADLINE
        with suppress(BrokenPipeError, ConnectionResetError):
            while True:
                wire.sendall(MORE)
                assert time.monotonic() < deadline


def test_a_wrong_key_is_told_at_once_and_in_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    with closing(Serving("curve")) as serving:
        with pytest.raises(Refused, match="the key does not match"):
            ControlConnection(serving.server.address, b"x" * 32, "run", 0, 1, LAYOUT, connect_timeout=0.5)
        wait_for(lambda: any("the key does not match" in record.getMessage() for record in caplog.records))
        assert len(caplog.records) <= guard.LINES


def test_the_log_says_where_a_refused_connection_came_from(caplog: pytest.LogCaptureFixture) -> None:
    with closing(Serving("curve")) as serving, serving.connect(m.CONTROL) as wire:
        assert wire.recv(1), "ZeroMQ greets first: the connection stands"
        wait_for(lambda: any(listener.strangers for listener in serving.server._guard._listeners))
        wire.close()
        wait_for(lambda: bool(caplog.records))
    assert caplog.records[0].getMessage().startswith("refused a connection from 127.0.0.1: ")


def test_who_is_let_in_is_decided_by_the_clients_own_key() -> None:
    keys = RunKeys(KEY)
    own = z85.decode(zmq.curve_public(z85.encode(keys._client)))
    request = [b"1.0", b"7", DOMAIN, b"127.0.0.1", b"", b"CURVE", own]

    def status(**changes: list[bytes]) -> bytes:
        return keys.answer_authentication(changes.get("request", request))[2]

    assert keys.answer_authentication(request)[:3] == [b"1.0", b"7", b"200"]
    for place, wrong in ((0, b"2.0"), (2, b""), (5, b"NULL"), (6, bytes(32))):
        assert status(request=[*request[:place], wrong, *request[place + 1 :]]) == b"400"
    assert status(request=request[:6]) == b"400"
    assert RunKeys(b"x" * 32).answer_authentication(request)[2] == b"400"


def test_a_zeromq_without_curve_is_one_sentence_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda feature: feature != "curve")
    with pytest.raises(ConfigurationError, match=r'cannot encrypt.*encryption="off"'):
        ZeroMQServer(ServerCore(KEY, bytes))
    with closing(ZeroMQServer(ServerCore(KEY, bytes), encryption="off")):
        pass
    with pytest.raises(ConfigurationError, match="encryption='tls': pass \"curve\""):
        ZeroMQServer(ServerCore(KEY, bytes), encryption="tls")


def test_log_lines_from_outside_are_escaped_cut_and_few(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = "x\n\x1b[2JWARNING: all is lost\r\u2028\u202e"
    shown = quoted(forged)
    assert shown.isprintable()
    assert shown.startswith("x\\n\\x1b[2JWARNING")
    assert len(quoted("\n" * 10_000_000)) <= LONGEST + 1
    assert quoted("é" * LONGEST) == "é" * LONGEST
    log = RefusalLog(logging.getLogger("test"))
    for _ in range(1000):
        log.write("refused", forged * 100)
    assert len(caplog.records) == guard.LINES
    assert all(record.getMessage().isprintable() for record in caplog.records)
    monkeypatch.setattr(guard, "SECONDS", 0.0)
    log.write("refused", "again")
    assert [record.getMessage() for record in caplog.records[-2:]] == [
        f"{1000 - guard.LINES} more lines like these were left out",
        "refused: again",
    ]
