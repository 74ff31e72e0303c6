"""Which pushes have come: each counts once, in order, and only from the group that is there now.

Rule 1: what an earlier incarnation of a group has sent is refused: ``late``. So is what comes after a later push.
Rule 2: the last push may come again, for its answer may have been lost. It is answered again and changes nothing.
Rule 3: a push before which one is missing is refused: ``gap``. At a server that goes on from a save, pushes that came
after that are missing: of each group the first one to come is the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_omni.errors import Refused
from lightning_omni.protocol.messages import PushMessage
from lightning_omni.topology import GroupId


@dataclass
class Delivery:
    """The last push of a group to one optimizer that counted.

    Attributes:
        sequence: its number.
        applied: whether it was finite.
        staleness: what it was answered with; -1 before that.
        is_answered: whether the method has answered it.
    """

    sequence: int
    applied: bool = True
    staleness: int = -1
    is_answered: bool = False


class Deliveries:
    """The pushes of all groups to all optimizers.

    Attributes:
        missing: pushes that a server before this one has answered, and that came after its last save.
    """

    def __init__(self) -> None:
        self.missing = 0
        self._last: dict[tuple[int, int], Delivery] = {}
        self._followed: set[tuple[int, int]] | None = None  # groups and optimizers of which a push has come again

    def check(self, group: int, identity: GroupId, message: PushMessage) -> Delivery | None:
        """The last delivery, if this push is that one once more; None if it is the next one.

        Args:
            group: number of the group that sent it.
            identity: which group that is.
            message: the push.

        Raises:
            Refused: it is neither.
        """
        if message.incarnation != identity.incarnation:
            raise Refused(
                "late",
                f"a push of group {GroupId(identity.name, message.incarnation)} came, and that name is now"
                f" {identity}: groups were formed, or it has joined again, since then",
            )
        last = self._last.get((group, message.optimizer))
        expected = last.sequence + 1 if last is not None else 1
        if message.sequence == expected:
            return None
        if last is not None and message.sequence == last.sequence:
            return last
        if message.sequence < expected:
            raise Refused(
                "late", f"push {message.sequence} of group {identity} came after push {expected - 1}; it has counted"
            )
        if self._followed is not None and (group, message.optimizer) not in self._followed:
            return None
        raise Refused("gap", f"push {message.sequence} of group {identity} came, and push {expected} has not")

    def count(self, group: int, message: PushMessage, applied: bool) -> None:
        """A push has been merged, or refused because it is not finite: it does not count again."""
        key = group, message.optimizer
        if self._followed is not None and key not in self._followed:
            self._followed.add(key)
            self.missing += message.sequence - 1 - (self._last[key].sequence if key in self._last else 0)
        self._last[key] = Delivery(message.sequence, applied, is_answered=not applied)

    def answer(self, group: int, optimizer: int, staleness: int) -> None:
        """The method has answered the group's last push."""
        if (last := self._last.get((group, optimizer))) is not None:
            last.staleness, last.is_answered = staleness, True

    def forget(self, group: int) -> None:
        """A group is gone."""
        self._last = {key: last for key, last in self._last.items() if key[0] != group}

    def clear(self) -> None:
        """Groups were formed: all count from the first."""
        self._last.clear()
        self._followed = None

    def state(self) -> list[Any]:
        """All of it, as plain values."""
        return [(*key, last.sequence, last.applied, last.staleness) for key, last in self._last.items()]

    def load(self, state: list[Any]) -> None:
        """Goes on from a `state`."""
        # What was not answered is when it comes again: the method has merged it.
        self._last = {
            (group, optimizer): Delivery(sequence, applied, staleness, is_answered=True)
            for group, optimizer, sequence, applied, staleness in state
        }
        self._followed = set()
