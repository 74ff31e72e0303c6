"""What servers that hold a share of the weights each say to one another.

What it means stands in `shard_servers`.

Rule 1: one of them coordinates, and the others speak to it alone.
Rule 2: what that one tells the others each of them does in the order in which it was told, and so do all of them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from lightning_omni.protocol import messages as m
from lightning_omni.protocol.journal import JoinedEntry, LeftEntry, LostEntry

# --- From a server that holds a share to the one that coordinates ----------------------------------------------------


class ShardHello(m.Message, frozen=True, kw_only=True):
    """The first message of a server that holds a share.

    Attributes:
        version: as in `Hello`.
        shard: its number, from 1; the one that coordinates is 0.
        shards: of how many.
        address: of its data socket, as ranks can reach it.
        nonce: random bytes.
    """

    version: int
    shard: int
    shards: int
    address: Annotated[str, msgspec.Meta(max_length=512)]
    nonce: m.Secret


class ShardProof(m.Message, frozen=True, kw_only=True):
    """The answer to a `Challenge`: proves that the server holds the run's key."""

    mac: m.Secret


class ShardReady(m.Message, frozen=True, kw_only=True):
    """My part of a request is here.

    Attributes:
        rank: that sent it.
        request: its number.
        finite: whether the numbers in it are.
        refusal: how it was refused, if it was.
        present: of a push, which entries of my share have a tensor; empty if all do.
    """

    rank: int
    request: int
    finite: bool = True
    refusal: m.RefusedMessage | None = None
    present: tuple[bool, ...] = ()


class ShardHeard(m.Message, frozen=True, kw_only=True):
    """I have done the first ``count`` things that I was told. Also a sign of life."""

    count: int


class ShardFailed(m.Message, frozen=True, kw_only=True):
    """I cannot go on."""

    reason: str


# --- From the server that coordinates to one that holds a share ------------------------------------------------------


class ShardWelcome(m.Message, frozen=True, kw_only=True):
    """Let in; ``mac`` proves that the other side holds the key, too. What it is told from here on is counted."""

    mac: bytes
    heartbeat_timeout: float


class Told(m.Message, frozen=True, kw_only=True):
    """Base of what is to be done, in the order in which it is told. ``now`` is the moment, on one clock for all."""

    now: float = 0.0


class Admit(Told, frozen=True, kw_only=True):
    """A rank was admitted: what it has said, and what it was asked, from which its secret is derived.

    Attributes:
        hello: what it has said.
        challenge: what it was asked.
        joins: whether it is of a run that groups join on their own.
    """

    hello: m.Hello
    challenge: bytes
    joins: bool = False


class Relay(Told, frozen=True, kw_only=True):
    """A message of a rank on its control connection was handled: handle it, too."""

    rank: int
    message: bytes


class Lose(Told, frozen=True, kw_only=True):
    """A rank is dead."""

    rank: int
    reason: str


class Idle(Told, frozen=True, kw_only=True):
    """The group of this leader waits for others."""

    rank: int


class Resume(Told, frozen=True, kw_only=True):
    """The group of this leader goes on."""

    rank: int


class Decide(Told, frozen=True, kw_only=True):
    """All parts of a request are here: handle yours.

    Attributes:
        rank: that sent it.
        request: its number.
        finite: whether the numbers in all parts are.
        refusal: how some server has refused its part, and so all do; None if none has.
    """

    rank: int
    request: int
    finite: bool = True
    refusal: m.RefusedMessage | None = None


class Expire(Told, frozen=True, kw_only=True):
    """A moment has come that methods have asked for."""


class Save(Told, frozen=True, kw_only=True):
    """Save your share of the state as it is now, under this number; all servers do so at this moment."""

    number: int


class Redo(Told, frozen=True, kw_only=True):
    """Servers before these have told ranks of this, after the state that these go on from.

    Attributes:
        entry: of the journal of the one that coordinates.
    """

    entry: LostEntry | LeftEntry | JoinedEntry


class RunOver(Told, frozen=True, kw_only=True):
    """The run cannot go on, for this reason; or all its ranks are gone, and the next one may come."""

    reason: str = ""


ToShard = (
    ShardWelcome | Admit | Relay | Lose | Idle | Resume | Decide | Expire | RunOver | Save | Redo
    | m.Challenge | m.RefusedMessage | m.Acknowledged
)  # fmt: skip
"""What the server that coordinates says to the others."""
_decoder = msgspec.msgpack.Decoder(ToShard)


def decode(data: bytes | memoryview) -> ToShard:
    """Bytes as a message to a server that holds a share.

    Raises:
        MalformedMessage: they are none.
    """
    message: ToShard = m.decode_with(_decoder, data, "shard")
    return message
