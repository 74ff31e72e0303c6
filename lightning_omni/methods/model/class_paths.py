"""Classes by path, ``module:Class``: of optimizers and modules that a description names, and a server admits."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.optim import Optimizer

from lightning_omni.errors import UnsupportedError

T = TypeVar("T")


def admitting(
    base: type[T], home: tuple[str, str], what: str, option: str, allowed: Sequence[str]
) -> Callable[[str], type[T]]:
    """Return a function from class path to class, for classes that are torch's or in ``allowed``.

    Args:
        base: the base class of admitted classes.
        home: torch's module of such classes, and the prefix of its submodules.
        what: name of the kind of class, for messages.
        option: option of ``lightning-omni serve`` that allows a class.
        allowed: class paths.
    """

    def resolve(path: str) -> type[T]:
        def check(module: str) -> None:
            if module != home[0] and not module.startswith(home[1]) and path not in allowed:
                raise UnsupportedError(
                    f"the {what} {path} is not from {home[0]}, and this server was not told to allow it; start it with:"
                    f" lightning-omni serve {option} {path}"
                )

        check(path.partition(":")[0])
        try:
            kind = import_class(path)
        except (ImportError, AttributeError, ValueError) as error:
            raise UnsupportedError(
                f"the server cannot import the {what} {path} ({error}); it must live in an installed module"
            ) from error
        except TypeError:
            kind = object
        else:
            check(kind.__module__)
        if not issubclass(kind, base) or kind is Optimizer:
            raise UnsupportedError(f"{path} is not a {home[0]}.{base.__name__}")
        return kind

    return resolve


def import_class(path: str) -> type:
    """Return the class at ``module:Class``, or ``module:Outer.Inner``.

    Every step of the path must be a class: it cannot lead from a module to that module's imports.

    Raises:
        ImportError: the module does not exist.
        AttributeError: the module has no such name.
        TypeError: the object at the path is no class.
    """
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
        if not isinstance(found, type):
            raise TypeError(f"{part!r} is no class")
    kind: type = found
    return kind


def class_path(kind: type) -> str:
    """Return the ``module:Class`` of a class."""
    return f"{kind.__module__}:{kind.__qualname__}"
