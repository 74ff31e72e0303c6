"""Tensors between a leader and a server on one machine go through memory that both have, which neither can abuse."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SCRIPTS, search_path, start
from test_wire import DEADLINE, KEY, Rank, assert_exact_training, sgd
from torch import Tensor
from torch.nn import Parameter

from lightning_omni.errors import ConnectionLost, MalformedMessage, Refused
from lightning_omni.methods.model.server_optimizer import hyperparameters_of
from lightning_omni.server.core import ServerCore
from lightning_omni.transport.zeromq import shared_memory
from lightning_omni.transport.zeromq.addresses import PrivateDirectory, memory_path
from lightning_omni.transport.zeromq.server import ZeroMQServer
from lightning_omni.transport.zeromq.shared_memory import MemoryRange, MemoryRanges, Share, Shared
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import RAW, Memory, wire_named
from lightning_omni.wire.layout import Layout

pytestmark = pytest.mark.skipif(
    not shared_memory.can_share_memory(), reason="only Linux has memory that is safe to share"
)


class Serving:
    """A server in a thread, on sockets in a directory."""

    def __init__(self, **options: Any) -> None:
        self.core = ServerCore(KEY, secrets.token_bytes)
        self.server = ZeroMQServer(self.core, directory=PrivateDirectory(), **options)
        self.address = self.server.address
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(self._stopping.is_set,))
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE)
        self.server.close()


class Leader(Rank):
    """A rank whose payloads lie in memory that can be shared."""

    def __init__(self, address: str, rank: int = 0, world_size: int = 1, numel: int = 1000, **options: Any) -> None:
        super().__init__(address, rank, world_size, numel, **options)
        self.out, self.into = (self.control.empty(self.layout.nbytes) for _ in range(2))

    def gradient(self, step: int) -> tuple[Tensor, list[Tensor]]:
        buffer, _ = super().gradient(step)
        return self.out.copy_(buffer), self.layout.views(self.out)

    def message(self, read_at: int) -> m.PushMessage:
        return m.PushMessage(
            optimizer=0,
            read_at=read_at,
            present=(True, True),
            hyperparameters=tuple(hyperparameters_of(sgd([Parameter(torch.zeros(1))]))),
            epoch=-1,
            trained=0,
            nbytes=self.layout.nbytes,
            incarnation=1,
            sequence=self.pushes + 1,
        )

    def push(self, step: int, read_at: int, fresh: bool = True) -> tuple[m.Weights, list[Tensor]]:
        if fresh:
            self.gradient(step)
        answer, payload = self.data.exchange(self.message(read_at), m.Weights, self.out, self.into)
        self.pushes += 1
        return answer, self.layout.views(payload)


@pytest.fixture
def serving() -> Iterator[Serving]:
    server = Serving()
    yield server
    server.stop()


@contextmanager
def leaders(serving: Serving, count: int = 1, **options: Any) -> Iterator[list[Leader]]:
    with ExitStack() as stack:
        joined = []
        for number in range(count):
            joined.append(Leader(serving.address, number, count, **options))
            stack.callback(joined[-1].close)
        joined[0].begin(*((number,) for number in range(count)))
        yield joined


def eventually(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def mapped(pid: int) -> int:
    """Segments that a process has mapped or open."""
    maps = Path(f"/proc/{pid}/maps").read_text().count("memfd:lightning-omni")
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    return maps + sum("memfd:lightning-omni" in link for link in links)


# --- What goes through it --------------------------------------------------------------------------------------------


def test_pushes_and_answers_lie_in_shared_memory_and_train_exactly(serving: Serving) -> None:
    with leaders(serving, numel=300_000) as (leader,):
        assert_exact_training(leader, [Parameter(torch.arange(n) / 7) for n in (300_000, 3)], steps=3)
        assert leader.data.shared == 6 * leader.layout.nbytes
        answer, payload = leader.data.exchange(m.FetchMessage(optimizer=0), m.Weights, None, leader.into)
        assert leader.data.shared == 7 * leader.layout.nbytes
        assert (answer.clock, payload.data_ptr()) == (3, leader.into.data_ptr())


def test_weights_of_eight_leaders_do_not_tear_while_the_server_steps_for_others(serving: Serving) -> None:
    with leaders(serving, count=8, numel=50_000) as joined:
        for leader in joined:  # every weight of this layout is the same, if it is of one moment
            leader.out.view(torch.float32).fill_(1.0)
        failed: list[str] = []

        def train(leader: Leader) -> None:
            start = torch.arange(50_000) / 7
            for step in range(12):
                answer, (weights, _) = leader.push(step, read_at=0, fresh=False)
                moved = weights - start
                if not torch.allclose(moved, moved[0].expand_as(moved), atol=2e-3 * float(moved[0].abs()) + 1e-2):
                    failed.append(f"rank {leader.control.rank}, clock {answer.clock}")

        threads = [threading.Thread(target=train, args=(leader,)) for leader in joined]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert serving.core.store.clock == 96
        assert all(leader.data.shared == 24 * leader.layout.nbytes for leader in joined)


@pytest.mark.parametrize("name", ["raw", "bf16", "int8", "topk:0.1"])
def test_a_push_is_encoded_into_shared_memory_whatever_its_format(name: str) -> None:
    memory, layout = (
        Memory(shared_memory.shared_zeros),
        Layout.of({"w": torch.zeros(40, 25), "b": torch.zeros(()), "e": torch.ones(0)}),
    )
    wire = RAW if name == "raw" else wire_named(name)
    tensors = [torch.randn(spec.shape) for spec in layout.specs]
    encoded = wire.encode(tensors, layout, {}, memory)
    assert shared_memory.find_segment(encoded.payload) is not None
    assert torch.equal(encoded.payload, wire.encode(tensors, layout, {}, Memory()).payload)


def test_a_larger_segment_takes_the_place_of_one_that_is_not_used_any_more(serving: Serving) -> None:
    with leaders(serving, numel=100_000) as (leader,):
        leader.push(0, read_at=0)
        for step in range(1, 20):
            leader.out, leader.into = (leader.control.empty(leader.layout.nbytes + 64 * step) for _ in range(2))
            leader.out, leader.into = leader.out[: leader.layout.nbytes], leader.into[: leader.layout.nbytes]
            gc.collect()
            leader.push(step, read_at=step)
        assert leader.data.shared == 40 * leader.layout.nbytes
        assert serving.server.shared.nbytes <= 5 * leader.layout.nbytes


# --- Where it cannot be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["at the server", "at the leader", "no socket", "no memory"])
def test_without_shared_memory_tensors_go_by_socket_and_one_line_says_so(
    where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    serving = Serving(shared_memory=where != "at the server")
    if where == "no socket":
        os.unlink(memory_path(serving.address))
    if where == "no memory":  # as where a container forbids it
        monkeypatch.setattr(os, "memfd_create", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not permitted")))
    try:
        with leaders(serving, shared_memory=where != "at the leader") as (leader,):
            assert_exact_training(leader, [Parameter(torch.arange(n) / 7) for n in (1000, 3)], steps=2)
            assert leader.data.shared == 0 < leader.data.moved
    finally:
        serving.stop()
    assert sum("sent through sockets" in line for line in caplog.messages) == (where != "at the leader")


# --- What a hostile leader may do ------------------------------------------------------------------------------------


def test_numbers_that_change_while_the_server_reads_them_never_reach_the_weights_unless_finite(
    serving: Serving,
) -> None:
    with leaders(serving, numel=200_000) as (leader,):
        leader.out.zero_()
        numbers, done = leader.out[:800_000].view(torch.float32), threading.Event()

        def change() -> None:
            while not done.is_set():
                numbers[::1000].fill_(float("nan"))
                numbers.zero_()

        thread = threading.Thread(target=change)
        thread.start()
        outcomes: list[bool] = []
        until = time.monotonic() + DEADLINE
        # As many pushes as it takes: a busy machine may leave the numbers alone, as either, for many of them.
        try:
            while len(outcomes) < 60 or (len(set(outcomes)) < 2 and time.monotonic() < until):
                answer, (weights, _) = leader.push(len(outcomes), read_at=0, fresh=False)
                outcomes.append(answer.applied)
                assert bool(torch.isfinite(weights).all())
        finally:
            done.set()
            thread.join()
        assert len(set(outcomes)) == 2, "only one of them was ever seen, so nothing was tested"


def test_memory_that_could_end_the_server_is_not_mapped(tmp_path: Path) -> None:
    def memfd(nbytes: int, *seals: int) -> int:
        descriptor = os.memfd_create("a test", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes)
        for seal in seals:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seal)
        return descriptor

    shrink = fcntl.F_SEAL_SHRINK
    (tmp_path / "file").write_bytes(bytes(8192))
    cases = [
        (memfd(8192), 8192, "not sealed"),
        (memfd(8192, fcntl.F_SEAL_GROW), 8192, "not sealed"),
        (memfd(4096, shrink), 8192, "has 4096 bytes"),
        (memfd(8192, shrink), 0, "0 were announced"),
        (memfd(8192, shrink), -4096, "-4096 were announced"),
        (memfd(8192, shrink, fcntl.F_SEAL_WRITE), 8192, "cannot be mapped"),
        (os.open(tmp_path / "file", os.O_RDWR), 8192, "cannot be mapped"),
        (os.open("/dev/zero", os.O_RDWR), 8192, "cannot be mapped"),
        (os.open("/dev/shm", os.O_RDONLY), 8192, "cannot be mapped"),
    ]
    for descriptor, nbytes, why in cases:
        with pytest.raises(Refused, match=why):
            shared_memory.open_segment(descriptor, nbytes)
        os.close(descriptor)
    good = memfd(8192, shrink)
    assert shared_memory.open_segment(good, 8192).numel() == 8192
    with pytest.raises(PermissionError):
        os.ftruncate(good, 4096)
    os.close(good)


def test_only_the_process_behind_a_connection_shares_memory_for_it_and_each_segment_once(serving: Serving) -> None:
    with leaders(serving, count=2) as (first, second):
        first.push(0, read_at=0)
        path, secret = memory_path(serving.address), first.control.session.secret

        def say(share: Share | bytes, descriptors: list[int]) -> Shared:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wire:
                ours.settimeout(DEADLINE)
                wire.connect(path)
                socket.send_fds(
                    wire,
                    [share if isinstance(share, bytes) else shared_memory.encode_record(share)],
                    [*descriptors, theirs.fileno()],
                )
                theirs.close()
                said = ours.recv(4096)
                return shared_memory.decode_record(said, Shared) if said else Shared(refused="no answer")

        def share(rank: int, segment: int, nbytes: int, key: bytes = secret) -> Share:
            said = Share(rank, segment, nbytes)
            return Share(rank, segment, nbytes, (), said.proof(key, "rank"))

        memory = shared_memory.shared_zeros(4096)
        found = shared_memory.find_segment(memory)
        assert found is not None
        descriptor, before = found[0].descriptor, serving.server.shared.nbytes
        for wrong, why in (
            (say(share(0, 9, 4096, b"x" * 32), [descriptor]), "this proof opens nothing"),
            (say(share(1, 9, 4096), [descriptor]), "this proof opens nothing"),
            (say(share(7, 9, 4096), [descriptor]), "this proof opens nothing"),
            (say(share(0, 1, 4096), [descriptor]), "was handed over before"),
            (say(share(0, 9, 1 << 40), [descriptor]), "may be shared"),
            (say(share(0, 9, 8192), [descriptor]), "has 4096 bytes"),
            (say(share(0, 9, 4096), []), "no answer"),
            (say(share(0, 9, 4096), [descriptor, descriptor]), "no answer"),
            (say(b"garbage", [descriptor]), "not a Share"),
        ):
            assert why in wrong.refused
        assert serving.server.shared.nbytes == before
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:  # one that takes no answer holds nobody up
            deaf.connect(path)
            socket.send_fds(deaf, [shared_memory.encode_record(share(0, 9, 8192))], [descriptor, deaf.fileno()])
            assert second.push(0, read_at=0)[0].applied
        good = say(share(0, 9, 4096), [descriptor])
        assert good.mac == share(0, 9, 4096).proof(secret, "server")


def test_a_leader_shares_memory_for_the_answers_of_all_servers_with_the_one_on_its_node(serving: Serving) -> None:
    with leaders(serving, numel=1_000_000) as (leader,):
        serving.core.replication.count = 4
        leader.into = leader.control.empty(4 * leader.layout.nbytes)
        leader.push(0, read_at=0)
        assert leader.data.shared == 2 * leader.layout.nbytes


def test_a_place_outside_of_what_is_shared_is_refused_and_the_next_push_goes_well(serving: Serving) -> None:
    with leaders(serving) as (leader,):
        leader.push(0, read_at=0)
        nbytes = leader.layout.nbytes
        wrong = [
            MemoryRanges(MemoryRange(1, 8, nbytes)),
            MemoryRanges(MemoryRange(1, -64, nbytes)),
            MemoryRanges(MemoryRange(3, 0, nbytes)),
            MemoryRanges(MemoryRange(1, 0, nbytes - 4)),
            MemoryRanges(MemoryRange(1, 0, nbytes), MemoryRange(2, 1, nbytes)),
            MemoryRanges(MemoryRange(1, 0, nbytes), MemoryRange(2, 1 << 62, 1 << 62)),
            MemoryRanges(MemoryRange(1, 0, nbytes), MemoryRange(2, 64, -64)),
        ]
        for places in wrong:
            leader.data._wire.send_multipart([m.encode(leader.message(0)), shared_memory.encode_record(places)])
            refused = m.decode(leader.data._receive()[0].buffer, at="rank", channel=m.DATA)
            assert isinstance(refused, m.RefusedMessage), places
        leader.data._wire.send_multipart([m.encode(leader.message(0)), b"\xc1"])
        assert isinstance(m.decode(leader.data._receive()[0].buffer, at="rank", channel=m.DATA), m.RefusedMessage)
        assert leader.push(1, read_at=1)[0].clock == 2


def test_room_whose_answer_never_came_is_not_offered_again(serving: Serving) -> None:
    with leaders(serving) as (leader,):
        leader.push(0, read_at=0)
        room = leader.data._sharing.range_of(leader.into)
        assert room is not None
        leader.data._offered.add(room)  # as a request leaves it that has waited for too long
        before = leader.data.shared
        assert leader.push(1, read_at=1)[0].clock == 2
        assert leader.data.shared == before + leader.layout.nbytes, "the push lies there, its answer does not"
        leader.into = leader.control.empty(leader.layout.nbytes)
        leader.push(2, read_at=2)
        assert leader.data.shared == before + 3 * leader.layout.nbytes


def test_an_answer_where_there_was_no_room_for_it_is_an_error(serving: Serving) -> None:
    with leaders(serving) as (leader,):
        leader.push(0, read_at=0)
        fetch = [
            m.encode(m.FetchMessage(optimizer=0)),
            shared_memory.encode_record(MemoryRanges(answer=leader.data._sharing.range_of(leader.into))),
        ]
        leader.data._wire.send_multipart(fetch)
        with pytest.raises(MalformedMessage, match="no room"):
            leader.data.exchange(m.FetchMessage(optimizer=0), m.Weights)


# --- Nothing is left behind ------------------------------------------------------------------------------------------


def test_memory_of_a_rank_that_is_out_is_let_go_and_what_it_writes_later_harms_nobody(serving: Serving) -> None:
    with leaders(serving, count=2) as (first, second):
        for leader in (first, second):
            leader.push(0, read_at=0)
        both = serving.server.shared.nbytes
        second.control.close()
        eventually(lambda: serving.server.shared.nbytes == both // 2)
        second.out.fill_(255)
        second.into.fill_(255)
        assert first.push(1, read_at=1)[0].clock == 3


class Process:
    """A copy of `scripts/killed.py`, and what it says."""

    def __init__(self, *arguments: str) -> None:
        self._lines, output = os.pipe()
        environment = {**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"}
        self._process = start([sys.executable, str(SCRIPTS / "killed.py"), *arguments], environment, output)
        os.close(output)
        self.pid = self._process.pid

    def line(self) -> str:
        said = b""
        while not said.endswith(b"\n"):
            more = os.read(self._lines, 1)
            assert more, said
            said += more
        return said.decode().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE)
        os.close(self._lines)


@pytest.mark.processes
def test_nothing_is_left_of_a_leader_or_a_server_that_was_killed(tmp_path: Path) -> None:
    before, pipe = set(os.listdir("/dev/shm")), tmp_path / "pipe"
    os.mkfifo(pipe)
    server = Process("serve")
    address = server.line()
    other = Process("lead", address, str(pipe))
    with closing(Leader(address, 0, 2, numel=50_000)) as leader:
        assert other.line() == "joined"
        leader.begin((0,), (1,))
        leader.push(0, read_at=0)
        assert mapped(server.pid) == 4  # a push and its answer: each is mapped, and the mapping has a descriptor
        pipe.write_text("go on")
        assert other.line() == f"pushed {4 * leader.layout.nbytes}"
        assert mapped(server.pid) == 8
        other.kill()  # while it pushes as fast as it can
        eventually(lambda: mapped(server.pid) == 4)
        assert leader.push(1, read_at=0)[0].applied
        server.kill()
        with pytest.raises(ConnectionLost):  # and no SIGBUS
            leader.push(2, read_at=0)
        leader.into.fill_(1)
    assert set(os.listdir("/dev/shm")) == before


def test_memory_goes_with_the_tensor_that_lies_in_it() -> None:
    gc.collect()
    before = mapped(os.getpid())
    tensor = shared_memory.shared_zeros(1 << 20)
    view = tensor[4096:].view(torch.float32)
    assert mapped(os.getpid()) == before + 3  # mapped once, and open twice: the mapping has a descriptor of its own
    del tensor
    assert shared_memory.find_segment(view.view(torch.uint8)) is not None
    del view
    assert mapped(os.getpid()) == before
