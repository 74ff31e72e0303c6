"""Real sockets, threads and processes: large payloads, garbage next to a running exchange, and a server that dies."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from processes import Process, connected_to
from torch import Tensor
from torch.nn import Parameter

from lightning_omni.errors import (
    ConfigurationError,
    ConnectionLost,
    Evicted,
    MalformedMessage,
    OmniError,
    RankLost,
    Refused,
)
from lightning_omni.methods import AsyncSGD, HardSync, Method
from lightning_omni.methods.model.modules import class_path
from lightning_omni.methods.model.server_optimizer import describe, hyperparameters_of, resolver
from lightning_omni.registry import to_wire
from lightning_omni.runtime.options import WorldOptions
from lightning_omni.runtime.server_process import RunServer
from lightning_omni.server.core import ServerCore
from lightning_omni.transport.serving import ServerProcess
from lightning_omni.transport.serving.process import ServerSettings
from lightning_omni.transport.zeromq.client import ControlConnection, DataConnection
from lightning_omni.transport.zeromq.dialing import Dialed
from lightning_omni.transport.zeromq.frames import CHUNK, KEPT_ALIVE, LITTLE, Assembly, Copies, chunks
from lightning_omni.transport.zeromq.keys import RunKeys, new_key
from lightning_omni.transport.zeromq.server import ZeroMQServer
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import Packed, pack
from lightning_omni.wire.layout import Layout

KEY = bytes(range(32))
DEADLINE, IN_TIME = 120.0, 10.0
"""Seconds that anything here may take on a busy machine before it counts as stuck."""


def eventually(is_true: Callable[[], bool]) -> bool:
    """Polls until it is true, or for too long."""
    deadline = time.monotonic() + DEADLINE
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def sgd(parameters: list[Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


class Broken(torch.optim.SGD):
    """An optimizer that cannot step."""

    def step(self, closure: Any = None) -> Any:
        raise FloatingPointError("no step")


ASYNC = AsyncSGD()
Make = Callable[[list[Parameter]], torch.optim.Optimizer]


class Rank:
    """A rank's two connections, and its pushes."""

    def __init__(self, address: str, rank: int = 0, world_size: int = 1, numel: int = 1000, **options: Any) -> None:
        self.layout = Layout.of({"w": torch.zeros(numel), "b": torch.zeros(3)})
        options = {"key": KEY, "run": "a run", "layout": self.layout, "connect_timeout": DEADLINE, **options}
        self.pushes = 0
        self.control = ControlConnection(address, rank=rank, world_size=world_size, **options)
        try:
            self.data = DataConnection(self.control.session, self.control.check, DEADLINE)
        except BaseException:
            self.control.close()
            raise

    def close(self) -> None:
        self.data.close()
        self.control.close()

    def begin(self, *groups: tuple[int, ...], method: Method = ASYNC, make: Make = sgd) -> list[Parameter]:
        """Forms groups and hands weights over."""
        form = m.FormGroups(generation=1, groups=groups, method=to_wire(method))
        self.control.request(form, m.GroupsFormed, timeout=DEADLINE)
        parameters = [Parameter(torch.arange(int(spec.shape[0])) / 7) for spec in self.layout.specs]
        names: dict[Tensor, str] = {
            parameter: spec.name for parameter, spec in zip(parameters, self.layout.specs, strict=True)
        }
        weights = {name: parameter.detach() for parameter, name in names.items()}
        part = {"optimizer": describe(make(parameters), names), "weights": weights, "clock": 0}
        packed, buffer = pack({"parts": [part]})
        self.data.exchange(m.UploadWeights(packed=packed, nbytes=buffer.numel()), m.WeightsUploaded, buffer)
        return parameters

    def gradient(self, step: int) -> tuple[Tensor, list[Tensor]]:
        """A gradient as payload and as tensors."""
        buffer = self.layout.empty()
        views = self.layout.views(buffer)
        for view in views:
            view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(step)))
        return buffer, views

    def push(self, step: int, read_at: int) -> tuple[m.Weights, list[Tensor]]:
        buffer, _ = self.gradient(step)
        answer, payload = self.data.exchange(self.push_message(read_at, buffer), m.Weights, buffer)
        return answer, self.layout.views(payload)

    def push_message(self, read_at: int, buffer: Tensor) -> m.PushMessage:
        self.pushes += 1
        return m.PushMessage(
            optimizer=0,
            read_at=read_at,
            present=(True, True),
            hyperparameters=tuple(hyperparameters_of(sgd([Parameter(torch.zeros(1))]))),
            epoch=-1,
            trained=0,
            nbytes=buffer.numel(),
            incarnation=1,
            sequence=self.pushes,
        )


