"""The service for data: it opens epochs, leases their samples, and answers groups that ask for the next step."""

from __future__ import annotations

from typing import Any

from lightning_omni.methods import Method
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Out, Payload, Sender, Service
from lightning_omni.server.training import Training
from lightning_omni.topology import Topology
from lightning_omni.wire import messages as m


class LeaseService(Service):
    """The service that leases samples.

    Args:
        run: the run.
        training: service that is notified of groups that wait.
    """

    def __init__(self, run: RunContext, training: Training) -> None:
        self._roster, self._epochs, self._events = run.roster, run.epochs, run.events
        self._training = training

    def form(self, topology: Topology, method: Method, message: m.FormGroups) -> None:
        sizes = {group: len(topology.members(group)) for group in topology.alive}
        self._epochs.form(sizes, message.generation, message.keep_epoch)

    def join(self, group: int, ranks: tuple[int, ...]) -> None:
        self._epochs.join(group, ranks)
        if self._roster.joining:  # the group holds a batch even before it requests one
            self._epochs.draw_first(group)

    def evict(self, group: int, lost: bool) -> list[Out]:
        self._epochs.evict(group)
        return []

    def resolve_pending(self) -> list[Out]:
        out = []
        for rank, decision in self._epochs.resolve_pending(self._training.all_answered):
            out.append(Out(self._roster.members[rank].peer, m.CONTROL, m.Next(next=decision)))
            self._training.resume(rank)
        return out

    def state(self) -> dict[str, Any]:
        return self._epochs.state()

    def load(self, state: dict[str, Any]) -> None:
        self._epochs.load(state)

    def open(self, sender: Sender, message: m.OpenEpoch, payload: Payload) -> list[Out]:
        """Open an epoch."""
        self._epochs.open(message.plan)
        return [Out(sender.peer, m.CONTROL, m.EpochOpened(epoch=message.plan.epoch))]

    def draw(self, sender: Sender, message: m.DrawBatches, payload: Payload) -> list[Out]:
        """Lease a group its next batches."""
        book, group = self._epochs.book_of(message.epoch, message.generation), sender.group
        if not book.has(group):  # another member's `Leave` arrived first
            return [Out(sender.peer, m.CONTROL, m.BatchesDrawn(number=message.number, batches=()))]
        spans = self._events.new_spans(group, message)
        batches = self._epochs.draw(group, message.number, message.trained)
        self._events.train(group, message.epoch, spans)
        return [Out(sender.peer, m.CONTROL, m.BatchesDrawn(number=message.number, batches=tuple(batches)))]

    def wait(self, sender: Sender, message: m.AskNext, payload: Payload) -> list[Out]:
        """Record that a group has trained its batches; it is answered once the next step is decided."""
        if decision := self._epochs.repeated_decision(sender.rank, message):
            return [Out(sender.peer, m.CONTROL, m.Next(next=decision))]
        spans = self._events.new_spans(sender.group, message)
        self._epochs.wait(sender.group, sender.rank, message)
        self._events.train(sender.group, message.epoch, spans)
        return self._training.idle(sender.rank)

    def leave(self, sender: Sender, message: m.LeaveEpoch, payload: Payload) -> list[Out]:
        """Remove a group from the epoch early, at its own request."""
        spans = self._events.new_spans(sender.group, message)
        self._epochs.leave(sender.group, message)
        self._events.train(sender.group, message.epoch, spans)
        return [Out(sender.peer, m.CONTROL, m.EpochLeft())]
