"""Samples per second while a run trains: of the batches that were trained, in the time that they took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_omni.performance.step_timer import StepTimer
from lightning_omni.strategy.declared import loader_of
from lightning_omni.strategy.hooks import strategy_of
from lightning_omni.tuner.probing import batch_size_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


@dataclass(frozen=True)
class Trained:
    """What one rank trained.

    Attributes:
        samples: of all batches.
        timed: of those batches whose time is known.
        seconds: that these took.
    """

    samples: int = 0
    timed: int = 0
    seconds: float = 0.0


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
        Trained(samples=40, timed=24, seconds=6.0)
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
        before, seconds = self._trained, self._timer.done()
        timed = 0 if seconds is None else samples
        self._trained = Trained(before.samples + samples, before.timed + timed, before.seconds + (seconds or 0.0))

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