def assert_exact_training(rank: Rank, parameters: list[Parameter], steps: int) -> None:
    """Pushes, and compares every answer with the same optimizer here."""
    optimizer = sgd(parameters)
    for step in range(steps):
        for parameter, value in zip(parameters, rank.gradient(step)[1], strict=True):
            parameter.grad = value
        optimizer.step()
        answer, weights = rank.push(step, read_at=step)
        assert (answer.clock, answer.staleness, answer.applied) == (step + 1, 0, True)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, weights, strict=True))


class Serving:
    """A server in a thread."""

    def __init__(self, encryption: str = "curve", **options: Any) -> None:
        self.core = ServerCore(KEY, secrets.token_bytes, **options)
        self.server = ZeroMQServer(self.core, encryption=encryption)
        self.address = self.server.address
        self.failure: BaseException | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.server.run(until=self._stopping.is_set)
        except BaseException as error:
            self.failure = error
        finally:
            self.server.close()

    @property
    def data_address(self) -> str:
        return f"tcp://127.0.0.1:{self.core.data_port}"

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        assert self.failure is None, self.failure


@pytest.fixture
def serving() -> Iterator[Serving]:
    server = Serving()
    yield server
    server.stop()


@pytest.fixture
def plain() -> Iterator[Serving]:
    """A server that any process can talk to, without encryption."""
    server = Serving(encryption="off")
    yield server
    server.stop()


@contextmanager
def ranks(address: str, count: int, **options: Any) -> Iterator[list[Rank]]:
    with ExitStack() as stack:
        joined = []
        for number in range(count):
            joined.append(Rank(address, number, count, **options))
            stack.callback(joined[-1].close)
        yield joined


@contextmanager
def raw_dealer(address: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, int(DEADLINE * 1000))
    dealer.connect(address)
    try:
        yield dealer
    finally:
        dealer.close()
        context.term()


# --- Frames --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17])
def test_a_payload_is_put_together_from_its_chunks(nbytes: int) -> None:
    payload = torch.arange(nbytes).to(torch.uint8)
    assembly = Assembly(m.WeightsUploaded(), torch.zeros(nbytes, dtype=torch.uint8))
    pieces = list(chunks(payload))
    assert all(0 < len(piece) <= CHUNK for piece in pieces)
    for index, piece in enumerate(pieces):
        assert not assembly.is_complete, index
        assembly.add(piece)
    assert assembly.is_complete
    assert torch.equal(assembly.buffer, payload)


