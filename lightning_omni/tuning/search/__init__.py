"""The search for the setting to train with, without a trainer, a cluster or a clock: `Search` is the entry point."""

from lightning_omni.tuning.search.choice import Choice
from lightning_omni.tuning.search.evidence import Evidence, Observation, TrainedSegment
from lightning_omni.tuning.search.search import ConsideredSetting, Search
from lightning_omni.tuning.search.space import Dimension, SearchSpec, Space

__all__ = [
    "Choice",
    "ConsideredSetting",
    "Dimension",
    "Evidence",
    "Observation",
    "Search",
    "SearchSpec",
    "Space",
    "TrainedSegment",
]
