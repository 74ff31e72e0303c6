"""The device mesh of a compute group: its ranks that hold the model together, and those that get the same samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from lightning_omni.checks import check_kind, check_whole, keep_plain
from lightning_omni.errors import ConfigurationError
from lightning_omni.topology import Topology

DATA, TENSOR = "data_parallel", "tensor_parallel"
"""The names of a mesh's dimensions in ``self.device_mesh[...]``, as in Lightning's ModelParallelStrategy."""


@dataclass(frozen=True)
class FSDP:
    """The settings of fully sharded data parallelism inside each compute group (torch's ``fully_shard``).

    Every rank of a group holds its part of every parameter's rows; those of the first replica exchange theirs. No
    rank trains with the whole model: see :doc:`/how-to/large-models`.

    Args:
        shards: number of ranks that hold one replica of the model together, 2 or more. A group has one or more
            replicas, whose gradients are averaged. None is the size of the smallest group.
        distributed_checkpoint: whether a checkpoint is a folder to which each rank of rank 0's replica writes its shard
            (torch.distributed.checkpoint, as ModelParallelStrategy saves it), instead of one file that rank 0 writes.
            Both kinds can always be loaded. Only OmniStrategy uses it.

    Raises:
        ConfigurationError: an argument is wrong; the message names it.

    Example:
        >>> FSDP(shards=4)
        FSDP(shards=4, distributed_checkpoint=False)
    """

    shards: int | None = None
    distributed_checkpoint: bool = False

    def __post_init__(self) -> None:
        keep_plain(self)
        if self.shards is not None:
            ranks = "the number of ranks that hold one replica of the model, 2 or more, or None"
            check_whole("FSDP(shards", self.shards, ranks, low=2)
        check_kind("FSDP(distributed_checkpoint", self.distributed_checkpoint, bool, "True or False")

    def __str__(self) -> str:
        values = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        return f"FSDP({', '.join(f'{name}={value!r}' for name, value, default in values if value != default)})"


@dataclass(frozen=True)
class ModelParallel:
    """The settings of Lightning's ModelParallelStrategy for each compute group: FSDP2 and tensor parallelism inside it.

    Args:
        data_parallel_size: ranks of a replica that get samples of their own; ``"auto"`` is the group's number of nodes.
        tensor_parallel_size: ranks that compute one batch together; ``"auto"`` is the group's ranks on each node.
        distributed_checkpoint: as in `FSDP`.

    Raises:
        ConfigurationError: an argument is wrong; the message names it.

    Example:
        >>> ModelParallel(tensor_parallel_size=2, data_parallel_size=2).sizes([4])
        (2, 2)
        >>> ModelParallel().sizes([4]), ModelParallel().sizes([4, 4])
        ((1, 4), (2, 4))
    """

    data_parallel_size: int | Literal["auto"] = "auto"
    tensor_parallel_size: int | Literal["auto"] = "auto"
    distributed_checkpoint: bool = False

    def __post_init__(self) -> None:
        keep_plain(self)
        for name, size in self._sizes.items():
            if size != "auto":
                check_whole(name, size, 'a number of ranks, 1 or more, or "auto"', 1)
        name = "ModelParallelStrategy(save_distributed_checkpoint"
        check_kind(name, self.distributed_checkpoint, bool, "True or False")

    @property
    def _sizes(self) -> dict[str, int | str]:
        return {name: getattr(self, name) for name in ("data_parallel_size", "tensor_parallel_size")}

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size!r}" for name, size in self._sizes.items())
        return f"ModelParallelStrategy({sizes})"

    @property
    def product(self) -> int | None:
        if self.data_parallel_size == "auto" or self.tensor_parallel_size == "auto":
            return None
        return self.data_parallel_size * self.tensor_parallel_size

    def sizes(self, ranks: Sequence[int]) -> tuple[int, int]:
        """Return both sizes as numbers, for a group's ranks on each of its nodes.

        Raises:
            ConfigurationError: the number of ranks is no multiple of the sizes' product; or differs from it, if a size
                is ``"auto"``.
        """
        data = len(ranks) if self.data_parallel_size == "auto" else self.data_parallel_size
        tensor = max(ranks) if self.tensor_parallel_size == "auto" else self.tensor_parallel_size
        if sum(ranks) % (data * tensor) or (self.product is None and sum(ranks) != data * tensor):
            raise ConfigurationError(
                f"model_parallel={self}: a mesh of {data} x {tensor} ranks does not fit a group of {sum(ranks)}; pass"
                " sizes whose product is the number of ranks in a group, or divides it, or another groups="
            )
        return data, tensor


Sharding = FSDP | ModelParallel | None
"""The way in which the members of a group hold the model: None if each has all of it."""


def shown(sharding: Sharding) -> str:
    return 'model_parallel="fsdp"' if sharding == FSDP() else f"model_parallel={sharding}"


def evenly(ranks: int, groups: int, sharding: Sharding) -> Topology:
    """Return groups of equal size, as far as possible, in units of neighbours that hold a model together.

    Raises:
        ConfigurationError: that number of groups or ranks is impossible.

    Example:
        >>> evenly(6, 2, FSDP(shards=2))
        Topology(groups=((0, 1, 2, 3), (4, 5)))
    """
    together = (sharding.shards if isinstance(sharding, FSDP) else None) or 1
    if isinstance(sharding, ModelParallel) and (product := sharding.product) is not None:
        together = product if ranks % product == 0 and groups * product <= ranks else 1  # or `sizes_in` raises an error
    return Topology.even(ranks, groups, together)


def sizes_in(
    topology: Topology, sharding: FSDP | ModelParallel, ranks_per_node: Sequence[int], joins: bool = False
) -> tuple[int, int]:
    """Return data-parallel and tensor-parallel size of a replica of the model.

    ``joins`` tells whether this is one group of a run that others join.

    Raises:
        ConfigurationError: members of these groups cannot hold a model together, in the same shares.
    """
    sizes = sorted({len(topology.members(group)) for group in topology.alive})
    shards = sharding.shards if isinstance(sharding, FSDP) else None
    each = shards or sizes[0]
    if isinstance(sharding, FSDP) and any(size % each or each < min(size, 2) for size in sizes):
        raise ConfigurationError(
            f"{shown(sharding)} and groups of {' or '.join(map(str, sizes))} ranks: a group holds the model once"
            " or several times, in as many shards as any other group, so that its size is a multiple of their number,"
            " 2 or more; pass FSDP(shards=...) that divides the size of every group, or another groups="
        )
    if sizes == [1] and not topology.is_synchronous:
        raise ConfigurationError(
            f"{shown(sharding)} and {len(topology.alive)} groups of one rank each: there is no other member to share"
            " the model with; pass a smaller groups=, or leave model_parallel= out"
        )
    if sizes == [1] and joins:
        raise ConfigurationError(
            f"{shown(sharding)}, elastic=True and a group of one rank: there is no other member to share the model"
            " with; start the group with as many ranks as the run has servers, or with a multiple, or leave"
            " model_parallel= out"
        )
    if not isinstance(sharding, ModelParallel):
        return each, 1
    node_of = [node for node, ranks in enumerate(ranks_per_node) for _ in range(ranks)]
    on_nodes = [Counter(node_of[rank] for rank in topology.members(group)) for group in topology.alive]
    found = {sharding.sizes(list(ranks.values())) for ranks in on_nodes}
    if len(found) > 1:
        raise ConfigurationError(
            f"{shown(sharding)}: some groups are on more nodes than others, and would have other meshes; pass both"
            " sizes as numbers, or another groups="
        )
    return found.pop()


def rows_of(topology: Topology, length: int) -> Topology:
    """Return each group's rows of ``length`` consecutive ranks, a divisor of every group's size."""
    each = (topology.members(group) for group in topology.alive)
    return Topology(tuple(members[i : i + length] for members in each for i in range(0, len(members), length)))


@lru_cache(maxsize=64)
def columns_of(topology: Topology, length: int) -> Topology:
    """Return each group's columns: the ranks with the same position in their rows of that length."""
    each = (topology.members(group) for group in topology.alive)
    return Topology(tuple(members[i::length] for members in each for i in range(length)))


def mesh_of(members: Sequence[int], groups: Sequence[Any], tensor: int, device: str) -> DeviceMesh:
    """Return the mesh of ranks that hold a model together. The default process group must be that of all ranks.

    ``groups`` are the process groups of all ``members`` and, for two dimensions, of this rank's column and row of
    ``tensor`` ranks.
    """
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device, mesh_dim_names=(DATA,))
    mesh = torch.tensor(members).view(-1, tensor)
    return DeviceMesh.from_group(list(groups[1:]), device, mesh=mesh, mesh_dim_names=(DATA, TENSOR))
