"""Callbacks that make training faster, for both of Lightning's namespaces.

`lightning_omni` exports classes that are callbacks in both (see ``either.py``); ``pytorch_lightning.py`` and
``lightning.py`` have the same classes for one namespace each. Lightning is imported when a callback is created, not
before.
"""

from __future__ import annotations

from typing import Any

from lightning_omni.strategy import NAMESPACES, module_in
from lightning_omni.strategy.namespaces import namespace_of


def tuner_module(kind: type) -> Any:
    """Return the tuner module for the namespace of a class, such as that of a Trainer, or of its nearest base class."""
    return module_in("tuning.callback", namespace_of(kind) or NAMESPACES[-1])


def names_for(trainer: object) -> Any:
    """Return the `Names` of the namespace that a Trainer comes from."""
    return tuner_module(type(trainer)).Names
