"""The transports that carry messages between ranks and servers: the interface, and ZeroMQ."""

from lightning_omni.transport.registry import Transport, register

__all__ = ["Transport", "register"]
