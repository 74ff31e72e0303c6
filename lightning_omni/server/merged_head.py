"""The service for merged heads: gradients are applied where they are computed."""

from __future__ import annotations

from collections.abc import Callable

from lightning_omni.errors import OmniError, ProtocolError
from lightning_omni.server.parameters.store import HeadRequest, ServedHead
from lightning_omni.server.replication import refusal_of
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Out, Payload, Sender, Service, as_tensor
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import pack, unpack


class MergedHeadService(Service):
    """The service that grants exclusive access to the merged heads; ``clock`` times each access."""

    def __init__(self, run: RunContext, clock: Callable[[], float]) -> None:
        self._roster, self._store, self._events = run.roster, run.store, run.events
        self._clock = clock

    def evict(self, group: int, lost: bool) -> list[Out]:
        out: list[Out] = []
        for number, head in self._store.heads:
            head.forget(group)
            out += self._serve(number)
        return out

    def check_head(self, sender: Sender, message: m.HeadForward | m.HeadBackward) -> int:
        if isinstance(message, m.HeadForward) and message.exclusive:
            self._roster.formed.check_leads(sender.rank, sender.group)
        self._store.head(message.optimizer)
        return self.check_packed(sender, message)

    def forward(self, sender: Sender, message: m.HeadForward, payload: Payload) -> list[Out]:
        head = self._store.head(message.optimizer)
        # The connection owns the memory, and sends nothing else before the answer.
        request = HeadRequest(sender.group, sender.peer, message, unpack(message.packed, as_tensor(payload)))
        if not message.exclusive:
            return [self._output(head, request)]
        self._roster.formed.check_leads(sender.rank, sender.group)
        head.add_request(request)
        return self._serve(message.optimizer)

    def backward(self, sender: Sender, message: m.HeadBackward, payload: Payload) -> list[Out]:
        head, group, number = self._store.head(message.optimizer), sender.group, message.optimizer
        spans = self._events.new_spans(group, message)
        try:
            of_output = unpack(message.packed, as_tensor(payload))
            gradients, read_at, applied = head.backward(group, message, of_output, number)
        except ProtocolError as error:
            head.forget(group)
            return [Out(sender.peer, m.DATA, refusal_of(error)), *self._serve(number)]
        self._events.note(
            "push",
            group,
            number,
            read_at=read_at,
            refused=not applied,
            epoch=message.epoch,
            spans=spans[-1:],
            hyperparameters=message.hyperparameters,
            note=message.clip,
        )
        head.release(self._clock())
        packed, buffer = pack(gradients)
        answer = m.HeadGradients(
            packed=packed,
            nbytes=buffer.numel(),
            clock=head.master.clock,
            applied=applied,
            refused_in_row=head.counts.refused_in_row[group],
        )
        return [Out(sender.peer, m.DATA, answer, (buffer,)), *self._serve(number)]

    def release(self, sender: Sender, message: m.HeadRelease, payload: Payload) -> list[Out]:
        self._store.head(message.optimizer).forget(sender.group)
        return [Out(sender.peer, m.DATA, m.HeadReleased()), *self._serve(message.optimizer)]

    def _serve(self, number: int) -> list[Out]:
        head, out = self._store.head(number), []
        while (request := head.grant_access(self._clock())) is not None:
            out.append(self._output(head, request))
        return out

    def _output(self, head: ServedHead, request: HeadRequest) -> Out:
        try:
            packed, buffer = pack(head.forward(request))
        except OmniError as error:
            if request.message.exclusive:
                head.forget(request.group)
            return Out(request.peer, m.DATA, refusal_of(error))
        return Out(request.peer, m.DATA, m.HeadOutput(packed=packed, nbytes=buffer.numel()), (buffer,))
