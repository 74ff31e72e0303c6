"""All messages of the protocol, and their encoding. Messages are frozen, typed, validated, and equal by value.

Rule 1: bytes that do not decode to exactly one of these types are refused, whichever process sent them.
Rule 2: a message contains no tensors; it states the size of the payload that follows.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from lightning_omni.errors import MalformedMessage
from lightning_omni.methods import REGISTRY, Exchange
from lightning_omni.registry import to_wire
from lightning_omni.wire.codec import Packed
from lightning_omni.wire.cut import Cut
from lightning_omni.wire.leases import Batch, EpochPlan

VERSION = 16
"""The protocol version, which must be the same on both sides."""
LARGEST_INLINE = 32 << 10
"""The most bytes of message or payload that a rank may send on the control channel; more goes to the data channel."""
LARGEST_ECHO = 1 << 20
"""The most bytes of an answer to `Echo`."""
LARGEST_BROUGHT = 8 << 20
"""The most bytes that a rank may contribute to one collective."""
LONGEST = 256 << 20
"""The most bytes of one message of an admitted rank on the data channel, without its payload."""

Name = Annotated[str, msgspec.Meta(max_length=128)]
Secret = Annotated[bytes, msgspec.Meta(max_length=64)]
"""A nonce or MAC. Fields that a stranger may send before admission have limited sizes."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The base of all messages."""


# --- Control, rank to server -----------------------------------------------------------------------------------------


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


class Proof(Message, frozen=True, kw_only=True):
    """The answer to a `Challenge`: it proves that the rank holds the run's key."""

    mac: Secret


class Heartbeat(Message, frozen=True, kw_only=True):
    """A sign of life of a rank, with its recent step times.

    Attributes:
        sent: the rank's own clock in seconds, which the answer returns.
        compute_time: mean seconds that the rank computed in a recent step.
        step_time: mean seconds of a whole step, waiting included.
        exchange_time: the part of it in the exchange with the server.
        signal: number of a signal that the rank has received; the larger, the more urgent.
        progress: count of the rank's progress: batches, and awaited answers of the server. 0 while it must not be
            judged by that: before its first batch is trained, or while a checkpoint is written.
    """

    sent: float
    compute_time: float = 0.0
    step_time: float = 0.0
    exchange_time: float = 0.0
    signal: int = 0
    progress: int = 0


class Form(Message, frozen=True, kw_only=True):
    """The recorder's request to form the compute groups; training begins, or continues in other groups.

    Attributes:
        keep_epoch: whether the new groups continue the current epoch.
        wire_format: encoding of their pushes, as plain data.
        names: names of the groups; empty to use their numbers.
        overlap: whether exchanges overlap the groups' computation; the server only records it.
        by_member: whether each of the first members of a group exchanges its own share with the server of the same
            number, instead of the leader all of them. Groups may have further members, a multiple of these.
    """

    generation: int
    groups: tuple[tuple[int, ...], ...]
    method: dict[str, Any]
    keep_epoch: bool = False
    wire_format: dict[str, Any] = msgspec.field(default_factory=lambda: {"name": "raw"})
    names: tuple[Name, ...] = ()
    overlap: bool = False
    by_member: bool = False


class Join(Message, frozen=True, kw_only=True):
    """A request of ranks that were not announced to become a group; the other groups continue unchanged.

    Attributes:
        ranks: ranks of the group; the first one sends this, and leads.
        name: name of the group; empty to use its number. An evicted group may join again under its name.
    """

    ranks: tuple[int, ...]
    name: Name = ""


class Enlist(Message, frozen=True, kw_only=True):
    """A request of a group with its own torch.distributed world to join the run.

    An observer sends it, before it has a model; it may repeat it.
    """

    ranks: int


class StoreRunState(Message, frozen=True, kw_only=True):
    """The state, beside the weights, for groups that join from now on. The tensors follow as payload.

    The groups have just parted; a group may join with this state until they synchronize again.
    """

    packed: Packed
    nbytes: int


class ReadRunState(Message, frozen=True, kw_only=True):
    """A request of a group that has joined for the stored state."""


