"""A run in virtual time with real gradients, by the server's and the methods' own objects."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.errors import ConfigurationError, OmniError
from lightning_omni.methods import HardSync, Method, checked, method_named
from lightning_omni.methods.contract import (
    Answer,
    Exchange,
    Gradient,
    NextGradient,
    Publish,
    ReadInbox,
    ReadPeer,
    SendPeer,
)
from lightning_omni.methods.master import hyperparameters_of
from lightning_omni.methods.replica import Replica, copies
from lightning_omni.methods.totals import Total
from lightning_omni.protocol import EpochPlan, Out
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.group import Action, Ask, Heard, Said
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.record import Recorder
from lightning_omni.protocol.wire_format import RAW, WireFormat
from lightning_omni.simulator.agenda import Agenda, Priority, Queue
from lightning_omni.simulator.cluster import Cluster, Failure, Link
from lightning_omni.simulator.desk import HEAD, Desk, part_of
from lightning_omni.simulator.group import Clockwork, Group
from lightning_omni.simulator.head import SimulatedHead, without
from lightning_omni.simulator.progress import Enough, Progress, progress_of
from lightning_omni.simulator.replicas import OwnReplica, SharingReplica, Snapshots
from lightning_omni.simulator.workbench import Loss, Samples, Workbench
from lightning_omni.topology import GroupId, Topology
from lightning_omni.trace import Trace, reaches

MakeOptimizer = Callable[[Any], Optimizer]
Evaluate = Callable[[nn.Module], Mapping[str, float]]

FORWARD = 1 / 3
"""Part of a batch's time that is its forward pass: the backward pass multiplies twice as many matrices."""
MOST_REFUSED = 10
"""Pushes of one group that may be refused in a row before the run counts as diverged."""


