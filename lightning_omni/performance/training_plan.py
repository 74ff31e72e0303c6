"""How groups would train, and how fast: from fitted costs to seconds of each part of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from lightning_omni.performance import constants as c
from lightning_omni.performance.cost_model import CostModel, first_draw, messages_of
from lightning_omni.performance.exchanging import ExchangePattern
from lightning_omni.performance.queueing import (
    BarrierExchange,
    quantiles_of_slowest,
    quantiles_of_sum,
    slowest,
    time_shared,
)
from lightning_omni.protocol.leases import apportion
from lightning_omni.topology import Topology

Array = np.ndarray[Any, Any]
Groups = Sequence[tuple[int, ...]]
_T = TypeVar("_T")


_TWICE_AS_FAST = {
    "compute": ("overhead", "per_sample", "between"),
    "allreduce": ("ring", "hop", "hand_ring", "hand_hop", "node_ring", "node_hop"),
    "exchange": ("delay", "own_per_byte"),
    "server": ("serve",),
    "link": ("link_per_byte", "own_per_byte"),
    "head": ("head_per_sample",),
}
"""What of a model is halved to find out what it helps."""


@dataclass(frozen=True)
class TrainingPlan:
    """How the groups would train. All that `ExchangePattern` can leave open is known."""

    model: CostModel
    batch: float
    rebalance: bool
    exchanging: ExchangePattern
    is_rough: bool = False

    @property
    def period(self) -> int:
        """Local steps between two exchanges."""
        return self.exchanging.period or 1

    @cached_property
    def speeds(self) -> dict[int, float]:
        return self.model.speeds(self.batch)

    def bottleneck(self, topology: Topology) -> str:
        """What would speed training up most if it took half as long."""
        model, rough = first_draw(self.model), replace(self, is_rough=True)

        def rate(halved: Sequence[str]) -> float:
            costs = {name: getattr(model, name) for name in halved}
            changed = {name: cost / 2 for name, cost in costs.items() if cost is not None}
            return float(replace(rough, model=replace(model, **changed)).outcome(topology).samples_rate[0])

        rates = {name: rate(halved) for name, halved in _TWICE_AS_FAST.items()}
        return max(rates, key=rates.__getitem__)

    def outcome(self, topology: Topology) -> Outcome:
        """How fast that would be."""
        model, groups = self.model, [topology.members(group) for group in topology.alive]
        sizes = np.array([len(members) for members in groups])
        work = self._work(groups, slowest)
        compute, variance = (np.stack(column, axis=1) for column in zip(*work, strict=True))
        between = model.between[:, None]
        together = np.array([model.placement.are_together(members) for members in groups])
        allreduce = model.all_reduce(sizes, together)
        nothing = np.zeros_like(allreduce)
        if len(groups) == 1:  # plain synchronous training, with no server and no head
            return Outcome(sizes * self.batch, compute + between, allreduce, nothing, nothing, nothing, 0.0, nothing)
        here = np.array(model.placement.are_here(groups))
        handed = self._handed_on(groups)
        seconds = self._seconds(here, np.where(here & ~together, self.period * handed, 0.0))
        # Of a group on the server's node with members elsewhere all messages cross the server's link.
        ring = np.where(here & ~together, self.period * allreduce, 0.0)
        allreduce = allreduce + np.where(here & ~together, 0.0, handed)
        head = model.head_per_sample * self.batch * float(sizes.mean())
        steps = self._local_steps(compute + allreduce + between)
        per_step = seconds.delay / steps, seconds.serve[:, None] / steps, seconds.link / steps
        shared = SharedStations(seconds, ring, self.period * head)
        if self.exchanging.barrier or self.exchanging.delay:
            alone = allreduce + head + between
            few = np.minimum(self.exchanging.delay, steps)  # that are made while an exchange is under way
            hidden, then = (self._steps(groups, count, compute, variance, alone) for count in (few, steps - few))
            if self.exchanging.barrier:
                cycle, waiting = self._at_a_barrier(hidden, then, seconds)
            else:
                cycle, waiting = self._beside(hidden, then, self.period * variance, replace(shared, head=0.0))
            cycle = np.maximum(cycle / steps, len(groups) * head)
            compute = np.maximum(waiting / steps - alone, compute)
            exposed = np.maximum(cycle - compute - alone, 0.0)
            parts = compute + between, allreduce, exposed
            return Outcome(sizes * self.batch, *parts, *per_step[1:], head, nothing, cycle)
        compute = compute + between
        think = self.period * (compute + allreduce) + seconds.delay
        spent = shared.spent(think, self.period * variance, self.period) / self.period
        return Outcome(sizes * self.batch, compute, allreduce, *per_step, head, spent)

    # --- What is sent ------------------------------------------------------------------------------------------------

    def _handed_on(self, groups: Groups) -> Array:
        """Seconds of a step in which members get what their leader was answered, shape (draws, groups)."""
        model = self.model
        if not model.hands_on:
            return np.zeros((len(model.delay), len(groups)))
        part = (self.exchanging.pull or 0) / model.nbytes if model.nbytes else 1.0
        if self.exchanging.peers:  # now and then the peer that is drawn is the group itself
            part *= 1 - 1 / len(groups)
        over = model.hand_hop + model.hand_ring * part
        return model.placement.handed_on(groups, over, part * model.nbytes) / self.period

    def _seconds(self, here: Array, handed: Array) -> ExchangeSeconds:
        """What an exchange takes each group.

        Args:
            here: of each group, whether its leader is on the server's node, shape (groups,).
            handed: seconds on the server's link in which answers are handed on, shape (draws, groups).
        """
        model, pattern = self.model, self.exchanging
        # Of the weights a part may be on the group's own node.
        push, pull = (model.away * (nbytes or 0) for nbytes in (pattern.push, pattern.pull))
        per_byte, delay, own = (
            each[:, None] + 0 * handed for each in (model.link_per_byte, model.delay, model.own_per_byte)
        )
        if pattern.peers:  # now and then the peer that is drawn is the group itself
            seconds = (1 - 1 / len(here)) * (delay + own * pull)
            return ExchangeSeconds(seconds * (not pattern.delay), 0 * model.serve, 0 * handed, 0 * handed)
        if here.any():
            per_byte = np.where(here, 0.0, per_byte)
            delay = np.where(here, model.placement.round_trip, delay)
            own = np.where(here, model.placement.per_byte or 0.0, own)
        # Servers on one node share its link.
        links = model.servers if model.placement.server is None else 1
        serve, per_byte, both = model.serve / model.servers, per_byte / links, push + pull
        # Messages cross a group's link and the server's at the same time, at a barrier while those of all groups do.
        beyond = np.maximum(own * both - per_byte * both * (len(here) if pattern.barrier else 1), 0.0)
        delay = delay * messages_of(model.servers) + beyond
        return ExchangeSeconds(delay, serve, per_byte * push, per_byte * pull + handed)

    def _local_steps(self, seconds: Array) -> Array:
        """Of each group, between two exchanges, if a step takes so long, shape (draws, groups); shape (groups,)."""
        if not self.exchanging.dynamic:
            return np.full(seconds.shape[1], self.period)
        return np.asarray(np.maximum(1, np.rint(self.period * seconds[0].min() / seconds[0])), int)

    def _at_a_barrier(self, hidden: Array, rest: Array, seconds: ExchangeSeconds) -> tuple[Array, Array]:
        """Seconds from exchange to exchange, and what they would be if exchanges took no time; (draws, groups)."""
        serve = seconds.serve[:, None]
        way = seconds.delay + np.minimum(serve, seconds.push)
        costs = BarrierExchange(way, np.maximum(serve, seconds.push), seconds.pull)
        cycle = costs.cycle(hidden, rest, self.is_rough)[:, None] + 0 * rest[:, :, 0]
        nothing = np.zeros((1, rest.shape[1]))
        alone = BarrierExchange(nothing, nothing, nothing).cycle(hidden[:1], rest[:1], is_rough=True)
        return cycle, alone + 0 * cycle

    def _beside(self, hidden: Array, rest: Array, variance: Array, shared: SharedStations) -> tuple[Array, Array]:
        """The same where no group waits for another."""
        then, delay = rest.mean(axis=2), shared.seconds.delay
        spent = np.maximum(shared.seconds.serve[:, None], shared.seconds.link)
        for _ in range(c.OVERLAP_ROUNDS):
            cycle = np.maximum(hidden, (delay + spent)[:, :, None]).mean(axis=2) + then
            spent = (spent + shared.spent(cycle - spent, variance, 1)) / 2
        return cycle, hidden.mean(axis=2) + then

    # --- The steps ---------------------------------------------------------------------------------------------------

    def _steps(self, groups: Groups, counts: Array, compute: Array, variance: Array, alone: Array) -> Array:
        """Equally likely seconds of so many steps of each group, shape (draws, groups, quantiles)."""
        if (counts == 1).all():
            return np.asarray(np.stack(self._work(groups, quantiles_of_slowest), axis=1) + alone[:, :, None])
        sums = quantiles_of_sum(counts * compute, counts * variance, self.model.jitter.shape[2])
        return np.asarray(sums + (counts * alone)[:, :, None])

    def _work(self, groups: Groups, of: Callable[[Array, Array], _T]) -> list[_T]:
        """What is asked of the compute times of each group's members: see `lightning_omni.performance.queueing`."""
        known: dict[Any, _T] = {}
        found = []
        for members in groups:
            kinds = Counter(
                (self.model.devices[rank], samples)
                for rank, samples in zip(members, self._shares(members), strict=True)
            )
            kind = frozenset(kinds.items())
            if kind not in known:
                known[kind] = of(*self._times(kinds))
            found.append(known[kind])
        return found

    def _shares(self, members: Sequence[int]) -> Sequence[float]:
        if not self.rebalance or len(members) == 1:
            return [self.batch] * len(members)
        return apportion(round(len(members) * self.batch), [self.speeds[rank] for rank in members])

    def _times(self, kinds: Mapping[tuple[tuple[int, float], float], int]) -> tuple[Array, Array]:
        """Equally likely seconds of a step of each kind of member, and how many there are."""
        which = np.array([device for (device, _), _ in kinds])
        slower = np.array([factor for (_, factor), _ in kinds])
        samples = np.array([share for _, share in kinds])
        seconds = slower * (self.model.overhead[:, which] + samples * self.model.per_sample[:, which])
        return seconds[:, :, None] * self.model.jitter[:, which], np.array(list(kinds.values()))