class OpenEpoch(Message, frozen=True, kw_only=True):
    """A request to open an epoch. Every rank sends it; all must agree on the plan."""

    plan: EpochPlan


class Draw(Message, frozen=True, kw_only=True):
    """A request for a group's batches from ``number`` on. Of those before, ``trained`` are trained."""

    epoch: int
    generation: int
    number: int
    trained: int = 0


class Await(Message, frozen=True, kw_only=True):
    """A rank's question for the next step: its group has trained all its batches of this validation interval."""

    epoch: int
    generation: int
    trained: int
    interval: int


class Leave(Message, frozen=True, kw_only=True):
    """A group's early departure from the epoch; its untrained batches return to the pool.

    Attributes:
        stop: ``""`` if the others continue; otherwise how they end, too: the run, ``"validate"`` (with a validation, as
            when a callback requests the stop) or ``"end"`` (without, as when max_steps is reached); or only the epoch,
            ``"skip"`` (without).
    """

    epoch: int
    generation: int
    trained: int
    stop: str = ""


class ClaimValidation(Message, frozen=True, kw_only=True):
    """A group's report that it has passed ``passed`` validation points of the epoch; it waits for no other group."""

    epoch: int
    generation: int
    passed: int


class AskValidations(Message, frozen=True, kw_only=True):
    """A request for the number of complete validations."""


class ReleaseVersion(Message, frozen=True, kw_only=True):
    """A report that validations up to this number need no further saves, so their stored versions may be deleted."""

    number: int


class Contribute(Message, frozen=True, kw_only=True):
    """A rank's contribution to a collective of all live ranks. The payload follows.

    Attributes:
        number: number of the collective in this run.
        what: the collective and its signature; all ranks must call the same one.
        brought: whether the rank has sent the payload before by `Bring`.
        where: position of this rank in the program, for a message if another one calls something else.
    """

    number: int
    what: str
    brought: bool = False
    where: str | msgspec.UnsetType = msgspec.UNSET


class ReadBrought(Message, frozen=True, kw_only=True):
    """A request to process the bytes sent before by `Bring` as a message, which is too large for this channel."""


class Lost(Message, frozen=True, kw_only=True):
    """A launcher's report that a rank's process has ended. The server does not answer it."""

    rank: int
    reason: str


class Goodbye(Message, frozen=True, kw_only=True):
    """The departure of a rank, either done or failed.

    Attributes:
        reason: reason of its failure; empty if it has not failed.
        finished: whether the run has ended, and not only this rank.
    """

    reason: str = ""
    finished: bool = False


class AskStatus(Message, frozen=True, kw_only=True):
    """A request for the status of the run."""


class AskShards(Message, frozen=True, kw_only=True):
    """A request for the addresses of the servers with a share, answered once all of them have admitted the rank."""


# --- Control, observer to server -------------------------------------------------------------------------------------


class Observe(Message, frozen=True, kw_only=True):
    """The first message of an observer. ``version`` is as in `Hello`."""

    version: int
    nonce: Secret


class ObserverProof(Message, frozen=True, kw_only=True):
    """The answer to a `Challenge`: it proves that the observer holds the key."""

    mac: Secret


class AskOverview(Message, frozen=True, kw_only=True):
    """A request for the overview of the run."""


class AskServer(Message, frozen=True, kw_only=True):
    """A request for the server's description."""


class Echo(Message, frozen=True, kw_only=True):
    """A request to send ``nbytes`` bytes back, at most `LARGEST_ECHO`. A payload may follow, and is dropped."""

    nbytes: int = 0


class Evict(Message, frozen=True, kw_only=True):
    """A request to remove a group from the run.

    Attributes:
        incarnation: incarnation of the group, because numbers are used again.
        bars: whether to bar groups whose ranks connect from the same addresses from joining the run again.
    """

    group: int
    incarnation: int
    bars: bool = False


class SetGroups(Message, frozen=True, kw_only=True):
    """A request to form a number of groups when the next epoch begins."""

    groups: int


class SaveNow(Message, frozen=True, kw_only=True):
    """A request to save the server's state, even if that is not due."""


