"""Tensors that no optimizer moves (buffers, frozen parameters, averages), and their merge where groups synchronize.

Inside an epoch they are each group's own. Running statistics of normalization layers, and averages of weights, become
the mean over the groups, without a group in which they are not finite.
All others become those of the recorder, as under DDP those of rank 0: a mean of two queues, two codebooks or
two vectors of unit length has no meaning.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim.swa_utils import AveragedModel

from lightning_omni.errors import UnsupportedError
from lightning_omni.runtime.model.replica import fingerprints
from lightning_omni.runtime.model.tensor_sync import are_alike, write
from lightning_omni.runtime.parallel_state import ParallelState
from lightning_omni.topology import RECORDER

_STATISTICS = re.compile(r"(running|moving)_(mean|var|variance|std)")
"""Names of normalization layers' statistics, in torch and elsewhere."""


class Merge(Enum):
    MEAN = auto()
    FIRST = auto()


@dataclass(frozen=True, eq=False)
class BufferSync:
    """A tensor with the rule for merging it."""

    name: str
    tensor: Tensor
    merge: Merge


def buffers_of(module: Module) -> Iterator[BufferSync]:
    for name, buffer in module.named_buffers():
        is_mean = _STATISTICS.fullmatch(name.rpartition(".")[2]) and (buffer.is_floating_point() or buffer.is_complex())
        yield BufferSync(name, buffer, Merge.MEAN if is_mean else Merge.FIRST)


def average_of(module: Module) -> Iterator[BufferSync]:
    """Yield the tensors of a callback's average of the weights: the mean of its parameters is an average, too."""
    for name, parameter in module.named_parameters():
        yield BufferSync(name, parameter, Merge.MEAN)
    yield from buffers_of(module)


def parameters_of(module: Module) -> Iterator[BufferSync]:
    averages = {id(held) for each in module.modules() if isinstance(each, AveragedModel) for held in each.parameters()}
    for name, parameter in module.named_parameters():
        yield BufferSync(name, parameter, Merge.MEAN if id(parameter) in averages else Merge.FIRST)


def check_dense(named: Iterable[tuple[str, Tensor]]) -> None:
    for name, tensor in named:
        if tensor.layout != torch.strided:
            raise UnsupportedError(
                f"{name} is a sparse tensor ({tensor.layout}), and what a module holds is passed on to other ranks"
                " dense, under DDP, too; register its indices and values as buffers, or keep it in a plain attribute,"
                " which remains each rank's own"
            )


def merge(parallel: ParallelState, untrained: Iterable[BufferSync]) -> None:
    """Merge the groups' own tensors, in one order on all ranks, which call it as one process group.

    Raises:
        UnsupportedError: one is sparse, has another shape or dtype on another rank, or cannot hold the values.
    """
    everything = list(untrained)
    check_dense((each.name, each.tensor) for each in everything)
    _check_shapes(parallel, everything)
    kinds: dict[Merge, list[BufferSync]] = {each: [] for each in Merge}
    for each in everything:
        tensor = each.tensor.detach()
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        kinds[each.merge].append(replace(each, tensor=real))
    _average(parallel, kinds[Merge.MEAN])
    _take_first(parallel, kinds[Merge.FIRST])


def _check_shapes(parallel: ParallelState, untrained: Sequence[BufferSync]) -> None:
    marks = [zlib.crc32(f"{each.tensor.dtype}{list(each.tensor.shape)}".encode()) for each in untrained]
    for each, is_one in zip(untrained, are_alike(marks, parallel.all_reduce_max), strict=True):
        if not is_one:
            raise UnsupportedError(
                f"{each.name} is not of one shape and dtype on all ranks ({list(each.tensor.shape)} on rank"
                f" {parallel.rank}), and all go on with one value of it when groups synchronize; keep it in a plain"
                " attribute, which remains each rank's own, or give it one shape"
            )


def _average(parallel: ParallelState, untrained: Sequence[BufferSync]) -> None:
    if not untrained:
        return
    flat = [each.tensor.double().cpu().flatten() for each in untrained]
    is_counted = _counts(parallel) and parallel.is_leader
    sound = [is_counted and bool(each.isfinite().all()) for each in flat]
    # A product with 0 would make infinities NaN. The last elements are counts, so that all divide by the same.
    counted = [each if all_finite else torch.zeros_like(each) for each, all_finite in zip(flat, sound, strict=True)]
    summed = torch.cat([*counted, torch.tensor(sound).double()])
    dist.all_reduce(summed)
    *sums, counts = summed.split([*(each.numel() for each in flat), len(flat)])
    for each, total, count in zip(untrained, sums, counts.tolist(), strict=True):
        if count:
            write(each.tensor, (total / count).view_as(each.tensor), each.name)
    _take_first(parallel, [each for each, count in zip(untrained, counts.tolist(), strict=True) if not count])


def _counts(parallel: ParallelState) -> bool:
    """Return whether this rank's group counts in a mean over the groups. All ranks call it.

    A group that has joined since the last synchronization began with its mean, and counts only if all have.
    """
    if parallel.registration is None:
        return True
    are_others_there = any(parallel.all_reduce_max([int(not parallel.joined_since_sync)]))
    return not (parallel.joined_since_sync and are_others_there)


def _take_first(parallel: ParallelState, untrained: Sequence[BufferSync]) -> None:
    are_one = are_alike(fingerprints(each.tensor for each in untrained), parallel.all_reduce_max)
    differ = [each for each, is_one in zip(untrained, are_one, strict=True) if not is_one]
    if differ:
        flat = torch.cat([each.tensor.contiguous().flatten().view(torch.uint8).cpu() for each in differ])
        dist.broadcast(flat, src=RECORDER)
        parts = flat.split([each.tensor.numel() * each.tensor.element_size() for each in differ])
        for part, each in zip(parts, differ, strict=True):
            values = part.clone().view(each.tensor.dtype)  # a copy is aligned
            write(each.tensor, values.view(each.tensor.shape), each.name)
