"""Presents `torch.cuda` devices on a build of torch without CUDA, with memory and arithmetic of the CPU.

Import it before torch, which looks for CUDA once. `device_library.py` compiles what it loads; README.md lists what it
can and cannot show. Environment variables: EMULATED_CUDA_DEVICES is the number of devices (8), of which an empty
CUDA_VISIBLE_DEVICES hides all; EMULATED_CUDA_US_PER_OP is the time that a device takes for each operation, in
microseconds; with EMULATED_NCCL_HANGS a collective waits forever for a rank that has died, as NCCL does.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

if "torch" in sys.modules:
    raise ImportError("import emulated_cuda before torch, which looks for CUDA once")

sys.path.append(str(Path(__file__).parent))
import device_library

LIBRARY = device_library.library()
FREE, TOTAL = 70 << 30, 80 << 30
"""Bytes of memory that a device claims to have."""


def _load() -> Any:
    """Load the library between torch's own libraries and torch, and return its Python module."""
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
        ctypes.CDLL(str(device_library.torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(LIBRARY), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    spec = importlib.util.spec_from_file_location("_emulated_cuda", LIBRARY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


device = _load()

import torch
import torch.distributed as dist


def _index(which: Any = None) -> int:
    """Return the number of a device, that of the current one for None and for "cuda"."""
    if isinstance(which, int):
        return which
    index = None if which is None else torch.device(which).index
    return int(device.current_device()) if index is None else index


class Stream(torch.Stream):
    """A stream of a device; those of one device do not run side by side."""

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)


class Event:
    """A maker of torch's own events, whose methods take no subclass."""

    def __new__(cls, enable_timing: bool = False, *_: Any, **__: Any) -> Any:
        return torch.Event(device="cuda", enable_timing=enable_timing)


class Device:
    """A context in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = device.current_device()
        if self._index >= 0:
            device.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        device.set_device(self._before)


class Properties:
    """What `torch.cuda.get_device_properties` returns."""

    name, uuid, gcnArchName = "emulated", "emulated", ""
    major, minor, multi_processor_count, warp_size = 9, 0, 132, 32
    total_memory, L2_cache_size = TOTAL, 50 << 20
    max_threads_per_multi_processor, regs_per_multiprocessor = 2048, 65536


class Runtime:
    """The part of CUDA's runtime that `torch.cuda.cudart` gives access to."""

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        device.pin(pointer, nbytes)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        device.unpin(pointer)
        return 0

    def cudaMemGetInfo(self, which: int) -> tuple[int, int]:
        return FREE, TOTAL


def current_stream(which: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(which))


def default_stream(which: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(which), device_type=1)


@contextmanager
def stream(chosen: torch.Stream | None) -> Iterator[None]:
    if chosen is None:
        yield
        return
    before = torch.accelerator.current_stream(chosen.device.index)
    torch.accelerator.set_stream(chosen)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def set_device(which: Any) -> None:
    if _index(which) >= 0:
        device.set_device(_index(which))


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])


def _no_op() -> Callable[..., None]:
    """Return a function of its own: torch's compiler wants no two names for one."""
    return lambda *_: None


def _patch_cuda() -> None:
    """Let `torch.cuda` use the library; random numbers are the CPU's, and so those of a run on the CPU."""
    module = types.SimpleNamespace(
        # devices
        is_available=lambda: device.device_count() > 0,
        device_count=lambda: device.device_count(),
        _device_count_nvml=lambda: device.device_count(),
        current_device=lambda: device.current_device(),
        set_device=set_device,
        device=Device,
        synchronize=lambda which=None: device.synchronize(_index(which)),
        init=_no_op(),
        _lazy_init=_no_op(),
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        get_device_name=lambda which=None: Properties.name,
        get_device_capability=lambda which=None: (Properties.major, Properties.minor),
        get_device_properties=lambda which=None: Properties(),
        is_bf16_supported=lambda *_, **__: True,
        cudart=Runtime,
        # streams
        Stream=Stream,
        Event=Event,
        StreamContext=stream,
        stream=stream,
        default_stream=default_stream,
        current_stream=current_stream,
        is_current_stream_capturing=lambda: False,
        _sleep=lambda cycles: device.launch(-1, cycles / 1e9),
        # memory
        empty_cache=_no_op(),
        ipc_collect=_no_op(),
        memory_stats=lambda which=None: {},
        mem_get_info=lambda which=None: (FREE, TOTAL),
        memory_allocated=lambda which=None: device.counts()["allocated"],
        memory_reserved=lambda which=None: device.counts()["allocated"],
        max_memory_allocated=lambda which=None: device.counts()["peak"],
        max_memory_reserved=lambda which=None: device.counts()["peak"],
        reset_peak_memory_stats=lambda which=None: device.reset_peak(),
        # random numbers
        get_rng_state=lambda which=None: torch.get_rng_state(),
        set_rng_state=lambda state, which=None: torch.set_rng_state(state),
        get_rng_state_all=lambda: [torch.get_rng_state()],
        set_rng_state_all=set_rng_state_all,
        manual_seed=_no_op(),
        manual_seed_all=_no_op(),
        seed_all=_no_op(),
        initial_seed=lambda: torch.initial_seed(),
    )
    for name, value in vars(module).items():
        setattr(torch.cuda, name, value)
    torch.cuda._initialized = True
    torch.version.cuda = "13.0"


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _patch_storages() -> None:
    """Let storages of the device be resized, cloned and moved, which torch does by code that only CUDA builds have."""
    resize, clone, move = torch.UntypedStorage.resize_, torch.UntypedStorage.clone, torch.UntypedStorage.to

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        device.resize_storage(self, size)
        return self

    def clone_(self: torch.UntypedStorage) -> Any:
        return clone(self) if self.device.type != "cuda" else _bytes_of(self).clone().untyped_storage()

    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type != "cuda":
            return move(self, device=device, non_blocking=non_blocking)
        return torch.empty(self.nbytes(), dtype=torch.uint8, device=device).copy_(_bytes_of(self)).untyped_storage()

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    torch.UntypedStorage.clone = clone_  # type: ignore[method-assign]
    torch.UntypedStorage.to = to  # type: ignore[method-assign,assignment]


def _register_collectives() -> None:
    """Register the process group for tensors of the device, where NCCL would be."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        inner = dist.ProcessGroupGloo(dist.PrefixStore("inner", store), rank, size, timeout=timeout)
        return device.make_backend(inner, rank, size)

    def options(_: Any) -> Any:
        """Return options for a part of a process group, which torch asks for and copies before it splits one."""
        made = dist.ProcessGroupGloo._Options()
        made._devices = [dist.ProcessGroupGloo.create_default_device()]
        return made

    torch._C._distributed_c10d.Backend.options = property(options)
    dist.ProcessGroupGloo._Options.__deepcopy__ = lambda given, _: given
    dist.Backend.register_backend("emulated_nccl", create, devices=["cuda"])
    dist.Backend.default_device_backend_map["cuda"] = "emulated_nccl"


def _restore_thread_pool() -> None:
    """Make torch's pool of threads anew in a copy of this process, while it has one thread.

    Otherwise the first of several that ask for it does so. Backward passes start one for each device, and if another of
    them asks meanwhile, it finds no pool, and the process aborts.
    """
    torch.set_num_threads(torch.get_num_threads())


os.register_at_fork(after_in_child=_restore_thread_pool)
_patch_cuda()
_patch_storages()
_register_collectives()
