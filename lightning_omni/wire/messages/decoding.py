"""The messages that may arrive at a rank, or at another group's leader. The server's are in `router`."""

from __future__ import annotations

from typing import Any

import msgspec

from lightning_omni.wire.messages.admission import (
    Attach,
    AttachChallenge,
    Attached,
    AttachProof,
    Challenge,
    ObserverWelcome,
    ServerAddresses,
    Welcome,
)
from lightning_omni.wire.messages.base import (
    CONTROL,
    DATA,
    PEER,
    Acknowledged,
    Channel,
    LargeMessage,
    RefusedMessage,
    decode_with,
)
from lightning_omni.wire.messages.collectives import Downloaded, Gathered, Uploaded
from lightning_omni.wire.messages.data import BatchesDrawn, EpochLeft, EpochOpened, Next
from lightning_omni.wire.messages.membership import (
    GroupRegistered,
    GroupsFormed,
    Joined,
    Notice,
    RunStateStored,
    StoredRunState,
)
from lightning_omni.wire.messages.merged_head import HeadGradients, HeadOutput, HeadReleased
from lightning_omni.wire.messages.peers import PeerMessage, PeerMessageStored, Published, ReadPublished
from lightning_omni.wire.messages.snapshots import GroupStateStored, Snapshot
from lightning_omni.wire.messages.status import Echoed, Overview, ServerDescription, Status
from lightning_omni.wire.messages.training import Restructured, Weights, WeightsUploaded
from lightning_omni.wire.messages.validation import (
    Evaluation,
    EvaluationPublished,
    ValidationClaimed,
    Validations,
    VersionReleased,
)

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
    | Evaluation
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
    """Decode a message to a rank, or between leaders. The table in `router` has the messages that a server receives.

    Args:
        data: one encoded message.
        at: the receiving side: ``"rank"``; or ``"server"``, the leader that another one has connected to.
        channel: ``"control"``, ``"data"`` or ``"peer"``.

    Raises:
        MalformedMessage: the bytes are no message that may arrive there.
    """
    return decode_with(_decoders[at, channel], data, channel)
