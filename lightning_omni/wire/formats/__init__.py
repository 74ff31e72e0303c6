"""The wire formats of pushes and answers: the contract and registry (``base``), and the lossy ones, one file each."""

from collections.abc import Mapping

from lightning_omni.errors import ConfigurationError
from lightning_omni.wire.formats.base import WireFormat, checked, register, registered, to_wire
from lightning_omni.wire.formats.int8 import Int8
from lightning_omni.wire.formats.per_direction import PerDirection
from lightning_omni.wire.formats.rounded import BF16, FP16
from lightning_omni.wire.formats.top_k import TopK

__all__ = ["BF16", "FP16", "Int8", "PerDirection", "TopK", "Wire", "WireFormat", "register", "wire_named", "wire_of"]

Wire = str | WireFormat | Mapping[str, str | WireFormat]
"""The type of ``wire=``: see `wire_of`."""


def wire_named(text: str) -> WireFormat:
    """Return the wire format of this name, with settings after a colon.

    Raises:
        ConfigurationError: no such format or setting exists.

    Example:
        >>> wire_named("topk:0.001")
        TopK(fraction=0.001)
        >>> wire_named("int8:block=64")
        Int8(block=64)
    """
    return registered(text)


def wire_of(given: Wire) -> WireFormat:
    """Return the wire format for a user's argument: a name, a format, or ``{"push": ..., "pull": ...}`` with these.

    Raises:
        ConfigurationError: the argument is none of these.
    """
    if isinstance(given, str):
        return wire_named(given)
    if isinstance(given, WireFormat):
        return checked(given)
    if not isinstance(given, Mapping) or not given or set(given) - {"push", "pull"}:
        raise ConfigurationError(
            f'wire={given!r}: pass a name such as "int8", a value such as TopK(fraction=0.001), or one for each'
            ' direction, as in {"push": "int8", "pull": "bf16"}'
        )
    push, pull = (wire_of(given.get(way, "fp32")) for way in ("push", "pull"))
    return PerDirection(push=to_wire(push), pull=to_wire(pull))
