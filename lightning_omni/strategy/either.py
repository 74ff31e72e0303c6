"""The `OmniStrategy` that `lightning_omni` exports, for both of Lightning's namespaces. See ``__init__.py``."""

from __future__ import annotations

from abc import ABCMeta

from lightning_omni.strategy.hooks import OmniStrategyHooks
from lightning_omni.strategy.namespaces import namespace_of
from lightning_omni.strategy.tested_versions import warn_about_untested

warn_about_untested()


class OmniStrategy(OmniStrategyHooks, metaclass=ABCMeta):  # noqa: D101
    __doc__ = OmniStrategyHooks.__doc__


def take_base(base: type, twin: type) -> None:
    """Derive the class and its subclasses from the base class of an imported namespace, if that is the first one.

    ``twin``, OmniStrategy of that namespace alone, becomes a virtual subclass.
    """
    if namespace_of(OmniStrategy) is None:
        OmniStrategy.__bases__ = (*OmniStrategy.__bases__, base)
    OmniStrategy.register(twin)