def simulate(
    method: str | Method,
    topology: int | Topology,
    cluster: Cluster,
    model: nn.Module,
    data: Any,
    *,
    optimizer: MakeOptimizer,
    loss: Loss,
    batch_size: int = 32,
    rebalance: Literal["off", "auto"] = "off",
    merged: str | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    evaluate_every_seconds: float | None = None,
    max_updates: int | None = None,
    max_epochs: int | None = None,
    max_seconds: float | None = None,
    target: tuple[str, float] | None = None,
    seed: int = 0,
    batched: bool | Literal["auto"] = "auto",
    members_apart: bool = False,
    record: Recorder | None = None,
    wire_format: WireFormat = RAW,
    progress: bool | Progress = False,
) -> Trace:
    """Trains a model on a cluster that does not exist: virtual time, real gradients.

    Time passes as devices, links and the server's queues have it; nothing waits for anything in real time. Server,
    leases, epochs and both halves of the method are the objects of a real run. A push travels over the group's link,
    queues at the server's network card, then for the server itself; when it is served it counts as arrived, and the
    order of arrivals decides staleness. The answer goes back the same way. Control messages and evaluations take no
    time. One group trains synchronously whatever the method, and exchanges take it no time, as in a real run.

    Args:
        method: a name, or a method.
        topology: which rank is in which group; or a number of groups, split evenly.
        cluster: the devices and links.
        model: a copy of it is trained; it stays as it is.
        data: a map-style dataset. The tensors of a ``TensorDataset`` are indexed directly, anything else is collated.
        optimizer: makes a torch optimizer from parameters; it runs where the method has it.
        loss: the mean loss of a batch, from the model and the batch (a tuple of tensors for a ``TensorDataset``).
        batch_size: samples in one device's batch; a group of k devices trains on k times as many.
        rebalance: ``"auto"`` gives the members of a group parts of its batch in proportion to their mean speeds, which
            are known from the start; a slowdown is followed at once.
        merged: name of a submodule that stays at the server, as by ``OmniStrategy(merged=...)``. A group's batch comes
            there after a third of the group's time (its forward pass); the turn lasts as long as the head takes, and
            the way of its outputs and their gradients.
        evaluate: figures of a model in evaluation mode, by name. The model is the one that the method would validate.
        evaluate_every: updates between two evaluations; there is always one at the end.
        evaluate_every_seconds: seconds of virtual time between two evaluations.
        max_updates: updates after which the run ends. An update is a tick of the server's clock or, where groups
            talk to one another only (gossip), one local step of one group.
        max_epochs: passes over the data after which the run ends.
        max_seconds: virtual time at which the run ends, in seconds.
        target: name and value of a figure; the run ends with the evaluation that reaches it (from above if the name
            contains "loss" or "error").
        seed: of data order, jitter and whatever chance there is in the model; same seed, same trace, to the bit.
        batched: compute gradients of several groups at a time with ``torch.func.vmap``; ``"auto"`` where that is
            faster and cannot change the outcome beyond rounding (no buffers, no dropout, few weights and samples).
        members_apart: compute each member's gradient by itself and average them as DDP does; for bit-equality with a
            real run of groups of several ranks.
        record: told of every event at the server, as by `lightning_omni.protocol.ServerCore`.
        wire_format: how pushes are put into bytes; a link takes as long as these bytes need.
        progress: True shows a progress bar; or a function, called with the fraction done and a text. With either,
            Ctrl-C returns the trace so far (``ended == "interrupted"``) instead of raising KeyboardInterrupt; so does
            a function that raises `lightning_omni.simulator.progress.Enough` (``ended == "stopped"``).

    Returns:
        The trace. Its ``ended`` says why the run ended, ``weights`` are those of the model last evaluated.

    Raises:
        ConfigurationError: an argument is wrong.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
        >>> trace = simulate(
        ...     "async_sgd", 4, Cluster.even(4), nn.Linear(2, 1), data,
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        ...     batch_size=4, max_updates=20,
        ... )
        >>> trace.updates, trace.ended
        (20, 'max_updates')
    """
    limits = _Limits(max_updates, max_epochs, max_seconds, target, evaluate, evaluate_every, evaluate_every_seconds)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigurationError(f"batch_size={batch_size!r}: pass the samples in one device's batch, 1 or more")
    if isinstance(topology, int):
        topology = Topology.even(len(cluster.devices), topology)
    if topology.ranks != tuple(range(len(cluster.devices))):
        raise ConfigurationError(
            f"topology: it has {len(topology.ranks)} ranks, but the cluster {len(cluster.devices)} devices;"
            " every device belongs to one group"
        )
    if rebalance not in ("off", "auto") or (rebalance == "auto" and members_apart):
        raise ConfigurationError(
            f'rebalance={rebalance!r}: pass "off" or "auto", and "off" with members_apart=True, which takes the mean of'
            " equal parts"
        )
    if merged is not None and members_apart:
        raise ConfigurationError(
            f"merged={merged!r} and members_apart=True: a group's rows go through the head together; drop one of them"
        )
    chosen = method_named(method) if isinstance(method, str) else checked(method)
    chosen.check(len(topology.alive))
    if topology.is_synchronous:
        chosen = HardSync()  # whatever the method, one group is plain synchronous training
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        run = Simulation(
            chosen,
            topology,
            cluster,
            model,
            data,
            optimizer,
            loss,
            batch_size,
            limits,
            seed,
            batched,
            members_apart,
            record,
            rebalance == "auto",
            None if topology.is_synchronous else merged,
            RAW if topology.is_synchronous else wire_format,
        )
        with progress_of(progress) as shown:
            return run.run(shown, returns_if_interrupted=progress is not False)


