"""The handshake of admission: version, then key, then fingerprint. The key itself is never sent.

Rule 1: a rank proves that it holds the run's key with a MAC over both nonces; the server proves the same in return.
Rule 2: a process without the key learns nothing but version and nonces.
Rule 3: every other secret is derived from the run's key for one purpose, and is never sent.
Rule 4: a data connection is opened by a proof over fresh nonces with a key of that rank's process alone, so that
overheard bytes open nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any, Literal

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
Request = Callable[[Message, type[Any]], Any]
"""A function that sends a message to the other side and returns its answer of the given type."""


def hello_of(run: str, rank: int, world_size: int, layout: Layout, nonce: bytes, returns: bool = False) -> Hello:
    """Return a rank's first message; ``layout`` is that of all optimizers' parameters."""
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


def join(request: Request, key: bytes, hello: Hello, where: str = "") -> tuple[Welcome, bytes]:
    """Perform a rank's side of the handshake; ``where`` is the server's address, for messages.

    Returns:
        The server's welcome, and the secret that opens this rank's data connection.

    Raises:
        Refused: the server does not hold the key.
    """
    challenge = request(hello, Challenge).nonce
    welcome: Welcome = request(Proof(mac=rank_mac(key, hello, challenge)), Welcome)
    if not is_equal(welcome.mac, server_mac(key, hello, challenge)):
        raise Refused("key", f"the server at {where} does not hold the run's key; it is not ours")
    return welcome, session_key(key, hello, challenge)


def attach(request: Request, secret: bytes, number: int, nonce: bytes) -> None:
    """Authenticate both sides of a data connection, or of one between leaders, by their shared secret.

    Raises:
        Refused: the other side does not hold the secret.
    """
    hello = Attach(rank=number, nonce=nonce)
    challenge = request(hello, AttachChallenge).nonce
    attached = request(AttachProof(mac=attach_mac(secret, "rank", hello, challenge)), Attached)
    if not is_equal(attached.mac, attach_mac(secret, "server", hello, challenge)):
        raise Refused("key", "the process that answers does not hold the secret of this connection; it is not ours")


def observe(request: Request, key: bytes, nonce: bytes, where: str = "") -> None:
    """Perform an observer's side of the handshake.

    Raises:
        Refused: the server does not hold the key.
    """
    hello = Observe(version=VERSION, nonce=nonce)
    challenge = request(hello, Challenge).nonce
    observing = request(ObserverProof(mac=observer_mac(key, "observer", hello, challenge)), ObserverWelcome)
    if not is_equal(observing.mac, observer_mac(key, "server", hello, challenge)):
        raise Refused("key", f"the server at {where} does not hold the run's key; it is not ours")


def rank_mac(key: bytes, hello: Hello, challenge: bytes) -> bytes:
    return _mac(key, b"rank", hello, challenge)


def server_mac(key: bytes, hello: Hello, challenge: bytes) -> bytes:
    return _mac(key, b"server", hello, challenge)


def session_key(key: bytes, hello: Hello, challenge: bytes) -> bytes:
    """Return the secret of a rank's process and the server that opens its data connection."""
    return derive(key, b"session", msgspec.msgpack.encode((hello, challenge)))


def attach_mac(secret: bytes, side: Literal["rank", "server"], attach: Attach, challenge: bytes) -> bytes:
    return hmac.digest(secret, msgspec.msgpack.encode(("attach", side, attach, challenge)), hashlib.sha256)


def share_mac(secret: bytes, side: str, share: tuple[Any, ...]) -> bytes:
    return hmac.digest(secret, msgspec.msgpack.encode(("share", side, share)), hashlib.sha256)


def observer_mac(key: bytes, side: Literal["observer", "server"], hello: Observe, challenge: bytes) -> bytes:
    return hmac.digest(key, msgspec.msgpack.encode(("observe", side, hello, challenge)), hashlib.sha256)


def follower_mac(key: bytes, side: Literal["follower", "coordinator"], hello: FollowerHello, challenge: bytes) -> bytes:
    return hmac.digest(key, msgspec.msgpack.encode(("between servers", side, hello, challenge)), hashlib.sha256)


def join_as_follower(request: Request, key: bytes, hello: FollowerHello, where: str = "") -> FollowerWelcome:
    """Perform the handshake of a server that holds a partition with the coordinating server.

    Raises:
        Refused: the coordinating server does not hold the key, or coordinates no others.
    """
    try:
        challenge = request(hello, Challenge).nonce
    except Refused as no:
        if no.code != "malformed":  # a server that coordinates no others knows no such message
            raise
        raise Refused(
            "follower",
            f"the server at {where} coordinates no others: start it with --servers {hello.servers}, or pass the address"
            " of server 0",
        ) from no
    welcome: FollowerWelcome = request(
        FollowerProof(mac=follower_mac(key, "follower", hello, challenge)), FollowerWelcome
    )
    if not is_equal(welcome.mac, follower_mac(key, "coordinator", hello, challenge)):
        raise Refused("key", f"the server at {where} does not hold the run's key; it is not ours")
    return welcome


def derive(key: bytes, purpose: bytes, salt: bytes = b"", length: int = 32) -> bytes:
    """Derive a secret of at most 8160 bytes by HKDF with SHA-256 (RFC 5869).

    Secrets for another ``purpose`` or ``salt`` are unrelated.
    """
    extracted = hmac.digest(salt or bytes(hashlib.sha256().digest_size), key, hashlib.sha256)
    block, derived = b"", b""
    while len(derived) < length:
        block = hmac.digest(extracted, block + purpose + bytes([len(derived) // len(extracted) + 1]), hashlib.sha256)
        derived += block
    return derived[:length]


def is_equal(one: bytes, other: bytes) -> bool:
    """Compare two MACs in constant time."""
    return hmac.compare_digest(one, other)


def version_problem(hello: Hello | Observe | FollowerHello) -> str:
    """Return why this protocol version cannot be served, or an empty string."""
    if hello.version == VERSION:
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
    """Return why this rank's model does not match the first one's, or an empty string."""
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


def _mac(key: bytes, side: bytes, hello: Hello, challenge: bytes) -> bytes:
    # MessagePack delimits the fields, so that no two conversations encode to the same bytes.
    return hmac.digest(key, msgspec.msgpack.encode((side, hello, challenge)), hashlib.sha256)
