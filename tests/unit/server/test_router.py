"""The table of messages: each has one row, the server does what the row says, and a new one is a struct and a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any, get_args, get_type_hints

import pytest
import torch
import zmq
from test_server_core import (
    KEY,
    SAMPLES,
    Link,
    control_peer,
    data_peer,
    expect_refusal,
    gradient,
    push_of,
    trained_link,
)
from test_wire import DEADLINE, Serving, ranks

from lightning_omni.errors import MalformedMessage, ProtocolError, Refused
from lightning_omni.server.core import ServerCore
from lightning_omni.server.router import COORDINATOR_TABLE, TABLE, Role, Row
from lightning_omni.server.service import Out, Payload, Sender, Service, as_tensor
from lightning_omni.transport.zeromq.server import ZeroMQServer
from lightning_omni.wire import messages as m

BETWEEN_LEADERS = (m.ReadPublished, m.PeerMessage, m.Published, m.PeerMessageStored)
PEERS = {m.CONTROL: control_peer, m.DATA: data_peer}

rows = pytest.mark.parametrize("row", TABLE, ids=[row.message.__name__ for row in TABLE])


def refusal(link: Link, row: Row, peer: bytes) -> Any:
    """What a peer hears when it says something: the first answer to itself, or the error before any payload came."""
    message = SAMPLES[row.message]
    try:
        if row.channel == m.DATA:
            link.core.check_payload(peer, message)
    except Refused as no:
        return link.core.refuse(row.channel, peer, no)[0].message
    except ProtocolError as error:
        return m.RefusedMessage(code="before its payload", reason=str(error))
    out = link.core.receive(row.channel, peer, message, b"", link.now)
    return next((item.message for item in out if item.peer == peer), None)


def says(answer: Any, text: str) -> bool:
    return isinstance(answer, m.RefusedMessage) and text in answer.reason


# --- The table -------------------------------------------------------------------------------------------------------


def test_every_message_that_a_server_may_receive_has_exactly_one_row() -> None:
    told = {*get_args(m.ToControl), *get_args(m.ToData), *BETWEEN_LEADERS} - {m.LargeMessage}  # which goes both ways
    known = {kind for kind in m.Message.__subclasses__() if getattr(m, kind.__name__, None) is kind}
    assert Counter(row.message for row in (*TABLE, *COORDINATOR_TABLE) if row.message in known) == Counter(known - told)


@rows
def test_a_row_names_methods_of_its_service_and_they_take_its_message(row: Row) -> None:
    for method in (row.handle, row.payload):
        if method is not None:
            assert getattr(row.service, method.__name__) is method
            hint = get_type_hints(method)["message"]
            assert row.message in (get_args(hint) or (hint,))


@rows
def test_only_what_brings_a_payload_has_a_size(row: Row) -> None:
    has_size = row.channel == m.DATA and "nbytes" in row.message.__struct_fields__
    assert (row.payload is not None) is has_size


# --- What the server makes of it -------------------------------------------------------------------------------------


@rows
def test_a_row_says_whether_a_stranger_is_heard(row: Row) -> None:
    link = trained_link((0, 1), (2,))
    answer = refusal(link, row, b"stranger")
    opens_nothing = ("the key does not match", "this proof opens nothing")
    if row.role is not Role.STRANGER:
        expect_refusal(answer, "stranger", "Hello first" if row.channel == m.CONTROL else "attach first")
    elif isinstance(answer, m.RefusedMessage):
        assert any(reason in answer.reason for reason in opens_nothing), answer
    assert link.core.strangers == isinstance(answer, m.RefusedMessage)


@rows
def test_a_row_says_which_rank_is_heard(row: Row) -> None:
    early, link = Link(), trained_link((0, 1), (2,))
    early.join(0)
    heard = refusal(early, row, PEERS[row.channel](0))
    assert says(heard, "in no group") == (row.role in (Role.MEMBER, Role.LEADER) or row.message is m.HeadForward)
    heard = refusal(link, row, PEERS[row.channel](1))
    assert says(heard, "does not lead") == (row.role is Role.LEADER or row.message is m.HeadForward)  # with access
    assert says(heard, "only rank 0") == (row.role is Role.RECORDER)


@rows
def test_a_row_says_who_is_heard_after_the_end(row: Row) -> None:
    if row.role in (Role.STRANGER, Role.OBSERVER):
        return
    lost, over = trained_link((0, 1), (2,)), trained_link((0, 1), (2,))
    lost.core.lose(2, "killed")
    over.core.fail("out of luck")
    for link, rank, heard in ((lost, 2, row.when_lost), (over, 0, row.when_over)):
        seen = link.core.roster.members[rank].last_seen
        link.now += 1
        answer = refusal(link, row, PEERS[row.channel](rank))
        told = isinstance(answer, m.Notice) or (
            isinstance(answer, m.RefusedMessage) and answer.code in ("lost", "over")
        )
        assert told is not heard, answer
        assert isinstance(answer, m.Notice) <= (row.channel == m.CONTROL)
        assert link.core.roster.members[rank].last_seen == seen + (row.channel == m.CONTROL)


def test_memory_is_allocated_for_no_member_that_does_not_lead() -> None:
    with pytest.raises(ProtocolError, match="does not lead group 0; only leaders push"):
        trained_link((0, 1), (2,)).core.check_payload(data_peer(1), push_of(gradient(0))[0])


# --- A message of one's own ------------------------------------------------------------------------------------------


class Tell(m.Message, frozen=True, kw_only=True):
    """A group's leader tells the server some numbers. They follow as payload."""

    nbytes: int


