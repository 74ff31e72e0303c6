"""What touches names of torch (most of torch.distributed) that it does not promise to keep.

Checked on torch 2.7, 2.13 and 2.15.

One small place, so that a new release of torch can be checked against one small file; a test notices when one of these
names is gone or behaves otherwise.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_omni.errors import UnsupportedError

GLOO_WORKER = "pt_gloo_runloop"
"""What ProcessGroupGloo calls the threads that run its collectives."""

LONGEST_WAIT_AT_EXIT_S = 2.0
"""After which the interpreter ends whatever gloo's threads do."""

QUIET_POLLS = 3
"""So often in a row gloo's threads are seen asleep: one that waits for the interpreter's lock sleeps, too."""


def new_named_group(name: str, ranks: Sequence[int], timeout: timedelta) -> Any:
    """``torch.distributed.new_group`` for its members alone, under a name of one's choice.

    Left alone, torch names such a group by its ranks and by how many groups the rank has at the moment. Ranks with
    unequal histories then wait for each other under different names.

    The communicator is not split off that of the default group, see `unbound`.

    Args:
        name: the same on all members, and never used before with this default process group.
        ranks: the members.
        timeout: seconds after which a collective that does not complete is an error.
    """
    if not hasattr(distributed_c10d, "_process_group_name"):
        raise UnsupportedError(
            f"torch {torch.__version__} names process groups in a way that this release of lightning-omni does not"
            " know; use groups=1, or torch 2.7 to 2.15"
        )
    named = patch.object(distributed_c10d, "_process_group_name", lambda ranks, use_hashed_name: name)
    with unbound(dist.group.WORLD), named:
        return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)


def check_reduced(module: DistributedDataParallel) -> None:
    """Raise torch's error if a backward pass has left gradients that are not averaged, as the next forward pass would.

    All members of its group call it. Once, after its first backward pass, it makes other buckets here, as it would in
    that forward pass: the members agree on them by a collective.

    Args:
        module: that was wrapped.
    """
    reducer = getattr(module, "reducer", None)  # none, if it delays the averages of all parameters
    if reducer is not None and reducer._rebuild_buckets():
        module._has_rebuilt_buckets = True


def ignored_by_ddp(module: Module) -> frozenset[str]:
    """Return the names of parameters and buffers that the user has DistributedDataParallel leave to each rank."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


@contextmanager
def unbound(default: Any) -> Iterator[None]:
    """Make process groups as if the default process group were not bound to a device.

    With Lightning it is bound to the device of every rank but those on the CPU. torch then splits the communicator of
    each further group off that of the default group, in which all ranks would have to take part, and some may be dead.
    For a group without a backend for that device, as `LiveWorld` is, torch raises.

    Args:
        default: the default process group.
    """
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


def store_of(group: Any) -> Any:
    """The store with which a process group was made."""
    return distributed_c10d._world.pg_map[group][1]


def collectives_of(group: Any) -> int:
    """Return how many collectives of a process group this rank has begun; 0 if its backend does not count them."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return 0


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a mesh was taken out of, as ``mesh["data_parallel"]``; of one that was not, itself."""
    if hasattr(mesh, "_get_root_mesh"):
        root: DeviceMesh = mesh._get_root_mesh()
        return root
    return device_mesh._mesh_resources.get_root_mesh(mesh)  # torch before 2.8


def forget_meshes() -> None:
    """Lets a mesh that is made next be taken for itself, and not for an equal one of an earlier run.

    torch remembers how operations on DTensors are sharded, and on which mesh, by meshes that are equal: those of the
    same ranks. What comes out of an operation would lie on the earlier one, whose process groups are gone if that run
    has failed.
    """
    with suppress(AttributeError):
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    with suppress(AttributeError):  # newer releases of torch have this one, too
        torch._C._clear_DTensor_sharding_propagator_cache()
    with suppress(AttributeError):
        _redistribute._gen_transform_infos.cache_clear()
    with suppress(AttributeError):
        _redistribute.clear_redistribute_planner_cache()


def all_reduce_hook_of(module: Any) -> Any:
    """What ``set_all_reduce_hook`` has been told of an FSDPModule last, or None."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    hooks = (getattr(group, "_all_reduce_hook", None) for group in groups)
    return next((hook for hook in hooks if hook is not None), None)


def put_in_order(module: Module, names: Sequence[str]) -> None:
    """Have a module and its submodules hold what they have in the order of these names of tensors.

    What has no tensors (an activation in a Sequential, say) keeps its place.
    """
    places: dict[str, int] = {}
    for place, name in enumerate(names):
        for end in (*(at for at, letter in enumerate(name) if letter == "."), len(name)):
            places.setdefault(name[:end], place)
    for prefix, each in list(module.named_modules(remove_duplicate=False)):
        before = f"{prefix}." if prefix else ""
        for held in (each._parameters, each._buffers, each._modules):
            known = [key for key in held if before + key in places]
            following = iter(sorted(known, key=lambda key: places[before + key]))
            items = {key: held[key] for key in (next(following) if key in known else key for key in held)}
            held.clear()
            held.update(items)


@cache
def wait_for_gloo_at_exit() -> None:
    """Lets gloo's threads give back the tensors of the last collectives before the interpreter ends.

    A thread of gloo says that a collective is done, then drops its tensors. Those that Python has dropped already are
    freed there, under the interpreter's lock; Python before 3.14 ends a thread that asks for it too late by unwinding
    its stack, and C++ answers "terminate called without an active exception" and aborts. That takes a busy machine, or
    a process that ends right after a collective.

    torch's remedy, destroying the process groups, is none here: their threads live for as long as a process's
    DistributedDataParallel holds the group, and joining them waits for ranks that may be dead. Only Linux says what a
    thread does; elsewhere nothing is waited for.
    """
    atexit.register(_wait_for_gloo)


def _wait_for_gloo() -> None:
    until, quiet = time.monotonic() + LONGEST_WAIT_AT_EXIT_S, 0
    while quiet < QUIET_POLLS and time.monotonic() < until:
        states = list(_states_of_gloo())
        if not states:
            return
        quiet = quiet + 1 if all(state == "S" for state in states) else 0
        time.sleep(0.001)  # without the interpreter's lock, which they may need


def _states_of_gloo() -> Iterator[str]:
    """What each of gloo's threads is doing, as in proc(5): S asleep, R running or ready to."""
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):
            if (task / "comm").read_text().strip() == GLOO_WORKER:
                yield (task / "stat").read_text().rpartition(")")[2].split()[0]
