"""A guard against weights that a loop without Lightning moves by itself, and that groups would not exchange.

With an optimizer that the user has not wrapped, each group would train a model of its own, without any error.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakSet, ref

import torch
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.methods.model.master import held_by
from lightning_omni.runtime.executor import Executor
from lightning_omni.runtime.model.sharded import local_of
from lightning_omni.runtime.parallel_state import ParallelState

_log = logging.getLogger(__name__)

_REMEDY = (
    "groups would exchange nothing of it, and each would train a model of its own: wrap every optimizer before `with"
    " world.training():`, optimizer = OmniOptimizer(optimizer, world), and step that"
)


class RawStepGuard:
    """A guard against steps without an `OmniOptimizer` of the world, while several groups train."""

    def __init__(self, parallel: ParallelState, executor: Callable[[], Executor]) -> None:
        self._parallel, self._executor = parallel, executor
        self._wrapped: list[ref[Module]] = []
        self._stranger = ""

    def wrapped(self, module: Module) -> None:
        """Record that the world has wrapped a module, whose weights its groups are to train together."""
        self._wrapped.append(ref(module))
        if self._executor().exchanges:
            _watch_outside()
            _outside.add(self)

    def warn_outside(self, optimizer: Optimizer) -> None:
        """Warn once of a step outside of a loop, where gradients are averaged in the group at most."""
        if self._parallel.control is not None or set(held_by(optimizer)).isdisjoint(self._weights()):
            return
        _outside.discard(self)
        modules = {id(module()) for module in self._wrapped}
        # `isinstance` would ask proxies for their class, which may be gone.
        wrappers = (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))
        if self._parallel.rank or any(
            id(each.module) in modules and each.process_group.size() == self._parallel.size for each in wrappers
        ):
            return
        _log.warning(
            "%s.step() outside of `with world.training():` moves weights of a module that world.wrap() has wrapped for"
            " groups: unless your program averages the gradients of all ranks, each group trains a model of its own."
            " Put the loop into `with world.training():`, with an OmniOptimizer, or, for plain DistributedDataParallel,"
            " wrap the module in it",
            type(optimizer).__name__,
        )

    @contextmanager
    def watch(self, steps: Callable[[], int]) -> Iterator[None]:
        """Watch the steps of all optimizers in this context; ``steps`` returns the number of the world's own steps.

        Raises:
            ConfigurationError: the loop ends, and weights have moved in it by other means alone.
        """
        self._stranger = ""
        before = self._sums() if self._executor().exchanges and not self._parallel.parts else []
        guard = register_optimizer_step_pre_hook(self._refuse)
        try:
            yield
        finally:
            guard.remove()
        if steps() or not self._executor().exchanges:
            return
        if self._stranger:
            raise ConfigurationError(
                f"world.training(): no OmniOptimizer of this world has stepped, and {self._stranger} has; {_REMEDY}"
            )
        if before and before != self._sums():
            raise ConfigurationError(
                f"world.training(): no OmniOptimizer was made, and the weights of the module have moved; {_REMEDY}"
            )

    def _refuse(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse the step of an optimizer that would move weights without an exchange."""
        parallel, executor = self._parallel, self._executor()
        if not executor.exchanges or executor.is_called or (parallel.steps_at_worker and not parallel.is_computing):
            return
        name = type(optimizer).__name__
        if any(part.optimizer is optimizer for part in parallel.parts):
            raise UnsupportedError(
                f"{name}.step() would move this rank's weights, and groups would exchange nothing; call step() of the"
                " OmniOptimizer that wraps it"
            )
        moved = set(held_by(optimizer))
        for part in parallel.parts:
            if not moved.isdisjoint(part.replica.ordered):
                raise UnsupportedError(
                    f"{name}.step() would move weights of {type(part.optimizer).__name__}, which is one of the group's:"
                    " call its step(closure), that of the OmniOptimizer, in which groups exchange, with a closure that"
                    " computes the loss and its gradients"
                )
        if not parallel.is_computing:  # perhaps the model is evaluated, by a classifier that is trained on top of it
            return
        if not parallel.parts or not moved.isdisjoint(self._weights()):
            raise ConfigurationError(f"{name}.step() of an optimizer that no OmniOptimizer wraps; {_REMEDY}")
        self._stranger = name

    def _weights(self) -> Iterator[Parameter]:
        for module in self._wrapped:
            if (alive := module()) is not None:
                yield from alive.parameters()

    def _sums(self) -> list[int]:
        """Return a sum over the bytes of each weight, which changes when the weight moves."""
        return [int(local_of(each).contiguous().view(-1).view(torch.uint8).sum()) for each in self._weights()]


_outside: WeakSet[RawStepGuard] = WeakSet()
"""The guards that have not warned yet of steps outside of loops."""


@cache
def _watch_outside() -> None:
    """Watch the steps of all optimizers from now on: no hook can be removed while hooks are called."""

    def warn(optimizer: Optimizer, *_: Any) -> None:
        for guard in list(_outside):
            guard.warn_outside(optimizer)

    register_optimizer_step_pre_hook(warn)
