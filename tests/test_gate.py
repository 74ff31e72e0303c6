"""The gate before a listening socket: a flood waits outside, and what stands is not touched."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack, closing

import pytest

from lightning_omni.transport.zeromq.guard import BURST, RATE, REOPEN, Gate


def connects(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=0.3).close()
    except TimeoutError:
        return False
    return True


def is_shut(gate: Gate) -> bool:
    return gate.is_shut


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux filters what comes to a socket")
def test_connections_are_left_waiting_while_too_many_come_and_those_that_stand_go_on() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=16))
        gate = stack.enter_context(closing(Gate(listener.fileno(), now=100.0)))
        address = listener.getsockname()
        near = stack.enter_context(socket.create_connection(address, timeout=5.0))
        far = stack.enter_context(listener.accept()[0])
        for _ in range(int(BURST) + 1):
            gate.came()
        gate.poll(100.0)
        assert is_shut(gate)
        assert not connects(address)
        near.sendall(b"still here")
        assert far.recv(100) == b"still here"
        gate.poll(100.0 + (REOPEN / 2) / RATE)
        assert is_shut(gate)
        gate.poll(100.0 + (REOPEN + 2) / RATE)
        assert not is_shut(gate)
        assert connects(address)


def test_ranks_that_are_let_in_do_not_count() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(Gate(listener.fileno(), now=0.0)) as gate:
        for _ in range(10 * int(BURST)):
            gate.came()
            gate.was_let_in()
        gate.poll(0.0)
        assert not is_shut(gate)
        assert connects(listener.getsockname())
