"""Callbacks that make a training faster, for whichever of Lightning's two namespaces the Trainer comes from.

Lightning is imported when a callback is asked for, not before.
"""

from __future__ import annotations

import importlib
from typing import Any


def tuner_module(name: str) -> Any:
    """Our module for the namespace that a module of Lightning's or of ours belongs to.

    Args:
        name: a module's full name, as in ``"lightning.pytorch.core.module"``.
    """
    flavour = "pytorch_lightning" if "pytorch_lightning" in name.split(".") else "lightning"
    return importlib.import_module(f"lightning_omni.tuner.{flavour}")
