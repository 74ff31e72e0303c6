"""The protocol in real time over ZeroMQ: frames, the server's loop, connections, process launch and keys."""

from lightning_omni.server.connection import ControlConnection, DataConnection
from lightning_omni.server.loop import Server
from lightning_omni.server.peers import PeerConnections, PeerSocket
from lightning_omni.server.process import ServerProcess
from lightning_omni.server.zeromq import ZeroMQ

__all__ = [
    "ControlConnection",
    "DataConnection",
    "PeerConnections",
    "PeerSocket",
    "Server",
    "ServerProcess",
    "ZeroMQ",
]
