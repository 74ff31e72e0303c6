"""What servers say to one another: those that hold a share of the weights each, and aggregators.

What it means stands in `shard_servers`, `aggregators` and `aggregator`.

Rule 1: one of them coordinates, and the others speak to it alone.
Rule 2: what that one tells the others each of them does in the order in which it was told, and so do all of them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from lightning_omni.protocol import messages as m
from lightning_omni.protocol.journal import JoinedEntry, LeftEntry, LostEntry
from lightning_omni.protocol.layout import Layout

# --- From a server that holds a share to the coordinating server -----------------------------------------------------


class ShardHello(m.Message, frozen=True, kw_only=True):
    """The first message of a server that holds a share, or of an aggregator.

    Attributes:
        version: as in `Hello`.
        shard: its number, from 1; the one that coordinates is 0. Of an aggregator 0, and so is ...
        shards: ... of how many.
        address: of its data socket, as ranks can reach it.
        nonce: random bytes.
    """

    version: int
    shard: int
    shards: int
    address: Annotated[str, msgspec.Meta(max_length=512)]
    nonce: m.Secret


class ShardProof(m.Message, frozen=True, kw_only=True):
    """The answer to a `Challenge`: it proves that the server holds the run's key."""

    mac: m.Secret


class ShardReady(m.Message, frozen=True, kw_only=True):
    """The report that the sender has its part of a request, or has refused it.

    Attributes:
        rank: sender of the request.
        request: number of the request.
        finite: whether this part is finite.
        refusal: refusal of this part; None if it was not refused.
        present: for a push, which entries of the sender's share have a tensor; empty if all do.
    """

    rank: int
    request: int
    finite: bool = True
    refusal: m.RefusedMessage | None = None
    present: tuple[bool, ...] = ()


class ShardHeard(m.Message, frozen=True, kw_only=True):
    """The report that the sender has executed the first ``count`` commands. It is also a sign of life."""

    count: int


class ShardFailed(m.Message, frozen=True, kw_only=True):
    """The report that the sender cannot continue."""

    reason: str


# --- From the coordinating server to a server that holds a share -----------------------------------------------------


class ShardWelcome(m.Message, frozen=True, kw_only=True):
    """Let in; ``mac`` proves that the other side holds the key, too. What it is told from here on is counted.

    Attributes:
        data_port: as in `Welcome`, for an aggregator.
        number: of an aggregator; it opens its data connection as the rank of this number, which is negative.
    """

    mac: bytes
    heartbeat_timeout: float
    data_port: int = 0
    number: int = 0


class Told(m.Message, frozen=True, kw_only=True):
    """The base of commands, which servers execute in order. ``now`` is the time, on one clock for all servers."""

    now: float = 0.0


class Admit(Told, frozen=True, kw_only=True):
    """The admission of a rank, with the messages from which its secret is derived.

    Attributes:
        hello: hello of the rank.
        challenge: challenge that it was sent.
        joins: whether groups join its run on their own.
    """

    hello: m.Hello
    challenge: bytes
    joins: bool = False


class Relay(Told, frozen=True, kw_only=True):
    """A rank's message on its control connection, which the coordinating server has handled."""

    rank: int
    message: bytes


class Lose(Told, frozen=True, kw_only=True):
    """The loss of a rank."""

    rank: int
    reason: str


class Idle(Told, frozen=True, kw_only=True):
    """The start of a leader's wait for other groups."""

    rank: int


class Resume(Told, frozen=True, kw_only=True):
    """The end of a leader's wait for other groups."""

    rank: int


class Decide(Told, frozen=True, kw_only=True):
    """The decision on a request: each server handles its part, or refuses it.

    Attributes:
        rank: sender of the request.
        request: number of the request.
        finite: whether all parts are finite.
        refusal: refusal of one server's part, which all servers send; None if all handle theirs.
    """

    rank: int
    request: int
    finite: bool = True
    refusal: m.RefusedMessage | None = None


class Expire(Told, frozen=True, kw_only=True):
    """The expiry of a time that methods have requested."""


class Save(Told, frozen=True, kw_only=True):
    """The command to save the share's state of this moment under a number; all servers do so at the same moment."""

    number: int


class Redo(Told, frozen=True, kw_only=True):
    """The replay of a decision that earlier servers had sent to ranks after the loaded state was saved.

    Attributes:
        entry: entry of the coordinating server's journal.
    """

    entry: LostEntry | LeftEntry | JoinedEntry


class RunOver(Told, frozen=True, kw_only=True):
    """The end of the run, with the reason; without a reason, all its ranks are gone, and the next run may begin."""

    reason: str = ""


class Leader(msgspec.Struct, frozen=True, array_like=True):
    """The rank that leads a group, and the group's incarnation."""

    group: int
    rank: int
    incarnation: int


class Gather(Told, frozen=True, kw_only=True):
    """To an aggregator: add up what these groups push from now on.

    Attributes:
        method: as in `Form`, and so is ...
        wire_format: ... this.
        leaders: of all groups that take part.
        layouts: of each optimizer's parameters; without entries for a merged head, to which no group pushes.
    """

    method: dict[str, Any]
    wire_format: dict[str, Any]
    leaders: tuple[Leader, ...]
    layouts: tuple[Layout, ...]


# --- Between an aggregator and its server, on the data channel -------------------------------------------------------


class SummedPush(msgspec.Struct, frozen=True, array_like=True):
    """A push that is in a sum: the number of its group, and what that has said."""

    group: int
    push: m.PushMessage


class Sum(m.Message, frozen=True, kw_only=True):
    """Pushes that an aggregator has added up. The payload is their sum, raw, of each tensor that one of them had.

    Attributes:
        number: counts the sums of this aggregator.
        optimizer: of all of these pushes.
        parts: the pushes, in the order in which they came.
    """

    number: int
    optimizer: int
    parts: Annotated[tuple[SummedPush, ...], msgspec.Meta(min_length=1)]
    nbytes: int


class Answered(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one push of a sum."""

    group: int
    incarnation: int
    sequence: int
    answer: m.Weights


class Summed(m.Message, frozen=True, kw_only=True):
    """Answers to pushes that an aggregator has added up; the payload, which is that of each of them, follows once."""

    answers: tuple[Answered, ...]
    nbytes: int


class SumRefused(m.Message, frozen=True, kw_only=True):
    """No push of this sum was applied: let each group push to the server itself."""

    number: int
    reason: str


ToShard = (
    ShardWelcome | Admit | Relay | Lose | Idle | Resume | Decide | Expire | RunOver | Gather | Save | Redo
    | m.Challenge | m.RefusedMessage | m.Acknowledged
)  # fmt: skip
"""The messages of the coordinating server to the others."""
_decoder = msgspec.msgpack.Decoder(ToShard)


def decode(data: bytes | memoryview) -> ToShard:
    """Decode a message to a server that holds a share.

    Raises:
        MalformedMessage: the bytes are no such message.
    """
    message: ToShard = m.decode_with(_decoder, data, "shard")
    return message


_sums = msgspec.msgpack.Decoder(Summed | SumRefused | m.AttachChallenge | m.Attached | m.Long | m.RefusedMessage)


def decode_answer(data: bytes | memoryview) -> m.Message:
    """Bytes as a message to an aggregator on its data connection.

    Raises:
        MalformedMessage: they are none.
    """
    message: m.Message = m.decode_with(_sums, data, m.DATA)
    return message
