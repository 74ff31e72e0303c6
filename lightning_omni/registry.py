"""Registries of the types that travel by name: frozen structs by their tags, including users' own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import msgspec

from lightning_omni.checks import plain
from lightning_omni.errors import ConfigurationError, MalformedMessage

Kind = TypeVar("Kind", bound=msgspec.Struct)


@dataclass(frozen=True)
class Registry(Generic[Kind]):
    """The known kinds of one type.

    Attributes:
        known: kinds by tag.
        argument: the user's argument that names one.
        path: import path of the base class for users.
        option: option of ``lightning-omni serve`` that registers others, if any.
        internal: tags that users cannot name.
    """

    known: dict[str, type[Kind]]
    base: type[Kind]
    argument: str
    what: str
    path: str
    option: str
    internal: frozenset[str] = frozenset()

    def named(self, text: str, presets: Mapping[str, Kind] = MappingProxyType({})) -> Kind:
        """Return the value of this name or preset; settings may follow after a colon: ``"diloco:period=50"``.

        A setting without a name is the first one: ``"topk:0.01"``.
        """
        name, _, settings = text.partition(":")
        names = [*(each for each in self.known if each not in self.internal), *presets]
        if name not in names:
            raise ConfigurationError(
                f"{self.argument}={name!r} is not known; pass one of {', '.join(map(repr, names))}{_meant(name, names)}"
            )
        plain = to_wire(presets[name]) if name in presets else {"name": name}
        try:
            return _with_settings(self.known[plain["name"]], plain, settings)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.argument}={text!r}: {error}") from error

    def text_of(self, value: Kind, without: Collection[str] = ()) -> str:
        """Return the text from which `named` makes the value, without defaults and settings in ``without``."""
        plain, settings = to_wire(value), []
        for name, field in _fields_of(type(value)).items():
            usual = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            if name not in without and getattr(value, name) != usual:  # a required one has no usual value
                settings.append(f"{name}={_text_of(plain[name])}")
        return f"{plain['name']}:{','.join(settings)}" if settings else str(plain["name"])

    def text_of_wire(self, plain: Mapping[str, Any]) -> str:
        """Return the text of `text_of` for plain data; the name alone if this process does not know the kind."""
        return self.text_of(self.from_wire(plain)) if plain["name"] in self.known else str(plain["name"])

    def checked(self, value: Kind) -> Kind:
        """Return the value after a check of its settings' types, which msgspec omits at construction."""
        try:
            return msgspec.convert(to_wire(value), type(value))
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigurationError(f"{self.argument}={value!r}: {error}") from error

    def from_wire(self, plain: Mapping[str, Any]) -> Kind:
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
        """Register a kind under its tag.

        Raises:
            ConfigurationError: another kind has the tag.
        """
        name = str(kind.__struct_config__.tag)
        if self.known.get(name, kind) is not kind:
            raise ConfigurationError(
                f"the name {name!r} belongs to {self.known[name].__name__}; give the {self.what} another tag="
            )
        self.known[name] = kind
        return kind

    def load(self, path: str) -> type[Kind]:
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


_NOTHING = ("None", "none", "null")


def _text_of(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _value_of(setting: str, field: msgspec.structs.FieldInfo) -> str | None:
    """Return a setting's value: None for "none" and the like, unless the field may be that text."""
    if setting not in _NOTHING:
        return setting
    try:
        return msgspec.convert(setting, field.type)  # type: ignore[no-any-return]
    except msgspec.ValidationError:
        return None


def _number(value: Any) -> Any:
    if (number := plain(value)) is value:
        raise TypeError(f"{value!r} is neither text nor a number")
    return number


@cache
def _fields_of(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields, cached."""
    # Evaluating their types takes a millisecond.
    return {field.name: field for field in msgspec.structs.fields(kind)}


def _with_settings(kind: type[Kind], plain: Mapping[str, Any], settings: str) -> Kind:
    changes: dict[str, str] = {}
    for part in settings.split(","):
        name, equals, setting = (each.strip() for each in part.partition("="))
        if not equals and name and kind.__struct_fields__:
            name, setting = kind.__struct_fields__[0], name
        if name in changes:
            raise ConfigurationError(f"{plain['name']}: {name} is given twice, as {changes[name]} and as {setting}")
        if name:
            changes[name] = setting
    known = kind.__struct_fields__
    if unknown := sorted(changes.keys() - set(known)):
        raise ConfigurationError(
            f"{plain['name']} has no setting {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
            f"{_meant(unknown[0], known)}"
        )
    fields = _fields_of(kind) if changes else {}
    values = {name: _value_of(setting, fields[name]) for name, setting in changes.items()}
    try:
        return msgspec.convert({**plain, **values}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{plain['name']}: {error}") from error


def _meant(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def name_of(value: msgspec.Struct) -> str:
    return str(type(value).__struct_config__.tag)


def to_wire(value: msgspec.Struct) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(value, enc_hook=_number)
    return told
