"""Delay-compensated asynchronous SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_omni.checks import check_number
from lightning_omni.methods.contract import Method, Push, Reply, ServerSide
from lightning_omni.methods.model.replica import copies
from lightning_omni.methods.model.server_optimizer import directions_of

_EPSILON = 1e-7


class _Compensate(ServerSide):
    method: DelayCompensated

    def setup(self) -> None:
        start = copies(self.master.weights())
        self._read = dict.fromkeys(self.groups, start)
        self._square: dict[int, list[Tensor]] = {}

    def receive(self, push: Push) -> list[Reply]:
        staleness = self.staleness_of(push)
        matters = self.method.strength and (staleness or self.method.adaptive)
        tensors = self._compensated(push) if matters else push.tensors
        self.master.update(tensors, push.hyperparameters)
        self.fetched(push.group)
        return [Reply(push.group, staleness)]

    def fetched(self, group: int) -> None:
        self._read[group] = copies(self.master.weights())

    def join(self, group: int) -> None:
        super().join(group)
        self.fetched(group)

    def grow(self, start: int) -> None:
        new = copies(self.master.weights()[start:])
        self._read = {group: [*read, *new] for group, read in self._read.items()}
        self._square = {group: [*means, *map(torch.zeros_like, new)] for group, means in self._square.items()}

    def read_from(self, group: int, start: int) -> None:
        new = copies(self.master.weights()[start:])
        self._read[group] = [*self._read[group][:start], *new]

    def evict(self, group: int) -> list[Reply]:
        self._read.pop(group, None)
        self._square.pop(group, None)
        return super().evict(group)

    def _compensated(self, push: Push) -> list[Tensor | None]:
        corrected: list[Tensor | None] = []
        assert self.master.optimizer is not None
        directions = directions_of(self.master.optimizer)
        if self.method.adaptive and push.group not in self._square:  # also where a server has frozen parameters alone
            self._square[push.group] = [torch.zeros_like(weight) for weight in self.master.weights()]
        for index, (parameter, gradient, then) in enumerate(
            zip(self.master.parameters.values(), push.tensors, self._read[push.group], strict=True)
        ):
            if gradient is None:
                corrected.append(None)
                continue
            moved = _real(parameter.detach() - then)
            square = _real(gradient).square()
            # The curvature of a maximized objective has the opposite sign.
            strength = directions.get(id(parameter), 1.0) * self._strength(push.group, index, square)
            change = strength * square * moved
            corrected.append(gradient + (torch.view_as_complex(change) if gradient.is_complex() else change))
        return corrected

    def _strength(self, group: int, index: int, square: Tensor) -> Tensor | float:
        if not self.method.adaptive:
            return self.method.strength
        mean = _real(self._square[group][index]).mul_(self.method.decay).add_(square, alpha=1 - self.method.decay)
        return self.method.strength / torch.sqrt(mean + _EPSILON)

    def state(self) -> dict[str, Any]:
        # Groups read the weights again when they resume.
        return {"square": self._square}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._square = {int(group): copies(means) for group, means in state["square"].items()}


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor as real numbers, two for each complex one, as in torch's Adam."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class DelayCompensated(Method, frozen=True, kw_only=True, tag="delay_compensated"):
    r"""DC-ASGD: asynchronous SGD whose gradients are corrected for their delay.

    .. math:: w_{t+1} = \mathrm{step}\bigl(w_t,\; g + \lambda_t\, g \odot g \odot (w_t - w_{t-\tau})\bigr)

    with g taken at :math:`w_{t-\tau}`, the weights that this group last read; :math:`g \odot g` approximates the
    Hessian's diagonal. The constant form has :math:`\lambda_t = \lambda`; the adaptive one :math:`\lambda_t = \lambda /
    \sqrt{m_t + 10^{-7}}` with :math:`m_t = \mu m_{t-1} + (1-\mu)\, g \odot g`, kept for each group. The server keeps a
    copy of the weights that each group read.

    Args:
        strength: :math:`\lambda`, 0 or more; 0 is `AsyncSGD`. Usual values are 0.04 (constant) and 2 (adaptive).
        adaptive: whether to scale by the gradients' running mean square.
        decay: :math:`\mu`, from 0 to less than 1.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> DelayCompensated(strength=2.0, adaptive=True)
        DelayCompensated(strength=2.0, adaptive=True, decay=0.95)

    References:
        Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation", arXiv:1609.08326.
    """

    side = _Compensate
    strength: float = 0.04
    adaptive: bool = False
    decay: float = 0.95

    def __post_init__(self) -> None:
        check_number(
            "strength", self.strength, "a finite number of 0 or more; 0 corrects nothing", 0, below=float("inf")
        )
        check_number("decay", self.decay, "0 <= decay < 1, as a running mean needs", 0, below=1)
