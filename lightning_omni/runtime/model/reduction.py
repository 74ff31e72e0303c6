"""The averaging of gradients by the members of a compute group: an all-reduce format, in DistributedDataParallel.

DDP calls a communication hook for each bucket of gradients. The hook averages the format's messages by
`torch.distributed.all_reduce` at once, so that the order of collectives is the same on all ranks, also with
SyncBatchNorm's in between. On a CUDA device they have a stream of their own; on a CPU the backward pass waits for them,
which `Reduction.seconds` counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_omni.errors import OmniError
from lightning_omni.methods.model.server_optimizer import Master, describe, held_by, hyperparameters_of, rebuild
from lightning_omni.runtime._private import check_reduced
from lightning_omni.runtime.timing import wait_for
from lightning_omni.wire.all_reduce import AllReduce, Exact, Memory, run_through

T = TypeVar("T")

BUCKET_MB = 64
"""Megabytes of gradients in one bucket on a CPU in an inexact format: smaller buckets would overlap with nothing, and
each takes as many successive all-reduces as the format has messages."""
TIMED_BYTES = 1 << 26
"""Bytes of gradients with which arithmetic is timed: its time is proportional to their number, and memory may be
short."""


class Reduction:
    """The averaging of a rank's gradients over its group.

    Attributes:
        format: the all-reduce format of modules that are wrapped next.
        seconds: seconds of averages in an inexact format on a CPU so far.
        memory: this rank's memory of the format, by parameter.
    """

    def __init__(self, format_: AllReduce) -> None:
        self.format = format_
        self.seconds = 0.0
        self.memory: Memory = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._wrapped: list[ref[DistributedDataParallel]] = []

    def ddp_options(self, module: torch.nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
        on_cpu = all(each.device.type == "cpu" for each in module.parameters())
        is_open = not isinstance(self.format, Exact) and on_cpu and "bucket_cap_mb" not in given
        return {**given, "bucket_cap_mb": BUCKET_MB} if is_open else dict(given)

    def install(self, module: Any, group: Any) -> None:
        """Install the hook by which DDP averages a wrapped module's gradients in the present format.

        The exact format needs none, nor does a group of one; the memory is then cleared. `check_reduced` checks
        the module from now on.
        """
        if not isinstance(module, DistributedDataParallel):
            self._wrapped = []
            self.forget()
            return
        # Modules that the garbage collector has left on some ranks only are dropped: `check_reduced` is a collective.
        known = [(each, ddp) for each in self._wrapped if (ddp := each()) is not None]
        stay = [each for each, ddp in known if ddp.process_group is group and ddp.module is not module.module]
        self._wrapped = [*stay, ref(module)]
        if isinstance(self.format, Exact):
            self.forget()
            return
        # A lambda, because torch compares annotations with types, and in this file they are strings.
        module.register_comm_hook((self.format, group), lambda state, bucket: self._hook(state, bucket))

    def check_reduced(self, parameters: Collection[Parameter]) -> None:
        """Raise torch's error if a backward pass has left gradients unaveraged, for which other members wait.

        Of several modules, those without these ``parameters`` are left out: their backward pass may still follow. All
        members call it.
        """
        # torch would find it in the next forward pass, after the exchange.
        wrapped = [module for each in self._wrapped if (module := each()) is not None]
        for module in wrapped:
            if len(wrapped) == 1 or _holds(module, parameters):
                check_reduced(module)

    def forget(self) -> None:
        """Clear the memory: its residuals belong to gradients that no longer exist."""
        self.memory.clear()

    def _hook(self, state: tuple[AllReduce, Any], bucket: Any) -> torch.futures.Future[Tensor]:
        flat = bucket.buffer()
        if flat.is_sparse:  # of one parameter; few of its rows have values, and only these are sent
            future: torch.futures.Future[Tensor] = allreduce_hook(state[1], bucket)
            return future
        if flat.is_cuda:
            return self._beside(state, bucket, flat)
        began = time.perf_counter()
        self._average(state, bucket)
        self.seconds += time.perf_counter() - began
        return _done(flat)

    def _beside(self, state: tuple[AllReduce, Any], bucket: Any, flat: Tensor) -> torch.futures.Future[Tensor]:
        device = flat.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._average(state, bucket)
            return _done(flat)

    def _average(self, state: tuple[AllReduce, Any], bucket: Any) -> None:
        format_, group = state
        size = dist.get_world_size(group)

        def mean(message: Tensor) -> Tensor:
            dist.all_reduce(message.div_(size), group=group)  # divided before, because 16 bits may not hold the sum
            return message

        with torch.autocast(bucket.buffer().device.type, enabled=False):  # backward() may be called inside one
            run_through(format_.average(_reals(bucket), bucket.parameters(), self.memory), mean)


def timed_part(items: Iterable[T], nbytes: Callable[[T], int]) -> list[T]:
    found, left = list[T](), TIMED_BYTES
    for item in sorted(items, key=nbytes, reverse=True):
        if nbytes(item) <= left:
            found.append(item)
            left -= nbytes(item)
    return found


def seconds_of_arithmetic(format_: AllReduce, shapes: Iterable[Sequence[int]], device: torch.device) -> float:
    """Return the seconds that a rank computes to average its gradients once, without communication.

    The largest ``shapes`` that fit into `TIMED_BYTES` are timed, and the others extrapolated; 0 if none fits.
    """
    shapes = list(shapes)
    timed = [torch.ones(tuple(shape), device=device) for shape in timed_part(shapes, lambda each: 4 * math.prod(each))]
    numbers = sum(each.numel() for each in timed)
    if not numbers:
        return 0.0
    memory: Memory = {}
    for _ in range(2):  # the first time, the memory is empty
        wait_for(device)
        began = time.perf_counter()
        run_through(format_.average(timed, range(len(timed)), memory), lambda message: message)
        wait_for(device)
        seconds = time.perf_counter() - began
    return seconds * sum(map(math.prod, shapes)) / numbers


def _holds(module: torch.nn.Module, parameters: Iterable[Parameter]) -> bool:
    held = set(map(id, module.parameters()))
    return any(id(each) in held for each in parameters)


def _reals(bucket: Any) -> list[Tensor]:
    """Return the gradients of a bucket, in its memory; a complex number as two real ones, in one more dimension."""
    # For complex parameters torch's ``gradients()`` returns half of the numbers.
    parameters: list[Tensor] = bucket.parameters()
    if not any(each.is_complex() for each in parameters):
        gradients: list[Tensor] = bucket.gradients()
        return gradients
    flat = bucket.buffer()
    real = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    parts = real.split([2 * each.numel() for each in parameters])
    return [part.view(*each.shape, 2) for each, part in zip(parameters, parts, strict=True)]


def _done(flat: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
    future.set_result(flat)
    return future


# --- A parameter server's time for a push, measured on a part of the weights ------------------------------------------

TIMED_PUSHES = 3
"""Pushes of which the shortest counts: in the first one, the optimizer creates its state."""


def seconds_of_push(optimizer: Optimizer) -> float:
    """Return the seconds that a server takes for one push of all gradients, without communication.

    On the CPU, in one thread, it copies the gradients, steps a copy of the optimizer, and copies the weights. The
    largest parameters that fit into `TIMED_BYTES` are timed, and the others extrapolated. The result is 0 if no server
    can run the optimizer, or not without its state, or no trained parameter fits.
    """
    every: list[Tensor] = [each for each in held_by(optimizer) if each.requires_grad]
    timed = timed_part(every, lambda each: each.nbytes)
    names = {parameter: str(number) for number, parameter in enumerate(timed)}
    if not names:
        return 0.0
    weights = {name: Parameter(torch.zeros(like.shape, dtype=like.dtype)) for like, name in names.items()}
    try:
        twin = rebuild(describe(optimizer, names, with_state=False), weights, lambda _: type(optimizer))
        seconds = _seconds_of_update(Master(weights, twin), twin)
    except OmniError:  # also if it cannot step without its constructor's state, as Adagrad of torch 2.7
        return 0.0
    return seconds * (sum(each.numel() for each in every) / sum(each.numel() for each in names))


def _seconds_of_update(master: Master, twin: Optimizer) -> float:
    settings, seconds = hyperparameters_of(twin), math.inf
    came = [torch.full_like(weight, 1e-3) for weight in master.weights()]
    pushed, answer = ([torch.empty_like(each) for each in came] for _ in range(2))  # reused memory
    with one_thread():
        for _ in range(TIMED_PUSHES):
            began = time.perf_counter()
            torch._foreach_copy_(pushed, came)
            master.update(pushed, settings)
            torch._foreach_copy_(answer, master.weights())
            seconds = min(seconds, time.perf_counter() - began)
    return seconds


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
