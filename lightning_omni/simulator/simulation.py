"""One simulated run: its parts are put together, and events happen until it is over."""

from __future__ import annotations

import copy

from torch import Tensor
from torch.nn import Module

from lightning_omni.errors import OmniError
from lightning_omni.methods.replica import Replica
from lightning_omni.methods.totals import Total
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.group import GroupCore
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.record import Recorder
from lightning_omni.simulator.cluster import Cluster, Failure
from lightning_omni.simulator.devices import Members
from lightning_omni.simulator.engine import Engine, Priority, Timeline
from lightning_omni.simulator.gradients import Gradients, HeadGradients, OwnGradients
from lightning_omni.simulator.group import MOST_REFUSED, Barrier, SimulatedGroup, Surroundings
from lightning_omni.simulator.head import SimulatedHead, without
from lightning_omni.simulator.measurements import arrays
from lightning_omni.simulator.monitor import Evaluator, Monitor
from lightning_omni.simulator.network import Network
from lightning_omni.simulator.parameters import named_parameters, own_optimizer, own_parameters
from lightning_omni.simulator.progress import Enough, Progress
from lightning_omni.simulator.replicas import OwnReplica, SharingReplica
from lightning_omni.simulator.server import HEAD, SimulatedServer, part_of
from lightning_omni.simulator.settings import Batches, Cadence, Formation, Limits
from lightning_omni.simulator.workbench import Samples, Workbench
from lightning_omni.simulator.workload import Workload
from lightning_omni.topology import GroupId
from lightning_omni.trace import Trace


