"""A model that the members of a compute group hold together: torch's FSDP2 and tensor parallelism, by DTensors.

Rule 1: a rank exchanges its own part of a parameter, flat (`here`), and holds more of it only while a block computes.
Rule 2: parameters that all ranks of a tensor-parallel row have alike (those of a norm, for example) are divided for the
exchange: each rank exchanges a part, and passes the answer on to the others (`complete`), so that they stay alike.
Rule 3: a checkpoint in one file has whole tensors, which are gathered one by one and kept on the CPU of one rank.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module, ModuleDict, ModuleList, Parameter, Sequential
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_omni.errors import UnsupportedError
from lightning_omni.methods.model.replica import load_optimizer_state
from lightning_omni.methods.model.server_optimizer import held_by
from lightning_omni.runtime._private import all_reduce_hook_of, root_mesh
from lightning_omni.runtime.model.meshes import DATA, TENSOR, Sharding, shown
from lightning_omni.runtime.model.tensor_sync import contiguous, gathered, take_from_rank_zero
from lightning_omni.topology import RECORDER, Topology

# --- The module ------------------------------------------------------------------------------------------------------


def is_sharded(module: Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def shard(module: Module, mesh: DeviceMesh) -> None:
    """Apply ``fully_shard`` to a module's children that have a forward, and to blocks, unless a parameter is sharded.

    Blocks are the outermost entries of every ModuleList, ModuleDict and Sequential in a child, without those that have
    no parameters or share one with another module of the child. The module itself is left as it is: Lightning calls its
    ``training_step``, not its ``forward``.

    Raises:
        UnsupportedError: two children share a parameter.
    """
    if is_sharded(module):
        return
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    owners = Counter(parameter for child in children for parameter in child.parameters())
    for name, parameter in module.named_parameters():
        if owners[parameter] > 1:
            raise UnsupportedError(
                f'model_parallel="fsdp": the parameter {name} is shared by two submodules, which are gathered each by'
                " itself: put both into one submodule with a forward of its own, or apply fully_shard in"
                f' configure_model, on self.device_mesh["{DATA}"]'
            )
    for child in children:
        for block in _blocks(child):
            fully_shard(block, mesh=mesh)
        if not isinstance(child, (ModuleList, ModuleDict)):  # which have no forward
            fully_shard(child, mesh=mesh)


def _blocks(child: Module) -> Iterator[Module]:
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


def check_sharded(
    parameters: Mapping[str, Parameter], mesh: DeviceMesh, sharding: Sharding, is_replicated: bool = False
) -> None:
    """Raise `UnsupportedError` unless every parameter lies on the mesh as a DTensor that groups can exchange.

    With ``is_replicated``, a group has several replicas.
    """
    for name, parameter in parameters.items():
        if not isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"{shown(sharding)}: the parameter {name} is not sharded, and its gradient would be each rank's own:"
                " put it into a submodule with a forward of its own, apply fully_shard to the module that holds it, on"
                f' self.device_mesh["{DATA}"], or freeze it and leave it out of the optimizer; in a loop without'
                " Lightning, make the optimizer after world.wrap(net)"
            )
        # Dimensions of size 1 do not count: torch may have replaced the mesh by an equal one of an earlier run.
        if not torch.equal(root_mesh(parameter.device_mesh).mesh.squeeze(), mesh.mesh.squeeze()):
            raise UnsupportedError(
                f"{shown(sharding)}: the parameter {name} lies on {parameter.device_mesh}, and its group's mesh is"
                f' {mesh}: shard it on self.device_mesh, or on self.device_mesh["{DATA}"]'
            )
        if any(placement.is_partial() for placement in parameter.placements):
            raise UnsupportedError(
                f"{shown(sharding)}: the parameter {name} lies as {parameter.placements}, and is the sum of what its"
                " ranks have; parallelize it with Shard or Replicate"
            )
        if (mesh.size(0) > 1 or is_replicated) and _is_replicated(parameter, DATA):
            raise UnsupportedError(
                f"{shown(sharding)}: the parameter {name} lies as {parameter.placements}, alike on the data-parallel"
                " ranks, or those of several replicas, and nothing would average its gradient over them: apply"
                f' fully_shard to the module that holds it, on self.device_mesh["{DATA}"]'
            )
        if not parameter.to_local().is_contiguous():
            raise UnsupportedError(
                f"{shown(sharding)}: what this rank has of the parameter {name} is not contiguous in memory; make it so"
                " before it is sharded, with .contiguous()"
            )


def division_of(parameters: Iterable[Tensor], mesh: DeviceMesh) -> str:
    """Describe each member's part of each parameter, equally where groups divide them alike."""
    lies = [str(each.placements) for each in parameters if isinstance(each, DTensor)]
    return f"{' x '.join(map(str, mesh.shape))} ranks, {hashlib.sha256(repr(lies).encode()).hexdigest()[:8]}"


