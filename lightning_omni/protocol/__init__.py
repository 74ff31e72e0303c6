"""The protocol without I/O: messages, membership, collectives, leases, and the server's state machine."""

from lightning_omni.protocol import wire_formats as _shipped  # noqa: F401  # registers the formats
from lightning_omni.protocol.leases import Batch, EpochPlan, LeaseBook, positions
from lightning_omni.protocol.server import ServerCore
from lightning_omni.protocol.service import Out

__all__ = ["Batch", "EpochPlan", "LeaseBook", "Out", "ServerCore", "positions"]
