"""The layout of messages and payloads in ZeroMQ frames.

On the control channel, message and payload are the frames of one ZeroMQ message. On the data channel a message is one
frame, and its payload follows in ZeroMQ messages of two frames: an empty frame, and at most half a megabyte of bytes.
A second frame of the message may hold ranges in memory that both processes share: for the payload, which then does not
follow, and for the answer's payload. A larger message is announced by a `LargeMessage` and sent in such pieces, too.

Rule: an answer is consistent. It is copied before the next message, and the weights may change while it is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy
import zmq
from torch import Tensor

from lightning_omni.errors import MalformedMessage
from lightning_omni.transport.zeromq.keys import HANDSHAKE_TIME
from lightning_omni.transport.zeromq.shared_memory import NO_RANGES, MemoryRanges, encode_record
from lightning_omni.wire.messages import LargeMessage, Message, encode

CHUNK = 1 << 19
"""The most bytes of payload in one frame."""
LITTLE = 8 * CHUNK
"""Bytes of payload up to which ZeroMQ itself copies: at 4 MB both ways take the same time."""
_ENVELOPE = 4 << 10
"""An upper bound of the bytes that encryption adds to a frame."""
LARGEST_CONTROL_FRAME = 64 << 10
"""The most bytes of a frame to a server on the control channel; ZeroMQ ends connections that send larger ones."""
LARGEST_DATA_FRAME = CHUNK + _ENVELOPE
"""The most bytes of a frame that is accepted on the data channel and between leaders."""
LARGEST_ANSWER_FRAME = 16 << 20
"""The most bytes of a frame that a rank accepts on the control channel: the status of a large run is one frame."""
KEPT_ALIVE = 60
"""Seconds of silence after which the system checks a connection with a TCP keep-alive.

Firewalls drop connections that are silent for minutes, as a data connection may be.
"""
CHUNK_MARK = b""
PROBE = b""
"""A frame that the server sends on the control channel to check a connection. Ranks do not answer it."""


def chunks(payload: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a payload (uint8, one-dimensional, on the CPU) in pieces that share its memory."""
    view: memoryview = payload.numpy().data
    for start in range(0, len(view), CHUNK):
        yield view[start : start + CHUNK]


_Sent = tuple[memoryview, zmq.MessageTracker]
"""The memory of a frame, and the tracker that reports whether the frame has been sent."""


class Assembly:
    """The assembly of one payload from its chunks, or from ``places`` in shared memory."""

    def __init__(self, message: Message, buffer: Tensor, places: MemoryRanges = NO_RANGES) -> None:
        self.message = message
        self.places = places
        self.buffer = buffer
        self._bytes = buffer.numpy()
        self._filled = 0

    @property
    def is_complete(self) -> bool:
        return self._filled == self.buffer.numel()

    def fill(self, payload: Tensor) -> None:
        """Copy a whole payload out of memory that may change meanwhile."""
        if payload.numel() != self.buffer.numel():
            raise MalformedMessage(f"{payload.numel()} bytes of payload came, {self.buffer.numel()} were announced")
        self.buffer.copy_(payload)
        self._filled = self.buffer.numel()

    def add(self, chunk: Any) -> None:
        """Append a chunk; raise `MalformedMessage` if it is empty or exceeds the announced size."""
        size = len(chunk)
        if size == 0 or self._filled + size > self.buffer.numel():
            raise MalformedMessage(f"{self._filled + size} bytes of payload came, {self.buffer.numel()} were announced")
        self._bytes[self._filled : self._filled + size] = numpy.frombuffer(chunk, dtype=numpy.uint8)
        self._filled += size


class Copies:
    """A sender of payload copies; the memory of large ones is used again once a frame has been sent.

    ZeroMQ's own copies use fresh memory, which is slow to touch.
    """

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._sent: list[_Sent] = []

    def send(self, socket: zmq.Socket[bytes], peer: bytes, payload: Tensor) -> None:
        """Send the chunks of a payload to one peer of a ROUTER. The payload may change afterwards."""
        if payload.numel() <= LITTLE:
            for chunk in chunks(payload):
                socket.send_multipart([peer, CHUNK_MARK, chunk], copy=True)
            return
        self._reclaim()
        sent: deque[_Sent] = deque()
        for chunk in chunks(payload):
            while sent and sent[0][1].done:  # frames to one peer are sent in order
                self._free.append(sent.popleft()[0])
            block = self._free.pop() if self._free else memoryview(bytearray(CHUNK))
            block[: len(chunk)] = chunk
            frame = zmq.Frame(block[: len(chunk)], track=True, copy=False)
            socket.send_multipart([peer, CHUNK_MARK, frame], copy=False)
            sent.append((block, frame.tracker))
        self._sent.extend(sent)
        if self._free:  # shrinks an unneeded reserve slowly
            self._free.pop()

    def _reclaim(self) -> None:
        sent, self._sent = self._sent, []
        for block, tracker in sent:
            if tracker.done:
                self._free.append(block)
            else:
                self._sent.append((block, tracker))


def message_frames(message: Message, places: MemoryRanges = NO_RANGES) -> Iterator[list[Any]]:
    data = encode(message)
    behind = [encode_record(places)] if places != NO_RANGES else []
    if len(data) <= CHUNK:
        yield [data, *behind]
        return
    yield [encode(LargeMessage(nbytes=len(data))), *behind]
    for start in range(0, len(data), CHUNK):
        yield [CHUNK_MARK, data[start : start + CHUNK]]


def configure(socket: zmq.Socket[bytes], largest_frame: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, largest_frame)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIME)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEPT_ALIVE)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEPT_ALIVE)
