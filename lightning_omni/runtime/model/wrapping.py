"""The model on the ranks of a group, in DDP or sharded, and a check that gradients are averages."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.runtime._private import ignored_by_ddp
from lightning_omni.runtime.model.buffer_sync import check_dense
from lightning_omni.runtime.model.meshes import FSDP
from lightning_omni.runtime.model.sharded import average_over_replicas, is_sharded, shard, share_initial
from lightning_omni.runtime.model.tensor_sync import check_all_shared, gathered, make_alike, take_from_rank_zero
from lightning_omni.runtime.parallel_state import ParallelState


class ModelWrapper:
    """The wrapping of the model for this rank's group, in DDP or by shards.

    Attributes:
        sharded: the module that the members hold together, from `shard` on; None if each has all of it.
    """

    def __init__(self, parallel: ParallelState, not_reduced: Callable[[], Iterable[Parameter]]) -> None:
        self._parallel, self._not_reduced = parallel, not_reduced
        self.sharded: Module | None = None

    # --- Held by each rank -------------------------------------------------------------------------------------------

    def wrap(self, module: Module, ddp_options: dict[str, Any]) -> Module:
        """Wrap a module into DDP over the compute group; a group of one needs none."""
        parallel = self._parallel
        if len(parallel.members) == 1:
            signature(DistributedDataParallel).bind(module, process_group=None, **ddp_options)  # refuses what DDP does
            parallel.reduction.install(module, parallel.compute_group)
            return module
        with frozen(self._not_reduced()):
            options = parallel.reduction.ddp_options(module, ddp_options)
            wrapped = DistributedDataParallel(module, process_group=parallel.compute_group, init_sync=False, **options)
        if len(parallel.topology.alive) > 1:
            wrapped.join_hook = _refuse_join  # type: ignore[method-assign]
        parallel.reduction.install(wrapped, parallel.compute_group)
        return wrapped

    def broadcast_initial(self, module: Module) -> None:
        """Copy tensors, but those that DDP ignores, from rank 0 of the default process group. All its ranks call it.

        Before groups are formed, it creates their process groups, too.

        Raises:
            UnsupportedError: one is sparse, or a trained one is excluded from DDP although there are several groups.
            ConfigurationError: another rank has other parameters or buffers.
        """
        ignored = ignored_by_ddp(module)
        if len(self._parallel.topology.alive) > 1:
            check_all_shared(module)
        self._make_alike(module)
        named = [each for each in (*module.named_parameters(), *module.named_buffers()) if each[0] not in ignored]
        check_dense(named)
        if self._parallel.control is None:  # otherwise the live ranks made it when groups were formed
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

        With a `ModelParallel` the module is parallelized already.

        Raises:
            ConfigurationError: the module has other tensors on another rank.
            UnsupportedError: it cannot be sharded, or averaged over replicas.
        """
        self._make_alike(module)
        if isinstance(self._parallel.options.model_parallel, FSDP):
            shard(module, self._parallel.mesh)
        self.sharded = module
        self.average_over_replicas()

    def average_over_replicas(self) -> None:
        if self.sharded is not None:
            average_over_replicas(self.sharded, self._mean if self._parallel.replicas > 1 else None)

    def _mean(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=self._parallel.replica_group)
        gradient.div_(self._parallel.replicas)

    def share_initial(self) -> None:
        parallel = self._parallel
        # Other launchers' groups are not in this torch.distributed world: they read the server's weights.
        is_alone = len(parallel.holders.alive) == 1 and parallel.registration is None
        is_whole = dist.get_world_size() == parallel.size
        if self.sharded is not None and not is_alone and parallel.control is None and is_whole:
            share_initial(self.sharded, parallel.holders, parallel.torch_rank)


