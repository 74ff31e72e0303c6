"""Every message of the protocol, and how it becomes bytes. Frozen, typed, validated, equal by value.

Rule 1: a message that does not decode to exactly one of these types is refused, whichever process sent it.
Rule 2: tensors never stand in a message; it says how many bytes of payload travel behind it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from lightning_omni.errors import MalformedMessage
from lightning_omni.methods import REGISTRY, Exchange
from lightning_omni.protocol.codec import Packed
from lightning_omni.protocol.cut import Cut
from lightning_omni.protocol.leases import Batch, EpochPlan
from lightning_omni.registry import to_wire

VERSION = 16
"""Protocol version. Both sides must have the same."""
LARGEST_INLINE = 32 << 10
"""Bytes of message or payload that a rank may send on the control channel; more is brought over the data channel."""
LARGEST_ECHO = 1 << 20
"""Bytes that come back for an `Echo`."""
LARGEST_BROUGHT = 8 << 20
"""Bytes that a rank may bring for one collective."""
LONGEST = 256 << 20
"""Bytes of one message of an admitted rank on the data channel, payload not counted."""

Name = Annotated[str, msgspec.Meta(max_length=128)]
Secret = Annotated[bytes, msgspec.Meta(max_length=64)]
"""What a stranger may say before it is admitted has a largest size: of names and of nonces and MACs."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""


# --- Control, rank to server -----------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """The first message of a rank. ``version`` stands first for good: it is all that an other version may rely on.

    A rank that was not announced, and comes while the run goes on, gives 0 as ``world_size`` and a rank beyond it:
        `Join`. One that ``returns`` was admitted by a server that is gone, in whose place there is one that goes on.
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
    """The answer to a `Challenge`: proves that the rank holds the run's key."""

    mac: Secret


class Heartbeat(Message, frozen=True, kw_only=True):
    """I am alive; and this is how long my steps take.

    Attributes:
        sent: the rank's own clock in seconds; comes back in the answer.
        compute_time: seconds that the rank itself worked in its last steps, on average.
        step_time: seconds that a whole step took, waiting included.
        exchange_time: of these, seconds in the exchange with the server.
        signal: a signal that the rank was given, as a number; the larger, the sooner it is to be heeded.
        progress: counts what the rank has got done: batches, and answers of the server that it waits for. 0 while it is
            not to be judged by that: before its first batch is trained, while a checkpoint is written.
    """

    sent: float
    compute_time: float = 0.0
    step_time: float = 0.0
    exchange_time: float = 0.0
    signal: int = 0
    progress: int = 0


class Form(Message, frozen=True, kw_only=True):
    """The recorder forms the compute groups; training begins, or goes on in other groups.

    Attributes:
        keep_epoch: whether the epoch that is under way goes on with the new groups.
        wire_format: how their pushes are put into bytes, as plain data.
        names: of the groups; their numbers, if there are none.
        overlap: whether exchanges travel while groups compute; the server writes it down, nothing else.
        by_member: whether each of the first members of a group exchanges a share of its own, with the server of the
            same number, and not its leader all of them. Groups may have further members, a multiple of these.
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
    """Ranks that came late, this one first, are a group from now on; the others go on as they are.

    Attributes:
        ranks: of the group; the first one says so, and leads.
        name: of the group; its number, if it has none. One that was evicted may come back under its name.
    """

    ranks: tuple[int, ...]
    name: Name = ""


class Enlist(Message, frozen=True, kw_only=True):
    """A group of so many ranks, which has a torch.distributed world of its own, wants to take part in the run.

    Said by a process that watches, before it has a model; it may ask again.
    """

    ranks: int


class StoreRunState(Message, frozen=True, kw_only=True):
    """What a group that joins from here on is given beside the weights. The tensors follow as payload.

    The groups have just parted: until they synchronize again a group may join with it.
    """

    packed: Packed
    nbytes: int


class ReadRunState(Message, frozen=True, kw_only=True):
    """My group has joined: give me what was stored for it."""


class OpenEpoch(Message, frozen=True, kw_only=True):
    """An epoch begins. Every rank says so; all must agree on the plan."""

    plan: EpochPlan


class Draw(Message, frozen=True, kw_only=True):
    """Which samples are in my group's batches from ``number`` on? Of those before, ``trained`` are trained."""

    epoch: int
    generation: int
    number: int
    trained: int = 0


