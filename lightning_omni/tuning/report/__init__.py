"""The report of a search for a setting: a picture, a page, and a file."""

from lightning_omni.tuning.report.summary import ReportOrigin, Round, RunTimes
from lightning_omni.tuning.report.tuning import TuningReport

__all__ = ["ReportOrigin", "Round", "RunTimes", "TuningReport"]