@contextmanager
def frozen(parameters: Iterable[Parameter]) -> Iterator[None]:
    """Freeze parameters while DDP is constructed: it would wait for gradients that never arrive."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


# --- The check of a loop's first steps --------------------------------------------------------------------------------

# An unwrapped module trains, too: with the gradients of each group's leader, and without those of its other members.

_TOLERANCE = 1e-3
"""Largest relative difference between sums of averaged gradients: members may have different kinds of devices."""


def ranks_elsewhere(what: Module | Optimizer, members: Collection[int]) -> set[int]:
    """Return the ranks outside ``members`` with which a module or optimizer has collectives."""
    group = getattr(what, "process_group", None)
    try:
        return set(dist.get_process_group_ranks(group)) - {*members} if isinstance(group, dist.ProcessGroup) else set()
    except KeyError:  # it was destroyed, for example by a failed loop, and no rank waits in it
        return set()


class ReductionCheck:
    """A check of gradients at an optimizer's first step: of the loop, of new groups, and of other trained parameters.

    ``check_reduced`` raises an error if DDP has not averaged these parameters' gradients.
    """

    def __init__(
        self, members: Collection[int], group: Any, check_reduced: Callable[[Collection[Parameter]], None]
    ) -> None:
        self._members, self._group, self._check_reduced = members, group, check_reduced
        self._seen: dict[int, set[Parameter]] = {}
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Refuse calls in this context to modules that DDP has already wrapped over ranks of other groups."""
        try:
            self._find_wrapped()
            yield
        finally:
            self._forget_wrapped()

    def renew(self, members: Collection[int], group: Any) -> None:
        """Check the first steps of new groups; refuse modules that are wrapped over ranks of other groups."""
        self._members, self._group = members, group
        self._seen.clear()
        self._forget_wrapped()
        self._find_wrapped()

    def _find_wrapped(self) -> None:
        # Only these modules get a hook, because torch.compile warns of a global one.
        wrapped = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
        self._handles = [
            each.register_forward_pre_hook(partial(_refuse, others))
            for each in wrapped
            if (others := ranks_elsewhere(each, self._members))
        ]

    def _forget_wrapped(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def checked(
        self, index: int, parameters: Iterable[Parameter], closure: Callable[[], Any] | None
    ) -> Callable[[], Any] | None:
        """Compare gradients in the first step of these parameters; return the step's closure.

        A closure compares them when it is called.

        Raises:
            ConfigurationError: the members of the group have not averaged the gradients.
            RuntimeError: DDP has left some unaveraged.
        """
        if len(self._members) == 1:
            return closure
        trained = [each for each in parameters if each.requires_grad]
        if not trained or self._seen.get(index) == set(trained):
            return closure
        self._seen[index] = set(trained)
        if closure is None:
            self._compare(trained)
            return None

        def checked() -> Any:
            loss = closure()
            if trained:  # it is the first evaluation
                self._compare(trained)
                trained.clear()
            return loss

        return checked

    def _compare(self, parameters: Sequence[Parameter]) -> None:
        self._check_reduced(parameters)
        gradients = [each.grad.detach() for each in parameters if each.grad is not None]
        sums = [torch.stack([each.real.sum().float(), each.abs().sum().float()]) for each in gradients]
        mine = torch.zeros(2, device=parameters[0].device)
        for each in sums:
            mine += each.to(mine.device)
        both = torch.stack(gathered(mine, self._group))
        scale = both[:, 1].max()
        if scale.isfinite() and bool((both - both[0]).abs().max() > _TOLERANCE * scale):
            raise ConfigurationError(
                "OmniOptimizer.step(): the members of this compute group have different gradients, and a group trains"
                " with their mean: use model = world.wrap(model) for what you call, again after world.regroup() and"
                " whenever parameters are unfrozen or added; or average gradients over world.compute_group before each"
                " step; and give the GradScaler of each member the same state"
            )


def _refuse(others: Collection[int], module: Module, *_: Any) -> None:
    raise UnsupportedError(
        f"a {type(module).__name__} whose process group has ranks of other compute groups"
        f" ({', '.join(map(str, sorted(others)))}): groups train different numbers of batches, and would wait for each"
        " other in its collectives; use model = world.wrap(model) instead"
    )


def _refuse_join(**_: Any) -> Any:
    raise UnsupportedError(
        "DistributedDataParallel.join() in a group of several: members without further batches would take part in the"
        " others' backward passes, but not in the exchanges of their steps, for which these would wait; give each"
        " member of a group the same number of batches, or use groups=1"
    )
