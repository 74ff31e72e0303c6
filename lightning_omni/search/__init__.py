"""Which setting to try next, and which to train with: the tuner's decisions, without a trainer, a cluster or a clock.

`Search` is the whole of it; `lightning_omni.tuner.OmniTuner` carries its probes out in a fit, a simulator can as well.
"""

from lightning_omni.search.search import Choice, Job, Observation, Probe, Search, Space

__all__ = ["Choice", "Job", "Observation", "Probe", "Search", "Space"]
