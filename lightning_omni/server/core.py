"""The server's state machine: messages and times are its input, messages its output.

Rule 1: a peer that has not been admitted may only send the table's messages of strangers; others are refused and
counted.
Rule 2: the outgoing weights are the live ones: the driver sends (or copies) them before the next message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightning_omni.errors import CollectiveMismatch, MalformedMessage, OmniError, Refused, StepFailed
from lightning_omni.methods.model.modules import ResolveModule, module_resolver
from lightning_omni.methods.model.server_optimizer import Resolve, resolver
from lightning_omni.server.admission import Admission
from lightning_omni.server.collectives import CollectiveService
from lightning_omni.server.epochs.epoch import Epochs
from lightning_omni.server.epochs.service import LeaseService, ValidationService
from lightning_omni.server.event_log import EventRecorder, Recorder
from lightning_omni.server.membership.roster import Roster
from lightning_omni.server.membership.service import Joining, Membership
from lightning_omni.server.membership.timeouts import TimeLimits
from lightning_omni.server.merged_head import MergedHeadService
from lightning_omni.server.parameters.served_parameters import ServedParameters
from lightning_omni.server.parameters.store import ParameterStore
from lightning_omni.server.replication import Coordinator, Follower, Replication
from lightning_omni.server.restore import Restore, check_state
from lightning_omni.server.router import FOLLOWER_TABLE, TABLE, Router, Row
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Out, Payload, Peer, Service
from lightning_omni.server.snapshots import Snapshots
from lightning_omni.server.status import Observers, RunObservation, StatusService
from lightning_omni.server.training import Training
from lightning_omni.wire import messages as m
from lightning_omni.wire.journal import Entry, Journal
from lightning_omni.wire.messages import servers as sm

STRANGE = ("stranger", "key", "malformed")
"""Codes of refusals that are counted, because their receivers are no ranks of the run, or send invalid messages."""


class ServerCore:
    """The parameter server, without its sockets.

    Args:
        random: returns a number of random bytes (nonces).
        heartbeat_timeout: ``heartbeat`` of `TimeLimits`, in seconds; the other time-outs likewise.
        resolve: returns the class of a class path, as ``resolve_module`` does for a merged head's module.
        clock: returns seconds, to measure the server's arithmetic; None in virtual time.
        record: takes every event of the weights, in order.
        rows: messages in addition to the table, for ``services``.
        services: your own classes, constructed once for every run, with this core.
        servers: number of servers with a partition of the parameters each.
        number: number of this server; 0 coordinates the others.

    Attributes:
        now: time of the current message, in seconds.
        observers: processes that observe this server, also from one run to the next.
        router: router of the run's messages; `reset` replaces it, as it does ``admission``, ``membership``,
            ``training``, ``status_service`` and ``observation``.
        journal: takes the decisions since the state was saved.
        reconnect_timeout: seconds for which ranks look for this server when it is gone; 0 if no other continues.
        resumed: whether it has continued the run of an earlier server.
        on_run_over: called on a server other than 0 at the end of the run, before it forgets the run.
        data_port: port of the data socket, reported to every admitted rank; the driver sets it.
        versions: those of the server's packages, for observers; the driver sets them.
        strangers: refused messages that were malformed or whose sender had not been admitted, and connections that the
            driver refused.
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
        rows: Sequence[Row] = (),
        services: Sequence[Callable[[ServerCore], Service]] = (),
        servers: int = 1,
        number: int = 0,
        progress_timeout: float = math.inf,
        joined_heartbeat_timeout: float | None = None,
    ) -> None:
        self.key = key
        self._random = random
        # The coordinating server reports silent ranks to the others.
        self.limits = (
            TimeLimits()
            if number > 0
            else TimeLimits(heartbeat_timeout, join_timeout, progress_timeout, joined_heartbeat_timeout)
        )
        self._resolve = resolve or resolver(())
        self._resolve_module = resolve_module or module_resolver(())
        self._clock = clock or self._last_now
        self._record = record
        self._more_services = tuple(services)
        self.now = 0.0
        self.replication: Replication
        table: Sequence[Row] = TABLE
        if number > 0:
            self.replication = Follower(number, servers)
        elif servers > 1:
            self.replication = Coordinator(key, random, servers, heartbeat_timeout, join_timeout, self._last_now)
            table = (*TABLE, *FOLLOWER_TABLE)
        else:
            self.replication = Replication()
        self._table = (*table, *rows)
        self.strangers = 0
        self.data_port = 0
        self.versions: dict[str, str] = {}
        self.observers = Observers(key, random)
        self.journal = Journal()
        self.reconnect_timeout = 0.0
        self.on_run_over: Callable[[], None] = lambda: None
        self.reset()

    def reset(self) -> None:
        self.now, self.roster, self.resumed = 0.0, Roster(self.key), False
        self._store, self._epochs, replication = ParameterStore(), Epochs(self.journal), self.replication
        self.events = EventRecorder(self._record, self._store, self._epochs, self._last_now, replication.count)
        run = RunContext(
            self.roster, self._store, self._epochs, self.events, self.journal, replication, self.limits, self._last_now
        )
        self.admission = Admission(run, self.key, self._random, lambda: self.data_port, lambda: self.reconnect_timeout)
        training = self.training = Training(run, self.admission)
        self._collective_service = CollectiveService(run, training, lambda *brought: self.router.forward(*brought))
        self._validation_service = ValidationService(run, training)
        self.status_service = StatusService(run, self._clock, lambda: self.strangers, lambda: training.pushes)
        self.observation = RunObservation(
            run, self.status_service, self.observers, lambda: self.membership.over, self._description
        )
        # The services are notified in this order.
        services: list[Service] = [
            replication,
            self._collective_service,
            LeaseService(run, training),
            training,
            self._validation_service,
            Snapshots(run, training, self._resolve, self._resolve_module),
            MergedHeadService(run, self._clock),
            self.status_service,
            self.observation,
            Joining(run, self._collective_service, self._random, lambda *asked: self.membership.join(*asked)),
            *(service(self) for service in self._more_services),
        ]
        self.membership = Membership(run, services, self.status_service, self._collective_service)
        self._restore = Restore(
            run, self.membership, services, training, self._collective_service, self._validation_service
        )
        self.router = Router(self._table, [self.admission, self.membership, *services], self.roster, replication)
        replication.begin(self.membership.end, lambda: self.roster.live)

    # --- Called by the driver ----------------------------------------------------------------------------------------

    def decode(self, channel: m.Channel, data: bytes | memoryview) -> m.Message:
        return self.router.decode(channel, data)

    def check_payload(self, peer: Peer, message: m.Message) -> int:
        """Return the size of a data message's payload, before memory is allocated for it.

        Raises:
            ProtocolError: this peer may not send the message, or not this many bytes. With several servers, all refuse
                their parts.
        """
        try:
            return self.router.check_payload(peer, message)
        except Refused as no:
            self._count(no)
            raise

    def receive(self, channel: m.Channel, peer: Peer, message: m.Message, payload: Payload, now: float) -> list[Out]:
        """Handle a message at ``now``, in seconds on any monotonic clock, and return the messages to send."""
        self._pass_time(self.now if self.replication.number else now)
        self.status_service.begin(message)
        try:
            return self._sent(self.router.route(channel, peer, message, payload, now))
        except Refused as no:
            self._count(no)
            return self._sent([Out(peer, channel, m.RefusedMessage(code=no.code, reason=str(no)))])
        except (CollectiveMismatch, StepFailed) as error:
            return self._sent(self.membership.end(str(error)))
        except OmniError as error:
            return self._sent([Out(peer, channel, m.RefusedMessage(code="protocol", reason=str(error)))])

    def follow(self, message: m.Message) -> list[Out]:
        replication = self.replication
        assert isinstance(replication, Follower)
        if not isinstance(message, sm.ServerCommand):
            return []
        self._pass_time(message.now)
        self.status_service.begin(message)
        try:
            out = self._execute(replication, message)
        except StepFailed as error:  # it ends the run, as at the other servers, and no server
            replication.fail(str(error), of_run=True)
            out = []
        replication.commands_executed += 1
        if isinstance(message, (sm.AdmitRank, sm.HandleMessage)):  # a rank waits for this report
            replication.report()
        return self._sent(out)

    def follower_hello(self, address: str, nonce: bytes) -> sm.FollowerHello:
        replication = self.replication
        return sm.FollowerHello(
            version=m.VERSION, number=replication.number, servers=replication.count, address=address, nonce=nonce
        )

    def _execute(self, replication: Follower, message: sm.ServerCommand) -> list[Out]:
        match message:
            case sm.ExpireTimers():
                return self.training.expire(message.now)
            case sm.DecideRequest():
                return replication.decide(message)
            case sm.IdleLeader():
                return self.training.idle(message.rank)
            case sm.ResumeLeader():
                self.training.resume(message.rank)
            case sm.AdmitRank():
                self.roster.add_member(_peer_of(message.hello.rank), message.hello, message.challenge, self.now)
                self.roster.joining = self.roster.can_continue = message.joins  # the coordinator reports the end
            case sm.HandleMessage():
                return self.router.relay(_peer_of(message.rank), message.rank, message.message)
            case sm.LoseRank():
                return self.membership.lose(message.rank, message.reason)
            case sm.EndRun(reason=""):
                if self.roster.run:  # else this server has seen the end first
                    self.on_run_over()
                self.reset()
            case sm.EndRun():
                return self.membership.end(message.reason)
            case _:
                raise MalformedMessage(f"{type(message).__name__} is nothing that a server is told to do")
        return []

    def _sent(self, out: list[Out]) -> list[Out]:
        """Return the messages to send; only server 0 has control connections to ranks."""
        out = [each for each in out if each.peer]  # ranks that have not reconnected have no peer
        if self.replication.number:
            out = [each for each in out if each.channel == m.DATA]
        return out + self.replication.drain()

    def refuse(self, channel: m.Channel, peer: Peer, reason: str) -> list[Out]:
        self.strangers += 1
        return [Out(peer, channel, m.RefusedMessage(code="malformed", reason=reason))]

    def tick(self, now: float) -> list[Out]:
        """Pass the time: methods continue, and silent, late or stalled ranks are lost."""
        if self.replication.number:  # the coordinating server handles time limits
            return self._sent(self.replication.tick(now))
        self._pass_time(now)
        self.status_service.tick(now)
        self.observation.tick(now)
        # A method's answers must be passed to the socket before the loss of a rank can change the weights again.
        try:
            out = self.training.expire(now) or self.membership.tick(now)
        except StepFailed as error:
            out = self.membership.end(str(error))
        return self._sent(out + self.replication.tick(now))

    @property
    def due(self) -> float:
        return math.inf if self.replication.number else self.training.due

    def lose(self, rank: int, reason: str) -> list[Out]:
        return self._sent(self.membership.lose(rank, reason))

    def hang_up(self, peer: Peer) -> list[Out]:
        self.observers.forget(peer)
        self.roster.numbers.withdraw(peer)
        return self._sent(self.membership.hang_up(peer) + self.replication.hang_up(peer))

    def fail(self, reason: str) -> list[Out]:
        if isinstance(self.replication, Follower):
            self.replication.fail(reason)
            return self._sent([])
        return self._sent(self.membership.end(f"the parameter server failed: {reason}"))

    # --- Saved state -------------------------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """Return whether a run is under way that `state` can represent completely."""
        return bool(self._store.all) and not self._store.heads and not self.over and not self.is_over

    def state(self) -> dict[str, Any]:
        """Return the state from which another server can continue the run, as plain values and live tensors.

        Call it between two messages, if `has_state`; later decisions go to the `journal`.
        """
        return self._restore.state()

    def server_ended(self, number: int, how: str) -> None:
        assert isinstance(self.replication, Coordinator)
        self.replication.ended(number, how)

    def load(self, state: Mapping[str, Any], journal: Iterable[Entry], now: float) -> None:
        """Continue a run with the weights of a `state`, and all decisions since.

        Raises:
            ConfigurationError: this server cannot continue from the state.
        """
        check_state(state)
        self.reset()
        self.now, self.resumed = now, True
        self._restore.load(state, journal, now)
        self._pass_time(now)

    # --- Status ------------------------------------------------------------------------------------------------------

    @property
    def over(self) -> str:
        return self.membership.over

    @property
    def is_over(self) -> bool:
        return self.roster.is_over

    @property
    def generation(self) -> int:
        """Return the recorder's count of formings of groups."""
        return self.roster.formed.message.generation if self.roster.formed.message is not None else 0

    @property
    def peers(self) -> list[Peer]:
        """Return the control connections of ranks that have not left, other servers, observers, joining groups."""
        if self.replication.number:
            return []
        watching = self.observers.peers + self.roster.numbers.peers
        return self.membership.peers + self.replication.peers + list(dict.fromkeys(watching))

    def is_admitted(self, channel: m.Channel, peer: Peer) -> bool:
        if channel == m.CONTROL and (peer in self.replication.peers or self.observers.has(peer)):
            return True
        return self.admission.find(channel, peer) is not None

    def data_connection(self, rank: int) -> tuple[Peer, bytes] | None:
        return self.admission.data_connection(rank)

    @property
    def optimizers(self) -> list[ServedParameters]:
        return self._store.all

    @property
    def clock(self) -> int:
        return self._store.clock

    def note_life(self, peer: Peer, now: float) -> None:
        if (member := self.roster.by_peer(peer)) is not None:
            member.last_seen = now

    def set_host(self, peer: Peer, host: str) -> None:
        if (member := self.roster.by_peer(peer)) is not None:
            member.host = host

    def _pass_time(self, now: float) -> None:
        self.now = now
        self.training.set_time(now)

    def _count(self, no: Refused) -> None:
        self.strangers += no.code in STRANGE

    @property
    def missing_servers(self) -> int:
        return self.replication.missing if isinstance(self.replication, Coordinator) else 0

    @property
    def lost_server(self) -> str:
        """Return a sentence about a lost server, without which no run can be served, or ""."""
        return self.replication.lost_server if isinstance(self.replication, Coordinator) else ""

    def _description(self) -> m.ServerDescription:
        return m.ServerDescription(
            versions=self.versions,
            data_port=self.data_port,
            heartbeat_timeout=self.limits.heartbeat_of(self.roster.joining),
            progress_timeout=self.limits.progress,
            servers=self.replication.count,
            reconnect_timeout=self.reconnect_timeout,
            joined_heartbeat_timeout=self.limits.heartbeat_of(joining=True),
        )

    def _last_now(self) -> float:
        return self.now


def _peer_of(rank: int) -> Peer:
    """Return a stand-in for a rank's control connection, at a server that has none."""
    return b"\0%d" % rank
