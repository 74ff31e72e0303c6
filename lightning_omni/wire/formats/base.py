"""Wire formats: the encoding of a push's tensors as bytes.

A wire format is a frozen value, sent by name and settings when groups are formed. Answers are sent raw, unless
the format has another encoding for them (`WireFormat.answers`). Weights that a server sends outside an exchange are
always raw.

Rule 1: `WireFormat.encode` returns the sender's next state, valid once the server has applied the push; a refused push
leaves the state unchanged.
Rule 2: the unsent part of a sender's input is in its state as ``residual``: one tensor or None for each parameter, in
order, in the units of the input. Only the format uses other entries.
Rule 3: if a number is not finite, at least one on the wire is not, because the server refuses such pushes.
Rule 4: the server trusts no sender. It checks a payload's size before it allocates memory, and refuses and counts a
payload that it cannot decode, before anything has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property, partial
from itertools import repeat
from operator import attrgetter, is_not
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import msgspec
import torch
from torch import Tensor

from lightning_omni.errors import ConfigurationError, MalformedMessage, Refused
from lightning_omni.methods.model.fragments import Piece, read, write
from lightning_omni.registry import Registry, name_of, to_wire
from lightning_omni.wire.layout import Layout

__all__ = [
    "FORMATS",
    "RAW",
    "RESIDUAL",
    "Encoded",
    "Memory",
    "PerDirection",
    "Raw",
    "State",
    "WireFormat",
    "argument_of",
    "check_size",
    "decode",
    "from_wire",
    "load_format",
    "name_of",
    "register",
    "state_of_fragment",
    "to_wire",
    "with_fragment",
]

RESIDUAL = "residual"
"""Key of the residual in a sender's state; see rule 2."""

State = Mapping[str, Any]
"""A sender's state: plain values, tensors and lists of them. No code changes it in place."""


def zeros_on(device: torch.device | str) -> Callable[[int], Tensor]:
    return partial(torch.zeros, dtype=torch.uint8, device=device)


class Memory:
    """A reusable buffer for one payload at a time, or for its tensors.

    ``empty`` returns a number of zeroed bytes, by default on the CPU.
    """

    def __init__(self, empty: Callable[[int], Tensor] | None = None) -> None:
        self._empty = empty or zeros_on("cpu")
        self._layout = Layout(())
        self._buffer = self._held = self._layout.empty()
        self._views: list[Tensor] = []

    def hold(self, layout: Layout) -> tuple[Tensor, list[Tensor]]:
        """Return memory with the layout, and its tensors as views, both valid until the next call."""
        if layout is not self._layout:
            if self._buffer.numel() < layout.nbytes:
                self._buffer = self._empty(layout.nbytes)
            self._layout, self._held, self._views = layout, self._buffer[: layout.nbytes], layout.views(self._buffer)
        return self._held, self._views

    def room(self, nbytes: int) -> Tensor:
        """Return memory of this size, at the start of its storage, valid until the next call."""
        if self._buffer.numel() < nbytes:
            self._buffer = self._empty(nbytes)
        self._layout, self._held, self._views = Layout(()), self._buffer[:0], []
        return self._buffer[:nbytes]


_NOTHING: State = MappingProxyType({})


class Encoded(NamedTuple):
    """Tensors encoded as bytes.

    Attributes:
        payload: uint8, on the CPU.
        present: for each parameter, whether it had a tensor.
        state: the sender's state once the server has applied the push.
    """

    payload: Tensor
    present: tuple[bool, ...]
    state: State = _NOTHING