class Await(Message, frozen=True, kw_only=True):
    """My group has trained all that it holds of this validation interval. Answered when it is known what is next."""

    epoch: int
    generation: int
    trained: int
    interval: int


class Leave(Message, frozen=True, kw_only=True):
    """My group leaves the epoch early; what it drew goes back.

    Attributes:
        stop: ``""``, and the others go on; or how they are to end, too: the run, ``"validate"`` (with a validation,
            as when a callback asks to stop) or ``"end"`` (without, as when max_steps is reached); or just the epoch,
            ``"skip"`` (without).
    """

    epoch: int
    generation: int
    trained: int
    stop: str = ""


class ClaimValidation(Message, frozen=True, kw_only=True):
    """My group has passed so many points of the epoch at which the run is to be validated, and waits for no other."""

    epoch: int
    generation: int
    passed: int


class AskValidations(Message, frozen=True, kw_only=True):
    """How many validations are complete?"""


class ReleaseVersion(Message, frozen=True, kw_only=True):
    """Nothing more is saved of validations up to this number: what was kept for them may go."""

    number: int


class Contribute(Message, frozen=True, kw_only=True):
    """My part of a collective of all live ranks. The payload follows.

    Attributes:
        number: counts the collectives of this run.
        what: the collective and its signature; all ranks must call the same one.
        brought: whether the payload is what I have brought before, see `Bring`.
        where: where this rank is, in words, for a message if another one calls something else.
    """

    number: int
    what: str
    brought: bool = False
    where: str | msgspec.UnsetType = msgspec.UNSET


class ReadBrought(Message, frozen=True, kw_only=True):
    """What I have brought before, see `Bring`, is a message, too large for this channel."""


class Lost(Message, frozen=True, kw_only=True):
    """A launcher saw a rank's process end. Not answered."""

    rank: int
    reason: str


class Goodbye(Message, frozen=True, kw_only=True):
    """A rank leaves on its own: done, or with the reason of its failure.

    Attributes:
        reason: of its failure; empty if there is none.
        finished: whether the run is at its end, and not only this rank.
    """

    reason: str = ""
    finished: bool = False


class AskStatus(Message, frozen=True, kw_only=True):
    """How does the run go?"""


class AskShards(Message, frozen=True, kw_only=True):
    """Where are the servers that hold a share each? Answered when all of them are there, and know me."""


class AskAggregator(Message, frozen=True, kw_only=True):
    """Which aggregator am I to push to? Answered when it knows me."""


# --- Control, observer to server -------------------------------------------------------------------------------------


class Observe(Message, frozen=True, kw_only=True):
    """The first message of a process that watches and is no rank. ``version`` is as in `Hello`."""

    version: int
    nonce: Secret


class ObserverProof(Message, frozen=True, kw_only=True):
    """The answer to a `Challenge`: proves that the process that watches holds the key."""

    mac: Secret


class AskOverview(Message, frozen=True, kw_only=True):
    """How does the run go, with all that there is to be seen of it?"""


class AskServer(Message, frozen=True, kw_only=True):
    """What are you, and what time is it with you?"""


class Echo(Message, frozen=True, kw_only=True):
    """Send so many bytes back, `LARGEST_ECHO` at most. A payload may follow, and is dropped: this measures the way."""

    nbytes: int = 0


class Evict(Message, frozen=True, kw_only=True):
    """Take a group out of the run.

    Attributes:
        group: its number.
        incarnation: of the group that is meant, for numbers are given again.
        bars: whether no group whose ranks connect from the same addresses may join the run any more.
    """

    group: int
    incarnation: int
    bars: bool = False


class SetGroups(Message, frozen=True, kw_only=True):
    """Form so many groups when the next epoch begins."""

    groups: int


class SaveNow(Message, frozen=True, kw_only=True):
    """Save the server's state, whether or not that is due."""


# --- Control, server to rank -----------------------------------------------------------------------------------------


class Challenge(Message, frozen=True, kw_only=True):
    """Prove that you hold the key."""

    nonce: bytes


