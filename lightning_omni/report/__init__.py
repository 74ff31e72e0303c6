"""What a fit's search for a setting found: a picture, a page, a table, and a file that has it all."""

from lightning_omni.report.round import Round
from lightning_omni.report.times import RunTimes
from lightning_omni.report.tuning import TuningReport

__all__ = ["Round", "RunTimes", "TuningReport"]
