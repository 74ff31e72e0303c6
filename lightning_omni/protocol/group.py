"""A group's state machine: gradients and answers go in, what is to be done comes out. No sockets, clocks or threads.

The other half of `lightning_omni.protocol.server`. It drives the group sides of the method, one for each optimizer, and
keeps what the group knows of the run. What drives it (a rank of a real run, the simulator, a replay, a test) does what
comes out, and says what came of it::

    action = core.gradient(optimizer, gradient)
    while not isinstance(action, NextGradient):
        action = core.answer(optimizer, do(action))

Rule 1: one action of an optimizer at a time. Its tensors are live ones, and stand until it is answered.
Rule 2: every rank of a group drives a core of its own, with the same events. The leader alone speaks to the server and
to other groups, and shares what it hears; so all of them come to the same actions.
Rule 3: a push has a number, and keeps it until it is answered: `GroupCore.send` may be called again for the same `Ask`,
where the answer was lost, and returns the same. The server applies each number once.
Rule 4: what the method needs and the group can do by itself, a step of its own optimizer for instance, is done here.
Rule 5: an exchange of an optimizer may be under way while gradients are computed. Before its group waits for others, at
a synchronization point or for more data, before its parameters change and before other groups are formed, what drives
the core receives the answer and gives it to `GroupCore.apply_answer`; so at each of these moments nothing is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from lightning_omni.errors import NonFiniteGradients, ProtocolError
from lightning_omni.methods import Method
from lightning_omni.methods.contract import (
    Answer,
    Exchange,
    Fetch,
    Gradient,
    GroupSide,
    Need,
    NextGradient,
    Publish,
    ReadInbox,
    ReadPeer,
    Receive,
    Send,
    SendPeer,
    Step,
    StepTime,
    Tensors,
)
from lightning_omni.methods.overlap import overlapped
from lightning_omni.methods.replica import Pulled, Replica
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.lessee import Lessee
from lightning_omni.protocol.split import Split
from lightning_omni.protocol.wire_format import (
    RAW,
    Encoded,
    Memory,
    State,
    WireFormat,
    state_of_fragment,
    with_fragment,
)
from lightning_omni.topology import GroupId


@dataclass(frozen=True)
class Average:
    """The mean of all groups' own weights, these among them: what methods without master weights are evaluated by.

    Attributes:
        tensors: this group's; None for those that are agreed, as the master weights are.
    """

    tensors: Tensors


class Ask(NamedTuple):
    """Ask the server, and answer with what `GroupCore.receive` makes of its answer.

    Attributes:
        optimizer: which of the model's optimizers.
        need: what the method wants, or a synchronization point.
        epoch: whose data is leased; -1 if none is.
        trained: batches of it that are trained with this.
        waits: whether for the server's answer. If not, send it and answer None: `Receive` will ask for what it brings.
    """

    optimizer: int
    need: Exchange | Fetch | Average
    epoch: int
    trained: int
    waits: bool = True

    @property
    def tensors(self) -> Tensors:
        """What is to go with the message."""
        return () if isinstance(self.need, Fetch) else self.need.tensors

    @property
    def pulls(self) -> bool:
        """Whether the answer brings tensors."""
        return not isinstance(self.need, Exchange) or self.need.pull

    @property
    def fragment(self) -> int | None:
        """Which fragment is pushed and answered; None for all parameters."""
        return self.need.fragment if isinstance(self.need, Exchange) else None


class Outgoing(NamedTuple):
    """What the leader sends to the server, from `GroupCore.send`.

    Attributes:
        message: the message.
        payload: of a push, its tensors in the run's wire format.
    """

    message: m.PushMessage | m.FetchMessage | m.AverageMessage | m.Seed | m.TakeSnapshot
    payload: Tensor | None = None


Action = NextGradient | Ask | Receive | Publish | SendPeer | ReadPeer | ReadInbox
"""What is to be done: a gradient computed, the server asked, or other groups spoken to, as the method's needs say."""


