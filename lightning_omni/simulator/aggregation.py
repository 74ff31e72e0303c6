"""Durations of exchanges where aggregators sum pushes on their way to the server, and forward its answers.

Aggregators do not change the exchanged values: the pushes of a sum count one after the other, when the sum is served.

Rule 1: of the pushes in a sum, one travels on and is served; of the answers that the server sends at one moment to
groups of the same aggregator, one travels.
Rule 2: a sum is sent when a real aggregator would send it: see `lightning_omni.protocol.aggregator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_omni.methods import Barrier
from lightning_omni.methods.contract import ServerSide
from lightning_omni.simulator.cluster import Cluster, Link
from lightning_omni.simulator.engine import Engine, Process, Timeline, until_resumed
from lightning_omni.simulator.exchange import Exchanges
from lightning_omni.simulator.shared_link import SharedLink


class _Aggregator:
    """An aggregator's unsent pushes, its groups that wait for an answer, and its network card."""

    def __init__(self, engine: Engine, card: Link) -> None:
        self.inwards, self.outwards = (SharedLink(engine, card.bandwidth) for _ in range(2))
        self.batch: list[tuple[int, Process]] = []  # group, and the process that resumes when its push is served
        self.largest = 0
        self.waiting: set[int] = set()
        self.groups: set[int] = set()
        self.is_busy = False
        self.answered = -1.0, 0  # time and bytes of the server's last answer
        self.heard: Process | None = None  # ends when that answer arrives


class AggregatedExchanges(Exchanges):
    """Exchanges by way of aggregators, in virtual time.

    Each aggregator has a network card like the server's, and a link to it like a group's.

    Args:
        engine: virtual time.
        cluster: the links, the server, and the number of aggregators.
        shares: the share of the one server, 1.
        side: returns the method's server side, which holds the working groups.
        sum_bytes: bytes of a sum, if pushes travel in a lossy format; None: those of its largest push.
    """

    def __init__(
        self,
        engine: Engine,
        cluster: Cluster,
        shares: Sequence[float],
        side: Callable[[], ServerSide],
        sum_bytes: int | None,
    ) -> None:
        super().__init__(engine, cluster, shares)
        self._side, self._sum_bytes = side, sum_bytes
        self._aggregators = [_Aggregator(engine, cluster.server) for _ in range(cluster.aggregators)]
        self._groups: dict[int, None] = {}

    def push(self, group: int, nbytes: int) -> Timeline:
        aggregator = self._aggregator_of(group)
        yield from self._come([(aggregator.inwards, nbytes)])
        served = self._engine.start(until_resumed())
        aggregator.batch.append((group, served))
        aggregator.waiting.add(group)
        aggregator.largest = max(aggregator.largest, nbytes)
        self._send_due(aggregator)
        yield served

    def answer(self, group: int, nbytes: int) -> Timeline:
        aggregator = self._aggregator_of(group)
        if group not in aggregator.waiting:  # the answer to a fetch
            yield from super().answer(group, nbytes)
            return
        aggregator.waiting.discard(group)
        if aggregator.answered != (self._engine.now, nbytes):
            aggregator.answered = self._engine.now, nbytes
            aggregator.heard = self._engine.start(super().answer(group, nbytes))
        yield aggregator.heard
        yield from self._leave([(aggregator.outwards, nbytes)])

    def resolve_pending(self) -> None:
        for aggregator in self._aggregators:
            self._send_due(aggregator)

    def _aggregator_of(self, group: int) -> _Aggregator:
        nodes = self._cluster.nodes or len(self._cluster.devices)
        return self._aggregators[self.nodes[group] * len(self._aggregators) // nodes]

    def _groups_of(self, aggregator: _Aggregator) -> set[int]:
        if len(self._groups) != len(self.nodes):  # a group has joined
            self._groups = dict.fromkeys(self.nodes)
            for each in self._aggregators:
                each.groups.clear()
            for group in self.nodes:
                self._aggregator_of(group).groups.add(group)
        return aggregator.groups

    def _send_due(self, aggregator: _Aggregator) -> None:
        side = self._side()
        if not aggregator.batch:
            return
        if isinstance(side, Barrier):
            is_due = aggregator.waiting.issuperset(side.working & self._groups_of(aggregator))
        else:
            is_due = not aggregator.is_busy or len(aggregator.batch) >= side.method.most_added(len(side.groups))
        if is_due:
            self._engine.start(self._send(aggregator))

    def _send(self, aggregator: _Aggregator) -> Timeline:
        """Run a process that sends a sum until it is served and its answer is back."""
        batch, nbytes = aggregator.batch, self._sum_bytes or aggregator.largest
        aggregator.batch, aggregator.largest, aggregator.is_busy = [], 0, True
        (server,) = self._servers
        yield from self._come([(server.inwards, nbytes)])
        yield server.updates.serve(self._engine.now, self._cluster.update_seconds)
        for _, served in batch:
            self._engine.resume(served)
        if aggregator.heard is not None:
            yield aggregator.heard
        aggregator.is_busy = False
        self._send_due(aggregator)
