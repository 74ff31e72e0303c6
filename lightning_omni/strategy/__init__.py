"""OmniStrategy, for whichever of Lightning's two namespaces the Trainer comes from.

Lightning loads no strategies by itself, so the name "omni" is registered when both this package and a namespace are
imported, in whatever order. Lightning is never imported from here before it is asked for: it takes seconds, and
the parameter server's process and loops without Lightning have no use for it.
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

NAMESPACES = {
    "pytorch_lightning": "lightning_omni.strategy.pytorch_lightning",
    "lightning.pytorch": "lightning_omni.strategy.lightning",
}
"""Lightning's namespaces, and our modules for them. Their Trainers refuse each other's strategies."""


def register() -> None:
    """Registers the name "omni" in every namespace that is imported, now or later."""
    for namespace in _in_use():
        importlib.import_module(NAMESPACES[namespace])
    if not any(isinstance(finder, _RegisterOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterOnImport())


def strategy_class() -> Any:
    """The OmniStrategy of the namespace in use.

    If both are imported, ``lightning.pytorch`` wins; take the other from `lightning_omni.strategy.pytorch_lightning`.

    Raises:
        ImportError: Lightning is not installed.
    """
    for namespace in reversed(_in_use() or _installed()):
        return importlib.import_module(NAMESPACES[namespace]).OmniStrategy
    raise ImportError(
        "OmniStrategy needs Lightning: pip install 'lightning-omni[lightning]' or 'lightning-omni[pytorch-lightning]'"
    )


def _in_use() -> list[str]:
    return [namespace for namespace in NAMESPACES if namespace in sys.modules]


def _installed() -> list[str]:
    return [namespace for namespace in NAMESPACES if importlib.util.find_spec(namespace.partition(".")[0]) is not None]


class _RegisterOnImport(importlib.abc.MetaPathFinder):
    """Lets others find Lightning, and registers the strategy when it has been loaded."""

    @override
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds the two namespaces only, through the other finders."""
        if name not in NAMESPACES:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, NAMESPACES[name])
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, ours: str) -> None:
        self._loader, self._ours = loader, ours

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
        importlib.import_module(self._ours)
