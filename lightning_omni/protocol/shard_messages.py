"""What servers that hold a share of the weights each say to one another: see `lightning_omni.protocol.shard_servers`.

Rule 1: one of them coordinates, and the others speak to it alone.
Rule 2: what that one tells the others each of them does in the order in which it was told, and so do all of them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from lightning_omni.protocol import messages as m

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
        problem: why it was refused, or an empty string.
    """

    rank: int
    request: int
    finite: bool = True
    problem: str = ""


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
    """A rank was admitted: what it has said, and what it was asked, from which its secret is derived."""

    hello: m.Hello
    challenge: bytes


class Relay(Told, frozen=True, kw_only=True):
    """A rank has said this on its control connection, and it was done: do it, too."""

    rank: int
    said: bytes


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
        problem: why some server has refused its part, and so all do; or an empty string.
    """

    rank: int
    request: int
    finite: bool = True
    problem: str = ""


class Expire(Told, frozen=True, kw_only=True):
    """A moment has come that methods have asked for."""


class RunOver(Told, frozen=True, kw_only=True):
    """The run cannot go on, for this reason; or all its ranks are gone, and the next one may come."""

    reason: str = ""


ToShard = (
    ShardWelcome | Admit | Relay | Lose | Idle | Resume | Decide | Expire | RunOver
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