class Welcome(Message, frozen=True, kw_only=True):
    """Admitted.

    Attributes:
        mac: proves that the server holds the key, too.
        data_port: port of the data socket, on the same host; 0 if that is a file beside the control socket's.
        heartbeat_timeout: seconds of silence after which a rank counts as dead.
        shards: servers that hold a share of the weights each, this one among them; see `AskShards`.
        patience: seconds for which a rank is to look for the server again when it is gone: its state is saved, and
            another one will go on from it. 0 if none will.
        clock: updates that the weights contain.
        began: when the server was started, in milliseconds. Of servers one after the other at one address the later
            one has the larger number; ranks know by it whether they speak to the same. 0 if none goes on after this.
    """

    mac: bytes
    data_port: int
    heartbeat_timeout: float
    shards: int = 1
    patience: float = 0.0
    clock: int = 0
    began: int = 0


class RefusedMessage(Message, tag="Refused", frozen=True, kw_only=True):
    """No, and why."""

    code: str
    reason: str


class GroupStatus(msgspec.Struct, frozen=True):
    """How one group does: seconds per step, which rank is the slowest in it, and its gradients' staleness.

    ``name`` and ``incarnation`` say which group it is: see `lightning_omni.topology.GroupId`.
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
    """How the run goes. Answers every heartbeat, and comes unasked when groups have been formed.

    Attributes:
        sent: from the heartbeat; 0 answers `AskStatus`, and a negative number nothing.
        clock: updates applied so far.
        refused: pushes refused because their gradients were not finite.
        strangers: messages refused because they were malformed or their sender had not been admitted.
        staleness: count of updates by staleness 0, 1, 2, ...
        head_time: seconds of exclusive access to the merged head, lately, on average; 0 if there is none.
        serve_time: seconds of the server's own time for one push lately, on average: from when the whole message is in
            hand until its answers have been handed to the socket; 0 before the first, and in virtual time.
        total_momentum: explicit momentum and what asynchrony adds to it, sensed lately over all pushes; None while it
            is unknown: too few pushes, another optimizer than plain SGD, or one that steps at the workers.
        signal: the largest of those that the ranks' last heartbeats told of.
        recorder: the rank that logs and saves.
        wanted_groups: how many groups a person who watches has asked for; 0 if that is done, or no one has.
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
    """The process that watches is let in; ``mac`` proves that the server holds the key, too."""

    mac: bytes


class About(msgspec.Struct, frozen=True):
    """What there is to know of a server's process, whatever run it has.

    Attributes:
        versions: of Python and of packages, by name; of one that is not installed, none.
        time: seconds since the epoch, by its clock.
    """

    versions: dict[str, str] = {}
    time: float = 0.0


class ServerDescription(Message, frozen=True, kw_only=True):
    """What this server is.

    Attributes:
        about: its process.
        data_port: of the data socket, on the same host; 0 if that is a file beside the control socket's.
        heartbeat_timeout: seconds of silence after which a rank counts as dead.
        progress_timeout: seconds after which a group counts as dead that gets nothing done; may be infinite.
        shards: servers that hold a share of the weights each, this one among them.
        patience: as in `Welcome`: above 0 if another server would go on.
        joined_heartbeat_timeout: that of runs which groups join on their own; 0 if the server does not say.
    """

    about: About
    data_port: int
    heartbeat_timeout: float
    progress_timeout: float
    shards: int
    patience: float
    joined_heartbeat_timeout: float = 0.0


class Echoed(Message, frozen=True, kw_only=True):
    """The bytes that were asked for follow."""


class GroupOverview(msgspec.Struct, frozen=True):
    """What is seen of one group beside its status.

    Attributes:
        status: how it does.
        hosts: addresses from which its ranks have connected, each once; none where the transport knows none.
        age: seconds since the last of its ranks was admitted.
        silence: seconds since the last sign of life of the rank that has been silent for the longest.
        samples: of leased data that it trained since groups were formed, each counted when it was trained first; None
            if the data is not leased.
    """

    status: GroupStatus
    hosts: tuple[str, ...]
    age: float
    silence: float
    samples: int | None


