"""Fragments: a model's parameters, cut into parts of equal bytes that are exchanged one by one.

Rule 1: both sides cut alike, from the sizes of the tensors alone; no offset ever travels.
Rule 2: fragments are cut once. A parameter that comes in mid-run goes whole into one of them, behind what that has; so
what a fragment held before is the beginning of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Piece(NamedTuple):
    """What a fragment has of one tensor.

    Attributes:
        place: of the tensor among all.
        range: first number, and the one behind the last, of the flattened tensor; None for all of it.
    """

    place: int
    range: tuple[int, int] | None = None


Pieces = Sequence[Piece]
"""A fragment: its pieces, in the order of the tensors."""


def cut(sizes: Sequence[tuple[int, int]], of: int, first: int = 0) -> list[list[Piece]]:
    """Tensors cut into fragments, the cuts between numbers and not within them.

    Args:
        sizes: of each tensor its numbers, and the bytes of one of them.
        of: how many fragments.
        first: how many tensors there were at first; 0 for all.

    Example:
        >>> cut([(6, 4), (2, 4)], of=2)
        [[Piece(place=0, range=(0, 4))], [Piece(place=0, range=(4, 6)), Piece(place=1, range=None)]]
    """
    first = first or len(sizes)
    total, begin = sum(count * width for count, width in sizes[:first]), 0
    fragments: list[list[Piece]] = [[] for _ in range(of)]
    for place, (count, width) in enumerate(sizes[:first]):
        cuts = [min(max(-(-(total * number // of - begin) // width), 0), count) for number in range(of + 1)]
        for fragment, start, stop in zip(fragments, cuts, cuts[1:], strict=False):
            if start < stop:
                fragment.append(Piece(place, None if stop - start == count else (start, stop)))
        begin += count * width
    for place in range(first, len(sizes)):
        fragments[place % of].append(Piece(place))
    return fragments


def sizes_of(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Of each tensor its numbers, and the bytes of one of them."""
    return [(tensor.numel(), tensor.element_size()) for tensor in tensors]


def read(tensors: Sequence[Tensor], pieces: Pieces) -> list[Tensor]:
    """A fragment of tensors, a tensor for each piece. They share memory wherever a tensor is contiguous.

    Example:
        >>> import torch
        >>> [each.tolist() for each in read([torch.arange(6), torch.ones(2)], [Piece(0, (4, 6)), Piece(1)])]
        [[4, 5], [1.0, 1.0]]
    """
    return [_part(tensors[place], where) for place, where in pieces]


def write(tensors: Sequence[Tensor], pieces: Pieces, values: Sequence[Tensor]) -> None:
    """Overwrites a fragment of tensors with one value for each piece."""
    for (place, where), value in zip(pieces, values, strict=True):
        whole = tensors[place]
        if where is None or whole.is_contiguous():
            _part(whole, where).copy_(value, non_blocking=True)
        else:  # in another memory format, in which its numbers are not in a row
            flat = whole.flatten()
            flat[slice(*where)].copy_(value)
            whole.copy_(flat.view_as(whole))


def _part(tensor: Tensor, where: tuple[int, int] | None) -> Tensor:
    return tensor if where is None else tensor.reshape(-1)[slice(*where)]