class AskTold(m.Message, frozen=True, kw_only=True):
    """What were the last numbers of my group?"""


class Told(Service):
    """Remembers what it was told, for as long as the group takes part."""

    def __init__(self, core: ServerCore) -> None:
        self.numbers: dict[int, list[float]] = {}
        self._core = core

    def size(self, sender: Sender, message: Tell) -> int:
        if message.nbytes > 16:
            raise MalformedMessage(f"{message.nbytes} bytes are too many")
        return message.nbytes

    def hear(self, sender: Sender, message: Tell, payload: Payload) -> list[Out]:
        self.numbers[sender.group] = as_tensor(payload).clone().view(torch.float32).tolist()
        return [Out(sender.peer, m.DATA, m.GroupStateStored())]

    def answer(self, sender: Sender, message: AskTold, payload: Payload) -> list[Out]:
        told = f"{self.numbers.get(sender.group)} at clock {self._core.store.clock}"
        return [Out(sender.peer, m.CONTROL, m.Next(next=told))]

    def evict(self, group: int, lost: bool) -> list[Out]:
        del self.numbers[group]
        return []


OWN = (
    Row(Tell, m.DATA, Role.LEADER, Told, Told.hear, Told.size),
    Row(AskTold, m.CONTROL, Role.MEMBER, Told, Told.answer, when_over=True),
)


def numbers(*values: float) -> tuple[Tell, bytes]:
    payload = torch.tensor(values).view(torch.uint8).numpy().tobytes()
    return Tell(nbytes=len(payload)), payload


@pytest.fixture
def link() -> Link:
    """Ranks 0 and 1 in group 0, rank 2 in group 1, at a server that knows two messages more."""
    return trained_link((0, 1), (2,), rows=OWN, services=(Told,))


def test_a_message_of_ones_own_is_a_struct_a_row_and_a_handler(link: Link) -> None:
    assert link.data(0, *numbers(1.0, 2.0)) == (m.GroupStateStored(), b"")
    assert link.data(2, *numbers(3.0)) == (m.GroupStateStored(), b"")
    link.data(0, *push_of(gradient(0)))
    assert link.control(1, AskTold()).next == "[1.0, 2.0] at clock 1"
    assert link.control(2, AskTold()).next == "[3.0] at clock 1"


