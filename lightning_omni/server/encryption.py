"""What the run's one key is turned into: key pairs for CURVE, and the secret by which leaders know each other.

Every TCP socket here that listens is a CURVE server whose key pair is derived from the run's key, as is the one key
pair of all ranks. Who does not hold the run's key knows neither public key: it cannot encrypt the first message that a
CURVE server would answer, and no frame of it ever reaches the code behind the socket.
"""

from __future__ import annotations

from typing import Literal

import zmq
from zmq.utils import z85

from lightning_omni.errors import ConfigurationError
from lightning_omni.protocol.handshake import derive, is_equal
from lightning_omni.server.directory import is_private

KINDS = ("curve", "off")
DOMAIN = b"lightning-omni"
"""ZeroMQ's authentication has a domain, so that a socket whose authenticator is missing lets no connection in."""
HANDSHAKE_TIME = 3000
"""Milliseconds in which a connection must have shown that it holds the key."""


def check_encryption(encryption: str) -> None:
    """Raises `ConfigurationError` unless there is such an encryption."""
    if encryption not in KINDS:
        raise ConfigurationError(
            f'encryption={encryption!r}: pass "curve" (the default), or "off" on a network whose every user you trust'
        )


class RunKeys:
    """All secrets of a run, derived from its key (HKDF, RFC 5869).

    Args:
        key: the run's shared secret.
        encryption: ``"curve"`` or ``"off"``. Sockets in a private directory need none, and have none.

    Attributes:
        encryption: as given.
        peers: by which leaders know each other.
    """

    def __init__(self, key: bytes, encryption: str = "curve") -> None:
        check_encryption(encryption)
        self.encryption = encryption
        self.peers = derive(key, b"peers")
        self._server, self._client = derive(key, b"curve server"), derive(key, b"curve client")

    def encrypts(self, address: str) -> bool:
        """Whether connections to this address are encrypted."""
        return self.encryption == "curve" and not is_private(address)

    def prepare(self, socket: zmq.Socket[bytes], address: str, side: Literal["server", "client"]) -> None:
        """Gives a socket the keys of its side, before it is bound or connected.

        Raises:
            ConfigurationError: this machine's ZeroMQ cannot encrypt.
        """
        if not self.encrypts(address):
            return
        if not zmq.has("curve"):
            raise ConfigurationError(
                f"the ZeroMQ library on this machine (libzmq {zmq.zmq_version()}) was built without CURVE and cannot"
                ' encrypt: install pyzmq from a wheel, or pass encryption="off" on a network whose every user you trust'
            )
        server, client = z85.encode(self._server), z85.encode(self._client)
        if side == "server":
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, server)
            socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(server))
            socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(client))
            socket.setsockopt(zmq.CURVE_SECRETKEY, client)

    def answer_authentication(self, request: list[bytes]) -> list[bytes]:
        """The answer to a request of ZeroMQ's authentication protocol (ZAP, RFC 27): a client's public key is ours."""
        version, number, domain, _, _, mechanism, *credentials = request
        public = z85.decode(zmq.curve_public(z85.encode(self._client)))
        good = (version, domain, mechanism) == (b"1.0", DOMAIN, b"CURVE")
        good = good and len(credentials) == 1 and is_equal(credentials[0], public)
        return [b"1.0", number, b"200" if good else b"400", b"OK" if good else b"NO ACCESS", b"", b""]
