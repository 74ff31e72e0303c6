"""torch.distributed's process groups: one for each compute group, one of all live ranks, and the current default.

Compute groups are kept for the life of the process, because a later fit of the same script would have to create them
again. All live ranks decide together whether a topology's groups exist or must be created, from the groups that each of
them holds; the groups that a rank has created or destroyed before do not matter.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from lightning_omni.errors import RankLost
from lightning_omni.runtime._private import new_named_group, unbound, wait_for_gloo_at_exit
from lightning_omni.runtime.live_world import BACKEND, LiveWorld, Synchronize, register
from lightning_omni.topology import Topology

MOST_KEPT = 16
"""The most topologies whose process groups are kept; each has sockets and threads."""

Groups = tuple[tuple[int, ...], ...]
Gather = Callable[[list[int]], list[list[int]]]
"""A function that takes whole numbers of this rank, and returns those of every live rank, in rank order."""


@dataclass
class _Made:
    """A process group, and the number by which its members identify it."""

    number: int
    group: ref[Any]


class _Cache:
    """The process groups created beside one default process group. Destroying the default destroys all of them.

    The cache keeps no process group alive, nor its store, whose port another default process group may need.
    """

    def __init__(self, default: Any) -> None:
        self.default = ref(default)
        self.live: ref[LiveWorld] | None = None
        self.compute: dict[Groups, _Made] = {}

    def destroy(self, groups: Groups) -> None:
        made = self.compute.pop(groups, None)
        group = made.group() if made is not None else None
        if group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)


_cache: _Cache | None = None


_survivors: tuple[ref[Any], tuple[int, ...]] | None = None
"""The default process group of ranks that have outlived others in this process, and the ranks that were lost."""


def outlive(group: Any, lost: Sequence[int]) -> None:
    """Record that a process group, which becomes the default one, consists of the surviving ranks of a run."""
    global _survivors
    _survivors = ref(group), tuple(lost)


def check_none_lost() -> None:
    """Check that the default process group still has all ranks with which the script has begun.

    Raises:
        RankLost: an earlier fit, or loop, has lost some, and Lightning and loaders would still count them.
    """
    if _survivors is None or _survivors[0]() is not dist.group.WORLD:
        return
    lost = _survivors[1]
    were = f"rank {lost[0]} was" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} were"
    raise RankLost(
        f"{were} lost in the fit or loop before, and this one would begin without: start the script again, from a"
        " checkpoint"
    )


def _cache_beside(default: Any) -> _Cache:
    """Return the cache of a default process group, and drop that of an earlier one."""
    global _cache
    if _cache is None or _cache.default() is not default:
        _cache = _Cache(default)
    return _cache


class ProcessGroups:
    """All process groups of a rank. No other class switches the default process group.

    Args:
        rank: this rank.
        size: number of ranks, dead or alive.
        timeout: time after which an incomplete collective is an error.
        device: device of tensors for the collectives of torch's own groups.
        is_group: whether the default process group is that of one compute group, which has joined on its own.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta, device: torch.device, is_group: bool = False) -> None:
        self._rank, self._size, self._timeout, self._device = rank, size, timeout, device
        self._is_group = is_group
        self._stay: set[Groups] = set()
        self._found: Any = None
        wait_for_gloo_at_exit()

    @property
    def original(self) -> Any:
        """Return the default process group as it was found: of all ranks, including those lost since."""
        if self._found is None:
            self._found = dist.group.WORLD
        return self._found

    @property
    def _cache(self) -> _Cache:
        return _cache_beside(self.original)

    @property
    def had_several(self) -> bool:
        """Return whether ranks of this process have trained in several groups before."""
        return self._cache.live is not None

    @property
    def live(self) -> LiveWorld:
        """Return the group of all live ranks, which exists once the server was joined."""
        live = self._cache.live() if self._cache.live is not None else None
        assert live is not None
        return live

    def make(self, topology: Topology, gather: Gather | None = None, stays: bool = False) -> None:
        """Create the process groups of a topology, unless all ranks have them. All live ranks call it.

        Args:
            topology: the topology; every rank of it calls this.
            gather: exchanges numbers between the ranks; None uses the default process group as it was found.
            stays: whether the groups are kept to the end of the run, whatever others are created.
        """
        members, kept = self._members(topology), self._cache
        if stays:
            self._stay.add(topology.groups)
        if len(members) == self._size:
            return
        held = kept.compute.get(topology.groups)
        offer = 1 + secrets.randbelow(1 << 62)
        of_all = (gather or self._gather)([held.number if held else 0, offer])
        if held is not None and all(theirs == held.number for theirs, _ in of_all):
            kept.compute[topology.groups] = kept.compute.pop(topology.groups)  # it was used last
            return
        kept.destroy(topology.groups)
        before, number = dist.group.WORLD, of_all[0][1]
        self.use(self.original)
        group = new_named_group(f"omni-{number:x}-{members[0]}", members, self._timeout)
        kept.compute[topology.groups] = _Made(number, ref(group))
        self.use(before)
        spare = [groups for groups in kept.compute if groups not in self._stay and groups != topology.groups]
        for groups in spare[: max(0, len(kept.compute) - MOST_KEPT)]:
            kept.destroy(groups)

    def compute(self, topology: Topology) -> Any:
        """Return the process group of this rank's group in a topology, which `make` has created."""
        members = self._members(topology)
        return self.original if len(members) == self._size else self._cache.compute[topology.groups].group()

    def _members(self, topology: Topology) -> Sequence[int]:
        """Return the ranks of this rank's group, as torch numbers them."""
        if self._is_group and self._rank not in topology.ranks:  # the numbers are those of the run
            return range(self._size)
        return topology.members(topology.group_of(self._rank))

    def use(self, group: Any) -> None:
        _ = self.original  # found before it is replaced
        dist.GroupMember.WORLD = group

    def join(self, synchronize: Synchronize, rank: int) -> None:
        """Create the group of all live ranks, and connect it to the function that carries out its collectives.

        All ranks call it, and wait for each other.

        Args:
            synchronize: the function, see `LiveWorld.connect`.
            rank: this rank's number in the run.
        """
        self.make_live_world()
        self.live.connect(synchronize, rank)
        dist.barrier()

    def make_live_world(self) -> None:
        """Create the group of all live ranks, unless it exists; the default process group is the original one."""
        register()
        self.use(self.original)
        if self._cache.live is None:
            with unbound(self.original):
                made = dist.new_group(range(self._size), timeout=self._timeout, backend=BACKEND)
            assert isinstance(made, LiveWorld)
            self._cache.live = ref(made)

    def abandon(self, topology: Topology) -> None:
        """Destroy this rank's process group in a topology, because this rank has failed.

        With gloo, members that wait for it then fail at once. A group of all ranks that torch knows is not destroyed:
        its members fail when this process ends. The original process group becomes the default one.
        """
        self.use(self.original)
        self._cache.destroy(topology.groups)

    def leave(self) -> None:
        """End the run; the next run finds its own default process group."""
        self._found = None
        self._stay.clear()

    # --- Among all ranks -----------------------------------------------------------------------------------------

    def barrier(self) -> None:
        before = dist.group.WORLD
        self.use(self.live)
        dist.barrier()
        self.use(before)

    def largest(self, numbers: Sequence[int], group: Any) -> list[int]:
        """Return the largest of each number over a group."""
        device = torch.device("cpu") if isinstance(group, LiveWorld) else self._device
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        largest: list[int] = tensor.tolist()
        return largest

    def broadcast_text(self, text: str, group: Any, by: int = 0) -> str:
        """Return the text of one rank, as torch numbers them, on every rank of a group of torch's own."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self._device)  # may be empty
        size = torch.tensor(data.numel(), device=self._device)
        dist.broadcast(size, src=by, group=group)
        if self._rank != by:
            data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.broadcast(data, src=by, group=group)
        return bytes(data.cpu().numpy()).decode()

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        places = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(places, mine, group=self.original)
        return [place.tolist() for place in places]