class LogEntry(msgspec.Struct, frozen=True):
    """Something that happened to the run, ``age`` seconds ago.

    ``kind`` is one of ``"joined"``, ``"formed"``, ``"wanted"`` (other groups), ``"lost"``, ``"left"``, ``"over"`` and
    ``"restored"``.
    """

    age: float
    kind: str
    text: str


class Overview(Message, frozen=True, kw_only=True):
    """How the run goes, for those that watch it.

    Attributes:
        run: its name; empty while no rank has come.
        age: seconds since its first rank was admitted.
        announced: number of ranks that it was announced with.
        live: ranks that take part.
        missing: ranks that were announced and have not come yet.
        recorder: the rank that logs and saves; the run ends with its group.
        status: how it goes, as every rank is told.
        groups: those that take part.
        method: as in `Form`, and so is ...
        wire_format: ... this; None before groups are formed.
        plan: the epoch that is under way, or was last; None if its data is not leased.
        trained: positions of this epoch that are trained.
        pushes: that the server has handled.
        serve_time: seconds of the server's own time that they have taken.
        log: what happened, the oldest first.
        over: why the run cannot go on, or an empty string.
        saved: seconds since the server's state was saved last; -1 if it was not.
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
    """The groups stand, each in this incarnation."""

    generation: int
    incarnation: int = 0


class Joined(Message, frozen=True, kw_only=True):
    """The group takes part: what it has to know. Weights are fetched.

    Attributes:
        group: its number.
        incarnation: which group it is, beside its name.
        generation: of the groups, for what is asked about leases.
        groups: all groups that take part.
        method: as in `Form`, and so is ...
        wire_format: ... this.
        plan: the epoch that is under way, if there is one.
        overlap: as in `Form`.
        live: all ranks that take part now, in ascending order.
        synchronizations: synchronization points of all ranks that are over.
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
    """The group's place in the run.

    Attributes:
        run: the run's name.
        first: number of the group's first rank; the others' follow. -1 while another group is about to begin the run:
            ask again.
        announced: ranks of the group that has begun the run, whose batch is the reference batch; 0 if this group is to
            begin it.
        silence: seconds without a sign of life after which the server may end the connections of the group's ranks; 0
            if it does not hear such signs.
    """

    run: str = ""
    first: int = -1
    announced: int = 0
    silence: float = 0.0


class Shards(Message, tag="ShardAddresses", frozen=True, kw_only=True):
    """The data addresses of the servers that hold a share each, but for this one's own, in the order of their numbers.

    Attributes:
        addresses: one for each.
    """

    addresses: tuple[str, ...]


class Aggregator(Message, tag="AggregatorAddress", frozen=True, kw_only=True):
    """The data address of the aggregator that this rank may push to; empty if there is none."""

    address: str


class PushDirectly(Message, frozen=True, kw_only=True):
    """The aggregator that this rank was told to push to is gone: push to the server itself."""


class EpochOpened(Message, frozen=True, kw_only=True):
    """The epoch's book is open."""

    epoch: int


class Drawn(Message, frozen=True, kw_only=True):
    """Batches from ``number`` on; none if the pool is empty at the moment."""

    number: int
    batches: tuple[Batch, ...]


class Verdict(Message, frozen=True, kw_only=True):
    """The answer to `Await`.

    Attributes:
        next: ``"more"`` (samples came back, draw again), ``"validate"`` (all groups are here: validate, then go on),
            ``"over"`` (the epoch is complete), ``"over:validate"`` (so it is, and a validation inside it was due in its
            last batches), or ``"stop:..."`` (another group ended epoch or run, see `Leave`).
    """

    next: str


class Left(Message, frozen=True, kw_only=True):
    """The answer to `Leave`."""


class ValidationClaimed(Message, frozen=True, kw_only=True):
    """The validation that the group is to evaluate, counted from 1; 0 if none."""

    number: int


class Validations(Message, frozen=True, kw_only=True):
    """How many validations are complete; and whether a point of this epoch was passed that has none."""

    complete: int
    is_missed: bool


class VersionReleased(Message, frozen=True, kw_only=True):
    """Nothing of it is kept."""


