"""Messages between the leaders of groups."""

from __future__ import annotations

from lightning_omni.wire.messages.base import Message


class ReadPublished(Message, frozen=True, kw_only=True):
    """A request for the weights that a leader has published for one optimizer."""

    optimizer: int


class Published(Message, frozen=True, kw_only=True):
    """A leader's published weights; the payload follows. The first has number 1; 0 is none yet."""

    nbytes: int
    number: int = 0


class PeerMessage(Message, frozen=True, kw_only=True):
    """Weights for another group's inbox. The payload follows."""

    optimizer: int
    nbytes: int


class PeerMessageStored(Message, frozen=True, kw_only=True):
    """A confirmation that the message is in the inbox."""
