"""Exchanges inside a group, of answers and numbers, and with other groups, of weights (gossip)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_omni.errors import MalformedMessage
from lightning_omni.methods import Inbox
from lightning_omni.runtime.model.replica import PREFIX, Part
from lightning_omni.runtime.model.tensor_sync import broadcast_bytes, broadcast_from
from lightning_omni.runtime.parallel_state import ParallelState
from lightning_omni.transport.connections import Address, Peers
from lightning_omni.wire.codec import Packed, pack, unpack
from lightning_omni.wire.formats.base import CHUNK, Memory, WireFormat
from lightning_omni.wire.layout import Layout
from lightning_omni.wire.partition import Partition

# --- Inside a group ---------------------------------------------------------------------------------------------------

# One rank exchanges with other groups or the server, and passes the answer on: the leader to its whole group; where the
# members hold the model together, the rank that exchanges a share to those with the same share.


class GroupBroadcast:
    """Broadcasts in this rank's group, and one to all live ranks; the receivers make the same calls."""

    def __init__(self, parallel: ParallelState) -> None:
        self._parallel = parallel

    def letter(self, part: Part) -> Tensor:
        """Return memory for an optimizer's weights and a prefix, on the device of the weights.

        On the CPU it is the memory in which a rank that exchanges receives them.
        """
        return part.memory() if self._parallel.device.type == "cpu" else part.on_device()

    def broadcast(self, memory: Tensor) -> None:
        if len(self._parallel.members) > 1:
            broadcast_from(memory, self._parallel.compute_group, self._parallel.device)

    def broadcast_to_replicas(self, memory: Tensor) -> None:
        if self._parallel.replicas > 1:
            broadcast_from(memory, self._parallel.replica_group, self._parallel.device)

    def broadcast_bytes(self, note: bytes) -> bytes:
        if len(self._parallel.members) == 1:
            return note
        return broadcast_bytes(note if self._parallel.is_leader else None, self.broadcast)

    def broadcast_tree_to_replicas(self, tree: Any) -> tuple[Any, str]:
        return _broadcast_tree(tree, self._parallel.exchanges, self.broadcast_to_replicas)

    def broadcast_tree_to_all(self, tree: Any, source: int) -> tuple[Any, str]:
        live = self._parallel.process_groups.live
        broadcast = partial(dist.broadcast, group=live, group_src=live.ranks.index(source))
        return _broadcast_tree(tree, self._parallel.rank == source, broadcast)


def _broadcast_tree(tree: Any, is_source: bool, broadcast: Callable[[Tensor], Any]) -> tuple[Any, str]:
    """Return one rank's ``tree`` on all ranks of a process group, and the reason why it cannot be sent, or "".

    With a reason, the other ranks get an empty dict.
    """
    refused, (packed, buffer) = "", pack({})
    try:
        packed, buffer = pack(tree if is_source else {})
    except MalformedMessage as error:
        refused = str(error)
    mine = msgspec.msgpack.encode((refused, packed, buffer.numel())) if is_source else None
    refused, packed, size = msgspec.msgpack.decode(broadcast_bytes(mine, broadcast), type=tuple[str, Packed, int])
    flat = buffer if is_source else torch.empty(size, dtype=torch.uint8)
    for chunk in flat.split(CHUNK) if size else ():
        broadcast(chunk)
    return tree if is_source else unpack(packed, flat, copy=True), refused


