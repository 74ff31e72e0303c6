"""A cluster in memory: one method's group sides, its server side and what peers published, driven event by event."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from core import (
    GroupCore,
    Layout,
    Memory,
    Outgoing,
    Partition,
    ServerRequest,
    Total,
    hyperparameters_of,
    load_optimizer_state,
    pack,
    unpack,
)
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.methods import (
    Exchange,
    Fetch,
    Gradient,
    Inbox,
    Master,
    Method,
    Need,
    NextGradient,
    Publish,
    Pulled,
    Push,
    ReadInbox,
    ReadPeer,
    Receive,
    Replica,
    Reply,
    Send,
    SendPeer,
)


def sent(core: GroupCore, ask: ServerRequest, layout: Layout, memory: Memory | None = None) -> Outgoing:
    """The message for a request to one server."""
    [outgoing] = core.send(ask, Partition.whole(layout), [memory or Memory()])
    return outgoing


Make = Callable[[Iterable[Any]], Optimizer]
GradientOf = Callable[[Sequence[Tensor], int, int], list[Any]]
"""From weights, group and the number of the group's step."""


def noisy(weights: Sequence[Tensor], group: int, step: int) -> list[Tensor]:
    """A gradient of its own for each group and step, which depends on the weights, so that stale ones are told."""
    generator = torch.Generator().manual_seed(1000 * group + step)
    return [0.3 * weight + torch.randn(weight.shape, generator=generator, dtype=weight.dtype) for weight in weights]


def zero(weights: Sequence[Tensor], group: int, step: int) -> list[Tensor]:
    return [torch.zeros_like(weight) for weight in weights]


def start(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((3, 2), (4,))]


def sgd(lr: float = 0.1, **settings: Any) -> Make:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **settings)


@contextmanager
def lent(tensors: Sequence[Tensor | None]) -> Iterator[list[Any]]:
    """Tensors that turn into NaN when they are given back: code that kept one without copying it is found out."""
    given = [None if tensor is None else tensor.detach().clone() for tensor in tensors]
    yield given
    for tensor in given:
        if tensor is not None:
            tensor.fill_(torch.nan)


def load(replica: Replica, state: Mapping[str, Any]) -> None:
    """Restores what `Replica.state` returned."""
    replica.load(Pulled(state["weights"], int(state["clock"])))
    replica.memory = dict(state["memory"])
    load_optimizer_state(replica.optimizer, state["optimizer"])


