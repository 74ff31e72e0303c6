"""The base of the server's services, each a part of the server with its own state.

A service answers the messages that the table in `router` assigns to it, and is notified of changes of groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from lightning_omni.methods import Method
from lightning_omni.topology import Topology
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import check_specs

Peer = bytes
"""The identity of a connection."""
Payload = bytes | Tensor
PackedMessage = m.StoreRunState | m.PublishEvaluation | m.UploadWeights | m.GroupState | m.HeadForward | m.HeadBackward


class Out(msgspec.Struct, frozen=True):
    """A message to send, with the parts of its payload."""

    peer: Peer
    channel: m.Channel
    message: m.Message
    payload: tuple[Payload, ...] = ()


class Sender(NamedTuple):
    """The sender of a message, as far as it is known.

    Attributes:
        rank: the admitted rank, or the leader that it counts as; otherwise -1.
        group: number of this rank's group, or -1.
        finite: whether all servers' parts of the request are finite; None without parts.
        elsewhere: for a push in parts, at the coordinating server, for each other one: which entries of its share have
            a tensor; empty if all have.
    """

    peer: Peer
    rank: int = -1
    group: int = -1
    finite: bool | None = None
    elsewhere: tuple[tuple[bool, ...], ...] = ()


class Service:
    """The base of all services, with the notifications that each receives besides its messages."""

    def check_packed(self, sender: Sender, message: PackedMessage) -> int:
        check_specs(message.packed.specs, message.nbytes)
        return message.nbytes

    def form(self, topology: Topology, method: Method, message: m.FormGroups) -> None:
        """Start with new groups and their method; ``message`` is the recorder's."""

    def join(self, group: int, ranks: tuple[int, ...]) -> None:
        """Add a group; the others are unchanged."""

    def evict(self, group: int, lost: bool) -> list[Out]:
        """Remove a ``lost`` group, or one that a rank leaves (again for each); return answers that waited for it."""
        return []

    def resolve_pending(self) -> list[Out]:
        """Return the pending answers whose condition is met."""
        return []

    def state(self) -> Any:
        """Return the state from which another server continues, as plain values and live tensors; None without one."""
        return None

    def load(self, state: Any) -> None:
        """Continue from a `state`, which is not None."""


def nbytes_of(payload: Payload) -> int:
    return payload.numel() if isinstance(payload, Tensor) else len(payload)


def bytes_of(payload: Payload) -> bytes:
    return payload.numpy().tobytes() if isinstance(payload, Tensor) else payload


def as_tensor(payload: Payload) -> Tensor:
    if isinstance(payload, Tensor):
        return payload
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
