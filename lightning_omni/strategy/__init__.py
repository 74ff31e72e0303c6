"""`OmniStrategy` for both of Lightning's namespaces, ``lightning.pytorch`` and ``pytorch_lightning``.

`lightning_omni.OmniStrategy` is one class. It has no base class of Lightning's until a namespace is imported; then it
and its subclasses get that namespace's base class. If none is imported when an object is made, the installed one is, or
``lightning.pytorch`` of both.

If both namespaces are imported, an object is made for the one that was imported first, or for ``pytorch_lightning`` if
both were before this package. When a Trainer of the other namespace gives it an accelerator, the object switches to a
class with the other base class. Classes of callbacks get the base classes of both namespaces.

This package registers the name "omni" when both it and a namespace are imported, in any order. It never imports
Lightning before an object is made: the import takes seconds, and the server's process does not need it.
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
"""Lightning's namespaces. The Trainer of one rejects the strategies of the other."""


_rooms: list[str] = []
"""Subpackages of `lightning_omni` that have a module for each namespace."""


def follow(room: str) -> None:
    """Import a subpackage's module for each namespace that is imported, now or later."""
    if room not in _rooms:
        _rooms.append(room)
    if not any(isinstance(finder, _FollowImports) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FollowImports())
    for namespace in NAMESPACES:
        if namespace in sys.modules:
            module_in(room, namespace)


def module_in(room: str, namespace: str) -> Any:
    return importlib.import_module(f"lightning_omni.{room}.{namespace.replace('lightning.pytorch', 'lightning')}")


def import_installed(name: str) -> None:
    for namespace in reversed(NAMESPACES):
        if importlib.util.find_spec(namespace.partition(".")[0]) is not None:
            importlib.import_module(namespace)
            return
    raise ImportError(
        f"{name} needs Lightning: pip install 'lightning-omni[lightning]' or 'lightning-omni[pytorch-lightning]'"
    )


class _FollowImports(importlib.abc.MetaPathFinder):
    """An import hook that imports our modules after Lightning, which other finders find."""

    @override
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
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
