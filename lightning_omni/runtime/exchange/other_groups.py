"""A group's exchanges with other groups, for methods whose groups communicate with each other: gossip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec
import torch
from torch import Tensor

from lightning_omni.errors import UnsupportedError
from lightning_omni.methods import Inbox
from lightning_omni.runtime.exchange.members import PREFIX, GroupMembers
from lightning_omni.runtime.exchange.sharded_peer_exchange import Together
from lightning_omni.runtime.model.meshes import shown
from lightning_omni.runtime.model.replica import Part
from lightning_omni.runtime.parallel_state import Place
from lightning_omni.transport.base import Address, Control, Peers, PeersOfShares
from lightning_omni.wire.layout import Layout


class OtherGroups:
    """A rank's exchanges with other groups. Every rank of a group makes the same calls.

    Args:
        place: this rank's position in the run.
        members: communication among the members of its group.
        synchronize: `Channel.synchronize`.
        timed: `Channel.timed`.
    """

    def __init__(
        self,
        place: Place,
        members: GroupMembers,
        synchronize: Callable[[str, bytes], list[tuple[int, bytes]]],
        timed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._place, self._members, self._synchronize, self._timed = place, members, synchronize, timed
        self._peers: Peers | None = None

    @property
    def moved(self) -> int:
        return self._peers.moved if self._peers is not None else 0

    def connect(self) -> None:
        """Connect newly formed groups, if the method has them exchange; their leaders announce addresses."""
        self.close()
        if not self._place.method.talks_to_peers or self._place.is_synchronous:
            return
        assert self._place.control is not None
        mine = b""
        if self._place.speaks:
            self._peers = self._listen(self._place.control)
            address = self._place.server.published(self._peers.address)
            mine = msgspec.json.encode((self._share_number, Address(self._place.group, address)))
        addresses = self._synchronize("peers", mine)
        if self._peers is not None:
            others = [msgspec.json.decode(payload, type=tuple[int, Address]) for _, payload in addresses if payload]
            alike = [other for share, other in others if share == self._share_number]
            self._peers.connect({other.group: other for other in alike if other.group != self._place.group})

    @property
    def _share_number(self) -> int:
        return self._place.share[0] if self._place.share is not None else 0

    def _listen(self, control: Control) -> Peers:
        """Open this rank's connection to other groups: as a leader, or as a member to those with the same share."""

        def is_lost(group: int) -> bool:
            return group not in self._place.live_groups

        peers = control.listen(
            [part.replica.layout for part in self._place.parts],
            is_lost,
            everywhere=not self._place.server.is_on_this_node_only,
            wire_format=self._place.core.wire_format.pushes,
        )
        if self._place.share is None:
            return peers
        if not isinstance(peers, PeersOfShares):
            peers.close()
            raise UnsupportedError(
                f"{shown(self._place.options.model_parallel)} and method={type(self._place.method).__name__}: with this"
                " transport= only leaders speak to other groups, and each member has a share of the model; leave"
                ' transport= out, or use a method that exchanges with the server, such as "local_sgd"'
            )
        return Together(peers, self._place.group, self._members.largest, is_lost)

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

        return self._share_tensors(self._place.parts[index], read)[0]

    def read_inbox(self, index: int) -> Inbox:
        def read() -> tuple[Sequence[Tensor] | None, int]:
            assert self._peers is not None
            inbox = self._peers.read_inbox(index)
            return inbox.total, inbox.count

        return Inbox(*self._share_tensors(self._place.parts[index], read))

    def _share_tensors(
        self, part: Part, read: Callable[[], tuple[Sequence[Tensor] | None, int]]
    ) -> tuple[Sequence[Tensor] | None, int]:
        """Return tensors and a count on all members, read by the leader or by the rank that exchanges their share."""
        by_member = self._place.share is not None
        listeners = self._place.replicas if by_member else len(self._place.members)
        broadcast = self._members.broadcast_to_replicas if by_member else self._members.broadcast
        with self._timed():
            tensors, count = read() if self._place.speaks else (None, 0)
            if listeners == 1:
                return tensors, count
            memory = part.memory(PREFIX, self._place.empty)
            prefix, views = memory[:PREFIX].view(torch.int64), part.replica.layout.views(memory[PREFIX:])
            if self._place.speaks:
                prefix[0] = count
                for view, tensor in zip(views, tensors or (), strict=False):
                    view.copy_(tensor)
            broadcast(memory[:PREFIX])
            count = int(prefix[0])
            if count:
                broadcast(memory)
            return (views if count else None), count

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()
            self._peers = None
