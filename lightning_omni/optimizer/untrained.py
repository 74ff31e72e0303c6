"""What no optimizer moves, and what becomes of it where groups synchronize: buffers, frozen parameters, averages.

Inside an epoch they are each group's own. Then all ranks go on with the same: running statistics of normalization
layers are the mean over the groups, for each group has seen other samples of the same distribution. A group in which
they are not finite is left out: what it pushed then was refused, and its weights are sound again. All else is that of
the recorder's group, as under DistributedDataParallel it is rank 0's: the mean of two queues, of two codebooks or of
two vectors of unit length is none, and what belongs together (a queue and its pointer, a scale and its zero point)
stays together.
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
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim.swa_utils import AveragedModel

from lightning_omni.errors import UnsupportedError
from lightning_omni.optimizer.model_replica import fingerprint
from lightning_omni.optimizer.place import Place
from lightning_omni.optimizer.values import write
from lightning_omni.topology import RECORDER

_STATISTICS = re.compile(r"(running|moving)_(mean|var|variance|std)")
"""Buffers of normalization layers: torch's, and others that keep to its names."""
_BATCHES = "num_batches_tracked"
"""What such a layer calls the number of batches that it has seen."""


class Merge(Enum):
    """What becomes of a tensor that groups have each for itself."""

    MEAN = auto()
    LARGEST = auto()
    FIRST = auto()


@dataclass(frozen=True, eq=False)
class Untrained:
    """A tensor that no optimizer moves.

    Attributes:
        name: what the module calls it.
        tensor: the tensor.
        merge: what becomes of it at a synchronization point.
    """

    name: str
    tensor: Tensor
    merge: Merge


def buffers_of(module: Module) -> Iterator[Untrained]:
    """The buffers of a module, in its order."""
    for name, buffer in module.named_buffers():
        own = name.rpartition(".")[2]
        if own == _BATCHES:
            yield Untrained(name, buffer, Merge.LARGEST)
        else:
            is_mean = _STATISTICS.fullmatch(own) and not _is_whole(buffer)
            yield Untrained(name, buffer, Merge.MEAN if is_mean else Merge.FIRST)


def average_of(module: Module) -> Iterator[Untrained]:
    """An average of the weights, which a callback keeps, and the buffers beside it: averaged over groups it is one."""
    for name, parameter in module.named_parameters():
        yield Untrained(name, parameter, Merge.MEAN)
    yield from buffers_of(module)


def parameters_of(module: Module) -> Iterator[Untrained]:
    """The parameters of a module, in its order, but for those of which each rank has a part."""
    averages = {id(held) for each in module.modules() if isinstance(each, AveragedModel) for held in each.parameters()}
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            yield Untrained(name, parameter, Merge.MEAN if id(parameter) in averages else Merge.FIRST)


def check_dense(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises `UnsupportedError` for a sparse tensor, which torch.distributed does not pass on."""
    for name, tensor in named:
        if tensor.layout != torch.strided:
            raise UnsupportedError(
                f"{name} is a sparse tensor ({tensor.layout}), and what a module holds is passed on to other ranks"
                " dense, under DDP, too; register its indices and values as buffers, or keep it in a plain attribute,"
                " which remains each rank's own"
            )


def merge(place: Place, untrained: Iterable[Untrained]) -> None:
    """What the groups had each for itself becomes the same on all ranks. On all of them, as one process group.

    Args:
        place: this rank's, in the run.
        untrained: in one order on all ranks.

    Raises:
        UnsupportedError: one of them is sparse, or has another shape on another rank.
    """
    everything = list(untrained)
    check_dense((each.name, each.tensor) for each in everything)
    _check_shapes(place, everything)
    kinds: dict[Merge, list[Untrained]] = {each: [] for each in Merge}
    for each in everything:
        tensor = each.tensor.detach()
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        kinds[each.merge].append(replace(each, tensor=real))
    _average(place, kinds[Merge.MEAN])
    _take_largest(kinds[Merge.LARGEST])
    _take_first(place, kinds[Merge.FIRST])


def _check_shapes(place: Place, untrained: Sequence[Untrained]) -> None:
    for each, is_one in zip(untrained, _are_one(place, [_mark(each.tensor) for each in untrained]), strict=True):
        if not is_one:
            raise UnsupportedError(
                f"{each.name} is not of one shape and dtype on all ranks ({list(each.tensor.shape)} on rank"
                f" {place.rank}), and all go on with one value of it when groups synchronize; keep it in a plain"
                " attribute, which remains each rank's own, or give it one shape"
            )


def _mark(tensor: Tensor) -> int:
    return zlib.crc32(f"{tensor.dtype}{list(tensor.shape)}".encode())


def _are_one(place: Place, marks: Sequence[int]) -> list[bool]:
    """Whether each mark is the same on all ranks."""
    if not marks:
        return []
    largest, negated = place.all_reduce_max(marks), place.all_reduce_max([-mark for mark in marks])
    return [most == -least for most, least in zip(largest, negated, strict=True)]


def _average(place: Place, untrained: Sequence[Untrained]) -> None:
    if not untrained:
        return
    flat = [each.tensor.double().cpu().flatten() for each in untrained]
    is_counted = _counts(place) and place.is_leader
    sound = [is_counted and bool(each.isfinite().all()) for each in flat]
    # Not multiplied: infinities would become NaN. The last numbers count those that spoke: all divide by the same.
    counted = [each if is_sound else torch.zeros_like(each) for each, is_sound in zip(flat, sound, strict=True)]
    summed = torch.cat([*counted, torch.tensor(sound).double()])
    dist.all_reduce(summed)
    *sums, counts = summed.split([*(each.numel() for each in flat), len(flat)])
    for each, total, count in zip(untrained, sums, counts.tolist(), strict=True):
        if count:
            write(each.tensor, (total / count).view_as(each.tensor), each.name)
    _take_first(place, [each for each, count in zip(untrained, counts.tolist(), strict=True) if not count])


def _counts(place: Place) -> bool:
    """Whether this rank's group counts in a mean over the groups. All ranks ask.

    One that has joined since they synchronized last began with the mean of that moment, from which others have gone on.
    """
    if place.enlistment is None:
        return True
    are_others_there = any(place.all_reduce_max([int(not place.is_new)]))
    return not (place.is_new and are_others_there)


def _take_largest(untrained: Sequence[Untrained]) -> None:
    if untrained:
        flat = torch.cat([each.tensor.long().cpu().flatten() for each in untrained])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        for part, each in zip(flat.split([each.tensor.numel() for each in untrained]), untrained, strict=True):
            write(each.tensor, part.view_as(each.tensor), each.name)


def _take_first(place: Place, untrained: Sequence[Untrained]) -> None:
    """Those that differ become the recorder's. What is the same everywhere (a mask, say) need not travel."""
    are_one = _are_one(place, [fingerprint(each.tensor, max(1, each.tensor.numel())) for each in untrained])
    differ = [each for each, is_one in zip(untrained, are_one, strict=True) if not is_one]
    if differ:
        flat = torch.cat([each.tensor.contiguous().flatten().view(torch.uint8).cpu() for each in differ])
        dist.broadcast(flat, src=RECORDER)
        parts = flat.split([each.tensor.numel() * each.tensor.element_size() for each in differ])
        for part, each in zip(parts, differ, strict=True):
            values = part.clone().view(each.tensor.dtype)  # a copy is aligned
            write(each.tensor, values.view(each.tensor.shape), each.name)


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