@dataclass
class LastAnswer:
    """What the server's last answer says of the run.

    Attributes:
        staleness: of the push that was answered; -1 for a fetch.
        applied: whether that push was applied.
        progress: positions of the epoch trained by all groups.
        stop: as in `lightning_omni.protocol.messages.Leave`.
        refused_in_row: pushes of this group that were refused in a row, this one among them.
        repeated: whether that push was counted when it came the first time, and its answer is lost.
        validations: those of all groups that are complete.
        groups: how many take part, of a run that they join on their own; else 0.
    """

    staleness: int = -1
    applied: bool = True
    progress: int = 0
    stop: str = ""
    repeated: bool = False
    refused_in_row: int = 0
    validations: int = 0
    groups: int = 0

    @classmethod
    def of(cls, message: m.Weights) -> LastAnswer:
        """What a message of the server's says."""
        return cls(
            message.staleness,
            message.applied,
            message.progress,
            message.stop,
            message.repeated,
            message.refused_in_row,
            message.validations,
            message.groups,
        )


@dataclass
class _Half:
    """The group side of the method for one optimizer."""

    replica: Replica
    is_head: bool = False
    side: GroupSide | None = None
    parameters: int = 0
    need: Need = field(default_factory=NextGradient)
    seconds: float = 0.0
    steps: int = 0
    sent: State = field(default_factory=dict)
    """What the sender of its pushes remembers, as the last push that was applied has left it."""
    sending: State | None = None
    """The same if the push that is to be answered is applied, too."""
    under_way: Ask | None = None
    """What was said and not waited for."""
    outgoing: list[Outgoing] | None = None
    """How it was said, to each server: its tensors have moved on."""
    sequence: int = 0
    """Pushes answered in this incarnation of the group; the next one is that number and one more."""


