"""Hardware efficiency: seconds per update of any grouping, from a model fitted to measured steps of one group.

    step of a group = E[max over members of compute time] + all-reduce + rest + exchange / H
    compute time of a rank = (overhead + samples × seconds per sample) × jitter, with the measured jitter
    all-reduce of k members = (k - 1) / k × 2 a + (k - 1) × 2 l
    exchange = delay + service at shared resources, and the wait for it (`lightning_omni.tuning.model.queueing`)

Here a is the time of the gradient's bytes on a link, l that of one message, H the number of local steps between
exchanges, and the rest a time that is equal in all groupings. Without a barrier, groups wait for each other only at
shared resources, so an update follows every 1 / Σ 1 / (step of each group) seconds.

With S servers, each takes 1 / S of the service. The delay that does not depend on bytes counts twice, because the
servers agree on each update. If each node has a server, 1 / S of an exchange crosses no link.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from lightning_omni.checks import check_number, check_whole
from lightning_omni.errors import ConfigurationError
from lightning_omni.topology import Topology
from lightning_omni.tuning.model import constants as c
from lightning_omni.tuning.model.cost_fit import fit_model
from lightning_omni.tuning.model.cost_model import CostModel, ExchangePattern
from lightning_omni.tuning.model.forecast import Estimate, TrainingPlan
from lightning_omni.tuning.model.measurements import Measured, mean_samples
from lightning_omni.wire.all_reduce import EXACT, AllReduce, all_reduce_of

Array = np.ndarray[Any, Any]


BOTTLENECKS = {
    "compute": "compute",
    "allreduce": "all-reduce",
    "exchange": "way to the server",
    "server": "server",
    "link": "server's link",
}
"""The possible bottlenecks of a `Prediction`, in words."""


@dataclass(frozen=True)
class Prediction:
    """The predicted speed of a grouping.

    Attributes:
        seconds_per_update: seconds per local step of any group.
        samples_per_second: total over all groups.
        parts: seconds per update that ``"compute"``, ``"allreduce"``, ``"exchange"`` (its delay), ``"serve"``, and
            ``"link"`` take. The first three are divided among the groups; no update is faster than any part.
        bottleneck: the part that would help most if it were twice as fast: ``"compute"``, ``"allreduce"``,
            ``"exchange"``, ``"server"`` or ``"link"``.
    """

    seconds_per_update: Estimate
    samples_per_second: Estimate
    parts: Mapping[str, float]
    bottleneck: str
    topology: Topology

    def faster(self, factor: float) -> Prediction:
        seconds, samples = self.seconds_per_update.times(1 / factor), self.samples_per_second.times(factor)
        return replace(self, seconds_per_update=seconds, samples_per_second=samples)


@dataclass(frozen=True, eq=False)
class Profile:
    """A cost model of ranks and their links, fitted to steps of one group, which predicts the speed of groups.

    Args:
        batch_size: mean samples per rank and step.

    Example:
        Two ranks, the second half as fast:

        >>> measured = Measured(
        ...     ranks=(0, 1), samples=((8,) * 9,) * 2, own=((0.1,) * 9, (0.2,) * 9), steps=(0.2,) * 9
        ... )
        >>> profile = Profile.fit([measured])
        >>> [round(speed) for speed in profile.speeds]
        [80, 40]
        >>> str(profile.predict(1).seconds_per_update)  # the slower one counts
        '0.2 (0.2 to 0.2)'
        >>> round(profile.predict(1, rebalance=True).seconds_per_update.value, 3)  # 11 samples and 5
        0.137
    """

    measured: tuple[Measured, ...]
    model: CostModel
    batch_size: float

    @classmethod
    def fit(cls, measured: Sequence[Measured], draws: int = 100, seed: int = 0) -> Profile:
        """Fit the model to measured steps of one group, some thirty of each rank.

        ``draws`` is the number of resampled fits for the intervals.

        Raises:
            ConfigurationError: ``measured`` is empty or mixes different ranks, or ``draws`` is no whole number above 1.

        References:
            Lawson and Hanson 1974 (least squares without negative costs); Künsch 1989 (resampling of blocks).
        """
        if not measured:
            raise ConfigurationError("measured=[]: pass at least one segment of training")
        if any(each.ranks != measured[0].ranks for each in measured):
            raise ConfigurationError(
                f"measured: of ranks {[list(each.ranks) for each in measured]}; pass segments of the same ranks"
            )
        check_whole("draws", draws, "a whole number, 2 or more", low=2)
        return cls(tuple(measured), fit_model(measured, draws, seed), mean_samples(measured))

    @property
    def ranks(self) -> int:
        return len(self.model.devices)

    @property
    def speeds(self) -> tuple[float, ...]:
        """Return the samples per second of each rank alone, in batches of `batch_size`."""
        return tuple(self.model.speeds(self.batch_size).values())

    def predict(
        self,
        groups: int,
        *,
        rebalance: bool = False,
        exchanging: ExchangePattern | None = None,
        all_reduce: str = "fp32",
    ) -> Prediction:
        """Predict the speed of a grouping.

        Args:
            groups: number of groups, with sizes that differ by at most one. Ranks that differ in speed are sorted by it
                if that is faster.
            rebalance: whether the members of a group share its batch in proportion to their speeds.
            exchanging: pattern of exchanges; None for groups that exchange after each step, and wait for their own
                answers only.
            all_reduce: format of gradients in a group, as in ``Compression(all_reduce=...)``; ``"fp32"`` as measured.

        The intervals, of probability 0.8, cover noise in the measurements and the error of forecast exchanges, but no
        other errors of the model.

        Raises:
            ConfigurationError: an argument is wrong, or needs what was not measured.
        """
        plan = self._plan(self.model, rebalance, exchanging, all_reduce)
        topology, _ = self._fastest_topology(groups, plan)
        outcome = plan.outcome(topology)
        least = outcome.serial
        most = float(outcome.samples_rate[0] * outcome.seconds_per_update[0]) / least if least else math.inf
        seconds = _interval(outcome.seconds_per_update, least=least)
        samples = _interval(outcome.samples_rate, most=most)
        return Prediction(seconds, samples, outcome.parts, plan.bottleneck(topology), topology)

    def samples_per_second(
        self,
        groups: int,
        *,
        rebalance: bool = False,
        exchanging: ExchangePattern | None = None,
        all_reduce: str = "fp32",
    ) -> float:
        """Return the speed by the fit without resampling: about that of `predict`, and much quicker."""
        plan = self._plan(self.model.likely, rebalance, exchanging, all_reduce)
        topology, rate = self._fastest_topology(groups, plan)
        return float(plan.outcome(topology).samples_rate[0]) if rate is None else rate

    def _plan(
        self, model: CostModel, rebalance: bool, exchanging: ExchangePattern | None, all_reduce: str
    ) -> TrainingPlan:
        known = model.known(exchanging or ExchangePattern())
        return TrainingPlan(self._averaging(model, all_reduce), self.batch_size, rebalance, known)

    @property
    def largest_gain_of_split(self) -> float:
        """Return a bound on the speed-up of any group by proportional batches."""
        slowest, *others = sorted(self.speeds)
        sums = np.cumsum([slowest, *reversed(others)])  # of the slowest and the fastest few
        return float((sums / np.arange(1, len(sums) + 1)).max() / slowest)

    def largest_gain(self, all_reduce: str) -> float:
        """Return a bound on the speed-up of any group by an all-reduce format, compared to the exact one."""
        exact, other = self.model.likely, self._averaging(self.model.likely, all_reduce)
        computed = float((other.overhead - exact.overhead).max())
        # Groups of each size, on several nodes and on one.
        sizes, together = np.tile(np.arange(1, self.ranks + 1), 2), np.repeat([False, True], self.ranks)
        saved = float((exact.all_reduce(sizes, together) - other.all_reduce(sizes, together)).max())
        return 1 + max(0.0, saved - computed) * max(self.speeds) / self.batch_size

    def _averaging(self, model: CostModel, all_reduce: str) -> CostModel:
        format_ = all_reduce_of(all_reduce)
        if format_ == EXACT:
            return model
        if not self.shapes:
            raise ConfigurationError(
                f"all_reduce={all_reduce!r}: how many bytes travel depends on the parameters' shapes, which were not"
                " measured; fit with Measured(shapes=...)"
            )
        computed = max((each.averaging.get(all_reduce, 0.0) for each in self.measured), default=0.0)
        share = _share(format_, self.shapes)  # the fraction of a gradient's bytes that travels
        return replace(model.averaging(share, format_.messages), overhead=model.overhead + computed)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return next((each.shapes for each in reversed(self.measured) if each.shapes), ())

    def _fastest_topology(self, groups: int, plan: TrainingPlan) -> tuple[Topology, float | None]:
        """Return the faster of even groups and groups of similar speed, and its rate (None if not compared)."""
        check_whole("groups", groups, f"1 to {self.ranks}, the number of ranks", 1, self.ranks)
        speeds = plan.speeds
        even = Topology.of(speeds, groups)
        if max(speeds.values()) <= (1 + c.ALIKE) * min(speeds.values()) or groups in (1, self.ranks):
            return even, None
        alike = Topology.by_speed(speeds, groups)
        quick = replace(plan, model=plan.model.likely)
        rates = [float(quick.outcome(topology).samples_rate[0]) for topology in (even, alike)]
        return (alike, rates[1]) if rates[1] > rates[0] else (even, rates[0])

    def scaled(
        self,
        ranks: int | None = None,
        bandwidth: float | None = None,
        latency: float | None = None,
        servers: int | None = None,
        per_node: bool = False,
        batch_size: float | None = None,
    ) -> Profile:
        """Return the profile of a changed cluster, or of other batches.

        Args:
            ranks: number of ranks, copied cyclically from the measured ones.
            bandwidth: bytes per second of the server's link, and of links between nodes.
            latency: seconds of one message, on both.
            servers: number of parameter servers, which agree by one more message each way.
            per_node: whether each node runs one of ``servers``.
            batch_size: mean samples per rank and step.

        Raises:
            ConfigurationError: an argument is wrong or missing, or the bytes for a bandwidth were not measured.

        Example:
            >>> measured = Measured((0, 1), ((8,) * 9,) * 2, ((0.1,) * 9,) * 2, (0.1,) * 9)
            >>> profile = Profile.fit([measured]).scaled(ranks=16, latency=0.001)
            >>> [round(1000 * profile.predict(groups).seconds_per_update.value, 2) for groups in (1, 4, 16)]
            [130.0, 27.0, 6.38]
        """
        size = self.batch_size if batch_size is None else batch_size
        check_number("batch_size", size, "samples per rank and step, above 0", above=0, below=math.inf)
        model = self.model.changed(ranks, bandwidth, latency, servers, per_node)
        return replace(self, model=model, batch_size=float(size))


@cache
def _share(format_: AllReduce, shapes: tuple[tuple[int, ...], ...]) -> float:
    return format_.share(shapes)


def _interval(draws: Array, least: float = 0.0, most: float = math.inf) -> Estimate:
    """Return the basic bootstrap interval: resampled fits are off the first by as much as it is off the true value.

    ``least`` and ``most`` bound the value.
    """
    first, factors = float(draws[0]), draws[0] / draws[1:]
    low, value, high = first * np.quantile(factors, [(1 - 0.8) / 2, 0.5, (1 + 0.8) / 2])
    value = float(min(max(value, least), most))
    return Estimate(value, min(float(low), value), max(float(high), value))
