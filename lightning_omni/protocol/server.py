"""The server's state machine: messages and the time go in, messages come out. No sockets, clocks or threads.

Here its services are put together. What a message is, which rank may send it and which service handles it stands in the
table in `router`; what happens when groups are formed or end, in `membership`; everything else is the services' own.

Rule 1: a peer that has not been admitted may say what the table lets a stranger say; all else is refused and counted.
Rule 2: the outgoing weights are the live ones: the driver sends (or copies) them before the next message in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_omni.errors import CollectiveMismatch, MalformedMessage, OmniError, Refused
from lightning_omni.methods.master import Resolve, resolver
from lightning_omni.methods.modules import ResolveModule, module_resolver
from lightning_omni.protocol import messages as m
from lightning_omni.protocol import shard_messages as sm
from lightning_omni.protocol.admission import Admission
from lightning_omni.protocol.aggregator import Aggregator
from lightning_omni.protocol.aggregators import Aggregators
from lightning_omni.protocol.data import DataLeasing
from lightning_omni.protocol.epochs import Epochs
from lightning_omni.protocol.evaluations import Evaluations
from lightning_omni.protocol.joining import Joining
from lightning_omni.protocol.journal import Entry, Journal
from lightning_omni.protocol.membership import Membership
from lightning_omni.protocol.merged_head import MergedHeads
from lightning_omni.protocol.monitoring import Monitoring
from lightning_omni.protocol.notes import Notes
from lightning_omni.protocol.observation import Happening, Observers, RunObservation
from lightning_omni.protocol.persistence import Persistence, check_state
from lightning_omni.protocol.record import Recorder
from lightning_omni.protocol.roster import Roster
from lightning_omni.protocol.router import AGGREGATOR_TABLE, AGGREGATORS_TABLE, SHARD_TABLE, TABLE, Router, Row
from lightning_omni.protocol.run_context import RunContext
from lightning_omni.protocol.service import Out, Payload, Peer, Service
from lightning_omni.protocol.shard import Shard
from lightning_omni.protocol.shard_servers import Coordinator, Follower, Servers
from lightning_omni.protocol.shards import HeldShards
from lightning_omni.protocol.snapshots import Snapshots
from lightning_omni.protocol.synchronization import Synchronization
from lightning_omni.protocol.time_limits import TimeLimits
from lightning_omni.protocol.training import Training

STRANGE = ("stranger", "key", "malformed")
"""Codes of refusals that are counted: their receivers are no ranks of the run, or send what cannot be read."""


class ServerCore:
    """The parameter server, without its sockets.

    Args:
        key: the run's shared secret.
        random: draws that many random bytes (nonces).
        heartbeat_timeout: seconds, ``heartbeat`` of `TimeLimits`.
        joined_heartbeat_timeout: its ``joined_heartbeat``.
        progress_timeout: its ``progress``; infinite for never.
        join_timeout: its ``join``.
        resolve: finds the class of an optimizer's class path.
        resolve_module: finds the class of a merged head's module.
        clock: tells the time that its arithmetic takes, in seconds; None if it takes none, in virtual time.
        record: told of everything that happens to the weights, in order.
        rows: messages beside those of the table, for ...
        services: ... services of your own. Each is a class that is made once for every run, with this core.
        shards: servers that hold a share of the weights each, this one among them.
        shard: which of them this is; number 0 coordinates the others.
        adds_up: whether it holds no weights, but adds up what groups push for another one: an aggregator.

    Attributes:
        journal: what has happened since the state was saved; what saves it (`state`) says where that is written.
        patience: seconds for which ranks look for this server again when it is gone, for another one will go on; what
            saves its state sets it. 0 if none will.
        goes_on: whether it has gone on with the run of a server before it.
        on_save: where this server holds a share, called when the one that coordinates says that all save their state
            now, with the number of this save.
        on_run_over: called when the one that coordinates says that the run is over, before it is forgotten here.
        key: the run's shared secret.
        limits: for how long it waits for ranks.
        data_port: told to every admitted rank; the driver of the machine sets it, and so does it ...
        about: ... this, which is told to processes that watch: what there is to know of the server's process. And ...
        began: ... this: see `lightning_omni.protocol.messages.Welcome`.
        strangers: messages refused because they were malformed or their sender had not been admitted.
        roster: the ranks of the run.
        notes: tells the recorder.
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
        shards: int = 1,
        shard: int = 0,
        adds_up: bool = False,
        progress_timeout: float = math.inf,
        joined_heartbeat_timeout: float | None = None,
    ) -> None:
        self.key = key
        self._random = random
        # Of ranks that are silent the server that coordinates tells the others.
        self.limits = (
            TimeLimits()
            if shard > 0 or adds_up
            else TimeLimits(heartbeat_timeout, join_timeout, progress_timeout, joined_heartbeat_timeout)
        )
        self._resolve = resolve or resolver(())
        self._resolve_module = resolve_module or module_resolver(())
        self._clock = clock or self._last_now
        self._record = record
        self._more_services = tuple(services)
        self._now = 0.0
        self.servers: Servers
        table: Sequence[Row] = TABLE
        if adds_up:
            self.servers, table = Aggregator(), AGGREGATOR_TABLE
        elif shard > 0:
            self.servers = Follower(shard, shards)
        elif shards > 1:
            self.servers = Coordinator(
                key, random, shards, heartbeat_timeout, join_timeout, self._last_now, lambda: self.patience > 0
            )
            table = (*TABLE, *SHARD_TABLE)
        else:
            self.servers = Aggregators(
                key, random, heartbeat_timeout, self._last_now, lambda: self.data_port, record is not None
            )
            table = (*TABLE, *AGGREGATORS_TABLE)
        self._table = (*table, *rows)
        self.strangers = 0
        self.data_port = 0
        self.about: Callable[[], m.About] = m.About
        self._observers = Observers(key, random)
        self.journal = Journal()
        self.patience, self.began = 0.0, 0
        self.on_save: Callable[[int], None] = lambda number: None
        self.on_run_over: Callable[[], None] = lambda: None
        self.reset()

    def reset(self) -> None:
        """Forgets the run; the next one may come."""
        self._now, self.roster, self.goes_on = 0.0, Roster(self.key), False
        self._shards, self._epochs, servers = HeldShards(), Epochs(self.journal), self.servers
        self.notes = Notes(self._record, self._shards, self._epochs, self._last_now, servers.count)
        run = RunContext(
            self.roster, self._shards, self._epochs, self.notes, self.journal, servers, self.limits, self._last_now
        )
        self._admission = Admission(
            run, self.key, self._random, lambda: self.data_port, lambda: (self.patience, self.clock, self.began)
        )
        training = self._training = Training(run, self._admission)
        self._synchronization = Synchronization(run, training, lambda *brought: self._router.forward(*brought))
        self._evaluations = Evaluations(run, training)
        self._monitoring = Monitoring(run, self._work_time, lambda: self.strangers, lambda: training.pushes)
        self._observation = RunObservation(
            run, self._monitoring, self._observers, lambda: self._membership.over, self._description
        )
        # In the order in which they are told what concerns all.
        services: list[Service] = [
            servers,
            self._synchronization,
            DataLeasing(run, training),
            training,
            self._evaluations,
            Snapshots(run, training, self._resolve, self._resolve_module),
            MergedHeads(run, self._work_time),
            self._monitoring,
            self._observation,
            Joining(run, self._synchronization, self._random, lambda *asked: self._membership.join(*asked)),
            *(service(self) for service in self._more_services),
        ]
        self._membership = Membership(run, services, self._monitoring, self._synchronization)
        self._persistence = Persistence(
            run, self._membership, services, training, self._synchronization, self._evaluations
        )
        self._router = Router(self._table, [self._admission, self._membership, *services], self.roster, servers)
        servers.begin(self._membership.end, lambda: self.roster.live)
        if isinstance(servers, Aggregators):
            servers.serve(self.roster, self._shards)
        elif isinstance(servers, Aggregator):
            admission = self._admission
            servers.watch(lambda rank: admission.data_connection(rank) is not None)

    # --- What drives the machine -------------------------------------------------------------------------------------

    def decode(self, channel: m.Channel, data: bytes | memoryview) -> m.Message:
        """Bytes that came in as a message.

        Args:
            channel: the channel that they came on.
            data: one encoded message.

        Raises:
            MalformedMessage: they are no message that belongs there.
        """
        return self._router.decode(channel, data)

    def check_payload(self, peer: Peer, message: m.Message) -> int:
        """Bytes of payload that a data message may bring; asked before any memory is allocated for them.

        Raises:
            ProtocolError: this peer may not send this, or not as much.
        """
        try:
            return self._router.check_payload(peer, message)
        except Refused as no:
            self._count(no)
            raise

    def keeps_payload(self, message: m.Message) -> bool:
        """Whether a data message's payload is kept; if not, its memory may be used again once it is answered."""
        return self._router.keeps_payload(message)

    def receive(self, channel: m.Channel, peer: Peer, message: m.Message, payload: Payload, now: float) -> list[Out]:
        """A message came in.

        Args:
            channel: the channel that it came on.
            peer: the connection that it came from.
            message: the message.
            payload: the bytes behind it.
            now: seconds, on any clock that only goes forward.
        """
        self._pass_time(self._now if self.servers.number else now)
        self._monitoring.begin(message)
        try:
            return self._sent(self._router.route(channel, peer, message, payload, now))
        except Refused as no:
            self._count(no)
            return self._sent([Out(peer, channel, m.RefusedMessage(code=no.code, reason=str(no)))])
        except CollectiveMismatch as mismatch:
            return self._sent(self._membership.end(str(mismatch)))
        except OmniError as error:
            return self._sent([Out(peer, channel, m.RefusedMessage(code="protocol", reason=str(error)))])

    def follow(self, message: m.Message) -> list[Out]:
        """The server that coordinates has said something, to this one that holds a share.

        Args:
            message: see `lightning_omni.protocol.shard_messages.ToShard`.
        """
        servers = self.servers
        assert isinstance(servers, (Follower, Aggregator))
        if not isinstance(message, sm.Told):
            return []
        self._pass_time(message.now)
        self._monitoring.begin(message)
        out = self._done_also(servers, message)
        servers.done()
        if isinstance(message, (sm.Admit, sm.Relay)):  # a rank waits for it
            servers.report()
        return self._sent(out)

    def receive_answer(self, message: m.Message, payload: Tensor) -> list[Out]:
        """The server for which this one adds up has said something on the data connection.

        Args:
            message: see `lightning_omni.protocol.shard_messages.decode_answer`.
            payload: the bytes behind it; they are sent on before the next message in.
        """
        assert isinstance(self.servers, Aggregator)
        return self._sent(self.servers.answered(message, payload))

    def shard_hello(self, address: str, nonce: bytes) -> sm.ShardHello:
        """What this server says first to the one that coordinates.

        Args:
            address: of its own data socket, as ranks can reach it.
            nonce: random bytes.
        """
        servers = self.servers
        shard, shards = (0, 0) if isinstance(servers, Aggregator) else (servers.number, servers.count)
        return sm.ShardHello(version=m.VERSION, shard=shard, shards=shards, address=address, nonce=nonce)

    def _done_also(self, servers: Follower | Aggregator, message: sm.Told) -> list[Out]:
        if isinstance(servers, Aggregator) and not isinstance(message, (sm.Admit, sm.RunOver)):
            if isinstance(message, sm.Lose):
                self.roster.gone.add(message.rank)
            return servers.told(message)
        match message:
            case sm.Expire():
                return self._training.expire(message.now)
            case sm.Decide() if isinstance(servers, Follower):
                return servers.decide(message)
            case sm.Idle():
                return self._training.idle(message.rank)
            case sm.Resume():
                self._training.resume(message.rank)
            case sm.Admit():
                self.roster.take_in(_peer_of(message.hello.rank), message.hello, message.challenge, self._now)
                self.roster.joining = self.roster.can_go_on = message.joins  # the coordinator says when it is over
            case sm.Relay():
                return self._router.relay(_peer_of(message.rank), message.rank, message.message)
            case sm.Lose():
                return self._membership.lose(message.rank, message.reason)
            case sm.Save():
                self.on_save(message.number)
            case sm.Redo():
                self._persistence.redo(message.entry)
            case sm.RunOver(reason=""):
                if self.roster.run:  # unless it was seen here before it was told
                    self.on_run_over()
                self.reset()
            case sm.RunOver():
                return self._membership.end(message.reason)
            case _:
                raise MalformedMessage(f"{type(message).__name__} is nothing that a server is told to do")
        return []

    def _sent(self, out: list[Out]) -> list[Out]:
        """What is sent: a server that holds a share has control connections to the one that coordinates only.

        An aggregator also tells those who take it for the server that it is none.
        """
        out = [each for each in out if each.peer]  # none of those that have not come again to a server that goes on
        if self.servers.number:
            also = m.RefusedMessage if isinstance(self.servers, Aggregator) else ()
            out = [each for each in out if each.channel == m.DATA or isinstance(each.message, also)]
        return out + self.servers.drain()

    def handed_over(self) -> None:
        """The answers to the last message are with the socket; if it was a push, it has taken until now."""
        self._monitoring.end()

    def refuse(self, channel: m.Channel, peer: Peer, reason: str) -> list[Out]:
        """Bytes came in that are no message: counted, and answered with the reason."""
        self.strangers += 1
        return [Out(peer, channel, m.RefusedMessage(code="malformed", reason=reason))]

    def tick(self, now: float) -> list[Out]:
        """Time passes: a method goes on at a moment that it asked for, ranks that were silent for too long are lost."""
        if self.servers.number:  # the server that coordinates says what time has brought
            return self._sent(self.servers.tick(now))
        self._pass_time(now)
        self._monitoring.tick(now)
        self._observation.tick(now)
        # What a method answers has to be with the socket before the loss of a rank can move the weights again.
        out = self._training.expire(now) or self._membership.tick(now)
        return self._sent(out + self.servers.tick(now))

    @property
    def due(self) -> float:
        """When a method wants `tick` to be called, on the clock of ``now``; infinite for never."""
        return math.inf if self.servers.number else self._training.due

    def lose(self, rank: int, reason: str) -> list[Out]:
        """A rank is dead: its group is evicted, and no rank waits for it any more."""
        return self._sent(self._membership.lose(rank, reason))

    def hang_up(self, peer: Peer) -> list[Out]:
        """A control connection has ended, and its rank did not say goodbye."""
        self._observers.forget(peer)
        self.roster.numbers.withdraw(peer)
        return self._sent(self._membership.hang_up(peer) + self.servers.hang_up(peer))

    def fail(self, reason: str) -> list[Out]:
        """The server itself cannot go on: the run ends, and every rank is told."""
        if isinstance(self.servers, (Follower, Aggregator)):
            self.servers.fail(reason)
            return self._sent([])
        return self._sent(self._membership.end(f"the parameter server failed: {reason}"))

    # --- A server that goes on ----------------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """Whether a run is under way of which `state` holds everything."""
        return bool(self._shards.all) and not self._shards.heads and not self.over and not self.is_over

    @property
    def is_quiet(self) -> bool:
        """Whether no group waits for the answer to a push: then nothing is under way that a state cannot hold."""
        return self._training.all_answered

    @property
    def missing(self) -> int:
        """Pushes that a server before this one has answered, and that came after its last save."""
        return self._training.missing

    def state(self) -> dict[str, Any]:
        """All that another server needs to go on with the run: plain values and tensors, the live ones.

        Between two messages only, and if `has_state`. What ranks are told from then on goes into the `journal`.
        """
        return self._persistence.state()

    def save_shares(self, number: int) -> None:
        """The other servers, which hold a share each, save theirs as of this moment.

        Args:
            number: of this save, another one each time.
        """
        self.servers.send_to_all(sm.Save(number=number))

    def share_ended(self, number: int, how: str) -> None:
        """The process of another server, which is to hold a share, has ended: it is not awaited if it has not come.

        Args:
            number: of that server.
            how: it has ended.
        """
        assert isinstance(self.servers, Coordinator)
        self.servers.ended(number, how)

    def load(self, state: Mapping[str, Any], journal: Iterable[Entry], now: float) -> None:
        """Goes on with a run: weights and what is trained are those of a state, what ranks were told is not unsaid.

        Args:
            state: from `state`, of a server that is no more.
            journal: what has been written there since.
            now: seconds, on the clock of this server.

        Raises:
            ConfigurationError: it is no state that this server can go on from.
        """
        check_state(state)
        self.reset()
        self._now, self.goes_on = now, True
        self._persistence.load(state, journal, now)
        self._pass_time(now)

    # --- How it goes -------------------------------------------------------------------------------------------------

    @property
    def over(self) -> str:
        """Why the run cannot go on, or an empty string."""
        return self._membership.over

    @property
    def is_over(self) -> bool:
        """Whether a run took place and all its ranks are gone."""
        return self.roster.is_over

    @property
    def generation(self) -> int:
        """Counts the formings of groups, as the recorder does."""
        return self._membership.generation

    @property
    def peers(self) -> list[Peer]:
        """Control connections of the ranks that have not left, of other servers, and of processes that watch.

        Also of those that asked for a place, and were displaced by others that watch: it must be seen if they end.
        """
        if self.servers.number:
            return []
        watching = self._observers.peers + self.roster.numbers.peers
        return self._membership.peers + self.servers.peers + list(dict.fromkeys(watching))

    @property
    def attached(self) -> set[Peer]:
        """Data connections of ranks that are still here."""
        return self._admission.attached

    def is_admitted(self, channel: m.Channel, peer: Peer) -> bool:
        """Whether a connection is that of an admitted rank or server, or of a process that watches."""
        if channel == m.CONTROL and (peer in self.servers.peers or self._observers.has(peer)):
            return True
        if channel == m.DATA and peer in self.servers.data_peers:
            return True
        return self._admission.find(channel, peer) is not None

    def is_watching(self, peer: Peer) -> bool:
        """Whether a control connection is that of a process that was let in and is no rank."""
        return self._observers.has(peer)

    def data_connection(self, rank: int) -> tuple[Peer, bytes] | None:
        """A rank's data connection, and the secret that has opened it; None if it has none, or is gone."""
        return self._admission.data_connection(rank)

    @property
    def shards(self) -> list[Shard]:
        """What it holds, one for each optimizer."""
        return self._shards.all

    @property
    def clock(self) -> int:
        """Updates applied so far, over all optimizers. Those of a merged head belong to updates of the body."""
        return self._shards.clock

    def status(self, sent: float) -> m.Status:
        """How the run goes; ``sent`` is as in `lightning_omni.protocol.messages.Status`."""
        return self._monitoring.status(sent)

    def overview(self) -> m.Overview:
        """How the run goes, with all that there is to be seen of it."""
        return self._observation.overview()

    @property
    def now(self) -> float:
        """The time of the last message, or of the last `tick`, on the clock of these."""
        return self._now

    @property
    def happenings(self) -> Sequence[Happening]:
        """What happened to the run, up to this moment."""
        return self._observation.happenings

    def locate(self, peer: Peer, host: str) -> None:
        """A rank's control connection comes from this address."""
        if (member := self.roster.by_peer(peer)) is not None:
            member.host = host

    def _pass_time(self, now: float) -> None:
        self._now = now
        self._training.set_time(now)

    def _count(self, no: Refused) -> None:
        self.strangers += no.code in STRANGE

    @property
    def missing_servers(self) -> int:
        """Of the servers that are to hold a share, those that have not come yet: until then ranks wait to join."""
        return self.servers.missing if isinstance(self.servers, Coordinator) else 0

    @property
    def knows_run(self) -> bool:
        """Whether it knows how the run goes, and not just what is told to servers that hold a share."""
        return self.servers.number == 0

    @property
    def gone(self) -> str:
        """Which server that holds a share is gone for good, so that no run can be served; or an empty string."""
        return self.servers.gone if isinstance(self.servers, Coordinator) else ""

    def _description(self) -> m.ServerDescription:
        return m.ServerDescription(
            about=self.about(),
            data_port=self.data_port,
            heartbeat_timeout=self.limits.heartbeat_of(self.roster.joining),
            progress_timeout=self.limits.progress,
            shards=self.servers.count,
            patience=self.patience,
            joined_heartbeat_timeout=self.limits.heartbeat_of(joining=True),
        )

    def _last_now(self) -> float:
        return self._now

    def _work_time(self) -> float:
        return self._clock()


def _peer_of(rank: int) -> Peer:
    """A rank's control connection, at a server that has none."""
    return b"\0%d" % rank
