"""The comparison of several ranks' tensors before the first collective, and their transfer whatever their layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from lightning_omni.errors import ConfigurationError, RankLost, UnsupportedError
from lightning_omni.runtime._private import ignored_by_ddp, put_in_order

_LETTER = 1024
"""Bytes of a note that one broadcast holds; a longer one takes two."""

# --- Transfer ---------------------------------------------------------------------------------------------------------

# gloo and NCCL read and write as many elements of memory as a tensor has, from its first one on. That is the tensor
# itself only if it is contiguous: a view with gaps has others in between, a tensor with another order of dimensions
# would arrive scrambled, and the memory after an expanded one belongs to other data.


@contextmanager
def contiguous(tensor: Tensor, name: str) -> Iterator[Tensor]:
    """Provide contiguous memory with a tensor's values for a collective; afterwards the tensor has the memory's.

    The memory is the tensor's own if that is contiguous; ``name`` is for errors.

    Raises:
        UnsupportedError: the tensor cannot have these values.
    """
    own = tensor.detach()
    if own.is_contiguous() and not own.is_conj() and not own.is_neg():
        yield own
        return
    memory = _copy(own, own)
    yield memory
    write(own, memory, name)


def take_from_rank_zero(named: Iterable[tuple[str, Tensor]], group: Any = None) -> None:
    """Overwrite tensors by those of a process group's rank 0, by default the default one's, unless it is lost.

    All its ranks call it.
    """
    for name, tensor in named:
        with contiguous(tensor, name) as memory, suppress(RankLost):  # if rank 0 is lost meanwhile, each has its own
            dist.broadcast(memory, src=0, group=group)


def broadcast_from(memory: Tensor, group: Any, device: torch.device, source: int = 0) -> None:
    """Overwrite memory by that of one rank of a process group, by its number there; its backend takes ``device``."""
    if memory.device.type == device.type:
        dist.broadcast(memory, group=group, group_src=source)
        return
    is_source = group.rank() == source  # the default process group may number its ranks otherwise
    shared = memory.to(device) if is_source else torch.empty_like(memory, device=device)
    dist.broadcast(shared, group=group, group_src=source)
    if not is_source:
        memory.copy_(shared)


def broadcast_bytes(note: bytes | None, broadcast: Callable[[Tensor], Any]) -> bytes:
    """Return one rank's ``note`` on all ranks of a process group; the others pass None."""
    letter = torch.zeros(8 + _LETTER, dtype=torch.uint8)
    if note:  # torch takes no empty buffer
        beginning = torch.frombuffer(bytearray(note[:_LETTER]), dtype=torch.uint8)
        letter[:8].view(torch.int64)[0] = len(note)
        letter[8 : 8 + beginning.numel()] = beginning
    broadcast(letter)
    size = int(letter[:8].view(torch.int64)[0])
    if size <= _LETTER:
        return letter[8 : 8 + size].numpy().tobytes()
    long = torch.zeros(size, dtype=torch.uint8)
    if note is not None:
        long.copy_(torch.frombuffer(bytearray(note), dtype=torch.uint8))
    broadcast(long)
    return long.numpy().tobytes()


def gathered(mine: Tensor, group: Any) -> list[Tensor]:
    """Return the tensor of every rank of a process group, all of which call it, in rank order."""
    places = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(places, mine, group=group)
    return places


def write(tensor: Tensor, values: Tensor, name: str = "a tensor") -> None:
    """Overwrite a strided tensor by values of its shape; a number that elements share is written once.

    Raises:
        UnsupportedError: elements that share a number would get different values.
    """
    once, part = tensor.detach(), values
    for dim, (size, stride) in enumerate(zip(once.shape, once.stride(), strict=True)):
        if size > 1 and stride == 0:
            once, part = once.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
    once.copy_(part)
    if not tensor.is_contiguous() and not torch.equal(_bytes(tensor, tensor), _bytes(values, tensor)):
        raise UnsupportedError(
            f"places of {name} share memory (its shape is {list(tensor.shape)}, its strides are"
            f" {list(tensor.stride())}), and it cannot have the different values that rank 0 has in them; register a"
            " copy with memory of its own, .clone()"
        )


def _copy(values: Tensor, like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device).copy_(values)


def _bytes(values: Tensor, like: Tensor) -> Tensor:
    return _copy(values.detach(), like.detach()).view(-1).view(torch.uint8)


# --- Comparison -------------------------------------------------------------------------------------------------------

# Rule 1: one small collective compares digests. Ranks exchange names only where the digests differ.
# Rule 2: an error is raised on all ranks, with the same message.
# Rule 3: a difference in order alone (that of a set, for example) is no error where the order may be changed: all ranks
# take the first rank's.

Largest = Callable[[Sequence[int]], list[int]]
"""A function that returns the largest of each number over all ranks that call it."""
_MOST_RANKS = 1 << 31


