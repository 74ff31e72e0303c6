"""How the tensors of a push become bytes and tensors again: the one place that knows. What ships is `Raw`.

A wire format is a frozen value, as a method is. It travels as its name and settings, once, when groups are formed, and
holds for every push, and for its answer, until groups are formed again. Answers travel raw unless the format says how
else (`WireFormat.answers`): they are the server's own flat memory. What is read outside an exchange travels raw always.

Rule 1: what the sender remembers is explicit. `WireFormat.encode` is given a state and returns the next one, which
counts from when the server has applied the push. A push that was refused leaves the state as it was.
Rule 2: what a sender was given and has not sent yet lies in its state as ``residual``: one tensor or None for each
parameter, in order, in the units of what it was given. Nothing else in a state means anything to other code.
Rule 3: a number that is not finite stays so on the wire, for it is the server that refuses such pushes.
Rule 4: the server believes nothing. A payload's size is checked before memory is allocated for it, and whatever cannot
be decoded is refused and counted, before anything has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_not
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import msgspec
import torch
from torch import Tensor

from lightning_omni.errors import MalformedMessage, Refused
from lightning_omni.methods import Method
from lightning_omni.methods.fragments import Piece, read, write
from lightning_omni.protocol.layout import Layout
from lightning_omni.registry import Registry, to_wire

RESIDUAL = "residual"
"""Where in a sender's state lies what has not been sent yet; see rule 2."""

State = Mapping[str, Any]
"""What a sender remembers: plain values, tensors and lists of them. No code changes it in place."""


