"""A wire format that is applied to each share of the weights separately, as with several servers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import Method
from lightning_omni.wire.formats import PerDirection
from lightning_omni.wire.formats.base import (
    RAW,
    Encoded,
    Memory,
    State,
    WireFormat,
    from_wire,
    name_of,
    register,
    to_wire,
)
from lightning_omni.wire.layout import Layout
from lightning_omni.wire.partition import Split

_LENGTH = 8
"""Bytes of the length of a part."""


def partitioned_format(wire_format: WireFormat, method: Method, split: Split) -> WireFormat:
    """Return the wire format with the rounding of several servers, for the one server of the simulator and the replay.

    Raw tensors are the same in parts, and messages between groups have no parts.

    Args:
        wire_format: the run's wire format.
        method: the run's method.
        split: the division of the weights over servers.
    """
    if len(split.shares) == 1 or method.talks_to_peers:
        return wire_format
    push, pull = (
        each
        if each == RAW or isinstance(each, PartitionedFormat)
        else PartitionedFormat(wire_format=to_wire(each), split=split)
        for each in (wire_format.pushes, wire_format.answers)
    )
    return push if pull == RAW else PerDirection(push=to_wire(push), pull=to_wire(pull))


@register
class PartitionedFormat(WireFormat, frozen=True, kw_only=True, dict=True, tag="by_share"):
    """A wire format that encodes each share separately; the payload begins with the lengths of all shares.

    Only the simulator's own server supports it: in real runs each share travels by itself.

    Args:
        wire_format: the format of each share, as plain data.
        split: the division of all parameters' tensors.
    """

    wire_format: dict[str, Any]
    split: Split

    @cached_property
    def _each(self) -> WireFormat:
        return from_wire(self.wire_format)

    def sizes(self, layout: Layout) -> tuple[int, int]:
        least, most = zip(*map(self._each.sizes, self._split_of(layout).shares), strict=True)
        lengths = _LENGTH * len(self.split.shares)
        return lengths + sum(least), lengths + sum(most)

    def encode(self, tensors: Sequence[Tensor | None], layout: Layout, state: State, memory: Memory) -> Encoded:
        split, present = self._split_of(layout), tuple(tensor is not None for tensor in tensors)
        parts = zip(split.parts(tensors), split.shares, split.sender_parts(state), strict=True)
        encoded = [self._each.encode(part, share, before, Memory()) for part, share, before in parts]
        if [part.present for part in encoded] != [tuple(present[place] for place in places) for places in split.places]:
            raise ConfigurationError(
                f"compression={name_of(self._each)!r} pushes other tensors than it is given, which is simulated and"
                " replayed with one server only; pass servers=1"
            )
        lengths = torch.tensor([part.payload.numel() for part in encoded]).view(torch.uint8)
        payload = torch.cat([lengths, *(part.payload for part in encoded)])
        return Encoded(payload, present, split.merged_sender([part.state for part in encoded]))

    def decode(self, payload: Tensor, layout: Layout, memory: Memory) -> Tensor:
        split, start = self._split_of(layout), _LENGTH * len(self.split.shares)
        parts = payload[start:].split(payload[:start].clone().view(torch.int64).tolist())
        buffer, _ = memory.hold(layout)
        split.write(
            buffer, [self._each.decode(part, of, Memory()) for part, of in zip(parts, split.shares, strict=True)]
        )
        return buffer

    def _split_of(self, layout: Layout) -> Split:
        """Return the same cuts for a layout of some of the tensors, or of a fragment of them."""
        return self.split if layout.specs == self.split.layout.specs else self.split.within(layout)
