"""The members of a group that has the model in shares exchange weights with other groups as one, or not at all.

With a method whose groups speak to each other (gossip), member j of a group reads the share of member j of another
group, or puts its own into that one's inbox. No rank sees more than its share. Members of a group take each step
together, but not at the same moment: one may find what the other group has published last while another member still
finds the one before. Weights of which one share was averaged with newer ones than another would be of no group.

Rule 1: what the members of a group do with the weights of another one, they do with the same ones: the same
publication, the same messages. They agree on these by their numbers, in a collective of theirs.
Rule 2: where that cannot be (a share is not finite, one member's connection broke), none of them does anything: groups
go on as if they had not met.
Rule 3: no other group waits for this.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from lightning_omni.methods import Inbox
from lightning_omni.methods.replica import is_sound
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.transport import Address, PeersOfShares

_log = logging.getLogger(__name__)

PAUSES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between two questions which publication a group has, while its members say different ones."""
WAIT = 5.0
"""Seconds in which a part of a message must come that another member has."""
_POLL = 0.001
"""Seconds between two polls for it."""


class Together:
    """A member's way to its counterparts in other groups. All members of the group make the same calls.

    Args:
        peers: the way of this member alone.
        group: number of this group.
        largest: the largest of each number over the members, all of which call it.
        is_lost: whether a group is gone, so that waiting for it is pointless.

    Attributes:
        missed: exchanges that did not take place since the members could not come to the same.
    """

    def __init__(
        self,
        peers: PeersOfShares,
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
        """Where this member listens."""
        return self._peers.address

    @property
    def moved(self) -> int:
        """Bytes of its share that this member has sent to others, and has read from them, so far."""
        return self._peers.moved

    def connect(self, addresses: Mapping[int, Address]) -> None:
        """Tells it where its counterparts in the other groups listen."""
        self._others = sorted(addresses)
        self._peers.connect(addresses)

    def publish(self, optimizer: int, tensors: Sequence[Tensor]) -> None:
        """Others read these weights from now on; copied."""
        self._peers.publish(optimizer, tensors)

    def read(self, group: int, optimizer: int) -> Sequence[Tensor] | None:
        """This member's share of what a group has published; None if there is nothing or no group."""
        number = self._agreed_publication(group, optimizer)
        if not number:
            return None
        theirs = self._peers.read(group, optimizer)
        return theirs if self._all(is_sound(theirs)) else None

    def _agreed_publication(self, group: int, optimizer: int) -> int:
        """The publication that all members are going to read; 0 if there is none."""
        for pause in PAUSES:
            time.sleep(pause)
            number = self._peers.hold(group, optimizer)
            newest, oldest = self._largest([number, -number])
            if not oldest or newest == -oldest:
                return -oldest
        self._warn("what another group has published")
        return 0

    def send(self, group: int, optimizer: int, tensors: Sequence[Tensor]) -> None:
        """Puts weights into a group's inbox, if all members can."""
        if not self._all(is_sound(tensors) and self._peers.takes(group)):
            return
        self._sent[group, optimizer] += 1
        self._peers.send_part(group, optimizer, tensors, self._group, self._sent[group, optimizer])

    def read_inbox(self, optimizer: int) -> Inbox:
        """Empties the inbox."""
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
        if not self._all(inbox is not None and is_sound(inbox.total)):
            self._warn("what other groups have sent")
            return Inbox(None, 0)
        assert inbox is not None
        return inbox

    def _wait_for(self, optimizer: int, upto: Mapping[int, int]) -> None:
        """Until what other members have is here, too, or is not to be expected any more."""
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            expected = {group: number for group, number in upto.items() if not self._is_lost(group)}
            with self._peers.arrivals(optimizer) as arrivals:
                if arrivals.has(expected):
                    return
            time.sleep(_POLL)

    def grow(self, optimizer: int, layout: Layout) -> None:
        """An optimizer's weights have another layout; what has come in the old one is gone."""
        self._peers.grow(optimizer, layout)

    def close(self) -> None:
        """Ends both directions."""
        self._peers.close()

    def _all(self, mine: bool) -> bool:
        """Whether something is so at all members."""
        return self._largest([int(not mine)]) == [0]

    def _warn(self, what: str) -> None:
        self.missed += 1
        if self.missed == 1:
            _log.warning("members of group %d do not have the same of %s; it is left out", self._group, what)
