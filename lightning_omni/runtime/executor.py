"""The ways in which ranks train together: as one group (plain data parallelism), or as several that exchange."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.methods import Gradient, NextGradient
from lightning_omni.methods.model.replica import Replica
from lightning_omni.methods.model.server_optimizer import (
    check_servable,
    has_own_step,
    hyperparameters_of,
    scaled_rates,
)
from lightning_omni.runtime.model.external_writes import ExternalWrites
from lightning_omni.runtime.model.merged_head import RemoteHead
from lightning_omni.runtime.model.meshes import shown
from lightning_omni.runtime.model.parameter_groups import ParameterGroups
from lightning_omni.runtime.model.replica import Part
from lightning_omni.runtime.model.wrapping import ranks_elsewhere
from lightning_omni.runtime.parallel_state import ParallelState
from lightning_omni.runtime.server_exchange import ServerExchange
from lightning_omni.transport.connections import Control
from lightning_omni.tuning.model.steps import StepTimer
from lightning_omni.wire.partition import check_by_parts


class Executor:
    """The operations in which one group and several groups differ; this base class is for one group.

    Attributes:
        exchanges: whether groups exchange: several, or those that join on their own.
        is_stepping: whether `Exchanging.step` runs: also in step hooks, but not in its first call of the closure.
    """

    exchanges: ClassVar[bool] = False

    def __init__(self, heads: Sequence[RemoteHead]) -> None:
        self._heads = heads
        self.is_stepping = False

    @property
    def control(self) -> Control | None:
        return None

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise `UnsupportedError` if this optimizer cannot be stepped in this way."""

    def check_parts(self) -> None:
        """Raise `UnsupportedError` if the optimizers' parameters cannot be trained in this way."""

    def place_heads(self) -> None:
        for head in self._heads:
            head.remove()

    def not_reduced(self) -> list[Parameter]:
        """Return the parameters whose gradients DDP does not average."""
        return []

    def follow_writes(self) -> None:
        """Distribute writes of user code; see `ExternalWrites.follow`."""

    def enter_compute(self) -> None:
        """Begin or continue the training epoch. All synchronized, or joining, ranks call it."""

    def enter_world(self, module: Module | None, wants_stop: bool, what: str) -> bool:
        """Synchronize the groups: see `World.enter_world`. Return whether a rank wants to stop.

        ``what`` names the call, the same on all ranks. With one group, or synchronized ones, return False.
        """
        return False

    def step(
        self, index: int, optimizer: Optimizer, closure: Callable[[], Any] | None, arguments: Mapping[str, Any]
    ) -> Any:
        """Make one step of optimizer ``index``; see `OmniOptimizer.step`."""
        closures = () if closure is None else (closure,)
        return optimizer.step(*closures, **arguments)


