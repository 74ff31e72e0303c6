"""How a group's batch is split among members of different speed: the measurements in, the decision out. No I/O.

Rule 1: a split changes only if the group gets noticeably faster by it, so that ranks of one speed are left alone.
Rule 2: what is noticed once may be noise; a small gain has to be seen twice in a row, with the same member too slow.
Rule 3: where a member's own batches differ as much as members do, the members' speeds are taken to be one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance

from lightning_omni.performance import constants as c
from lightning_omni.protocol.leases import apportion


class Throughput:
    """One rank's samples per second: the median of its latest batches, without the very first ones.

    A few batches in a row that are all faster than every one before them, or all slower, say that something else uses
    the device, or does no longer: what was before is forgotten.

    Args:
        warm_up: batches that do not count.
        window: batches that the median is taken over, at most.

    Example:
        >>> throughput = Throughput(warm_up=0)
        >>> for seconds in (0.1, 0.1, 0.5):
        ...     throughput.note(samples=8, seconds=seconds)
        >>> throughput.speed
        80.0
    """

    def __init__(self, warm_up: int = c.SPLIT_WARM_UP, window: int = c.SPLIT_WINDOW) -> None:
        self._to_skip = warm_up
        self._speeds: deque[float] = deque(maxlen=window)

    def note(self, samples: int, seconds: float) -> None:
        """A batch is done.

        Args:
            samples: this rank's part of it.
            seconds: the time of its compute time, without waiting for others.
        """
        if self._to_skip:
            self._to_skip -= 1
        elif samples and seconds > 0:
            self._speeds.append(samples / seconds)
            self._forget_what_has_changed()

    @property
    def speed(self) -> float:
        """Samples per second; 0.0 if too little is known."""
        return median(self._speeds) if len(self._speeds) >= c.SPLIT_FEWEST else 0.0

    @property
    def variance(self) -> float:
        """Of the logarithm of `speed`, from the scatter of the batches, as if that were normal; 0.0 if unknown."""
        if len(self._speeds) < c.SPLIT_FEWEST:
            return 0.0
        return math.pi / 2 * variance(map(math.log, self._speeds)) / len(self._speeds)

    def _forget_what_has_changed(self) -> None:
        before, latest = list(self._speeds)[: -c.SPLIT_FEWEST], list(self._speeds)[-c.SPLIT_FEWEST :]
        if len(before) >= c.SPLIT_FEWEST and (min(latest) > max(before) or max(latest) < min(before)):
            self._speeds = deque(latest, maxlen=self._speeds.maxlen)


@dataclass(frozen=True)
class BatchSplit:
    """A better split of a group's batch.

    Attributes:
        shares: whole samples for each member.
        gain: by which part of its speed the group gets faster, as far as can be foreseen: 0.5 is half as fast again.
    """

    shares: tuple[int, ...]
    gain: float


class Balancer:
    """Decides when a group's batch is to be split otherwise. The same numbers in, the same decision out.

    Example:
        >>> Balancer().decide(shares=(8, 8), speeds=(10.0, 30.0))
        BatchSplit(shares=(4, 12), gain=1.0)
        >>> Balancer().decide(shares=(8, 8), speeds=(100.0, 104.0)) is None
        True
    """

    def __init__(self) -> None:
        self._relieved: frozenset[int] = frozenset()

    def decide(
        self, shares: Sequence[int], speeds: Sequence[float], variances: Sequence[float] = ()
    ) -> BatchSplit | None:
        """What would be better, if anything is.

        Args:
            shares: how the batch is split at present.
            speeds: each member's samples per second; 0.0 for one that is not known yet.
            variances: of the logarithm of each speed, by which it may be wrong; none if they are exact.

        Returns:
            A split that makes the group noticeably faster, or None.
        """
        if not all(speeds):
            return None
        speeds = shrunk(speeds, variances)
        best = apportion(sum(shares), speeds)
        gain = seconds(shares, speeds) / seconds(best, speeds) - 1
        seen_before = slowest(shares, speeds) in self._relieved
        self._relieved = frozenset()
        if gain > c.SPLIT_AT_ONCE or (gain > c.SPLIT_GAIN and seen_before):
            return BatchSplit(best, gain)
        if gain > c.SPLIT_GAIN:
            self._relieved = frozenset(place for place, share in enumerate(best) if share < shares[place])
        return None


def shrunk(speeds: Sequence[float], variances: Sequence[float]) -> list[float]:
    """Speeds that were measured with errors, each as much nearer to their mean as is likely (James and Stein 1961).

    The part of the members' variance that errors explain is taken out of it. Where step times are random, and a few
    batches say little of a member, all speeds are the same then, and nothing is split by chance.

    Args:
        speeds: of each member, in samples per second; above 0.
        variances: of the logarithm of each; none if they are exact.

    Example:
        >>> shrunk((10.0, 40.0), (0.0, 0.0))
        [10.0, 40.0]
        >>> [round(speed, 3) for speed in shrunk((10.0, 40.0), (2.0, 2.0))]
        [20.0, 20.0]
    """
    if len(speeds) < 2 or not any(variances):
        return list(speeds)
    logs = [math.log(speed) for speed in speeds]
    among, mean = variance(logs), fmean(logs)
    kept = max(0.0, 1 - fmean(variances) / among) if among else 0.0
    return [speed * math.exp((kept - 1) * (log - mean)) for speed, log in zip(speeds, logs, strict=True)]


def seconds(shares: Sequence[int], speeds: Sequence[float]) -> float:
    """Time of the slowest member for its part of a batch, in seconds.

    Args:
        shares: samples of each member.
        speeds: samples per second of each.

    Example:
        >>> seconds((8, 8), (10.0, 40.0))
        0.8
    """
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def slowest(shares: Sequence[int], speeds: Sequence[float]) -> int:
    """The member that the others wait for.

    Example:
        >>> slowest((8, 8), (10.0, 40.0))
        0
    """
    return max(range(len(shares)), key=lambda place: shares[place] / speeds[place])
