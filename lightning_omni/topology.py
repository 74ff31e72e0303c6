"""The partition of ranks into compute groups, and their leaders. No I/O, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from numbers import Integral
from typing import Any

from lightning_omni.checks import counted
from lightning_omni.errors import ConfigurationError

RECORDER = 0
"""The rank that acts for a run of ranks started together: it forms groups, sends initial weights, logs and saves."""


@dataclass(frozen=True)
class GroupId:
    """A group's name and incarnation, which together are unique in a run.

    Group numbers are array indices, and are reused when groups are formed again.

    Attributes:
        name: by default the group's number; living groups have different names.
        incarnation: grows whenever groups are formed, and whenever one joins. 0 before any.

    Example:
        >>> str(GroupId("1", incarnation=3))
        "'1' (incarnation 3)"
    """

    name: str
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.name!r} (incarnation {self.incarnation})"


@dataclass(frozen=True)
class Topology:
    """A partition of ranks into compute groups.

    Ranks of one group train synchronously; the groups are asynchronous to each other. The first rank of a group is its
    *leader*, the only one whose steps exchange tensors with the parameter server unless the model is sharded.

    Attributes:
        groups: the ranks of each group, in ascending order. An evicted group keeps its index as an empty tuple, so that
            group numbers never change within a topology.

    Raises:
        ConfigurationError: a rank occurs twice, or no group has a rank.

    Example:
        >>> Topology.even(world_size=5, groups=2)
        Topology(groups=((0, 1, 2), (3, 4)))
        >>> Topology.even(5, 2).leader(1)
        3
    """

    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = [rank for members in self.groups for rank in members]
        if not ranks:
            raise ConfigurationError("a topology needs at least one rank in at least one group")
        if len(set(ranks)) != len(ranks):
            raise ConfigurationError(f"every rank belongs to exactly one group, got {self.groups}")

    @classmethod
    def even(cls, world_size: int, groups: int, together: int = 1) -> Topology:
        """Split ranks ``0 .. world_size-1`` into contiguous groups whose sizes differ by at most ``together``.

        Args:
            world_size: number of ranks N.
            groups: number of compute groups g, ``1 <= g <= N / together``.
            together: number of neighbouring ranks that stay in one group, such as those that hold one model.

        Raises:
            ConfigurationError: ``groups`` is no whole number in range, or the ranks are no multiple of ``together``.

        Example:
            >>> Topology.even(6, groups=2, together=2)
            Topology(groups=((0, 1, 2, 3), (4, 5)))
        """
        return cls.of(range(world_size), groups, together)

    @classmethod
    def of(cls, ranks: Iterable[int], groups: int, together: int = 1) -> Topology:
        """Split any set of ranks, such as those still alive, like :meth:`even`."""
        return cls(_joined(_cut(_neighbours(sorted(ranks), together), groups)))

    @classmethod
    def by_speed(cls, speeds: Mapping[int, float] | Sequence[float], groups: int, together: int = 1) -> Topology:
        """Form groups of similar speed, the fastest first, so that slow ranks delay few fast ones.

        Sizes differ by at most ``together``. Equal speeds give :meth:`of`. Neighbours that stay together have the
        speed of the slowest.

        Args:
            speeds: each rank's speed, in any unit.
            groups: as in `even`.
            together: as in `even`.

        Raises:
            ConfigurationError: a speed is not positive and finite, or as for `even`.

        Example:
            >>> Topology.by_speed([10.0, 40.0, 11.0, 39.0], groups=2)
            Topology(groups=((1, 3), (0, 2)))
            >>> Topology.by_speed([10.0, 40.0, 20.0, 30.0], groups=2, together=2)
            Topology(groups=((2, 3), (0, 1)))
        """
        known = dict(speeds) if isinstance(speeds, Mapping) else dict(enumerate(speeds))
        for rank, speed in known.items():
            if not 0 < speed < inf:
                raise ConfigurationError(
                    f"speeds: that of rank {rank} is {speed}; pass a positive number for each rank"
                )
        neighbours = _neighbours(sorted(known), together)
        fastest_first = sorted(neighbours, key=lambda ranks: (-min(known[rank] for rank in ranks), ranks))
        return cls(tuple(tuple(sorted(members)) for members in _joined(_cut(fastest_first, groups))))

    @classmethod
    def by_node(cls, ranks_per_node: Sequence[int]) -> Topology:
        """Form one group for each node with ranks: fast links inside a group, the slow network across groups.

        Args:
            ranks_per_node: number of ranks on each node, in rank order.

        Example:
            >>> Topology.by_node([2, 2])
            Topology(groups=((0, 1), (2, 3)))
        """
        ends = pairwise(accumulate(ranks_per_node, initial=0))
        return cls(tuple(tuple(range(start, stop)) for start, stop in ends if stop > start))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return all ranks, ascending."""
        return tuple(sorted(self._homes))

    @cached_property
    def _homes(self) -> dict[int, int]:
        return {rank: group for group, members in enumerate(self.groups) for rank in members}

    @cached_property
    def alive(self) -> tuple[int, ...]:
        """Return the numbers of the groups that have members."""
        return tuple(group for group, members in enumerate(self.groups) if members)

    @cached_property
    def is_synchronous(self) -> bool:
        """Return whether only one group of this topology is alive."""
        return len(self.alive) == 1

    def group_of(self, rank: int) -> int:
        """Return the number of the group that holds ``rank``; raise `KeyError` if none does."""
        if rank not in self._homes:
            raise KeyError(f"rank {rank} is in no group of {self.groups}")
        return self._homes[rank]

    def find(self, rank: int) -> int:
        """Return the number of the group that holds ``rank``, or -1."""
        return self._homes.get(rank, -1)

    def members(self, group: int) -> tuple[int, ...]:
        """Return the ranks of a group, ascending; empty if it was evicted."""
        return self.groups[group]

    def leader(self, group: int) -> int:
        """Return the leader of a group; raise `IndexError` if it was evicted."""
        return self.groups[group][0]

    def without(self, group: int) -> Topology:
        """Return the topology with one group evicted and no other renumbered."""
        return Topology(tuple(() if index == group else members for index, members in enumerate(self.groups)))