# --- Control, server to rank -----------------------------------------------------------------------------------------


class Challenge(Message, frozen=True, kw_only=True):
    """A request to the other side to prove that it holds the key."""

    nonce: bytes


class Welcome(Message, frozen=True, kw_only=True):
    """The admission of a rank.

    Attributes:
        mac: proof that the server holds the key, too.
        data_port: port of the data socket, on the same host; 0 if that is a file beside the control socket's.
        heartbeat_timeout: seconds of silence after which a rank counts as dead.
        shards: number of servers, each of which holds a share of the weights, this one among them; see `AskShards`.
        reconnect_timeout: seconds for which a rank must look for the server again when it is gone, because its state is
            saved and another one will continue. 0 if none will.
        clock: updates in the weights.
        started_at_ms: start of the server, in milliseconds. Later servers at the same address have larger values, so
            ranks can tell servers apart. 0 if no server continues after this one.
    """

    mac: bytes
    data_port: int
    heartbeat_timeout: float
    shards: int = 1
    reconnect_timeout: float = 0.0
    clock: int = 0
    started_at_ms: int = 0


class RefusedMessage(Message, tag="Refused", frozen=True, kw_only=True):
    """A refusal, with its reason."""

    code: str
    reason: str


class GroupStatus(msgspec.Struct, frozen=True):
    """The status of one group: seconds per step, its slowest rank, and the staleness of its gradients.

    ``name`` and ``incarnation`` identify the group: see `lightning_omni.topology.GroupId`.
    """

    group: int
    ranks: tuple[int, ...]
    updates: int
    staleness_mean: float
    step_time: float
    compute_time: float
    exchange_time: float
    slowest_rank: int
    slowest_time: float
    name: str = ""
    incarnation: int = 0


class Status(Message, frozen=True, kw_only=True):
    """The status of the run. It answers every heartbeat, and is sent unrequested when groups have been formed.

    Attributes:
        sent: value from the heartbeat; 0 answers `AskStatus`, a negative number no request.
        clock: updates applied so far.
        refused: pushes refused because their gradients were not finite.
        strangers: messages refused because they were malformed or their sender had not been admitted.
        staleness: count of updates by staleness 0, 1, 2, ...
        head_time: recent mean seconds of exclusive access to the merged head; 0 if there is none.
        serve_time: recent mean seconds of the server's own time for one push, from the arrival of the whole message
            until its answers are passed to the socket; 0 before the first, and in virtual time.
        total_momentum: explicit momentum plus that of asynchrony, measured recently over all pushes; None while it is
            unknown: too few pushes, an optimizer other than plain SGD, or one that steps at the workers.
        signal: the largest signal in the ranks' last heartbeats.
        recorder: the rank that logs and saves.
        wanted_groups: number of groups that an observer has requested; 0 if no request is pending.
    """

    sent: float
    clock: int
    updates_per_second: float
    refused: int
    strangers: int
    groups: tuple[GroupStatus, ...]
    staleness: tuple[int, ...]
    lost: tuple[int, ...]
    head_time: float = 0.0
    serve_time: float = 0.0
    total_momentum: float | None = None
    signal: int = 0
    recorder: int = 0
    wanted_groups: int = 0


class Observing(Message, frozen=True, kw_only=True):
    """The admission of an observer; ``mac`` proves that the server holds the key, too."""

    mac: bytes


class About(msgspec.Struct, frozen=True):
    """A description of a server's process, independent of its run.

    Attributes:
        versions: versions of Python and of installed packages, by name.
        time: seconds since the epoch, by its clock.
    """

    versions: dict[str, str] = {}
    time: float = 0.0


class ServerDescription(Message, frozen=True, kw_only=True):
    """A description of a server.

    Attributes:
        about: its process.
        data_port: as in `Welcome`.
        heartbeat_timeout: as in `Welcome`.
        progress_timeout: seconds without progress after which a group counts as dead; may be infinite.
        shards: as in `Welcome`.
        reconnect_timeout: as in `Welcome`: above 0 if another server would continue.
        joined_heartbeat_timeout: the heartbeat timeout of runs that groups join on their own; 0 if unknown.
    """

    about: About
    data_port: int
    heartbeat_timeout: float
    progress_timeout: float
    shards: int
    reconnect_timeout: float
    joined_heartbeat_timeout: float = 0.0


