"""Fragments: an optimizer's parameters, cut into parts of equal bytes that are exchanged one by one.

Rule 1: both sides cut alike, from the sizes of the tensors and the number of servers; offsets never travel.
Rule 2: if several servers divide the parameters among them, each cuts its share separately, and fragment k consists of
the k-th fragments of all shares, one after the other.
Rule 3: parameters are cut once. A parameter added mid-run is appended whole to one fragment, whose earlier content
stays at its beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor


class Piece(NamedTuple):
    """A part of one tensor in a fragment.

    Attributes:
        place: index of the tensor.
        range: start and stop in the flattened tensor; None for the whole tensor.
    """

    place: int
    range: tuple[int, int] | None = None


Pieces = Sequence[Piece]
"""A fragment or a share: its pieces, in the order of the tensors, or share after share in that order."""

UNIT = 64
"""Number of elements at whose multiples tensors are divided over several servers."""
FRAGMENTS = "fragments"
"""The key of the list of states per fragment in the state of a method's server side, if it has several."""


def cut(sizes: Sequence[tuple[int, int]], of: int, first: int = 0, servers: int = 1) -> Sequence[Pieces]:
    """Cut tensors into fragments of equal bytes, up to rounding to whole elements.

    Args:
        sizes: elements of each tensor, and bytes of one element.
        of: number of fragments.
        first: number of tensors to cut, 0 for all; those added later stay whole.
        servers: number of servers, which `divide` the tensors. With several, no tensors are added mid-run.

    Example:
        >>> cut([(6, 4), (2, 4)], of=2)
        [[Piece(place=0, range=(0, 4))], [Piece(place=0, range=(4, 6)), Piece(place=1, range=None)]]
        >>> cut([(256, 4)], of=2, servers=2)[1]
        [Piece(place=0, range=(64, 128)), Piece(place=0, range=(192, 256))]
    """
    return _cut(tuple(sizes), of, first, servers)


@lru_cache(maxsize=64)  # with many tensors it takes milliseconds, and each exchange calls it
def _cut(sizes: Sequence[tuple[int, int]], of: int, first: int, servers: int) -> Sequence[Pieces]:
    if servers > 1:
        shares = divide(sizes, servers)
        each = [cut([(_count(sizes, piece), sizes[piece.place][1]) for piece in share], of) for share in shares]
        return [
            [
                _within(share[place], where)
                for share, fragments in zip(shares, each, strict=True)
                for place, where in fragments[number]
            ]
            for number in range(of)
        ]
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


def divide(sizes: Sequence[tuple[int, int]], servers: int) -> list[list[Piece]]:
    """Divide tensors of ``sizes``, as in `cut`, into shares of about equal bytes, cut at multiples of `UNIT` elements.

    An empty tensor joins the share of the tensor before it.
    """
    total, begin = sum(count * width for count, width in sizes), 0
    bounds = [total * server // servers for server in range(servers)] + [total]
    shares: list[list[Piece]] = [[] for _ in range(servers)]
    for place, (count, width) in enumerate(sizes):
        cuts = [_cut_at((bound - begin) // width, count) for bound in bounds]
        cuts[-1] = count  # if several bounds coincide at its beginning, the last one ends it
        for share, start, stop in zip(shares, cuts, cuts[1:], strict=False):
            if start < stop:
                share.append(Piece(place, None if stop - start == count else (start, stop)))
        if not count:
            next((share for share in reversed(shares) if share), shares[0]).append(Piece(place))
        begin += count * width
    return shares


def _cut_at(at: int, count: int) -> int:
    return min(count, max(0, at)) if not 0 < at < count else min(count, round(at / UNIT) * UNIT)


def _count(sizes: Sequence[tuple[int, int]], piece: Piece) -> int:
    return sizes[piece.place][0] if piece.range is None else piece.range[1] - piece.range[0]


def _within(piece: Piece, where: tuple[int, int] | None) -> Piece:
    if where is None:
        return piece
    begin = piece.range[0] if piece.range is not None else 0
    return Piece(piece.place, (begin + where[0], begin + where[1]))


def state_of(fragments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a server side's state from its states per fragment: with several, a list under `FRAGMENTS`."""
    return dict(fragments[0]) if len(fragments) == 1 else {FRAGMENTS: [dict(each) for each in fragments]}


def states_in(state: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    states: Sequence[Mapping[str, Any]] = state.get(FRAGMENTS, [state])
    return states


def sizes_of(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(tensor.numel(), tensor.element_size()) for tensor in tensors]


def read(tensors: Sequence[Tensor], pieces: Pieces) -> list[Tensor]:
    """Return one tensor for each piece, which shares the tensor's memory if that is taken whole or contiguous.

    Example:
        >>> import torch
        >>> [each.tolist() for each in read([torch.arange(6), torch.ones(2)], [Piece(0, (4, 6)), Piece(1)])]
        [[4, 5], [1.0, 1.0]]
    """
    return [_part(tensors[place], where) for place, where in pieces]


def write(tensors: Sequence[Tensor], pieces: Pieces, values: Sequence[Tensor]) -> None:
    """Overwrite a fragment of tensors with one tensor for each piece; copies between devices may be asynchronous."""
    for (place, where), value in zip(pieces, values, strict=True):
        whole = tensors[place]
        if where is None or whole.is_contiguous():
            _part(whole, where).copy_(value, non_blocking=True)
        else:  # in another memory format, where a range is not contiguous
            flat = whole.flatten()
            flat[slice(*where)].copy_(value)
            whole.copy_(flat.view_as(whole))


def _part(tensor: Tensor, where: tuple[int, int] | None) -> Tensor:
    return tensor if where is None else tensor.reshape(-1)[slice(*where)]
