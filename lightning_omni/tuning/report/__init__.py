"""The report of a fit's search for a setting: a page, a table, and a file with all of it."""

from lightning_omni.tuning.report.summary import Round, RunTimes, Written
from lightning_omni.tuning.report.tuning import TuningReport

__all__ = ["Round", "RunTimes", "TuningReport", "Written"]
