"""torch.distributed's process groups: one for each compute group, one of all live ranks, and the current default.

Compute groups are kept for later fits of the same script.

The server carries out the collectives of all live ranks, `LiveWorld`: none waits for dead ranks, and all survivors get
the same contributions. Ranks are numbered by their index among the live ranks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, reduce
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_omni.errors import ConfigurationError, RankLost, UnsupportedError
from lightning_omni.runtime._private import new_named_group, unbound, wait_for_gloo_at_exit
from lightning_omni.runtime.model.tensor_sync import broadcast_bytes, broadcast_from, gathered
from lightning_omni.topology import Topology
from lightning_omni.wire.messages import LARGEST_UPLOAD

MOST_KEPT = 16
"""The most topologies whose process groups are kept."""

Groups = tuple[tuple[int, ...], ...]
Gather = Callable[[list[int]], list[list[int]]]
"""A function from this rank's whole numbers to those of every live rank, in rank order."""


@dataclass
class _Made:
    number: int
    group: ref[Any]


class _Cache:
    """The process groups created beside one default process group. Destroying the default destroys all of them.

    The cache keeps no process group alive, nor its store, whose port another default process group may need.

    Attributes:
        lost: the lost ranks of the run whose survivors are the default process group.
    """

    def __init__(self) -> None:
        self.live: ref[LiveWorld] | None = None
        self.compute: dict[Groups, _Made] = {}
        self.lost: Sequence[int] = ()

    def destroy(self, groups: Groups) -> None:
        made = self.compute.pop(groups, None)
        group = made.group() if made is not None else None
        if group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)


_caches: WeakKeyDictionary[Any, _Cache] = WeakKeyDictionary()


def outlive(group: Any, lost: Sequence[int]) -> None:
    """Record that a process group, the next default, consists of the surviving ranks of a run."""
    _caches.setdefault(group, _Cache()).lost = lost


def check_none_lost() -> None:
    """Raise a `RankLost` if the default group is an earlier fit's or loop's survivors: loaders would count the lost."""
    if not (lost := _caches.get(dist.group.WORLD, _Cache()).lost):
        return
    were = f"rank {lost[0]} was" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} were"
    raise RankLost(
        f"{were} lost in the fit or loop before, and this one would begin without: start the script again, from a"
        " checkpoint"
    )


def is_switched() -> bool:
    """Return whether the default process group is one that a World made: in its loop, or after it has lost ranks."""
    made = [
        group for cache in _caches.values() for group in (cache.live, *(each.group for each in cache.compute.values()))
    ]
    return any(group is not None and group() is dist.group.WORLD for group in made)


def check_not_in_loop() -> None:
    """Raise a `ConfigurationError` if `is_switched`: another World would take the group for that of all ranks."""
    if is_switched():
        raise ConfigurationError(
            "a second World while compute groups train, inside `with world.training():` or a fit: torch.distributed"
            " refers to one group there; make each World before or after it"
        )