@contextmanager
def routed(*names: bytes) -> Iterator[tuple[zmq.Socket[bytes], list[zmq.Socket[bytes]]]]:
    """A ROUTER and peers of these names, which take in no more than they read."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, ExitStack() as stack:
        router.setsockopt(zmq.SNDHWM, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        peers = [stack.enter_context(context.socket(zmq.DEALER)) for _ in names]
        for name, peer in zip(names, peers, strict=True):
            peer.setsockopt(zmq.IDENTITY, name)
            peer.setsockopt(zmq.RCVHWM, 1)
            peer.connect(f"tcp://127.0.0.1:{port}")
            peer.send(b"")
            router.recv_multipart()
        yield router, peers


def hear(peer: zmq.Socket[bytes], nbytes: int) -> bytes:
    """A payload that was sent in chunks."""
    payload = bytearray()
    while len(payload) < nbytes:
        assert peer.poll(30_000)
        payload += peer.recv_multipart()[-1]
    return bytes(payload)


def test_copies_stay_as_they_were_sent_while_a_slow_peer_does_not_read() -> None:
    weights = torch.empty(24 * CHUNK - 5, dtype=torch.uint8)  # more than lies between two sockets
    with routed(b"slow", b"fast") as (router, (slow, fast)):
        copies = Copies()
        for value in range(3):
            copies.send(router, b"slow", weights.fill_(value))
            copies.send(router, b"fast", weights.fill_(10 + value))
            weights.fill_(99)
            assert hear(fast, weights.numel()) == bytes([10 + value]) * weights.numel()
        for value in range(3):
            assert hear(slow, weights.numel()) == bytes([value]) * weights.numel()


def test_memory_of_copies_is_used_again() -> None:
    rounds, weights = 6, torch.empty(LITTLE + 1, dtype=torch.uint8)
    with routed(b"peer") as (router, (peer,)):
        copies, memory = Copies(), {}
        for value in range(rounds):
            copies.send(router, b"peer", weights.fill_(value))
            memory.update({id(block): block for block, _ in copies._sent})
            assert hear(peer, weights.numel()) == bytes([value]) * weights.numel()
            for _, tracker in copies._sent:
                tracker.wait(30.0)
        count = len(list(chunks(weights)))
        assert 0 < len(memory) <= count + rounds  # each time one may be let go; some are there again before one looks


def test_a_server_gives_back_the_memory_of_copies_when_no_rank_is_left(serving: Serving) -> None:
    with ranks(serving.address, 1, numel=2 * LITTLE // 4) as (rank,):
        rank.begin((0,))
        rank.push(0, read_at=0)
        assert serving.server._copies._sent
    deadline = time.monotonic() + DEADLINE
    while serving.server._copies._sent or serving.server._copies._free:
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- Exchange ------------------------------------------------------------------------------------------------------


def test_a_payload_of_many_chunks_arrives_bit_for_bit(serving: Serving) -> None:
    numel = 3 * CHUNK + 17  # of float32: thirteen chunks
    with ranks(serving.address, 1, numel=numel) as (rank,):
        assert_exact_training(rank, rank.begin((0,)), steps=3)


def test_weights_and_snapshots_are_of_one_moment_while_others_push(serving: Serving) -> None:
    with ranks(serving.address, 2, numel=200_000) as (first, second):
        parameters = first.begin((0,), (1,))
        failed: list[BaseException] = []

        def poll() -> None:
            try:
                for _ in range(20):
                    answer, payload = second.data.exchange(m.FetchMessage(optimizer=0), m.Weights)
                    seen[answer.clock] = payload.clone()
            except BaseException as error:
                failed.append(error)

        seen: dict[int, Tensor] = {}
        thread = threading.Thread(target=poll)
        thread.start()
        optimizer, history = sgd(parameters), [[p.detach().clone() for p in parameters]]
        step = 0
        while thread.is_alive() or step < 3:
            for parameter, value in zip(parameters, first.gradient(step)[1], strict=True):
                parameter.grad = value
            optimizer.step()
            history.append([p.detach().clone() for p in parameters])
            first.push(step, read_at=step)
            step += 1
        thread.join()
        assert not failed
        assert seen
        for clock, payload in seen.items():
            views = first.layout.views(payload)
            assert all(torch.equal(a, b) for a, b in zip(views, history[clock], strict=True))


def test_a_refused_payload_does_not_spoil_the_next_one(serving: Serving) -> None:
    with ranks(serving.address, 1, numel=2 * CHUNK) as (rank,):
        parameters = rank.begin((0,))
        buffer, _ = rank.gradient(0)
        message = m.PushMessage(
            optimizer=0, read_at=0, present=(True, True), hyperparameters=({},), epoch=-1, trained=0, nbytes=17
        )
        with pytest.raises(Refused, match="the tensors have 17 bytes"):
            rank.data.exchange(message, m.Weights, buffer)
        assert_exact_training(rank, parameters, steps=2)


@pytest.mark.parametrize("size", [1000, 100_000])
def test_collectives_carry_each_ranks_bytes(serving: Serving, size: int) -> None:
    with ranks(serving.address, 3) as joined:
        answers: dict[int, list[bytes]] = {}

        def synchronize(rank: int) -> None:
            control, data, payload = joined[rank].control, joined[rank].data, bytes([rank]) * size * rank
            if brought := len(payload) > m.LARGEST_INLINE:
                data.exchange(
                    m.Upload(nbytes=len(payload)), m.Uploaded, torch.frombuffer(bytearray(payload), dtype=torch.uint8)
                )
            message = m.Contribute(number=0, what="all_gather", uploaded=brought)
            gathered, parts = control.request_payload(message, m.Gathered, b"" if brought else payload, DEADLINE)
            assert gathered.must_download == (size * 2 > m.LARGEST_INLINE)
            if gathered.must_download:
                _, whole = data.exchange(m.Download(number=0), m.Downloaded)
                parts = [part.numpy().tobytes() for part in whole.split(list(gathered.sizes))]
            answers[rank] = parts

        threads = [threading.Thread(target=synchronize, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = [bytes([rank]) * size * rank for rank in range(3)]
        assert answers == dict.fromkeys(range(3), expected)


def test_what_is_too_large_for_the_control_channel_is_an_error_before_it_is_sent(serving: Serving) -> None:
    with ranks(serving.address, 1) as (rank,):
        with pytest.raises(MalformedMessage, match="bring it over the data channel"):
            rank.control.request(m.Contribute(number=0, what="gather"), m.Gathered, bytes(m.LARGEST_INLINE + 1))
        assert rank.control.request(m.AskStatus(), m.Status, timeout=DEADLINE).lost == ()


def test_heartbeats_bring_the_status_home(serving: Serving) -> None:
    with ranks(serving.address, 1) as (rank,):
        rank.begin((0,))
        rank.push(0, read_at=0)
        rank.control.report_timings(0.25, 0.5, 0.125)
        assert eventually(lambda: serving.core.status_service.status(0.0).groups[0].compute_time == 0.25)
        assert eventually(lambda: rank.control.status is not None and rank.control.status.clock == 1)


def test_a_rank_that_says_goodbye_with_a_reason_ends_its_group_only(serving: Serving) -> None:
    with ranks(serving.address, 2) as (first, second):
        first.begin((0,), (1,))
        second.control.close(reason="rank 1 failed: KeyError")
        assert eventually(lambda: first.control.lost == (1,))
        first.control.check()
        assert first.push(0, read_at=0)[0].applied
        with pytest.raises(RankLost, match="rank 1 was evicted: rank 1 failed: KeyError"):
            second.push(0, read_at=0)


def test_a_lost_rank_is_told_and_stops_waiting(serving: Serving) -> None:
    told: list[OmniError] = []
    with ExitStack() as stack:
        first = Rank(serving.address, 0, 2)
        stack.callback(first.close)
        second = Rank(serving.address, 1, 2, on_end=told.append)
        stack.callback(second.close)
        first.begin((0,), (1,))
        first.control.post(m.RankEnded(rank=1, reason="rank 1 was killed"))
        with pytest.raises(RankLost, match="rank 1's group is out of the run: rank 1 was killed"):
            second.control.request(m.Contribute(number=0, what="barrier"), m.Gathered, timeout=DEADLINE)
        assert [type(error) for error in told] == [Evicted]


def test_ranks_are_told_why_a_step_failed_also_when_it_was_the_loss_of_a_group_that_made_the_server_step() -> None:
    serving = Serving(resolve=resolver((class_path(Broken),)))
    try:
        with ranks(serving.address, 2) as (first, second):
            first.begin((0,), (1,), method=HardSync(), make=lambda parameters: Broken(parameters, lr=0.1))
            buffer, _ = first.gradient(0)
            first.data.send(first.push_message(0, buffer), buffer)
            second.control.close()
            with pytest.raises(
                RankLost, match=r"the run is over: Broken.step\(\), .*FloatingPointError: no step; use a method"
            ):
                first.data.receive(m.Weights)
    finally:
        serving.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are found in /proc")
@pytest.mark.parametrize("moment", ["while it waits", "between two pushes"])
def test_a_data_connection_that_broke_is_noticed_while_the_control_connection_stands(
    serving: Serving, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_omni.transport.zeromq.client.GRACE", 0.0)
    with ranks(serving.address, 2) as (first, _):
        first.begin((0,), (1,), method=HardSync())
        buffer, _ = first.gradient(0)
        waits = first.push_message(0, buffer)
        if moment == "while it waits":  # for the other group
            first.data.send(waits, buffer)
        for wire in connected_to(serving.data_address):
            wire.shutdown(socket.SHUT_RDWR)
        assert eventually(lambda: first.data._has_broken)
        if moment == "between two pushes":
            first.data.send(waits, buffer)
        with pytest.raises(ConnectionLost, match="the data connection broke"):
            first.data.receive(m.Weights)
        first.control.check()


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are found in /proc")
def test_why_the_run_ends_is_told_rather_than_that_the_connection_broke(serving: Serving) -> None:
    """The server closes what it has, and its reason is still on its way when another connection is refused."""
    with ranks(serving.address, 2) as (first, _):
        first.begin((0,), (1,), method=HardSync())
        buffer, _ = first.gradient(0)
        for wire in connected_to(serving.data_address):
            wire.shutdown(socket.SHUT_RDWR)
        assert eventually(lambda: first.data._has_broken)
        first.data.send(first.push_message(0, buffer), buffer)
        told = time.monotonic() + 0.5

        def check() -> None:
            if time.monotonic() > told:
                raise RankLost("rank 1 cannot go on: odd has dtype float8")

        first.data._check = check
        with pytest.raises(RankLost, match="odd has dtype float8"):
            first.data.receive(m.Weights)


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are found in /proc")
def test_connections_that_are_silent_are_kept_alive_by_the_system(serving: Serving) -> None:
    with ranks(serving.address, 1):
        for address in (serving.address, serving.data_address):
            idle = [wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) for wire in connected_to(address)]
            assert idle == [KEPT_ALIVE]


# --- Strangers and garbage -----------------------------------------------------------------------------------------


def garbage(seed: int) -> Iterator[list[bytes]]:
    """Multipart messages of all kinds of wrong: random bytes, halves of messages, chunks out of the blue."""
    source = random.Random(seed)
    push = m.encode(
        m.PushMessage(
            optimizer=0, read_at=0, present=(True, True), hyperparameters=({},), epoch=-1, trained=0, nbytes=2**50
        )
    )
    seed_message = m.encode(m.UploadWeights(packed=Packed(b"", ()), nbytes=2**50))
    for _ in range(60):
        yield [source.randbytes(source.randrange(200)) for _ in range(source.randrange(1, 5))]
    yield from ([push], [push[: len(push) // 2]], [seed_message], [b"", b"x" * 1000], [b"", b""], [b""], [b""] * 5)
    yield from (
        [m.encode(message)] for message in (m.AskStatus(), m.FetchMessage(optimizer=0), m.AttachProof(mac=b"x" * 32))
    )
    yield [b"\x80\x04\x95" + b"cos\nsystem\n(S'true'\ntR."]  # a pickle
    yield [b"\xdd\xff\xff\xff\xff"]


def test_garbage_is_refused_and_counted_and_harms_no_exchange(plain: Serving) -> None:
    with ExitStack() as stack:
        (rank,) = stack.enter_context(ranks(plain.address, 1, numel=50_000, encryption="off"))
        parameters = rank.begin((0,))
        control = stack.enter_context(raw_dealer(plain.address))
        data = stack.enter_context(raw_dealer(plain.data_address))
        finished = threading.Event()

        def pester() -> None:
            for number in range(1000):
                for frames in garbage(number):
                    control.send_multipart(frames)
                    data.send_multipart(frames)
                if finished.is_set() and plain.core.strangers >= 100:
                    return

        thread = threading.Thread(target=pester)
        thread.start()
        try:
            assert_exact_training(rank, parameters, steps=8)
        finally:
            finished.set()
            thread.join()
        assert eventually(lambda: plain.core.strangers >= 100)
        control.send_multipart(
            [m.encode(m.AskStatus())]
        )  # answers of before are lost if a connection was closed for it
        assert control.poll(int(DEADLINE * 1000))
        refusal = m.decode(control.recv_multipart()[0], at="rank", channel=m.CONTROL)
        assert isinstance(refusal, m.RefusedMessage)
        assert eventually(lambda: rank.control.status is not None and rank.control.status.strangers >= 100)


def test_bytes_that_are_not_even_zeromq_harm_no_exchange(serving: Serving) -> None:
    source = random.Random(0)
    with ranks(serving.address, 1) as (rank,):
        parameters = rank.begin((0,))
        for address in (serving.address, serving.data_address):
            port = int(address.rpartition(":")[2])
            for start in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f", b"", bytes(64), b"\xff" * 64):
                with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as wire:
                    wire.sendall(start + source.randbytes(1000))
        assert_exact_training(rank, parameters, steps=3)


@pytest.mark.parametrize(
    "message", [m.FetchMessage(optimizer=0), m.UploadWeights(packed=Packed(b"", ()), nbytes=2**50)]
)
def test_a_stranger_on_the_data_channel_is_refused_as_a_stranger_once(plain: Serving, message: m.Message) -> None:
    with raw_dealer(plain.data_address) as dealer:
        dealer.send(m.encode(message))
        assert dealer.poll(int(DEADLINE * 1000))
        answer = m.decode(dealer.recv_multipart()[0], at="rank", channel=m.DATA)
    assert (answer.code, plain.core.strangers) == ("stranger", 1)


def test_the_secret_of_another_process_attaches_nothing_and_its_owner_keeps_its_connection(serving: Serving) -> None:
    with ranks(serving.address, 1) as (rank,):
        parameters = rank.begin((0,))
        thief = dataclasses.replace(rank.control.session, secret=bytes(32))
        with pytest.raises(Refused, match="this proof opens nothing"):
            DataConnection(thief, lambda: None, DEADLINE)
        with pytest.raises(Refused, match="has a data connection already"):
            DataConnection(rank.control.session, lambda: None, DEADLINE)
        assert_exact_training(rank, parameters, steps=2)


def test_another_key_is_refused_with_and_without_encryption(serving: Serving, plain: Serving) -> None:
    ways: tuple[tuple[Serving, dict[str, Any]], ...] = (
        (serving, {"connect_timeout": 1.0}),  # it hears nothing at all
        (plain, {"encryption": "off"}),
    )
    for server, options in ways:
        with pytest.raises(Refused, match="the same key") as refusal:
            Rank(server.address, key=new_key(), **options)
        assert refusal.value.code == "key"


def test_a_rank_without_encryption_is_not_heard_by_a_server_with_it_nor_the_other_way_round(
    serving: Serving, plain: Serving
) -> None:
    for server, encryption in ((serving, "off"), (plain, "curve")):
        with pytest.raises(Refused, match='only one side was given encryption="off"'):
            Rank(server.address, connect_timeout=1.0, encryption=encryption)
    assert eventually(lambda: min(serving.core.strangers, plain.core.strangers) > 0)  # counted, and not heard


def test_a_server_without_the_key_is_not_believed() -> None:
    context = zmq.Context()
    impostor = context.socket(zmq.ROUTER)
    port = impostor.bind_to_random_port("tcp://127.0.0.1")

    def answer_everything() -> None:
        peer, _ = impostor.recv_multipart()
        impostor.send_multipart([peer, m.encode(m.Challenge(nonce=b"n" * 32))])
        peer, _ = impostor.recv_multipart()
        welcome = m.Welcome(mac=b"guess", data_port=1, heartbeat_timeout=30.0)
        impostor.send_multipart([peer, m.encode(welcome)])

    thread = threading.Thread(target=answer_everything)
    thread.start()
    try:
        with pytest.raises(Refused, match="the key does not match"):  # it hears nothing at all
            Rank(f"tcp://127.0.0.1:{port}", connect_timeout=0.5)
        with pytest.raises(Refused, match="does not hold the run's key"):
            Rank(f"tcp://127.0.0.1:{port}", encryption="off")
    finally:
        thread.join()
        impostor.close(0)
        context.term()


class Wiretap:
    """Passes the bytes of TCP connections on to a port, and keeps them."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(DEADLINE)
        self.port = self._listener.getsockname()[1]
        self.heard: list[bytearray] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with self._listener:
            near = self._listener.accept()[0]
        far = socket.create_connection(self._target)
        for source, target in ((near, far), (far, near)):
            self.heard.append(bytearray())
            self._threads.append(threading.Thread(target=self._pass_on, args=(source, target, self.heard[-1])))
            self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket, heard: bytearray) -> None:
        with source, suppress(OSError):  # either side may hang up first
            while data := source.recv(1 << 16):
                heard += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def all(self) -> list[bytearray]:
        """What either side said, once both have hung up."""
        for thread in self._threads:
            thread.join(DEADLINE)
        return self.heard

    def messages(self) -> Iterator[list[bytes]]:
        """Everything that was said, once both sides have hung up: the frames of each ZeroMQ message."""
        for heard in self.all():
            frames, position = [], 64  # after the greeting
            while position < len(heard):
                flags, width = heard[position], 8 if heard[position] & 2 else 1
                start = position + 1 + width
                position = start + int.from_bytes(heard[position + 1 : start], "big")
                if flags & 4:
                    continue  # a command of ZeroMQ itself
                frames.append(bytes(heard[start:position]))
                if not flags & 1:
                    yield frames
                    frames = []


