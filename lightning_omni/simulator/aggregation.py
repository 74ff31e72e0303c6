"""How long exchanges take where aggregators add pushes up on their way to the server, and hand its answers on.

What is exchanged does not change: pushes of one sum count one after the other, at the moment when the sum is served.

Rule 1: of pushes that are added up one travels on, and is served; of answers that are sent at one moment to groups of
the same aggregator, too.
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
    """What has come and was not sent, who waits for an answer, and its network card."""

    def __init__(self, engine: Engine, card: Link) -> None:
        self.inwards, self.outwards = (SharedLink(engine, card.bandwidth) for _ in range(2))
        self.batch: list[tuple[int, Process]] = []  # group, and what goes on when its push is served
        self.largest = 0
        self.waiting: set[int] = set()
        self.groups: set[int] = set()
        self.is_busy = False
        self.answered = -1.0, 0  # when the server has sent its last answer, and how many bytes
        self.heard: Process | None = None  # is over when that is here


class AggregatedExchanges(Exchanges):
    """What exchanges by way of aggregators cost, in virtual time.

    Each aggregator has a network card like the server's, and a link to it like a group's.

    Args:
        engine: virtual time.
        cluster: the links, the server, and how many aggregators.
        shares: of the one server, 1.
        side: the method's server side, which knows which groups work.
        sum_bytes: of a sum, where pushes travel in a lossy format; None: as large as the largest push.
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
        if group not in aggregator.waiting:  # it has read weights outside an exchange
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
        if len(self._groups) != len(self.nodes):  # another has come
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
        """A process: a sum travels and is served, and its answer comes back."""
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
