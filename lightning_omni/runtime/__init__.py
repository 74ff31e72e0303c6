"""Training across compute groups without Lightning: `World`, and `OmniOptimizer` for its loops."""

from lightning_omni.runtime.optimizer import OmniOptimizer, names_of
from lightning_omni.runtime.options import WorldOptions
from lightning_omni.runtime.world import World

__all__ = ["OmniOptimizer", "World", "WorldOptions", "names_of"]
