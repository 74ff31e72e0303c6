"""What the services of the server have in common: the sender of a message, what is sent back, what all of them hear of.

A service is one part of the server with a state of its own. It answers the messages that the table in `router` gives
it, and it is told when groups are formed and when one ends. It knows other services only through what it is given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from lightning_omni.methods import Method
from lightning_omni.protocol import messages as m
from lightning_omni.topology import Topology

Peer = bytes
"""A connection."""
Payload = bytes | Tensor


class Out(msgspec.Struct, frozen=True):
    """A message to be sent, with the parts of its payload.

    Attributes:
        may_take_long: whether its receiver alone waits for it, so that what others are sent may come first.
    """

    peer: Peer
    channel: m.Channel
    message: m.Message
    payload: tuple[Payload, ...] = ()
    may_take_long: bool = False


class Sender(NamedTuple):
    """The sender of a message, as far as it is known.

    Attributes:
        peer: the connection that it came from.
        rank: the admitted rank behind it, or -1.
        group: the group that this rank is in, or -1.
        finite: whether the numbers of what it sent are finite in all parts, of which this server has one; None if this
            is all there is.
        elsewhere: of a push that comes in parts, for each other server which entries of its share have a tensor; empty
            for those where all do.
    """

    peer: Peer
    rank: int = -1
    group: int = -1
    finite: bool | None = None
    elsewhere: tuple[tuple[bool, ...], ...] = ()


class Service:
    """Base of the services: what they are told of beside their messages."""

    def form(self, topology: Topology, method: Method, message: m.Form) -> None:
        """Groups are formed.

        Args:
            topology: the groups.
            method: what they follow.
            message: as the recorder has sent it.
        """

    def join(self, group: int, ranks: tuple[int, ...]) -> None:
        """A group more takes part; the others go on as they are.

        Args:
            group: its number.
            ranks: of its members.
        """

    def evict(self, group: int, lost: bool) -> list[Out]:
        """A group takes no part any more: no rank waits for it.

        Args:
            group: number of the group.
            lost: whether it is dead; else it has left in good order.

        Returns:
            The answers that were waiting for that group.
        """
        return []

    def resolve_pending(self) -> list[Out]:
        """The answers that were waiting for something that has come true."""
        return []

    def state(self) -> Any:
        """What another server needs to go on: plain values and tensors, the live ones. None if it needs nothing."""
        return None

    def load(self, state: Any) -> None:
        """Goes on from a `state`, which is not None."""


def nbytes_of(payload: Payload) -> int:
    """Size of a payload."""
    return payload.numel() if isinstance(payload, Tensor) else len(payload)


def bytes_of(payload: Payload) -> bytes:
    """A payload as bytes."""
    return payload.numpy().tobytes() if isinstance(payload, Tensor) else payload


def as_tensor(payload: Payload) -> Tensor:
    """A payload as a tensor of bytes."""
    if isinstance(payload, Tensor):
        return payload
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
