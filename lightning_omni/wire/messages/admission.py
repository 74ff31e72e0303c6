"""Messages of handshakes: the admission of a rank, of its data connection, and of an observer."""

from __future__ import annotations

from lightning_omni.wire.messages.base import Message, Name, Secret


class Hello(Message, frozen=True, kw_only=True):
    """The first message of a rank. ``version`` stays the first field: other versions may rely on nothing else.

    A rank that was not announced and joins a running run sends 0 as ``world_size`` and a rank beyond it: see `Join`.
    With ``returns``, an earlier server, which is gone, had admitted the rank.
    """

    version: int
    run: Name
    rank: int
    world_size: int
    fingerprint: Name
    tensors: int
    numbers: int
    nonce: Secret
    returns: bool = False


class Challenge(Message, frozen=True, kw_only=True):
    """A request to the other side to prove that it holds the key."""

    nonce: bytes


class Proof(Message, frozen=True, kw_only=True):
    """The answer to a `Challenge`: it proves that the rank holds the run's key."""

    mac: Secret


class Welcome(Message, frozen=True, kw_only=True):
    """The admission of a rank.

    Attributes:
        mac: proof that the server holds the key, too.
        data_port: port of the data socket, on the same host; 0 if that is a file beside the control socket's.
        heartbeat_timeout: seconds of silence after which a rank counts as dead.
        servers: number of servers, each of which holds a partition of the parameters, this one among them; see
            `AskServerAddresses`.
        reconnect_timeout: seconds for which a rank must look for the server again when it is gone, because its state is
            saved and another one will continue. 0 if none will.
        clock: updates in the weights.
        started_at_ms: start of the server, in milliseconds. Later servers at the same address have larger values, so
            ranks can tell servers apart. 0 if no server continues after this one.
    """

    mac: bytes
    data_port: int
    heartbeat_timeout: float
    servers: int = 1
    reconnect_timeout: float = 0.0
    clock: int = 0
    started_at_ms: int = 0


class AskServerAddresses(Message, frozen=True, kw_only=True):
    """A request for the addresses of the servers with a partition, answered once all of them have admitted the rank."""


class ServerAddresses(Message, frozen=True, kw_only=True):
    """The data addresses of the other servers, which hold a partition each, in the order of their numbers."""

    addresses: tuple[str, ...]


class Attach(Message, frozen=True, kw_only=True):
    """A request of an admitted rank to open its data connection, or one to the leader of another group."""

    rank: int
    nonce: Secret


class AttachChallenge(Message, frozen=True, kw_only=True):
    """A request to the other side to prove that it is the admitted rank."""

    nonce: Secret


class AttachProof(Message, frozen=True, kw_only=True):
    """The answer to an `AttachChallenge`: it proves that the rank's own process is behind this connection, too."""

    mac: Secret


class Attached(Message, frozen=True, kw_only=True):
    """The admission of the connection; ``mac`` proves that the answering side holds the secret, too."""

    mac: Secret


class Observe(Message, frozen=True, kw_only=True):
    """The first message of an observer. ``version`` is as in `Hello`."""

    version: int
    nonce: Secret


class ObserverProof(Message, frozen=True, kw_only=True):
    """The answer to a `Challenge`: it proves that the observer holds the key."""

    mac: Secret


class ObserverWelcome(Message, frozen=True, kw_only=True):
    """The admission of an observer; ``mac`` proves that the server holds the key, too."""

    mac: bytes
