"""The server's state machine: messages and the time go in, messages come out. No sockets, clocks or threads.

Rule 1: a peer that has not been admitted may say `Hello` and `Proof`, nothing else; all else is refused and counted.
Rule 2: every answer goes back on the channel that the question came on.
Rule 3: the outgoing weights are the live ones: whoever drives this sends (or copies) them before the next message in.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_omni.errors import CollectiveMismatch, MalformedMessage, OmniError, ProtocolError, Refused
from lightning_omni.methods import Method, Reply
from lightning_omni.methods.master import Resolve, resolver
from lightning_omni.methods.modules import ResolveModule, module_resolver
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.codec import check_specs, pack, unpack
from lightning_omni.protocol.epochs import Epochs
from lightning_omni.protocol.handshake import NONCE_BYTES, attach_mac, is_equal, server_mac
from lightning_omni.protocol.head import Arrival, HeadShard
from lightning_omni.protocol.meetings import Meetings
from lightning_omni.protocol.record import Event, Kind, Recorder, Spans
from lightning_omni.protocol.roster import MOST_CHALLENGED, Member, Roster
from lightning_omni.protocol.sensing import total_momentum
from lightning_omni.protocol.shard import ROOM, Shard
from lightning_omni.topology import Topology

Peer = bytes
Payload = bytes | Tensor
LATELY = 64
"""Pushes over which their time is averaged: where groups meet, the last one's takes many times the others'."""
RATE_WINDOW = 10.0
"""Seconds over which the rate of updates is measured."""


@dataclass(frozen=True)
class Out:
    """A message to be sent, with the parts of its payload."""

    peer: Peer
    channel: m.Channel
    message: m.Message
    payload: tuple[Payload, ...] = ()


class ServerCore:
    """The parameter server, without its sockets.

    Args:
        key: the run's shared secret.
        random: draws that many random bytes (nonces).
        heartbeat_timeout: seconds of silence after which a rank counts as dead.
        join_timeout: seconds that a rank may take to join after the first.
        resolve: turns an optimizer's class path into the class.
        resolve_module: turns the class path of a merged head's module into the class.
        clock: tells the time that its own work takes, in seconds; None if it takes none, in virtual time.
        record: told of everything that happens to the weights, in order.

    Attributes:
        key: the run's shared secret.
        data_port: told to every admitted rank; whoever drives the machine sets it.
        strangers: messages refused because they were malformed or their sender had not been admitted.
        over: why the run cannot go on, or an empty string.
    """

    def __init__(
        self,
        key: bytes,
        random: Callable[[int], bytes],
        heartbeat_timeout: float = 30.0,
        join_timeout: float = 300.0,
        resolve: Resolve | None = None,
        record: Recorder | None = None,
        resolve_module: ResolveModule | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.key = key
        self._random = random
        self._heartbeat_timeout = heartbeat_timeout
        self._join_timeout = join_timeout
        self._resolve = resolve or resolver(())
        self._resolve_module = resolve_module or module_resolver(())
        self._clock = clock or (lambda: self._now)
        self._record = record
        self.strangers = 0
        self.data_port = 0
        self.reset()

    def reset(self) -> None:
        """Forgets the run; the next one may come."""
        self.roster = Roster(self.key)
        self.meetings = Meetings()
        self.epochs = Epochs()
        self._hold([])
        self.generation = 0
        self.over = ""
        self._method: Method | None = None
        self._attaching: dict[Peer, tuple[m.Attach, bytes]] = {}
        self._attached: dict[Peer, int] = {}
        self._data_peers: dict[int, Peer] = {}
        self._brought: dict[int, Payload] = {}
        self._gathered: tuple[int, tuple[Payload, ...]] = (-1, ())  # the last meeting's, where they must be collected
        self._deposits: dict[int, Any] = {}
        self._present: dict[tuple[int, int], tuple[bool, ...]] = {}  # for the record
        self._pending: dict[int, tuple[int, bool]] = {}  # group: optimizer of the push that waits, and whether it pulls
        self._resting_elsewhere: set[int] = set()
        self._now = 0.0
        self._rate: deque[tuple[float, int]] = deque()
        self._push_began: float | None = None
        self._serve_times: deque[float] = deque(maxlen=LATELY)
        self._serves = False

    @property
    def is_over(self) -> bool:
        """Whether a run took place and all its ranks are gone."""
        return self.roster.is_over

    @property
    def attached(self) -> set[Peer]:
        """Data connections of ranks that are still here."""
        return {peer for peer, rank in self._attached.items() if rank not in self.roster.gone}

    def is_admitted(self, channel: m.Channel, peer: Peer) -> bool:
        """Whether a connection is that of an admitted rank."""
        return peer in self._attached if channel == m.DATA else self.roster.by_peer(peer) is not None

    @property
    def clock(self) -> int:
        """Updates applied so far, over all optimizers. Those of a merged head belong to updates of the body."""
        return sum(shard.master.clock for _, shard in self._pushed)

    # --- What drives the machine -------------------------------------------------------------------------------------

    def receive(self, channel: m.Channel, peer: Peer, message: m.Message, payload: Payload, now: float) -> list[Out]:
        """A message came in.

        Args:
            channel: the channel that it came on.
            peer: the connection that it came from.
            message: the message.
            payload: the bytes behind it.
            now: seconds, on any clock that only goes forward.
        """
        self._now = now
        self._push_began = self._clock() if isinstance(message, m.PushMessage) else None
        try:
            if channel == m.CONTROL:
                return self._on_control(peer, message, payload, now)
            return self._on_data(peer, message, payload, now)
        except Refused as no:
            return [Out(peer, channel, m.RefusedMessage(code=no.code, reason=str(no)))]
        except CollectiveMismatch as mismatch:
            return self._end(str(mismatch))
        except OmniError as error:
            return [Out(peer, channel, m.RefusedMessage(code="protocol", reason=str(error)))]

    def handed_over(self) -> None:
        """The answers to the last message are with the socket; if it was a push, it has taken until now."""
        if self._push_began is None:
            return
        lasted = max(0.0, self._clock() - self._push_began)
        self._push_began = None
        if self._serves:
            self._serve_times.append(lasted)
        self._serves = True  # the first after groups were formed has memory to find

    def refuse(self, channel: m.Channel, peer: Peer, reason: str) -> list[Out]:
        """Bytes came in that are no message: counted, and answered with the reason."""
        self.strangers += 1
        return [Out(peer, channel, m.RefusedMessage(code="malformed", reason=reason))]

    def check_payload(self, peer: Peer, message: m.Message) -> int:
        """Bytes of payload that a data message may bring; asked before any memory is set aside for them.

        Raises:
            ProtocolError: this peer may not send this, or not as much.
        """
        if isinstance(message, m.PushMessage):
            group = self._group_of(self._member_of(peer))
            return self._shard(message.optimizer).payload_layout(group, message).nbytes
        if isinstance(message, m.Average):
            group = self._leads(self._member_of(peer))
            expected = self._shard(message.optimizer).layout_of(group).nbytes
            if message.nbytes != expected:
                raise MalformedMessage(f"the weights have {message.nbytes} bytes, {expected} were expected")
            return message.nbytes
        if isinstance(message, (m.Seed, m.Deposit)):
            member = self._member_of(peer)
            if isinstance(message, m.Deposit):
                self._leads(member)
            elif member.rank != 0:
                raise ProtocolError("only rank 0 hands weights over")
            check_specs(message.packed.specs, message.nbytes)
            return message.nbytes
        if isinstance(message, m.Restructure):
            self._leads(self._member_of(peer))
            check_specs(message.packed.specs, message.nbytes)
            self._shard(message.optimizer).check_room(message.nbytes)
            return message.nbytes
        if isinstance(message, (m.HeadForward, m.HeadBackward)):
            member = self._member_of(peer)
            if isinstance(message, m.HeadBackward) or message.turn:
                self._leads(member)
            self._head(message.optimizer)
            check_specs(message.packed.specs, message.nbytes)
            return message.nbytes
        if isinstance(message, (m.Bring, m.Long)):
            self._member_of(peer)
            largest = m.LARGEST_BROUGHT if isinstance(message, m.Bring) else m.LONGEST
            if not 0 < message.nbytes <= largest:
                raise MalformedMessage(f"{message.nbytes} bytes are announced, and at most {largest} may come")
            return message.nbytes
        return 0

    def fail(self, reason: str) -> list[Out]:
        """The server itself cannot go on: the run ends, and everyone is told."""
        return self._end(f"the parameter server failed: {reason}")

    def tick(self, now: float) -> list[Out]:
        """Time passes: ranks that were silent for too long are lost."""
        self._now = now
        self._rate.append((now, self.clock))
        while now - self._rate[0][0] > RATE_WINDOW:
            self._rate.popleft()
        out = []
        for rank, reason in self.roster.silent(now, self._heartbeat_timeout, self._join_timeout):
            if self.over:
                self.roster.gone.add(rank)
            out += self.lose(rank, reason)
        return out

    @property
    def peers(self) -> list[Peer]:
        """Control connections of the ranks that have not left."""
        return [member.peer for rank, member in self.roster.members.items() if rank not in self.roster.gone]

    def hang_up(self, peer: Peer) -> list[Out]:
        """A control connection has ended, and its rank did not say goodbye."""
        member = self.roster.by_peer(peer)
        if member is None:
            return []
        out = self.lose(member.rank, f"rank {member.rank} is gone without a goodbye: its process or its machine failed")
        self.roster.gone.add(member.rank)
        return out

    def lose(self, rank: int, reason: str) -> list[Out]:
        """A rank is dead: its group is retired, and nobody waits for it any more."""
        if rank in self.roster.lost or rank in self.roster.gone or self.over:
            return []
        group, over = self.roster.lose(rank, reason)
        if over:
            return self._end(f"{reason}; the run cannot go on without it")
        assert group is not None
        self.epochs.retire(group)
        self.meetings.forget(self.roster.lost)
        self._deposits.pop(group, None)
        out = self._tell_everyone(m.Notice(lost=self._lost, reason=reason))
        return out + self._retire(group) + self._release_heads(group) + self._settle()

    # --- Control -----------------------------------------------------------------------------------------------------

    def _on_control(self, peer: Peer, message: m.Message, payload: Payload, now: float) -> list[Out]:
        if isinstance(message, m.Hello):
            challenge = self._random(NONCE_BYTES)
            self.roster.knock(peer, message, challenge)
            return [Out(peer, m.CONTROL, m.Challenge(nonce=challenge))]
        if isinstance(message, m.Proof):
            return self._admit(peer, message, now)
        member = self.roster.by_peer(peer)
        if member is None:
            self.strangers += 1
            raise Refused("stranger", "say Hello first: this connection has not been admitted")
        member.last_seen = now
        if member.rank in self.roster.lost and not isinstance(message, m.Goodbye):
            reason = self.roster.lost[member.rank]
            return [Out(peer, m.CONTROL, m.Notice(lost=self._lost, reason=reason))]
        if self.over and not isinstance(message, (m.Goodbye, m.AskStatus)):
            return [Out(peer, m.CONTROL, m.Notice(lost=self._lost, reason=self.over, over=True))]
        if isinstance(message, m.ReadBrought):
            message = self._brought_message(member)
        return self._handlers[type(message)](self, member, message, payload)

    def _admit(self, peer: Peer, message: m.Proof, now: float) -> list[Out]:
        try:
            hello, challenge = self.roster.admit(peer, message, now)
        except Refused as no:
            self.strangers += no.code == "key"
            raise
        welcome = m.Welcome(
            mac=server_mac(self.key, hello, challenge),
            data_port=self.data_port,
            heartbeat_timeout=self._heartbeat_timeout,
        )
        return [Out(peer, m.CONTROL, welcome)]

    def _heartbeat(self, member: Member, message: m.Heartbeat, payload: Payload) -> list[Out]:
        member.timings = message
        return [Out(member.peer, m.CONTROL, self.status(message.sent))]

    def _ask_status(self, member: Member, message: m.AskStatus, payload: Payload) -> list[Out]:
        return [Out(member.peer, m.CONTROL, self.status(0.0))]

    def _form(self, member: Member, message: m.Form, payload: Payload) -> list[Out]:
        if member.rank != 0:
            raise ProtocolError("only rank 0 forms groups")
        topology = Topology(message.groups)
        if topology.ranks != self.roster.live:
            raise ProtocolError(f"the groups {message.groups} are not a partition of the live ranks {self.roster.live}")
        self._method = m.method_from_wire(message.method)
        self.generation = message.generation
        self.roster.topology = topology
        for shard in self.shards:
            shard.change_method(self._method, topology.alive)
        for number, _ in self._pushed:
            self._note("form", -1, number, groups=topology.groups, method=message.method)
        self._deposits.clear()
        self._present.clear()
        self._pending.clear()
        self._resting_elsewhere.clear()
        self._serve_times.clear()
        self._serves = False
        sizes = {group: len(topology.members(group)) for group in topology.alive}
        self.epochs.form(sizes, message.generation, message.keep_epoch)
        # Whoever asks how the run goes before the next heartbeat should hear of these groups.
        return [
            *self._tell_everyone(self.status(-1.0)),
            Out(member.peer, m.CONTROL, m.Formed(generation=message.generation)),
        ]

    def _open_epoch(self, member: Member, message: m.OpenEpoch, payload: Payload) -> list[Out]:
        self._group_of(member)
        self.epochs.open(message.plan)
        return [Out(member.peer, m.CONTROL, m.EpochOpened(epoch=message.plan.epoch))]

    def _draw(self, member: Member, message: m.Draw, payload: Payload) -> list[Out]:
        book, group = self.epochs.book_of(message.epoch, message.generation), self._group_of(member)
        if not book.has(group):  # a mate was faster to say that the group leaves the epoch
            return [Out(member.peer, m.CONTROL, m.Drawn(number=message.number, batches=()))]
        spans = self._new_spans(group, message)
        book.train(group, message.trained)
        self._note_training(group, message.epoch, spans)
        batches = book.draw(group, message.number)
        return [Out(member.peer, m.CONTROL, m.Drawn(number=message.number, batches=tuple(batches)))]

    def _await(self, member: Member, message: m.Await, payload: Payload) -> list[Out]:
        group = self._group_of(member)
        spans = self._new_spans(group, message)
        self.epochs.wait(group, member.rank, message)
        self._note_training(group, message.epoch, spans)
        return self._rest(member) + self._settle()

    def _leave(self, member: Member, message: m.Leave, payload: Payload) -> list[Out]:
        group = self._group_of(member)
        spans = self._new_spans(group, message)
        self.epochs.leave(group, message)
        self._note_training(group, message.epoch, spans)
        return [Out(member.peer, m.CONTROL, m.Left()), *self._settle()]

    def _contribute(self, member: Member, message: m.Contribute, payload: Payload) -> list[Out]:
        if message.brought:
            payload = self._take_brought(member)
        self.meetings.contribute(message.number, member.rank, message.what, payload)
        return self._rest(member) + self._settle()

    def _report_lost(self, member: Member, message: m.Lost, payload: Payload) -> list[Out]:
        if not 0 <= message.rank < self.roster.world_size:
            raise ProtocolError(f"there is no rank {message.rank} to be lost")
        return self.lose(message.rank, message.reason)

    def _goodbye(self, member: Member, message: m.Goodbye, payload: Payload) -> list[Out]:
        out = [Out(member.peer, m.CONTROL, m.Acknowledged())]
        if message.reason:
            out += self.lose(member.rank, message.reason)
        elif self._grouped(member.rank):
            self.epochs.retire(self._group_of(member))
            out += self._each_side("retire", self._group_of(member), note="leave")
            out += self._release_heads(self._group_of(member))
        self.roster.gone.add(member.rank)
        return out + self._settle()

    _handlers: dict[type, Callable[..., list[Out]]] = {
        m.Heartbeat: _heartbeat,
        m.AskStatus: _ask_status,
        m.Form: _form,
        m.OpenEpoch: _open_epoch,
        m.Draw: _draw,
        m.Await: _await,
        m.Leave: _leave,
        m.Contribute: _contribute,
        m.Lost: _report_lost,
        m.Goodbye: _goodbye,
    }

    # --- Data --------------------------------------------------------------------------------------------------------

    def _on_data(self, peer: Peer, message: m.Message, payload: Payload, now: float) -> list[Out]:
        if isinstance(message, m.Attach):
            return self._challenge(peer, message)
        if isinstance(message, m.AttachProof):
            return self._attach(peer, message)
        member = self._member_of(peer)
        member.last_seen = now
        if isinstance(message, m.PushMessage):
            return self._push(peer, member, message, _as_tensor(payload))
        if isinstance(message, m.Fetch):
            return self._fetch(peer, member, message)
        if isinstance(message, m.Average):
            self._shard(message.optimizer).average(self._leads(member), _as_tensor(payload))
            return self._settle()
        if isinstance(message, m.Deposit):
            # Taken apart and packed again for the snapshot, so that it cannot hold what no snapshot may.
            self._deposits[self._leads(member)] = unpack(message.packed, _as_tensor(payload).clone())
            return [Out(peer, m.DATA, m.Deposited())]
        if isinstance(message, m.TakeSnapshot):
            return self._snapshot(peer, message)
        if isinstance(message, m.HeadForward):
            return self._head_forward(peer, member, message, _as_tensor(payload))
        if isinstance(message, m.HeadBackward):
            return self._head_backward(peer, member, message, _as_tensor(payload))
        if isinstance(message, m.HeadRelease):
            self._head(message.optimizer).forget(self._leads(member))
            return [Out(peer, m.DATA, m.HeadReleased()), *self._serve_head(message.optimizer)]
        if isinstance(message, m.Restructure):
            return self._restructure(peer, member, message, _as_tensor(payload))
        if isinstance(message, m.Seed):
            return self._seed(peer, member, message, _as_tensor(payload))
        if isinstance(message, m.Bring):
            self._brought[member.rank] = payload
            return [Out(peer, m.DATA, m.Brought())]
        if isinstance(message, m.Collect):
            return self._collect(peer, message)
        raise ProtocolError(f"{type(message).__name__} does not belong on the data channel")

    def _challenge(self, peer: Peer, message: m.Attach) -> list[Out]:
        challenge = self._random(NONCE_BYTES)
        self._attaching[peer] = (message, challenge)
        while len(self._attaching) > MOST_CHALLENGED:
            self._attaching.pop(next(iter(self._attaching)))
        return [Out(peer, m.DATA, m.AttachChallenge(nonce=challenge))]

    def _attach(self, peer: Peer, message: m.AttachProof) -> list[Out]:
        attach, challenge = self._attaching.pop(peer, (None, b""))
        member = self.roster.members.get(attach.rank) if attach is not None else None
        if attach is None or member is None:
            self.strangers += 1
            raise Refused("stranger", "this proof opens nothing")
        if not is_equal(message.mac, attach_mac(member.session, "rank", attach, challenge)):
            self.strangers += 1
            raise Refused("stranger", "this proof opens nothing")
        if member.rank in self._data_peers:
            raise Refused("attached", f"rank {member.rank} has a data connection already; it keeps that one")
        self._attached[peer] = member.rank
        self._data_peers[member.rank] = peer
        return [Out(peer, m.DATA, m.Attached(mac=attach_mac(member.session, "server", attach, challenge)))]

    def _take_brought(self, member: Member) -> Payload:
        if member.rank not in self._brought:
            raise ProtocolError(f"rank {member.rank} has brought nothing over its data connection")
        return self._brought.pop(member.rank)

    def _brought_message(self, member: Member) -> m.Message:
        brought = self._take_brought(member)
        data = brought.numpy().tobytes() if isinstance(brought, Tensor) else brought
        message: m.Message = m.decode(data, at="server", channel=m.CONTROL)
        if type(message) not in self._handlers:
            raise ProtocolError(f"a {type(message).__name__} cannot be brought")
        return message

    def _collect(self, peer: Peer, message: m.Collect) -> list[Out]:
        number, payloads = self._gathered
        if message.number != number:
            raise ProtocolError(f"there is nothing to collect of meeting {message.number}")
        parts = tuple(_as_tensor(payload) for payload in payloads)
        return [Out(peer, m.DATA, m.Collected(nbytes=sum(map(_nbytes, parts))), parts)]

    def _seed(self, peer: Peer, member: Member, message: m.Seed, payload: Tensor) -> list[Out]:
        if member.rank != 0:
            raise ProtocolError("only rank 0 hands weights over")
        if self._method is None:
            raise ProtocolError("form groups first")
        tree = unpack(message.packed, payload)
        groups = self.roster.topology.alive if self.roster.topology is not None else ()
        try:
            self._hold([self._shard_of(part, self._method, groups) for part in tree["parts"]])
        except OmniError:
            raise
        except Exception as error:  # torch raises what it likes on states that are none
            raise MalformedMessage(f"not a seed: {type(error).__name__}: {error}") from error
        formed, method = self.roster.topology, m.method_to_wire(self._method)
        for number in range(len(self.shards)):
            self._note("seed", -1, number, groups=formed.groups if formed else (), method=method)
        return [Out(peer, m.DATA, m.Seeded())]

    def _hold(self, shards: list[Shard]) -> None:
        """These are the run's optimizers; groups push to some, and to merged heads nobody does."""
        self.shards = shards
        self._pushed = [(number, shard) for number, shard in enumerate(shards) if not shard.is_head]
        self._heads = [(number, shard) for number, shard in enumerate(shards) if isinstance(shard, HeadShard)]

    def _shard_of(self, part: Any, method: Method, groups: Iterable[int]) -> Shard:
        optimizer, weights, clock = part["optimizer"], part["weights"], int(part["clock"])
        if part.get("head") is not None:
            return HeadShard(optimizer, weights, clock, part["head"], groups, self._resolve, self._resolve_module)
        room = ROOM + int(part.get("room", 0))
        return Shard(optimizer, weights, clock, method, groups, self._resolve, part.get("method"), room)

    def _restructure(self, peer: Peer, member: Member, message: m.Restructure, payload: Tensor) -> list[Out]:
        group, shard = self._leads(member), self._shard(message.optimizer)
        tree = unpack(message.packed, payload)
        try:
            start = shard.restructure(group, tree)
        except OmniError:
            raise
        except Exception as error:  # torch raises what it likes on groups and states that are none
            raise MalformedMessage(f"no parameter groups: {type(error).__name__}: {error}") from error
        known = shard.layout_of(group)
        self._note(
            "restructure",
            group,
            message.optimizer,
            parameters=tuple(spec.name for spec in known.specs[start:]),
            param_groups=tuple(tree["groups"]),
        )
        first = known.offsets[start] if start < len(known.specs) else known.nbytes
        rest = shard.buffer[first : known.nbytes]
        answer = m.Restructured(optimizer=message.optimizer, nbytes=rest.numel())
        return [Out(peer, m.DATA, answer, (rest,))]

    def _push(self, peer: Peer, member: Member, message: m.PushMessage, payload: Tensor) -> list[Out]:
        group, number = self._leads(member), message.optimizer
        shard = self._shard(number)
        if shard.is_head:
            raise ProtocolError(f"optimizer {number} is a merged head; nothing is pushed to it")
        if message.epoch >= 0:
            self.epochs.check_trained(group, message.epoch, message.trained)
        replies = shard.push(group, message, payload)
        if self._record is not None:
            self._note_push(group, message, refused=replies is None)
        if message.epoch >= 0:
            self.epochs.train(group, message.epoch, message.trained)
        if replies is None:
            if message.pull:
                shard.method_side.fetched(group)
            return [self._weights(peer, number, shard, applied=False, group=group, pull=message.pull), *self._settle()]
        self._pending[group] = (number, message.pull)
        out = self._answers(number, replies)
        if group in self._pending:
            out += self._rest_elsewhere(group, number)
        return out + self._settle()

    def _fetch(self, peer: Peer, member: Member, message: m.Fetch) -> list[Out]:
        shard = self._shard(message.optimizer)
        if self._grouped(member.rank):
            group = self._group_of(member)
            spans = self._new_spans(group, message)
            if self.epochs.holds(group, message.epoch):  # at a meeting after it has left, it has nothing to tell
                self.epochs.train(group, message.epoch, message.trained)
            shard.method_side.fetched(group)
            self._note("fetch", group, message.optimizer, epoch=message.epoch, spans=spans)
        known = self._group_of(member) if self._grouped(member.rank) else -1
        return [self._weights(peer, message.optimizer, shard, known=known)]

    def _answers(self, number: int, replies: list[Reply]) -> list[Out]:
        return [self._answer(number, reply, only=len(replies) == 1) for reply in replies]

    def _answer(self, number: int, reply: Reply, only: bool) -> Out:
        """The answer to the push that a group is waiting with."""
        shard, peer = self._shard(number), self._leader_peer(reply.group)
        _, pull = self._pending.pop(reply.group, (number, True))
        if reply.group in self._resting_elsewhere:
            self._resting_elsewhere.discard(reply.group)
            self._resume_group(reply.group, but=number)
        payload = shard.payload_of(reply) if pull else None
        if payload is not None and reply.tensors is not None and not only:
            payload = payload.clone()  # the next one is written into the same memory
        return self._weights(
            peer, number, shard, reply.staleness, group=reply.group, payload=payload, note=reply.note, pull=pull
        )

    def _weights(
        self,
        peer: Peer,
        optimizer: int,
        shard: Shard,
        staleness: int = -1,
        applied: bool = True,
        group: int = -1,
        payload: Tensor | None = None,
        note: float = 0.0,
        pull: bool = True,
        known: int = -1,
    ) -> Out:
        layout = shard.layout_of(group if known < 0 else known)
        message = m.Weights(
            optimizer=optimizer,
            clock=shard.master.clock,
            staleness=staleness,
            applied=applied,
            refused_in_row=shard.refused_in_row[group],
            progress=self.epochs.progress,
            stop=self.epochs.stop,
            nbytes=layout.nbytes if pull else 0,
            note=note,
        )
        if not pull:
            return Out(peer, m.DATA, message)
        whole = shard.buffer if payload is None else payload
        return Out(peer, m.DATA, message, (whole if layout is shard.layout else whole[: layout.nbytes],))

    def _snapshot(self, peer: Peer, message: m.TakeSnapshot) -> list[Out]:
        parts: list[dict[str, Any]] = [shard.master.snapshot() for shard in self.shards]
        if not message.with_state:
            parts = [{**part, "state": {}} for part in parts]
        tree: dict[str, Any] = {
            "parts": parts,
            "epoch": self.epochs.plan_fields,
            "trained": self.epochs.trained_spans,
        }
        if message.with_state:
            for part, shard in zip(parts, self.shards, strict=True):
                part["method"] = shard.method_side.state()
            tree["groups"], self._deposits = self._deposits, {}  # once: later they are of another moment
        packed, buffer = pack(tree)
        return [Out(peer, m.DATA, m.Snapshot(packed=packed, nbytes=buffer.numel()), (buffer,))]

    # --- Merged heads ------------------------------------------------------------------------------------------------

    def _head_forward(self, peer: Peer, member: Member, message: m.HeadForward, payload: Tensor) -> list[Out]:
        head = self._head(message.optimizer)
        # The memory is the connection's, on which nothing else comes before the answer.
        arrival = Arrival(self._group_of(member), peer, message, unpack(message.packed, payload))
        if not message.turn:
            return [self._head_output(head, arrival)]
        self._leads(member)
        head.arrive(arrival)
        return self._serve_head(message.optimizer)

    def _serve_head(self, number: int) -> list[Out]:
        """The next group in line has its turn; one whose batch the head cannot take hears why, and the next has it."""
        head, out = self._head(number), []
        while (arrival := head.next_turn(self._clock())) is not None:
            out.append(self._head_output(head, arrival))
        return out

    @staticmethod
    def _head_output(head: HeadShard, arrival: Arrival) -> Out:
        try:
            packed, buffer = pack(head.forward(arrival))
        except OmniError as error:
            if arrival.message.turn:
                head.forget(arrival.group)
            code = error.code if isinstance(error, Refused) else "protocol"
            return Out(arrival.peer, m.DATA, m.RefusedMessage(code=code, reason=str(error)))
        return Out(arrival.peer, m.DATA, m.HeadOutput(packed=packed, nbytes=buffer.numel()), (buffer,))

    def _head_backward(self, peer: Peer, member: Member, message: m.HeadBackward, payload: Tensor) -> list[Out]:
        head, group, number = self._head(message.optimizer), self._leads(member), message.optimizer
        spans = self._new_spans(group, message)
        try:
            stepped = head.backward(group, message, unpack(message.packed, payload), number)
        except ProtocolError as error:
            head.forget(group)
            code = error.code if isinstance(error, Refused) else "protocol"
            return [Out(peer, m.DATA, m.RefusedMessage(code=code, reason=str(error))), *self._serve_head(number)]
        self._note(
            "push",
            group,
            number,
            read_at=stepped.read_at,
            refused=not stepped.applied,
            epoch=message.epoch,
            spans=spans[-1:],
            hyperparameters=message.hyperparameters,
            note=message.clip,
        )
        head.end_turn(self._clock())
        packed, buffer = pack(stepped.inputs)
        answer = m.HeadGradients(
            packed=packed,
            nbytes=buffer.numel(),
            clock=head.master.clock,
            applied=stepped.applied,
            refused_in_row=head.refused_in_row[group],
        )
        return [Out(peer, m.DATA, answer, (buffer,)), *self._serve_head(number)]

    def _release_heads(self, group: int) -> list[Out]:
        """A group is gone: it has no turn, and waits for none."""
        out: list[Out] = []
        for number, head in self._heads:
            head.forget(group)
            out += self._serve_head(number)
        return out

    # --- Who waits for whom ------------------------------------------------------------------------------------------

    def _rest(self, member: Member) -> list[Out]:
        """A leader waits for others: nobody waits for a push of its group meanwhile."""
        if not self._is_leader(member.rank):
            return []
        return self._each_side("rest", self._group_of(member))

    def _resume(self, rank: int) -> None:
        if self._is_leader(rank):
            self._resume_group(self._group_of(self.roster.members[rank]))

    def _resume_group(self, group: int, but: int = -1) -> None:
        for number, shard in self._pushed:
            if number != but:
                shard.method_side.resume(group)
                self._note("resume", group, number)

    def _rest_elsewhere(self, group: int, number: int) -> list[Out]:
        """A group waits with one optimizer's push: for those of its other optimizers nobody must wait meanwhile.

        Groups need not step their optimizers alike; two that waited for each other at two optimizers would do so for
        ever.
        """
        if len(self._pushed) == 1:
            return []
        self._resting_elsewhere.add(group)
        return self._each_side("rest", group, but=number)

    def _retire(self, group: int) -> list[Out]:
        return self._each_side("retire", group)

    def _each_side(
        self, what: Literal["rest", "retire"], group: int, note: Kind | None = None, but: int = -1
    ) -> list[Out]:
        out: list[Out] = []
        for number, shard in self._pushed:
            if number == but:
                continue
            with torch.no_grad():
                replies: list[Reply] = getattr(shard.method_side, what)(group)
            self._note(note or what, group, number)
            out += self._answers(number, replies)
        return out

    def _note(self, kind: Kind, group: int, optimizer: int, **more: Any) -> None:
        if self._record is not None:
            clock = self.shards[optimizer].master.clock
            self._record(Event(kind=kind, time=self._now, group=group, optimizer=optimizer, clock=clock, **more))

    def _new_spans(self, group: int, message: m.Draw | m.Await | m.Leave | m.Fetch | m.HeadBackward) -> Spans:
        """The batches that a message brings news of; none if nobody wants to know."""
        if self._record is None or not self.epochs.holds(group, message.epoch):
            return ()
        return self.epochs.new_spans(group, message.epoch, message.trained)

    def _note_training(self, group: int, epoch: int, spans: Spans) -> None:
        if spans:
            for number, _ in self._pushed:
                self._note("train", group, number, epoch=epoch, spans=spans)

    def _note_push(self, group: int, message: m.PushMessage, refused: bool) -> None:
        self._note(
            "push",
            group,
            message.optimizer,
            read_at=message.read_at,
            refused=refused,
            epoch=message.epoch,
            spans=self.epochs.new_spans(group, message.epoch, message.trained),
            hyperparameters=message.hyperparameters,
            note=message.note,
            present=self._news_of_presence(group, message),
        )

    def _news_of_presence(self, group: int, message: m.PushMessage) -> tuple[bool, ...]:
        """Which parameters had a tensor, if it is not the same as in the group's last push."""
        where, before = (group, message.optimizer), self._present.get((group, message.optimizer))
        self._present[where] = message.present
        same = message.present == before if before is not None else all(message.present)
        return () if same else message.present

    # --- Shared ------------------------------------------------------------------------------------------------------

    @property
    def _lost(self) -> tuple[int, ...]:
        return tuple(sorted(self.roster.lost))

    def status(self, sent: float) -> m.Status:
        """How the run goes."""
        staleness: Counter[int] = sum((shard.staleness for _, shard in self._pushed), Counter())
        rate = 0.0
        if len(self._rate) > 1 and self._rate[-1][0] > self._rate[0][0]:
            rate = (self._rate[-1][1] - self._rate[0][1]) / (self._rate[-1][0] - self._rate[0][0])
        return m.Status(
            sent=sent,
            clock=self.clock,
            updates_per_second=max(rate, 0.0),
            refused=sum(shard.refused for shard in self.shards),
            strangers=self.strangers,
            groups=tuple(
                self._group_status(group) for group in (self.roster.topology.alive if self.roster.topology else ())
            ),
            staleness=tuple(staleness[t] for t in range(max(staleness, default=-1) + 1)),
            lost=self._lost,
            head_time=sum(head.turn_time for _, head in self._heads),
            serve_time=fmean(self._serve_times) if self._serve_times else 0.0,
            total_momentum=total_momentum(shard.sensing for _, shard in self._pushed),
            signal=max(
                (self.roster.members[r].timings.signal for r in self.roster.live if r in self.roster.members), default=0
            ),
        )

    def _group_status(self, group: int) -> m.GroupStatus:
        assert self.roster.topology is not None
        ranks = self.roster.topology.members(group)
        timings = {r: self.roster.members[r].timings for r in ranks if r in self.roster.members}
        seen: Counter[int] = sum((shard.by_group.get(group, Counter()) for _, shard in self._pushed), Counter())
        updates = sum(seen.values())
        slowest = max(timings, key=lambda r: timings[r].compute_time, default=ranks[0])

        def mean(values: list[float]) -> float:
            return sum(values) / len(values) if values else 0.0

        return m.GroupStatus(
            group=group,
            ranks=ranks,
            updates=updates,
            staleness_mean=sum(t * count for t, count in seen.items()) / updates if updates else 0.0,
            step_time=mean([t.step_time for t in timings.values()]),
            compute_time=mean([t.compute_time for t in timings.values()]),
            exchange_time=mean([t.exchange_time for t in timings.values()]),
            slowest_rank=slowest,
            slowest_time=timings[slowest].compute_time if slowest in timings else 0.0,
        )

    def _settle(self) -> list[Out]:
        """Answers whoever waited for something that has come true."""
        out: list[Out] = []
        for number, parts in self.meetings.complete(self.roster.live) if not self.meetings.is_idle else ():
            payloads = tuple(payload for _, payload in parts)
            sizes = tuple(map(_nbytes, payloads))
            ranks = tuple(rank for rank, _ in parts)
            # All ranks have collected the last one's, or they would not be at this one.
            collect = max(sizes, default=0) > m.LARGEST_INLINE
            self._gathered = (number, payloads) if collect else (-1, ())
            gathered = m.Gathered(number=number, ranks=ranks, sizes=sizes, collect=collect)
            told = () if collect else payloads
            out += [Out(self.roster.members[rank].peer, m.CONTROL, gathered, told) for rank in ranks]
            for rank, _ in parts:
                self._resume(rank)
        for rank, verdict in self.epochs.settle():
            out.append(Out(self.roster.members[rank].peer, m.CONTROL, m.Verdict(next=verdict)))
            self._resume(rank)
        for number, shard in enumerate(self.shards):
            for group, good in shard.averaged(self.roster.topology.alive if self.roster.topology else ()):
                out.append(self._weights(self._leader_peer(group), number, shard, applied=good, group=group))
        return out

    def _end(self, reason: str) -> list[Out]:
        self.over = reason
        return self._tell_everyone(m.Notice(lost=self._lost, reason=reason, over=True))

    def _tell_everyone(self, message: m.Message) -> list[Out]:
        return [
            Out(member.peer, m.CONTROL, message)
            for rank, member in self.roster.members.items()
            if rank not in self.roster.gone
        ]

    def _member_of(self, peer: Peer) -> Member:
        if peer not in self._attached:
            self.strangers += 1
            raise Refused("stranger", "attach first: this data connection has not been admitted")
        member = self.roster.members[self._attached[peer]]
        if member.rank in self.roster.lost:
            raise Refused("lost", f"rank {member.rank} was retired: {self.roster.lost[member.rank]}")
        if self.over:
            raise Refused("over", self.over)
        return member

    def _grouped(self, rank: int) -> bool:
        return self.roster.topology is not None and self.roster.topology.holds(rank)

    def _group_of(self, member: Member) -> int:
        if not self._grouped(member.rank):
            raise ProtocolError(f"rank {member.rank} is in no group; groups are formed when training begins")
        assert self.roster.topology is not None
        return self.roster.topology.group_of(member.rank)

    def _is_leader(self, rank: int) -> bool:
        topology = self.roster.topology
        return topology is not None and self._grouped(rank) and topology.leader(topology.group_of(rank)) == rank

    def _leads(self, member: Member) -> int:
        """The group that a rank speaks for."""
        group = self._group_of(member)
        if not self._is_leader(member.rank):
            raise ProtocolError(f"rank {member.rank} does not lead group {group}; only leaders push")
        return group

    def _leader_peer(self, group: int) -> Peer:
        assert self.roster.topology is not None
        return self._data_peers[self.roster.topology.leader(group)]

    def _shard(self, optimizer: int) -> Shard:
        if not 0 <= optimizer < len(self.shards):
            raise ProtocolError(f"there is no optimizer {optimizer}; the server holds {len(self.shards)}")
        return self.shards[optimizer]

    def _head(self, optimizer: int) -> HeadShard:
        shard = self._shard(optimizer)
        if not isinstance(shard, HeadShard):
            raise ProtocolError(f"optimizer {optimizer} is no merged head")
        return shard


def _nbytes(payload: Payload) -> int:
    return payload.numel() if isinstance(payload, Tensor) else len(payload)


def _as_tensor(payload: Payload) -> Tensor:
    if isinstance(payload, Tensor):
        return payload
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
