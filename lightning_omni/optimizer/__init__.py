"""Training across compute groups without Lightning: `World`, and `OmniOptimizer` for its loops."""

from lightning_omni.optimizer.optimizer import OmniOptimizer, names_of
from lightning_omni.optimizer.options import WorldOptions
from lightning_omni.optimizer.world import World

__all__ = ["OmniOptimizer", "World", "WorldOptions", "names_of"]
