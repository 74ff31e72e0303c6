"""The exchange between groups that have the model in shares: members of a group exchange together, or not at all.

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

from torch import Tensor

from lightning_omni.methods import Inbox
from lightning_omni.methods.model.replica import all_finite
from lightning_omni.transport.base import Address, PeersOfShares
from lightning_omni.wire.layout import Layout

_log = logging.getLogger(__name__)

PAUSES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between two requests for a group's publication number, while its members return different ones."""
WAIT = 5.0
"""Seconds in which a part of a message must arrive that another member has."""
_POLL = 0.001
"""Seconds between two polls for such a part."""


class Together:
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
