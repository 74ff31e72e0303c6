"""Asynchronous DiLoCo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_omni.checks import check_number, check_whole
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.contract import Push, Reply, ServerSide, Total, check_fragments, check_period
from lightning_omni.methods.diloco import check_outer
from lightning_omni.methods.model.fragments import state_of, states_in
from lightning_omni.methods.model.replica import copies
from lightning_omni.methods.overlap import LocalSteps


class _DelayedNesterov(ServerSide):
    """A server side that steps by delayed Nesterov.

    Each fragment has a block, the sum of the arrivals since the last full one, and momentum, a tensor for each weight.
    """

    method: AsyncDiLoCo

    def setup(self) -> None:
        # The size stays when groups join, because the parts of momentum applied within a block must add up to one.
        self._size = self.method.buffer or max(1, len(self.groups))
        fragments = [self.master.weights(number) for number in range(self.method.fragments)]
        self._blocks = [Total() for _ in fragments]
        self._momenta = [[torch.zeros_like(weight) for weight in weights] for weights in fragments]
        self._step_times: dict[int, float] = {}

    def receive(self, push: Push) -> list[Reply]:
        staleness, number = self.staleness_of(push), push.fragment or 0
        block, momentum = self._blocks[number], self._momenta[number]
        block.add(push.tensors)
        method, share = self.method, self.method.activation
        if block.count >= self._size:
            share = 1 - method.activation * self._size + method.activation
            self._fold(momentum, block.take(1 / self._size))
        self.master.add(push.tensors, -method.outer_lr / self._size, push.fragment)
        if share and method.outer_momentum:
            weights = self.master.weights(push.fragment)
            for weight, velocity, change in zip(weights, momentum, push.tensors, strict=True):
                if change is not None:
                    weight.sub_(velocity, alpha=method.outer_lr * share * method.outer_momentum)
        return [Reply(push.group, staleness, note=float(self._local_steps(push)))]

    def _fold(self, momentum: list[Tensor], mean: list[Tensor | None]) -> None:
        for velocity, change in zip(momentum, mean, strict=True):
            velocity.mul_(self.method.outer_momentum)
            if change is not None:
                velocity.add_(change)

    def _local_steps(self, push: Push) -> int:
        method = self.method
        if push.note > 0:
            self._step_times[push.group] = push.note
        if not method.dynamic_steps or push.group not in self._step_times:
            return method.push_period
        fastest = min(seconds for group, seconds in self._step_times.items() if group in self.groups)
        ratio = fastest / self._step_times[push.group]
        return max(1, max(method.min_steps, int(method.period * ratio)) // method.fragments)

    def grow(self, start: int) -> None:
        for number, (block, momentum) in enumerate(zip(self._blocks, self._momenta, strict=True)):
            weights = self.master.weights(number)
            block.reach(len(weights))
            momentum.extend(map(torch.zeros_like, weights[len(momentum) :]))

    def evict(self, group: int) -> list[Reply]:
        self._step_times.pop(group, None)
        return super().evict(group)

    def state(self) -> dict[str, Any]:
        each = zip(self._blocks, self._momenta, strict=True)
        states = [{"block": block.state(), "momentum": momentum} for block, momentum in each]
        return {**state_of(states), "step_times": dict(self._step_times)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for block, saved in zip(self._blocks, states_in(state), strict=True):
            block.load_state(saved["block"])
        self._momenta = [copies(saved["momentum"]) for saved in states_in(state)]
        self._step_times = {int(group): float(seconds) for group, seconds in state["step_times"].items()}


class AsyncDiLoCo(LocalSteps, frozen=True, kw_only=True, tag="async_diloco"):
    r"""Asynchronous local SGD with delayed Nesterov momentum (DN) and dynamic local updates (DyLU).

    Each group makes :math:`H_w` steps of the user's optimizer from the outer weights :math:`\theta` that it last read,
    and pushes :math:`\Delta_t = \theta_{read} - x`. The server applies the t-th arrival immediately, and updates the
    momentum only with every N-th, from the mean of the last N:

    .. math:: B \leftarrow B + \Delta_t; \quad \text{if } N | t: \; m \leftarrow \beta m + B/N, \;
        \theta \leftarrow \theta - \epsilon\bigl[(1 - cN + c)\beta m + \Delta_t/N\bigr], \; B \leftarrow 0;
        \quad \text{else } \theta \leftarrow \theta - \epsilon\bigl[c\beta m + \Delta_t/N\bigr]

    With c = 0, N arrivals from one :math:`\theta` make one Nesterov step along their mean. Slow groups make :math:`H_w
    = \lfloor H v_w / \max_{w'} v_{w'} \rfloor` local steps, for speeds v in steps per second, so that all arrive at
    about the same time.

    With P fragments, a group exchanges the next one every :math:`\lfloor H_w / P \rfloor` steps and overwrites its own
    with the answer. Each fragment has its own block, momentum and count t.

    Args:
        period: H, local steps of the fastest group between two exchanges of the same weight.
        outer_lr: :math:`\epsilon`, above 0. One arrival moves the weights by 1/N of it.
        outer_momentum: :math:`\beta`, from 0 to less than 1.
        buffer: N, pushes in one block; None takes the number of groups when they are formed.
        activation: c, 0 to 1/N: the part of the momentum that is applied with each arrival but the N-th.
        dynamic_steps: whether slow groups make fewer steps.
        min_steps: lower bound of :math:`H_w`; a group makes at least P in any case.
        fragments: P, fragments of equal bytes at the start, exchanged one after the other; P divides H.

    Raises:
        ConfigurationError: arguments are out of range, or do not go together.

    Example:
        >>> AsyncDiLoCo(period=50, dynamic_steps=False).outer_lr
        0.7

    References:
        Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling", arXiv:2401.09135 (algorithm 3;
        equation 6);
        Douillard et al. 2025, "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
        arXiv:2501.18512 (fragments; there at a barrier, and in flight while a group computes).
    """

    side = _DelayedNesterov
    period: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    buffer: int | None = None
    activation: float = 0.0
    dynamic_steps: bool = True  # type: ignore[misc]
    min_steps: int = 1
    fragments: int = 1  # type: ignore[misc]  # of other methods it is a class attribute

    def __post_init__(self) -> None:
        check_period(self.period)
        check_outer(self.outer_lr, self.outer_momentum)
        if self.buffer is not None:
            check_whole("buffer", self.buffer, "1 or more arrivals, or None for the number of groups", 1)
        most = 1 / (self.buffer or 1)
        shared = f"0 to {most:g}: momentum is shared out over the {self.buffer or 'N'} arrivals of a block"
        check_number("activation", self.activation, shared, 0, most)
        check_whole("min_steps", self.min_steps, f"1 to period={self.period}", 1, self.period)
        check_fragments(self.fragments, self.period)

    def check(self, groups: int) -> None:
        size = self.buffer or groups
        if self.activation > 1 / size:
            raise ConfigurationError(
                f"activation={self.activation}: with a buffer of {size} arrivals (the number of groups) pass 0 to"
                f" {1 / size:g}"
            )

    def changes_with_period(self, period: int) -> dict[str, Any]:
        return {**super().changes_with_period(period), "min_steps": min(self.min_steps, period)}
