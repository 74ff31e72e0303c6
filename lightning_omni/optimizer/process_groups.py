"""torch.distributed's process groups: one for each compute group, one for all that live, and which is the default."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_omni.optimizer.live_world import BACKEND, LiveWorld, Meet, register
from lightning_omni.topology import Topology


class ProcessGroups:
    """All process groups that a rank is in. The default process group is switched here and nowhere else.

    Args:
        rank: this rank.
        size: number of ranks, dead or alive.
        timeout: seconds after which a collective that does not complete is an error.
        device: where tensors for the collectives of torch's own groups live.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta, device: torch.device) -> None:
        self._rank, self._size, self._timeout, self._device = rank, size, timeout, device
        self._found: Any = None
        self._live: LiveWorld | None = None
        self._compute: dict[tuple[tuple[int, ...], ...], Any] = {}

    @property
    def original(self) -> Any:
        """The default process group as it was found: of all ranks, also of those that were lost since."""
        if self._found is None:
            self._found = dist.group.WORLD
        return self._found

    @property
    def live(self) -> LiveWorld:
        """The group of all ranks that live; there is one once the server was joined."""
        assert self._live is not None
        return self._live

    def compute(self, topology: Topology) -> Any:
        """The process group of this rank's group in a topology; made when first needed, then kept.

        Every rank makes one for each topology, even if it has one of the same ranks: torch names a group by its ranks
        and by the number of groups that the rank has, and mates must arrive at the same name.
        """
        members = topology.members(topology.group_of(self._rank))
        original = self.original
        if len(members) == self._size:
            return original
        if topology.groups not in self._compute:
            before = dist.group.WORLD
            self.use(original)
            self._compute[topology.groups] = dist.new_group(
                members, timeout=self._timeout, use_local_synchronization=True
            )
            self.use(before)
        return self._compute[topology.groups]

    def use(self, group: Any) -> None:
        """Makes a process group the default of torch.distributed."""
        _ = self.original  # found before it is replaced
        dist.GroupMember.WORLD = group

    def join(self, meet: Meet) -> None:
        """From now on those who live meet this way. All ranks call it."""
        register()
        self.use(self.original)
        if self._live is None:
            made = dist.new_group(range(self._size), timeout=self._timeout, backend=BACKEND)
            assert isinstance(made, LiveWorld)
            self._live = made
        self._live.connect(meet)
        dist.barrier()

    def give_up(self) -> None:
        """Keeps no process group alive beyond the run: torch must be able to end them before the interpreter does."""
        kept = dist.group.WORLD
        for group in self._compute.values():
            if group is not kept:
                dist.destroy_process_group(group)
        self._compute, self._found = {}, None

    # --- Among all ranks -----------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Everyone who lives waits for everyone who lives."""
        before = dist.group.WORLD
        self.use(self.live)
        dist.barrier()
        self.use(before)

    def largest(self, numbers: Sequence[int], group: Any) -> list[int]:
        """The largest of each number over a group."""
        device = torch.device("cpu") if group is self._live else self._device
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        largest: list[int] = tensor.tolist()
        return largest

    def tell(self, text: str, group: Any) -> str:
        """Text of rank 0 on every rank of a group of torch's own."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self._device)  # may be empty
        size = torch.tensor(data.numel(), device=self._device)
        dist.broadcast(size, src=0, group=group)
        if self._rank != 0:
            data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.broadcast(data, src=0, group=group)
        return bytes(data.cpu().numpy()).decode()
