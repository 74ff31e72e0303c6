"""Dataclasses that are saved in JSON files, by their annotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from lightning_omni.errors import ConfigurationError

if TYPE_CHECKING:
    from typing_extensions import Self


class Serializable:
    """The base class of dataclasses that convert to plain values for JSON and back.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Timing(Serializable):
        ...     seconds: tuple[float, ...]
        >>> Timing.from_dict(Timing((0.1, 0.2)).to_dict())
        Timing(seconds=(0.1, 0.2))
    """

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self, str_keys=True, enc_hook=_plain)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Rebuild an object from `to_dict`.

        Raises:
            ConfigurationError: the values are not those of such an object.
        """
        try:
            return msgspec.convert(plain, cls, str_keys=True, dec_hook=_rebuilt)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"plain: {error}; pass what {cls.__name__}.to_dict returned") from error


def _plain(value: Any) -> Any:
    return value.to_dict() if hasattr(value, "to_dict") else value.item()


def _rebuilt(kind: Any, plain: Any) -> Any:
    """Rebuild an object of a class that msgspec does not support."""
    return kind.from_dict(plain)