class _Limits:
    """When the run ends, and when it is evaluated."""

    def __init__(
        self,
        updates: int | None,
        epochs: int | None,
        seconds: float | None,
        target: tuple[str, float] | None,
        evaluate: Evaluate | None,
        every: int | None,
        every_seconds: float | None,
    ) -> None:
        if updates is None and epochs is None and seconds is None:
            raise ConfigurationError("when is the run to end? pass max_updates=, max_epochs= or max_seconds=")
        limits = {"max_updates": updates, "max_epochs": epochs, "max_seconds": seconds}
        periods = {"evaluate_every": every, "evaluate_every_seconds": every_seconds}
        for name, value in {**limits, **periods}.items():
            if value is not None and not value > 0:
                raise ConfigurationError(f"{name}={value}: pass a number above 0, or None")
        if evaluate is None and (every is not None or every_seconds is not None or target is not None):
            raise ConfigurationError(
                "evaluate=None: pass a function that evaluates a model, or neither period nor target"
            )
        if target is not None and every is None and every_seconds is None:
            raise ConfigurationError(
                "target= is looked for at evaluations; pass evaluate_every= or evaluate_every_seconds="
            )
        self.updates = math.inf if updates is None else updates
        self.epochs = math.inf if epochs is None else epochs
        self.seconds = math.inf if seconds is None else seconds
        self.target, self.evaluate = target, evaluate
        self.every = math.inf if every is None else every
        self.every_seconds = every_seconds


