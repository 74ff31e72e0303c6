"""The live world: a torch process group whose collectives the server carries out.

The server knows which ranks are alive, so no collective waits for dead ranks, and all survivors get the same
contributions. Small payloads (metrics, flags, names of checkpoints) are sent over the server's control socket, larger
ones over its data socket, and gradients never. Ranks are numbered by their index among the live ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_omni.errors import UnsupportedError
from lightning_omni.wire.messages import LARGEST_UPLOAD

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
    """The work of a collective that has finished when the call returns."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
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
    """A process group of all live ranks.

    Args:
        rank: this rank's global number.
        size: number of ranks at the start.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, unused-ignore]
        self._global_rank = rank  # until `connect` sets another
        self._live: list[int] = list(range(size))
        self._synchronize: Synchronize | None = None
        self._name = ""

    def connect(self, synchronize: Synchronize, rank: int) -> None:
        """Set the function that carries out the collectives, and this rank's number.

        Args:
            synchronize: the function.
            rank: this rank's number in the run, as in the results of ``synchronize``; not its index among the live
                ranks.
        """
        self._synchronize, self._global_rank = synchronize, rank

    @property
    def ranks(self) -> Sequence[int]:
        """Return the numbers of the live ranks, as of the last collective."""
        return self._live

    @ranks.setter
    def ranks(self, live: Sequence[int]) -> None:
        self._live = list(live)

    @property
    def group_name(self) -> Any:
        """Return the name by which functional collectives find this group; torch's own property needs a backend."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def size(self) -> int:
        return len(self._live)

    def rank(self) -> int:
        return self._live.index(self._global_rank)

    # --- Collectives, by the names that torch.distributed calls -------------------------------------------------------

    def barrier(self, opts: Any = None) -> dist.Work:
        self.contribute("barrier", b"")
        return _Done(None)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduce in rank order, so that every rank gets the same bits."""
        op = _op(opts)
        for tensor in tensors:
            parts = self._gather(f"all_reduce({_signature(tensor)}, {op})", tensor)
            tensor.copy_(_reduced(parts, op))
        return _Done(list(tensors))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Reduce as `allreduce` does; only the root keeps the result."""
        op = _op(opts)
        root = self._live[opts.rootRank]  # before ranks may die in the collective
        for tensor in tensors:
            parts = self._gather(f"reduce({_signature(tensor)}, {op}, {root})", tensor)
            if root == self._global_rank:
                tensor.copy_(_reduced(parts, op))
        return _Done(list(tensors))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        root = self._live[opts.rootRank]
        for tensor in tensors:
            parts = self._gather(f"broadcast({_signature(tensor)}, {root})", tensor, only=root)
            if root != self._global_rank and root in parts:
                tensor.copy_(parts[root])
        return _Done(list(tensors))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Gather every rank's tensor on every rank. If ranks have died meanwhile, the last outputs are zeros."""
        for places, tensor in zip(outputs, inputs, strict=True):
            parts = list(self._gather(f"all_gather({_signature(tensor)})", tensor).values())
            for index, place in enumerate(places):
                place.copy_(parts[index]) if index < len(parts) else place.zero_()
        return _Done(list(outputs))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor on every rank, concatenated. If ranks have died meanwhile, the end is zeros."""
        parts = list(self._gather(f"all_gather_single({_signature(input)})", input).values())
        flat = output.view(-1)
        flat.zero_()
        for index, part in enumerate(parts):
            flat[index * part.numel() : (index + 1) * part.numel()] = part.reshape(-1).to(flat.device)
        return _Done(output)

    _allgather_base = all_gather_single  # its name before torch 2.13

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Call `all_gather_single` for each of several tensors; functional collectives use it."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return _Done(list(outputs))

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        root = self._live[opts.rootRank]  # before ranks may die in the collective
        for index, tensor in enumerate(inputs):
            parts = self._gather(f"gather({_signature(tensor)}, {root})", tensor)
            if root == self._global_rank:
                for place, part in zip(outputs[index], parts.values(), strict=False):
                    place.copy_(part)
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

        With ``only``, just that rank sends its tensor. A rank that dies before all of its bytes arrive is left out.
        """
        mine = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu() if tensor.numel() else torch.empty(0)
        data = mine.numpy().tobytes() if only in (None, self._global_rank) else b""
        nbytes = tensor.numel() * tensor.element_size()
        pieces: dict[int, list[bytes]] = {}
        for start in range(0, max(nbytes, 1), LARGEST_UPLOAD):
            for rank, piece in self.contribute(what, data[start : start + LARGEST_UPLOAD]):
                pieces.setdefault(rank, []).append(piece)
        gathered = {}
        for rank, parts in pieces.items():
            whole = b"".join(parts)
            if len(whole) == nbytes and (only is None or rank == only):
                gathered[rank] = _tensor_of(whole, tensor)
        return gathered

    def contribute(self, what: str, payload: bytes = b"") -> list[tuple[int, bytes]]:
        """Wait for all live ranks, and return their payloads.

        Args:
            what: description of the collective; if other ranks call another one, all ranks raise an error.
            payload: this rank's bytes for the others.

        Returns:
            The payloads of all, as (global rank, bytes) in rank order.
        """
        if self._synchronize is None:
            raise RuntimeError("the live world is not connected to a parameter server yet")
        parts = self._synchronize(what, payload)
        self._live = [rank for rank, _ in parts]
        return parts


def register() -> None:
    """Register the backend ``"omni"``, with which ``torch.distributed.new_group`` returns a `LiveWorld`."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, devices=device_types(torch.accelerator.current_accelerator()))


def device_types(accelerator: torch.device | None) -> list[str]:
    """Return the types of the devices whose tensors a `LiveWorld` takes.

    The type of an accelerator without a default backend of torch is left out: torch would take this one as its default.
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