class Simulation:
    """A run in virtual time.

    Args:
        workload: what is trained.
        cluster: the devices and links.
        formation: the groups, and what they exchange.
        batches: how the gradients are made.
        limits: when the run ends.
        cadence: how often it is evaluated.
        record: told of every event at the server.

    Attributes:
        server: the parameter server.
        groups: the living groups by number.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        formation: Formation,
        batches: Batches,
        limits: Limits,
        cadence: Cadence,
        record: Recorder | None = None,
    ) -> None:
        self._workload, self._cluster, self._formation = workload, cluster, formation
        self._batches, self._limits, self._cadence = batches, limits, cadence
        self._engine = Engine()
        self._model = copy.deepcopy(workload.model).train()
        evaluated = copy.deepcopy(workload.model).eval()
        self._optimizer = workload.optimizer(list(self._model.parameters()))
        everything = named_parameters(self._model, self._optimizer)
        merged = formation.merged
        self._head = SimulatedHead(merged, self._model, self._optimizer) if merged is not None else None
        self._parameters = without(everything, self._head)
        self._samples = Samples(workload.data, batches.seed)
        bench = self._new_bench()
        self.server = self._new_server(record)
        self._network = Network(self._engine, cluster, self.server, is_instant=formation.topology.is_synchronous)
        gradients = self._new_gradients(bench)
        self._form()
        self._monitor = self._new_monitor(evaluated)
        self.groups: dict[int, SimulatedGroup] = {}
        self._barrier = Barrier(self._engine, self.groups)
        self._add_groups(gradients)
        self._gradients = gradients

    # --- Its parts ---------------------------------------------------------------------------------------------------

    def _new_bench(self) -> Workbench:
        batches, topology = self._batches, self._formation.topology
        members = len(topology.ranks) // len(topology.alive)
        one_by_one = batches.members_apart or self._head is not None
        return Workbench(
            self._model,
            self._parameters,
            self._workload.loss,
            self._samples,
            False if one_by_one else batches.batched,
            batches.size * members,
        )

    def _new_server(self, record: Recorder | None) -> SimulatedServer:
        layout = Layout.of({name: parameter.detach() for name, parameter in self._parameters.items()})
        topology, seed = self._formation.topology, self._batches.seed
        return SimulatedServer(self._engine, layout, topology, seed, self._optimizer, record)

    def _new_gradients(self, bench: Workbench) -> Gradients:
        if self._head is None:
            return OwnGradients(self._engine, bench)
        one = self._samples.batch(self._samples.at(0, range(1)))
        sizes = self._head.sizes(self._model, self._workload.loss, one)
        return HeadGradients(self._engine, bench, self._head, self._network, sizes)

    def _form(self) -> None:
        """The server gets weights and optimizers, and knows the groups."""
        method = self._formation.method
        parts = [part_of(self._parameters, self._optimizer if method.steps_at == "server" else None)]
        if self._head is not None:
            parts.append(part_of(self._head.parameters, self._optimizer, self._head.part(self._batches.seed)))
        self.server.form(method, self._formation.wire_format, parts)
        if self._head is not None:
            self._head.install(self.server)

    def _new_monitor(self, evaluated: Module) -> Monitor:
        evaluate = self._workload.evaluate
        evaluator = Evaluator(evaluate, evaluated, self._model, self._weights) if evaluate is not None else None
        clock = None if self._formation.method.talks_to_peers else self.server.clock
        return Monitor(self._engine, self._limits, self._cadence, evaluator, clock, len(self._samples))

    def _add_groups(self, gradients: Gradients) -> None:
        around = Surroundings(
            engine=self._engine,
            server=self.server,
            network=self._network,
            gradients=gradients,
            monitor=self._monitor,
            limits=self._limits,
            batches=self._batches,
            epoch_size=len(self._samples),
            groups=self.groups,
            barrier=self._barrier,
        )
        method, topology = self._formation.method, self._formation.topology
        for number in topology.alive:
            ranks = topology.members(number)
            members = Members(self._cluster, ranks, self._batches.seed, self._batches.is_balanced)
            replica = self._sharing_replica(number) if method.steps_at == "server" else self._own_replica(number)
            replica.peers = topology.alive
            core = GroupCore(method, self._formation.wire_format, refusals=MOST_REFUSED)
            core.form(GroupId(str(number), self.server.incarnation))
            group = self.groups[number] = SimulatedGroup(core, replica, ranks, members, around)
            self._network.processes[number] = group.process

    def _sharing_replica(self, number: int) -> Replica:
        start = self.server.snapshots.at(0, self.server.shard.buffer)
        return SharingReplica(list(self._parameters.values()), self._optimizer, number, start)

    def _own_replica(self, number: int) -> Replica:
        parameters = own_parameters(self._model, self._parameters, self.server.shard.master.weights())
        optimizer = own_optimizer(self._workload.optimizer, self._model, parameters)
        return OwnReplica(list(parameters.values()), optimizer, number)

    # --- The run -----------------------------------------------------------------------------------------------------

    def run(self, progress: Progress | None, returns_if_interrupted: bool) -> Trace:
        """Runs to the end."""
        try:
            self._start()
            self._go_through(progress)
        except KeyboardInterrupt:
            if not returns_if_interrupted:
                raise
            self._monitor.ended = "interrupted"
        except Enough:
            self._monitor.ended = "stopped"
        self._monitor.evaluate_at_end()
        return self._trace()

    def _start(self) -> None:
        """Everything begins, in the order that `docs/simulator.md` has for what happens at one moment."""
        for event in self._cluster.events:
            if isinstance(event, Failure):
                self._engine.start(self._failure(event), Priority.FAILURE)
        if self._cadence.every_seconds:
            self._engine.start(self._monitor.evaluate_by_time(self._cadence.every_seconds))
        for group in self.groups.values():
            group.open_epoch(0)
        for group in list(self.groups.values()):
            self._engine.resume(group.process)

    def _go_through(self, progress: Progress | None) -> None:
        monitor, engine, shown = self._monitor, self._engine, 0.0
        while not monitor.ended:
            if all(group.process.is_over for group in self.groups.values()):
                monitor.ended = "max_epochs"
            elif not len(engine.events):
                raise OmniError("every simulated group waits for another; the method never answers them")
            elif engine.events.next_time > self._limits.seconds:
                engine.now, monitor.ended = self._limits.seconds, "max_seconds"
            else:
                engine.step()
                if progress is not None and (done := monitor.fraction) >= shown + 0.01:
                    shown = done
                    progress(done, f"{monitor.updates} updates, {engine.now:.4g} s")

    def _failure(self, failure: Failure) -> Timeline:
        """A process: a rank dies, and its group with it."""
        yield failure.time
        group = self.groups.get(self._formation.topology.group_of(failure.rank))
        if group is None:
            return
        out = self.server.lose(failure.rank, f"rank {failure.rank} failed at {self._engine.now:g} s")
        if self.server.core.over:
            self._monitor.ended = f"lost: {self.server.core.over}"
            return
        self._engine.stop(group.process)
        del self.groups[group.number]
        self._gradients.drop(group.number)
        self._network.deliver(out)
        self._barrier.leave(group.process)

    # --- What comes of it --------------------------------------------------------------------------------------------

    def _weights(self) -> dict[str, Tensor]:
        """The weights that the method would evaluate."""
        weights = self.server.shard.master.weights()
        if self._formation.method.evaluated == "mean" and self.groups:
            total = Total()
            for group in self.groups.values():
                total.add(group.replica.weights())
            weights = [mean for mean in total.scaled(1 / total.count) if mean is not None]
        named = dict(zip(self._parameters, weights, strict=True))
        if self._head is not None:
            named |= dict(zip(self._head.parameters, self.server.core.shards[HEAD].master.weights(), strict=True))
        return named

    def _trace(self) -> Trace:
        monitor = self._monitor
        return Trace(
            rows=arrays(Trace.COLUMNS, monitor.rows),
            evaluated=monitor.evaluations.arrays(),
            updates=monitor.updates,
            seconds=self._engine.now,
            ended=monitor.ended,
            meta={
                "method": m.method_to_wire(self._formation.method),
                "groups": [list(members) for members in self._formation.topology.groups],
                "cluster": self._cluster.summary(),
                "seed": self._batches.seed,
                "batch_size": self._batches.size,
                "samples_per_epoch": len(self._samples),
                "merged": self._formation.merged,
                "refused": self.server.shard.refused,
                "most_snapshots": self.server.snapshots.most,
            },
            weights={name: weight.detach().clone().numpy() for name, weight in self._weights().items()},
            work=arrays(Trace.WORK, monitor.stopwatch.work),
            steps=arrays(Trace.STEPS, monitor.stopwatch.steps),
        )
