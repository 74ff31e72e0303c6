"""The handshake of admission: version, then key, then fingerprint.

Rule 1: a rank proves that it holds the run's key with a MAC over both nonces; the server proves the same in return.
Rule 2: a process without the key learns nothing but version and nonces.
Rule 3: no message holds the key, or another secret. Each other secret is derived from the key for one purpose.
Rule 4: a data connection is opened by a proof over fresh nonces with a key of that rank's process alone, so that
overheard bytes open nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from lightning_omni.errors import Refused
from lightning_omni.wire.layout import Layout
from lightning_omni.wire.messages import (
    VERSION,
    Attach,
    AttachChallenge,
    Attached,
    AttachProof,
    Challenge,
    Hello,
    Message,
    Observe,
    ObserverProof,
    ObserverWelcome,
    Proof,
    Welcome,
)
from lightning_omni.wire.messages.servers import FollowerHello, FollowerProof, FollowerWelcome

NONCE_BYTES = 32
MOST_CHALLENGED = 1024
"""The most connections with an open challenge, by default."""
OTHER_KEY = "key", "the key does not match the server's; both sides must be given the same key"
OPENS_NOTHING = "stranger", "this proof opens nothing"
Opening = Hello | Attach | Observe | FollowerHello
"""The first message of a connection."""
First = TypeVar("First", bound=Opening)
Request = Callable[[Message, type[Any]], Any]
"""A function that sends a message to the other side and returns its answer of the given type."""


def hello_of(run: str, rank: int, world_size: int, layout: Layout, nonce: bytes, returns: bool = False) -> Hello:
    """Return a rank's first message; ``layout`` has the parameters of all optimizers."""
    return Hello(
        version=VERSION,
        run=run,
        rank=rank,
        world_size=world_size,
        fingerprint=layout.fingerprint,
        tensors=len(layout.specs),
        numbers=layout.numel,
        nonce=nonce,
        returns=returns,
    )


# --- The side that connects -------------------------------------------------------------------------------------------


def join(request: Request, key: bytes, hello: Hello, where: str = "") -> tuple[Welcome, bytes]:
    """Perform a rank's side of the handshake; ``where`` is the server's address, for messages.

    Returns:
        The server's welcome, and the secret that opens this rank's data connection.
    """
    welcome, challenge = _prove(request, key, hello, (Challenge, Proof, Welcome), _other_server(where))
    return welcome, session_key(key, hello, challenge)


def attach(request: Request, secret: bytes, number: int, nonce: bytes) -> None:
    """Authenticate both sides of a data connection, or of one between leaders, by their shared secret."""
    other = "the process that answers does not hold the secret of this connection"
    _prove(request, secret, Attach(rank=number, nonce=nonce), (AttachChallenge, AttachProof, Attached), other)


def observe(request: Request, key: bytes, nonce: bytes, where: str = "") -> None:
    """Perform an observer's side of the handshake; ``where`` is as in `join`."""
    hello = Observe(version=VERSION, nonce=nonce)
    _prove(request, key, hello, (Challenge, ObserverProof, ObserverWelcome), _other_server(where))


def join_as_follower(request: Request, key: bytes, hello: FollowerHello, where: str = "") -> FollowerWelcome:
    """Perform the handshake of a server that holds a partition with the coordinating server."""
    try:
        welcome, _ = _prove(request, key, hello, (Challenge, FollowerProof, FollowerWelcome), _other_server(where))
    except Refused as no:
        if no.code != "malformed":  # that of a server which holds a share, and knows no such message
            raise
        raise Refused("server", f"the server at {where} coordinates no others; pass the address of server 0") from no
    return welcome  # type: ignore[no-any-return]


def _prove(
    request: Request, secret: bytes, hello: Opening, kinds: tuple[type[Any], type[Any], type[Any]], other: str
) -> tuple[Any, bytes]:
    """Prove that this side holds a secret, and check that the other one does; return its answer, and its challenge.

    ``kinds`` are the types of challenge, proof and answer; ``other`` describes a process without the secret.
    """
    challenge, proof, answer = kinds
    nonce = request(hello, challenge).nonce
    found = request(proof(mac=client_mac(secret, hello, nonce)), answer)
    if not is_equal(found.mac, server_mac(secret, hello, nonce)):
        raise Refused("key", f"{other}; it is not ours")
    return found, nonce


def _other_server(where: str) -> str:
    return f"the server at {where} does not hold the run's key"


# --- The side that is connected to ------------------------------------------------------------------------------------


