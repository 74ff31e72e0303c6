"""The protocol over ZeroMQ: frames, the server's loop, connections, keys, and limits on strangers."""

from lightning_omni.transport.zeromq.transport import ZeroMQ

__all__ = ["ZeroMQ"]
