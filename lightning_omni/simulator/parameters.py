"""A model's parameters by name, and those of a group's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.errors import ConfigurationError

MakeOptimizer = Callable[[Any], Optimizer]


def named_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Parameter]:
    """The parameters of an optimizer by name, in its order.

    Raises:
        ConfigurationError: it holds something that is no parameter of the model.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in ordered):
        raise ConfigurationError("optimizer: it must be made from the parameters that it is called with")
    return {names[id(parameter)]: parameter for parameter in ordered}


def own_parameters(
    model: nn.Module, parameters: Mapping[str, Parameter], weights: list[Tensor]
) -> dict[str, Parameter]:
    """Parameters of a group's own, with these values, by name in the optimizer's order."""
    return {
        name: Parameter(weight.clone(), requires_grad=parameter.requires_grad)
        for (name, parameter), weight in zip(parameters.items(), weights, strict=True)
    }


def own_optimizer(make: MakeOptimizer, model: nn.Module, parameters: Mapping[str, Parameter]) -> Optimizer:
    """The user's optimizer over a group's own parameters, which it gets in the model's order."""
    return make([parameters.get(name, other) for name, other in model.named_parameters()])
