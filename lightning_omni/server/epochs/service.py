"""The service for an epoch: leases of its samples, and validations while groups train."""

from __future__ import annotations

import msgspec

from lightning_omni.errors import MalformedMessage
from lightning_omni.methods import Method
from lightning_omni.server.epochs.validation import Evaluation
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Out, Payload, Sender, Service, as_tensor, bytes_of
from lightning_omni.server.training import Training
from lightning_omni.topology import Topology
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import Packed

LARGEST = 256 << 20
"""The most bytes of tensors in the result of one validation: metrics, and the buffers of the evaluated model."""


class EpochService(Service):
    def __init__(self, run: RunContext, training: Training) -> None:
        self._roster, self._epochs, self._events, self._journal = run.roster, run.epochs, run.events, run.journal
        self._training = training

    def form(self, topology: Topology, method: Method, message: m.FormGroups) -> None:
        sizes = {group: len(topology.members(group)) for group in topology.alive}
        self._epochs.form(sizes, message.generation, message.keep_epoch)

    def join(self, group: int, ranks: tuple[int, ...]) -> None:
        self._epochs.join(group, ranks)
        if self._roster.joining and self._epochs.book is not None:  # it holds a batch even before it requests one
            self._epochs.book.draw(group, 0)

    def evict(self, group: int, lost: bool) -> list[Out]:
        self._epochs.evict(group)
        return []

    def resolve_pending(self) -> list[Out]:
        out = []
        for rank, decision in self._epochs.resolve_pending(self._training.all_answered):
            out.append(Out(self._roster.members[rank].peer, m.CONTROL, m.Next(next=decision)))
            self._training.resume(rank)
        return out

    def state(self) -> bytes:
        return msgspec.msgpack.encode(self._epochs)

    def load(self, state: bytes) -> None:
        self._epochs.load(state)

    # --- Leases ------------------------------------------------------------------------------------------------------

    def open(self, sender: Sender, message: m.OpenEpoch, payload: Payload) -> list[Out]:
        self._epochs.open(message.plan)
        return [Out(sender.peer, m.CONTROL, m.EpochOpened(epoch=message.plan.epoch))]

    def draw(self, sender: Sender, message: m.DrawBatches, payload: Payload) -> list[Out]:
        book, group = self._epochs.book_of(message.epoch, message.generation), sender.group
        if not book.has(group):  # another member's `LeaveEpoch` arrived first
            return [Out(sender.peer, m.CONTROL, m.BatchesDrawn(number=message.number, batches=()))]
        spans = self._events.new_spans(group, message)
        self._epochs.train(group, message.epoch, message.trained)
        batches = self._epochs.draw(group, message.number)
        self._events.train(group, message.epoch, spans)
        return [Out(sender.peer, m.CONTROL, m.BatchesDrawn(number=message.number, batches=tuple(batches)))]

    def wait(self, sender: Sender, message: m.AskNext, payload: Payload) -> list[Out]:
        """Record that a group has trained its batches; the answer is its next step, once decided."""
        if decision := self._epochs.repeated_decision(sender.rank, message):
            return [Out(sender.peer, m.CONTROL, m.Next(next=decision))]
        spans = self._events.new_spans(sender.group, message)
        self._epochs.wait(sender.group, sender.rank, message)
        self._events.train(sender.group, message.epoch, spans)
        return self._training.idle(sender.rank)

    def leave(self, sender: Sender, message: m.LeaveEpoch, payload: Payload) -> list[Out]:
        spans = self._events.new_spans(sender.group, message)
        self._epochs.leave(sender.group, message)
        self._events.train(sender.group, message.epoch, spans)
        return [Out(sender.peer, m.CONTROL, m.EpochLeft())]

    # --- Validations -------------------------------------------------------------------------------------------------

    def read_result(self, rank: int, number: int) -> Evaluation | None:
        result = self._epochs.validations.read(rank, number)
        self._epochs.validations.forget(self._roster.live)
        self._journal.note(self.read_result, rank, number)
        return result

    def claim(self, sender: Sender, message: m.ClaimValidation, payload: Payload) -> list[Out]:
        self._epochs.book_of(message.epoch, message.generation)
        claim = sender.group, message.epoch, message.passed
        number = self._epochs.validations.claim(*claim)
        self._journal.note(self._epochs.validations.claim, *claim)
        answer = Out(sender.peer, m.CONTROL, m.ValidationClaimed(number=number))
        return [answer, *(self._training.idle(sender.rank) if number else ())]

    def check_result(self, sender: Sender, message: m.PublishEvaluation) -> int:
        self._epochs.validations.check_evaluates(sender.group, message.number)
        if message.nbytes > LARGEST:
            raise MalformedMessage(f"{message.nbytes} bytes are announced, and at most {LARGEST} may come")
        return self.check_packed(sender, message)

    def publish(self, sender: Sender, message: m.PublishEvaluation, payload: Payload) -> list[Out]:
        result = sender.group, message.number, (message.packed, bytes_of(payload))
        self._epochs.validations.publish(*result)
        self._journal.note(self._epochs.validations.publish, *result)
        self._training.resume(sender.rank)
        return [Out(sender.peer, m.DATA, m.EvaluationPublished())]

    def ask(self, sender: Sender, message: m.AskValidations, payload: Payload) -> list[Out]:
        book = self._epochs.validations
        return [Out(sender.peer, m.CONTROL, m.Validations(complete=book.complete, is_missed=book.is_missed))]

    def read(self, sender: Sender, message: m.ReadEvaluation, payload: Payload) -> list[Out]:
        packed, content = self.read_result(sender.rank, message.number) or (None, b"")
        answer = m.EvaluationResult(packed=packed or Packed(b"", ()), is_void=packed is None, nbytes=len(content))
        return [Out(sender.peer, m.DATA, answer, (as_tensor(content),) if content else ())]
