"""DiLoCo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from lightning_omni.checks import check_number
from lightning_omni.methods.contract import Push, Total
from lightning_omni.methods.model.fragments import states_in
from lightning_omni.methods.overlap import PacedBarrier, Streaming


class _OuterStep(PacedBarrier):
    method: DiLoCo

    def setup(self) -> None:
        super().setup()
        momentum = self.method.outer_momentum
        self._outer = [
            outer_sgd(parameters, self.method.outer_lr, momentum)
            for parameters in map(self.master.fragment, range(self.method.fragments))
        ]

    def merge(self, total: Total, last: Push) -> None:
        self.master.step(self._outer[last.fragment or 0], total.scaled(1 / total.count), last.fragment)

    def grow(self, start: int) -> None:
        super().grow(start)
        for number, outer in enumerate(self._outer):
            parameters = outer.param_groups[0]["params"]
            parameters.extend(self.master.fragment(number)[len(parameters) :])

    def state_of_fragment(self, number: int) -> dict[str, Any]:
        return {**super().state_of_fragment(number), "outer": self._outer[number].state_dict()["state"]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        for outer, saved in zip(self._outer, states_in(state), strict=True):
            outer.load_state_dict({**outer.state_dict(), "state": saved["outer"]})


class DiLoCo(Streaming, frozen=True, kw_only=True, tag="diloco"):
    r"""DiLoCo: local training with an outer Nesterov optimizer at the server.

    Each group makes H steps of the user's optimizer from the outer weights :math:`\theta`; then, at a barrier,

    .. math:: \Delta = \tfrac1n \sum_i (\theta - x_i), \qquad m \leftarrow \beta m + \Delta, \qquad
        \theta \leftarrow \theta - \eta_o (\Delta + \beta m), \qquad x_i \leftarrow \theta

    for n groups. The inner optimizer's state is neither reset nor averaged.

    Streaming DiLoCo: with P fragments, groups exchange one of them, p, every H/P steps. Its change is captured after
    step t, and the server makes the outer step with it while the groups make :math:`\tau` further steps; then

    .. math:: x_{i,p} \leftarrow \alpha\, x_{i,p} + (1 - \alpha)\, \theta_p

    and the next change of this fragment is measured from :math:`\theta_p`. P = 1, :math:`\tau = 0` and :math:`\alpha =
    0` is DiLoCo.

    Args:
        period: H, inner steps between two outer ones of the same weight.
        outer_lr: :math:`\eta_o`, above 0.
        outer_momentum: :math:`\beta`, from 0 to less than 1.
        fragments: P, of equal bytes at the start; divides ``period``.
        delay: :math:`\tau`, steps that a group makes while a fragment is in flight, fewer than H/P; 0 waits. Runs
            with P = 1 refuse a delay above 0.
        alpha: :math:`\alpha`, the weight that a group gives to its own parameters, from 0 to less than 1. With 0 a
            group loses its last :math:`\tau` steps, unless ``keep_steps``.
        keep_steps: whether the group adds the change of these steps to :math:`\theta_p`; needs some, and no ``alpha``.
        dynamic_steps: whether slow groups make fewer steps, in proportion to their speed.

    Raises:
        ConfigurationError: arguments are out of range, or do not go together.

    Example:
        >>> DiLoCo(period=48, fragments=4, delay=2, alpha=0.5)  # doctest: +ELLIPSIS
        DiLoCo(period=48, fragments=4, delay=2, alpha=0.5, ..., outer_lr=0.7, outer_momentum=0.9)

    References:
        Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105;
        Douillard et al. 2025, "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
        arXiv:2501.18512.
    """

    side = _OuterStep
    period: int = 500
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_outer(self.outer_lr, self.outer_momentum)


def outer_sgd(parameters: Sequence[Parameter], lr: float, momentum: float) -> torch.optim.SGD:
    """Return the outer optimizer; ``parameters`` may be empty, since a server's share may lack some fragments."""
    return torch.optim.SGD([{"params": list(parameters)}], lr=lr, momentum=momentum, nesterov=momentum > 0)


def check_outer(outer_lr: float, outer_momentum: float) -> None:
    check_number("outer_lr", outer_lr, "a number above 0; 0.7 is usual", above=0, below=float("inf"))
    check_number("outer_momentum", outer_momentum, "0 <= outer_momentum < 1; 0.9 is usual", 0, below=1)
