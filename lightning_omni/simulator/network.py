"""Durations of a group's exchanges with the parameter servers: links, the servers' network cards, and their queues.

:doc:`/contribute/simulator` describes the model.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from lightning_omni.simulator.cluster import Cluster, Link
from lightning_omni.simulator.engine import Engine, Process, Timeline, until_resumed


class _Lane:
    """The messages that have the same limit.

    Attributes:
        messages: a heap of (``crossed`` at its end, serial number, process to resume).
        crossed: bytes that would have crossed of a message that was in the lane from the beginning.
        rate: bytes per second of each message.
    """

    def __init__(self) -> None:
        self.messages: list[tuple[float, int, Process]] = []
        self.crossed = self.rate = 0.0

    @property
    def due(self) -> float:
        return max(self.messages[0][0] - self.crossed, 0.0) / self.rate


class SharedLink:
    """One direction of a link.

    Args:
        bandwidth: bytes per second, finite.

    Example:
        Two messages of 100 bytes over a link of 100 bytes a second, half a second after one another:

        >>> engine = Engine()
        >>> link = SharedLink(engine, 100.0)
        >>> def send(moment):
        ...     yield moment
        ...     print((yield link.carry(100, limit=1000.0)))
        >>> for moment in (0.0, 0.5):
        ...     _ = engine.start(send(moment))
        >>> while engine.events:
        ...     engine.step()
        1.5
        2.0
    """

    def __init__(self, engine: Engine, bandwidth: float) -> None:
        self._engine, self._bandwidth = engine, bandwidth
        self._lanes: dict[float, _Lane] = {}  # by limit
        self._shared_at, self._serial_number = 0.0, 0

    def carry(self, nbytes: float, limit: float) -> Process:
        """Start to carry a message at ``limit`` bytes per second at most; the process returns its end."""
        message = self._engine.start(until_resumed())
        self._continue()
        lane = self._lanes.setdefault(limit, _Lane())
        self._serial_number += 1
        heapq.heappush(lane.messages, (lane.crossed + nbytes, self._serial_number, message))
        self._share()
        return message

    def _continue(self) -> None:
        for lane in self._lanes.values():
            lane.crossed += lane.rate * (self._engine.now - self._shared_at)
        self._shared_at = self._engine.now

    def _share(self) -> None:
        """Divide the bandwidth evenly; faster lanes get the surplus of slower ones."""
        left, count = self._bandwidth, sum(len(lane.messages) for lane in self._lanes.values())
        for limit, lane in sorted(self._lanes.items()):
            lane.rate = min(limit, left / count)
            left, count = left - lane.rate * len(lane.messages), count - len(lane.messages)
        if self._lanes:
            self._serial_number += 1
            first = min(self._lanes.values(), key=lambda lane: lane.due)
            self._engine.start(self._arrive(first, self._engine.now + first.due, self._serial_number))

    def _arrive(self, lane: _Lane, due: float, serial_number: int) -> Timeline:
        yield due
        if serial_number != self._serial_number:
            return
        self._continue()
        lane.crossed = lane.messages[0][0]  # without rounding error
        arrived = []
        while lane.messages and lane.messages[0][0] <= lane.crossed:
            arrived.append(heapq.heappop(lane.messages)[2])
        self._lanes = {limit: each for limit, each in self._lanes.items() if each.messages}
        self._share()
        for message in arrived:
            self._engine.resume(message, self._engine.now)


_Parts = Sequence[tuple[SharedLink, float]]
"""The parts of a message: the card that each crosses, and its bytes."""


class Queue:
    """A first-come, first-served queue."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def serve(self, arrival: float, seconds: float) -> float:
        self._free_at = max(arrival, self._free_at) + seconds
        return self._free_at


class _Server:
    """A server's network card in both directions, its updates and a merged head."""

    def __init__(self, engine: Engine, card: Link) -> None:
        self.inwards, self.outwards = (SharedLink(engine, card.bandwidth) for _ in range(2))
        self.updates, self.head = Queue(), Queue()


