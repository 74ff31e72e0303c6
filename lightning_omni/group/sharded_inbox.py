"""Messages from other groups to a group that holds the model in shares: all its members take the same messages.

Each member has an inbox for its share. A message to the group has one part for each member, and the parts arrive at
different times. If one member used a message and another did not, only one share of the model would be averaged.

Rule 1: groups number their messages to a group, from 1 on; each part has the message's number, and parts from one
sender arrive in order. So one number per sender describes the messages that a member has.
Rule 2: to read its inbox, each member reports its numbers (`ShardedInbox.seen`), and all take the messages up to the
largest that any reports (`ShardedInbox.take`) as soon as they have them (`ShardedInbox.has`). Parts that arrive
meanwhile wait.
Rule 3: if a member lacks a part that will not arrive (its connection broke, for example), its `take` returns None, and
all members take nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_omni.methods import Inbox
from lightning_omni.methods.contract import Total

MOST_WAITING = 16
"""Parts that may wait for the next `take`; further ones count as lost."""


class _Part(NamedTuple):
    sender: int
    number: int
    tensors: Sequence[Tensor] | None


class ShardedInbox:
    """A member's share of an inbox.

    Example:
        >>> import torch
        >>> here, there = ShardedInbox(), ShardedInbox()
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
        """Add a part that has arrived.

        Args:
            sender: number of the sending group.
            number: the sender's number of this message to this group.
            tensors: this member's share of the weights; None if it cannot be used.
        """
        if self._is_open:
            self._include(_Part(sender, number, tensors))
        else:
            self._waiting.append(_Part(sender, number, tensors if len(self._waiting) < MOST_WAITING else None))

    def spoil(self) -> None:
        """Drop the parts since the last `take`, because the parameters have changed."""
        self._lacks = self._lacks or self._total.count > 0
        self._total.clear()
        self._waiting = [part._replace(tensors=None) for part in self._waiting]

    def seen(self) -> dict[int, int]:
        """Return the number of each sender's last message; parts that arrive from now on wait until `take`."""
        self._is_open = False
        return dict(self._latest)

    def has(self, upto: Mapping[int, int]) -> bool:
        """Return whether all messages up to these numbers have arrived, or cannot arrive any more."""
        latest = dict(self._latest)
        for part in self._waiting:
            latest[part.sender] = max(latest.get(part.sender, 0), part.number)
        return all(latest.get(sender, 0) >= number for sender, number in upto.items())

    def take(self, upto: Mapping[int, int]) -> Inbox | None:
        """Take all messages since the last time up to these numbers, even if a part is missing.

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
            return  # it was skipped, or is taken already
        self._lacks = self._lacks or part.number > latest + 1 or part.tensors is None
        self._latest[part.sender] = part.number
        if part.tensors is not None:
            self._total.add(part.tensors)
