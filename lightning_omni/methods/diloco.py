"""DiLoCo: many local steps, then one outer step along the mean of what they changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_omni.checks import check_number
from lightning_omni.methods.contract import Barrier, Exchange, GroupSide, Method, NextGradient, Push, Step, check_period
from lightning_omni.methods.replica import Replica
from lightning_omni.methods.totals import Total


class _OuterStep(Barrier):
    """One outer step when all working groups have pushed."""

    method: DiLoCo

    def setup(self) -> None:
        super().setup()
        self._outer = torch.optim.SGD(
            list(self.master.parameters.values()),
            lr=self.method.outer_lr,
            momentum=self.method.outer_momentum,
            nesterov=self.method.outer_momentum > 0,
        )

    def merge(self, total: Total, last: Push) -> None:
        self.master.step(self._outer, total.scaled(1 / total.count))

    def grow(self, start: int) -> None:
        super().grow(start)
        self._outer.param_groups[0]["params"].extend(list(self.master.parameters.values())[start:])

    def state(self) -> dict[str, Any]:
        return {**super().state(), "outer": self._outer.state_dict()["state"]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._outer.load_state_dict({**self._outer.state_dict(), "state": state["outer"]})


class DiLoCo(Method, frozen=True, kw_only=True, tag="diloco"):
    r"""DiLoCo: local training with an outer Nesterov optimizer at the server.

    Each group makes H steps of the user's optimizer from the outer weights :math:`\theta`; then, at a barrier,

    .. math:: \Delta = \tfrac1p \sum_i (\theta - x_i), \qquad m \leftarrow \beta m + \Delta, \qquad
        \theta \leftarrow \theta - \eta_o (\Delta + \beta m), \qquad x_i \leftarrow \theta

    The inner optimizer's state stays at the worker and is neither reset nor averaged.

    Args:
        period: H, inner steps between two outer ones, in steps.
        outer_lr: :math:`\eta_o`, above 0.
        outer_momentum: :math:`\beta`, from 0 to less than 1.

    The model that is evaluated is the server's outer weights.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> DiLoCo(period=50)
        DiLoCo(period=50, outer_lr=0.7, outer_momentum=0.9)

    References:
        Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105.
    """

    steps_at = "worker"
    side = _OuterStep
    period: int = 500
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        check_period(self.period)
        check_outer(self.outer_lr, self.outer_momentum)

    def group_side(self, replica: Replica) -> GroupSide:
        """``period`` inner steps; push what they changed; go on from the outer weights."""
        memory = replica.memory
        while True:
            gradient = yield NextGradient()
            outer = replica.remember("outer")
            yield Step(gradient)
            memory["steps"] = memory.get("steps", 0) + 1
            if memory["steps"] == self.period:
                pulled = yield Exchange(replica.change(since=outer, factor=-1.0), replica.clock)
                replica.go_on_from(pulled)
                memory.clear()


def check_outer(outer_lr: float, outer_momentum: float) -> None:
    """Raises `ConfigurationError` unless these make an outer optimizer."""
    check_number("outer_lr", outer_lr, "a number above 0; 0.7 is usual", above=0, below=float("inf"))
    check_number("outer_momentum", outer_momentum, "0 <= outer_momentum < 1; 0.9 is usual", 0, below=1)
