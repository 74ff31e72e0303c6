"""The table of messages, one row each, and the routing that follows from it.

Rule 1: a message without a row in the table, or on another channel than its row's, is refused.
Rule 2: the router first checks which rank sent a message and whether that still participates, then the size of its
payload, before memory is allocated; then the message is handled.
Rule 3: every answer to a message is sent on the message's channel.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from lightning_omni.errors import MalformedMessage, OmniError, ProtocolError, Refused
from lightning_omni.server.admission import Admission
from lightning_omni.server.collectives import CollectiveService
from lightning_omni.server.epochs.service import EpochService
from lightning_omni.server.membership.roster import Member, Roster
from lightning_omni.server.membership.service import Joining, Membership
from lightning_omni.server.merged_head import MergedHeadService
from lightning_omni.server.replication import Coordinator, Replication, refusal_of, stand_in
from lightning_omni.server.service import Out, Payload, Peer, Sender
from lightning_omni.server.snapshots import Snapshots
from lightning_omni.server.status import StatusService
from lightning_omni.server.training import Training
from lightning_omni.wire import messages as m
from lightning_omni.wire.messages import CONTROL, DATA
from lightning_omni.wire.messages import servers as sm


class Role(Enum):
    """The role required of a message's sender. All but the first require an admitted connection on its channel."""

    STRANGER = auto()
    """Any connection, even one that has not been admitted."""
    OBSERVER = auto()
    """A process that holds the key and observes the run, without being a rank."""
    RANK = auto()
    """An admitted rank."""
    MEMBER = auto()
    """An admitted rank in a group."""
    LEADER = auto()
    """An admitted rank that leads its group, or counts as its leader at this server."""
    RECORDER = auto()
    """The recorder: rank 0, or the lowest live rank where groups join on their own."""
    FOLLOWER = auto()
    """A server other than the coordinating one."""


@dataclass(frozen=True)
class Row:
    """A message's row in the table.

    Attributes:
        handle: method that answers it, called with the service, a `Sender`, the message and the payload; None if the
            transport converts it to another message.
        payload: method that returns the size of the payload that may follow, called like ``handle`` but without it. On
            the control channel a payload arrives with its message, and the transport limits it.
        keeps: whether the payload is kept; otherwise the connection reuses its memory after the answer.
        resolves: whether pending answers may be possible afterwards.
        when_lost: whether a rank is answered although its group is gone.
        when_over: whether a rank is answered although the run is over.
        does: effect of a message of the recorder, for an error.
        in_parts: whether each of several servers gets a part of it.
        is_finite: method that returns whether such a part is finite, called like ``handle``; None if it need not be.
        check: method that raises an error if all servers must refuse such a part, called like ``payload``.
        on_all_servers: whether the other servers must handle it before it is answered.
    """

    message: type[m.Message]
    channel: m.Channel
    role: Role
    service: type[Any]
    handle: Callable[..., list[Out]] | None
    payload: Callable[..., int] | None = None
    keeps: bool = False
    resolves: bool = False
    when_lost: bool = False
    when_over: bool = False
    does: str = ""
    in_parts: bool = False
    is_finite: Callable[..., bool] | None = None
    check: Callable[..., None] | None = None
    on_all_servers: bool = False