def test_its_row_guards_a_message_of_ones_own(link: Link) -> None:
    expect_refusal(link.data(1, *numbers(1.0))[0], "malformed", "rank 1 does not lead group 0")
    expect_refusal(link.data(0, *numbers(*[1.0] * 5))[0], "malformed", "20 bytes are too many")
    ((answer, _),) = link.say(b"stranger", Tell(nbytes=4), b"1234", m.DATA)
    expect_refusal(answer, "stranger", "attach first")
    with pytest.raises(MalformedMessage, match="not a control message"):
        link.core.decode(m.CONTROL, m.encode(Tell(nbytes=4)))
    with pytest.raises(MalformedMessage, match="not a control message"):
        Link().core.decode(m.CONTROL, m.encode(AskTold()))  # where nothing was added
    link.core.fail("out of luck")
    assert link.control(0, AskTold()).next == "None at clock 0"
    assert link.control(0, m.Heartbeat(sent=0.0)).over


def test_a_service_of_ones_own_hears_of_losses_and_begins_each_run_afresh(link: Link) -> None:
    link.data(2, *numbers(3.0)), link.data(0, *numbers(1.0))
    link.deliver(link.core.lose(2, "killed"))
    assert link.control(0, AskTold()).next.startswith("[1.0]")
    link.core.reset()
    for rank in range(3):
        link.join(rank)
    assert link.form((0, 1), (2,)) == m.GroupsFormed(generation=1, incarnation=1)
    assert {link.control(rank, AskTold()).next for rank in (0, 2)} == {"None at clock 0"}


def test_a_message_of_ones_own_can_be_brought_when_it_is_too_large_for_its_channel(link: Link) -> None:
    data = m.encode(AskTold())
    link.data(0, m.Upload(nbytes=len(data)), data)
    assert link.control(0, m.ReadUpload()).next == "None at clock 0"


def test_a_message_of_ones_own_passes_the_frames_of_a_server(link: Link) -> None:
    with closing(ZeroMQServer(link.core)) as server:
        message, payload = numbers(4.0, 5.0)
        frames: Iterator[list[bytes]] = iter([[m.encode(message)], [b"", payload]])
        said = [server.take(m.DATA, data_peer(0), [zmq.Frame(part) for part in parts]) for parts in frames]
        assert said == [[], [Out(data_peer(0), m.DATA, m.GroupStateStored())]]
    assert link.control(0, AskTold()).next.startswith("[4.0, 5.0]")


@pytest.mark.parametrize("keeps", [True, False])
def test_a_row_says_whether_the_memory_of_a_payload_is_used_again(keeps: bool) -> None:
    kept: list[Any] = []

    class Keeping(Told):
        def hear(self, sender: Sender, message: Tell, payload: Payload) -> list[Out]:
            kept.append(payload)
            return []

    row = Row(Tell, m.DATA, Role.LEADER, Keeping, Keeping.hear, Keeping.size, keeps=keeps)
    link = trained_link((0,), (1,), rows=(row,), services=(Keeping,))
    with closing(ZeroMQServer(link.core)) as server:
        for number in (1.0, 2.0):
            message, payload = numbers(number)
            for parts in ([m.encode(message)], [b"", payload]):
                server.take(m.DATA, data_peer(0), [zmq.Frame(part) for part in parts])
    assert [part.view(torch.float32).item() for part in kept] == ([1.0, 2.0] if keeps else [2.0, 2.0])


def test_a_message_of_ones_own_is_answered_over_sockets() -> None:
    serving = Serving(rows=OWN, services=(Told,))
    try:
        with ranks(serving.address, 1) as (rank,):
            rank.begin((0,))
            rank.data.exchange(Tell(nbytes=4), m.GroupStateStored, torch.tensor([7.0]).view(torch.uint8))
            told = rank.control.request(AskTold(), m.Next, timeout=DEADLINE)
            assert told.next == "[7.0] at clock 0"
    finally:
        serving.stop()


def test_a_table_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="AskTold, Tell cannot have two"):
        ServerCore(KEY, bytes, rows=(*OWN, *OWN), services=(Told,))
    with pytest.raises(ValueError, match="Heartbeat cannot have two"):
        ServerCore(KEY, bytes, rows=[Row(m.Heartbeat, m.CONTROL, Role.RANK, Told, Told.answer)], services=(Told,))
    with pytest.raises(ValueError, match=r"no service Told; pass it in services="):
        ServerCore(KEY, bytes, rows=OWN)
