"""The device mesh of a compute group: its ranks that hold the model together, and those that get the same samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from lightning_omni.checks import check_whole, keep_plain
from lightning_omni.errors import ConfigurationError
from lightning_omni.topology import Topology

DATA, TENSOR = "data_parallel", "tensor_parallel"
"""The names of a mesh's dimensions in ``self.device_mesh[...]``, as in Lightning's ModelParallelStrategy."""


@dataclass(frozen=True)
class ModelParallel:
    """The settings of Lightning's ModelParallelStrategy for each compute group: FSDP2 and tensor parallelism inside it.

    Args:
        data_parallel_size: ranks of the group that get samples of their own; ``"auto"`` is the number of nodes that the
            group is on.
        tensor_parallel_size: ranks that compute one batch together; ``"auto"`` is the number of the group's ranks on
            each node.

    Raises:
        ConfigurationError: a size is neither a positive number nor ``"auto"``.

    Example:
        >>> ModelParallel(tensor_parallel_size=2, data_parallel_size=2).sizes([4])
        (2, 2)
        >>> ModelParallel().sizes([4]), ModelParallel().sizes([4, 4])
        ((1, 4), (2, 4))
    """

    data_parallel_size: int | Literal["auto"] = "auto"
    tensor_parallel_size: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        keep_plain(self)
        for name, size in vars(self).items():
            if size != "auto":
                check_whole(name, size, 'a number of ranks, 1 or more, or "auto"', 1)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size!r}" for name, size in vars(self).items())
        return f"ModelParallelStrategy({sizes})"

    @property
    def product(self) -> int | None:
        """Return the number of ranks that hold a model together; None if it depends on the nodes that a group is on."""
        if self.data_parallel_size == "auto" or self.tensor_parallel_size == "auto":
            return None
        return self.data_parallel_size * self.tensor_parallel_size

    def sizes(self, ranks: Sequence[int]) -> tuple[int, int]:
        """Return both sizes as numbers.

        Args:
            ranks: number of ranks of one group on each of its nodes.

        Raises:
            ConfigurationError: the number of ranks is no multiple of the sizes' product; or differs from it, if a size
                is ``"auto"``.
        """
        data = len(ranks) if self.data_parallel_size == "auto" else self.data_parallel_size
        tensor = max(ranks) if self.tensor_parallel_size == "auto" else self.tensor_parallel_size
        if sum(ranks) % (data * tensor) or (self.product is None and sum(ranks) != data * tensor):
            raise ConfigurationError(
                f"inside={self}: a mesh of {data} x {tensor} ranks does not fit a group of {sum(ranks)}; pass sizes"
                " whose product is the number of ranks in a group, or divides it, or another groups="
            )
        return data, tensor


Inside = Literal["ddp", "fsdp"] | ModelParallel
"""The way in which the members of a group hold the model."""


def shown(inside: Inside) -> str:
    """Return the argument as the user has written it, for messages."""
    return f'inside="{inside}"' if isinstance(inside, str) else f"inside={inside}"


def evenly(ranks: int, groups: int, inside: Inside, shards: int | None) -> Topology:
    """Return groups whose sizes differ as little as possible, in units of neighbours that hold a model together.

    Args:
        ranks: number of ranks.
        groups: number of compute groups.
        inside: how their members hold the model.
        shards: ranks that hold one model together, as the user has passed it.

    Raises:
        ConfigurationError: that number of groups is impossible.

    Example:
        >>> evenly(6, 2, "fsdp", shards=2)
        Topology(groups=((0, 1, 2, 3), (4, 5)))
    """
    together = shards or 1
    if isinstance(inside, ModelParallel) and (product := inside.product) is not None:
        together = product if ranks % product == 0 and groups * product <= ranks else 1  # or `sizes_in` raises an error
    return Topology.even(ranks, groups, together)


def sizes_in(
    topology: Topology,
    inside: Inside,
    ranks_per_node: Sequence[int],
    joins: bool = False,
    shards: int | None = None,
) -> tuple[int, int]:
    """Return data-parallel and tensor-parallel size of a replica of the model; groups hold one or more replicas.

    Args:
        topology: the compute groups.
        inside: how their members hold the model; not ``"ddp"``.
        ranks_per_node: number of ranks on each node, in rank order.
        joins: whether this is one group of a run that others join.
        shards: ranks that hold one model together, as the user has passed it; None for the size of the smallest group.

    Raises:
        ConfigurationError: members of these groups cannot hold a model together, in the same shares.

    Example:
        >>> sizes_in(Topology.even(8, 2), "fsdp", [8])
        (4, 1)
        >>> sizes_in(Topology.even(8, 2), "fsdp", [8], shards=2)
        (2, 1)
        >>> sizes_in(Topology.even(8, 2), ModelParallel(2, 2), [8])
        (2, 2)
    """
    sizes = sorted({len(topology.members(group)) for group in topology.alive})
    each = shards or sizes[0]
    if inside == "fsdp" and any(size % each or each < min(size, 2) for size in sizes):
        given = f" and shards={shards}" if shards is not None else ""
        raise ConfigurationError(
            f"{shown(inside)}{given} and groups of {' or '.join(map(str, sizes))} ranks: a group holds the model once"
            " or several times, in as many shards as any other group, so that its size is a multiple of their number,"
            " 2 or more; pass shards= that divides the size of every group, or another groups="
        )
    if sizes == [1] and not topology.is_synchronous:
        raise ConfigurationError(
            f"{shown(inside)} and {len(topology.alive)} groups of one rank each: there is no other member to share the"
            ' model with; pass a smaller groups=, or inside="ddp"'
        )
    if sizes == [1] and joins:
        raise ConfigurationError(
            f"{shown(inside)}, join=True and a group of one rank: there is no other member to share the model with;"
            ' start the group with as many ranks as the run has servers, or with a multiple, or pass inside="ddp"'
        )
    if not isinstance(inside, ModelParallel):
        return each, 1
    node_of = [node for node, ranks in enumerate(ranks_per_node) for _ in range(ranks)]
    on_nodes = [Counter(node_of[rank] for rank in topology.members(group)) for group in topology.alive]
    found = {inside.sizes(list(ranks.values())) for ranks in on_nodes}
    if len(found) > 1:
        raise ConfigurationError(
            f"inside={inside}: some groups are on more nodes than others, and would have other meshes; pass both sizes"
            " as numbers, or another groups="
        )
    return found.pop()


def rows_of(topology: Topology, length: int) -> Topology:
    """Return a topology whose groups are the rows of these groups: each row is ``length`` consecutive ranks.

    ``length`` divides the size of every group.
    """
    each = (topology.members(group) for group in topology.alive)
    return Topology(tuple(members[i : i + length] for members in each for i in range(0, len(members), length)))


@lru_cache(maxsize=64)
def columns_of(topology: Topology, length: int) -> Topology:
    """Return each group's columns: the ranks with the same position in their rows of that length."""
    each = (topology.members(group) for group in topology.alive)
    return Topology(tuple(members[i::length] for members in each for i in range(length)))


def mesh_of(members: Sequence[int], groups: Sequence[Any], tensor: int, device: str) -> DeviceMesh:
    """Return the mesh of ranks that hold a model together. The default process group must be that of all ranks.

    Args:
        members: these ranks.
        groups: process groups: of all of them; for two dimensions, also of this rank's column and row.
        tensor: number of ranks in a row.
        device: kind of device.
    """
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device, mesh_dim_names=(DATA,))
    mesh = torch.tensor(members).view(-1, tensor)
    return DeviceMesh.from_group(list(groups[1:]), device, mesh=mesh, mesh_dim_names=(DATA, TENSOR))
