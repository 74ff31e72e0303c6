"""Membership: the forming and joining of groups, the loss and departure of ranks, and the end of the run.

Rule 1: each service handles a loss itself; this module only decides their order.
Rule 2: when the run cannot continue, every rank is notified once, and again at later requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from torch import Tensor

from lightning_omni.errors import ProtocolError, Refused, StepFailed
from lightning_omni.methods import REGISTRY
from lightning_omni.server.collectives import CollectiveService
from lightning_omni.server.membership.roster import TRAINED_TO_ITS_END, Member
from lightning_omni.server.replication import refusal_of
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Out, Payload, Peer, Sender, Service, as_tensor
from lightning_omni.server.status import StatusService
from lightning_omni.topology import Topology
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import Packed
from lightning_omni.wire.formats.base import from_wire


class Membership:
    """The participating ranks and groups of a run; it notifies ``services`` of changes, in this order."""

    def __init__(
        self,
        run: RunContext,
        services: Sequence[Service],
        monitoring: StatusService,
        synchronization: CollectiveService,
    ) -> None:
        self._roster, self._epochs, self._journal = run.roster, run.epochs, run.journal
        self._replication, self._limits, self._now = run.replication, run.limits, run.now
        self._services = services
        self._waited_for = [each for each in services if type(each).resolve_pending is not Service.resolve_pending]
        self._status_service, self._collective_service = monitoring, synchronization

    @property
    def peers(self) -> list[Peer]:
        members = self._roster.members.items()
        return [member.peer for rank, member in members if member.peer and rank not in self._roster.gone]

    # --- Saved state --------------------------------------------------------------------------------------------------

    def lose_again(self, rank: int, reason: str, barred: bool) -> None:
        group, _ = self._roster.lose(rank, reason, barred)
        if group is not None:
            self._evict(group, lost=True)

    def join_again(self, message: m.Join) -> None:
        self._roster.expect(message.ranks, self._now())
        self._join(message)

    def notice_for(self, member: Member, even_lost: bool, even_over: bool) -> m.Notice | None:
        """Return the notice that a rank receives instead of an answer: it is lost, or the run is over; else None."""
        if member.rank in self._roster.lost and not even_lost:
            barred = member.rank in self._roster.barred
            return m.Notice(lost=self._roster.lost_ranks, reason=self._roster.lost[member.rank], barred=barred)
        if self._roster.over and not even_over:
            return m.Notice(lost=self._roster.lost_ranks, reason=self._roster.over, over=True)
        return None

    # --- Messages ----------------------------------------------------------------------------------------------------

    def form(self, sender: Sender, message: m.FormGroups, payload: Payload) -> list[Out]:
        topology = Topology(message.groups)
        if topology.ranks != self._roster.live:
            raise ProtocolError(
                f"the groups {message.groups} are not a partition of the live ranks {self._roster.live}"
            )
        method = REGISTRY.from_wire(message.method)
        from_wire(message.wire_format)  # refuses an unknown format before anything has changed
        if message.by_member and any(
            len(topology.members(group)) % self._replication.count for group in topology.alive
        ):
            raise ProtocolError(
                f"the members of the groups {message.groups} exchange a share each, and there are"
                f" {self._replication.count}"
                " servers: the size of each group must be a multiple of that"
            )
        formed = self._roster.formed
        formed.form(message)
        self._journal.outdate()
        for service in self._services:
            service.form(topology, method, message)
        # Ranks that read the status before their next heartbeat should see these groups.
        return [
            *self._send_to_everyone(self._status_service.status(-1.0)),
            Out(sender.peer, m.CONTROL, m.GroupsFormed(generation=message.generation, incarnation=formed.incarnation)),
        ]

    def join(self, sender: Sender, message: m.Join, payload: Payload) -> list[Out]:
        if not message.ranks or message.ranks[0] != sender.rank:
            raise ProtocolError(f"rank {sender.rank} speaks for no group of {message.ranks}: the first of them does")
        formed = self._roster.formed
        if formed.by_member and len(message.ranks) % self._replication.count:
            raise ProtocolError(
                f"the members of the groups exchange a share each, with {self._replication.count} servers, and"
                f" {len(message.ranks)} ranks want to be one more: the size of each group must be a multiple of that"
            )
        group = formed.group_of(sender.rank)
        if group < 0 or message.ranks != formed.members(group):  # else the answer was lost, and the rank repeats
            group = self._join(message)
        assert formed.message is not None
        joined = m.Joined(
            group=group,
            incarnation=formed.identity(group).incarnation,
            generation=formed.message.generation,
            groups=self._roster.formed.alive,
            method=formed.message.method,
            wire_format=formed.message.wire_format,
            plan=self._epochs.book.plan if self._epochs.book is not None else None,
            overlap=formed.message.overlap,
            live=self._roster.live,
            synchronizations=self._collective_service.completed,
        )
        out = [*self._send_to_everyone(self._status_service.status(-1.0)), Out(sender.peer, m.CONTROL, joined)]
        # Only now, because the request may have waited.
        self._replication.relay(sender.rank, message)
        return self._replication.when_done(out)

    def _join(self, message: m.Join) -> int:
        group = self._roster.join(message.ranks, message.name)
        for service in self._services:
            service.join(group, message.ranks)
        self._journal.note(self.join_again, message)
        self._journal.is_due = True
        return group

    def report_lost(self, sender: Sender, message: m.RankEnded, payload: Payload) -> list[Out]:
        return self.lose(message.rank, message.reason)

    def evict(self, sender: Sender, message: m.Evict, payload: Payload) -> list[Out]:
        roster, group = self._roster, message.group
        if roster.over:
            raise ProtocolError(f"the run is over: {roster.over}")
        if group not in roster.formed.alive or roster.formed.identity(group).incarnation != message.incarnation:
            raise ProtocolError(f"there is no group {group} of incarnation {message.incarnation} any more")
        name, ranks = roster.formed.identity(group).name, roster.formed.members(group)
        if roster.ends_with(group):
            raise ProtocolError(f"group {name} cannot be evicted, for the run would end with it; stop the run instead")
        if message.bars:
            if not roster.joining:
                raise ProtocolError("no group joins this run on its own: there is nothing to bar its addresses from")
            roster.barred_hosts |= {roster.members[rank].host for rank in ranks if rank in roster.members} - {""}
            self._journal.is_due = True
        live = next(rank for rank in ranks if rank in roster.live)
        out = self.lose(live, f"group {name} was evicted by hand", barred=True)
        return [*out, Out(sender.peer, m.CONTROL, m.Acknowledged())]

    def goodbye(self, sender: Sender, message: m.Goodbye, payload: Payload) -> list[Out]:
        out = [Out(sender.peer, m.CONTROL, m.Acknowledged())]
        self._replication.relay(sender.rank, message)
        if message.reason:
            out += self.lose(sender.rank, message.reason, barred=True)
            self._roster.finished |= message.finished
            self._roster.leave(sender.rank)
            return out
        return out + self.leave(sender.rank, message.finished)

    def leave(self, rank: int, finished: bool) -> list[Out]:
        group = self._roster.formed.group_of(rank)
        out = self._evict(group, lost=False) if group >= 0 else []
        self._roster.finished |= finished
        self._roster.leave(rank)
        self._journal.note(self.leave, rank, finished)
        return out + self._notify_of_end()

    def _notify_of_end(self) -> list[Out]:
        roster = self._roster
        if roster.over or not roster.is_over or not (roster.finished or roster.joining):
            return []
        return self._send_end(TRAINED_TO_ITS_END if roster.finished else _BEGINNER_IS_GONE)

    def _send_end(self, reason: str) -> list[Out]:
        notice = m.Notice(lost=self._roster.lost_ranks, reason=reason, over=True)
        return [Out(peer, m.CONTROL, notice) for peer in (*self.peers, *self._roster.numbers.peers)]

    # --- Losses ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Out]:
        out, roster, limits = list[Out](), self._roster, self._limits
        for rank, reason in list(limits.stalled(roster, now, self._collective_service.contributed)):
            out += self.lose(rank, reason)
        for rank, reason in list(limits.silent(roster, now)):
            if roster.over:
                roster.gone.add(rank)
            out += self.lose(rank, reason)
        return out

    def hang_up(self, peer: Peer) -> list[Out]:
        member = self._roster.find(m.CONTROL, peer)
        if member is None:
            return []
        out = self.lose(member.rank, f"rank {member.rank} is gone without a goodbye: its process or its machine failed")
        self._roster.gone.add(member.rank)
        return out or self.resolve_pending()  # its group may wait to be admitted

    def lose(self, rank: int, reason: str, barred: bool = False) -> list[Out]:
        """Evict the group of a dead rank, or end the run; if ``barred``, the group must not rejoin by itself."""
        if rank not in self._roster.live or self._roster.over:  # it is gone already, or is in no group yet
            return []
        self._replication.send_to_all(self.lose, rank, reason, barred)
        group, over = self._roster.lose(rank, reason, barred)
        if over:
            return self.end(f"{reason}; the run cannot go on without it")
        assert group is not None
        self._journal.note(self.lose_again, rank, reason, barred)
        out = self._send_to_everyone(m.Notice(lost=self._roster.lost_ranks, reason=reason, barred=barred))
        try:
            return out + self._evict(group, lost=True) + self.resolve_pending() + self._notify_of_end()
        except StepFailed as error:  # all other groups waited for it
            if self._replication.number:
                raise
            return out + self.end(str(error))

    def resolve_pending(self) -> list[Out]:
        return [out for service in self._waited_for for out in service.resolve_pending()]

    def end(self, reason: str) -> list[Out]:
        self._roster.over, self._roster.can_continue = reason, False
        self._replication.send_to_all(self.end, reason)
        return self._send_end(reason)

    def _evict(self, group: int, lost: bool) -> list[Out]:
        return [out for service in self._services for out in service.evict(group, lost)]

    def _send_to_everyone(self, message: m.Message) -> list[Out]:
        return [Out(peer, m.CONTROL, message) for peer in self.peers]


# --- Groups that join a running run -----------------------------------------------------------------------------------

# Rule 1: the server assigns rank numbers; the first group to request them begins the run, with its own settings.
# Rule 2: a group joins between two synchronization points of the others, after they have parted and the state for it
# was stored. Otherwise it would enter collectives that the others have begun or were called to without it. Until then
# it waits.
# Rule 3: it holds a batch as soon as it joins. Without one it would consider the epoch over.

_BEGINNER_IS_GONE = "the group that was to begin it is gone; start this one again, and it begins another"

Admit = Callable[[Sender, m.Join, Payload], list[Out]]
"""A function that admits a group at once: `lightning_omni.server.membership.service.Membership.join`."""


class Joining(Service):
    def __init__(
        self, run: RunContext, synchronization: CollectiveService, random: Callable[[int], bytes], admit: Admit
    ) -> None:
        self._roster, self._epochs, self._journal = run.roster, run.epochs, run.journal
        self._replication, self._limits = run.replication, run.limits
        self._collective_service, self._random, self._admit = synchronization, random, admit
        self._waiting: dict[int, tuple[Sender, m.Join]] = {}
        self._stored: tuple[Packed, Tensor] | None = None
        self._stored_at = -1
        self._called = (-1, 0)  # to validations, when the state was stored

    # --- Messages ----------------------------------------------------------------------------------------------------

    def register(self, sender: Sender, message: m.RegisterGroup, payload: Payload) -> list[Out]:
        first, announced = self._roster.register(sender.peer, message.ranks, self._random(8).hex())
        if announced:
            self._journal.note(self._roster.numbers.assign, first + message.ranks)
        run = self._roster.run or self._roster.numbers.claimed
        silence = self._limits.silence_of_connections
        enlisted = m.GroupRegistered(run=run, first=first, announced=announced, silence=silence)
        return [Out(sender.peer, m.CONTROL, enlisted)]

    def ask(self, sender: Sender, message: m.Join, payload: Payload) -> list[Out]:
        """Admit a group that was not announced; it is answered once it has joined."""
        # It may be admitted already: by the coordinating server, or by an earlier one whose answer was lost.
        if not self._roster.joining or self._replication.number or sender.group >= 0:
            return self._admit(sender, message, payload)
        self._waiting[sender.rank] = sender, message
        return self.resolve_pending()

    def store(self, sender: Sender, message: m.StoreRunState, payload: Payload) -> list[Out]:
        self._stored = message.packed, as_tensor(payload)
        self._stored_at, self._called = self._collective_service.completed, self._epochs.called
        self._roster.can_continue = True
        self._journal.is_due = True
        return [Out(sender.peer, m.DATA, m.RunStateStored())]

    def read(self, sender: Sender, message: m.ReadRunState, payload: Payload) -> list[Out]:
        if self._stored is None:
            raise Refused("state", "nothing was stored for groups that join")
        packed, buffer = self._stored
        return [Out(sender.peer, m.DATA, m.StoredRunState(packed=packed, nbytes=buffer.numel()), (buffer,))]

    def state(self) -> dict[str, Any] | None:
        if self._stored is None:
            return None
        packed, buffer = self._stored
        stored = {"packed": msgspec.msgpack.encode(packed), "buffer": buffer}
        return {**stored, "at": self._stored_at, "called": list(self._called)}

    def load(self, state: dict[str, Any]) -> None:
        self._stored = msgspec.msgpack.decode(state["packed"], type=Packed), state["buffer"].clone()
        self._stored_at, self._roster.can_continue = state["at"], True
        epoch, times = state["called"]
        self._called = epoch, times

    # --- Pending requests --------------------------------------------------------------------------------------------

    def resolve_pending(self) -> list[Out]:
        out: list[Out] = []
        for rank, (sender, message) in list(self._waiting.items()):
            if rank in self._roster.gone:
                del self._waiting[rank]
            elif gone := self._roster.gone.intersection(message.ranks):
                del self._waiting[rank]
                reason = f"rank {min(gone)} is gone before its group was admitted"
                out.append(Out(sender.peer, m.CONTROL, m.RefusedMessage(code="lost", reason=reason)))
            elif reason := self._over:
                del self._waiting[rank]
                out.append(Out(sender.peer, m.CONTROL, m.RefusedMessage(code="over", reason=reason)))
            elif self._is_open:
                del self._waiting[rank]
                out += self._add_group(sender, message)
        return out

    @property
    def _over(self) -> str:
        if self._roster.finished:
            return TRAINED_TO_ITS_END
        if not self._roster.live and not self._roster.can_continue:
            return _BEGINNER_IS_GONE
        return ""

    @property
    def _is_open(self) -> bool:
        book = self._epochs.book
        if self._stored is None or book is None:
            return False
        if not self._roster.live:  # without live ranks no collective or stop is under way
            return True
        # No synchronization or validation may have begun since the state was stored.
        completed, contributed = self._collective_service.completed, self._collective_service.contributed
        have_parted = (completed, self._epochs.called) == (self._stored_at, self._called) and not contributed
        return have_parted and not book.is_drained and not self._epochs.stop

    def _add_group(self, sender: Sender, message: m.Join) -> list[Out]:
        try:
            return self._admit(sender, message, b"")
        except ProtocolError as error:
            return [Out(sender.peer, m.CONTROL, refusal_of(error))]
