"""Reports of a tuned run: on the console, in the loggers, and as files in the first logger's folder."""

from __future__ import annotations

import logging
from typing import Any

from lightning_omni.tuning.callback.tuned_run import Command, TunedRun
from lightning_omni.tuning.report import TuningReport, Written
from lightning_omni.tuning.trainer import log

_log = logging.getLogger(__name__)


class TunerReports:
    """The reports of one fit.

    Args:
        run: the tuned run.
    """

    def __init__(self, run: TunedRun) -> None:
        self._run = run

    def chosen(self, command: Command) -> None:
        """Report a new setting. All ranks call it."""
        run, setting = self._run, command.setting
        run.info(f"OmniTuner: trains with {setting}: {command.why}")
        metrics = {
            "omni/groups": float(setting.groups),
            "omni/momentum": setting.momentum,
            "omni/lr": setting.lr,
            **run.times.metrics,
        }
        if run.rounds and (noise_scale := run.searches[-1].observation.noise_scale) is not None:
            metrics["omni/noise_scale"] = noise_scale
        if (folder := log(run.trainer, metrics)) is not None:
            run.folder = folder  # pictures would delay all ranks inside an epoch; they are drawn when the run ends

    def validated(self, value: float) -> None:
        """Record the monitored metric, and report when it reaches the target."""
        run, options = self._run, self._run.options
        run.state.reached.append((run.seconds, value))
        if options.is_reached(value) and run.state.at_target is None:
            run.state.at_target = run.times.total, run.spent
            run.info(f"OmniTuner: {options.monitor}={value:.4g}: {run.times.sentence}")
            for logger in run.trainer.loggers:
                logger.log_metrics(run.times.metrics, step=run.trainer.global_step)

    def ended(self) -> None:
        """Write the report, and inform the user if the target was not reached."""
        run, options = self._run, self._run.options
        if run.rounds and run.is_rank_zero:  # a checkpoint gives all ranks the earlier searches
            self._report(TuningReport(*self._contents))
        values = [value for _, value in run.state.reached]
        if options.target is None or any(map(options.is_reached, values)):
            return
        best = (min(values) if options.is_lower_better else max(values)) if values else None
        best_value = f"the best was {best:.4g}" if best is not None else "it was never logged in a validation"
        run.info(f"OmniTuner: {options.monitor} has not reached {options.target:.4g}: {best_value}")

    @property
    def _contents(self) -> tuple[Any, ...]:
        run, options = self._run, self._run.options
        validated = tuple(run.state.reached)
        return tuple(run.rounds), options.target, options.monitor, run.times, validated, Written.now()

    def _report(self, report: TuningReport) -> None:
        """Log the numbers, and write files; an error in them does not end the run."""
        run = self._run
        try:
            for logger in run.trainer.loggers:
                logger.log_metrics(report.metrics, step=run.trainer.global_step)
            run.info(f"OmniTuner: {report.statement}")
            if run.folder is None:
                run.info(
                    "OmniTuner: no report was written, because nothing was chosen since the run was resumed, or no"
                    " logger has a folder on this machine"
                )
                return
            files = report.save(run.folder)
            run.info(f"OmniTuner: the report is {next(each for each in files if each.suffix == '.html')}")
        except Exception as error:
            _log.warning(
                "OmniTuner: the report could not be written to %s: %s: %s", run.folder, type(error).__name__, error
            )


__all__ = ["TunerReports"]
