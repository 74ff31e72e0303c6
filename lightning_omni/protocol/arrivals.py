"""What other groups have sent to one that holds the model in shares, so that each member takes its share of the same.

Where the members of a group hold the model together, each of them has an inbox, for its share. A message to the group
comes in parts, one to each member, at different moments. If one member took a message into account and another did
not, the group would have a model of which one share is averaged with another group's and one is not.

Rule 1: groups number their messages to a group, from 1 on; each part has the message's number, and parts from one
sender come in order. So what a member has is told by one number for each sender.
Rule 2: to read its inbox, each member says what it has (`Arrivals.seen`), and the most that any has is what all take
(`Arrivals.take`) as soon as they have it (`Arrivals.has`). What comes meanwhile waits until that is known.
Rule 3: if a member lacks a part that never comes (its connection broke, say), all of them take nothing: `take` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_omni.methods import Inbox
from lightning_omni.methods.totals import Total

MOST_WAITING = 16
"""Parts that may wait until it is known when they are to be taken; what comes beyond counts as lost."""


class _Part(NamedTuple):
    sender: int
    number: int
    tensors: Sequence[Tensor] | None


class Arrivals:
    """A member's share of an inbox.

    Example:
        >>> import torch
        >>> here, there = Arrivals(), Arrivals()
        >>> here.add(sender=1, number=1, tensors=[torch.ones(2)])
        >>> here.seen(), there.seen()
        ({1: 1}, {})
        >>> there.has({1: 1})
        False
        >>> there.add(sender=1, number=1, tensors=[torch.ones(3)])
        >>> there.has({1: 1}), here.take({1: 1}).count, there.take({1: 1}).count
        (True, 1, 1)
    """

    def __init__(self) -> None:
        self._total = Total()
        self._latest: dict[int, int] = {}
        self._lacks = False
        self._is_open = True
        self._waiting: list[_Part] = []

    def add(self, sender: int, number: int, tensors: Sequence[Tensor] | None) -> None:
        """A part has come.

        Args:
            sender: the group that has sent it.
            number: of the message, as that group counts those to this one.
            tensors: this member's share of the weights; None if it cannot be used.
        """
        if self._is_open:
            self._include(_Part(sender, number, tensors))
        else:
            self._waiting.append(_Part(sender, number, tensors if len(self._waiting) < MOST_WAITING else None))

    def spoil(self) -> None:
        """What came since the last time is of no use: the parameters are others now."""
        self._lacks = self._lacks or self._total.count > 0
        self._total.clear()
        self._waiting = [part._replace(tensors=None) for part in self._waiting]

    def seen(self) -> dict[int, int]:
        """The number of the last message of each sender. What comes from here on waits until `take`."""
        self._is_open = False
        return dict(self._latest)

    def has(self, upto: Mapping[int, int]) -> bool:
        """Whether all is here that is to be taken, or can come no more."""
        latest = dict(self._latest)
        for part in self._waiting:
            latest[part.sender] = max(latest.get(part.sender, 0), part.number)
        return all(latest.get(sender, 0) >= number for sender, number in upto.items())

    def take(self, upto: Mapping[int, int]) -> Inbox | None:
        """All messages since the last time up to these, whether all members can use them or not.

        Args:
            upto: the largest number of each sender that any member has.

        Returns:
            This member's share of their sum; None if it lacks a part of it.
        """
        waiting, self._waiting, self._is_open = self._waiting, [], True
        for part in waiting:
            if part.number <= upto.get(part.sender, 0):
                self._include(part)
        count, is_whole = self._total.count, not self._lacks
        for sender, number in upto.items():
            is_whole = is_whole and self._latest.get(sender, 0) >= number
            self._latest[sender] = max(self._latest.get(sender, 0), number)
        total, self._lacks = self._total.take(), False
        for part in waiting:
            self._include(part)
        if not is_whole:
            return None
        return Inbox(total if count else None, count)  # type: ignore[arg-type]  # parts are whole

    def _include(self, part: _Part) -> None:
        latest = self._latest.get(part.sender, 0)
        if part.number <= latest:
            return  # it was done without, or is taken already
        self._lacks = self._lacks or part.number > latest + 1 or part.tensors is None
        self._latest[part.sender] = part.number
        if part.tensors is not None:
            self._total.add(part.tensors)