class WireFormat(msgspec.Struct, frozen=True, kw_only=True, tag_field="name"):
    """A wire format and its settings.

    Attributes:
        is_stateful: whether senders have a state.
    """

    is_stateful: ClassVar[bool] = True

    @property
    def pushes(self) -> WireFormat:
        return self

    @property
    def answers(self) -> WireFormat:
        """Return the format of answers."""
        return RAW

    def sizes(self, layout: Layout) -> tuple[int, int]:
        """Return the smallest and largest payload of the layout's tensors in bytes; equal if known before encoding."""
        raise NotImplementedError(f"{type(self).__name__} does not say how large its payloads are")

    def encode(self, tensors: Sequence[Tensor | None], layout: Layout, state: State, memory: Memory) -> Encoded:
        """Encode tensors as bytes.

        Args:
            tensors: one for each parameter, on any device, left unchanged; None if it did not contribute to the loss.
            layout: layout of all parameters, which may have grown at its end since the last call.
            state: state after the last applied push; empty at first.
            memory: memory for the payload.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot encode")

    def decode(self, payload: Tensor, layout: Layout, memory: Memory) -> Tensor:
        """Decode bytes into tensors in flat memory with the layout; the payload itself if it has this form.

        Args:
            payload: uint8, on any device, left unchanged, from an untrusted sender, of a size that `sizes` permits.
            layout: layout of the tensors in the payload.
            memory: memory for the tensors, on the same device.

        Raises:
            Exception: any exception; the payload is then refused.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot decode")

    def decoding(self, layout: Layout, tensors: Sequence[Tensor], nbytes: int) -> Decoding:
        """Decode a payload of trusted bytes into tensors of the layout, about ``nbytes`` of them at a time, if it can.

        The tensors are contiguous, and all on the device to which the parts of the payload are sent.
        """
        payload = yield [slice(None)]
        flat = self.decode(payload, layout, Memory(zeros_on(payload.device)))
        torch._foreach_copy_(list(tensors), layout.views(flat))


Decoding = Generator[list[slice], Tensor, None]
"""A generator that yields the places of the bytes that it needs next, and is sent these bytes, one after the other."""
_IS_CPU = attrgetter("is_cpu")
CHUNK = 64 << 20
"""Bytes of a device's memory through which tensors are copied to the host."""


class Raw(WireFormat, frozen=True, kw_only=True, tag="raw"):
    """The tensors as they are, one after the other in their own dtypes.

    Example:
        >>> layout, memory = Layout.of({"w": torch.ones(2), "b": torch.ones(1)}), Memory()
        >>> encoded = RAW.encode([torch.ones(2), None], layout, {}, memory)
        >>> encoded.present, encoded.payload.view(torch.float32).tolist()
        ((True, False), [1.0, 1.0])
    """

    is_stateful: ClassVar[bool] = False

    def sizes(self, layout: Layout) -> tuple[int, int]:
        return layout.nbytes, layout.nbytes

    def encode(self, tensors: Sequence[Tensor | None], layout: Layout, state: State, memory: Memory) -> Encoded:
        present = tuple(map(is_not, tensors, repeat(None)))
        there = [tensor for tensor in tensors if tensor is not None]
        buffer, views = memory.hold(layout.subset(present))
        if there and all(map(_IS_CPU, there)):
            torch._foreach_copy_(views, there)
        elif there:
            _copy_from_device(there, layout.subset(present), buffer)
        return Encoded(buffer, present)

    def decode(self, payload: Tensor, layout: Layout, memory: Memory) -> Tensor:
        return payload


def _copy_from_device(tensors: Sequence[Tensor], layout: Layout, buffer: Tensor) -> None:
    """Copy tensors of a device to the CPU in chunks."""
    device = next(tensor.device for tensor in tensors if not tensor.is_cpu)
    memory = torch.empty(min(CHUNK, layout.nbytes), dtype=torch.uint8, device=device)
    for into, (pieces, part) in zip(buffer.split(CHUNK), layout.chunks(CHUNK), strict=False):
        chunk = memory[: part.nbytes].zero_()
        torch._foreach_copy_(part.views(chunk), [piece.to(device) for piece in read(tensors, pieces)])
        into[: part.nbytes].copy_(chunk)


RAW = Raw()
FORMATS: dict[str, type[WireFormat]] = {"raw": Raw}
"""Every wire format by its name in messages."""
_registry = Registry(
    FORMATS,
    WireFormat,
    "compression",
    "wire format",
    "lightning_omni.wire.formats.WireFormat",
    "--wire-format",
    internal=frozenset({"raw", "both_ways"}),
)


# --- Fragments -------------------------------------------------------------------------------------------------------

_OF_FRAGMENT = "fragment"
"""Prefix of the keys in a sender's state for each fragment's state, without the residual."""


