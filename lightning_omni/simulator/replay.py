"""Repetition of a recorded run without its devices: the same pushes in the same order, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from lightning_omni.errors import ConfigurationError, ProtocolError
from lightning_omni.group.core import Action, GroupCore, ServerRequest
from lightning_omni.group.leased_batches import positions
from lightning_omni.methods import REGISTRY, Method
from lightning_omni.methods.contract import Exchange, Fetch, Gradient, NextGradient, Receive, Reply
from lightning_omni.methods.model.replica import Hyperparameters, Pulled, Replica, copies
from lightning_omni.methods.model.server_optimizer import describe, hyperparameters_of
from lightning_omni.server.event_log import Event
from lightning_omni.server.parameters.served_parameters import ServedParameters
from lightning_omni.simulator.monitor import Row, arrays
from lightning_omni.simulator.server import resolve_also
from lightning_omni.simulator.workbench import Samples, Workbench, named_parameters, own_replica
from lightning_omni.simulator.workload import Loss, MakeOptimizer
from lightning_omni.topology import Topology
from lightning_omni.trace import Trace
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import RAW, Memory, WireFormat, decode, from_wire, name_of
from lightning_omni.wire.layout import Layout
from lightning_omni.wire.messages import Batch
from lightning_omni.wire.partition import Partition, is_elementwise

BatchAt = Callable[[int, range], Any]
"""A function that returns the batch of an epoch's positions: ``batches(epoch, positions)``."""


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    Attributes:
        weights: the master weights by name.
        clock: updates that they contain.
        groups: own weights of each group that was not evicted, by its number.
    """

    weights: dict[str, Tensor]
    clock: int
    groups: dict[int, list[Tensor]]


def replay(
    events: Iterable[Event],
    model: nn.Module,
    loss: Loss,
    batches: BatchAt,
    optimizer: MakeOptimizer,
) -> Replayed:
    """Repeat a recorded run of one optimizer.

    An optimizer at the server uses the recorded hyperparameters; optimizers at the workers keep their initial ones.
    :doc:`/reference/simulator` has the limitations.

    Args:
        events: from `lightning_omni.server.event_log.read_record`, or as a recorder received them.
        model: the model when groups were first formed; it is not changed.
        loss: the mean loss of a batch, from the model and the batch.
        batches: returns the batch of an epoch's positions.
        optimizer: makes the torch optimizer from parameters.

    Raises:
        ConfigurationError: the record is empty, of several runs or not from the beginning; the run has several
            optimizers or gossips, changed its parameters or parameter groups, formed new groups whose initial state is
            not on record, or had several servers, with fragments or a wire format other than "fp32"; or an
            argument is wrong.
        ProtocolError: the record contradicts the method.

    Example:
        >>> from lightning_omni.simulator import Cluster, Computation, Limits, Workload, simulate
        >>> data = torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
        >>> run = dict(
        ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        ... )
        >>> model, events = nn.Linear(2, 1), []
        >>> trace = simulate("async_sgd", 2, Cluster.even(2), Workload(model, data, **run), batch_size=4,
        ...     limits=Limits(updates=5), computation=Computation(batched=False), record=events.append)
        >>> samples = Samples(data, seed=0)
        >>> again = replay(events, model, batches=lambda *where: samples.batch(samples.at(*where)), **run)
        >>> bool((again.weights["weight"].numpy() == trace.weights["weight"]).all())
        True
    """
    with torch.no_grad():
        run = _Replay(model, loss, batches, optimizer)
        for event in events:
            run.take(event)
    return run.result()


def trace_of(events: Iterable[Event], optimizer: int | None = None) -> Trace:
    """Return the trace of a recorded run. A record has no losses (they are NaN), weights or evaluations.

    Args:
        events: from `lightning_omni.server.event_log.read_record`.
        optimizer: number of the optimizer to trace, if the run has several; with `OmniStrategy`, a merged head
            has the last number.

    Raises:
        ConfigurationError: the record holds several runs, or several optimizers and ``optimizer`` is None.

    Example:
        >>> trace_of([Event(kind="push", time=2.5, group=1, read_at=0, clock=1)]).columns()["time"]
        array([0.])
    """
    rows: list[Row] = []
    untold: dict[int, list[tuple[int, int]]] = {}
    clock, began, now, meta = 0, None, 0.0, {}
    for event in events:
        if event.optimizer != (optimizer or 0):
            if optimizer is None:
                raise ConfigurationError(
                    "events: the run has several optimizers, and a trace is of one; pass the number of one, optimizer=0"
                    " for the first"
                )
            continue
        if event.kind == "seed" and began is not None:
            raise ConfigurationError("events: the record holds more than one run; pass the events of one")
        began = event.time if began is None else began
        now = event.time - began
        if event.kind in ("seed", "form"):
            meta = {"method": event.method, "groups": [list(ranks) for ranks in event.groups]}
            untold.clear()
        spans = untold.setdefault(event.group, [])
        spans.extend(event.spans)
        if event.kind == "push" and not event.refused:
            size = sum(stop - start for start, stop in spans)
            staleness = clock - event.read_at
            rows.append((now, event.group, event.read_at, clock + 1, staleness, np.nan, size, event.epoch, len(spans)))
        if event.kind == "push":
            spans.clear()
        clock = event.clock
    return Trace(arrays(Trace.COLUMNS, rows), updates=clock, seconds=now, ended="recorded", meta=meta)


@dataclass
class _Group:
    ranks: tuple[int, ...]
    replica: Replica
    core: GroupCore
    has_joined: bool = False
    """Whether it has joined the others mid-run, and has not read the weights yet."""
    present: tuple[bool, ...] = ()
    """Whether each parameter had a gradient in the last push; empty if not recorded."""
    ask: ServerRequest | None = None
    """The request that the server has not answered."""
    answer: Pulled | None = None
    """The answer to an exchange in flight, until the group needs it."""


class _Replay:
    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: BatchAt,
        optimizer: MakeOptimizer,
    ) -> None:
        self._model = copy.deepcopy(model).train()
        self._make, self._batches = optimizer, batches
        self._optimizer = optimizer(list(self._model.parameters()))
        self._parameters = named_parameters(self._model, self._optimizer)
        self._bench = Workbench(self._model, self._parameters, loss, Samples([0], 0), False, 1)
        self._is_formed = False
        self._served: ServedParameters
        self._method: Method
        self._wire_format: WireFormat
        self._overlap = False
        self._servers = 1
        self._out, self._in = Memory(), Memory()
        self._groups: dict[int, _Group] = {}
        self._step_time = 0.0
        self._batch_size = 0  # samples of one member, as far as known: its first batch is whole

    def take(self, event: Event) -> None:
        if event.optimizer:
            raise ConfigurationError("events: the run has several optimizers, and only runs of one can be replayed")
        elif event.kind == "restructure":
            raise ConfigurationError(
                "events: parameters or parameter groups were changed in mid-run, and only runs that keep them can be"
                " replayed"
            )
        elif event.kind in ("seed", "form"):
            self._form(event)
        elif not self._is_formed:
            raise ConfigurationError(
                "events: the record does not begin with the forming of groups; pass the whole of it"
            )
        else:
            self._served.method_side.now = event.time
            self._take_of_run(event)

    def _take_of_run(self, event: Event) -> None:
        group = self._groups.get(event.group)
        if event.kind == "expire":
            self._deliver(self._served.method_side.expire())
        elif event.kind == "join":
            self._join(event)
            return
        elif group is None:
            return
        else:
            self._take_of_group(group, event)
        clock = self._served.master.clock
        if clock != event.clock:
            raise ProtocolError(f"the record says {event}, but after it the clock is {clock}")

    def _take_of_group(self, group: _Group, event: Event) -> None:
        if (event.present or event.elsewhere) and self._method.steps_at == "server":
            self._mask(group, event)
        self._step_time = event.note
        for span in event.spans:
            self._step(group, event.epoch, span, event.hyperparameters)
        side = self._served.method_side
        match event.kind:
            case "push":
                self._push(group, event)
            case "fetch":
                self._fetch(group)
            case "rest":
                if group.answer is not None:  # groups receive an exchange in flight before they wait
                    pulled, group.answer = group.answer, None
                    group.core.apply_answer(0, pulled)
                self._deliver(side.idle(event.group))
            case "resume":
                side.resume(event.group)
            case "leave":
                self._deliver(side.evict(event.group))
            case "retire":
                del self._groups[event.group]
                self._deliver(side.evict(event.group))

    def result(self) -> Replayed:
        if not self._is_formed:
            raise ConfigurationError("events: the record is empty")
        weights = dict(zip(self._parameters, copies(self._served.master.weights()), strict=True))
        groups = {number: copies(group.replica.weights()) for number, group in self._groups.items()}
        return Replayed(weights, self._served.master.clock, groups)

    def _form(self, event: Event) -> None:
        topology, method = Topology(event.groups), REGISTRY.from_wire(event.method)
        wire_format = from_wire(event.wire_format) if event.wire_format else RAW
        self._check_can_form(event, method, wire_format)
        self._method, self._wire_format = method, wire_format
        self._overlap, self._servers = event.overlap, event.servers
        if not self._is_formed:
            self._is_formed = True
            names: dict[Tensor, str] = {parameter: name for name, parameter in self._parameters.items()}
            description = describe(self._optimizer, names) if method.steps_at == "server" else None
            weights, resolve = self._detached(), resolve_also(self._optimizer)
            self._served = ServedParameters(description, weights, event.clock, method, topology.alive, resolve)
        else:
            self._served.change_method(method, topology.alive)
        self._served.answer_in(wire_format.answers)
        self._groups = {
            number: self._make_group(number, topology.members(number), topology.alive) for number in topology.alive
        }

    def _check_can_form(self, event: Event, method: Method, wire_format: WireFormat) -> None:
        if event.servers > 1 and (wire_format != RAW or method.fragments > 1):
            raise ConfigurationError(
                f"events: each of {event.servers} servers has cut fragments out of its part, or encoded it, and only"
                ' runs in "fp32" and without fragments= are the same with one server, as in a replay'
            )
        if not self._is_formed:
            return
        if event.kind == "seed":
            raise ConfigurationError(
                "events: the record holds more than one run, or the run went through one group, whose steps no server"
                " saw"
            )
        if method.steps_at == "worker":
            raise ConfigurationError(
                f"events: other groups were formed in mid-run, and what these begin with is not on record with"
                f" {type(method).__name__}"
            )
        if self._wire_format.pushes.is_stateful:
            raise ConfigurationError(
                "events: other groups were formed in mid-run, and what the groups before had not pushed yet in their"
                f" wire format {name_of(self._wire_format)} is not on record"
            )

    def _detached(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def _join(self, event: Event) -> None:
        (ranks,) = event.groups
        self._served.method_side.join(event.group)
        self._groups[event.group] = self._make_group(event.group, ranks, (*self._groups, event.group))
        self._groups[event.group].has_joined = True

    def _make_group(self, number: int, ranks: tuple[int, ...], peers: tuple[int, ...]) -> _Group:
        master = self._served.master
        replica = own_replica(self._make, self._model, self._parameters, master.weights(), number)
        replica.clock, replica.peers = master.clock, peers
        core = GroupCore(self._method, self._wire_format, overlap=self._overlap)
        core.attach(replica)
        return _Group(ranks, replica, core)

    def _mask(self, group: _Group, event: Event) -> None:
        """Leave out the parameters that have no gradient at any server; the others train from now on."""
        present = event.present
        if event.elsewhere:
            elementwise = is_elementwise(self._method, self._optimizer)
            split = Partition.of(Layout.of(self._detached()), self._servers, elementwise)
            each = zip(split.places, (event.present, *event.elsewhere), strict=True)
            absent = {place for places, flags in each for place, there in zip(places, flags, strict=False) if not there}
            present = tuple(place not in absent for place in range(len(self._parameters)))
        group.present = present
        for parameter, own, there in zip(self._parameters.values(), group.replica.ordered, present, strict=False):
            if there:
                own.requires_grad_(True)
                parameter.requires_grad_(True)

    # --- Steps and exchanges -----------------------------------------------------------------------------------------

    def _step(self, group: _Group, epoch: int, span: tuple[int, int], hyperparameters: Hyperparameters) -> None:
        if not isinstance(need := group.core.waits_for(0), NextGradient):
            raise ProtocolError(f"the record has {group.ranks} train {span}, but they want {need}")
        members, replica = len(group.ranks), group.replica
        self._batch_size = max(self._batch_size, (span[1] - span[0]) // members)
        in_pairs = self._batch_size > 1
        parts = [positions(Batch(*span, 0), member, members, in_pairs=in_pairs) for member in range(members)]
        own = self._bench.compute(replica.weights(), [self._batches(epoch, part) for part in parts]).gradient
        if len(group.present) == len(own):
            own = [tensor if there else None for tensor, there in zip(own, group.present, strict=True)]
        used = hyperparameters or hyperparameters_of(replica.optimizer, set(replica.ordered))
        group.core.steps_take(0, self._step_time)
        self._continue(group, group.core.gradient(0, Gradient(own, used)))

    def _continue(self, group: _Group, action: Action) -> None:
        """Continue a group until it needs a gradient, or an answer that it does not have."""
        while True:
            match action:
                case ServerRequest(need=Exchange(), waits=False):
                    group.ask = action
                    group.core.send(action, self._whole, [Memory()])  # keeps the message, because tensors change
                    action = group.core.answer(0, None)
                case ServerRequest():
                    group.ask = action
                    return
                case Receive() if group.answer is not None:
                    group.core.steps_take(0, self._step_time)
                    pulled, group.answer = group.answer, None
                    action = group.core.answer(0, pulled)
                case NextGradient() | Receive():
                    return
                case _:
                    raise ConfigurationError(f"{type(self._method).__name__} goes from group to group, past any record")

    def _answer(self, group: _Group, ask: ServerRequest, pulled: Pulled) -> None:
        """Continue a group with an answer; that of an exchange in flight waits for the group's `Receive`."""
        group.ask = None
        if ask.waits:
            group.core.steps_take(0, self._step_time)
            self._continue(group, group.core.answer(0, pulled))
        else:
            group.answer = pulled
            if isinstance(need := group.core.waits_for(0), Receive):
                self._continue(group, need)

    @property
    def _whole(self) -> Partition:
        return Partition.whole(self._served.layout)

    def _push(self, group: _Group, event: Event) -> None:
        ask, served = group.ask, self._served
        if ask is None or not isinstance(ask.need, Exchange) or ask.need.read_at != event.read_at:
            raise ProtocolError(f"the record says {event}, but the group wants {ask or group.core.waits_for(0)}")
        [(message, encoded)] = group.core.send(ask, self._whole, [self._out])
        assert isinstance(message, m.PushMessage)
        assert encoded is not None
        message = msgspec.structs.replace(message, hyperparameters=event.hyperparameters, note=event.note)
        layout = served.layout_of_push(event.group, message)
        payload = decode(self._wire_format.pushes, encoded, layout, self._in)
        replies = served.push(event.group, message, payload, layout)
        if (replies is None) != event.refused:
            raise ProtocolError(f"the record says {event}, but the push was {'taken' if event.refused else 'refused'}")
        if replies is None:
            if ask.pulls:
                served.method_side.fetched(event.group)
            self._answer(group, ask, self._pulled(ask, Reply(event.group, 0), refused=True))
        else:
            self._deliver(replies)

    def _deliver(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if (group := self._groups.get(reply.group)) is None:
                continue
            if (ask := group.ask) is None or not isinstance(ask.need, Exchange):
                raise ProtocolError(f"group {reply.group} gets an answer, but wants {group.core.waits_for(0)}")
            self._answer(group, ask, self._pulled(ask, reply))

    def _pulled(self, ask: ServerRequest, reply: Reply, refused: bool = False) -> Pulled:
        served = self._served
        tensors: list[Tensor] = []
        if ask.pulls:
            layout = served.layout.fragment(ask.fragment, self._method.fragments)
            payload = served.as_bytes(served.payload_of(reply, ask.fragment), layout)
            tensors = layout.views(served.arrived(payload, layout).clone())
        return Pulled(tensors, served.master.clock, reply.note, refused, ask.fragment)

    def _fetch(self, group: _Group) -> None:
        master = self._served.master
        self._served.method_side.fetched(group.replica.group)
        pulled = Pulled(copies(master.weights()), master.clock)
        if group.ask is not None and isinstance(group.ask.need, Fetch):
            self._answer(group, group.ask, pulled)
        elif self._method.steps_at == "server" or group.has_joined:
            group.replica.load(pulled)
            group.has_joined = False
