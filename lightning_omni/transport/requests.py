"""A rank's requests to several servers that hold a partition each, or to one that holds everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor

from lightning_omni.errors import ProtocolError, Refused
from lightning_omni.group.core import Outgoing
from lightning_omni.transport.connections import Answer, Data
from lightning_omni.wire import messages as m


class Requests:
    """A rank's data connections, used concurrently: it sends each server its part before it waits for any answer.

    With ``by_member``, `send` uses only the last one: other members of this rank's group send to other servers.
    """

    def __init__(self, connections: Sequence[Data], by_member: bool = False) -> None:
        self._all = list(connections)
        self._connections = self._all[-1:] if by_member else self._all
        self._in_parts = by_member or len(self._all) > 1
        self._number = 0
        self._got: list[Any] = []

    @property
    def count(self) -> int:
        return len(self._connections)

    @property
    def coordinator(self) -> Data:
        return self._all[0]

    @property
    def own(self) -> Data:
        return self._connections[0]

    @property
    def moved(self) -> int:
        return sum(connection.moved for connection in self._all)

    @property
    def shared(self) -> int:
        return sum(connection.shared for connection in self._all)

    def send(self, outgoing: Sequence[Outgoing], into: Sequence[Tensor | None] | None = None) -> None:
        """Send each server its part of a request, as for `lightning_omni.transport.connections.Data.send`."""
        self._number += 1
        rooms = into or [None] * self.count
        if self._in_parts:
            number = self._number
            outgoing = [
                Outgoing(msgspec.structs.replace(message, request=number), payload) for message, payload in outgoing
            ]
        parts = [(message, payload, room) for (message, payload), room in zip(outgoing, rooms, strict=True)]
        self._got = []
        for connection, part in zip(self._connections, parts, strict=True):
            connection.send(*part)

    def receive(self, expect: type[Answer], into: Sequence[Tensor | None] | None = None) -> list[tuple[Answer, Tensor]]:
        """Wait for all answers; if a server has refused, none has handled its part, and `Refused` is raised."""
        memories = into or [None] * self.count
        # All answers are received first, so that none is mistaken for an answer to the next request; an exception may
        # have interrupted an earlier call.
        for connection, memory in list(zip(self._connections, memories, strict=True))[len(self._got) :]:
            try:
                self._got.append(connection.receive(expect, memory))
            except Refused as no:  # noqa: PERF203  # the other servers answer, too
                self._got.append(no)
        received, self._got = self._got, []
        for each in received:
            if isinstance(each, Refused):
                raise each
        return received

    def exchange(self, outgoing: Sequence[Outgoing], expect: type[Answer]) -> list[tuple[Answer, Tensor]]:
        self.send(outgoing)
        return self.receive(expect)

    def close(self) -> None:
        for connection in self._all:
            connection.close()


def check_alike(answers: list[tuple[m.Weights, Tensor]]) -> None:
    clocks = [answer.clock for answer, _ in answers]
    if len(set(clocks)) > 1:
        raise ProtocolError(f"servers that hold a partition each have applied different numbers of updates: {clocks}")
