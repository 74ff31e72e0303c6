"""Which setting to train with: the tuner's decisions, without a trainer, a cluster or a clock.

`Search` is the whole of it; `lightning_omni.tuner.OmniTuner` carries out in a fit what it chooses, a simulator can as
well.
"""

from lightning_omni.search.choice import Choice
from lightning_omni.search.evidence import Evidence, Observation, TrainedSegment
from lightning_omni.search.phase import Considered
from lightning_omni.search.search import Search
from lightning_omni.search.space import Dimension, Space
from lightning_omni.search.specification import SearchSpec

__all__ = [
    "Choice",
    "Considered",
    "Dimension",
    "Evidence",
    "Observation",
    "Search",
    "SearchSpec",
    "Space",
    "TrainedSegment",
]
