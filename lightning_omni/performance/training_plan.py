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
    residence,
    slowest,
)
from lightning_omni.protocol.leases import apportion
from lightning_omni.topology import Topology

Array = np.ndarray[Any, Any]
Groups = Sequence[tuple[int, ...]]
_T = TypeVar("_T")


_TWICE_AS_FAST = {
    "compute": ("overhead", "per_sample", "between"),
    "allreduce": ("ring", "hop"),
    "exchange": ("delay", "delay_per_byte"),
    "server": ("serve",),
    "link": ("link_per_byte",),
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
            changed = replace(model, **{name: getattr(model, name) / 2 for name in halved})
            return float(replace(rough, model=changed).outcome(topology).samples_rate[0])

        rates = {name: rate(halved) for name, halved in _TWICE_AS_FAST.items()}
        return max(rates, key=rates.__getitem__)

    def outcome(self, topology: Topology) -> Outcome:
        """How fast that would be."""
        model, groups = self.model, [topology.members(group) for group in topology.alive]
        sizes = np.array([len(members) for members in groups])
        work = self._work(groups, slowest)
        compute, variance = (np.stack(column, axis=1) for column in zip(*work, strict=True))
        between = model.between[:, None]
        allreduce = 2 * (sizes - 1) * (model.ring[:, None] / sizes + model.hop[:, None])
        if len(groups) == 1:  # plain synchronous training, with no server and no head
            nothing = np.zeros_like(model.delay)
            return Outcome(sizes * self.batch, compute + between, allreduce, nothing, nothing, nothing, 0.0, nothing)
        if model.hands_on:
            allreduce = allreduce + self._handed_on(sizes)
        serve, link = self._serial()
        # What comes one after the other and takes equally long each time makes one queue only, at the longest.
        busy, rest = np.maximum(serve, link), np.minimum(serve, link)
        delay = self._delay(len(groups)) + rest
        head = model.head_per_sample * self.batch * float(sizes.mean())
        per_step = delay / self.period, serve / self.period, link / self.period
        if self.exchanging.barrier or self.exchanging.delay:
            alone = allreduce + head + between
            hidden, then = (self._steps(groups, count, compute, variance, alone) for count in self._hidden_and_others)
            play = self._at_a_barrier if self.exchanging.barrier else self._beside
            cycle, waiting = play(hidden, then, self.period * variance, delay, busy)
            cycle = np.maximum(cycle / self.period, len(groups) * head)
            compute = np.maximum(waiting / self.period - alone, compute)
            exposed = np.maximum(cycle - compute - alone, 0.0).mean(axis=1)
            parts = compute + between, allreduce, exposed
            return Outcome(sizes * self.batch, *parts, *per_step[1:], head, 0 * delay, cycle)
        service, visits = np.stack([busy, np.full_like(busy, head)], axis=1), np.array([1, self.period])
        compute = compute + between
        think = self.period * (compute + allreduce) + delay[:, None]
        shared = residence(think, self.period * variance, service, visits) / self.period
        return Outcome(sizes * self.batch, compute, allreduce, *per_step, head, shared)

    # --- The exchange ------------------------------------------------------------------------------------------------

    @property
    def _nbytes(self) -> tuple[float, float]:
        """Of a push and of its answer, as far as they cross links."""
        return self.model.away * (self.exchanging.push or 0), self.model.away * (self.exchanging.pull or 0)

    def _serial(self) -> tuple[Array, Array]:
        """Seconds of the server, and of its link in the direction that is busier, for an exchange."""
        model, nbytes = self.model, max(self._nbytes)
        if self.exchanging.peers:
            return 0 * model.serve, 0 * model.serve
        return model.serve / model.servers, model.link_per_byte * nbytes / model.servers

    def _handed_on(self, sizes: Array) -> Array:
        """Seconds of a step in which members get what their leader was answered, shape (draws, groups): by a tree."""
        rounds = np.ceil(np.log2(sizes))
        return rounds * self.model.link_per_byte[:, None] * (self.exchanging.pull or 0) / self.period

    def _delay(self, groups: int) -> Array:
        """Seconds of an exchange but for these, for which no group waits for another."""
        model, (push, pull) = self.model, self._nbytes
        if self.exchanging.peers:  # now and then the peer that is drawn is the group itself
            per_byte = (model.delay_per_byte + model.link_per_byte) / 2
            return (1 - 1 / groups) * (model.delay + per_byte * pull) * (not self.exchanging.delay)
        mean = (push + pull) / 2
        # The other direction of the server's link is a part of the delay.
        other = model.link_per_byte / model.servers * (mean - max(push, pull))
        return model.delay * messages_of(model.servers) + np.maximum(model.delay_per_byte * mean + other, 0.0)

    @property
    def _hidden_and_others(self) -> tuple[int, int]:
        """Steps between two exchanges that are made while one is under way, and the others."""
        hidden = min(self.exchanging.delay, self.period)
        return hidden, self.period - hidden

    def _at_a_barrier(self, hidden: Array, rest: Array, _: Array, delay: Array, busy: Array) -> tuple[Array, Array]:
        """Seconds from exchange to exchange, and what they would be if exchanges took no time; (draws, groups)."""
        model, (push, pull) = self.model, self._nbytes
        serve, link = model.serve / model.servers, model.link_per_byte / model.servers
        came = np.maximum(serve, link * push)
        # Answers go out one after the other, too; what of an exchange is neither no group waits for but its own.
        sent = np.minimum(link * pull, np.maximum(delay + busy - came, 0.0))
        costs = BarrierExchange(np.maximum(delay + busy - came - sent, 0.0), came, sent)
        cycle = costs.cycle(hidden, rest, self.is_rough)[:, None] + 0 * rest[:, :, 0]
        nothing = np.zeros(1)
        alone = BarrierExchange(nothing, nothing, nothing).cycle(hidden[:1], rest[:1], is_rough=True)
        return cycle, alone + 0 * cycle

    def _beside(self, hidden: Array, rest: Array, variance: Array, delay: Array, busy: Array) -> tuple[Array, Array]:
        """The same where no group waits for another."""
        spent, then = busy, rest.mean(axis=2)
        for _ in range(c.OVERLAP_ROUNDS):
            cycle = np.maximum(hidden, (delay + spent)[:, None, None]).mean(axis=2) + then
            found = residence(cycle - spent[:, None], variance, busy[:, None], np.ones(1))
            spent = (spent + found) / 2
        return cycle, hidden.mean(axis=2) + then

    # --- The steps ---------------------------------------------------------------------------------------------------

    def _steps(self, groups: Groups, count: int, compute: Array, variance: Array, alone: Array) -> Array:
        """Equally likely seconds of so many steps of each group, shape (draws, groups, quantiles)."""
        if count == 1:
            return np.asarray(np.stack(self._work(groups, quantiles_of_slowest), axis=1) + alone[:, :, None])
        sums = quantiles_of_sum(count * compute, count * variance, self.model.jitter.shape[2])
        return np.asarray(sums + count * alone[:, :, None])

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
class Outcome:
    """What became of a plan; seconds of one step, shape (draws, groups) or (draws,).

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
        parts = self.compute + self.allreduce + (self.exchange + self.shared)[:, None]
        rates = 1 / (parts if self.whole is None else self.whole)
        busy = np.maximum(self._serial * rates.sum(axis=1), 1.0)  # by a rounding error, at most
        return np.asarray(rates / busy[:, None])

    @property
    def _serial(self) -> Array:
        return np.maximum(np.maximum(self.serve, self.link), self.head)

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
            "exchange": float(self.exchange[0]) / groups,
            "serve": float(self.serve[0]),
            "link": float(self.link[0]),
            "head": self.head,
        }

    @property
    def is_saturated(self) -> bool:
        """Whether groups that did not wait would bring more than a serial part can take."""
        alone = self.exchange[0] + max(self.serve[0], self.link[0]) + self.head
        return bool(self._serial[0] * (1 / (self.compute[0] + self.allreduce[0] + alone)).sum() >= 1 - 1e-9)

    @property
    def is_busy(self) -> bool:
        """Whether something that all groups share is busy nearly all the time."""
        return bool(self._serial[0] * self._rates[0].sum() > 1 - c.IDLE)

    @property
    def bottleneck(self) -> str:
        names = ("serve", "link", "head") if self.is_saturated else ("compute", "allreduce", "exchange")
        largest = max(names, key=lambda name: self.parts[name])
        return "server" if largest == "serve" else largest
