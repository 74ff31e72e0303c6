"""Messages of collectives of all live ranks."""

from __future__ import annotations

import msgspec

from lightning_omni.wire.messages.base import Message


class Contribute(Message, frozen=True, kw_only=True):
    """A rank's contribution to a collective of all live ranks. The payload follows.

    Attributes:
        number: number of the collective in this run.
        what: the collective and its signature; all ranks must call the same one.
        uploaded: whether the rank has sent the payload before by `Upload`.
        where: position of this rank in the program, for a message if another one calls something else.
    """

    number: int
    what: str
    uploaded: bool = False
    where: str | msgspec.UnsetType = msgspec.UNSET


class Gathered(Message, frozen=True, kw_only=True):
    """The answer to `Contribute`, once all live ranks have contributed.

    Attributes:
        ranks: contributing ranks, ascending.
        sizes: bytes of payload of each; the payload follows in this order.
        must_download: whether the payload is too large for this channel, and `Download` must request it.
    """

    number: int
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    must_download: bool = False


class Upload(Message, frozen=True, kw_only=True):
    """An upload of bytes that a control message needs next and cannot hold. They follow as payload."""

    nbytes: int


class Uploaded(Message, frozen=True, kw_only=True):
    """The answer to `Upload`."""


class ReadUpload(Message, frozen=True, kw_only=True):
    """A request to process the bytes sent before by `Upload` as a message, which is too large for this channel."""


class Download(Message, frozen=True, kw_only=True):
    """A request for the payloads of the last collective."""

    number: int


class Downloaded(Message, frozen=True, kw_only=True):
    """All payloads of a collective, in the order of ranks; they follow."""

    nbytes: int
