"""What travels by name: kinds of a frozen struct, a user's own among them, by the tag under which they travel."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from lightning_omni.errors import ConfigurationError, MalformedMessage

Kind = TypeVar("Kind", bound=msgspec.Struct)


@dataclass(frozen=True)
class Registry(Generic[Kind]):
    """The kinds that are known.

    Attributes:
        known: by their tags.
        base: what all of them are.
        what: what one is called in messages.
        path: of the base, as users import it.
        option: of ``lightning-omni serve``, by which a server of its own is told of others.
    """

    known: dict[str, type[Kind]]
    base: type[Kind]
    what: str
    path: str
    option: str

    def from_wire(self, plain: Mapping[str, Any]) -> Kind:
        """A value from plain data.

        Raises:
            MalformedMessage: no such kind, or wrong settings.
        """
        kind = self.known.get(str(plain.get("name")))
        if kind is None:
            raise MalformedMessage(
                f"unknown {self.what} {plain.get('name')!r}; known are {', '.join(self.known)}; a server of its own is"
                f" told of others with: lightning-omni serve {self.option} module:Class"
            )
        try:
            return msgspec.convert(plain, kind)
        except (msgspec.ValidationError, ConfigurationError) as error:
            raise MalformedMessage(f"{self.what} {plain['name']}: {error}") from error

    def register(self, kind: type[Kind]) -> type[Kind]:
        """Makes a kind known by its tag.

        Raises:
            ConfigurationError: the name is taken.
        """
        name = str(kind.__struct_config__.tag)
        if self.known.get(name, kind) is not kind:
            raise ConfigurationError(
                f"the name {name!r} belongs to {self.known[name].__name__}; give the {self.what} another tag="
            )
        self.known[name] = kind
        return kind

    def load(self, path: str) -> type[Kind]:
        """Imports and registers a kind, from its path ``module:Class``.

        Raises:
            ConfigurationError: it cannot be imported, or is none.
        """
        module, _, name = path.partition(":")
        try:
            kind = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigurationError(
                f"the {self.what} {path} cannot be imported ({error}); it must be module:Class, in an installed module"
                " or on PYTHONPATH"
            ) from error
        if not (isinstance(kind, type) and issubclass(kind, self.base)):
            raise ConfigurationError(f"{path} is not a {self.path}")
        return self.register(kind)


def to_wire(value: msgspec.Struct) -> dict[str, Any]:
    """A value as plain data."""
    plain: dict[str, Any] = msgspec.to_builtins(value)
    return plain
