"""Messages from rank to rank: collectives of all live ranks, and weights between the leaders of groups."""

from __future__ import annotations

import msgspec

from lightning_omni.wire.messages.base import Message

# --- Collectives ------------------------------------------------------------------------------------------------------


class Contribute(Message, frozen=True, kw_only=True):
    """A rank's contribution to a collective of all live ranks. The payload follows.

    Attributes:
        what: the collective and its signature, the same for all ranks.
        uploaded: whether the payload was sent before, by `Upload`.
        where: the rank's position in the program, for a message on a mismatch.
    """

    number: int
    what: str
    uploaded: bool = False
    where: str | msgspec.UnsetType = msgspec.UNSET


UPLOADED_ELSEWHERE = "uploaded"
"""Code of a refusal: this server has not received the rank's bytes; an earlier server may have."""


class Gathered(Message, frozen=True, kw_only=True):
    """The answer to `Contribute`, once all live ranks have contributed.

    Attributes:
        sizes: bytes of each rank's payload, which follow in this order.
        must_download: whether they are too large for this channel, and must be requested by `Download`.
    """

    number: int
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    must_download: bool = False


class Upload(Message, frozen=True, kw_only=True):
    """Bytes that the rank's next control message needs and cannot hold; they follow as payload."""

    nbytes: int


class Uploaded(Message, frozen=True, kw_only=True):
    """The answer to `Upload`."""


class ReadUpload(Message, frozen=True, kw_only=True):
    """A request to process the bytes of `Upload` as a message."""


class Download(Message, frozen=True, kw_only=True):
    number: int


class Downloaded(Message, frozen=True, kw_only=True):
    """All payloads of a collective, in the order of ranks."""

    nbytes: int


# --- Leaders of groups ------------------------------------------------------------------------------------------------


class ReadPublished(Message, frozen=True, kw_only=True):
    optimizer: int


class Published(Message, frozen=True, kw_only=True):
    """A leader's published weights, numbered from 1; 0 without any."""

    nbytes: int
    number: int = 0


class PeerMessage(Message, frozen=True, kw_only=True):
    """Weights for another group's inbox."""

    optimizer: int
    nbytes: int


class PeerMessageStored(Message, frozen=True, kw_only=True):
    """The answer to `PeerMessage`."""
