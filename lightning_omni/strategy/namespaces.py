"""The namespace of Lightning that a class belongs to, and the conversion of a class to the other namespace.

A Trainer accepts callbacks of any class, but strategies of its own namespace only; Trainers of both accept ours.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from typing_extensions import override

from lightning_omni.strategy import NAMESPACES, import_installed, module_in


def namespace_of(kind: type) -> str | None:
    for base in kind.__mro__:
        for name in NAMESPACES:
            if base.__module__ == name or base.__module__.startswith(f"{name}."):
                return name
    return None


def need_namespace(kind: type) -> None:
    if namespace_of(kind) is None:
        import_installed(kind.__name__)


def strategy_class_in(kind: type, namespace: str) -> type:
    """Return OmniStrategy, or a user's subclass, as derived from a namespace's base class."""
    if namespace_of(kind) == namespace:
        return kind
    if "_original" in vars(kind):
        return strategy_class_in(vars(kind)["_original"], namespace)
    ours = module_in("strategy", namespace)
    if kind.__module__.startswith("lightning_omni.strategy."):
        found: type = ours.OmniStrategy
        return found
    if "_elsewhere" not in vars(kind):
        same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        bases = (kind, ours.NamespaceDDP)
        kind._elsewhere = _Elsewhere(kind.__name__, bases, {**same, "_original": kind})  # type: ignore[attr-defined]
    there: type = vars(kind)["_elsewhere"]
    return there


def new_in(kind: type, namespace: str) -> Any:
    """Return an object in a namespace without calling ``__init__``, for unpickling."""
    module_in("strategy", namespace)
    return object.__new__(strategy_class_in(kind, namespace))


class _Elsewhere(ABCMeta):
    """A metaclass for users' strategies in the other namespace; ``super()`` skips the bases of their own."""

    @override
    def mro(cls) -> list[type]:
        _, here = cls.__bases__
        [other] = set(NAMESPACES) - {namespace_of(here)}
        theirs = set(module_in("strategy", other).NamespaceDDP.__mro__) - set(here.__mro__)
        return [each for each in super().mro() if each not in theirs]
