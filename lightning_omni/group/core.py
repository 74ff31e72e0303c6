"""A group's state machine: it converts gradients and answers into actions.

It drives the group sides of the method, one for each optimizer. A driver performs each action and reports its result::

    action = core.gradient(optimizer, gradient)
    while not isinstance(action, NextGradient):
        action = core.answer(optimizer, do(action))

Rule 1: each optimizer has one action at a time. The action's tensors are live, and stay unchanged until it is answered.
Rule 2: every rank of a group drives its own core with the same events. Only ranks that exchange (the leader; if the
model is sharded, one for each shard) communicate with servers and other groups; they pass the results on, so all
members arrive at the same actions.
Rule 3: a push keeps its number until it is answered. Until then, `GroupCore.send` returns the same messages for the
same `ServerRequest`.
Rule 4: needs of the method that the group can meet by itself, such as a step of its own optimizer, are met here.
Rule 5: an exchange may overlap the computation of gradients. The driver passes its answer to `GroupCore.apply_answer`
before the group waits for others, before parameters are added, and before other groups are formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from lightning_omni.errors import NonFiniteGradients, ProtocolError
from lightning_omni.group.leased_batches import LeaseClient
from lightning_omni.methods import Method
from lightning_omni.methods.async_sgd import AsyncSGD
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
from lightning_omni.methods.model.replica import Pulled, Replica
from lightning_omni.methods.overlap import overlapped
from lightning_omni.topology import GroupId
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import (
    RAW,
    Encoded,
    Memory,
    State,
    WireFormat,
    state_of_fragment,
    with_fragment,
    zeros_on,
)
from lightning_omni.wire.layout import Layout
from lightning_omni.wire.partition import Partition


@dataclass(frozen=True)
class Average:
    """A request for the mean of all groups' own weights, for methods that are evaluated by it.

    Attributes:
        tensors: this group's weights; None for frozen ones that equal the server's.
    """

    tensors: Tensors


class ServerRequest(NamedTuple):
    """A request to the server; its answer is the result of `GroupCore.receive`.

    Attributes:
        epoch: epoch of leased data; -1 if none is leased.
        trained: number of its batches that this group has begun to train; see `LeaseClient`.
        waits: whether the driver waits for the answer. Otherwise it sends the request and answers None; a later
            `Receive` requests the answer.
    """

    optimizer: int
    need: Exchange | Fetch | Average
    epoch: int
    trained: int
    waits: bool = True

    @property
    def tensors(self) -> Tensors:
        return () if isinstance(self.need, Fetch) else self.need.tensors

    @property
    def pulls(self) -> bool:
        return not isinstance(self.need, Exchange) or self.need.pull

    @property
    def fragment(self) -> int | None:
        return self.need.fragment if isinstance(self.need, Exchange) else None


class Outgoing(NamedTuple):
    """A message to one server, and its payload, if any: uint8; a push is in the run's wire format."""

    message: m.PushMessage | m.FetchMessage | m.AverageMessage | m.UploadWeights | m.TakeSnapshot
    payload: Tensor | None = None


Action = NextGradient | ServerRequest | Receive | Publish | SendPeer | ReadPeer | ReadInbox
"""An action for the driver: compute a gradient, or exchange with the server or other groups."""


NO_ANSWER = m.Weights(optimizer=0, clock=0, staleness=-1, applied=True, refused_in_row=0, progress=0, stop="", nbytes=0)
"""The value of `GroupCore.last_answer` before the first answer."""


@dataclass
class _MethodState:
    """The group side of the method for one optimizer."""

    replica: Replica
    side: GroupSide | None = None
    parameters: int = 0
    need: Need = field(default_factory=NextGradient)
    seconds: float = 0.0
    steps: int = 0
    sent: State = field(default_factory=dict)
    """The sender's state after the last applied push."""
    sending: State | None = None
    """The sender's state if the unanswered push is applied, too."""
    under_way: ServerRequest | None = None
    """The request that was sent without waiting."""
    outgoing: list[Outgoing] | None = None
    """The messages of that request to each server, kept because its tensors change."""
    sequence: int = 0
    """The number of answered pushes in this incarnation of the group; the next push has the next number."""