class Gathered(Message, frozen=True, kw_only=True):
    """All live ranks have contributed.

    Attributes:
        ranks: those that took part, ascending.
        sizes: bytes of payload of each; the payload follows, in this order.
        collect: it does not follow: it is too large for this channel, and `Collect` gets it.
    """

    number: int
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    collect: bool = False


class Notice(Message, frozen=True, kw_only=True):
    """Ranks were lost.

    Attributes:
        lost: all ranks lost so far.
        reason: what happened, for people.
        over: whether the run cannot go on.
        barred: whether the group that this is about is not to join again by itself: it was evicted by a person, or one
            of its ranks has failed by itself.
    """

    lost: tuple[int, ...]
    reason: str
    over: bool = False
    barred: bool = False


class Acknowledged(Message, frozen=True, kw_only=True):
    """Heard."""


# --- Data, rank to server --------------------------------------------------------------------------------------------


class Attach(Message, frozen=True, kw_only=True):
    """An admitted rank opens its data connection, or one to the leader of another group."""

    rank: int
    nonce: Secret


class AttachProof(Message, frozen=True, kw_only=True):
    """The answer to an `AttachChallenge`: proves that the rank's own process is behind this connection, too."""

    mac: Secret


class Long(Message, frozen=True, kw_only=True):
    """A message too large for one frame follows: ``nbytes`` of it in chunks, then its payload. Either way."""

    nbytes: int


class Bring(Message, frozen=True, kw_only=True):
    """Bytes that are too large for the control channel, on which they are needed next. They follow as payload."""

    nbytes: int


class Collect(Message, frozen=True, kw_only=True):
    """Send the payloads of the last collective."""

    number: int


class Seed(Message, frozen=True, kw_only=True):
    """The recorder hands the master weights and optimizers over. The tensors follow as payload.

    ``request`` is as in `PushMessage`.
    """

    packed: Packed
    nbytes: int
    request: int = 0


class Restructure(Message, frozen=True, kw_only=True):
    """My group's optimizer has other parameter groups than before, or more parameters. The tensors follow as payload.

    Attributes:
        optimizer: which of the model's optimizers.
        packed: see `lightning_omni.protocol.structure.read_structure`.
    """

    optimizer: int
    packed: Packed
    nbytes: int


class PushMessage(Message, tag="Push", frozen=True, kw_only=True):
    """What a group pushes: a gradient, weights or a change of weights. The payload holds the tensors that are present.

    Attributes:
        optimizer: which of the model's optimizers.
        read_at: clock of the weights that it was computed from.
        layout: version of the layout in which its tensors lie.
        present: one flag for each parameter; the others' tensor is None.
        hyperparameters: one mapping for each parameter group; none if the optimizer steps at the workers.
        note: one number, for the method.
        pull: whether the answer is to bring tensors.
        epoch: the epoch, -1 if its data is not leased.
        trained: group batches of the epoch that are trained with this push.
        incarnation: of the group; what an earlier one has sent is refused.
        sequence: counts the pushes of this incarnation to this optimizer, from 1. The server applies each of them once.
            0 where nothing is sent: at a merged head, in a replay.
        fragment: which of the method's fragments it is of; -1 for all parameters. ``present`` then has a flag for each
            entry of `lightning_omni.protocol.layout.Layout.fragment`.
        request: counts what a rank asks of several servers at once, each of which gets a part; 0 if one has all.
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
        """The fragment; None for all parameters."""
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
        """What a group side needs exchanged, as a message.

        Args:
            need: from the group side.
            optimizer: which of the model's optimizers.
            present: one flag for each parameter.
            nbytes: of the payload.
            epoch: the epoch, -1 if its data is not leased.
            trained: group batches of the epoch that are trained with this push.
            layout: version of the layout.
            incarnation: of the group.
            sequence: number of the push.
        """
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
    """A group's own weights, for the mean of all groups'; answered with it when all have come. Payload follows.

    Attributes:
        optimizer: which of the model's optimizers.
        nbytes: of the payload.
        request: as in `PushMessage`.
        absent: places of the parameters that the payload does not hold: this group has them frozen as the server has.
    """

    optimizer: int
    nbytes: int
    request: int = 0
    absent: tuple[int, ...] = ()


class GroupState(Message, frozen=True, kw_only=True):
    """What a group alone knows, to be part of the next snapshot. The tensors follow as payload."""

    packed: Packed
    nbytes: int


class FetchMessage(Message, tag="Fetch", frozen=True, kw_only=True):
    """Send the master weights of one optimizer. By now my group has trained that much, as in `PushMessage`."""

    optimizer: int
    epoch: int = -1
    trained: int = 0
    request: int = 0


class HeadForward(Message, frozen=True, kw_only=True):
    """A group's batch arrives at a merged head. Answered when the group has access. The tensors follow as payload.

    Attributes:
        optimizer: number of the head, among the optimizers.
        packed: ``[arguments, keyword arguments]`` of the submodule; their tensors are in the payload, as
            `lightning_omni.protocol.activations` has them.
        training: whether each of its submodules is in training mode, itself first.
        trainable: whether each of its weights is to be trained.
        autocast: dtype of automatic mixed precision, if any.
        exclusive: whether a `HeadBackward` will follow; else the answer is all, and no group has to wait for it.
    """

    optimizer: int
    packed: Packed
    nbytes: int
    training: tuple[bool, ...]
    trainable: tuple[bool, ...]
    autocast: str = ""
    exclusive: bool = True


class HeadBackward(Message, frozen=True, kw_only=True):
    """The gradients of what the head gave; it is stepped, and the access is over. The tensors follow as payload.

    Attributes:
        optimizer: as in `HeadForward`.
        packed: a list with one gradient for each tensor of the output; None where it took no part in the loss.
        hyperparameters: as in `PushMessage`, of the parameter groups that hold weights of the head.
        scale: multiplies the gradients of the head's weights.
        clip: largest norm or magnitude of these; 0 clips nothing.
        clip_algorithm: ``"norm"`` or ``"value"``.
        epoch: as in `PushMessage`.
        trained: as in `PushMessage`, with this batch; the push of the body tells of it.
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
    """No backward pass follows: the access is over, and the head stays as it is."""

    optimizer: int


