"""ZeroMQ as the transport of a run: sockets in a private directory, or TCP with CURVE."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lightning_omni.errors import OmniError
from lightning_omni.transport.registry import Transport, register
from lightning_omni.transport.zeromq.addresses import (
    PrivateDirectory,
    check_address,
    directory_of,
    is_offered,
    is_private,
    own_host,
    remove_if_abandoned,
)
from lightning_omni.transport.zeromq.keys import check_encryption
from lightning_omni.wire.layout import Layout

if TYPE_CHECKING:
    from lightning_omni.server.core import ServerCore
    from lightning_omni.transport.zeromq.client import ControlConnection
    from lightning_omni.transport.zeromq.server import ZeroMQServer


@register
class ZeroMQ(Transport, frozen=True, kw_only=True, tag="zeromq"):
    """A transport with two sockets at the server, for messages and tensors, and one at each leader for gossip.

    Attributes:
        encryption: of TCP connections: ``"curve"``, or ``"off"`` on a network whose every user you trust.
        shared_memory: whether ranks exchange tensors with the coordinating server through shared memory where possible:
            on Linux, if its sockets are in a directory.

    Raises:
        ConfigurationError: the encryption is unknown.
    """

    encryption: str = "curve"
    shared_memory: bool = True

    def __post_init__(self) -> None:
        check_encryption(self.encryption)

    def check_address(self, address: str) -> None:
        check_address(address)

    def serve(self, core: ServerCore, host: str = "", port: int = 0, data_port: int = 0) -> ZeroMQServer:
        from lightning_omni.transport.zeromq.server import ZeroMQServer

        if host or not is_offered():
            return ZeroMQServer(core, host or "127.0.0.1", port, data_port, encryption=self.encryption)
        return ZeroMQServer(
            core, directory=PrivateDirectory(), encryption=self.encryption, shared_memory=self.shared_memory
        )

    def follow(
        self, core: ServerCore, coordinator: str, host: str = "", port: int = 0, data_port: int = 0
    ) -> ZeroMQServer:
        if not host and not is_private(coordinator):
            host = own_host(coordinator)
        server = self.serve(core, host, port, data_port)
        try:
            server.follow(coordinator)
        except BaseException:
            server.close()
            raise
        return server

    def serve_again(self, core: ServerCore, address: str) -> ZeroMQServer:
        from lightning_omni.transport.zeromq.server import ZeroMQServer

        if not is_private(address):
            parts = urlsplit(address)
            return ZeroMQServer(core, parts.hostname or "", parts.port or 0, encryption=self.encryption)
        directory = PrivateDirectory(at=directory_of(address))
        return ZeroMQServer(core, directory=directory, encryption=self.encryption, shared_memory=self.shared_memory)

    def join(
        self,
        address: str,
        key: bytes,
        run: str,
        rank: int,
        world_size: int,
        layout: Layout,
        on_end: Callable[[OmniError], None] | None = None,
        silence: float = 0.0,
    ) -> ControlConnection:
        from lightning_omni.transport.zeromq.client import ControlConnection

        return ControlConnection(
            address,
            key,
            run,
            rank,
            world_size,
            layout,
            on_end=on_end,
            encryption=self.encryption,
            shared_memory=self.shared_memory,
            silence=silence,
        )

    def clear(self, address: str) -> None:
        remove_if_abandoned(address)
