"""Access to names of torch that torch does not promise to keep.

Checked on torch 2.7, 2.13 and 2.15.
"""

from __future__ import annotations

import atexit
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_omni.errors import UnsupportedError

untraced = _disable_dynamo
"""`torch.compiler.disable`, with types; it imports torch's compiler at the first call."""

GLOO_WORKER = "pt_gloo_runloop"
"""The name of ProcessGroupGloo's threads."""

LONGEST_WAIT_AT_EXIT_S = 2.0
"""The longest delay of the interpreter's exit for gloo's threads."""

QUIET_POLLS = 3
"""Polls in a row that must find gloo's threads asleep: a thread that waits for the interpreter's lock sleeps, too."""


def new_named_group(name: str, ranks: Sequence[int], timeout: timedelta) -> Any:
    """Create a process group as ``torch.distributed.new_group`` does, under a given name. Its members alone call it.

    torch's own name contains the rank's number of groups, by which ranks with different histories would not find each
    other.

    ``name`` is the same on all members, and was never used before with this default process group.

    Raises:
        UnsupportedError: this release of torch names process groups in another way.
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
    """Raise torch's error if a backward pass has left gradients unaveraged, as the next forward pass would.

    All members of the module's group call it: after the first backward pass it rebuilds the buckets, by a collective.
    """
    reducer = getattr(module, "reducer", None)  # DDP has none if it delays the averages of all parameters
    if reducer is not None and reducer._rebuild_buckets():
        module._has_rebuilt_buckets = True


def hooks_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's dictionaries of hooks, by attribute name."""
    return {name: value for name, value in vars(optimizer).items() if name.startswith("_optimizer_")}


def caller_in(module: str) -> FrameType | None:
    """Return the innermost frame of this thread that runs code of a module; None if there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame


def is_unscaled(optimizer: Optimizer) -> bool:
    """Return whether a `GradScaler` that is making a step, in a caller's frame, has unscaled this optimizer."""
    frame = caller_in("torch.amp.grad_scaler")
    scaler = None if frame is None else frame.f_locals.get("self")
    return id(optimizer) in getattr(scaler, "_per_optimizer_states", {})


def ignored_by_ddp(module: Module) -> frozenset[str]:
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


@contextmanager
def unbound(default: Any) -> Iterator[None]:
    """Create process groups in this context as if the default process group were not bound to a device.

    With Lightning it is bound to the rank's device, except on the CPU. torch would then split each further group's
    communicator off the default group's, which needs all ranks, and some may be dead.
    """
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


def store_of(group: Any) -> Any:
    return distributed_c10d._world.pg_map[group][1]


def collectives_of(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return 0


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the root of a submesh such as ``mesh["data_parallel"]``, or the mesh itself."""
    if hasattr(mesh, "_get_root_mesh"):
        root: DeviceMesh = mesh._get_root_mesh()
        return root
    return device_mesh._mesh_resources.get_root_mesh(mesh)  # torch before 2.8


def forget_meshes() -> None:
    """Clear torch's caches of sharding, which mistake a new mesh for an equal one of an earlier run."""
    with suppress(AttributeError):
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    with suppress(AttributeError):  # newer releases of torch have this one, too
        torch._C._clear_DTensor_sharding_propagator_cache()
    with suppress(AttributeError):
        _redistribute._gen_transform_infos.cache_clear()
    with suppress(AttributeError):
        _redistribute.clear_redistribute_planner_cache()


def all_reduce_hook_of(module: Any) -> Any:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    hooks = (getattr(group, "_all_reduce_hook", None) for group in groups)
    return next((hook for hook in hooks if hook is not None), None)


def put_in_order(module: Module, names: Sequence[str]) -> None:
    """Reorder a module's parameters, buffers and submodules, at each depth, by these names of tensors."""
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
    """Delay the interpreter's exit, within a limit, until gloo's threads have released the last collectives' tensors.

    A thread of gloo may free a collective's tensors after it has reported it as done, under the interpreter's lock.
    Before Python 3.14, a thread that requests the lock too late ends the process with "terminate called without an
    active exception". Only Linux reports a thread's state; elsewhere the exit is not delayed.
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
    """Yield the state of each of gloo's threads, as in proc(5): S for asleep."""
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):
            if (task / "comm").read_text().strip() == GLOO_WORKER:
                yield (task / "stat").read_text().rpartition(")")[2].split()[0]


def iterated_datasets() -> list[Any]:
    return [each._dataset for each in gc.get_objects() if issubclass(type(each), _BaseDataLoaderIter)]
