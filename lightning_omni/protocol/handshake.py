"""Admission: version, then key, then fingerprint. The key itself never travels.

Rule 1: a rank proves that it holds the run's key with a MAC over both nonces; the server proves the same back.
Rule 2: nothing but version and nonces is revealed to a process without the key.
Rule 3: every secret beside the run's key is derived from it, each for one purpose; none of them travels.
Rule 4: a data connection is opened by a proof over fresh nonces with a key of that rank's process alone, so that bytes
that were overheard open nothing.
Nonces are arguments here; drawing them is the caller's business.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from lightning_omni.errors import Refused
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.messages import (
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
    Observing,
    Proof,
    Welcome,
)
from lightning_omni.protocol.shard_messages import ShardHello, ShardProof, ShardWelcome

NONCE_BYTES = 32
Request = Callable[[Message, type[Any]], Any]
"""Sends a message to the other side, and returns its answer, which is of that type."""


def hello_of(run: str, rank: int, world_size: int, layout: Layout, nonce: bytes, returns: bool = False) -> Hello:
    """What a rank says first.

    Args:
        run: a name that all ranks of the run agree on.
        rank: the rank.
        world_size: number of ranks.
        layout: the parameters of all optimizers; every rank must have the same.
        nonce: random bytes.
        returns: whether a server that is gone had admitted it.
    """
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
    """A rank's side of the handshake on its control connection.

    Args:
        request: to the server.
        key: the run's shared secret.
        hello: from `hello_of`.
        where: the server's address, for messages.

    Returns:
        What the server tells an admitted rank, and the secret that opens this rank's data connection.

    Raises:
        Refused: the server does not hold the key.
    """
    challenge = request(hello, Challenge).nonce
    welcome: Welcome = request(Proof(mac=rank_mac(key, hello, challenge)), Welcome)
    if not is_equal(welcome.mac, server_mac(key, hello, challenge)):
        raise Refused("key", f"the server at {where} does not hold the run's key; it is not ours")
    return welcome, session_key(key, hello, challenge)


def attach(request: Request, secret: bytes, number: int, nonce: bytes) -> None:
    """Proves to hold the secret of a data connection, or of one between leaders, and has it proved.

    Args:
        request: to the other side.
        secret: from `join`; or that of leaders.
        number: the rank.
        nonce: random bytes.

    Raises:
        Refused: the other side does not hold the secret.
    """
    hello = Attach(rank=number, nonce=nonce)
    challenge = request(hello, AttachChallenge).nonce
    attached = request(AttachProof(mac=attach_mac(secret, "rank", hello, challenge)), Attached)
    if not is_equal(attached.mac, attach_mac(secret, "server", hello, challenge)):
        raise Refused("key", "the process that answers does not hold the secret of this connection; it is not ours")


def observe(request: Request, key: bytes, nonce: bytes, where: str = "") -> None:
    """The handshake of a process that watches and is no rank.

    Args:
        request: to the server.
        key: the run's shared secret.
        nonce: random bytes.
        where: the server's address, for messages.

    Raises:
        Refused: the server does not hold the key.
    """
    hello = Observe(version=VERSION, nonce=nonce)
    challenge = request(hello, Challenge).nonce
    observing = request(ObserverProof(mac=observer_mac(key, "observer", hello, challenge)), Observing)
    if not is_equal(observing.mac, observer_mac(key, "server", hello, challenge)):
        raise Refused("key", f"the server at {where} does not hold the run's key; it is not ours")


def rank_mac(key: bytes, hello: Hello, challenge: bytes) -> bytes:
    """The MAC by which a rank answers a challenge."""
    return _mac(key, b"rank", hello, challenge)


def server_mac(key: bytes, hello: Hello, challenge: bytes) -> bytes:
    """The MAC by which the server shows that it holds the key, too."""
    return _mac(key, b"server", hello, challenge)


def session_key(key: bytes, hello: Hello, challenge: bytes) -> bytes:
    """The secret of one admitted process and its server; it opens that process's data connection."""
    return derive(key, b"session", msgspec.msgpack.encode((hello, challenge)))


def attach_mac(secret: bytes, side: Literal["rank", "server"], attach: Attach, challenge: bytes) -> bytes:
    """The MAC by which either side shows that it holds the secret of a connection."""
    return hmac.digest(secret, msgspec.msgpack.encode(("attach", side, attach, challenge)), hashlib.sha256)


