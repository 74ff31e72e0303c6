"""How a group's batch is split among members of different speed: the measurements in, the decision out. No I/O.

Rule 1: a split changes only if the group gets noticeably faster by it, so that ranks of one speed are left alone.
Rule 2: what is noticed once may be noise; a small gain has to be seen twice in a row, with the same member too slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lightning_omni.performance import constants as c
from lightning_omni.protocol.leases import apportion


class Throughput:
    """One rank's samples per second: the median of its latest batches, without the very first ones.

    Args:
        warm_up: batches that do not count.
        window: batches that the median is taken over.

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

    @property
    def speed(self) -> float:
        """Samples per second; 0.0 if too little is known."""
        return median(self._speeds) if len(self._speeds) >= c.SPLIT_FEWEST else 0.0


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

    def decide(self, shares: Sequence[int], speeds: Sequence[float]) -> BatchSplit | None:
        """What would be better, if anything is.

        Args:
            shares: how the batch is split at present.
            speeds: each member's samples per second; 0.0 for one that is not known yet.

        Returns:
            A split that makes the group noticeably faster, or None.
        """
        if not all(speeds):
            return None
        best = apportion(sum(shares), speeds)
        gain = seconds(shares, speeds) / seconds(best, speeds) - 1
        seen_before = slowest(shares, speeds) in self._relieved
        self._relieved = frozenset()
        if gain > c.SPLIT_AT_ONCE or (gain > c.SPLIT_GAIN and seen_before):
            return BatchSplit(best, gain)
        if gain > c.SPLIT_GAIN:
            self._relieved = frozenset(place for place, share in enumerate(best) if share < shares[place])
        return None


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
