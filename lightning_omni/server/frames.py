"""How messages and payloads lie in ZeroMQ frames.

On the data channel a message is one frame, and its payload follows in messages of two frames: an empty one, and at
most half a megabyte of bytes. (One frame of 100 MB is half as fast: it cannot be copied out while the rest arrives.)
Where the payload lies in memory that both processes share, the message has a second frame that says where (`sharing`),
and nothing follows. A message that is larger itself is announced by a `Long` and comes in such pieces, too. On the
control channel message and payload are the frames of one ZeroMQ message.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import zmq
from torch import Tensor

from lightning_omni.errors import MalformedMessage
from lightning_omni.protocol.messages import Long, Message, encode
from lightning_omni.server.keys import HANDSHAKE_TIME
from lightning_omni.server.sharing import NOWHERE, Places
from lightning_omni.server.sharing import encode as encode_places

CHUNK = 1 << 19
"""Bytes of payload in one frame, at most."""
LITTLE = 8 * CHUNK
"""Bytes of payload up to which ZeroMQ may copy by itself: with 4 MB it takes as long, with 1 MB 0.95 of the time."""
MOST_UNTAKEN = 16 << 20
"""Bytes of answers that a process which watches has not taken, with `_ENVELOPE` for each frame; then it gets no more.
Twice what `doctor` asks for."""
_ENVELOPE = 4 << 10
"""Bytes that encryption adds to a frame, and more."""
LARGEST_CONTROL_FRAME = 64 << 10
"""Bytes of a frame that a server takes on the control channel; ZeroMQ ends a connection on which a larger one comes."""
LARGEST_DATA_FRAME = CHUNK + _ENVELOPE
"""Bytes of a frame on the data channel and between leaders, likewise."""
LARGEST_ANSWER_FRAME = 16 << 20
"""Bytes of a frame that a rank takes on the control channel: the status of a large run is one."""
KEPT_ALIVE = 60
"""Seconds of silence on a connection after which the system asks the other side whether it stands: firewalls and
address translation forget connections that are silent for a few minutes, as a data connection may be."""
CHUNK_MARK = b""
PROBE = b""
"""What the server sends on the control channel to find out whether a connection still stands. It is not answered."""


def chunks(payload: Tensor) -> Iterator[memoryview]:
    """A payload's bytes in pieces that share its memory.

    Args:
        payload: uint8, one-dimensional, on the CPU.
    """
    view: memoryview = payload.numpy().data
    for start in range(0, len(view), CHUNK):
        yield view[start : start + CHUNK]


_Sent = tuple[memoryview, zmq.MessageTracker]
"""The memory of a frame, and what knows whether that is out."""


class Assembly:
    """Puts the chunks of one payload together again.

    Args:
        message: the message that announced the payload.
        buffer: uint8, exactly as long as the payload.
        places: what came with the message.
    """

    def __init__(self, message: Message, buffer: Tensor, places: Places = NOWHERE) -> None:
        self.message = message
        self.places = places
        self.buffer = buffer
        self._bytes = buffer.numpy()
        self._filled = 0

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are there."""
        return self._filled == self.buffer.numel()

    def fill(self, payload: Tensor) -> None:
        """Copies a whole payload, which may change meanwhile.

        Raises:
            MalformedMessage: it is not as large as was announced.
        """
        if payload.numel() != self.buffer.numel():
            raise MalformedMessage(f"{payload.numel()} bytes of payload came, {self.buffer.numel()} were announced")
        self.buffer.copy_(payload)
        self._filled = self.buffer.numel()

    def add(self, chunk: Any) -> None:
        """Appends a chunk.

        Raises:
            MalformedMessage: more bytes came than were announced, or an empty chunk.
        """
        size = len(chunk)
        if size == 0 or self._filled + size > self.buffer.numel():
            raise MalformedMessage(f"{self._filled + size} bytes of payload came, {self.buffer.numel()} were announced")
        self._bytes[self._filled : self._filled + size] = numpy.frombuffer(chunk, dtype=numpy.uint8)
        self._filled += size


