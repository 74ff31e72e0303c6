"""Forecasts: plans of training, and the seconds that each part of a step takes by the fitted costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from lightning_omni.group.leased_batches import apportion
from lightning_omni.topology import Topology
from lightning_omni.tuning.model import constants as c
from lightning_omni.tuning.model.cost_model import CostModel, ExchangePattern
from lightning_omni.tuning.model.queueing import (
    BarrierExchange,
    quantiles_of_slowest,
    quantiles_of_sum,
    slowest,
    time_shared,
)

Array = np.ndarray[Any, Any]
Groups = Sequence[tuple[int, ...]]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Estimate:
    """A value and its interval.

    Attributes:
        value: median.

    Example:
        >>> str(Estimate(120.0, 100.0, 150.0).times(2))
        '240 (200 to 300)'
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"

    def times(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


_TWICE_AS_FAST = {
    "compute": ("overhead", "per_sample", "between"),
    "allreduce": ("ring", "hop", "hand_ring", "hand_hop", "node_ring", "node_hop"),
    "exchange": ("delay", "own_per_byte"),
    "server": ("serve",),
    "link": ("link_per_byte", "own_per_byte"),
}
"""Fields of the model that are halved to find the effect of each part."""


@dataclass(frozen=True)
class TrainingPlan:
    """A way to train, whose speed the cost model determines. No field of its `ExchangePattern` is None."""

    model: CostModel
    batch: float
    rebalance: bool
    exchanging: ExchangePattern
    is_rough: bool = False

    @property
    def period(self) -> int:
        return self.exchanging.period

    @cached_property
    def speeds(self) -> dict[int, float]:
        return self.model.speeds(self.batch)

    def bottleneck(self, topology: Topology) -> str:
        model, rough = self.model.likely, replace(self, is_rough=True)

        def rate(halved: Sequence[str]) -> float:
            costs = {name: getattr(model, name) for name in halved}
            changed = {name: cost / 2 for name, cost in costs.items() if cost is not None}
            return float(replace(rough, model=replace(model, **changed)).outcome(topology).samples_rate[0])

        rates = {name: rate(halved) for name, halved in _TWICE_AS_FAST.items()}
        return max(rates, key=rates.__getitem__)

    def outcome(self, topology: Topology) -> Outcome:
        model, groups = self.model, [topology.members(group) for group in topology.alive]
        sizes = np.array([len(members) for members in groups])
        work = self._work(groups, slowest)
        compute, variance = (np.stack(column, axis=1) for column in zip(*work, strict=True))
        between = model.between[:, None]
        together = np.array([model.placement.are_together(members) for members in groups])
        allreduce = model.all_reduce(sizes, together)
        nothing = np.zeros_like(allreduce)
        if len(groups) == 1:  # plain synchronous training, with no server
            return Outcome(sizes * self.batch, compute + between, allreduce, nothing, nothing, nothing, nothing)
        here = np.array(model.placement.are_here(groups))
        handed = self._handed_on(groups)
        seconds = self._seconds(here, np.where(here & ~together, self.period * handed, 0.0))
        # If only the leader of a group is on the server's node, all messages of the group cross the server's link.
        ring = np.where(here & ~together, self.period * allreduce, 0.0)
        allreduce = allreduce + np.where(here & ~together, 0.0, handed)
        steps = self._local_steps(compute + allreduce + between)
        per_step = seconds.delay / steps, seconds.serve[:, None] / steps, seconds.link / steps
        if self.exchanging.barrier or self.exchanging.delay:
            alone = allreduce + between
            few = np.minimum(self.exchanging.delay, steps)  # steps made during an exchange
            hidden, then = (self._steps(groups, count, compute, variance, alone) for count in (few, steps - few))
            if self.exchanging.barrier:
                cycle, waiting = self._at_a_barrier(hidden, then, seconds)
            else:
                cycle, waiting = self._beside(hidden, then, self.period * variance, seconds, ring)
            cycle = cycle / steps
            compute = np.maximum(waiting / steps - alone, compute)
            exposed = np.maximum(cycle - compute - alone, 0.0)
            parts = compute + between, allreduce, exposed
            return Outcome(sizes * self.batch, *parts, *per_step[1:], nothing, cycle)
        compute = compute + between
        think = self.period * (compute + allreduce) + seconds.delay
        spent = seconds.spent(think, self.period * variance, ring) / self.period
        return Outcome(sizes * self.batch, compute, allreduce, *per_step, spent)

    # --- Exchanges ---------------------------------------------------------------------------------------------------

    def _handed_on(self, groups: Groups) -> Array:
        """Return the seconds of a step in which leaders forward answers, shape (draws, groups)."""
        model = self.model
        if not model.hands_on:
            return np.zeros((len(model.delay), len(groups)))
        part = (self.exchanging.pull or 0) / model.nbytes if model.nbytes else 1.0
        if self.exchanging.peers:  # sometimes a group draws itself as its peer
            part *= 1 - 1 / len(groups)
        over = model.hand_hop + model.hand_ring * part
        return model.placement.handed_on(groups, over, part * model.nbytes) / self.period

    def _seconds(self, here: Array, handed: Array) -> ExchangeSeconds:
        """Return the seconds of an exchange.

        Args:
            here: whether the leader of each group is on the server's node, shape (groups,).
            handed: seconds on the server's link in which leaders forward answers, shape (draws, groups).
        """
        model, pattern = self.model, self.exchanging
        # A part of the weights may be on the group's own node.
        push, pull = (model.away * (nbytes or 0) for nbytes in (pattern.push, pattern.pull))
        per_byte, delay, own = (
            each[:, None] + 0 * handed for each in (model.link_per_byte, model.delay, model.own_per_byte)
        )
        if pattern.peers:  # sometimes a group draws itself as its peer
            seconds = (1 - 1 / len(here)) * (delay + own * pull)
            return ExchangeSeconds(seconds * (not pattern.delay), 0 * model.serve, 0 * handed, 0 * handed)
        if here.any():
            per_byte = np.where(here, 0.0, per_byte)
            delay = np.where(here, model.placement.round_trip, delay)
            own = np.where(here, max(model.placement.per_byte or 0.0, model.placement.copy_per_byte), own)
        # Servers on one node share its link.
        links = model.servers if model.placement.server is None else 1
        serve, per_byte, both = model.serve / model.servers, per_byte / links, push + pull
        # A message crosses its group's link and the server's at once; at a barrier, all groups' messages do.
        beyond = np.maximum(own * both - per_byte * both * (len(here) if pattern.barrier else 1), 0.0)
        delay = delay * (1 if model.servers == 1 else 2) + beyond
        return ExchangeSeconds(delay, serve, per_byte * push, per_byte * pull + handed)

    def _local_steps(self, seconds: Array) -> Array:
        if not self.exchanging.dynamic:
            return np.full(seconds.shape[1], self.period)
        return np.asarray(np.maximum(1, np.rint(self.period * seconds[0].min() / seconds[0])), int)

    def _at_a_barrier(self, hidden: Array, rest: Array, seconds: ExchangeSeconds) -> tuple[Array, Array]:
        """Return the seconds between exchanges, and those without the exchange, each of shape (draws, groups)."""
        serve = seconds.serve[:, None]
        way = seconds.delay + np.minimum(serve, seconds.push)
        costs = BarrierExchange(way, np.maximum(serve, seconds.push), seconds.pull)
        cycle = costs.cycle(hidden, rest, self.is_rough)[:, None] + 0 * rest[:, :, 0]
        nothing = np.zeros((1, rest.shape[1]))
        alone = BarrierExchange(nothing, nothing, nothing).cycle(hidden[:1], rest[:1], is_rough=True)
        return cycle, alone + 0 * cycle

    def _beside(
        self, hidden: Array, rest: Array, variance: Array, seconds: ExchangeSeconds, ring: Array
    ) -> tuple[Array, Array]:
        """Return the results of `_at_a_barrier` for groups that do not wait for each other."""
        then = rest.mean(axis=2)
        spent = np.maximum(seconds.serve[:, None], seconds.link)
        for _ in range(c.OVERLAP_ROUNDS):
            cycle = np.maximum(hidden, (seconds.delay + spent)[:, :, None]).mean(axis=2) + then
            spent = (spent + seconds.spent(cycle - spent, variance, ring)) / 2
        return cycle, hidden.mean(axis=2) + then

    # --- The steps ---------------------------------------------------------------------------------------------------

    def _steps(self, groups: Groups, counts: Array, compute: Array, variance: Array, alone: Array) -> Array:
        """Return equally likely seconds of ``counts`` steps of each group, shape (draws, groups, quantiles)."""
        if (counts == 1).all():
            return np.asarray(np.stack(self._work(groups, quantiles_of_slowest), axis=1) + alone[:, :, None])
        sums = quantiles_of_sum(counts * compute, counts * variance, self.model.jitter.shape[2])
        return np.asarray(sums + (counts * alone)[:, :, None])

    def _work(self, groups: Groups, of: Callable[[Array, Array], _T]) -> list[_T]:
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

    def _times(self, kinds: Mapping[tuple[int, float], int]) -> tuple[Array, Array]:
        """Return equally likely seconds of a step of each kind of member, and the number of members of each kind."""
        which, samples = (np.array(column) for column in zip(*kinds, strict=True))
        seconds = self.model.overhead[:, which] + samples * self.model.per_sample[:, which]
        return seconds[:, :, None] * self.model.jitter[:, which], np.array(list(kinds.values()))


@dataclass(frozen=True)
class ExchangeSeconds:
    """The seconds of an exchange for each group, of shape (draws, groups) but for ``serve``.

    Attributes:
        delay: time outside shared resources.
        serve: time of the server, shape (draws,).
        push: time of the push on the server's link; 0 for a group on the server's node.
        pull: time of the answer on that link, and of forwarding it from the server's node.
    """

    delay: Array
    serve: Array
    push: Array
    pull: Array

    @property
    def link(self) -> Array:
        return np.maximum(self.push, self.pull)

    def spent(self, think: Array, variance: Array, ring: Array) -> Array:
        """Compute the seconds of a cycle at the server and its link, with waiting, of shape (draws, groups).

        ``ring`` are the seconds of a cycle's all-reduces on the server's link, which ``think`` includes; see
        `residence`.
        """
        rings = ring[:, :, None]  # in both directions at once
        links = np.stack([self.push, self.pull], axis=2) + rings
        counted = np.divide(links - rings / 2, links, out=np.ones_like(links), where=links > 0)
        return time_shared(think - ring, variance, links, counted, self.serve) - ring


@dataclass(frozen=True)
class Outcome:
    """The predicted speed of a plan: seconds of one step, by part, shape (draws, groups).

    ``samples`` have shape (groups,); ``whole`` is the whole step, if that is not the sum of its parts.
    """

    samples: Array
    compute: Array
    allreduce: Array
    exchange: Array
    serve: Array
    link: Array
    shared: Array
    whole: Array | None = None

    @cached_property
    def _rates(self) -> Array:
        parts = self.compute + self.allreduce + self.exchange + self.shared
        rates = 1 / (parts if self.whole is None else self.whole)
        busy = np.max([(each * rates).sum(axis=1) for each in (self.serve, self.link)], axis=0)
        return np.asarray(rates / np.maximum(busy, 1.0)[:, None])  # by a rounding error, at most

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
        }

    @property
    def serial(self) -> float:
        """Return the seconds per update at the busiest shared resource, a lower bound."""
        parts = self.parts
        return max(parts[name] for name in ("serve", "link"))
