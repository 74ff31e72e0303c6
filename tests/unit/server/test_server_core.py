"""The server's state machine over an in-memory link: who is let in, what is merged, who is lost, what is refused."""

from __future__ import annotations

import random
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from lightning_omni.errors import MalformedMessage, OmniError, ProtocolError, Refused
from lightning_omni.methods import AsyncSGD, HardSync
from lightning_omni.methods.model.server_optimizer import describe, hyperparameters_of
from lightning_omni.registry import to_wire
from lightning_omni.server.collectives import MOST_OPEN
from lightning_omni.server.core import ServerCore
from lightning_omni.server.membership.roster import MOST_RANKS
from lightning_omni.server.router import types_on
from lightning_omni.server.service import as_tensor
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import Packed, pack, unpack
from lightning_omni.wire.handshake import client_mac, derive, fingerprint_problem, server_mac, session_key
from lightning_omni.wire.layout import Layout, TensorSpec
from lightning_omni.wire.messages import EpochPlan, SnapshotId

varied = settings(
    deadline=None,
    max_examples=10,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

KEY = bytes(range(32))
TIMEOUT, JOIN_TIMEOUT = 30.0, 300.0
SHAPES = {"w": (2, 3), "b": (3,)}
LAYOUT = Layout.of({name: torch.zeros(shape) for name, shape in SHAPES.items()})

Received = tuple[Any, bytes]


def control_peer(rank: int) -> bytes:
    return f"control {rank}".encode()


def data_peer(rank: int) -> bytes:
    return f"data {rank}".encode()


def new_parameters() -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def sgd(parameters: dict[str, Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9, fused=True)


def gradient(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def as_bytes(tensors: Sequence[Tensor | None]) -> bytes:
    present = {str(index): tensor for index, tensor in enumerate(tensors) if tensor is not None}
    layout = Layout.of(present)
    buffer = layout.empty().zero_()
    for view, tensor in zip(layout.views(buffer), present.values(), strict=True):
        view.copy_(tensor)
    return buffer.numpy().tobytes()


def as_tensors(payload: bytes) -> list[Tensor]:
    return LAYOUT.views(torch.frombuffer(bytearray(payload), dtype=torch.uint8))


def hello(rank: int, world_size: int = 3, **changes: Any) -> m.Hello:
    fields = {
        "version": m.VERSION,
        "run": "a run",
        "rank": rank,
        "world_size": world_size,
        "fingerprint": LAYOUT.fingerprint,
        "tensors": len(LAYOUT.specs),
        "numbers": LAYOUT.numel,
        "nonce": bytes([rank % 256]) * 32,
    }
    return m.Hello(**{**fields, **changes})


def push_of(tensors: Sequence[Tensor | None], read_at: int = 0, **changes: Any) -> tuple[m.PushMessage, bytes]:
    payload = as_bytes(tensors)
    fields = {
        "optimizer": 0,
        "read_at": read_at,
        "present": tuple(tensor is not None for tensor in tensors),
        "hyperparameters": tuple(hyperparameters_of(sgd(new_parameters()))),
        "epoch": -1,
        "trained": 0,
        "nbytes": len(payload),
    }
    return m.PushMessage(**{**fields, **changes}), payload


def seed_of(tree: Any) -> tuple[m.UploadWeights, bytes]:
    packed, buffer = pack(tree)
    return m.UploadWeights(packed=packed, nbytes=buffer.numel()), buffer.numpy().tobytes()


def part_of(parameters: dict[str, Parameter], clock: int = 0) -> dict[str, Any]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    return {"optimizer": describe(sgd(parameters), names), "weights": weights, "clock": clock}


class Link:
    """Joins ranks to a server without sockets. Everything crosses it as bytes, as on the wire."""

    def __init__(self, world_size: int = 3, **options: Any) -> None:
        self.core = ServerCore(KEY, random.Random(0).randbytes, TIMEOUT, JOIN_TIMEOUT, **options)
        self.core.data_port = 4242
        self.world_size = world_size
        self.sessions: dict[int, bytes] = {}
        self.now = 100.0
        self.inbox: dict[tuple[bytes, str], list[Received]] = defaultdict(list)
        self.unasked: dict[bytes, m.Status] = {}
        self.pushed: Counter[tuple[bytes, int]] = Counter()

    def say(self, peer: bytes, message: m.Message, payload: bytes = b"", channel: str = m.CONTROL) -> list[Received]:
        """A message from a peer; the answers that the same peer gets on the same channel.

        A push without a number gets the next one, and keeps it if it is refused.
        """
        if isinstance(message, m.PushMessage) and not message.sequence:
            where, incarnation = (peer, message.optimizer), self.core.roster.formed.incarnation
            message = msgspec.structs.replace(message, incarnation=incarnation, sequence=self.pushed[where] + 1)
            answers = self.say(peer, message, payload, channel)
            self.pushed[where] += not any(isinstance(answer, m.RefusedMessage) for answer, _ in answers)
            return answers
        arrived = self.core.decode(channel, m.encode(message))
        before = len(self.inbox[peer, channel])
        try:
            expected = self.core.check_payload(peer, arrived) if channel == m.DATA else len(payload)
            assert expected == len(payload)
            out = self.core.receive(channel, peer, arrived, payload, self.now)
        except ProtocolError as error:
            out = self.core.refuse(channel, peer, error)
        if any(isinstance(item.message, m.GroupsFormed) for item in out):
            self.pushed.clear()
        self.deliver(out)
        return self.inbox[peer, channel][before:]

    def deliver(self, out: Any) -> None:
        for item in out:
            message = m.decode(m.encode(item.message), at="rank", channel=item.channel)
            parts = [part if isinstance(part, bytes) else part.numpy().tobytes() for part in item.payload]
            if isinstance(message, m.Status) and message.sent < 0:
                self.unasked[item.peer] = message
                continue
            self.inbox[item.peer, item.channel].append((message, b"".join(parts)))

    def control(self, rank: int, message: m.Message, payload: bytes = b"") -> Any:
        """A control message and its one answer."""
        (answer, _), *others = self.say(control_peer(rank), message, payload)
        assert not others
        return answer

    def data(self, rank: int, message: m.Message, payload: bytes = b"") -> Received:
        """A data message and its one answer."""
        (answer,) = self.say(data_peer(rank), message, payload, m.DATA)
        return answer

    def news(self, rank: int) -> list[Any]:
        """Control messages that came since the last look."""
        new = [message for message, _ in self.inbox[control_peer(rank), m.CONTROL]]
        self.inbox[control_peer(rank), m.CONTROL].clear()
        return new

    def join(self, rank: int, **changes: Any) -> m.Welcome:
        greeting = hello(rank, **{"world_size": self.world_size, **changes})
        challenge = self.control(rank, greeting)
        welcome: m.Welcome = self.control(rank, m.Proof(mac=client_mac(KEY, greeting, challenge.nonce)))
        assert isinstance(welcome, m.Welcome), welcome
        self.sessions[rank] = session_key(KEY, greeting, challenge.nonce)
        assert isinstance(self.attach(rank, data_peer(rank)), m.Attached)
        return welcome

    def attach(self, rank: int, peer: bytes) -> m.Message:
        attach = m.Attach(rank=rank, nonce=bytes([rank % 256]) * 32)
        ((challenge, _),) = self.say(peer, attach, channel=m.DATA)
        proof = m.AttachProof(mac=client_mac(self.sessions[rank], attach, challenge.nonce))
        answer: m.Message
        ((answer, _),) = self.say(peer, proof, channel=m.DATA)
        return answer

    def form(self, *groups: tuple[int, ...], generation: int = 1, **options: Any) -> Any:
        form = m.FormGroups(generation=generation, groups=groups, method=to_wire(AsyncSGD()), **options)
        return self.control(0, form)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.deliver(self.core.tick(self.now))

    def weights(self) -> list[Tensor]:
        return as_tensors(self.data(0, m.FetchMessage(optimizer=0))[1])


def trained_link(*groups: tuple[int, ...], **options: Any) -> Link:
    """Ranks joined, groups formed, weights handed over."""
    link = Link(sum(map(len, groups)), **options)
    for rank in range(link.world_size):
        link.join(rank)
    assert link.form(*groups) == m.GroupsFormed(generation=1, incarnation=1)
    message, payload = seed_of({"parts": [part_of(new_parameters())]})
    assert link.data(0, message, payload)[0] == m.WeightsUploaded()
    link.inbox.clear()
    return link


@pytest.fixture
def link() -> Link:
    """Ranks 0 and 1 in group 0, rank 2 in group 1."""
    return trained_link((0, 1), (2,))


def expect_refusal(answer: Any, code: str, says: str = "") -> None:
    assert isinstance(answer, m.RefusedMessage), answer
    assert answer.code == code, answer
    assert says in answer.reason


def assert_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


# --- Admission -----------------------------------------------------------------------------------------------------


def test_a_rank_with_the_key_is_let_in_and_the_server_proves_that_it_has_it_too() -> None:
    link = Link()
    greeting = hello(0)
    challenge = link.control(0, greeting)
    welcome = link.control(0, m.Proof(mac=client_mac(KEY, greeting, challenge.nonce)))
    assert welcome.mac == server_mac(KEY, greeting, challenge.nonce)
    assert (welcome.data_port, welcome.heartbeat_timeout) == (4242, TIMEOUT)
    assert link.core.strangers == 0


def test_a_rank_with_another_key_is_refused_and_counted() -> None:
    link = Link()
    challenge = link.control(0, hello(0))
    proof = m.Proof(mac=client_mac(b"another key", hello(0), challenge.nonce))
    expect_refusal(link.control(0, proof), "key", "the same key")
    assert link.core.strangers == 1
    assert not link.core.roster.members


@pytest.mark.parametrize("field", ["run", "rank", "world_size", "fingerprint", "tensors", "numbers", "nonce"])
def test_a_proof_holds_for_one_hello_only(field: str) -> None:
    link = Link()
    other = {"run": "another", "fingerprint": "another", "nonce": b"another"}.get(field, 1)
    challenge = link.control(0, hello(0))
    proof = m.Proof(mac=client_mac(KEY, msgspec.structs.replace(hello(0), **{field: other}), challenge.nonce))
    expect_refusal(link.control(0, proof), "key")


def test_a_proof_cannot_be_replayed() -> None:
    link = Link()
    challenge = link.control(0, hello(0))
    proof = m.Proof(mac=client_mac(KEY, hello(0), challenge.nonce))
    link.control(1, hello(0))
    expect_refusal(link.control(1, proof), "key")
    assert isinstance(link.control(0, proof), m.Welcome)
    expect_refusal(link.control(0, proof), "key")


def test_the_mac_of_the_server_does_not_open_it() -> None:
    link = Link()
    challenge = link.control(0, hello(0))
    expect_refusal(link.control(0, m.Proof(mac=server_mac(KEY, hello(0), challenge.nonce))), "key")


def test_another_protocol_version_is_refused_by_naming_both() -> None:
    answer = Link().control(1, hello(1, version=m.VERSION + 1))
    expect_refusal(answer, "version", f"rank 1 speaks protocol version {m.VERSION + 1}, the server {m.VERSION}")


def greet_and_prove(link: Link, rank: int, peer: int, **changes: Any) -> Any:
    greeting = hello(rank, **{"world_size": link.world_size, **changes})
    challenge = link.control(peer, greeting)
    return link.control(peer, m.Proof(mac=client_mac(KEY, greeting, challenge.nonce)))


def test_another_model_is_refused_by_naming_both_ranks_and_their_sizes() -> None:
    link = Link()
    link.join(0)
    answer = greet_and_prove(link, 2, 2, fingerprint="f" * 64, tensors=7, numbers=99)
    expect_refusal(answer, "fingerprint", "rank 2 has another model than rank 0: 7 parameters with 99 numbers")
    assert "2 with 9" in answer.reason
    assert "--state" not in answer.reason


def test_a_group_that_comes_with_another_model_than_that_of_the_run_hears_how_to_begin_another_run() -> None:
    """It may be the only one: the run is one that an earlier server has saved, of a script that was changed since."""
    problem = fingerprint_problem(hello(1, world_size=0, fingerprint="f" * 64), hello(0))
    assert problem.startswith("rank 1 has another model than rank 0: ")
    assert problem.endswith("to begin another one, use another server, with another --state directory")


@pytest.mark.parametrize("changes", [{"run": "another run"}, {"world_size": 4}])
def test_a_second_run_is_refused_while_the_server_is_busy(changes: dict[str, Any]) -> None:
    link = Link()
    link.join(0)
    expect_refusal(greet_and_prove(link, 1, 1, **changes), "busy", "busy with another run of 3 ranks")


def test_a_rank_cannot_join_twice() -> None:
    link = Link()
    link.join(0)
    expect_refusal(greet_and_prove(link, 0, 7), "rank", "rank 0 has joined already")
    assert isinstance(link.control(0, m.AskStatus()), m.Status), "the first one is still in"


@pytest.mark.parametrize("rank", [3, -1, 10**6])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    expect_refusal(greet_and_prove(Link(), rank, 0), "rank", f"rank {rank} of 3")


@pytest.mark.parametrize("world_size", [MOST_RANKS + 1, 2**40, 2**64 - 1])
def test_a_run_of_more_ranks_than_there_are_numbers_is_refused_and_the_server_takes_another(world_size: int) -> None:
    link = Link()
    expect_refusal(greet_and_prove(link, 0, 0, world_size=world_size), "rank", f"{MOST_RANKS} are the most")
    link.tick(1.0)
    assert isinstance(link.join(0), m.Welcome)


def test_a_lost_rank_cannot_come_back(link: Link) -> None:
    link.deliver(link.core.lose(2, "rank 2 died"))
    expect_refusal(greet_and_prove(link, 2, 7), "rank", "it was lost")


# --- Strangers -----------------------------------------------------------------------------------------------------

CONTROL_MESSAGES: tuple[type[m.Message], ...] = types_on(m.CONTROL)
DATA_MESSAGES: tuple[type[m.Message], ...] = types_on(m.DATA)

small = st.integers(-2, 6) | st.integers(-(2**63), 2**64 - 1)
text = st.text(st.characters(codec="utf-8"), max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | small | st.floats() | text | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text | st.integers(-5, 5), inner, max_size=3),
    max_leaves=5,
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Anything that the type of a field allows."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return some(hint)
    if get_origin(hint) is tuple:
        first, *rest = get_args(hint)
        if rest == [...]:
            return st.lists(values(first), max_size=4).map(tuple)
        return st.tuples(values(first), *map(values, rest))
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is dict:
        of = plain if get_args(hint)[1] is Any else values(get_args(hint)[1])
        return st.dictionaries(st.sampled_from(["lr", "params", "name", "momentum"]) | text, of, max_size=3)
    if get_origin(hint) in (Union, UnionType):
        return st.one_of(*map(values, get_args(hint)))
    kinds: dict[Any, st.SearchStrategy[Any]] = {
        type(None): st.none(),
        msgspec.UnsetType: st.just(msgspec.UNSET),
        int: small,
        float: st.floats(),
        bool: st.booleans(),
        bytes: st.binary(max_size=40),
        str: st.sampled_from(["float32", "validate", ""]) | text,
    }
    return kinds[hint]


def some(kind: type[Any], **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Messages of one type with any fields."""
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: fixed.get(name, values(hints[name])) for name in kind.__struct_fields__})


BEFORE_ADMISSION = (m.Hello, m.Proof, m.Observe, m.ObserverProof)


@varied
@given(st.data())
@pytest.mark.parametrize("kind", [kind for kind in CONTROL_MESSAGES if kind not in BEFORE_ADMISSION])
def test_a_stranger_is_refused_on_the_control_channel(kind: type[m.Message], data: st.DataObject) -> None:
    core = Link().core
    (out,) = core.receive(m.CONTROL, b"stranger", data.draw(some(kind)), b"payload", 0.0)
    expect_refusal(out.message, "stranger", "say Hello first")
    assert core.strangers == 1


@varied
@given(st.data())
@pytest.mark.parametrize("kind", [kind for kind in DATA_MESSAGES if kind is not m.Attach])
def test_a_stranger_is_refused_on_the_data_channel(kind: type[m.Message], data: st.DataObject) -> None:
    core = Link().core
    (out,) = core.receive(m.DATA, b"stranger", data.draw(some(kind)), b"payload", 0.0)
    expect_refusal(out.message, "stranger")
    assert core.strangers == 1


@pytest.mark.parametrize("kind", [m.PushMessage, m.UploadWeights])
def test_no_memory_is_allocated_for_a_stranger(kind: type[m.Message]) -> None:
    seed = m.UploadWeights(packed=Packed(b"", ()), nbytes=2**40)
    with pytest.raises(ProtocolError, match="attach first"):
        Link().core.check_payload(
            b"stranger", seed if kind is m.UploadWeights else push_of(gradient(0), nbytes=2**40)[0]
        )


def test_no_memory_is_allocated_for_more_than_the_model(link: Link) -> None:
    for nbytes in (0, LAYOUT.nbytes + 1, 2**50, -1):
        with pytest.raises(MalformedMessage, match=f"the tensors have {nbytes} bytes, {LAYOUT.nbytes} were expected"):
            link.core.check_payload(data_peer(0), push_of(gradient(0), nbytes=nbytes)[0])


def test_a_control_connection_does_not_open_the_data_channel(link: Link) -> None:
    message, payload = push_of(gradient(0))
    (out,) = link.core.receive(m.DATA, control_peer(0), message, payload, link.now)
    expect_refusal(out.message, "stranger", "attach first")


def test_a_second_data_connection_of_a_rank_is_refused_and_the_first_one_stays() -> None:
    link = Link(world_size=1)
    link.join(0)
    expect_refusal(link.attach(0, b"data again"), "attached", "rank 0 has a data connection already")
    assert link.core.is_admitted(m.DATA, data_peer(0))
    assert not link.core.is_admitted(m.DATA, b"data again")


def test_a_proof_of_attachment_opens_nothing_twice_and_nothing_for_another_rank_or_nonce() -> None:
    link = Link(world_size=2)
    for rank in range(2):
        greeting = hello(rank, 2)
        challenge = link.control(rank, greeting)
        link.control(rank, m.Proof(mac=client_mac(KEY, greeting, challenge.nonce)))
        link.sessions[rank] = session_key(KEY, greeting, challenge.nonce)
    assert link.sessions[0] != link.sessions[1]
    attach = m.Attach(rank=0, nonce=b"n" * 32)
    ((challenge, _),) = link.say(b"first", attach, channel=m.DATA)
    right = m.AttachProof(mac=client_mac(link.sessions[0], attach, challenge.nonce))
    for secret in (KEY, link.sessions[1]):  # the run's key alone does not attach
        ((asked, _),) = link.say(b"thief", attach, channel=m.DATA)
        wrong = m.AttachProof(mac=client_mac(secret, attach, asked.nonce))
        ((answer, _),) = link.say(b"thief", wrong, channel=m.DATA)
        expect_refusal(answer, "stranger", "this proof opens nothing")
    link.say(b"thief", attach, channel=m.DATA)
    ((answer, _),) = link.say(b"thief", right, channel=m.DATA)  # overheard: it answers another challenge
    expect_refusal(answer, "stranger", "this proof opens nothing")
    ((answer, _),) = link.say(b"first", right, channel=m.DATA)
    assert isinstance(answer, m.Attached)
    ((answer, _),) = link.say(b"first", right, channel=m.DATA)
    expect_refusal(answer, "stranger", "this proof opens nothing")
    assert link.core.strangers == 4


def test_bytes_too_many_for_the_control_channel_are_brought_and_collected(link: Link) -> None:
    large, small = bytes(range(256)) * 1000, b"small"
    assert link.data(1, m.Upload(nbytes=len(large)), large)[0] == m.Uploaded()
    link.say(control_peer(0), m.Contribute(number=0, what="gather"), small)
    link.say(control_peer(1), m.Contribute(number=0, what="gather", uploaded=True))
    link.say(control_peer(2), m.Contribute(number=0, what="gather"), b"")
    for rank in range(3):
        (gathered,) = [message for message in link.news(rank) if isinstance(message, m.Gathered)]
        assert (gathered.sizes, gathered.must_download) == ((5, len(large), 0), True)
        assert link.data(rank, m.Download(number=0)) == (m.Downloaded(nbytes=5 + len(large)), small + large)
    expect_refusal(link.data(0, m.Download(number=1))[0], "protocol", "nothing to collect of collective 1")
    answer = link.control(0, m.Contribute(number=1, what="gather", uploaded=True))
    expect_refusal(answer, "uploaded", "has uploaded nothing")


def test_a_message_too_large_for_the_control_channel_is_brought_and_only_such_as_an_admitted_rank_may_send(
    link: Link,
) -> None:
    for inner, known in ((m.AskStatus(), True), (hello(0), False), (m.ReadUpload(), False)):
        data = m.encode(inner)
        link.data(0, m.Upload(nbytes=len(data)), data)
        answer = link.control(0, m.ReadUpload())
        assert isinstance(answer, m.Status if known else m.RefusedMessage)
    for nbytes in (0, -1, m.LARGEST_UPLOAD + 1):
        with pytest.raises(MalformedMessage, match=f"{nbytes} bytes are announced"):
            link.core.check_payload(data_peer(0), m.Upload(nbytes=nbytes))
    with pytest.raises(Refused, match="attach first"):
        link.core.check_payload(b"stranger", m.LargeMessage(nbytes=10))


@pytest.mark.parametrize("field", ["run", "fingerprint", "nonce"])
def test_what_a_stranger_may_say_has_a_largest_size(field: str) -> None:
    long = "x" * 10_000 if field != "nonce" else b"x" * 10_000
    with pytest.raises(MalformedMessage, match="Expected"):
        Link().core.decode(m.CONTROL, m.encode(hello(0, 1, **{field: long})))


def test_secrets_are_derived_by_hkdf() -> None:
    # RFC 5869, test cases 1 and 3
    assert derive(b"\x0b" * 22, bytes(range(0xF0, 0xFA)), bytes(range(13)), 42).hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )
    assert derive(b"\x0b" * 22, b"", b"", 42).hex() == (
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    )


# --- Groups and weights --------------------------------------------------------------------------------------------


def test_all_ranks_hear_of_new_groups_before_rank_0_hears_that_they_stand() -> None:
    link = trained_link((0, 1), (2,))
    assert set(link.unasked) == {control_peer(rank) for rank in range(3)}
    assert {tuple(group.ranks for group in status.groups) for status in link.unasked.values()} == {((0, 1), (2,))}


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (((0, 1),), "not a partition of the live ranks"),
        (((0, 1), (2, 3)), "not a partition"),
        (((0, 1), (1, 2)), "exactly one group"),
        ((), "at least one rank"),
        (((), ()), "at least one rank"),
    ],
)
def test_groups_that_are_no_partition_are_refused(link: Link, groups: Any, says: str) -> None:
    expect_refusal(link.form(*groups, generation=2), "protocol", says)
    assert link.core.generation == 1


def test_only_rank_0_forms_groups_and_hands_weights_over(link: Link) -> None:
    form = m.FormGroups(generation=2, groups=((0,), (1, 2)), method=to_wire(AsyncSGD()))
    expect_refusal(link.control(1, form), "protocol", "only rank 0 forms groups")
    message, payload = seed_of({"parts": [part_of(new_parameters())]})
    (out,) = link.core.receive(m.DATA, data_peer(1), message, payload, link.now)
    expect_refusal(out.message, "protocol", "only rank 0 hands weights over")


def test_an_unknown_method_is_refused(link: Link) -> None:
    form = m.FormGroups(generation=2, groups=((0, 1), (2,)), method={"name": "telepathy"})
    expect_refusal(link.control(0, form), "protocol", "unknown method 'telepathy'; known are async_sgd")


def test_weights_need_groups_first() -> None:
    link = Link(world_size=1)
    link.join(0)
    expect_refusal(link.data(0, *seed_of({"parts": [part_of(new_parameters())]}))[0], "protocol", "form groups first")


def changed(**changes: Any) -> dict[str, Any]:
    part = part_of(new_parameters())
    return {"parts": [{**part, **changes, "optimizer": {**part["optimizer"], **changes.get("optimizer", {})}}]}


SEEDS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "a list": list,
    "no parts": dict,
    "parts are a number": lambda: {"parts": 3},
    "a part is a number": lambda: {"parts": [3]},
    "an empty part": lambda: {"parts": [{}]},
    "no clock": lambda: {"parts": [{k: v for k, v in part_of(new_parameters()).items() if k != "clock"}]},
    "the clock is a word": lambda: changed(clock="noon"),
    "the clock is before time": lambda: changed(clock=-1),
    "weights are a list": lambda: changed(weights=[torch.ones(2)]),
    "a weight is a number": lambda: changed(weights={"w": 3, "b": torch.ones(3)}),
    "a weight is missing": lambda: changed(weights={"w": torch.ones(2, 3)}),
    "the class is a number": lambda: changed(optimizer={"class": 5}),
    "the class is no optimizer": lambda: changed(optimizer={"class": "os:system"}),
    "the class is the base class": lambda: changed(optimizer={"class": "torch.optim.optimizer:Optimizer"}),
    "groups are a number": lambda: changed(optimizer={"groups": 5}),
    "no groups": lambda: changed(optimizer={"groups": []}),
    "a parameter twice": lambda: changed(optimizer={"groups": [{"params": ["w", "w"], "lr": 0.1}]}),
    "attributes are a word": lambda: changed(optimizer={"attributes": "abc"}),
    "defaults are a number": lambda: changed(optimizer={"defaults": 5}),
    "the state is a list": lambda: changed(optimizer={"state": [1]}),
}


@pytest.mark.parametrize("make", SEEDS.values(), ids=SEEDS.keys())
def test_a_seed_that_is_none_is_refused_and_the_old_weights_stay(link: Link, make: Callable[[], Any]) -> None:
    before = link.weights()
    assert isinstance(link.data(0, *seed_of(make()))[0], m.RefusedMessage)
    assert_same(link.weights(), before)


def test_fetched_weights_are_those_that_were_handed_over(link: Link) -> None:
    answer, payload = link.data(2, m.FetchMessage(optimizer=0))
    assert (answer.clock, answer.staleness, answer.applied) == (0, -1, True)
    assert_same(as_tensors(payload), [parameter.detach() for parameter in new_parameters().values()])
    assert link.core.store.clock == 0


def test_pushes_are_steps_of_the_users_optimizer_on_stale_gradients(link: Link) -> None:
    expected = new_parameters()
    optimizer = sgd(expected)
    pushes = [(0, 0), (2, 0), (2, 2), (0, 1), (0, 4)]  # who, and the clock at which it last read
    for tick, (rank, read_at) in enumerate(pushes):
        answer, payload = link.data(rank, *push_of(gradient(tick), read_at=read_at))
        for parameter, value in zip(expected.values(), gradient(tick), strict=True):
            parameter.grad = value
        optimizer.step()
        assert (answer.clock, answer.staleness, answer.applied) == (tick + 1, tick - read_at, True)
        assert_same(as_tensors(payload), [parameter.detach() for parameter in expected.values()])
    status = link.control(1, m.Heartbeat(sent=7.5))
    assert (status.sent, status.clock, status.staleness) == (7.5, 5, (3, 1, 1))
    assert [(group.ranks, group.updates) for group in status.groups] == [((0, 1), 3), ((2,), 2)]


def test_a_missing_gradient_stays_missing(link: Link) -> None:
    before = link.weights()
    _, payload = link.data(0, *push_of([None, gradient(0)[1]]))
    after = as_tensors(payload)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


REFUSED_PUSHES: dict[str, tuple[int, dict[str, Any], str]] = {
    "a member that does not lead": (1, {}, "only leaders push"),
    "the future": (0, {"read_at": 3}, "weights of clock 3 were never sent; the clock is 1"),
    "before time": (0, {"read_at": -1}, "were never sent"),
    "too few bytes": (0, {"nbytes": LAYOUT.nbytes - 1}, "bytes"),
    "too many bytes": (0, {"nbytes": LAYOUT.nbytes + 64}, "bytes"),
    "other parameters": (0, {"present": (True, True, True)}, "3 parameters, the optimizer has 2"),
    "another optimizer": (0, {"optimizer": 1}, "there is no optimizer 1"),
    "a negative optimizer": (0, {"optimizer": -1}, "there is no optimizer -1"),
    "other parameter groups": (0, {"hyperparameters": ({"lr": 0.1}, {"lr": 0.1})}, "2 parameter groups"),
    "no parameter groups": (0, {"hyperparameters": ()}, "0 parameter groups"),
}


@pytest.mark.parametrize(("rank", "changes", "says"), REFUSED_PUSHES.values(), ids=REFUSED_PUSHES.keys())
def test_a_push_that_cannot_be_is_refused_and_changes_nothing(
    link: Link, rank: int, changes: dict[str, Any], says: str
) -> None:
    link.data(0, *push_of(gradient(0)))
    before = link.weights()
    message, payload = push_of(gradient(1), **changes)
    answer, _ = link.data(rank, message, payload)
    assert isinstance(answer, m.RefusedMessage)
    assert says in answer.reason
    assert link.core.store.clock == 1
    assert_same(link.weights(), before)


def calls_of_a_push(groups: int) -> int:
    """Python calls and steps of generators that the server makes for a push, once it has seen others."""
    link, calls = trained_link(*((rank,) for rank in range(groups))), 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    for rank in range(2):
        link.data(rank, *push_of(gradient(rank), read_at=0))
    message, payload = push_of(gradient(2), read_at=0)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        link.data(2, message, payload)
    finally:
        sys.setprofile(before)
    return calls


def test_a_push_costs_the_server_no_more_with_more_groups() -> None:
    assert 0 < calls_of_a_push(64) == calls_of_a_push(4)


@pytest.mark.parametrize(
    "hyperparameters",
    [
        *({"lr": "fast"}, {"lr": None}, {"lr": [0.1]}, {"momentum": {}}, {"lr": float("nan")}, {"weight_decay": b"0"}),
        *({"nesterov": 1}, {"maximize": 2.5}),
    ],
    ids=str,
)
def test_hyperparameters_of_another_kind_are_refused_and_change_nothing(
    link: Link, hyperparameters: dict[str, Any]
) -> None:
    good = hyperparameters_of(sgd(new_parameters()))[0]
    before = link.weights()
    answer, _ = link.data(0, *push_of(gradient(0), hyperparameters=({**good, **hyperparameters},)))
    assert isinstance(answer, m.RefusedMessage)
    assert link.core.store.clock == 0
    assert_same(link.weights(), before)
    answer, _ = link.data(0, *push_of(gradient(0)))
    assert answer.applied


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_refused_counted_and_not_applied(link: Link, poison: float) -> None:
    before = link.weights()
    bad = gradient(0)
    bad[1][2] = poison
    for times in (1, 2, 3):
        answer, payload = link.data(0, *push_of(bad))
        assert (answer.applied, answer.refused_in_row, answer.clock, answer.staleness) == (False, times, 0, -1)
        assert_same(as_tensors(payload), before)
    answer, _ = link.data(2, *push_of(gradient(1)))
    assert (answer.applied, answer.refused_in_row, answer.clock) == (True, 0, 1)
    answer, _ = link.data(0, *push_of(gradient(1)))
    assert (answer.applied, answer.refused_in_row, answer.clock) == (True, 0, 2)
    assert link.control(0, m.AskStatus()).refused == 3


def test_huge_finite_gradients_are_applied(link: Link) -> None:
    huge = [torch.full(shape, 3e38) for shape in SHAPES.values()]
    answer, _ = link.data(0, *push_of(huge))
    assert answer.applied


def test_a_push_that_claims_batches_it_never_drew_is_refused_and_changes_nothing(link: Link) -> None:
    link.control(0, m.OpenEpoch(plan=EpochPlan(epoch=0, total=16, batch_size=2, budget=16)))
    before = link.weights()
    answer, _ = link.data(0, *push_of(gradient(0), epoch=0, trained=1))
    expect_refusal(answer, "protocol", "trained 1 batches")
    assert link.core.store.clock == 0
    assert_same(link.weights(), before)


# --- Snapshots -----------------------------------------------------------------------------------------------------


def growth(*names: str, places: tuple[int, ...] = (2,)) -> tuple[m.Restructure, bytes]:
    """A second parameter group comes, with these parameters of three numbers each."""
    settings = hyperparameters_of(sgd(new_parameters()))[0]
    groups = [{**settings, "params": [0, 1]}, {**settings, "lr": 0.5, "params": list(places)}]
    packed, buffer = pack({"groups": groups, "weights": {name: torch.ones(3) for name in names}, "state": {}})
    return m.Restructure(optimizer=0, packed=packed, nbytes=buffer.numel()), buffer.numpy().tobytes()


def test_a_parameter_group_that_comes_in_mid_run_is_one_groups_first_and_then_the_others(link: Link) -> None:
    answer, payload = link.data(0, *growth("x"))
    assert answer == m.Restructured(optimizer=0, layout=1, nbytes=12)
    assert payload == torch.ones(3).numpy().tobytes()
    settings = hyperparameters_of(sgd(new_parameters()))[0]
    both = (settings, {**settings, "lr": 0.5})
    late, _ = link.data(0, *push_of([*gradient(0), torch.ones(3)], hyperparameters=both))
    expect_refusal(late, "malformed", "version 0 of the layout, and group 0 knows version 1")
    link.data(0, *push_of([*gradient(0), torch.ones(3)], hyperparameters=both, layout=1))
    pushed, weights = link.data(2, *push_of(gradient(1)))  # knows nothing of it yet
    assert (pushed.nbytes, pushed.staleness, len(weights)) == (LAYOUT.nbytes, 1, LAYOUT.nbytes)
    expect_refusal(link.data(2, *push_of([*gradient(1), torch.ones(3)], hyperparameters=both))[0], "malformed")
    _, payload = link.data(2, *growth("x"))
    assert payload == torch.full((3,), 0.5).numpy().tobytes()  # as the first group left it
    assert link.data(2, *growth())[0] == m.Restructured(optimizer=0, layout=1, nbytes=0)  # said twice, it is done once
    assert link.data(2, m.FetchMessage(optimizer=0))[0].nbytes == len(payload) + -(-LAYOUT.nbytes // 64) * 64


def test_growth_that_cannot_be_is_refused_and_changes_nothing(link: Link) -> None:
    before = link.weights()
    expect_refusal(link.say(data_peer(1), *growth("x"), m.DATA)[0][0], "malformed", "does not lead")
    expect_refusal(link.data(0, *growth("w"))[0], "protocol", "already")
    expect_refusal(link.data(0, *growth("x", places=(7,)))[0], "protocol", "places")
    large = m.Restructure(optimizer=0, packed=Packed(b"", (TensorSpec("x", (1 << 40,), "float32"),)), nbytes=4 << 40)
    expect_refusal(link.say(data_peer(0), large, b"", m.DATA)[0][0], "structure", "are left")
    assert_same(link.weights(), before)
    link.data(2, *growth("x"))
    expect_refusal(link.data(0, *growth("y"))[0], "structure", "added the parameter y")
    assert link.data(0, *push_of(gradient(0)))[0].applied


def test_a_snapshot_is_of_one_moment_and_training_goes_on_from_it_exactly(link: Link) -> None:
    for tick in range(3):
        link.data(0, *push_of(gradient(tick), read_at=tick))
    answer, payload = link.data(0, m.TakeSnapshot())
    tree = unpack(answer.packed, torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    at_snapshot = link.weights()
    answers = [link.data(0, *push_of(gradient(tick), read_at=tick)) for tick in range(3, 6)]

    (part,) = tree["parts"]
    assert part["clock"] == 3
    assert_same([*part["weights"].values()], at_snapshot)

    resumed = trained_link((0, 1), (2,))
    fresh = part_of(new_parameters())
    fresh = {**part, "optimizer": {**fresh["optimizer"], "state": part["state"]}}
    assert resumed.data(0, *seed_of({"parts": [fresh]}))[0] == m.WeightsUploaded()
    for tick, (message, weights) in zip(range(3, 6), answers, strict=True):
        assert resumed.data(0, *push_of(gradient(tick), read_at=tick)) == (message, weights)


def test_a_snapshot_without_state_leaves_the_optimizer_out(link: Link) -> None:
    link.data(0, *push_of(gradient(0)))
    answer, payload = link.data(2, m.TakeSnapshot(with_state=False))
    tree = unpack(answer.packed, torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    assert tree["parts"][0]["state"] == {}
    assert answer.nbytes == LAYOUT.nbytes


def test_a_snapshot_says_how_far_the_epoch_is(link: Link) -> None:
    plan = EpochPlan(epoch=5, total=64, batch_size=2, budget=64)
    link.control(0, m.OpenEpoch(plan=plan))
    link.control(0, m.DrawBatches(epoch=5, generation=1, number=0))
    answer, _ = link.data(0, *push_of(gradient(0), epoch=5, trained=1))
    assert answer.progress == 4
    answer, _ = link.data(0, m.TakeSnapshot())
    assert answer.cut == SnapshotId(clocks=(1,), pushes={0: 1}, epoch=5, total=64, trained=((0, 4),))


# --- Epochs over the link ------------------------------------------------------------------------------------------


def test_groups_share_an_epoch_over_the_link(link: Link) -> None:
    plan = EpochPlan(epoch=0, total=12, batch_size=2, budget=12)
    for rank in range(3):
        assert link.control(rank, m.OpenEpoch(plan=plan)) == m.EpochOpened(epoch=0)
    mine = [link.control(rank, m.DrawBatches(epoch=0, generation=1, number=0)).batches for rank in range(3)]
    assert mine[0] == mine[1], "members agree"
    assert [(batches[0].start, batches[0].stop) for batches in mine] == [(0, 4), (0, 4), (4, 6)]
    link.deliver(link.core.lose(2, "rank 2 died"))
    for number in range(1, 3):
        (batch,) = link.control(0, m.DrawBatches(epoch=0, generation=1, number=number)).batches
        assert batch.start == {1: 4, 2: 8}[number], "what rank 2 held goes out again"
    link.news(0), link.news(1)
    question = m.AskNext(epoch=0, generation=1, trained=3, interval=0)
    assert link.control(0, question) == link.control(1, question) == m.Next(next="over")


def test_ranks_that_disagree_on_the_data_are_refused(link: Link) -> None:
    link.control(0, m.OpenEpoch(plan=EpochPlan(epoch=0, total=12, batch_size=2, budget=12)))
    other = m.OpenEpoch(plan=EpochPlan(epoch=0, total=14, batch_size=2, budget=14))
    expect_refusal(link.control(1, other), "protocol", "ranks disagree on the data of epoch 0")


def test_a_question_from_before_a_regrouping_is_refused(link: Link) -> None:
    link.form((0,), (1, 2), generation=2)
    expect_refusal(link.control(0, m.DrawBatches(epoch=0, generation=1, number=0)), "protocol", "generation 2, not 1")


def test_a_stop_travels_with_the_weights(link: Link) -> None:
    assert link.control(2, m.LeaveEpoch(epoch=-1, generation=1, trained=0, stop="end")) == m.EpochLeft()
    assert link.data(0, m.FetchMessage(optimizer=0))[0].stop == "end"


# --- Collectives -----------------------------------------------------------------------------------------------------


def contribute(link: Link, rank: int, payload: bytes = b"", what: str = "barrier", number: int = 0) -> list[Received]:
    return link.say(control_peer(rank), m.Contribute(number=number, what=what), payload)


def test_a_collective_gives_every_rank_all_payloads_in_rank_order(link: Link) -> None:
    assert contribute(link, 2, b"two") == contribute(link, 0, b"zero!") == []
    expected = (m.Gathered(number=0, ranks=(0, 1, 2), sizes=(5, 0, 3)), b"zero!two")
    assert contribute(link, 1) == [expected]
    assert link.inbox[control_peer(0), m.CONTROL] == link.inbox[control_peer(2), m.CONTROL] == [expected]


def test_a_collective_does_not_wait_for_the_dead(link: Link) -> None:
    contribute(link, 0, b"a"), contribute(link, 1, b"b")
    link.deliver(link.core.lose(2, "rank 2 died"))
    notice, gathered = link.news(0)
    assert notice == m.Notice(lost=(2,), reason="rank 2 died")
    assert gathered == m.Gathered(number=0, ranks=(0, 1), sizes=(1, 1))


def test_what_a_rank_brought_before_it_died_is_not_counted(link: Link) -> None:
    contribute(link, 2, b"dead")
    link.deliver(link.core.lose(2, "rank 2 died"))
    contribute(link, 0, b"a")
    assert contribute(link, 1, b"b") == [(m.Gathered(number=0, ranks=(0, 1), sizes=(1, 1)), b"ab")]


def test_what_a_rank_brought_for_a_synchronization_point_to_which_it_did_not_come_is_not_kept(link: Link) -> None:
    large = as_tensor(bytes(m.LARGEST_INLINE + 1))
    kept = weakref.ref(large)
    link.core.receive(m.DATA, data_peer(2), m.Upload(nbytes=large.numel()), large, link.now)
    del large
    assert kept() is not None
    link.deliver(link.core.lose(2, "rank 2 died"))
    assert kept() is None


def test_what_a_rank_called_before_it_died_is_no_mismatch(link: Link) -> None:
    contribute(link, 2, what="all_reduce(float32[2])")
    link.deliver(link.core.lose(2, "rank 2 died"))
    contribute(link, 0)
    assert contribute(link, 1)[0][0] == m.Gathered(number=0, ranks=(0, 1), sizes=(0, 0))


def test_two_purposes_of_one_collective_end_the_run_with_a_sentence(link: Link) -> None:
    contribute(link, 0, what="barrier")
    contribute(link, 2, what="all_reduce(float32[2])")
    for rank in range(3):
        (notice,) = link.news(rank)
        assert notice.over
        assert "rank 2 called all_reduce(float32[2]) while rank 0 called barrier" in notice.reason
    answer = link.control(1, m.DrawBatches(epoch=0, generation=1, number=0))
    assert (type(answer), answer.over) == (m.Notice, True)
    (out,) = link.core.receive(m.DATA, data_peer(0), m.FetchMessage(optimizer=0), b"", link.now)
    expect_refusal(out.message, "over", "while rank 0 called barrier")


def test_ranks_that_gather_what_they_have_kept_of_each_batch_hear_where_they_are_and_why_sizes_differ(
    link: Link,
) -> None:
    for rank, size in ((0, 18), (2, 6)):
        where = f"called in Net.on_train_epoch_end (net.py, line 7), after batch {size} of epoch 1"
        link.say(control_peer(rank), m.Contribute(number=0, what=f"all_gather(float32[{size}])", where=where))
    (notice,) = link.news(1)
    assert (
        "rank 2 called all_gather(float32[6]) (called in Net.on_train_epoch_end (net.py, line 7), after batch 6 of"
        " epoch 1) while rank 0 called all_gather(float32[18]) (called in Net.on_train_epoch_end"
    ) in notice.reason
    assert "Groups train different numbers of batches" in notice.reason
    assert "pad to the largest" in notice.reason


def test_ranks_whose_epochs_have_different_lengths_hear_where_they_are_and_what_to_do(link: Link) -> None:
    link.say(control_peer(0), m.Contribute(number=0, what="barrier", where="in no hook, after batch 10 of epoch 0"))
    said = "in on_train_epoch_end, after batch 6 of epoch 0"
    link.say(control_peer(1), m.Contribute(number=0, what="agree", where=said))
    (notice,) = link.news(2)
    assert f"rank 1 called agree ({said}) while rank 0 called barrier (in no hook, after batch 10" in notice.reason
    assert "limit_train_batches=" in notice.reason


def test_after_a_request_to_stop_a_mismatch_is_not_blamed_on_data_of_different_lengths(link: Link) -> None:
    link.control(1, m.LeaveEpoch(epoch=-1, generation=1, trained=0, stop="validate"))
    link.say(control_peer(0), m.Contribute(number=0, what="barrier", where="in no hook, after batch 10 of epoch 0"))
    link.say(control_peer(1), m.Contribute(number=0, what="agree", where="in on_train_epoch_end, after batch 6"))
    (notice,) = link.news(2)
    assert "rank 1 called agree" in notice.reason
    assert "limit_train_batches=" not in notice.reason


def test_collectives_may_overlap(link: Link) -> None:
    contribute(link, 0, number=0), contribute(link, 0, number=1), contribute(link, 1, number=1)
    assert [g.number for g, _ in contribute(link, 2, number=1)] == [1]
    contribute(link, 1, number=0)
    assert [g.number for g, _ in contribute(link, 2, number=0)] == [0]


@pytest.mark.parametrize("stop", ["run", "Validate", "end\n", " "])
def test_an_end_of_an_epoch_that_no_rank_would_understand_is_refused(link: Link, stop: str) -> None:
    link.control(2, m.OpenEpoch(plan=EpochPlan(epoch=0, total=8, batch_size=2, budget=8)))
    answer = link.control(2, m.LeaveEpoch(epoch=0, generation=1, trained=0, stop=stop))
    expect_refusal(answer, "protocol", "leaves an epoch with stop=")
    link.control(0, m.OpenEpoch(plan=EpochPlan(epoch=0, total=8, batch_size=2, budget=8)))
    assert link.data(2, *push_of(gradient(0)))[0].stop == ""


def test_a_rank_that_comes_to_ever_more_collectives_is_refused_and_those_of_all_ranks_go_on(link: Link) -> None:
    for number in range(100, 100 + MOST_OPEN):
        assert contribute(link, 2, number=number) == []
    for number in range(200, 300):
        expect_refusal(link.control(2, m.Contribute(number=number, what="barrier")), "protocol", "waits at 16 others")
    for rank in range(2):
        contribute(link, rank, number=100)
    assert [g.number for rank in range(3) for g in link.news(rank) if isinstance(g, m.Gathered)] == [100] * 3


# --- Losses --------------------------------------------------------------------------------------------------------


def test_a_silent_rank_is_lost_with_its_group_and_costs_no_other() -> None:
    link = trained_link((0,), (1, 2), (3,))
    for _ in range(4):
        link.tick(TIMEOUT / 2 - 1)
        for rank in (0, 1, 3):
            link.control(rank, m.Heartbeat(sent=link.now))
    assert link.core.roster.lost.keys() == {1, 2}
    notice = next(message for message in link.news(3) if isinstance(message, m.Notice))
    assert notice == m.Notice(lost=(1, 2), reason="rank 2 gave no sign of life for 30 s")
    assert not link.core.roster.over
    assert link.control(0, m.AskStatus()).lost == (1, 2)
    assert link.data(3, *push_of(gradient(0)))[0].applied
    contribute(link, 0)
    assert contribute(link, 3)[0][0].ranks == (0, 3)


def test_a_rank_that_only_sends_gradients_is_alive() -> None:
    link = trained_link((0,), (1,))
    for _ in range(4):
        link.tick(TIMEOUT / 2 - 1)
        link.control(0, m.Heartbeat(sent=link.now))
        assert link.data(1, *push_of(gradient(0)))[0].applied
    assert not link.core.roster.lost


def beat(link: Link, seconds: float, waiting: Sequence[int] = (), **progress: int) -> None:
    """Time passes; every rank that is not lost says what it has got done: as ``r1=5``, or nothing new.

    Those that wait for the server count up meanwhile.
    """
    for _ in range(int(seconds / 20)):
        link.tick(20)
        for rank in set(range(link.world_size)) - link.core.roster.lost.keys():
            done = int(link.now) if rank in waiting else progress.get(f"r{rank}", 1)
            link.control(rank, m.Heartbeat(sent=link.now, progress=done))


def test_a_group_that_is_alive_and_gets_nothing_done_is_evicted_with_all_its_ranks() -> None:
    link = trained_link((0,), (1, 2), (3,), progress_timeout=600.0)
    beat(link, 500)
    beat(link, 500, r2=2, r3=0)  # rank 1 waits for rank 2, which gets on; rank 3 is not to be judged
    assert not link.core.roster.lost
    beat(link, 200, r2=2, r3=0)
    assert link.core.roster.lost == dict.fromkeys((1, 2), "group 1 is alive and has made no progress for 600 s")
    assert not link.core.roster.over  # nor is it for the recorder's group, which stands still, too
    assert link.core.roster.formed.alive == (0, 2)
    notice = next(message for message in link.news(3) if isinstance(message, m.Notice))
    assert (notice.lost, notice.barred) == ((1, 2), False)


def test_who_waits_at_a_synchronization_point_is_not_taken_for_one_that_stands_still() -> None:
    link = trained_link((0,), (1, 2), (3,), progress_timeout=600.0)
    beat(link, 20)
    contribute(link, 0), contribute(link, 1), contribute(link, 3)
    beat(link, 580, waiting=(0, 1, 3))
    assert not link.core.roster.lost
    beat(link, 100, waiting=(0, 1, 3))  # also rank 1, of the group of rank 2, which never comes
    assert link.core.roster.lost.keys() == {1, 2}
    gathered = [message for message in link.news(3) if isinstance(message, m.Gathered)]
    assert [each.ranks for each in gathered] == [(0, 3)]


def test_no_group_is_judged_by_its_progress_if_there_is_no_limit() -> None:
    link = trained_link((0,), (1,))
    beat(link, 5000)
    assert not link.core.roster.lost


def test_a_rank_that_never_joins_ends_the_run() -> None:
    link = Link(world_size=2)
    link.join(0)
    for _ in range(int(JOIN_TIMEOUT / 20)):
        link.tick(20)
        link.control(0, m.Heartbeat(sent=link.now))
        assert not link.core.roster.over
    link.tick(1)
    assert "rank 1 did not join within 300 s" in link.core.roster.over
    assert link.news(0)[-1].over


@pytest.mark.parametrize("rank", [0, 1])
def test_the_group_of_rank_0_costs_the_run(link: Link, rank: int) -> None:
    link.deliver(link.core.lose(rank, f"rank {rank} died"))
    (notice,) = link.news(2)
    assert notice == m.Notice(lost=(rank,), reason=f"rank {rank} died; the run cannot go on without it", over=True)
    assert link.control(2, m.Heartbeat(sent=0.0)).over


def test_a_loss_before_groups_are_formed_ends_the_run() -> None:
    link = Link()
    link.join(0), link.join(2)
    link.deliver(link.core.lose(2, "rank 2 died"))
    assert link.news(0)[-1].over


def test_an_evicted_rank_is_told_so_on_both_channels(link: Link) -> None:
    link.deliver(link.core.lose(2, "rank 2 died"))
    before = link.weights()
    link.news(2)
    assert link.control(2, m.Heartbeat(sent=1.0)) == m.Notice(lost=(2,), reason="rank 2 died")
    message, payload = push_of(gradient(0))
    (out,) = link.core.receive(m.DATA, data_peer(2), message, payload, link.now)
    expect_refusal(out.message, "lost", "rank 2 was evicted: rank 2 died")
    assert link.core.store.clock == 0
    assert_same(link.weights(), before)


def test_a_launcher_may_report_a_loss(link: Link) -> None:
    assert link.say(control_peer(0), m.RankEnded(rank=2, reason="rank 2 was killed by signal 9")) == [
        (m.Notice(lost=(2,), reason="rank 2 was killed by signal 9"), b"")
    ]
    assert link.say(control_peer(0), m.RankEnded(rank=2, reason="again")) == []


@pytest.mark.parametrize("rank", [3, -1, 2**40])
def test_a_reported_loss_of_a_rank_that_never_was_costs_nothing(link: Link, rank: int) -> None:
    link.say(control_peer(0), m.RankEnded(rank=rank, reason="gone"))
    assert not link.core.roster.over
    assert not link.core.roster.lost


def test_a_goodbye_with_a_reason_is_a_loss(link: Link) -> None:
    contribute(link, 0), contribute(link, 1)
    answers = [message for message, _ in link.say(control_peer(2), m.Goodbye(reason="rank 2 failed: KeyError"))]
    assert answers[0] == m.Acknowledged()
    assert [type(message) for message in link.news(0)] == [m.Notice, m.Gathered]
    assert link.core.roster.lost == {2: "rank 2 failed: KeyError"}


def test_a_goodbye_without_a_reason_is_no_loss_and_no_group_waits_for_it(link: Link) -> None:
    contribute(link, 0), contribute(link, 1)
    assert link.control(2, m.Goodbye()) == m.Acknowledged()
    assert link.news(0) == [m.Gathered(number=0, ranks=(0, 1), sizes=(0, 0))]
    assert not link.core.roster.lost
    link.tick(10 * TIMEOUT)
    assert 2 not in link.core.roster.lost


def test_a_run_is_over_when_all_have_left_and_the_next_one_may_come(link: Link) -> None:
    assert not Link().core.roster.is_over, "none came yet"
    for rank in range(3):
        assert not link.core.roster.is_over
        assert link.control(rank, m.Goodbye()) == m.Acknowledged()
    assert link.core.roster.is_over
    link.core.reset()
    link.world_size = 1
    assert isinstance(link.join(0), m.Welcome)


# --- Garbage -------------------------------------------------------------------------------------------------------


@varied
@given(st.lists(st.tuples(st.sampled_from([m.CONTROL, m.DATA]), st.binary(max_size=60)), max_size=20))
def test_random_bytes_are_refused_as_malformed(frames: list[tuple[str, bytes]]) -> None:
    core = Link().core
    for count, (channel, frame) in enumerate(frames):
        with pytest.raises(MalformedMessage):
            core.decode(channel, frame)
        (out,) = core.refuse(channel, b"stranger", MalformedMessage("not a message"))
        expect_refusal(out.message, "malformed")
        assert core.strangers == count + 1


@pytest.mark.parametrize("kind", [*CONTROL_MESSAGES, *DATA_MESSAGES])
def test_a_truncated_message_is_malformed(kind: type[m.Message]) -> None:
    channel = m.CONTROL if kind in CONTROL_MESSAGES else m.DATA
    core, whole = Link().core, m.encode(SAMPLES[kind])
    assert core.decode(channel, whole) == SAMPLES[kind]
    for cut in range(len(whole)):
        with pytest.raises(MalformedMessage):
            core.decode(channel, whole[:cut])


@pytest.mark.parametrize("kind", [*CONTROL_MESSAGES, *DATA_MESSAGES])
def test_a_message_on_the_wrong_channel_is_malformed(kind: type[m.Message]) -> None:
    channel = m.DATA if kind in CONTROL_MESSAGES else m.CONTROL
    with pytest.raises(MalformedMessage, match=f"not a {channel} message"):
        Link().core.decode(channel, m.encode(SAMPLES[kind]))


SAMPLES: dict[type[m.Message], m.Message] = {
    type(message): message
    for message in (
        hello(1),
        m.Proof(mac=b"mac"),
        m.AskServerAddresses(),
        m.Observe(version=m.VERSION, nonce=b"nonce"),
        m.ObserverProof(mac=b"mac"),
        m.AskOverview(),
        m.AskServer(),
        m.Echo(nbytes=3),
        m.Evict(group=1, incarnation=1),
        m.Heartbeat(sent=1.5, compute_time=0.25),
        m.FormGroups(generation=1, groups=((0, 1), (2,)), method={"name": "async_sgd"}),
        m.OpenEpoch(plan=EpochPlan(epoch=0, total=8, batch_size=2, budget=8, trained=((0, 2),))),
        m.DrawBatches(epoch=0, generation=1, number=2),
        m.AskNext(epoch=0, generation=1, trained=2, interval=0),
        m.LeaveEpoch(epoch=0, generation=1, trained=2, stop="end"),
        m.ClaimValidation(epoch=0, generation=1, passed=1),
        m.AskValidations(),
        m.ReleaseVersion(number=1),
        m.Contribute(number=3, what="barrier"),
        m.Join(ranks=(1,)),
        m.RankEnded(rank=2, reason="killed"),
        m.Goodbye(reason="done"),
        m.AskStatus(),
        m.ReadUpload(),
        m.Attach(rank=1, nonce=b"nonce"),
        m.AttachProof(mac=b"mac"),
        m.LargeMessage(nbytes=1 << 20),
        m.Upload(nbytes=8),
        m.Download(number=3),
        seed_of({"parts": [torch.ones(2)]})[0],
        m.Restructure(optimizer=0, packed=pack({"groups": [], "weights": {}, "state": {}})[0], nbytes=0),
        push_of(gradient(0))[0],
        m.AverageMessage(optimizer=0, nbytes=LAYOUT.nbytes),
        m.GroupState(packed=pack([torch.ones(2)])[0], nbytes=8),
        m.HeadForward(
            optimizer=1, packed=pack([[torch.ones(2)], {}])[0], nbytes=8, training=(True,), trainable=(True, False)
        ),
        m.HeadBackward(optimizer=1, packed=pack([torch.ones(2)])[0], nbytes=8, hyperparameters=({"lr": 0.1},)),
        m.HeadRelease(optimizer=1),
        m.FetchMessage(optimizer=0),
        m.TakeSnapshot(),
        m.PublishEvaluation(number=1, packed=pack([torch.ones(2)])[0], nbytes=8),
        m.ReadEvaluation(number=1),
        m.RegisterGroup(ranks=1),
        m.StoreRunState(packed=pack([torch.ones(2)])[0], nbytes=8),
        m.ReadRunState(),
    )
}

any_message = st.one_of(
    st.tuples(st.just(m.CONTROL), st.sampled_from(CONTROL_MESSAGES).flatmap(some)),
    st.tuples(st.just(m.DATA), st.sampled_from(DATA_MESSAGES).flatmap(some)),
)


@varied
@given(st.lists(st.tuples(any_message, st.integers(0, 3), st.binary(max_size=8)), max_size=25))
def test_no_message_of_an_admitted_rank_breaks_the_server(
    script: list[tuple[tuple[str, m.Message], int, bytes]],
) -> None:
    link = trained_link((0, 1), (2,))
    link.control(0, m.OpenEpoch(plan=EpochPlan(epoch=0, total=16, batch_size=2, budget=16)))
    for (channel, message), rank, payload in script:
        peer = control_peer(rank) if channel == m.CONTROL else data_peer(rank)
        if channel == m.DATA:
            payload = bytes(expected_payload(link, peer, message))
        link.say(peer, message, payload, channel)
        link.tick(0.5)
    assert isinstance(link.core.status_service.status(0.0), m.Status)


def expected_payload(link: Link, peer: bytes, message: m.Message) -> int:
    try:
        return link.core.check_payload(peer, link.core.decode(m.DATA, m.encode(message)))
    except ProtocolError:
        return 0


@varied
@given(some(m.PushMessage, optimizer=st.just(0), read_at=st.just(0), present=st.just((True, True)),
            nbytes=st.just(LAYOUT.nbytes), hyperparameters=st.tuples(values(dict[str, Any]))))  # fmt: skip
def test_a_push_with_any_settings_is_applied_or_refused(message: m.PushMessage) -> None:
    link = trained_link((0, 1), (2,))
    before = link.weights()
    answer, _ = link.data(0, message, as_bytes(gradient(0)))
    if isinstance(answer, m.RefusedMessage):
        assert link.core.store.clock == 0
        assert_same(link.weights(), before)
    else:
        assert (answer.applied, answer.clock) == (True, 1)


@varied
@given(st.lists(st.tuples(any_message, st.binary(max_size=8)), max_size=25))
def test_strangers_change_nothing_for_the_run(script: list[tuple[tuple[str, m.Message], bytes]]) -> None:
    link, quiet = trained_link((0, 1), (2,)), trained_link((0, 1), (2,))
    for tick, ((channel, message), _) in enumerate(script):
        link.say(b"stranger", message, b"", channel)
        read_at = max(0, tick - 2)
        noisy = link.data(0, *push_of(gradient(tick), read_at=read_at))
        assert noisy == quiet.data(0, *push_of(gradient(tick), read_at=read_at))
    said = sum(not isinstance(message, (m.Hello, m.Attach, m.Observe)) for (_, message), _ in script)
    assert link.core.strangers >= said
    assert link.core.roster.members.keys() == quiet.core.roster.members.keys()


@pytest.mark.parametrize("dies", [False, True])
def test_a_step_that_fails_where_all_groups_wait_for_it_ends_the_run_for_all(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(2 + dies)
    for rank in range(2 + dies):
        link.join(rank)
    groups = tuple((rank,) for rank in range(2 + dies))
    form = m.FormGroups(generation=1, groups=groups, method=to_wire(HardSync()))
    assert link.control(0, form) == m.GroupsFormed(generation=1, incarnation=1)
    message, payload = seed_of({"parts": [part_of(new_parameters())]})
    link.data(0, message, payload)

    def fails(*_: Any) -> None:
        raise OmniError("this optimizer cannot step")

    monkeypatch.setattr(link.core.store.all[0].method_side, "merge", fails)
    for rank in range(2):
        push = push_of([torch.ones_like(each) for each in new_parameters().values()])
        link.say(data_peer(rank), *push, m.DATA)
    if dies:  # the one that the others wait for
        link.core.hang_up(control_peer(2))
    assert "this optimizer cannot step" in link.core.roster.over


def test_a_merge_that_fails_when_its_time_comes_ends_the_run_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(1)
    link.join(0)
    link.form((0,))
    message, payload = seed_of({"parts": [part_of(new_parameters())]})
    link.data(0, message, payload)

    def fails() -> None:
        raise OmniError("this fragment cannot be merged")

    side = link.core.store.all[0].method_side
    monkeypatch.setattr(side, "due", 5.0)
    monkeypatch.setattr(side, "expire", fails)
    (out,) = link.core.tick(6.0)
    assert out.message == m.Notice(lost=(), reason="this fragment cannot be merged", over=True)
    assert link.core.tick(7.0) == [], "it is not tried again"


def test_the_optimizer_state_that_is_handed_over_lies_in_memory_of_its_own(link: Link) -> None:
    message, _ = seed_of({"parts": [part_of(new_parameters())]})
    assert link.core.router.keeps_payload(message), "an outer optimizer loads its state without copying it"
