"""Parameters of simulated groups, by name and in the optimizer's order.

Groups that read the same weights share them, so that those of a thousand groups fit into the memory of a few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.model.master import held_by
from lightning_omni.methods.model.replica import Pulled, Replica, copies
from lightning_omni.simulator.workload import MakeOptimizer
from lightning_omni.wire.layout import Layout


class SharedWeights(list[Tensor]):
    """The master weights at one clock. They are never changed, and freed when no group holds them."""


class WeightsByClock:
    """The weights of each clock that a group still uses.

    Attributes:
        most: the most different weights that were alive at a time.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._at: WeakValueDictionary[int, SharedWeights] = WeakValueDictionary()
        self.most = 0

    def at(self, clock: int, buffer: Tensor) -> SharedWeights:
        """Return a copy of the weights in ``buffer`` at this clock; all readers share it."""
        known = self._at.get(clock)
        if known is None:
            known = self._at[clock] = SharedWeights(self._layout.views(buffer.clone()))
            self.most = max(self.most, len(self._at))
        return known

    def forget(self) -> None:
        """Forget all weights, because the clock goes back and will reach the same values with other weights."""
        self._at.clear()


class OwnReplica(Replica):
    """A replica that frees gradients after each step; otherwise a thousand groups would keep a thousand."""

    def step(self, gradient: Sequence[Tensor | None]) -> None:
        super().step(gradient)
        for parameter in self.ordered:
            parameter.grad = None


class SharingReplica(Replica):
    """A replica that refers to shared weights, and copies them before it first moves them.

    Args:
        parameters: used only to find the learning rate of each weight.
        optimizer: holds the hyperparameters.
        group: number of the group.
        start: the weights.
    """

    def __init__(self, parameters: Sequence[Parameter], optimizer: Optimizer, group: int, start: SharedWeights) -> None:
        super().__init__(parameters, optimizer, group)
        self._weights: list[Tensor] = start

    def weights(self) -> list[Tensor]:
        return self._weights

    def load(self, pulled: Pulled) -> None:
        if not (tensors := pulled.tensors):
            return
        self._weights = tensors if isinstance(tensors, SharedWeights) else copies(tensors)
        self.clock = pulled.clock
        self.drift.read()

    def move(self, by: Sequence[Tensor], factor: float = 1.0) -> None:
        self._own()
        super().move(by, factor)

    def descend(self, gradient: Sequence[Tensor | None]) -> None:
        self._own()
        super().descend(gradient)

    def _own(self) -> None:
        if isinstance(self._weights, SharedWeights):
            self._weights = copies(self._weights)


def named_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Parameter]:
    """Return the parameters of an optimizer by name, in its order.

    Raises:
        ConfigurationError: it holds a parameter that the model does not have.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = held_by(optimizer)
    if any(id(parameter) not in names for parameter in ordered):
        raise ConfigurationError("optimizer: it must be made from the parameters that it is called with")
    return {names[id(parameter)]: parameter for parameter in ordered}


def own_replica(
    make: MakeOptimizer, model: nn.Module, parameters: Mapping[str, Parameter], weights: Sequence[Tensor], group: int
) -> OwnReplica:
    """Return a replica with parameters of its own for a group.

    Args:
        make: makes the user's optimizer from all parameters in the model's order.
        model: has the other parameters.
        parameters: the trained parameters by name, in the optimizer's order.
        weights: their values.
        group: number of the group.
    """
    own = {
        name: Parameter(weight.clone(), requires_grad=parameter.requires_grad)
        for (name, parameter), weight in zip(parameters.items(), weights, strict=True)
    }
    optimizer = make([own.get(name, other) for name, other in model.named_parameters()])
    return OwnReplica(list(own.values()), optimizer, group)
