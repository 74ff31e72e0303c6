"""Training across compute groups without Lightning: `World`, and `OmniOptimizer` for its loops."""

from lightning_omni.runtime.model.meshes import FSDP
from lightning_omni.runtime.optimizer import OmniOptimizer, names_of
from lightning_omni.runtime.options import Elastic, Server, WorldOptions
from lightning_omni.runtime.world import World

__all__ = ["FSDP", "Elastic", "OmniOptimizer", "Server", "World", "WorldOptions", "names_of"]
