"""The parameter server's state machine: a message goes in, and replies come out. No sockets, clocks or threads."""

from lightning_omni.server.core import ServerCore
from lightning_omni.server.service import Out

__all__ = ["Out", "ServerCore"]
