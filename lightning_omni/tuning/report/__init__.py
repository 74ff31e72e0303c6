"""The report of a fit's search for a setting: a picture, a page, a table, and a file with all of it."""

from lightning_omni.tuning.report.summary import ReportOrigin, Round, RunTimes
from lightning_omni.tuning.report.tuning import TuningReport

__all__ = ["ReportOrigin", "Round", "RunTimes", "TuningReport"]
