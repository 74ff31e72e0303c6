"""Large answers, sent piece by piece, so that only their receiver waits and the other groups are hardly delayed.

A joining group reads all weights. Sent at once, these would occupy the server and the link as long as an exchange of
one more group, and all other exchanges would wait. Sending costs a few times as much as a copy, whose duration is
measured, and is spread over many times as long.

Rule: an answer is consistent. It is copied before the next message, and the weights may change while it is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import zmq
from torch import Tensor

from lightning_omni.transport.zeromq.frames import CHUNK, CHUNK_MARK, chunks

LONGER = 40.0
"""Duration of sending as a multiple of that of a copy.

Sending costs about three copies: into the socket, into the system, and the encryption. So it takes at most a tenth of
one core meanwhile.
"""
LONGEST = 20.0
"""The longest duration of sending in seconds: a joining group is to train, too."""


@dataclass
class _Stream:
    """An answer that is being sent.

    Attributes:
        socket: socket to send on.
        peer: identity of the receiver.
        pieces: remaining pieces.
        interval: seconds between two pieces.
        due: when the next piece may be sent.
    """

    socket: zmq.Socket[bytes]
    peer: bytes
    pieces: Iterator[memoryview]
    interval: float
    due: float


class PacedAnswers:
    """The large answers that are being sent.

    Args:
        clock: returns seconds, on the clock of the loop that waits until a piece is `due`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._streams: deque[_Stream] = deque()

    @property
    def due(self) -> float:
        """Return when the next piece of any answer may be sent; infinity without any."""
        return min((each.due for each in self._streams), default=float("inf"))

    def begin(self, socket: zmq.Socket[bytes], peer: bytes, payload: Tensor) -> None:
        """Start to send the payload of an answer whose message has been sent.

        Args:
            socket: a ROUTER.
            peer: identity of the receiver, which waits for this payload and is sent nothing else on this socket
                meanwhile.
            payload: uint8, one-dimensional; it may change at once.
        """
        began = self._clock()
        copy = payload.clone()
        now = self._clock()
        count = max(1, -(-copy.numel() // CHUNK))
        interval = min(LONGER * (now - began), LONGEST) / count
        self._streams.append(_Stream(socket, peer, chunks(copy), interval, now))

    def send(self, attached: Container[bytes]) -> None:
        """Send the pieces that are due.

        Args:
            attached: open connections; answers to others are dropped.
        """
        now = self._clock()
        for stream in [each for each in self._streams if each.due <= now]:
            piece = next(stream.pieces, None)
            if piece is None or stream.peer not in attached:
                self._streams.remove(stream)
                continue
            stream.socket.send_multipart([stream.peer, CHUNK_MARK, piece], copy=True)
            stream.due = now + stream.interval
