"""OmniStrategy for both of Lightning's namespaces: the one that `lightning_omni` names. See ``__init__.py``."""

from __future__ import annotations

from abc import ABCMeta

from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.strategy.namespaces import namespace_of


class OmniStrategy(OmniStrategyHooks, metaclass=ABCMeta):  # noqa: D101
    __doc__ = OmniStrategyHooks.__doc__


def take_base(base: type, twin: type) -> None:
    """Derive the class and its subclasses from a namespace that was imported, if it is the first.

    Args:
        base: our base class of that namespace.
        twin: OmniStrategy of that namespace alone, which counts as this one.
    """
    if namespace_of(OmniStrategy) is None:
        OmniStrategy.__bases__ = (*OmniStrategy.__bases__, base)
    OmniStrategy.register(twin)