@dataclass(frozen=True)
class ExchangeSeconds:
    """What an exchange takes each group, in seconds.

    Attributes:
        delay: for which no group waits for another, shape (draws, groups).
        serve: of the server, shape (draws,).
        push: on the server's link, shape (draws, groups); nothing for a group on the server's node.
        pull: of the answer, likewise.
    """

    delay: Array
    serve: Array
    push: Array
    pull: Array

    @property
    def link(self) -> Array:
        """Of the server's link in the direction that is busier, shape (draws, groups)."""
        return np.maximum(self.push, self.pull)


@dataclass(frozen=True)
class SharedStations:
    """What groups share: the server, its link, and a merged head.

    Attributes:
        seconds: what an exchange takes each group.
        ring: of the seconds of a cycle that a group needs elsewhere, those of an all-reduce on the server's link, shape
            (draws, groups).
        head: seconds of a cycle at a merged head.
    """

    seconds: ExchangeSeconds
    ring: Array
    head: float

    def spent(self, think: Array, variance: Array, period: int) -> Array:
        """Seconds of a cycle there, with waiting, shape (draws, groups).

        Args:
            think: seconds of a cycle elsewhere, shape (draws, groups).
            variance: of these, in seconds squared, shape (draws, groups).
            period: visits to a merged head in a cycle.
        """
        ring = self.ring[:, :, None]  # is in both directions at once
        links = np.stack([self.seconds.push, self.seconds.pull], axis=2) + ring
        counted = np.divide(links - ring / 2, links, out=np.ones_like(links), where=links > 0)
        service = np.stack([self.seconds.serve, np.full_like(self.seconds.serve, self.head / period)], axis=1)
        return time_shared(think - self.ring, variance, links, counted, service, np.array([1, period])) - self.ring


