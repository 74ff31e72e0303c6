"""The real server as simulated groups speak to it, all ranks at once, and the way there and back.

It refuses nothing they say. Several servers that hold a share of the weights each do what one does, in the same order,
so there is one here, too; what they cost is counted in `lightning_omni.simulator.exchange`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.errors import ProtocolError
from lightning_omni.methods import Method
from lightning_omni.methods.master import Resolve, class_path, describe, resolver
from lightning_omni.protocol import Out, ServerCore, handshake
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.codec import pack
from lightning_omni.protocol.group import Ask, GroupCore, Outgoing
from lightning_omni.protocol.handshake import NONCE_BYTES
from lightning_omni.protocol.in_memory import InMemoryConnections
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.record import Recorder
from lightning_omni.protocol.shard import Shard
from lightning_omni.protocol.wire_format import Memory, WireFormat, to_wire
from lightning_omni.simulator.cluster import Link
from lightning_omni.simulator.engine import Engine, Process, Timeline
from lightning_omni.simulator.exchange import Exchanges
from lightning_omni.simulator.replicas import WeightsByClock
from lightning_omni.simulator.saved_state import SavedState
from lightning_omni.topology import Topology

GENERATION = 1
"""The groups are formed once."""
HEAD = 1
"""Number of a merged head: the optimizer of the rest is 0."""
_Answer = TypeVar("_Answer", bound=m.Message)
_NOTHING = b""
_NONCE = bytes(NONCE_BYTES)
"""A rank's own: nothing can overhear, and the server's are drawn."""


class SimulatedServer:
    """A `ServerCore` that all ranks have joined.

    Args:
        engine: virtual time.
        layout: of the trained parameters.
        topology: which rank is in which group.
        seed: of nonces and tickets.
        optimizer: the user's.
        record: told of everything that happens to the weights.

    Attributes:
        core: the server.
        snapshots: weights that it has sent, by clock.
        incarnation: of the groups that were formed.
        away_until: when a server that has died is there again, in seconds; None while it is there.
        shard: the master weights; there are none before the groups were formed.
    """

    def __init__(
        self,
        engine: Engine,
        layout: Layout,
        topology: Topology,
        seed: int,
        optimizer: Optimizer,
        record: Recorder | None,
    ) -> None:
        self._random, self._resolve, self._record = Random(seed), resolve_also(optimizer), record
        self._key = self._random.randbytes(NONCE_BYTES)
        self.core = self._new_core()
        self.snapshots = WeightsByClock(layout)
        self._engine, self._layout, self._topology = engine, layout, topology
        self._announced = len(topology.ranks)
        self._link, self._memory = InMemoryConnections(self.core), Memory()
        self._saved_state: SavedState | None = None
        self.incarnation = 0
        self.away_until: float | None = None
        self.shard: Shard
        for rank in topology.ranks:
            self._join(rank)

    def form(self, method: Method, wire_format: WireFormat, overlap: bool, parts: Sequence[Mapping[str, Any]]) -> None:
        """The recorder forms the groups and hands weights and optimizers over: see `part_of`."""
        form = m.Form(
            generation=GENERATION,
            groups=self._topology.groups,
            method=m.method_to_wire(method),
            wire_format=to_wire(wire_format),
            overlap=overlap,
        )
        (*_, formed) = self.control(0, form)
        self.incarnation = cast(m.Formed, formed.message).incarnation
        packed, buffer = pack({"parts": [dict(part) for part in parts]})
        self._data(0, m.Seed(packed=packed, nbytes=buffer.numel()), buffer)
        self.shard = self.core.shards[0]

    def join(self, members: int, name: str) -> tuple[m.Joined, tuple[int, ...], list[Out]]:
        """A group more takes part.

        Args:
            members: number of its ranks.
            name: of the group.

        Returns:
            What it is told, its ranks, and what the server sends.
        """
        first = max(self._topology.ranks) + 1
        ranks = tuple(range(first, first + members))
        for rank in ranks:
            self._join(rank)
        out = self.control(ranks[0], m.Join(ranks=ranks, name=name))
        self._topology = Topology((*self._topology.groups, ranks))
        (joined,) = (item.message for item in out if isinstance(item.message, m.Joined))
        return joined, ranks, out

    def control(self, rank: int, message: m.Message) -> list[Out]:
        """A rank says something on its control connection."""
        self._poll()
        return _accepted(self._link.control(rank, message))

    def prepare(self, core: GroupCore, ask: Ask) -> tuple[int, Outgoing | None]:
        """The bytes of a push that is sent now; and the push, if its size is only known when it is encoded.

        If it is known before, the push is encoded when it arrives: there is one memory then for all that are under way.
        What its group does not wait for is encoded now, for the group moves on.
        """
        present = [tensor is not None for tensor in ask.tensors]
        layout = self.shard.layout.fragment(ask.fragment, core.method.fragments)
        smallest, largest = core.wire_format.pushes.sizes(layout.subset(present))
        if smallest == largest and ask.waits:
            return largest, None
        outgoing = core.send(ask, self.shard.layout, Memory())
        return cast(m.PushMessage, outgoing.message).nbytes, outgoing

    def ask(self, leader: int, core: GroupCore, ask: Ask, outgoing: Outgoing | None = None) -> list[Out]:
        """A push or a fetch arrives.

        Args:
            leader: the rank that sent it.
            core: of its group.
            ask: what was asked.
            outgoing: from `prepare`.
        """
        outgoing = outgoing or core.send(ask, self.shard.layout, self._memory)
        return self._data(leader, outgoing.message, _NOTHING if outgoing.payload is None else outgoing.payload)

    def ask_head(
        self, leader: int, message: m.HeadForward | m.HeadBackward, payload: Tensor, expect: type[_Answer]
    ) -> tuple[_Answer, Tensor]:
        """A group's batch at the merged head, or its gradients; answered at once, for the head is the group's alone."""
        (out,) = self._data(leader, message, payload)
        assert isinstance(out.message, expect)
        (answer,) = out.payload
        assert isinstance(answer, Tensor)
        return out.message, answer.clone()

    def tick(self) -> list[Out]:
        """Time has passed. Returns what the server sends."""
        self._poll()
        return self.core.tick(self._engine.now)

    def lose(self, rank: int, reason: str) -> list[Out]:
        """A rank is dead. Returns what the server sends."""
        self._poll()
        return self.core.lose(rank, reason)

    # --- It dies, and another one goes on ----------------------------------------------------------------------------

    def save_every(self, seconds: float, on_save: Callable[[], None]) -> None:
        """From now on, with the groups formed, its state is saved every so many seconds."""
        self._saved_state = SavedState(seconds, on_save)
        self._saved_state.save(self.core, self._engine.now)

    def die(self, until: float) -> None:
        """It dies: its state is that of the last save, and it hears nothing until a moment, in seconds."""
        self._poll()
        assert self._saved_state is not None
        self.core, self.away_until = self._new_core(), until
        self._saved_state.restore(self.core, self._engine.now)
        self._link, self.shard = InMemoryConnections(self.core), self.core.shards[0]
        self.snapshots.forget()

    def come_back(self, ranks: Iterable[int]) -> None:
        """It hears again, and these ranks attach again."""
        self.away_until = None
        for rank in ranks:
            self._join(rank, returns=True)

    def wait_while_away(self) -> Timeline:
        """A process' part: goes on when the server is there."""
        while self.away_until is not None:
            yield self.away_until

    # --- What the server sends ---------------------------------------------------------------------------------------

    def group_of(self, out: Out) -> int:
        """To which group it goes."""
        return self._topology.group_of(self._link.rank_of(out.peer))

    def tensors_of(self, out: Out) -> list[Tensor]:
        """The weights in an answer, to keep: groups that are sent the same share them."""
        message, shard = out.message, self.shard
        assert isinstance(message, m.Weights)
        if not out.payload:
            return []
        if out.payload[0] is shard.buffer:
            return self.snapshots.at(message.clock, shard.buffer)
        assert isinstance(out.payload[0], Tensor)
        # Of another's push, or of a fetch, it is either the very buffer or in the format of answers.
        fragment = message.fragment if message.fragment >= 0 else None
        layout = shard.layout.fragment(fragment, shard.method_side.method.fragments)
        return layout.views(shard.arrived(out.payload[0], layout).clone())

    # --- Connections -------------------------------------------------------------------------------------------------

    def _new_core(self) -> ServerCore:
        # Silence means nothing here: a rank dies when the cluster says so.
        return ServerCore(
            self._key, self._random.randbytes, math.inf, math.inf, resolve=self._resolve, record=self._record
        )

    def _join(self, rank: int, returns: bool = False) -> None:
        announced = self._announced if rank < self._announced else 0
        hello = handshake.hello_of("simulated", rank, announced, self._layout, _NONCE, returns)
        _, secret = handshake.join(lambda message, _: self.control(rank, message)[0].message, self._key, hello)
        handshake.attach(lambda message, _: self._data(rank, message)[0].message, secret, rank, _NONCE)

    def _data(self, rank: int, message: m.Message, payload: bytes | Tensor = _NOTHING) -> list[Out]:
        self._poll()
        return _accepted(self._link.data(rank, message, payload))

    def _poll(self) -> None:
        """Something is about to happen, now."""
        self._link.now = self._engine.now
        if self._saved_state is not None:
            self._saved_state.poll(self.core, self._engine.now)


