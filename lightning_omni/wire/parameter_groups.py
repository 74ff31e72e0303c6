"""The parameters and parameter groups of an optimizer, and their changes during a run.

Rule 1: a layout grows only at its end, so a group's earlier layout is the beginning of the later ones.
Rule 2: each group makes a change at its own time. The first one changes the server's optimizer; for the others the
change exists already. Until a group makes it, its pushes are accepted without the parameters that it does not have.
Rule 3: a change that cannot be followed is refused before anything has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from lightning_omni.errors import MalformedMessage, Refused
from lightning_omni.wire.layout import TensorSpec, spec_of

MOST_STRUCTURES = 4096
"""The most changes between two formings of groups."""
MOST_GROUPS = 1 << 16
"""The most parameter groups of an optimizer."""


class Structure(msgspec.Struct, frozen=True):
    """The structure of one optimizer at one time of the run.

    Attributes:
        size: number of parameters in its layout.
        groups: for each parameter group, the indices of its parameters in that layout. Empty if the optimizer steps at
            the workers, because the server then does not need parameter groups.

    Example:
        >>> before, after = Structure(2, ((0, 1),)), Structure(3, ((0, 1), (2,)))
        >>> after.extends(before), after.counterparts(before)
        (True, [0, None])
    """

    size: int
    groups: tuple[tuple[int, ...], ...]

    def extends(self, other: Structure) -> bool:
        """Return whether this is the other structure with parameters or parameter groups added behind existing ones."""
        mine = self.groups[: len(other.groups)]
        begins = [group[: len(old)] for group, old in zip(mine, other.groups, strict=False)]
        return self.size >= other.size and begins == list(other.groups)

    def counterparts(self, older: Structure) -> list[int | None]:
        """Return for each parameter group the older group that held the first of its older parameters, or None."""
        home = {place: number for number, group in enumerate(older.groups) for place in group}
        return [next((home[place] for place in group if place in home), None) for group in self.groups]


class Structures:
    """The structures of one optimizer so far, and the current one of each compute group.

    Args:
        first: structure when groups were formed.
    """

    def __init__(self, first: Structure) -> None:
        self._all = [first]
        self._at: dict[int, int] = {}

    @property
    def newest(self) -> Structure:
        """Return the structure of the server's optimizer."""
        return self._all[-1]

    def of(self, group: int) -> Structure:
        """Return a group's current structure."""
        return self._all[self._at.get(group, 0)]

    def form(self) -> None:
        """Start new groups, which begin with the newest structure."""
        self._all, self._at = self._all[-1:], {}

    def find(self, group: int, structure: Structure) -> int | None:
        """Return the number of a structure that a group changes to; None if it is new.

        Raises:
            Refused: other groups have changed differently, or the structure has changed too often.
        """
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
            raise Refused("structure", f"parameter groups have changed {MOST_STRUCTURES} times; change them less often")
        return None

    def state(self) -> dict[str, Any]:
        return {"all": [(each.size, each.groups) for each in self._all], "at": dict(self._at)}

    def load(self, state: Mapping[str, Any]) -> None:
        self._all = [Structure(size, tuple(map(tuple, groups))) for size, groups in state["all"]]
        self._at = dict(state["at"])

    def move(self, group: int, structure: Structure, number: int | None) -> None:
        """Record a group's change to a structure; ``number`` is from `find`."""
        if number is None:
            self._all.append(structure)
        self._at[group] = len(self._all) - 1 if number is None else number


def read_structure(tree: Any, known: int) -> tuple[Structure, list[dict[str, Any]], dict[str, Tensor], dict[int, Any]]:
    """Read a group's description of an optimizer's parameter groups.

    Args:
        tree: ``{"groups": [{..., "params": [indices]}], "weights": {name: tensor}, "state": {index: {...}}}``.
        known: number of parameters that the group had before; the weights are those of later ones.

    Returns:
        The structure; settings and indices of each parameter group; weights of the parameters that are new to the
        group; and their optimizer state.

    Raises:
        MalformedMessage: the description is invalid.
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
    """Return the specifications of named tensors."""
    return tuple(spec_of(name, value) for name, value in weights.items())


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
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