def state_of_fragment(state: State, layout: Layout, number: int, of: int) -> State:
    """Return a sender's state for one of ``of`` fragments: its part of the residual, and its own entries."""
    whole = state.get(RESIDUAL, ())
    owed = [
        None if place >= len(whole) or whole[place] is None else read(whole, [Piece(place, where)])[0]
        for place, where in layout.pieces(number, of)
    ]
    more = state.get(f"{_OF_FRAGMENT} {number}", {})
    return {**more, RESIDUAL: owed} if any(each is not None for each in owed) else more


def with_fragment(state: State, new: State, layout: Layout, number: int, of: int) -> State:
    more = {key: value for key, value in new.items() if key != RESIDUAL}
    changed = {**state, f"{_OF_FRAGMENT} {number}": more} if more else dict(state)
    if RESIDUAL in new:
        whole = [*state.get(RESIDUAL, ())]
        whole += [None] * (len(layout.specs) - len(whole))
        for piece, owed in zip(layout.pieces(number, of), new[RESIDUAL], strict=False):
            if owed is not None:
                before = whole[piece.place]
                shape = layout.specs[piece.place].local_shape
                whole[piece.place] = owed.new_zeros(shape) if before is None else before.clone()
                write(whole, [piece], [owed])
        changed[RESIDUAL] = whole
    return changed


# --- At the server ---------------------------------------------------------------------------------------------------


def check_size(wire_format: WireFormat, nbytes: int, layout: Layout) -> None:
    smallest, largest = wire_format.sizes(layout)
    if not smallest <= nbytes <= largest:
        expected = f"{largest}" if smallest == largest else f"{smallest} to {largest}"
        raise MalformedMessage(f"the tensors have {nbytes} bytes, {expected} were expected")


def decode(wire_format: WireFormat, payload: Tensor, layout: Layout, memory: Memory) -> Tensor:
    """Return the tensors of a payload, in flat memory with the layout.

    Raises:
        Refused: the payload cannot be decoded.
        MalformedMessage: the decoded tensors have another size.
    """
    try:
        flat = wire_format.decode(payload, layout, memory)
    except Exception as error:  # torch raises various errors on invalid indices and counts
        raise Refused(
            "malformed", f"{payload.numel()} bytes are no push in the wire format {name_of(wire_format)}: {error}"
        ) from error
    if flat.numel() != layout.nbytes:
        raise MalformedMessage(f"the tensors have {flat.numel()} bytes, {layout.nbytes} were expected")
    return flat


# --- By name ---------------------------------------------------------------------------------------------------------


def argument_of(plain: Mapping[str, Any]) -> str:
    """Return the argument of OmniStrategy for a format as plain data, for messages."""
    if plain["name"] != "both_ways":
        return f'compression="{_text_of(plain)}"'
    return f'compression=Compression(push="{_text_of(plain["push"])}", pull="{_text_of(plain["pull"])}")'


def _text_of(plain: Mapping[str, Any]) -> str:
    return "fp32" if plain["name"] == "raw" else _registry.text_of_wire(plain)


def text_of(format_: WireFormat) -> str:
    """Return the text of a format; "" for one that has no registered name."""
    plain = to_wire(format_)
    return _text_of(plain) if plain["name"] in _registry.known.keys() - {"both_ways"} else ""


from_wire = _registry.from_wire


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
    return _registry.named(text, {"fp32": RAW})


def wire_of(given: str | WireFormat) -> WireFormat:
    if isinstance(given, str):
        return wire_named(given)
    if isinstance(given, WireFormat):
        return _registry.checked(given)
    raise ConfigurationError(
        f'compression={given!r}: pass a name such as "int8", or a value such as TopK(fraction=0.001)'
    )


def register(kind: type[WireFormat]) -> type[WireFormat]:
    """Register a custom wire format under its tag, as a class decorator.

    The embedded server imports the format's module; a standalone one needs ``lightning-omni serve --wire-format
    module:Class``.

    Raises:
        ConfigurationError: the name is in use.
    """
    return _registry.register(kind)


load_format = _registry.load


# --- One format for pushes, another for their answers -----------------------------------------------------------------


@register
class PerDirection(WireFormat, frozen=True, kw_only=True, dict=True, tag="both_ways"):
    """The format of ``Compression(push=..., pull=...)``: two formats as plain data.

    Raises:
        MalformedMessage: one of them is no format.
        ConfigurationError: one of them is itself for both directions.
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
