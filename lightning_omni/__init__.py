"""Training that is synchronous inside compute groups and asynchronous across them, for PyTorch Lightning.

Importing this registers the strategy name ``"omni"`` with Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_omni import methods
from lightning_omni.errors import OmniError
from lightning_omni.metrics import RunReport, Staleness
from lightning_omni.optimizer import OmniOptimizer, World, WorldOptions
from lightning_omni.strategy import register as _register
from lightning_omni.strategy import strategy_class as _strategy_class
from lightning_omni.topology import Topology

if TYPE_CHECKING:
    from lightning_omni.strategy.pytorch_lightning import OmniStrategy

__version__ = "0.1.0"

__all__ = [
    "OmniError",
    "OmniOptimizer",
    "OmniStrategy",
    "RunReport",
    "Staleness",
    "Topology",
    "World",
    "WorldOptions",
    "methods",
]


def __getattr__(name: str) -> Any:
    # Looked up when used, so that it is the class of the namespace that the Trainer comes from.
    if name == "OmniStrategy":
        return _strategy_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_register()
