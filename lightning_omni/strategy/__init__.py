"""OmniStrategy, for whichever of Lightning's two namespaces the Trainer comes from.

`lightning_omni.OmniStrategy` is one class, in whatever order things are imported (see ``either.py``). It has no base
class of Lightning's until a namespace is imported; it gets that namespace's then, and so do its subclasses. If none is
imported when an object is made, the one that is installed is imported, or ``lightning.pytorch`` if both are.

If both are imported, an object is made for the one that was imported first, and belongs to the other from the moment
on at which a Trainer of the other gives it its accelerator: it gets a class with the other base class then (see
``namespaces.py``). Callbacks have no state of Lightning's, and their class gets the base classes of both.
``pytorch_lightning.py`` and ``lightning.py`` have the same classes, each for one namespace.

Lightning loads no strategies by itself, so the name "omni" is registered when both this package and a namespace are
imported, in whatever order. Lightning is never imported from here before an object is made: it takes seconds, and the
parameter server's process and loops without Lightning have no use for it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

NAMESPACES = ("pytorch_lightning", "lightning.pytorch")
"""Lightning's namespaces. Their Trainers refuse each other's strategies."""


_rooms: list[str] = []
"""In which there are modules for each namespace."""


def follow(room: str) -> None:
    """Import our module for each namespace that is imported, now or later: it names its classes to both sides.

    Args:
        room: where the modules are, as in ``"strategy"``.
    """
    if room not in _rooms:
        _rooms.append(room)
    if not any(isinstance(finder, _FollowImports) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FollowImports())
    for namespace in NAMESPACES:
        if namespace in sys.modules:
            module_in(room, namespace)


def module_in(room: str, namespace: str) -> Any:
    """Import and return our module for a namespace."""
    return importlib.import_module(f"lightning_omni.{room}.{namespace.replace('lightning.pytorch', 'lightning')}")


def import_installed(name: str) -> None:
    """Import a namespace, as none is imported yet.

    Args:
        name: of the class that needs one.

    Raises:
        ImportError: Lightning is not installed.
    """
    for namespace in reversed(NAMESPACES):
        if importlib.util.find_spec(namespace.partition(".")[0]) is not None:
            importlib.import_module(namespace)
            return
    raise ImportError(
        f"{name} needs Lightning: pip install 'lightning-omni[lightning]' or 'lightning-omni[pytorch-lightning]'"
    )


class _FollowImports(importlib.abc.MetaPathFinder):
    """Lets others find Lightning, and follows when it has been loaded."""

    @override
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds the two namespaces only, through the other finders."""
        if name not in NAMESPACES:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, name)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, namespace: str) -> None:
        self._loader, self._namespace = loader, namespace

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for room in _rooms:
            module_in(room, self._namespace)