class GroupCore:
    """One rank's state machine of its compute group.

    Args:
        wire_format: encoding of its pushes and their answers.
        max_nonfinite_pushes: consecutive pushes with NaN or infinite elements after which the group fails; None for no
            limit.
        overlap: whether exchanges of `AsyncSGD` overlap computation; see `lightning_omni.methods.overlap`.

    Attributes:
        data: the group's drawn and trained batches of the epoch, if its data is leased.
        last_answer: the server's last answer, which has the state of the run.
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
        self.data: LeaseClient | None = None
        self.last_answer = NO_ANSWER
        self._method_states: list[_MethodState] = []

    def attach(self, replica: Replica) -> int:
        """Add the weights of an optimizer; return its number."""
        self._method_states.append(_MethodState(replica))
        return len(self._method_states) - 1

    def detach_all(self) -> None:
        self._method_states.clear()

    def form(self, identity: GroupId | None = None) -> None:
        """Restart the method for other groups; the memory of its replicas and the senders' states stay.

        With an ``identity``, the group's pushes are counted from the first.
        """
        for own in self._method_states:
            own.side = own.under_way = own.outgoing = None
            if identity is not None:
                own.sequence = 0
        self.identity = identity or self.identity

    # --- Events ------------------------------------------------------------------------------------------------------

    def gradient(self, optimizer: int, gradient: Gradient) -> Action:
        _check_finished(self.waits_for(optimizer), f"a gradient of optimizer {optimizer}")
        if self.data is not None and (batch := self.data.current) is not None:
            gradient = msgspec.structs.replace(gradient, samples=batch.stop - batch.start)
        return self._advance(optimizer, gradient)

    def answer(self, optimizer: int, answer: Answer) -> Action:
        own = self._method_states[optimizer]
        if isinstance(own.need, Publish | SendPeer):
            answer = own.need.tensors
        if isinstance(answer, Pulled) and isinstance(own.need, (Exchange, Receive)):
            answer = self._accept_answer(own, answer)
        return self._advance(optimizer, answer)

    def apply_answer(self, optimizer: int, pulled: Pulled) -> None:
        """Apply the answer of an overlapped exchange before the method requests it, and restart the method."""
        own = self._method_states[optimizer]
        if own.under_way is None:
            raise ProtocolError(f"an answer to optimizer {optimizer}, of which nothing is under way")
        self.method.apply_answer(own.replica, self._accept_answer(own, pulled))
        own.side = None

    def _accept_answer(self, own: _MethodState, answer: Pulled) -> Pulled:
        own.sequence += 1
        last = self.last_answer
        if own.sending is not None and (not answer.refused or (last.repeated and last.applied)):
            own.sent = own.sending  # else the previous state stays
        own.sending = own.under_way = own.outgoing = None
        if self.wire_format.answers == RAW or (self.method.answers_changes and not answer.refused):
            return answer
        return own.replica.exactly(answer, self.method.fragments)

    def receive(self, answer: m.Weights, tensors: Sequence[Tensor]) -> Pulled:
        """Store the server's answer as the last one, and return it in the form that the method expects.

        Raises:
            NonFiniteGradients: the server refused too many consecutive pushes.
        """
        self.last_answer = answer
        self.check_nonfinite(answer.refused_in_row)
        # After a lost answer, groups with weights of their own restart from the master weights.
        lost = answer.repeated and self.method.steps_at == "worker"
        fragment = answer.fragment if answer.fragment >= 0 else None
        return Pulled(tensors, answer.clock, answer.note, refused=lost or not answer.applied, fragment=fragment)

    def check_nonfinite(self, in_row: int) -> None:
        if self._max_nonfinite_pushes is not None and in_row >= self._max_nonfinite_pushes:
            raise NonFiniteGradients(
                f"what group {self.identity.name} pushed was NaN or infinite {in_row} times in a row, and none of"
                " it was applied: lower the learning rate, clip gradients (gradient_clip_val), or use"
                " precision='16-mixed' with its loss scaling; more groups need less momentum;"
                " Server(max_nonfinite_pushes=...) sets how many are tolerated"
            )

    def step_took(self, optimizer: int, seconds: float) -> None:
        """Add the duration of a local step, without exchanges."""
        own = self._method_states[optimizer]
        own.seconds += seconds
        own.steps += 1

    def steps_take(self, optimizer: int, seconds: float) -> None:
        """Replace the recorded durations of local steps by this one."""
        own = self._method_states[optimizer]
        own.seconds, own.steps = seconds, 1

    @property
    def overlaps(self) -> bool:
        return self.overlap and isinstance(self.method, AsyncSGD)

    # --- Actions -----------------------------------------------------------------------------------------------------

    def fetch(self, optimizer: int) -> ServerRequest:
        return ServerRequest(optimizer, Fetch(), *self.place)

    def synchronize(self, optimizer: int) -> ServerRequest:
        """Return a request for the weights to evaluate at a synchronization point.

        Where the method is evaluated by the mean of all groups' own weights, it is for this mean.
        """
        own = self._method_states[optimizer]
        if own.side is not None:
            _check_finished(own.need, f"a synchronization of optimizer {optimizer}")
        if self.method.evaluated == "mean":
            return ServerRequest(optimizer, Average(own.replica.offered(own.replica.weights())), *self.place)
        return self.fetch(optimizer)

    @property
    def place(self) -> tuple[int, int]:
        return self.data.place if self.data is not None else (-1, 0)

    def send(self, ask: ServerRequest, split: Partition, memories: Sequence[Memory]) -> list[Outgoing]:
        """Return each server's message for a request; only ranks that exchange call it.

        Only the first message reports trained batches. No other payload may use ``memories``, one for each server,
        before the answer.
        """
        own = self._method_states[ask.optimizer]
        if ask is own.under_way and own.outgoing is not None:
            return own.outgoing
        asks = [ask, *[ask._replace(epoch=-1, trained=0)] * (len(split.shares) - 1)]  # the first server leases data
        if isinstance(ask.need, Fetch):
            return [
                Outgoing(m.FetchMessage(optimizer=each.optimizer, epoch=each.epoch, trained=each.trained))
                for each in asks
            ]
        shares = split.fragment(ask.fragment, self.method.fragments).shares
        if isinstance(ask.need, Average):
            wholes = zip(split.parts(ask.need.tensors), shares, memories, strict=True)
            return [_mean_of(ask, *whole) for whole in wholes]
        pushes = zip(asks, self.encode(ask.optimizer, ask.need, split, memories), shares, strict=True)
        outgoing = [self._push(each, ask.need, encoded, share) for each, encoded, share in pushes]
        own.outgoing = None if ask.waits else outgoing
        return outgoing

    def _push(self, ask: ServerRequest, need: Exchange, encoded: Encoded, layout: Layout) -> Outgoing:
        message = m.PushMessage(
            optimizer=ask.optimizer,
            read_at=need.read_at,
            present=encoded.present,
            hyperparameters=tuple(map(dict, need.hyperparameters)),
            epoch=ask.epoch,
            trained=ask.trained,
            nbytes=encoded.payload.numel(),
            note=need.note,
            pull=need.pull,
            layout=layout.version,
            incarnation=self.identity.incarnation,
            sequence=self._method_states[ask.optimizer].sequence + 1,
            fragment=-1 if need.fragment is None else need.fragment,
        )
        return Outgoing(message, encoded.payload)

    def encode(self, optimizer: int, need: Exchange, split: Partition, memories: Sequence[Memory]) -> list[Encoded]:
        """Encode each server's part of a push; keep the sender's next state until the answer."""
        own, pushes, whole = self._method_states[optimizer], self.wire_format.pushes, split.layout
        number, of = need.fragment, self.method.fragments
        split = split.fragment(number, of)
        state = own.sent if number is None else state_of_fragment(own.sent, whole, number, of)
        parts = zip(split.parts(need.tensors), split.shares, split.sender_parts(state), memories, strict=True)
        encoded = [pushes.encode(*part) for part in parts]
        state = split.merged_sender([each.state for each in encoded]) if pushes.is_stateful else {}
        own.sending = state if number is None else with_fragment(own.sent, state, whole, number, of)
        return encoded

    def sequence(self, optimizer: int) -> int:
        return self._method_states[optimizer].sequence

    def sender_state(self, optimizer: int) -> State:
        """Return the sender's state for an optimizer's pushes; empty on ranks that do not exchange."""
        return self._method_states[optimizer].sent

    def load_sender_state(self, optimizer: int, state: State) -> None:
        self._method_states[optimizer].sent = state

    def waits_for(self, optimizer: int) -> Need:
        """Return the method's current need: the next gradient, or an unanswered one.

        The method starts if it does not run, and again after parameters were added.
        """
        own = self._method_states[optimizer]
        self._begin(own)
        return own.need

    def _begin(self, own: _MethodState) -> None:
        if own.side is None or own.parameters != len(own.replica.ordered):
            own.parameters = len(own.replica.ordered)
            own.side = overlapped(own.replica) if self.overlaps else self.method.group_side(own.replica)
            own.need = next(own.side)

    def _encode_for_peers(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Encode and decode weights, so that the sender continues with the same values as the receivers."""
        pushes = self.wire_format.pushes
        if pushes == RAW:
            return weights
        layout = Layout.of({str(place): weight for place, weight in enumerate(weights)})
        payload = pushes.encode(weights, layout, {}, Memory()).payload.to(weights[0].device)
        return layout.views(pushes.decode(payload, layout, Memory(zeros_on(payload.device))))

    def _advance(self, optimizer: int, answer: Any) -> Action:
        own = self._method_states[optimizer]
        assert own.side is not None
        while True:
            need = own.need = own.side.send(answer)
            match need:
                case Step():
                    own.replica.step(need.gradient.tensors)
                    answer = None
                case StepTime():
                    answer = own.seconds / own.steps if own.steps else 0.0
                    own.seconds, own.steps = 0.0, 0
                case Exchange() | Fetch():
                    self._check_free(own, need)
                    return ServerRequest(optimizer, need, *self.place)
                case Send():
                    self._check_free(own, need)
                    own.under_way = ServerRequest(optimizer, need.exchange, *self.place, waits=False)
                    return own.under_way
                case Receive():
                    if own.under_way is None:
                        raise ProtocolError(f"{type(self.method).__name__} receives, and has sent nothing")
                    return need
                case Publish() | SendPeer():
                    answer = self._encode_for_peers(need.tensors)
                    if not (isinstance(need, SendPeer) and need.group == own.replica.group):
                        own.need = msgspec.structs.replace(need, tensors=answer)
                        return own.need
                case NextGradient() | ReadPeer() | ReadInbox():
                    return need
                case _:
                    raise TypeError(f"{type(self.method).__name__} needs {need!r}, which is no need")

    def _check_free(self, own: _MethodState, need: Need) -> None:
        if own.under_way is not None:
            raise ProtocolError(
                f"{type(self.method).__name__} needs {type(need).__name__} while an exchange is under way; let it need"
                " Receive before"
            )


def _check_finished(need: Need, what: str) -> None:
    if not isinstance(need, NextGradient):
        raise ProtocolError(
            f"{what}, whose group waits for {type(need).__name__}: an exception has interrupted its last step, which"
            " cannot be continued; let the exception end training"
        )


def _mean_of(ask: ServerRequest, tensors: Tensors, layout: Layout, memory: Memory) -> Outgoing:
    encoded = RAW.encode(tensors, layout, {}, memory)
    absent = tuple(place for place, there in enumerate(encoded.present) if not there)
    nbytes = encoded.payload.numel()
    return Outgoing(m.AverageMessage(optimizer=ask.optimizer, nbytes=nbytes, absent=absent), encoded.payload)
