"""The speed of a run, and its comparison with the forecast."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch

from lightning_omni.strategy.lightning_internals.callbacks import loader_of
from lightning_omni.tuning.callback.settings import AppliedSetting
from lightning_omni.tuning.callback.tuned_run import Command, TunedRun, TunerReports, strategy_of
from lightning_omni.tuning.model.setting import Setting
from lightning_omni.tuning.model.steps import StepTimer
from lightning_omni.tuning.search import Search, TrainedSegment
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.search.choice import Choice, best_by_forecast
from lightning_omni.tuning.search.evidence import mean_error
from lightning_omni.tuning.trainer import batch_size_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

__all__ = ["ForecastCheck", "SpeedRecord"]

# --- Speed ------------------------------------------------------------------------------------------------------------


def _standard_errors(probability: float) -> float:
    return NormalDist().inv_cdf(1 - probability / 2)


@dataclass(frozen=True)
class TimedBatches:
    """The timed batches of one rank: their samples (``timed``), seconds, number, and sum of squared seconds."""

    timed: int = 0
    seconds: float = 0.0
    batches: int = 0
    squares: float = 0.0

    def __add__(self, other: TimedBatches) -> TimedBatches:
        return TimedBatches(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

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
        return (self.rate * self.error) ** 2 if math.isfinite(self.error) else math.inf


@dataclass(frozen=True)
class Speed:
    """The seconds that all ranks together train for ``samples``, with their relative standard error."""

    samples: float
    seconds: float
    error: float

    def __add__(self, other: Speed) -> Speed:
        seconds = self.seconds + other.seconds
        error = math.hypot(self.error * self.seconds, other.error * other.seconds) / seconds
        return Speed(self.samples + other.samples, seconds, error)

    @property
    def rate(self) -> float:
        return self.samples / self.seconds

    def log_most(self, probability: float = c.FALSE_ALARM) -> float:
        """Return an upper bound of the log rate, which noise exceeds with at most this probability."""
        return math.log(self.rate) + _standard_errors(probability) * self.error


class SpeedHistory:
    """The speeds of a run's epochs, and whether it trains faster or slower than before.

    After each epoch the last 1, 2, 4, ... epochs, up to half of all, are compared with those before. The n-th epoch's
    comparisons share 1/(n(n - 1)) of the probability of a false alarm, which sums to one over a run of any length
    (alpha spending, as in sequential trials).

    Example:
        >>> history = SpeedHistory()
        >>> [history.add(Speed(1000, seconds, error=0.05)) for seconds in (10.0, 9.0, 10.5, 14.0)]
        [False, False, False, True]
    """

    def __init__(self) -> None:
        self._totals: list[Speed] = []

    def add(self, epoch: Speed) -> bool:
        self._totals.append(self._totals[-1] + epoch if self._totals else epoch)
        count = len(self._totals)
        windows = [2**power for power in range((count // 2).bit_length())]
        return any(self._differs(window, c.FALSE_ALARM / ((count - 1) * count * len(windows))) for window in windows)

    def _differs(self, last: int, probability: float) -> bool:
        before, both = self._totals[-last - 1], self._totals[-1]
        samples, seconds = both.samples - before.samples, both.seconds - before.seconds
        error = both.error * math.sqrt(both.seconds / before.seconds + both.seconds / seconds)
        return abs(math.log(samples / seconds / before.rate)) > max(
            math.log(1 + c.CLEAR_CHANGE), _standard_errors(probability) * error
        )


class RunThroughput:
    """A counter of one rank's samples and of the seconds of their training.

    The first batch after an interruption is not timed. ``trained`` are the batches since the last `take`.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._timer = StepTimer(clock)
        self.trained = TimedBatches()

    def interrupt(self) -> None:
        self._timer.interrupt()

    def batch_done(self, samples: int) -> None:
        if (seconds := self._timer.done()) is not None:
            self.trained = self.trained + TimedBatches(samples, seconds, 1, seconds**2)

    def take(self) -> TimedBatches:
        taken, self.trained = self.trained, TimedBatches()
        return taken