class Memory:
    """Flat memory on the CPU that is used again and again, for one payload at a time.

    Args:
        empty: makes memory of so many bytes, all zeros; see `lightning_omni.protocol.transport.Control.empty`.
    """

    def __init__(self, empty: Callable[[int], Tensor] | None = None) -> None:
        self._empty = empty or (lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
        self._layout = Layout(())
        self._buffer = self._held = self._layout.empty()
        self._views: list[Tensor] = []

    def hold(self, layout: Layout) -> tuple[Tensor, list[Tensor]]:
        """Memory in which tensors lie as the layout has it, and these tensors. Valid until the next call."""
        if layout is not self._layout:
            if self._buffer.numel() < layout.nbytes:
                self._buffer = self._empty(layout.nbytes)
            self._layout, self._held, self._views = layout, self._buffer[: layout.nbytes], layout.views(self._buffer)
        return self._held, self._views

    def room(self, nbytes: int) -> Tensor:
        """Memory of so many bytes, at the beginning of its storage. Valid until the next call, as that of `hold`."""
        if self._buffer.numel() < nbytes:
            self._buffer = self._empty(nbytes)
        self._layout, self._held, self._views = Layout(()), self._buffer[:0], []
        return self._buffer[:nbytes]


_NOTHING: State = MappingProxyType({})


class Encoded(NamedTuple):
    """Tensors as bytes.

    Attributes:
        payload: uint8, on the CPU.
        present: one flag for each parameter: whether the payload holds something of it.
        state: what the sender remembers once the server has applied the push.
    """

    payload: Tensor
    present: tuple[bool, ...]
    state: State = _NOTHING


class WireFormat(msgspec.Struct, frozen=True, kw_only=True, tag_field="name"):
    """A way to put tensors into bytes: its settings, and both directions.

    (A msgspec struct cannot be an abstract base class, hence the errors.)

    Attributes:
        is_stateful: whether senders remember anything; if not, nothing is looked for when groups are formed.
    """

    is_stateful: ClassVar[bool] = True

    @property
    def pushes(self) -> WireFormat:
        """How pushes are put into bytes: this format, unless it is one for each direction."""
        return self

    @property
    def answers(self) -> WireFormat:
        """How the tensors of their answers are."""
        return RAW

    @property
    def activations(self) -> WireFormat:
        """How activations of a merged head travel in this direction: this format, if each number arrives as itself.

        Unless a format says so, they travel raw. Such a format makes as many bytes of as many numbers, whatever they
        are, and needs no state.
        """
        return RAW

    def check(self, method: Method) -> None:
        """Raises `ConfigurationError` if what a method pushes cannot be sent so."""

    def check_answers(self, method: Method) -> None:
        """Raises `ConfigurationError` if what a method is answered cannot be sent so."""

    def sizes(self, layout: Layout) -> tuple[int, int]:
        """The fewest and the most bytes that a payload can have; the same if it is known before it is encoded.

        Args:
            layout: of the tensors that the payload holds something of.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how large its payloads are")

    def encode(self, tensors: Sequence[Tensor | None], layout: Layout, state: State, memory: Memory) -> Encoded:
        """Tensors as bytes.

        Args:
            tensors: one for each parameter, on any device; None if it took no part in the loss. They are lent.
            layout: of all parameters. There may be more than at the last call, behind the others.
            state: as the last push that was applied has left it; empty at first.
            memory: may be used for the payload.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot encode")

    def decode(self, payload: Tensor, layout: Layout, memory: Memory) -> Tensor:
        """Bytes as tensors, which lie in flat memory as the layout has it; the payload itself if they do so there.

        Args:
            payload: uint8, from any sender, and as large as `sizes` has it. It is lent.
            layout: of the tensors that it holds something of.
            memory: may be used for the tensors.

        Raises:
            Exception: whichever; the payload is then refused.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot decode")


_IS_CPU = attrgetter("is_cpu")


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
        else:
            for view, tensor in zip(views, there, strict=True):
                view.copy_(tensor)
        return Encoded(buffer, present)

    def decode(self, payload: Tensor, layout: Layout, memory: Memory) -> Tensor:
        return payload


RAW = Raw()
FORMATS: dict[str, type[WireFormat]] = {"raw": Raw}
"""Every wire format by the name under which it travels."""
_registry = Registry(
    FORMATS,
    WireFormat,
    "wire",
    "wire format",
    "lightning_omni.protocol.wire_format.WireFormat",
    "--wire-format",
    internal=frozenset({"raw", "both_ways", "by_share"}),
)


# --- Fragments -------------------------------------------------------------------------------------------------------

_OF_FRAGMENT = "fragment"
"""Where in a sender's state lies what else it remembers of each fragment."""


def state_of_fragment(state: State, layout: Layout, number: int, of: int) -> State:
    """What a sender remembers of one fragment, as its format has it. The residual is a part of the whole one.

    Args:
        state: what it remembers of all parameters.
        layout: of all parameters.
        number: of the fragment.
        of: how many there are.
    """
    whole = state.get(RESIDUAL, ())
    owed = [
        None if place >= len(whole) or whole[place] is None else read(whole, [Piece(place, where)])[0]
        for place, where in layout.pieces(number, of)
    ]
    more = state.get(f"{_OF_FRAGMENT} {number}", {})
    return {**more, RESIDUAL: owed} if any(each is not None for each in owed) else more


def with_fragment(state: State, new: State, layout: Layout, number: int, of: int) -> State:
    """A sender's state, with what it remembers of one fragment; see `state_of_fragment`. Both stay as they are."""
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
    """Raises `MalformedMessage` if no payload of these tensors has so many bytes."""
    smallest, largest = wire_format.sizes(layout)
    if not smallest <= nbytes <= largest:
        expected = f"{largest}" if smallest == largest else f"{smallest} to {largest}"
        raise MalformedMessage(f"the tensors have {nbytes} bytes, {expected} were expected")


def decode(wire_format: WireFormat, payload: Tensor, layout: Layout, memory: Memory) -> Tensor:
    """The tensors of a payload, in flat memory as the layout has it.

    Raises:
        Refused: they cannot be had from it.
    """
    try:
        flat = wire_format.decode(payload, layout, memory)
    except Exception as error:  # torch raises what it likes on places and counts that are none
        raise Refused(
            "malformed", f"{payload.numel()} bytes are no push in the wire format {name_of(wire_format)}: {error}"
        ) from error
    if flat.numel() != layout.nbytes:
        raise MalformedMessage(f"the tensors have {flat.numel()} bytes, {layout.nbytes} were expected")
    return flat


# --- By name ---------------------------------------------------------------------------------------------------------


def name_of(wire_format: WireFormat) -> str:
    """The name under which a format travels."""
    return str(type(wire_format).__struct_config__.tag)


def from_wire(plain: Mapping[str, Any]) -> WireFormat:
    """A format from plain data.

    Raises:
        MalformedMessage: no such format, or wrong settings.
    """
    return _registry.from_wire(plain)


def registered(text: str) -> WireFormat:
    """The format of that name, with settings after a colon: see `lightning_omni.registry.Registry.named`."""
    return _registry.named(text, {"fp32": RAW})


def checked(wire_format: WireFormat) -> WireFormat:
    """Return the same format if its settings are of the right types: see `lightning_omni.registry.Registry.checked`."""
    return _registry.checked(wire_format)


def register(kind: type[WireFormat]) -> type[WireFormat]:
    """Makes a wire format of your own known by its tag. A class decorator.

    The embedded server imports the module that a run's format comes from; a standalone server is told with
    ``lightning-omni serve --wire-format module:Class``.

    Raises:
        ConfigurationError: the name is taken.
    """
    return _registry.register(kind)


def load(path: str) -> type[WireFormat]:
    """Imports and registers a wire format, from its path ``module:Class``.

    Raises:
        ConfigurationError: it cannot be imported, or is no wire format.
    """
    return _registry.load(path)


__all__ = [
    "FORMATS",
    "RAW",
    "RESIDUAL",
    "Encoded",
    "Memory",
    "Raw",
    "State",
    "WireFormat",
    "check_size",
    "decode",
    "from_wire",
    "load",
    "name_of",
    "register",
    "registered",
    "state_of_fragment",
    "to_wire",
    "with_fragment",
]
