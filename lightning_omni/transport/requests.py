"""A rank's requests to several servers that hold a partition each, or to one that holds everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from torch import Tensor

from lightning_omni.errors import ProtocolError, Refused
from lightning_omni.group.core import Outgoing
from lightning_omni.transport.connections import Answer, Data, ReconnectingData, ServerUnavailable
from lightning_omni.wire import messages as m

_Part = tuple[m.Message, Tensor | None, Tensor | None]
"""The part of a request for one server: the arguments of `lightning_omni.transport.connections.Data.send`."""


class Requests:
    """A rank's data connections, used concurrently: it sends each server its part before it waits for any answer.

    With ``by_member``, this rank exchanges only over the last one, and other members of its group with other servers.
    ``largest`` returns the largest of a number over all these members, each of which calls it.
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
        self._got: list[Any] = []
        lasting = [each for each in self._connections if isinstance(each, ReconnectingData)]
        self._again = _Again(lasting, largest) if self._in_parts and lasting else None

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
        if self._again is not None:
            self._again.send(parts)
            return
        for connection, part in zip(self._connections, parts, strict=True):
            connection.send(*part)

    def receive(self, expect: type[Answer], into: Sequence[Tensor | None] | None = None) -> list[tuple[Answer, Tensor]]:
        """Wait for all answers; if a server has refused, none has handled its part, and `Refused` is raised."""
        memories = into or [None] * self.count
        # All answers are received first, so that none is mistaken for an answer to the next request.
        if self._again is not None:
            received = self._again.receive(expect, memories)
        else:
            _receive_missing(self._got, [each.receive for each in self._connections], expect, memories)
            received, self._got = self._got, []
        answers = []
        for each in received:
            if isinstance(each, Refused):
                raise each
            answers.append(each)
        return answers

    def exchange(self, outgoing: Sequence[Outgoing], expect: type[Answer]) -> list[tuple[Answer, Tensor]]:
        self.send(outgoing)
        return self.receive(expect)

    def close(self) -> None:
        for connection in self._all:
            connection.close()


class _Again:
    """A request in parts that outlasts its servers: if a part is not answered, all are repeated to the new servers.

    Even a part that an earlier server has answered is repeated if another was not; where the members of a group send
    one part each, they agree on this.
    """

    def __init__(self, connections: Sequence[ReconnectingData], largest: Callable[[int], int]) -> None:
        self._connections, self._largest = connections, largest
        self._control = connections[0].control
        self._server_epoch: int | None = None  # of the servers with which all members of the group exchange
        self._parts: Sequence[_Part] = ()
        self._got: list[Any] = []
        self._is_out = False

    def send(self, parts: Sequence[_Part]) -> None:
        if self._server_epoch is None:
            self._reconnect()
        self._got = []
        self._parts, self._is_out = parts, all(each.server_epoch == self._server_epoch for each in self._connections)
        try:
            for connection, part in zip(self._connections, parts, strict=True) if self._is_out else ():
                connection.send_part(*part)
        except ServerUnavailable:
            self._is_out = False

    def receive(self, expect: type[Answer], memories: Sequence[Tensor | None]) -> list[tuple[Answer, Tensor] | Refused]:
        while True:
            received = self._receive(expect, memories)
            if self._largest(int(received is None)) == 0:
                assert received is not None
                self._got = []
                return received
            assert self._server_epoch is not None
            self._control.wait_for_server_epoch(self._server_epoch + 1)
            self._reconnect()
            self.send(self._parts)

    def _reconnect(self) -> None:
        self._server_epoch = self._largest(self._control.server_epoch)
        self._control.wait_for_server_epoch(self._server_epoch)
        for connection in self._connections:
            connection.renew()

    def _receive(
        self, expect: type[Answer], memories: Sequence[Tensor | None]
    ) -> list[tuple[Answer, Tensor] | Refused] | None:
        if not self._is_out:
            return None
        try:
            _receive_missing(self._got, [each.receive_part for each in self._connections], expect, memories)
        except ServerUnavailable:
            return None
        return self._got


def _received(
    receive: Callable[[type[Answer], Tensor | None], tuple[Answer, Tensor]], expect: type[Answer], memory: Tensor | None
) -> tuple[Answer, Tensor] | Refused:
    try:
        return receive(expect, memory)
    except Refused as no:
        return no


def _receive_missing(
    got: list[tuple[Answer, Tensor] | Refused],
    receives: Sequence[Callable[[type[Answer], Tensor | None], tuple[Answer, Tensor]]],
    expect: type[Answer],
    memories: Sequence[Tensor | None],
) -> None:
    """Append the answers that are not among ``got`` yet: an exception may have interrupted an earlier call."""
    for receive, memory in list(zip(receives, memories, strict=True))[len(got) :]:
        got.append(_received(receive, expect, memory))


def check_alike(answers: list[tuple[m.Weights, Tensor]]) -> None:
    clocks = [answer.clock for answer, _ in answers]
    if len(set(clocks)) > 1:
        raise ProtocolError(f"servers that hold a partition each have applied different numbers of updates: {clocks}")