def _neighbours(ranks: Sequence[int], together: int) -> list[tuple[int, ...]]:
    if len(ranks) % together:
        raise ConfigurationError(
            f"{counted(len(ranks), 'rank')}, of which {together} hold a model together: pass FSDP(shards=...) that"
            " divides the number of ranks, or another number of devices"
        )
    return [tuple(ranks[start : start + together]) for start in range(0, len(ranks), together)]


def _cut(pieces: Sequence[tuple[int, ...]], groups: int) -> list[Sequence[tuple[int, ...]]]:
    check_groups(groups, sum(map(len, pieces)), together=len(pieces[0]) if pieces else 1)
    small, larger = divmod(len(pieces), groups)
    starts = [group * small + min(group, larger) for group in range(groups + 1)]
    return [pieces[start:stop] for start, stop in pairwise(starts)]


def _joined(parts: Iterable[Sequence[tuple[int, ...]]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(rank for piece in part for rank in piece) for part in parts)


def check_groups(groups: int, world_size: int, together: int = 1) -> None:
    given: Any = groups  # NumPy's integers are valid, but not for type checkers
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise ConfigurationError(f"groups={groups!r}: pass a whole number of compute groups, or None for one per node")
    if groups < 1:
        raise ConfigurationError(f"groups={groups}: at least one compute group is needed; groups=1 is plain DDP")
    if groups > world_size:
        raise ConfigurationError(
            f"groups={groups}, but there {'is' if world_size == 1 else 'are'} only {counted(world_size, 'rank')}, and a"
            f" group needs at least one; pass groups{'=' if world_size == 1 else '<='}{world_size} or more devices"
        )
    if groups * together > world_size:
        raise ConfigurationError(
            f"groups={groups}, but {together} ranks hold a model together, and there are only"
            f" {counted(world_size, 'rank')}; pass groups<={world_size // together}, smaller sizes in model_parallel=,"
            " or more devices"
        )
