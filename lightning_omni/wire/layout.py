"""The layout of named tensors in one flat buffer of bytes, its fingerprint, and its growth.

Rule 1: both sides derive offsets from the same layout; offsets are never sent.
Rule 2: a layout grows only at its end, and each growth gives a new version; earlier versions are prefixes of it.
Rule 3: an entry is a tensor, or a range of its elements if each of several processes holds a part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from math import prod
from typing import Any

import msgspec
import torch
from torch import Tensor

from lightning_omni.errors import MalformedMessage, Refused
from lightning_omni.methods.model.fragments import Piece, Pieces, cut

ALIGNMENT = 64
"""Alignment of each tensor's start in bytes, so that any dtype can be viewed in place."""

LARGEST = 1 << 56
"""An exclusive upper bound of the elements in a tensor."""

SUBSETS = 64
"""The most cached subsets of a layout."""

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor, or a part of it.

    Attributes:
        shape: shape of the whole tensor.
        dtype: name of the dtype, without ``torch.``.
        range: start and stop of this part in the flattened tensor; None for the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    range: tuple[int, int] | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.shape if self.range is None else (self.range[1] - self.range[0],)

    @property
    def numel(self) -> int:
        return prod(self.local_shape)

    @property
    def bounds(self) -> tuple[int, int]:
        return (0, prod(self.shape)) if self.range is None else self.range

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        shape = self.local_shape
        return tuple(prod(shape[axis + 1 :]) for axis, _ in enumerate(shape))

    def part(self, where: tuple[int, int] | None) -> TensorSpec:
        """Return a range of this entry's elements, or all if ``where`` is None."""
        if where is None:
            return self
        begin = self.range[0] if self.range is not None else 0
        return TensorSpec(self.name, self.shape, self.dtype, (begin + where[0], begin + where[1]))

    @property
    def is_sane(self) -> bool:
        """Return whether such a tensor can exist; empty ones, too, must have sizes that torch can hold."""
        if self.dtype not in DTYPES or any(size < 0 for size in self.shape):
            return False
        start, stop = self.range or (0, 0)
        whole = prod(max(size, 1) for size in self.shape)
        return whole < LARGEST and 0 <= start <= stop <= max(prod(self.shape), 0)


