"""Samples per second while a run trains: of the batches that were trained, in the time that they took."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import reduce
from operator import add
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from lightning_omni.performance.step_timer import StepTimer
from lightning_omni.search import constants as c
from lightning_omni.strategy.declared import loader_of
from lightning_omni.strategy.hooks import strategy_of
from lightning_omni.tuner.tunable import batch_size_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def _standard_errors(probability: float) -> float:
    """How many of them noise exceeds with this probability, to either side."""
    return NormalDist().inv_cdf(1 - probability / 2)


@dataclass(frozen=True)
class Trained:
    """What one rank trained.

    Attributes:
        samples: of all batches.
        timed: of those batches whose time is known.
        seconds: that these took.
        batches: how many these are.
        squares: sum of the squares of their seconds.
    """

    samples: int = 0
    timed: int = 0
    seconds: float = 0.0
    batches: int = 0
    squares: float = 0.0

    def __add__(self, other: Trained) -> Trained:
        return Trained(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    @property
    def rate(self) -> float:
        """Samples per second; 0.0 if no batch is timed."""
        return self.timed / self.seconds if self.seconds else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean time of a batch, as a part of it; infinite if too few are timed."""
        if self.batches < 2 or not self.seconds:
            return math.inf
        mean = self.seconds / self.batches
        return math.sqrt(max(0.0, self.squares / self.batches - mean**2) / (self.batches - 1)) / mean

    @property
    def variance(self) -> float:
        """Square of the standard error of the rate; infinite if too few batches are timed, or none."""
        return (self.rate * self.error) ** 2 if math.isfinite(self.error) else math.inf


@dataclass(frozen=True)
class Speed:
    """How fast all ranks together train, validations, saving and all else left out.

    Attributes:
        samples: of all ranks.
        seconds: that all of them together take for these, if none waits for another at the end.
        error: standard error of the seconds, as a part of them.
    """

    samples: float
    seconds: float
    error: float

    def __add__(self, other: Speed) -> Speed:
        """Of both, one after the other."""
        seconds = self.seconds + other.seconds
        error = math.hypot(self.error * self.seconds, other.error * other.seconds) / seconds
        return Speed(self.samples + other.samples, seconds, error)

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds

    def log_most(self, probability: float = c.FALSE_ALARM) -> float:
        """Logarithm of the most samples per second that noise can have hidden, but with this probability."""
        return math.log(self.rate) + _standard_errors(probability) * self.error

    def is_known_within(self, factor: float) -> bool:
        """Whether noise has hidden no more than that factor."""
        return _standard_errors(c.FALSE_ALARM) * self.error <= math.log(factor)


class SpeedHistory:
    """The speeds of a run's epochs, and whether it trains faster or slower than it did.

    After each epoch the last 1, 2, 4, ... epochs, up to half of all, are compared with those before. That is asked many
    times, so the probability of a false alarm is divided over all questions of a run that may have any number of
    epochs: the n-th epoch's have 1/(n(n + 1)) of it, which sums to one (alpha spending, as in sequential trials). The
    noise is that of all epochs, since a few batches tell little of it.

    Args:
        part: speeds that differ by less than this part do not matter.

    Example:
        >>> history = SpeedHistory(part=0.2)
        >>> [history.add(Speed(1000, seconds, error=0.05)) for seconds in (10.0, 9.0, 10.5, 14.0)]
        [False, False, False, True]
    """

    def __init__(self, part: float) -> None:
        self._least = math.log(1 + part)
        self._epochs: list[Speed] = []

    def add(self, epoch: Speed) -> bool:
        """One more epoch.

        Returns:
            Whether the speed is another one by now.
        """
        self._epochs.append(epoch)
        count = len(self._epochs)
        windows = [2**power for power in range((count // 2).bit_length())]
        return any(self._differs(window, c.FALSE_ALARM / ((count - 1) * count * len(windows))) for window in windows)

    def _differs(self, last: int, probability: float) -> bool:
        """Whether that of the last epochs does, by more than noise does with this probability."""
        before, now = reduce(add, self._epochs[:-last]), reduce(add, self._epochs[-last:])
        both = before + now
        error = both.error * math.sqrt(both.seconds / before.seconds + both.seconds / now.seconds)
        return abs(math.log(now.rate / before.rate)) > max(self._least, _standard_errors(probability) * error)


class RunThroughput:
    """Counts one rank's samples and the seconds in which it trained them, validations and searches left out.

    The first batch after an interruption is not timed: it begins with other things, and waits for ranks that are later.

    Args:
        clock: gives the time in seconds.

    Attributes:
        trained: since `take` was last called.

    Example:
        >>> moments = iter([0.0, 2.0, 4.0, 100.0, 102.0])
        >>> counted = RunThroughput(clock=lambda: next(moments))
        >>> counted.go()
        >>> for _ in range(3):
        ...     counted.batch_done(8)
        >>> counted.pause(), counted.go()  # a validation
        (None, None)
        >>> counted.batch_done(8), counted.batch_done(8)
        (None, None)
        >>> counted.take()
        Trained(samples=40, timed=24, seconds=6.0, batches=3, squares=12.0)
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._timer = StepTimer(clock)
        self._is_on = False
        self.trained = Trained()

    def go(self) -> None:
        """Training begins, or goes on."""
        self._is_on = True
        self._timer.interrupt()

    def pause(self) -> None:
        """Something else begins."""
        self._is_on = False

    def batch_done(self, samples: int) -> None:
        """A batch has ended.

        Args:
            samples: this rank's part of it.
        """
        if not self._is_on:
            return
        seconds = self._timer.done()
        timed = Trained() if seconds is None else Trained(0, samples, seconds, 1, seconds**2)
        self.trained = self.trained + Trained(samples) + timed

    def take(self) -> Trained:
        """What was trained since this was last called."""
        taken, self.trained = self.trained, Trained()
        return taken


def samples_in(trainer: Trainer, batch_idx: int) -> int:
    """This rank's samples in the batch that has just been trained."""
    leases = strategy_of(trainer).epochs.leases
    if leases is not None:
        return int(leases.samples)
    loader: Any = loader_of(trainer)  # whose sampler knows its length
    size = batch_size_of(loader)
    return max(0, min(size, len(loader.sampler) - batch_idx * size))