class Cluster:
    """All groups and the server of a run.

    Args:
        method: the method.
        groups: number of groups.
        weights: the initial weights, or those of ``state``.
        make: makes the user's optimizer.
        gradient: computes gradients.
        state: of another cluster, to go on from.

    Attributes:
        waiting: groups whose push has not been answered.
        staleness: of every answered push, by group.
    """

    def __init__(
        self,
        method: Method,
        groups: int,
        weights: Sequence[Tensor] = (),
        make: Make | None = None,
        gradient: GradientOf = noisy,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.method, self.gradient, self.make = method, gradient, make or sgd()
        weights = state["weights"] if state else weights or start()
        parameters = {str(index): Parameter(weight.detach().clone()) for index, weight in enumerate(weights)}
        optimizer = self.make(parameters.values()) if method.steps_at == "server" else None
        if optimizer is not None and state:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state["optimizer"]})
        self.master = Master(parameters, optimizer, state["clock"] if state else 0)
        self.side = method.server_side(self.master, range(groups))
        self.replicas: list[Replica] = []
        for group in range(groups):
            own = [Parameter(weight.detach().clone()) for weight in weights]
            self.replicas.append(Replica(own, self.make(own), group))
        self.published: dict[int, list[Tensor]] = {}
        self.inboxes = [Total() for _ in range(groups)]
        self.steps = [0] * groups
        self.step_time = [1.0] * groups
        self.alive = set(range(groups))
        self.waiting: set[int] = set()
        self.sent: dict[int, Exchange] = {}
        self.answers: dict[int, Pulled] = {}
        self.staleness: dict[int, list[int]] = defaultdict(list)
        if state:
            self._load(state)
        self._tell_peers()
        self.cores = [GroupCore(method) for _ in self.replicas]
        for core, replica in zip(self.cores, self.replicas, strict=True):
            core.attach(replica)

    # --- What happens ------------------------------------------------------------------------------------------------

    def compute(self, group: int) -> None:
        """A group computes its next gradient and does all that follows, until it wants another one or must wait."""
        self.begin(group)
        self.drive(group)

    def run(self, order: Iterable[int]) -> None:
        """Groups compute in this order; those that must wait are passed over."""
        for group in order:
            if group not in self.waiting:
                self.compute(group)

    def begin(self, group: int) -> None:
        replica = self.replicas[group]
        tensors = self.gradient(replica.weights(), group, self.steps[group])
        self.steps[group] += 1
        self.cores[group].steps_take(0, self.step_time[group])
        with torch.no_grad():
            gradient = Gradient(tensors, hyperparameters_of(replica.optimizer))
            self.cores[group].gradient(0, gradient)

    def drive(self, group: int, until: type[Any] | tuple[type[Any], ...] = NextGradient) -> None:
        """Does what comes, until the group must wait, wants a gradient or needs one of these."""
        stops: tuple[type[Any], ...] = (NextGradient, *(until if isinstance(until, tuple) else (until,)))
        while group not in self.waiting and not isinstance(self.need(group), stops):
            self.supply(group)

    def need(self, group: int) -> Need:
        """What the group's half of the method waits for."""
        return self.cores[group].waits_for(0)

    def supply(self, group: int) -> None:
        """Answers one need."""
        need = self.need(group)
        if isinstance(need, Exchange):
            self.waiting.add(group)
            self.deliver(self._receive(group, need))
        elif isinstance(need, Send):
            self.sent[group] = need.exchange
            replies = self._receive(group, need.exchange)
            self._send(group, None)
            self.deliver(replies)
        elif isinstance(need, Receive):
            if group in self.answers:
                self._send(group, self.answers.pop(group))
            else:
                self.waiting.add(group)
        elif isinstance(need, Fetch):
            self.side.fetched(group)
            with lent(self.master.weights()) as tensors:
                self._send(group, Pulled(tensors, self.master.clock))
        elif isinstance(need, Publish):
            self.published[group] = [tensor.clone() for tensor in need.tensors]
            self._send(group, None)
        elif isinstance(need, ReadPeer):
            with lent(self.published.get(need.group, [])) as tensors:
                self._send(group, tensors or None)
        elif isinstance(need, SendPeer):
            self.inboxes[need.group].add(need.tensors)
            self._send(group, None)
        elif isinstance(need, ReadInbox):
            count = self.inboxes[group].count
            total = self.inboxes[group].take()
            self._send(group, Inbox(total or None, count))  # type: ignore[arg-type]

    def _receive(self, group: int, need: Exchange) -> list[Reply]:
        with torch.no_grad(), lent(need.tensors) as tensors:
            push = Push(group, need.read_at, tensors, need.hyperparameters, need.note, need.fragment)
            return self.side.receive(push)

    def _arrive(self, reply: Reply, sent: Exchange) -> None:
        """The answer to what a group has under way."""
        self.staleness[reply.group].append(reply.staleness)
        tensors = self.master.weights(sent.fragment) if reply.tensors is None else reply.tensors
        given = [tensor.clone() for tensor in tensors if tensor is not None] if sent.pull else []
        self.answers[reply.group] = Pulled(given, self.master.clock, reply.note, fragment=sent.fragment)
        if reply.group in self.waiting:
            self.waiting.discard(reply.group)
            self.drive(reply.group)
        elif reply.group in self.side.idle_groups:
            self.finish(reply.group)

    def finish(self, group: int) -> None:
        """What the group has under way is answered, and applied before its time."""
        if group in self.answers:
            with torch.no_grad():
                self.cores[group].apply_answer(0, self.answers.pop(group))

    def deliver(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            assert reply.group in self.alive, "answered a group that is gone"
            if reply.group in self.sent:
                self._arrive(reply, self.sent.pop(reply.group))
                continue
            assert reply.group in self.waiting, "answered a group that did not ask, or twice"
            self.waiting.discard(reply.group)
            self.staleness[reply.group].append(reply.staleness)
            need = self.need(reply.group)
            assert isinstance(need, Exchange)
            tensors = self.master.weights(need.fragment) if reply.tensors is None else reply.tensors
            with lent(tensors if need.pull else []) as given:
                self._send(reply.group, Pulled(given, self.master.clock, reply.note, fragment=need.fragment))
            self.drive(reply.group)

    def idle(self, group: int) -> None:
        assert group not in self.waiting
        self.finish(group)
        with torch.no_grad():
            replies = self.side.idle(group)
        self.deliver(replies)

    def resume(self, group: int) -> None:
        self.side.resume(group)

    def evict(self, group: int) -> None:
        self.alive.discard(group)
        self.waiting.discard(group)
        self.sent.pop(group, None)
        self._tell_peers()
        with torch.no_grad():
            replies = self.side.evict(group)
        self.deliver(replies)

    def join(self) -> int:
        """A group more takes part, and reads the master weights. Returns its number."""
        group = len(self.replicas)
        own = [Parameter(weight.detach().clone()) for weight in self.master.weights()]
        self.replicas.append(Replica(own, self.make(own), group))
        self.inboxes.append(Total())
        self.steps.append(0)
        self.step_time.append(1.0)
        self.alive.add(group)
        self._tell_peers()
        self.cores.append(GroupCore(self.method))
        self.cores[group].attach(self.replicas[group])
        self.side.join(group)
        self.side.fetched(group)
        self.replicas[group].clock = self.master.clock
        return group

    def synchronize(self, order: Iterable[int]) -> None:
        """All groups become idle, in this order as far as they are free to."""
        left = list(order)
        while left:
            group = next(group for group in left if group not in self.waiting)
            left.remove(group)
            self.idle(group)

    def remake(self, group: int) -> None:
        """The group's generator is thrown away and made again, unless an exchange is under way."""
        if group not in self.sent and group not in self.answers:
            self.cores[group].form()

    # --- What is the case --------------------------------------------------------------------------------------------

    @property
    def all_staleness(self) -> list[int]:
        return [staleness for group in sorted(self.staleness) for staleness in self.staleness[group]]

    def weights(self, group: int | None = None) -> list[Tensor]:
        """Copies of a group's weights, or of the server's."""
        live = self.master.weights() if group is None else self.replicas[group].weights()
        return [weight.clone() for weight in live]

    def mean(self) -> list[Tensor]:
        """The mean of all groups' own weights."""
        own = [self.weights(group) for group in range(len(self.replicas))]
        return [torch.stack(column).mean(0) for column in zip(*own, strict=True)]

    def everything(self) -> list[Tensor]:
        return [weight for group in (None, *sorted(self.alive)) for weight in self.weights(group)]

    def state(self) -> dict[str, Any]:
        """All that a new cluster needs, as it arrives at the other end of a wire."""
        snapshot = self.master.snapshot()
        packed, buffer = pack(
            {
                "weights": list(snapshot["weights"].values()),
                "optimizer": snapshot["state"],
                "clock": snapshot["clock"],
                "side": self.side.state(),
                "replicas": [replica.state() for replica in self.replicas],
                "published": self.published,
                "inboxes": [inbox.state() for inbox in self.inboxes],
                "steps": self.steps,
            }
        )
        tree: dict[str, Any] = unpack(
            msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=type(packed)), buffer.clone()
        )
        return tree

    def _load(self, state: dict[str, Any]) -> None:
        self.side.load_state(state["side"])
        for replica, theirs in zip(self.replicas, state["replicas"], strict=True):
            load(replica, theirs)
        self.published = dict(state["published"])
        for inbox, theirs in zip(self.inboxes, state["inboxes"], strict=True):
            inbox.load_state(theirs)
        self.steps = list(state["steps"])

    def _send(self, group: int, answer: Any) -> None:
        with torch.no_grad():
            self.cores[group].answer(0, answer)

    def _tell_peers(self) -> None:
        for replica in self.replicas:
            replica.peers = tuple(sorted(self.alive))


def by_speed(cluster: Cluster, seconds: Callable[[int], float], pushes: int) -> None:
    """Groups compute at their own speeds, a step of a group taking ``seconds``, until so many pushes are answered."""
    heap = [(seconds(group), group) for group in sorted(cluster.alive)]
    heapq.heapify(heap)
    away: set[int] = set()
    while sum(map(len, cluster.staleness.values())) < pushes:
        now, group = heapq.heappop(heap)
        cluster.compute(group)
        away.add(group)
        for free in sorted(away - cluster.waiting):
            heapq.heappush(heap, (now + seconds(free), free))
            away.discard(free)
