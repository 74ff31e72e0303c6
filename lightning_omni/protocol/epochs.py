"""The epoch that is under way: its lease book, which ranks wait at its end, and whether one called for a stop.

Rule: every member of a group gets the same verdict on the same question, however late it asks. So a verdict
follows from what the member has heard before and from what its group has drawn, and ``more`` is a promise: the batch
is drawn already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from lightning_omni.errors import ProtocolError
from lightning_omni.protocol.leases import EpochPlan, LeaseBook
from lightning_omni.protocol.messages import Await, Leave
from lightning_omni.protocol.validations import ValidationBook


class Epochs:
    """Opens, watches and closes epochs."""

    def __init__(self) -> None:
        self.book: LeaseBook | None = None
        self.validations = ValidationBook()
        self.stop = ""
        self.generation = 0
        self.samples: Counter[int] = Counter()  # of each group, trained since groups were formed
        self._sizes: dict[int, int] = {}
        self._waiting: dict[int, tuple[int, Await]] = {}
        self._asked: set[int] = set()  # ranks whose questions have not been looked at yet
        self._dirty = True  # whether something has changed for those whose questions have been
        self._validations = 0
        self._validated: Counter[int] = Counter()

    @property
    def progress(self) -> int:
        """Positions of the epoch that are trained."""
        return self.book.trained if self.book else 0

    @property
    def trained_spans(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the epoch that are trained."""
        return self.book.trained_spans if self.book else ()

    @property
    def plan(self) -> EpochPlan | None:
        """The plan of the epoch, if one is under way or was."""
        return self.book.plan if self.book else None

    def form(self, group_sizes: dict[int, int], generation: int, keep_epoch: bool) -> None:
        """Groups are formed, or formed again; what was out on lease goes back."""
        self._sizes = dict(group_sizes)
        self.generation = generation
        self.stop = ""
        self._begin()
        self.samples.clear()
        if self.book is not None and keep_epoch:
            self.book.regroup(self._sizes)
        else:
            self.book = None

    def join(self, group: int, ranks: Sequence[int]) -> None:
        """A group more draws, from the epoch that is under way, too; validations that were are none of its."""
        self._sizes[group] = len(ranks)
        self._dirty = True
        for rank in ranks:
            self._validated[rank] = self._validations
        if self.book is not None:
            self.book.join(group, len(ranks))

    def draw_first(self, group: int) -> None:
        """The first batch of a group that has joined."""
        if self.book is not None:
            self.book.draw(group, 0)

    def open(self, plan: EpochPlan) -> None:
        """An epoch begins; every rank says so.

        Raises:
            ProtocolError: ranks disagree on the plan.
        """
        if self.book is not None and self.book.plan.epoch == plan.epoch:
            if self.book.plan != plan:
                raise ProtocolError(
                    f"ranks disagree on the data of epoch {plan.epoch}: {self.book.plan} against {plan}; every rank"
                    " must build the same dataset and dataloader"
                )
            return
        if self._waiting:
            raise ProtocolError(
                f"epoch {plan.epoch} cannot begin: ranks {sorted(self._waiting)} wait for another's end"
            )
        self.book = LeaseBook(plan, self._sizes, self.samples)
        self.stop = "" if self.stop == "skip" else self.stop
        self._begin()

    def book_of(self, epoch: int, generation: int) -> LeaseBook:
        """The book of an epoch.

        Raises:
            ProtocolError: that epoch is not under way, or the groups have changed since.
        """
        if generation != self.generation:
            raise ProtocolError(f"groups were formed again: generation {self.generation}, not {generation}")
        if self.book is None or self.book.plan.epoch != epoch:
            raise ProtocolError(f"epoch {epoch} is not under way")
        return self.book

    def holds(self, group: int, epoch: int) -> bool:
        """Whether that epoch is under way and the group draws from it."""
        return self.book is not None and self.book.plan.epoch == epoch and self.book.has(group)

    def check_trained(self, group: int, epoch: int, batches: int) -> None:
        """Raises `ProtocolError` unless `train` would accept this."""
        if self.book is not None and self.book.plan.epoch == epoch:
            self.book.check_trained(group, batches)

    def train(self, group: int, epoch: int, batches: int) -> None:
        """A push says how far its group has trained."""
        if self.book is not None and self.book.plan.epoch == epoch:
            self.book.train(group, batches)

    def wait(self, group: int, rank: int, question: Await) -> None:
        """A rank has trained what its group holds of the validation interval, and asks what is next."""
        book = self.book_of(question.epoch, question.generation)
        if book.has(group) or group not in self._sizes:  # else a peer was faster to say that the group leaves
            book.train(group, question.trained)
        self._waiting[rank] = (group, question)
        self._asked.add(rank)

    def new_spans(self, group: int, epoch: int, batches: int) -> tuple[tuple[int, int], ...]:
        """The batches of a group, one range each, that `train` would now add."""
        if self.book is None or self.book.plan.epoch != epoch:
            return ()
        return self.book.untrained_spans(group, batches)

    def leave(self, group: int, message: Leave) -> None:
        """A group leaves the epoch early, and perhaps ends the run for all."""
        self._dirty = True
        if message.stop:
            self.stop = self.stop or message.stop
        if self.book is None or message.epoch != self.book.plan.epoch:
            return
        if self.book.has(group):
            self.book.train(group, message.trained)
            self.book.evict(group)
        if self.stop:
            self.book.close()

    def evict(self, group: int) -> None:
        """A group is dead."""
        self._dirty = True
        self._sizes.pop(group, None)
        self._waiting = {rank: asked for rank, asked in self._waiting.items() if asked[0] != group}
        if self.book is not None and self.book.has(group):
            self.book.evict(group)

    def resolve_pending(self, all_answered: bool = True) -> list[tuple[int, str]]:
        """Verdicts that can now be given: rank and verdict.

        Args:
            all_answered: whether no group waits for the answer to a push. If one does, the epoch is not over yet: that
                the others are idle may be what the group's answer follows from.
        """
        if not self._waiting:
            return []
        given: list[tuple[int, str]] = []
        # A verdict can make another possible (an interval closes), so go on until nothing moves.
        while ready := self._next_verdict(all_answered):
            del self._waiting[ready[0]]
            given.append(ready)
            self._dirty = True
        self._dirty = False
        self._asked.clear()
        return given

    def _begin(self) -> None:
        self._waiting.clear()
        self._dirty = True
        self._validations = 0
        self._validated.clear()

    def _next_verdict(self, all_answered: bool) -> tuple[int, str] | None:
        """The first verdict that can be given."""
        state = _QuiescenceCheck(self, all_answered)
        # With a thousand groups, most questions at an epoch's end change nothing for ranks that wait already.
        all_again = self._dirty or self.stop or state.is_trained or state.all_wait
        ranks = sorted(self._waiting if all_again else self._asked & self._waiting.keys())
        verdicts = ((rank, self._verdict(rank, state)) for rank in ranks)
        return next((given for given in verdicts if given[1]), None)

    def _verdict(self, rank: int, state: _QuiescenceCheck) -> str:
        assert self.book is not None
        group, question = self._waiting[rank]
        if self._validated[rank] == self._validations:
            if self._has_more(group, question):
                self.book.draw(group, question.trained)
                return "more"
            if self.stop:
                return f"stop:{self.stop}"
            if state.is_trained:
                return "over" if state.all_answered else ""
            if not state.all_wait:
                return ""
            self.book.advance()
            self._validations += 1
        self._validated[rank] += 1
        return "validate"

    def _has_more(self, group: int, question: Await) -> bool:
        """Whether the group has something to train before the next validation."""
        assert self.book is not None
        if not self.book.has(group):
            return False
        interval = max(self.book.interval, question.interval)
        if held := self.book.drawn(group, question.trained):
            return held.interval <= interval
        return not self.book.is_drained and self.book.next_interval <= interval

    def all_wait(self) -> bool:
        """Whether every group waits, and none has anything to train before the next validation."""
        assert self.book is not None
        here = [asked for rank, asked in self._waiting.items() if self._validated[rank] == self._validations]
        if len(here) < len(self.book.groups):
            return False  # asked with every message, so the cheap answer first
        if any(self._has_more(*asked) for asked in here):
            return False
        return {group for group, _ in here} >= set(self.book.groups)


class _QuiescenceCheck:
    """What is the same for all that wait until the next verdict is given: read once, not once for each."""

    def __init__(self, epochs: Epochs, all_answered: bool) -> None:
        self._epochs, self.all_answered = epochs, all_answered

    @cached_property
    def is_trained(self) -> bool:
        """Whether every batch of the epoch is trained."""
        assert self._epochs.book is not None
        return self._epochs.book.is_finished

    @cached_property
    def all_wait(self) -> bool:
        """Whether every group waits."""
        return self._epochs.all_wait()
