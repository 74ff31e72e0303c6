"""Validations while groups train: which group evaluates, and the results.

Rule 1: a validation is assigned to one group; the others continue. If that group dies before it has published the
result, the validation is void, and the next group that passes a point gets another one.
Rule 2: results become complete in the order of their numbers, so every rank receives them in the same order.
Rule 3: the answer to a claim never changes, so the members of a group agree without communication.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from lightning_omni.errors import ProtocolError
from lightning_omni.wire.codec import Packed

MOST_OPEN = 8
"""The most validations that are not saved completely yet; the server keeps a copy of its state for each."""


Evaluation = tuple[Packed, bytes]
"""The result of a validation: metrics, and buffers of the evaluated model."""


class ValidationBook(msgspec.Struct):
    """The validations of a run, numbered from 1.

    Attributes:
        complete: every validation up to this number has a result, or is void.
        is_missed: whether a point of this epoch was passed without a validation, or with one that is void.
        saved: every validation up to this number is saved completely.
        last: number of the last validation.

    Example:
        >>> book = ValidationBook()
        >>> book.claim(group=0, epoch=0, passed=1), book.claim(group=1, epoch=0, passed=1)
        (1, 0)
        >>> book.publish(0, 1, (Packed(b"accuracy 0.9", ()), b""))
        >>> book.complete, book.read(rank=3, number=1)
        (1, (Packed(tree=b'accuracy 0.9', specs=()), b''))
    """

    complete: int = 0
    saved: int = 0
    last: int = 0
    is_missed: bool = False
    _epoch: int = -1
    _passed: int = 0
    _answers: dict[int, tuple[int, int, int]] = {}  # each group's last one: epoch, points passed, number
    _under_way: dict[int, int] = {}  # number: group
    _results: dict[int, Evaluation | None] = {}
    _read: dict[int, int] = {}
    _lost: set[int] = set()  # validations under way whose weights are lost

    def form(self) -> None:
        for group in self.evaluating:
            self.evict(group)
        self._answers.clear()

    def claim(self, group: int, epoch: int, passed: int) -> int:
        """Return the validation that a group must evaluate after ``passed`` points of the epoch; 0 for none."""
        answer = self._answers.get(group)
        if answer is None or answer[:2] != (epoch, passed):
            answer = self._answers[group] = (epoch, passed, self._give(group, epoch, passed))
        return answer[2]

    def _give(self, group: int, epoch: int, passed: int) -> int:
        if epoch != self._epoch:
            self._epoch, self._passed, self.is_missed = epoch, 0, False
        self.is_missed = self.is_missed or passed > self._passed
        self._passed = max(passed, self._passed)
        if not self.is_missed or self.last - self.saved >= MOST_OPEN:
            return 0
        self.is_missed, self.last = False, self.last + 1
        self._under_way[self.last] = group
        return self.last

    @property
    def evaluating(self) -> set[int]:
        return set(self._under_way.values())

    def check_evaluates(self, group: int, number: int) -> None:
        is_repeated = number > 0 and self._answers.get(group, (0, 0, 0))[2] == number  # its answer was lost
        if self._under_way.get(number) != group and not is_repeated:
            raise ProtocolError(f"validation {number} was not given to group {group}, or is over")

    def publish(self, group: int, number: int, result: Evaluation) -> None:
        self.check_evaluates(group, number)
        if number in self._under_way:
            self._end(number, None if number in self._lost else result)

    def evict(self, group: int) -> None:
        self._answers.pop(group, None)
        for number in [number for number, by in self._under_way.items() if by == group]:
            self.is_missed = True
            self._end(number, None)

    def go_back(self) -> None:
        """Resume after a restart, which lost the evaluated weights: unsaved results that no rank has read are void."""
        read = max(self._read.values(), default=0)
        for number in range(max(read, self.saved) + 1, self.last + 1):
            self.is_missed = True
            if number in self._under_way:
                self._lost.add(number)
            else:
                self._results[number] = None

    def _end(self, number: int, result: Evaluation | None) -> None:
        del self._under_way[number]
        self._results[number] = result
        self.complete = min(self._under_way, default=self.last + 1) - 1

    def read(self, rank: int, number: int) -> Evaluation | None:
        """Return the result of a validation, or None if it is void. A rank reads results in order."""
        if not 0 < number <= self.complete or number not in self._results:
            raise ProtocolError(f"there is no result of validation {number}: {self.complete} are complete")
        self._read[rank] = max(number, self._read.get(rank, 0))
        return self._results[number]

    def save(self, number: int) -> None:
        self.saved = max(number, self.saved)

    def forget(self, live: Collection[int]) -> None:
        known = min((self._read.get(rank, 0) for rank in live), default=0)
        # The last one stays: a rank repeats a request that is not answered.
        self._results = {number: result for number, result in self._results.items() if number >= known}
