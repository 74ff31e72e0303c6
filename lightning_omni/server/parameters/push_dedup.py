"""The pushes received from each group: each counts once, in order, and only from the group's current incarnation.

Rule 1: pushes of an earlier incarnation of a group are refused: ``late``. So is a push that arrives after a later one.
Rule 2: the last push may arrive again, because its answer was lost. It is answered again and changes nothing.
Rule 3: a push whose predecessor is missing is refused: ``gap``. A server that continues from a save lacks the pushes
after it, so it accepts the first push of each group as the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_omni.errors import Refused
from lightning_omni.topology import GroupId
from lightning_omni.wire.messages import PushMessage


@dataclass
class Delivery:
    """The last push of a group to one optimizer that counted.

    Attributes:
        sequence: its number.
        applied: whether it was finite.
        staleness: staleness in its answer; -1 before that.
        is_answered: whether the method has answered it.
    """

    sequence: int
    applied: bool = True
    staleness: int = -1
    is_answered: bool = False


class Deliveries:
    """The pushes of all groups to all optimizers.

    Attributes:
        missing: number of pushes that an earlier server has answered after its last save.
    """

    def __init__(self) -> None:
        self.missing = 0
        self._last: dict[tuple[int, int], Delivery] = {}
        self._followed: set[tuple[int, int]] | None = None  # pairs with a push since the restart

    def check(self, group: int, identity: GroupId, message: PushMessage) -> Delivery | None:
        """Return the last delivery if this push repeats it; None if the push is the next one.

        After a restart, the first push of a group may leave a gap: an earlier server has answered the missing ones.

        Args:
            group: number of the sending group.
            identity: identity of that group.
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
        """Count a push that was merged, or refused because it is not finite."""
        key = group, message.optimizer
        if self._followed is not None and key not in self._followed:
            self._followed.add(key)
            self.missing += message.sequence - 1 - (self._last[key].sequence if key in self._last else 0)
        self._last[key] = Delivery(message.sequence, applied, is_answered=not applied)

    def answer(self, group: int, optimizer: int, staleness: int) -> None:
        """Record that the method has answered the group's last push."""
        if (last := self._last.get((group, optimizer))) is not None:
            last.staleness, last.is_answered = staleness, True

    def forget(self, group: int) -> None:
        self._last = {key: last for key, last in self._last.items() if key[0] != group}

    def clear(self) -> None:
        """Start all sequences at 1 again, because groups were formed."""
        self._last.clear()
        self._followed = None

    def state(self) -> list[Any]:
        """Return the state as plain values."""
        return [(*key, last.sequence, last.applied, last.staleness) for key, last in self._last.items()]

    def load(self, state: list[Any]) -> None:
        # The method has merged unanswered pushes, which are answered when they are repeated.
        self._last = {
            (group, optimizer): Delivery(sequence, applied, staleness, is_answered=True)
            for group, optimizer, sequence, applied, staleness in state
        }
        self._followed = set()