def test_without_encryption_everything_on_the_wire_is_messagepack_or_bytes_of_a_tensor(plain: Serving) -> None:
    control, data = (Wiretap(int(at.rpartition(":")[2])) for at in (plain.address, plain.data_address))
    plain.core.data_port = data.port
    with ranks(f"tcp://127.0.0.1:{control.port}", 1, encryption="off") as (rank,):
        assert_exact_training(rank, rank.begin((0,)), steps=2)
        rank.control.request_payload(m.Contribute(number=0, what="gather"), m.Gathered, b"bytes", DEADLINE)
    said = {}
    for tap in (control, data):
        for head, *payload in tap.messages():
            if head == b"":  # a chunk of a tensor, or a probe
                assert len(payload) == (1 if tap is data else 0)
                continue
            said[msgspec.msgpack.decode(head)["type"]] = payload
    assert said.keys() >= {
        "Hello",
        "Challenge",
        "Proof",
        "Welcome",
        "FormGroups",
        "GroupsFormed",
        "UploadWeights",
        "Push",
        "Weights",
    }
    assert said["Contribute"] == said["Gathered"] == [b"bytes"]


def test_nothing_on_the_wire_can_be_read_with_encryption(serving: Serving) -> None:
    control, data = (Wiretap(int(at.rpartition(":")[2])) for at in (serving.address, serving.data_address))
    serving.core.data_port = data.port
    with ranks(f"tcp://127.0.0.1:{control.port}", 1, numel=1000) as (rank,):
        assert_exact_training(rank, rank.begin((0,)), steps=2)
        gradient = rank.gradient(0)[0].numpy().tobytes()
    heard = [bytes(each) for tap in (control, data) for each in tap.all()]
    assert sum(map(len, heard)) > 4 * len(gradient)
    for each in heard:
        assert not any(word in each for word in (b"Hello", b"Proof", b"Attach", b"Push", b"Weights", gradient[:64]))


