"""All messages between ranks, observers and the server, and their encoding; those between servers are in `servers`."""

from __future__ import annotations

from typing import Any

import msgspec

from lightning_omni.wire.messages.base import *
from lightning_omni.wire.messages.collectives import *
from lightning_omni.wire.messages.data import *
from lightning_omni.wire.messages.membership import *
from lightning_omni.wire.messages.status import *
from lightning_omni.wire.messages.training import *

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
    """Decode a message to a rank, or between leaders; `lightning_omni.server.router` has those that a server receives.

    Args:
        data: one encoded message.
        at: ``"rank"``, or ``"server"`` for a leader that another leader has connected to.
        channel: ``"control"``, ``"data"`` or ``"peer"``.
    """
    return decode_with(_decoders[at, channel], data, channel)
