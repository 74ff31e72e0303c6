"""One simulated compute group: a process that drives its state machine through virtual time.

Rule: its leader broadcasts the server's answers and peers' weights to the other members, and the group continues when
all have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import msgspec
from torch import Tensor

from lightning_omni.errors import NonFiniteGradients
from lightning_omni.group.core import Action, GroupCore, ServerRequest
from lightning_omni.group.leased_batches import LeaseClient
from lightning_omni.methods.contract import (
    Answer,
    Exchange,
    Gradient,
    Inbox,
    NextGradient,
    Publish,
    Push,
    ReadInbox,
    ReadPeer,
    Receive,
    SendPeer,
    Total,
)
from lightning_omni.methods.model.replica import Replica, copies
from lightning_omni.methods.model.server_optimizer import hyperparameters_of
from lightning_omni.simulator.engine import Engine, Process, Timeline
from lightning_omni.simulator.gradients import Assignment, Gradients, Members
from lightning_omni.simulator.monitor import Monitor
from lightning_omni.simulator.server import GENERATION, SimulatedNetwork, SimulatedServer
from lightning_omni.simulator.settings import Batches
from lightning_omni.simulator.workbench import Result
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats.base import RAW
from lightning_omni.wire.messages import Batch, EpochPlan

MOST_REFUSED = 10
"""Number of non-finite pushes in a row, of one group, at which the run counts as diverged."""


@dataclass
class SimulationContext:
    """The objects that all groups of a run share."""

    engine: Engine
    server: SimulatedServer
    network: SimulatedNetwork
    gradients: Gradients
    monitor: Monitor
    batches: Batches
    groups: dict[int, SimulatedGroup]
    barrier: EpochBarrier


class EpochBarrier:
    """A barrier that releases the living groups when all have arrived, in the order of arrival."""

    def __init__(self, engine: Engine, groups: dict[int, SimulatedGroup]) -> None:
        self._engine, self._groups = engine, groups
        self._waiting: list[Process] = []

    def wait(self, process: Process) -> Timeline:
        if len(self._waiting) + 1 < len(self._groups):
            self._waiting.append(process)
            yield None
        else:
            self._release()

    def leave(self, process: Process) -> None:
        if process in self._waiting:
            self._waiting.remove(process)
        if self._waiting and len(self._waiting) >= len(self._groups):
            self._release()

    def _release(self) -> None:
        met, self._waiting = self._waiting, []
        for process in met:
            self._engine.resume(process)


class UnpushedWork(msgspec.Struct):
    """The training of a group since its last push."""

    steps: int = 0
    samples: int = 0
    losses: float = 0.0
    seconds: float = 0.0


class SimulatedGroup:
    """One compute group.

    Args:
        ranks: ranks of its members; the first leads.
        epoch: the current epoch, if the group joins a running run.

    Attributes:
        process: its process, which ends with the last epoch.
    """

    def __init__(
        self,
        core: GroupCore,
        replica: Replica,
        ranks: tuple[int, ...],
        members: Members,
        context: SimulationContext,
        epoch: int | None = None,
    ) -> None:
        self.core, self.replica, self.ranks, self.leader = core, replica, ranks, ranks[0]
        self.number = replica.group
        self.members, self._context = members, context
        core.attach(replica)
        self._parameters = set(replica.ordered)
        self._data = core.data = LeaseClient(members=len(ranks), generation=GENERATION)
        if epoch is not None:
            self._data.restart(epoch)
        self._unpushed = UnpushedWork()
        self._under_way: tuple[ServerRequest, Process] | None = None
        self._before = self._pushed = (0, 0)  # epoch and trained batches at the last two pushes
        self._published: list[Tensor] | None = None
        self._inbox = Total()
        self.process = Process(self.live(joins=epoch is not None))

    # --- Its process -------------------------------------------------------------------------------------------------

    def live(self, joins: bool) -> Timeline:
        """Run the group, epoch after epoch; a group that joins reads the weights first."""
        if joins:
            self.replica.load((yield from self._request(self.core.fetch(0))))
        yield from self._train_epoch()
        while self._data.epoch + 1 < self._context.monitor.limits.epochs:
            yield from self._context.barrier.wait(self.process)  # other groups may still wait for an answer
            self.open_epoch(self._data.epoch + 1)
            if self.core.method.steps_at == "server":
                # The master weights have moved while the group waited for others.
                self.replica.load((yield from self._request(self.core.fetch(0))))
            yield from self._train_epoch()

    def open_epoch(self, epoch: int) -> None:
        self._data.restart(epoch)
        size = self._context.monitor.epoch_size
        plan = EpochPlan(epoch=epoch, total=size, batch_size=self._context.batches.size, budget=size)
        self._context.server.control(self.leader, m.OpenEpoch(plan=plan))

    def _train_epoch(self) -> Timeline:
        while (batch := (yield from self._next_batch())) is not None:
            action = self._perform(self._step((yield from self._compute(batch)), batch.stop - batch.start))
            if self.core.method.talks_to_peers:
                self._context.monitor.check()
            while not isinstance(action, NextGradient):
                action = self._perform(self.core.answer(0, (yield from self._wait_for(action))))

    def _next_batch(self) -> Timeline:
        """Return the next batch, once there is one; None at the end of the epoch."""
        context, data = self._context, self._data
        context.monitor.end(self.number)
        while True:
            if data.drawn == data.trained:
                (out,) = context.server.control(self.leader, data.draw(data.drawn, self._finished))
                data.record_drawn(cast(m.BatchesDrawn, out.message).batches)
            if data.drawn > data.trained:
                data.begin_batch()
                return data.current
            if self._under_way is not None:  # there is no batch left to overlap it with
                self.core.apply_answer(0, (yield from self._receive()))
            context.network.deliver(context.server.control(self.leader, data.ask_next()))
            if (yield None) != "more":
                return None

    @property
    def _finished(self) -> int:
        """Return the number of the epoch's batches that were trained before those of a push in flight, if any."""
        if self._under_way is None:
            return self._data.trained
        epoch, trained = self._before
        return trained if epoch == self._data.epoch else 0

    # --- Its gradients -----------------------------------------------------------------------------------------------

    def _compute(self, batch: Batch) -> Timeline:
        context = self._context
        now = context.engine.now
        work = self.members.work(batch, now)
        seconds = max(own for _, _, own in work) + self.members.reduce_seconds(context.server.served.layout)
        self.core.step_took(0, seconds)
        context.monitor.begin(self.number, work)
        apart = context.batches.computation.members_apart
        assignment = Assignment(
            group=self.number,
            leader=self.leader,
            weights=self.replica.weights(),
            parts=self.members.positions(batch, now) if apart else [range(batch.start, batch.stop)],
            place=self._data.place,
            seconds=seconds,
        )
        return (yield from context.gradients.compute(assignment))

    def _step(self, result: Result, size: int) -> Action:
        monitor = self._context.monitor
        self._unpushed.seconds += monitor.computed(self.number, size)
        self._unpushed.steps += 1
        self._unpushed.samples += size
        self._unpushed.losses += result.loss
        if self.core.method.talks_to_peers:
            done, self._unpushed = self._unpushed, UnpushedWork()
            self._record(done, monitor.steps, monitor.steps, 0, self._data.epoch)
        hyperparameters = hyperparameters_of(self.replica.optimizer, self._parameters)
        return self.core.gradient(0, Gradient(self.members.averaged(result.gradient), hyperparameters))

    def _record(self, done: UnpushedWork, read: int, write: int, staleness: int, epoch: int) -> None:
        loss = done.losses / max(1, done.steps)
        row = (self._context.engine.now, self.number, read, write, staleness, loss, done.samples, epoch, done.steps)
        self._context.monitor.rows.append(row)
        self._context.monitor.useful_seconds += done.seconds

    # --- Actions of its state machine --------------------------------------------------------------------------------

    def _perform(self, action: Action) -> Action:
        """Perform actions between peers that take no time, and return the first other one."""
        while True:
            answer: Answer = None
            match action:
                case Publish():
                    self._published = copies(action.tensors)
                case SendPeer():
                    self._context.engine.start(self._send(action))
                case ReadInbox() if not self._peer_updates(is_there=True):
                    answer = self._read_inbox()
                case _:
                    return action
            action = self.core.answer(0, answer)

    def _wait_for(self, action: Action) -> Timeline:
        match action:
            case ServerRequest(waits=False):
                self._before, self._pushed = self._pushed, (action.epoch, action.trained)
                self._under_way = action, self._begin(action)
                return None
            case Receive():
                return (yield from self._receive())
            case ServerRequest():
                return (yield from self._request(action))
            case ReadPeer():
                return (yield from self._read_peer(action.group))
            case ReadInbox():
                inbox = self._read_inbox()
                yield self._context.engine.now + self._peer_updates(is_there=inbox.count > 0)
                return inbox
            case _:
                raise TypeError(f"{action!r} is nothing that a simulated group can do")

    # --- To the server and back --------------------------------------------------------------------------------------

    def _request(self, ask: ServerRequest) -> Timeline:
        return (yield from self._answer_to(ask, self._begin(ask)))

    def _begin(self, ask: ServerRequest) -> Process:
        process = Process(self._push(ask) if isinstance(ask.need, Exchange) else self._fetch(ask))
        self._context.network.exchanges[self.number] = process
        self._context.engine.resume(process)
        return process

    def _receive(self) -> Timeline:
        assert self._under_way is not None
        (ask, exchange), self._under_way = self._under_way, None
        return (yield from self._answer_to(ask, exchange))

    def stop(self) -> None:
        self._context.engine.stop(self.process)
        if (exchange := self._context.network.exchanges.get(self.number)) is not None:
            self._context.engine.stop(exchange)

    def _push(self, ask: ServerRequest) -> Timeline:
        done, self._unpushed = self._unpushed, UnpushedWork()
        server, network, need = self._context.server, self._context.network, ask.need
        assert isinstance(need, Exchange)
        nbytes, outgoing = server.prepare(self.core, ask)
        # A separate process, because a push in flight occupies links and server even if this group dies.
        yield self._context.engine.start(network.costs.push(self.number, nbytes))
        served = server.served
        clock, refused = served.master.clock, served.counts.refused
        staleness = served.method_side.staleness_of(Push(self.number, need.read_at, ()))
        out = server.ask(self.leader, self.core, ask, outgoing)
        network.deliver(out)
        if served.counts.refused == refused:
            self._record(done, need.read_at, clock + 1, staleness, ask.epoch)
        else:
            self._check_divergence()
        return (yield None)

    def _check_divergence(self) -> None:
        try:
            self.core.check_nonfinite(self._context.server.served.counts.refused_in_row[self.number])
        except NonFiniteGradients:
            self._context.monitor.ended = (
                f"diverged: {MOST_REFUSED} pushes of group {self.number} in a row were not finite"
            )

    def _fetch(self, ask: ServerRequest) -> Timeline:
        yield self._context.network.costs.ask(self.number)
        self._context.network.deliver(self._context.server.ask(self.leader, self.core, ask))
        return (yield None)

    def _answer_to(self, ask: ServerRequest, exchange: Process) -> Timeline:
        message, tensors = yield exchange
        if len(self.ranks) > 1 and (seconds := self._passed_on(self._bytes_of_answer(ask))):
            yield self._context.engine.now + seconds
        return self.core.receive(message, tensors)

    def _bytes_of_answer(self, ask: ServerRequest) -> int:
        """Return the bytes of an answer's broadcast: encoded, if that is smaller and of a known size."""
        if not ask.pulls:
            return 0
        layout = self._context.server.served.layout.fragment(ask.fragment, self.core.method.fragments)
        answers = self.core.wire_format.answers if isinstance(ask.need, Exchange) else RAW
        smallest, largest = answers.sizes(layout)
        return min(largest, layout.nbytes) if smallest == largest else layout.nbytes

    def _passed_on(self, nbytes: int) -> float:
        return self._context.network.costs.group_link.broadcast_seconds(nbytes, len(self.ranks))

    # --- From group to group -----------------------------------------------------------------------------------------

    def _read_peer(self, number: int) -> Timeline:
        yield self._context.network.costs.to_peer()
        peer = self._context.groups.get(number)
        published = peer._published if peer is not None else None
        yield self._context.network.costs.to_peer(self._peer_bytes if published is not None else 0)
        if seconds := self._peer_updates(is_there=published is not None):
            yield self._context.engine.now + seconds
        return published

    @property
    def _peer_bytes(self) -> int:
        return self.core.wire_format.pushes.sizes(self._context.server.served.layout)[1]

    def _peer_updates(self, is_there: bool) -> float:
        """Return the seconds in which members learn whether a peer has weights, and receive these."""
        seconds = self._passed_on(0)
        return seconds + self._passed_on(self._context.server.served.layout.nbytes) if is_there else seconds

    def _send(self, need: SendPeer) -> Timeline:
        tensors = copies(need.tensors)
        yield self._context.network.costs.to_peer(self._peer_bytes)
        if need.group in self._context.groups:
            self._context.groups[need.group]._inbox.add(tensors)

    def _read_inbox(self) -> Inbox:
        count, total = self._inbox.count, self._inbox.take()
        return Inbox([tensor for tensor in total if tensor is not None] if count else None, count)