class Exchanges:
    """Exchanges with the servers, in virtual time.

    Args:
        shares: the fraction of the weights that each server holds; they add up to 1.

    Attributes:
        nodes: the node of each group's leader, by group number.
    """

    def __init__(self, engine: Engine, cluster: Cluster, shares: Sequence[float]) -> None:
        self._engine, self._cluster, self._shares, self.group_link = engine, cluster, shares, cluster.group_link
        self._link, self._card = cluster.link, cluster.server
        self._servers = [_Server(engine, cluster.server) for _ in shares]
        self.nodes: dict[int, int] = {}

    # --- Shares of the weights ---------------------------------------------------------------------------------------

    def ask(self, group: int) -> float:
        """Return the time at which every server can act on a small message that a group sends now to all."""
        now, away = self._engine.now, self._away_from(group)
        there = now + self._link.latency + self._card.latency
        return max(self._agreed([there if place in away else now for place in range(len(self._shares))]))

    def push(self, group: int, nbytes: int) -> Timeline:
        servers, received = self._servers, [self._engine.now] * len(self._servers)
        away = self._away_from(group)
        arrivals = yield from self._come([(servers[place].inwards, nbytes * self._shares[place]) for place in away])
        for place, arrival in zip(away, arrivals, strict=True):
            received[place] = arrival
        if len(servers) > 1:
            received = self._agreed(received)
            yield received[0]
        yield max(
            each.updates.serve(moment, self._cluster.update_seconds * share)
            for each, moment, share in zip(servers, received, self._shares, strict=True)
        )

    def answer(self, group: int, nbytes: int) -> Timeline:
        away = self._away_from(group)
        yield from self._leave([(self._servers[place].outwards, nbytes * self._shares[place]) for place in away])

    def _away_from(self, group: int) -> list[int]:
        return [place for place in range(len(self._shares)) if not self._is_at_home(group, place)]

    def _come(self, parts: _Parts) -> Timeline:
        """Wait until all parts have crossed a link and their cards; return each arrival."""
        delay = self._link.seconds(self._unshared(parts)), self._card.latency
        yield self._engine.now + delay[0] + delay[1] if parts else self._engine.now
        return (yield from self._cross(parts))

    def _leave(self, parts: _Parts) -> Timeline:
        yield from self._cross(parts)
        delay = self._link.seconds(self._unshared(parts)) + self._card.latency
        yield self._engine.now + delay if parts else self._engine.now

    def _unshared(self, parts: _Parts) -> float:
        return sum(nbytes for _, nbytes in parts) if math.isinf(self._card.bandwidth) else 0.0

    def _cross(self, parts: _Parts) -> Timeline:
        """Wait until parts have crossed cards of finite bandwidth and, meanwhile, a link; return the end of each."""
        whole, now = sum(nbytes for _, nbytes in parts), self._engine.now
        if not whole or math.isinf(self._card.bandwidth):
            return [now] * len(parts)
        bandwidth = self._link.bandwidth
        crossing = [card.carry(nbytes, bandwidth * (nbytes / whole)) if nbytes else None for card, nbytes in parts]
        for part in crossing:
            if part is not None:
                yield part
        return [now if part is None else part.returned for part in crossing]

    def _agreed(self, here: Sequence[float]) -> list[float]:
        """Return the times at which servers may continue after the arrival of their parts; server 0 coordinates."""
        message = self._link.latency + self._card.latency
        first, *others = here
        decided = max([first, *(moment + message for moment in others)])
        return [decided, *[decided + message] * len(others)]

    def _is_at_home(self, group: int, server: int) -> bool:
        return self._cluster.servers == "per-node" and self.nodes[group] == server

    # --- From group to group -----------------------------------------------------------------------------------------

    def to_peer(self, nbytes: int = 0) -> float:
        """Return the arrival of a message to another group that is sent now. Links between groups are not shared."""
        return self._engine.now + self._link.seconds(nbytes)

    # --- A merged head, which the first server holds -----------------------------------------------------------------

    def to_head(self, group: int, nbytes: int, answers: tuple[int, int], size: int) -> Timeline:
        """Wait until a batch has travelled to a merged head, and its exclusive access there is over.

        ``answers`` are the bytes of its outputs, and of their gradients.
        """
        first, is_at_home = self._servers[0], self._is_at_home(group, 0)
        yield from self._come([] if is_at_home else [(first.inwards, nbytes)])
        # The exclusive access includes the travel of the outputs and of their gradients.
        slower = Link(min(self._link.bandwidth, self._card.bandwidth), self._link.latency)
        travel = 0.0 if is_at_home else sum(slower.seconds(each) + self._card.latency for each in answers)
        yield first.head.serve(self._engine.now, size * self._cluster.head_seconds_per_sample + travel)

    def from_head(self, group: int, nbytes: int) -> Timeline:
        yield from self._leave([] if self._is_at_home(group, 0) else [(self._servers[0].outwards, nbytes)])
