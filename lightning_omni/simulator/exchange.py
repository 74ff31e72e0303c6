"""How long a group's exchange with the parameter servers takes: links, the servers' network cards, and their queues.

Nothing here knows what is exchanged: only of which group, and how many bytes.

Rule 1: what is on a card at once shares it evenly, and crosses its group's link at the same time. The parts of an
exchange, one for each server, share that link in proportion to their bytes: all of it is never faster than the link
carries the whole.
Rule 2: a part that stays on its group's node crosses no link and no card.
Rule 3: with one server nothing is agreed upon: each moment is bitwise what it would be if there could not be several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_omni.simulator.cluster import Cluster, Link
from lightning_omni.simulator.engine import Engine, Timeline
from lightning_omni.simulator.shared_link import SharedLink

_Parts = Sequence[tuple[SharedLink, float]]
"""Parts of a message: over which card each goes, and how many bytes it has."""


class Queue:
    """Serves one after the other, first come, first served."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def serve(self, arrival: float, seconds: float) -> float:
        """Something comes that takes that long to serve. Returns when that is done."""
        self._free_at = max(arrival, self._free_at) + seconds
        return self._free_at


class _Server:
    """What groups share at one server: its network card, in both directions, its updates and a merged head."""

    def __init__(self, engine: Engine, card: Link) -> None:
        self.inwards, self.outwards = (SharedLink(engine, card.bandwidth) for _ in range(2))
        self.updates, self.head = Queue(), Queue()


class Exchanges:
    """What exchanges with the servers cost, in virtual time.

    A push ends when the last of its parts is served, and an answer when the last of its parts is there. Where several
    servers hold a share each, the one that coordinates (server 0) hears from the others when their parts are there, and
    tells them that all are: one small message each way.

    Args:
        engine: virtual time.
        cluster: the links, the servers and where they are.
        shares: of each server, what part of the weights it holds; they add up to 1.

    Attributes:
        nodes: of each group by its number, the node that its leader is on.

    Example:
        Two servers with half of 100 bytes each, over a link of 100 bytes a second; cards of 50 bytes a second:

        >>> from lightning_omni.simulator.cluster import Link
        >>> engine, cluster = Engine(), Cluster.even(2, link=Link(100.0), server=Link(50.0), servers=2)
        >>> exchanges = Exchanges(engine, cluster, [0.5, 0.5])
        >>> _ = engine.start(exchanges.push(0, 100))
        >>> while engine.events:
        ...     engine.step()
        >>> engine.now  # a second through both cards at once, no faster than over the link
        1.0
    """

    def __init__(self, engine: Engine, cluster: Cluster, shares: Sequence[float]) -> None:
        self._engine, self._cluster, self._shares = engine, cluster, shares
        self._link, self._card = cluster.link, cluster.server
        self._servers = [_Server(engine, cluster.server) for _ in shares]
        self.nodes: dict[int, int] = {}

    # --- Shares of the weights ---------------------------------------------------------------------------------------

    def ask(self, group: int) -> float:
        """When a small message of a group, sent now, has come to the servers and each knows that all have it."""
        now, away = self._engine.now, self._away_from(group)
        there = now + self._link.latency + self._card.latency
        return max(self._agreed([there if place in away else now for place in range(len(self._shares))]))

    def push(self, group: int, nbytes: int) -> Timeline:
        """A process' part: so many bytes travel until all servers have served their parts of them."""
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
        """A process' part: so many bytes, which the servers send now, travel to a group."""
        away = self._away_from(group)
        yield from self._leave([(self._servers[place].outwards, nbytes * self._shares[place]) for place in away])

    def passed_on(self, nbytes: int, members: int) -> float:
        """Seconds in which the leader of so many members passes what it was answered on to the others."""
        return self._cluster.group_link.broadcast_seconds(nbytes, members)

    def resolve_pending(self) -> None:
        """What the server has heard and said at this moment is done: groups may be idle, or gone, that were not."""

    def begin_again(self) -> None:
        """The servers have died: nothing waits there, and what is under way to them delays no other."""
        self._servers = [_Server(self._engine, self._card) for _ in self._shares]

    def _away_from(self, group: int) -> list[int]:
        """The servers that are not on the group's own node."""
        return [place for place in range(len(self._shares)) if not self._is_at_home(group, place)]

    def _come(self, parts: _Parts) -> Timeline:
        """A process' part: all parts of a message travel over a link, and then cards. Returns when each is there."""
        delay = self._link.seconds(self._unshared(parts)), self._card.latency
        yield self._engine.now + delay[0] + delay[1] if parts else self._engine.now
        return (yield from self._cross(parts))

    def _leave(self, parts: _Parts) -> Timeline:
        """A process' part: the same over cards, and then a link."""
        yield from self._cross(parts)
        delay = self._link.seconds(self._unshared(parts)) + self._card.latency
        yield self._engine.now + delay if parts else self._engine.now

    def _unshared(self, parts: _Parts) -> float:
        """Bytes that cross a link alone: all, if cards can take anything at once."""
        return sum(nbytes for _, nbytes in parts) if math.isinf(self._card.bandwidth) else 0.0

    def _cross(self, parts: _Parts) -> Timeline:
        """A process' part: parts cross their cards, and a link at the same time. Returns when each has."""
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
        """When each server may go on, if their parts are there at these moments: all do what the first one says."""
        message = self._link.latency + self._card.latency
        first, *others = here
        decided = max([first, *(moment + message for moment in others)])
        return [decided, *[decided + message] * len(others)]

    def _is_at_home(self, group: int, server: int) -> bool:
        """Whether a server is on a group's own node."""
        return self._cluster.servers == "per-node" and self.nodes[group] == server

    # --- A merged head, which the first server holds -----------------------------------------------------------------

    def to_head(self, group: int, nbytes: int, answers: tuple[int, int], size: int) -> Timeline:
        """A batch of ``size`` samples travels to a merged head, until its exclusive access there is over.

        Args:
            group: number of the group.
            nbytes: of the batch.
            answers: bytes of its outputs, and of their gradients.
            size: samples.
        """
        first, is_at_home = self._servers[0], self._is_at_home(group, 0)
        yield from self._come([] if is_at_home else [(first.inwards, nbytes)])
        # The outputs go out and their gradients come in while the head is this group's alone.
        slower = Link(min(self._link.bandwidth, self._card.bandwidth), self._link.latency)
        travel = 0.0 if is_at_home else sum(slower.seconds(each) + self._card.latency for each in answers)
        yield first.head.serve(self._engine.now, size * self._cluster.head_seconds_per_sample + travel)

    def from_head(self, group: int, nbytes: int) -> Timeline:
        """A process' part: the gradients of a batch travel back."""
        yield from self._leave([] if self._is_at_home(group, 0) else [(self._servers[0].outwards, nbytes)])