class Echoed(Message, frozen=True, kw_only=True):
    """The answer to `Echo`; the requested bytes follow."""


class GroupOverview(msgspec.Struct, frozen=True):
    """An observer's view of one group.

    Attributes:
        status: its status.
        hosts: distinct addresses from which its ranks have connected; empty if the transport knows none.
        age: seconds since the last of its ranks was admitted.
        silence: seconds since the last sign of life of the rank that has been silent for the longest.
        samples: leased samples that it was the first to train since groups were formed; None if the data is not leased.
    """

    status: GroupStatus
    hosts: tuple[str, ...]
    age: float
    silence: float
    samples: int | None


class LogEntry(msgspec.Struct, frozen=True):
    """An event of the run, ``age`` seconds ago.

    ``kind`` is one of ``"joined"``, ``"formed"``, ``"wanted"`` (other groups), ``"lost"``, ``"left"``, ``"over"`` and
    ``"restored"``.
    """

    age: float
    kind: str
    text: str


class Overview(Message, frozen=True, kw_only=True):
    """An observer's view of the run.

    Attributes:
        run: its name; empty before a rank has joined.
        age: seconds since its first rank was admitted.
        announced: number of announced ranks.
        live: participating ranks.
        missing: announced ranks that have not joined yet.
        recorder: the rank that logs and saves; the run ends with its group.
        status: status of the run, as every rank gets it.
        groups: participating groups.
        method: as in `Form`; None before groups are formed.
        wire_format: as in `Form`; None before groups are formed.
        plan: the current or last epoch; None if its data is not leased.
        trained: trained positions of this epoch.
        pushes: number of pushes that the server has handled.
        serve_time: seconds of the server's own time for them.
        log: events, the oldest first.
        over: why the run cannot continue, or an empty string.
        saved: seconds since the server's state was last saved; -1 if it was not.
    """

    run: str
    age: float
    announced: int
    live: tuple[int, ...]
    missing: tuple[int, ...]
    recorder: int
    status: Status
    groups: tuple[GroupOverview, ...]
    method: dict[str, Any] | None
    wire_format: dict[str, Any] | None
    plan: EpochPlan | None
    trained: int
    pushes: int
    serve_time: float
    log: tuple[LogEntry, ...]
    over: str
    saved: float = -1.0


class Formed(Message, frozen=True, kw_only=True):
    """The answer to `Form`: the groups are formed, each in this incarnation."""

    generation: int
    incarnation: int = 0


