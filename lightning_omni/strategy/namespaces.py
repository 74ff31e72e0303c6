"""Which of Lightning's namespaces classes belong to, and how an object comes to belong to the other one.

Only a class's base classes tell: Lightning's Trainer takes callbacks of any class, but strategies of its own namespace
only, and one of ours counts as that in both.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from typing_extensions import override

from lightning_omni.strategy import NAMESPACES, import_installed, module_in


def namespace_of(kind: type) -> str | None:
    """Return the namespace that a class, or the nearest of its base classes that has one, comes from."""
    for base in kind.__mro__:
        for name in NAMESPACES:
            if base.__module__ == name or base.__module__.startswith(f"{name}."):
                return name
    return None


def need_namespace(kind: type) -> None:
    """Import a namespace, unless one is imported, because an object of a class of ours is being made.

    Args:
        kind: the object's class, which thereby gets that namespace's base class.

    Raises:
        ImportError: Lightning is not installed.
    """
    if namespace_of(kind) is None:
        import_installed(kind.__name__)


def strategy_class_in(kind: type, namespace: str) -> type:
    """Return a class as it would be if it had been derived from our base class of another namespace.

    Args:
        kind: OmniStrategy, or a user's subclass.
        namespace: the one that the class is to belong to.
    """
    if namespace_of(kind) == namespace:
        return kind
    if "_original" in vars(kind):
        return strategy_class_in(vars(kind)["_original"], namespace)
    ours = module_in("strategy", namespace)
    if kind.__module__.startswith("lightning_omni."):
        found: type = ours.OmniStrategy
        return found
    if "_elsewhere" not in vars(kind):
        same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        bases = (kind, ours.NamespaceDDP)
        kind._elsewhere = _Elsewhere(kind.__name__, bases, {**same, "_original": kind})  # type: ignore[attr-defined]
    there: type = vars(kind)["_elsewhere"]
    return there


def new_in(kind: type, namespace: str) -> Any:
    """Return an object of a class in a namespace, whose ``__init__`` is not called: for what is unpickled."""
    module_in("strategy", namespace)
    return object.__new__(strategy_class_in(kind, namespace))


class _Elsewhere(ABCMeta):
    """The kind of a user's strategies in the other namespace: there ``super()`` does not find the one they are from."""

    @override
    def mro(cls) -> list[type]:
        """As ever, without the other namespace's strategies."""
        _, here = cls.__bases__
        [other] = set(NAMESPACES) - {namespace_of(here)}
        theirs = set(module_in("strategy", other).NamespaceDDP.__mro__) - set(here.__mro__)
        return [each for each in super().mro() if each not in theirs]