def share_mac(secret: bytes, side: str, share: tuple[Any, ...]) -> bytes:
    """The MAC by which either side shows that it holds the secret of the connection for which memory is shared."""
    return hmac.digest(secret, msgspec.msgpack.encode(("share", side, share)), hashlib.sha256)


def observer_mac(key: bytes, side: Literal["observer", "server"], hello: Observe, challenge: bytes) -> bytes:
    """The MAC by which a process that watches, or the server to it, shows that it holds the key."""
    return hmac.digest(key, msgspec.msgpack.encode(("observe", side, hello, challenge)), hashlib.sha256)


def shard_mac(key: bytes, side: Literal["shard", "coordinator"], hello: ShardHello, challenge: bytes) -> bytes:
    """The MAC by which a server that holds a share, or the one that coordinates, shows that it holds the key."""
    return hmac.digest(key, msgspec.msgpack.encode(("between servers", side, hello, challenge)), hashlib.sha256)


def aggregator_key(key: bytes, hello: ShardHello, challenge: bytes) -> bytes:
    """The secret of one admitted aggregator and its server; it opens its data connection."""
    return derive(key, b"aggregator", msgspec.msgpack.encode((hello, challenge)))


def join_as_shard(request: Request, key: bytes, hello: ShardHello, where: str = "") -> tuple[ShardWelcome, bytes]:
    """The side of a server that holds a share, or adds pushes up, of the handshake with the one that coordinates.

    Args:
        request: to the server that coordinates.
        key: the run's shared secret.
        hello: what this server says of itself.
        where: the address of that server, for messages.

    Returns:
        What it tells a server that it lets in, and the secret that opens an aggregator's data connection.

    Raises:
        Refused: the server does not hold the key.
    """
    challenge = request(hello, Challenge).nonce
    welcome: ShardWelcome = request(ShardProof(mac=shard_mac(key, "shard", hello, challenge)), ShardWelcome)
    if not is_equal(welcome.mac, shard_mac(key, "coordinator", hello, challenge)):
        raise Refused("key", f"the server at {where} does not hold the run's key; it is not ours")
    return welcome, aggregator_key(key, hello, challenge)


def derive(key: bytes, purpose: bytes, salt: bytes = b"", length: int = 32) -> bytes:
    """HKDF with SHA-256 (RFC 5869): a secret for one purpose.

    Args:
        key: the secret to derive from.
        purpose: what the new secret is for; other purposes give unrelated secrets.
        salt: makes it another one each time.
        length: its length in bytes, at most 8160.
    """
    extracted = hmac.digest(salt or bytes(hashlib.sha256().digest_size), key, hashlib.sha256)
    block, derived = b"", b""
    while len(derived) < length:
        block = hmac.digest(extracted, block + purpose + bytes([len(derived) // len(extracted) + 1]), hashlib.sha256)
        derived += block
    return derived[:length]


def is_equal(one: bytes, other: bytes) -> bool:
    """Compares two MACs in constant time."""
    return hmac.compare_digest(one, other)


def version_problem(hello: Hello | Observe | ShardHello) -> str:
    """Why this version cannot be served, or an empty string."""
    if hello.version == VERSION:
        return ""
    match hello:
        case Hello():
            speaker = f"rank {hello.rank}"
        case Observe():
            speaker = "the process that watches"
        case _:
            speaker = f"server {hello.shard}" if hello.shards else "the aggregator"
    return (
        f"{speaker} speaks protocol version {hello.version}, the server {VERSION}; install the same version of"
        " lightning-omni on both sides"
    )


def fingerprint_problem(hello: Hello, first: Hello) -> str:
    """Why this rank's model does not fit the first one's, or an empty string."""
    if hello.fingerprint == first.fingerprint:
        return ""
    (mine, _, division), (theirs, _, divided) = (each.fingerprint.partition(" ") for each in (hello, first))
    if mine == theirs:
        held = (f"sharded ({each})" if each else "whole in each member" for each in (division, divided))
        return (
            "rank {} has the model of rank {}, and its group holds it {}, not {}: all groups need the same inside=, the"
            " same number of ranks and the same configure_model".format(hello.rank, first.rank, *held)
        )
    otherwise = ""
    if not hello.world_size:  # a group that joins on its own, perhaps the only one of a run that was saved
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
    # MessagePack says where each field ends, so that no two conversations have the same bytes.
    return hmac.digest(key, msgspec.msgpack.encode((side, hello, challenge)), hashlib.sha256)
