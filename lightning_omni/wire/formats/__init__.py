"""The wire formats of pushes and answers: the contract and registry (``base``), and the ``lossy`` ones."""

from lightning_omni.wire.formats.base import PerDirection, WireFormat, register, wire_named, wire_of
from lightning_omni.wire.formats.lossy import BF16, FP16, Int8, TopK

__all__ = ["BF16", "FP16", "Int8", "PerDirection", "TopK", "WireFormat", "register", "wire_named", "wire_of"]
