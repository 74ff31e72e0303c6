"""Leaders that talk to each other over real sockets: published weights, inboxes, strangers, the slow and the dead."""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
import torch
import zmq
from patience import SLOWER
from processes import connected_to
from torch import Tensor

from lightning_omni.errors import ConnectionLost, RankLost, Refused
from lightning_omni.methods import Inbox
from lightning_omni.server.core import ServerCore
from lightning_omni.transport.connections import Address
from lightning_omni.transport.zeromq import ZeroMQ
from lightning_omni.transport.zeromq.addresses import own_host
from lightning_omni.transport.zeromq.keys import RunKeys
from lightning_omni.transport.zeromq.peers import PeerConnections, PeerSocket
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats import Int8
from lightning_omni.wire.formats.base import RAW, Memory, WireFormat
from lightning_omni.wire.handshake import client_mac
from lightning_omni.wire.layout import Layout, TensorSpec

SHAPES = {"w": (300, 1000), "b": (7,)}  # more than one chunk
KEYS = RunKeys(bytes(32))
LAYOUT = Layout.of({name: torch.zeros(shape) for name, shape in SHAPES.items()})


def weights(value: float) -> list[Tensor]:
    return [torch.full(shape, value) for shape in SHAPES.values()]


def wait_for(what: Callable[[], bool]) -> None:
    """Until something is so, or the test's time is over."""
    deadline = time.monotonic() + SLOWER * 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Peers:
    """Some leaders on loopback."""

    def __init__(self, count: int, wire_format: WireFormat = RAW) -> None:
        self.lost: set[int] = set()
        self.ended = False
        self._stack = ExitStack()
        self.sockets = [PeerSocket("tcp://127.0.0.1:*", [LAYOUT], KEYS, wire_format) for _ in range(count)]
        addresses = {group: Address(group, listening.address) for group, listening in enumerate(self.sockets)}
        self.addresses = addresses
        self.connections = [
            PeerConnections(
                group,
                {other: address for other, address in addresses.items() if other != group},
                [LAYOUT],
                KEYS,
                lambda other: other in self.lost,
                self.check,
                timeout=120,
                wire_format=wire_format,
            )
            for group in range(count)
        ]

    def check(self) -> None:
        if self.ended:
            raise RankLost("the run is over")

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for listening in self.sockets:
            listening.close()


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers(3)
    yield made
    made.close()


def test_peers_read_what_was_published_last(peers: Peers) -> None:
    assert peers.connections[0].read(1, 0) is None
    for value in (1.0, 2.0):
        source = weights(value)
        peers.sockets[1].publish(0, source)
        source[0].zero_()  # published is a copy
        read = peers.connections[0].read(1, 0)
        assert read is not None
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(read, weights(value), strict=True))


def test_weights_travel_in_the_wire_format_both_ways() -> None:
    sent = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in SHAPES.values()]
    encoded = Int8().encode(sent, LAYOUT, {}, Memory()).payload
    rounded = LAYOUT.views(Int8().decode(encoded, LAYOUT, Memory()))
    with closing(Peers(2, Int8())) as peers:
        peers.sockets[0].publish(0, sent)
        theirs = peers.connections[1].read(0, 0)
        assert theirs is not None
        assert all(map(torch.equal, theirs, rounded))
        assert not torch.equal(theirs[0], sent[0])
        assert (peers.connections[0].moved, peers.connections[1].moved) == (0, encoded.numel())
        peers.connections[1].send(0, 0, sent)
        assert peers.connections[1].moved == 2 * encoded.numel(), "bytes as they travel, to and fro"
        inbox = Inbox(None, 0)
        deadline = time.monotonic() + SLOWER * 20
        while not inbox.count:
            assert time.monotonic() < deadline
            inbox = peers.sockets[0].read_inbox(0)
        total = inbox.total
        assert total is not None
        assert all(map(torch.equal, total, rounded))


def test_a_model_of_very_many_chunks_arrives_whole(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_omni.transport.zeromq.frames.CHUNK", 64)
    peers.sockets[1].publish(0, weights(3.0))
    read = peers.connections[0].read(1, 0)
    assert read is not None
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(read, weights(3.0), strict=True))


def test_an_inbox_holds_the_sum_of_all_messages_until_it_is_read(peers: Peers) -> None:
    peers.connections[1].send(0, 0, weights(1.0))
    peers.connections[2].send(0, 0, weights(10.0))
    peers.connections[2].send(0, 0, weights(100.0))
    wait_for(lambda: peers.sockets[0]._inboxes[0].count == 3)
    inbox = peers.sockets[0].read_inbox(0)
    assert inbox.count == 3
    assert inbox.total is not None
    assert all(torch.equal(total, one) for total, one in zip(inbox.total, weights(111.0), strict=True))
    assert (peers.sockets[0].read_inbox(0).count, peers.sockets[0].read_inbox(0).total) == (0, None)