class Joined(Message, frozen=True, kw_only=True):
    """The answer to `Join`, with the state that the group needs. Weights are fetched separately.

    Attributes:
        group: its number.
        incarnation: its incarnation, which identifies it together with its name.
        generation: generation of the groups, for requests about leases.
        groups: all participating groups.
        method: as in `Form`.
        wire_format: as in `Form`.
        plan: the current epoch, if any.
        overlap: as in `Form`.
        live: all participating ranks in ascending order.
        synchronizations: number of completed synchronization points of all ranks.
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


class Enlisted(Message, frozen=True, kw_only=True):
    """The answer to `Enlist`: the group's rank numbers.

    Attributes:
        run: the run's name.
        first: number of the group's first rank; the others' follow. -1 while another group is about to begin the run:
            the request must be repeated.
        announced: ranks of the group that has begun the run, whose batch is the reference batch; 0 if this group is to
            begin it.
        silence: seconds without a sign of life after which the server may end the connections of the group's ranks; 0
            if it receives no such signs.
    """

    run: str = ""
    first: int = -1
    announced: int = 0
    silence: float = 0.0


class Shards(Message, tag="ShardAddresses", frozen=True, kw_only=True):
    """The data addresses of the other servers that hold a share of the weights, in the order of their numbers."""

    addresses: tuple[str, ...]


class EpochOpened(Message, frozen=True, kw_only=True):
    """The answer to `OpenEpoch`."""

    epoch: int


class Drawn(Message, frozen=True, kw_only=True):
    """The batches from ``number`` on; none if the pool is empty now."""

    number: int
    batches: tuple[Batch, ...]


class Verdict(Message, frozen=True, kw_only=True):
    """The answer to `Await`.

    Attributes:
        next: ``"more"`` (samples were returned, draw again), ``"validate"`` (all groups wait: validate, then continue),
            ``"over"`` (the epoch is complete), ``"over:validate"`` (the same, and a validation was due in its last
            batches), or ``"stop:..."`` (another group ended epoch or run, see `Leave`).
    """

    next: str


class Left(Message, frozen=True, kw_only=True):
    """The answer to `Leave`."""


class ValidationClaimed(Message, frozen=True, kw_only=True):
    """The number of the validation that the group is to evaluate, from 1; 0 if none."""

    number: int


class Validations(Message, frozen=True, kw_only=True):
    """The number of complete validations, and whether a point of this epoch was passed without one."""

    complete: int
    is_missed: bool


class VersionReleased(Message, frozen=True, kw_only=True):
    """The answer to `ReleaseVersion`."""


class Gathered(Message, frozen=True, kw_only=True):
    """The answer to `Contribute`, once all live ranks have contributed.

    Attributes:
        ranks: contributing ranks, ascending.
        sizes: bytes of payload of each; the payload follows in this order.
        collect: whether the payload is too large for this channel, and `Collect` must request it.
    """

    number: int
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    collect: bool = False


class Notice(Message, frozen=True, kw_only=True):
    """A report of lost ranks.

    Attributes:
        lost: all ranks lost so far.
        reason: the event, for people.
        over: whether the run cannot continue.
        barred: whether the group must not join again by itself, because a person evicted it or one of its ranks has
            failed by itself.
    """

    lost: tuple[int, ...]
    reason: str
    over: bool = False
    barred: bool = False


class Acknowledged(Message, frozen=True, kw_only=True):
    """An acknowledgement."""


# --- Data, rank to server --------------------------------------------------------------------------------------------


class Attach(Message, frozen=True, kw_only=True):
    """A request of an admitted rank to open its data connection, or one to the leader of another group."""

    rank: int
    nonce: Secret


class AttachProof(Message, frozen=True, kw_only=True):
    """The answer to an `AttachChallenge`: it proves that the rank's own process is behind this connection, too."""

    mac: Secret


class Long(Message, frozen=True, kw_only=True):
    """The announcement of a message larger than a frame: ``nbytes`` in chunks, then its payload. Both sides send it."""

    nbytes: int


class Bring(Message, frozen=True, kw_only=True):
    """An upload of bytes that a control message needs next and cannot hold. They follow as payload."""

    nbytes: int


class Collect(Message, frozen=True, kw_only=True):
    """A request for the payloads of the last collective."""

    number: int


class Seed(Message, frozen=True, kw_only=True):
    """The recorder's upload of the master weights and optimizers. The tensors follow as payload.

    ``request`` is as in `PushMessage`.
    """

    packed: Packed
    nbytes: int
    request: int = 0


class Restructure(Message, frozen=True, kw_only=True):
    """A change of a group's optimizer to other parameter groups, or more parameters. The tensors follow as payload.

    Attributes:
        packed: see `lightning_omni.wire.parameter_groups.read_structure`.
    """

    optimizer: int
    packed: Packed
    nbytes: int