def samples_in(trainer: Trainer, batch_idx: int) -> int:
    leases = strategy_of(trainer).parts.epochs.leases
    if leases is not None:
        return int(leases.samples)
    loader: Any = loader_of(trainer)  # its sampler has a length
    size = batch_size_of(loader)
    return max(0, min(size, len(loader.sampler) - batch_idx * size))


class SpeedRecord:
    """A record of how fast a run trains. All ranks call its methods.

    Attributes:
        speed: speed of all ranks in the part of the last epoch that was trained with the present setting, if known.
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
        self._totals = {}

    def changed(self) -> None:
        self._speeds, self._has_changed = SpeedHistory(), False
        self.speed = None
        if self._run.strategy.parts.epochs.is_open:
            self._changed_in = self._run.trainer.current_epoch
            self.throughput.take()
            self.throughput.interrupt()  # the time of forming groups is no batch's

    def epoch_done(self) -> None:
        run = self._run
        timed, rate, variance = self._sum_over_ranks(self.throughput.take())
        if run.rounds and run.state.setting is not None and rate > 0:
            groups = run.state.setting.groups
            before = self._totals.get(groups, (0.0, 0.0))
            samples, seconds = self._totals[groups] = before[0] + timed, before[1] + timed / rate
            run.rounds[-1].measured_after[groups] = samples / seconds
        is_mixed = self._changed_in == run.trainer.current_epoch  # part of it was trained with another setting
        self.speed = _speed(timed, rate, variance)
        self._has_changed = self.speed is not None and not is_mixed and self._speeds.add(self.speed)

    def speed_so_far(self) -> Speed | None:
        """Return the speed in the current epoch so far, with the present setting."""
        return _speed(*self._sum_over_ranks(self.throughput.trained))

    def _sum_over_ranks(self, own: TimedBatches) -> list[float]:
        """Return the timed samples of all ranks, and the samples per second with their variance."""
        world, strategy = self._run.world, self._run.strategy
        counts = torch.tensor([own.timed, own.rate, own.variance], device=strategy.root_device)
        *sums, variance = strategy.reduce(counts, reduce_op="sum").tolist()
        # Ranks that wait for each other measure the same, and count once: those of a group, or all.
        is_one = len(world.topology.alive) == 1 or world.method.has_barrier
        return [*sums, variance * len(world.live_ranks) / (1 if is_one else len(world.topology.alive))]

    # --- Decision -----------------------------------------------------------------------------------------------------

    def reason(self) -> str:
        """Return why another search may be worth its time, or ""."""
        # The forecast ignores how the run went with its choice, and would choose the same again.
        has_changed = self._run.broadcast(int(self._has_changed and not self._run.state.is_final))
        return "the ranks train at another speed than before" if has_changed else ""


def _speed(timed: float, rate: float, variance: float) -> Speed | None:
    return Speed(timed, timed / rate, math.sqrt(variance) / rate) if rate > 0 and math.isfinite(variance) else None


# --- Comparison with the forecast -------------------------------------------------------------------------------------

# A forecast may be wrong about unseen effects: a server that shares its cores, a link with other traffic, a lock in the
# user's data. Then one group may be faster after all, for the samples that groups cost.
#
# The forecast of one group may be wrong, too: its batches were a few fast ones, or the machine has become slower since,
# for groups and for one. So one group is timed again, and from then on groups are chosen only if they pay although they
# are slower than predicted, by the measured factor. If they do not, they are given up.
#
# One group with the user's own setting may also be slower than in the first batches: ranks that stall now and then, or
# slow down later, make all others wait. It is then timed again, too.


class ForecastCheck:
    """A comparison of a run's samples per second with the forecast.

    The speed of groups is compared once after each choice. `SpeedRecord` detects groups that get slower later. All
    ranks call the public methods.
    """

    def __init__(self, run: TunedRun, applied: AppliedSetting, speeds: SpeedRecord, reports: TunerReports) -> None:
        self._run, self._applied, self._speed_record, self._reports = run, applied, speeds, reports
        self._steps, self._next = 0, c.FEWEST_STEPS

    def step_done(self) -> str:
        """Return why one group with the user's own setting is to be timed again, or "".

        Its speed is compared with the forecast after `c.FEWEST_STEPS`, and then whenever a fifth more steps are done.
        The comparisons until the steps have doubled share one probability of a false alarm.
        """
        run, state = self._run, self._run.state
        is_user_setting = state.setting is not None and state.setting == state.own
        if not is_user_setting or state.is_final or state.before_trial is not None:
            return ""
        self._steps += 1
        if self._steps < self._next:
            return ""
        self._next = math.ceil(self._steps * (1 + c.CLEAR_CHANGE))
        speed = self._speed_record.speed_so_far()
        return run.world.broadcast_text(self._why_slower(speed) if speed is not None else "")

    def _why_slower(self, speed: Speed) -> str:
        run = self._run
        if not run.searches:
            return ""
        search = run.searches[-1]
        least = search.prediction(run.setting).samples_per_second.low
        probability = c.FALSE_ALARM * math.log2(1 + c.CLEAR_CHANGE)
        if math.log(least) - speed.log_most(probability) < math.log(c.GAIN):
            return ""
        predicted = search.throughput(run.setting)  # as in the report
        return f"it trains {speed.rate:.3g} samples per second, and {predicted:.3g} were predicted"

    def epoch_done(self) -> str:
        """Check the ended epoch's speed; return why one group is to be timed again, or "".

        Groups that prove too slow a second time are given up.
        """
        speed = self._speed_record.speed
        return self._check(speed) if self._is_due and speed is not None else ""

    def validated(self) -> str:
        """Check the speed so far, once it is certain enough, as `epoch_done` does."""
        speed = self._speed_record.speed_so_far() if self._is_due else None
        is_known = speed is not None and speed.log_most() - math.log(speed.rate) <= math.log(c.GAIN)
        return self._check(speed) if speed is not None and is_known else ""

    @property
    def _is_due(self) -> bool:
        state, setting = self._run.state, self._run.state.setting
        if state.is_final or setting is None or state.own is None or state.checked == state.rounds:
            return False
        return setting.groups > 1 or setting.further != state.own.further

    def _check(self, speed: Speed) -> str:
        run, state, found = self._run, self._run.state, None
        state.checked = state.rounds
        if run.is_rank_zero and run.searches:
            found = self._refutes(run.searches[-1], run.setting, speed) or self._first_of_its_values()
            state.segments = self._trained(speed, is_refuted=found is not None and found.setting != run.setting)
        command, was_refuted = run.broadcast_command(found), state.refuted
        if command is None:
            return ""
        state.refuted = was_refuted or command.setting != run.setting
        if command.setting == run.setting or not was_refuted:
            return command.why
        self._applied.return_to_one_group(command.setting)
        self._speed_record.changed()
        self._reports.chosen(command)
        return ""

    def _first_of_its_values(self) -> Command | None:
        run, further = self._run, self._run.setting.further
        if further in (run.own.further, *(each.setting.further for each in run.state.segments)):
            return None
        values = ", ".join(f"{name}={value}" for name, value in further)
        return Command(run.setting, why=f"the speed with {values} is known")

    def _trained(self, speed: Speed, is_refuted: bool) -> list[TrainedSegment]:
        run, setting, search = self._run, self._run.setting, self._run.searches[-1]
        log_ratio = math.log(search.modelled_throughput(setting) / speed.rate)
        variance = speed.error**2 + mean_error(search.measured) ** 2
        segment = TrainedSegment(setting, log_ratio, variance, speed.rate if is_refuted else 0.0)
        return [*(each for each in run.state.segments if each.setting != setting), segment]

    def _refutes(self, search: Search, setting: Setting, speed: Speed) -> Command | None:
        """Choose one group and return its command, unless groups of that speed may be worth their samples.

        With one group, return None, too.
        """
        one = best_by_forecast(search, groups=1)
        theory = search.theory
        one_at_least = math.log(search.prediction(one).samples_per_second.low)
        if setting.groups == 1 or speed.log_most() - theory(setting) >= one_at_least - theory(one):
            return None
        predicted = search.throughput(setting)
        why = (
            f"{setting.groups} groups train {speed.rate:.3g} samples per second, and {predicted:.3g} were predicted;"
            " for the samples that they need, one group is faster"
        )
        self._run.choice = Choice(one, why)
        return Command(one, why=why)