class Layout(msgspec.Struct, frozen=True, dict=True):
    """A sequence of tensors, or parts of them, in a flat buffer of bytes.

    Attributes:
        version: number of times that entries were added.
        first: entries in the first version, which fragments divide; 0 if this is the first.
        division: how a group's members share these tensors, as text; empty if each member holds all.
        servers: number of servers; each holds a share of these tensors, and fragments divide the shares.

    Example:
        >>> layout = Layout.of({"w": torch.ones(2, 3), "b": torch.zeros(3)})
        >>> layout.nbytes, [view.shape for view in layout.views(layout.empty())]
        (76, [torch.Size([2, 3]), torch.Size([3])])
    """

    specs: tuple[TensorSpec, ...]
    version: int = 0
    first: int = 0
    division: str = ""
    servers: int = 1

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        return cls(tuple(spec_of(name, tensor) for name, tensor in tensors.items()))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        starts, position = [], 0
        for spec in self.specs:
            starts.append(position)
            position += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        return tuple(starts)

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Return for each entry the number of elements, and the bytes of one."""
        return tuple((spec.numel, DTYPES[spec.dtype].itemsize) for spec in self.specs)

    @cached_property
    def _places(self) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...], int], ...]:
        return tuple(
            (spec.dtype, spec.local_shape, spec.strides, start // DTYPES[spec.dtype].itemsize)
            for spec, start in zip(self.specs, self.offsets, strict=True)
        )

    @cached_property
    def nbytes(self) -> int:
        return self.offsets[-1] + self.specs[-1].nbytes if self.specs else 0

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        return tuple({spec.dtype: None for spec in self.specs})

    @cached_property
    def numel(self) -> int:
        return sum(prod(spec.local_shape) for spec in self.specs)

    @cached_property
    def reals(self) -> tuple[int, ...]:
        return tuple(prod(spec.local_shape) * (1 + DTYPES[spec.dtype].is_complex) for spec in self.specs)

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of all names, shapes, dtypes and ranges in order, with the `division`, if any."""
        digest = hashlib.sha256(msgspec.msgpack.encode(self.specs)).hexdigest()
        return f"{digest} {self.division}" if self.division else digest

    def grown(self, specs: Sequence[TensorSpec]) -> Layout:
        return Layout((*self.specs, *specs), self.version + 1, self.first or len(self.specs), servers=self.servers)

    def subset(self, present: Sequence[bool]) -> Layout:
        """Return the layout of the tensors whose flag is set; the last `SUBSETS` are cached."""
        return self if all(present) else self._subset(tuple(present))

    @cached_property
    def _subset(self) -> Callable[[tuple[bool, ...]], Layout]:  # the used parameters may change at random
        return lru_cache(SUBSETS)(
            lambda flags: Layout(
                tuple(spec for spec, there in zip(self.specs, flags, strict=True) if there), self.version
            )
        )

    def pieces(self, number: int, of: int) -> Pieces:
        """Return a fragment's pieces of the entries, in elements relative to each entry."""
        return self._pieces(of)[number]

    @cached_property
    def _pieces(self) -> Callable[[int], Sequence[Pieces]]:
        return cache(lambda of: cut(self.sizes, of, self.first, self.servers))

    def fragment(self, number: int | None, of: int) -> Layout:
        """Return the layout of one of ``of`` fragments, of whole entries and ranges; this one if the number is None."""
        return self if number is None else self._fragment(number, of)

    @cached_property
    def _fragment(self) -> Callable[[int, int], Layout]:
        return cache(lambda number, of: Layout(self._parts(self.pieces(number, of)), self.version))

    def chunks(self, nbytes: int) -> Sequence[tuple[Pieces, Layout]]:
        """Return the pieces and the layout of each chunk of the flat buffer, in order.

        A chunk has ``nbytes``, a multiple of `ALIGNMENT`; the last one may have fewer.
        """
        return self._chunks(nbytes)

    @cached_property
    def _chunks(self) -> Callable[[int], Sequence[tuple[Pieces, Layout]]]:
        return cache(lambda size: [self._chunk(begin, begin + size) for begin in range(0, self.nbytes, size)])

    def _chunk(self, begin: int, end: int) -> tuple[Pieces, Layout]:
        pieces = []
        for place, ((count, size), offset) in enumerate(zip(self.sizes, self.offsets, strict=True)):
            start, stop = (min(max((bound - offset) // size, 0), count) for bound in (begin, end))
            if start < stop:
                pieces.append(Piece(place, None if stop - start == count else (start, stop)))
        return pieces, Layout(self._parts(pieces))

    def _parts(self, pieces: Pieces) -> tuple[TensorSpec, ...]:
        return tuple(self.specs[place].part(where) for place, where in pieces)

    def empty(self) -> Tensor:
        """Return a new buffer, uint8 ``(nbytes,)``, zeroed because the gaps between tensors are sent, too."""
        return torch.zeros(self.nbytes, dtype=torch.uint8)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors as views of a buffer: uint8, at least ``(nbytes,)``, contiguous."""
        # One call for each tensor: with many small tensors, views dominate the cost of a push.
        flat: dict[str, tuple[Tensor, int]] = {}
        views = []
        for dtype, shape, strides, offset in self._places:
            if dtype not in flat:
                size = DTYPES[dtype].itemsize
                typed = buffer[: self.nbytes // size * size].view(DTYPES[dtype])
                flat[dtype] = typed, int(typed.storage_offset())
            typed, first = flat[dtype]
            views.append(typed.as_strided(shape, strides, first + offset))
        return views


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise MalformedMessage(f"tensor {name!r} has dtype {tensor.dtype}, which cannot be exchanged")
    return TensorSpec(name, tuple(tensor.shape), dtype)


# --- Parameters and parameter groups of an optimizer ------------------------------------------------------------------

# Rule 1: a layout grows only at its end, so a group's earlier layout is the beginning of the later ones.
# Rule 2: each group makes a change at its own time. The first one changes the server's optimizer; for the others the
# change exists already. Until a group makes it, its pushes are accepted without the parameters that it does not have.
# Rule 3: a change that cannot be followed is refused before anything has changed.

MOST_STRUCTURES = 4096
"""The most structures of an optimizer between two formings of groups."""
MOST_GROUPS = 1 << 16
"""The most parameter groups of an optimizer."""


class Structure(msgspec.Struct, frozen=True):
    """The structure of one optimizer at one time.

    Attributes:
        size: number of parameters.
        groups: each parameter group's indices of parameters, below ``size``; empty if the optimizer steps at the
            workers.
    """

    size: int
    groups: tuple[tuple[int, ...], ...]

    def extends(self, other: Structure) -> bool:
        """Return whether this is the other structure with parameters or parameter groups added behind its own."""
        mine = self.groups[: len(other.groups)]
        begins = [group[: len(old)] for group, old in zip(mine, other.groups, strict=False)]
        return self.size >= other.size and begins == list(other.groups)

    def counterparts(self, older: Structure) -> list[int | None]:
        """Return for each parameter group the older group that held the first of its older parameters, or None."""
        home = {place: number for number, group in enumerate(older.groups) for place in group}
        return [next((home[place] for place in group if place in home), None) for group in self.groups]


class Structures(msgspec.Struct):
    """The structures of one optimizer since groups were formed, and each compute group's current one."""

    _all: list[Structure]
    _at: dict[int, int] = {}

    @property
    def newest(self) -> Structure:
        return self._all[-1]

    @property
    def first(self) -> Structure:
        return self._all[0]

    def of(self, group: int) -> Structure:
        return self._all[self._at.get(group, 0)]

    def form(self) -> None:
        self._all, self._at = self._all[-1:], {}

    def find(self, group: int, structure: Structure) -> int | None:
        """Return the number of a structure that a group changes to; None if it is new."""
        now = self._at.get(group, 0)
        for number in range(now, len(self._all)):
            if self._all[number] == structure:
                return number
        if now < len(self._all) - 1 and not structure.extends(self.newest):
            raise Refused(
                "structure",
                f"group {group} has changed its parameter groups in another way than the others before it: it has"
                f" {_shape_of(structure)}, they have {_shape_of(self.newest)}; let all groups change them alike, and in"
                " the same order",
            )
        if len(self._all) >= MOST_STRUCTURES:
            raise Refused("structure", f"parameter groups have been of {MOST_STRUCTURES} forms; change them less often")
        return None

    def move(self, group: int, structure: Structure, number: int | None) -> None:
        if number is None:
            self._all.append(structure)
        self._at[group] = len(self._all) - 1 if number is None else number


def read_structure(tree: Any, known: int) -> tuple[Structure, list[dict[str, Any]], dict[str, Tensor], dict[int, Any]]:
    """Read a group's description of an optimizer's parameter groups, which had ``known`` parameters before.

    Args:
        tree: ``{"groups": [{..., "params": [indices]}], "weights": {name: tensor}, "state": {index: {...}}}``.
        known: number of parameters that the group had before; the weights are those of later ones.

    Returns:
        The structure; settings and indices of each parameter group; weights and optimizer state of the new parameters.
    """
    try:
        groups = [dict(group) for group in tree["groups"]]
        weights = {str(name): value for name, value in tree["weights"].items()}
        state = {int(place): dict(values) for place, values in tree["state"].items()}
        structure = Structure(known + len(weights), tuple(tuple(group["params"]) for group in groups))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise MalformedMessage(f"no parameter groups: {type(error).__name__}: {error}") from error
    places = [place for group in structure.groups for place in group]
    if not all(type(place) is int and 0 <= place < structure.size for place in places):
        raise MalformedMessage(f"parameter groups hold places outside of the {structure.size} parameters")
    if len(set(places)) != len(places):
        raise MalformedMessage("a parameter is in two parameter groups")
    if len(groups) > MOST_GROUPS:
        raise MalformedMessage(f"{len(groups)} parameter groups are too many")
    if not all(isinstance(value, Tensor) for value in weights.values()):
        raise MalformedMessage("a weight is no tensor")
    if not all(_is_plain(value) for group in groups for value in group.values()):
        raise MalformedMessage("the settings of a parameter group are plain values")
    if not all(known <= place < structure.size for place in state):
        raise MalformedMessage("optimizer state comes with parameters that are new, and with no others")
    return structure, groups, weights, state


def specs_of(weights: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(spec_of(name, value) for name, value in weights.items())


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


def _shape_of(structure: Structure) -> str:
    sizes: Sequence[int] = [len(group) for group in structure.groups]
    return f"{len(sizes)} of {sizes} parameters" if len(sizes) < 8 else f"{len(sizes)} of {sum(sizes)} parameters"
