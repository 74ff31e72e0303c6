"""A check whether a run is as fast as forecast, by the batches after the choice.

A forecast may be wrong about unseen effects: a server that shares its cores, a link with other traffic, a lock in the
user's data. Then one group may be faster after all, for the samples that groups cost.

The forecast of one group may be wrong, too: its batches were a few fast ones, or the machine has become slower since,
for groups and for one. So one group is timed again, and from then on groups are chosen only if they pay although they
are slower than predicted, by the measured factor. If they do not, they are given up.

One group with the user's own setting may also be slower than in the first batches: ranks that stall now and then, or
slow down later, make all others wait. It is then timed again, too.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace

from lightning_omni.errors import OmniError
from lightning_omni.tuning.callback.applied_setting import AppliedSetting
from lightning_omni.tuning.callback.guards.speed import Speed, SpeedRecord
from lightning_omni.tuning.callback.reports import TunerReports
from lightning_omni.tuning.callback.tuned_run import Command, TunedRun
from lightning_omni.tuning.model.forecast import Setting
from lightning_omni.tuning.search import Search, TrainedSegment
from lightning_omni.tuning.search import constants as c
from lightning_omni.tuning.search.choice import Choice, best_by_forecast
from lightning_omni.tuning.search.evidence import mean_error


class ForecastCheck:
    """A comparison of a run's samples per second with the forecast.

    The speed of groups is compared with that of one group once after each choice. `SpeedRecord` detects groups that get
    slower later.

    Args:
        run: the tuned run.
        applied: the setting that it trains with.
        speeds: the record of its speed.
        reports: the reports of a change.
    """

    def __init__(self, run: TunedRun, applied: AppliedSetting, speeds: SpeedRecord, reports: TunerReports) -> None:
        self._run, self._applied, self._speed_record, self._reports = run, applied, speeds, reports
        self._steps, self._next = 0, c.FEWEST_STEPS

    def step_done(self) -> str:
        """Return why one group with the user's own setting is to be timed again, or "". All ranks call it.

        Its speed is compared with the forecast after 8 steps, and then whenever a fifth more steps are done: so a
        slowdown is found before as many steps again are lost. The comparisons until the steps have doubled share one
        probability of a false alarm.
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
        """Return why one group is clearly slower than forecast, or ""; rank 0 decides."""
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
        """Return why one group is to be timed again, by the speed of a whole epoch, or "". All ranks call it."""
        speed = self._speed_record.speed
        return self._check(speed) if self._is_due and speed is not None else ""

    def validated(self) -> str:
        """Return why one group is to be timed again, by a certain enough speed inside an epoch; or "".

        All ranks call it.
        """
        if not self._is_due:
            return ""
        speed = self._speed_record.speed_so_far()
        return self._check(speed) if speed is not None and speed.is_known_within(c.GAIN) else ""

    @property
    def _is_due(self) -> bool:
        """Return whether a choice of groups or of user-defined values is unchecked; the same on all ranks."""
        state, setting = self._run.state, self._run.state.setting
        if state.is_final or setting is None or state.own is None or state.checked == state.rounds:
            return False
        return setting.groups > 1 or setting.further != state.own.further

    def _check(self, speed: Speed) -> str:
        run, state = self._run, self._run.state
        state.checked = state.rounds
        is_known = run.is_rank_zero and run.searches
        found = self._refutes(run.searches[-1], run.setting, speed) if is_known else None
        segments = self._trained(speed, is_refuted=found is not None) if is_known else state.segments
        command, was_refuted = run.broadcast_command(found), state.refuted
        state.segments, state.refuted = run.broadcast_segments(segments), state.refuted or command is not None
        if command is None:
            return self._why_other_value()
        if not was_refuted:
            return command.why
        self._applied.return_to_one_group(command.setting)
        self._speed_record.changed(in_mid_epoch=run.strategy.epochs.is_open)
        self._reports.chosen(command)
        return ""

    def _why_other_value(self) -> str:
        """Return why another value in a user-defined dimension should be used, as rank 0 decides."""
        run = self._run
        if not run.options.further:
            return ""
        why, began = "", time.perf_counter()
        if run.is_rank_zero and run.searches:
            last = run.searches[-1]
            space = replace(last.spec.space, further=run.options.further)  # no checkpoint holds them
            spec = replace(last.spec, space=space, horizon=run.horizon, seconds=run.seconds_left)
            with suppress(OmniError):  # it is reported when batches are timed
                chosen = Search(spec, last.observation, last.known, run.state.segments).choice().setting
                if chosen.further != run.setting.further:
                    value = ", ".join(f"{name}={value}" for name, value in chosen.further)
                    why = f"{value} is to be tried, or was faster"
            last.overhead += time.perf_counter() - began
        why = run.world.broadcast_text(why)
        run.exclude_seconds(time.perf_counter() - began)
        return why

    def _trained(self, speed: Speed, is_refuted: bool) -> list[TrainedSegment]:
        """Return the last segment of each setting, with the one that has just been measured."""
        run, setting, search = self._run, self._run.setting, self._run.searches[-1]
        log_ratio = math.log(search.modelled_throughput(setting) / speed.rate)
        variance = speed.error**2 + mean_error(search.measured) ** 2
        segment = TrainedSegment(setting, log_ratio, variance, speed.rate if is_refuted else 0.0)
        return [*(each for each in run.state.segments if each.setting != setting), segment]

    def _refutes(self, search: Search, setting: Setting, speed: Speed) -> Command | None:
        """Return a command for one group; None if groups of that speed are, or may be, worth their samples."""
        one = best_by_forecast(search, groups=1)
        theory = search.forecast().theory
        one_at_least = math.log(search.prediction(one).samples_per_second.low)
        if setting.groups == 1 or speed.log_most() - theory(setting) >= one_at_least - theory(one):
            return None
        predicted = search.throughput(setting)
        why = (
            f"{setting.groups} groups train {speed.rate:.3g} samples per second, and {predicted:.3g} were predicted;"
            " for the samples that they need, one group is faster"
        )
        self._run.choice = Choice(one, why, search.forecast().of(one))
        return Command(one, why=why)


__all__ = ["ForecastCheck"]