TABLE = (
    # admission
    Row(m.Hello, CONTROL, Role.STRANGER, Admission, Admission.hello),
    Row(m.Proof, CONTROL, Role.STRANGER, Admission, Admission.admit),
    Row(m.Attach, DATA, Role.STRANGER, Admission, Admission.challenge),
    Row(m.AttachProof, DATA, Role.STRANGER, Admission, Admission.attach),
    # membership
    Row(m.FormGroups, CONTROL, Role.RECORDER, Membership, Membership.form, does="forms groups", on_all_servers=True),
    Row(m.Join, CONTROL, Role.RANK, Joining, Joining.ask),
    Row(m.RankEnded, CONTROL, Role.RANK, Membership, Membership.report_lost),
    Row(m.Goodbye, CONTROL, Role.RANK, Membership, Membership.goodbye, resolves=True, when_lost=True, when_over=True),
    # joining
    Row(m.RegisterGroup, CONTROL, Role.OBSERVER, Joining, Joining.register),
    Row(
        m.StoreRunState, DATA, Role.RECORDER, Joining, Joining.store, Joining.check_packed,
        keeps=True, resolves=True, does="says what groups that join are given",
    ),
    Row(m.ReadRunState, DATA, Role.RANK, Joining, Joining.read),
    # monitoring
    Row(m.Heartbeat, CONTROL, Role.RANK, StatusService, StatusService.heartbeat),
    Row(m.AskStatus, CONTROL, Role.RANK, StatusService, StatusService.ask, when_over=True),
    # observation
    Row(m.Observe, CONTROL, Role.STRANGER, StatusService, StatusService.hello),
    Row(m.ObserverProof, CONTROL, Role.STRANGER, StatusService, StatusService.admit),
    Row(m.AskOverview, CONTROL, Role.OBSERVER, StatusService, StatusService.ask_overview),
    Row(m.AskServer, CONTROL, Role.OBSERVER, StatusService, StatusService.describe),
    Row(m.Echo, CONTROL, Role.OBSERVER, StatusService, StatusService.echo),
    Row(m.Evict, CONTROL, Role.OBSERVER, Membership, Membership.evict),
    # data
    Row(m.OpenEpoch, CONTROL, Role.MEMBER, EpochService, EpochService.open),
    Row(m.DrawBatches, CONTROL, Role.MEMBER, EpochService, EpochService.draw),
    Row(m.AskNext, CONTROL, Role.MEMBER, EpochService, EpochService.wait, resolves=True),
    Row(m.LeaveEpoch, CONTROL, Role.MEMBER, EpochService, EpochService.leave, resolves=True),
    # validations
    Row(m.ClaimValidation, CONTROL, Role.MEMBER, EpochService, EpochService.claim),
    Row(m.AskValidations, CONTROL, Role.RANK, EpochService, EpochService.ask),
    Row(
        m.PublishEvaluation, DATA, Role.LEADER, EpochService, EpochService.publish,
        EpochService.check_result, keeps=True,
    ),
    Row(m.ReadEvaluation, DATA, Role.RANK, EpochService, EpochService.read),
    # synchronization
    Row(m.Contribute, CONTROL, Role.RANK, CollectiveService, CollectiveService.contribute, resolves=True),
    Row(m.ReadUpload, CONTROL, Role.RANK, CollectiveService, CollectiveService.read_upload),
    Row(
        m.Upload, DATA, Role.RANK, CollectiveService, CollectiveService.upload,
        CollectiveService.check_upload, keeps=True,
    ),
    Row(m.LargeMessage, DATA, Role.RANK, CollectiveService, None, CollectiveService.check_long, keeps=True),
    Row(m.Download, DATA, Role.RANK, CollectiveService, CollectiveService.download),
    # training
    Row(
        m.PushMessage, DATA, Role.LEADER, Training, Training.push, Training.check_push,
        resolves=True, in_parts=True, is_finite=Training.is_push_finite, check=Training.check_counts,
    ),
    Row(m.FetchMessage, DATA, Role.RANK, Training, Training.fetch, in_parts=True, check=Training.check_counts),
    Row(
        m.AverageMessage, DATA, Role.LEADER, Training, Training.average, Training.check_average,
        resolves=True, in_parts=True, is_finite=Training.is_average_finite,
    ),
    Row(m.Restructure, DATA, Role.LEADER, Training, Training.restructure, Training.check_restructure),
    # snapshots
    Row(
        m.UploadWeights, DATA, Role.RECORDER, Snapshots, Snapshots.seed, Snapshots.check_packed,
        keeps=True, does="hands weights over", in_parts=True,
    ),
    Row(m.GroupState, DATA, Role.LEADER, Snapshots, Snapshots.store_group_state, Snapshots.check_packed),
    Row(m.TakeSnapshot, DATA, Role.RANK, Snapshots, Snapshots.take, in_parts=True, check=Snapshots.check_version),
    Row(
        m.ReleaseVersion, CONTROL, Role.RECORDER, Snapshots, Snapshots.release,
        does="saves the weights of validations", on_all_servers=True,
    ),
    # merged head
    Row(
        m.HeadForward, DATA, Role.MEMBER, MergedHeadService, MergedHeadService.forward,
        MergedHeadService.check_head,
    ),
    Row(
        m.HeadBackward, DATA, Role.LEADER, MergedHeadService, MergedHeadService.backward,
        MergedHeadService.check_head,
    ),
    Row(m.HeadRelease, DATA, Role.LEADER, MergedHeadService, MergedHeadService.release),
)  # fmt: skip
"""The messages of ranks and observers, except `AskServerAddresses`."""

