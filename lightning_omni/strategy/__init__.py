"""OmniStrategy, for whichever of Lightning's two namespaces the Trainer comes from."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

NAMESPACES = {
    "pytorch_lightning": "lightning_omni.strategy.pytorch_lightning",
    "lightning.pytorch": "lightning_omni.strategy.lightning",
}
"""Lightning's namespaces, and our modules for them. Their Trainers refuse each other's strategies."""


def register() -> None:
    """Registers the name "omni" in every namespace in use; in every installed one if none is in use yet."""
    for namespace in _in_use() or _installed():
        importlib.import_module(NAMESPACES[namespace])


def strategy_class() -> Any:
    """The OmniStrategy of the namespace in use.

    If both are imported, ``lightning.pytorch`` wins; take the other from `lightning_omni.strategy.pytorch_lightning`.

    Raises:
        ImportError: Lightning is not installed.
    """
    for namespace in reversed(_in_use() or _installed()):
        return importlib.import_module(NAMESPACES[namespace]).OmniStrategy
    raise ImportError(
        "OmniStrategy needs Lightning: pip install 'lightning-omni[lightning]' or 'lightning-omni[pytorch-lightning]'"
    )


def _in_use() -> list[str]:
    return [namespace for namespace in NAMESPACES if namespace in sys.modules]


def _installed() -> list[str]:
    return [namespace for namespace in NAMESPACES if importlib.util.find_spec(namespace.partition(".")[0]) is not None]
