"""The status of a run: for ranks that request it, and for processes that observe the run."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from lightning_omni.checks import counted
from lightning_omni.errors import MalformedMessage, Refused
from lightning_omni.methods import Method
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Out, Payload, Peer, Sender, Service
from lightning_omni.topology import Topology
from lightning_omni.wire import messages as m
from lightning_omni.wire.handshake import Challenges, server_mac

LATELY = 64
"""Pushes over which their time is averaged: if groups synchronize, the last one takes far longer than the others."""
RATE_WINDOW = 10.0
"""Seconds over which the rate of updates is measured."""


# --- Observers --------------------------------------------------------------------------------------------------------

# Rule 1: an observer proves that it holds the run's key, as a rank does; the server answers no other process.
# Rule 2: an observer does not participate: no rank and no collective waits for it. It changes the run only by `Evict`
# and `RegisterGroup`. It stays connected after the run, and observes the next one.

MOST_OBSERVERS = 64
"""The most observers; a further one displaces the one admitted first."""
MOST_CHALLENGED = 256
"""The most connections with an open challenge; a further one displaces the first."""
LONGEST_LOG = 256
"""The most entries in the log; the oldest are dropped."""


class RunEvent(NamedTuple):
    at: float
    kind: str
    text: str


class Observers:
    def __init__(self, key: bytes, random: Callable[[int], bytes]) -> None:
        self._key, self._random = key, random
        self.challenges = Challenges[m.Observe](random, MOST_CHALLENGED)
        self.peers: dict[Peer, None] = {}  # in the order of admission
        self._noise = b""

    def admit(self, peer: Peer, proof: m.ObserverProof) -> bytes:
        hello, challenge = self.challenges.proved(peer, proof.mac, lambda _: self._key)
        self.peers[peer] = None
        while len(self.peers) > MOST_OBSERVERS:
            self.peers.pop(next(iter(self.peers)))
        return server_mac(self._key, hello, challenge)

    def noise(self, nbytes: int) -> bytes:
        """Return bytes that no link can compress."""
        self._noise = self._noise or self._random(m.LARGEST_ECHO)
        return self._noise[:nbytes]


class StatusService(Service):
    """The service that measures the server, reports on the run to ranks and observers, and keeps its log.

    ``handled`` returns the number of the run's pushes that this process has handled, in ``total_serve_time`` seconds.
    """

    def __init__(
        self,
        run: RunContext,
        observers: Observers,
        clock: Callable[[], float],
        strangers: Callable[[], int],
        handled: Callable[[], int],
        description: Callable[[], m.ServerDescription],
    ) -> None:
        self._roster, self._store, self._epochs, self._journal = run.roster, run.store, run.epochs, run.journal
        self._now, self._clock, self._observers = run.now, clock, observers
        self._strangers, self._handled, self._description = strangers, handled, description
        self._rate: deque[tuple[float, int]] = deque()
        self._began: float | None = None
        self._is_part = False  # whether the current message is a push, or this server's part of one
        self._handled_before = 0
        self._unfinished = 0.0  # duration of the parts of unfinished pushes
        self._serve_times: deque[float] = deque(maxlen=LATELY)
        self._serves = False
        self.total_serve_time = 0.0
        self._run_events: deque[RunEvent] = deque(maxlen=LONGEST_LOG)
        self._saves, self._saved_at = run.journal.saves, -math.inf
        self._joined: set[int] = set()
        self._lost: set[int] = set()
        self._left: set[int] = set()

    # --- Time of pushes ----------------------------------------------------------------------------------------------

    def begin(self, message: m.Message) -> None:
        self._is_part, self._began = isinstance(message, m.PushMessage), self._clock()
        self._handled_before = self._handled()

    def end(self) -> None:
        if self._began is None:
            return
        lasted = max(0.0, self._clock() - self._began)
        self._began = None
        handled = self._handled() - self._handled_before
        if not (handled or self._is_part):  # it belongs to another request
            return
        self.total_serve_time += lasted
        self._unfinished += lasted
        if not handled:
            return
        if self._serves:
            self._serve_times.append(self._unfinished / handled)
        self._serves = True  # the first push after groups were formed allocates memory
        self._unfinished = 0.0

    # --- Messages ----------------------------------------------------------------------------------------------------

    def check(self, peer: Peer) -> None:
        if peer not in self._observers.peers:
            raise Refused("stranger", "say Hello first: this connection has not been admitted")

    def hello(self, sender: Sender, message: m.Observe, payload: Payload) -> list[Out]:
        return [Out(sender.peer, m.CONTROL, m.Challenge(nonce=self._observers.challenges.ask(sender.peer, message)))]

    def admit(self, sender: Sender, message: m.ObserverProof, payload: Payload) -> list[Out]:
        return [Out(sender.peer, m.CONTROL, m.ObserverWelcome(mac=self._observers.admit(sender.peer, message)))]

    def ask_overview(self, sender: Sender, message: m.AskOverview, payload: Payload) -> list[Out]:
        return [Out(sender.peer, m.CONTROL, self.overview())]

    def describe(self, sender: Sender, message: m.AskServer, payload: Payload) -> list[Out]:
        return [Out(sender.peer, m.CONTROL, self._description())]

    def echo(self, sender: Sender, message: m.Echo, payload: Payload) -> list[Out]:
        if not 0 <= message.nbytes <= m.LARGEST_ECHO:
            raise MalformedMessage(f"{message.nbytes} bytes cannot be sent back; ask for {m.LARGEST_ECHO} at most")
        back = (self._observers.noise(message.nbytes),) if message.nbytes else ()
        return [Out(sender.peer, m.CONTROL, m.Echoed(), back)]

    # --- Status ------------------------------------------------------------------------------------------------------

    def heartbeat(self, sender: Sender, message: m.Heartbeat, payload: Payload) -> list[Out]:
        self._roster.members[sender.rank].update(message)
        return [Out(sender.peer, m.CONTROL, self.status(message.sent))]

    def ask(self, sender: Sender, message: m.AskStatus, payload: Payload) -> list[Out]:
        return [Out(sender.peer, m.CONTROL, self.status(0.0))]

    def status(self, sent: float) -> m.Status:
        staleness: Counter[int] = sum((served.counts.staleness for _, served in self._store.pushed), Counter())
        rate = 0.0
        if len(self._rate) > 1 and self._rate[-1][0] > self._rate[0][0]:
            rate = (self._rate[-1][1] - self._rate[0][1]) / (self._rate[-1][0] - self._rate[0][0])
        members = self._roster.members
        return m.Status(
            sent=sent,
            clock=self._store.clock,
            updates_per_second=max(rate, 0.0),
            refused=sum(served.counts.refused for served in self._store.all),
            strangers=self._strangers(),
            groups=tuple(self._group_status(group) for group in self._roster.formed.alive),
            staleness=tuple(staleness[t] for t in range(max(staleness, default=-1) + 1)),
            lost=self._roster.lost_ranks,
            head_time=sum(head.access_time for _, head in self._store.heads),
            serve_time=fmean(self._serve_times) if self._serve_times else 0.0,
            recorder=self._roster.recorder,
            signal=max((members[rank].timings.signal for rank in self._roster.live if rank in members), default=0),
        )

    def _group_status(self, group: int) -> m.GroupStatus:
        identity = self._roster.formed.identity(group)
        ranks, members = self._roster.formed.members(group), self._roster.members
        timings = {rank: members[rank].timings for rank in ranks if rank in members}
        counts = [served.counts.by_group.get(group, Counter()) for _, served in self._store.pushed]
        seen: Counter[int] = sum(counts, Counter())
        updates = sum(seen.values())
        slowest = max(timings, key=lambda rank: timings[rank].compute_time, default=ranks[0])
        return m.GroupStatus(
            group=group,
            ranks=ranks,
            updates=updates,
            staleness_mean=sum(t * count for t, count in seen.items()) / updates if updates else 0.0,
            step_time=_mean([each.step_time for each in timings.values()]),
            compute_time=_mean([each.compute_time for each in timings.values()]),
            exchange_time=_mean([each.exchange_time for each in timings.values()]),
            slowest_rank=slowest,
            slowest_time=timings[slowest].compute_time if slowest in timings else 0.0,
            name=identity.name,
            incarnation=identity.incarnation,
        )

    # --- Overview ----------------------------------------------------------------------------------------------------

    def overview(self) -> m.Overview:
        roster, epochs, now, formed = self._roster, self._epochs, self._now(), self._roster.formed.message
        status = self.status(0.0)
        return m.Overview(
            run=roster.run,
            age=now - roster.began if roster.run else 0.0,
            announced=roster.world_size,
            live=roster.live,
            missing=tuple(rank for rank in roster.live if rank not in roster.members),
            recorder=roster.recorder,
            status=status,
            groups=tuple(self._group(group, now) for group in status.groups),
            method=formed.method if formed else None,
            wire_format=formed.wire_format if formed else None,
            plan=epochs.plan,
            trained=epochs.progress,
            pushes=self._handled(),
            serve_time=self.total_serve_time,
            log=tuple(m.LogEntry(now - each.at, each.kind, each.text) for each in self.run_events),
            over=roster.over,
            saved=now - self._saved_at if math.isfinite(self._saved_at) else -1.0,
            metrics=self._metrics(),
        )

    def _metrics(self) -> dict[str, float]:
        reported: dict[str, list[float]] = {}
        for rank in self._roster.live:
            member = self._roster.members.get(rank)
            for name, value in member.timings.metrics.items() if member is not None else ():
                reported.setdefault(name, []).append(value)
        return {name: _mean(values) for name, values in reported.items()}

    def _group(self, status: m.GroupStatus, now: float) -> m.GroupOverview:
        members = [self._roster.members[rank] for rank in status.ranks if rank in self._roster.members]
        return m.GroupOverview(
            status=status,
            hosts=tuple(dict.fromkeys(member.host for member in members if member.host)),
            age=now - max((member.since for member in members), default=now),
            silence=now - min((member.last_seen for member in members), default=now),
            samples=self._epochs.samples.get(status.group, 0) if self._epochs.book is not None else None,
        )

    # --- Log ---------------------------------------------------------------------------------------------------------

    @property
    def run_events(self) -> Sequence[RunEvent]:
        self._log_ranks(self._now())
        return self._run_events

    def form(self, topology: Topology, method: Method, message: m.FormGroups) -> None:
        self._serve_times.clear()
        self._serves, self._unfinished = False, 0.0
        self._log_ranks(self._now())
        names = ", ".join(self._roster.formed.identity(group).name for group in topology.alive)
        groups = counted(len(topology.alive), "group")
        self._note(self._now(), "formed", f"{groups} formed ({names}): {method!r}")

    def state(self) -> bytes:
        return b""  # what happened before is in the roster: `load` takes it from there

    def load(self, state: bytes) -> None:
        self._joined.update(self._roster.members)
        self._lost.update(self._roster.lost)
        self._left.update(self._roster.gone)
        text = "this server goes on with the run of one that is no more, from what that has saved"
        self._note(self._now(), "restored", text)

    def join(self, group: int, ranks: tuple[int, ...]) -> None:
        self._log_ranks(self._now())
        name = self._roster.formed.identity(group).name
        self._note(self._now(), "joined", f"group {name} takes part: {ranks_text(ranks)}")

    def tick(self, now: float) -> None:
        self._rate.append((now, self._store.clock))
        while now - self._rate[0][0] > RATE_WINDOW:
            self._rate.popleft()
        self._log_ranks(now)

    def _log_ranks(self, now: float) -> None:
        """Log ranks that joined, were lost or left since the last call, and why the run is over; note a save's time."""
        roster = self._roster
        if self._journal.saves != self._saves:
            self._saves, self._saved_at = self._journal.saves, now
        if new := sorted(roster.members.keys() - self._joined):
            hosts = ", ".join(sorted({roster.members[rank].host for rank in new} - {""}))
            self._note(now, "joined", f"{ranks_text(new)} joined" + f" from {hosts}" * bool(hosts))
        lost = roster.lost.keys() - self._lost
        for reason in dict.fromkeys(roster.lost[rank] for rank in sorted(lost)):
            ranks = [rank for rank in sorted(lost) if roster.lost[rank] == reason]
            self._note(now, "lost", f"{ranks_text(ranks)} lost: {reason}")
        if left := sorted(roster.gone - roster.lost.keys() - self._left):
            self._note(now, "left", f"{ranks_text(left)} left in good order")
        if roster.over and not any(each.kind == "over" for each in self._run_events):
            self._note(now, "over", f"the run is over: {roster.over}")
        self._joined.update(new)
        self._lost.update(lost)
        self._left.update(left)

    def _note(self, now: float, kind: str, text: str) -> None:
        self._run_events.append(RunEvent(now, kind, text))


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text.

    Example:
        >>> ranks_text([3]), ranks_text([0, 1, 2, 5])
        ('rank 3', 'ranks 0 to 2, 5')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[1]}" for run in runs]
    return f"rank{'s' * (len(runs) > 1 or any(len(run) > 1 for run in runs))} {', '.join(parts)}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
