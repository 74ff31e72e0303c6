"""The way from groups to the server and back: links, the server's network card, and the queues at both ends."""

from __future__ import annotations

from lightning_omni.protocol import Out
from lightning_omni.protocol import messages as m
from lightning_omni.simulator.cluster import Cluster, Link
from lightning_omni.simulator.engine import Engine, Process, Timeline
from lightning_omni.simulator.server import SimulatedServer


class Queue:
    """Serves one after the other, first come, first served."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def serve(self, arrival: float, seconds: float) -> float:
        """Something comes that takes that long to serve. Returns when that is done."""
        self._free_at = max(arrival, self._free_at) + seconds
        return self._free_at


class Network:
    """How long messages travel and queue.

    Args:
        engine: virtual time.
        cluster: the links.
        server: at the far end.
        is_instant: whether exchanges take no time: one group has no server in its path.

    Attributes:
        processes: who waits for what the server sends, by the number of the group.
    """

    def __init__(self, engine: Engine, cluster: Cluster, server: SimulatedServer, is_instant: bool) -> None:
        self._engine, self._server = engine, server
        self._link = Link() if is_instant else cluster.link
        self._card = Link() if is_instant else cluster.server
        self._update_seconds = 0.0 if is_instant else cluster.update_seconds
        self._head_seconds = cluster.head_seconds_per_sample
        self._between_groups = cluster.link
        self._inwards, self._outwards, self._updates, self._head = Queue(), Queue(), Queue(), Queue()
        self.processes: dict[int, Process] = {}

    # --- To the server and back --------------------------------------------------------------------------------------

    def arrival(self, sent: float, nbytes: int = 0) -> float:
        """When a message has come over the link. Control messages have no size, and no queue either."""
        return sent + self._link.seconds(nbytes) + self._card.latency

    def push(self, nbytes: int) -> Timeline:
        """A push travels until it is served: over the link, through the server's card, to the server itself."""
        yield self.arrival(self._engine.now, nbytes)
        received = self._inwards.serve(self._engine.now, nbytes / self._card.bandwidth)
        yield self._updates.serve(received, self._update_seconds)

    def to_head(self, nbytes: int, bytes_back: int, size: int) -> Timeline:
        """A batch of ``size`` samples travels to a merged head, until its exclusive access there is over."""
        yield self.arrival(self._engine.now, nbytes)
        received = self._inwards.serve(self._engine.now, nbytes / self._card.bandwidth)
        # The outputs go out and their gradients come in while the head is this group's alone.
        travel = 2 * (self._link.seconds(bytes_back) + self._card.seconds(bytes_back))
        yield self._head.serve(received, size * self._head_seconds + travel)

    def from_head(self, nbytes: int) -> float:
        """When the gradients of a batch are back, if they are sent now."""
        return self.arrival(self._outwards.serve(self._engine.now, nbytes / self._card.bandwidth), nbytes)

    def deliver(self, out: list[Out]) -> None:
        """What the server sends now goes to whom it is for: weights take their time, verdicts none."""
        for item in out:
            if isinstance(item.message, m.Weights):
                # Copied now: the server's answer is only valid until the next message.
                answer = item.message, self._server.tensors_of(item)
                self._engine.resume_at(self._answered(item.message.nbytes), self._process(item), answer)
            elif isinstance(item.message, m.Verdict):
                self._engine.resume_at(self._engine.now, self._process(item), item.message.next)

    def _answered(self, nbytes: int) -> float:
        sent = self._outwards.serve(self._engine.now, nbytes / self._card.bandwidth)
        return sent + (self._link.seconds(nbytes) + self._card.latency)

    def _process(self, out: Out) -> Process:
        return self.processes[self._server.group_of(out)]

    # --- From group to group -----------------------------------------------------------------------------------------

    def to_peer(self, nbytes: int = 0) -> float:
        """When a message to another group is there, if it is sent now. Links between groups are not shared."""
        return self._engine.now + self._between_groups.seconds(nbytes)
