"""Base class, limits and encoding of messages.

Rule 1: bytes that do not decode to exactly one of these types are refused, whichever process sent them.
Rule 2: a message contains no tensors. They follow as a payload, whose size most messages state as ``nbytes``.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from lightning_omni.errors import MalformedMessage

VERSION = 16
"""The protocol version, which must be the same on both sides."""

LARGEST_INLINE = 32 << 10
"""The most bytes of message or payload that a rank may send on the control channel; more goes to the data channel."""

LARGEST_ECHO = 1 << 20
"""The most bytes of an answer to `Echo`."""

LARGEST_UPLOAD = 8 << 20
"""The most bytes of one `Upload`."""

LONGEST = 256 << 20
"""The most bytes of one message of an admitted rank on the data channel, without its payload."""

Name = Annotated[str, msgspec.Meta(max_length=128)]

Secret = Annotated[bytes, msgspec.Meta(max_length=64)]
"""A nonce or MAC. Fields that a stranger may send before admission have limited sizes."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The base of all messages."""


class RefusedMessage(Message, tag="Refused", frozen=True, kw_only=True):
    code: str
    reason: str


class Acknowledged(Message, frozen=True, kw_only=True):
    """An acknowledgement."""


class LargeMessage(Message, frozen=True, kw_only=True):
    """The announcement of a message larger than a frame: ``nbytes`` in chunks, then its payload."""

    nbytes: int


Channel = str

CONTROL: Channel = "control"

DATA: Channel = "data"

PEER: Channel = "peer"

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_with(decoder: msgspec.msgpack.Decoder[Any], data: bytes | memoryview, channel: Channel) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, TypeError) as error:
        # msgspec before 0.22 raises a TypeError where a map is the key of another one.
        raise MalformedMessage(f"not a {channel} message: {error}") from error