class Simulation:
    """One simulated run; see `simulate` for the arguments."""

    def __init__(
        self,
        method: Method,
        topology: Topology,
        cluster: Cluster,
        model: nn.Module,
        data: Any,
        optimizer: MakeOptimizer,
        loss: Loss,
        batch_size: int,
        limits: _Limits,
        seed: int,
        batched: bool | Literal["auto"],
        members_apart: bool,
        record: Recorder | None,
        is_balanced: bool,
        merged: str | None,
        wire_format: WireFormat = RAW,
    ) -> None:
        self._wire_format = wire_format
        self._is_balanced = is_balanced
        self.method, self.topology, self.cluster, self.limits = method, topology, cluster, limits
        self.seed, self.batch_size, self.members_apart = seed, batch_size, members_apart
        self.agenda, self.now, self.ended = Agenda(), 0.0, ""
        self._model = copy.deepcopy(model).train()
        self._evaluated = copy.deepcopy(model).eval()
        master = optimizer(list(self._model.parameters()))
        everything = named_parameters(self._model, master)
        self._head = SimulatedHead(merged, self._model, master) if merged is not None else None
        self._parameters = without(everything, self._head)
        samples = Samples(data, seed)
        members = len(topology.ranks) // len(topology.alive)
        self._bench = Workbench(
            self._model,
            self._parameters,
            loss,
            samples,
            False if members_apart or self._head is not None else batched,
            batch_size * members,
        )
        self._samples = samples
        layout = Layout.of({name: parameter.detach() for name, parameter in self._parameters.items()})
        self._desk = Desk(layout, len(topology.ranks), seed, master, record)
        self._snapshots = Snapshots(layout)
        self._steps_at_server = method.steps_at == "server"
        parts = [part_of(self._parameters, master if self._steps_at_server else None)]
        self._bytes_in = self._bytes_out = 0
        if self._head is not None:
            parts.append(part_of(self._head.parameters, master, self._head.part(seed)))
            first = samples.batch(samples.at(0, range(1)))
            self._bytes_in, self._bytes_out = self._head.sizes(self._model, loss, first)
        self._desk.form(topology, method, parts, wire_format)
        if self._head is not None:
            self._head.install(self._desk)
        self._inwards, self._outwards, self._service, self._turns = Queue(), Queue(), Queue(), Queue()
        instant = topology.is_synchronous
        self._link = Link() if instant else cluster.link
        self._card = Link() if instant else cluster.server
        self._service_seconds = 0.0 if instant else cluster.update_seconds
        self._groups = {number: self._new_group(number, master, optimizer) for number in topology.alive}
        self._tell_peers()
        self._over: list[Group] = []  # who is through with the epoch and waits for the others
        self._steps = 0
        self._samples_trained = 0
        self._next_evaluation = limits.every
        self._rows, self._watch = Rows(), Stopwatch()
        self._evaluations = Evaluations()

    # --- The run -----------------------------------------------------------------------------------------------------

    def run(self, progress: Progress, returns_if_interrupted: bool) -> Trace:
        """Runs to the end."""
        for event in self.cluster.events:
            if isinstance(event, Failure):
                self.agenda.add(event.time, partial(self._fail, event.rank), Priority.FAILURE)
        if self.limits.every_seconds:
            self.agenda.add(self.limits.every_seconds, partial(self._evaluate_at, 1))
        try:
            for group in self._groups.values():
                self._desk.open_epoch(group.leader, self._plan(0))
            for group in list(self._groups.values()):
                self._next_gradient(group)
            self._go_through(progress)
        except KeyboardInterrupt:
            if not returns_if_interrupted:
                raise
            self.ended = "interrupted"
        except Enough:
            self.ended = "stopped"
        if self.limits.evaluate is not None and self._evaluations.last_update != self.updates:
            self._evaluate()
        return self._trace()

    def _go_through(self, progress: Progress) -> None:
        shown = 0.0
        while not self.ended:
            if all(group.is_done for group in self._groups.values()):
                self.ended = "max_epochs"
            elif not len(self.agenda):
                raise OmniError("every simulated group waits for another; the method never answers them")
            elif self.agenda.next_time > self.limits.seconds:
                self.now, self.ended = self.limits.seconds, "max_seconds"
            else:
                self.now = self._desk.now = self.agenda.next_time
                self.agenda.pop()()
                if (done := self._fraction) >= shown + 0.01:
                    shown = done
                    progress(done, f"{self.updates} updates, {self.now:.4g} s")

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self._steps if self.method.talks_to_peers else self._desk.core.clock

    @property
    def _fraction(self) -> float:
        limits = self.limits
        epochs = self._samples_trained / len(self._samples)
        return min(1.0, max(self.updates / limits.updates, self.now / limits.seconds, epochs / limits.epochs))

    def _plan(self, epoch: int) -> EpochPlan:
        total = len(self._samples)
        return EpochPlan(epoch=epoch, total=total, batch_size=self.batch_size, budget=total)

    def _new_group(self, number: int, master: Optimizer, make: MakeOptimizer) -> Group:
        ranks = self.topology.members(number)
        replica = self._sharing_replica(number, master) if self._steps_at_server else self._own_replica(number, make)
        clocks = [Clockwork(self.cluster, rank, self.seed) for rank in ranks]
        group = Group(number, ranks, replica, self.method, clocks, self._is_balanced, self._wire_format)
        group.core.form(GroupId(str(number), self._desk.incarnation))
        return group

    def _sharing_replica(self, number: int, master: Optimizer) -> Replica:
        start = self._snapshots.at(0, self._desk.shard.buffer)
        return SharingReplica(list(self._parameters.values()), master, number, start)

    def _own_replica(self, number: int, make: MakeOptimizer) -> Replica:
        parameters = own_parameters(self._model, self._parameters, self._desk.shard.master.weights())
        return OwnReplica(list(parameters.values()), own_optimizer(make, self._model, parameters), number)

    def _tell_peers(self) -> None:
        peers = tuple(self._groups)
        for group in self._groups.values():
            group.replica.peers = peers

    # --- A group computes --------------------------------------------------------------------------------------------

    def _next_gradient(self, group: Group) -> None:
        """The group begins its next batch, or asks what is next if it has none."""
        self._watch.end(group.number, self.now)
        data = group.data
        if data.drawn == data.trained:
            data.drew(self._desk.draw(group.leader, data.draw(data.drawn)).batches)
        if data.drawn == data.trained:
            self._take(self._desk.wait(group.leader, data.question()))
            return
        data.begin_batch()
        batch = group.batch
        assert batch is not None
        nbytes, members = self._desk.shard.layout.nbytes, len(group.ranks)
        work = group.work(batch, self.now)
        seconds = max(own for _, _, own in work) + self.cluster.group_link.ring_seconds(nbytes, members)
        group.core.step_took(0, seconds)
        self._watch.begin(group.number, self.now, work)
        if self._head is not None:
            self.agenda.add(self.now + seconds * FORWARD, partial(self._to_head, group, seconds))
            return
        due = self.now + seconds
        parts = group.positions(batch, self.now) if self.members_apart else [range(batch.start, batch.stop)]
        indices = [self._samples.at(group.epoch, part) for part in parts]
        self._bench.begin(group.number, due, group.replica.weights(), indices)
        self.agenda.add(due, partial(self._computed, group))

    def _computed(self, group: Group) -> None:
        if not group.alive:
            return
        result = self._bench.result(group.number) if self._head is None else group.result
        assert group.batch is not None
        assert result is not None
        self._watch.computed(group.number, self.now)
        size = group.batch.stop - group.batch.start
        group.count(size, result.loss)
        self._samples_trained += size
        self._steps += 1
        hyperparameters = hyperparameters_of(group.replica.optimizer, set(group.replica.ordered))
        if self.method.talks_to_peers:
            self._rows.add(self.now, group, self._steps, self._steps, 0)
            group.start_afresh()
        self._do(group, group.core.gradient(0, Gradient(result.gradient, hyperparameters)))
        if self.method.talks_to_peers:
            self._look_at_limits()

    def _to_head(self, group: Group, seconds: float) -> None:
        """A group's forward pass has come to the merged head."""
        assert group.batch is not None
        nbytes = self._bytes_in * (group.batch.stop - group.batch.start)
        arrival = self.now + self._link.seconds(nbytes) + self._card.latency
        self.agenda.add(arrival, partial(self._queue_at_head, group, seconds, nbytes))

    def _queue_at_head(self, group: Group, seconds: float, nbytes: int) -> None:
        assert group.batch is not None
        size = group.batch.stop - group.batch.start
        received = self._inwards.serve(self.now, nbytes / self._card.bandwidth)
        # The outputs go out and their gradients come in while nobody else may have the head.
        way = 2 * (self._link.seconds(self._bytes_out * size) + self._card.seconds(self._bytes_out * size))
        over = self._turns.serve(received, size * self.cluster.head_seconds_per_sample + way)
        self.agenda.add(over, partial(self._turn, group, seconds, nbytes))

    def _turn(self, group: Group, seconds: float, nbytes: int) -> None:
        """A turn ends. Nobody has had the head since it began, so all of it may be computed now."""
        if not group.alive:
            return
        assert self._head is not None
        assert group.batch is not None
        self._head.turn_of(group.leader, *group.data.place)
        indices = self._samples.at(group.epoch, range(group.batch.start, group.batch.stop))
        group.result = self._bench.compute(group.replica.weights(), [self._samples.batch(indices)])
        sent = self._outwards.serve(self.now, nbytes / self._card.bandwidth)
        back = sent + self._link.seconds(nbytes) + self._card.latency
        self.agenda.add(back + seconds * (1 - FORWARD), partial(self._computed, group))

    def _do(self, group: Group, action: Action) -> None:
        """What takes no time is done, until the group wants what does."""
        while True:
            answer: Answer = None
            match action:
                case NextGradient():
                    return self._next_gradient(group)
                case Ask(need=Exchange()):
                    return self._send(group, action)
                case Ask():
                    return self._fetch(group, action)
                case ReadPeer():
                    return self._ask_peer(group, action.group)
                case Publish():
                    group.published = copies(action.tensors)
                case SendPeer():
                    self._send_peer(action)
                case ReadInbox():
                    answer = group.empty_inbox()
            action = group.core.answer(0, answer)

    # --- To the server and back --------------------------------------------------------------------------------------

    def _send(self, group: Group, ask: Ask) -> None:
        nbytes, said = self._desk.prepare(group.core, ask)
        arrival = self.now + self._link.seconds(nbytes) + self._card.latency
        self.agenda.add(arrival, partial(self._queue, group, ask, nbytes, said))

    def _queue(self, group: Group, ask: Ask, nbytes: int, said: Said | None) -> None:
        received = self._inwards.serve(self.now, nbytes / self._card.bandwidth)
        served = self._service.serve(received, self._service_seconds)
        self.agenda.add(served, partial(self._arrive, group, ask, said))

    def _arrive(self, group: Group, ask: Ask, said: Said | None) -> None:
        if not group.alive:
            return
        assert isinstance(ask.need, Exchange)
        read_at = ask.need.read_at
        clock = self._desk.shard.master.clock
        staleness = self._desk.staleness(group.number, read_at)
        refused = self._desk.shard.refused
        self._take(self._desk.ask(group.leader, group.core, ask, said))
        if self._desk.shard.refused == refused:
            self._rows.add(self.now, group, read_at, clock + 1, staleness)
        elif self._desk.shard.refused_in_row[group.number] >= MOST_REFUSED:
            self.ended = f"diverged: {MOST_REFUSED} pushes of group {group.number} in a row were not finite"
        group.start_afresh()
        self._look_at_limits()

    def _fetch(self, group: Group, ask: Ask) -> None:
        self.agenda.add(self.now + self._link.latency + self._card.latency, partial(self._fetch_arrives, group, ask))

    def _fetch_arrives(self, group: Group, ask: Ask) -> None:
        if group.alive:
            self._take(self._desk.ask(group.leader, group.core, ask))

    def _take(self, out: list[Out]) -> None:
        """Delivers what the server sends."""
        for item in out:
            if isinstance(item.message, m.Weights):
                group = self._groups[self.topology.group_of(self._desk.rank_of(item))]
                sent = self._outwards.serve(self.now, item.message.nbytes / self._card.bandwidth)
                delay = self._link.seconds(item.message.nbytes) + self._card.latency
                # Copied now: the server's answer is only valid until the next message.
                self.agenda.add(sent + delay, partial(self._pulled, group, item.message, self._copy(item)))
            elif isinstance(item.message, m.Verdict):
                group = self._groups[self.topology.group_of(self._desk.rank_of(item))]
                self.agenda.add(self.now, partial(self._decided, group, item.message.next))

    def _copy(self, out: Out) -> list[Tensor]:
        message, shard = out.message, self._desk.shard
        assert isinstance(message, m.Weights)
        if not out.payload:
            return []
        if out.payload[0] is shard.buffer:
            return self._snapshots.at(message.clock, shard.buffer)
        assert isinstance(out.payload[0], Tensor)
        return shard.layout.views(out.payload[0].clone())

    def _pulled(self, group: Group, message: m.Weights, tensors: list[Tensor]) -> None:
        if not group.alive:
            return
        pulled = group.core.hear(Heard.of(message), tensors, message.clock, message.note)
        if isinstance(group.core.waits_for(0), NextGradient):  # fetched at the beginning of an epoch
            group.replica.load(pulled)
            self._next_gradient(group)
        else:
            self._do(group, group.core.answer(0, pulled))

    # --- From group to group -----------------------------------------------------------------------------------------

    def _ask_peer(self, group: Group, peer: int) -> None:
        self.agenda.add(self.now + self.cluster.link.latency, partial(self._peer_answers, group, peer))

    def _peer_answers(self, group: Group, peer: int) -> None:
        theirs = self._groups[peer].published if peer in self._groups else None
        nbytes = self._desk.shard.layout.nbytes if theirs is not None else 0
        self.agenda.add(self.now + self.cluster.link.seconds(nbytes), partial(self._peer_read, group, theirs))

    def _peer_read(self, group: Group, theirs: list[Tensor] | None) -> None:
        if group.alive:
            self._do(group, group.core.answer(0, theirs))

    def _send_peer(self, need: SendPeer) -> None:
        arrival = self.now + self.cluster.link.seconds(self._desk.shard.layout.nbytes)
        self.agenda.add(arrival, partial(self._gift, need.group, copies(need.tensors)))

    def _gift(self, peer: int, tensors: list[Tensor]) -> None:
        if peer in self._groups:
            self._groups[peer].take_in(tensors)

    # --- Epochs and failures -----------------------------------------------------------------------------------------

    def _decided(self, group: Group, verdict: str) -> None:
        if not group.alive:
            return
        if verdict == "more":
            self._next_gradient(group)
            return
        if group.epoch + 1 >= self.limits.epochs:
            group.is_done = True
            return
        self._over.append(group)
        self._begin_epoch_together()

    def _begin_epoch_together(self) -> None:
        """All groups meet between two epochs, as in a real run: the last push of one may not be answered yet."""
        if len(self._over) < len(self._groups):
            return
        met, self._over = self._over, []
        for group in met:
            group.begin_epoch(group.epoch + 1)
            self._desk.open_epoch(group.leader, self._plan(group.epoch))
            if self._steps_at_server:
                self._fetch(group, group.core.fetch(0))  # while it waited for the others, the master weights moved on
            else:
                self._next_gradient(group)

    def _fail(self, rank: int) -> None:
        group = self._groups.get(self.topology.group_of(rank))
        if group is None:
            return
        out = self._desk.lose(rank, f"rank {rank} failed at {self.now:g} s")
        if self._desk.core.over:
            self.ended = f"lost: {self._desk.core.over}"
            return
        group.alive = False
        del self._groups[group.number]
        self._bench.drop(group.number)
        self._take(out)
        if group in self._over:
            self._over.remove(group)
        if self._over:
            self._begin_epoch_together()

    # --- What is measured --------------------------------------------------------------------------------------------

    def _look_at_limits(self) -> None:
        if self.updates >= self._next_evaluation:
            self._evaluate()
            while self._next_evaluation <= self.updates:
                self._next_evaluation += self.limits.every
        if self.updates >= self.limits.updates:
            self.ended = self.ended or "max_updates"

    def _evaluate_at(self, number: int) -> None:
        self._evaluate()
        if len(self.agenda) and self.limits.every_seconds:
            self.agenda.add((number + 1) * self.limits.every_seconds, partial(self._evaluate_at, number + 1))

    def _evaluate(self) -> None:
        assert self.limits.evaluate is not None
        parameters = dict(self._evaluated.named_parameters())
        for name, weight in self._weights().items():
            parameters[name].copy_(weight)
        for mine, theirs in zip(self._evaluated.buffers(), self._model.buffers(), strict=True):
            mine.copy_(theirs)
        figures = {name: float(value) for name, value in self.limits.evaluate(self._evaluated).items()}
        self._evaluations.add(self.now, self.updates, self._samples_trained, figures)
        if self.limits.target is not None:
            name, value = self.limits.target
            if name not in figures:
                raise ConfigurationError(
                    f"target={name!r}: evaluate returns {', '.join(map(repr, figures)) or 'nothing'}"
                )
            if reaches(name, figures[name], value):
                self.ended = self.ended or "target"

    def _weights(self) -> dict[str, Tensor]:
        """The weights that the method would evaluate."""
        weights = self._desk.shard.master.weights()
        if self.method.evaluated == "mean" and self._groups:
            total = Total()
            for group in self._groups.values():
                total.add(group.replica.weights())
            weights = [mean for mean in total.scaled(1 / total.count) if mean is not None]
        named = dict(zip(self._parameters, weights, strict=True))
        if self._head is not None:
            named |= dict(zip(self._head.parameters, self._desk.core.shards[HEAD].master.weights(), strict=True))
        return named

    def _trace(self) -> Trace:
        meta = {
            "method": m.method_to_wire(self.method),
            "groups": [list(members) for members in self.topology.groups],
            "cluster": self.cluster.summary(),
            "seed": self.seed,
            "batch_size": self.batch_size,
            "samples_per_epoch": len(self._samples),
            "merged": self._head.name if self._head is not None else None,
            "refused": self._desk.shard.refused,
            "most_snapshots": self._snapshots.most,
        }
        return Trace(
            rows=self._rows.arrays(),
            evaluated=self._evaluations.arrays(),
            updates=self.updates,
            seconds=self.now,
            ended=self.ended,
            meta=meta,
            weights={name: weight.detach().clone().numpy() for name, weight in self._weights().items()},
            work=arrays(Trace.WORK, self._watch.work),
            steps=arrays(Trace.STEPS, self._watch.steps),
        )


