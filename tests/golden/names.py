"""Numbers of the names in golden outcomes: a renaming changes this file, and no recorded digest.

A digest is over values in the order of fields; where the name of a type, of a kind or of a key would matter, its number
here stands for it. A new name stands last; in the place of one that is gone there is a dash. An
outcome holds the numbers, so two trees in which the same thing has different names have the same outcomes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lightning_omni.wire.codec import Packed


def _numbered(names: str) -> dict[str, int]:
    words = enumerate(names.split())
    return {f"-{number}" if name == "-" else name: number for number, name in words}


TYPES = _numbered(
    """
    - Acknowledged - - AskOverview AskServer AskServerAddresses AskStatus AskValidations Attach
    AttachChallenge AttachProof Attached AverageMessage AskNext Batch Upload Uploaded Challenge ClaimValidation
    Download Downloaded Contribute SnapshotId DrawBatches BatchesDrawn Echo Echoed RegisterGroup GroupRegistered
    EpochOpened EpochPlan EvaluationResult EvaluationPublished Event Evict FetchMessage FormGroups GroupsFormed Gathered
    Goodbye GroupOverview GroupState GroupStateStored GroupStatus HeadBackward HeadForward HeadGradients HeadOutput
    HeadRelease HeadReleased Heartbeat Hello Join Joined LeaveEpoch EpochLeft LogEntry LargeMessage RankEnded Notice
    Observe ObserverProof ObserverWelcome OpenEpoch Overview Packed PeerMessage Proof PublishEvaluation Published -
    PushMessage ReadUpload ReadEvaluation ReadPublished ReadRunState RefusedMessage ReleaseVersion Restructure
    Restructured RunStateStored - UploadWeights WeightsUploaded ServerDescription - ServerAddresses
    Snapshot Status StoreRunState StoredRunState TakeSnapshot PeerMessageStored TensorSpec ValidationClaimed
    Validations Next VersionReleased Weights Welcome
    """
)
"""Messages, the values in them, and the recorded event."""
VALUES = _numbered(
    """
    seed form restructure push expire train fetch rest resume retire leave join barrier gather all_reduce more
    validate over stop:skip stop:validate skip end stop:end attached uploaded busy fingerprint head key lost
    malformed protocol rank stranger structure version
    """
)
"""Values of fields that name a kind: of an event, a collective, what a group does next, a refusal."""
KEYS = _numbered(
    """
    weights clock parts steps state memory groups method optimizer weight count sum counts total class attributes
    step_times step_times_of outer unit came merged_at pushes buffers staleness hyperparameters square extra block
    fragments parameters children metrics head name module activation adaptive alpha bound buffer decay delay
    dynamic_steps grace keep_steps kind min_steps modulation moving_rate n n_fetch n_push outer_lr outer_momentum
    period quorum seed send staleness_aware strength warm_start warmup_steps
    """
)
"""Keys of ours in trees of plain values: states, snapshots, settings of methods."""
COUNTED = (
    *("optimizer", "clock", "staleness", "applied", "refused_in_row", "progress", "stop", "batches", "next", "ranks"),
    *("lost", "over", "code", "epoch", "generation", "number", "read_at", "trained", "sizes", "present", "groups"),
)
"""Fields of messages that are the same on every machine; their places in this tuple are their numbers."""
EVENT_ORDER = (
    *("kind", "group", "optimizer", "read_at", "clock", "refused", "epoch", "spans", "groups", "parameters"),
    "present",
)
"""Fields of recorded events that are the same on every machine, in the order in which they are kept."""
PROSE = ("reason",)
"""Fields that hold a sentence for people: of these, only whether there is one is kept."""


def type_number(kind: type) -> int:
    """Return the number of a type of message, or of a value in one."""
    return TYPES[kind.__name__]


def type_name(number: str) -> str:
    """Return the present name of a type, by its number in an outcome; other keys of an outcome are their own names."""
    return next((name for name, own in TYPES.items() if str(own) == number), number)


def counted_fields(message: msgspec.Struct) -> list[list[Any]]:
    """Return numbers and values of the fields of a message that are the same on every machine."""
    own = message.__struct_fields__
    return [[number, _kind(getattr(message, name))] for number, name in enumerate(COUNTED) if name in own]


def nameless_event(event: msgspec.Struct) -> list[Any]:
    """Return the values of a recorded event that are the same on every machine."""
    return [_kind(getattr(event, name)) for name in EVENT_ORDER]


def nameless(value: Any) -> Any:
    """Return a value in which numbers stand for names, for a digest.

    A struct becomes its type's number, and place and value of each field that differs from its default: a field more,
    with a default, changes no digest. A dict becomes its items in their order.
    """
    if isinstance(value, Packed):
        return [type_number(Packed), _tree(value.tree), nameless(value.specs)]
    if isinstance(value, msgspec.Struct):
        return [type_number(type(value)), *_fields(value)]
    if isinstance(value, dict):
        return [[_key(key), nameless(each)] for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [nameless(each) for each in value]
    if value is msgspec.UNSET:
        return []
    if isinstance(value, msgspec.msgpack.Ext):
        return [value.code, _tree(bytes(value.data)) if value.code == _TUPLE else bytes(value.data).hex()]
    return value.hex() if isinstance(value, bytes) else value


_TUPLE = 2
"""What the codec of trees calls a tuple."""


def _tree(packed: bytes) -> Any:
    try:
        return nameless(msgspec.msgpack.decode(packed))
    except msgspec.DecodeError:  # a case in which a rank sends no tree
        return packed.hex()


def _key(key: Any) -> Any:
    return ["key", KEYS[key]] if key in KEYS else key


def _fields(value: msgspec.Struct) -> list[list[Any]]:
    found = []
    for place, field in enumerate(msgspec.structs.fields(value)):
        own = getattr(value, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if default is msgspec.NODEFAULT or own != default:
            found.append([place, bool(own) if field.name in PROSE else nameless(_kind(own))])
    return found


def _kind(value: Any) -> Any:
    return ["kind", VALUES[value]] if isinstance(value, str) and value in VALUES else value
