"""The wire formats of pushes and answers: the contract and registry (``base``), and the ``lossy`` ones."""

from lightning_omni.errors import ConfigurationError
from lightning_omni.wire.formats.base import PerDirection, WireFormat, checked, register, registered
from lightning_omni.wire.formats.lossy import BF16, FP16, Int8, TopK

__all__ = ["BF16", "FP16", "Int8", "PerDirection", "TopK", "WireFormat", "register", "wire_named", "wire_of"]


def wire_named(text: str) -> WireFormat:
    """Return the wire format of a name, with settings after a colon.

    Raises:
        ConfigurationError: no such format or setting exists.

    Example:
        >>> wire_named("topk:0.001")
        TopK(fraction=0.001)
        >>> wire_named("int8:block=64")
        Int8(block=64)
    """
    return registered(text)


def wire_of(given: str | WireFormat) -> WireFormat:
    """Return the wire format of a name or a format.

    Raises:
        ConfigurationError: it is neither.
    """
    if isinstance(given, str):
        return wire_named(given)
    if isinstance(given, WireFormat):
        return checked(given)
    raise ConfigurationError(
        f'compression={given!r}: pass a name such as "int8", or a value such as TopK(fraction=0.001)'
    )
