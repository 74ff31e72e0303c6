"""Training: the merging of pushes and the answers to them. No group waits for an idle one."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_omni.errors import MalformedMessage, OmniError, ProtocolError, Refused, StepFailed
from lightning_omni.methods import Method, Reply
from lightning_omni.server.event_log import Kind
from lightning_omni.server.parameters.push_checks import Deliveries, Delivery, is_finite
from lightning_omni.server.parameters.served_parameters import ServedParameters
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Out, Payload, Peer, Sender, Service, as_tensor, bytes_of, nbytes_of
from lightning_omni.topology import Topology
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import Packed, check_specs, unpack
from lightning_omni.wire.formats.base import RAW, Memory, WireFormat, check_size, decode, from_wire

LARGEST_NOTED = 256 << 20
"""The most bytes of added parameters in the journal; larger ones are only saved with the state, which is then due."""


class Training(Service):
    """The service that merges and answers pushes.

    ``handled`` are the pushes of each group since groups were formed, ``pushes`` all of this run to this process.
    """

    def __init__(self, run: RunContext) -> None:
        self._roster, self._store, self._epochs = run.roster, run.store, run.epochs
        self._events, self._journal, self._replication = run.events, run.journal, run.replication
        self._deliveries = Deliveries()
        self._pending: dict[int, m.PushMessage] = {}  # group: the push that waits
        self._idle_elsewhere: set[int] = set()  # groups that wait with one optimizer's push, and idle at the others
        self._idle: set[int] = set()  # groups that wait for others, and not for the answer to a push
        self.handled: Counter[int] = Counter()
        self.pushes = 0
        self._wire_format: WireFormat = RAW
        self._memory = Memory()

    # --- Groups come and go ------------------------------------------------------------------------------------------

    def form(self, topology: Topology, method: Method, message: m.FormGroups) -> None:
        for served in self._store.all:
            served.change_method(method, topology.alive)
        self.apply_settings(message)
        self._events.form(topology.groups, message)
        self._pending.clear()
        self.handled.clear()
        self._deliveries.clear()
        self._idle_elsewhere.clear()
        self._idle.clear()

    def apply_settings(self, formed: m.FormGroups) -> None:
        wire_format = from_wire(formed.wire_format)
        self._wire_format = wire_format.pushes
        for _, served in self._store.pushed:
            served.answer_in(wire_format.answers)

    def join(self, group: int, ranks: tuple[int, ...]) -> None:
        for number, served in enumerate(self._store.all):
            served.method_side.join(group)
            if not served.is_head:
                self._events.note("join", group, number, groups=(ranks,))

    def evict(self, group: int, lost: bool) -> list[Out]:
        self._deliveries.forget(group)
        self._idle.discard(group)
        return self._notify_sides("evict", group, "retire" if lost else "leave")

    @property
    def all_answered(self) -> bool:
        return not any(group in self._roster.formed.alive for group in self._pending)

    @property
    def due(self) -> float:
        return min((served.method_side.due for _, served in self._store.pushed), default=math.inf)

    def set_time(self, now: float) -> None:
        for _, served in self._store.pushed:
            served.method_side.now = now

    def expire(self, now: float) -> list[Out]:
        if self.due <= now:
            self._replication.send_to_all(self.expire, now)
        out: list[Out] = []
        for number, served in self._store.pushed:
            if served.method_side.due <= now:
                try:
                    with torch.no_grad():
                        replies = served.method_side.expire()
                except OmniError as error:  # no group has asked, and none is to be answered
                    served.method_side.due = math.inf  # it would fail at once again, without end
                    raise StepFailed(str(error)) from error
                self._events.note("expire", -1, number)
                out += [self._answer(number, reply, only=len(replies) == 1) for reply in replies]
        return out

    def resolve_pending(self) -> list[Out]:
        out = []
        for number, served in enumerate(self._store.all):
            for group, good in served.averaged(self._waited_for(number)) if served.averaging else ():
                peer = self._roster.exchange_peer(group, self._replication.number)
                out.append(self._weights(peer, number, group, _master_weights(served, group), applied=good))
        return out

    def _waited_for(self, number: int) -> set[int]:
        """Return the groups whose own weights a mean needs.

        Those that are idle or average a later optimizer have the mean from an earlier server.
        """
        later = {group for served in self._store.all[number + 1 :] for group in served.averaging}
        return set(self._roster.formed.alive) - ((self._idle | later) - set(self._store.all[number].averaging))

    def state(self) -> dict[str, Any]:
        return {"handled": dict(self.handled), "deliveries": self._deliveries.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.handled = Counter(state["handled"])
        self._deliveries.load(state["deliveries"])

    # --- Messages ----------------------------------------------------------------------------------------------------

    def check_push(self, sender: Sender, message: m.PushMessage) -> int:
        layout = self._store.optimizer(message.optimizer).layout_of_push(sender.group, message)
        check_size(self._wire_format, message.nbytes, layout)
        return message.nbytes

    def check_counts(self, sender: Sender, message: m.PushMessage | m.FetchMessage) -> None:
        """Raise `ProtocolError` for batches that were not drawn; only the coordinating server has the draws."""
        is_told = isinstance(message, m.PushMessage) or self._epochs.holds(sender.group, message.epoch)
        if message.epoch >= 0 and is_told:
            self._epochs.check_trained(sender.group, message.epoch, message.trained)

    def push(self, sender: Sender, message: m.PushMessage, payload: Payload) -> list[Out]:
        """Merge a group's push to one optimizer; the method decides when it is answered."""
        group, number = sender.group, message.optimizer
        served = self._store.optimizer(number)
        if served.is_head:
            raise ProtocolError(f"optimizer {number} is a merged head; nothing is pushed to it")
        if (last := self._deliveries.check(group, self._roster.formed.identity(group), message)) is not None:
            return self._answer_again(sender, message, served, last)
        if message.epoch >= 0:
            self._epochs.check_trained(group, message.epoch, message.trained)
        layout = served.layout_of_push(group, message)
        tensors = decode(self._wire_format, as_tensor(payload), layout, self._memory)
        replies = served.push(group, message, tensors, layout, sender.finite)
        self.handled[group] += 1
        self.pushes += 1
        self._deliveries.count(group, message, applied=replies is not None)
        self._events.push(group, message, refused=replies is None, elsewhere=sender.elsewhere)
        if message.epoch >= 0:
            is_declined = replies is None and not served.counts.refused_in_row[group]
            self._epochs.train(group, message.epoch, message.trained, counts=not is_declined)
        if replies is None:
            if message.pull:
                served.method_side.fetched(group)
            parts = _pulled(served, Reply(group, -1), message)
            return [self._weights(sender.peer, number, group, parts, message, applied=False)]
        self._pending[group] = message
        out = [self._answer(number, reply, only=len(replies) == 1) for reply in replies]
        if group in self._pending and len(self._store.pushed) > 1:
            # Otherwise two groups with different orders of optimizers could wait for each other forever.
            self._idle_elsewhere.add(group)
            out += self._notify_sides("idle", group, "rest", but=number)
        return out

    def is_push_finite(self, sender: Sender, message: m.PushMessage, payload: Payload) -> bool:
        served = self._store.optimizer(message.optimizer)
        layout = served.layout_of_push(sender.group, message)
        return is_finite(layout, decode(self._wire_format, as_tensor(payload), layout, self._memory))

    def _answer_again(
        self, sender: Sender, message: m.PushMessage, served: ServedParameters, last: Delivery
    ) -> list[Out]:
        """Answer a repeated push; an answer that is still pending is sent once."""
        if not last.is_answered:
            return []
        served.method_side.fetched(sender.group)
        parts = _pulled(served, Reply(sender.group, -1), message)
        where = sender.peer, message.optimizer, sender.group
        return [self._weights(*where, parts, message, staleness=last.staleness, applied=last.applied, repeated=True)]

    def fetch(self, sender: Sender, message: m.FetchMessage, payload: Payload) -> list[Out]:
        served, group = self._store.optimizer(message.optimizer), sender.group
        if group >= 0:
            spans = self._events.new_spans(group, message)
            if self._epochs.holds(group, message.epoch):  # a group that has left reports nothing
                self._epochs.train(group, message.epoch, message.trained)
            served.method_side.fetched(group)
            self._events.note("fetch", group, message.optimizer, epoch=message.epoch, spans=spans)
        return [self._weights(sender.peer, message.optimizer, -1, _master_weights(served, group))]

    def check_average(self, sender: Sender, message: m.AverageMessage) -> int:
        layout = self._store.optimizer(message.optimizer).layout_of_average(sender.group, message.absent)
        check_size(RAW, message.nbytes, layout)
        return message.nbytes

    def average(self, sender: Sender, message: m.AverageMessage, payload: Payload) -> list[Out]:
        self._store.optimizer(message.optimizer).average(
            sender.group, as_tensor(payload), sender.finite, message.absent
        )
        return []

    def is_average_finite(self, sender: Sender, message: m.AverageMessage, payload: Payload) -> bool:
        served = self._store.optimizer(message.optimizer)
        return is_finite(served.layout_of_average(sender.group, message.absent), as_tensor(payload))

    def check_restructure(self, sender: Sender, message: m.Restructure) -> int:
        if self._replication.count > 1:
            raise Refused(
                "structure",
                "parameters and parameter groups cannot change in mid-run where several servers hold a partition each;"
                " use one server (Server(count=1))",
            )
        check_specs(message.packed.specs, message.nbytes)
        self._store.optimizer(message.optimizer).check_room(message.nbytes)
        return message.nbytes

    def restructure(self, sender: Sender, message: m.Restructure, payload: Payload) -> list[Out]:
        group, served = sender.group, self._store.optimizer(message.optimizer)
        tree = unpack(message.packed, as_tensor(payload))
        try:
            start = served.restructure(group, tree)
        except OmniError:
            raise
        except Exception as error:  # torch raises various errors on invalid groups and states
            raise MalformedMessage(f"no parameter groups: {type(error).__name__}: {error}") from error
        if self._journal.write is not None and message.nbytes <= LARGEST_NOTED:
            self._journal.note(self.restructure_again, group, message.optimizer, message.packed, bytes_of(payload))
        self._journal.is_due = True
        known = served.layout_of(group)
        self._events.note(
            "restructure",
            group,
            message.optimizer,
            parameters=tuple(spec.name for spec in known.specs[start:]),
            param_groups=tuple(tree["groups"]),
        )
        first = known.offsets[start] if start < len(known.specs) else known.nbytes
        rest = served.buffer[first : known.nbytes]
        answer = m.Restructured(optimizer=message.optimizer, layout=known.version, nbytes=rest.numel())
        return [Out(sender.peer, m.DATA, answer, (rest,))]

    def restructure_again(self, group: int, optimizer: int, packed: Packed, payload: bytes) -> None:
        self._store.optimizer(optimizer).restructure(group, unpack(packed, as_tensor(payload)))

    # --- Idle groups -------------------------------------------------------------------------------------------------

    def idle(self, rank: int) -> list[Out]:
        """Mark a leader's group as idle, and return the answers that waited for its pushes; ignore other ranks."""
        if not self._roster.formed.is_leader(rank):
            return []
        self._replication.send_to_all(self.idle, rank)
        self._idle.add(group := self._roster.formed.group_of(rank))
        return [*self._notify_sides("idle", group, "rest"), *self.resolve_pending()]

    def resume(self, rank: int) -> None:
        if self._roster.formed.is_leader(rank):
            self._replication.send_to_all(self.resume, rank)
            self._idle.discard(group := self._roster.formed.group_of(rank))
            self._resume_group(group)

    def _resume_group(self, group: int, but: int = -1) -> None:
        for number, served in self._store.pushed:
            if number != but:
                served.method_side.resume(group)
                self._events.note("resume", group, number)

    def _notify_sides(self, what: Literal["idle", "evict"], group: int, note: Kind, but: int = -1) -> list[Out]:
        out: list[Out] = []
        for number, served in self._store.pushed:
            if number == but:
                continue
            with torch.no_grad():
                replies: list[Reply] = getattr(served.method_side, what)(group)
            self._events.note(note, group, number)
            out += [self._answer(number, reply, only=False) for reply in replies]  # more may follow in this tick
        return out

    # --- Answers -----------------------------------------------------------------------------------------------------

    def _answer(self, number: int, reply: Reply, only: bool) -> Out:
        """Return the answer to a group's pending push; ``only`` if it is sent before another one is made."""
        peer = self._roster.exchange_peer(reply.group, self._replication.number)
        served, push = self._store.optimizer(number), self._pending.pop(reply.group, None)
        self._deliveries.answer(reply.group, number, reply.staleness)
        if reply.group in self._idle_elsewhere:
            self._idle_elsewhere.discard(reply.group)
            self._resume_group(reply.group, but=number)
        parts = _pulled(served, reply, push, copies=not only)
        return self._weights(peer, number, reply.group, parts, push, staleness=reply.staleness, note=reply.note)

    def _weights(
        self,
        peer: Peer,
        optimizer: int,
        group: int,
        parts: tuple[Payload, ...],
        push: m.PushMessage | None = None,
        *,
        staleness: int = -1,
        applied: bool = True,
        note: float = 0.0,
        repeated: bool = False,
    ) -> Out:
        """Return weights for a group, -1 for a fetch; ``push`` is the one that they answer, if any."""
        served = self._store.all[optimizer]
        message = m.Weights(
            optimizer=optimizer,
            clock=served.master.clock,
            staleness=staleness,
            applied=applied,
            refused_in_row=served.counts.refused_in_row[group],
            note=note,
            repeated=repeated,
            fragment=push.fragment if push is not None else -1,
            progress=self._epochs.progress,
            stop=self._epochs.stop,
            validations=self._epochs.validations.complete,
            nbytes=sum(map(nbytes_of, parts)),
            groups=len(self._roster.formed.alive) if self._roster.joining else 0,
        )
        return Out(peer, m.DATA, message, parts)


def _master_weights(served: ServedParameters, group: int) -> tuple[Tensor]:
    layout = served.layout_of(group)
    return (served.buffer if layout is served.layout else served.buffer[: layout.nbytes],)


def _pulled(
    served: ServedParameters, reply: Reply, push: m.PushMessage | None, copies: bool = False
) -> tuple[Payload, ...]:
    """Return the encoded tensors that answer a push; none if it requests none.

    ``copies`` is true if the next answer is made in the same memory before this one is sent.
    """
    if push is not None and not push.pull:
        return ()
    fragment = push.part if push is not None else None
    flat = served.payload_of(reply, fragment)
    if copies and flat is not served.buffer:
        flat = flat.clone()
    layout = served.layout_of(reply.group).fragment(fragment, served.method_side.method.fragments)
    return (served.as_bytes(flat if layout is served.layout else flat[: layout.nbytes], layout),)
