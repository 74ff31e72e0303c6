"""Evaluations: a group takes a validation on, says what came of it, and all ranks hear that."""

from __future__ import annotations

from lightning_omni.errors import MalformedMessage
from lightning_omni.methods import Method
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.codec import Packed, check_specs
from lightning_omni.protocol.epochs import Epochs
from lightning_omni.protocol.roster import Roster
from lightning_omni.protocol.service import Out, Payload, Sender, Service, as_tensor
from lightning_omni.protocol.training import Training
from lightning_omni.topology import Topology

LARGEST = 256 << 20
"""Bytes of tensors in the result of one validation: metrics, and the buffers of the model that was evaluated."""


class Evaluations(Service):
    """Gives validations to groups.

    Args:
        roster: the ranks of the run.
        epochs: has the book of validations.
        training: is told which group pushes nothing meanwhile.
    """

    def __init__(self, roster: Roster, epochs: Epochs, training: Training) -> None:
        self._roster = roster
        self._epochs = epochs
        self._training = training

    def form(self, topology: Topology, method: Method, message: m.Form) -> None:
        self._epochs.validations.form()

    def evict(self, group: int, lost: bool) -> list[Out]:
        self._epochs.validations.evict(group)
        return []

    def claim(self, sender: Sender, message: m.ClaimValidation, payload: Payload) -> list[Out]:
        """A group passes a point at which the run is to be validated."""
        self._epochs.book_of(message.epoch, message.generation)
        number = self._epochs.validations.claim(sender.group, message.epoch, message.passed, self._roster.recorder)
        answer = Out(sender.peer, m.CONTROL, m.ValidationClaimed(number=number))
        return [answer, *(self._training.idle(sender.rank) if number else ())]

    def check_result(self, sender: Sender, message: m.PublishEvaluation) -> int:
        """Bytes of what came of a validation."""
        self._epochs.validations.check_evaluates(sender.group, message.number)
        if message.nbytes > LARGEST:
            raise MalformedMessage(f"{message.nbytes} bytes are announced, and at most {LARGEST} may come")
        check_specs(message.packed.specs, message.nbytes)
        return message.nbytes

    def publish(self, sender: Sender, message: m.PublishEvaluation, payload: Payload) -> list[Out]:
        """A group has evaluated."""
        result = message.packed, as_tensor(payload)
        self._epochs.validations.publish(sender.group, message.number, result)
        self._training.resume(sender.rank)
        return [Out(sender.peer, m.DATA, m.EvaluationPublished())]

    def ask(self, sender: Sender, message: m.AskValidations, payload: Payload) -> list[Out]:
        """A rank wants to know how many validations are complete."""
        book = self._epochs.validations
        return [Out(sender.peer, m.CONTROL, m.Validations(complete=book.complete, is_missed=book.is_missed))]

    def read(self, sender: Sender, message: m.ReadEvaluation, payload: Payload) -> list[Out]:
        """A rank wants to know what came of a validation."""
        book = self._epochs.validations
        packed, buffer = book.read(sender.rank, message.number) or (None, as_tensor(b""))
        book.forget(self._roster.live)
        answer = m.Evaluation(packed=packed or Packed(b"", ()), is_void=packed is None, nbytes=buffer.numel())
        return [Out(sender.peer, m.DATA, answer, (buffer,) if buffer.numel() else ())]