def test_weights_can_be_read_after_messages_on_the_same_connection(peers: Peers) -> None:
    peers.sockets[1].publish(0, weights(5.0))
    peers.connections[0].send(1, 0, weights(1.0))
    read = peers.connections[0].read(1, 0)
    assert read is not None
    assert torch.equal(read[0], weights(5.0)[0])


def test_a_peer_that_does_not_take_its_messages_gets_no_more(peers: Peers) -> None:
    with peers.sockets[1]._lock:  # it can put none away
        for _ in range(5):
            peers.connections[0].send(1, 0, weights(1.0))
    assert peers.connections[0].dropped == 3


def test_no_message_is_dropped_because_weights_are_read_in_between(peers: Peers) -> None:
    peers.sockets[1].publish(0, weights(5.0))
    for _ in range(5):
        peers.connections[0].send(1, 0, weights(1.0))
        assert peers.connections[0].read(1, 0) is not None
    assert peers.connections[0].dropped == 0
    assert peers.sockets[1].read_inbox(0).count == 5


def test_a_message_in_a_layout_that_the_peer_has_left_behind_does_not_spoil_the_question_after_it(peers: Peers) -> None:
    grown = Layout.of({**{name: torch.zeros(shape) for name, shape in SHAPES.items()}, "c": torch.zeros(9)})
    peers.sockets[1].grow(0, grown)
    peers.connections[0].send(1, 0, weights(1.0))
    assert peers.connections[0].read(1, 0) is None


def test_what_was_under_way_on_a_connection_is_forgotten_with_it(peers: Peers) -> None:
    listening, connection = peers.sockets[1], peers.connections[0]
    listening.publish(0, weights(1.0))
    for _ in range(3):
        assert connection.read(1, 0) is not None
        connection._wire(1).send(m.encode(m.PeerMessage(optimizer=0, nbytes=LAYOUT.nbytes)))  # and nothing more of it
        wait_for(lambda: len(listening._assemblies) == 1)
        connection._give_up(1)
    assert connection.read(1, 0) is not None
    assert (len(listening._assemblies), len(listening._connections)) == (0, 1)


def break_connections(address: str) -> None:
    """As the network breaks them: what this process has connected to the address gets no more of it."""
    for wire in connected_to(address):
        wire.shutdown(socket.SHUT_RDWR)


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are found in /proc")
def test_groups_meet_again_after_their_connection_broke(peers: Peers) -> None:
    connection, address = peers.connections[0], peers.addresses[1].address
    peers.sockets[1].publish(0, weights(1.0))
    assert connection.read(1, 0) is not None
    for number in (1, 2):
        break_connections(address)
        wait_for(lambda: connection._has_ended(1))
        assert connection.read(1, 0) is not None
        break_connections(address)
        wait_for(lambda: connection._has_ended(1))
        connection.send(1, 0, weights(1.0))
        wait_for(lambda number=number: peers.sockets[1]._inboxes[0].count == number)  # type: ignore[misc]
    assert connection.dropped == 0


def test_a_message_for_which_there_is_no_memory_is_answered() -> None:
    huge = Layout((TensorSpec("w", (1 << 50,), "float32"),))
    listening = PeerSocket("tcp://127.0.0.1:*", [huge], KEYS)
    with closing(listening), raw_dealer(listening.address, KEYS) as other:
        admit(other)
        other.send(m.encode(m.PeerMessage(optimizer=0, nbytes=huge.nbytes)))
        assert other.poll(20_000)
        assert isinstance(m.decode(other.recv(), at="rank", channel=m.PEER), m.RefusedMessage)


def test_no_group_waits_for_a_dead_peer(peers: Peers) -> None:
    peers.sockets[1].close()
    peers.lost.add(1)
    assert peers.connections[0].read(1, 0) is None
    peers.lost.clear()
    peers.connections[0]._timeout = 0.5
    assert peers.connections[0].read(1, 0) is None  # nor for ever for a silent one
    peers.ended = True
    with pytest.raises(RankLost):
        peers.connections[0].read(1, 0)
    peers.sockets[1] = PeerSocket("tcp://127.0.0.1:*", [LAYOUT], KEYS)


