"""Messages between the leaders of groups."""

from __future__ import annotations

from lightning_omni.wire.messages.base import Message


class ReadPublished(Message, frozen=True, kw_only=True):
    """A request for the weights that a leader has published for one optimizer.

    With ``holds``, the leader answers with the number of its last publication and keeps that one for this connection.
    The next request without ``holds`` gets it; if none is kept, it gets the last one.
    """

    optimizer: int
    holds: bool = False


class Published(Message, frozen=True, kw_only=True):
    """A leader's published weights; the payload follows, unless it is held. The first has number 1; 0 is none yet."""

    nbytes: int
    number: int = 0


class PeerMessage(Message, frozen=True, kw_only=True):
    """Weights for another group's inbox. The payload follows.

    If the members of a group hold the model together, this is one member's part of message ``number`` of group
    ``sender``, for its counterpart; otherwise the number is 0.
    """

    optimizer: int
    nbytes: int
    sender: int = 0
    number: int = 0


class PeerMessageStored(Message, frozen=True, kw_only=True):
    """A confirmation that the message is in the inbox."""