class GroupCore:
    """A compute group, without what computes its gradients.

    Args:
        method: the method.
        wire_format: how its pushes are put into bytes.
        max_nonfinite_pushes: pushes with NaN or infinite numbers that are borne in a row; None bears any.
        overlap: whether exchanges travel while gradients are computed, if the method's optimizer steps at the server;
            see `lightning_omni.methods.overlap`.

    Attributes:
        identity: which group this is.
        data: what the group has drawn and trained of the epoch's data, if it is leased.
        last_answer: what the server's last answer says of the run.

    Example:
        >>> import torch
        >>> from lightning_omni.methods import AsyncSGD
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> replica = Replica([weight], torch.optim.SGD([weight], lr=0.1))
        >>> core = GroupCore(AsyncSGD())
        >>> core.attach(replica)
        0
        >>> ask = core.gradient(0, Gradient([torch.ones(2)], [{"lr": 0.1}]))
        >>> core.send(ask, Layout.of({"weight": weight.detach()}), Memory()).message.read_at
        0
        >>> core.answer(0, Pulled([torch.zeros(2)], clock=1))
        NextGradient()
        >>> weight.tolist()
        [0.0, 0.0]
    """

    def __init__(
        self,
        method: Method,
        wire_format: WireFormat = RAW,
        max_nonfinite_pushes: int | None = None,
        overlap: bool = False,
    ) -> None:
        self.method = method
        self.overlap = overlap
        self.wire_format = wire_format
        self._max_nonfinite_pushes = max_nonfinite_pushes
        self.identity = GroupId("")
        self.data: Lessee | None = None
        self.last_answer = LastAnswer()
        self._halves: list[_Half] = []

    def attach(self, replica: Replica, is_head: bool = False) -> int:
        """Takes in the weights of an optimizer. Returns its number.

        Args:
            replica: the weights.
            is_head: whether they are a merged head's, which the server steps by itself.
        """
        self._halves.append(_Half(replica, is_head))
        return len(self._halves) - 1

    def detach_all(self) -> None:
        """Forgets all optimizers; others may be attached."""
        self._halves.clear()

    def form(self, identity: GroupId | None = None) -> None:
        """Other groups stand: the method begins again, with what its replicas remember.

        What the sender remembers stays: the rank that forms groups sees to it that the new leaders have it.

        Args:
            identity: which group this is now, if it is another one: its pushes are counted from the first.
        """
        for half in self._halves:
            half.side = half.under_way = half.outgoing = None
            if identity is not None:
                half.sequence = 0
        self.identity = identity or self.identity

    # --- Events ------------------------------------------------------------------------------------------------------

    def gradient(self, optimizer: int, gradient: Gradient) -> Action:
        """The group has the gradient that it wanted."""
        if not isinstance(need := self.waits_for(optimizer), NextGradient):
            raise ProtocolError(f"a gradient of optimizer {optimizer}, whose group waits for {need}")
        if self.data is not None and (batch := self.data.current) is not None:
            gradient = msgspec.structs.replace(gradient, samples=batch.stop - batch.start)
        return self._go_on(optimizer, gradient)

    def answer(self, optimizer: int, answer: Answer) -> Action:
        """The last action of an optimizer is done, with this answer to the method's need."""
        half = self._halves[optimizer]
        if isinstance(half.need, Publish | SendPeer):
            answer = half.need.tensors
        if isinstance(answer, Pulled) and isinstance(half.need, (Exchange, Receive)):
            answer = self._arrived(half, answer)
        return self._go_on(optimizer, answer)

    def apply_answer(self, optimizer: int, pulled: Pulled) -> None:
        """What is under way was answered before the method asked for it: it applies that, and begins again."""
        half = self._halves[optimizer]
        if half.under_way is None:
            raise ProtocolError(f"an answer to optimizer {optimizer}, of which nothing is under way")
        self.method.apply_answer(half.replica, self._arrived(half, pulled))
        half.side = None

    def _arrived(self, half: _Half, answer: Pulled) -> Pulled:
        half.sequence += 1
        last = self.last_answer
        if half.sending is not None and (not answer.refused or (last.repeated and last.applied)):
            half.sent = half.sending  # else the state stands as it was before
        half.sending = half.under_way = half.outgoing = None
        if self.wire_format.answers == RAW or (self.method.answers_changes and not answer.refused):
            return answer
        return half.replica.exactly(answer, self.method.fragments)

    def receive(
        self, answer: LastAnswer, tensors: Sequence[Tensor], clock: int, note: float = 0.0, fragment: int | None = None
    ) -> Pulled:
        """The server has sent weights; what they are to the method, if it asked for them.

        Args:
            answer: what came with them.
            tensors: the weights, or none.
            clock: of the master weights.
            note: one number for the method.
            fragment: which fragment they are; None for all parameters.

        Raises:
            NonFiniteGradients: the server refused too many pushes in a row.
        """
        self.last_answer = answer
        self.check_nonfinite(answer.refused_in_row)
        # Where the answer was lost, groups with weights of their own begin again from the master weights.
        lost = answer.repeated and self.method.steps_at == "worker"
        return Pulled(tensors, clock, note, refused=lost or not answer.applied, fragment=fragment)

    def check_nonfinite(self, in_row: int) -> None:
        """So many of what this group pushed last were not finite, and none of them was applied.

        Raises:
            NonFiniteGradients: too many.
        """
        if self._max_nonfinite_pushes is not None and in_row >= self._max_nonfinite_pushes:
            raise NonFiniteGradients(
                f"what group {self.identity.name} pushed was NaN or infinite {in_row} times in a row, and none of"
                " it was applied: lower the learning rate, clip gradients (gradient_clip_val), or use"
                " precision='16-mixed' with its loss scaling; more groups need less momentum;"
                " max_nonfinite_pushes= sets how many are tolerated"
            )

    def step_took(self, optimizer: int, seconds: float) -> None:
        """A local step has taken so long, exchanges left out."""
        half = self._halves[optimizer]
        half.seconds += seconds
        half.steps += 1

    def steps_take(self, optimizer: int, seconds: float) -> None:
        """Local steps take so long, whatever `step_took` has said."""
        half = self._halves[optimizer]
        half.seconds, half.steps = seconds, 1

    @property
    def overlaps(self) -> bool:
        """Whether exchanges travel while gradients are computed, whatever the method is."""
        return self.overlap and self.method.steps_at == "server"

    # --- What is to be done ------------------------------------------------------------------------------------------

    def fetch(self, optimizer: int) -> Ask:
        """The server's weights, which the method did not ask for. `receive` the answer."""
        return Ask(optimizer, Fetch(), *self.place)

    def synchronize(self, optimizer: int) -> Ask:
        """A synchronization point of all groups: the weights to be evaluated. `receive` the answer.

        They are the master weights or, where groups have none in common, the mean of all groups' own.
        """
        half = self._halves[optimizer]
        if self.method.evaluated == "mean" and not half.is_head:
            return Ask(optimizer, Average(half.replica.offered(half.replica.weights())), *self.place)
        return self.fetch(optimizer)

    @property
    def place(self) -> tuple[int, int]:
        """Where the group is in the epoch's data: see `Lessee.place`."""
        return self.data.place if self.data is not None else (-1, 0)

    def send(self, ask: Ask, layout: Layout, memory: Memory) -> Outgoing:
        """What is said to the server for an `Ask`. By the leader alone; again, if the answer was lost.

        Args:
            ask: from this core.
            layout: of the optimizer's parameters.
            memory: may be used for the payload, and must not be for another one before this is answered.
        """
        half = self._halves[ask.optimizer]
        if ask is half.under_way and half.outgoing is not None:
            return half.outgoing[0]
        if isinstance(ask.need, Fetch):
            return Outgoing(m.FetchMessage(optimizer=ask.optimizer, epoch=ask.epoch, trained=ask.trained))
        if isinstance(ask.need, Average):
            return _mean_of(ask, ask.need.tensors, layout, memory)
        outgoing = self._push(ask, ask.need, self.encode(ask.optimizer, ask.need, layout, memory), layout)
        half.outgoing = None if ask.waits else [outgoing]
        return outgoing

    def send_parts(self, ask: Ask, split: Split, memories: Sequence[Memory]) -> list[Outgoing]:
        """What is sent to each of several servers that hold a share, as in `send`. The first one coordinates.

        Args:
            ask: from this core.
            split: how the optimizer's parameters are divided.
            memories: may be used for the payloads, one for each server, as in `send`.
        """
        half = self._halves[ask.optimizer]
        if ask is half.under_way and half.outgoing is not None:
            return half.outgoing
        apart = ask._replace(epoch=-1, trained=0)  # of the data the server that coordinates knows alone
        asks = [ask] + [apart] * (len(split.shares) - 1)
        if isinstance(ask.need, Fetch):
            return [self.send(each, split.layout, memories[0]) for each in asks]
        whole, split = split, split.fragment(ask.fragment, self.method.fragments)
        parts = split.parts(ask.need.tensors)
        if isinstance(ask.need, Average):
            wholes = zip(parts, split.shares, memories, strict=True)
            return [_mean_of(ask, part, share, memory) for part, share, memory in wholes]
        pushes = self.wire_format.pushes
        state = self._sender_state(half, ask.need, whole.layout)
        each_part = zip(parts, split.shares, split.sender_parts(state), memories, strict=True)
        encoded = [pushes.encode(part, share, state, memory) for part, share, state, memory in each_part]
        state = split.merged_sender([each.state for each in encoded]) if pushes.is_stateful else {}
        self._will_have_sent(half, ask.need, whole.layout, state)
        each_ask = zip(asks, encoded, split.shares, strict=True)
        outgoing = [self._push(each, ask.need, part, share) for each, part, share in each_ask]
        half.outgoing = None if ask.waits else outgoing
        return outgoing

    def _push(self, ask: Ask, need: Exchange, encoded: Encoded, layout: Layout) -> Outgoing:
        nbytes = encoded.payload.numel()
        numbers = ask.epoch, ask.trained, layout.version, self.identity.incarnation
        sequence = self._halves[ask.optimizer].sequence + 1
        message = m.PushMessage.of(need, ask.optimizer, encoded.present, nbytes, *numbers, sequence)
        return Outgoing(message, encoded.payload)

    def encode(self, optimizer: int, need: Exchange, layout: Layout, memory: Memory) -> Encoded:
        """A push in the run's wire format, as in `send`."""
        half, part = self._halves[optimizer], layout.fragment(need.fragment, self.method.fragments)
        state = self._sender_state(half, need, layout)
        encoded = self.wire_format.pushes.encode(need.tensors, part, state, memory)
        self._will_have_sent(half, need, layout, encoded.state)
        return encoded

    def _sender_state(self, half: _Half, need: Exchange, layout: Layout) -> State:
        """What the sender remembers of what is to be pushed."""
        if need.fragment is None:
            return half.sent
        return state_of_fragment(half.sent, layout, need.fragment, self.method.fragments)

    def _will_have_sent(self, half: _Half, need: Exchange, layout: Layout, state: State) -> None:
        """What the sender remembers of what is pushed, if it is applied."""
        if need.fragment is not None:
            state = with_fragment(half.sent, state, layout, need.fragment, self.method.fragments)
        half.sending = state

    def sequence(self, optimizer: int) -> int:
        """Pushes of an optimizer that the server has answered since the group has its incarnation."""
        return self._halves[optimizer].sequence

    def sender_state(self, optimizer: int) -> State:
        """What the sender of an optimizer's pushes remembers; of a leader only."""
        return self._halves[optimizer].sent

    def load_sender_state(self, optimizer: int, state: State) -> None:
        """Goes on from a `sender_state`."""
        self._halves[optimizer].sent = state

    def waits_for(self, optimizer: int) -> Need:
        """What the method waits for: the next gradient, or what it was not answered yet."""
        half = self._halves[optimizer]
        self._begin(half)
        return half.need

    def _begin(self, half: _Half) -> None:
        """A generator may be made again whenever it wants the next gradient: for other groups, or more parameters."""
        if half.side is None or half.parameters != len(half.replica.ordered):
            half.parameters = len(half.replica.ordered)
            side = self.method.group_side(half.replica)
            half.side = overlapped(side, half.replica) if self.overlaps else side
            half.need = next(half.side)

    def _as_peers_get(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Weights in the run's wire format, and back: what is sent is what both sides go on with."""
        pushes = self.wire_format.pushes
        if pushes == RAW:
            return weights
        layout = Layout.of({str(place): weight for place, weight in enumerate(weights)})
        payload = pushes.encode(weights, layout, {}, Memory()).payload
        return layout.views(pushes.decode(payload, layout, Memory()))

    def _go_on(self, optimizer: int, answer: Any) -> Action:
        """Drives the method to the next need that the group cannot answer by itself."""
        half = self._halves[optimizer]
        assert half.side is not None
        while True:
            need = half.need = half.side.send(answer)
            match need:
                case Step():
                    half.replica.step(need.gradient.tensors)
                    answer = None
                case StepTime():
                    answer = half.seconds / half.steps if half.steps else 0.0
                    half.seconds, half.steps = 0.0, 0
                case Exchange() | Fetch():
                    self._check_free(half, need)
                    return Ask(optimizer, need, *self.place)
                case Send():
                    self._check_free(half, need)
                    half.under_way = Ask(optimizer, need.exchange, *self.place, waits=False)
                    return half.under_way
                case Receive():
                    if half.under_way is None:
                        raise ProtocolError(f"{type(self.method).__name__} receives, and has sent nothing")
                    return need
                case Publish() | SendPeer():
                    answer = self._as_peers_get(need.tensors)
                    if not (isinstance(need, SendPeer) and need.group == half.replica.group):
                        half.need = msgspec.structs.replace(need, tensors=answer)
                        return half.need
                case NextGradient() | ReadPeer() | ReadInbox():
                    return need
                case _:
                    raise TypeError(f"{type(self.method).__name__} needs {need!r}, which is no need")

    def _check_free(self, half: _Half, need: Need) -> None:
        if half.under_way is not None:
            raise ProtocolError(
                f"{type(self.method).__name__} needs {type(need).__name__} while an exchange is under way; let it need"
                " Receive before"
            )


def _mean_of(ask: Ask, tensors: Tensors, layout: Layout, memory: Memory) -> Outgoing:
    encoded = RAW.encode(tensors, layout, {}, memory)
    absent = tuple(place for place, there in enumerate(encoded.present) if not there)
    nbytes = encoded.payload.numel()
    return Outgoing(m.AverageMessage(optimizer=ask.optimizer, nbytes=nbytes, absent=absent), encoded.payload)
