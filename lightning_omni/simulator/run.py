"""A run in virtual time with real gradients, made of the server's and the methods' own objects."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_omni.checks import check_kind
from lightning_omni.combinations import refuse_pairs
from lightning_omni.errors import ConfigurationError, OmniError
from lightning_omni.group.core import GroupCore
from lightning_omni.methods import HardSync, Method, checked, method_named
from lightning_omni.methods.contract import Total
from lightning_omni.methods.model.replica import Replica
from lightning_omni.registry import to_wire
from lightning_omni.server.event_log import Recorder
from lightning_omni.simulator.cluster import Cluster, Failure
from lightning_omni.simulator.engine import Engine, Priority, Timeline
from lightning_omni.simulator.gradients import Gradients, Members, MergedHeadGradients, SimulatedHead
from lightning_omni.simulator.group_process import MOST_REFUSED, EpochBarrier, SimulatedGroup, SimulationContext
from lightning_omni.simulator.monitor import Monitor, arrays, evaluated
from lightning_omni.simulator.network import Exchanges
from lightning_omni.simulator.server import HEAD, SimulatedNetwork, SimulatedServer, part_of
from lightning_omni.simulator.settings import (
    Batches,
    Computation,
    Evaluation,
    Formation,
    Limits,
    Progress,
    StopSimulation,
    progress_bar,
)
from lightning_omni.simulator.workbench import Samples, SharingReplica, Workbench, named_parameters, own_replica
from lightning_omni.simulator.workload import Workload
from lightning_omni.topology import GroupId, Topology
from lightning_omni.trace import Trace
from lightning_omni.wire.compression import Compression
from lightning_omni.wire.formats import WireFormat
from lightning_omni.wire.layout import Layout
from lightning_omni.wire.partition import Partition, is_elementwise

# --- Construction, and the loop over events until the run ends --------------------------------------------------------


class Simulation:
    """A run in virtual time.

    ``record`` receives every event at the server.

    Attributes:
        groups: the living groups by number. A group that returns has a new number.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        formation: Formation,
        batches: Batches,
        limits: Limits,
        evaluation: Evaluation,
        record: Recorder | None = None,
    ) -> None:
        self._cluster, self._formation, self._batches, self._evaluation = cluster, formation, batches, evaluation
        self._evaluate, self._engine = workload.evaluate, Engine()
        self._model = copy.deepcopy(workload.model).train()
        self._evaluated = copy.deepcopy(workload.model).eval()
        self._optimizer = workload.optimizer(list(self._model.parameters()))
        check_kind("optimizer", self._optimizer, Optimizer, "a function that returns a torch optimizer")
        everything = named_parameters(self._model, self._optimizer)
        merged = formation.merged
        self._head = SimulatedHead(merged, self._model, self._optimizer) if merged is not None else None
        inside = self._head.parameters if self._head is not None else {}
        self._parameters = {name: parameter for name, parameter in everything.items() if name not in inside}
        self._samples = Samples(workload.data, batches.seed)
        layout = Layout.of({name: parameter.detach() for name, parameter in self._parameters.items()})
        topology = formation.topology
        self.server = SimulatedServer(self._engine, layout, topology, batches.seed, self._optimizer, record)
        # One group has no server in its path, so exchanges take no time.
        between = Cluster(cluster.devices) if topology.is_synchronous else cluster
        split = Partition.of(layout, between.server_count, is_elementwise(formation.method, self._optimizer))
        self._wire_format = formation.compression.wire_format
        self._costs = Exchanges(self._engine, between, split.fractions)
        self._network = SimulatedNetwork(self._engine, self.server, self._costs)
        self._gradients = self._new_gradients(workload)
        self._form()
        metrics = self._metrics if self._evaluate is not None else None
        clock = None if formation.method.talks_to_peers else lambda: self.server.core.store.clock
        self._monitor = Monitor(self._engine, limits, evaluation, metrics, clock, len(self._samples))
        self._monitor.moves_between_updates = formation.method.evaluated == "mean"
        self._network.delivered = self._monitor.check
        self.groups: dict[int, SimulatedGroup] = {}
        self._homes: dict[int, SimulatedGroup] = {}
        self._barrier = EpochBarrier(self._engine, self.groups)
        self._make = workload.optimizer
        self._add_groups()

    # --- Its parts ---------------------------------------------------------------------------------------------------

    def _new_gradients(self, workload: Workload) -> Gradients:
        batches, topology, head = self._batches, self._formation.topology, self._head
        computation = batches.computation
        batched = False if computation.members_apart or head is not None else computation.batched
        group_batch = batches.size * (len(topology.ranks) // len(topology.alive))
        bench = Workbench(self._model, self._parameters, workload.loss, self._samples, batched, group_batch)
        if head is None:
            return Gradients(self._engine, bench)
        one = self._samples.batch(self._samples.at(0, range(1)))
        sizes = head.sizes(self._model, workload.loss, one)
        return MergedHeadGradients(self._engine, bench, head, self._costs, sizes)

    def _form(self) -> None:
        method = self._formation.method
        at_server = self._optimizer if method.steps_at == "server" else None
        parts = [part_of(self._parameters, at_server)]
        if self._head is not None:
            parts.append(part_of(self._head.parameters, self._optimizer, self._head.part(self._batches.seed)))
        self.server.form(method, self._wire_format, self._formation.overlap, parts)
        if self._head is not None:
            self._head.install(self.server)

    def _add_groups(self) -> None:
        self._context = SimulationContext(
            engine=self._engine,
            server=self.server,
            network=self._network,
            gradients=self._gradients,
            monitor=self._monitor,
            batches=self._batches,
            groups=self.groups,
            barrier=self._barrier,
        )
        topology, all_reduce = self._formation.topology, self._formation.compression.all_reduce_format
        is_balanced = self._batches.computation.rebalance == "auto"
        in_pairs = self._batches.size > 1 and not topology.is_synchronous
        for number in topology.alive:
            ranks = topology.members(number)
            members = Members(self._cluster, ranks, self._batches.seed, is_balanced, in_pairs, all_reduce)
            self._homes[number] = self._add_group(number, GroupId(str(number), self.server.incarnation), ranks, members)

    def _add_group(
        self, number: int, identity: GroupId, ranks: tuple[int, ...], members: Members, epoch: int | None = None
    ) -> SimulatedGroup:
        method, served = self._formation.method, self.server.served
        replica: Replica
        if method.steps_at == "server":
            start = self.server.snapshots.at(served.master.clock, served.buffer)
            replica = SharingReplica(list(self._parameters.values()), self._optimizer, number, start)
        else:
            replica = own_replica(self._make, self._model, self._parameters, served.master.weights(), number)
        replica.peers = self.server.core.roster.formed.alive
        core = GroupCore(method, self._wire_format, MOST_REFUSED, self._formation.overlap)
        core.form(identity)
        group = self.groups[number] = SimulatedGroup(core, replica, ranks, members, self._context, epoch)
        self._network.processes[number] = group.process
        self._costs.nodes[number] = self._cluster.node_of(members.first)
        return group

    # --- The run -----------------------------------------------------------------------------------------------------

    def run(self, progress: Progress | None, returns_if_interrupted: bool) -> Trace:
        try:
            self._start()
            self._run_events(progress)
        except KeyboardInterrupt:
            if not returns_if_interrupted:
                raise
            self._monitor.ended = "interrupted"
        except StopSimulation:
            self._monitor.ended = self._monitor.ended or "stopped"
        try:
            self._monitor.evaluate_at_end()
        except KeyboardInterrupt:
            if not returns_if_interrupted:
                raise
            self._monitor.ended = "interrupted"
        return self._trace()

    def _start(self) -> None:
        """Start all processes, in the order that :doc:`/contribute/simulator` defines for events at the same time."""
        for event in self._cluster.events:
            if isinstance(event, Failure):
                self._engine.start(self._failure(event), Priority.FAILURE)
        if self._evaluation.every_seconds:
            self._engine.start(self._monitor.evaluate_by_time(self._evaluation.every_seconds))
        for group in self.groups.values():
            group.open_epoch(0)
        for group in list(self.groups.values()):
            self._engine.resume(group.process)
        self._engine.start(self._end())

    def _end(self) -> Timeline:
        while running := [group for group in self.groups.values() if not group.process.is_over]:
            yield running[0].process
        self._monitor.ended = self._monitor.ended or "max_epochs"

    def _run_events(self, progress: Progress | None) -> None:
        monitor, engine, shown = self._monitor, self._engine, 0.0
        while not monitor.ended:
            due = engine.next_time
            if due == math.inf:
                raise OmniError("every simulated group waits for another; the method never answers them")
            if due > monitor.limits.seconds:
                engine.now, monitor.ended = monitor.limits.seconds, "max_seconds"
            else:
                engine.step()
                if progress is not None and (done := monitor.fraction) >= shown + 0.01:
                    shown = done
                    progress(done, f"{monitor.updates} updates, {engine.now:.4g} s")

    def _failure(self, failure: Failure) -> Timeline:
        yield failure.time
        topology = self._formation.topology
        home = topology.group_of(failure.rank)
        group = self._homes[home]
        if group.number not in self.groups:
            return
        reason = f"rank {failure.rank} failed at {self._engine.now:g} s"
        self._network.deliver(self.server.tick())
        rank = group.ranks[topology.members(home).index(failure.rank)]
        out = self.server.lose(rank, reason)
        if over := self.server.core.roster.over:
            self._monitor.ended = f"lost: {over}"
            return
        self._remove(group)
        self._network.deliver(out)
        self._barrier.leave(group.process)
        if failure.until is not None:
            yield failure.until
            self._restart_group(home, group)

    def _remove(self, group: SimulatedGroup) -> None:
        group.stop()
        del self.groups[group.number]
        self._gradients.drop(group.number)

    def _restart_group(self, home: int, dead: SimulatedGroup) -> None:
        joined, ranks, out = self.server.join(len(dead.ranks), str(home))
        dead.members.forget_unsent()
        epoch = joined.plan.epoch if joined.plan is not None else 0
        identity = GroupId(str(home), joined.incarnation)
        self._homes[home] = self._add_group(joined.group, identity, ranks, dead.members, epoch)
        self._network.deliver(out)
        self._engine.resume(self._homes[home].process)

    # --- Results -----------------------------------------------------------------------------------------------------

    def _weights(self) -> dict[str, Tensor]:
        weights = self.server.served.master.weights()
        if self._formation.method.evaluated == "mean" and self.groups:
            total = Total()
            for group in self.groups.values():
                total.add(group.replica.offered(group.replica.weights()))
            means = zip(weights, total.means(), strict=True)
            weights = [weight if mean is None else mean for weight, mean in means]
        named = dict(zip(self._parameters, weights, strict=True))
        if self._head is not None:
            named |= dict(zip(self._head.parameters, self.server.core.store.all[HEAD].master.weights(), strict=True))
        return named

    def _metrics(self) -> dict[str, float]:
        assert self._evaluate is not None
        parameters = dict(self._evaluated.named_parameters())
        for name, weight in self._weights().items():
            parameters[name].copy_(weight)
        for mine, trained in zip(self._evaluated.buffers(), self._model.buffers(), strict=True):
            mine.copy_(trained)
        metrics = self._evaluate(self._evaluated)
        try:
            return {name: float(value) for name, value in metrics.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f'evaluate: it returns {metrics!r}; let it return a number for each metric, as {{"accuracy": 0.9}}'
            ) from error

    def _trace(self) -> Trace:
        monitor = self._monitor
        return Trace(
            rows=arrays(Trace.COLUMNS, monitor.rows),
            evaluated=evaluated(monitor.evaluations),
            updates=monitor.updates,
            seconds=self._engine.now,
            ended=monitor.ended,
            meta={
                "method": to_wire(self._formation.method),
                "groups": [list(members) for members in self._formation.topology.groups],
                "cluster": self._cluster.summary(),
                "seed": self._batches.seed,
                "batch_size": self._batches.size,
                "samples_per_epoch": len(self._samples),
                "merged": self._formation.merged,
                "refused": self.server.served.counts.refused,
                "most_snapshots": self.server.snapshots.most,
            },
            weights={name: _array(weight.detach()) for name, weight in self._weights().items()},
            useful_seconds=monitor.useful_seconds,
            device_seconds=self._engine.now * len(self._cluster.devices),
            work=arrays(Trace.WORK, monitor.work),
            steps=arrays(Trace.STEPS, monitor.step_times),
        )


def _array(weight: Tensor) -> Any:
    return (weight.float() if weight.dtype == torch.bfloat16 else weight.clone()).numpy()  # NumPy has no bfloat16


# --- `simulate` -------------------------------------------------------------------------------------------------------


def simulate(
    method: str | Method,
    topology: int | Topology,
    cluster: Cluster,
    workload: Workload,
    *,
    limits: Limits,
    batch_size: int = 32,
    seed: int = 0,
    evaluation: Evaluation | None = None,
    merged: str | None = None,
    compression: str | WireFormat | Compression = "fp32",
    overlap: bool = False,
    computation: Computation | None = None,
    record: Recorder | None = None,
    progress: bool | Progress = False,
) -> Trace:
    """Train a model on a simulated cluster, in virtual time with real gradients.

    Server, leases and both sides of the method are the objects of a real run; :doc:`/contribute/simulator` explains the
    times. One group trains synchronously with any method, and its exchanges take no time.

    Args:
        method: a name, or a method.
        topology: the ranks of each group; or a number of groups, split evenly.
        cluster: the devices and links.
        workload: model, which is copied, data, loss, optimizer and metrics.
        limits: see `Limits`.
        batch_size: samples in one device's batch; a group of k devices trains on k times as many.
        seed: seed of data order, jitter and random operations of the model; the same seed gives bitwise the same trace
            on one machine.
        evaluation: the times of evaluations before the run's end, and a target.
        merged: name of a submodule that stays at the server, as with ``OmniStrategy(merged=...)``. A batch is sent
            there after a third of the group's time; the access includes the travel of outputs and their gradients.
        compression: the formats in which tensors are sent, as with ``OmniStrategy(compression=...)``.
        overlap: as with ``OmniStrategy(overlap=True)``.
        computation: how devices compute gradients; None for the defaults.
        record: receives every event at the server, for `replay`.
        progress: True shows a progress bar; or a function, called with the fraction done and a text. With either,
            Ctrl-C returns the trace so far (``ended == "interrupted"``) instead of raising KeyboardInterrupt; so does a
            function that raises `lightning_omni.simulator.StopSimulation` (``ended == "stopped"``).

    Returns:
        The trace, with the reason for the end of the run and the weights at the end.

    Raises:
        ConfigurationError: an argument is wrong.
        OmniError: all groups wait for each other, or a step at the server fails.

    Example:
        >>> import torch
        >>> workload = Workload(
        ...     torch.nn.Linear(2, 1),
        ...     torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1)),
        ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        ... )
        >>> trace = simulate("async_sgd", 4, Cluster.even(4), workload, batch_size=4, limits=Limits(updates=20))
        >>> trace.updates, trace.ended
        (20, 'max_updates')
    """
    check_kind("workload", workload, Workload, "a Workload, as Workload(model, data, loss)")
    check_kind("limits", limits, Limits, "Limits, as Limits(updates=1000)")
    check_kind("evaluation", evaluation, (Evaluation, type(None)), "an Evaluation, as Evaluation(every=100), or None")
    evaluation = evaluation or Evaluation()
    if workload.evaluate is None and evaluation != Evaluation():
        raise ConfigurationError("Workload(evaluate=None): pass a function that evaluates a model, or no evaluation=")
    if not isinstance(progress, bool) and not callable(progress):
        raise ConfigurationError(f"progress={progress!r}: pass True, False or a function of a fraction and a text")
    batches = Batches(batch_size, seed, computation or Computation())
    check_kind("cluster", cluster, Cluster, "a Cluster, as Cluster.even(4)")
    check_kind("topology", topology, (Integral, Topology), "a number of groups, or a Topology")
    if not isinstance(topology, Topology):
        topology = Topology.even(len(cluster.devices), topology)
    _check_together(topology, cluster, batches.computation, merged)
    given = 'a name such as "hardsync", or a value such as DiLoCo(period=50)'
    check_kind("method", method, (str, Method), given)
    chosen = method_named(method) if isinstance(method, str) else checked(method)
    chosen.check(len(topology.alive))
    formats = Compression.of(compression)
    refuse_pairs(chosen, _features(cluster, batches.computation, formats, merged, overlap, record))
    formation = Formation(chosen, topology, merged, formats, overlap)
    if topology.is_synchronous:
        # With any method, one group is plain synchronous training.
        formation = Formation(HardSync(), topology, compression=Compression(all_reduce=formats.all_reduce))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        run = Simulation(workload, cluster, formation, batches, limits, evaluation, record)
        with progress_bar() if progress is True else nullcontext(progress or None) as shown:
            return run.run(shown, returns_if_interrupted=progress is not False)


def _features(
    cluster: Cluster,
    computation: Computation,
    formats: Compression,
    merged: str | None,
    overlap: bool,
    record: Recorder | None,
) -> dict[str, str]:
    rejoins = any(isinstance(event, Failure) and event.until is not None for event in cluster.events)
    used = {
        "merged": (merged is not None, f"merged={merged!r}"),
        "overlap": (overlap, "overlap=True"),
        "servers": (cluster.servers != 1, f"Cluster(servers={cluster.servers!r})"),
        "record": (record is not None, "record="),
        "joining": (rejoins, "Failure(until=...)"),
        "rebalance": (computation.rebalance == "auto", 'Computation(rebalance="auto")'),
    }
    return {**{name: given for name, (is_used, given) in used.items() if is_used}, **formats.features}


def _check_together(topology: Topology, cluster: Cluster, computation: Computation, merged: str | None) -> None:
    if topology.ranks != tuple(range(len(cluster.devices))):
        raise ConfigurationError(
            f"topology: it has {len(topology.ranks)} ranks, but the cluster {len(cluster.devices)} devices;"
            " every device belongs to one group"
        )
    if merged is not None and computation.members_apart:
        raise ConfigurationError(
            f"merged={merged!r} and Computation(members_apart=True): a group's rows go through the head together; drop"
            " one of them"
        )
