"""One optimizer's master weights at the server: pushes in, answers out.

Rule 1: staleness is counted by the method, against the clock kept in `Master`, and recorded here and nowhere else.
Rule 2: a push with a NaN or an infinity in it is refused and counted, never applied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_omni.errors import MalformedMessage, ProtocolError
from lightning_omni.methods import Master, Method, Push, Reply
from lightning_omni.methods.master import Resolve, rebuild
from lightning_omni.methods.totals import Total
from lightning_omni.protocol.layout import DTYPES, Layout
from lightning_omni.protocol.messages import PushMessage
from lightning_omni.protocol.sensing import Sensing


class Shard:
    """Master weights of one optimizer, in one flat buffer, with the server side of the method.

    Args:
        description: the optimizer, from `lightning_omni.methods.master.describe`; None if it steps at the workers.
        weights: initial value of each of its parameters; copied.
        clock: updates that these already contain.
        method: the method.
        groups: numbers of the groups that take part.
        resolve: turns the optimizer's class path into the class.
        state: of the method's server side, to go on from.

    Attributes:
        is_head: whether its gradients are computed here, and nobody pushes any.
        sensing: senses the total momentum; None if it cannot be, or is not to be.
    """

    is_head = False

    def __init__(
        self,
        description: Mapping[str, Any] | None,
        weights: Mapping[str, Tensor],
        clock: int,
        method: Method,
        groups: Iterable[int],
        resolve: Resolve,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if clock < 0:
            raise MalformedMessage(f"the clock cannot be {clock}")
        if (description is None) != (method.steps_at == "worker"):
            raise MalformedMessage(f"with {type(method).__name__} the optimizer steps at the {method.steps_at}")
        self.layout = Layout.of(weights)
        self.buffer = self.layout.empty()
        parameters = {}
        for view, (name, value) in zip(self.layout.views(self.buffer), weights.items(), strict=True):
            view.copy_(value)
            parameters[name] = Parameter(view, requires_grad=view.is_floating_point() or view.is_complex())
        optimizer = rebuild(description, parameters, resolve) if description is not None else None
        self.master = Master(parameters, optimizer, clock)
        self.method_side = method.server_side(self.master, groups)
        if state is not None:
            self.method_side.load_state(state)
        self.staleness: Counter[int] = Counter()
        self.by_group: dict[int, Counter[int]] = {}
        self.refused_in_row: Counter[int] = Counter()
        self.refused = 0
        self._answer: Tensor | None = None
        self._mean = Total()
        self._averaging: dict[int, bool] = {}
        self.sensing = self._new_sensing(method)

    def change_method(self, method: Method, groups: Iterable[int]) -> None:
        """New groups, or another method: its server side starts afresh on the same weights."""
        self.method_side = method.server_side(self.master, groups)
        self.by_group.clear()
        self.refused_in_row.clear()
        self._mean.clear()
        self._averaging = {}
        self.sensing = self._new_sensing(method)  # other groups, other staleness

    def _new_sensing(self, method: Method) -> Sensing | None:
        if self.is_head or method.steps_at != "server":
            return None
        return Sensing.of(self.master, self.layout, self.buffer)

    # --- Pushes ------------------------------------------------------------------------------------------------------

    def payload_layout(self, message: PushMessage) -> Layout:
        """How the tensors lie in a push's payload.

        Raises:
            MalformedMessage: wrong number of parameters or bytes.
        """
        if len(message.present) != len(self.layout.specs):
            raise MalformedMessage(
                f"the push speaks of {len(message.present)} parameters, the optimizer has {len(self.layout.specs)}"
            )
        layout = self.layout.subset(message.present)
        if message.nbytes != layout.nbytes:
            raise MalformedMessage(f"the push has {message.nbytes} bytes, {layout.nbytes} were expected")
        return layout

    def push(self, group: int, message: PushMessage, payload: Tensor) -> list[Reply] | None:
        """Merges a push.

        Returns:
            The method's replies, or None if the push was refused because it is not finite.

        Raises:
            ProtocolError: the push cannot be (read in the future, other parameter groups).
        """
        layout = self.payload_layout(message)
        views = iter(layout.views(payload))
        tensors = [next(views) if there else None for there in message.present]
        return self.take(group, message, tensors, finite=_sums_up(layout, payload), payload=payload)

    def take(
        self,
        group: int,
        message: PushMessage,
        tensors: Sequence[Tensor | None],
        finite: bool = False,
        payload: Tensor | None = None,
    ) -> list[Reply] | None:
        """Merges a push whose tensors are at hand; ``finite`` if they are known to be. See `push`.

        With their ``payload`` it is sensed, too.
        """
        self._check(message)
        if not (finite or _is_finite(tensors)):
            self._refuse(group)
            return None
        self.refused_in_row[group] = 0
        push = Push(group, message.read_at, tensors, message.hyperparameters, message.note)
        staleness = self.method_side.staleness_of(push)
        self.staleness[staleness] += 1
        self.by_group.setdefault(group, Counter())[staleness] += 1
        with torch.no_grad():
            if self.sensing is None or payload is None:
                return self.method_side.receive(push)
            self.sensing.before(push.read_at, message.present, payload)
            replies = self.method_side.receive(push)
            self.sensing.after()
            return replies

    def payload_of(self, reply: Reply) -> Tensor:
        """The bytes that answer a push; valid until the next call."""
        if reply.tensors is None:
            return self.buffer
        if self._answer is None:
            self._answer = self.layout.empty()
        for view, tensor in zip(self.layout.views(self._answer), reply.tensors, strict=True):
            view.copy_(tensor)
        return self._answer

    def _check(self, message: PushMessage) -> None:
        if not 0 <= message.read_at <= self.master.clock:
            raise ProtocolError(f"weights of clock {message.read_at} were never sent; the clock is {self.master.clock}")
        if not math.isfinite(message.note):
            raise ProtocolError(f"the note of a push is a number, not {message.note}")
        optimizer = self.master.optimizer
        theirs = optimizer.param_groups if optimizer is not None else []
        if len(message.hyperparameters) != len(theirs):
            raise ProtocolError(
                f"the push has {len(message.hyperparameters)} parameter groups, the optimizer"
                f" {len(theirs)}; add_param_group after training began needs groups=1"
            )
        for group, settings in zip(theirs, message.hyperparameters, strict=True):
            for name, value in settings.items():
                if name in group and name != "params" and not _fits(value, group[name]):
                    raise ProtocolError(f"the optimizer cannot take {name}={value!r}; it is {group[name]!r}")

    def _refuse(self, group: int) -> None:
        self.refused += 1
        self.refused_in_row[group] += 1

    # --- The mean of all groups' own weights -------------------------------------------------------------------------

    def average(self, group: int, payload: Tensor) -> None:
        """A group's own weights, for the mean. Weights that are not finite are refused and counted, not averaged."""
        if group in self._averaging:
            raise ProtocolError(f"group {group} has handed its weights in already")
        weights = self.layout.views(payload)
        if good := _is_finite(weights):
            self._mean.add(weights)
            self.refused_in_row[group] = 0
        else:
            self._refuse(group)
        self._averaging[group] = good

    def averaged(self, live: Iterable[int]) -> list[tuple[int, bool]]:
        """Once all live groups have come: the master weights are their mean.

        Returns:
            Whom to send them to, and whether their own weights are in it.
        """
        if not self._averaging or not set(live) <= self._averaging.keys():
            return []
        if self._mean.count:
            mean = self._mean.scaled(1 / self._mean.count)
            for weight, value in zip(self.master.weights(), mean, strict=True):
                weight.copy_(value)  # type: ignore[arg-type]  # all are there
            if self.sensing is not None:
                self.sensing.forget()
        self._mean.clear()
        answered, self._averaging = self._averaging, {}
        return [(group, good) for group, good in answered.items() if group in live]