def check_clipping(optimizers: Iterable[Optimizer], sharding: Sharding) -> None:
    for optimizer in optimizers:
        meshes = {each.device_mesh for each in held_by(optimizer) if isinstance(each, DTensor) and each.requires_grad}
        if len(meshes) > 1:
            raise UnsupportedError(
                f"{shown(sharding)} and gradient_clip_val: the optimizer holds parameters on {len(meshes)} meshes, and"
                " torch takes the norm of those of one; parallelize all modules that have parameters on"
                f' self.device_mesh["{TENSOR}"] (with SequenceParallel, say, which copies them), or leave'
                " gradient_clip_val= out"
            )


def reshard(module: Module | None) -> None:
    """Release parameters that a forward without a backward pass has left gathered: they may be outdated.

    If the user has frozen or unfrozen gathered ones, so are the sharded ones afterwards.
    """
    if module is None:
        return
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad is not trained[name]:
            parameter.requires_grad_(trained[name])


def average_over_replicas(module: Module, mean: Callable[[Tensor], None] | None) -> None:
    """Install the hook by which FSDP2 averages gradients over replicas, after it has averaged them over the ranks.

    ``mean`` replaces this rank's part of a gradient by the mean over replicas; None removes the hook.

    Raises:
        UnsupportedError: this release of torch cannot do it, or a user's own hook would be replaced.
    """
    for name, each in module.named_modules():
        if not isinstance(each, FSDPModule):
            continue
        ours = vars(each).get(_AVERAGES)
        is_theirs = hasattr(each, "set_all_reduce_hook") and all_reduce_hook_of(each) not in (None, ours)
        if mean is None and (ours is None or is_theirs):
            continue  # a user's own hook stays
        if is_theirs:
            raise UnsupportedError(
                f"set_all_reduce_hook() of {name or type(each).__name__}, and several replicas of the model in a group:"
                " FSDP2 has one such hook, by which they average gradients; leave it out, or pass as many groups= as"
                " there are replicas"
            )
        if not hasattr(each, "set_all_reduce_hook"):
            raise UnsupportedError(
                f"FSDP(shards=...) of several replicas in a group, and torch {torch.__version__}: its FSDP2 has no"
                " set_all_reduce_hook(), by which they average gradients; use a later release, or as many groups as"
                " there are replicas"
            )
        each.set_all_reduce_hook(mean)  # type: ignore[arg-type]  # None removes the hook
        vars(each)[_AVERAGES] = mean


_AVERAGES = "_omni_averages"
"""The attribute of a module with the function, of this or an earlier run, that averages its gradients over replicas."""


def share_initial(module: Module, holders: Topology, rank: int) -> None:
    """Copy the parameters of rank 0's replica to all others, share by share, and its buffers.

    All ranks call it, while their process group is the default.
    """
    mine, first = holders.members(holders.group_of(rank)), holders.members(holders.group_of(RECORDER))
    index = mine.index(rank)
    for name, parameter in module.named_parameters():
        with contiguous(_memory_of(parameter), name) as part:
            if not isinstance(parameter, DTensor):
                dist.broadcast(part, src=RECORDER)
            elif not part.numel():
                continue
            elif mine == first:
                for replica in holders.alive:
                    if holders.members(replica) != first:
                        dist.send(part, holders.members(replica)[index])
            else:
                dist.recv(part, first[index])
    take_from_rank_zero(module.named_buffers())


# --- Tensors ---------------------------------------------------------------------------------------------------------


