"""Samples per second while a run trains: of the trained batches, in the time that they took."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import reduce
from operator import add
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from lightning_omni.strategy.hooks import strategy_of
from lightning_omni.strategy.lightning_internals.callbacks import loader_of
from lightning_omni.tuning.callback.tunable import batch_size_of
from lightning_omni.tuning.model.steps.timer import StepTimer
from lightning_omni.tuning.search import constants as c

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def _standard_errors(probability: float) -> float:
    """Return the number of standard errors that noise exceeds with a probability, to either side."""
    return NormalDist().inv_cdf(1 - probability / 2)


@dataclass(frozen=True)
class Trained:
    """The batches that one rank trained.

    Attributes:
        samples: samples of all batches.
        timed: samples of the timed batches.
        seconds: seconds of the timed batches.
        batches: number of the timed batches.
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
        return self.timed / self.seconds if self.seconds else 0.0

    @property
    def error(self) -> float:
        """Return the relative standard error of a batch's mean time; infinite if too few are timed."""
        if self.batches < 2 or not self.seconds:
            return math.inf
        mean = self.seconds / self.batches
        return math.sqrt(max(0.0, self.squares / self.batches - mean**2) / (self.batches - 1)) / mean

    @property
    def variance(self) -> float:
        """Return the square of the standard error of the rate; infinite if too few batches are timed."""
        return (self.rate * self.error) ** 2 if math.isfinite(self.error) else math.inf


@dataclass(frozen=True)
class Speed:
    """The speed of all ranks together, without validations, saving and everything else.

    Attributes:
        samples: samples of all ranks.
        seconds: seconds that all ranks together take for these, if none waits for another at the end.
        error: relative standard error of the seconds.
    """

    samples: float
    seconds: float
    error: float

    def __add__(self, other: Speed) -> Speed:
        """Return the speed of both, one after the other."""
        seconds = self.seconds + other.seconds
        error = math.hypot(self.error * self.seconds, other.error * other.seconds) / seconds
        return Speed(self.samples + other.samples, seconds, error)

    @property
    def rate(self) -> float:
        return self.samples / self.seconds

    def log_most(self, probability: float = c.FALSE_ALARM) -> float:
        """Return an upper bound of the log rate, which noise exceeds with at most this probability."""
        return math.log(self.rate) + _standard_errors(probability) * self.error

    def is_known_within(self, factor: float) -> bool:
        """Return whether noise hides no more than a factor."""
        return _standard_errors(c.FALSE_ALARM) * self.error <= math.log(factor)


class SpeedHistory:
    """The speeds of a run's epochs, and whether it trains faster or slower than before.

    After each epoch the last 1, 2, 4, ... epochs, up to half of all, are compared with those before. There are many
    comparisons, so they share the probability of a false alarm, in a run of any number of epochs: the n-th epoch's have
    1/(n(n - 1)) of it, which sums to one (alpha spending, as in sequential trials). The noise is that of all epochs,
    since a few batches show little of it.

    Args:
        part: relative difference of speeds that does not matter yet.

    Example:
        >>> history = SpeedHistory(part=0.2)
        >>> [history.add(Speed(1000, seconds, error=0.05)) for seconds in (10.0, 9.0, 10.5, 14.0)]
        [False, False, False, True]
    """

    def __init__(self, part: float) -> None:
        self._least = math.log(1 + part)
        self._epochs: list[Speed] = []

    def add(self, epoch: Speed) -> bool:
        """Add an epoch, and return whether the speed has changed."""
        self._epochs.append(epoch)
        count = len(self._epochs)
        windows = [2**power for power in range((count // 2).bit_length())]
        return any(self._differs(window, c.FALSE_ALARM / ((count - 1) * count * len(windows))) for window in windows)

    def _differs(self, last: int, probability: float) -> bool:
        """Return whether the last epochs differ by more than noise does with this probability."""
        before, now = reduce(add, self._epochs[:-last]), reduce(add, self._epochs[-last:])
        both = before + now
        error = both.error * math.sqrt(both.seconds / before.seconds + both.seconds / now.seconds)
        return abs(math.log(now.rate / before.rate)) > max(self._least, _standard_errors(probability) * error)


class RunThroughput:
    """A counter of one rank's samples and of the seconds of their training, without validations and searches.

    The first batch after an interruption is not timed, because it includes other work, and waits for late ranks.

    Args:
        clock: returns the time in seconds.

    Attributes:
        trained: the batches since the last `take`.

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
        """Start counting."""
        self._is_on = True
        self._timer.interrupt()

    def pause(self) -> None:
        """Stop counting."""
        self._is_on = False

    def batch_done(self, samples: int) -> None:
        """Count this rank's samples in a batch."""
        if not self._is_on:
            return
        seconds = self._timer.done()
        timed = Trained() if seconds is None else Trained(0, samples, seconds, 1, seconds**2)
        self.trained = self.trained + Trained(samples) + timed

    def take(self) -> Trained:
        """Return and drop the batches since the last call."""
        taken, self.trained = self.trained, Trained()
        return taken


def samples_in(trainer: Trainer, batch_idx: int) -> int:
    """Return this rank's samples in the batch that has just been trained."""
    leases = strategy_of(trainer).epochs.leases
    if leases is not None:
        return int(leases.samples)
    loader: Any = loader_of(trainer)  # its sampler has a length
    size = batch_size_of(loader)
    return max(0, min(size, len(loader.sampler) - batch_idx * size))
