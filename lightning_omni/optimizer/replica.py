"""A rank's copy of one optimizer's parameters, and the flat memory through which they travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_omni.errors import UnsupportedError
from lightning_omni.methods import Pulled, Replica
from lightning_omni.methods.replica import copies
from lightning_omni.protocol.layout import Layout


class ModelReplica(Replica):
    """The parameters of one optimizer on this rank.

    Args:
        parameters: name and parameter, in the optimizer's order.
        optimizer: the worker's own optimizer over them.
    """

    def __init__(self, parameters: Mapping[str, Parameter], optimizer: Optimizer) -> None:
        super().__init__(list(parameters.values()), optimizer)
        self.parameters = dict(parameters)
        self._out: Tensor | None = None
        self._aside: Pulled | None = None

    @cached_property
    def layout(self) -> Layout:
        """How the parameters lie in flat memory."""
        return Layout.of({name: parameter.detach() for name, parameter in self.parameters.items()})

    def gradients(self) -> list[Tensor | None]:
        """The gradients, in order; None where a parameter took no part in the loss.

        Raises:
            UnsupportedError: a gradient is sparse.
        """
        gradients = [parameter.grad for parameter in self.ordered]
        for name, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise UnsupportedError(
                    f"the gradient of {name} is sparse, and gradients travel dense; build the embedding with"
                    " sparse=False, or use groups=1"
                )
        return gradients

    def flatten(self, tensors: Sequence[Tensor | None]) -> tuple[tuple[bool, ...], Tensor]:
        """Copies tensors into flat memory on the CPU.

        Returns:
            Which are present, and those one after the other: uint8. Valid until the next call.
        """
        present = tuple(tensor is not None for tensor in tensors)
        layout = self.layout.subset(present)
        if self._out is None:
            self._out = self.layout.empty()
        there = [tensor for tensor in tensors if tensor is not None]
        for view, tensor in zip(layout.views(self._out), there, strict=True):
            view.copy_(tensor)
        return present, self._out[: layout.nbytes]

    # --- Meetings: a group's own weights make way for those that are evaluated --------------------------------------

    def put_aside(self) -> None:
        """Keeps the own weights while others are evaluated in their place."""
        if self._aside is None:
            self._aside = Pulled(copies(self.weights()), self.clock)

    def take_up(self) -> None:
        """The own weights come back, if they were put aside."""
        if self._aside is not None:
            self.load(self._aside)
            self._aside = None

    def abandon(self) -> None:
        """The own weights do not come back: training goes on, or ends, with those that were evaluated."""
        self._aside = None
        self.memory.clear()

    def own_state(self, whole: bool) -> dict[str, Any]:
        """What this group alone knows: its memory, and if ``whole`` its own weights and optimizer state."""
        if not whole:
            return {"memory": self.memory}
        state = self.state()
        if self._aside is not None:
            state.update(weights=list(self._aside.tensors), clock=self._aside.clock)
        return state

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from an `own_state` when training begins."""
        self.memory = _on(state["memory"], self.ordered[0].device)
        if "weights" in state:
            self._aside = Pulled(copies(state["weights"]), int(state["clock"]))
            plain = self.optimizer.state_dict()
            self.optimizer.load_state_dict({**plain, "state": state["optimizer"]})


def _on(tree: Any, device: torch.device) -> Any:
    """The tree with its tensors on a device."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, Mapping):
        return {key: _on(value, device) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_on(value, device) for value in tree)
    return tree


@dataclass
class Part:
    """One optimizer's share of the exchange."""

    optimizer: Optimizer
    replica: ModelReplica
    into: Tensor | None = None
    staleness: list[int] = field(default_factory=list)
    head: tuple[str, Module] | None = None
    """Name and submodule, if this is a merged head: it lives at the server, and nothing of it is pushed."""