class TakeSnapshot(Message, frozen=True, kw_only=True):
    """Send everything: weights, optimizer states, clocks, as of one moment. ``request`` is as in `PushMessage`.

    Attributes:
        version: number of a validation: everything as it was when this was first asked for that one; 0 for now.
    """

    with_state: bool = True
    request: int = 0
    version: int = 0


class PublishEvaluation(Message, frozen=True, kw_only=True):
    """What came of the validation that my group was given. The tensors follow as payload.

    Attributes:
        number: of the validation.
        packed: ``{"metrics": ..., "buffers": {name: tensor}, "steps": ...}``, which other ranks read.
    """

    number: int
    packed: Packed
    nbytes: int


class ReadEvaluation(Message, frozen=True, kw_only=True):
    """What came of this validation?"""

    number: int


# --- Data, server to rank --------------------------------------------------------------------------------------------


class AttachChallenge(Message, frozen=True, kw_only=True):
    """Prove that you are the rank that was admitted."""

    nonce: Secret


class Attached(Message, frozen=True, kw_only=True):
    """The connection stands; ``mac`` proves that the side that was asked holds the secret, too."""

    mac: Secret


class Brought(Message, frozen=True, kw_only=True):
    """The server has it."""


class Collected(Message, frozen=True, kw_only=True):
    """All payloads of a collective, in the order of ranks; they follow."""

    nbytes: int


class Seeded(Message, frozen=True, kw_only=True):
    """The server holds the master weights."""


class Restructured(Message, frozen=True, kw_only=True):
    """The server's optimizer is so; the master weights that are new to the group follow as payload.

    Attributes:
        optimizer: its number.
        layout: the version of the layout that the group now knows.
    """

    optimizer: int
    layout: int
    nbytes: int


class GroupStateStored(Message, frozen=True, kw_only=True):
    """The server keeps it."""


