"""A group's exchanges with other groups, for methods whose groups communicate with each other: gossip.

The exchange between groups that have the model in shares: members of a group exchange together, or not at all.

In gossip, member j of a group reads the share of member j of another group, or sends its own into that one's inbox. No
rank gets more than its share. Members make each step together, but not at the same time: one may find the last
publication of the other group while another still finds the one before. Weights whose shares were averaged with
different publications would belong to no group.

Rule 1: the members of a group use the same publication and the same messages of another group. They agree on the
numbers of these, in a collective of their own.
Rule 2: where this fails (a share is not finite, one member's connection broke), none of them uses any: the groups
continue as if they had not exchanged.
Rule 3: no other group waits for this.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import msgspec
import torch
from torch import Tensor

from lightning_omni.errors import UnsupportedError
from lightning_omni.methods import Inbox
from lightning_omni.methods.model.replica import all_finite
from lightning_omni.runtime.exchange.group_broadcast import PREFIX, GroupBroadcast
from lightning_omni.runtime.model.meshes import shown
from lightning_omni.runtime.model.replica import Part
from lightning_omni.runtime.parallel_state import ParallelState
from lightning_omni.transport.connections import Address, Control, Peers, ShardedPeers
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
            mine = msgspec.json.encode((self._share_number, Address(self._parallel.group, address)))
        addresses = self._synchronize("peers", mine)
        if self._peers is not None:
            others = [msgspec.json.decode(payload, type=tuple[int, Address]) for _, payload in addresses if payload]
            alike = [other for share, other in others if share == self._share_number]
            self._peers.connect({other.group: other for other in alike if other.group != self._parallel.group})

    @property
    def _share_number(self) -> int:
        return self._parallel.share[0] if self._parallel.share is not None else 0

    def _listen(self, control: Control) -> Peers:
        """Open this rank's connection to other groups: as a leader, or as a member to those with the same share."""

        def is_lost(group: int) -> bool:
            return group not in self._parallel.live_groups

        peers = control.listen(
            [part.replica.layout for part in self._parallel.parts],
            is_lost,
            everywhere=not self._parallel.server.is_on_this_node_only,
            wire_format=self._parallel.core.wire_format.pushes,
        )
        if self._parallel.share is None:
            return peers
        if not isinstance(peers, ShardedPeers):
            peers.close()
            raise UnsupportedError(
                f"{shown(self._parallel.options.model_parallel)} and method={type(self._parallel.method).__name__}:"
                " with this transport= only leaders speak to other groups, and each member has a share of the model;"
                ' leave transport= out, or use a method that exchanges with the server, such as "local_sgd"'
            )
        return ShardedPeerExchange(peers, self._parallel.group, self._members.largest, is_lost)

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
        """Return tensors and a count on all members, read by the leader or by the rank that exchanges their share."""
        by_member = self._parallel.share is not None
        listeners = self._parallel.replicas if by_member else len(self._parallel.members)
        broadcast = self._members.broadcast_to_replicas if by_member else self._members.broadcast
        with self._timed():
            tensors, count = read() if self._parallel.exchanges else (None, 0)
            if listeners == 1:
                return tensors, count
            memory = part.memory(PREFIX, self._parallel.empty)
            prefix, views = memory[:PREFIX].view(torch.int64), part.replica.layout.views(memory[PREFIX:])
            if self._parallel.exchanges:
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


_log = logging.getLogger(__name__)

PAUSES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between two requests for a group's publication number, while its members return different ones."""
WAIT = 5.0
"""Seconds in which a part of a message must arrive that another member has."""
_POLL = 0.001
"""Seconds between two polls for such a part."""


