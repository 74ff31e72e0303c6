"""The protocol over ZeroMQ: frames, the server's loop, connections, keys, and limits on strangers."""

from lightning_omni.transport.zeromq.client import ControlConnection, DataConnection
from lightning_omni.transport.zeromq.peers import PeerConnections, PeerSocket
from lightning_omni.transport.zeromq.server import ZeroMQServer
from lightning_omni.transport.zeromq.transport import ZeroMQ

__all__ = [
    "ControlConnection",
    "DataConnection",
    "PeerConnections",
    "PeerSocket",
    "ZeroMQ",
    "ZeroMQServer",
]
