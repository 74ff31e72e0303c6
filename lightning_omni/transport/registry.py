"""The transports between ranks and server, and their registry. No sockets, clocks or threads.

A transport provides a rank's control connection (`Control`) and data connection (`Data`), a leader's connections to
other leaders (`Peers`), and the driver of the server's state machine (`Served`).

Rule 1: messages on a control connection arrive in order, and so do messages on a data connection.
Rule 2: a request has one answer. A refusal is raised as `Refused`, and the end of this rank's run as the error that
ended it.
Rule 3: if a control connection ends without a goodbye, the driver calls `ServerCore.hang_up`: its rank is lost.
Rule 4: the server trusts no sender. It calls `ServerCore.check_payload` before it allocates memory for a data message's
payload.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from lightning_omni.errors import (
    ConfigurationError,
    MalformedMessage,
    OmniError,
    ProtocolError,
)
from lightning_omni.registry import Registry, name_of, to_wire
from lightning_omni.server.service import Out, Peer
from lightning_omni.transport.connections import Control
from lightning_omni.wire import messages as m
from lightning_omni.wire.layout import Layout

if TYPE_CHECKING:  # ranks do not import the server
    from lightning_omni.server.core import ServerCore

# --- Server ----------------------------------------------------------------------------------------------------------


class Served(Protocol):
    """A listening server, which drives a `ServerCore`."""

    @property
    def address(self) -> str:
        """Return the address at which ranks join."""

    def run(self, until: Callable[[], bool]) -> None:
        """Serve until ``until()``, called several times a second, is true, or a followed server is gone."""

    def farewell(self, reason: str) -> None:
        """End the run for this reason, if rank 0, which owns this server, still takes part in it."""

    def close(self) -> None:
        """Stop listening; queued messages have a short time to be sent."""


def allowed(core: ServerCore, channel: m.Channel, peer: Peer, data: bytes | memoryview, nbytes: int) -> m.Message:
    """Decode and check a message before its payload of ``nbytes``, for a transport that receives the message first.

    Raises:
        ProtocolError: the message is invalid or not allowed; answer with `refusal`, and do not keep the payload.
    """
    message = core.decode(channel, data)
    if channel == m.CONTROL:
        if nbytes > m.LARGEST_INLINE:
            raise MalformedMessage(f"{nbytes} bytes of payload on the control channel, which takes {m.LARGEST_INLINE}")
    elif (expected := core.check_payload(peer, message)) != nbytes:
        raise MalformedMessage(f"{nbytes} bytes of payload came, {expected} were announced")
    return message


def refusal(core: ServerCore, channel: m.Channel, peer: Peer, error: ProtocolError) -> list[Out]:
    return core.refuse(channel, peer, error)


# --- Transports ------------------------------------------------------------------------------------------------------


class Transport(msgspec.Struct, frozen=True, kw_only=True, tag_field="name"):
    """A way for the ranks of a run and its server to communicate: its settings, and both ends."""

    def check_address(self, address: str) -> None:
        """Raise `ConfigurationError` unless this is a possible address of a server."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its addresses are")

    def serve(self, core: ServerCore, host: str = "", port: int = 0, data_port: int = 0) -> Served:
        """Listen as a server.

        Args:
            core: state machine of the server.
            host: address of this machine to listen on; empty if all ranks are on it, for the fastest connection.
            port: port, if the transport has any; 0 for a free one.
            data_port: port for tensors, if that is another; 0 for a free one.

        Raises:
            ConfigurationError: it cannot listen there.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot serve")

    def follow(self, core: ServerCore, coordinator: str, host: str = "", port: int = 0, data_port: int = 0) -> Served:
        """Listen as a server that holds a partition, and join the coordinating server.

        Args:
            core: state machine of the server, with the number of its share.
            coordinator: its address.
            host: as in `serve`; empty also for the address from which the coordinating server is reached.
            port: as in `serve`.
            data_port: as in `serve`.

        Raises:
            ConfigurationError: it cannot listen there, ``coordinator`` is no address, or the transport does not support
                several servers.
            ConnectionLost: the coordinating server cannot be reached.
            ProtocolError: the coordinating server refuses this one (`Refused`), lacks the key, or answers wrongly.
        """
        raise ConfigurationError(
            f"transport={name_of(self)}: with it one server holds all weights; pass Server(count=1)"
        )

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
    ) -> Control:
        """Join a run as a rank.

        Args:
            address: address of the server.
            key: the run's shared secret.
            run: a name on which all ranks of the run agree.
            rank: this rank; beyond the announced ones if ``world_size`` is 0.
            world_size: number of ranks; 0 if this one was not announced and joins a running run.
            layout: the parameters of all optimizers; every rank must have the same.
            on_end: called once, from any thread, when this rank must stop.
            silence: seconds without a sign of life after which the server evicts the rank; unless it is 0, the
                transport sends such signs without Python, if it can.

        Raises:
            ConfigurationError: the address is wrong, or this machine cannot encrypt.
            ConnectionLost: the server cannot be reached.
            ProtocolError: the server refuses this rank (`Refused`), lacks the key, or answers wrongly.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot join")

    def serve_again(self, core: ServerCore, address: str) -> Served:
        """Listen at the address of a server that is gone, to continue its run.

        Raises:
            ConfigurationError: it cannot listen there, or the transport does not support this.
        """
        raise ConfigurationError(f"transport={name_of(self)}: with it no server goes on in the place of another")

    def clear(self, address: str) -> None:
        """Remove remains of a server that is gone at this address, before this process ends."""


TRANSPORTS: dict[str, type[Transport]] = {}
"""Every transport by its name."""
_registry = Registry(
    TRANSPORTS, Transport, "transport", "transport", "lightning_omni.transport.Transport", "--transport"
)


from_wire = _registry.from_wire


def register(kind: type[Transport]) -> type[Transport]:
    """Register your own transport under its tag, as a class decorator.

    The embedded server imports the module of a run's transport; a standalone server needs the argument
    ``lightning-omni serve --transport module:Class``.

    Raises:
        ConfigurationError: the name is in use.
    """
    return _registry.register(kind)


load = _registry.load


__all__ = [
    "TRANSPORTS",
    "Served",
    "Transport",
    "allowed",
    "from_wire",
    "load",
    "name_of",
    "refusal",
    "register",
    "to_wire",
]
