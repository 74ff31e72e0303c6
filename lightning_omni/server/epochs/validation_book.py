"""Validations while groups train: their assignment to groups, and their results.

Rule 1: a validation is assigned to one group; the others continue. If that group dies before it has published the
result, the validation is void, and the next group that passes a point gets another one.
Rule 2: results become complete in the order of their numbers, so every rank receives them in the same order.
Rule 3: the answer to a claim never changes, so the members of a group agree without communication.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning_omni.errors import ProtocolError

MOST_OPEN = 8
"""The most validations that are not saved completely yet; the server keeps a copy of its state for each."""


_NUMBERS = ("complete", "is_missed", "saved", "_epoch", "_passed", "_last")


class ValidationBook:
    """The validations of a run, numbered from 1.

    Attributes:
        complete: every validation up to this number has a result, or is void.
        is_missed: whether a point of this epoch was passed without a validation.
        saved: every validation up to this number is saved completely.

    Example:
        >>> book = ValidationBook()
        >>> book.claim(group=0, epoch=0, passed=1), book.claim(group=1, epoch=0, passed=1)
        (1, 0)
        >>> book.publish(0, 1, "accuracy 0.9")
        >>> book.complete, book.read(rank=3, number=1)
        (1, 'accuracy 0.9')
    """

    def __init__(self) -> None:
        self.complete = self.saved = 0
        self.is_missed = False
        self._epoch, self._passed, self._last = -1, 0, 0
        self._answers: dict[int, tuple[int, int, int]] = {}  # each group's last one: epoch, points passed, number
        self._under_way: dict[int, int] = {}  # number: group
        self._results: dict[int, Any] = {}
        self._read: dict[int, int] = {}
        self._lost: set[int] = set()  # validations under way whose weights are lost

    def form(self) -> None:
        """Start with new groups; validations of the earlier ones are void."""
        for group in self.evaluating:
            self.evict(group)
        self._answers.clear()

    def claim(self, group: int, epoch: int, passed: int) -> int:
        """Assign a validation to a group that has passed ``passed`` validation points of this epoch.

        Returns:
            The number of the validation that the group must evaluate; 0 if there is none.
        """
        answer = self._answers.get(group)
        if answer is None or answer[:2] != (epoch, passed):
            answer = self._answers[group] = (epoch, passed, self._give(group, epoch, passed))
        return answer[2]

    def _give(self, group: int, epoch: int, passed: int) -> int:
        if epoch != self._epoch:
            self._epoch, self._passed, self.is_missed = epoch, 0, False
        self.is_missed = self.is_missed or passed > self._passed
        self._passed = max(passed, self._passed)
        if not self.is_missed or self._last - self.saved >= MOST_OPEN:
            return 0
        self.is_missed, self._last = False, self._last + 1
        self._under_way[self._last] = group
        return self._last

    @property
    def last(self) -> int:
        """Return the number of the last validation assigned to a group; 0 if there is none."""
        return self._last

    @property
    def evaluating(self) -> set[int]:
        """Return the groups that evaluate."""
        return set(self._under_way.values())

    def check_evaluates(self, group: int, number: int) -> None:
        """Raise `ProtocolError` unless a group evaluates that validation."""
        if self._under_way.get(number) != group:
            raise ProtocolError(f"validation {number} was not given to group {group}, or is over")

    def publish(self, group: int, number: int, result: Any) -> None:
        """Store the result of a validation.

        Raises:
            ProtocolError: the group was not assigned this validation.
        """
        self.check_evaluates(group, number)
        self._end(number, None if number in self._lost else result)

    def evict(self, group: int) -> None:
        """Remove a group; validations that it evaluates are void."""
        self._answers.pop(group, None)
        for number in [number for number, by in self._under_way.items() if by == group]:
            self.is_missed = True
            self._end(number, None)

    def go_back(self) -> None:
        """Continue after a restart of the server, which has lost the weights of validations.

        Results that no rank has read become void, because their weights cannot be saved any more.
        """
        read = max(self._read.values(), default=0)
        for number in range(max(read, self.saved) + 1, self._last + 1):
            self.is_missed = True
            if number in self._under_way:
                self._lost.add(number)
            else:
                self._results[number] = None

    def state(self) -> dict[str, Any]:
        """Return the state as plain values, with the results unchanged."""
        numbers = {name: vars(self)[name] for name in _NUMBERS}
        return {
            **numbers,
            "answers": dict(self._answers),
            "under_way": dict(self._under_way),
            "results": dict(self._results),
            "read": dict(self._read),
            "lost": sorted(self._lost),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: state[name] for name in _NUMBERS})
        self._answers = {group: tuple(answer) for group, answer in state["answers"].items()}
        self._under_way, self._results = dict(state["under_way"]), dict(state["results"])
        self._read, self._lost = dict(state["read"]), set(state["lost"])

    def _end(self, number: int, result: Any) -> None:
        del self._under_way[number]
        self._results[number] = result
        self.complete = min(self._under_way, default=self._last + 1) - 1

    def read(self, rank: int, number: int) -> Any:
        """Return the result of a validation, or None if it is void. A rank reads results in order.

        Raises:
            ProtocolError: the result is not complete, or every rank has read it.
        """
        if not 0 < number <= self.complete or number not in self._results:
            raise ProtocolError(f"there is no result of validation {number}: {self.complete} are complete")
        self._read[rank] = max(number, self._read.get(rank, 0))
        return self._results[number]

    def save(self, number: int) -> None:
        """Record that all validations up to this number are saved completely."""
        self.saved = max(number, self.saved)

    def forget(self, live: Collection[int]) -> None:
        """Drop results that all live ranks have read."""
        known = min((self._read.get(rank, 0) for rank in live), default=0)
        self._results = {number: result for number, result in self._results.items() if number > known}
