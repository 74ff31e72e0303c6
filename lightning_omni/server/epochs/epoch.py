"""The current epoch: its lease book, the ranks that wait for their next step, requests to stop, and validations.

Rule: every member of a group gets the same decision on the same question, however late or often it asks. A decision
therefore depends on the decisions that the member has received and on the batches that its group has drawn, and
``more`` is a promise: the batch is drawn already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from lightning_omni.errors import ProtocolError
from lightning_omni.server.epochs.lease_book import LeaseBook
from lightning_omni.server.epochs.validation import ValidationBook
from lightning_omni.wire.journal import Journal
from lightning_omni.wire.messages import AskNext, Batch, EpochPlan, LeaveEpoch
from lightning_omni.wire.messages.data import STOPS, plan_difference


class Epochs(msgspec.Struct, dict=True):
    """The current epoch of a run, and its validations. The fields are the saved state.

    ``samples`` are those that each group was the first to train since groups were formed.
    """

    book: LeaseBook | None = None
    validations: ValidationBook = msgspec.field(default_factory=ValidationBook)
    stop: str = ""
    generation: int = 0
    samples: dict[int, int] = {}
    _sizes: dict[int, int] = {}
    _waiting: dict[int, tuple[int, AskNext]] = {}
    _validations: int = 0
    _validated: dict[int, int] = {}
    _told: dict[int, tuple[AskNext, str]] = {}  # each rank's last answered question

    def __post_init__(self) -> None:
        self.journal = Journal()
        self._asked: set[int] = set()  # ranks with questions that were not checked yet
        self._dirty = True  # whether the checked questions must be checked again
        self._saved: _Saved | None = None

    @property
    def progress(self) -> int:
        return self.book.trained if self.book else 0

    @property
    def trained_spans(self) -> tuple[tuple[int, int], ...]:
        return self.book.trained_spans if self.book else ()

    @property
    def called(self) -> tuple[int, int]:
        """Return the current or last epoch, or -1, and how often all groups validated in it since they were formed."""
        return (self.book.plan.epoch if self.book else -1), self._validations

    @property
    def plan(self) -> EpochPlan | None:
        return self.book.plan if self.book else None

    def form(self, group_sizes: dict[int, int], generation: int, keep_epoch: bool) -> None:
        self._sizes = dict(group_sizes)
        self.generation = generation
        self.stop = ""
        self.validations.form()
        self._begin()
        self.samples.clear()
        if self.book is not None and keep_epoch:
            self.book.regroup(self._sizes)
        else:
            self.book = None

    def join(self, group: int, ranks: Sequence[int]) -> None:
        """Add a group, which skips earlier validations of the current epoch."""
        self._sizes[group] = len(ranks)
        self._dirty = True
        for rank in ranks:
            self._validated[rank] = self._validations
        if self.book is not None:
            self.book.join(group, len(ranks))

    def open(self, plan: EpochPlan) -> None:
        if self.book is not None and self.book.plan.epoch == plan.epoch:
            if differing := plan_difference(self.book.plan, plan):
                words, theirs, own = differing
                raise ProtocolError(
                    f"ranks disagree on the data of epoch {plan.epoch}: {words}: {theirs} against {own}; every rank"
                    " must build the same dataset and dataloader"
                )
            return
        if self._waiting:
            raise ProtocolError(
                f"epoch {plan.epoch} cannot begin: ranks {sorted(self._waiting)} wait for another's end"
            )
        self.book = LeaseBook.open(plan, self._sizes)
        self.journal.note(self.open, plan)
        self.stop = "" if self.stop == "skip" else self.stop
        self._begin()

    def book_of(self, epoch: int, generation: int) -> LeaseBook:
        if generation != self.generation:
            raise ProtocolError(f"groups were formed again: generation {self.generation}, not {generation}")
        if self.book is None or self.book.plan.epoch != epoch:
            raise ProtocolError(f"epoch {epoch} is not under way")
        return self.book

    def holds(self, group: int, epoch: int) -> bool:
        return self.book is not None and self.book.plan.epoch == epoch and self.book.has(group)

    def check_trained(self, group: int, epoch: int, batches: int) -> None:
        if self.book is not None and self.book.plan.epoch == epoch:
            self.book.check_trained(group, batches)

    def train(self, group: int, epoch: int, batches: int, counts: bool = True) -> None:
        if self.book is not None and self.book.plan.epoch == epoch:
            self._train(self.book, group, batches, counts)
            self._dirty = self._dirty or not counts  # other groups may train these batches now
            self.journal.note(self.train, group, epoch, batches, counts)

    def _train(self, book: LeaseBook, group: int, batches: int, counts: bool = True) -> None:
        self.samples[group] = self.samples.get(group, 0) + book.train(group, batches, counts)

    def draw(self, group: int, number: int) -> list[Batch]:
        assert self.book is not None
        self._dirty = self._dirty or not self.book.has_begun(group)  # batches kept for it may go to others now
        batches = self.book.draw(group, number)
        self.journal.note(self.draw, group, number)
        return batches

    def repeated_decision(self, rank: int, question: AskNext) -> str:
        asked, decision = self._told.get(rank, (None, ""))
        return decision if asked == question else ""

    def wait(self, group: int, rank: int, question: AskNext) -> None:
        book = self.book_of(question.epoch, question.generation)
        if book.has(group) or group not in self._sizes:  # else a peer's `LeaveEpoch` arrived first
            self._train(book, group, question.trained)
        self.journal.note(self.wait, group, rank, question)  # after the checks, so that replay cannot fail
        self._waiting[rank] = (group, question)
        self._asked.add(rank)

    def new_spans(self, group: int, epoch: int, batches: int) -> tuple[tuple[int, int], ...]:
        if self.book is None or self.book.plan.epoch != epoch:
            return ()
        return self.book.untrained_spans(group, batches)

    def leave(self, group: int, message: LeaveEpoch) -> None:
        if message.stop not in STOPS:
            raise ProtocolError(f"a group leaves an epoch with stop={message.stop!r}: there are {STOPS}")
        if self.holds(group, message.epoch):
            self.check_trained(group, message.epoch, message.trained)
        self.journal.note(self.leave, group, message)
        self._dirty = True
        if message.stop:
            self.stop = self.stop or message.stop
        if self.book is None or message.epoch != self.book.plan.epoch:
            return
        if self.book.has(group):
            self._train(self.book, group, message.trained)
            self.book.evict(group)
        if self.stop:
            self.book.close()

    def evict(self, group: int) -> None:
        self._dirty = True
        self.validations.evict(group)
        self._sizes.pop(group, None)
        self._waiting = {rank: asked for rank, asked in self._waiting.items() if asked[0] != group}
        if self.book is not None and self.book.has(group):
            self.book.evict(group)

    def resolve_pending(self, all_answered: bool = True) -> list[tuple[int, str]]:
        """Return the decisions that are possible now: rank and decision.

        Unless ``all_answered``, the epoch is not over: an answer may depend on the other groups being idle.
        """
        if not self._waiting:
            return []
        given: list[tuple[int, str]] = []
        # A decision can enable another one (an interval closes), so repeat until none is left.
        while ready := self._next_decision(all_answered):
            _, question = self._waiting.pop(ready[0])
            self._told[ready[0]] = question, ready[1]
            given.append(ready)
            self._dirty = True
        self._dirty = False
        self._asked.clear()
        if given:
            self.journal.note(self.resolve_pending, all_answered)
        if any(decision.startswith(("over", "stop")) for _, decision in given):
            self.journal.is_due = True  # samples of an epoch that has ended are not dealt out again
        return given

    # --- Saved state --------------------------------------------------------------------------------------------------

    def load(self, state: bytes) -> None:
        saved = msgspec.msgpack.decode(state, type=Epochs)
        for name in self.__struct_fields__:
            setattr(self, name, getattr(saved, name))
        self._saved = _Saved(self.plan, self.trained_spans, dict(self.samples))
        self._dirty = True

    def go_back(self) -> None:
        """Discard the training since the state was saved: its batches return to the pool.

        A group keeps the batches that it has drawn and not trained.
        """
        self.validations.go_back()
        if self.book is None or self._saved is None:
            return
        is_same = self._saved.plan == self.plan
        self.book.go_back(self._saved.trained if is_same else self.book.plan.trained)
        self.samples = dict(self._saved.samples)
        if self.stop:
            self.book.close()
        self._dirty = True

    def _begin(self) -> None:
        self._waiting.clear()
        self._dirty = True
        self._validations = 0
        self._validated.clear()

    def _next_decision(self, all_answered: bool) -> tuple[int, str] | None:
        assert self.book is not None
        is_trained, all_wait = self.book.is_finished, self.all_wait()
        # With a thousand groups, most questions at an epoch's end change nothing for the waiting ranks.
        all_again = self._dirty or self.stop or is_trained or all_wait
        ranks = sorted(self._waiting if all_again else self._asked & self._waiting.keys())
        decisions = ((rank, self._decide(rank, is_trained, all_wait, all_answered)) for rank in ranks)
        return next((given for given in decisions if given[1]), None)

    def _decide(self, rank: int, is_trained: bool, all_wait: bool, all_answered: bool) -> str:
        assert self.book is not None
        group, question = self._waiting[rank]
        if self._validated.get(rank, 0) == self._validations:
            if self._has_more(group, question):
                self.book.deal(group, question.trained)
                return "more"
            if self.stop and not self._is_called_over:
                return f"stop:{self.stop}"
            if is_trained:
                return self._over if all_answered else ""
            if not all_wait:
                return ""
            self.book.advance()
            self._validations += 1
        self._validated[rank] = self._validated.get(rank, 0) + 1
        return "validate"

    @property
    def _over(self) -> str:
        assert self.book is not None
        return "over:validate" if self.book.has_point_after(self.book.interval) else "over"

    @property
    def _is_called_over(self) -> bool:
        """Return whether a rank was sent the end of this epoch."""
        plan = self.plan
        return plan is not None and any(
            decision.startswith("over") and (asked.epoch, asked.generation) == (plan.epoch, self.generation)
            for asked, decision in self._told.values()
        )

    def _has_more(self, group: int, question: AskNext) -> bool:
        assert self.book is not None
        if not self.book.has(group):
            return False
        interval = max(self.book.interval, question.interval)
        if held := self.book.drawn(group, question.trained):
            return held.interval <= interval
        return self.book.has_free(group) and self.book.next_interval <= interval

    def all_wait(self) -> bool:
        """Return whether every group waits, without a batch to train before the next validation."""
        assert self.book is not None
        here = [asked for rank, asked in self._waiting.items() if self._validated.get(rank, 0) == self._validations]
        if len(here) < len(self.book.groups):
            return False  # called for every message, so the cheap test is first
        if any(self._has_more(*asked) for asked in here):
            return False
        return {group for group, _ in here} >= set(self.book.groups)


class _Saved(NamedTuple):
    plan: EpochPlan | None
    trained: tuple[tuple[int, int], ...]
    samples: dict[int, int]