class Copies:
    """Sends copies of payloads, in memory that is used again when its frame is out.

    What ZeroMQ itself copies goes to fresh memory each time, and touching that takes longer than copying. Only where
    there is little does it cost less than being told what is out.
    """

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._sent: list[_Sent] = []

    def send(self, socket: zmq.Socket[bytes], peer: bytes, payload: Tensor) -> None:
        """Sends the chunks of a payload, which may change at once, to one peer of a ROUTER.

        Args:
            socket: the ROUTER.
            peer: to whom.
            payload: as for `chunks`.
        """
        if payload.numel() <= LITTLE:
            for chunk in chunks(payload):
                socket.send_multipart([peer, CHUNK_MARK, chunk], copy=True)
            return
        self._reclaim()
        sent: deque[_Sent] = deque()
        for chunk in chunks(payload):
            while sent and sent[0][1].done:  # to one peer they go out in order
                self._free.append(sent.popleft()[0])
            block = self._free.pop() if self._free else memoryview(bytearray(CHUNK))
            block[: len(chunk)] = chunk
            frame = zmq.Frame(block[: len(chunk)], track=True, copy=False)
            socket.send_multipart([peer, CHUNK_MARK, frame], copy=False)
            sent.append((block, frame.tracker))
        self._sent.extend(sent)
        if self._free:  # more than was needed: a little less is kept from time to time
            self._free.pop()

    def _reclaim(self) -> None:
        """Takes back what is out by now; to slow peers some is not."""
        sent, self._sent = self._sent, []
        for block, tracker in sent:
            if tracker.done:
                self._free.append(block)
            else:
                self._sent.append((block, tracker))


class Untaken:
    """Answers that no rank waits for: what a peer does not take of them is bounded, and more is not sent.

    ZeroMQ keeps whatever a peer does not read. It gives a frame back when that is out.
    """

    def __init__(self) -> None:
        self._sent: dict[bytes, deque[tuple[int, zmq.MessageTracker]]] = {}
        self._sizes: Counter[bytes] = Counter()

    def add(self, peer: bytes, parts: Sequence[bytes]) -> list[zmq.Frame]:
        """An answer as frames that are to be sent now; none if too much of earlier ones has not been taken."""
        sent = self._sent.setdefault(peer, deque())
        while sent and sent[0][1].done:
            self._sizes[peer] -= sent.popleft()[0]
        if self._sizes[peer] > MOST_UNTAKEN:
            return []
        # Of a small frame that is copied, as by default, it is not known when it is out.
        frames = [zmq.Frame(part, track=True, copy=False, copy_threshold=0) for part in parts]
        for part, frame in zip(parts, frames, strict=True):
            size = len(part) + _ENVELOPE  # what a frame of few bytes costs is more than these
            self._sizes[peer] += size
            sent.append((size, frame.tracker))
        return frames

    def tidy(self) -> None:
        """Forgets peers that have taken all, or have gone."""
        for peer in [peer for peer, sent in self._sent.items() if all(tracker.done for _, tracker in sent)]:
            del self._sent[peer], self._sizes[peer]


def message_frames(message: Message, places: Places = NOWHERE) -> Iterator[list[Any]]:
    """A message of the data channel as it is sent: one ZeroMQ message, or more if it is a long one."""
    data = encode(message)
    behind = [encode_places(places)] if places != NOWHERE else []
    if len(data) <= CHUNK:
        yield [data, *behind]
        return
    yield [encode(Long(nbytes=len(data))), *behind]
    for start in range(0, len(data), CHUNK):
        yield [CHUNK_MARK, data[start : start + CHUNK]]


def configure(socket: zmq.Socket[bytes], largest_frame: int) -> None:
    """What all sockets here have in common: nothing lingers, nothing is endless."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, largest_frame)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIME)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEPT_ALIVE)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEPT_ALIVE)
