"""Whether groups are as fast as they have to be: what the first batches could not show, the first epoch with them does.

A forecast may be wrong about what it has not seen: a server that shares its cores with something else, a link that
others use, a lock in the user's data. Then one group may be faster after all for the samples that groups cost.
"""

from __future__ import annotations

import math

from lightning_omni.search.choice import Choice, best_by_forecast
from lightning_omni.tuner.applied import AppliedSetting
from lightning_omni.tuner.reports import TunerReports
from lightning_omni.tuner.retuning import Retuning
from lightning_omni.tuner.run import TunedRun
from lightning_omni.tuner.state import Command


class ForecastCheck:
    """Compares what groups train per second with what one group would, once after each choice.

    If they get slower later, that is a change, which `Retuning` sees.

    Args:
        run: that is tuned.
        applied: what it trains with.
        retuning: has measured how fast it is.
        reports: tell of a change.
    """

    def __init__(self, run: TunedRun, applied: AppliedSetting, retuning: Retuning, reports: TunerReports) -> None:
        self._run, self._applied, self._retuning, self._reports = run, applied, retuning, reports

    def epoch_done(self) -> bool:
        """Goes back to one group if groups are slower than that; says whether it has. On all ranks."""
        run = self._run
        state = run.state
        is_groups = (
            run.learns_from_run and not state.is_final and state.setting is not None and state.setting.groups > 1
        )
        if not is_groups or self._retuning.speed is None or state.checked == state.rounds:
            return False
        state.checked = state.rounds
        command = run.hear_command(self._command() if run.speaks else None)
        if command is None:
            return False
        self._applied.give_up_groups(command.setting)
        self._retuning.changed()
        self._reports.chosen(command)
        return True

    def _command(self) -> Command | None:
        """What rank 0 makes of it: None if groups are worth their samples, or if it is not clear that they are not."""
        run, speed, setting = self._run, self._retuning.speed, self._run.state.setting
        if speed is None or setting is None or not run.searches or run.searches[-1].profile is None:
            return None
        search = run.searches[-1]
        one = best_by_forecast(search, groups=1)
        costs = search.forecast().efficiency
        one_at_least = math.log(search.prediction(one).samples_per_second.low)
        if speed.log_most - costs(setting)[0] >= one_at_least - costs(one)[0]:
            return None
        predicted = search.prediction(setting).samples_per_second.value
        why = (
            f"{setting.groups} groups train {speed.rate:.3g} samples per second, and {predicted:.3g} were predicted;"
            " for the samples that they need, one group is faster"
        )
        run.choice = Choice(one, why, search.forecast().of(one))
        return Command(one, why=why)


__all__ = ["ForecastCheck"]
