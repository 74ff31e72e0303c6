"""The speed of a run, and the check whether it is a reason to choose again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import reduce
from operator import add
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch

from lightning_omni.strategy.hooks import strategy_of
from lightning_omni.strategy.lightning_internals.callbacks import loader_of
from lightning_omni.tuning.callback.tuned_run import TunedRun
from lightning_omni.tuning.model.steps import StepTimer
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.trainer import batch_size_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def _standard_errors(probability: float) -> float:
    """Return the number of standard errors that noise exceeds with a probability, to either side."""
    return NormalDist().inv_cdf(1 - probability / 2)


@dataclass(frozen=True)
class Trained:
    """The batches that one rank trained.

    Attributes:
        timed: samples of the timed batches.
        seconds: seconds of the timed batches.
        batches: number of the timed batches.
        squares: sum of the squares of their seconds.
    """

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

    Example:
        >>> history = SpeedHistory()
        >>> [history.add(Speed(1000, seconds, error=0.05)) for seconds in (10.0, 9.0, 10.5, 14.0)]
        [False, False, False, True]
    """

    def __init__(self) -> None:
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
        return abs(math.log(now.rate / before.rate)) > max(
            math.log(1 + c.CLEAR_CHANGE), _standard_errors(probability) * error
        )


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
        Trained(timed=24, seconds=6.0, batches=3, squares=12.0)
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
        timed = Trained() if seconds is None else Trained(samples, seconds, 1, seconds**2)
        self.trained = self.trained + timed

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


_OTHER_SPEED = "the ranks train at another speed than before"
"""The reason to choose again."""


class SpeedRecord:
    """A record of how fast a run trains.

    Args:
        run: the tuned run.

    Attributes:
        throughput: the counter of this rank's samples while it trains.
        speed: speed of all ranks in that part of the last epoch that was trained with the present setting; None if
            unknown.
    """

    def __init__(self, run: TunedRun) -> None:
        self._run = run
        self.throughput = RunThroughput()
        self.speed: Speed | None = None
        self._speeds = SpeedHistory()
        self._has_changed = False
        self._totals: dict[int, tuple[float, float]] = {}
        self._changed_in = -1

    # --- Measurements -------------------------------------------------------------------------------------------------

    def search_begins(self) -> None:
        """Drop the totals of the last choice."""
        self._totals = {}

    def changed(self, in_mid_epoch: bool = False) -> None:
        """Start over, because the run trains with another setting from now on."""
        self._speeds, self._has_changed = SpeedHistory(), False
        self.speed = None
        if in_mid_epoch:
            self._changed_in = self._run.trainer.current_epoch
            self.throughput.take()

    def stash_speeds(self) -> SpeedHistory:
        """Start over for a temporary setting, and return the speeds before it."""
        speeds = self._speeds
        self.changed(in_mid_epoch=self._run.strategy.epochs.is_open)
        return speeds

    def restore_speeds(self, speeds: SpeedHistory) -> None:
        """Continue with the speeds before a temporary setting, in the middle of an epoch."""
        self.changed(in_mid_epoch=True)
        self._speeds = speeds

    def epoch_done(self) -> None:
        """Record the speed of an epoch, or of its trained part. On all ranks; the report leaves validations out."""
        run = self._run
        timed, rate, variance = self._sum_over_ranks(self.throughput.take())
        if run.rounds and run.state.setting is not None and rate > 0:
            groups = run.state.setting.groups
            before = self._totals.get(groups, (0.0, 0.0))
            self._totals[groups] = before[0] + timed, before[1] + timed / rate
            run.rounds[-1].measured_after[groups] = self._totals[groups][0] / self._totals[groups][1]
        is_mixed = self._changed_in == run.trainer.current_epoch  # part of it was trained with another setting
        self.speed = _speed(timed, rate, variance)
        self._has_changed = self.speed is not None and not is_mixed and self._speeds.add(self.speed)

    def speed_so_far(self) -> Speed | None:
        """Return the speed in a current epoch whose groups are all at a synchronization point. All ranks call it."""
        return _speed(*self._sum_over_ranks(self.throughput.trained))

    def _sum_over_ranks(self, own: Trained) -> list[float]:
        """Return the timed samples of all ranks, and the samples per second with their variance."""
        world, strategy = self._run.world, self._run.strategy
        counts = torch.tensor([own.timed, own.rate, own.variance], device=strategy.root_device)
        *sums, variance = strategy.reduce(counts, reduce_op="sum").tolist()
        # Ranks that wait for each other measure the same, and count once: those of a group, or all.
        is_one = len(world.topology.alive) == 1 or world.method.has_barrier
        return [*sums, variance * len(world.live_ranks) / (1 if is_one else len(world.topology.alive))]

    # --- Decision -----------------------------------------------------------------------------------------------------

    def reason(self) -> str:
        """Return why another search may be worth its time, or ""; the same on all ranks."""
        # The forecast ignores how the run went with its choice, and would choose the same again.
        has_changed = self._has_changed and not self._run.state.is_final
        return _OTHER_SPEED if self._run.broadcast(int(has_changed)) else ""


def _speed(timed: float, rate: float, variance: float) -> Speed | None:
    """Return the speed; None if nothing was timed, or too little on some rank."""
    return Speed(timed, timed / rate, math.sqrt(variance) / rate) if rate > 0 and math.isfinite(variance) else None


__all__ = ["SpeedRecord"]
