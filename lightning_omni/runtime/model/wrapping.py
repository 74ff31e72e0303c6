"""The model on the ranks of a group: each holds all of it, in DistributedDataParallel, or a shard of it.

This is set up before training: wrapping, sharding, and the common initial weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_omni.runtime._private import ignored_by_ddp
from lightning_omni.runtime.checks.same_tensors import check_all_shared, make_alike
from lightning_omni.runtime.model.buffer_sync import check_dense
from lightning_omni.runtime.model.contiguous import contiguous
from lightning_omni.runtime.model.meshes import FSDP
from lightning_omni.runtime.model.sharded import average_over_replicas, is_sharded, shard, share_initial
from lightning_omni.runtime.parallel_state import ParallelState


class ModelWrapper:
    """The model, as the members of this rank's group hold it.

    Args:
        parallel: this rank's position in the run.
        not_reduced: returns the parameters whose gradients DDP does not average.

    Attributes:
        sharded: the module that the members hold together; None if each has all of it.
    """

    def __init__(self, parallel: ParallelState, not_reduced: Callable[[], Iterable[Parameter]]) -> None:
        self._parallel, self._not_reduced = parallel, not_reduced
        self.sharded: Module | None = None

    # --- Held by each rank -------------------------------------------------------------------------------------------

    def wrap(self, module: Module, ddp_options: dict[str, Any]) -> Module:
        """Wrap a module into DistributedDataParallel over the compute group; a group of one needs none.

        Args:
            module: the model, with its initial weights.
            ddp_options: arguments of DistributedDataParallel.
        """
        parallel = self._parallel
        if len(parallel.members) == 1:
            parallel.reduction.install(module, parallel.compute_group)
            return module
        with frozen(self._not_reduced()):
            options = parallel.reduction.ddp_options(module, ddp_options)
            wrapped = DistributedDataParallel(module, process_group=parallel.compute_group, init_sync=False, **options)
        parallel.reduction.install(wrapped, parallel.compute_group)
        return wrapped

    def broadcast_initial(self, module: Module) -> None:
        """Copy the parameters and buffers of rank 0 to all ranks, before training begins. All ranks call it.

        Raises:
            UnsupportedError: one of them is sparse, or is excluded from DDP although there are several groups.
            ConfigurationError: another rank has other parameters or buffers.
        """
        ignored = ignored_by_ddp(module)
        if len(self._parallel.topology.alive) > 1:
            check_all_shared(module)
        self._make_alike(module)
        named = [each for each in (*module.named_parameters(), *module.named_buffers()) if each[0] not in ignored]
        check_dense(named)
        self._parallel.process_groups.make(self._parallel.topology)
        take_from_rank_zero(named)

    def _make_alike(self, module: Module) -> None:
        groups = self._parallel.process_groups
        make_alike(
            module,
            self._parallel.rank,
            lambda numbers: groups.largest(numbers, dist.group.WORLD),
            may_reorder=not is_sharded(module),
        )

    # --- Held together -----------------------------------------------------------------------------------------------

    def shard(self, module: Module) -> None:
        """Shard a module over the ranks that hold a replica of it together. All ranks call it, before training.

        Args:
            module: see `lightning_omni.runtime.model.sharded.shard`. With a `ModelParallel` it is parallelized already.

        Raises:
            ConfigurationError: the module has other tensors on another rank.
        """
        self._make_alike(module)
        if isinstance(self._parallel.options.model_parallel, FSDP):
            shard(module, self._parallel.mesh)
        self.sharded = module
        self.average_over_replicas()

    def average_over_replicas(self) -> None:
        """Install or remove the hook by which a group's replicas of a sharded model average their gradients."""
        if self.sharded is not None:
            average_over_replicas(self.sharded, self._mean if self._parallel.replicas > 1 else None)

    def _mean(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=self._parallel.replica_group)
        gradient.div_(self._parallel.replicas)

    def share_initial(self) -> None:
        """Copy the initial weights of the recorder's replica to all others. All ranks call it, before training."""
        parallel = self._parallel
        # Other launchers' groups are not in this torch.distributed world: they read the server's weights.
        is_alone = len(parallel.holders.alive) == 1 and parallel.registration is None
        if self.sharded is not None and not is_alone and not parallel.ever_lost:
            share_initial(self.sharded, parallel.holders, parallel.torch_rank)


def take_from_rank_zero(named: Iterable[tuple[str, Tensor]]) -> None:
    """Copy the values of rank 0 to all ranks of the default process group."""
    for name, tensor in named:
        with contiguous(tensor, name) as memory:
            dist.broadcast(memory, src=0)


@contextmanager
def frozen(parameters: Iterable[Parameter]) -> Iterator[None]:
    """Freeze parameters while DDP is constructed: it waits for gradients, and those of merged heads never arrive."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
