"""The real server, as simulated groups use it, with all ranks joined, and the network to and from it.

Several servers do the same as one, in the same order, up to the rounding of lossy formats and the borders of fragments,
so the simulation has one; `lightning_omni.simulator.network` computes the time that several take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.errors import ProtocolError
from lightning_omni.group.core import GroupCore, Outgoing, ServerRequest
from lightning_omni.methods import Method
from lightning_omni.methods.model.modules import class_path
from lightning_omni.methods.model.server_optimizer import Resolve, describe, resolver
from lightning_omni.server.core import ServerCore
from lightning_omni.server.event_log import Recorder
from lightning_omni.server.parameters.served_parameters import ServedParameters
from lightning_omni.server.service import Out
from lightning_omni.simulator.engine import Engine, Process, Timeline
from lightning_omni.simulator.network import Exchanges
from lightning_omni.simulator.workbench import WeightsByClock
from lightning_omni.topology import Topology
from lightning_omni.wire import handshake
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import pack
from lightning_omni.wire.formats.base import Memory, WireFormat, to_wire
from lightning_omni.wire.handshake import NONCE_BYTES
from lightning_omni.wire.layout import Layout
from lightning_omni.wire.partition import Partition

GENERATION = 1
"""The generation of groups; the groups are formed once."""
HEAD = 1
"""Number of a merged head's optimizer; that of the body is 0."""
_Answer = TypeVar("_Answer", bound=m.Message)
_NOTHING = b""
_NONCE = bytes(NONCE_BYTES)
"""A constant nonce of ranks: connections cannot be overheard here, and the server's nonces are random."""


