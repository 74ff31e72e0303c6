"""Many settings of a task in one simulated run: a model of copies, each with a learning rate and momentum of its own.

Methods and server compute element by element, so they treat the stack as any other model; all copies train on the same
batches, in the same order of events. A run costs a few times what one setting costs, most of which is not arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tasks import Run, Task, at_evaluation, crossing
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim import Optimizer

PATIENCE = 1.35
"""A run is over when so many times the samples are trained after which the first copy was at the target."""
LOST = 10.0
"""Times the first loss, at which a copy counts as diverged."""


class Stacked(Optimizer):
    """SGD with momentum, or AdamW with its defaults, of tensors whose first dimension counts copies.

    Args:
        parameters: to be trained.
        rates: learning rate of each copy; the group's ``lr`` multiplies them.
        momenta: momentum of each copy, or β1.
        is_adaptive: whether it is AdamW.
    """

    def __init__(self, parameters: Any, rates: Sequence[float], momenta: Sequence[float], is_adaptive: bool) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.rates, self.momenta, self.is_adaptive = list(rates), list(momenta), is_adaptive

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group["lr"])

    def _move(self, weight: Tensor, factor: float) -> None:
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if not state:
            shape = (-1,) + (1,) * (weight.dim() - 1)
            state["rates"] = torch.tensor(self.rates).view(shape)
            state["momenta"] = torch.tensor(self.momenta).view(shape)
            state["velocity"] = torch.zeros_like(weight)
            state["squares"], state["steps"] = torch.zeros_like(weight) if self.is_adaptive else torch.zeros(()), 0
        rates, momenta, velocity = factor * state["rates"], state["momenta"], state["velocity"]
        state["steps"] += 1
        if self.is_adaptive:
            velocity.mul_(momenta).add_(gradient * (1 - momenta))
            state["squares"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            size = (state["squares"] / (1 - 0.999 ** state["steps"])).sqrt_().add_(1e-8)
            weight.mul_(1 - 0.01 * rates).sub_(rates / (1 - momenta ** state["steps"]) * velocity / size)
        else:
            weight.sub_(rates * velocity.mul_(momenta).add_(gradient))


class StackedRun(Run):  # type: ignore[misc]  # as scripts import each other, its type is not known
    """A run of many settings of a task.

    Args:
        task: what is trained.
        settings: momentum and learning rate of each copy.
        target: held-out loss; minus infinity for a run that is to end otherwise.
    """

    def __init__(self, task: Task, settings: Sequence[tuple[float, float]], target: float) -> None:
        super().__init__(task, 0.0, 0.0)
        self.settings, self.target = list(settings), target
        self._base = task.subject.model
        self._names = {name: name.replace(".", "_") for name, _ in self._base.named_parameters()}
        self.model = nn.Module()
        for name, weight in self._base.named_parameters():
            copies = weight.detach().expand(len(settings), *weight.shape).clone()
            self.model.register_parameter(self._names[name], nn.Parameter(copies))
        self.held_out: list[Tensor] = []
        self.is_alive = torch.ones(len(settings), dtype=torch.bool)
        self.is_open = self.is_alive.clone()
        self._first_loss = math.inf
        self._reached = 0

    @property
    def batched(self) -> bool:
        return False  # copies are

    def make(self, parameters: Any) -> Optimizer:
        momenta, rates = zip(*self.settings, strict=True)
        return Stacked(parameters, rates, momenta, self.task.is_adaptive)

    def _of_each(self, model: nn.Module, batch: Any, chosen: Tensor) -> Tensor:
        """Of each copy; of those that are not chosen, of weights that are all 0."""
        weights = {name: getattr(model, flat) for name, flat in self._names.items()}
        kept = {
            name: torch.where(chosen.view((-1,) + (1,) * (weight.dim() - 1)), weight, 0.0)
            if not chosen.all()
            else weight
            for name, weight in weights.items()
        }
        return self._mapped(kept, batch)

    def _mapped(self, weights: Mapping[str, Tensor], batch: Any) -> Tensor:
        if self._is_perceptron:  # vmap takes three times as long
            return self._through_layers(weights, *batch)

        def one(mine: Mapping[str, Tensor]) -> Tensor:
            mean: Tensor = self.task.subject.loss(
                lambda inputs: functional_call(self._base, dict(mine), (inputs,)), batch
            )
            return mean

        found: Tensor = vmap(one)(dict(weights))
        return found

    @cached_property
    def _is_perceptron(self) -> bool:
        return isinstance(self._base, nn.Sequential) and all(type(each) in (nn.Linear, nn.ReLU) for each in self._base)

    def _through_layers(self, weights: Mapping[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy of each copy of a perceptron."""
        copies = len(next(iter(weights.values())))
        outputs = inputs.expand(copies, *inputs.shape)
        assert isinstance(self._base, nn.Sequential)
        for place, layer in enumerate(self._base):
            if isinstance(layer, nn.Linear):
                bias, weight = weights[f"{place}.bias"].unsqueeze(1), weights[f"{place}.weight"].transpose(1, 2)
                outputs = torch.baddbmm(bias, outputs, weight)
            else:
                outputs = outputs.relu()
        chosen = outputs.gather(2, labels.expand(copies, -1).unsqueeze(2)).squeeze(2)
        return (outputs.logsumexp(2) - chosen).mean(1)

    def loss(self, model: Any, batch: Any) -> Tensor:
        if self.task.warmup:
            self._samples += len(batch[0])
            self._warm_up()
        losses = self._of_each(model, batch, self.is_alive)
        now = losses.detach()
        if math.isinf(self._first_loss):
            self._first_loss = float(now.max())
        self.is_alive = self.is_alive & (now <= LOST * self._first_loss)  # not a number is neither
        return torch.where(self.is_alive, losses, 0.0).sum()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        held_out = torch.full((len(self.settings),), math.inf)
        self.is_open &= self.is_alive
        if self.is_open.any():
            weights = {name: getattr(model, flat)[self.is_open] for name, flat in self._names.items()}
            held_out[self.is_open] = self._mapped(weights, self.task.subject.held_out)
        self.held_out.append(held_out.nan_to_num(math.inf, posinf=math.inf))
        if len(self.held_out) >= self.smoothed:
            smooth = torch.stack(self.held_out[-self.smoothed :]).mean(0)
            self.is_open &= ~(smooth <= self.target)
            if not self._reached and (smooth <= self.target).any():
                self._reached = len(self.held_out)
        is_over = self._reached and len(self.held_out) > PATIENCE * self._reached + 1
        return {"open_loss": 0.0 if is_over else float(self.is_open.sum())}

    @property
    def smooth(self) -> Any:
        """Smoothed held-out loss of each copy at each evaluation, shape (evaluations, copies)."""
        rows = torch.stack(self.held_out).double().numpy()
        smooth = np.full_like(rows, math.inf)
        for place in range(self.smoothed - 1, len(rows)):
            smooth[place] = rows[place - self.smoothed + 1 : place + 1].mean(0)
        return smooth

    def samples(self, trained: Sequence[float], target: float) -> list[float]:
        """To a held-out loss, of each copy, from the samples at each evaluation."""
        return [at_evaluation(trained, crossing(column, target, self.smoothed)) for column in self.smooth.T]