class SimulatedNetwork:
    """What the server sends goes where it is to go, and takes its time.

    Args:
        engine: virtual time.
        between: the link from group to group.
        server: at the far end.
        costs: how long exchanges with it take; kept.

    Attributes:
        processes: what waits for what the server sends, by the number of the group.
        expired: called when the method was told of a moment that it had asked for.
        exchanges: what waits for weights in their place, while they compute.
    """

    def __init__(self, engine: Engine, between: Link, server: SimulatedServer, costs: Exchanges) -> None:
        self._engine, self._between, self._server, self.costs = engine, between, server, costs
        self.processes: dict[int, Process] = {}
        self.expired: Callable[[], None] = lambda: None
        self._due = math.inf
        self.exchanges: dict[int, Process] = {}

    def deliver(self, out: list[Out]) -> None:
        """What the server sends now goes where it is to go: weights take their time, verdicts none."""
        for item in out:
            group = self._server.group_of(item)
            process = self.processes[group]
            if isinstance(item.message, m.Weights):
                process = self.exchanges.get(group, process)
                # Copied now: the server's answer is only valid until the next message.
                answer = item.message, self._server.tensors_of(item)
                self._engine.start(self._send(group, process, answer))
            elif isinstance(item.message, m.Verdict):
                self._engine.resume_at(self._engine.now, process, item.message.next)
        self.costs.resolve_pending()
        if (due := self._server.core.due) < self._due:
            self._due = due
            self._engine.start(self._expire(due))

    def _send(self, group: int, process: Process, answer: tuple[m.Weights, list[Tensor]]) -> Timeline:
        """A process: weights travel to a group, and what waits for them there goes on."""
        yield from self.costs.answer(group, answer[0].nbytes)
        self._engine.resume(process, answer)

    def _expire(self, due: float) -> Timeline:
        """A process: the method is told of the moment that it has asked for, unless it asks for another by then."""
        yield due
        self._due = math.inf
        if self._server.away_until is not None:  # it looks at the time when it is back
            return
        self.deliver(self._server.tick() if self._server.core.due <= self._engine.now else [])
        self.expired()

    # --- From group to group -----------------------------------------------------------------------------------------

    def to_peer(self, nbytes: int = 0) -> float:
        """When a message to another group is there, if it is sent now. Links between groups are not shared."""
        return self._engine.now + self._between.seconds(nbytes)


def part_of(
    parameters: Mapping[str, Parameter],
    optimizer: Optimizer | None,
    head: Mapping[str, Any] | None = None,
    servers: int = 1,
) -> dict[str, Any]:
    """Weights and optimizer as a server takes them; no optimizer if it steps at the workers.

    Args:
        parameters: by name, in the optimizer's order.
        optimizer: over these, and perhaps others.
        head: what is to be said of a merged head.
        servers: for which the one here stands.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    return {
        "optimizer": describe(optimizer, names) if optimizer is not None else None,
        "weights": {name: parameter.detach() for name, parameter in parameters.items()},
        "clock": 0,
        "head": head,
        "servers": servers,
    }


def resolve_also(optimizer: Optimizer) -> Resolve:
    """A resolver that admits the user's own class, too: no other is sent here."""
    return resolver([class_path(type(optimizer))])


def _accepted(out: list[Out]) -> list[Out]:
    for item in out:
        if isinstance(item.message, m.RefusedMessage):
            raise ProtocolError(f"the server refused a simulated message: {item.message.reason}")
    return out
