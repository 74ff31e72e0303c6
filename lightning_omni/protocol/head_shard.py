"""A merged head at the server: master weights whose gradients are computed where they are, one group at a time.

Rule 1: exclusive access is one group's forward pass and the backward pass that follows, with no other in between; so
the weights that are stepped are those that were read, and staleness is 0 by construction. It is counted all the same,
from the clock at which the forward pass read them.
Rule 2: access is granted in order of arrival. A group that dies or gives up meanwhile leaves the head as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_omni.errors import MalformedMessage, ProtocolError, Refused
from lightning_omni.methods import AsyncSGD, Method
from lightning_omni.methods.head import MergedHead, clip
from lightning_omni.methods.master import Resolve
from lightning_omni.methods.modules import ResolveModule, rebuild_module
from lightning_omni.protocol.layout import DTYPES
from lightning_omni.protocol.messages import HeadBackward, HeadForward, PushMessage
from lightning_omni.protocol.shard import Shard

SMOOTHING = 0.9
"""Weight of the past in the mean length of an access."""


@dataclass(frozen=True)
class Arrival:
    """A group's batch at the head.

    Attributes:
        group: number of the group.
        peer: the connection that its leader waits on.
        message: what it said.
        inputs: ``[arguments, keyword arguments]``.
    """

    group: int
    peer: bytes
    message: HeadForward
    inputs: Any


@dataclass(frozen=True)
class Stepped:
    """What came of a group's gradients.

    Attributes:
        inputs: the gradients of what came into the head.
        read_at: updates that the head's weights contained when they were read.
        applied: whether the gradients of the weights were finite.
    """

    inputs: list[Tensor | None]
    read_at: int
    applied: bool


class HeadShard(Shard):
    """A merged head, with the user's optimizer over its weights.

    Args:
        description: the optimizer, as for `Shard`; always given, for the head is stepped here.
        weights: as for `Shard`.
        clock: as for `Shard`.
        head: ``{"name": of the submodule, "module": from describe_module, "seed": of its random numbers}``.
        groups: numbers of the groups that take part.
        resolve: finds the class of the optimizer's class path.
        resolve_module: finds the class of a module's class path.

    Attributes:
        access_time: seconds that an access takes lately, on average.
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
        self._waiting: deque[Arrival] = deque()
        self._holder: Arrival | None = None
        self._began, self._read_at = 0.0, 0
        self.access_time = 0.0

    def change_method(self, method: Method, groups: Iterable[int]) -> None:
        """New groups. Whatever method they follow, the head stays where it is."""
        super().change_method(AsyncSGD(), groups)
        self._waiting.clear()
        self._release()

    @property
    def holder(self) -> int | None:
        """The group that has exclusive access."""
        return self._holder.group if self._holder is not None else None

    def arrive(self, arrival: Arrival) -> None:
        """A group's batch comes, and gets in line.

        Raises:
            ProtocolError: the group is in line already.
        """
        if arrival.group == self.holder or any(other.group == arrival.group for other in self._waiting):
            raise ProtocolError(f"group {arrival.group} came to the merged head twice in one step")
        self._waiting.append(arrival)

    def grant_access(self, now: float) -> Arrival | None:
        """The next in line, if no group has access."""
        if self._holder is not None or not self._waiting:
            return None
        self._holder, self._began, self._read_at = self._waiting.popleft(), now, self.master.clock
        return self._holder

    def forward(self, arrival: Arrival) -> Any:
        """The head's output for a group's batch, a tree of tensors and plain values.

        Raises:
            MalformedMessage: the inputs are none.
            Refused: the submodule raised an error.
        """
        message = arrival.message
        if message.autocast and message.autocast not in DTYPES:
            raise MalformedMessage(f"there is no dtype {message.autocast}")
        try:
            args, kwargs = arrival.inputs
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
        except Exception as error:  # the user's own module raises what it likes
            raise Refused("head", f"{type(error).__name__}: {error}") from error

    def backward(self, group: int, message: HeadBackward, gradients: Any, number: int) -> Stepped:
        """Steps the head along a group's gradients.

        Raises:
            ProtocolError: the group has no access.
            MalformedMessage: the optimizer cannot have these hyperparameters.
            Refused: the submodule or the optimizer raised an error; they may be no gradients of what the head gave.
        """
        if self.holder != group:
            raise ProtocolError(f"group {group} has no access to the merged head; the holder is {self.holder}")
        try:
            passed = self._head.backward(list(gradients), message.scale)
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
        except Exception as error:  # the user's own module or optimizer raises what it likes
            raise Refused("head", f"{type(error).__name__}: {error}") from error
        return Stepped(passed.inputs, self._read_at, applied)

    def release(self, now: float) -> None:
        """The access is over, and took from when it was granted until now."""
        lasted = max(0.0, now - self._began)
        self.access_time = SMOOTHING * self.access_time + (1 - SMOOTHING) * lasted if self.access_time else lasted
        self._release()

    def forget(self, group: int) -> None:
        """A group gives its access up, or is gone: nothing of it is applied."""
        self._waiting = deque(arrival for arrival in self._waiting if arrival.group != group)
        if self.holder == group:
            self._release()

    def _release(self) -> None:
        self._holder = None
        self._head.abandon()
