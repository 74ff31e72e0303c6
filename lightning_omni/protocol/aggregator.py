"""An aggregator: it sums the pushes of groups and sends each sum to the server as one. It holds no weights.

The server sends it the groups and their waiting states (`aggregators`). The aggregator refuses a push that it cannot
sum (not finite, or of an unknown group) with the code `DIRECTLY`, and the group then pushes to the server. So the
server alone decides which pushes count.

Rule 1: a push is answered once: with the server's answer, or with `DIRECTLY`.
Rule 2: if groups wait for each other, a sum is sent when no group that pushes here is computing: each has pushed, waits
for something else, or is gone. Otherwise no group waits for a slower one: a sum is sent once the one before was
answered, and includes all pushes since.
Rule 3: the push of a dead group is removed from a sum that was not sent yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from lightning_omni.errors import MalformedMessage, ProtocolError, Refused
from lightning_omni.methods import Barrier, Method
from lightning_omni.methods.totals import Total
from lightning_omni.protocol import messages as m
from lightning_omni.protocol import shard_messages as sm
from lightning_omni.protocol import wire_format
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.service import Out, Payload, Peer, Sender, as_tensor
from lightning_omni.protocol.shard import is_finite
from lightning_omni.protocol.shard_servers import COORDINATOR, OneServer
from lightning_omni.protocol.wire_format import RAW, Memory, WireFormat

DIRECTLY = "directly"
"""Code of a refusal: the group must send this push to the server itself."""


@dataclass
class _Held:
    """A push without an answer yet.

    Attributes:
        peer: connection that waits for the answer.
        push: the message.
        payload: its encoded tensors, in memory that the connection keeps until the answer.
        sum: number of the sum that contains it; 0 before that is sent.
    """

    peer: Peer
    push: m.PushMessage
    payload: Tensor
    sum: int = 0


@dataclass
class _Plan:
    """The groups and their settings, as the server has sent them."""

    method: Method
    pushes: WireFormat
    leaders: dict[int, sm.Leader]
    layouts: tuple[Layout, ...]

    @property
    def is_barrier(self) -> bool:
        return self.method.side is not None and issubclass(self.method.side, Barrier)

    @property
    def most(self) -> int:
        """Return the largest number of pushes in one sum."""
        return self.method.most_added(len(self.leaders))

    def layout(self, push: m.PushMessage) -> Layout:
        """Return the layout of all tensors that a push may contain."""
        return self.layouts[push.optimizer].fragment(push.part, self.method.fragments)


@dataclass
class _Batch:
    """A sum under construction: its groups in order, and the total so far."""

    groups: list[int] = field(default_factory=list)
    total: Total = field(default_factory=Total)


class Aggregator(OneServer):
    """The state machine of an aggregator."""

    number = 1  # another server sends the commands

    def __init__(self) -> None:
        self._count_heard = self._sums = 0
        self._out: list[Out] = []
        self._memory, self._coded = Memory(), Memory()
        self.watch(lambda rank: False)

    def watch(self, is_attached: Callable[[int], bool]) -> None:
        """Reset for a new run.

        Args:
            is_attached: returns whether a rank has a data connection to this aggregator.
        """
        self._is_attached = is_attached
        self._plan: _Plan | None = None
        self._idle: set[int] = set()
        self._held: dict[int, _Held] = {}
        self._batches: dict[tuple[int, int], _Batch] = {}  # by optimizer and fragment

    # --- Commands of the server --------------------------------------------------------------------------------------

    def told(self, message: sm.Told) -> list[Out]:
        """Process a command of the server."""
        match message:
            case sm.Gather():
                return self._gather(message)
            case sm.Idle():
                self._idle.add(message.rank)
            case sm.Resume():
                self._idle.discard(message.rank)
            case sm.Lose():
                self._drop(message.rank)
            case _:
                raise MalformedMessage(f"{type(message).__name__} is nothing that an aggregator is told to do")
        return self._send_due()

    def _gather(self, message: sm.Gather) -> list[Out]:
        out = self._refuse([group for group, held in self._held.items() if not held.sum], "other groups take part now")
        self._batches.clear()
        leaders = {leader.group: leader for leader in message.leaders}
        incarnations = {group: leader.incarnation for group, leader in leaders.items()}
        self._held = {  # groups formed before receive no answer any more
            group: held for group, held in self._held.items() if incarnations.get(group) == held.push.incarnation
        }
        self._plan = _Plan(
            m.method_from_wire(message.method),
            wire_format.from_wire(message.wire_format).pushes,
            leaders,
            message.layouts,
        )
        return out

    def _drop(self, rank: int) -> None:
        plan = self._plan
        for group in [] if plan is None else [each for each, leader in plan.leaders.items() if leader.rank == rank]:
            assert plan is not None
            del plan.leaders[group]
            held = self._held.pop(group, None)
            if held is None or held.sum:
                continue
            key = held.push.optimizer, held.push.fragment
            batch = self._batches.pop(key)
            for other in batch.groups:
                if other != group:  # rebuild the sum without the dead group
                    self._add(plan, other)

    # --- Pushes ------------------------------------------------------------------------------------------------------

    def check_push(self, sender: Sender, message: m.PushMessage) -> int:
        """Return the size of a push in bytes.

        Raises:
            Refused: the group must send this push to the server itself.
        """
        try:
            plan = self._plan_for(sender.rank, message)
            layout = plan.layout(message)
            if len(message.present) != len(layout.specs):
                raise MalformedMessage(f"{len(message.present)} parameters came, {len(layout.specs)} were expected")
            wire_format.check_size(plan.pushes, message.nbytes, layout.subset(message.present))
        except ProtocolError as error:
            raise Refused(DIRECTLY, f"{error}: push to the server itself") from error
        return message.nbytes

    def _plan_for(self, rank: int, message: m.PushMessage) -> _Plan:
        if self._plan is None:
            raise MalformedMessage("no groups are known here")
        plan, group = self._plan, self._group_of(rank)
        if group is None or plan.leaders[group].incarnation != message.incarnation or message.sequence < 1:
            raise MalformedMessage(f"rank {rank} leads no group that is known here")
        if group in self._held:
            raise MalformedMessage("a push of this group waits already")
        if not plan.most:
            raise MalformedMessage("the method needs each push by itself")
        if not 0 <= message.optimizer < len(plan.layouts) or not plan.layouts[message.optimizer].specs:
            raise MalformedMessage(f"there is no optimizer {message.optimizer} to push to")
        of = plan.method.fragments
        if message.layout != plan.layouts[message.optimizer].version:
            raise MalformedMessage("the parameters have changed")
        if not (message.fragment == -1 if of == 1 else 0 <= message.fragment < of):
            raise MalformedMessage(f"there is no fragment {message.fragment} of {of}")
        return plan

    def _group_of(self, rank: int) -> int | None:
        leaders = self._plan.leaders.values() if self._plan is not None else ()
        return next((leader.group for leader in leaders if leader.rank == rank), None)

    def push(self, sender: Sender, message: m.PushMessage, payload: Payload) -> list[Out]:
        """Add a group's push to a sum; the group is answered after the server has answered the sum."""
        self.check_push(sender, message)
        group, plan = self._group_of(sender.rank), self._plan
        assert plan is not None
        assert group is not None
        self._held[group] = _Held(sender.peer, message, as_tensor(payload))
        try:
            self._add(plan, group)
        except ProtocolError as error:
            del self._held[group]
            raise Refused(DIRECTLY, f"{error}: push to the server itself") from error
        self._idle.discard(sender.rank)
        return self._send_due()

    def _add(self, plan: _Plan, group: int) -> None:
        held = self._held[group]
        layout = plan.layout(held.push).subset(held.push.present)
        flat = wire_format.decode(plan.pushes, held.payload, layout, self._memory)
        if not is_finite(layout, flat):
            raise MalformedMessage("it is not finite")
        views = iter(layout.views(flat))
        batch = self._batches.setdefault((held.push.optimizer, held.push.fragment), _Batch())
        batch.total.add([next(views) if there else None for there in held.push.present])
        batch.groups.append(group)

    # --- Sums --------------------------------------------------------------------------------------------------------

    def _send_due(self) -> list[Out]:
        if self._plan is None:
            return []
        plan = self._plan
        return [
            self._send(plan, key)
            for key, batch in list(self._batches.items())
            if len(batch.groups) >= plan.most or (self._computing == 0 if plan.is_barrier else self._is_free(key[0]))
        ]

    @property
    def _computing(self) -> int:
        """Return the number of groups that are going to push here."""
        assert self._plan is not None
        return sum(
            group not in self._held and leader.rank not in self._idle and self._is_attached(leader.rank)
            for group, leader in self._plan.leaders.items()
        )

    def _is_free(self, optimizer: int) -> bool:
        """Return whether no sum awaits its answer."""
        return not any(held.sum and held.push.optimizer == optimizer for held in self._held.values())

    def _send(self, plan: _Plan, key: tuple[int, int]) -> Out:
        batch = self._batches.pop(key)
        self._sums += 1
        parts = []
        for group in batch.groups:
            self._held[group].sum = self._sums
            parts.append(sm.SummedPush(group, self._held[group].push))
        payload = RAW.encode(batch.total.take(), plan.layout(parts[0].push), {}, self._coded).payload
        message = sm.Sum(number=self._sums, optimizer=key[0], parts=tuple(parts), nbytes=payload.numel())
        return Out(COORDINATOR, m.DATA, message, (payload,))

    def answered(self, message: m.Message, payload: Tensor) -> list[Out]:
        """Process the server's answer to a sum."""
        match message:
            case sm.Summed():
                out = [each for answer in message.answers for each in self._hand_on(answer, payload)]
            case sm.SumRefused():
                groups = [group for group, held in self._held.items() if held.sum == message.number]
                out = self._refuse(groups, message.reason)
            case m.RefusedMessage():
                out = self._refuse([group for group, held in self._held.items() if held.sum], message.reason)
            case _:
                raise MalformedMessage(f"{type(message).__name__} answers no sum")
        return out + self._send_due()

    def _hand_on(self, answered: sm.Answered, payload: Tensor) -> list[Out]:
        held = self._held.get(answered.group)
        if held is None or (held.push.incarnation, held.push.sequence) != (answered.incarnation, answered.sequence):
            return []  # the group is gone, or was sent `DIRECTLY`
        del self._held[answered.group]
        return [Out(held.peer, m.DATA, answered.answer, (payload,) if answered.answer.nbytes else ())]

    def _refuse(self, groups: list[int], reason: str) -> list[Out]:
        return [
            Out(self._held.pop(group).peer, m.DATA, m.RefusedMessage(code=DIRECTLY, reason=reason)) for group in groups
        ]

    # --- The server's interface --------------------------------------------------------------------------------------

    def hello(self, sender: Sender, message: m.Hello | sm.ShardHello, payload: Payload) -> list[Out]:
        """Refuse a rank or server that takes this aggregator for the server."""
        raise Refused(
            "upstream", "this is an aggregator: give the address of the server that it adds up for (its --upstream)"
        )

    def done(self) -> None:
        self._count_heard += 1

    def report(self) -> None:
        """Send the number of processed commands to the server."""
        self._out.append(Out(COORDINATOR, m.CONTROL, sm.ShardHeard(count=self._count_heard)))

    def tick(self, now: float) -> list[Out]:
        self.report()
        return []

    def fail(self, reason: str) -> None:
        """Report to the server that this aggregator cannot continue."""
        self._out.append(Out(COORDINATOR, m.CONTROL, sm.ShardFailed(reason=reason)))

    def drain(self) -> list[Out]:
        out, self._out = self._out, []
        return out
