"""The optimizers of a run, by number: those that groups push to, and merged heads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_omni.errors import MalformedMessage, ProtocolError, Refused
from lightning_omni.methods import AsyncSGD, Method
from lightning_omni.methods.model.head import MergedHead, clip
from lightning_omni.methods.model.modules import ResolveModule, rebuild_module
from lightning_omni.methods.model.server_optimizer import Resolve
from lightning_omni.server.parameters.served_parameters import ServedParameters
from lightning_omni.wire.layout import DTYPES
from lightning_omni.wire.messages import HeadBackward, HeadForward, PushMessage

# --- Merged heads -----------------------------------------------------------------------------------------------------

# Rule 1: exclusive access lasts from one group's forward pass to the end of its backward pass, with no other in
# between. So the optimizer steps the weights that were read, and staleness is 0 by construction. It is counted all the
# same, from the clock at the forward pass.
# Rule 2: access is granted in order of request. A group that dies or gives up during its access leaves the head
# unchanged.

SMOOTHING = 0.9
"""Weight of the past in the mean duration of an access."""


@dataclass(frozen=True)
class HeadRequest:
    """A group's batch at the head, ``[arguments, keyword arguments]``; the rank at ``peer`` waits."""

    group: int
    peer: bytes
    message: HeadForward
    inputs: Any


class ServedHead(ServedParameters):
    """A merged head, with the user's optimizer over its weights.

    Args:
        description: as for `ServedParameters`, as are most others; never None.
        head: ``{"name": of the submodule, "module": from describe_module, "seed": of its random numbers}``.

    Attributes:
        access_time: recent mean duration of an access, in seconds.
    """

    is_head = True

    def __init__(
        self,
        description: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        clock: int,
        head: Mapping[str, Any],
        groups: Iterable[int],
        resolve: Resolve,
        resolve_module: ResolveModule,
    ) -> None:
        super().__init__(description, weights, clock, AsyncSGD(), groups, resolve)
        prefix = f"{head['name']}."
        parameters = {name.removeprefix(prefix): p for name, p in self.master.parameters.items()}
        module = rebuild_module(head["module"], parameters, resolve_module)
        self._head = MergedHead(module, parameters, int(head["seed"]))
        self._waiting: deque[HeadRequest] = deque()
        self._holder: HeadRequest | None = None
        self._began, self._read_at = 0.0, 0
        self.access_time = 0.0

    def change_method(self, method: Method, groups: Iterable[int]) -> None:
        """Adopt new groups, but not their method; cancel all accesses."""
        super().change_method(AsyncSGD(), groups)
        self._waiting.clear()
        self._release()

    @property
    def holder(self) -> int | None:
        return self._holder.group if self._holder is not None else None

    def add_request(self, request: HeadRequest) -> None:
        if request.group == self.holder or any(other.group == request.group for other in self._waiting):
            raise ProtocolError(f"group {request.group} came to the merged head twice in one step")
        self._waiting.append(request)

    def grant_access(self, now: float) -> HeadRequest | None:
        if self._holder is not None or not self._waiting:
            return None
        self._holder, self._began, self._read_at = self._waiting.popleft(), now, self.master.clock
        return self._holder

    def forward(self, request: HeadRequest) -> Any:
        """Return the head's output for a group's batch, a tree of tensors and plain values."""
        message = request.message
        if message.autocast and message.autocast not in DTYPES:
            raise MalformedMessage(f"there is no dtype {message.autocast}")
        try:
            args, kwargs = request.inputs
            if message.exclusive:
                for weight, flag in zip(self.master.parameters.values(), message.trainable, strict=True):
                    weight.requires_grad_(flag)
            return self._head.forward(
                args,
                kwargs,
                training=message.training,
                autocast=DTYPES[message.autocast] if message.autocast else None,
                exclusive=message.exclusive,
            )
        except Exception as error:  # the user's own module may raise any error
            raise Refused("head", f"{type(error).__name__}: {error}") from error

    def backward(
        self, group: int, message: HeadBackward, gradients: Any, number: int
    ) -> tuple[list[Tensor | None], int, bool]:
        """Step the head along a group's gradients.

        Returns:
            The gradients of the inputs, the clock of the weights that were read, and whether the step was applied: the
            weights' gradients were finite.
        """
        if self.holder != group:
            raise ProtocolError(f"group {group} has no access to the merged head; the holder is {self.holder}")
        try:
            passed = self._head.backward(list(gradients), message.scale, copies=bool(message.clip))
            with torch.no_grad():
                clip(passed.parameters, message.clip, message.clip_algorithm)
            push = PushMessage(
                optimizer=number,
                read_at=self._read_at,
                present=tuple(gradient is not None for gradient in passed.parameters),
                hyperparameters=message.hyperparameters,
                epoch=-1,
                trained=0,
                nbytes=0,
            )
            applied = self.take(group, push, passed.parameters) is not None
        except ProtocolError:
            raise
        except Exception as error:  # the user's own module or optimizer may raise any error
            raise Refused("head", f"{type(error).__name__}: {error}") from error
        return passed.inputs, self._read_at, applied

    def release(self, now: float) -> None:
        lasted = max(0.0, now - self._began)
        self.access_time = SMOOTHING * self.access_time + (1 - SMOOTHING) * lasted if self.access_time else lasted
        self._release()

    def forget(self, group: int) -> None:
        """End or cancel a group's access; nothing of it is applied."""
        self._waiting = deque(request for request in self._waiting if request.group != group)
        if self.holder == group:
            self._release()

    def _release(self) -> None:
        self._holder = None
        self._head.abandon()


# --- All optimizers ---------------------------------------------------------------------------------------------------


class ParameterStore:
    """The optimizers that the server holds, by number; none before the recorder has uploaded the weights.

    ``pushed`` are those that groups push to, ``heads`` the merged heads.
    """

    def __init__(self) -> None:
        self.hold(())

    def hold(self, optimizers: Sequence[ServedParameters]) -> None:
        self.all = list(optimizers)
        self.pushed = [(number, optimizer) for number, optimizer in enumerate(optimizers) if not optimizer.is_head]
        self.heads = [
            (number, optimizer) for number, optimizer in enumerate(optimizers) if isinstance(optimizer, ServedHead)
        ]

    @property
    def clock(self) -> int:
        return sum([optimizer.master.clock for _, optimizer in self.pushed])

    def optimizer(self, number: int) -> ServedParameters:
        if not 0 <= number < len(self.all):
            raise ProtocolError(f"there is no optimizer {number}; the server holds {len(self.all)}")
        return self.all[number]

    def head(self, number: int) -> ServedHead:
        optimizer = self.optimizer(number)
        if not isinstance(optimizer, ServedHead):
            raise ProtocolError(f"optimizer {number} is no merged head")
        return optimizer
