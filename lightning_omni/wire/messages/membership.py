"""Messages by which ranks are admitted, and groups form, join and leave."""

from __future__ import annotations

from typing import Any

import msgspec

from lightning_omni.wire.codec import Packed
from lightning_omni.wire.messages.base import Message, Name, Secret
from lightning_omni.wire.messages.data import EpochPlan

# --- Handshakes: of a rank, of its data connection, and of an observer ------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """The first message of a rank. ``version`` stays the first field: other versions may rely on nothing else.

    A rank that was not announced sends ``world_size`` 0 and a rank beyond the announced ones: see `Join`. With
    ``returns``, the rank was admitted before, and its connection has ended.
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
    nonce: bytes


class Proof(Message, frozen=True, kw_only=True):
    mac: Secret


class Welcome(Message, frozen=True, kw_only=True):
    """The admission of a rank.

    Attributes:
        data_port: port of the data socket on the same host; 0 for a file beside the control socket's.
        heartbeat_timeout: seconds of silence after which the server counts as dead.
        reconnect_timeout: seconds for which a rank must look for a lost server; 0 if no other will continue.
    """

    mac: bytes
    data_port: int
    heartbeat_timeout: float
    servers: int = 1
    reconnect_timeout: float = 0.0
    clock: int = 0


class AskServerAddresses(Message, frozen=True, kw_only=True):
    """A request for `ServerAddresses`, answered once all servers have admitted the rank."""


class ServerAddresses(Message, frozen=True, kw_only=True):
    """The data addresses of servers 1, 2, ..., in order."""

    addresses: tuple[str, ...]


class Attach(Message, frozen=True, kw_only=True):
    """A request to open a rank's data connection, or a leader's connection to another leader."""

    rank: int
    nonce: Secret


class AttachChallenge(Message, frozen=True, kw_only=True):
    nonce: Secret


class AttachProof(Message, frozen=True, kw_only=True):
    mac: Secret


class Attached(Message, frozen=True, kw_only=True):
    """The admission of a connection, with a proof that the answering side holds the secret, too."""

    mac: Secret


class Observe(Message, frozen=True, kw_only=True):
    """The first message of an observer. ``version`` is as in `Hello`."""

    version: int
    nonce: Secret


class ObserverProof(Message, frozen=True, kw_only=True):
    mac: Secret


class ObserverWelcome(Message, frozen=True, kw_only=True):
    """The admission of an observer, with a proof that the server holds the key, too."""

    mac: bytes


# --- Groups, and the state that a joining one needs -------------------------------------------------------------------


class FormGroups(Message, frozen=True, kw_only=True):
    """The recorder's request to form the compute groups; training begins, or continues in other groups.

    Attributes:
        keep_epoch: whether the groups continue the epoch.
        names: names of the groups; empty for their numbers.
        overlap: whether exchanges overlap computation; the server only records it.
        by_member: whether a group's first members exchange a share each with the server of the same number, instead of
            the leader all of them. A group's size is then a multiple of the number of servers.
    """

    generation: int
    groups: tuple[tuple[int, ...], ...]
    method: dict[str, Any]
    keep_epoch: bool = False
    wire_format: dict[str, Any] = msgspec.field(default_factory=lambda: {"name": "raw"})
    names: tuple[Name, ...] = ()
    overlap: bool = False
    by_member: bool = False


class GroupsFormed(Message, frozen=True, kw_only=True):
    generation: int
    incarnation: int = 0


class Join(Message, frozen=True, kw_only=True):
    """A request of ranks that were not announced to become a group; the other groups continue unchanged.

    Attributes:
        ranks: ranks of the group; the first sends this, and leads.
        name: name of the group, which an evicted one may use again; empty for its number.
    """

    ranks: tuple[int, ...]
    name: Name = ""


class Joined(Message, frozen=True, kw_only=True):
    """The answer to `Join`, with the state that the group needs besides weights.

    Attributes:
        method: as in `FormGroups`, as are ``wire_format`` and ``overlap``.
        synchronizations: completed collectives of all ranks.
    """

    group: int
    incarnation: int
    generation: int
    groups: tuple[int, ...]
    method: dict[str, Any]
    wire_format: dict[str, Any]
    plan: EpochPlan | None = None
    overlap: bool = False
    live: tuple[int, ...] = ()
    synchronizations: int = 0


class RegisterGroup(Message, frozen=True, kw_only=True):
    """An observer's request for rank numbers, for a group with its own torch.distributed world; it may be repeated."""

    ranks: int


class GroupRegistered(Message, frozen=True, kw_only=True):
    """The answer to `RegisterGroup`.

    Attributes:
        first: number of the group's first rank; the others' follow. -1 while another group is about to begin the run:
            repeat the request.
        announced: ranks of the group that has begun the run, whose batch is the reference batch; 0 before:
            the group whose ``first`` is 0 must begin it.
        silence: seconds without a sign of life after which the server evicts the group; 0 for never.
    """

    run: str = ""
    first: int = -1
    announced: int = 0
    silence: float = 0.0


class StoreRunState(Message, frozen=True, kw_only=True):
    """State, besides weights, for groups that join before the next synchronization."""

    packed: Packed
    nbytes: int


class RunStateStored(Message, frozen=True, kw_only=True):
    """The answer to `StoreRunState`."""


class ReadRunState(Message, frozen=True, kw_only=True):
    """A request for `StoredRunState`."""


class StoredRunState(Message, frozen=True, kw_only=True):
    packed: Packed
    nbytes: int


class Evict(Message, frozen=True, kw_only=True):
    """A request to remove a group; with ``bars``, no group may join from its ranks' addresses again.

    ``incarnation`` tells groups with the same number apart.
    """

    group: int
    incarnation: int
    bars: bool = False


class RankEnded(Message, frozen=True, kw_only=True):
    """A launcher's report that a rank's process has ended; it is not answered."""

    rank: int
    reason: str


class Notice(Message, frozen=True, kw_only=True):
    """A report of all ranks lost so far; ``over`` if the run has ended.

    ``barred`` if the group must not rejoin by itself: a person evicted it, or a rank failed by itself.
    """

    lost: tuple[int, ...]
    reason: str
    over: bool = False
    barred: bool = False


class Goodbye(Message, frozen=True, kw_only=True):
    """The departure of a rank, done or failed; ``finished`` if its Lightning fit was trained to its end.

    Other loops never set it.
    """

    reason: str = ""
    finished: bool = False