class SimulatedServer:
    """A `ServerCore` that all ranks have joined; ``seed`` is that of the key and nonces.

    Attributes:
        served: the master weights; unset before the groups were formed.
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
        random, resolve = Random(seed), resolve_also(optimizer)
        self._key = random.randbytes(NONCE_BYTES)
        # Ranks never time out: they die only in the cluster's events.
        self.core = ServerCore(self._key, random.randbytes, math.inf, math.inf, resolve=resolve, record=record)
        self.snapshots = WeightsByClock(layout)
        self._engine, self._layout, self._topology = engine, layout, topology
        self._announced = len(topology.ranks)
        self._memory = Memory()
        self.incarnation = 0
        self.served: ServedParameters
        for rank in topology.ranks:
            self._join(rank)

    def form(self, method: Method, wire_format: WireFormat, overlap: bool, parts: Sequence[Mapping[str, Any]]) -> None:
        """Form the groups and send weights and optimizers, as the recorder does: see `part_of`."""
        form = m.FormGroups(
            generation=GENERATION,
            groups=self._topology.groups,
            method=to_wire(method),
            wire_format=to_wire(wire_format),
            overlap=overlap,
        )
        (*_, formed) = self.control(0, form)
        self.incarnation = cast(m.GroupsFormed, formed.message).incarnation
        packed, buffer = pack({"parts": [dict(part) for part in parts]})
        self._data(0, m.UploadWeights(packed=packed, nbytes=buffer.numel()), buffer)
        self.served = self.core.store.all[0]

    def join(self, members: int, name: str) -> tuple[m.Joined, tuple[int, ...], list[Out]]:
        first = max(self._topology.ranks) + 1
        ranks = tuple(range(first, first + members))
        for rank in ranks:
            self._join(rank)
        out = self.control(ranks[0], m.Join(ranks=ranks, name=name))
        self._topology = Topology((*self._topology.groups, ranks))
        (joined,) = (item.message for item in out if isinstance(item.message, m.Joined))
        return joined, ranks, out

    def control(self, rank: int, message: m.Message) -> list[Out]:
        return _accepted(self.core.receive(m.CONTROL, b"c%d" % rank, message, _NOTHING, self._engine.now))

    def prepare(self, core: GroupCore, ask: ServerRequest) -> tuple[int, Outgoing | None]:
        """Return the bytes of a push that is sent now; and the encoded push, if it must be encoded now.

        A push of known size whose group waits is encoded when it arrives, so that all pushes in flight share one
        memory.
        """
        present = [tensor is not None for tensor in ask.tensors]
        layout = self.served.layout.fragment(ask.fragment, core.method.fragments)
        smallest, largest = core.wire_format.pushes.sizes(layout.subset(present))
        if smallest == largest and ask.waits:
            return largest, None
        [outgoing] = core.send(ask, Partition.whole(self.served.layout), [Memory()])
        return cast(m.PushMessage, outgoing.message).nbytes, outgoing

    def ask(self, leader: int, core: GroupCore, ask: ServerRequest, outgoing: Outgoing | None = None) -> list[Out]:
        if outgoing is None:
            [outgoing] = core.send(ask, Partition.whole(self.served.layout), [self._memory])
        return self._data(leader, outgoing.message, _NOTHING if outgoing.payload is None else outgoing.payload)

    def ask_head(
        self, leader: int, message: m.HeadForward | m.HeadBackward, payload: Tensor, expect: type[_Answer]
    ) -> tuple[_Answer, Tensor]:
        (out,) = self._data(leader, message, payload)
        assert isinstance(out.message, expect)
        (answer,) = out.payload
        assert isinstance(answer, Tensor)
        return out.message, answer.clone()

    def tick(self) -> list[Out]:
        return _accepted(self.core.tick(self._engine.now))

    def lose(self, rank: int, reason: str) -> list[Out]:
        return self.core.lose(rank, reason)

    # --- Messages from the server ------------------------------------------------------------------------------------

    def group_of(self, out: Out) -> int:
        return self._topology.group_of(int(out.peer[1:]))

    def tensors_of(self, out: Out) -> list[Tensor]:
        """Return the weights in an answer; groups that receive all master weights unencoded share the tensors."""
        message, served = out.message, self.served
        assert isinstance(message, m.Weights)
        if not out.payload:
            return []
        if out.payload[0] is served.buffer:
            return self.snapshots.at(message.clock, served.buffer)
        assert isinstance(out.payload[0], Tensor)
        # Every other payload is in the format of answers.
        fragment = message.fragment if message.fragment >= 0 else None
        layout = served.layout.fragment(fragment, served.method_side.method.fragments)
        return layout.views(served.arrived(out.payload[0], layout).clone())

    # --- Connections -------------------------------------------------------------------------------------------------

    def _join(self, rank: int) -> None:
        announced = self._announced if rank < self._announced else 0
        hello = handshake.hello_of("simulated", rank, announced, self._layout, _NONCE)
        _, secret = handshake.join(lambda message, _: self.control(rank, message)[0].message, self._key, hello)
        handshake.attach(lambda message, _: self._data(rank, message)[0].message, secret, rank, _NONCE)

    def _data(self, rank: int, message: m.Message, payload: bytes | Tensor = _NOTHING) -> list[Out]:
        return _accepted(self.core.receive(m.DATA, b"d%d" % rank, message, payload, self._engine.now))


class SimulatedNetwork:
    """The network that delivers the server's messages, in virtual time.

    Attributes:
        processes: the process that receives the server's decisions, by group number.
        exchanges: the process that receives weights, likewise: the group's last exchange.
        delivered: called after each delivery, since the server may have made an update.
    """

    def __init__(self, engine: Engine, server: SimulatedServer, costs: Exchanges) -> None:
        self._engine, self._server, self.costs = engine, server, costs
        self.processes: dict[int, Process] = {}
        self.delivered: Callable[[], None] = lambda: None
        self._due = math.inf
        self.exchanges: dict[int, Process] = {}

    def deliver(self, out: list[Out]) -> None:
        """Deliver messages that the server sends now: weights take time, `Next` none; drop others."""
        for item in out:
            group = self._server.group_of(item)
            if isinstance(item.message, m.Weights):
                # The tensors are copied now, because the answer is only valid until the server's next message.
                answer = item.message, self._server.tensors_of(item)
                self._engine.start(self._send(group, self.exchanges[group], answer))
            elif isinstance(item.message, m.Next):
                self._engine.resume_at(self._engine.now, self.processes[group], item.message.next)
        if (due := self._server.core.due) < self._due:
            self._due = due
            self._engine.start(self._expire(due))
        self.delivered()

    def _send(self, group: int, process: Process, answer: tuple[m.Weights, list[Tensor]]) -> Timeline:
        yield from self.costs.answer(group, answer[0].nbytes)
        self._engine.resume(process, answer)

    def _expire(self, due: float) -> Timeline:
        """Tick the server when its method has requested, unless it requests a later moment."""
        yield due
        self._due = math.inf
        self.deliver(self._server.tick() if self._server.core.due <= self._engine.now else [])


def part_of(
    parameters: Mapping[str, Parameter],
    optimizer: Optimizer | None,
    head: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return weights and optimizer in the server's format; ``optimizer`` is None if it steps at the workers.

    ``parameters`` are in the optimizer's order.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    return {
        "optimizer": describe(optimizer, names) if optimizer is not None else None,
        "weights": {name: parameter.detach() for name, parameter in parameters.items()},
        "clock": 0,
        "head": head,
    }


def resolve_also(optimizer: Optimizer) -> Resolve:
    return resolver([class_path(type(optimizer))])


def _accepted(out: list[Out]) -> list[Out]:
    for item in out:
        if isinstance(item.message, m.RefusedMessage):
            raise ProtocolError(f"the server refused a simulated message: {item.message.reason}")
        if isinstance(item.message, m.Notice) and item.message.over:  # a step has failed for which groups wait
            raise ProtocolError(f"the server has ended the simulated run: {item.message.reason}")
    return out