def is_part(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def _memory_of(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def local_of(tensor: Tensor) -> Tensor:
    """Return all that this rank has of a sharded tensor, flat, in the same memory; another tensor as it is."""
    return _memory_of(tensor).reshape(-1) if isinstance(tensor, DTensor) else tensor.detach()


def here(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor that this rank alone exchanges; another tensor as it is."""
    local = local_of(tensor)
    return _part(local, *_copy_of(tensor)) if isinstance(tensor, DTensor) else local


def _is_replicated(tensor: DTensor, dim: str) -> bool:
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or (DATA,)
    return dim not in names or tensor.placements[names.index(dim)].is_replicate()


def _copy_of(tensor: DTensor) -> tuple[int, int]:
    """Return the index of this rank's copy in its tensor-parallel row, and the number of copies."""
    mesh = root_mesh(tensor.device_mesh)
    names, coordinate = mesh.mesh_dim_names or (), mesh.get_coordinate()
    if TENSOR not in names or not _is_replicated(tensor, TENSOR):
        return 0, 1
    assert coordinate is not None
    return coordinate[names.index(TENSOR)], mesh.size(names.index(TENSOR))


def _part(flat: Tensor, number: int, of: int) -> Tensor:
    each = -(-flat.numel() // of)
    return flat[each * number : each * (number + 1)]


def complete(tensors: Iterable[Tensor]) -> None:
    """Pass the parts that ranks have written `here` on to their tensor-parallel row. All its ranks call it."""
    copied: dict[torch.dtype, list[DTensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor) and _copy_of(tensor)[1] > 1:
            copied.setdefault(tensor.dtype, []).append(tensor)
    for alike in copied.values():
        _exchange_in_row(alike)


def _exchange_in_row(tensors: Sequence[DTensor]) -> None:
    number, of = _copy_of(tensors[0])
    flats = [local_of(tensor) for tensor in tensors]
    sizes = [-(-flat.numel() // of) for flat in flats]
    mine = flats[0].new_zeros(sum(sizes))
    for room, flat in zip(mine.split(sizes), flats, strict=True):
        part = _part(flat, number, of)
        room[: part.numel()] = part
    theirs = gathered(mine, root_mesh(tensors[0].device_mesh).get_group(TENSOR))
    for tensor, *parts in zip(tensors, *(each.split(sizes) for each in theirs), strict=True):
        local = _memory_of(tensor)
        local.copy_(torch.cat(parts)[: local.numel()].view(local.shape))


def fill(tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, part in parts.items():
            local = _memory_of(tensors[name])
            local.copy_(part.view(local.shape))


def like(part: Tensor, parameter: Tensor) -> Tensor:
    """Return the tensor of which ``part`` is the part `here`, sharded as a parameter; any other value as it is.

    All ranks of a tensor-parallel row call it.
    """
    if not isinstance(parameter, DTensor) or isinstance(part, DTensor) or part.dim() != 1:
        return part
    local = parameter.to_local().detach()
    number, of = _copy_of(parameter)
    if of == 1:
        return _as_sharded(part.to(local.device).view(local.shape), parameter)
    flat = torch.empty(local.numel(), dtype=part.dtype, device=local.device)
    _part(flat, number, of).copy_(part)
    made = _as_sharded(flat.view(local.shape), parameter)
    complete([made])
    return made


def rows(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor of a parameter's shape, sharded as the parameter; any other tensor as it is."""
    if not isinstance(parameter, DTensor) or isinstance(whole, DTensor) or whole.shape != parameter.shape:
        return whole
    mesh, local = parameter.device_mesh, whole
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    placed = list(zip(parameter.placements, coordinate, mesh.shape, strict=True))
    # FSDP2 divides the part that tensor parallelism has left of the same dimension, so it is applied last.
    for placement, index, of in sorted(placed, key=lambda each: getattr(each[0], "split_factor", 1) > 1):
        if not placement.is_replicate():
            dim = placement.dim  # type: ignore[attr-defined]
            each = -(-local.shape[dim] // of)
            start, stop = (min(local.shape[dim], each * i) for i in (index, index + 1))
            local = local.narrow(dim, start, stop - start)
    return _as_sharded(local.to(parameter.device, copy=True), parameter)


def gradient_of(parameter: Parameter) -> Tensor | None:
    """Give a parameter's gradient the parameter's placements, which sums partial ones, and return it.

    All ranks of a tensor-parallel row call it.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return parameter.grad


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
    return tree_map(lambda leaf: here(leaf) if isinstance(leaf, DTensor) else leaf, tree)


def state_like(state: Mapping[Any, Mapping[str, Any]], optimizer: Optimizer) -> dict[Any, dict[str, Any]]:
    """Return a state of `here` parts, by parameter index, with tensors sharded as the optimizer's own."""
    return _converted(state, dict(enumerate(held_by(optimizer))), like)


def load_state(optimizer: Optimizer, state: Mapping[Any, Mapping[str, Any]]) -> None:
    load_optimizer_state(optimizer, state_like(state, optimizer))


def state_rows(saved: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return a ``state_dict`` of whole parameters with its state sharded as the optimizer's own."""
    # ModelParallelStrategy numbers frozen parameters, too.
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    held = dict(zip(numbers, held_by(optimizer), strict=False))  # torch raises an error if one is longer
    known = {number: values for number, values in saved["state"].items() if number in held}
    return {**saved, "state": {**saved["state"], **_converted(known, held, rows)}}


def _converted(
    state: Mapping[Any, Mapping[str, Any]],
    parameters: Mapping[Any, Parameter],
    make: Callable[[Tensor, Tensor], Tensor],
) -> dict[Any, Any]:
    if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return dict(state)
    return {
        index: {
            key: make(value, parameters[index]) if isinstance(value, Tensor) else value for key, value in values.items()
        }
        for index, values in state.items()
    }


def whole(tree: Any, keeps: bool) -> Any:
    """Return a tree in which whole tensors on the CPU replace sharded ones. All ranks of their mesh call it.

    Ranks that do not keep the tensors (``keeps``) get None in their places.
    """

    def gathered(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        full = leaf.full_tensor().detach()
        return full.cpu() if keeps else None

    return tree_map(gathered, tree)


def in_order(tree: Any) -> Any:
    """Return a tree whose mappings by number are in ascending order."""
    if isinstance(tree, Mapping):
        keys = sorted(tree) if all(isinstance(key, int) for key in tree) else list(tree)
        return {key: in_order(tree[key]) for key in keys}
    if isinstance(tree, (list, tuple)):
        return type(tree)(in_order(each) for each in tree)
    return tree


def tensors_of(module: Module) -> dict[str, Any]:
    """Return the live entries of a module's ``state_dict``, by name, without the module's own override of it.

    A user's override may return copies or other names.
    """
    return dict(Module.state_dict(module, keep_vars=True))


def named_rows(state: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    own = dict(tensors)
    return {
        name: rows(value, own[name]) if name in own and isinstance(value, Tensor) else value
        for name, value in state.items()
    }
