"""How the ranks train together: as one group, which is plain data parallelism, or as several that exchange.

`World` has one of each and asks that which its groups call for (`World.executor`). What is the same for both stands in
`World`; what differs stands here, and what one group does is next to nothing: no server is in its path.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.errors import UnsupportedError
from lightning_omni.methods import Gradient, NextGradient
from lightning_omni.methods.master import check_servable, hyperparameters_of
from lightning_omni.optimizer.channel import Channel
from lightning_omni.optimizer.edits import Edits
from lightning_omni.optimizer.head import RemoteHead
from lightning_omni.optimizer.place import Place
from lightning_omni.optimizer.structure import Structures
from lightning_omni.performance.step_timer import StepTimer
from lightning_omni.protocol.transport import Control


class Executor(ABC):
    """What ranks do in a way of training together.

    Attributes:
        exchanges: whether groups train apart and exchange.
    """

    exchanges: ClassVar[bool]

    @property
    @abstractmethod
    def control(self) -> Control | None:
        """The connection on which data is leased and ranks meet while they train; None if neither needs one."""

    @abstractmethod
    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises `UnsupportedError` if this optimizer cannot be stepped so."""

    @abstractmethod
    def check_parts(self) -> None:
        """Raises `UnsupportedError` if what the optimizers hold cannot be trained so."""

    @abstractmethod
    def place_heads(self) -> None:
        """Merged heads are put where they are trained."""

    @abstractmethod
    def not_reduced(self) -> list[Parameter]:
        """Parameters whose gradients are none of DDP's."""

    @abstractmethod
    def enter_compute(self) -> None:
        """The training epoch begins or goes on."""

    @abstractmethod
    def enter_world(self, buffers: Iterable[Tensor], wants_stop: bool) -> bool:
        """The ranks meet: see `World.enter_world`. Returns whether any of them wants to stop."""

    @abstractmethod
    def is_finite(self, parameters: Iterable[Parameter]) -> bool:
        """Whether the gradient of the last step was, known alike to all members of a group without a word.

        Args:
            parameters: of the model.
        """

    @abstractmethod
    def step(self, index: int, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """One step of an optimizer, on every rank of the group. Returns what the closure returns.

        Args:
            index: its number among the parts.
            optimizer: the user's.
            closure: computes loss and gradients, as for any torch optimizer.
        """


class Local(Executor):
    """One group: DistributedDataParallel as it is. Nothing is exchanged, so there is nothing to do.

    Args:
        heads: the merged heads, which are modules like others here.
    """

    exchanges = False

    def __init__(self, heads: Sequence[RemoteHead]) -> None:
        self._heads = heads

    @property
    def control(self) -> None:
        return None

    def check_optimizer(self, optimizer: Optimizer) -> None:
        pass

    def check_parts(self) -> None:
        pass

    def place_heads(self) -> None:
        for head in self._heads:
            head.remove()

    def not_reduced(self) -> list[Parameter]:
        return []

    def enter_compute(self) -> None:
        pass

    def enter_world(self, buffers: Iterable[Tensor], wants_stop: bool) -> bool:
        return False

    def is_finite(self, parameters: Iterable[Parameter]) -> bool:
        # The same gradient on every rank, and it is not finite if one rank's loss is not.
        gradients = [each.grad.detach() for each in parameters if each.grad is not None]
        return math.isfinite(sum(float(gradient.float().abs().sum()) for gradient in gradients))

    def step(self, index: int, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        return optimizer.step(closure) if closure is not None else optimizer.step()


class Exchanging(Executor):
    """Several groups, each of which trains by itself and exchanges with the server or with others.

    Args:
        place: this rank's, in the run.
        channel: its way to the server and to other groups.
        structures: follows the optimizers' parameter groups.
        edits: follows what others write.
        heads: the merged heads, which are at the server here.
    """

    exchanges = True

    def __init__(
        self, place: Place, channel: Channel, structures: Structures, edits: Edits, heads: Sequence[RemoteHead]
    ) -> None:
        self._place, self._channel, self._structures, self._edits = place, channel, structures, edits
        self._heads = heads
        self._timers: dict[int, StepTimer] = {}

    @property
    def control(self) -> Control | None:
        return self._place.control

    # --- What is trained ---------------------------------------------------------------------------------------------

    def check_optimizer(self, optimizer: Optimizer) -> None:
        if not self._place.steps_at_worker or isinstance(optimizer, torch.optim.SparseAdam):
            check_servable(optimizer)
        elif isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS evaluates the loss several times in one step, between which no group may exchange weights; use"
                " groups=1, or a first-order optimizer such as SGD or AdamW"
            )

    def check_parts(self) -> None:
        seen: set[int] = set()
        for part in self._place.parts:
            for name, parameter in part.replica.parameters.items():
                if id(parameter) in seen:
                    raise UnsupportedError(
                        f"the parameter {name} is in two optimizers; the server keeps one master copy of it, moved by"
                        " one optimizer: give it to one of them, or use groups=1"
                    )
                seen.add(id(parameter))

    def place_heads(self) -> None:
        for head in self._heads:
            if self._place.control is None:
                head.remove()
            else:
                head.install()

    def not_reduced(self) -> list[Parameter]:
        return [each for part in self._place.parts if part.head is not None for each in part.replica.ordered]

    # --- Phases ------------------------------------------------------------------------------------------------------

    def enter_compute(self) -> None:
        place = self._place
        if not place.is_computing:
            self._edits.follow()
        place.process_groups.use(place.compute_group)
        place.is_computing = True
        self._timers.clear()
        for part in place.parts:
            part.replica.take_up()

    def enter_world(self, buffers: Iterable[Tensor], wants_stop: bool) -> bool:
        place = self._place
        if not place.is_computing:
            return False
        for head in self._heads:
            head.release()
        for part in place.parts:
            self._edits.check(part)
        place.process_groups.use(place.process_groups.live)
        place.is_computing = False
        stops = any(place.agree([int(wants_stop)]))  # a barrier, too
        self._pull()
        self._average([*buffers, *self._edits.others_written()])
        self._edits.others_followed()
        return stops

    def _pull(self) -> None:
        """Every rank gets the weights to evaluate, of all optimizers."""
        place = self._place
        for index, part in enumerate(place.parts):
            if place.steps_here(part):
                part.replica.put_aside()
            pulled = self._channel.ask_weights(place.core.synchronize(index))
            if pulled.refused:  # the own weights are not finite, and not in the mean: they do not come back
                part.replica.restart(pulled)
                part.replica.abandon()
            else:
                part.replica.load(pulled)
        self._structures.read_beyond()

    def _average(self, buffers: Iterable[Tensor]) -> None:
        """The mean over groups of every floating-point buffer; of whole numbers (they count things) the largest."""
        everything = [torch.view_as_real(b) if b.is_complex() else b for b in buffers]
        floating = [b for b in everything if b.is_floating_point()]
        counting = [b for b in everything if not b.is_floating_point() and b.dtype != torch.bool]
        if floating:
            # The last number counts the leaders that spoke, so that all ranks divide by the same.
            flat = torch.cat([*(b.detach().double().cpu().flatten() for b in floating), torch.ones(1).double()])
            if not self._place.is_leader:
                flat.zero_()  # not multiplied: a mask may hold infinities
            dist.all_reduce(flat)
            _scatter(flat[:-1] / flat[-1], floating)
        if counting:
            flat = torch.cat([b.detach().long().cpu().flatten() for b in counting])
            dist.all_reduce(flat, op=dist.ReduceOp.MAX)
            _scatter(flat, counting)

    def is_finite(self, parameters: Iterable[Parameter]) -> bool:
        return self._place.core.heard.applied

    # --- The step ----------------------------------------------------------------------------------------------------

    def step(self, index: int, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        loss, part = None, self._place.parts[index]
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for head in self._heads:
            head.step_done()
        self._edits.check(part)
        with torch.no_grad():
            self._structures.follow(index)
            hyperparameters = hyperparameters_of(optimizer, part.replica.ever_held)
            self._advance(index, Gradient(part.replica.gradients(), hyperparameters))
        optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn of a missing step
        return loss

    def _advance(self, index: int, gradient: Gradient) -> None:
        """The group goes on from this gradient to the next."""
        core, channel = self._place.core, self._channel
        elsewhere = channel.traffic.seconds
        action = core.gradient(index, gradient)
        while not isinstance(action, NextGradient):
            action = core.answer(index, channel.do(index, action))
        took = self._timers.setdefault(index, StepTimer()).done(channel.traffic.seconds - elsewhere)
        if took is not None:
            core.step_took(index, took)


def _scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for part, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
        tensor.copy_(part.view_as(tensor))
