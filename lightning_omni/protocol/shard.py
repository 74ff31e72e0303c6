"""One optimizer's master weights at the server: pushes in, weights out.

Rule 1: staleness is counted by the method, against the clock kept in `Master`, and recorded here and nowhere else.
Rule 2: a gradient with a NaN or an infinity in it is refused and counted, never applied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_omni.errors import MalformedMessage, ProtocolError
from lightning_omni.methods import Gradient, Master, Method, Push, Reply
from lightning_omni.methods.master import Resolve, rebuild
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.messages import PushMessage


class Shard:
    """Master weights of one optimizer, in one flat buffer, with the server side of the method.

    Args:
        description: the optimizer, from `lightning_omni.methods.master.describe`.
        weights: initial value of each of its parameters; copied.
        clock: updates that these already contain.
        method: the method.
        resolve: turns the optimizer's class path into the class.
    """

    def __init__(
        self,
        description: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        clock: int,
        method: Method,
        resolve: Resolve,
    ) -> None:
        if clock < 0:
            raise MalformedMessage(f"the clock cannot be {clock}")
        self.layout = Layout.of(weights)
        self.buffer = self.layout.empty()
        parameters = {}
        for view, (name, value) in zip(self.layout.views(self.buffer), weights.items(), strict=True):
            view.copy_(value)
            parameters[name] = Parameter(view, requires_grad=view.is_floating_point() or view.is_complex())
        self.master = Master(parameters, rebuild(description, parameters, resolve), clock)
        self.method_side = method.server_side(self.master)
        self.staleness: Counter[int] = Counter()
        self.by_group: dict[int, Counter[int]] = {}
        self.refused_in_row: Counter[int] = Counter()
        self.refused = 0
        self._subsets: dict[tuple[bool, ...], Layout] = {}

    def change_method(self, method: Method) -> None:
        """New groups, or another method: its server side starts afresh on the same weights."""
        self.method_side = method.server_side(self.master)
        self.by_group.clear()
        self.refused_in_row.clear()

    def payload_layout(self, message: PushMessage) -> Layout:
        """How the gradient lies in a push's payload.

        Raises:
            MalformedMessage: wrong number of parameters or bytes.
        """
        present = message.present
        if present not in self._subsets:
            if len(present) != len(self.layout.specs):
                raise MalformedMessage(
                    f"the push speaks of {len(present)} parameters, the optimizer has {len(self.layout.specs)}"
                )
            self._subsets[present] = self.layout.subset(present)
        layout = self._subsets[present]
        if message.nbytes != layout.nbytes:
            raise MalformedMessage(f"the gradient has {message.nbytes} bytes, {layout.nbytes} were expected")
        return layout

    def push(self, group: int, message: PushMessage, payload: Tensor) -> list[Reply] | None:
        """Merges a push.

        Returns:
            The method's replies, or None if the gradient was refused because it is not finite.

        Raises:
            ProtocolError: the push cannot be (read in the future, other parameter groups).
        """
        if not 0 <= message.read_at <= self.master.clock:
            raise ProtocolError(f"weights of clock {message.read_at} were never sent; the clock is {self.master.clock}")
        if len(message.hyperparameters) != len(self.master.optimizer.param_groups):
            raise ProtocolError(
                f"the push has {len(message.hyperparameters)} parameter groups, the optimizer"
                f" {len(self.master.optimizer.param_groups)}; add_param_group after training began needs groups=1"
            )
        for group_, settings in zip(self.master.optimizer.param_groups, message.hyperparameters, strict=True):
            for name, value in settings.items():
                if name in group_ and name != "params" and not _fits(value, group_[name]):
                    raise ProtocolError(f"the optimizer cannot take {name}={value!r}; it is {group_[name]!r}")
        views = iter(self.payload_layout(message).views(payload))
        gradients = [next(views) if there else None for there in message.present]
        if not _is_finite(gradients):
            self.refused += 1
            self.refused_in_row[group] += 1
            return None
        self.refused_in_row[group] = 0
        replies = self.method_side.receive(Push(group, message.read_at, Gradient(gradients, message.hyperparameters)))
        for reply in replies:
            self.staleness[reply.staleness] += 1
            self.by_group.setdefault(reply.group, Counter())[reply.staleness] += 1
        return replies


def _fits(value: Any, present: Any) -> bool:
    """Whether a hyperparameter is of the kind that the optimizer has, and finite."""
    if isinstance(present, (list, tuple)):
        return isinstance(value, (list, tuple)) and len(value) == len(present) and all(map(_fits, value, present))
    if isinstance(present, (bool, int, float)):
        return isinstance(value, (bool, int, float)) and (math.isfinite(value) or not math.isfinite(present))
    return present is None or value is None or type(value) is type(present)


def _is_finite(tensors: list[Tensor | None]) -> bool:
    present = [tensor for tensor in tensors if tensor is not None]
    # One pass that allocates nothing: a sum is finite only if every number is. (Huge numbers may overflow the sum,
    # hence the second look.)
    if all(torch.isfinite(tensor.sum()) for tensor in present):
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in present)
