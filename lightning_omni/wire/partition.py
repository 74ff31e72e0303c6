"""Division of one optimizer's parameters, and of their states, over several servers.

Rule 1: all ranks derive the same division from layout, number of servers, method and optimizer; it is never sent.
Rule 2: if the method, and an optimizer that steps at the servers, treat each element independently, servers hold ranges
of about equal bytes, and a tensor may be cut. Otherwise, or if this is not known, they hold whole parameters.
Rule 3: a cut is at a multiple of 64 elements of its tensor, so that stepping a share is bitwise equal to stepping the
whole.
Rule 4: each server cuts its own share into fragments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_omni.checks import counted
from lightning_omni.errors import MalformedMessage, UnsupportedError
from lightning_omni.methods import Method
from lightning_omni.methods.contract import Tensors
from lightning_omni.methods.model.fragments import FRAGMENTS, divide
from lightning_omni.methods.model.modules import class_path
from lightning_omni.wire.formats.base import RESIDUAL, State
from lightning_omni.wire.layout import DTYPES, Layout, TensorSpec

ELEMENTWISE = frozenset(
    class_path(kind)
    for kind in (
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
        torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop,
    )
)  # fmt: skip
"""Class paths of optimizers that treat each element independently. A subclass is another class, and may not."""
_SENDERS = "servers"
"""Key of a sender's states for each server, without residuals."""
_SERVERS = "servers"
"""Key, beside the states of fragments, of the number of shares from which the fragments are cut."""