@dataclass(frozen=True)
class Outcome:
    """What became of a plan; seconds of one step, of shape (draws, groups).

    ``whole`` is all of a step, where that is no sum of its parts.
    """

    samples: Array
    compute: Array
    allreduce: Array
    exchange: Array
    serve: Array
    link: Array
    head: float
    shared: Array
    whole: Array | None = None

    @cached_property
    def _rates(self) -> Array:
        """Steps per second of each group."""
        parts = self.compute + self.allreduce + self.exchange + self.shared
        rates = 1 / (parts if self.whole is None else self.whole)
        busy = np.maximum(self._busy(rates), 1.0)  # by a rounding error, at most
        return np.asarray(rates / busy[:, None])

    def _busy(self, rates: Array) -> Array:
        """Part of the time in which the busiest serial part is, at so many steps per second; shape (draws,)."""
        return np.asarray(np.max([(each * rates).sum(axis=1) for each in (self.serve, self.head, self.link)], axis=0))

    @property
    def seconds_per_update(self) -> Array:
        return np.asarray(1 / self._rates.sum(axis=1))

    @property
    def samples_rate(self) -> Array:
        return np.asarray(self._rates @ self.samples)

    @property
    def parts(self) -> dict[str, float]:
        rates, groups = self._rates[0], len(self.samples)
        weights = rates / rates.sum() / groups
        return {
            "compute": float(self.compute[0] @ weights),
            "allreduce": float(self.allreduce[0] @ weights),
            "exchange": float(self.exchange[0] @ weights),
            "serve": float(self.serve[0] @ weights) * groups,
            "link": float(self.link[0] @ weights) * groups,
            "head": self.head,
        }

    @property
    def serial(self) -> float:
        """Seconds of an update at the busiest of what all groups share: no update takes less."""
        parts = self.parts
        return max(parts[name] for name in ("serve", "link", "head"))

    @property
    def is_saturated(self) -> bool:
        """Whether groups that did not wait would bring more than a serial part can take."""
        alone = self.exchange + self.serve + 2 * self.link + self.head
        return bool(self._busy(1 / (self.compute + self.allreduce + alone))[0] >= 1 - 1e-9)

    @property
    def is_busy(self) -> bool:
        """Whether something that all groups share is busy nearly all the time."""
        return bool(self._busy(self._rates)[0] > 1 - c.IDLE)

    @property
    def bottleneck(self) -> str:
        names = ("serve", "link", "head") if self.is_saturated else ("compute", "allreduce", "exchange")
        largest = max(names, key=self.parts.__getitem__)
        return "server" if largest == "serve" else largest
