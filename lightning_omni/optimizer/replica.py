"""A rank's copy of one optimizer's parameters, and the flat memory through which they travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_omni.errors import UnsupportedError
from lightning_omni.methods import MasterWeights
from lightning_omni.protocol.layout import Layout


class ModelReplica:
    """The parameters of one optimizer on this rank.

    Args:
        parameters: name and parameter, in the optimizer's order.

    Attributes:
        clock: the server's clock when the weights were read.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self.parameters = dict(parameters)
        self.clock = 0
        self._ordered = list(self.parameters.values())
        self._out: Tensor | None = None
        self._subsets: dict[tuple[bool, ...], Layout] = {}

    @cached_property
    def layout(self) -> Layout:
        """How the parameters lie in flat memory."""
        return Layout.of({name: parameter.detach() for name, parameter in self.parameters.items()})

    def load(self, master: MasterWeights) -> None:
        """Overwrites the weights and remembers their clock."""
        with torch.no_grad():
            for parameter, value in zip(self._ordered, master.tensors, strict=True):
                parameter.copy_(value, non_blocking=True)
        self.clock = master.clock

    def gradients(self) -> list[Tensor | None]:
        """The gradients, in order; None where a parameter took no part in the loss.

        Raises:
            UnsupportedError: a gradient is sparse.
        """
        gradients = [parameter.grad for parameter in self._ordered]
        for name, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise UnsupportedError(
                    f"the gradient of {name} is sparse, and gradients travel dense; build the embedding with"
                    " sparse=False, or use groups=1"
                )
        return gradients

    def flatten(self, gradients: Sequence[Tensor | None]) -> tuple[tuple[bool, ...], Tensor]:
        """Copies gradients into flat memory on the CPU.

        Returns:
            Which are present, and those one after the other: uint8. Valid until the next call.
        """
        present = tuple(gradient is not None for gradient in gradients)
        if present not in self._subsets:
            self._subsets[present] = self.layout.subset(present)
        layout = self._subsets[present]
        if self._out is None:
            self._out = self.layout.empty()
        there = [gradient for gradient in gradients if gradient is not None]
        for view, gradient in zip(layout.views(self._out), there, strict=True):
            view.copy_(gradient)
        return present, self._out[: layout.nbytes]
