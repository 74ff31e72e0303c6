"""Training that is synchronous inside compute groups and asynchronous across them, for PyTorch Lightning.

If Lightning is imported, too, the strategy name ``"omni"`` is registered with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_omni.strategy import follow as _follow

if TYPE_CHECKING:  # for type checkers, OmniStrategy and the tuners of lightning.pytorch belong to both namespaces
    from lightning_omni import methods
    from lightning_omni.errors import OmniError
    from lightning_omni.run_report import RunReport, Staleness
    from lightning_omni.runtime import FSDP, Elastic, OmniOptimizer, Server, World, WorldOptions
    from lightning_omni.strategy.lightning import OmniStrategy
    from lightning_omni.topology import Topology
    from lightning_omni.tuning.callback.lightning import DeviceTuner, OmniTuner
    from lightning_omni.wire.compression import Compression

__version__ = "0.1.0"

__all__ = [
    "FSDP",
    "Compression",
    "DeviceTuner",
    "Elastic",
    "OmniError",
    "OmniOptimizer",
    "OmniStrategy",
    "OmniTuner",
    "RunReport",
    "Server",
    "Staleness",
    "Topology",
    "World",
    "WorldOptions",
    "methods",
]

_HOME = {
    "Compression": "wire.compression",
    "DeviceTuner": "tuning.callback.both_namespaces",
    "Elastic": "runtime",
    "FSDP": "runtime",
    "OmniError": "errors",
    "OmniOptimizer": "runtime",
    "OmniStrategy": "strategy.both_namespaces",
    "OmniTuner": "tuning.callback.both_namespaces",
    "RunReport": "run_report",
    "Server": "runtime",
    "Staleness": "run_report",
    "Topology": "topology",
    "World": "runtime",
    "WorldOptions": "runtime",
}


def __getattr__(name: str) -> Any:
    # Lazy imports: the parameter server's process starts twice as fast without modules that it never uses.
    if name in _HOME:
        return getattr(importlib.import_module(f"lightning_omni.{_HOME[name]}"), name)
    if name == "methods":
        return importlib.import_module("lightning_omni.methods")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


_follow("strategy")