class Weights(Message, frozen=True, kw_only=True):
    """Master weights, or what else the method answers; the payload follows.

    Attributes:
        clock: of this optimizer.
        staleness: of the push that this answers; -1 if it answers a fetch.
        applied: False if the push was not finite and was refused; then these are the master weights.
        refused_in_row: pushes of this group refused in a row.
        repeated: whether the push had come before, so that it was not applied once more; these are the master weights.
        progress: positions of the epoch trained by all groups.
        stop: as in `Leave`.
        fragment: of the push that this answers, as there.
        validations: those that are complete, as `ClaimValidation` gives them out.
        groups: how many take part, of a run that they join on their own; else 0.
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
    """The group has exclusive access, and this is the head's output; the tensors follow as payload."""

    packed: Packed
    nbytes: int


class HeadGradients(Message, frozen=True, kw_only=True):
    """The gradients of what came into the head, one or None for each tensor; they follow as payload.

    Attributes:
        clock: updates of the head so far.
        applied: False if the gradients were not finite and the head was not stepped.
        refused_in_row: gradients of this group refused in a row.
    """

    packed: Packed
    nbytes: int
    clock: int
    applied: bool
    refused_in_row: int


class HeadReleased(Message, frozen=True, kw_only=True):
    """The access is over."""


class Snapshot(Message, frozen=True, kw_only=True):
    """Everything of one moment, the ``cut``; the tensors follow as payload."""

    cut: Cut
    packed: Packed
    nbytes: int


class RunStateStored(Message, frozen=True, kw_only=True):
    """The server has it."""


class StoredRunState(Message, frozen=True, kw_only=True):
    """What was stored for groups that join; the tensors follow as payload."""

    packed: Packed
    nbytes: int


class EvaluationPublished(Message, frozen=True, kw_only=True):
    """The server has it."""


class Evaluation(Message, frozen=True, kw_only=True):
    """What came of a validation, as in `PublishEvaluation`; the tensors follow. Nothing, if its group is gone."""

    packed: Packed
    nbytes: int
    is_void: bool = False


# --- From leader to leader -------------------------------------------------------------------------------------------


class ReadPublished(Message, frozen=True, kw_only=True):
    """Show me what you have published for one optimizer: what was held for this connection, or else the last.

    ``holds``: hold what is the last now, and tell me its number, but do not send it yet.
    """

    optimizer: int
    holds: bool = False


class PeerMessage(Message, frozen=True, kw_only=True):
    """Weights for your inbox. The payload follows.

    Where the members of a group hold the model together, this is what one of them sends of message ``number`` of group
    ``sender``, to its counterpart; otherwise the number is 0.
    """

    optimizer: int
    nbytes: int
    sender: int = 0
    number: int = 0


class Published(Message, frozen=True, kw_only=True):
    """What I have published; the payload follows, unless it is held. The first is number 1, and 0 is nothing yet."""

    nbytes: int
    number: int = 0


class Taken(Message, frozen=True, kw_only=True):
    """The message is in the inbox."""


ToControl = (
    Challenge | Welcome | RefusedMessage | Status | Formed | Joined | EpochOpened | Drawn | Verdict | Left | Gathered
    | Notice | Acknowledged | Shards | Observing | Overview | Aggregator | PushDirectly | ValidationClaimed
    | Validations | VersionReleased | Enlisted | ServerDescription | Echoed
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
    """A message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview, *, at: str, channel: Channel) -> Any:
    """Bytes as a message to a rank, or as one between leaders. What a server receives is in the table in `router`.

    Args:
        data: one encoded message.
        at: which side reads it: ``"rank"``; or ``"server"``, the leader that is asked by another one.
        channel: ``"control"``, ``"data"`` or ``"peer"``.

    Raises:
        MalformedMessage: the bytes are no message that may arrive there.
    """
    return decode_with(_decoders[at, channel], data, channel)


def decode_with(decoder: msgspec.msgpack.Decoder[Any], data: bytes | memoryview, channel: Channel) -> Any:
    """Bytes as one of the messages that a decoder knows; see `decode`."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, TypeError) as error:
        # msgspec before 0.22 raises a TypeError where a map is the key of another one.
        raise MalformedMessage(f"not a {channel} message: {error}") from error


def method_to_wire(method: Any) -> dict[str, Any]:
    """A method as plain data."""
    return to_wire(method)


def method_from_wire(plain: dict[str, Any]) -> Any:
    """A method from plain data.

    Raises:
        MalformedMessage: no such method, or wrong settings.
    """
    return REGISTRY.from_wire(plain)