class ShardedPeerExchange:
    """A member's exchanges with its counterparts in other groups. All members of the group make the same calls.

    Args:
        peers: this member's own connection to them.
        group: number of this group.
        largest: returns the largest of each number over the members, all of which call it.
        is_lost: returns whether a group is gone, so that waiting for it is pointless.

    Attributes:
        missed: exchanges that did not happen because the members could not agree.
    """

    def __init__(
        self,
        peers: ShardedPeers,
        group: int,
        largest: Callable[[Sequence[int]], list[int]],
        is_lost: Callable[[int], bool],
    ) -> None:
        self._peers, self._group, self._largest, self._is_lost = peers, group, largest, is_lost
        self._others: list[int] = []
        self._sent: Counter[tuple[int, int]] = Counter()
        self._taken: dict[int, dict[int, int]] = {}
        self.missed = 0

    @property
    def address(self) -> str:
        return self._peers.address

    @property
    def moved(self) -> int:
        """Return the bytes of its share that this member has sent and read so far."""
        return self._peers.moved

    def connect(self, addresses: Mapping[int, Address]) -> None:
        self._others = sorted(addresses)
        self._peers.connect(addresses)

    def publish(self, optimizer: int, tensors: Sequence[Tensor]) -> None:
        self._peers.publish(optimizer, tensors)

    def read(self, group: int, optimizer: int) -> Sequence[Tensor] | None:
        """Return this member's share of a group's publication; None if there is no publication or no group."""
        number = self._agreed_publication(group, optimizer)
        if not number:
            return None
        theirs = self._peers.read(group, optimizer)
        return theirs if self._all(all_finite(theirs)) else None

    def _agreed_publication(self, group: int, optimizer: int) -> int:
        """Return the number of the publication that all members will read; 0 if there is none."""
        for pause in PAUSES:
            time.sleep(pause)
            number = self._peers.hold(group, optimizer)
            newest, oldest = self._largest([number, -number])
            if not oldest or newest == -oldest:
                return -oldest
        self._warn("what another group has published")
        return 0

    def send(self, group: int, optimizer: int, tensors: Sequence[Tensor]) -> None:
        """Send weights into a group's inbox, if all members can."""
        if not self._all(all_finite(tensors) and self._peers.takes(group)):
            return
        self._sent[group, optimizer] += 1
        self._peers.send_part(group, optimizer, tensors, self._group, self._sent[group, optimizer])

    def read_inbox(self, optimizer: int) -> Inbox:
        """Empty the inbox, and return its messages; none if the members could not agree on them."""
        with self._peers.arrivals(optimizer) as arrivals:
            seen = arrivals.seen()
        upto = dict(zip(self._others, self._largest([seen.get(group, 0) for group in self._others]), strict=True))
        taken = self._taken.get(optimizer, {})
        self._taken[optimizer] = upto
        is_new = any(number > taken.get(group, 0) for group, number in upto.items())
        if is_new:
            self._wait_for(optimizer, upto)
        with self._peers.arrivals(optimizer) as arrivals:
            inbox = arrivals.take(upto)
        if not is_new:
            return Inbox(None, 0)
        if not self._all(inbox is not None and all_finite(inbox.total)):
            self._warn("what other groups have sent")
            return Inbox(None, 0)
        assert inbox is not None
        return inbox

    def _wait_for(self, optimizer: int, upto: Mapping[int, int]) -> None:
        """Wait for the messages that other members have, until they arrive or cannot be expected any more."""
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            expected = {group: number for group, number in upto.items() if not self._is_lost(group)}
            with self._peers.arrivals(optimizer) as arrivals:
                if arrivals.has(expected):
                    return
            time.sleep(_POLL)

    def grow(self, optimizer: int, layout: Layout) -> None:
        """Change the layout of an optimizer's weights; messages in the old one are dropped."""
        self._peers.grow(optimizer, layout)

    def close(self) -> None:
        self._peers.close()

    def _all(self, mine: bool) -> bool:
        return self._largest([int(not mine)]) == [0]

    def _warn(self, what: str) -> None:
        self.missed += 1
        if self.missed == 1:
            _log.warning("members of group %d do not have the same of %s; it is left out", self._group, what)
