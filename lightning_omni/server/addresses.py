"""Addresses of sockets: how they read, and how a machine is known on the way to another one."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from lightning_omni.errors import ConfigurationError
from lightning_omni.server.directory import DATA, is_private, sibling


def check_address(address: str) -> None:
    """Raises `ConfigurationError` unless the address reads ``tcp://host:port`` or ``ipc:///directory/control``."""
    try:
        parts = urlsplit(address)
        good = not (parts.query or parts.fragment or parts.username or " " in address)
        if parts.scheme == "ipc":
            good = good and not parts.netloc and parts.path.startswith("/")
        else:
            good = good and parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port) and not parts.path
    except ValueError:
        good = False
    if not good:
        raise ConfigurationError(f'server={address!r}: pass the address of a running server as "tcp://host:port"')


def data_address(control: str, port: int) -> str:
    """Address of a server's data socket.

    Args:
        control: address of its control socket.
        port: of its data socket, where these are sockets of TCP.

    Example:
        >>> data_address("tcp://10.0.0.1:5555", 5556), data_address("ipc:///tmp/a/control", 0)
        ('tcp://10.0.0.1:5556', 'ipc:///tmp/a/data')
    """
    if is_private(control):
        return sibling(control, DATA)
    return f"tcp://{urlsplit(control).netloc.rpartition(':')[0]}:{port}"


def own_host(server: str) -> str:
    """The address by which this machine is known on the way to a server: loopback if that runs here.

    Args:
        server: ``tcp://host:port``.
    """
    parts = urlsplit(server)
    kind, _, _, _, target = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # a datagram socket: nothing is sent, but the system picks the route
        return str(probe.getsockname()[0])


def tcp_endpoint(host: str, port: int = 0) -> str:
    """What to bind for a host's address or name; port 0 takes a free one."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}"
