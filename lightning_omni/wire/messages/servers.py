"""Messages between servers that hold a partition of the parameters each; see `lightning_omni.server.replication`.

Every server makes the coordinating server's calls in the order in which they were sent.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from lightning_omni.wire import messages as m
from lightning_omni.wire.journal import Call

# --- From a server that holds a partition to the coordinating server --------------------------------------------------


class FollowerHello(m.Message, frozen=True, kw_only=True):
    """The first message of server ``number``, from 1, with the address of its data socket for ranks."""

    version: int
    number: int
    servers: int
    address: Annotated[str, msgspec.Meta(max_length=512)]
    nonce: m.Secret


class FollowerProof(m.Message, frozen=True, kw_only=True):
    mac: m.Secret


class PartReady(m.Message, frozen=True, kw_only=True):
    """The report that the sender has its part of a request, finite or not, or has refused it.

    Attributes:
        present: for a push, which entries of the sender's share have a tensor; empty if all do.
    """

    rank: int
    request: int
    finite: bool = True
    refusal: m.RefusedMessage | None = None
    present: tuple[bool, ...] = ()


class CommandsDone(m.Message, frozen=True, kw_only=True):
    """The report that the sender has executed the first ``count`` commands; also a sign of life."""

    count: int


class FollowerFailed(m.Message, frozen=True, kw_only=True):
    """The failure of a server, or of a step of the run that all servers make (``of_run``)."""

    reason: str
    of_run: bool = False


# --- From the coordinating server to a server that holds a partition --------------------------------------------------


class FollowerWelcome(m.Message, frozen=True, kw_only=True):
    """The admission of a server, with a proof that the other side holds the key. Later commands are counted."""

    mac: bytes
    heartbeat_timeout: float


class ServerCommand(m.Message, frozen=True, kw_only=True):
    """A call that servers make in order. ``now`` is the time, on one clock for all servers."""

    call: Call
    now: float = 0.0


ToFollower = FollowerWelcome | ServerCommand | m.Challenge | m.RefusedMessage | m.Acknowledged
"""The messages of the coordinating server to the others."""
_decoder = msgspec.msgpack.Decoder(ToFollower)


def decode(data: bytes | memoryview) -> ToFollower:
    message: ToFollower = m.decode_with(_decoder, data, "server")
    return message