class Partition(msgspec.Struct, frozen=True, dict=True):
    """A division of one optimizer's parameters over servers.

    Attributes:
        shares: each server's layout, whose entries are tensors or ranges of their elements.
        places: for each entry of each share, the index of its parameter in ``layout``.

    Example:
        >>> layout = Layout.of({"w": torch.ones(3, 64), "b": torch.ones(4)})
        >>> split = Partition.of(layout, 2, elementwise=True)
        >>> [[(spec.name, spec.range) for spec in share.specs] for share in split.shares]
        [[('w', (0, 128))], [('w', (128, 192)), ('b', None)]]
        >>> [[part.numel() for part in parts] for parts in split.parts([torch.ones(3, 64), torch.ones(4)])]
        [[128], [64, 4]]
    """

    layout: Layout
    shares: tuple[Layout, ...]
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, layout: Layout, servers: int, elementwise: bool) -> Partition:
        """Divide a layout over servers; tensors are cut only if ``elementwise``."""
        cut = _ranges(layout, servers) if elementwise else _wholes(layout, servers)
        if layout.servers != servers:
            layout = msgspec.structs.replace(layout, servers=servers)
        return cls(
            layout,
            tuple(Layout(tuple(spec for _, spec in share), layout.version) for share in cut),
            tuple(tuple(place for place, _ in share) for share in cut),
        )

    @classmethod
    def whole(cls, layout: Layout, servers: int = 1) -> Partition:
        none = Layout((), layout.version)
        others = servers - 1
        return cls(layout, (layout, *[none] * others), (tuple(range(len(layout.specs))), *[()] * others))

    def fragment(self, number: int | None, of: int) -> Partition:
        """Return the division of one of ``of`` fragments; this division if the number is None."""
        return self if number is None else self._fragment(number, of)

    @cached_property
    def _fragment(self) -> Callable[[int, int], Partition]:
        divided = Partition.whole if len(self.shares) == 1 else self.within
        return cache(lambda number, of: divided(self.layout.fragment(number, of)))

    def within(self, layout: Layout) -> Partition:
        """Return the same division of some of these entries, or of ranges of them."""
        by_name: dict[str, list[int]] = {}
        for place, spec in enumerate(layout.specs):
            by_name.setdefault(spec.name, []).append(place)
        shares = []
        for share in self.shares:
            found = [
                (place, part)
                for spec in share.specs
                for place in by_name.get(spec.name, ())
                if (part := _overlap(layout.specs[place], spec)) is not None
            ]
            shares.append(found)
        return Partition(
            layout,
            tuple(Layout(tuple(part for _, part in share), layout.version) for share in shares),
            tuple(tuple(place for place, _ in share) for share in shares),
        )

    @property
    def fractions(self) -> list[float]:
        """Return each server's fraction of the bytes; equal fractions for an empty layout."""
        sizes = [sum(spec.nbytes for spec in share.specs) for share in self.shares]
        return [size / sum(sizes) if any(sizes) else 1 / len(sizes) for size in sizes]

    # --- Tensors -----------------------------------------------------------------------------------------------------

    def parts(self, tensors: Tensors) -> list[list[Tensor | None]]:
        """Split tensors, one for each parameter, into each server's part; views where the memory layout allows."""
        if len(self.shares) == 1:
            return [list(tensors)]
        return [
            [
                None if (tensor := tensors[place]) is None else _piece(tensor, self.layout.specs[place], spec)
                for spec, place in zip(share.specs, places, strict=True)
            ]
            for share, places in zip(self.shares, self.places, strict=True)
        ]

    def merged(self, parts: Sequence[Tensors]) -> list[Tensor | None]:
        """Merge each server's part into one tensor for each parameter; None where a part is None."""
        return [
            _joined(spec, [parts[server][here] for server, here in found])
            for spec, found in zip(self.layout.specs, self._found, strict=True)
        ]

    def memories(self, into: Tensor) -> list[Tensor] | None:
        """Return each share's range in flat memory of the whole; None if the shares are no such ranges."""
        if not self._is_contiguous:
            return None
        ends = zip(self._begins, self.shares, strict=True)
        return [into[begin : begin + share.nbytes] for begin, share in ends]

    def write(self, into: Tensor, parts: Sequence[Tensor]) -> None:
        """Copy flat memory of each share into flat memory of the whole; parts from `memories` stay.

        Raises:
            MalformedMessage: a part has another size than its share.
        """
        for share, part in zip(self.shares, parts, strict=True):
            if part.numel() != share.nbytes:
                raise MalformedMessage(f"{part.numel()} bytes of weights came, {share.nbytes} were expected")
        if (memories := self.memories(into)) is not None:
            for memory, part in zip(memories, parts, strict=True):
                if part.data_ptr() != memory.data_ptr():
                    memory.copy_(part)
            return
        views = self.layout.views(into)
        for share, places, part in zip(self.shares, self.places, parts, strict=True):
            for spec, place, tensor in zip(share.specs, places, share.views(part), strict=True):
                _piece(views[place], self.layout.specs[place], spec).copy_(tensor)

    @cached_property
    def _offsets(self) -> list[list[int]]:
        """Return where each entry of each share starts in flat memory of the whole, in bytes."""
        return [
            [
                self.layout.offsets[place] + _begin(spec, self.layout.specs[place]) * DTYPES[spec.dtype].itemsize
                for spec, place in zip(share.specs, places, strict=True)
            ]
            for share, places in zip(self.shares, self.places, strict=True)
        ]

    @cached_property
    def _begins(self) -> list[int]:
        return [offsets[0] if offsets else 0 for offsets in self._offsets]

    @cached_property
    def _is_contiguous(self) -> bool:
        return all(
            offsets == [begin + here for here in share.offsets]
            for offsets, begin, share in zip(self._offsets, self._begins, self.shares, strict=True)
        )

    # --- States of senders -------------------------------------------------------------------------------------------

    def sender_parts(self, state: State) -> list[State]:
        if len(self.shares) == 1:
            return [state]
        own = state.get(_SENDERS, ())
        rest = own if len(own) == len(self.shares) else [{}] * len(self.shares)
        if RESIDUAL not in state:
            return list(rest)
        owed = [*state[RESIDUAL], *[None] * (len(self.layout.specs) - len(state[RESIDUAL]))]
        return [{**each, RESIDUAL: part} for each, part in zip(rest, self.parts(owed), strict=True)]

    def merged_sender(self, states: Sequence[State]) -> State:
        if len(states) == 1:
            return states[0]
        rest = [{key: value for key, value in state.items() if key != RESIDUAL} for state in states]
        merged: dict[str, Any] = {_SENDERS: rest} if any(rest) else {}
        if any(RESIDUAL in state for state in states):
            owed = [
                [*state.get(RESIDUAL, ()), *[None] * (len(share.specs) - len(state.get(RESIDUAL, ())))]
                for state, share in zip(states, self.shares, strict=True)
            ]
            merged[RESIDUAL] = self._merged_residual(owed)
        return merged

    def _merged_residual(self, owed: Sequence[Tensors]) -> list[Tensor | None]:
        """Merge residuals, with zeros for a server without one."""
        known = {
            place: part
            for places, parts in zip(self.places, owed, strict=True)
            for place, part in zip(places, parts, strict=True)
            if part is not None
        }
        filled = [
            [
                torch.zeros(spec.local_shape, dtype=known[place].dtype, device=known[place].device)
                if part is None and place in known
                else part
                for spec, place, part in zip(share.specs, places, parts, strict=True)
            ]
            for share, places, parts in zip(self.shares, self.places, owed, strict=True)
        ]
        return self.merged(filled)

    # --- Trees: states of optimizers and methods ---------------------------------------------------------------------

    def tree_parts(self, tree: Any) -> list[Any]:
        """Split a tree, as from `lightning_omni.methods.ServerSide.state`, into one for each server.

        A list with one entry per parameter (tensor, None or integer) is divided, and so is a dict keyed by their
        indices, as in torch's optimizer states; every server gets all other values.
        """
        return [self._cut(tree, server) for server in range(len(self.shares))]

    def _cut(self, tree: Any, server: int) -> Any:
        specs, places = self.shares[server].specs, self.places[server]
        if _is_by_place(tree):
            return {
                here: {key: _piece_of(value, self.layout.specs[place], spec) for key, value in tree[place].items()}
                for here, (place, spec) in enumerate(zip(places, specs, strict=True))
                if place in tree
            }
        if isinstance(tree, Mapping) and FRAGMENTS in tree:
            fragments = [split._cut(each, server) for split, each in self._each_fragment(tree[FRAGMENTS])]
            return {**self._cut(_beside_fragments(tree), server), FRAGMENTS: fragments}
        if isinstance(tree, Mapping):
            return {key: self._cut(value, server) for key, value in tree.items()}
        if _is_for_each(tree, self.layout.specs):
            return [
                _piece_of(tree[place], self.layout.specs[place], spec)
                for place, spec in zip(places, specs, strict=True)
            ]
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._cut(item, server) for item in tree)
        return tree

    def merged_tree(self, trees: Sequence[Any]) -> Any:
        first = trees[0]
        if any(_is_by_place(tree) and tree for tree in trees):
            return self._merged_places(trees)
        if isinstance(first, Mapping) and FRAGMENTS in first:
            each = list(zip(*(tree[FRAGMENTS] for tree in trees), strict=True))
            merged = [split.merged_tree(theirs) for split, theirs in self._each_fragment(each)]
            rest = self.merged_tree([_beside_fragments(tree) for tree in trees])
            return {**rest, FRAGMENTS: merged, _SERVERS: len(trees)}
        if isinstance(first, Mapping):
            return {key: self.merged_tree([tree[key] for tree in trees]) for key in first}
        if all(_is_for_each(tree, share.specs) for tree, share in zip(trees, self.shares, strict=True)):
            return [
                _joined_of([trees[server][here] for server, here in found], spec)
                for found, spec in zip(self._found, self.layout.specs, strict=True)
            ]
        if isinstance(first, (list, tuple)):
            return type(first)(self.merged_tree(items) for items in zip(*trees, strict=True))
        return first

    def check_fragments(self, tree: Any) -> None:
        """Raise `UnsupportedError` if states of fragments, from `merged_tree`, are of another number of servers."""
        servers = tree.get(_SERVERS, 1) if FRAGMENTS in tree else len(self.shares)
        if servers != len(self.shares):
            raise UnsupportedError(
                f"the checkpoint was saved with {counted(servers, 'server')}, each of which cuts its own share into"
                f" {len(tree[FRAGMENTS])} fragments, and this run has {len(self.shares)}: pass"
                f" Server(count={servers}), or start lightning-omni serve --servers {servers}"
            )

    def _each_fragment(self, states: Sequence[Any]) -> Iterable[tuple[Partition, Any]]:
        return ((self.fragment(number, len(states)), state) for number, state in enumerate(states))

    def _merged_places(self, trees: Sequence[Mapping[int, Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
        merged = {}
        for place, (spec, found) in enumerate(zip(self.layout.specs, self._found, strict=True)):
            states = [trees[server][here] for server, here in found if here in trees[server]]
            if states:
                merged[place] = {key: _joined_of([each[key] for each in states], spec) for key in states[0]}
        return merged

    @cached_property
    def _found(self) -> list[list[tuple[int, int]]]:
        """Return for each parameter the servers and entries that hold it, in order."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.layout.specs]
        for server, places in enumerate(self.places):
            for here, place in enumerate(places):
                found[place].append((server, here))
        return found

    # --- Optimizers --------------------------------------------------------------------------------------------------

    def described(self, description: Mapping[str, Any] | None, server: int) -> dict[str, Any] | None:
        """Return a server's part of the description of an optimizer."""
        if description is None:
            return None
        held = [name for group in description["groups"] for name in group["params"]]  # states are keyed by index in it
        states = description["state"]
        by_name = {name: states[place] for place, name in enumerate(held) if place in states}
        entries = zip(self.shares[server].specs, self.places[server], strict=True)
        specs = {spec.name: (self.layout.specs[place], spec) for spec, place in entries}
        groups = [
            {**group, "params": [name for name in group["params"] if name in specs]} for group in description["groups"]
        ]
        kept = [name for group in groups for name in group["params"]]
        state = {
            place: {key: _piece_of(value, *specs[name]) for key, value in by_name[name].items()}
            for place, name in enumerate(kept)
            if name in by_name
        }
        return {**description, "groups": groups, "state": state}


def over_parameters(tree: Any, specs: Sequence[TensorSpec], make: Callable[[Any, int | None], Any]) -> Any:
    """Apply ``make`` to each value of a tree as in `Partition.tree_parts`, but without states of fragments.

    ``make`` also gets the index of the value's parameter, or None.
    """
    if _is_by_place(tree):
        return {place: {key: make(value, place) for key, value in values.items()} for place, values in tree.items()}
    if isinstance(tree, Mapping):
        return {key: over_parameters(value, specs, make) for key, value in tree.items()}
    if _is_for_each(tree, specs):
        return [make(value, place) for place, value in enumerate(tree)]
    if isinstance(tree, (list, tuple)):
        return type(tree)(over_parameters(item, specs, make) for item in tree)
    return make(tree, None)


def is_elementwise(method: Method, optimizer: Optimizer) -> bool:
    """Return whether tensors may be cut, for a method and the user's optimizer."""
    return method.elementwise and (method.steps_at == "worker" or class_path(type(optimizer)) in ELEMENTWISE)


def check_by_parts(method: Method, optimizer: Optimizer, inside: str) -> None:
    """Raise `UnsupportedError` if the optimizer cannot step parts of parameters at several servers.

    ``inside`` is the user's argument by which a group's members hold parts of the parameters.
    """
    if method.steps_at == "server" and not is_elementwise(method, optimizer):
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not known to treat each number by itself, and with {inside} each"
            " server holds a part of the parameters: use SGD, Adam, AdamW or another of torch's element-wise"
            ' optimizers, a method whose optimizer steps on the ranks (method="local_sgd"), or no model_parallel='
        )


def _beside_fragments(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key not in (FRAGMENTS, _SERVERS)}


def _ranges(layout: Layout, servers: int) -> list[list[tuple[int, TensorSpec]]]:
    return [
        [(place, layout.specs[place].part(where)) for place, where in share] for share in divide(layout.sizes, servers)
    ]


def _wholes(layout: Layout, servers: int) -> list[list[tuple[int, TensorSpec]]]:
    """Assign whole parameters, the largest first, each to the server with the fewest bytes."""
    loads = [0] * servers
    owner = {}
    for place in sorted(range(len(layout.specs)), key=lambda place: -layout.specs[place].nbytes):
        owner[place] = loads.index(min(loads))
        loads[owner[place]] += layout.specs[place].nbytes
    return [
        [(place, spec) for place, spec in enumerate(layout.specs) if owner[place] == server]
        for server in range(servers)
    ]


def _piece(tensor: Tensor, whole: TensorSpec, part: TensorSpec) -> Tensor:
    if part.range == whole.range:
        return tensor
    begin = _begin(part, whole)
    return tensor.reshape(-1)[begin : begin + part.numel]


def _overlap(spec: TensorSpec, held: TensorSpec) -> TensorSpec | None:
    start, stop = spec.bounds
    begin, end = max(start, held.bounds[0]), min(stop, held.bounds[1])
    if (begin, end) == (start, stop):
        return spec
    return spec.part((begin - start, end - start)) if begin < end else None


def _begin(part: TensorSpec, whole: TensorSpec) -> int:
    return (part.range[0] if part.range else 0) - (whole.range[0] if whole.range else 0)


def _joined(spec: TensorSpec, pieces: Sequence[Tensor | None]) -> Tensor | None:
    if len(pieces) == 1:
        return pieces[0]
    there = [piece for piece in pieces if piece is not None]
    if len(there) < len(pieces):
        return None
    return torch.cat([piece.reshape(-1) for piece in there]).view(spec.local_shape)


def _is_like(value: Any, spec: TensorSpec) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == spec.local_shape


def _piece_of(value: Any, whole: TensorSpec, part: TensorSpec) -> Any:
    return _piece(value, whole, part) if _is_like(value, whole) else value


def _joined_of(values: Sequence[Any], spec: TensorSpec) -> Any:
    if len(values) > 1 and all(isinstance(value, Tensor) and value.dim() == 1 for value in values):
        return _joined(spec, values)
    return values[0]


def _is_by_place(tree: Any) -> bool:
    return isinstance(tree, Mapping) and all(
        isinstance(place, int) and isinstance(value, Mapping) for place, value in tree.items()
    )


def _is_for_each(tree: Any, specs: Sequence[TensorSpec]) -> bool:
    """Return whether a list has one entry for each parameter: its tensor, None, or a count; betas are floats."""
    return (
        isinstance(tree, list)
        and len(tree) == len(specs)
        and all(
            value is None or isinstance(value, int) or _is_like(value, spec)
            for value, spec in zip(tree, specs, strict=True)
        )
    )
