"""The epoch that is under way: its lease book, who waits at its end, and whether somebody called for a stop.

Rule: every member of a group gets the same verdict on the same question, however late it asks.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lightning_omni.errors import ProtocolError
from lightning_omni.protocol.leases import EpochPlan, LeaseBook
from lightning_omni.protocol.messages import Await, Leave


class Epochs:
    """Opens, watches and closes epochs."""

    def __init__(self) -> None:
        self.book: LeaseBook | None = None
        self.stop = ""
        self.generation = 0
        self._sizes: dict[int, int] = {}
        self._waiting: dict[int, tuple[int, Await]] = {}
        self._verdicts: dict[tuple[int, int, int], str] = {}

    @property
    def progress(self) -> int:
        """Positions of the epoch that are trained."""
        return self.book.trained if self.book else 0

    @property
    def trained_spans(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the epoch that are trained."""
        return self.book.trained_spans if self.book else ()

    @property
    def plan_fields(self) -> dict[str, Any] | None:
        """The plan of the epoch as plain data."""
        return msgspec.to_builtins(self.book.plan) if self.book else None

    def form(self, group_sizes: dict[int, int], generation: int, keep_epoch: bool) -> None:
        """Groups are formed, anew perhaps; what was out on lease goes back."""
        self._sizes = dict(group_sizes)
        self.generation = generation
        self.stop = ""
        self._waiting.clear()
        self._verdicts.clear()
        if self.book is not None and keep_epoch:
            self.book.regroup(self._sizes)
        else:
            self.book = None

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
        self.book = LeaseBook(plan, self._sizes)
        self._waiting.clear()
        self._verdicts.clear()

    def book_of(self, epoch: int, generation: int) -> LeaseBook:
        """The book of an epoch.

        Raises:
            ProtocolError: that epoch is not under way, or the groups have changed since.
        """
        if generation != self.generation:
            raise ProtocolError(f"groups were formed anew: generation {self.generation}, not {generation}")
        if self.book is None or self.book.plan.epoch != epoch:
            raise ProtocolError(f"epoch {epoch} is not under way")
        return self.book

    def train(self, group: int, epoch: int, batches: int) -> None:
        """A push says how far its group has trained."""
        if self.book is not None and self.book.plan.epoch == epoch:
            self.book.train(group, batches)

    def wait(self, group: int, rank: int, question: Await) -> None:
        """A rank has trained what its group holds of the stretch, and asks what is next."""
        book = self.book_of(question.epoch, question.generation)
        book.train(group, question.trained)
        self._waiting[rank] = (group, question)

    def leave(self, group: int, message: Leave) -> None:
        """A group leaves the epoch early, and perhaps ends the run for all."""
        if message.stop:
            self.stop = self.stop or message.stop
        if self.book is None or message.epoch != self.book.plan.epoch or group not in self.book.groups:
            return
        self.book.train(group, message.trained)
        self.book.retire(group)
        if self.stop:
            self.book.close()

    def retire(self, group: int) -> None:
        """A group is dead."""
        self._sizes.pop(group, None)
        self._waiting = {rank: asked for rank, asked in self._waiting.items() if asked[0] != group}
        if self.book is not None and group in self.book.groups:
            self.book.retire(group)

    def settle(self) -> list[tuple[int, str]]:
        """Verdicts that can now be given: rank and verdict."""
        given = []
        # A verdict can make another possible (a stretch closes), so go on until nothing moves.
        while ready := [(rank, verdict) for rank in sorted(self._waiting) if (verdict := self._verdict(rank))]:
            for rank, verdict in ready:
                del self._waiting[rank]
                given.append((rank, verdict))
        return given

    def _verdict(self, rank: int) -> str:
        assert self.book is not None
        group, question = self._waiting[rank]
        key = (group, question.trained, question.stretch)
        if key not in self._verdicts and (verdict := self._decide(group, question.stretch)):
            self._verdicts[key] = verdict
        return self._verdicts.get(key, "")

    def _decide(self, group: int, stretch: int) -> str:
        book = self.book
        assert book is not None
        if self.stop:
            return f"stop:{self.stop}"
        if stretch < book.stretch:  # the others were let through when the last of them came
            return "validate"
        if book.is_finished:
            return "over"
        if group in book.groups and not book.out(group) and not book.is_drained and book.next_stretch <= stretch:
            return "more"
        waiting = {g for g, asked in self._waiting.values() if asked.stretch == stretch}
        if waiting >= set(book.groups) and not any(book.out(g, stretch) for g in book.groups) and (
            book.is_drained or book.next_stretch > stretch or all(book.out(g) for g in book.groups)
        ):
            if book.is_drained and not any(book.out(g) for g in book.groups):
                return "over"
            book.stretch = stretch + 1
            return "validate"
        return ""
