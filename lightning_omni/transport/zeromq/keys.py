"""The single key of a run: its sources, and the secrets derived from it.

With encryption, every listening TCP socket is a CURVE server, and no frame of a process without the run's key reaches
the code behind it. The socket's key pair, the one key pair of all ranks and the secret by which leaders authenticate
each other are derived from that key.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning_omni.errors import ConfigurationError
from lightning_omni.transport.zeromq.addresses import is_private
from lightning_omni.wire.handshake import derive, is_equal

if TYPE_CHECKING:
    import zmq

KEY_BYTES = 32
ENVIRONMENT = "LIGHTNING_OMNI_KEY"
KINDS = ("curve", "off")
DOMAIN = b"lightning-omni"
"""The domain of ZeroMQ's authentication; with a domain, a socket without an authenticator admits no connection."""
HANDSHAKE_TIME = 3000
"""Milliseconds within which a connection must have shown the key."""


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def default_path() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "lightning-omni" / "key"


def key_of_environment() -> bytes | None:
    text = os.environ.get(ENVIRONMENT)
    remedy = "; set it to what the server's key file holds, or unset it"
    return _parse(text, f"the environment variable {ENVIRONMENT}", remedy) if text else None


def load_key(path: Path | None = None) -> bytes:
    """Return a running server's key, from a key file.

    Without ``path``, it is that of the environment variable ``LIGHTNING_OMNI_KEY`` (hexadecimal), or else of the file
    that ``lightning-omni serve`` creates.
    """
    if path is None and (key := key_of_environment()) is not None:
        return key
    file = path or default_path()
    try:
        text = file.read_text(errors="replace")  # so that raw bytes fail as not hexadecimal
    except OSError as error:
        raise ConfigurationError(
            f"no key for the parameter server: cannot read {file} ({error.strerror}); copy the key file that"
            f" `lightning-omni serve` made to this machine, or set {ENVIRONMENT}"
        ) from error
    return _parse(text, str(file))


def is_open_to_others(path: Path | None = None) -> bool:
    if path is None and os.environ.get(ENVIRONMENT):
        return False
    return bool((path or default_path()).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


def load_or_create(path: Path | None = None) -> tuple[bytes, Path | None]:
    """Return the user's key and its file (None for the environment variable).

    The key is created on first use, readable by the user alone.
    """
    if path is None and os.environ.get(ENVIRONMENT):
        return load_key(), None
    file = path or default_path()
    try:
        if not file.exists():
            _create(file)
    except OSError as error:
        raise ConfigurationError(
            f"cannot make the key file {file} ({error.strerror}); name another one with --key-file, or set"
            f" {ENVIRONMENT}"
        ) from error
    return load_key(file), file


def _create(file: Path) -> None:
    """Create a key file atomically; if another server creates one meanwhile, both use that one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, new = tempfile.mkstemp(prefix=f"{file.name}-", dir=file.parent)  # mode 0600
    with os.fdopen(descriptor, "w") as handle:
        handle.write(new_key().hex() + "\n")
    try:
        os.link(new, file)
    except OSError:
        if not file.exists():  # the file system has no links
            os.replace(new, file)
            return
    os.unlink(new)


def check_encryption(encryption: str) -> None:
    if encryption not in KINDS:
        raise ConfigurationError(
            f'encryption={encryption!r}: pass "curve" (the default), or "off" on a network whose every user you trust'
        )


class RunKeys:
    """The secrets of a run, derived from its key (HKDF, RFC 5869).

    ``peers`` is the secret by which leaders authenticate each other.
    """

    def __init__(self, key: bytes, encryption: str = "curve") -> None:
        check_encryption(encryption)
        self.encryption = encryption
        self.peers = derive(key, b"peers")
        self._server, self._client = derive(key, b"curve server"), derive(key, b"curve client")

    def encrypts(self, address: str) -> bool:
        return self.encryption == "curve" and not is_private(address)

    def prepare(self, socket: zmq.Socket[bytes], address: str, side: Literal["server", "client"]) -> None:
        if not self.encrypts(address):
            return
        import zmq
        from zmq.utils import z85

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
        """Answer an authentication request (ZAP, RFC 27): only the public key of the run's ranks is valid."""
        import zmq
        from zmq.utils import z85

        version, number, domain, _, _, mechanism, *credentials = request
        public = z85.decode(zmq.curve_public(z85.encode(self._client)))
        good = (version, domain, mechanism) == (b"1.0", DOMAIN, b"CURVE")
        good = good and len(credentials) == 1 and is_equal(credentials[0], public)
        return [b"1.0", number, b"200" if good else b"400", b"OK" if good else b"NO ACCESS", b"", b""]


def _parse(text: str, where: str, remedy: str = "") -> bytes:
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) < KEY_BYTES:
        raise ConfigurationError(f"{where} does not hold a key: {KEY_BYTES} bytes in hexadecimal are expected{remedy}")
    return key