def test_weights_that_are_not_finite_are_thrown_away(peers: Peers) -> None:
    peers.connections[1].send(0, 0, weights(float("inf")))
    peers.connections[1].send(0, 0, weights(1.0))
    wait_for(lambda: peers.sockets[0]._inboxes[0].count == 1)
    assert torch.equal(peers.sockets[0].read_inbox(0).total[0], weights(1.0)[0])  # type: ignore[index]


@contextmanager
def raw_dealer(address: str, keys: RunKeys) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    keys.prepare(dealer, address, "client")
    dealer.connect(address)
    try:
        yield dealer
    finally:
        dealer.close(0)
        context.term()


def admit(dealer: zmq.Socket[bytes]) -> None:
    attach = m.Attach(rank=0, nonce=bytes(32))
    dealer.send(m.encode(attach))
    challenge = m.decode(dealer.recv(), at="rank", channel=m.PEER).nonce
    dealer.send(m.encode(m.AttachProof(mac=client_mac(KEYS.peers, attach, challenge))))
    assert isinstance(m.decode(dealer.recv(), at="rank", channel=m.PEER), m.Attached)


def test_a_leader_with_another_key_is_not_answered(peers: Peers) -> None:
    peers.sockets[1].publish(0, weights(1.0))
    addresses = {1: peers.addresses[1]}
    stranger = PeerConnections(0, addresses, [LAYOUT], RunKeys(b"x" * 32), lambda _: False, peers.check, timeout=0.5)
    with pytest.raises(Refused, match="the key does not match"):
        stranger.read(1, 0)
    stranger.close()
    assert peers.connections[0].read(1, 0) is not None


@pytest.mark.parametrize("message", [m.ReadPublished(optimizer=0), m.PeerMessage(optimizer=0, nbytes=LAYOUT.nbytes)])
def test_a_connection_that_has_not_proved_itself_is_refused_and_counted_also_without_encryption(
    message: m.Message,
) -> None:
    keys = RunKeys(bytes(32), "off")
    socket = PeerSocket("tcp://127.0.0.1:*", [LAYOUT], keys)
    socket.publish(0, weights(1.0))
    with raw_dealer(socket.address, keys) as stranger:
        stranger.send(m.encode(message))
        assert stranger.poll(20_000)
        answer = m.decode(stranger.recv(), at="rank", channel=m.PEER)
        assert isinstance(answer, m.RefusedMessage)
        stranger.send(m.encode(m.Attach(rank=0, nonce=b"nonce")))
        stranger.recv()
        stranger.send(m.encode(m.AttachProof(mac=b"guess")))
        answer = m.decode(stranger.recv(), at="rank", channel=m.PEER)
        assert isinstance(answer, m.RefusedMessage)
        assert answer.reason == "this proof opens nothing"
    assert socket.strangers == 2
    assert socket.read_inbox(0).count == 0
    socket.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b"not a message"],
        [b"a", b"b", b"c"],
        [m.encode(m.PeerMessageStored())],
        [b"", b"a chunk of nothing"],
    ],
    ids=["noise", "frames", "answer", "chunk"],
)
def test_noise_between_peers_harms_no_rank(peers: Peers, frames: list[bytes]) -> None:
    with raw_dealer(peers.sockets[1].address, KEYS) as other:
        other.send_multipart(frames)
        peers.sockets[1].publish(0, weights(4.0))
        read = peers.connections[0].read(1, 0)
        assert read is not None
        assert torch.equal(read[0], weights(4.0)[0])


@pytest.mark.parametrize("change", [{"nbytes": LAYOUT.nbytes + 1}, {"nbytes": -1}, {"optimizer": 1}])
def test_a_message_of_another_size_or_for_no_group_is_refused(peers: Peers, change: dict[str, int]) -> None:
    socket = peers.sockets[1]
    with raw_dealer(socket.address, KEYS) as other:
        admit(other)
        fields = {"optimizer": 0, "nbytes": LAYOUT.nbytes, **change}
        other.send(m.encode(m.PeerMessage(**fields)))
        assert other.poll(20_000)
        answer = m.decode(other.recv(), at="rank", channel=m.PEER)
    assert isinstance(answer, m.RefusedMessage)
    assert socket.read_inbox(0).count == 0


def test_a_leader_listens_where_the_server_can_be_reached() -> None:
    assert own_host("tcp://127.0.0.1:5555") == "127.0.0.1"


def test_a_server_whose_host_is_not_known_is_named() -> None:
    core = ServerCore(bytes(32), secrets.token_bytes, servers=2, number=1)
    with pytest.raises(ConnectionLost, match=r"tcp://nowhere.invalid:5555: .*; check the host's name"):
        ZeroMQ().follow(core, "tcp://nowhere.invalid:5555")
