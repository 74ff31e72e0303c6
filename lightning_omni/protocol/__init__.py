"""Which side says what, and when: messages, membership, collectives, leases, the server's state machine. No I/O."""

from lightning_omni.protocol import wire_formats as _shipped  # noqa: F401  # known by name from here on
from lightning_omni.protocol.leases import Batch, EpochPlan, LeaseBook, positions
from lightning_omni.protocol.server import ServerCore
from lightning_omni.protocol.service import Out

__all__ = ["Batch", "EpochPlan", "LeaseBook", "Out", "ServerCore", "positions"]
