"""Objects of one Lightning namespace in the Trainer of the other: refused, with the import that is right.

Lightning's Trainer takes callbacks of any class, and refuses a strategy of the other namespace with a sentence on wrong
strategy names. So each namespace's OmniStrategy is made known to the other as one of its own, far enough to get in and
to say itself what is wrong.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from lightning_omni.errors import ConfigurationError
from lightning_omni.strategy import NAMESPACES


def introduce() -> None:
    """Makes the strategies that are loaded known to each other's namespaces."""
    loaded = {name: sys.modules[ours] for name, ours in NAMESPACES.items() if hasattr(sys.modules.get(ours), _STRATEGY)}
    for name in loaded:
        base = importlib.import_module(f"{name}.strategies").Strategy
        for other, module in loaded.items():
            if other != name:
                base.register(getattr(module, _STRATEGY))


def refuse_other_namespace(ours: object, theirs: object, room: str) -> None:
    """Refuses a Trainer that comes from another namespace.

    Args:
        ours: a strategy or callback of this package.
        theirs: the Trainer, or something that it made.
        room: where our classes are, as in ``"strategy"``.

    Raises:
        ConfigurationError: they come from different namespaces; the message has the import that is right.
    """
    own, wanted = _namespace(ours), _namespace(theirs)
    if own is None or wanted is None or own == wanted:
        return
    name, module = type(ours).__name__, NAMESPACES[wanted].rpartition(".")[2]
    raise ConfigurationError(
        f"this {name} is that of {own}, and the Trainer is that of {wanted}; take the one that matches it:"
        f" from lightning_omni.{room}.{module} import {name}"
    )


_STRATEGY = "OmniStrategy"


def _namespace(of: Any) -> str | None:
    """The namespace that an object's class, or the nearest of its bases, comes from."""
    for base in type(of).__mro__:
        for name in NAMESPACES:
            if base.__module__ == name or base.__module__.startswith(f"{name}."):
                return name
    return None
