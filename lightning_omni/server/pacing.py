"""Large answers that their receiver alone waits for: they go out a piece at a time, and the others hardly notice.

A group that joins reads all weights. Sent at once, that takes the server, and the link, as long as an exchange of one
more group, and all who exchange meanwhile wait for it. What it takes is known from how long a copy takes: sending costs
a few times as much, and is spread over many times as long.

Rule: what goes out is of one moment. It is copied before the next message, and the weights may move on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import zmq
from torch import Tensor

from lightning_omni.server.frames import CHUNK, CHUNK_MARK, chunks

LONGER = 40.0
"""Times as long as a copy takes that sending is spread over. Sending costs about three copies: one into the socket, one
into the system, and the encryption; so it takes a tenth of one core's time meanwhile, or less."""
LONGEST = 20.0
"""Seconds that it is spread over at most: a group that joins is to train, too."""


@dataclass
class _Stream:
    """An answer under way.

    Attributes:
        socket: that it goes out on.
        peer: to whom.
        pieces: what is left of it.
        interval: seconds from one piece to the next.
        due: when the next one may go.
    """

    socket: zmq.Socket[bytes]
    peer: bytes
    pieces: Iterator[memoryview]
    interval: float
    due: float


class PacedAnswers:
    """The large answers that are under way.

    Args:
        clock: tells the time in seconds; that of the loop which waits until a piece is `due`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._streams: deque[_Stream] = deque()

    @property
    def due(self) -> float:
        """When the next piece of any of them may go; infinite if there is none."""
        return min((each.due for each in self._streams), default=float("inf"))

    def begin(self, socket: zmq.Socket[bytes], peer: bytes, payload: Tensor) -> None:
        """An answer is to be sent, whose message has gone out already.

        Args:
            socket: a ROUTER.
            peer: to whom; it is sent nothing else on this socket meanwhile, for it waits for this.
            payload: uint8, one-dimensional; it may change at once.
        """
        began = self._clock()
        copy = payload.clone()
        now = self._clock()
        count = max(1, -(-copy.numel() // CHUNK))
        interval = min(LONGER * (now - began), LONGEST) / count
        self._streams.append(_Stream(socket, peer, chunks(copy), interval, now))

    def send(self, attached: Container[bytes]) -> None:
        """Sends the pieces that are due.

        Args:
            attached: connections that stand; what goes to others is dropped.
        """
        now = self._clock()
        for stream in [each for each in self._streams if each.due <= now]:
            piece = next(stream.pieces, None)
            if piece is None or stream.peer not in attached:
                self._streams.remove(stream)
                continue
            stream.socket.send_multipart([stream.peer, CHUNK_MARK, piece], copy=True)
            stream.due = now + stream.interval
