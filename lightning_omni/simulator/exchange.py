"""How long a group's exchange with the parameter servers takes: links, the servers' network cards, and their queues.

Nothing here knows what is exchanged: only of which group, and how many bytes.

Rule 1: the parts of an exchange, one for each server, share the link of their group; all of it is never faster than the
link carries the whole.
Rule 2: a part that stays on its group's node crosses no link and no card.
Rule 3: with one server nothing is agreed upon: each moment is bitwise what it would be if there could not be several.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_omni.simulator.cluster import Cluster
from lightning_omni.simulator.engine import Engine, Timeline


class Queue:
    """Serves one after the other, first come, first served."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def serve(self, arrival: float, seconds: float) -> float:
        """Something comes that takes that long to serve. Returns when that is done."""
        self._free_at = max(arrival, self._free_at) + seconds
        return self._free_at


class _ServerQueues:
    """The queues at one server: of its network card, in both directions, of its updates and of a merged head."""

    def __init__(self) -> None:
        self.inwards, self.outwards, self.updates, self.head = Queue(), Queue(), Queue(), Queue()


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
        >>> engine.now  # one second over the link, and one through both cards at once
        2.0
    """

    def __init__(self, engine: Engine, cluster: Cluster, shares: Sequence[float]) -> None:
        self._engine, self._cluster, self._shares = engine, cluster, shares
        self._link, self._card = cluster.link, cluster.server
        self._servers = [_ServerQueues() for _ in shares]
        self.nodes: dict[int, int] = {}

    # --- Shares of the weights ---------------------------------------------------------------------------------------

    def ask(self, group: int) -> float:
        """When a small message of a group, sent now, has come to the servers and each knows that all have it."""
        return max(self._agreed([self._come(group, server, 0) for server in range(len(self._shares))]))

    def push(self, group: int, nbytes: int) -> Timeline:
        """A process' part: so many bytes travel until all servers have served their parts of them."""
        servers, parts = self._servers, self._parts(group, nbytes)
        across = [sum(min(part, other) for other in parts) for part in parts]  # when it is there, its rivals have sent
        arrivals = [self._come(group, server, seen) for server, seen in enumerate(across)]
        received = arrivals[:]
        for server in sorted(range(len(parts)), key=arrivals.__getitem__):
            if arrivals[server] > self._engine.now or len(parts) == 1:
                yield arrivals[server]
            if not self._is_at_home(group, server):
                seconds = parts[server] / self._card.bandwidth
                received[server] = servers[server].inwards.serve(self._engine.now, seconds)
        if len(parts) > 1:
            received = self._agreed(received)
            yield received[0]
        yield max(
            each.updates.serve(moment, self._cluster.update_seconds * share)
            for each, moment, share in zip(servers, received, self._shares, strict=True)
        )

    def answer(self, group: int, nbytes: int) -> float:
        """When so many bytes, which the servers send now, have come to a group."""
        now, parts = self._engine.now, self._parts(group, nbytes)
        leaves = sorted(
            (
                (each.outwards.serve(now, part / self._card.bandwidth), part)
                for server, (each, part) in enumerate(zip(self._servers, parts, strict=True))
                if not self._is_at_home(group, server)
            ),
            reverse=True,
        )
        arrival, behind = now, 0.0
        for left, part in leaves:  # what comes last over a shared link waits for nothing that comes after it
            behind += part
            arrival = max(arrival, left + (self._link.seconds(behind) + self._card.latency))
        return arrival

    def passed_on(self, nbytes: int, members: int) -> float:
        """Seconds in which the leader of so many members passes what it was answered on to the others."""
        return self._cluster.group_link.broadcast_seconds(nbytes, members)

    def resolve_pending(self) -> None:
        """What the server has heard and said at this moment is done: groups may be idle, or gone, that were not."""

    def begin_again(self) -> None:
        """The servers have died: nothing waits in their queues, and what is under way to them delays no other."""
        self._servers = [_ServerQueues() for _ in self._shares]

    def _parts(self, group: int, nbytes: float) -> list[float]:
        """The bytes of each server's part that leave the group's node."""
        return [0.0 if self._is_at_home(group, server) else nbytes * share for server, share in enumerate(self._shares)]

    def _come(self, group: int, server: int, nbytes: float) -> float:
        """When what is sent now has come to a server over the link, if that has carried so many bytes by then."""
        if self._is_at_home(group, server):
            return self._engine.now
        return self._engine.now + self._link.seconds(nbytes) + self._card.latency

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
        yield self._come(group, 0, nbytes)
        first, received = self._servers[0], self._engine.now
        travel = 0.0
        if not self._is_at_home(group, 0):
            received = first.inwards.serve(received, nbytes / self._card.bandwidth)
            # The outputs go out and their gradients come in while the head is this group's alone.
            travel = sum(self._link.seconds(each) + self._card.seconds(each) for each in answers)
        yield first.head.serve(received, size * self._cluster.head_seconds_per_sample + travel)

    def from_head(self, group: int, nbytes: int) -> float:
        """When the gradients of a batch are back, if they are sent now."""
        now = self._engine.now
        if self._is_at_home(group, 0):
            return now
        sent = self._servers[0].outwards.serve(now, nbytes / self._card.bandwidth)
        return sent + self._link.seconds(nbytes) + self._card.latency