class ProcessGroups:
    """All process groups of a rank. No other class switches the default process group.

    ``size`` counts dead ranks, too. ``device`` holds the tensors of torch's own collectives. With ``is_group``, the
    default process group is that of one compute group, which has joined on its own.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta, device: torch.device, is_group: bool = False) -> None:
        self._rank, self._size, self._timeout, self._device = rank, size, timeout, device
        self._is_group = is_group
        self._stay: set[Groups] = set()
        self._found: Any = None
        wait_for_gloo_at_exit()

    @property
    def original(self) -> Any:
        """Return the default process group as it was found: of all launched ranks, including those lost since."""
        if self._found is None:
            self._found = dist.group.WORLD
        return self._found

    @property
    def _cache(self) -> _Cache:
        return _caches.setdefault(self.original, _Cache())

    @property
    def had_several(self) -> bool:
        return self._cache.live is not None

    @property
    def live(self) -> LiveWorld:
        live = self._cache.live() if self._cache.live is not None else None
        assert live is not None
        return live

    def make(self, topology: Topology, gather: Gather | None = None, stays: bool = False) -> None:
        """Create this rank's process group of a topology, unless all ranks have theirs. All live ranks call it.

        ``gather`` exchanges numbers, by default over the original process group. With ``stays`` the groups are kept to
        the end of the run.
        """
        members, kept = self._members(topology), self._cache
        if stays:
            self._stay.add(topology.groups)
        if len(members) == self._size:
            return
        held = kept.compute.get(topology.groups)
        offer = 1 + secrets.randbelow(1 << 62)
        of_all = (gather or self.gather)([held.number if held else 0, offer])
        if held is not None and all(theirs == held.number for theirs, _ in of_all):
            kept.compute[topology.groups] = kept.compute.pop(topology.groups)  # it was used last
            return
        kept.destroy(topology.groups)
        before, number = dist.group.WORLD, of_all[0][1]
        self.use(self.original)
        group = new_named_group(f"omni-{number:x}-{members[0]}", members, self._timeout)
        kept.compute[topology.groups] = _Made(number, ref(group))
        self.use(before)
        if self._device.type != "cpu":  # NCCL connects the ranks at their first collective, which steps shall not time
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        spare = [groups for groups in kept.compute if groups not in self._stay and groups != topology.groups]
        for groups in spare[: max(0, len(kept.compute) - MOST_KEPT)]:
            kept.destroy(groups)

    def compute(self, topology: Topology) -> Any:
        if (made := self._cache.compute.get(topology.groups)) is not None:
            return made.group()
        if len(self._members(topology)) != self._size:
            raise KeyError(f"no process group was made for {topology.groups}")
        return self.original

    def _members(self, topology: Topology) -> Sequence[int]:
        if self._is_group and self._rank not in topology.ranks:  # the numbers are those of the run
            return range(self._size)
        return topology.members(topology.group_of(self._rank))

    def use(self, group: Any) -> None:
        _ = self.original  # found before it is replaced
        dist.GroupMember.WORLD = group

    def join(self, synchronize: Synchronize, rank: int) -> None:
        """Create and connect the group of all live ranks. All ranks call it."""
        self.make_live_world()
        self.live.connect(synchronize, rank)
        dist.barrier()

    def make_live_world(self) -> None:
        register()
        self.use(self.original)
        if self._cache.live is None:
            with unbound(self.original):
                made = dist.new_group(range(self._size), timeout=self._timeout, backend=BACKEND)
            assert isinstance(made, LiveWorld)
            self._cache.live = ref(made)

    def abandon(self, topology: Topology) -> None:
        """Destroy this failed rank's process group in a topology; the original one becomes the default.

        With gloo, members that wait for it fail at once. A group of all ranks that torch knows is not destroyed: its
        members fail when this process ends.
        """
        self.use(self.original)
        self._cache.destroy(topology.groups)

    def abort(self) -> None:
        """Abort this rank's NCCL communicators, whose kernels wait for dead ranks without end; gloo raises an error.

        torch's watchdog then ends the process, unless TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 when a group is created.
        """
        for group in (*(made.group() for made in self._cache.compute.values()), self.original):
            if group is not None and "nccl" in str(dist.get_backend_config(group)):
                group.abort()

    def leave(self) -> None:
        self._found = None

    # --- Among all ranks -----------------------------------------------------------------------------------------

    def largest(self, numbers: Sequence[int], group: Any) -> list[int]:
        if not numbers:
            return []
        device = torch.device("cpu") if isinstance(group, LiveWorld) else self._device
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        largest: list[int] = tensor.tolist()
        return largest

    def broadcast_text(self, text: str, group: Any, by: int = 0) -> str:
        """Return the text of rank ``by``, in torch's numbering, on every rank of a group of torch's own."""
        mine = text.encode() if self._rank == by else None
        return broadcast_bytes(mine, partial(broadcast_from, group=group, device=self._device, source=by)).decode()

    def gather(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        return [theirs.tolist() for theirs in gathered(mine, self.original)]


BACKEND = "omni"

Synchronize = Callable[[str, bytes], list[tuple[int, bytes]]]
"""A function that contributes bytes for a stated purpose; it returns each live rank and its bytes, in rank order."""

_REDUCE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


class _Done(dist.Work):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:  # torch's own, for a future, takes no timeout
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


def _not_offered(name: str) -> Callable[..., dist.Work]:
    def refuse(self: LiveWorld, *args: Any) -> dist.Work:
        raise UnsupportedError(
            f"torch.distributed.{name} is not offered across compute groups outside the training epoch; use"
            " all_reduce, all_gather, broadcast, gather or barrier, or pass a process group of your own"
        )

    return refuse


class LiveWorld(dist.ProcessGroup):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, unused-ignore]
        self._global_rank = rank  # until `connect` sets another
        self.ranks: Sequence[int] = range(size)
        self._synchronize: Callable[[], Synchronize | None] = lambda: None
        self._name = ""

    def connect(self, synchronize: Synchronize, rank: int) -> None:
        self._synchronize, self._global_rank = WeakMethod(synchronize), rank  # torch keeps this group

    @property
    def group_name(self) -> Any:
        """Return the name by which functional collectives find this group; torch's own property needs a backend."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self._global_rank)

    # --- Collectives, by the names that torch.distributed calls -------------------------------------------------------

    def barrier(self, opts: Any = None) -> dist.Work:
        self.contribute("barrier", b"")
        return _Done(None)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        op = _op(opts)
        for tensor in tensors:
            parts = self._gather(f"all_reduce({_signature(tensor)}, {op})", tensor)
            tensor.copy_(_reduced(parts, op))
        return _Done(list(tensors))

    allreduce_coalesced = allreduce
    reduce = allreduce  # type: ignore[assignment]  # torch leaves open what the ranks get that did not ask for the sum

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        root = self.ranks[opts.rootRank]
        for tensor in tensors:
            parts = self._gather(f"broadcast({_signature(tensor)}, {root})", tensor, only=root)
            if root not in parts:  # torch's broadcast of objects would read memory that nothing was written to
                raise RankLost(f"rank {root} was lost in a broadcast of its values to all ranks")
            if root != self._global_rank:
                tensor.copy_(parts[root])
        return _Done(list(tensors))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Gather every rank's tensor. If ranks have died meanwhile, the last outputs are zeros."""
        for places, tensor in zip(outputs or [()], inputs, strict=True):
            parts = list(self._gather(f"all_gather({_signature(tensor)})", tensor).values())
            for index, place in enumerate(places):
                place.copy_(parts[index]) if index < len(parts) else place.zero_()
        return _Done(list(outputs))

    gather = allgather  # type: ignore[assignment]  # with outputs on one rank only

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor, concatenated; see `allgather`."""
        self.allgather([output.view(-1).split(max(1, input.numel()))], [input.reshape(-1)])
        return _Done(output)

    _allgather_base = all_gather_single  # its name before torch 2.13

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return _Done(list(outputs))

    send = _not_offered("send")
    recv = _not_offered("recv")
    recv_anysource = _not_offered("recv")
    alltoall = _not_offered("all_to_all")
    alltoall_base = _not_offered("all_to_all_single")
    scatter = _not_offered("scatter")
    reduce_scatter = _not_offered("reduce_scatter")
    reduce_scatter_tensor_coalesced = _not_offered("reduce_scatter_tensor")
    reduce_scatter_single = _reduce_scatter_base = _not_offered("reduce_scatter_tensor")

    # --- How ----------------------------------------------------------------------------------------------------------

    def _gather(self, what: str, tensor: Tensor, only: int | None = None) -> dict[int, Tensor]:
        """Return every rank's tensor of one collective, by global rank, on the CPU.

        With ``only``, just that rank sends. A rank that dies before all of its bytes arrive is left out.
        """
        mine = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu() if tensor.numel() else torch.empty(0)
        data = mine.numpy().tobytes() if only in (None, self._global_rank) else b""
        nbytes = tensor.numel() * tensor.element_size()
        pieces: dict[int, list[bytes]] = {}
        for start in range(0, max(nbytes, 1), LARGEST_UPLOAD):
            for rank, piece in self.contribute(what, data[start : start + LARGEST_UPLOAD]):
                pieces.setdefault(rank, []).append(piece)
        whole = {rank: b"".join(parts) for rank, parts in pieces.items() if only in (None, rank)}
        return {rank: _tensor_of(data, tensor) for rank, data in whole.items() if len(data) == nbytes}

    def contribute(self, what: str, payload: bytes = b"") -> list[tuple[int, bytes]]:
        """Wait for all live ranks, and return their payloads as (global rank, bytes) in rank order.

        If another rank calls it with another ``what``, all ranks raise an error.
        """
        if (synchronize := self._synchronize()) is None:
            raise RuntimeError("the live world is not connected to a parameter server yet")
        parts = synchronize(what, payload)
        self.ranks = [rank for rank, _ in parts]
        return parts


def register() -> None:
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, devices=device_types(torch.accelerator.current_accelerator()))


def device_types(accelerator: torch.device | None) -> list[str]:
    """Return the types of the devices whose tensors a `LiveWorld` takes.

    An accelerator without a default backend is left out: torch would take this one as its default.
    """
    types = ["cpu", "cuda"]
    if accelerator is not None and accelerator.type in dist.Backend.default_device_backend_map:
        types.append(accelerator.type)
    return list(dict.fromkeys(types))


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> LiveWorld:
    return LiveWorld(rank, size)


def _op(opts: Any) -> Any:
    op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    for known in _REDUCE:
        if op == known:
            return known
    raise UnsupportedError(f"{op} is not offered across compute groups; use SUM, AVG, MIN, MAX or PRODUCT")


def _reduced(parts: dict[int, Tensor], op: Any) -> Tensor:
    total = reduce(_REDUCE[op], parts.values())
    return total / len(parts) if op == dist.ReduceOp.AVG else total


def _signature(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _tensor_of(data: bytes, like: Tensor) -> Tensor:
    if not data:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape)


def is_of_a_loss(error: BaseException) -> bool:
    """Return whether an error of a collective, by its words, is due to a rank or link that is gone."""
    signs = ("connect", "network", "socket", "broken pipe", "timed out", "timeout")
    return is_of_a_collective(error) and any(sign in str(_raised_first(error)).lower() for sign in signs)


def is_of_a_collective(error: BaseException) -> bool:
    """Return whether torch.distributed raised this error; gloo's errors have no class of their own."""
    names, error = ("gloo", "nccl"), _raised_first(error)
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(name in str(error).lower() for name in names)
    )


def _raised_first(error: BaseException) -> BaseException:
    """Return the error of a collective, also where torch's logging has replaced it."""
    # While a group computes, the default process group numbers its ranks from 0, and that may not find this rank.
    is_of_logging = type(error) is ValueError and "is not part of group" in str(error)
    return error.__context__ if is_of_logging and error.__context__ is not None else error