class PushMessage(Message, tag="Push", frozen=True, kw_only=True):
    """A push: a gradient, weights or a change of weights. The payload holds the tensors that are present.

    Attributes:
        optimizer: number of the optimizer.
        read_at: clock of the weights that it was computed from.
        layout: version of the layout of its tensors.
        present: one flag for each parameter; the others' tensor is None.
        hyperparameters: one mapping for each parameter group; empty if the optimizer steps at the workers.
        note: a number for the method.
        pull: whether the answer must contain tensors.
        epoch: the epoch, -1 if its data is not leased.
        trained: group batches of the epoch that are trained with this push.
        incarnation: incarnation of the group; pushes of an earlier one are refused.
        sequence: number of the push of this incarnation to this optimizer, from 1. The server applies each of them
            once. 0 where nothing is sent: at a merged head, in a replay.
        fragment: number of the method's fragment; -1 for all parameters. ``present`` then has a flag for each entry of
            `lightning_omni.wire.layout.Layout.fragment`.
        request: number of a rank's request to several servers, each of which gets a part; 0 for one server.
    """

    optimizer: int
    read_at: int
    present: tuple[bool, ...]
    hyperparameters: tuple[dict[str, Any], ...]
    epoch: int
    trained: int
    nbytes: int
    note: float = 0.0
    pull: bool = True
    layout: int = 0
    incarnation: int = 0
    sequence: int = 0
    fragment: int = -1
    request: int = 0

    @property
    def part(self) -> int | None:
        """Return the fragment; None for all parameters."""
        return None if self.fragment < 0 else self.fragment

    @classmethod
    def of(
        cls,
        need: Exchange,
        optimizer: int,
        present: tuple[bool, ...],
        nbytes: int,
        epoch: int,
        trained: int,
        layout: int = 0,
        incarnation: int = 0,
        sequence: int = 0,
    ) -> PushMessage:
        """Build a message from an exchange that a group side needs; for the other arguments see `PushMessage`."""
        return cls(
            layout=layout,
            optimizer=optimizer,
            read_at=need.read_at,
            present=present,
            hyperparameters=tuple([dict(group) for group in need.hyperparameters]),
            epoch=epoch,
            trained=trained,
            nbytes=nbytes,
            note=need.note,
            pull=need.pull,
            incarnation=incarnation,
            sequence=sequence,
            fragment=-1 if need.fragment is None else need.fragment,
        )


class AverageMessage(Message, tag="Average", frozen=True, kw_only=True):
    """A group's own weights, answered with the mean of all groups' weights once all have arrived. Payload follows.

    Attributes:
        request: as in `PushMessage`.
        absent: indices of the parameters that the payload leaves out, because this group has them frozen as the server
            has.
    """

    optimizer: int
    nbytes: int
    request: int = 0
    absent: tuple[int, ...] = ()


class GroupState(Message, frozen=True, kw_only=True):
    """The state that only this group holds, for the next snapshot. The tensors follow as payload."""

    packed: Packed
    nbytes: int


class FetchMessage(Message, tag="Fetch", frozen=True, kw_only=True):
    """A request for the master weights of one optimizer, with the group's trained batches, as in `PushMessage`."""

    optimizer: int
    epoch: int = -1
    trained: int = 0
    request: int = 0


class HeadForward(Message, frozen=True, kw_only=True):
    """A group's batch for a merged head, answered once the group has access. The tensors follow as payload.

    Attributes:
        optimizer: number of the head, among the optimizers.
        packed: ``[arguments, keyword arguments]`` of the submodule; their tensors are in the payload, as encoded by
            `lightning_omni.wire.activations`.
        training: whether each of its submodules is in training mode, itself first.
        trainable: whether each of its weights is to be trained.
        autocast: dtype of automatic mixed precision, if any.
        exclusive: whether a `HeadBackward` will follow; otherwise no group has to wait for this one.
    """

    optimizer: int
    packed: Packed
    nbytes: int
    training: tuple[bool, ...]
    trainable: tuple[bool, ...]
    autocast: str = ""
    exclusive: bool = True


class HeadBackward(Message, frozen=True, kw_only=True):
    """The gradients of a head's output, which step the head and end the access. The tensors follow as payload.

    Attributes:
        packed: a list with one gradient for each tensor of the output; None where the loss does not depend on it.
        hyperparameters: as in `PushMessage`, of the parameter groups that hold weights of the head.
        scale: factor for the gradients of the head's weights.
        clip: largest norm or magnitude of these; 0 clips nothing.
        clip_algorithm: ``"norm"`` or ``"value"``.
        epoch: as in `PushMessage`.
        trained: as in `PushMessage`, with this batch; the push of the body reports it.
    """

    optimizer: int
    packed: Packed
    nbytes: int
    hyperparameters: tuple[dict[str, Any], ...]
    epoch: int = -1
    trained: int = 0
    scale: float = 1.0
    clip: float = 0.0
    clip_algorithm: Literal["norm", "value"] = "norm"


