"""`Serializable`: dataclasses that stand in JSON files, by their annotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from lightning_omni.errors import ConfigurationError

if TYPE_CHECKING:
    from typing_extensions import Self


class Serializable:
    """Base of dataclasses that become plain values for JSON, and come back.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Timing(Serializable):
        ...     seconds: tuple[float, ...]
        >>> Timing.from_dict(Timing((0.1, 0.2)).to_dict())
        Timing(seconds=(0.1, 0.2))
    """

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self, str_keys=True, enc_hook=_plain)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """What `to_dict` gave.

        Raises:
            ConfigurationError: it did not give that.
        """
        try:
            return msgspec.convert(plain, cls, str_keys=True)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"plain: {error}; pass what {cls.__name__}.to_dict returned") from error


def _plain(value: Any) -> Any:
    """What msgspec does not know: a number of NumPy, or something that tells itself."""
    return value.to_dict() if hasattr(value, "to_dict") else value.item()
