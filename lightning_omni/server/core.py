"""The server's state machine: messages and times are its input, messages its output.

Rule 1: a peer that has not been admitted may only send the table's messages of strangers; others are refused and
counted.
Rule 2: the outgoing weights are the live ones: the driver sends (or copies) them before the next message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightning_omni.errors import (
    CollectiveMismatch,
    ConfigurationError,
    MalformedMessage,
    OmniError,
    ProtocolError,
    Refused,
    StepFailed,
)
from lightning_omni.methods.model.modules import ResolveModule, module_resolver
from lightning_omni.methods.model.server_optimizer import Resolve, resolver
from lightning_omni.server.admission import Admission
from lightning_omni.server.collectives import CollectiveService
from lightning_omni.server.epochs.epoch import Epochs
from lightning_omni.server.epochs.service import EpochService
from lightning_omni.server.event_log import EventRecorder, Recorder
from lightning_omni.server.membership.roster import Roster
from lightning_omni.server.membership.service import Joining, Membership
from lightning_omni.server.membership.timeouts import TimeLimits
from lightning_omni.server.merged_head import MergedHeadService
from lightning_omni.server.parameters.store import ParameterStore
from lightning_omni.server.replication import Coordinator, Follower, Replication
from lightning_omni.server.router import COORDINATOR_TABLE, TABLE, Router, Row
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Out, Payload, Peer, Service
from lightning_omni.server.snapshots import Snapshots
from lightning_omni.server.status import Observers, StatusService
from lightning_omni.server.training import Training
from lightning_omni.wire import messages as m
from lightning_omni.wire.journal import Call, Journal
from lightning_omni.wire.messages import servers as sm

STATE, STATE_VERSION = "lightning_omni.server_state", 7
"""Name and version of a saved state."""
STRANGE = ("stranger", "key", "malformed")
"""Codes of refusals that are counted, because their receivers are no ranks of the run, or send invalid messages."""


class ServerCore:
    """The parameter server, without its sockets.

    Args:
        random: returns random bytes.
        heartbeat_timeout: ``heartbeat`` of `TimeLimits`, in seconds; the other time-outs likewise.
        resolve: returns the class of a class path, as ``resolve_module`` does for a merged head's module.
        clock: returns seconds, to measure the server's arithmetic; None in virtual time.
        record: takes every event of the weights, in order.
        rows: messages in addition to the table, for ``services``.
        services: your own classes, constructed with this core at each `reset`.
        servers: number of servers with a partition of the parameters each.
        number: number of this server; 0 coordinates the others.

    Attributes:
        observers: processes that observe this server, also from one run to the next.
        reconnect_timeout: seconds for which ranks look for this server when it is gone; 0 if no other continues.
        resumed: whether it continues the run of an earlier server.
        on_run_over: called on other servers than 0 when a run has ended at server 0, and not here yet.
        data_port: port of the data socket, reported to every admitted rank; the driver sets it.
        versions: those of the server's packages, for observers; the driver sets them.
        strangers: number of connections that the driver refused, and of refused messages that it could not read, of
            senders that had not been admitted, and of those with another key.
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
        if number > 0:
            self.replication = Follower(number, servers)
            self._table = (*TABLE, *rows)
        else:
            self.replication = Coordinator(key, random, servers, heartbeat_timeout, join_timeout, self._last_now)
            self._table = (*TABLE, *COORDINATOR_TABLE, *rows)
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
        self.store, self.epochs, replication = ParameterStore(), Epochs(), self.replication
        self.epochs.journal = self.journal
        self.events = EventRecorder(self._record, self.store, self.epochs, self._last_now, replication.count)
        run = RunContext(
            self.roster, self.store, self.epochs, self.events, self.journal, replication, self.limits, self._last_now
        )
        self.admission = Admission(run, self.key, self._random, lambda: self.data_port, lambda: self.reconnect_timeout)
        training = self.training = Training(run)
        self._collective_service = CollectiveService(run, training, lambda *brought: self.router.forward(*brought))
        self._epoch_service = EpochService(run, training)
        self.status_service = StatusService(
            run,
            self.observers,
            self._clock,
            lambda: self.strangers,
            lambda: training.pushes,
            self._description,
        )
        # The services are notified in this order.
        self._services: list[Service] = [
            replication,
            self._collective_service,
            self._epoch_service,
            training,
            Snapshots(run, training, self._resolve, self._resolve_module),
            MergedHeadService(run, self._clock),
            self.status_service,
            Joining(run, self._collective_service, self._random, lambda *asked: self.membership.join(*asked)),
            *(service(self) for service in self._more_services),
        ]
        self.membership = Membership(run, self._services, self.status_service, self._collective_service)
        self.router = Router(self._table, [self.admission, self.membership, *self._services], self.roster, replication)
        replication.begin(self.membership.end, lambda: self.roster.live, self.router.relayed)
        replication.send_to_all(self.begin_next_run)

    def begin_next_run(self) -> None:
        """Forget the run, as the coordinating server has done."""
        if self.roster.run:  # else this server has seen the end first
            self.on_run_over()
        self.reset()

    # --- Called by the driver ----------------------------------------------------------------------------------------

    def decode(self, channel: m.Channel, data: bytes | memoryview) -> m.Message:
        return self.router.decode(channel, data)

    def check_payload(self, peer: Peer, message: m.Message) -> int:
        """Return the size of a data message's payload, before memory is allocated for it.

        Raises:
            ProtocolError: this peer may not send the message, or not this many bytes. With several servers, all refuse
                their parts.
        """
        return self.router.check_payload(peer, message)

    def receive(self, channel: m.Channel, peer: Peer, message: m.Message, payload: Payload, now: float) -> list[Out]:
        """Handle a message at ``now``, in seconds on any monotonic clock, and return the messages to send."""
        self._pass_time(self.now if self.replication.number else now)
        self.status_service.begin(message)
        try:
            return self._sent(self.router.route(channel, peer, message, payload, now))
        except Refused as no:
            return self.refuse(channel, peer, no)
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
        training, membership = self.training, self.membership
        awaited = self.admission.follow, self.router.relayed  # a rank waits for the report on these
        methods = membership.lose, membership.end, training.expire, training.idle, training.resume, replication.decide
        try:
            out = message.call.make((*awaited, *methods, self.begin_next_run)) or []
        except StepFailed as error:  # it ends the run, as at the other servers, and no server
            replication.fail(str(error), of_run=True)
            out = []
        replication.commands_executed += 1
        if message.call.method in [each.__qualname__ for each in awaited]:
            replication.tick(self.now)
        return self._sent(out)

    def follower_hello(self, address: str, nonce: bytes) -> sm.FollowerHello:
        replication = self.replication
        return sm.FollowerHello(
            version=m.VERSION, number=replication.number, servers=replication.count, address=address, nonce=nonce
        )

    def _sent(self, out: list[Out]) -> list[Out]:
        """Return the messages to send; only server 0 has control connections to ranks."""
        out = [each for each in out if each.peer]  # ranks that have not reconnected have no peer
        if self.replication.number:
            out = [each for each in out if each.channel == m.DATA]
        return out + self.replication.drain()

    def refuse(self, channel: m.Channel, peer: Peer, error: ProtocolError) -> list[Out]:
        """Answer a message that is malformed or refused; count it if it is malformed or a stranger's."""
        code = error.code if isinstance(error, Refused) else "malformed"
        self.strangers += code in STRANGE
        # A server that holds a share answers here, too: the sender would wait in vain.
        return [Out(peer, channel, m.RefusedMessage(code=code, reason=str(error))), *self.replication.drain()]

    def tick(self, now: float) -> list[Out]:
        """Pass the time: methods continue, and silent, late or stalled ranks are lost."""
        if self.replication.number:  # the coordinating server handles time limits
            return self._sent(self.replication.tick(now))
        self._pass_time(now)
        self.status_service.tick(now)
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
        self.observers.peers.pop(peer, None)
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
        return bool(self.store.all) and not self.store.heads and not self.roster.over and not self.roster.is_over

    def state(self) -> dict[str, Any]:
        """Return the state from which another server can continue the run, as plain values and live tensors.

        Call it between two messages, if `has_state`; later decisions go to the `journal`.
        """
        services = {type(each).__name__: each.state() for each in self._services}
        return {
            "name": STATE,
            "version": STATE_VERSION,
            "protocol": m.VERSION,
            "roster": self.roster.state(),
            "services": {name: state for name, state in services.items() if state is not None},
        }

    def load(self, state: Mapping[str, Any], journal: Iterable[Call], now: float) -> None:
        """Continue a run with the weights of a `state`, and all decisions since.

        Raises:
            ConfigurationError: this server cannot continue from the state.
        """
        if state.get("name") != STATE or (state.get("version"), state.get("protocol")) != (STATE_VERSION, m.VERSION):
            raise ConfigurationError(
                f"the state is that of {state.get('name')} {state.get('version')} with protocol"
                f" {state.get('protocol')}, and this server reads {STATE} {STATE_VERSION} with protocol {m.VERSION};"
                " start the server in an empty directory"
            )
        self.reset()
        self.now, self.resumed = now, True
        self.roster.load(state["roster"], now)
        for service in self._services:
            if (saved := state["services"].get(type(service).__name__)) is not None:
                service.load(saved)
        writes, self.journal.write = self.journal.write, None
        self._repeat(journal)
        self.epochs.go_back()
        for group in self.epochs.validations.evaluating:  # groups that wait for others report that again
            self.training.idle(self.roster.formed.exchanges_with(group, 0))
        self.journal.write, self.journal.is_due = writes, True
        self._pass_time(now)

    def _repeat(self, journal: Iterable[Call]) -> None:
        epochs, validations, membership = self.epochs, self.epochs.validations, self.membership
        methods = (
            *(epochs.open, epochs.train, epochs.draw, epochs.wait, epochs.resolve_pending, epochs.leave),
            *(epochs.go_back, validations.claim, validations.publish, validations.save),
            *(self._epoch_service.read_result, self._collective_service.gather, self.roster.numbers.assign),
            *(membership.lose_again, membership.leave, membership.join_again, self.training.restructure_again),
        )
        try:
            for call in journal:
                call.make(methods)
        except MalformedMessage as error:
            raise ConfigurationError(
                f"{error}: other groups were formed, or weights were handed over after the state was saved, and before"
                " it was saved again; this run cannot go on: resume it from a checkpoint"
            ) from error

    # --- Status ------------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Return the recorder's count of formings of groups."""
        return self.roster.formed.message.generation if self.roster.formed.message is not None else 0

    @property
    def peers(self) -> list[Peer]:
        """Return the control connections of ranks that have not left, other servers, observers, joining groups."""
        if self.replication.number:
            return []
        watching = dict.fromkeys([*self.observers.peers, *self.roster.numbers.peers])
        return [*self.membership.peers, *self.replication.peers, *watching]

    def is_admitted(self, channel: m.Channel, peer: Peer) -> bool:
        if channel == m.CONTROL and (peer in self.replication.peers or peer in self.observers.peers):
            return True
        return self.roster.find(channel, peer) is not None

    def _pass_time(self, now: float) -> None:
        self.now = now
        self.training.set_time(now)

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
