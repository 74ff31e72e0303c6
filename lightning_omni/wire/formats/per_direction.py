"""A wire format for pushes together with another for their answers."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from lightning_omni.errors import ConfigurationError
from lightning_omni.wire.formats.base import WireFormat, from_wire, register


@register
class PerDirection(WireFormat, frozen=True, kw_only=True, dict=True, tag="both_ways"):
    """The format of ``Compression(push=..., pull=...)``. It encodes nothing itself.

    Args:
        push: the format of pushes, as plain data.
        pull: the format of answers, as plain data.

    Raises:
        MalformedMessage: one of them is no format.
        ConfigurationError: one of them is for both directions itself.

    Example:
        >>> both = PerDirection(push={"name": "int8"}, pull={"name": "bf16"})
        >>> both.pushes, both.answers
        (Int8(block=128), BF16())
    """

    push: dict[str, Any]
    pull: dict[str, Any]

    def __post_init__(self) -> None:
        if isinstance(self.pushes, PerDirection) or isinstance(self.answers, PerDirection):
            raise ConfigurationError("Compression(push=..., pull=...): pass a format of one direction for each")

    @cached_property
    def pushes(self) -> WireFormat:
        return from_wire(self.push)

    @cached_property
    def answers(self) -> WireFormat:
        return from_wire(self.pull)
