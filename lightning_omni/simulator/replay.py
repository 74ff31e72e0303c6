"""Repetition of a recorded run without its devices: the same pushes in the same order, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_omni.errors import ConfigurationError, ProtocolError
from lightning_omni.group.core import Action, GroupCore, ServerRequest
from lightning_omni.group.leased_batches import positions
from lightning_omni.methods import REGISTRY, Method
from lightning_omni.methods.contract import Exchange, Fetch, Gradient, NextGradient, Receive, Reply, Tensors
from lightning_omni.methods.model.replica import Hyperparameters, Pulled, Replica, copies
from lightning_omni.methods.model.server_optimizer import describe, detach_state, holds, hyperparameters_of
from lightning_omni.server.event_log import Event
from lightning_omni.server.parameters.served_parameters import ServedParameters
from lightning_omni.simulator.monitor import Row, arrays
from lightning_omni.simulator.server import partitioned_format, resolve_also
from lightning_omni.simulator.workbench import Samples, Workbench, named_parameters, own_replica
from lightning_omni.simulator.workload import Loss, MakeOptimizer
from lightning_omni.topology import Topology
from lightning_omni.trace import Trace
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import RAW, Encoded, Memory, WireFormat, decode, from_wire, name_of
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
        model: the model when groups were first formed, with all parameters that were added later; it is not changed.
        loss: the mean loss of a batch, from the model and the batch.
        batches: returns the batch of an epoch's positions.
        optimizer: makes the torch optimizer from parameters.

    Raises:
        ConfigurationError: the run has several optimizers or gossips, was not recorded from its beginning, or formed
            new groups whose initial state is not on record.
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
        optimizer: number of the optimizer to trace, if the run has several; a merged head has the last number.

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


def _message(event: Event, tensors: Tensors, pull: bool = True, fragment: int | None = None) -> m.PushMessage:
    return m.PushMessage(
        optimizer=event.optimizer,
        read_at=event.read_at,
        present=tuple(tensor is not None for tensor in tensors),
        hyperparameters=event.hyperparameters,
        epoch=event.epoch,
        trained=0,
        nbytes=0,
        note=event.note,
        pull=pull,
        fragment=-1 if fragment is None else fragment,
    )


@dataclass
class _Group:
    ranks: tuple[int, ...]
    replica: Replica
    core: GroupCore
    others: dict[str, Tensor] = field(default_factory=dict)
    """Weights of parameters that other groups train and this one does not have yet."""
    has_joined: bool = False
    """Whether it has joined the others mid-run, and has not read the weights yet."""
    present: tuple[bool, ...] = ()
    """Whether each parameter had a gradient in the last push; empty if not recorded."""
    sent: tuple[Exchange, Encoded] | None = None
    """The exchange in flight, until the server answers it."""
    answer: Pulled | None = None
    """The server's answer to that exchange."""


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
        self._start = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}
        self._loss = loss
        self._bench = self._new_bench()
        self._param_groups: tuple[dict[str, Any], ...] = ()
        self._is_formed = False
        self._served: ServedParameters
        self._method: Method
        self._wire_format: WireFormat
        self._split: Partition
        self._overlap = False
        self._out, self._in = Memory(), Memory()
        self._groups: dict[int, _Group] = {}
        self._step_time = 0.0
        self._batch_size = 0  # samples of one member, as far as known: its first batch is whole

    def _new_bench(self) -> Workbench:
        return Workbench(self._model, self._parameters, self._loss, Samples([0], 0), False, 1)

    def take(self, event: Event) -> None:
        if event.optimizer:
            raise ConfigurationError("events: the run has several optimizers, and only runs of one can be replayed")
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
        elif event.kind == "restructure":
            self._finish_exchange(group)
            self._restructure(group, event)
            return
        else:
            self._take_of_group(group, event)
        self._check_clock(event, self._served)

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
                self._finish_exchange(group)
                self._deliver(side.idle(event.group))
            case "resume":
                side.resume(event.group)
            case "leave":
                self._deliver(side.evict(event.group))
            case "retire":
                del self._groups[event.group]
                self._deliver(side.evict(event.group))

    @staticmethod
    def _check_clock(event: Event, served: ServedParameters) -> None:
        if served.master.clock != event.clock:
            raise ProtocolError(f"the record says {event}, but after it the clock is {served.master.clock}")

    def result(self) -> Replayed:
        if not self._is_formed:
            raise ConfigurationError("events: the record is empty")
        weights = dict(zip(self._parameters, copies(self._served.master.weights()), strict=True))
        groups = {number: copies(group.replica.weights()) for number, group in self._groups.items()}
        return Replayed(weights, self._served.master.clock, groups)

    def _form(self, event: Event) -> None:
        topology, method = Topology(event.groups), REGISTRY.from_wire(event.method)
        if self._is_formed and event.kind == "seed":
            raise ConfigurationError(
                "events: the record holds more than one run, or the run went through one group, whose steps no server"
                " saw"
            )
        if self._is_formed and method.steps_at == "worker":
            raise ConfigurationError(
                f"events: other groups were formed in mid-run, and what these begin with is not on record with"
                f" {type(method).__name__}"
            )
        if self._is_formed and self._wire_format.pushes.is_stateful:
            raise ConfigurationError(
                "events: other groups were formed in mid-run, and what the groups before had not pushed yet in their"
                f" wire format {name_of(self._wire_format)} is not on record"
            )
        self._method = method
        wire_format = from_wire(event.wire_format) if event.wire_format else RAW
        self._split = self._divided(event.servers)
        self._wire_format, self._overlap = partitioned_format(wire_format, method, self._split), event.overlap
        if not self._is_formed:
            self._is_formed = True
            names: dict[Tensor, str] = {parameter: name for name, parameter in self._parameters.items()}
            description = describe(self._optimizer, names) if method.steps_at == "server" else None
            weights = {name: self._start[name] for name in self._parameters}
            resolve, servers = resolve_also(self._optimizer), event.servers
            self._served = ServedParameters(
                description, weights, event.clock, method, topology.alive, resolve, servers=servers
            )
        else:
            self._served.change_method(method, topology.alive)
        self._served.answer_in(self._wire_format.answers)
        self._groups = {
            number: self._make_group(number, topology.members(number), topology.alive) for number in topology.alive
        }

    def _divided(self, servers: int) -> Partition:
        layout = Layout.of({name: parameter.detach() for name, parameter in self._parameters.items()})
        at_servers = self._optimizer if self._method.steps_at == "server" else None
        return Partition.of(layout, servers, is_elementwise(self._method, at_servers))

    def _join(self, event: Event) -> None:
        (ranks,) = event.groups
        self._served.method_side.join(event.group)
        self._groups[event.group] = self._make_group(event.group, ranks, (*self._groups, event.group))
        self._groups[event.group].has_joined = True

    def _make_group(self, number: int, ranks: tuple[int, ...], peers: tuple[int, ...]) -> _Group:
        size = self._served.structures.of(number).size  # a group that joins gets later what was added
        held = dict(islice(self._parameters.items(), size))
        replica = own_replica(self._make, self._model, held, self._served.master.weights()[:size], number)
        replica.clock, replica.peers = self._served.master.clock, peers
        replica.servers = len(self._split.shares)
        core = GroupCore(self._method, self._wire_format, overlap=self._overlap)
        core.attach(replica)
        group = _Group(ranks, replica, core)
        self._arrange(group)
        return group

    # --- Changes of parameters ---------------------------------------------------------------------------------------

    def _restructure(self, group: _Group, event: Event) -> None:
        served = self._served
        for name in event.parameters:
            self._add(name)
        weights = {name: self._start[name] for name in event.parameters}
        served.restructure(event.group, {"groups": event.param_groups, "weights": weights, "state": {}})
        for name in event.parameters:
            group.replica.ordered.append(nn.Parameter(served.master.parameters[name].detach().clone()))
            group.others.pop(name, None)
        self._param_groups = event.param_groups
        self._arrange(group)

    def _add(self, name: str) -> None:
        if name in self._parameters:
            return
        if name not in self._start:
            raise ConfigurationError(
                f"model: the run came to train {name}, which this model does not have; pass one with all parameters"
            )
        parameter = self._model.get_parameter(name)
        parameter.requires_grad_(True)
        self._parameters[name] = parameter
        self._bench = self._new_bench()

    def _arrange(self, group: _Group) -> None:
        """Set the recorded parameter groups of the group's own optimizer; existing ones keep their settings."""
        own, groups = group.replica.ordered, group.replica.optimizer.param_groups
        held = [each for each in groups if holds(each, set(own))]
        for number, described in enumerate(self._param_groups):
            parameters = [own[place] for place in described["params"] if place < len(own)]
            if number < len(held):
                held[number]["params"] = parameters
            else:
                group.replica.optimizer.add_param_group({**described, "params": parameters})
        for each in held[len(self._param_groups) :] if self._param_groups else ():
            groups.remove(each)
        detach_state(group.replica.optimizer, {})

    def _mask(self, group: _Group, event: Event) -> None:
        present = event.present
        if event.elsewhere:
            each = zip(self._split.places, (event.present, *event.elsewhere), strict=True)
            absent = {place for places, flags in each for place, there in zip(places, flags, strict=False) if not there}
            present = tuple(place not in absent for place in range(len(self._parameters)))
        group.present = present
        for name, own, there in zip(self._parameters, group.replica.ordered, present, strict=False):
            if there:
                own.requires_grad_(True)
            if there and not self._parameters[name].requires_grad:
                self._parameters[name].requires_grad_(True)
                self._bench = self._new_bench()

    def _step(self, group: _Group, epoch: int, span: tuple[int, int], hyperparameters: Hyperparameters) -> None:
        if not isinstance(need := group.core.waits_for(0), NextGradient):
            raise ProtocolError(f"the record has {group.ranks} train {span}, but they want {need}")
        members = len(group.ranks)
        self._batch_size = max(self._batch_size, (span[1] - span[0]) // members)
        in_pairs = self._batch_size > 1
        parts = [positions(Batch(*span, 0), member, members, in_pairs=in_pairs) for member in range(members)]
        weights: dict[str, Tensor] = {**self._start, **group.others}
        weights |= dict(zip(self._parameters, group.replica.weights(), strict=False))
        ordered = [weights[name] for name in self._parameters]
        result = self._bench.compute(ordered, [self._batches(epoch, part) for part in parts])
        gradient = dict(zip(self._parameters, result.gradient, strict=True))
        used = hyperparameters or hyperparameters_of(group.replica.optimizer, set(group.replica.ordered))
        own = [gradient[name] for name, _ in zip(self._parameters, group.replica.ordered, strict=False)]
        if len(group.present) == len(own):
            own = [tensor if there else None for tensor, there in zip(own, group.present, strict=True)]
        group.core.steps_take(0, self._step_time)
        self._continue(group, group.core.gradient(0, Gradient(own, used)))

    def _answer(self, group: _Group, pulled: Pulled) -> None:
        """Continue the group with an answer; that of an exchange in flight waits for the group's `Receive`."""
        if group.sent is not None:
            group.sent, group.answer = None, pulled
            if isinstance(group.core.waits_for(0), Receive):
                self._continue(group, Receive())
            return
        group.core.steps_take(0, self._step_time)
        self._continue(group, group.core.answer(0, pulled))

    def _continue(self, group: _Group, action: Action) -> None:
        while True:
            match action:
                case ServerRequest(need=Exchange() as need, waits=False):
                    known = Partition.whole(self._served.layout_of(group.replica.group))
                    [encoded] = group.core.encode(0, need, known, [Memory()])
                    group.sent = need, encoded
                    action = group.core.answer(0, None)
                case Receive() if group.answer is not None:
                    group.core.steps_take(0, self._step_time)
                    pulled, group.answer = group.answer, None
                    action = group.core.answer(0, pulled)
                case NextGradient() | ServerRequest() | Receive():
                    return
                case _:
                    raise ConfigurationError(f"{type(self._method).__name__} goes from group to group, past any record")

    def _finish_exchange(self, group: _Group) -> None:
        """Receive the exchange in flight, as groups do before they wait or get other parameters."""
        if group.answer is not None:
            pulled, group.answer = group.answer, None
            group.core.apply_answer(0, pulled)

    def _push(self, group: _Group, event: Event) -> None:
        need, served = group.core.waits_for(0), self._served
        known = served.layout_of(event.group)
        if group.sent is not None:
            need, encoded = group.sent
        elif isinstance(need, Exchange):
            [encoded] = group.core.encode(0, need, Partition.whole(known), [self._out])
        if not isinstance(need, Exchange) or need.read_at != event.read_at:
            raise ProtocolError(f"the record says {event}, but the group wants {type(need).__name__}: {need}")
        layout = known.fragment(need.fragment, self._method.fragments).subset(encoded.present)
        views = iter(layout.views(decode(self._wire_format.pushes, encoded.payload, layout, self._in)))
        tensors = [next(views) if there else None for there in encoded.present]
        message = _message(event, tensors, need.pull, need.fragment)
        replies = served.take(event.group, message, tensors)
        if (replies is None) != event.refused:
            raise ProtocolError(f"the record says {event}, but the push was {'taken' if event.refused else 'refused'}")
        if replies is None:
            if need.pull:
                served.method_side.fetched(event.group)
            self._answer(group, self._pulled(need, Reply(event.group, 0), refused=True))
        else:
            self._deliver(replies)

    def _deliver(self, replies: Sequence[Any]) -> None:
        for reply in replies:
            if (group := self._groups.get(reply.group)) is None:
                continue
            need = group.sent[0] if group.sent is not None else group.core.waits_for(0)
            if not isinstance(need, Exchange):
                raise ProtocolError(f"group {reply.group} gets an answer, but wants {type(need).__name__}")
            self._answer(group, self._pulled(need, reply))

    def _pulled(self, need: Exchange, reply: Reply, refused: bool = False) -> Pulled:
        served = self._served
        known = served.layout_of(reply.group).fragment(need.fragment, self._method.fragments)
        tensors: list[Tensor] = []
        if need.pull:
            payload = served.as_bytes(served.payload_of(reply, need.fragment)[: known.nbytes], known)
            tensors = known.views(served.arrived(payload, known).clone())
        return Pulled(tensors, served.master.clock, reply.note, refused, need.fragment)

    def _fetch(self, group: _Group) -> None:
        side = self._served.method_side
        side.fetched(group.replica.group)
        known = copies(self._served.master.weights()[: len(group.replica.ordered)])
        pulled = Pulled(known, self._served.master.clock)
        if isinstance(group.core.waits_for(0), Fetch):
            self._answer(group, pulled)
            return
        if self._method.steps_at == "server" or group.has_joined:
            group.replica.load(pulled)
            group.has_joined = False
        beyond = list(self._served.master.parameters.items())[len(pulled.tensors) :]
        group.others.update((name, parameter.detach().clone()) for name, parameter in beyond)
