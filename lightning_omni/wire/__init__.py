"""The form of everything that travels: messages, tensors as bytes, wire formats, and the handshake. No I/O."""

from lightning_omni.wire import formats as _shipped  # noqa: F401  # registers the formats