class Rows:
    """The trace's rows while they come in."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, int, int, int, float, int, int, int]] = []

    def add(self, time: float, group: Group, read: int, write: int, staleness: int) -> None:
        """A push arrived; or, where nobody pushes, a step was made."""
        loss = group.losses / max(1, group.steps)
        self._rows.append((time, group.number, read, write, staleness, loss, group.samples, group.epoch, group.steps))

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """One array for each column."""
        return arrays(Trace.COLUMNS, self._rows)


class Stopwatch:
    """How long each group's steps took, and each member's part of them; a step that the run cuts short is none.

    Attributes:
        work: rows of `Trace.WORK`.
        steps: rows of `Trace.STEPS`.
    """

    def __init__(self) -> None:
        self.work: list[tuple[int, int, float]] = []
        self.steps: list[tuple[int, float, float, float]] = []
        self._open: dict[int, tuple[float, list[tuple[int, int, float]]]] = {}
        self._computed: dict[int, float] = {}

    def begin(self, group: int, now: float, work: list[tuple[int, int, float]]) -> None:
        """A group begins a batch; of each member its rank, its samples and its seconds."""
        self._open[group] = now, work

    def computed(self, group: int, now: float) -> None:
        """The group has its gradient. Whatever comes before its next batch is exchange."""
        self._computed[group] = now

    def end(self, group: int, now: float) -> None:
        """The step is over, if there was one: the group may begin its next batch."""
        if group in self._open:
            began, work = self._open.pop(group)
            self.work.extend(work)
            self.steps.append((group, now, now - began, now - self._computed[group]))


def arrays(columns: Mapping[str, type[Any]], rows: Sequence[tuple[Any, ...]]) -> dict[str, np.ndarray[Any, Any]]:
    """One array for each column of that name and type."""
    values = zip(*rows, strict=True) if rows else ((),) * len(columns)
    return {name: np.array(column, dtype) for (name, dtype), column in zip(columns.items(), values, strict=True)}


class Evaluations:
    """The trace's evaluations while they come in."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, int, dict[str, float]]] = []

    @property
    def last_update(self) -> int:
        """Updates at the last evaluation; -1 if there was none."""
        return self._rows[-1][1] if self._rows else -1

    def add(self, time: float, update: int, samples: int, figures: dict[str, float]) -> None:
        """An evaluation."""
        self._rows.append((time, update, samples, figures))

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """One array for each column; a figure that was missing is NaN."""
        names = list(dict.fromkeys(name for row in self._rows for name in row[3]))
        return {
            "time": np.array([row[0] for row in self._rows], np.float64),
            "update": np.array([row[1] for row in self._rows], np.int64),
            "samples": np.array([row[2] for row in self._rows], np.int64),
            **{name: np.array([row[3].get(name, math.nan) for row in self._rows], np.float64) for name in names},
        }


# --- Parameters and optimizers ---------------------------------------------------------------------------------------


def named_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Parameter]:
    """The parameters of an optimizer by name, in its order.

    Raises:
        ConfigurationError: it holds something that is no parameter of the model.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in ordered):
        raise ConfigurationError("optimizer: it must be made from the parameters that it is called with")
    return {names[id(parameter)]: parameter for parameter in ordered}


def own_parameters(
    model: nn.Module, parameters: Mapping[str, Parameter], weights: list[Tensor]
) -> dict[str, Parameter]:
    """Parameters of a group's own, with these values, by name in the optimizer's order."""
    return {
        name: Parameter(weight.clone(), requires_grad=parameter.requires_grad)
        for (name, parameter), weight in zip(parameters.items(), weights, strict=True)
    }


def own_optimizer(make: MakeOptimizer, model: nn.Module, parameters: Mapping[str, Parameter]) -> Optimizer:
    """The user's optimizer over a group's own parameters, which it gets in the model's order."""
    return make([parameters.get(name, other) for name, other in model.named_parameters()])