# --- Addresses -----------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_named(serving: Serving) -> None:
    port = int(serving.address.rpartition(":")[2])
    with pytest.raises(ConfigurationError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--port"):
        ZeroMQServer(ServerCore(KEY, secrets.token_bytes), port=port)
    with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1:{serving.core.data_port}.*\(--data-port; 0"):
        ZeroMQServer(ServerCore(KEY, secrets.token_bytes), data_port=serving.core.data_port)


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1.*host="):
        ZeroMQServer(ServerCore(KEY, secrets.token_bytes), host="192.0.2.1")


@pytest.mark.parametrize(
    "address",
    [
        "nonsense",
        "",
        "tcp://",
        "tcp://host",
        "tcp://:5555",
        "tcp://host:port",
        "tcp://host:99999",
        "tcp://127.0.0.1:0",
        "tcp://a b:5555",
        "tcp://127.0.0.1:5555/path",
        "http://host:1",
        "ipc://tmp/x",
        "127.0.0.1:5555",
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_is_tried(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r'server=.*"tcp://host:port"'):
        Rank(address, connect_timeout=0.0)


def test_a_server_that_cannot_be_reached_is_reported_in_time() -> None:
    with socket.socket() as taken:  # and no process listens
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match=rf"no parameter server answers at .*:{port}; check server="):
            Rank(f"tcp://127.0.0.1:{port}", connect_timeout=0.3)
        assert time.monotonic() - began < IN_TIME


# --- The server goes away ------------------------------------------------------------------------------------------


def test_a_rank_that_waits_is_told_when_the_server_disappears() -> None:
    server = Serving()
    told: list[OmniError] = []
    with ExitStack() as stack:
        rank = Rank(server.address, 0, 2, on_end=told.append)
        stack.callback(rank.close)
        threading.Timer(0.2, server.stop).start()
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match="is gone; the run cannot go on"):
            rank.control.request(m.Contribute(number=0, what="barrier"), m.Gathered, timeout=600.0)
        with pytest.raises(ConnectionLost, match="is gone; the run cannot go on"):
            rank.data.exchange(m.FetchMessage(optimizer=0), m.Weights)
        assert time.monotonic() - began < IN_TIME
        assert [type(error) for error in told] == [ConnectionLost]


# --- The server's own process --------------------------------------------------------------------------------------


def settings(**changes: Any) -> ServerSettings:
    fields = {
        "key": KEY.hex(),
        "host": "127.0.0.1",
        "port": 0,
        "heartbeat_timeout": 30.0,
        "join_timeout": 60.0,
        "threads": 1,
        "allow_optimizers": (),
    }
    return ServerSettings(**{**fields, **changes})


def is_running(pid: int) -> bool:
    """Whether a process lives; one that was not reaped yet does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:
        return Path("/proc").is_dir() is False
    return state != "Z"


@pytest.mark.processes
def test_the_server_process_serves_and_stops() -> None:
    process = ServerProcess(settings())
    try:
        with ranks(process.address(), 1) as (rank,):
            assert_exact_training(rank, rank.begin((0,)), steps=3)
        port = int(process.address().rpartition(":")[2])
    finally:
        process.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)


@pytest.mark.processes
def test_a_server_process_waits_to_be_told_what_to_do_also_after_ctrl_c() -> None:
    process = ServerProcess()
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.pid, number)  # it still imports: the ranks decide what a signal means
        process.configure(settings())
        with ranks(process.address(), 1) as (rank,):
            assert_exact_training(rank, rank.begin((0,)), steps=1)
    finally:
        process.stop()


@pytest.mark.processes
@pytest.mark.parametrize("saves", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_server_process_ends_when_told_to_though_another_one_holds_its_pipe(saves: bool, tmp_path: Path) -> None:
    process = ServerProcess(settings(state=str(tmp_path / "state") if saves else ""))
    process.address()
    assert process._process.stdin is not None
    pipe = process._process.stdin.fileno()  # a forked data loader has it, too
    with subprocess.Popen(["sleep", "60"], pass_fds=[pipe]) as loader:
        process.stop()
        loader.kill()
    assert process._process.wait() == 0  # it was not killed


@pytest.mark.processes
def test_nobody_waits_for_a_server_that_is_dismissed_while_it_imports_what_it_needs() -> None:
    server, process = RunServer(0, WorldOptions(), [2]), ServerProcess(settings())
    server.processes[0] = process
    server.stop(waits=False)
    assert process._process.poll() is None, "it still imports"
    process._process.wait()


def test_a_server_process_that_is_never_told_anything_ends_in_silence() -> None:
    command = [sys.executable, "-m", "lightning_omni.transport.serving"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


@pytest.mark.processes
def test_a_server_process_that_cannot_listen_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = ServerProcess(settings(port=port))
        try:
            with pytest.raises(ConfigurationError, match=rf"did not start: cannot listen on 127\.0\.0\.1:{port}"):
                process.address()
        finally:
            process.stop()


PARENT = """
import signal, sys, msgspec, spares
from lightning_omni.transport.serving import ServerProcess
from lightning_omni.transport.serving.process import ServerSettings
spares.prepare(ranks=0, servers=1)
process = ServerProcess(msgspec.json.decode(sys.argv[1], type=ServerSettings))
print(process._process.pid, process.address(), flush=True)
signal.pause()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "way",
    [lambda pid: os.kill(pid, signal.SIGKILL), lambda pid: os.killpg(pid, signal.SIGTERM)],
    ids=["SIGKILL to the parent", "SIGTERM to all it started"],
)
def test_the_server_process_outlives_its_parent_for_as_long_as_it_takes_to_say_so(way: Callable[[int], None]) -> None:
    parent = Process([sys.executable, "-c", PARENT, msgspec.json.encode(settings()).decode()])
    try:
        pid, address = parent.expect(r"^(\d+) (\S+)$", timeout=60).groups()
        assert is_running(int(pid))
        with ranks(address, 1) as (rank,):
            rank.begin((0,))
            way(parent.pid)  # the second is what torchrun does when another rank has failed
            assert eventually(lambda: not is_running(int(pid)))
            with pytest.raises(RankLost, match="rank 0 has ended"):
                rank.push(0, read_at=0)
    finally:
        parent.kill()


@pytest.mark.parametrize("left", [0, 1, 2])
def test_where_no_more_files_may_be_opened_an_attempt_fails_and_leaves_nothing_to_wait_for(left: int) -> None:
    context, held = zmq.Context[Any](), []
    first = context.socket(zmq.DEALER)  # its threads run; they would close its file at a time of their own
    gc.collect()  # and no file of another test's is closed meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/dev/fd"))) + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, soft), hard))
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(left):
            os.close(held.pop())
        with pytest.raises(zmq.ZMQError, match="Too many open files"):
            Dialed("tcp://127.0.0.1:9", RunKeys(KEY, "off"), CHUNK, m.CONTROL, context=context)
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        first.close(0)
    ending = threading.Thread(target=context.term, daemon=True)
    ending.start()
    ending.join(IN_TIME)
    assert not ending.is_alive()