def _fits(value: Any, present: Any) -> bool:
    """Whether a hyperparameter is of the kind that the optimizer has, and finite."""
    if isinstance(present, (list, tuple)):
        return isinstance(value, (list, tuple)) and len(value) == len(present) and all(map(_fits, value, present))
    if isinstance(present, bool):  # fused optimizers take no number for a switch
        return isinstance(value, bool)
    if isinstance(present, (int, float)):
        return isinstance(value, (bool, int, float)) and (math.isfinite(value) or not math.isfinite(present))
    return present is None or value is None or type(value) is type(present)


def _sums_up(layout: Layout, payload: Tensor) -> bool:
    """Whether a payload is surely finite: one sum over all tensors at once, and over what lies between them."""
    kinds = {spec.dtype for spec in layout.specs}
    if len(kinds) != 1:
        return False
    dtype = DTYPES[kinds.pop()]
    whole = payload[: payload.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return bool(torch.isfinite(whole.sum()))


def _is_finite(tensors: Sequence[Tensor | None]) -> bool:
    present = [tensor for tensor in tensors if tensor is not None]
    # One pass that allocates nothing: a sum is finite only if every number is. (Huge numbers may overflow the sum,
    # hence the second look.)
    if all(torch.isfinite(tensor.sum()) for tensor in present):
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in present)
