"""A link that several messages cross at once, as over TCP: each gets an even part of it, up to the message's own limit.

Messages of one limit are equally fast, so their crossed bytes are counted once for all; a message costs the logarithm
of their number.
"""

from __future__ import annotations

import heapq

from lightning_omni.simulator.engine import Engine, Process, Timeline, until_resumed


class _Lane:
    """The messages that have the same limit.

    Attributes:
        messages: a heap of (``crossed`` at its end, serial number, process to resume then).
        crossed: bytes that would have crossed of a message that had been in the lane from the beginning.
        rate: bytes per second of each message.
    """

    def __init__(self) -> None:
        self.messages: list[tuple[float, int, Process]] = []
        self.crossed = self.rate = 0.0

    @property
    def due(self) -> float:
        return max(self.messages[0][0] - self.crossed, 0.0) / self.rate


class SharedLink:
    """One direction of a link.

    Args:
        engine: virtual time.
        bandwidth: bytes per second, finite.

    Example:
        Two messages of 100 bytes over a link of 100 bytes a second, half a second after one another:

        >>> engine = Engine()
        >>> link = SharedLink(engine, 100.0)
        >>> def send(moment):
        ...     yield moment
        ...     print((yield link.carry(100, limit=1000.0)))
        >>> for moment in (0.0, 0.5):
        ...     _ = engine.start(send(moment))
        >>> while engine.events:
        ...     engine.step()
        1.5
        2.0
    """

    def __init__(self, engine: Engine, bandwidth: float) -> None:
        self._engine, self._bandwidth = engine, bandwidth
        self._lanes: dict[float, _Lane] = {}  # by limit
        self._shared_at, self._serial_number = 0.0, 0

    def carry(self, nbytes: float, limit: float) -> Process:
        """Start to carry a message.

        Args:
            nbytes: bytes of the message, above 0.
            limit: its most bytes per second.

        Returns:
            A process that ends when the whole message has crossed, and returns that time.
        """
        message = self._engine.start(until_resumed())
        self._go_on()
        lane = self._lanes.setdefault(limit, _Lane())
        self._serial_number += 1
        heapq.heappush(lane.messages, (lane.crossed + nbytes, self._serial_number, message))
        self._share()
        return message

    def _go_on(self) -> None:
        for lane in self._lanes.values():
            lane.crossed += lane.rate * (self._engine.now - self._shared_at)
        self._shared_at = self._engine.now

    def _share(self) -> None:
        """Divide the bandwidth evenly after the messages have changed; faster lanes get the surplus of slower ones."""
        left, count = self._bandwidth, sum(len(lane.messages) for lane in self._lanes.values())
        for limit, lane in sorted(self._lanes.items()):
            lane.rate = min(limit, left / count)
            left, count = left - lane.rate * len(lane.messages), count - len(lane.messages)
        if self._lanes:
            self._serial_number += 1
            first = min(self._lanes.values(), key=lambda lane: lane.due)
            self._engine.start(self._arrive(first, self._engine.now + first.due, self._serial_number))

    def _arrive(self, lane: _Lane, due: float, serial_number: int) -> Timeline:
        """Run a process that ends the first messages of a lane, unless the messages change before."""
        yield due
        if serial_number != self._serial_number:
            return
        self._go_on()
        lane.crossed = lane.messages[0][0]  # without rounding error
        arrived = []
        while lane.messages and lane.messages[0][0] <= lane.crossed:
            arrived.append(heapq.heappop(lane.messages)[2])
        self._lanes = {limit: each for limit, each in self._lanes.items() if each.messages}
        self._share()
        for message in arrived:
            self._engine.resume(message, self._engine.now)
