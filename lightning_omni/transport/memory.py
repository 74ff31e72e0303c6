"""All connections of a run to a server in this process, which the simulator drives. No sockets or threads."""

from __future__ import annotations

from lightning_omni.server.core import ServerCore
from lightning_omni.server.service import Out, Payload, Peer
from lightning_omni.wire import messages as m


class InMemoryConnections:
    """The connections of all ranks to a server in this process.

    Args:
        core: state machine of the server.

    Attributes:
        now: seconds on a monotonic clock, set by the driver.
    """

    def __init__(self, core: ServerCore) -> None:
        self.core = core
        self.now = 0.0

    def control(self, rank: int, message: m.Message, payload: bytes = b"") -> list[Out]:
        """Send a rank's message on its control connection; return the server's messages to any ranks.

        The returned tensors belong to the server and are valid until the next message.
        """
        return self.core.receive(m.CONTROL, b"c%d" % rank, message, payload, self.now)

    def data(self, rank: int, message: m.Message, payload: Payload = b"") -> list[Out]:
        """Send a rank's message on its data connection; return as `control` does."""
        return self.core.receive(m.DATA, b"d%d" % rank, message, payload, self.now)

    def hang_up(self, rank: int) -> list[Out]:
        """End a rank's control connection."""
        return self.core.hang_up(b"c%d" % rank)

    def rank_of(self, peer: Peer) -> int:
        """Return the rank that owns a connection."""
        return int(peer[1:])
