"""The timer of steps, their parts, and the split of a group's batch among members of different speed.

Rule 1: A split changes only if the group gets noticeably faster.
Rule 2: One observation may be noise, so a small gain must be seen twice in a row, with the same member too slow.
Rule 3: Where one member's batches differ as much as the members do, all members count as equally fast.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance

from lightning_omni.group.leased_batches import apportion
from lightning_omni.tuning.model import constants as c
from lightning_omni.wire.messages import Status


class StepTimer:
    """A timer of the seconds from the end of one step to the end of the next.

    Example:
        >>> moments = iter([0.0, 2.0, 4.5])
        >>> timer = StepTimer(clock=lambda: next(moments))
        >>> timer.done(), timer.done(), timer.done(elsewhere=0.5)
        (None, 2.0, 2.0)
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.perf_counter
        self._since: float | None = None

    def start(self) -> None:
        if self._since is None:
            self._since = self._clock()

    def interrupt(self) -> None:
        """Discard the recorded beginning: the next step is timed only after `start`."""
        self._since = None

    def done(self, elsewhere: float = 0.0) -> float | None:
        """Record the end of a step; return its seconds, less those ``elsewhere``; None if its beginning is unknown."""
        since, self._since = self._since, self._clock()
        return None if since is None else max(0.0, self._since - since - elsewhere)


def parts_of_step(step: float, forward: float, exchange: float) -> dict[str, float]:
    """Return the seconds of a step to the end of the forward pass, of the exchange, and the rest; empty if untimed.

    The rest is the backward pass, the all-reduce and waiting for the group.

    Example:
        >>> parts_of_step(0.5, 0.125, 0.25)
        {'forward': 0.125, 'exchange': 0.25, 'rest': 0.125}
    """
    if not step:
        return {}
    return {"forward": forward, "exchange": exchange, "rest": max(0.0, step - forward - exchange)}


def straggler_sentence(status: Status, can_rebalance: bool = False) -> str:
    """Return a sentence that names the worst straggler; empty if no rank slows its group down.

    With ``can_rebalance``, it suggests splitting the batch by speed.
    """
    worst, sentence = c.STRAGGLER, ""
    for group in status.groups:
        others = len(group.ranks) - 1
        if not others:
            continue
        rest = (group.compute_time * len(group.ranks) - group.slowest_time) / others
        if group.slowest_time - rest > c.STRAGGLER_SECONDS and rest > 0 and group.slowest_time / rest > worst:
            worst = group.slowest_time / rest
            sentence = (
                f"rank {group.slowest_rank} holds group {group.group} up: {group.slowest_time * 1e3:.0f} ms to the end"
                f" of its forward pass, against {rest * 1e3:.0f} ms on the others"
            )
    if sentence and can_rebalance:
        sentence += '; rebalance="auto" splits the batch in proportion to the speeds'
    return sentence


class Throughput:
    """The samples per second of one rank: the median over its latest batches, without the first ones.

    If the last few batches are all faster, or all slower, than every earlier one, the earlier ones are discarded.

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
        if self._to_skip:
            self._to_skip -= 1
        elif samples and seconds > 0:
            self._speeds.append(samples / seconds)
            self._forget_what_has_changed()

    @property
    def speed(self) -> float:
        return median(self._speeds) if len(self._speeds) >= c.SPLIT_FEWEST else 0.0

    @property
    def variance(self) -> float:
        """Return the variance of log `speed`, as if batches scattered normally; 0.0 if too few are recorded."""
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
        gain: predicted relative gain in speed: 0.5 is 50 % faster.
    """

    shares: tuple[int, ...]
    gain: float


class Balancer:
    """A policy that decides when to change the split of one group's batch. Equal histories give equal decisions.

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
        """Return a split that makes the group noticeably faster, or None.

        ``shares`` are the members' present samples, ``speeds`` their samples per second, 0.0 if not known yet;
        ``variances`` are those of their logarithms, empty if the speeds are exact.
        """
        if not all(speeds):
            return None
        speeds = shrunk(speeds, variances)
        best = apportion(sum(shares), speeds)
        gain = seconds(shares, speeds) / seconds(best, speeds) - 1
        seen_before = slowest(shares, speeds) in self._relieved
        self._relieved = frozenset()
        if gain > c.SPLIT_AT_ONCE or (gain > c.ALIKE and seen_before):
            return BatchSplit(best, gain)
        if gain > c.ALIKE:
            self._relieved = frozenset(place for place, share in enumerate(best) if share < shares[place])
        return None


def shrunk(speeds: Sequence[float], variances: Sequence[float]) -> list[float]:
    """Shrink measured speeds towards their geometric mean according to their errors (James and Stein 1961).

    The variance due to measurement errors is removed from the variance among members. The arguments are as in
    `Balancer.decide`; all speeds are known.

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
    """Return the seconds that the slowest member takes for its share of a batch.

    Example:
        >>> seconds((8, 8), (10.0, 40.0))
        0.8
    """
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def slowest(shares: Sequence[int], speeds: Sequence[float]) -> int:
    return max(range(len(shares)), key=lambda place: shares[place] / speeds[place])
