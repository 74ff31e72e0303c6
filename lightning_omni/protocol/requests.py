"""What a rank asks of several servers that hold a share each, or of the one that holds everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from torch import Tensor

from lightning_omni.errors import ProtocolError, Refused
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.group import Outgoing
from lightning_omni.protocol.transport import Data, LastingData, ServerAway

Answer = TypeVar("Answer", bound=m.Message)
_Part = tuple[m.Message, Tensor | None, Tensor | None]
"""What one server is told: as the arguments of `lightning_omni.protocol.transport.Data.send`."""


class Requests:
    """A rank's data connections, used at once: each server gets its part before any answer is waited for.

    Args:
        connections: to each server that this rank speaks to; the first one coordinates.
        by_member: whether this rank exchanges with the last one alone, and the other members of its group with the
            others.
        largest: the largest of a number over those members, all of which call it.
    """

    def __init__(
        self,
        connections: Sequence[Data],
        by_member: bool = False,
        largest: Callable[[int], int] = lambda number: number,
    ) -> None:
        self._all = list(connections)
        self._connections = self._all[-1:] if by_member else self._all
        self._in_parts = by_member or len(self._all) > 1
        self._number = 0
        lasting = [each for each in self._connections if isinstance(each, LastingData)]
        self._again = _Again(lasting, largest) if self._in_parts and lasting else None

    @property
    def count(self) -> int:
        """Servers, of those that hold a share each, that this rank exchanges with."""
        return len(self._connections)

    @property
    def coordinator(self) -> Data:
        """The connection to the server that coordinates."""
        return self._all[0]

    @property
    def own(self) -> Data:
        """The connection to the first server that this rank exchanges with."""
        return self._connections[0]

    @property
    def moved(self) -> int:
        """Bytes of payload that went out and came in so far."""
        return sum(connection.moved for connection in self._all)

    @property
    def shared(self) -> int:
        """Bytes of these that lay in memory that both sides have."""
        return sum(connection.shared for connection in self._all)

    def send(self, outgoing: Sequence[Outgoing], into: Sequence[Tensor | None] | None = None) -> None:
        """Says its part to each server.

        Args:
            outgoing: one for each, the payloads as in `lightning_omni.protocol.transport.Data.send`.
            into: memory for the answers' payloads, as there.
        """
        self._number += 1
        rooms = into or [None] * self.count
        if self._in_parts:
            number = self._number
            outgoing = [
                Outgoing(msgspec.structs.replace(message, request=number), payload) for message, payload in outgoing
            ]
        parts = [(message, payload, room) for (message, payload), room in zip(outgoing, rooms, strict=True)]
        if self._again is not None:
            self._again.send(parts)
            return
        for connection, part in zip(self._connections, parts, strict=True):
            connection.send(*part)

    def receive(self, expect: type[Answer], into: Sequence[Tensor | None] | None = None) -> list[tuple[Answer, Tensor]]:
        """Waits for all answers.

        Args:
            expect: type of them.
            into: memory for their payloads, as in `lightning_omni.protocol.transport.Data.receive`.

        Raises:
            Refused: a server refused; then none has done anything.
        """
        memories = into or [None] * self.count
        # All of them: the answers to the next request are not to be taken for these.
        if self._again is not None:
            received = self._again.receive(expect, memories)
        else:
            pairs = zip(self._connections, memories, strict=True)
            received = [_received(each.receive, expect, memory) for each, memory in pairs]
        answers = []
        for each in received:
            if isinstance(each, Refused):
                raise each
            answers.append(each)
        return answers

    def exchange(self, outgoing: Sequence[Outgoing], expect: type[Answer]) -> list[tuple[Answer, Tensor]]:
        """`send` and `receive`, with fresh memory."""
        self.send(outgoing)
        return self.receive(expect)

    def close(self) -> None:
        """Closes all connections at once."""
        for connection in self._all:
            connection.close()


class _Again:
    """A request in parts outlasts its servers: if one part was not answered, all are said again to those that go on.

    Servers handle a request when all parts are there. So a part that was answered by a server that is gone is said
    again, too, if another one was not; and where members of a group say a part each, they agree on that.

    Args:
        connections: of this rank, to each server that it says a part.
        largest: see `Requests`.
    """

    def __init__(self, connections: Sequence[LastingData], largest: Callable[[int], int]) -> None:
        self._connections, self._largest = connections, largest
        self._control = connections[0].control
        self._returns: int | None = None  # of the servers that all members of the group speak to
        self._parts: Sequence[_Part] = ()
        self._is_out = False

    def send(self, parts: Sequence[_Part]) -> None:
        """Says all parts of this rank."""
        if self._returns is None:
            self._reconnect()
        self._parts, self._is_out = parts, all(each.returns == self._returns for each in self._connections)
        try:
            for connection, part in zip(self._connections, parts, strict=True) if self._is_out else ():
                connection.send_part(*part)
        except ServerAway:
            self._is_out = False

    def receive(self, expect: type[Answer], memories: Sequence[Tensor | None]) -> list[tuple[Answer, Tensor] | Refused]:
        """Waits for all answers, or what was refused."""
        while True:
            received = self._receive(expect, memories)
            if self._largest(int(received is None)) == 0:
                assert received is not None
                return received
            assert self._returns is not None
            self._control.wait_for_another(self._returns + 1)
            self._reconnect()
            self.send(self._parts)

    def _reconnect(self) -> None:
        """All members speak to the servers that one of them has heard of last."""
        self._returns = self._largest(self._control.returns)
        self._control.wait_for_another(self._returns)
        for connection in self._connections:
            connection.renew()

    def _receive(
        self, expect: type[Answer], memories: Sequence[Tensor | None]
    ) -> list[tuple[Answer, Tensor] | Refused] | None:
        """All answers; None if a server is gone that owes one."""
        if not self._is_out:
            return None
        try:
            pairs = zip(self._connections, memories, strict=True)
            return [_received(connection.receive_part, expect, memory) for connection, memory in pairs]
        except ServerAway:
            return None


def _received(
    receive: Callable[[type[Answer], Tensor | None], tuple[Answer, Tensor]], expect: type[Answer], memory: Tensor | None
) -> tuple[Answer, Tensor] | Refused:
    try:
        return receive(expect, memory)
    except Refused as no:
        return no


def check_alike(answers: list[tuple[m.Weights, Tensor]]) -> None:
    """Raises `ProtocolError` unless the weights that servers have sent have moved by the same pushes."""
    clocks = [answer.clock for answer, _ in answers]
    if len(set(clocks)) > 1:
        raise ProtocolError(f"servers that hold a share each have applied different numbers of updates: {clocks}")
