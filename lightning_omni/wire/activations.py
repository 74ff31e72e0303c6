"""The encoding of a merged head's activations and gradients: floating-point in the run's wire format, others raw.

Rule 1: no residual is kept, because the rounding error of these activations does not belong to those of the next batch.
Rule 2: formats that leave elements out (top-k) are not used here, because an incomplete activation is useless.
Rule 3: integers and booleans (targets, token positions, masks) are sent unchanged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_omni.errors import MalformedMessage
from lightning_omni.wire.codec import Packed, check_specs, pack, unpack
from lightning_omni.wire.formats.base import RAW, Memory, WireFormat, decode
from lightning_omni.wire.layout import DTYPES, Layout


class ActivationFormats(NamedTuple):
    """The wire formats of a merged head's two directions.

    Attributes:
        up: format of tensors sent to the server: activations, and the gradients of outputs.
        down: format of tensors sent by the server: outputs, and the gradients of activations.

    Example:
            >>> from lightning_omni.wire.compression import Compression
        >>> ActivationFormats.of(Compression("int8", "bf16").wire_format)
        ActivationFormats(up=Int8(block=128), down=BF16())
        >>> ActivationFormats.of(Compression("topk:0.01").wire_format)
        ActivationFormats(up=Raw(), down=Raw())
    """

    up: WireFormat
    down: WireFormat

    @classmethod
    def of(cls, chosen: WireFormat) -> ActivationFormats:
        """Return the formats for a run with this wire format."""
        return cls(chosen.pushes.activations, chosen.answers.activations)


RAW_ACTIVATIONS = ActivationFormats(RAW, RAW)


def pack_activations(wire: WireFormat, tree: Any) -> tuple[Packed, Tensor]:
    """Encode a tree; see `lightning_omni.wire.codec.pack`."""
    packed, buffer = pack(tree)
    if _is_raw(wire, packed):
        return packed, buffer
    layout = packed.layout
    floats, others = _flags(layout)
    views = layout.views(buffer)
    parts = [
        each.encode([view if flag else None for view, flag in zip(views, flags, strict=True)], layout, {}, Memory())
        for each, flags in ((wire, floats), (RAW, others))
        if any(flags)
    ]
    return packed, torch.cat([part.payload for part in parts])


def flat_of(wire: WireFormat, packed: Packed, payload: Tensor) -> Tensor:
    """Decode the tensors of a tree into flat memory.

    Raises:
        MalformedMessage: the payload has another length than the tensors.
        Refused: the payload cannot be decoded.
    """
    if _is_raw(wire, packed):
        return payload
    check(wire, packed, payload.numel())
    layout = packed.layout
    floats, others = _flags(layout)
    flat = layout.empty()
    views, first = layout.views(flat), _nbytes(wire, layout.subset(floats))
    for each, flags, part in ((wire, floats, payload[:first]), (RAW, others, payload[first:])):
        known, mine = layout.subset(flags), [view for view, flag in zip(views, flags, strict=True) if flag]
        if mine:
            values = known.views(decode(each, part.clone(), known, Memory()))
            torch._foreach_copy_(mine, values)
    return flat


def unpack_activations(wire: WireFormat, packed: Packed, payload: Tensor) -> Any:
    """Decode a tree; see `lightning_omni.wire.codec.unpack`."""
    return unpack(packed, flat_of(wire, packed, payload))


def check(wire: WireFormat, packed: Packed, nbytes: int) -> None:
    """Raise `MalformedMessage` unless every tensor is sane, and all have exactly ``nbytes`` bytes when encoded."""
    if _is_raw(wire, packed):
        check_specs(packed.specs, nbytes)
        return
    layout = packed.layout
    floats, others = _flags(layout)
    check_specs(packed.specs, layout.nbytes)
    expected = _nbytes(wire, layout.subset(floats)) + layout.subset(others).nbytes
    if expected != nbytes:
        raise MalformedMessage(f"the tensors need {expected} bytes, but {nbytes} came")


def _is_raw(wire: WireFormat, packed: Packed) -> bool:
    return wire == RAW or not any(_flags(packed.layout)[0])


def _flags(layout: Layout) -> tuple[list[bool], list[bool]]:
    """Return which entries have floating-point elements, and which do not."""
    floats = [spec.dtype in DTYPES and DTYPES[spec.dtype].is_floating_point for spec in layout.specs]
    return floats, [not each for each in floats]


def _nbytes(wire: WireFormat, layout: Layout) -> int:
    return wire.sizes(layout)[1]
