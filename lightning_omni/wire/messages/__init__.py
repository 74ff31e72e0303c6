"""All messages between ranks, observers and the server, and their encoding; those between servers are in `servers`."""

from __future__ import annotations

from typing import Any

import msgspec

from lightning_omni.wire.messages.base import (
    CONTROL,
    DATA,
    LARGEST_ECHO,
    LARGEST_INLINE,
    LARGEST_UPLOAD,
    LONGEST,
    PEER,
    VERSION,
    Acknowledged,
    Channel,
    LargeMessage,
    Message,
    Name,
    RefusedMessage,
    Secret,
    decode_with,
    encode,
)
from lightning_omni.wire.messages.collectives import (
    Contribute,
    Download,
    Downloaded,
    Gathered,
    PeerMessage,
    PeerMessageStored,
    Published,
    ReadPublished,
    ReadUpload,
    Upload,
    Uploaded,
)
from lightning_omni.wire.messages.data import (
    AskNext,
    AskValidations,
    Batch,
    BatchesDrawn,
    ClaimValidation,
    DrawBatches,
    EpochLeft,
    EpochOpened,
    EpochPlan,
    EvaluationPublished,
    EvaluationResult,
    LeaveEpoch,
    Next,
    OpenEpoch,
    PublishEvaluation,
    ReadEvaluation,
    ReleaseVersion,
    ValidationClaimed,
    Validations,
    VersionReleased,
)
from lightning_omni.wire.messages.membership import (
    AskServerAddresses,
    Attach,
    AttachChallenge,
    Attached,
    AttachProof,
    Challenge,
    Evict,
    FormGroups,
    Goodbye,
    GroupRegistered,
    GroupsFormed,
    Hello,
    Join,
    Joined,
    Notice,
    Observe,
    ObserverProof,
    ObserverWelcome,
    Proof,
    RankEnded,
    ReadRunState,
    RegisterGroup,
    RunStateStored,
    ServerAddresses,
    StoredRunState,
    StoreRunState,
    Welcome,
    method_from_wire,
    method_to_wire,
)
from lightning_omni.wire.messages.status import (
    AskOverview,
    AskServer,
    AskStatus,
    Echo,
    Echoed,
    GroupOverview,
    GroupStatus,
    Heartbeat,
    LogEntry,
    Overview,
    ProcessInfo,
    SaveNow,
    ServerDescription,
    Status,
)
from lightning_omni.wire.messages.training import (
    AverageMessage,
    FetchMessage,
    GroupState,
    GroupStateStored,
    HeadBackward,
    HeadForward,
    HeadGradients,
    HeadOutput,
    HeadRelease,
    HeadReleased,
    PushMessage,
    Restructure,
    Restructured,
    Snapshot,
    SnapshotId,
    TakeSnapshot,
    UploadWeights,
    Weights,
    WeightsUploaded,
)

__all__ = [
    "CONTROL",
    "DATA",
    "LARGEST_ECHO",
    "LARGEST_INLINE",
    "LARGEST_UPLOAD",
    "LONGEST",
    "PEER",
    "VERSION",
    "Acknowledged",
    "AskNext",
    "AskOverview",
    "AskServer",
    "AskServerAddresses",
    "AskStatus",
    "AskValidations",
    "Attach",
    "AttachChallenge",
    "AttachProof",
    "Attached",
    "AverageMessage",
    "Batch",
    "BatchesDrawn",
    "Challenge",
    "Channel",
    "ClaimValidation",
    "Contribute",
    "Download",
    "Downloaded",
    "DrawBatches",
    "Echo",
    "Echoed",
    "EpochLeft",
    "EpochOpened",
    "EpochPlan",
    "EvaluationPublished",
    "EvaluationResult",
    "Evict",
    "FetchMessage",
    "FormGroups",
    "Gathered",
    "Goodbye",
    "GroupOverview",
    "GroupRegistered",
    "GroupState",
    "GroupStateStored",
    "GroupStatus",
    "GroupsFormed",
    "HeadBackward",
    "HeadForward",
    "HeadGradients",
    "HeadOutput",
    "HeadRelease",
    "HeadReleased",
    "Heartbeat",
    "Hello",
    "Join",
    "Joined",
    "LargeMessage",
    "LeaveEpoch",
    "LogEntry",
    "Message",
    "Name",
    "Next",
    "Notice",
    "Observe",
    "ObserverProof",
    "ObserverWelcome",
    "OpenEpoch",
    "Overview",
    "PeerMessage",
    "PeerMessageStored",
    "ProcessInfo",
    "Proof",
    "PublishEvaluation",
    "Published",
    "PushMessage",
    "RankEnded",
    "ReadEvaluation",
    "ReadPublished",
    "ReadRunState",
    "ReadUpload",
    "RefusedMessage",
    "RegisterGroup",
    "ReleaseVersion",
    "Restructure",
    "Restructured",
    "RunStateStored",
    "SaveNow",
    "Secret",
    "ServerAddresses",
    "ServerDescription",
    "Snapshot",
    "SnapshotId",
    "Status",
    "StoreRunState",
    "StoredRunState",
    "TakeSnapshot",
    "ToControl",
    "ToData",
    "Upload",
    "UploadWeights",
    "Uploaded",
    "ValidationClaimed",
    "Validations",
    "VersionReleased",
    "Weights",
    "WeightsUploaded",
    "Welcome",
    "decode",
    "decode_with",
    "encode",
    "method_from_wire",
    "method_to_wire",
]

ToControl = (
    Challenge
    | Welcome
    | RefusedMessage
    | Status
    | GroupsFormed
    | Joined
    | EpochOpened
    | BatchesDrawn
    | Next
    | EpochLeft
    | Gathered
    | Notice
    | Acknowledged
    | ServerAddresses
    | ObserverWelcome
    | Overview
    | ValidationClaimed
    | Validations
    | VersionReleased
    | GroupRegistered
    | ServerDescription
    | Echoed
)

ToData = (
    AttachChallenge
    | Attached
    | LargeMessage
    | WeightsUploaded
    | Restructured
    | GroupStateStored
    | Weights
    | Snapshot
    | HeadOutput
    | HeadGradients
    | HeadReleased
    | RefusedMessage
    | Uploaded
    | Downloaded
    | EvaluationPublished
    | EvaluationResult
    | RunStateStored
    | StoredRunState
)

_decoders = {
    ("rank", CONTROL): msgspec.msgpack.Decoder(ToControl),
    ("rank", DATA): msgspec.msgpack.Decoder(ToData),
    ("server", PEER): msgspec.msgpack.Decoder(Attach | AttachProof | ReadPublished | PeerMessage),
    ("rank", PEER): msgspec.msgpack.Decoder(
        AttachChallenge | Attached | Published | PeerMessageStored | RefusedMessage
    ),
}


def decode(data: bytes | memoryview, *, at: str, channel: Channel) -> Any:
    """Decode a message to a rank, or between leaders; `router` has the table of those that a server receives.

    Args:
        data: one encoded message.
        at: ``"rank"``, or ``"server"`` for a leader that another leader has connected to.
        channel: ``"control"``, ``"data"`` or ``"peer"``.

    Raises:
        MalformedMessage: the bytes are no message that may arrive there.
    """
    return decode_with(_decoders[at, channel], data, channel)
