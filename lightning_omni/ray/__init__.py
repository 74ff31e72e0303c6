"""Compute groups on the workers of Ray Train: the strategy, and workers that Ray replaces one by one.

Ray is imported where it is used: ``pip install 'lightning-omni[ray]'``.
"""

from lightning_omni.ray.strategy import RayOmniStrategy, elastic_torch_config

__all__ = ["RayOmniStrategy", "elastic_torch_config"]