class HeadRelease(Message, frozen=True, kw_only=True):
    """The end of an access without a backward pass; the head stays unchanged."""

    optimizer: int


class TakeSnapshot(Message, frozen=True, kw_only=True):
    """A request for a snapshot: weights, optimizer states, clocks, all consistent. ``request`` is as in `PushMessage`.

    Attributes:
        version: number of a validation, for the state at the first request with this number; 0 for the current one.
    """

    with_state: bool = True
    request: int = 0
    version: int = 0


class PublishEvaluation(Message, frozen=True, kw_only=True):
    """The result of the validation assigned to a group. The tensors follow as payload.

    Attributes:
        packed: ``{"metrics": ..., "buffers": {name: tensor}, "steps": ...}``, for the other ranks.
    """

    number: int
    packed: Packed
    nbytes: int


class ReadEvaluation(Message, frozen=True, kw_only=True):
    """A request for the result of a validation."""

    number: int


# --- Data, server to rank --------------------------------------------------------------------------------------------


class AttachChallenge(Message, frozen=True, kw_only=True):
    """A request to the other side to prove that it is the admitted rank."""

    nonce: Secret


class Attached(Message, frozen=True, kw_only=True):
    """The admission of the connection; ``mac`` proves that the answering side holds the secret, too."""

    mac: Secret


class Brought(Message, frozen=True, kw_only=True):
    """The answer to `Bring`."""


class Collected(Message, frozen=True, kw_only=True):
    """All payloads of a collective, in the order of ranks; they follow."""

    nbytes: int


class Seeded(Message, frozen=True, kw_only=True):
    """The answer to `Seed`."""


class Restructured(Message, frozen=True, kw_only=True):
    """The answer to `Restructure`; the master weights that are new to the group follow as payload.

    Attributes:
        layout: version of the layout that the group now has.
    """

    optimizer: int
    layout: int
    nbytes: int


class GroupStateStored(Message, frozen=True, kw_only=True):
    """The answer to `GroupState`."""


class Weights(Message, frozen=True, kw_only=True):
    """The master weights, or the method's other answer; the payload follows.

    Attributes:
        clock: clock of this optimizer.
        staleness: staleness of the answered push; -1 for a fetch.
        applied: False if the push was not finite and was refused; then these are the master weights.
        refused_in_row: consecutive refused pushes of this group.
        repeated: whether the push had arrived before and was not applied again; then these are the master weights.
        progress: positions of the epoch trained by all groups.
        stop: as in `Leave`.
        fragment: fragment of the answered push.
        validations: number of complete validations, as counted by `ClaimValidation`.
        groups: number of participating groups, if groups join the run on their own; otherwise 0.
    """

    optimizer: int
    clock: int
    staleness: int
    applied: bool
    refused_in_row: int
    progress: int
    stop: str
    nbytes: int
    note: float = 0.0
    repeated: bool = False
    fragment: int = -1
    validations: int = 0
    groups: int = 0


class HeadOutput(Message, frozen=True, kw_only=True):
    """The head's output for a group that has exclusive access; the tensors follow as payload."""

    packed: Packed
    nbytes: int


class HeadGradients(Message, frozen=True, kw_only=True):
    """The gradients of a head's inputs, one or None for each tensor; they follow as payload.

    Attributes:
        clock: updates of the head so far.
        applied: False if the gradients were not finite and the head was not stepped.
        refused_in_row: consecutive refused gradients of this group.
    """

    packed: Packed
    nbytes: int
    clock: int
    applied: bool
    refused_in_row: int


class HeadReleased(Message, frozen=True, kw_only=True):
    """The answer to `HeadRelease`."""


class Snapshot(Message, frozen=True, kw_only=True):
    """A consistent snapshot, described by its ``cut``; the tensors follow as payload."""

    cut: Cut
    packed: Packed
    nbytes: int


class RunStateStored(Message, frozen=True, kw_only=True):
    """The answer to `StoreRunState`."""


