"""The speed of a run, and the check whether it is a reason to choose again."""

from __future__ import annotations

import math

import torch

from lightning_omni.tuning.callback.guards.throughput import RunThroughput, Speed, SpeedHistory, Trained
from lightning_omni.tuning.callback.run import TunedRun
from lightning_omni.tuning.search import constants as c

_OTHER_SPEED = "the ranks train at another speed than before"
"""The reason to choose again."""


class Retuning:
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
        self._speeds = SpeedHistory(c.CHANGED)
        self._has_changed = False
        self._totals: dict[int, tuple[float, float]] = {}
        self._changed_in = -1

    # --- Measurements -------------------------------------------------------------------------------------------------

    def search_begins(self) -> None:
        """Drop the totals of the last choice."""
        self._totals = {}

    def changed(self, in_mid_epoch: bool = False) -> None:
        """Start over, because the run trains with another setting from now on."""
        self._speeds, self._has_changed = SpeedHistory(c.CHANGED), False
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
        _, timed, rate, variance = self._of_all(self.throughput.take())
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
        _, *counts = self._of_all(self.throughput.trained)
        return _speed(*counts)

    def _of_all(self, own: Trained) -> list[float]:
        """Return the samples of all ranks, the timed ones, and the samples per second with their variance."""
        world, strategy = self._run.world, self._run.strategy
        counts = torch.tensor([own.samples, own.timed, own.rate, own.variance], device=strategy.root_device)
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


__all__ = ["Retuning"]
