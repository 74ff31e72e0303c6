"""The service for the status of the run, for ranks that request it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from statistics import fmean

from lightning_omni.methods import Method
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Out, Payload, Sender, Service
from lightning_omni.topology import Topology
from lightning_omni.wire import messages as m
from lightning_omni.wire.messages import servers as sm

LATELY = 64
"""Pushes over which their time is averaged: if groups synchronize, the last one takes far longer than the others."""
RATE_WINDOW = 10.0
"""Seconds over which the rate of updates is measured."""
_ENDS = (sm.PartReady, sm.DecideRequest)
"""Messages after which an earlier part is handled, because another server has its own part or the push was decided."""


class StatusService(Service):
    """The service that measures the server and collects the ranks' step times.

    Args:
        run: the run.
        clock: returns seconds, for the duration of the server's arithmetic.
        strangers: returns the number of messages refused as malformed, or from a sender that was not admitted.
        handled: returns the number of handled pushes, including those of earlier groups.

    Attributes:
        pushes: number of pushes handled so far.
        total_serve_time: their total duration in seconds.
    """

    def __init__(
        self, run: RunContext, clock: Callable[[], float], strangers: Callable[[], int], handled: Callable[[], int]
    ) -> None:
        self._roster, self._store = run.roster, run.store
        self._clock = clock
        self._strangers = strangers
        self._handled = handled
        self._rate: deque[tuple[float, int]] = deque()
        self._began: float | None = None
        self._is_part = False  # whether the current message is a push, or this server's part of one
        self._handled_before = 0
        self._unfinished = 0.0  # duration of the parts of unfinished pushes
        self._serve_times: deque[float] = deque(maxlen=LATELY)
        self._serves = False
        self.pushes = 0
        self.total_serve_time = 0.0

    def form(self, topology: Topology, method: Method, message: m.FormGroups) -> None:
        self._serve_times.clear()
        self._serves = False
        self._unfinished = 0.0

    def begin(self, message: m.Message) -> None:
        """Start to measure a message."""
        self._is_part = isinstance(message, m.PushMessage)
        self._began = self._clock() if self._is_part or isinstance(message, _ENDS) else None
        self._handled_before = self._handled()

    def end(self) -> None:
        """Stop measuring the last message, whose answers have been passed to the socket."""
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
        self.pushes += handled
        if self._serves:
            self._serve_times.append(self._unfinished / handled)
        self._serves = True  # the first push after groups were formed allocates memory
        self._unfinished = 0.0

    def tick(self, now: float) -> None:
        self._rate.append((now, self._store.clock))
        while now - self._rate[0][0] > RATE_WINDOW:
            self._rate.popleft()

    def heartbeat(self, sender: Sender, message: m.Heartbeat, payload: Payload) -> list[Out]:
        """Record a rank's heartbeat with its step times, and answer with the status."""
        self._roster.members[sender.rank].update(message)
        return [Out(sender.peer, m.CONTROL, self.status(message.sent))]

    def ask(self, sender: Sender, message: m.AskStatus, payload: Payload) -> list[Out]:
        return [Out(sender.peer, m.CONTROL, self.status(0.0))]

    def status(self, sent: float) -> m.Status:
        """Return the status of the run.

        Args:
            sent: see `lightning_omni.wire.messages.Status`.
        """
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
            groups=tuple(self._group_status(group) for group in self._roster.groups),
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


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
