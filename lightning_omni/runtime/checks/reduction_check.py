"""A check at first steps: a loop without Lightning must average its gradients in the compute group alone.

An unwrapped module trains, too: with the gradients of each group's leader, and without those of its other members.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_omni.errors import ConfigurationError, UnsupportedError

_TOLERANCE = 1e-3
"""Largest relative difference between sums of averaged gradients: members may have different kinds of devices."""


def ranks_elsewhere(what: Module | Optimizer, members: Collection[int]) -> set[int]:
    """Return the ranks outside ``members`` with which a module or optimizer has collectives, as DDP or ZeRO has."""
    group = getattr(what, "process_group", None)
    try:
        return set(dist.get_process_group_ranks(group)) - {*members} if isinstance(group, dist.ProcessGroup) else set()
    except KeyError:  # it was destroyed, for example by a failed loop, and no rank waits in it
        return set()


class ReductionCheck:
    """A check of gradients at an optimizer's first step: of the loop, of new groups, and of unfrozen parameters.

    Args:
        members: ranks of this rank's group.
        group: its process group.
        check_reduced: raises an error if DDP has not averaged the gradients of these parameters, for which others wait.
    """

    def __init__(
        self, members: Collection[int], group: Any, check_reduced: Callable[[Collection[Parameter]], None]
    ) -> None:
        self._members, self._group, self._check_reduced = members, group, check_reduced
        self._seen: dict[int, list[bool]] = {}
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Refuse calls in this context to modules that DDP has wrapped over ranks of other groups."""
        try:
            self._find_wrapped()
            yield
        finally:
            self._forget_wrapped()

    def renew(self, members: Collection[int], group: Any) -> None:
        """Check the first steps of newly formed groups; refuse modules that are still wrapped over the earlier ones."""
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
        """Compare gradients in the first step of each parameter; return the closure of the step, if there is one.

        Args:
            index: number of the optimizer.
            parameters: the parameters that it steps.
            closure: computes their gradients; None if they are computed already.

        Raises:
            ConfigurationError: the members of the group have not averaged the gradients.
        """
        if len(self._members) == 1:
            return closure
        parameters = list(parameters)
        flags, known = [each.requires_grad for each in parameters], self._seen.get(index, [])
        if flags == known:
            return closure
        self._seen[index] = flags
        before = [*known, *[False] * (len(flags) - len(known))]
        fresh = [each for each, now, then in zip(parameters, flags, before, strict=True) if now and not then]
        if not fresh:
            return closure
        if closure is None:
            self._compare(fresh)
            return None

        def checked() -> Any:
            loss = closure()
            if fresh:
                self._compare(fresh)
                fresh.clear()
            return loss

        return checked

    def _compare(self, parameters: Sequence[Parameter]) -> None:
        """Raise `ConfigurationError` if the members have different gradients. All members of the group call it."""
        self._check_reduced(parameters)
        gradients = [each.grad.detach() for each in parameters if each.grad is not None]
        sums = [torch.stack([each.real.sum().float(), each.abs().sum().float()]) for each in gradients]
        mine = torch.zeros(2, device=parameters[0].device)
        for each in sums:
            mine += each.to(mine.device)
        every = [torch.empty_like(mine) for _ in self._members]
        dist.all_gather(every, mine, group=self._group)
        both = torch.stack(every)
        scale = both[:, 1].max()
        if scale.isfinite() and bool((both - both[0]).abs().max() > _TOLERANCE * scale):
            raise ConfigurationError(
                "OmniOptimizer.step(): the members of this compute group have different gradients, and a group trains"
                " with their mean: use model = world.wrap(model) for what you call, again after world.regroup() and"
                " whenever parameters are unfrozen or added; or average gradients over world.compute_group before each"
                " step"
            )


def _refuse(others: Collection[int], module: Module, *_: Any) -> None:
    raise UnsupportedError(
        f"a {type(module).__name__} whose process group has ranks of other compute groups"
        f" ({', '.join(map(str, sorted(others)))}): groups train different numbers of batches, and would wait for each"
        " other in its collectives; use model = world.wrap(model) instead"
    )
