"""Whether a run under way is to be searched again, why, and how much time there is for it."""

from __future__ import annotations

import math

import torch

from lightning_omni.search import SearchSpec
from lightning_omni.search import constants as c
from lightning_omni.tuner.run import TunedRun
from lightning_omni.tuner.throughput import RunThroughput, Speed, SpeedHistory, Trained

_REASONS = _NONE, _UNDER_WAY_ALREADY, SPEED, _STALLED = (
    "",
    "the run is under way",
    "the ranks do not train as fast as before",
    "the target would not be reached in time",
)


class Retuning:
    """Follows how fast a run is, and how far it has come.

    Args:
        run: that is tuned.

    Attributes:
        throughput: counts this rank's samples while it trains.
        rate: samples per second of all ranks in the last epoch, validations included; 0.0 if part of it was trained
            with another setting, or there was none.
        speed: of all ranks in that part of the last epoch that was trained with the present setting; None if unknown.
    """

    def __init__(self, run: TunedRun) -> None:
        self._run = run
        self.throughput = RunThroughput()
        self.rate = 0.0
        self.speed: Speed | None = None
        self._speeds = SpeedHistory(c.CHANGED)
        self._has_changed = False
        self._totals: dict[int, tuple[float, float]] = {}
        self._changed_in = -1
        self._seconds_before = 0.0

    # --- What was measured --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Training begins."""
        self._seconds_before = self._run.state.trained

    def search_begins(self) -> None:
        """What is measured from now on is told of the next choice."""
        self._totals = {}

    def changed(self, in_mid_epoch: bool = False) -> None:
        """From now on the run trains with another setting."""
        self.rate, self._speeds, self._has_changed = 0.0, SpeedHistory(c.CHANGED), False
        self.speed = None
        if in_mid_epoch:
            self._changed_in = self._run.trainer.current_epoch
            self.throughput.take()

    def stash_speeds(self) -> SpeedHistory:
        """The run trains with another setting for a while: says how fast it was, for when it returns."""
        speeds = self._speeds
        self.changed(in_mid_epoch=self._run.strategy.epochs.is_open)
        return speeds

    def restore_speeds(self, speeds: SpeedHistory) -> None:
        """From now on, in the middle of an epoch, the run trains as it did before, when it was so fast."""
        self.changed(in_mid_epoch=True)
        self._speeds = speeds

    def epoch_done(self) -> None:
        """An epoch has ended, or what was trained of it. On all ranks; validations do not count for the report."""
        run = self._run
        trained, timed, rate, variance = self._of_all(self.throughput.take())
        if run.rounds and run.state.setting is not None and rate > 0:
            groups = run.state.setting.groups
            before = self._totals.get(groups, (0.0, 0.0))
            self._totals[groups] = before[0] + timed, before[1] + timed / rate
            run.rounds[-1].measured_after[groups] = self._totals[groups][0] / self._totals[groups][1]
        seconds, self._seconds_before = run.seconds - self._seconds_before, run.seconds
        is_mixed = self._changed_in == run.trainer.current_epoch  # part of it was trained with another setting
        self.rate = trained / seconds if seconds > 0 and not is_mixed else 0.0
        self.speed = _speed(timed, rate, variance)
        self._has_changed = self.speed is not None and not is_mixed and self._speeds.add(self.speed)

    def speed_so_far(self) -> Speed | None:
        """The same of an epoch under way, in which all groups are at a synchronization point. On all ranks."""
        _, *counts = self._of_all(self.throughput.trained)
        return _speed(*counts)

    def _of_all(self, own: Trained) -> list[float]:
        """Samples of all ranks, those of them that are timed, and their samples per second with the variance."""
        world, strategy = self._run.world, self._run.strategy
        counts = torch.tensor([own.samples, own.timed, own.rate, own.variance], device=strategy.root_device)
        *sums, variance = strategy.reduce(counts, reduce_op="sum").tolist()
        # Ranks that wait for each other say the same with their batches, and count once: those of a group, or all.
        is_one = len(world.topology.alive) == 1 or world.method.has_barrier
        return [*sums, variance * len(world.live_ranks) / (1 if is_one else len(world.topology.alive))]

    # --- What follows from it -----------------------------------------------------------------------------------------

    def reason(self, epoch: int) -> str:
        """Why another search may be worth its time, or nothing; the same on all ranks.

        Args:
            epoch: how many have ended.
        """
        run = self._run
        is_early = run.state.rounds == 1 and epoch <= max(1, c.EARLY * run.epochs)
        found = _NONE
        if run.learns_from_run:
            # The forecast does not know how the run went with its choice, and would choose the same again.
            found = SPEED if self._has_changed and not run.state.is_final else _NONE
        elif is_early:
            found = _UNDER_WAY_ALREADY
        elif self._has_changed:
            found = SPEED
        elif self._has_stalled(epoch):
            found = _STALLED
        return _REASONS[run.broadcast(_REASONS.index(found))]

    def _has_stalled(self, epoch: int) -> bool:
        """Whether at the rate of the last epoch the target would not be reached in time."""
        options, ends = self._run.options, self._run.state.at_epochs
        known = [number for number, value in enumerate(ends) if not math.isnan(value)]
        is_new = len(known) > 1 and known[-1] == len(ends) - 1
        if options.target is None or not is_new or options.is_reached(ends[-1]):
            return False
        before, now = (abs(options.target - ends[number]) for number in known[-2:])
        gained = (before - now) / (known[-1] - known[-2])
        return not gained > 0 or now / gained > self._run.epochs - epoch

    def allowance(self, reason: str) -> float:
        """Seconds for a search: what was earned so far, or what was reserved."""
        run, budget = self._run, self._run.options.budget
        earned = budget * (run.seconds + run.spent) - run.spent
        if reason != _UNDER_WAY_ALREADY or not self.rate:
            return earned
        by_epochs, by_time = run.epochs * run.samples_per_epoch / self.rate, run.seconds + run.seconds_left
        whole = min(by_epochs, by_time, run.options.seconds_to_target(run.state.reached))
        return max(earned, budget * 2 * c.BUDGET_PART * whole - run.spent)

    def specification_for_step(self, spec: SearchSpec) -> SearchSpec:
        """A search for the size of the step alone."""
        run = self._run
        tried = [each for search in run.searches for each in search.tried if each.losses]
        first_loss = tried[0].first_loss if tried else None  # rank 0 knows it from its first probe
        is_final = ends_soon(run.options.seconds_to_target(run.state.reached), run.seconds)
        return spec.for_step(first_loss, is_final and not run.trainer.lr_scheduler_configs)


def _speed(timed: float, rate: float, variance: float) -> Speed | None:
    """None if nothing was timed, or on some rank too little."""
    return Speed(timed, timed / rate, math.sqrt(variance) / rate) if rate > 0 and math.isfinite(variance) else None


def ends_soon(expected: float, seconds: float) -> bool:
    """Whether the target is expected before the run has lasted three times as long.

    About so long a run whose steps have become a third as large is ahead of one whose steps have not.

    Args:
        expected: seconds of training until the target.
        seconds: of training so far.
    """
    return 0 < expected <= c.SMALLER * seconds


__all__ = ["SPEED", "Retuning", "ends_soon"]
