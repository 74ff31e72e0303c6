"""Which setting to try next, and which to train with: the tuner's decisions, without a trainer, a cluster or a clock.

`Search` is the whole of it; `lightning_omni.tuner.OmniTuner` carries its probes out in a fit, a simulator can as well.
"""

from lightning_omni.search.choice import Choice
from lightning_omni.search.evidence import Evidence, GroupSpeed, Observation
from lightning_omni.search.samplers import SAMPLERS, Proposal, Sampler, register_sampler
from lightning_omni.search.search import Probe, Search
from lightning_omni.search.space import Dimension, Space
from lightning_omni.search.specification import FinalStepSearchSpec, SearchSpec, StepSearchSpec

__all__ = [
    "SAMPLERS",
    "Choice",
    "Dimension",
    "Evidence",
    "FinalStepSearchSpec",
    "GroupSpeed",
    "Observation",
    "Probe",
    "Proposal",
    "Sampler",
    "Search",
    "SearchSpec",
    "Space",
    "StepSearchSpec",
    "register_sampler",
]