class StoredRunState(Message, frozen=True, kw_only=True):
    """The stored state for groups that join; the tensors follow as payload."""

    packed: Packed
    nbytes: int


class EvaluationPublished(Message, frozen=True, kw_only=True):
    """The answer to `PublishEvaluation`."""


class Evaluation(Message, frozen=True, kw_only=True):
    """The result of a validation, as in `PublishEvaluation`; the tensors follow. It is void if its group is gone."""

    packed: Packed
    nbytes: int
    is_void: bool = False


# --- From leader to leader -------------------------------------------------------------------------------------------


class ReadPublished(Message, frozen=True, kw_only=True):
    """A request for the weights that a leader has published for one optimizer.

    With ``holds``, the leader answers with the number of its last publication and keeps that one for this connection.
    The next request without ``holds`` gets it; if none is kept, it gets the last one.
    """

    optimizer: int
    holds: bool = False


class PeerMessage(Message, frozen=True, kw_only=True):
    """Weights for another group's inbox. The payload follows.

    If the members of a group hold the model together, this is one member's part of message ``number`` of group
    ``sender``, for its counterpart; otherwise the number is 0.
    """

    optimizer: int
    nbytes: int
    sender: int = 0
    number: int = 0


class Published(Message, frozen=True, kw_only=True):
    """A leader's published weights; the payload follows, unless it is held. The first has number 1; 0 is none yet."""

    nbytes: int
    number: int = 0


class Taken(Message, frozen=True, kw_only=True):
    """A confirmation that the message is in the inbox."""


ToControl = (
    Challenge | Welcome | RefusedMessage | Status | Formed | Joined | EpochOpened | Drawn | Verdict | Left | Gathered
    | Notice | Acknowledged | Shards | Observing | Overview | ValidationClaimed | Validations | VersionReleased
    | Enlisted | ServerDescription | Echoed
)  # fmt: skip
ToData = (
    AttachChallenge | Attached | Long | Seeded | Restructured | GroupStateStored | Weights | Snapshot | HeadOutput
    | HeadGradients | HeadReleased | RefusedMessage | Brought | Collected | EvaluationPublished | Evaluation
    | RunStateStored | StoredRunState
)  # fmt: skip

Channel = str
CONTROL: Channel = "control"
DATA: Channel = "data"
PEER: Channel = "peer"

_encoder = msgspec.msgpack.Encoder()
_decoders = {
    ("rank", CONTROL): msgspec.msgpack.Decoder(ToControl),
    ("rank", DATA): msgspec.msgpack.Decoder(ToData),
    ("server", PEER): msgspec.msgpack.Decoder(Attach | AttachProof | ReadPublished | PeerMessage),
    ("rank", PEER): msgspec.msgpack.Decoder(AttachChallenge | Attached | Published | Taken | RefusedMessage),
}


def encode(message: Message) -> bytes:
    """Encode a message."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview, *, at: str, channel: Channel) -> Any:
    """Decode a message to a rank, or between leaders. The table in `router` has the messages that a server receives.

    Args:
        data: one encoded message.
        at: the receiving side: ``"rank"``; or ``"server"``, the leader that another one has connected to.
        channel: ``"control"``, ``"data"`` or ``"peer"``.

    Raises:
        MalformedMessage: the bytes are no message that may arrive there.
    """
    return decode_with(_decoders[at, channel], data, channel)


def decode_with(decoder: msgspec.msgpack.Decoder[Any], data: bytes | memoryview, channel: Channel) -> Any:
    """Decode one of a decoder's messages; see `decode`."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, TypeError) as error:
        # msgspec before 0.22 raises a TypeError where a map is the key of another one.
        raise MalformedMessage(f"not a {channel} message: {error}") from error


def method_to_wire(method: Any) -> dict[str, Any]:
    """Return a method as plain data."""
    return to_wire(method)


def method_from_wire(plain: dict[str, Any]) -> Any:
    """Return a method from plain data.

    Raises:
        MalformedMessage: the method is unknown, or its settings are invalid.
    """
    return REGISTRY.from_wire(plain)
