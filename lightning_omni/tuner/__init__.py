"""Callbacks that make a training faster, for whichever of Lightning's two namespaces the Trainer comes from.

`lightning_omni` names classes that are callbacks in both (see ``either.py``); ``pytorch_lightning.py`` and
``lightning.py`` have the same, each for one namespace. Lightning is imported when a callback is made, not before.
"""

from __future__ import annotations

from typing import Any

from lightning_omni.strategy import NAMESPACES, module_in
from lightning_omni.strategy.namespaces import namespace_of


def tuner_module(kind: type) -> Any:
    """Our module for the namespace that a class of Lightning's, or the nearest of its base classes, comes from.

    Args:
        kind: the class of a Trainer, for example.
    """
    return module_in("tuner", namespace_of(kind) or NAMESPACES[-1])


def names_for(trainer: object) -> Any:
    """What callbacks use of the namespace that a Trainer comes from."""
    return tuner_module(type(trainer)).Names