COORDINATOR_TABLE = (
    Row(m.AskServerAddresses, CONTROL, Role.RANK, Coordinator, Coordinator.ask_addresses),
    Row(sm.FollowerHello, CONTROL, Role.STRANGER, Coordinator, Coordinator.hello),
    Row(sm.FollowerProof, CONTROL, Role.STRANGER, Coordinator, Coordinator.admit),
    Row(sm.PartReady, CONTROL, Role.FOLLOWER, Coordinator, Coordinator.ready),
    Row(sm.CommandsDone, CONTROL, Role.FOLLOWER, Coordinator, Coordinator.commands_done),
    Row(sm.FollowerFailed, CONTROL, Role.FOLLOWER, Coordinator, Coordinator.fail),
)
"""Further messages that server 0 may receive."""


def types_on(channel: m.Channel, rows: Iterable[Row] = TABLE) -> tuple[type[m.Message], ...]:
    return tuple(row.message for row in rows if row.channel == channel)


class Router:
    """The router of messages to ``services``, one of each type that the rows name."""

    def __init__(self, rows: Iterable[Row], services: Iterable[Any], roster: Roster, replication: Replication) -> None:
        rows = tuple(rows) if replication.count > 1 else tuple(replace(row, in_parts=False) for row in rows)
        self._rows = {row.message: row for row in rows}
        self._services = {type(service): service for service in services}
        self._roster, self._replication = roster, replication
        self._membership: Membership = self._services[Membership]
        self._status_service: StatusService = self._services[StatusService]
        twice = sorted(kind.__name__ for kind, count in Counter(row.message for row in rows).items() if count > 1)
        if twice:
            raise ValueError(f"rows: {', '.join(twice)} cannot have two; give each message one row")
        homeless = sorted({row.service.__name__ for row in rows if row.service not in self._services})
        if homeless:
            raise ValueError(f"rows: there is no service {', '.join(homeless)}; pass it in services=, too")
        self._decoders = {
            channel: msgspec.msgpack.Decoder(reduce(or_, types_on(channel, rows))) for channel in (CONTROL, DATA)
        }

    def decode(self, channel: m.Channel, data: bytes | memoryview) -> m.Message:
        try:
            message: m.Message = m.decode_with(self._decoders[channel], data, channel)
        except MalformedMessage:
            if channel == DATA:
                self._check_is_for_data(data)
            raise
        return message

    def _check_is_for_data(self, data: bytes | memoryview) -> None:
        try:
            m.decode_with(self._decoders[CONTROL], data, CONTROL)
        except MalformedMessage:
            return
        raise MalformedMessage(
            f"not a {DATA} message: this is the server's data port; pass its address with the control port"
            " (serve --port)"
        )

    def route(self, channel: m.Channel, peer: Peer, message: m.Message, payload: Payload, now: float) -> list[Out]:
        row = self._row(channel, message)
        if row.role is Role.STRANGER or row.role is Role.FOLLOWER:
            return self._handle(row, Sender(peer), message, payload)
        if row.role is Role.OBSERVER:
            self._status_service.check(peer)
            return self._handle(row, Sender(peer), message, payload)
        member, sender = self._find(row, peer)
        notice = self._membership.notice_for(member, row.when_lost, row.when_over)
        if notice is not None and channel == DATA:
            raise _refusal(member.rank, notice)
        member.last_seen = now
        if notice is not None:
            return [Out(peer, channel, notice)]
        if row.in_parts:
            return self._hold(row, sender, message, payload)
        return self._handle(row, sender, message, payload)

    def _find(self, row: Row, peer: Peer) -> tuple[Member, Sender]:
        """Return the rank at a connection, and the `Sender` of its message."""
        member = self._roster.find(row.channel, peer)
        if member is None:
            first = "attach first: this data connection" if row.channel == DATA else "say Hello first: this connection"
            raise Refused("stranger", f"{first} has not been admitted")
        rank, formed = member.rank, self._roster.formed
        counts_as = formed.counts_as(rank, self._replication.number) if row.channel == DATA else rank
        return member, Sender(peer, counts_as, formed.group_of(rank))

    def _hold(self, row: Row, sender: Sender, message: Any, payload: Payload) -> list[Out]:
        """Check this server's part of a request, and hold it until the other servers have theirs."""
        service = self._services[row.service]
        with self._refused_by_all(row, sender, message):
            self._check(row, sender)
            self._replication.check_number(sender.rank, message.request)
            if row.check is not None:
                row.check(service, sender, message)
            finite = row.is_finite is None or row.is_finite(service, sender, message, payload)
        return self._replication.hold(
            sender, message, finite, lambda decided: self._handle(row, decided, message, payload)
        )

    @contextlib.contextmanager
    def _refused_by_all(self, row: Row, sender: Sender, message: Any) -> Iterator[None]:
        """Make all servers refuse their parts of a message if this one refuses its part."""
        try:
            yield
        except OmniError as error:
            if row.in_parts:
                self._replication.refuse(sender.rank, message.request, refusal_of(error))
            raise

    def relayed(self, rank: int, data: bytes) -> list[Out]:
        """Handle a rank's encoded control message that the coordinating server has handled."""
        message = self.decode(CONTROL, data)
        sender = Sender(stand_in(rank), rank, self._roster.formed.group_of(rank))
        return self._handle(self._rows[type(message)], sender, message, b"")

    def forward(self, sender: Sender, data: bytes, payload: Payload) -> list[Out]:
        message = self.decode(CONTROL, data)
        row = self._row(CONTROL, message)
        if row.role in (Role.STRANGER, Role.OBSERVER) or row.message is m.ReadUpload:
            raise ProtocolError(f"a {type(message).__name__} cannot be uploaded")
        return self._handle(row, sender, message, payload)

    def check_payload(self, peer: Peer, message: Any) -> int:
        """Return the size of the payload that may follow a data message, if this peer may send it."""
        row = self._row(DATA, message)
        if row.payload is None:
            return 0
        member, sender = self._find(row, peer)
        with self._refused_by_all(row, sender, message):
            notice = self._membership.notice_for(member, row.when_lost, row.when_over)
            if notice is not None:
                raise _refusal(member.rank, notice)
            self._check(row, sender)
            if row.in_parts:
                self._replication.check_number(sender.rank, message.request)
            return row.payload(self._services[row.service], sender, message)

    def keeps_payload(self, message: m.Message) -> bool:
        row = self._row(DATA, message)
        return row.keeps or row.in_parts

    def _row(self, channel: m.Channel, message: m.Message) -> Row:
        row = self._rows.get(type(message))
        if row is None or row.channel != channel:
            raise ProtocolError(f"{type(message).__name__} does not belong on the {channel} channel")
        self._replication.check_addressee(row.message, row.in_parts)
        return row

    def _check(self, row: Row, sender: Sender) -> None:
        if row.role is Role.LEADER:
            self._roster.formed.check_leads(sender.rank, sender.group)
        elif row.role is Role.MEMBER:
            self._roster.formed.check_grouped(sender.rank, sender.group)
        elif row.role is Role.RECORDER and sender.rank != self._roster.recorder:
            raise ProtocolError(f"only rank {self._roster.recorder} {row.does}")

    def _handle(self, row: Row, sender: Sender, message: m.Message, payload: Payload) -> list[Out]:
        self._check(row, sender)
        if row.handle is None:
            raise ProtocolError(f"{type(message).__name__} does not belong on the {row.channel} channel")
        out = row.handle(self._services[row.service], sender, message, payload)
        if row.on_all_servers:
            self._replication.relay(sender.rank, message)
            out = self._replication.when_done(out)
        return out + self._membership.resolve_pending() if row.resolves else out


def _refusal(rank: int, notice: m.Notice) -> Refused:
    if notice.over:
        return Refused("over", notice.reason)
    return Refused("barred" if notice.barred else "lost", f"rank {rank} was evicted: {notice.reason}")
