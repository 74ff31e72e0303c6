"""A model that the members of a compute group hold together: torch's FSDP2, each member with rows of every parameter.

Rule 1: what is exchanged of a parameter is what this rank has of it, flat (`here`), and no rank has more of it for
longer than its block computes.
Rule 2: a checkpoint is whole, and is put together parameter by parameter on the CPU of one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Module, ModuleDict, ModuleList, Parameter, Sequential
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.topology import RECORDER, Topology

MESH_DIM = "data_parallel"
"""What a compute group's mesh is called in ``self.device_mesh[...]``, as in Lightning's ModelParallelStrategy."""


def check_shardable(topology: Topology) -> None:
    """Raises `ConfigurationError` if members of these groups cannot hold a model together, each the same share.

    Args:
        topology: the compute groups.
    """
    sizes = sorted({len(topology.members(group)) for group in topology.alive})
    if len(sizes) > 1:
        raise ConfigurationError(
            f'inside="fsdp" and groups of {sizes[0]} or {sizes[1]} ranks: member j of every group exchanges share j of'
            " the model, so all groups need equally many members; pass a groups= that divides the number of ranks"
        )
    if sizes == [1] and not topology.is_synchronous:
        raise ConfigurationError(
            f'inside="fsdp" and {len(topology.alive)} groups of one rank each: there is no other member to share the'
            ' model with; pass a smaller groups=, or inside="ddp"'
        )


def mesh_of(group: Any, device: str) -> DeviceMesh:
    """The mesh of a compute group, on every member; called while the default process group is that of all ranks."""
    return DeviceMesh.from_group(group, device, mesh_dim_names=(MESH_DIM,))


# --- The module ------------------------------------------------------------------------------------------------------


def is_sharded(module: Module) -> bool:
    """Whether any parameter of a module is sharded, by `shard` or by the user's ``configure_model``."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def shard(module: Module, mesh: DeviceMesh) -> None:
    """Applies ``fully_shard`` to the blocks of a module's children and to these, unless any of it is sharded already.

    Blocks are what lists and sequences of modules hold: the layers of a transformer, say. The module itself is left as
    it is, with parameters of its own, for Lightning calls its ``training_step`` and not its ``forward``.

    Args:
        module: the LightningModule, or any that holds the model.
        mesh: of this rank's compute group.

    Raises:
        UnsupportedError: a parameter is of two children.
    """
    if is_sharded(module):
        return
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    owners = Counter(parameter for child in children for parameter in child.parameters())
    for name, parameter in module.named_parameters():
        if owners[parameter] > 1:
            raise UnsupportedError(
                f'inside="fsdp": the parameter {name} is shared by two submodules, which are gathered each by itself:'
                " put both into one submodule with a forward of its own, or apply fully_shard in configure_model, on"
                f' self.device_mesh["{MESH_DIM}"]'
            )
    for child in children:
        for block in _blocks(child):
            fully_shard(block, mesh=mesh)
        if not isinstance(child, (ModuleList, ModuleDict)):  # which have no forward
            fully_shard(child, mesh=mesh)


def _blocks(child: Module) -> Iterator[Module]:
    """What lists and sequences in a child hold, but for what shares a parameter with anything else in it."""
    uses = Counter(parameter for _, parameter in child.named_parameters(remove_duplicate=False))
    for block in _listed(child):
        own = Counter(parameter for _, parameter in block.named_parameters(remove_duplicate=False))
        if own and all(uses[parameter] == count for parameter, count in own.items()):
            yield block


def _listed(module: Module) -> Iterator[Module]:
    for child in module.children():
        if isinstance(module, (ModuleList, ModuleDict, Sequential)) and not isinstance(child, (ModuleList, ModuleDict)):
            yield child
        else:
            yield from _listed(child)


def check_sharded(parameters: Mapping[str, Parameter], members: int) -> None:
    """Raises `UnsupportedError` unless each member of a group has rows of every parameter that is exchanged.

    Args:
        parameters: by name.
        members: of the group.
    """
    for name, parameter in parameters.items():
        if not isinstance(parameter, DTensor):
            raise UnsupportedError(
                f'inside="fsdp": the parameter {name} is not sharded, and its gradient would be each rank\'s own: put'
                " it into a submodule with a forward of its own, apply fully_shard to the module that holds it, or"
                " freeze it and leave it out of the optimizer"
            )
        if parameter.placements != (Shard(0),) or parameter.device_mesh.size() != members:
            raise UnsupportedError(
                f'inside="fsdp": the parameter {name} lies as {parameter.placements} on {parameter.device_mesh}; groups'
                f' exchange rows: shard it with fully_shard, along dimension 0, on self.device_mesh["{MESH_DIM}"]'
            )


def reshard(module: Module | None) -> None:
    """What a forward pass without a backward pass has left gathered is given up: its weights may be of the past."""
    for each in module.modules() if module is not None else ():
        if isinstance(each, FSDPModule):
            each.reshard()


def share_initial(module: Module, topology: Topology, rank: int) -> None:
    """All groups begin with the parameters of the recorder's, share by share, and with the buffers of rank 0.

    Args:
        module: sharded.
        topology: the compute groups.
        rank: this one. All ranks call it, while the default process group is that of all.
    """
    mine, first = topology.members(topology.group_of(rank)), topology.members(topology.group_of(RECORDER))
    place = mine.index(rank)
    for parameter in module.parameters():
        part = here(parameter)
        if not isinstance(parameter, DTensor):
            dist.broadcast(part, src=RECORDER)
        elif not part.numel():
            continue
        elif mine == first:
            for group in topology.alive:
                if topology.members(group) != first:
                    dist.send(part, topology.members(group)[place])
        else:
            dist.recv(part, first[place])
    for buffer in module.buffers():
        dist.broadcast(buffer.detach(), src=RECORDER)