def make_alike(module: Module, rank: int, largest: Largest, may_reorder: bool = True) -> None:
    """Bring the tensors of a module into the same order on all ranks. All ranks call it.

    ``may_reorder`` is false if code depends on the order already.

    Raises:
        ConfigurationError: the ranks' modules have different tensors, or orders that may not be changed.
    """
    remedy = "all ranks train one model: build it alike on each of them"
    order = agree(_tensors_of(module), rank, largest, remedy)
    if order is not None and may_reorder and not ignored_by_ddp(module):
        put_in_order(module, [name.partition(" ")[2] for name in order])
        order = agree(_tensors_of(module), rank, largest, remedy)
    if order is not None:
        raise ConfigurationError(f"the ranks have the tensors of the model in different orders; {remedy}")


def check_all_shared(module: Module) -> None:
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    if ignored := trained & ignored_by_ddp(module):
        raise UnsupportedError(
            f"DistributedDataParallel is to ignore {min(ignored)} (_ddp_params_and_buffers_to_ignore of the module), so"
            " that each rank has its own, and groups exchange what all ranks have in common; use groups=1"
        )


def agree(found: Mapping[str, str], rank: int, largest: Largest, remedy: str) -> list[str] | None:
    """Compare named descriptions with those of the other ranks. All ranks call it.

    Return None if all have the same order, otherwise the first rank's. ``remedy`` ends an error message.

    Raises:
        ConfigurationError: another rank has other items or descriptions.
    """
    text = json.dumps(list(found.items()))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    most, least, last = largest([digest, -digest, -rank])
    if most == -least:
        return None
    first = -last
    theirs = dict(json.loads(_text_of(first == rank, text, largest)))
    problem = _difference(found, theirs, rank, first)
    [lowest] = largest([_MOST_RANKS - rank if problem else 0])
    if lowest:
        raise ConfigurationError(f"{_text_of(lowest == _MOST_RANKS - rank, problem, largest)}; {remedy}")
    return list(theirs)


def are_alike(numbers: Sequence[int], largest: Largest) -> list[bool]:
    """Return of each number whether all ranks, which call it, have the same."""
    both = largest([*numbers, *(-each for each in numbers)])
    return [most == -least for most, least in zip(both, both[len(numbers) :], strict=False)]


def describe(tensor: Tensor) -> str:
    """Describe the properties of a tensor that must be equal on all ranks."""
    if is_lazy(tensor):
        return "of no shape yet"
    words = [f"{tensor.dtype} of shape {list(tensor.shape)}".removeprefix("torch.")]
    if tensor.layout != torch.strided:
        words.append(str(tensor.layout))
    elif tensor.requires_grad and not isinstance(tensor, DTensor) and not tensor.is_contiguous():
        # DistributedDataParallel averages gradients in their memory order, which is that of the parameters.
        strides = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        words.append(f"strides {strides}")
    elif shared := [dim for dim, size in enumerate(tensor.shape) if size > 1 and tensor.stride(dim) == 0]:
        # It stores fewer elements than its shape has, so it may not be able to hold those of a rank that stores all.
        words.append(f"expanded along dimensions {shared}")
    if isinstance(tensor, Parameter):
        words.append("trained" if tensor.requires_grad else "frozen")
    return ", ".join(words)


def _tensors_of(module: Module) -> dict[str, str]:
    """Describe a module's tensors by kind and name, except those that DDP ignores; parents precede children."""
    found: dict[str, Tensor] = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        for name, parameter in Module.named_parameters(each, prefix, recurse=False, remove_duplicate=False):
            found[f"parameter {name}"] = parameter
        for name, buffer in Module.named_buffers(each, prefix, recurse=False, remove_duplicate=False):
            found[f"buffer {name}"] = buffer
    ignored, names = ignored_by_ddp(module), dict[int, str]()
    for name in sorted(found):
        names.setdefault(id(found[name]), name)
    return {
        name: describe(tensor) if names[id(tensor)] == name else f"tied to {names[id(tensor)]}"
        for name, tensor in found.items()
        if name.partition(" ")[2] not in ignored
    }


def _difference(mine: Mapping[str, str], theirs: Mapping[str, str], rank: int, first: int) -> str:
    differences = [
        *(f"rank {rank} has no {name}, which rank {first} has" for name in theirs if name not in mine),
        *(f"rank {rank} has a {name}, which rank {first} has not" for name in mine if name not in theirs),
        *(
            f"the {name} is {mine[name]} on rank {rank}, and {theirs[name]} on rank {first}"
            for name in mine
            if theirs.get(name, mine[name]) != mine[name]
        ),
    ]
    if len(differences) > 1:
        differences[0] += f" (differences in all: {len(differences)})"
    return differences[0] if differences else ""


def _text_of(is_mine: bool, text: str, largest: Largest) -> str:
    mine = text.encode() if is_mine else b""
    [length] = largest([len(mine)])
    return bytes(largest([*mine] or [0] * length)).decode()