class Exchanging(Executor):
    """The operations of groups that exchange."""

    exchanges = True

    def __init__(
        self,
        parallel: ParallelState,
        exchange: ServerExchange,
        parameter_groups: ParameterGroups,
        edits: ExternalWrites,
        heads: Sequence[RemoteHead],
    ) -> None:
        super().__init__(heads)
        self._parallel, self._exchange, self._parameter_groups, self._external_writes = (
            parallel,
            exchange,
            parameter_groups,
            edits,
        )
        self._timers: dict[int, tuple[StepTimer, float]] = {}  # with the seconds in exchanges until then

    @property
    @override
    def control(self) -> Control | None:
        return self._parallel.control

    # --- What is trained ---------------------------------------------------------------------------------------------

    @override
    def check_optimizer(self, optimizer: Optimizer) -> None:
        if has_own_step(optimizer):
            raise UnsupportedError(
                f"step was replaced on this {type(optimizer).__name__} itself, and groups step as its class does, so"
                " that what replaced it would not be called: override step in a subclass, register a hook"
                " (optimizer.register_step_post_hook), or use groups=1"
            )
        if self._parallel.registration is None and len(ranks_elsewhere(optimizer, ())) == self._parallel.size > 1:
            _check_collectives(optimizer, ())  # with all ranks, whatever groups will be formed
        if self._parallel.is_sharded:
            check_by_parts(self._parallel.method, optimizer, shown(self._parallel.options.model_parallel))
        if not self._parallel.steps_at_worker or isinstance(optimizer, torch.optim.SparseAdam):
            check_servable(optimizer)
        elif isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS evaluates the loss several times in one step, between which no group may exchange weights; use"
                " groups=1, or a first-order optimizer such as SGD or AdamW"
            )

    @override
    def check_parts(self) -> None:
        seen: set[int] = set()
        for part in self._parallel.parts:
            _check_collectives(part.optimizer, self._parallel.torch_members)
            for name, parameter in part.replica.parameters.items():
                if id(parameter) in seen:
                    raise UnsupportedError(
                        f"the parameter {name} is in two optimizers; the server keeps one master copy of it, moved by"
                        " one optimizer: give it to one of them, or use groups=1"
                    )
                seen.add(id(parameter))
                if self._parallel.steps_at_worker and not (parameter.is_floating_point() or parameter.is_complex()):
                    raise UnsupportedError(
                        f"the parameter {name} is of {parameter.dtype}, and {type(self._parallel.method).__name__}"
                        " averages weights; leave it out of the optimizer, or use groups=1"
                    )

    @override
    def place_heads(self) -> None:
        for head in self._heads:
            if self._parallel.control is None:
                head.remove()
            else:
                head.install()

    @override
    def not_reduced(self) -> list[Parameter]:
        return [each for part in self._parallel.parts if part.head is not None for each in part.replica.ordered]

    # --- Phases ------------------------------------------------------------------------------------------------------

    @override
    def follow_writes(self) -> None:
        for head in self._heads:
            head.remove()  # if weights were written, the submodule itself is sent to the server
        self._external_writes.follow(self._parameter_groups.check_alike)
        self.place_heads()

    @override
    def enter_compute(self) -> None:
        parallel = self._parallel
        if not parallel.is_computing and not parallel.is_entering:
            self.follow_writes()
        parallel.process_groups.use(parallel.compute_group)
        parallel.is_computing, parallel.is_entering = True, False
        self._timers.clear()
        for part in parallel.parts:
            part.replica.restore(but_frozen=parallel.method.pushes_weights)

    @override
    def enter_world(self, module: Module | None, wants_stop: bool, what: str) -> bool:
        parallel = self._parallel
        if not parallel.is_computing:
            return False
        for head in self._heads:
            head.release()
        for part in parallel.parts:
            self._external_writes.check(part)
        self._exchange.finish_exchanges()
        parallel.process_groups.use(parallel.process_groups.live)
        parallel.is_computing = False
        stops = any(stop for _, stop in parallel.process_groups.live.contribute(what, b"stop" if wants_stop else b""))
        self._pull()
        self._external_writes.merge(module)
        parallel.joined_since_sync = False
        return stops

    def _pull(self) -> None:
        parallel = self._parallel
        for index, part in enumerate(parallel.parts):
            if parallel.steps_at_worker:
                part.replica.stash()
            pulled = self._exchange.ask_weights(parallel.core.synchronize(index))
            if pulled.refused:  # the group's own weights are not finite, and not in the mean: they are dropped
                part.replica.restart(pulled)
                part.replica.abandon()
            else:
                part.replica.load(pulled)
        self._parameter_groups.read_beyond()

    # --- The step ----------------------------------------------------------------------------------------------------

    @override
    def step(
        self, index: int, optimizer: Optimizer, closure: Callable[[], Any] | None, arguments: Mapping[str, Any]
    ) -> Any:
        part = self._parallel.parts[index]
        if self._parallel.control is None:
            raise ConfigurationError(
                "OmniOptimizer.step(): several groups exchange in each step, and are connected only inside `with"
                " world.training():` of the World that the optimizer was made with; put the training loop into it, and"
                " make other OmniOptimizers for another World"
            )

        if arguments and not self._parallel.steps_at_worker:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step() is called with {', '.join(arguments)}, which is not sent to the"
                " parameter server, where it steps; use a method whose optimizer steps on the ranks"
                ' (method="local_sgd", say), or groups=1'
            )

        def step(*_: Any) -> Any:
            return self._step(index, part, optimizer, closure, arguments)

        if not self._parallel.steps_at_worker:
            # The optimizer steps at the server, but users' step hooks are on this rank: an average of weights, say.
            step = Optimizer.profile_hook_step(step)
        before, self.is_stepping = self.is_stepping, True  # a hook, or a closure, may step another optimizer
        try:
            loss = step(optimizer, closure)
        finally:
            self.is_stepping = before
        optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn of a missing step
        return loss

    def _step(
        self,
        index: int,
        part: Part,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None,
        arguments: Mapping[str, Any],
    ) -> Any:
        loss = None
        if closure is not None:
            self.is_stepping = False
            with torch.enable_grad():
                loss = closure()
            self.is_stepping = True
        self._parallel.reduction.check_reduced(part.replica.ordered)
        for head in self._heads:
            head.step_done()
        self._external_writes.check(part)
        with torch.no_grad(), scaled_rates(optimizer, self._parallel.rate_factor):
            self._parameter_groups.follow(index)
            are_needed = not self._parallel.steps_at_worker
            hyperparameters = hyperparameters_of(optimizer, part.replica.ever_held, are_needed)
            with evaluating(part.replica, closure, loss, arguments):
                gradients = part.replica.gradients()
                self._advance(index, Gradient(gradients, hyperparameters))
                gradients.clear()  # the method may still refer to them, and the next ones need this memory
        return loss

    def _advance(self, index: int, gradient: Gradient) -> None:
        core, exchange = self._parallel.core, self._exchange
        action = core.gradient(index, gradient)
        while not isinstance(action, NextGradient):
            action = core.answer(index, exchange.do(index, action))
        timer, before = self._timers.get(index, (StepTimer(), 0.0))
        now = exchange.traffic.seconds  # also of other optimizers' exchanges since this one's last step
        self._timers[index] = timer, now
        took = timer.done(now - before)
        if took is not None:
            core.step_took(index, took)


@contextmanager
def evaluating(
    replica: Replica, closure: Callable[[], Any] | None, loss: Any, arguments: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Provide the closure to the worker's own optimizer in this context: it may evaluate the loss again, as SAM does.

    Unless the optimizer has written weights or gradients before, its first call returns ``loss``, the closure's last
    result, with the gradients as they are.
    """
    replica.closure, replica.loss, replica.arguments = closure, loss, arguments or {}
    try:
        yield
    finally:
        replica.closure, replica.loss, replica.arguments = None, None, {}


def _check_collectives(optimizer: Optimizer, members: Collection[int]) -> None:
    if others := ranks_elsewhere(optimizer, members):
        raise UnsupportedError(
            f"a {type(optimizer).__name__} whose process group has ranks of other compute groups"
            f" ({', '.join(map(str, sorted(others)))}): groups make different numbers of steps, and would wait for each"
            " other in its collectives; use the optimizer that it wraps"
        )
