"""Validations while groups train: which group evaluates the weights of which moment, and what came of it.

Rule 1: a validation is given to one group; the others go on. If that group dies before it has said what came of it, the
validation is void, and the next group that passes a point gets another one.
Rule 2: results are complete in the order of their numbers, so every rank hears of them in the same order.
Rule 3: the answer to a claim never changes, so the members of a group agree without talking.
Rule 4: where the recorder may die and the run goes on, it hears of a result first, and others when it has saved what it
wants to save. So if it dies the next one does that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning_omni.errors import ProtocolError

MOST_OPEN = 8
"""Validations of which not everything is saved yet, at most: of each the server keeps a copy of all that it holds."""


_NUMBERS = ("complete", "is_missed", "saved", "_given", "_epoch", "_passed", "_last")


class ValidationBook:
    """The validations of a run, numbered from 1.

    Attributes:
        complete: every validation up to this number has a result, or is void.
        is_missed: whether a point of this epoch was passed for which there is no validation.
        saved: nothing is to be saved of the validations up to this number any more.

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
        self._given: int | None = None
        self._epoch, self._passed, self._last = -1, 0, 0
        self._answers: dict[int, tuple[int, int, int]] = {}  # of each group, the last: epoch, points passed, number
        self._under_way: dict[int, int] = {}  # number: group
        self._results: dict[int, Any] = {}
        self._read: dict[int, int] = {}
        self._lost: set[int] = set()  # under way, of weights that are no more

    def form(self) -> None:
        """Groups are formed: none of those before evaluates any more."""
        for group in self.evaluating:
            self.evict(group)
        self._answers.clear()

    def claim(self, group: int, epoch: int, passed: int) -> int:
        """A group comes past a point at which the run is to be validated.

        Args:
            group: which one.
            epoch: that is under way.
            passed: points of this epoch that it has passed.

        Returns:
            The number of the validation that it is to evaluate; 0 for none.
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
        """Number of the validation that was given to a group last; 0 if there was none."""
        return self._last

    @property
    def evaluating(self) -> set[int]:
        """Groups that evaluate."""
        return set(self._under_way.values())

    def check_evaluates(self, group: int, number: int) -> None:
        """Raises `ProtocolError` unless a group evaluates that validation."""
        if self._under_way.get(number) != group:
            raise ProtocolError(f"validation {number} was not given to group {group}, or is over")

    def publish(self, group: int, number: int, result: Any) -> None:
        """A group says what came of the validation that it was given.

        Raises:
            ProtocolError: it was given no such one.
        """
        self.check_evaluates(group, number)
        self._end(number, None if number in self._lost else result)

    def evict(self, group: int) -> None:
        """A group is gone: what it evaluates is void."""
        self._answers.pop(group, None)
        for number in [number for number, by in self._under_way.items() if by == group]:
            self.is_missed = True
            self._end(number, None)

    def go_back(self) -> None:
        """A server goes on in the place of one that died, with which the weights of validations are lost.

        What no rank has heard of is void, for its weights could not be saved any more.
        """
        read = max(self._read.values(), default=0)
        for number in range(max(read, self.saved) + 1, self._last + 1):
            self.is_missed = True
            if number in self._under_way:
                self._lost.add(number)
            else:
                self._results[number] = None

    def state(self) -> dict[str, Any]:
        """All of it, as plain values; results as they are."""
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
        """Goes on from a `state`."""
        vars(self).update({name: state[name] for name in _NUMBERS})
        self._answers = {group: tuple(answer) for group, answer in state["answers"].items()}
        self._under_way, self._results = dict(state["under_way"]), dict(state["results"])
        self._read, self._lost = dict(state["read"]), set(state["lost"])

    def _end(self, number: int, result: Any) -> None:
        del self._under_way[number]
        self._results[number] = result
        self.complete = min(self._under_way, default=self._last + 1) - 1

    def read(self, rank: int, number: int) -> Any:
        """What came of a validation; None if it is void. A rank reads them in order.

        Raises:
            ProtocolError: that is not known yet, or was read before by every rank.
        """
        if not 0 < number <= self.complete or number not in self._results:
            raise ProtocolError(f"there is no result of validation {number}: {self.complete} are complete")
        self._read[rank] = max(number, self._read.get(rank, 0))
        return self._results[number]

    def known(self, is_first: bool) -> int:
        """Of the validations that are complete, those that a rank may hear of.

        Args:
            is_first: whether it may hear of them before the recorder has saved what it wants to.
        """
        return self.complete if is_first else min(self.complete, self.saved)

    def save(self, number: int) -> None:
        """Of the validations up to this number everything is saved."""
        self.saved = max(number, self.saved)

    def give(self) -> None:
        """From now on a group that joins is given what came of validations, but for those that are not `saved` yet."""
        self._given = self.saved

    def forget(self, live: Collection[int]) -> None:
        """What all ranks that are alive have read is not kept, unless a group that joins would have to."""
        known = min((self._read.get(rank, 0) for rank in live), default=0)
        if self._given is not None:
            known = min(known, self._given)
        self._results = {number: result for number, result in self._results.items() if number > known}
