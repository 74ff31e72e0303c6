"""A group's exchanges with other groups, for methods whose groups communicate with each other: gossip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec
import torch
from torch import Tensor

from lightning_omni.methods import Inbox
from lightning_omni.runtime.exchange.group_broadcast import PREFIX, GroupBroadcast
from lightning_omni.runtime.model.replica import Part
from lightning_omni.runtime.parallel_state import ParallelState
from lightning_omni.transport.connections import Address, Control, Peers
from lightning_omni.wire.layout import Layout


class PeerExchange:
    """A rank's exchanges with other groups. Every rank of a group makes the same calls.

    Args:
        parallel: this rank's position in the run.
        members: communication among the members of its group.
        synchronize: `ServerExchange.synchronize`.
        timed: `ServerExchange.timed`.
    """

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
        """Connect newly formed groups, if the method has them exchange; their leaders announce addresses."""
        self.close()
        if not self._parallel.method.talks_to_peers or self._parallel.is_synchronous:
            return
        assert self._parallel.control is not None
        mine = b""
        if self._parallel.exchanges:
            self._peers = self._listen(self._parallel.control)
            address = self._parallel.server.published(self._peers.address)
            mine = msgspec.json.encode(Address(self._parallel.group, address))
        addresses = self._synchronize("peers", mine)
        if self._peers is not None:
            others = [msgspec.json.decode(payload, type=Address) for _, payload in addresses if payload]
            self._peers.connect({other.group: other for other in others if other.group != self._parallel.group})

    def _listen(self, control: Control) -> Peers:
        """Open this leader's connection to those of other groups."""
        return control.listen(
            [part.replica.layout for part in self._parallel.parts],
            lambda group: group not in self._parallel.live_groups,
            everywhere=not self._parallel.server.is_on_this_node_only,
            wire_format=self._parallel.core.wire_format.pushes,
        )

    def grow(self, index: int, layout: Layout) -> None:
        """Change the layout of one optimizer's weights; tensors that peers have sent in the old one are dropped."""
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
        """Return tensors and a count on all members, read by the leader."""
        with self._timed():
            tensors, count = read() if self._parallel.exchanges else (None, 0)
            if len(self._parallel.members) == 1:
                return tensors, count
            memory = part.memory(PREFIX, self._parallel.empty)
            prefix, views = memory[:PREFIX].view(torch.int64), part.replica.layout.views(memory[PREFIX:])
            if self._parallel.exchanges:
                prefix[0] = count
                for view, tensor in zip(views, tensors or (), strict=False):
                    view.copy_(tensor)
            self._members.broadcast(memory[:PREFIX])
            count = int(prefix[0])
            if count:
                self._members.broadcast(memory)
            return (views if count else None), count

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()
            self._peers = None
