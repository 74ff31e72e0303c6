"""Weights for a group that joins: they go out a piece at a time, are of one moment, and come to those who are there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
import zmq
from test_server_core import data_peer, trained_link
from torch import Tensor

from lightning_omni.methods import METHODS, AsyncSGD, Downpour, method_named
from lightning_omni.server.service import Out
from lightning_omni.transport.zeromq.frames import CHUNK, CHUNK_MARK, LITTLE, LONGER, LONGEST, PacedAnswers
from lightning_omni.transport.zeromq.server import ZeroMQServer
from lightning_omni.wire import messages as m

PEER = b"peer"
COPY = 0.01
"""Seconds that a copy takes here."""


class Clock:
    """Stands still, but for what is copied."""

    def __init__(self) -> None:
        self.now, self._readings = 100.0, itertools.count()

    def __call__(self) -> float:
        return self.now

    def copying(self) -> float:
        """For `PacedAnswers.begin`, which reads it before and after."""
        return self.now + COPY * next(self._readings)


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.ROUTING_ID, PEER)
    for socket in (router, dealer):
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
    router.bind("inproc://paced")
    dealer.connect("inproc://paced")
    dealer.send(b"here")
    assert router.recv_multipart() == [PEER, b"here"]
    yield router, dealer
    router.close()
    dealer.close()
    context.term()


def arrived(dealer: zmq.Socket[bytes]) -> list[bytes]:
    """Pieces that have come."""
    found = []
    while dealer.poll(50):
        mark, piece = dealer.recv_multipart()
        assert mark == CHUNK_MARK
        found.append(piece)
    return found


def begun(router: zmq.Socket[bytes], payload: Tensor) -> tuple[PacedAnswers, Clock]:
    """An answer that is under way, whose copy has taken `COPY` seconds."""
    clock = Clock()
    paced = PacedAnswers(clock.copying)
    paced.begin(router, PEER, payload)
    paced._clock = clock
    clock.now += COPY
    return paced, clock


def test_what_goes_out_is_of_one_moment_and_whole(sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    router, dealer = sockets
    weights = torch.arange(5 * CHUNK // 2) % 251
    payload = weights.to(torch.uint8)
    expected = bytes(payload.numpy())
    paced, clock = begun(router, payload)
    payload.zero_()  # the weights move on
    pieces: list[bytes] = []
    while math.isfinite(paced.due):
        clock.now = max(clock.now, paced.due)
        paced.send({PEER})
        pieces += arrived(dealer)
    assert [len(piece) for piece in pieces] == [CHUNK, CHUNK, CHUNK // 2]
    assert b"".join(pieces) == expected


def test_a_piece_goes_out_when_it_is_due_and_all_take_many_copies_long(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    router, dealer = sockets
    count = 8
    paced, clock = begun(router, torch.zeros(count * CHUNK, dtype=torch.uint8))
    began = clock.now
    for number in range(count):
        paced.send({PEER})
        paced.send({PEER})  # the next one is not due
        assert len(arrived(dealer)) == 1, number
        assert paced.due - clock.now == pytest.approx(LONGER * COPY / count)
        clock.now = paced.due
    paced.send({PEER})
    assert paced.due == math.inf
    assert clock.now - began == pytest.approx(LONGER * COPY)
    assert LONGER * COPY < LONGEST


def test_what_is_for_a_connection_that_has_ended_is_dropped(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    router, dealer = sockets
    paced, clock = begun(router, torch.zeros(8 * CHUNK, dtype=torch.uint8))
    paced.send({PEER})
    clock.now = paced.due
    paced.send(set())
    assert paced.due == math.inf
    assert len(arrived(dealer)) == 1


def test_a_group_that_others_wait_for_is_given_its_weights_at_once() -> None:
    waited_for = {name for name in METHODS if method_named(name).holds_others_up}
    assert waited_for >= {"hardsync", "local_sgd", "diloco", "decoupled_diloco", "softsync"}
    assert not waited_for & {"async_sgd", "elastic_averaging", "async_diloco", "delay_compensated"}
    assert AsyncSGD(bound=2).holds_others_up
    assert Downpour(warm_start=10).holds_others_up
    assert not Downpour().holds_others_up


def test_weights_go_out_as_fast_to_a_group_that_joins_a_server_that_once_stood_still() -> None:
    link = trained_link((0,), (1,))
    with closing(ZeroMQServer(link.core)) as server:
        server._clock._stood += 3600.0
        weights = torch.zeros(2 * LITTLE, dtype=torch.uint8)
        answer = Out(data_peer(1), m.DATA, m.Uploaded(), (weights,), may_take_long=True)
        server._send([answer])
        assert server._paced.due <= server._clock(), "the loop waits for it no longer than for the time it is due"