# --- Tensors ---------------------------------------------------------------------------------------------------------


def here(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, flat, in the same memory; of one that is not sharded, all of it, as it is."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach().view(-1)
    return tensor.detach()


def like(part: Tensor, parameter: Tensor) -> Tensor:
    """A tensor that is sharded as a parameter is, of which this is `here`; what is none stays as it is."""
    if not isinstance(parameter, DTensor) or isinstance(part, DTensor) or part.dim() != 1:
        return part
    local = parameter.to_local().detach()
    return _as_sharded(part.to(local.device).view(local.shape), parameter)


def rows(whole: Tensor, parameter: Tensor) -> Tensor:
    """A tensor as large as a parameter, sharded as that is; anything else stays as it is."""
    if not isinstance(parameter, DTensor) or isinstance(whole, DTensor) or whole.shape != parameter.shape:
        return whole
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    each = -(-len(whole) // parameter.device_mesh.size())
    local = whole[each * coordinate[0] : each * (coordinate[0] + 1)]
    return _as_sharded(local.to(parameter.device, copy=True), parameter)


def _as_sharded(local: Tensor, parameter: DTensor) -> DTensor:
    return DTensor.from_local(
        local.contiguous(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


# --- States ----------------------------------------------------------------------------------------------------------


def parts_of(tree: Any) -> Any:
    """A tree with `here` in the place of each tensor that is sharded."""
    return tree_map(lambda leaf: here(leaf) if isinstance(leaf, DTensor) else leaf, tree)


def state_like(state: Mapping[Any, Mapping[str, Any]], parameters: Sequence[Tensor]) -> dict[Any, dict[str, Any]]:
    """An optimizer's state of what is `here`, by places, as the optimizer itself has it of its parameters."""
    return _converted(state, parameters, like)


def state_rows(state: Mapping[Any, Mapping[str, Any]], parameters: Sequence[Tensor]) -> dict[Any, dict[str, Any]]:
    """An optimizer's state of whole parameters, by places, as `state_like`."""
    return _converted(state, parameters, rows)


def _converted(
    state: Mapping[Any, Mapping[str, Any]], parameters: Sequence[Tensor], make: Callable[[Tensor, Tensor], Tensor]
) -> dict[Any, Any]:
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return dict(state)
    return {
        place: {
            key: make(value, parameters[place]) if isinstance(value, Tensor) else value for key, value in values.items()
        }
        for place, values in state.items()
    }


def held_by(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def whole(tree: Any, keeps: bool) -> Any:
    """A tree with whole tensors on the CPU in the place of sharded ones. Every member of the group calls it.

    Args:
        tree: the same but for its numbers on all of them.
        keeps: whether this rank wants it; elsewhere what is sharded is None.
    """

    def gathered(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        full = leaf.full_tensor().detach()
        return full.cpu() if keeps else None

    return tree_map(gathered, tree)


def gather(tree: Any, group: Any, device: torch.device) -> list[Any]:
    """Trees of all members of a group, on the first; nothing elsewhere. They differ in their tensors' sizes and values.

    Tensors, which have one dimension or none, are gathered one by one, and are on the CPU then.
    """
    leaves, structure = tree_flatten(in_order(tree))
    gathered = [_gather_one(leaf, group, device) if isinstance(leaf, Tensor) else None for leaf in leaves]
    if dist.get_rank(group) != 0:
        return []
    return [
        tree_unflatten(
            [leaf if each is None else each[member] for leaf, each in zip(leaves, gathered, strict=True)], structure
        )
        for member in range(dist.get_world_size(group))
    ]


def _gather_one(part: Tensor, group: Any, device: torch.device) -> list[Tensor]:
    size = torch.tensor([part.numel()], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    if not any(map(int, sizes)):
        return [part.cpu() for _ in sizes]
    padded = torch.zeros(max(map(int, sizes)), dtype=part.dtype, device=device)
    padded[: part.numel()] = part.flatten().to(device)
    is_first = dist.get_rank(group) == 0
    places = [torch.empty_like(padded) for _ in sizes] if is_first else None
    dist.gather(padded, places, group=group, group_dst=0)
    shape = () if part.dim() == 0 else (-1,)
    return [each[: int(count)].cpu().reshape(shape) for each, count in zip(places or (), sizes, strict=is_first)]


def in_order(tree: Any) -> Any:
    """A tree with what goes by numbers (groups, places) in their order, the same on all members."""
    if isinstance(tree, Mapping):
        keys = sorted(tree) if all(isinstance(key, int) for key in tree) else list(tree)
        return {key: in_order(tree[key]) for key in keys}
    if isinstance(tree, (list, tuple)):
        return type(tree)(in_order(each) for each in tree)
    return tree


def named_rows(state: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """A ``state_dict`` of whole tensors, each sharded as the module's own of that name is."""
    own = dict(tensors)
    return {
        name: rows(value, own[name]) if name in own and isinstance(value, Tensor) else value
        for name, value in state.items()
    }