@dataclass(frozen=True)
class EncodedAnswer:
    """An encoded answer of servers, which is decoded a part at a time on a device, and at once on the CPU."""

    answers: WireFormat
    split: Partition

    @property
    def is_small(self) -> bool:
        """Return whether it has fewer bytes than its tensors, and all ranks know how many."""
        bounds = [self.answers.sizes(share) for share in self.split.shares]
        is_known = all(smallest == largest for smallest, largest in bounds)
        return is_known and sum(largest for _, largest in bounds) < self.split.layout.nbytes

    def decode(
        self,
        payloads: Sequence[Tensor] | None,
        into: Tensor,
        memory: Memory,
        broadcast: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Decode it into flat memory of the weights. Members of a group that receive a ``broadcast`` pass no payloads.

        ``memory`` is for the bytes of a part, on the device of the weights.
        """
        most = sys.maxsize if into.is_cpu else CHUNK
        tensors = self.split.parts(self.split.layout.views(into))
        for server, (share, views) in enumerate(zip(self.split.shares, tensors, strict=True)):
            steps = self.answers.decoding(share, [view for view in views if view is not None], most)
            places = next(steps, None)
            while places is not None:
                payload = payloads[server] if payloads is not None else None
                part = self._part(payload, places, share, memory, into.is_cpu and broadcast is None)
                if broadcast is not None:
                    broadcast(part)
                try:
                    places = steps.send(part)
                except StopIteration:
                    places = None

    def _part(
        self, payload: Tensor | None, places: Sequence[slice], share: Layout, memory: Memory, is_here: bool
    ) -> Tensor:
        if payload is not None and is_here and len(places) == 1:
            return payload[places[0]]
        nbytes = self.answers.sizes(share)[1] if payload is None else payload.numel()
        lengths = [len(range(nbytes)[place]) for place in places]
        part = memory.room(sum(lengths))
        if payload is not None:
            for into, place in zip(part.split(lengths), places, strict=True):
                into.copy_(payload[place])
        return part


# --- With other groups ------------------------------------------------------------------------------------------------


class PeerExchange:
    """A rank's exchanges with other groups. Every rank of a group makes the same calls."""

    def __init__(
        self,
        parallel: ParallelState,
        members: GroupBroadcast,
        synchronize: Callable[[str, bytes], list[tuple[int, bytes]]],
        timed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._parallel, self._members, self._synchronize, self._timed = parallel, members, synchronize, timed
        self._peers: Peers | None = None

    @property
    def moved(self) -> int:
        return self._peers.moved if self._peers is not None else 0

    def connect(self) -> None:
        """Connect the leaders of newly formed groups, if the method has these exchange. All live ranks call it."""
        self.close()
        if not self._parallel.method.talks_to_peers or self._parallel.is_synchronous:
            return
        mine = b""
        if self._parallel.exchanges:
            self._peers = self._parallel.joined.listen(
                [part.replica.layout for part in self._parallel.parts],
                lambda group: group not in self._parallel.live_groups,
                everywhere=not self._parallel.server.is_on_this_node_only,
                wire_format=self._parallel.core.wire_format.pushes,
            )
            address = self._parallel.server.published(self._peers.address)
            mine = msgspec.json.encode(Address(self._parallel.group, address))
        addresses = self._synchronize("peers", mine)
        if self._peers is not None:
            others = [msgspec.json.decode(payload, type=Address) for _, payload in addresses if payload]
            self._peers.connect({other.group: other for other in others if other.group != self._parallel.group})

    def grow(self, index: int, layout: Layout) -> None:
        if self._peers is not None:
            self._peers.grow(index, layout)

    def publish(self, index: int, tensors: Sequence[Tensor]) -> None:
        if self._peers is not None:
            self._peers.publish(index, tensors)

    def send(self, index: int, group: int, tensors: Sequence[Tensor]) -> None:
        if self._peers is not None:
            with self._timed():
                self._peers.send(group, index, tensors)

    def read(self, index: int, group: int) -> Sequence[Tensor] | None:
        def read() -> tuple[Sequence[Tensor] | None, int]:
            assert self._peers is not None
            theirs = self._peers.read(group, index)
            return theirs, int(theirs is not None)

        return self._share_tensors(self._parallel.parts[index], read)[0]

    def read_inbox(self, index: int) -> Inbox:
        def read() -> tuple[Sequence[Tensor] | None, int]:
            assert self._peers is not None
            inbox = self._peers.read_inbox(index)
            return inbox.total, inbox.count

        return Inbox(*self._share_tensors(self._parallel.parts[index], read))

    def _share_tensors(
        self, part: Part, read: Callable[[], tuple[Sequence[Tensor] | None, int]]
    ) -> tuple[Sequence[Tensor] | None, int]:
        with self._timed():
            tensors, count = read() if self._parallel.exchanges else (None, 0)
            letter, layout = self._members.letter(part), part.replica.layout
            if len(self._parallel.members) == 1 and letter.is_cpu:
                return tensors, count
            if self._parallel.exchanges:
                memory = part.memory()
                memory[:PREFIX].view(torch.int64)[0] = count
                if tensors:
                    torch._foreach_copy_(layout.views(memory[PREFIX:]), list(tensors))
                if not letter.is_cpu:
                    used = PREFIX + (layout.nbytes if tensors else 0)
                    letter[:used].copy_(memory[:used])
            self._members.broadcast(letter[:PREFIX])
            if not self._parallel.exchanges:
                count = int(letter[:PREFIX].view(torch.int64)[0])
            if count:
                self._members.broadcast(letter)
            return (layout.views(letter[PREFIX:]) if count else None), count

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()
            self._peers = None
