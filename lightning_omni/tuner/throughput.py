"""Samples per second while a run trains: of the batches that were trained, in the time that they took."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from lightning_omni.performance.step_timer import StepTimer
from lightning_omni.strategy.declared import loader_of
from lightning_omni.strategy.hooks import strategy_of
from lightning_omni.tuner.probing import batch_size_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

_CERTAIN = 2.0
"""Standard errors by which speeds have to differ: noise alone brings that about once in twenty times."""


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
    def error(self) -> float:
        """Standard error of the mean time of a batch, as a part of it; infinite if too few are timed."""
        if self.batches < 2 or not self.seconds:
            return math.inf
        mean = self.seconds / self.batches
        return math.sqrt(max(0.0, self.squares / self.batches - mean**2) / (self.batches - 1)) / mean


@dataclass(frozen=True)
class Speed:
    """How fast all ranks together train, validations, saving and all else left out.

    Attributes:
        samples: of all ranks.
        seconds: of the rank that trained for the longest.
        error: standard error of the time of a batch, as a part of it.
    """

    samples: float
    seconds: float
    error: float

    def __add__(self, other: Speed) -> Speed:
        """Of both together."""
        seconds = self.seconds + other.seconds
        error = math.hypot(self.error * self.seconds, other.error * other.seconds) / seconds
        return Speed(self.samples + other.samples, seconds, error)

    def differs_from(self, other: Speed, part: float) -> bool:
        """Whether it is another one by more than this part, and by more than noise explains.

        Args:
            other: at another time.
            part: of the speed.

        Example:
            >>> before = Speed(1000, 10.0, 0.05)
            >>> Speed(1000, 12.5, 0.05).differs_from(before, 0.2), Speed(1000, 12.5, 0.15).differs_from(before, 0.2)
            (True, False)
        """
        ratio = (self.samples / self.seconds) / (other.samples / other.seconds)
        least = max(math.log(1 + part), _CERTAIN * math.hypot(self.error, other.error))
        return abs(math.log(ratio)) > least


class RunThroughput:
    """Counts one rank's samples and the seconds in which it trained them, validations and searches left out.

    The first batch after an interruption is not timed: it begins with other things, and waits for ranks that are later.

    Args:
        clock: gives the time in seconds.

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

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._timer = StepTimer(clock)
        self._is_on = False
        self._trained = Trained()

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
        self._trained = self._trained + Trained(samples) + timed

    def take(self) -> Trained:
        """What was trained since this was last called."""
        taken, self._trained = self._trained, Trained()
        return taken


def samples_in(trainer: Trainer, batch_idx: int) -> int:
    """This rank's samples in the batch that has just been trained."""
    leases = strategy_of(trainer).epochs.leases
    if leases is not None:
        return int(leases.samples)
    loader: Any = loader_of(trainer)  # whose sampler knows its length
    size = batch_size_of(loader)
    return max(0, min(size, len(loader.sampler) - batch_idx * size))
