"""The form of everything that travels: messages, tensors as bytes, wire formats, leases, and the handshake. No I/O."""

from lightning_omni.wire import formats as _shipped  # noqa: F401  # registers the formats
from lightning_omni.wire.leases import Batch, EpochPlan, LeaseBook, positions

__all__ = ["Batch", "EpochPlan", "LeaseBook", "positions"]