class Challenges(Generic[First]):
    """The connections that have sent a hello, and must still prove that they hold a secret.

    Args:
        random: returns as many random bytes as requested.
        most: number of connections to remember, which bounds the memory that strangers can occupy; a further one
            displaces the first.
        refusal: code and reason of the refusal of a wrong proof.
    """

    def __init__(
        self, random: Callable[[int], bytes], most: int = MOST_CHALLENGED, refusal: tuple[str, str] = OTHER_KEY
    ) -> None:
        self._random, self._most, self._refusal = random, most, refusal
        self._open: dict[bytes, tuple[First, bytes]] = {}

    def ask(self, peer: bytes, hello: First) -> bytes:
        nonce = self._random(NONCE_BYTES)
        if problem := version_problem(hello):
            raise Refused("version", problem)
        self._open.pop(peer, None)
        self._open[peer] = hello, nonce
        while len(self._open) > self._most:
            self._open.pop(next(iter(self._open)))
        return nonce

    def proved(self, peer: bytes, mac: bytes, secret_of: Callable[[First], bytes]) -> tuple[First, bytes]:
        """Remove a connection's challenge; return hello and nonce for a right proof. Empty secrets prove nothing."""
        hello, nonce = self._open.pop(peer, (None, b""))
        secret = secret_of(hello) if hello is not None else b""
        if hello is None or not secret or not is_equal(mac, client_mac(secret, hello, nonce)):
            raise Refused(*self._refusal)
        return hello, nonce


# --- Secrets ----------------------------------------------------------------------------------------------------------

_SIDES: dict[type[Any], tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    Hello: ((b"rank",), (b"server",)),
    Attach: (("attach", "rank"), ("attach", "server")),
    Observe: (("observe", "observer"), ("observe", "server")),
    FollowerHello: (("between servers", "follower"), ("between servers", "coordinator")),
}
"""The first fields of both sides' proofs, so that none is one of the other side, or of another handshake."""


def client_mac(secret: bytes, hello: Opening, challenge: bytes) -> bytes:
    """Return the proof of the side that has sent the hello."""
    return mac_of(secret, *_SIDES[type(hello)][0], hello, challenge)


def server_mac(secret: bytes, hello: Opening, challenge: bytes) -> bytes:
    """Return the proof of the side that has sent the challenge."""
    return mac_of(secret, *_SIDES[type(hello)][1], hello, challenge)


def mac_of(secret: bytes, *said: Any) -> bytes:
    # MessagePack delimits the fields, so that no two conversations encode to the same bytes.
    return hmac.digest(secret, msgspec.msgpack.encode(said), hashlib.sha256)


def session_key(key: bytes, hello: Hello, challenge: bytes) -> bytes:
    """Return the secret of a rank's process and the server that opens its data connection."""
    return derive(key, b"session", msgspec.msgpack.encode((hello, challenge)))


def derive(key: bytes, purpose: bytes, salt: bytes = b"", length: int = 32) -> bytes:
    """Derive a secret of at most 8160 bytes by HKDF with SHA-256 (RFC 5869)."""
    extracted = hmac.digest(salt or bytes(hashlib.sha256().digest_size), key, hashlib.sha256)
    block, derived = b"", b""
    while len(derived) < length:
        block = hmac.digest(extracted, block + purpose + bytes([len(derived) // len(extracted) + 1]), hashlib.sha256)
        derived += block
    return derived[:length]


is_equal = hmac.compare_digest


def version_problem(hello: Opening) -> str:
    if isinstance(hello, Attach) or hello.version == VERSION:  # a rank has shown its version before it attaches
        return ""
    match hello:
        case Hello():
            speaker = f"rank {hello.rank}"
        case Observe():
            speaker = "the process that connects"  # to watch the run, or to join it
        case _:
            speaker = f"server {hello.number}"
    return (
        f"{speaker} speaks protocol version {hello.version}, the server {VERSION}; install the same version of"
        " lightning-omni on both sides"
    )


def fingerprint_problem(hello: Hello, first: Hello) -> str:
    if hello.fingerprint == first.fingerprint:
        return ""
    (mine, _, division), (theirs, _, divided) = (each.fingerprint.partition(" ") for each in (hello, first))
    if mine == theirs:
        held = (f"sharded ({each})" if each else "whole in each member" for each in (division, divided))
        return (
            "rank {} has the model of rank {}, and its group holds it {}, not {}: all groups need the same"
            " model_parallel=, the same number of ranks and the same configure_model".format(
                hello.rank, first.rank, *held
            )
        )
    otherwise = ""
    if not hello.world_size:  # a group that joins on its own, perhaps the only one of a saved run
        otherwise = (
            f"; rank {first.rank} has begun the run at this server, and may be gone: to begin another one, use another"
            " server, with another --state directory"
        )
    return (
        f"rank {hello.rank} has another model than rank {first.rank}: {hello.tensors} parameters with {hello.numbers}"
        f" numbers ({hello.fingerprint[:8]}) against {first.tensors} with {first.numbers} ({first.fingerprint[:8]});"
        f" names, shapes, dtypes and order of the optimizers' parameters must be the same on every rank{otherwise}"
    )
